"""Tangents of a mean in one visit, with the rounding of differences from the mean.

The tangent of `num / den` is `(dnum - num / den * dden) / den`, with `num = sum p v`,
`dnum = sum p ds v` and `dden = sum p ds`. Narrow products round `p ds` in `dnum` and `p` in `num`:
where all logits of a row move alike, these errors exceed the difference. But for any `c`,
`dnum = sum p (ds - c) v + c num`, and with that very `num`, as it is rounded, `c num` cancels
exactly. So a block takes its own mean of `ds` as `c`, and what is left over after the last visit,
where the mean of the row is known, is the rounding of `num` times that mean.

Only evaluation differs from the plain sums. Derivative and transpose are theirs, as a gradient has
its row's mean before the visit: the programs of gradients hold nothing of this.
"""

import functools as ft
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._jax import ad, batching, compile_eagerly, mlir, Primitive
from .products import batch_in_front, dot


refined_p = Primitive("attention_refined")


def centred_dot(ds: Array, p: Array, weights: Array, v: Array, products: tuple) -> list[Array]:
    """`(weights * ds) v` and `weights v`, `[rows, v]`, of a block of tangents of logits `[keys,
    rows]` and values `[keys, v]`.
    """
    plain = dot(weights * ds, v, (0, 0), **dict(products))
    kw = dict(exact=_about_block_mean, count=2, products=products, lead=0)
    return refined_p.bind(plain, ds, p, weights, v, **kw)


def recentred(dnum: Array, dden: Array, again: Array, num: Array, den: Array) -> Array:
    """`dnum`, which goes with the numerator `again`, as what goes with `num`: both are the same but
    for rounding.
    """
    kw = dict(exact=_about_row_mean, count=1, products=(), lead=0)
    return refined_p.bind(dnum, dden, again, num, den, **kw)[0]


def _about_block_mean(plain, ds, p, weights, v, **kw):
    del plain
    mean = _mean((p * ds).sum(0), p.sum(0))
    off, again = dot(weights * (ds - mean[None]), v, (0, 0), **kw), dot(weights, v, (0, 0), **kw)
    return [off + mean[:, None] * again, again]


def _about_row_mean(dnum, dden, again, num, den):
    return [dnum + (num - again) * _mean(dden, den)[..., None]]


def _mean(total: Array, weight: Array) -> Array:
    return total / jnp.where(weight == 0, 1, weight)


def _evaluate(*args, exact: Callable, count: int, products: tuple, lead: int):
    del count
    f = ft.partial(exact, **dict(products))
    for _ in range(lead):
        f = jax.vmap(f)
    return f(*args)


def _jvp(primals, tangents, *, count, **kw):
    ys = refined_p.bind(*primals, count=count, **kw)
    return ys, [tangents[0], *[ad.Zero(jax.typeof(y)) for y in ys[1:]]]


def _transpose(cts, *args, **kw):
    return [cts[0], *[None] * (len(args) - 1)]


def _batch(args, dims, **kw):
    ys, dim = batch_in_front(refined_p, args, dims, **kw)
    return ys, [dim] * len(ys)


_STATIC = ("exact", "count", "products", "lead")
refined_p.multiple_results = True
compile_eagerly(refined_p, _STATIC)
refined_p.def_abstract_eval(lambda plain, *args, count, **kw: [plain] * count)
ad.primitive_jvps[refined_p] = _jvp
ad.primitive_transposes[refined_p] = _transpose
batching.primitive_batchers[refined_p] = _batch
mlir.register_lowering(refined_p, mlir.lower_fun(_evaluate, multiple_results=True))
