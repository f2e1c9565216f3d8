"""Blocks that depend on the difference of two places alone: one number for each diagonal.

In a block of `n` keys and `m` queries, number `i` of a window belongs to all pairs with
`query - key = i - (n' - 1)`. Here `n'` is `n`, rounded up to a multiple of `LANES`. So a window of
`window_size(n, m)` numbers stands for `n * m`. The two operations are each other's transposes: one
repeats a number along its diagonal, and the other sums along diagonals.

A third operation takes the numbers of all diagonals, and finds those of a block among them. Code
that loads a number at a place that it computes needs no windows.
"""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
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


def cut_diagonals(
    x: Array, start: Array, last: Array | None, keys: int, queries: int, heads: int
) -> Array:
    """Finds the numbers of a block among those of all diagonals, and repeats them along its own.

    **Arguments:**

    - `x`: the numbers of all heads, or those that they share, `[heads|1, n]`.
    - `start`: the index of the number of the first query and the last key.
    - `last`: the last query that is no padding. Queries that pad the block have the numbers of this
        one. None means that there is no padding.
    - `keys`, `queries`, `heads`: as for `along_diagonals`.

    **Returns:** `[keys, heads * queries]`.
    """
    more = () if last is None else (last,)
    return cut_diagonals_p.bind(x, start, *more, keys=keys, queries=queries, heads=heads)


def _cut_diagonals(x, start, *last, keys, queries, heads):
    window = lax.dynamic_slice_in_dim(x, start, keys + queries, axis=1)
    pairs = repeated(window, keys - 1, keys, queries, heads)
    if not last:
        return pairs
    pairs = pairs.reshape(keys, heads, queries)
    padding = lax.dynamic_index_in_dim(pairs, last[0], axis=2)
    pairs = jnp.where(np.arange(queries, dtype=np.int32) <= last[0], pairs, padding)
    return pairs.reshape(keys, -1)


def _jvp_cut(primals, tangents, **kw):
    y, dx = cut_diagonals_p.bind(*primals, **kw), tangents[0]
    if type(dx) is ad.Zero:
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    return y, cut_diagonals_p.bind(dx, *primals[1:], **kw)


def _transpose_cut(ct, x, *at, **kw):
    back = jax.linear_transpose(lambda x: _cut_diagonals(x, *at, **kw), x.aval)
    return [back(ct)[0], *[None] * len(at)]


def _sums_of_diagonals(y, *, keys, queries, heads, windows):
    fn = ft.partial(_along_diagonals, keys=keys, queries=queries, heads=heads)
    like = abstract(y, (windows, window_size(keys, queries)), y.dtype)
    return jax.linear_transpose(fn, like)(y)[0]


def _transpose_along(ct, x, **kw):
    return [sums_of_diagonals_p.bind(ct, windows=x.aval.shape[0], **kw)]


def _transpose_sums(ct, y, *, windows, **kw):
    del windows
    return [along_diagonals_p.bind(ct, **kw)]


def _define(name, fn, static):
    primitive = Primitive(name)
    compile_eagerly(primitive, static)
    primitive.def_abstract_eval(
        lambda *xs, **kw: jax.make_jaxpr(ft.partial(fn, **kw))(*xs).out_avals[0]
    )

    def batched(args, dims, **kw):
        return jax.vmap(ft.partial(fn, **kw), dims)(*args), 0

    batching.primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, mlir.lower_fun(fn, multiple_results=False))
    return primitive


_SIZES = ("keys", "queries", "heads")
along_diagonals_p = _define("along_diagonals", _along_diagonals, _SIZES)
sums_of_diagonals_p = _define("sums_of_diagonals", _sums_of_diagonals, (*_SIZES, "windows"))
cut_diagonals_p = _define("cut_diagonals", _cut_diagonals, _SIZES)
ad.deflinear2(along_diagonals_p, _transpose_along)
ad.deflinear2(sums_of_diagonals_p, _transpose_sums)
ad.primitive_jvps[cut_diagonals_p] = _jvp_cut
ad.primitive_transposes[cut_diagonals_p] = _transpose_cut
