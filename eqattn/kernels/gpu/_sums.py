"""The kernels of a backward pass: which results each computes, and of which arrays it is made."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..._jax import abstract
from ..._sweep.grid import GridLayout
from .._program import LOG2E
from . import _mosaic as mosaic
from ._backward import Plan, Program, REGISTERS, STREAMED
from ._lists import lists
from ._matrices import Matrix
from ._operands import Operand, rounded_up, ROWS, Side, TILE
from ._sum_program import SumProgram


_LEAST = float(jnp.finfo(jnp.float32).min)


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
    table, operands = layout.known_without_corners(args)
    first = programs[max(programs)]
    needs = lambda o: len(first.dots([first.gradient(o).pairs]))
    wanted = sorted(wanted, key=needs)
    gradients = {c: [p.gradient(o) for o in wanted] for c, p in programs.items()}
    pairs = {c: [g.pairs for g in gs] for c, gs in gradients.items()}
    inner = [p.factors(eqn) for c, p in programs.items() for eqn in p.dots(pairs[c])]
    matrices = [g.matrix for gs in gradients.values() for g in gs]
    mine = side is not ROWS
    own = list(dict.fromkeys(f[mine] for f in inner))
    streamed = list(dict.fromkeys([*(f[not mine] for f in inner), *matrices]))
    origins = {p.origin(pairs[c]) for c, p in programs.items()}
    origin = origins.pop() if len(origins) == 1 else None
    reads = [p.needed(pairs[c])[1] for c, p in programs.items()]

    keys, rows = layout.block
    length, other = (rows, keys) if side is ROWS else (keys, rows)
    lengths = dict(zip(side.kinds, (rounded_up(length, TILE), rounded_up(other, STREAMED))))
    if origin is not None:
        x = jnp.maximum(operands[origin], _LEAST) * LOG2E
        operands = [jnp.maximum(x, _LEAST) if i == origin else y for i, y in enumerate(operands)]
    given = {
        i: Operand(x, layout.in_axes[i], layout, side, lengths)
        for i, x in enumerate(operands)
        if any(r[i] for r in reads)
    }
    (dtype,) = first.dtypes
    cleans = [p.cleaned | p.cleaned_first for p in programs.values()]
    cleaned = [i for i in (*own, *streamed) if any(i in some for some in cleans)]
    matrices, inputs, dirty = {}, [], []
    for i in (*own, *streamed):
        axes, x, axis = layout.in_axes[i], operands[i], side.other if i in streamed else side.own
        if i in cleaned:
            along = [n for n, a in enumerate(axes) if a == side.other]
            bad = ~jnp.isfinite(x).all((*along, x.ndim - 2, x.ndim - 1))
            dirty.append(bad.astype(jnp.int32).reshape(-1))
        lie = other if i in streamed else length, first.size(i), lengths[side.kinds[i in streamed]]
        matrices[i] = Matrix(layout, axes, axis, *lie, turned=first.features[i] == 0)
        inputs.append(matrices[i].given(x, dtype))
    inputs += dirty
    kept, results = (*layout.batch, side.own), {}
    widest = max(matrices[i].features for i in own)
    for o in wanted:
        gradient = first.gradient(o)
        lie = length, first.size(gradient.matrix), lengths[side.kinds[0]]
        place = Matrix(layout, kept, side.own, *lie, turned=gradient.turned)
        by_copies = dtypes[o] == dtype and place.features <= widest
        results[o] = place if by_copies else None
    if table is not None:
        table = table if side is ROWS else table.swapaxes(-1, -2)
        order, columns, counts = lists(table, tuple(programs))
        inputs += [order, *(x.reshape(-1, *x.shape[-2:]) for x in (columns, counts))]
    inputs += [x.array for x in given.values()]
    plan = Plan(
        layout=layout,
        side=side,
        length=length,
        other=other,
        programs=programs,
        wanted=wanted,
        own=own,
        streamed=streamed,
        matrices=matrices,
        results=results,
        operands=given,
        origin=origin,
        cleaned=cleaned,
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
    for o in wanted:
        place, copied = results[o], (places, lengths[side.kinds[0]], plan.widths[o])
        out.append(abstract(args[-1], copied if place is None else place.written, dtypes[o]))
    name = "eqattn_sum_" + ("rows" if side is ROWS else "columns")
    run = mosaic.kernel(body, out, places * plan.tiles, name, plan.scratch(), interpreted)
    found = {}
    for o, x in zip(wanted, run(*inputs)):
        if (place := results[o]) is not None:
            found[o] = place.blocks(x)
            continue
        width = first.size(first.gradient(o).matrix)
        x = x[:, :length, :width].reshape(*shape, length, width)
        found[o] = jnp.swapaxes(x, -1, -2) if first.gradient(o).turned else x
    return found
