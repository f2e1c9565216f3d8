"""The step of the online softmax on registers, which all folds of this device take."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


_ORIGIN = -(2.0**30)
"""The least origin of exponents, such as that of a row that has seen nothing.

The product of a logit and `factor` is not rounded in an exponent, while it is in its origin. Where
both are below -2^31, their difference may be 128, and a power of two infinite. With this origin,
such logits are as masked. They are those of rows that a bias hides, as one of -1e10 for padding.
"""


def across(x: Any, like: Any) -> Any:
    """Numbers of rows, spread over the columns of a matrix."""
    return lax.broadcast_in_dim(x, like.shape, [0])


def powers_of_two(x: Any, factor: Any, origin: Any) -> Any:
    """Computes `2^(x factor - origin)`. The numbers `x` belong to rows, or to pairs of a row and a
    key. None stands for a factor of 1.
    """
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
    """Updates a Carry by a tile of logits, except for the product with the values of the tile.

    **Arguments:**

    - `state`: numerator, denominator and maximum of each row. The maximum is in units of `log 2`.
    - `s`: the logits `[rows, keys]`.
    - `weights`: the factor on the probabilities in the numerator, if there is one.
    - `factor`: the positive number by which logits are multiplied to be in units of `log 2`. In an
        exponent, this product costs nothing.
    - `dtype`: the dtype in which the probabilities multiply the values.
    - `in_order`: a function that returns its arguments. The compiler then computes these before
        what follows.
    - `powers`: `powers_of_two`, or a faster function of the device.

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
