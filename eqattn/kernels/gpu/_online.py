"""The step of the online softmax on registers, which all folds of this device take."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


_ORIGIN = float(jnp.finfo(jnp.float32).min)
"""Of the exponents of a row that has seen nothing."""


def across(x: Any, like: Any) -> Any:
    """Numbers of rows, spread over the columns of a matrix."""
    return lax.broadcast_in_dim(x, like.shape, [0])


def powers_of_two(x: Any, factor: Any, origin: Any) -> Any:
    """`2^(x factor - origin)` of numbers of rows, or of pairs of a row and a key; None means 1."""
    x = x if factor is None else x * factor
    return jnp.exp2(x - (origin if x.ndim == 1 else across(origin, x)))


def online_step(
    state: tuple,
    s: Any,
    weights: Sequence[Any],
    factor: Any,
    dtype: Any,
    in_order: Callable[..., tuple] | None = None,
    powers: Callable[[Any, Any, Any], Any] = powers_of_two,
) -> tuple[Any, Any, Any, Any]:
    """What a tile of logits makes of a Carry, but for the product with its values.

    **Arguments:**

    - `state`: numerator, denominator and maximum of each row, that of powers of two.
    - `s`: the logits `[rows, keys]`.
    - `weights`: the factor on the probabilities in the numerator, if there is one.
    - `factor`: the positive number that makes of logits those of powers of two. In an exponent, the
        product costs nothing.
    - `dtype`: that of the factors of the values.
    - `in_order`: returns its arguments, which the compiler then computes before what follows.
    - `powers`: `powers_of_two`, or what the device has in its place.

    **Returns:** numerator and denominator relative to the new maximum, that maximum, and the
    factors `[rows, keys]` of the values.
    """
    acc, den, top = state
    most = s.max(1)
    now = jnp.maximum(top, most * factor)
    origin = jnp.maximum(now, _ORIGIN)
    scale = powers(top, None, origin)
    p = powers(s, factor, origin)
    den = den * scale + p.sum(1)
    weighted = (p * weights[0] if weights else p).astype(dtype)
    acc = acc * across(scale, acc)
    return (acc, den, now, weighted) if in_order is None else in_order(acc, den, now, weighted)
