"""Which pairs of row and column a kernel visits, in which order, and where their blocks lie.

The pairs that are visited are on a list in scalar memory, one word of 32 bits for each:

    bit   31            18 17             4 3     2    1      0
         +----------------+----------------+-------+------+-------+
         |  row, 14 bits  | column, 14 bits| class | LAST | FIRST |
         +----------------+----------------+-------+------+-------+

`class` is `EMPTY`, `PARTIAL`, `FULL` or `DIAGONAL` of `eqattn._sweep.grid`. `FIRST` and `LAST` say
that a pair begins or ends its group. A group is the pairs that share an accumulator: a row if rows
are kept, and a column if columns are kept. A causal table of 2 x 2 blocks whose rows are kept gives

    PARTIAL  EMPTY           row  column  class    flags            word
    FULL     PARTIAL           0       0  PARTIAL  FIRST | LAST  0x00007
                               1       0  FULL     FIRST         0x40009
                               1       1  PARTIAL  LAST          0x40016
                               1       1  FULL                   0x40018

The empty block is not on the list, whose length is 3. The word after its end is for the step that
drains the forward's pipeline. It has the place of the last pair, so that no block is copied for
this step.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ..._misc import at_most
from ..._sweep.grid import BlockGrid, COL, EMPTY, ROW
from ._chip import cores, SHORT


FIRST, LAST = 1, 2
SIDE = 2**14
"""The number of rows, or of columns, that 14 bits can count."""


def work_list(
    table: Any,
    layout: BlockGrid,
    kept: tuple[int, ...],
    default_class: int,
    merged: tuple[int, ...] = (),
) -> Any:
    """The list of the pairs to visit.

    On it are the live pairs. A kept row or column without one has a pair of class `EMPTY`, so that
    its result is written, too.

    **Arguments:**

    - `table`: the class of each block, `[*batch, rows, columns]`, known or traced. None stands for
        a table whose blocks all have the class `default_class`.
    - `kept`: the grid axes that the results keep. The pairs of a kept row or column follow each
        other.
    - `default_class`: the class without a table, and of the word after the last pair.
    - `merged`: the innermost batch axes whose elements share one list. The list then has the rows
        of all these elements, one after the other. The same holds for columns, unless the layout is
        `ragged`.

    **Returns:** the packed pairs, int32 `[*batch, pairs + 1]`, and the number of pairs on the
    longest list. Shorter lists are filled with words of class `EMPTY` and without flags.
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
    # `TPULowering` refuses a grid of more rows or columns.
    assert max(rows, columns) < SIDE, (rows, columns)
    if COL in kept and ROW not in kept:
        table, row, column = (xp.swapaxes(x, -1, -2) for x in (table, row, column))
    lead, (outer, inner) = table.shape[:-2], table.shape[-2:]
    # One group for each accumulator: each pair, each row (or column), or all pairs.
    if ROW in kept and COL in kept:
        outer, inner = outer * inner, 1
    elif ROW not in kept and COL not in kept:
        outer, inner = 1, outer * inner
    table = table.reshape(*lead, outer, inner)
    none = (table == EMPTY).all(-1, keepdims=True)
    chosen = (table != EMPTY) | (none & np.broadcast_to(np.arange(inner) == 0, table.shape))
    chosen = chosen.reshape(*lead, -1)
    # A sort moves the chosen pairs to the front and keeps their order. It also works for a traced
    # table. The list then has room for all pairs, or for as many as may be live, and `count` says
    # how many it holds.
    index, everything = np.arange(outer * inner), outer * inner
    index = np.broadcast_to(index, chosen.shape)
    order = xp.sort(xp.where(chosen, index, index + everything), axis=-1)
    if layout.live_pairs and not (ROW in kept and COL in kept):
        together = math.prod(layout.grid[a] for a in merged)
        order = order[..., : together * (layout.live_pairs + max(layout.grid[ROW:]))]
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


def merged_axes(layout: BlockGrid) -> tuple[int, ...]:
    """The innermost batch axes whose elements may share a list, so that they are drained once.

    A shared list must be short, as it lies in scalar memory. It would be one core's work, so where
    two cores share a kernel, nothing is merged.
    """
    axes, pairs = layout.batch, math.prod(layout.grid[ROW:])
    together = lambda axes: math.prod(layout.grid[a] for a in axes) * pairs
    while axes and (cores() > 1 or not at_most(together(axes), SHORT)):
        axes = axes[1:]
    return axes


def in_parts(work: Array, length: Any, parts: int, rows: int) -> tuple[Array, Any, Array]:
    """One list cut into `parts` equal stretches, so that cores may share it.

    Each stretch begins with a `FIRST` pair and ends with a `LAST` one, so a row that is cut has a
    Carry in both parts.

    **Arguments:**

    - `work`: the list `[pairs + 1]` of `work_list`.
    - `length`: the number of its pairs, known or traced.
    - `parts`: how many stretches there are.
    - `rows`: how many rows the list has.

    **Returns:** the lists `[parts, pairs]`, the length of the longest, and whether each part has a
    pair of each row, `[parts, rows]`.
    """
    size = -(-length // parts)
    begin = np.arange(parts, dtype=np.int32)[:, None] * size
    end = jnp.minimum(begin + size, length)
    at = np.arange(-(-(len(work) - 1) // parts) + 1, dtype=np.int32)[None]
    here = begin + at
    pairs = work[jnp.minimum(here, end - 1)]
    flags = jnp.where(at == 0, FIRST, 0) | jnp.where(here == end - 1, LAST, 0)
    pairs = jnp.where(here < end, pairs | flags, pairs & ~15)  # EMPTY past the end, without flags
    rows_at = lambda i: row_of(work[jnp.clip(i, 0, length - 1)])
    first, last, row = rows_at(begin), rows_at(end - 1), np.arange(rows, dtype=np.int32)[None]
    return pairs, size, (begin < end) & (first <= row) & (row <= last)


def kind_of(pair: Any) -> Any:
    """The class of the block of a packed pair."""
    return (pair >> 2) & 3


def row_of(pair: Any) -> Any:
    """The row of a packed pair. The shift is logical: bit 31 is the row's, not a sign."""
    return lax.shift_right_logical(pair, 18)
