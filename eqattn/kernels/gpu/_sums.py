"""The kernels of a backward pass: which results each computes, and of which arrays it is made."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..._jax import abstract
from ..._sweep.grid import GridLayout
from . import _mosaic as mosaic
from ._backward import Plan, Program, REGISTERS, STREAMED
from ._gradients import SumArrays
from ._lists import lists
from ._matrices import Matrix
from ._operands import rounded_up, ROWS, Side, TILE
from ._sum_program import SumProgram


def kernels_of(
    programs: dict[int, SumProgram], wanted: Sequence[int]
) -> list[tuple[Side, list[int]]]:
    """The results that each kernel computes: all of a side whose sums fit into registers."""
    program, found = programs[max(programs)], []
    for i in wanted:
        gradient = program.gradient(i)
        size = rounded_up(program.size(gradient.matrix), 64) // 2
        for n, (side, mine, used) in enumerate(found):
            if side is gradient.side and used + size <= REGISTERS:
                found[n] = (side, [*mine, i], used + size)
                break
        else:
            found.append((gradient.side, [i], size))
    return [(side, mine) for side, mine, _ in found]


def visit_sum(
    programs: dict[int, SumProgram],
    side: Side,
    wanted: list[int],
    layout: GridLayout,
    args: Sequence,
    dtypes: dict[int, Any],
    interpreted: bool,
) -> dict[int, Any]:
    """Some results of a sweep, by one kernel.

    **Arguments:**

    - `programs`: the block function of each class.
    - `side`, `wanted`: the results, all of one side.
    - `layout`, `args`: the grid, and the table, if there is one, and the operands on it.
    - `dtypes`: what results are rounded to.

    **Returns:** the results with all batch axes and that of the side in front, `[own, features]`.
    """
    first = programs[max(programs)]
    keys, rows = layout.block
    length, other = (rows, keys) if side is ROWS else (keys, rows)
    lengths = dict(zip(side.kinds, (rounded_up(length, TILE), rounded_up(other, STREAMED))))
    found = SumArrays.of(programs, side, wanted, layout, args, lengths)
    own, streamed, dtype = found.own, found.streamed, found.dtype
    matrices, inputs = {}, []
    for i in (*own, *streamed):
        axes, axis = layout.in_axes[i], side.other if i in streamed else side.own
        lie = other if i in streamed else length, first.size(i), lengths[side.kinds[i in streamed]]
        matrices[i] = Matrix(layout, axes, axis, *lie, turned=first.features[i] == 0)
        inputs.append(matrices[i].given(found.operands[i], dtype))
    inputs += found.dirty
    kept, results = (*layout.batch, side.own), {}
    widest = max(matrices[i].features for i in own)
    for o in found.wanted:
        gradient = first.gradient(o)
        lie = length, first.size(gradient.matrix), lengths[side.kinds[0]]
        place = Matrix(layout, kept, side.own, *lie, turned=gradient.turned)
        by_copies = dtypes[o] == dtype and place.features <= widest
        results[o] = place if by_copies else None
    table = found.table
    if table is not None:
        table = table if side is ROWS else table.swapaxes(-1, -2)
        order, columns, counts = lists(table, tuple(programs))
        inputs += [order, *(x.reshape(-1, *x.shape[-2:]) for x in (columns, counts))]
    inputs += [x.array for x in found.given.values()]
    plan = Plan(
        layout=layout,
        side=side,
        length=length,
        other=other,
        programs=programs,
        wanted=found.wanted,
        own=own,
        streamed=streamed,
        matrices=matrices,
        results=results,
        operands=found.given,
        origin=found.origin,
        cleaned=found.cleaned,
        table_axes=None if table is None else (layout.table_axes or ())[:-2],
        dtype=dtype,
        dtypes=dtypes,
        interpreted=interpreted,
    )

    def body(*refs):
        scratch = len(plan.scratch())
        mosaic.specialise(Program(plan, refs[:-scratch], refs[-scratch:]), 240, 24)

    shape = layout.shape(kept)
    places = math.prod(shape)
    out = []
    for o in found.wanted:
        place, copied = results[o], (places, lengths[side.kinds[0]], plan.widths[o])
        out.append(abstract(args[-1], copied if place is None else place.written, dtypes[o]))
    name = "eqattn_sum_" + ("rows" if side is ROWS else "columns")
    run = mosaic.kernel(body, out, places * plan.tiles, name, plan.scratch(), interpreted)
    done = {}
    for o, x in zip(found.wanted, run(*inputs)):
        if (place := results[o]) is not None:
            done[o] = place.blocks(x)
            continue
        width = first.size(first.gradient(o).matrix)
        x = x[:, :length, :width].reshape(*shape, length, width)
        done[o] = jnp.swapaxes(x, -1, -2) if first.gradient(o).turned else x
    return done
