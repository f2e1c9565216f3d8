"""The fold as a kernel: the arrays that it reads and writes."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..._jax import abstract
from ..._sweep.grid import COL, GridLayout, PARTIAL, ROW
from . import _mosaic as mosaic
from ._ending import Ending
from ._forward import Plan, Program
from ._lists import lists
from ._matrices import Matrix
from ._operands import Operand, padded, ROWS, scale_of, Sizes, TILE
from ._program import PairProgram


def visit_fold(
    steps: dict[int, Any],
    layout: GridLayout,
    args: Sequence,
    finish: Any,
    into: Sequence | None,
    interpreted: bool,
) -> list:
    """What `finish` makes of each row of the grid, with its grid axes in front."""
    table, operands = layout.known_without_corners(args)
    first = steps[max(steps)]
    n = len(first.logits.in_avals)
    (query, key, *_), value = operands[:n], operands[n]
    q_axes, k_axes, v_axes = (layout.in_axes[i] for i in (0, 1, n))
    programs = {c: PairProgram(step.logits) for c, step in steps.items()}
    scale = scale_of(programs, layout)
    keys, rows = layout.block
    sizes = Sizes(rows, keys, query.shape[-2], first.width)
    dtype = dict(first.products)["operand_dtype"]
    wanted = [i for i in range(n) if any(p.reads[i] for p in programs.values())]
    lengths = dict(r=sizes.padded_rows, k=sizes.padded_keys)
    given = {i: Operand(operands[i], layout.in_axes[i], layout, ROWS, lengths) for i in wanted}
    kept = (*layout.batch, ROW)
    of_rows, of_keys = (ROW, rows), (COL, keys)
    q = Matrix(layout, q_axes, *of_rows, sizes.dim, sizes.padded_rows, turned=True)
    k = Matrix(layout, k_axes, *of_keys, sizes.dim, sizes.padded_keys, turned=False)
    v = Matrix(layout, v_axes, *of_keys, sizes.width, sizes.padded_keys, turned=False)
    inputs = [x.given(y, dtype) for x, y in ((q, query), (k, key), (v, value))]
    if PARTIAL in programs:
        along = [i for i, a in enumerate(v_axes) if a == COL]
        bad = ~jnp.isfinite(value).all((*along, value.ndim - 2, value.ndim - 1))
        inputs.append(bad.astype(jnp.int32).reshape(-1))
    if table is not None:
        ranks, order, counts = lists(table, tuple(steps))
        inputs += [ranks, *(x.reshape(-1, *x.shape[-2:]) for x in (order, counts))]
    inputs += [x.array for x in given.values()]

    shape = layout.shape(kept)
    old = None if into is None or into[0] is None else [jnp.swapaxes(into[0], -1, -2), *into[1:]]
    if old is not None:
        lie = sizes.padded_rows, sizes.padded_width
        inputs += [_padded_blocks(x, len(kept), lie) for x in old]
    ending = Ending(finish, operands, layout, lengths)
    inputs += [x.array for x in ending.given]
    results: list[Matrix | None] = []
    for result, is_wide, turned in ending.results:
        place = Matrix(layout, kept, *of_rows, sizes.width, sizes.padded_rows, turned=not turned)
        by_copies = is_wide and result == dtype and sizes.padded_width <= sizes.padded_dim
        results.append(place if by_copies else None)
    plan = Plan(
        layout=layout,
        sizes=sizes,
        programs=programs,
        operands=given,
        query=q,
        key=k,
        value=v,
        results=results,
        scale=scale,
        table_axes=None if table is None else (layout.table_axes or ())[:-2],
        dtype=dtype,
        continued=old is not None,
        ending=ending,
        interpreted=interpreted,
    )

    def body(*refs):
        scratch = len(plan.scratch())
        registers = (240, 24) if sizes.padded_dim > 128 else (232, 40)
        mosaic.specialise(Program(plan, refs[:-scratch], refs[-scratch:]), *registers)

    places = math.prod(shape)
    wide = lambda is_wide: (sizes.padded_width,) if is_wide else ()
    out = [
        ((places, sizes.padded_rows, *wide(w)) if place is None else place.written, dtype)
        for (dtype, w, _), place in zip(ending.results, results)
    ]
    out = [abstract(args[-1], *x) for x in out]
    count = places * (sizes.padded_rows // TILE)
    run = mosaic.kernel(body, out, count, "eqattn_fold", plan.scratch(), interpreted)
    found = []
    for x, place, (_, is_wide, turned) in zip(run(*inputs), results, ending.results):
        if place is not None:
            found.append(place.blocks(x))
            continue
        x = x[:, :rows, : sizes.width] if is_wide else x[:, :rows]
        x = x.reshape(*shape, *x.shape[1:])
        found.append(jnp.swapaxes(x, -1, -2) if is_wide and not turned else x)
    return found


def _padded_blocks(x: Any, lead: int, lengths: Sequence[int]) -> Any:
    """Blocks with the axes of the grid in one, padded to some lengths."""
    x = x.reshape(-1, *x.shape[lead:])
    for axis, size in zip(range(1, x.ndim), lengths):
        x = padded(x, axis, size)
    return x
