"""The grid of a kernel, and where the blocks of its operands lie at each step.

A kernel's grid has one axis for the list of pairs (`_work_list.py`) and one for each batch axis
that does not share the list. A step reads its pair from scalar memory. The index maps of the
`BlockSpec`s read the same words, so that blocks are on their way before their step begins.

An output of the kernel that sums over live pairs: how it lies in vector and in main memory.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ..._sweep.grid import BlockGrid, COL, HEAD, ROW
from ..._sweep.tokens import from_heads, TokenPairs
from ._operands import KernelOperand, vmem_shape
from ._work_list import merged_axes, row_of, SIDE, work_list


@dataclasses.dataclass(frozen=True)
class SumResult:
    """An output of a kernel.

    **Arguments:**

    - `aval`: the shape and dtype of its block, as a step of the sweep reads it.
    - `axes`: the grid axes that it keeps.
    - `lies`: those of them in front of what lies in vector memory at one time.
    - `dtype`: the dtype in which it is written, once its sum is complete.
    - `rows`: the number of blocks that lie there at one time, if all rows stay: `(rows,)`, or `()`.
    - `flipped`: whether its sum is the transpose of what is written, and so has additional memory.
    - `transposed`: whether its blocks are the transposes of its sums, with features innermost.
    - `heads`: how many heads a row has the queries of, if blocks that are turned are written by
        head.
    - `window`: the heads, queries and keys of a block of pairs that is written where these lie, see
        `PairsOperand`; else None.
    """

    aval: Any
    axes: tuple[int, ...]
    lies: tuple[int, ...]
    dtype: Any
    rows: tuple[int, ...] = ()
    flipped: bool = False
    transposed: bool = False
    heads: int = 1
    window: tuple[int, int, int] | None = None

    @property
    def block(self) -> tuple[int, ...]:
        """The shape of one block in vector memory."""
        return vmem_shape(self.aval.shape)

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of what lies in vector memory at one time."""
        return (*self.rows, *self.block)

    @property
    def written(self) -> tuple[int, ...]:
        """The shape of what is written of it at one time."""
        if self.window:
            return self.window
        if not self.transposed:
            return self.whole
        rows, features = self.block[::-1]
        if self.heads == 1:
            return (*self.rows, rows, features)
        return (self.heads, *self.rows, rows // self.heads, features)

    def write(self, ref: Any, sum_of: Callable[..., Any]) -> None:
        """Writes what lies in vector memory at one time.

        **Arguments:**

        - `sum_of`: a function of a row, or of `...` for all, that returns its sum.
        """
        if self.window:
            ref[...] = sum_of(...).reshape(self.window)
            return
        if not self.transposed:
            ref[...] = sum_of(...).T if self.flipped else sum_of(...)
            return
        for row in range(*self.rows):
            block = sum_of(row).T
            if self.heads == 1:
                ref[row] = block
            else:
                ref[:, row] = block.reshape(self.heads, -1, block.shape[-1])

    def from_written(self, x: Any, layout: BlockGrid) -> Any:
        """What was written, as the sweep returns it, before its grid axes are restored."""
        if self.window:
            return TokenPairs(x, self.axes, self.window, self.aval.shape).blocks(layout)
        x = from_heads(x) if self.heads > 1 else x
        return jnp.swapaxes(x, -1, -2) if self.transposed else x

    @property
    def total(self) -> tuple[int, ...]:
        """The shape of its sum."""
        if self.window:
            return self.block[::-1]
        return self.whole[::-1] if self.flipped else self.whole

    @property
    def apart(self) -> bool:
        """Whether the sum has memory beside what is written. This is so if its place is visited
        several times, or if the sum is rounded.
        """
        return not self.rows or self.dtype != self.aval.dtype


def split_at(xs: Sequence, n: int) -> tuple[Sequence, Sequence]:
    """The first `n` of some values, and the others."""
    return xs[:n], xs[n:]


def tables_of(layout: BlockGrid, operands: Sequence[Array]) -> list[Array]:
    """The tables of what a step looks up. Scalar memory holds vectors at least, so a single entry
    is one.
    """
    tables = [operands[i] for i in layout.lookups]
    return [x.reshape(1) if x.ndim == 0 else x for x in tables]


@dataclasses.dataclass(frozen=True)
class KernelGrid:
    """The grid of a kernel.

    **Arguments:**

    - `layout`: the grid of blocks that the kernel visits.
    - `order`: its axes from the outermost to the innermost: batch axes and, as None, the list.
    - `table_axes`: the batch axes that the list has before its pairs: each element has its own.
    - `length`: how many pairs are on the list, known or traced.
    - `drain`: how many steps follow the last pair, to empty a pipeline.
    - `merged`: the batch axes whose elements share a list. They have no axis of the kernel's grid.
        The rows of the list are those of all the elements, and so are its columns if it is
        `joined`.
    - `parts`: into how many parts the list is cut, one for each core; 0 if it is whole.
    - `heads_per_step`: how many heads a step visits. With more than one, `layout` counts that many
        heads as one. Arrays of heads then have an axis of that size after the axis of heads.
    """

    layout: BlockGrid
    order: tuple[int | None, ...]
    table_axes: tuple[int, ...]
    length: Any
    drain: int = 0
    merged: tuple[int, ...] = ()
    parts: int = 0
    heads_per_step: int = 1

    @classmethod
    def of(
        cls,
        table: Any,
        layout: BlockGrid,
        kept: tuple[int, ...],
        default_class: int,
        drain: int = 0,
        heads_per_step: int = 1,
    ) -> tuple["KernelGrid", Any]:
        """The grid of a fold, and its list of pairs.

        Batch elements are visited one after the other, outside of the list. They share a list where
        the layout is ragged, or where there is something to drain and the list is short.

        **Arguments:** those of `work_list`, and `drain` and `heads_per_step` as above.
        """
        if heads_per_step > 1:
            sizes = dict(zip(layout.batch, layout.grid)) | {
                HEAD: layout.grid[HEAD] // heads_per_step
            }
            grid = *sizes.values(), *layout.grid[ROW:]
            layout = dataclasses.replace(layout, grid=grid)
        table_batch_axes = (layout.table_axes or ())[:-2]
        merged = table_batch_axes if layout.ragged else merged_axes(layout) if drain else ()
        work, length = work_list(table, layout, kept, default_class, merged)
        order = (*[a for a in layout.batch if a not in merged], None)
        outer = tuple(a for a in table_batch_axes if a not in merged)
        return cls(layout, order, outer, length, drain, merged, heads_per_step=heads_per_step), work

    @property
    def joined(self) -> bool:
        """Whether the columns of the list, too, are those of all elements that share it."""
        return bool(self.merged) and not self.layout.ragged

    @property
    def outermost(self) -> int:
        """The outermost of the axes that a row of the list counts."""
        return self.merged[0] if self.merged else ROW

    @property
    def grid(self) -> tuple:
        """The sizes of the kernel's grid, parts first."""
        parts = (self.parts,) if self.parts else ()
        sizes = (self.length + self.drain if a is None else self.layout.grid[a] for a in self.order)
        return (*parts, *sizes)

    def pair(self, ids: Sequence, work_ref: Any, lag: int = 0) -> Any:
        """The packed pair of the step `lag` before this one; at the first step, its own. With a lag
        of -1 it is that of the next step, if the list has one.
        """
        part, ids = split_at(ids, bool(self.parts))
        at = [ids[self.order.index(a)] for a in self.table_axes]
        step = ids[self.order.index(None)]
        if lag > 0:
            step = jnp.maximum(step - lag, 0)
        elif lag < 0:
            step = jnp.minimum(step - lag, work_ref.shape[-1] - 1)
        return work_ref[(*part, *at, step)]

    def index(
        self,
        axes: tuple[int, ...],
        ids: Sequence,
        refs: Sequence,
        lag: int = 0,
        apart: bool = False,
    ) -> list:
        """The index on the given grid axes of the block that a step reads or writes.

        A row of a merged list counts `(*merged, ROW)` in one number, so the index on each of these
        axes is found by division. Arrays whose axes are merged in the same way, see
        `leading_sizes`, need no division.

        **Arguments:**

        - `axes`: the grid axes of an array.
        - `ids`: the indices of the step on the kernel's grid.
        - `refs`: the list, and the tables of pages.
        - `lag`: how many steps before this one.
        - `apart`: whether the array has all of its axes, also those that are merged.
        """
        work_ref, *tables = refs
        pair = self.pair(ids, work_ref, lag)
        _, ids = split_at(ids, bool(self.parts))
        where = {a: i for a, i in zip(self.order, ids) if a is not None}
        sides = {ROW: row_of(pair), COL: (pair >> 4) & (SIDE - 1)}
        *others, side = (*axes, None) if apart else self.split(axes)
        if side is not None:
            return [*[where[a] for a in others], sides[side]]
        row, where[COL] = sides[ROW], sides[COL]
        if self.joined:
            _, where[COL] = _divided(where[COL], self.layout.grid[COL])
        for a in (ROW, *reversed(self.merged)):
            if a == self.outermost:
                where[a] = row
            else:
                row, where[a] = _divided(row, self.layout.grid[a])
        for i, lookup in enumerate(self.layout.lookups):
            where[i] = tables[i][tuple(where[a] for a in self.layout.in_axes[lookup]) or (0,)]
        return [where[a] for a in axes]

    def split(self, axes: tuple[int, ...]) -> tuple:
        """The axes that an array keeps, and `ROW` or `COL` if the others are merged into it.

        The merged batch axes and the row (or column) after them are one axis of the array where
        they are one number of the list.
        """
        n = len(axes) - 1 - len(self.merged)
        if not self.joined or n < 0 or self.heads(axes):
            return *axes, None
        together = axes[n:-1] == self.merged and axes[-1] in (ROW, COL)
        return (*axes[:n], axes[-1]) if together else (*axes, None)

    def leading_sizes(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of the axes in front of the blocks of an array on these grid axes.

        Axes that are one number of the list are one axis here: then the scalar unit has nothing to
        divide.
        """
        *apart, side = self.split(axes)
        sizes = self.layout.shape(tuple(apart))
        if self.heads(axes):
            sizes = self._beside(axes, sizes, self.heads_per_step)
        return sizes if side is None else (*sizes, math.prod(self.layout.shape(axes[len(apart) :])))

    def heads(self, axes: tuple[int, ...]) -> bool:
        """Whether a block of an array on these axes holds those of several heads."""
        return self.heads_per_step > 1 and HEAD in axes

    def _beside(self, axes: tuple[int, ...], xs: Sequence, x: Any) -> tuple:
        """Inserts `x` after the entry of `xs`, one for each axis, that belongs to the axis of
        heads.
        """
        at = axes.index(HEAD) + 1
        return *xs[:at], x, *xs[at:]

    def sizes_of(self, axes: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of an array of blocks. With a block of three axes, the queries of one head lie
        together, see `by_head`: then `ROW` is the last of the axes.
        """
        if len(block) < 3:
            return *self.leading_sizes(axes), *block
        *lead, rows = self.layout.shape(axes)
        if self.heads(axes):
            lead = self._beside(axes, lead, self.heads_per_step)
        heads, *rest = block
        return *lead, heads, rows, *rest

    def spec_of(self, axes: tuple[int, ...], block: tuple[int, ...], lag: int = 0) -> pl.BlockSpec:
        """Where the block of such an array lies at each step, as `spec` tells for others. With
        several heads, it is one stretch of memory for each.
        """
        if len(block) < 3:
            return self.spec(axes, block, lag)

        def index(*ids_and_refs):
            ids, refs = split_at(ids_and_refs, len(self.order))
            *at, row = self.index(axes, ids, refs, lag, apart=True)
            at = self._beside(axes, at, 0) if self.heads(axes) else at
            return *at, 0, row, 0, 0

        lead = [None] * (len(axes) - 1)
        if self.heads(axes):
            lead = self._beside(axes, lead, self.heads_per_step)
        heads, *rest = block
        return pl.BlockSpec((*lead, heads, None, *rest), index)

    def sizes_of_pairs(
        self, axes: tuple[int, ...], window: tuple[int, int, int]
    ) -> tuple[int, ...]:
        """The shape of an array of all pairs, `[*lead, heads, all queries, all keys]`.

        **Arguments:**

        - `axes`: the grid axes of its blocks.
        - `window`: the heads, queries and keys of a block, which are a window of it.
        """
        heads, *sides = window
        lead = tuple(a for a in axes if a not in (ROW, COL))
        sizes = self.layout.shape(lead)
        if self.heads(axes):
            sizes = self._beside(lead, sizes, self.heads_per_step)
        counts = (self.layout.grid[a] if a in axes else 1 for a in (ROW, COL))
        return *sizes, heads, *(n * m for n, m in zip(counts, sides))

    def spec_of_pairs(
        self, axes: tuple[int, ...], window: tuple[int, int, int], lag: int = 0
    ) -> pl.BlockSpec:
        """Where the block of such an array lies at each step."""
        lead = tuple(a for a in axes if a not in (ROW, COL))
        several = self.heads(axes)

        def index(*ids_and_refs):
            ids, refs = split_at(ids_and_refs, len(self.order))
            where = dict(zip(axes, self.index(axes, ids, refs, lag, apart=True)))
            at = [where[a] for a in lead]
            at = self._beside(lead, at, 0) if several else at
            return *at, 0, where.get(ROW, 0), where.get(COL, 0)

        outer: Sequence = [None] * len(lead)
        if several:
            outer = self._beside(lead, outer, self.heads_per_step)
        return pl.BlockSpec((*outer, *window), index)

    def spec(
        self, axes: tuple[int, ...], block: tuple[int, ...], lag: int = 0, *, by_part: bool = False
    ) -> pl.BlockSpec:
        """Where the block of an array on these grid axes lies at each step.

        **Arguments:**

        - `axes`, `block`: the grid axes of the array, and the shape of a block.
        - `lag`: how many steps late the block is used.
        - `by_part`: whether each part of the list has a separate array, as a first axis.
        """

        def index(*ids_and_refs):
            ids, refs = split_at(ids_and_refs, len(self.order) + bool(self.parts))
            own = ids[:1] if by_part and self.parts else ()
            at = self.index(axes, ids, refs, lag)
            if self.heads(axes):
                at = self._beside(axes, at, 0)
            return (*own, *at, *[0] * len(block))

        lead = [None] * len(axes)
        if self.heads(axes):
            lead = self._beside(axes, lead, self.heads_per_step)
        else:
            lead = [None] * (len(self.leading_sizes(axes)) + (bool(self.parts) and by_part))
        return pl.BlockSpec((*lead, *block), index)

    def sizes_of_result(self, y: SumResult) -> tuple[int, ...]:
        """The shape of the array to which a sum's blocks are written."""
        if y.window:
            return self.sizes_of_pairs(y.axes, y.window)
        return *self.layout.shape(y.lies), *y.written

    def spec_of_result(self, y: SumResult) -> pl.BlockSpec:
        """Where its block lies at each step."""
        return self.spec_of_pairs(y.axes, y.window) if y.window else self.spec(y.lies, y.written)

    def block_spec(self, x: KernelOperand, lag: int = 0) -> pl.BlockSpec:
        """Where the block of an operand lies at each step; a resident one is given whole."""
        if x.resident:
            return pl.BlockSpec(memory_space=pltpu.VMEM)
        if x.window:
            return self.spec_of_pairs(x.axes, x.window, lag)
        return (
            self.spec_of(x.axes, x.block, lag) if x.heads > 1 else self.spec(x.axes, x.block, lag)
        )

    def read(
        self,
        x: KernelOperand,
        ref: Any,
        ids: Sequence,
        refs: Sequence,
        lag: int = 0,
        as_row: bool = False,
        head: int = 0,
    ) -> Array:
        """The block of an operand at a step, or at the one `lag` before it; see `KernelOperand`.

        **Arguments:**

        - `head`: which of the heads that are visited together.
        """
        at: Sequence = (head,) if self.heads(x.axes) else ()
        if x.resident:
            at = self.index(x.axes, ids, refs, lag)
            at = self._beside(x.axes, at, head) if self.heads(x.axes) else at
        return x.read(ref, at, as_row)

    def arrays(self, xs: Sequence[KernelOperand]) -> list[Array]:
        """The arrays of the operands, with the leading axes that `spec` counts on."""

        def shape(x: KernelOperand) -> tuple[int, ...]:
            if x.window:
                return self.sizes_of_pairs(x.axes, x.window)
            if x.heads > 1:
                return self.sizes_of(x.axes, x.block)
            return (*self.leading_sizes(x.axes), *x.block)

        return [x.array.reshape(shape(x)) for x in xs]


def _divided(x: Any, size: int) -> tuple[Any, Any]:
    """The quotient and the remainder of an index. The scalar unit has shifts, but no division."""
    if size & (size - 1):
        return lax.div(x, jnp.int32(size)), lax.rem(x, jnp.int32(size))
    return lax.shift_right_logical(x, jnp.int32(size.bit_length() - 1)), x & (size - 1)
