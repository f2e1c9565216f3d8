"""Values that are static, known or traced, and the dtypes of sums: what every room may use."""

import enum
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def as_array(x: Any, name: str, least_ndim: int = 0) -> Any:
    """An array as it is; lists and Python scalars as NumPy. NumPy has one of JAX's dtypes."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        if not isinstance(x, list | tuple | bool | int | float):
            raise TypeError(f"{name} must be an array, got {type(x).__name__}.")
        x = np.asarray(x)
    if isinstance(x, np.ndarray | np.generic):
        x = np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))
    if x.ndim < least_ndim:
        raise ValueError(f"{name} must have at least {least_ndim} axis, got shape {x.shape}.")
    return x


def accumulation(*dtypes) -> jnp.dtype:
    """What sums are kept in: float64 if any of the dtypes is, else float32."""
    return jnp.dtype(jnp.float64 if jnp.float64 in dtypes else jnp.float32)


def concrete(value: Any) -> np.ndarray | None:
    """The value of a number or array, or None where it cannot be looked at."""
    if isinstance(value, float | int | np.generic):
        return np.asarray(value)
    if isinstance(value, Tracer) or not isinstance(value, jax.Array | np.ndarray):
        return None
    if isinstance(value, jax.Array) and (value.is_deleted() or not value.is_fully_addressable):
        return None
    return np.asarray(value)


_LARGEST = 2**30  # of a static position: sums of two stay within int32


class Fixed(eqx.Module):
    """A static value in a field that may also hold an array."""

    value: Any = eqx.field(static=True)


def is_known(x: Any) -> bool:
    """Whether NumPy can have the value: no tracer, not spread over other hosts."""
    if isinstance(x, jax.Array):
        return not isinstance(x, jax.core.Tracer) and x.is_fully_addressable
    return isinstance(x, np.ndarray | np.generic | int | float)


def at_most(n: Any, limit: int) -> bool:
    """Whether a size is known to be: one that `jax.export` leaves open is not."""
    return isinstance(n, int) and n <= limit


def iota(n: Any) -> Any:
    """`0, 1, ..., n - 1` as int32; of NumPy, unless `jax.export` leaves `n` open."""
    xp = np if isinstance(n, int) else jnp
    return xp.arange(n, dtype=np.int32)


def value_of(x: Any) -> Any:
    return x.value if isinstance(x, Fixed) else x


class _Constant:
    """A field that may hold a number as `Fixed`, and gives the number itself to who reads it."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return self
        try:
            return value_of(module.__dict__[self.name])
        except KeyError:
            raise AttributeError(f"{owner.__name__} has no {self.name} yet.") from None

    def __set__(self, module: Any, value: Any) -> None:
        module.__dict__[self.name] = value


_Module = TypeVar("_Module", bound=type)


def with_constants(*names: str) -> Callable[[_Module], _Module]:
    """A decorator of an `eqx.Module` class: where a field with one of these names holds a `Fixed`,
    reading it gives the value.

    JAX flattens a module by its `__dict__`, so that it finds the `Fixed`, which has no leaves: no
    gradient, optimiser or weight decay moves the value, and functions under `jax.jit` see a
    number. The fields are converted by `as_constant`, which an array passes unchanged.
    """

    def decorate(cls: _Module) -> _Module:
        for name in names:
            setattr(cls, name, _Constant(name))
        return cls

    return decorate


def constants_of(cls: type) -> list[str]:
    """The fields that `with_constants` named."""
    return [name for c in cls.__mro__ for name, x in vars(c).items() if isinstance(x, _Constant)]


def as_constant(x: Any) -> Any:
    """A Python or NumPy number as a `Fixed` float, anything else as it is."""
    number = isinstance(x, float | int | np.floating | np.integer) and not isinstance(x, bool)
    return Fixed(float(x)) if number else x


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


def eagerly(fn: Callable, x: Any) -> Any:
    """`fn(np or jnp, x)`, computed at once if `x` is known, even under a trace."""
    if isinstance(x, np.ndarray):
        return fn(np, x)
    with jax.ensure_compile_time_eval():
        return fn(jnp, x)


class NotGiven(enum.Enum):
    """The type of `NOT_GIVEN`."""

    NOT_GIVEN = "not given"

    def __repr__(self) -> str:
        return "<not given>"


NOT_GIVEN: Any = NotGiven.NOT_GIVEN
"""An argument that was left out, where None is a value."""


def text_of(value: Any, what: str) -> str:
    """The lower-case text of a string or of a string-valued enum member."""
    value = value.value if isinstance(value, enum.Enum) else value
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a string or an enum member, got {value!r}.")
    return value.lower()


def even_block(tokens: int, most: int = 256) -> int | None:
    """The largest size from `most` down to 64 that divides so many tokens, or None."""
    return next((n for n in range(most, 63, -1) if tokens % n == 0), None)
