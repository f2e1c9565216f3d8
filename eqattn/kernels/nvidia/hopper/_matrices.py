"""Matrices of tokens as kernels copy their tiles: queries, keys, values, cotangents and results.

Tokens are read and written where they lie, `[batch, tokens, heads, features]`, by copies that know
strides and bounds. They read 0 behind the last token, and write nothing there. This is not possible
where blocks begin at odd places, or where tokens move around a ring. Then blocks are copied for the
kernel.

Numbers that each thread of a kernel for Hopper loads at places which it computes.

Pallas loads slices, and so this is written in what Pallas Mosaic GPU is written in. It is as
unstable as what `_mosaic.py` has.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...._sweep.grid import BlockGrid, HEAD
from ...._sweep.tokens import Tokens
from .._operands import divided, padded, Places, rounded_up, WARPGROUP
from . import _mosaic as mosaic


_ROWS = 8
"""A copy into shared memory has at least so many rows, and begins at a multiple of this number."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Where the tiles of a matrix lie.

    **Arguments:**

    - `layout`: the grid.
    - `axes`, `axis`: the grid axes of the matrix, and the one along which its tokens lie.
    - `rows`, `width`: the numbers of rows and features of a block, before they are padded.
    - `length`: the number of rows to which a copy of a block is padded.
    - `transposed`: whether blocks are `[width, rows]`.
    """

    layout: BlockGrid
    axes: tuple[int, ...]
    axis: int
    rows: int
    width: int
    length: int
    transposed: bool

    @property
    def features(self) -> int:
        """The width in shared memory, in lines of 128 bytes."""
        return rounded_up(self.width, mosaic.WARPGROUP)

    @property
    def tokens(self) -> Tokens | None:
        """The tokens that the matrix was cut from, if a kernel can read them in place."""
        found = next((x for x in self.layout.tokens if x.axis == self.axis), None)
        if found is None or not {HEAD, self.axis} <= set(self.axes):
            return None
        whole = found.block % mosaic.WARPGROUP == 0
        if found.group > 1:
            whole = whole or found.block in (8, 16, 32)
        elif self.layout.grid[self.axis] == 1:
            whole = True
        return found if whole else None

    @property
    def _others(self) -> list[int]:
        return [a for a in self.axes if a not in (self.axis, HEAD)]

    def given(self, x: Any, dtype: Any) -> Any:
        """Turns blocks into the kernel's array, `[elements, tokens, heads, features]`."""
        if self.tokens is None:
            x = jnp.swapaxes(x, -1, -2) if self.transposed else x
            x = padded(x.reshape(-1, self.rows, 1, self.width), 1, self.length)
        else:
            x = self.tokens.joined(x, self.axes, self.transposed)
            x = x.reshape(-1, *x.shape[-3:])
            x = padded(x, 1, rounded_up(x.shape[1], _ROWS))
        return padded(x, 3, self._stored_width).astype(dtype)

    @property
    def _stored_width(self) -> int:
        """The width in global memory. Copies add zeros to a short width, up to the width in shared
        memory.
        """
        short = self.width % 8 == 0 and self.width <= mosaic.WARPGROUP
        return self.width if short else self.features

    @property
    def written(self) -> tuple[int, ...]:
        """The shape of the array that a kernel writes."""
        if self.tokens is None:
            places = math.prod(self.layout.shape(self.axes))
            return places, self.length, 1, self.features
        elements = math.prod(self.layout.shape(tuple(self._others)))
        heads = self.layout.grid[HEAD] * self.tokens.group
        return elements, rounded_up(self.tokens.count, _ROWS), heads, self._stored_width

    def blocks(self, x: Any) -> Any:
        """Turns what the kernel wrote into blocks, with the axes of the grid in front."""
        sizes = {a: self.layout.grid[a] for a in self.axes}
        x = x[..., : self.width]
        if self.tokens is not None:
            x = x[:, : self.tokens.count]
            x = x.reshape(*[sizes[a] for a in self._others], *x.shape[1:])
            return self.tokens.cut(x, self.axes, sizes, self.transposed)
        x = x[:, : self.rows, 0].reshape(*sizes.values(), self.rows, self.width)
        return jnp.swapaxes(x, -1, -2) if self.transposed else x

    def copies(self, count: int) -> int:
        """How many copies a tile of so many rows takes: one for each head in it."""
        if self.tokens is None or self.tokens.group == 1:
            return 1
        return max(count // self.tokens.block, 1)

    def _pieces(
        self, places: Places, other: Any, start: Any, count: int
    ) -> Iterator[tuple[Any, tuple, int, int]]:
        """Lists the copies of a tile. Each is given by whether its rows are in the block, where
        they lie, its first row in the tile, and the number of rows.
        """
        # A slice may end beyond the array. Pallas does not check that if the start is not known
        # while tracing, so the zero is computed.
        zero = 0 if self._stored_width == self.features else lax.mul(jnp.int32(0), jnp.int32(1))
        all_features = mosaic.ds(zero, self.features)
        if self.tokens is None:
            where = (places.place(self.axes, other), mosaic.ds(start, count))
            yield True, (*where, 0, all_features), 0, count
            return
        at, block, group = places.with_other(other), self.tokens.block, self.tokens.group
        element = places.place(self._others, other)
        # A single block may have any length, and the compiler asks for a multiple.
        single = self.layout.grid[self.axis] == 1
        first = jnp.int32(0) if single else at[self.axis] * jnp.int32(block)
        head = at[HEAD] * jnp.int32(group)
        if group == 1:
            inside = True if single else start < block
            yield inside, (element, mosaic.ds(first + start, count), head, all_features), 0, count
            return
        n = count // self.copies(count)
        for offset in range(0, count, n):
            heads, token = divided(start + jnp.int32(offset), block)
            inside = heads < group
            heads = jnp.minimum(heads, jnp.int32(group - 1))
            where = (element, mosaic.ds(first + token, n), head + heads, all_features)
            yield inside, where, offset, n

    def copy_in(
        self, ref: Any, places: Places, other: Any, start: Any, tile: Any, barrier: Any
    ) -> None:
        """Has a tile of a block copied into shared memory.

        **Arguments:**

        - `ref`: the array that is `given`.
        - `places`, `other`: where the block is on the grid.
        - `start`: the first row of the tile in the block.
        - `tile`: the shared memory.
        - `barrier`: the barrier at which each copy arrives.
        """
        count = tile.shape[0]
        for _, where, offset, n in self._pieces(places, other, start, count):
            part = tile if n == count else tile.at[mosaic.ds(offset, n)]
            mosaic.copy_in(ref.at[where], part, barrier)

    def store(self, x: Any, ref: Any, places: Places, start: Any, memory: Any) -> None:
        """Writes a tile of a block by way of shared memory. The memory has as many rows, but may
        have fewer columns; then some columns are written at a time.
        """
        (count, width), columns = x.shape, memory.shape[1]
        for first in range(0, width, columns):
            now = x if columns == width else lax.slice(x, (0, first), (count, first + columns))
            mosaic.stage(now, memory)
            for inside, where, offset, n in self._pieces(places, None, start, count):
                if columns != width:
                    where = (*where[:-1], mosaic.ds(where[-1].start + first, columns))
                part = memory if n == count else memory.at[mosaic.ds(offset, n)]
                send = lambda part=part, where=where: mosaic.copy_out(part, ref.at[where])
                send() if inside is True else mosaic.when(inside)(send)
            mosaic.wait_for_copies()


def gathered(ref: Any, first: Any, columns: int, interpreted: bool, diagonal: bool = False) -> Any:
    """Reads a number for each pair of a tile, `[own, columns]`.

    **Arguments:**

    - `ref`: a vector in global memory.
    - `first`: where the number of each row in the first column lies, `[own]`. The next columns have
        the numbers behind it. Otherwise these are the places of all pairs, `[own, columns]`.
    - `diagonal`: whether each row has the numbers of the row before, moved by one. A thread then
        loads most numbers once for several rows.
    """
    if interpreted:
        if first.ndim == 1:
            far = lax.broadcasted_iota(jnp.int32, (WARPGROUP, columns), 1)
            first = lax.broadcast_in_dim(first, far.shape, [0]) + far
        return ref[...][first]
    which = "own" if first.ndim == 1 else "pairs"
    layout, pairs = (mosaic.layout_of(x) for x in (which, "pairs"))
    shape = WARPGROUP, columns
    kind: Any = plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=pairs)  # pyright: ignore

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout), return_type=kind)
    def load(ctx, ref, *more):
        del ctx
        (places,), to = more, pairs.to_mgpu()
        if len(places.shape) == 2:
            return _loaded(ref, to, shape, _of_pairs(ref, places))
        return _loaded(ref, to, shape, _of_rows(ref, to, shape, places, diagonal))

    return load(ref, mosaic.held(first, which))


def _loaded(ref: Any, layout: Any, shape: tuple[int, int], load: Callable[..., Any]) -> Any:
    """The array `[own, columns]` of what a thread loads for each of its registers.

    **Arguments:**

    - `load`: a function that loads a number. It gets the index of a register, and which number of
        the register this is. It also gets the row and the column, counted from the thread's first.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    dtype = ir.MemRefType(ref.type).element_type
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for at, offset in _offsets(layout, shape):
        found = llvm.mlir_undef(ir.VectorType.get((layout.vector_length,), dtype))
        for i in range(layout.vector_length):
            x = load(at, i, *divmod(offset + i, shape[1]))
            found = llvm.insertelement(found, x, _number(i))
        registers[at] = found
    signed = None if isinstance(dtype, ir.FloatType) else True
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def _of_pairs(ref: Any, places: Any) -> Callable[..., Any]:
    """The function `load` of `_loaded` where each pair has a place of its own."""
    from jaxlib.mlir.dialects import llvm

    def load(at, i, row, column):
        del row, column
        return _load(ref, llvm.extractelement(places.registers[at], _number(i)), 0)

    return load


def _of_rows(
    ref: Any, layout: Any, shape: tuple[int, int], places: Any, diagonal: bool
) -> Callable[..., Any]:
    """The same where the numbers of a row lie behind each other. A thread computes one address for
    each row, or only one, and all others differ from it by known numbers.
    """
    from jaxlib.mlir.dialects import arith, llvm

    _, column = next(iter(layout.thread_idxs(shape)))
    column = arith.index_cast(_number(0).type, column)
    of = lambda at: arith.addi(llvm.extractelement(places.registers[at], _number(0)), column)
    rows = {row: of(at) for at, row in _offsets(places.layout, places.shape)}
    loaded = ft.cache(lambda row, far: _load(ref, rows[row], far))

    def load(at, i, row, column):
        del at, i
        return loaded(0, column - row) if diagonal else loaded(row, column)

    return load


def _number(i: int) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    return arith.constant(ir.IntegerType.get_signless(32), i)


def _load(ref: Any, place: Any, far: int) -> Any:
    """Loads a number that lies a known number of places behind a computed one."""
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    dtype, of = ir.MemRefType(ref.type).element_type, mgpu.utils.getelementptr
    return llvm.load(dtype, of(of(mgpu.utils.memref_ptr(ref), [place], dtype), [far], dtype))


def _offsets(layout: Any, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], int]]:
    """The registers of a thread in a layout of an array. With each comes the index of its first
    number in the array, counted from that of the first register.
    """
    strides = layout.tiling.tile_strides((shape[1], 1) if len(shape) == 2 else (1,))
    found = np.ndindex(layout.registers_shape(shape))
    return [(at, sum(i * s for i, s in zip(at, strides))) for at in found]
