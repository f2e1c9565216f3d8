"""The kernels of a backward pass: which results each computes, and of which arrays it is made."""

import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..._jax import abstract
from ..._sweep.grid import GridLayout
from . import _mosaic as mosaic
from ._backward import Program
from ._matrices import Matrix
from ._operands import rounded_up, ROWS, Side, TILE
from ._pair_gradients import PairArrays, Tiles
from ._pair_sums import PairPlan, PairSums, written_whole
from ._plans import SumArrays
from ._sum_plan import FEW_REGISTERS, Plan, REGISTERS, STREAMED
from ._sum_program import SumProgram


def kernels_of(
    programs: dict[int, SumProgram], wanted: Sequence[int]
) -> list[tuple[Side, list[int]]]:
    """The results that each kernel computes: all of a side whose sums fit into registers."""
    program, found = programs[max(programs)], []
    for i in wanted:
        gradient = program.gradient(i)
        size = _registers(program, i)
        for n, (side, mine, used) in enumerate(found):
            if side is gradient.side and used + size <= REGISTERS:
                found[n] = (side, [*mine, i], used + size)
                break
        else:
            found.append((gradient.side, [i], size))
    return [(side, mine) for side, mine, _ in found]


def _registers(program: SumProgram, i: int) -> int:
    """How many registers of a thread hold the sum of a result."""
    return rounded_up(program.size(program.gradient(i).matrix), 64) // 2


def visit_sum(
    programs: dict[int, SumProgram],
    side: Side,
    wanted: dict[int, tuple[int, ...]],
    layout: GridLayout,
    args: Sequence,
    dtypes: dict[int, Any],
    interpreted: bool,
) -> dict[int, Any]:
    """Some results of a sweep, by one kernel.

    **Arguments:**

    - `programs`: the block function of each class.
    - `side`, `wanted`: the results, all of one side, and the grid axes that they are to have.
    - `layout`, `args`: the grid, and the table, if there is one, and the operands on it.
    - `dtypes`: what results are rounded to.

    **Returns:** the results with all batch axes and that of the side in front, `[own, features]`.
    """
    arrays = SumArrays(programs, side, list(wanted), layout, args)
    plan, lengths = _plan(arrays, dtypes, interpreted)
    shape = layout.shape((*layout.batch, side.own))
    places, out = math.prod(shape), []
    for o, place in plan.results.items():
        copied = places, lengths[side.kinds[0]], plan.widths[o]
        out.append(abstract(args[-1], copied if place is None else place.written, dtypes[o]))
    name = "eqattn_sum_" + ("rows" if side is ROWS else "columns")
    body = ft.partial(Program.run, plan)
    run = mosaic.kernel(body, out, places * plan.tiles, name, plan.scratch(), interpreted)
    done, length = {}, arrays.length
    dirty = [_are_dirty(arrays, plan, i) for i in plan.cleaned]
    for (o, place), x in zip(plan.results.items(), run(*arrays.inputs(plan, dirty))):
        gradient = arrays.first.gradient(o)
        if place is not None:
            done[o] = place.blocks(x)
            continue
        width = arrays.first.size(gradient.matrix)
        x = x[:, :length, :width].reshape(*shape, length, width)
        done[o] = jnp.swapaxes(x, -1, -2) if gradient.turned else x
    return done


def visit_pairs(
    programs: dict[int, SumProgram],
    side: Side,
    wanted: dict[int, tuple[int, ...]],
    layout: GridLayout,
    args: Sequence,
    dtypes: dict[int, Any],
    interpreted: bool,
) -> dict[int, Any]:
    """A result that has a number for each pair, by one kernel. Arguments are those of `visit_sum`,
    with one result.
    """
    ((o, axes),) = wanted.items()
    arrays = PairArrays(programs, side, o, layout, args, axes, multiple=8)
    # What XLA sums up further is rounded after that.
    dtype = dtypes[o] if arrays.apart == 1 else jnp.float32
    plan = _pair_plan(arrays, {o: dtype}, interpreted)
    out = [abstract(args[-1], plan.written.written, dtype)]
    body, count = ft.partial(PairSums.run, plan), plan.visit.programs
    run = mosaic.kernel(body, out, count, "eqattn_sum_pairs", plan.scratch(), interpreted)
    dirty = [_are_dirty(arrays, plan, i) for i in plan.cleaned]
    (found,) = run(*arrays.inputs(plan, dirty))
    return {o: arrays.result(plan.written.blocks(found)).astype(dtypes[o])}


def _are_dirty(arrays: SumArrays, plan: Plan, i: int) -> Any:
    """Which batch elements of a matrix have a number that is not finite in some block, as one array
    of integers.
    """
    x, axes, kept = arrays.operands[i], arrays.layout.in_axes[i], plan.watched(i)
    along = [n for n, a in enumerate(axes) if a not in kept]
    bad = ~jnp.isfinite(x).all((*along, x.ndim - 2, x.ndim - 1))
    return bad.astype(jnp.int32).reshape(-1)


def _tile(arrays: SumArrays) -> int:
    """How many queries or keys of the other side a kernel multiplies at once. Large tiles are for
    few sums, and for blocks that they fill with whole heads or with a part of one.
    """
    large, axis = 2 * STREAMED, arrays.side.other
    head = next((x.block for x in arrays.layout.tokens if x.axis == axis), arrays.other)
    whole = arrays.other % large == 0 and (head % large == 0 or large % head == 0)
    few = sum(_registers(arrays.first, i) for i in arrays.wanted) <= FEW_REGISTERS
    return large if few and whole else STREAMED


def _placed(arrays: SumArrays, padded: tuple[int, int]) -> Any:
    """The function that says where a matrix lies, for blocks that are padded to these lengths."""
    by_axis = dict(zip((arrays.side.own, arrays.side.other), padded))
    return lambda axes, axis, rows, width, turned: Matrix(
        arrays.layout, axes, axis, rows, width, by_axis[axis], turned
    )


def _pair_plan(arrays: PairArrays, dtypes: dict[int, Any], interpreted: bool) -> PairPlan:
    """The kernel of a result that has a number for each pair."""
    layout = arrays.layout
    whole = arrays.other % (2 * STREAMED) == 0
    tile = 2 * STREAMED if whole and max(arrays.widths) <= 128 else STREAMED
    rows = TILE if arrays.heads == 1 else TILE // 2
    out = rounded_up(arrays.rows, rows), rounded_up(arrays.other, tile)
    turns = -(-arrays.heads // 2)
    # The last rows of the last head, or of the one that would follow.
    most = (2 * turns - 1) * arrays.rows + out[0] if arrays.heads > 1 else out[0]
    padded = rounded_up(most, TILE), out[1]
    return PairPlan(
        **arrays.planned(dict(zip(arrays.side.kinds, padded)), _placed(arrays, padded)),
        length=arrays.length,
        other=arrays.other,
        tile=tile,
        dtypes=dtypes,
        interpreted=interpreted,
        visit=arrays.visit((out[0] // rows, out[1] // tile), turns),
        written=Tiles(layout, arrays.kept, arrays.rows, out, written_whole(layout, tile), (8, 64)),
        heads=arrays.heads,
    )


def _plan(
    arrays: SumArrays, dtypes: dict[int, Any], interpreted: bool
) -> tuple[Plan, dict[str, int]]:
    """The kernel of some results, and the lengths of blocks as it pads them."""
    side, tile = arrays.side, _tile(arrays)
    padded = rounded_up(arrays.length, TILE), rounded_up(arrays.other, tile)
    lengths = dict(zip(side.kinds, padded))
    found = arrays.planned(lengths, _placed(arrays, padded))
    widest = max(found["matrices"][i].features for i in arrays.own)
    by_copies = lambda o, x: dtypes[o] == arrays.dtype and x.features <= widest
    found["results"] = {o: x if by_copies(o, x) else None for o, x in found["results"].items()}
    found |= dict(length=arrays.length, other=arrays.other, tile=tile)
    return Plan(**found, dtypes=dtypes, interpreted=interpreted), lengths
