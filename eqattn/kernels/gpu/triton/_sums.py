"""A backward pass as kernels in Pallas Triton: the arrays that they read and write."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

from ...._jax import abstract
from ...._sweep.grid import GridLayout
from .._gradients import by_kernels
from .._operands import Side
from .._pair_gradients import one_each, PairArrays, PairSumProgram, Tiles
from .._plans import SumArrays
from .._sum_program import SumProgram
from . import _triton as triton, NATIVE
from ._backward import Plan, Program, Sizes
from ._fold import check_axes
from ._forward import STAGES
from ._pair_sums import PairPlan, PairSums, Sizes as PairSizes
from ._rows import Rows, shifted


def traverse_sum(
    steps: dict[int, Callable[..., Any]],
    layout: GridLayout,
    args: Sequence[Any],
    *more: Any,
    interpreted: bool = False,
    **kw: Any,
) -> list[Any]:
    """`eqattn._sweep.loops.traverse` of a backward pass; further arguments are those of
    `by_kernels`.
    """
    del steps  # they have all results, and the loops need some
    check_axes(interpreted, args)
    run, run_pairs = (ft.partial(f, layout, args, interpreted) for f in (_sums, _pair_sums))
    forms = {
        SumProgram: (_kernels_of, run),
        PairSumProgram: (lambda _, wanted: one_each(wanted), run_pairs),
    }
    native = triton.native(interpreted, NATIVE)
    return by_kernels(forms, native, layout, args, *more, **kw)


def _kernels_of(
    programs: dict[int, SumProgram], wanted: Sequence[int]
) -> list[tuple[Side, list[int]]]:
    """The results that each kernel computes: all of a side, or one where vectors are long."""
    program = programs[max(programs)]
    found: list[tuple[Side, list[int]]] = []
    for i in wanted:
        gradient = program.gradient(i)
        short = program.size(gradient.matrix) <= 128
        same = [mine for side, mine in found if side is gradient.side]
        if same and short:
            same[0].append(i)
        else:
            found.append((gradient.side, [i]))
    return found


def _sums(
    layout: GridLayout,
    args: Sequence[Any],
    interpreted: bool,
    programs: dict[int, SumProgram],
    side: Side,
    wanted: dict[int, tuple[int, ...]],
    dtypes: dict[int, Any],
) -> list[Any]:
    """Some results of one side, by one kernel, with all batch axes and that of the side in front.

    **Arguments:** those of `SumArrays`, and

    - `dtypes`: what results are rounded to.
    """
    arrays = SumArrays(programs, side, list(wanted), layout, args)
    sizes = Sizes(side, arrays.length, arrays.other, tuple(arrays.widths))
    found = arrays.planned(dict(zip(side.kinds, sizes.padded)), ft.partial(Rows, layout))
    found["operands"] = shifted(found["operands"])
    plan = Plan(**found, sizes=sizes, dtypes=dtypes, interpreted=interpreted)
    out = [abstract(args[-1], x.written, dtypes[o]) for o, x in plan.results.items()]
    run = triton.kernel(
        lambda *refs: Program(plan, refs).run(),
        out,
        plan.count,
        f"eqattn_sum_{'rows' if side.kinds == 'rk' else 'columns'}",
        sizes.warps,
        STAGES,
        interpreted,
    )
    done = dict(zip(plan.wanted, run(*arrays.inputs(plan))))
    return [plan.results[o].blocks(done[o]) for o in wanted]


def _pair_sums(
    layout: GridLayout,
    args: Sequence[Any],
    interpreted: bool,
    programs: dict[int, SumProgram],
    side: Side,
    wanted: dict[int, tuple[int, ...]],
    dtypes: dict[int, Any],
) -> list[Any]:
    """A result that has a number for each pair, by one kernel. Arguments are those of `_sums`."""
    ((o, axes),) = wanted.items()
    arrays = PairArrays(programs, side, o, layout, args, axes)
    sizes = PairSizes(side, arrays.rows, arrays.other, arrays.heads, tuple(arrays.widths))
    found = arrays.planned(dict(zip(side.kinds, sizes.padded)), ft.partial(Rows, layout))
    found["operands"] = shifted(found["operands"])
    whole = {x.axis for x in layout.tokens} >= {side.own, side.other}
    out = sizes.tiles[0] * sizes.own, sizes.padded[1]
    plan = PairPlan(
        **found,
        sizes=sizes,
        dtypes=dtypes,
        interpreted=interpreted,
        visit=arrays.visit(sizes.tiles, arrays.heads),
        written=Tiles(layout, arrays.kept, arrays.rows, out, whole, (1, 1)),
    )
    run = triton.kernel(
        lambda *refs: PairSums(plan, refs).run(),
        [abstract(args[-1], plan.written.written, dtypes[o])],
        plan.count,
        "eqattn_sum_pairs",
        sizes.warps,
        STAGES,
        interpreted,
    )
    (x,) = run(*arrays.inputs(plan))
    return [arrays.result(plan.written.blocks(x))]
