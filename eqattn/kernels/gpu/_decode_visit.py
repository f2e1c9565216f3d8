"""The fold of `Ragged` as a kernel: the arrays that it reads and writes."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._carry import change_of_origin
from ..._jax import abstract
from ..._sweep import loops
from ..._sweep.grid import COL, GridLayout, ROW
from . import _mosaic as mosaic
from ._decode import Plan
from ._operands import Operand, padded, ROWS
from ._pair_program import PairProgram
from ._parts import keys_in, Pieces, values_in
from ._plans import listed
from ._stored import (
    flat_heads,
    of_one_head,
    rows_by_head,
    scales_by_head,
    Sizes,
    sizes_of,
    Source,
)
from ._traverse import called


PROGRAMS = 1056
"""How many programs there should be at least. They are eight for each of the 132 multiprocessors of
an H200, so that programs that end early leave little idle.
"""

LEAST_TILES = 8
"""How many tiles a share should have, as each writes a Carry."""


def _shares(layout: GridLayout, sizes: Sizes) -> int:
    """Chooses into how many parts the blocks of a row are cut."""
    programs = math.prod(layout.shape((*layout.batch, ROW))) * sizes.tiles
    tiles = layout.grid[COL] * (sizes.padded_keys // sizes.tile_k)
    wanted = PROGRAMS // (1 + sizes.alone)
    return max(min(-(-wanted // programs), tiles // LEAST_TILES), 1)


def visit_stored(
    steps: dict[int, Any], layout: GridLayout, args: Sequence, interpreted: bool
) -> list:
    """Numerator, denominator and maximum of each row of the grid, with its grid axes in front."""
    table, operands = layout.split(args)
    plan, pieces = _plan(steps, layout, operands, table is not None, interpreted)
    sizes, inputs = plan.sizes, _queries(operands[0], plan.sizes)
    for group in filter(None, pieces):
        if layout.pages:
            tables = [layout.lookups[max(layout.in_axes[piece[0].array])] for piece in group]
            inputs += [operands[i].reshape(-1) for i in tables]
    for part in (part for group in pieces for part in zip(*group)):
        inputs += [
            flat_heads(operands[x.array], layout.in_axes[x.array], sizes.piece) for x in part
        ]
        scales = [operands[x.scales] for x in part if x.scales is not None]
        inputs += [scales_by_head(x, sizes.heads, sizes.piece) for x in scales]
    inputs += listed(table, list(steps))[1:]
    inputs += [x.array for x in plan.operands.values()]
    kept = layout.shape((*layout.batch, ROW))
    lead = plan.shares * math.prod(kept)
    shapes = (lead, sizes.tiles, sizes.written, sizes.width), *[(lead, sizes.padded_rows)] * 2
    out, count = [abstract(args[-1], x, jnp.float32) for x in shapes], len(sizes.widths) + 1
    run = mosaic.kernel(
        plan.body, out, plan.count, "eqattn_decode", plan.scratch(), interpreted, warpgroups=count
    )
    found = run(*inputs)

    def of_rows(x, *rest):
        x = x.reshape(plan.shares, *kept, sizes.heads, -1, *rest)
        x = lax.slice_in_dim(x, 0, sizes.of_head, axis=2 + len(kept))
        return x.reshape(plan.shares, *kept, sizes.rows, *rest)

    return merged(of_rows(found[0], sizes.width), *map(of_rows, found[1:]))


def _plan(
    steps: dict[int, Any],
    layout: GridLayout,
    operands: Sequence[Any],
    is_listed: bool,
    interpreted: bool,
) -> tuple[Plan, list[Pieces]]:
    """The kernel of a fold, and the pieces of keys and of values, by operands.

    **Arguments:**

    - `is_listed`: whether there is a table of live blocks.
    """
    first = steps[max(steps)]
    query, n = operands[0], len(first.logits.in_avals)
    pieces = [keys_in(first.logits), _values(first, layout, n)]
    pages = len(pieces[0]) if layout.pages else 0
    parts = [operands[part.array] for part in pieces[0][0]]
    value = operands[pieces[1][0][0].array] if pieces[1] else None
    sizes = sizes_of(layout, parts, value, pages, query)
    native = mosaic.native(interpreted)
    programs = {c: PairProgram(of_one_head(step.logits), native) for c, step in steps.items()}
    wide = dataclasses.replace(layout, block=(sizes.keys, sizes.padded_rows))
    lengths, given = dict(r=sizes.padded_rows, k=sizes.padded_keys), {}
    for i in (i for i in range(n) if any(p.reads[i] for p in programs.values())):
        x = rows_by_head(operands[i], layout.in_axes[i], sizes)
        given[i] = Operand(x, layout.in_axes[i], wide, ROWS, lengths)

    def source(part):
        axes = layout.in_axes[part.array]
        axes = layout.in_axes[layout.lookups[max(axes)]] if pages else axes
        size = operands[part.array].shape[-1]
        return Source(axes, size, sizes.heads, pages, part.scales is not None)

    keys, values = (tuple(map(source, group[0])) if group else () for group in pieces)
    plan = Plan(
        layout=wide,
        sizes=sizes,
        programs=programs,
        operands=given,
        keys=keys,
        values=values,
        table_axes=(layout.table_axes or ())[:-2] if is_listed else None,
        dtype=query.dtype,
        stored=parts[0].dtype,
        shares=_shares(layout, sizes),
        interpreted=interpreted,
    )
    return plan, pieces


def _queries(query: Any, sizes: Sizes) -> list[Any]:
    """The queries that each part of the keys is multiplied with, `[places, rows, n]`."""
    q = query.reshape(-1, sizes.dim, sizes.heads, sizes.of_head)  # there may be a single row
    q = padded(q, 3, sizes.padded_rows // sizes.heads).reshape(-1, sizes.dim, sizes.padded_rows)
    q, starts = jnp.swapaxes(q, -1, -2), np.cumsum(sizes.dims)[:-1]
    return jnp.split(q, starts, -1)


def _values(first: Any, layout: GridLayout, n: int) -> Pieces:
    """The pieces of values, by operands; none if they are the first part of the keys.

    **Raises:** `ValueError` if they are made of anything else.
    """
    found = values_in(first.values)
    read = [*layout.shared, *range(n, n + len(first.values.in_avals))]
    pieces = [tuple(part.among(read) for part in piece) for piece in found]
    own = not layout.shared
    if [len(piece) for piece in pieces] != [1] * len(keys_in(first.logits)) or (
        not own and [piece[0] for piece in pieces] != [piece[0] for piece in keys_in(first.logits)]
    ):
        raise ValueError(
            "there is no kernel for this call (its values are stored in a way of their own); "
            "platform='auto' or 'xla' runs it as XLA code."
        )
    return pieces if own else []


def merged(num: Any, den: Any, top: Any) -> list:
    """Merges several Carries, `[shares, ...]`, into one."""
    if len(num) == 1:
        return [num[0], den[0], top[0]]
    most = top.max(0)
    _, scale = change_of_origin(most[None], top)
    return [(num * scale[..., None]).sum(0), (den * scale).sum(0), most]


def traverse_stored(
    steps: dict[int, Callable[..., Any]],
    layout: GridLayout,
    args: Sequence[Any],
    start: Sequence[Any],
    axes: Sequence[tuple[int, ...]],
    *,
    finish: Callable[..., Any] = list,
    into: Sequence[Any] | None = None,
    interpreted: bool = False,
) -> list[Any]:
    """`eqattn._sweep.loops.traverse` of a fold whose keys and values stay in place."""
    assert into is None, "what is read in place does not travel around a ring"
    run = lambda *xs: visit_stored(steps, layout, xs, interpreted)
    num, den, top = called(run, interpreted, *args)

    def again():
        return loops.traverse(steps, layout, args, start, axes, finish=finish, vectorise=False)

    return lax.cond(jnp.isfinite(num).all(), lambda: [num, den, top], again)
