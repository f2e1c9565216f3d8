"""Numbers that each thread of a kernel for Hopper loads at places which it computes.

Pallas loads slices, and so this is written in what Pallas Mosaic GPU is written in. It is as
unstable as what `_mosaic.py` has.
"""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _mosaic as mosaic
from ._operands import WARPGROUP


def gathered(ref: Any, first: Any, step: int, columns: int, interpreted: bool) -> Any:
    """Reads a number for each pair of a tile, `[own, columns]`.

    **Arguments:**

    - `ref`: a vector in global memory.
    - `first`: where the number of each row and of the first column lies, `[own]`. If the places of
        a row are not equally far from each other, it has all of them, `[own, columns]`.
    - `step`: how far the number of the next column lies behind.
    """
    if interpreted:
        if first.ndim == 1:
            far = lax.broadcasted_iota(jnp.int32, (WARPGROUP, columns), 1) * step
            first = lax.broadcast_in_dim(first, far.shape, [0]) + far
        return ref[...][first]
    which = "own" if first.ndim == 1 else "pairs"
    layout, pairs = (mosaic.layout_of(x) for x in (which, "pairs"))
    shape = WARPGROUP, columns
    kind: Any = plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=pairs)  # pyright: ignore

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout), return_type=kind)
    def load(ctx, ref, places):
        del ctx
        return _loaded(ref, places, step, shape, pairs.to_mgpu())

    return load(ref, mosaic.held(first, which))


def _loaded(ref: Any, places: Any, step: int, shape: tuple[int, int], layout: Any) -> Any:
    """Loads the numbers that the registers of a thread hold in a layout. All places of a row differ
    by known numbers, so that a thread computes one address for them.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    i32, dtype = ir.IntegerType.get_signless(32), ir.MemRefType(ref.type).element_type
    vector, start = ir.VectorType.get((layout.vector_length,), dtype), mgpu.utils.memref_ptr(ref)
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    number = lambda n: arith.constant(i32, n)
    within = lambda x, i: llvm.extractelement(x, number(i))
    bases: dict[int, Any] = {}
    if len(places.shape) == 1:
        # A thread has some rows, and of each row the same columns. `offsets` says which, counted
        # from its first row and column.
        _, column = next(iter(layout.thread_idxs(shape)))
        column = arith.muli(arith.index_cast(i32, column), number(step))
        for at, row in offsets(places.layout, places.shape):
            place = arith.addi(within(places.registers[at], 0), column)
            bases[row] = mgpu.utils.getelementptr(start, [place], dtype)
    for at, offset in offsets(layout, shape):
        (row, column), found = divmod(offset, shape[1]), llvm.mlir_undef(vector)
        for i in range(layout.vector_length):
            if bases:
                where = mgpu.utils.getelementptr(bases[row], [step * (column + i)], dtype)
            else:
                place = within(places.registers[at], i)
                where = mgpu.utils.getelementptr(start, [place], dtype)
            found = llvm.insertelement(found, llvm.load(dtype, where), number(i))
        registers[at] = found
    signed = None if isinstance(dtype, ir.FloatType) else True
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def offsets(layout: Any, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], int]]:
    """The registers of a thread in a layout of an array, and the index of the first number of each
    in the array, counted from that of the first register.
    """
    strides = layout.tiling.tile_strides((shape[1], 1) if len(shape) == 2 else (1,))
    found = np.ndindex(layout.registers_shape(shape))
    return [(at, sum(i * s for i, s in zip(at, strides))) for at in found]
