"""Integers of other dtypes than int32: those that do not fit raise."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from . import concrete
from .run_time import raise_if


def within(x: Any, name: str, least: int, most: int) -> Any:
    """Returns an array of integers that are within the bounds.

    Traced integers of at most 32 bits are trusted.

    **Raises:** `ValueError` for known integers that are not, and `TypeError` for traced uint32 and
    uint64. With traced int64 the program raises when it runs.
    """
    known = concrete(x)
    if known is not None:
        check_bounds(known, name, least, most)
        return x
    if x.dtype in (np.uint32, np.uint64):
        raise TypeError(
            f"{name} is traced and of {x.dtype}, and int32 may not hold its values; if it does, "
            f"pass {name}.astype(jnp.int32)."
        )
    if x.dtype != np.int64:
        return x
    kept = jnp.clip(x, least, most)
    return raise_if(kept, kept != x, _message(name, least, most))


def check_bounds(x: np.ndarray, name: str, least: int, most: int) -> None:
    """**Raises:** `ValueError` unless all integers are within the bounds."""
    if x.size and not (least <= int(x.min()) and int(x.max()) <= most):
        wrong = int(x.min() if int(x.min()) < least else x.max())
        raise ValueError(f"{_message(name, least, most)[:-1]}, got {wrong}.")


def _message(name: str, least: int, most: int) -> str:
    reach = "; renumber what is larger" if most >= 2**31 - 1 else ", so that differences fit"
    return f"{name} must be from {_power(least)} to {_power(most)}{reach}."


def _power(n: int) -> str:
    """The text of a bound: as a power of two if it is one, or one less, else in digits."""
    bits = abs(n).bit_length()
    if n == 2**bits - 1 and n:
        return f"2**{bits} - 1"
    return f"{'-' if n < 0 else ''}2**{bits - 1}" if abs(n) == 2 ** max(bits - 1, 0) else str(n)
