"""The unstable API that kernels for NVIDIA GPUs are written in, in one place.

Pallas says of Mosaic GPU that it can change weekly. Code that depends on the version of JAX, or on
what its interpreter cannot do, is here and in `_gathering.py`, and nowhere else.

The contract of `_sweep/nonfinite.py` in shared memory: tiles in which what is not finite is 0.

By a product, it would reach all rows of a tile, and not only those that see its key.
"""

import functools as ft
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from .._chip import WARPGROUP as WARPGROUP
from .._operations import Native, PLAIN


PIECE = 32
"""How many columns of a tile are computed at once, pair by pair. With fewer columns, fewer
registers would spill outside of loops, but a kernel would take many times as long to trace.
"""

_BLOCK = plgpu.Layout.WGMMA
_LAYOUTS = {"pairs": _BLOCK, "own": _BLOCK.reduce(1), "other": _BLOCK.reduce(0)}

Barrier = plgpu.Barrier
SMEM: Any = plgpu.SMEM
# To type checkers they are abstract in JAX 0.12.
_Tiling: Any = plgpu.TilingTransform
_Swizzle: Any = plgpu.SwizzleTransform
barrier_arrive = plgpu.barrier_arrive
barrier_wait = plgpu.barrier_wait
ds = pl.ds
when = pl.when
copy_in = plgpu.copy_gmem_to_smem
copy_out = plgpu.copy_smem_to_gmem
commit_smem = plgpu.commit_smem
set_max_registers = plgpu.set_max_registers


def matrices(shape: tuple[int, ...], dtype: Any, summed: int = 0) -> Any:
    """Shared memory for matrices that tensor cores read, or that are widened for them. It is cut
    into tiles of 8 rows with 128 bytes each. A row has 64 or 32 bytes instead where vectors are not
    multiples of 128.

    **Arguments:**

    - `summed`: the number of rows, if a product sums over them. It must be a multiple of the
        numbers that a row of a tile has. Both sides of a product have the same tiles.
    """
    size = jnp.dtype(dtype).itemsize
    width = line(shape[-1] * size, summed * size)
    tiles = _Tiling((8, width // size)), _Swizzle(width)
    return SMEM(shape, dtype, transforms=tiles)


def line(*lengths: int) -> int:
    """The bytes of a row of a tile, which divide some lengths in bytes."""
    return next(n for n in (128, 64, 32) if not any(x % n for x in lengths))


def vectors(count: int, length: int, dtype: Any) -> Any:
    """Shared memory for vectors that copies fill. Each begins at a multiple of 128 bytes, as a copy
    must, so it may be longer than `length`. The interpreter does not know that.
    """
    least = 128 // jnp.dtype(dtype).itemsize
    return SMEM((count, -(-length // least) * least), dtype)


def vector(memory: Any, i: Any, length: int) -> Any:
    """One of `vectors`."""
    return memory.at[i, ds(0, length)]


def by_rows(columns: int) -> Any:
    """How 16 rows of a matrix in shared memory, of 16 bits a number, are spread over threads. The
    columns are those of one tile. Two warps have eight rows each, and two more the same ones.
    Unlike the layout of products, this one needs no 64 rows.
    """
    at_once = min(8, columns // 4)  # numbers that a thread reads in one instruction
    rows = 32 * at_once // columns  # rows that a warp reads in one instruction
    more = [(rows, columns)] * (rows < 8)
    tiling = plgpu.Tiling(((16, columns), (8, columns), *more, (at_once,)))
    warps = -5 - 2 * len(more), plgpu.Replicated(2)
    return plgpu.Layout.TILED(tiling, warps, (-3, -2), -1)


def load(ref: Any, which: Any) -> Any:
    """Reads an array into the registers of a warpgroup. The array has a number for each of the
    `"pairs"` of a block, or only for the program's `"own"` side, or for the `"other"`. Or it is
    spread over threads in some other way, as `by_rows` says.
    """
    layout: Any = _LAYOUTS.get(which, which)
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]


def load_transposed(ref: Any) -> Any:
    """Reads an array `[other, own]` as the `"pairs"` of a block."""
    x = load(ref.transpose((1, 0)), plgpu.Layout.WGMMA_TRANSPOSED)
    # Threads exchange numbers of 16 or 32 bits.
    return plgpu.layout_cast(x if x.dtype.itemsize > 1 else x.astype(jnp.int32), _BLOCK)


def held(x: Any, which: str) -> Any:
    """The same array, spread over the threads as by `load`."""
    return plgpu.layout_cast(x, _LAYOUTS[which])


def layout_of(which: str) -> Any:
    """How an array is spread over threads, as by `load`."""
    return _LAYOUTS[which]


def iota(shape: tuple[int, ...], axis: int) -> Any:
    layout = _LAYOUTS["pairs" if len(shape) == 2 else "own"]
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


def pairs_of(*factors: tuple[Any, Any], meanwhile: Any = lambda: None) -> list[Any]:
    """The products `own other^T` of pairs of matrices in shared memory. All are begun before the
    first is waited for, and `meanwhile()` runs while they are computed.
    """

    def products(*sums):
        for total, (own, other) in zip(sums, factors):
            plgpu.wgmma(total, own, other.transpose((1, 0)))
        meanwhile()
        return [total[...] for total in sums]

    shapes = [(WARPGROUP, other.shape[0]) for _, other in factors]
    return pl.run_scoped(products, *(plgpu.WGMMAAccumulatorRef(x, jnp.float32) for x in shapes))


def weighted(
    sums: Sequence[Any],
    factors: Sequence[tuple[Any, Any]],
    interpreted: bool,
    meanwhile: Any = lambda: None,
) -> list[Any]:
    """Adds `p v` to each sum, where `p` is in registers and `v` in shared memory. `meanwhile()`
    runs while they are computed.

    The interpreter lacks products whose left side is in registers, and products that continue an
    accumulator. There they are ordinary products.
    """
    if interpreted:
        product = ft.partial(jnp.dot, preferred_element_type=jnp.float32)
        found = [x + product(p, v[...]) for x, (p, v) in zip(sums, factors)]
        meanwhile()
        commit_smem()  # threads read it, not the tensor cores
        return found

    def products(refs):
        for ref, (p, v) in zip(refs, factors):
            plgpu.wgmma(ref, p, v)
        meanwhile()

    return pl.run_state(products)([plgpu.WGMMAAccumulatorRef.init(x) for x in sums])


def store(x: Any, to: Any) -> None:
    """Writes what a warpgroup holds to global memory."""
    plgpu.store(to, x, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]


def stage(x: Any, memory: Any) -> None:
    """Writes what a warpgroup holds to shared memory. Copies from there to global memory write
    whole lines.
    """
    memory[...] = x
    commit_smem()


def wait_for_copies() -> None:
    """Waits until copies to global memory have read the shared memory. What they write is there
    when the kernel has ended.
    """
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def widen(tile: Any, into: Any) -> None:
    """Converts a tile with numbers of 8 bits, exactly, and writes it to another tile. Both are in
    shared memory.
    """
    rows, columns = tile.shape
    n = line(columns)  # a row of its tiles has so many numbers
    for i in range(0, rows, WARPGROUP):
        for j in range(0, columns, n):
            at = ds(i, WARPGROUP), ds(j, n)
            x = load(tile.at[at], "pairs")
            if jnp.issubdtype(x.dtype, jnp.floating):  # the compiler has no direct way
                x = x.astype(jnp.float16).astype(jnp.float32)
            into[at] = x.astype(into.dtype)


def parts_of(tile: Any) -> list[Any]:
    """Cuts a tile of shared memory into parts that registers have room for."""
    n = WARPGROUP
    return [tile.at[:, ds(i * n, n)] for i in range(tile.shape[1] // n)]


def piecewise(of: Any, columns: int) -> list[Any]:
    """Computes results `[rows, columns]` piece by piece, with some columns at a time. The compiler
    keeps the order in which operations are written. If each were applied to a whole tile, all
    intermediate results would stay in registers.

    **Arguments:**

    - `of`: a function from the first column of a piece to its results, `[rows, PIECE]`.
    """
    pieces = [of(first) for first in range(0, columns, PIECE)]
    return [lax.concatenate(xs, 1) for xs in zip(*pieces)]


def piece(x: Any, first: int) -> Any:
    """A piece of an array `[rows, columns]`."""
    return lax.slice(x, (0, first), (x.shape[0], first + PIECE))


def in_order(*xs: Any) -> tuple:
    """Keeps the compiler from moving what comes before behind what follows, which would spill."""
    return lax.optimization_barrier(xs)


def anew(i: Any, interpreted: bool) -> Any:
    """The same index, which the compiler takes for a new one. So it computes what follows from the
    index where it is used. Otherwise it would compute, for example, the addresses of all parts of a
    matrix before a loop, and hold them in registers.
    """
    return i if interpreted else lax.optimization_barrier(i)


def kernel(
    body: Any,
    out: list,
    programs: int,
    name: str,
    scratch: tuple,
    interpreted: bool,
    warpgroups: int = 2,
) -> Any:
    """A kernel of warpgroups, `body(*inputs, *outputs, *scratch)`, on a grid of programs."""

    def entry(*refs):
        pl.run_scoped(lambda *own: body(*refs, *own), *scratch, collective_axes="warpgroup")

    entry.__name__ = name
    more = {}
    if interpreted:
        more["interpret"] = plgpu.InterpretGPUParams()  # pyright: ignore[reportAttributeAccessIssue]
    return plgpu.kernel(
        entry,
        out_type=out,
        grid=(programs,),
        grid_names=("program",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **more,
    )


def in_place(run: Any, xs: Sequence[Any]) -> list[Any]:
    """The arrays that a kernel has changed, `run(*refs)`, which has no other results."""

    def change(refs):
        run(*refs)

    return pl.run_state(change)(list(xs))


def _instruction(ptx: str, constraints: str, *xs: Any) -> Any:
    """Applies an instruction of the device to each number of some blocks. LLVM takes it as it is.

    **Arguments:**

    - `ptx`: the instruction, with `$0` for its result.
    - `constraints`: the kinds of registers for the result, with `=`, and for the blocks.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    def of_one(*ys):
        return llvm.inline_asm(ys[0].type, ys, ptx, constraints)

    def of_register(*ys):
        if not isinstance(ys[0].type, ir.VectorType):
            return of_one(*ys)
        found = llvm.mlir_undef(ys[0].type)
        for i in range(ir.VectorType(ys[0].type).shape[0]):
            at = arith.constant(ir.IntegerType.get_signless(32), i)
            y: Any = of_one(*(llvm.extractelement(y, at) for y in ys))
            found = llvm.insertelement(found, y, at)
        return found

    kind: Any = plgpu.ShapeDtypeStruct(xs[0].shape, xs[0].dtype, layout=_BLOCK)  # pyright: ignore

    @plgpu.inline_mgpu(arg_types=(_BLOCK,) * len(xs), return_type=kind)
    def apply(ctx, first, *more):
        del ctx
        return first._pointwise(of_register, *more)

    return apply(*(held(x, "pairs") for x in xs))


def _inverse(x: Any) -> Any:
    """`1 / x` within a unit of the last place. The compiler's own division takes ten instructions,
    as it is exact.
    """
    if x.ndim != 2:
        return 1 / x
    return _instruction("rcp.approx.ftz.f32 $0, $1;", "=f,f", x)


def _both(x: Any, y: Any) -> Any:
    """Whether two predicates hold. LLVM would turn `select(x and y, a, b)` into two selections,
    although the device joins predicates in the comparison itself.
    """
    return _instruction("and.pred $0, $1, $2;", "=b,b,b", x, y)


def native(interpreted: bool) -> Native:
    """The operations that the compiler, or the interpreter, has itself."""
    return PLAIN if interpreted else Native(inverse=_inverse, both=_both)


_interpreting = threading.Lock()


def specialise(program: Any) -> None:
    """Has two warpgroups compute. A third one copies what they read, and gives registers to them.

    **Arguments:**

    - `program`: an object with the index `warpgroup`, and the methods `compute` and `copy`.
    """

    @when(program.warpgroup < 2)
    def _():
        set_max_registers(240, action="increase")
        program.compute()

    @when(program.warpgroup == 2)
    def _():
        set_max_registers(24, action="decrease")
        program.copy()


def share_out(computing: Sequence[Any], copying: Sequence[Any]) -> None:
    """Has each warpgroup run one of the functions. If two compute, they take registers from the one
    that copies.
    """
    warpgroup = lax.axis_index("warpgroup")

    def begin(run, registers, action):
        if len(computing) > 1:
            set_max_registers(registers, action=action)
        run()

    for i, run in enumerate(computing):
        when(warpgroup == i)(ft.partial(begin, run, 232, "increase"))
    for i, run in enumerate(copying, len(computing)):
        when(warpgroup == i)(ft.partial(begin, run, 40, "decrease"))


def alone(fn: Any) -> Any:
    """A function of arrays that interprets a kernel, as a callback. All interpreted kernels of a
    process share one memory, and XLA would run two of one program at once.
    """

    def run(*xs):
        compiled = jax.jit(fn)

        def host(*xs):
            with _interpreting:
                return [np.asarray(y) for y in compiled(*map(np.asarray, xs))]

        return jax.pure_callback(host, jax.eval_shape(fn, *xs), *xs)

    return run


def store_some(x: Any, to: Any, memory: Any) -> None:
    """Writes the first rows of `x`, as many as `to` has. They pass through shared `memory`, which
    has room for some columns of all rows.
    """
    rows, n = memory.shape
    for i in range(0, x.shape[1], n):
        memory[...] = lax.slice(x, (0, i), (rows, i + n))
        commit_smem()
        plgpu.copy_smem_to_gmem(memory.at[ds(0, to.shape[0])], to.at[:, ds(i, n)])
        wait_for_copies()


def clean_together(tile: Any, warpgroup: Any, both: Any) -> None:
    """Replaces what is not finite by 0 in a tile of shared memory that two warpgroups have read.

    **Arguments:**

    - `warpgroup`: which of the two this is.
    - `both`: a barrier for both of them.
    """
    meet(both)
    for i, part in enumerate(parts_of(tile)):

        @when(warpgroup == i % 2)
        def _(part=part):
            clean(part)

    commit_smem()
    meet(both)


def meet(both: Any) -> None:
    """Has two warpgroups wait for each other, at a barrier for both of them."""
    barrier_arrive(both)
    barrier_wait(both)


def clean(part: Any) -> None:
    """Replaces what is not finite by 0 in a part of a tile."""
    x = load(part, "pairs")
    part[...] = jnp.where(jnp.abs(x) < jnp.inf, x, jnp.zeros_like(x))


def clean_values(tile: Any, width: int, nan_flag: Any) -> None:
    """Replaces what is not finite by 0 in values that a single warpgroup reads.

    **Arguments:**

    - `tile`: some columns of values `[keys, width]` in shared memory. 16 divides the number of
        keys, which may be fewer than those of the layout of products.
    - `width`: how many columns there are in all.
    - `nan_flag`: shared memory `[keys]`. It gets NaN for a key whose value is not finite, else 0.
    """
    keys, columns = tile.shape
    n = line(2 * width, 2 * keys) // 2
    for k in range(0, keys, 16):
        rows, found = ds(k, 16), jnp.float32(0)
        for i in range(0, columns, n):
            part = tile.at[rows, ds(i, n)]
            x = load(part, by_rows(n))
            fine = jnp.abs(x) < jnp.inf
            found = found + jnp.where(fine, jnp.float32(0), jnp.float32(jnp.nan)).sum(1)
            commit_smem()  # two more warps have the same rows, and have read them now
            part[...] = jnp.where(fine, x, jnp.zeros_like(x))
        store(found, nan_flag.at[rows])
    commit_smem()
