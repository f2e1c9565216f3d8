"""The kernel's grid, and the blocks of its operands."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ..._jax import abstract
from ..._sweep.grid import COL, GridLayout, ROW
from ._chip import RESIDENT
from ._work_list import merged_axes, row_of, SIDE, work_list


def split_at(xs: Sequence, n: int) -> tuple[Sequence, Sequence]:
    return xs[:n], xs[n:]


def vmem_shape(shape: tuple[int, ...], flipped: bool = False) -> tuple[int, ...]:
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
class KernelGrid:
    """The kernel's grid: batch axes and, as None, the work list; `table_axes` are those of the list
    before its pairs, `merged` those that its rows are of, and its columns where it is `joined`.
    `parts`: of the list, each a core's; 0 if it is one.
    """

    layout: GridLayout
    order: tuple[int | None, ...]
    table_axes: tuple[int, ...]
    length: Any
    drain: int = 0
    merged: tuple[int, ...] = ()
    parts: int = 0

    @classmethod
    def of(
        cls,
        table: Any,
        layout: GridLayout,
        kept: tuple[int, ...],
        default_class: int,
        drain: int = 0,
    ) -> tuple["KernelGrid", Any]:
        """The grid of a fold, and its list of pairs: batch elements outside, one after the other,
        or in the list where the layout is ragged or the list is short.
        """
        table_batch_axes = (layout.table_axes or ())[:-2]
        merged = table_batch_axes if layout.ragged else merged_axes(layout) if drain else ()
        work, length = work_list(table, layout, kept, default_class, merged)
        order = (*[a for a in layout.batch if a not in merged], None)
        outer = tuple(a for a in table_batch_axes if a not in merged)
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

    def leading_sizes(self, axes: tuple[int, ...]) -> tuple[int, ...]:
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

        lead = len(self.leading_sizes(axes)) + (bool(self.parts) and by_part)
        return pl.BlockSpec((*[None] * lead, *block), index)

    def block_spec(self, x: "KernelOperand", lag: int = 0) -> pl.BlockSpec:
        """Where an argument of the kernel lies."""
        if x.resident:
            return pl.BlockSpec(memory_space=pltpu.VMEM)
        return self.spec(x.axes, x.block, lag)

    def read(
        self, x: "KernelOperand", ref: Any, ids: Sequence, refs: Sequence, lag: int = 0
    ) -> Array:
        """Its block at a step."""
        return x.read(ref, self.index(x.axes, ids, refs, lag) if x.resident else ())

    def arrays(self, xs: Sequence["KernelOperand"]) -> list[Array]:
        return [x.array.reshape(*self.leading_sizes(x.axes), *x.block) for x in xs]


class KernelOperand:
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
        self.block = shape if as_lies else vmem_shape(shape, flipped)
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
