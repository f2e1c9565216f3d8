"""A backward pass as kernels in Pallas Triton: the arrays that they read and write."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

from ...._jax import abstract
from ...._sweep.grid import GridLayout
from .._gradients import by_kernels, SumArrays
from .._lists import lists
from .._operands import ROWS, Side
from .._sum_program import SumProgram
from . import _triton as triton, NATIVE
from ._backward import Plan, Program, Sizes
from ._fold import check_axes
from ._forward import STAGES
from ._rows import Rows


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
    del steps  # which have all results, of which the loops need some
    check_axes(interpreted, args)
    run = ft.partial(_sums, layout, args, interpreted)
    return by_kernels(_kernels_of, run, NATIVE, layout, args, *more, **kw)


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
    wanted: list[int],
    dtypes: dict[int, Any],
) -> list[Any]:
    """Some results of one side, by one kernel, with all batch axes and that of the side in front.

    **Arguments:** those of `SumArrays.of`, and

    - `dtypes`: what results are rounded to.
    """
    first = programs[max(programs)]
    keys, rows = layout.block
    length, other = (rows, keys) if side is ROWS else (keys, rows)
    widths = tuple(first.size(i) for i in _matrices(programs, wanted))
    sizes = Sizes(side, length, other, widths)
    lengths = dict(zip(side.kinds, sizes.padded))
    found = SumArrays.of(programs, side, wanted, layout, args, lengths)
    matrices, inputs = {}, []
    for i in (*found.own, *found.streamed):
        of = (side.other, other) if i in found.streamed else (side.own, length)
        turned = first.features[i] == 0
        matrices[i] = Rows(layout, layout.in_axes[i], *of, first.size(i), turned)
        inputs.append(matrices[i].given(found.operands[i], found.dtype))
    inputs += found.dirty
    table = found.table
    if table is not None:
        table = table if side is ROWS else table.swapaxes(-1, -2)
        order, columns, counts = lists(table, tuple(programs))
        inputs += [order, *(x.reshape(-1, *x.shape[-2:]) for x in (columns, counts))]
    inputs += [x.array for x in found.given.values()]
    kept, results = (*layout.batch, side.own), {}
    for o in found.wanted:
        gradient = first.gradient(o)
        width = first.size(gradient.matrix)
        results[o] = Rows(layout, kept, side.own, length, width, gradient.turned)
    plan = Plan(
        layout=layout,
        side=side,
        sizes=sizes,
        programs=programs,
        wanted=found.wanted,
        own=found.own,
        streamed=found.streamed,
        matrices=matrices,
        results=results,
        operands=found.given,
        origin=found.origin,
        cleaned=found.cleaned,
        table_axes=None if table is None else (layout.table_axes or ())[:-2],
        dtype=found.dtype,
        dtypes=dtypes,
        interpreted=interpreted,
    )
    out = [abstract(args[-1], results[o].written, dtypes[o]) for o in found.wanted]
    run = triton.kernel(
        lambda *refs: Program(plan, refs).run(),
        out,
        plan.count,
        f"eqattn_sum_{'rows' if side.kinds == 'rk' else 'columns'}",
        sizes.warps,
        STAGES,
        interpreted,
    )
    done = dict(zip(found.wanted, run(*inputs)))
    return [results[o].blocks(done[o]) for o in wanted]


def _matrices(programs: dict[int, SumProgram], wanted: list[int]) -> list[int]:
    """The matrices that some results are made of, as arguments."""
    first = programs[max(programs)]
    gradients = [first.gradient(o) for o in wanted]
    inner = [i for eqn in first.dots([g.pairs for g in gradients]) for i in first.factors(eqn)]
    return [*inner, *(g.matrix for g in gradients)]
