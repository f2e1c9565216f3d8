"""Numbers that each thread of a kernel for Hopper loads at places which it computes.

Pallas loads slices, and so this is written in what Pallas Mosaic GPU is written in. It is as
unstable as what `_mosaic.py` has.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _mosaic as mosaic
from ._operands import WARPGROUP


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
