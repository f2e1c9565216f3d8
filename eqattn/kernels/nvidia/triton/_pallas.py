"""The unstable API that the kernels in Pallas Triton are written in, in one place.

JAX deprecated it in version 0.11 and will remove it. Nothing else in eqattn imports it, and nothing
imports this module before such a kernel is lowered.
"""

import contextlib
import functools as ft
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .._chip import capability
from .._operations import Native
from .._plans import across, powers_of_two


NATIVE = frozenset(("ceil", "cos", "floor", "log1p", "sin"))
"""The operations that the compiler of Pallas Triton takes from NVIDIA's library, which are
accurate.
"""


def native_for(dtype: Any) -> frozenset[str]:
    """`NATIVE` for queries of a dtype. For float32 it has tanh, too: the error of ours is 2^-23 of
    1, also where the result is small, and ours is faster.
    """
    return NATIVE | {"tanh"} if dtype == jnp.float32 else NATIVE


@contextlib.contextmanager
def _deprecated() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


with _deprecated():
    from jax.experimental.pallas import triton


ds = pl.ds
multiple_of = pl.multiple_of
program_id = pl.program_id
when = pl.when


def _entries(lead: Sequence[Any], inside: Any, shape: tuple[int, int], width: int) -> tuple:
    """The indices of the entries of a row, and which of them exist; None if all do."""
    entry = lax.broadcasted_iota(jnp.int32, shape, 1)
    spread = lambda x: lax.broadcast_in_dim(x, shape, [0] * jnp.ndim(x))
    there = None if inside is None else spread(inside)
    if width != shape[1]:
        there = entry < width if there is None else there & (entry < width)
    return (*map(spread, lead), entry), there


def rows(ref: Any, lead: Sequence[Any], inside: Any, shape: tuple[int, int]) -> Any:
    """Rows of a matrix, `[n, m]`, with 0 behind their last entry and for rows that are not inside.

    **Arguments:**

    - `ref`: an array whose last axis is that of the entries.
    - `lead`: the index on each other axis, a number or one for each row.
    - `inside`: which rows there are, bool `[n]`; None if all.
    """
    at, there = _entries(lead, inside, shape, ref.shape[-1])
    with _deprecated():
        if there is None:
            return triton.load(ref.at[at])
        return triton.load(ref.at[at], mask=there, other=jnp.zeros((), ref.dtype))


def entries(ref: Any, at: Sequence[Any], inside: Any = None) -> Any:
    """Entries of an array, one for each index in `at`, whose last one is a vector. There is 0 for
    those that are not `inside`.
    """
    at = tuple(jnp.broadcast_to(jnp.int32(i), at[-1].shape) for i in at)
    with _deprecated():
        if inside is None:
            return triton.load(ref.at[at])
        return triton.load(ref.at[at], mask=inside, other=jnp.zeros((), ref.dtype))


def widened(x: Any, dtype: Any) -> Any:
    """Converts numbers to a dtype that holds them all. The compiler cannot read float8_e4m3fn for
    chips that lack it, so integers are moved about there. In a trial, a loop over a cache then had
    1,900 instructions for an A100, in place of the 720 for an H200; no command counts them again.
    """
    if x.dtype != jnp.float8_e4m3fn or capability() not in ("8.0", "8.6", "8.7"):
        return x.astype(dtype)
    # Four bits of exponent go to where float16 has its lowest ones, and three of the fraction to
    # the highest ones. The product moves the origin of exponents from 7 to 15. It is exact, also
    # where the exponent is 0 in either dtype. All ones are NaN.
    bits = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int16)
    rest = bits & jnp.int16(127)
    y = lax.bitcast_convert_type((rest << jnp.int16(7)) | (bits & jnp.int16(-32768)), jnp.float16)
    y = jnp.where(rest == 127, jnp.float16(jnp.nan), y * jnp.float16(2.0**8))
    return y.astype(dtype)


def put_rows(ref: Any, x: Any, lead: Sequence[Any], inside: Any) -> None:
    """Writes rows of a matrix, with the arguments of `rows`."""
    at, there = _entries(lead, inside, x.shape, ref.shape[-1])
    with _deprecated():
        triton.store(ref.at[at], x, mask=there)


def put(ref: Any, x: Any, at: Sequence[Any], inside: Any) -> None:
    """Writes the entries of an array, those that are `inside`. `at` has an index for each entry on
    every axis of the reference.
    """
    with _deprecated():
        triton.store(ref.at[tuple(at)], x, mask=inside)


def unless_finite(sums: Sequence[Any], again: Callable[[], Any], else_: Any) -> Any:
    """Visits the blocks again if not all sums are finite, and else returns what was found.

    By the products of the first visit, what is not finite reaches all rows, and not only those that
    see it. It is rare, so the loop that keeps it apart is another one. Its tiles have the same
    size, so that the bits of what sees none of it do not change.
    """
    total = ft.reduce(jnp.add, [(x * 0).sum() for x in sums])
    return lax.cond(total == 0, lambda: else_, again)


def product(a: Any, b: Any, axis: int) -> Any:
    """The product of two matrices, summed over axis 1 of `a` and an axis of `b`, in float32. If the
    matrices are float32, their numbers are multiplied without being rounded first.
    """
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (axis,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


def _exponential(before: str, *args: Any) -> Any:
    """Computes a power of two in one instruction, after another one that computes `t` from the
    arguments. The function of the compiler takes four more, for results below the smallest normal
    number. Here such results are 0.
    """
    with _deprecated():
        (y,) = triton.elementwise_inline_asm(
            f"{{ .reg .f32 t; {before}; ex2.approx.ftz.f32 $0, t; }}",
            args=args,
            constraints=",".join(["=f", *["f"] * len(args)]),
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.float32)],
        )
    return y


def _fast_powers_of_two(x: Any, factor: Any, origin: Any) -> Any:
    origin = origin if x.ndim == 1 else across(origin, x)
    if factor is None:
        return _exponential("sub.ftz.f32 t, $1, $2", x, origin)
    factor = jnp.broadcast_to(factor, x.shape)
    return _exponential("fma.rn.ftz.f32 t, $1, $2, $3", x, factor, -origin)


def native(interpreted: bool, names: frozenset[str]) -> Native:
    """The operations that the compiler, or the interpreter, has itself: some by their names, and
    powers of two.
    """
    exp2 = jnp.exp2 if interpreted else ft.partial(_exponential, "mov.f32 t, $1")
    return Native(names, exp2)


def powers(interpreted: bool) -> Callable[[Any, Any, Any], Any]:
    """`powers_of_two`, as the compiler or the interpreter knows it."""
    return powers_of_two if interpreted else _fast_powers_of_two


def kernel(
    body: Callable[..., None],
    out: Sequence[Any],
    programs: int,
    name: str,
    warps: int,
    stages: int,
    interpreted: bool,
    in_place: dict[int, int] | None = None,
) -> Callable[..., list]:
    """A kernel `body(*inputs, *outputs)` on a grid of programs.

    **Arguments:**

    - `warps`: how many warps, of 32 threads each, a program has.
    - `stages`: how many tiles ahead the compiler copies in loops.
    - `in_place`: the inputs that hold an output before it is written, by their indices.
    """

    def entry(*refs):
        body(*refs)

    entry.__name__ = name
    more: dict[str, Any] = {"interpret": True}
    if not interpreted:
        with _deprecated():
            more = {"compiler_params": triton.CompilerParams(num_warps=warps, num_stages=stages)}
    more |= dict(grid=(programs,), name=name, input_output_aliases=in_place or {})
    return pl.pallas_call(entry, out_shape=list(out), **more)
