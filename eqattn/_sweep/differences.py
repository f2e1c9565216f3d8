"""Blocks that depend on the difference of two places alone: one number for each diagonal.

In a block of `n` keys and `m` queries, number `i` of a window belongs to all pairs with
`query - key = i - (n' - 1)`. Here `n'` is `n`, rounded up to a multiple of `LANES`. So a window of
`window_size(n, m)` numbers stands for `n * m`. The two operations are each other's transposes: one
repeats a number along its diagonal, and the other sums along diagonals.
"""

import functools as ft

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._jax import abstract, ad, batching, compile_eagerly, mlir, Primitive


LANES = 128
"""The lanes of a vector register of a TPU: arrays can be cut along the last axis at multiples of
them. Windows are padded to such a multiple.
"""


def padded(n: int) -> int:
    """A number of tokens, rounded up to a multiple of `LANES`."""
    return -(-n // LANES) * LANES


def window_size(keys: int, queries: int) -> int:
    """How many numbers the window of a block has."""
    return padded(keys) + padded(queries)


def along_diagonals(x: Array, keys: int, queries: int, heads: int) -> Array:
    """Repeats numbers along the diagonals of a block.

    **Arguments:**

    - `x`: the windows of all heads, or one that they share, `[heads|1, window]`.
    - `keys`, `queries`: the sides of the block of one head.
    - `heads`: how many heads the rows of the block have the queries of.

    **Returns:** `[keys, heads * queries]`.
    """
    if x.dtype == jnp.bool_:
        return along_diagonals(x.astype(jnp.int32), keys, queries, heads) != 0
    return along_diagonals_p.bind(x, keys=keys, queries=queries, heads=heads)


def _along_diagonals(x, *, keys, queries, heads):
    return repeated(x, padded(keys) - 1, keys, queries, heads)


def repeated(x: Array, first: int, keys: int, queries: int, heads: int) -> Array:
    """`along_diagonals` in ordinary JAX. The number `first` of a window is that of the first key
    and query. A window has at least one number more than a block needs.
    """
    # In a window that is repeated, each repetition starts one number earlier in a row that is
    # shorter by one. So no number is looked up.
    windows, n = x.shape
    rows = jnp.broadcast_to(x[:, None], (windows, keys, n)).reshape(windows, keys * n)
    rows = rows[:, : keys * (n - 1)].reshape(windows, keys, n - 1)[..., first : first + queries]
    rows = jnp.broadcast_to(rows.transpose(1, 0, 2), (keys, heads, queries))
    return rows.reshape(keys, heads * queries)


def _sums_of_diagonals(y, *, keys, queries, heads, windows):
    fn = ft.partial(_along_diagonals, keys=keys, queries=queries, heads=heads)
    like = abstract(y, (windows, window_size(keys, queries)), y.dtype)
    return jax.linear_transpose(fn, like)(y)[0]


def _transpose_along(ct, x, **kw):
    return [sums_of_diagonals_p.bind(ct, windows=x.aval.shape[0], **kw)]


def _transpose_sums(ct, y, *, windows, **kw):
    del windows
    return [along_diagonals_p.bind(ct, **kw)]


def _define(name, fn, transpose, static):
    primitive = Primitive(name)
    compile_eagerly(primitive, static)
    primitive.def_abstract_eval(
        lambda x, **kw: jax.make_jaxpr(ft.partial(fn, **kw))(x).out_avals[0]
    )
    ad.deflinear2(primitive, transpose)

    def batched(args, dims, **kw):
        return jax.vmap(ft.partial(fn, **kw), dims)(*args), 0

    batching.primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, mlir.lower_fun(fn, multiple_results=False))
    return primitive


_SIZES = ("keys", "queries", "heads")
along_diagonals_p = _define("along_diagonals", _along_diagonals, _transpose_along, _SIZES)
sums_of_diagonals_p = _define(
    "sums_of_diagonals", _sums_of_diagonals, _transpose_sums, (*_SIZES, "windows")
)
