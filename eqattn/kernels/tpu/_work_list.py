"""Which pairs of row and column a kernel visits, in which order, and where their blocks lie."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ..._sweep.grid import COL, EMPTY, GridLayout, ROW
from ._chip import cores, SHORT


FIRST, LAST = 1, 2  # flags of a pair; then two bits of its class, 14 of its column, 14 of its row
SIDE = 2**14


def work_list(
    table: Any,
    layout: GridLayout,
    kept: tuple[int, ...],
    default_class: int,
    merged: tuple[int, ...] = (),
) -> Any:
    """The pairs to visit, packed, `[*, pairs]`, and how many there are: the live ones, and one for
    each kept row or column without any. Without a table, all of class `every`. One more of that
    class, without flags, follows them. Its rows are those of all the batch elements of the axes
    `merged`, which are the innermost; its columns too, but for a `ragged` layout.
    """
    rows, columns = layout.grid[ROW:]
    apart = rows
    if table is None:
        table = np.full((rows, columns), default_class, np.int8)
    xp: Any = np if isinstance(table, np.ndarray) else jnp
    if merged:
        table_batch_axes = (layout.table_axes or ())[:-2]
        outer = table.shape[: sum(a not in merged for a in table_batch_axes)]
        sizes = [layout.grid[a] for a in merged]
        own = [n if a in table_batch_axes else 1 for a, n in zip(merged, sizes)]
        table = xp.broadcast_to(
            table.reshape(*outer, *own, rows, columns), (*outer, *sizes, rows, columns)
        ).reshape(*outer, -1, columns)
        rows = table.shape[ROW]
    row, column = np.mgrid[:rows, :columns]
    if merged and not layout.ragged:
        column += row // apart * columns
    # A list that may be this long is refused.
    assert max(rows, columns) < SIDE, (rows, columns)
    if COL in kept and ROW not in kept:
        table, row, column = (xp.swapaxes(x, -1, -2) for x in (table, row, column))
    lead, (outer, inner) = table.shape[:-2], table.shape[-2:]
    if ROW in kept and COL in kept:
        outer, inner = outer * inner, 1
    elif ROW not in kept and COL not in kept:
        outer, inner = 1, outer * inner
    table = table.reshape(*lead, outer, inner)
    none = (table == EMPTY).all(-1, keepdims=True)
    chosen = (table != EMPTY) | (none & np.broadcast_to(np.arange(inner) == 0, table.shape))
    chosen = chosen.reshape(*lead, -1)
    index, everything = np.arange(outer * inner), outer * inner
    index = np.broadcast_to(index, chosen.shape)
    order = xp.sort(xp.where(chosen, index, index + everything), axis=-1)
    count = chosen.sum(-1)
    past = order >= everything
    final = xp.take_along_axis(order, count[..., None] - 1, -1)
    at = xp.where(past, final, order)
    group, edge = xp.where(past, -1, at // inner), xp.full((*lead, 1), -1, at.dtype)
    first = ~past & (group != xp.concatenate([edge, group[..., :-1]], -1))
    last = ~past & (group != xp.concatenate([group[..., 1:], edge], -1))
    kind = xp.where(past, EMPTY, xp.take_along_axis(table.reshape(*lead, -1), at, -1))
    word = lambda x: x.astype(np.uint32)
    row, column = (word(xp.asarray(x).reshape(-1)[at]) for x in (row, column))
    packed = row << 18 | column << 4 | word(kind) << 2 | word(first) * FIRST | word(last) * LAST
    length = int(count.max()) if xp is np else count.max().astype(jnp.int32)
    packed = packed[..., :length] if xp is np else packed
    drained = packed[..., -1:] >> 4 << 4 | np.uint32(default_class << 2)
    packed = xp.concatenate([packed, drained], -1)
    return lax.bitcast_convert_type(jnp.asarray(packed), jnp.int32), length


def merged_axes(layout: GridLayout) -> tuple[int, ...]:
    """The innermost batch axes whose pairs may share a list, so that they are drained once. It
    lies in scalar memory, and is one core's.
    """
    axes, pairs = layout.batch, math.prod(layout.grid[ROW:])
    while axes and (cores() > 1 or math.prod(layout.grid[a] for a in axes) * pairs > SHORT):
        axes = axes[1:]
    return axes


def in_parts(work: Array, length: Any, parts: int, rows: int) -> tuple[Array, Any, Array]:
    """One list as `parts` equal stretches of it, so that cores may share it.

    **Returns:** the lists `[parts, pairs]`, the length of the longest, and whether each has a pair
    of each row, `[parts, rows]`. A row that two of them have is begun and ended by both.
    """
    size = -(-length // parts)
    begin = np.arange(parts, dtype=np.int32)[:, None] * size
    end = jnp.minimum(begin + size, length)
    at = np.arange(-(-(len(work) - 1) // parts) + 1, dtype=np.int32)[None]
    here = begin + at
    pairs = work[jnp.minimum(here, end - 1)]
    flags = jnp.where(at == 0, FIRST, 0) | jnp.where(here == end - 1, LAST, 0)
    pairs = jnp.where(here < end, pairs | flags, pairs & ~15)  # past the end: not a visit
    rows_at = lambda i: row_of(work[jnp.clip(i, 0, length - 1)])
    first, last, row = rows_at(begin), rows_at(end - 1), np.arange(rows, dtype=np.int32)[None]
    return pairs, size, (begin < end) & (first <= row) & (row <= last)


def kind_of(pair: Any) -> Any:
    return (pair >> 2) & 3


def row_of(pair: Any) -> Any:
    return lax.shift_right_logical(pair, 18)
