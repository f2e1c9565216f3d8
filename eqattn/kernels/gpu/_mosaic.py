"""The unstable API that kernels for NVIDIA GPUs are written in, in one place.

Pallas says of Mosaic GPU that it can change weekly. What differs between versions of JAX, and what
its interpreter cannot do, is told apart here and nowhere else.
"""

import functools as ft
import threading
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ._operands import WARPGROUP as WARPGROUP
from ._operations import Native, PLAIN


PIECE = 32
"""How many columns of a tile are computed at once, pair by pair. Of fewer, few registers spill
outside of loops, and a kernel takes many times as long to trace."""

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
    """Shared memory for matrices that tensor cores read, or that are widened for them: tiles of 8
    rows of 128 bytes, or of 64 or 32 where rows are no multiple of that.

    **Arguments:**

    - `summed`: the number of rows, if a product sums over them. They must be as many as a row of a
        tile has numbers, or a multiple. Both sides of a product have the same tiles.
    """
    size = jnp.dtype(dtype).itemsize
    fits = lambda n: shape[-1] * size % n == 0 and summed * size % n == 0
    width = next(n for n in (128, 64, 32) if fits(n))
    tiles = _Tiling((8, width // size)), _Swizzle(width)
    return SMEM(shape, dtype, transforms=tiles)


def load(ref: Any, which: str) -> Any:
    """What a warpgroup's threads hold of a block of `"pairs"`, of its first axis, which is the
    program's `"own"`, or of the `"other"`.
    """
    layout: Any = _LAYOUTS[which]
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]


def held(x: Any, which: str) -> Any:
    """The same array, held as `load` says."""
    return plgpu.layout_cast(x, _LAYOUTS[which])


def iota(shape: tuple[int, int], axis: int) -> Any:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_BLOCK)


def pairs_of(own: Any, other: Any, meanwhile: Any = lambda: None) -> Any:
    """`own other^T` of two matrices in shared memory; `meanwhile()` runs while it is computed."""

    def product(acc):
        plgpu.wgmma(acc, own, other.transpose((1, 0)))
        meanwhile()
        return acc[...]

    shape = (WARPGROUP, other.shape[0])
    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def weighted(acc: Any, p: Any, v: Any, interpreted: bool, meanwhile: Any = lambda: None) -> Any:
    """`acc + p v`, where `p` is in registers and `v` in shared memory.

    The interpreter has no products whose left side is in registers, and none that go on with an
    accumulator: there it is an ordinary product.
    """
    if interpreted:
        new = acc + jnp.dot(p, v[...], preferred_element_type=jnp.float32)
        meanwhile()
        commit_smem()  # it was read as by threads, not as by the tensor cores
        return new

    def product(ref):
        plgpu.wgmma(ref, p, v)
        meanwhile()

    return pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(acc))


def store(x: Any, to: Any) -> None:
    """Writes what a warpgroup holds to global memory."""
    plgpu.store(to, x, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]


def stage(x: Any, memory: Any) -> None:
    """Writes what a warpgroup holds to shared memory, for copies to global memory: these write
    whole lines.
    """
    memory[...] = x
    commit_smem()


def wait_for_copies() -> None:
    """Waits until what this warpgroup copies to global memory has been written."""
    plgpu.wait_smem_to_gmem(0)


def clean_together(tile: Any, warpgroup: Any, both: Any) -> None:
    """Replaces what is not finite by 0 in a tile of shared memory that two warpgroups have read.

    **Arguments:**

    - `warpgroup`: which of the two this is. `both`: a barrier for them.
    """

    def meet():
        barrier_arrive(both)
        barrier_wait(both)

    meet()
    for i, part in enumerate(parts_of(tile)):
        when(warpgroup == i % 2)(ft.partial(clean, part))
    commit_smem()
    meet()


def clean(part: Any) -> None:
    """Replaces what is not finite by 0 in a part of a tile."""
    x = load(part, "pairs")
    part[...] = jnp.where(jnp.abs(x) < jnp.inf, x, jnp.zeros_like(x))


def widen(tile: Any, into: Any) -> None:
    """Writes numbers of 8 bits of a tile of shared memory as those of another one, exactly."""
    rows, columns = tile.shape
    n = next(n for n in (128, 64, 32) if columns % n == 0)  # as many as a row of its tiles has
    for i in range(0, rows, WARPGROUP):
        for j in range(0, columns, n):
            at = ds(i, WARPGROUP), ds(j, n)
            x = load(tile.at[at], "pairs")
            if jnp.issubdtype(x.dtype, jnp.floating):  # of which the compiler has no other way
                x = x.astype(jnp.float16).astype(jnp.float32)
            into[at] = x.astype(into.dtype)


def parts_of(tile: Any) -> list[Any]:
    """A tile of shared memory in parts that registers have room for."""
    n = WARPGROUP
    return [tile.at[:, ds(i * n, n)] for i in range(tile.shape[1] // n)]


def piecewise(of: Any, columns: int) -> list[Any]:
    """Results `[rows, columns]` of a function of the first column of a piece, which gives them some
    columns at a time. The compiler keeps the order in which it is told to compute. Of a whole tile,
    an operation after the other would leave what is between them in registers.

    **Arguments:**

    - `of`: the results for `PIECE` columns from one on, all those of a row among them.
    """
    pieces = [of(first) for first in range(0, columns, PIECE)]
    return [lax.concatenate(xs, 1) for xs in zip(*pieces)]


def piece(x: Any, first: int) -> Any:
    """A piece of an array `[rows, columns]`."""
    return lax.slice(x, (0, first), (x.shape[0], first + PIECE))


def in_order(*xs: Any) -> tuple:
    """What comes before must not move behind what follows: the compiler would spill."""
    return lax.optimization_barrier(xs)


def anew(i: Any, interpreted: bool) -> Any:
    """The same index, which the compiler takes for another one. What follows from it is computed
    where it is used. Otherwise it would be computed before a loop, as are the addresses of each
    part of a matrix that stays in place, and take up registers in there.
    """
    return i if interpreted else lax.optimization_barrier(i)


def kernel(
    body: Any,
    out: list,
    programs: int,
    name: str,
    scratch: tuple,
    interpreted: bool,
    warpgroups: int = 3,
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


def _instruction(ptx: str, constraints: str, *xs: Any) -> Any:
    """An instruction of the device for each number of some blocks, which LLVM takes as it is.

    **Arguments:**

    - `ptx`: with `$0` for the result.
    - `constraints`: the kinds of registers of the result, with `=`, and of the blocks.
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
    """Whether two predicates hold. LLVM would take `select(x and y, a, b)` apart, and select by one
    and by the other, where the device joins predicates in the comparison itself.
    """
    return _instruction("and.pred $0, $1, $2;", "=b,b,b", x, y)


def native(interpreted: bool) -> Native:
    """What the compiler has of its own, or the interpreter."""
    return PLAIN if interpreted else Native(inverse=_inverse, both=_both)


_interpreting = threading.Lock()


def specialise(program: Any, computing: int, copying: int) -> None:
    """Has two warpgroups compute, and the third one copy what they read.

    **Arguments:**

    - `program`: has the index `warpgroup`, and the methods `compute` and `copy`.
    - `computing`, `copying`: how many registers a thread of either has.
    """

    @when(program.warpgroup < 2)
    def _():
        set_max_registers(computing, action="increase")
        program.compute()

    @when(program.warpgroup == 2)
    def _():
        set_max_registers(copying, action="decrease")
        program.copy()


def share_out(workers: int, compute: Any, copy: Any) -> None:
    """Has each of the first warpgroups `compute(its index)`, and the last one `copy`. Two that
    compute take registers from the one that copies.
    """
    warpgroup = lax.axis_index("warpgroup")

    def begin(run, registers, action):
        if workers > 1:
            set_max_registers(registers, action=action)
        run()

    for i in range(workers):
        when(warpgroup == i)(ft.partial(begin, ft.partial(compute, i), 232, "increase"))
    when(warpgroup == workers)(ft.partial(begin, copy, 40, "decrease"))


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
    """Writes as many rows as `to` has, the first ones, by way of a shared `memory` for some columns
    of all rows.
    """
    rows, n = memory.shape
    for i in range(0, x.shape[1], n):
        memory[...] = lax.slice(x, (0, i), (rows, i + n))
        commit_smem()
        plgpu.copy_smem_to_gmem(memory.at[ds(0, to.shape[0])], to.at[:, ds(i, n)])
        plgpu.wait_smem_to_gmem(0)
