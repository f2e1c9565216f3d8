"""Which pairs of row and column a kernel visits, in which order, and where their blocks lie."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ..._compat import abstract
from ..._traverse import COL, EMPTY, Layout, ROW


RESIDENT = 2**19  # bytes of an array
SHORT = 2**11  # pairs of a list
FIRST, LAST = 1, 2  # flags of a pair; then two bits of its class, 14 of its column, 14 of its row
SIDE = 2**14


def work_list(
    table: Any, layout: Layout, kept: tuple[int, ...], every: int, merged: tuple[int, ...] = ()
) -> Any:
    """The pairs to visit, packed, `[*, pairs]`, and how many there are: the live ones, and one for
    each kept row or column without any. Without a table, all of class `every`. One more of that
    class, without flags, follows them. Its rows are those of all the batch elements of the axes
    `merged`, which are the innermost; its columns too, but for a `ragged` layout.
    """
    rows, columns = layout.grid[ROW:]
    apart = rows
    if table is None:
        table = np.full((rows, columns), every, np.int8)
    xp: Any = np if isinstance(table, np.ndarray) else jnp
    if merged:
        told = (layout.table_axes or ())[:-2]
        outer = table.shape[: sum(a not in merged for a in told)]
        sizes = [layout.grid[a] for a in merged]
        own = [n if a in told else 1 for a, n in zip(merged, sizes)]
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
    drained = packed[..., -1:] >> 4 << 4 | np.uint32(every << 2)
    packed = xp.concatenate([packed, drained], -1)
    return lax.bitcast_convert_type(jnp.asarray(packed), jnp.int32), length


def merged_axes(layout: Layout) -> tuple[int, ...]:
    """The innermost batch axes whose pairs may share a list, so that they are drained once. It
    lies in scalar memory, and is one core's.
    """
    axes, pairs = layout.batch, math.prod(layout.grid[ROW:])
    while axes and (cores() > 1 or math.prod(layout.grid[a] for a in axes) * pairs > SHORT):
        axes = axes[1:]
    return axes


def cores() -> int:
    """How many cores share a kernel: the two of a v4 or v5p are one device."""
    try:
        return pltpu.get_tpu_info().num_cores
    except (ValueError, NotImplementedError):  # no TPU to ask about
        return 1


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


def split_at(xs: Sequence, n: int) -> tuple[Sequence, Sequence]:
    return xs[:n], xs[n:]


def kind_of(pair: Any) -> Any:
    return (pair >> 2) & 3


def row_of(pair: Any) -> Any:
    return lax.shift_right_logical(pair, 18)


def lies_as(shape: tuple[int, ...], flipped: bool = False) -> tuple[int, ...]:
    """A block as it lies in vector memory: at least a matrix, a column `[n, 1]` as a row."""
    if len(shape) < 2:
        return (1, *(shape or (1,)))
    return shape[::-1] if flipped or (len(shape) == 2 and shape[1] == 1) else shape


def nbytes_of(shape: Sequence[int], dtype: Any) -> int:
    """Bytes of vector memory that an array takes."""
    *lead, m, n = shape
    m = m if m == 1 else -(-m // 8) * 8
    return math.prod(lead) * m * -(-n // 128) * 128 * dtype.itemsize


def as_block(x: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """What the block function reads, from what lies in vector memory."""
    if len(shape) == 2 and shape[1] == 1 and shape[0] > 1:
        x = jnp.broadcast_to(x, (8, shape[0])).T[:, :1]
    x = x.reshape(shape)
    return x != 0 if dtype == jnp.bool_ else x


@dataclasses.dataclass(frozen=True)
class Steps:
    """The kernel's grid: batch axes and, as None, the work list; `table_axes` are those of the list
    before its pairs, `merged` those that its rows are of, and its columns where it is `joined`.
    `parts`: of the list, each a core's; 0 if it is one.
    """

    layout: Layout
    order: tuple[int | None, ...]
    table_axes: tuple[int, ...]
    length: Any
    drain: int = 0
    merged: tuple[int, ...] = ()
    parts: int = 0

    @classmethod
    def of(
        cls, table: Any, layout: Layout, kept: tuple[int, ...], every: int, drain: int = 0
    ) -> tuple["Steps", Any]:
        """The grid of a fold, and its list of pairs: batch elements outside, one after the other,
        or in the list where the layout is ragged or the list is short.
        """
        told = (layout.table_axes or ())[:-2]
        merged = told if layout.ragged else merged_axes(layout) if drain else ()
        work, length = work_list(table, layout, kept, every, merged)
        order = (*[a for a in layout.batch if a not in merged], None)
        outer = tuple(a for a in told if a not in merged)
        return cls(layout, order, outer, length, drain, merged), work

    @property
    def joined(self) -> bool:
        return bool(self.merged) and not self.layout.ragged

    @property
    def outermost(self) -> int:
        """Of the axes that a row of the list stands for."""
        return self.merged[0] if self.merged else ROW

    @property
    def grid(self) -> tuple:
        parts = (self.parts,) if self.parts else ()
        sizes = (self.length + self.drain if a is None else self.layout.grid[a] for a in self.order)
        return (*parts, *sizes)

    def pair(self, ids: Sequence, work_ref: Any, lag: int = 0) -> Any:
        """The packed pair of the step `lag` before this one."""
        part, ids = split_at(ids, bool(self.parts))
        at = [ids[self.order.index(a)] for a in self.table_axes]
        step = ids[self.order.index(None)]
        return work_ref[(*part, *at, jnp.maximum(step - lag, 0) if lag else step)]

    def index(self, axes: tuple[int, ...], ids: Sequence, refs: Sequence, lag: int = 0) -> list:
        """Where a step, or the one `lag` before it, is on these grid axes, of which some may be one
        as in `laid`. `refs`: the list and the tables of pages.
        """
        work_ref, *tables = refs
        pair = self.pair(ids, work_ref, lag)
        _, ids = split_at(ids, bool(self.parts))
        where = {a: i for a, i in zip(self.order, ids) if a is not None}
        sides = {ROW: row_of(pair), COL: (pair >> 4) & (SIDE - 1)}
        *apart, side = self.split(axes)
        if side is not None:
            return [*[where[a] for a in apart], sides[side]]
        row, where[COL] = sides[ROW], sides[COL]
        if self.joined:
            where[COL] = lax.rem(where[COL], jnp.int32(self.layout.grid[COL]))
        for a in (ROW, *reversed(self.merged)):
            size = jnp.int32(self.layout.grid[a])
            if a == self.outermost:
                where[a] = row
            elif self.layout.grid[a] == 1:
                where[a] = jnp.int32(0)
            else:
                where[a], row = lax.rem(row, size), lax.div(row, size)
        for i, lookup in enumerate(self.layout.lookups):
            where[i] = tables[i][tuple(where[a] for a in self.layout.in_axes[lookup])]
        return [where[a] for a in axes]

    def split(self, axes: tuple[int, ...]) -> tuple:
        """The axes before those that are one in `laid`, and which of `ROW` and `COL` that is of."""
        n = len(axes) - 1 - len(self.merged)
        if self.joined and n >= 0 and axes[n:-1] == self.merged and axes[-1] in (ROW, COL):
            return *axes[:n], axes[-1]
        return *axes, None

    def laid(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of these axes, in front of the blocks of an array. Of joined axes it has one,
        as the list has: then the scalar unit has less to do.
        """
        *apart, side = self.split(axes)
        sizes = self.layout.shape(tuple(apart))
        return sizes if side is None else (*sizes, math.prod(self.layout.shape(axes[len(apart) :])))

    def spec(
        self, axes: tuple[int, ...], block: tuple[int, ...], lag: int = 0, *, by_part: bool = False
    ) -> pl.BlockSpec:
        """Where the block of an array on these grid axes lies at each step. `by_part`: in front of
        them, each part of the list has its own.
        """

        def index(*ids_and_refs):
            ids, refs = split_at(ids_and_refs, len(self.order) + bool(self.parts))
            own = ids[:1] if by_part and self.parts else ()
            return (*own, *self.index(axes, ids, refs, lag), *[0] * len(block))

        lead = len(self.laid(axes)) + (bool(self.parts) and by_part)
        return pl.BlockSpec((*[None] * lead, *block), index)

    def place(self, x: "Operand", lag: int = 0) -> pl.BlockSpec:
        """Where an argument of the kernel lies."""
        if x.resident:
            return pl.BlockSpec(memory_space=pltpu.VMEM)
        return self.spec(x.axes, x.block, lag)

    def read(self, x: "Operand", ref: Any, ids: Sequence, refs: Sequence, lag: int = 0) -> Array:
        """Its block at a step."""
        return x.read(ref, self.index(x.axes, ids, refs, lag) if x.resident else ())

    def arrays(self, xs: Sequence["Operand"]) -> list[Array]:
        return [x.array.reshape(*self.laid(x.axes), *x.block) for x in xs]


class Operand:
    """An array on the grid, as the kernel is given it: `flipped`, transposed; `as_lies`, with
    matrices of one column as they are; `cached`, from a cache.
    """

    def __init__(
        self,
        x: Any,
        axes: tuple[int, ...],
        flipped: bool = False,
        as_lies: bool = False,
        cached: bool = False,
    ):
        self.axes, self.flipped, self.cached, self.dtype = axes, flipped, cached, x.dtype
        shape = x.shape[len(axes) :]
        self.shape = shape[::-1] if flipped else shape
        self.block = shape if as_lies else lies_as(shape, flipped)
        x = jnp.asarray(x)
        x = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
        x = jnp.swapaxes(x, -1, -2) if flipped else x
        self.array = x.reshape(*x.shape[: len(axes)], *self.block)

    @property
    def resident(self) -> bool:
        """Whether the whole array lies in vector memory all the time: what is small would not take
        longer to copy there for each step than to find out that it must be.
        """
        return 1 in self.block and nbytes_of(self.array.shape, self.array.dtype) <= RESIDENT

    @property
    def nbytes(self) -> int:
        """Of vector memory: one block is read while the next one arrives."""
        if self.resident:
            return nbytes_of(self.array.shape, self.array.dtype)
        return 2 * nbytes_of(self.block, self.array.dtype)

    def read(self, ref: Any, at: Sequence = ()) -> Array:
        """The block in `ref`, or of a resident array the one `at` some place."""
        x = ref[(*at, ...)]
        if x.shape != self.shape or x.ndim == 0:
            return as_block(x, self.shape, self.dtype)
        return x != 0 if self.dtype == jnp.bool_ else x


def abstract_blocks(operands: Sequence, axes: Sequence[tuple[int, ...]]) -> list:
    return [abstract(x, x.shape[len(a) :], x.dtype) for x, a in zip(operands, axes)]


def matrix(x: Any) -> bool:
    return len(x.shape) == 2 and min(x.shape) > 1
