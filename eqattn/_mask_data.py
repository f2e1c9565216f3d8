"""The data that masks hold: static Python ints, or arrays that are leaves."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ._pairs import as_array as as_array, Operand


_LARGEST = 2**30  # of a static position: sums of two stay within int32


class Fixed(eqx.Module):
    """A static value in a field that may also hold an array."""

    value: Any = eqx.field(static=True)


def is_known(x: Any) -> bool:
    """Whether NumPy can have the value: no tracer, not spread over other hosts."""
    if isinstance(x, jax.Array):
        return not isinstance(x, jax.core.Tracer) and x.is_fully_addressable
    return isinstance(x, np.ndarray | np.generic | int | float)


def value_of(x: Any) -> Any:
    return x.value if isinstance(x, Fixed) else x


def as_ids(x: Any, name: str, least_ndim: int = 0) -> Any:
    x = as_array(x, name, least_ndim)
    if not jnp.issubdtype(x.dtype, np.integer):
        raise TypeError(f"{name} must be integers, got {x.dtype}.")
    return x


def as_int(x: Any, name: str, least: int | None = None, static: bool = False) -> Any:
    """A Python int as `Fixed`, an int array as it is."""
    if isinstance(x, int | np.integer) and not isinstance(x, bool):
        if abs(int(x)) > _LARGEST:
            raise ValueError(f"{name} must be within +-2**30, got {x}.")
        if least is not None and x < least:
            raise ValueError(f"{name} must be at least {least}, got {x}.")
        return Fixed(int(x))
    if static:
        raise TypeError(f"{name} must be a Python int, got {x!r}.")
    if isinstance(x, bool | float):
        raise TypeError(f"{name} must be an int or an int array, got {x!r}.")
    return as_ids(x, name)


def int32(x: Any) -> Any:
    return x if x.dtype == np.int32 else eagerly(lambda xp, x: x.astype(np.int32), x)


def int_operand(x: Any) -> tuple[Operand, ...]:
    """The operand of an int per batch element; none if it is static."""
    return () if isinstance(x, Fixed) else (Operand(int32(x), "b"),)


def eagerly(fn: Callable, x: Any) -> Any:
    """`fn(np or jnp, x)`, computed at once if `x` is known, even under a trace."""
    if isinstance(x, np.ndarray):
        return fn(np, x)
    with jax.ensure_compile_time_eval():
        return fn(jnp, x)


def scalar_result(fn: Callable, *args: Any) -> Any:
    """What a user's function of one pair returns.

    **Raises:** `TypeError` with the remedy if it branches on a traced value.
    """
    try:
        return fn(*args)
    except jax.errors.TracerBoolConversionError as e:
        name = getattr(fn, "__qualname__", type(fn).__name__)
        raise TypeError(
            f"{name} asks whether a traced scalar is true: write `&`, `|` and `~` for `and`, `or` "
            "and `not`, and jnp.where(condition, x, y) for `if`."
        ) from e


def count_of(mask: Any) -> int:
    """How many operands a mask has; computes none of them."""
    return len(jax.eval_shape(lambda: [o.array for o in mask.operands()]))
