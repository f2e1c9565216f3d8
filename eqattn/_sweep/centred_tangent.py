"""Tangents of a mean in one visit, rounded as differences from the mean are.

The output of a row is `num / den`, and its tangent is

    (dnum - (num / den) dden) / den

    num = sum_j p_j v_j        dnum = sum_j p_j ds_j v_j        dden = sum_j p_j ds_j.

Narrow products round `p_j ds_j` in `dnum` and `p_j` in `num`. Where all logits of a row move alike,
`dnum` and `(num / den) dden` nearly cancel, and these errors exceed their difference. However,
every constant `c` satisfies

    dnum = sum_j p_j (ds_j - c) v_j + c num.

The first sum is small where logits move alike, and so are its errors. The second cancels exactly
if `num` is the same sum with the same rounding. So `centred_dot` takes as `c` the mean of `ds` over
a block. It also adds up `num` again, rounded as it is in this visit. After the last visit the mean
of the whole row, `dden / den`, is known. `recentred` then adds what that mean times the two
roundings of `num` differs by.

What is left of the rounding of `num` is multiplied by `c - dden / den`. Sinks count in the mean of
a row, and not in that of a block. So where a visit knows their share of the row, it also counts
them in `c`, as if each block had that share. A visit that returns a Carry does not know of them.

Only evaluation differs from the plain sums. Derivative and transpose are those of the plain sums. A
backward pass knows the mean of a row before the visit, so programs of gradients contain nothing of
this.
"""

import functools as ft
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._jax import ad, batching, compile_eagerly, mlir, Primitive
from .products import batch_in_front, dot


refined_p = Primitive("attention_refined")


def centred_dot(
    ds: Array, p: Array, weights: Array, v: Array, *sinks: Array, products: tuple
) -> list[Array]:
    """The products `(weights * ds) v` and `weights v` `[rows, v]` of one block.

    **Arguments:**

    - `ds`: the tangents of the logits `[keys, rows]`.
    - `p`, `weights`: the probabilities `[keys, rows]`, without and with dropout.
    - `v`: the values `[keys, v]`.
    - `sinks`: the share of the softmax that the sinks of each row have, and this share times the
        tangent of their logsumexp, both `[rows]`. The second may be left out if it is 0, and both
        where there are no sinks.
    - `products`: keyword arguments of `dot`, as sorted pairs.
    """
    plain = dot(weights * ds, v, (0, 0), **dict(products))
    kw = dict(exact=_about_block_mean, count=2, products=products, lead=0)
    return refined_p.bind(plain, ds, p, weights, v, *sinks, **kw)


def recentred(dnum: Array, dden: Array, again: Array, num: Array, den: Array) -> Array:
    """Corrects `dnum`, which is relative to the numerator `again`, to be relative to `num`. The two
    numerators differ only by rounding.
    """
    kw = dict(exact=_about_row_mean, count=1, products=(), lead=0)
    return refined_p.bind(dnum, dden, again, num, den, **kw)[0]


def _about_block_mean(plain, ds, p, weights, v, *sinks, **kw):
    del plain
    mean = _mean((p * ds).sum(0), p.sum(0))
    if sinks:
        share, *moved = sinks
        mean = sum(moved, mean * (1 - share))
    off, again = dot(weights * (ds - mean[None]), v, (0, 0), **kw), dot(weights, v, (0, 0), **kw)
    return [off + mean[:, None] * again, again]


def _about_row_mean(dnum, dden, again, num, den):
    return [dnum + (num - again) * _mean(dden, den)[..., None]]


def _mean(total: Array, weight: Array) -> Array:
    """A mean, which is 0 where the sum of the weights is 0."""
    return total / jnp.where(weight == 0, 1, weight)


# The primitive takes a plain result and further operands. It evaluates `exact` of them instead, and
# returns `count` results, vectorised over `lead` axes. Its first result has the derivative of the
# plain one, that is 1, and the others have none.


def evaluate_refined(*args, exact: Callable, count: int, products: tuple, lead: int):
    """What the primitive returns, by operations that are no primitives of this library."""
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
mlir.register_lowering(refined_p, mlir.lower_fun(evaluate_refined, multiple_results=True))
