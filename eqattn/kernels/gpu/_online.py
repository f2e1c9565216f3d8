"""The step of the online softmax on registers, which all folds of this device take."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from . import _mosaic as mosaic


_ORIGIN = float(jnp.finfo(jnp.float32).min)
"""Of the exponents of a row that has seen nothing."""


def across(x: Any, like: Any) -> Any:
    """Numbers of rows, spread over the columns of a matrix."""
    return lax.broadcast_in_dim(x, like.shape, [0])


def online_step(
    state: tuple,
    s: Any,
    weights: Sequence[Any],
    factor: Any,
    dtype: Any,
    interpreted: bool,
) -> tuple[Any, Any, Any, Any]:
    """What a tile of logits makes of a Carry, but for the product with its values.

    **Arguments:**

    - `state`: numerator, denominator and maximum of each row, that of powers of two.
    - `s`: the logits `[rows, keys]`.
    - `weights`: the factor on the probabilities in the numerator, if there is one.
    - `factor`: the positive number that makes of logits those of powers of two. In an exponent, the
        product costs nothing.
    - `dtype`: that of the factors of the values.
    - `interpreted`: whether the kernel is interpreted.

    **Returns:** numerator and denominator relative to the new maximum, that maximum, and the
    factors `[rows, keys]` of the values.
    """
    acc, den, top = state
    most = s.max(1)
    now = jnp.maximum(top, most * factor)
    origin = jnp.maximum(now, _ORIGIN)
    scale = jnp.exp2(top - origin)
    p = jnp.exp2(s * factor - across(origin, s))
    den = den * scale + p.sum(1)
    weighted = (p * weights[0] if weights else p).astype(dtype)
    acc = acc * across(scale, acc)
    if interpreted:
        return acc, den, now, weighted
    return mosaic.in_order(acc, den, now, weighted)
