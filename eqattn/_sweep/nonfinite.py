"""The contract for numbers that are not finite, and the functions that keep it.

1. What is masked may hold NaN or Inf, and it reaches nothing. With any other content there, values
    and gradients of what is visible have the same bits. The gradient of what is masked is exactly
    0.
2. What is visible is never cleaned up. If a key or a value is not finite, each row that sees it is
    NaN as a whole, and no other row is.

Arithmetic does not give this by itself, as `0 * inf` and `0 * nan` are NaN. A masked pair has the
probability 0, yet a product of matrices multiplies it with the rest of its block:

    num_i = sum_j p_ij v_j          p_ij = 0 where row i does not see key j.

One NaN in `v_j` would make all rows of the block NaN, those that do not see it, too. So there are
three rules.

**Values where pairs are masked.** The product reads a finite copy of the values
(`zero_nonfinite`), for which `0 * v = 0`. What the copy left out is told by the *poison*, `[keys]`:
0, or NaN for a key whose value is not finite (`cleaned`). `poisoned` adds it to the logits of
visible pairs only. There it makes the probability NaN, and with it numerator and denominator.

**Values where every pair is visible.** Nothing has to be kept out, so nothing is copied. By itself
the product spoils only the entries of the numerator whose values are not finite. `complete` makes
the whole row NaN, by way of the denominator that divides it.

**Logits.** Masking selects, it does not multiply: a masked logit is replaced by `-inf`, also if it
was NaN. Its derivatives multiply, however. The tangent of `k q` is `dk q + k dq`. So its transpose
multiplies the zero cotangent of a masked logit by `q` and by `k`, and adds the products up over
keys or rows. `masked_dot` and `scaled` have the usual values, and derivatives in which what is not
finite is 0. Nothing visible is lost by it: a row whose logit is NaN or `+inf` is NaN already, and
so are the cotangents of its logits.

One visible number spoils no row: an Inf in a key that makes the logit `-inf`. Its probability is
`exp(-inf) = 0`, as in the plain softmax.

A user's function that is singular at masked pairs has the same trouble, and another remedy: see
`_problem/closed_score.py`. Kernels keep this contract in other ways, and cite this module where
they do.
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from .products import dot


def zero_nonfinite(x: Array) -> Array:
    """Replaces what is not finite by 0, so that a probability of 0 times it is 0."""
    return jnp.where(jnp.isfinite(x), x, 0)


def not_finite(x: Array, precision: Any) -> Array:
    """The poison `[...]` of vectors `x` `[..., n]`: NaN where one holds what is not finite, else 0.

    A sum of all entries is NaN or Inf if an entry is, and times 0 it is NaN then and else 0. A
    product with a matrix of weights takes that sum in one pass; tests of each entry took seven
    kernels of XLA:CPU.
    """
    x = lax.stop_gradient(x)
    # Finite entries must not overflow. The weights are `3 * 2^-15` on average. So a sum of up to
    # `2^15 / 3`, that is 10,922, entries stays in range, even if each is the largest float.
    few = np.where(np.arange(x.shape[-1]) % 2, 2.0**-13, 2.0**-14)
    # There are two equal columns, as XLA:CPU is slow at a product with a single one.
    weights = jnp.asarray(few[:, None].repeat(2, 1), x.dtype)
    return (jnp.einsum("...n,nm->...m", x, weights, precision=precision) * 0)[..., 0]


def cleaned(value: Array, precision: Any) -> list[Array]:
    """Values `[..., n]` with 0 for what is not finite, and their poison `[...]`."""
    return [zero_nonfinite(value), not_finite(value, precision)]


def cleaned_in_kernel(value: Array) -> list[Array]:
    """The same of a block in a kernel, entry by entry: a pattern that kernels recognise."""
    nan_flag = jnp.where(jnp.isfinite(value), 0, jnp.nan).astype(value.dtype)
    return [zero_nonfinite(value), nan_flag.sum(-1)]


def poisoned(
    s: Array, origin: Array, nan_flag: Array | None = None, *, transposed: bool = False
) -> Array:
    """The exponentials `exp(s - origin)` of logits `[keys, rows]`, NaN at the visible pairs of each
    key that is NaN in the `nan_flag`, `[keys]` or `[keys, groups of rows]`. If they are
    `transposed`, logits are `[rows, keys]`, and the `nan_flag` is that of keys.
    """
    origin = origin[:, None] if transposed else origin[None]
    if nan_flag is None:
        return jnp.exp(s - origin)
    if transposed:
        nan_flag = nan_flag[None]
    else:
        nan_flag = nan_flag.reshape(nan_flag.shape[0], -1, 1)
        nan_flag = jnp.broadcast_to(
            nan_flag, (*nan_flag.shape[:2], s.shape[1] // nan_flag.shape[1])
        )
        nan_flag = nan_flag.reshape(s.shape)
    # The selection comes before the exponential. XLA:CPU would repeat a later one for each use.
    return jnp.exp(jnp.where(s == -jnp.inf, s, s - origin + nan_flag))


def complete(num: Array, den: Array, top: Array, axis: int) -> list:
    """Makes the denominator NaN of each row whose numerator has an entry that is not finite. The
    `axis` is that of the entries of one row.
    """
    return [num, den + (num * 0).sum(axis), top]


@ft.partial(jax.custom_jvp, nondiff_argnums=(2,))
def masked_dot(k: Array, q: Array, products: tuple) -> Array:
    """The product `k q`, some of whose results will be masked. In its derivatives, operands that
    are not finite are 0, as the zero cotangent of a masked result must not meet them.
    """
    return dot(k, q, (1, 0), **dict(products))


@masked_dot.defjvp
def _masked_dot_jvp(products, primals, tangents):
    # d(k q) = dk q + k dq, each operand cleaned where it multiplies a tangent.
    (k, q), (dk, dq) = primals, tangents
    both = dot(dk, zero_nonfinite(q), (1, 0), **dict(products)) + dot(
        zero_nonfinite(k), dq, (1, 0), **dict(products)
    )
    return masked_dot(k, q, products), both


@jax.custom_jvp
def scaled(x: Array, scale: Array) -> Array:
    """The product `x * scale`, some of which will be masked. In the derivative for the scale, a sum
    over all of `x`, entries that are not finite are 0.
    """
    return x * scale


@ft.partial(scaled.defjvp, symbolic_zeros=True)
def _scaled_jvp(primals, tangents):
    # d(x scale) = dx scale + x dscale, and only the second multiplies a tangent by `x`.
    (x, scale), (dx, dscale) = primals, tangents
    y = scaled(x, scale)
    parts = [] if isinstance(dx, SymbolicZero) else [dx * scale]
    if not isinstance(dscale, SymbolicZero):
        parts.append(zero_nonfinite(x) * dscale)
    return y, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(y)
