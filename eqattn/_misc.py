"""Helpers that every room may use: checks of arguments, static values, and the dtypes of sums.

A value is *static* if it is part of the program, as a Python number or a shape is. It is *known* if
NumPy can have it while tracing, and *traced* otherwise. Known arrays are checked and computed with
at once.

Integers of other dtypes than int32: those that do not fit raise.

The text of modules, which leaves out what their constructors fill in by themselves.
"""

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer


def late_imports(
    package: str, modules: dict[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package that imports some names when they are asked for.

    **Arguments:**

    - `package`: the `__name__` of the package.
    - `modules`: the module of each of these names, relative to the package, as `"module:name"` if
        it has another one there.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, there = modules[name].partition(":")
        value = getattr(importlib.import_module(f".{module}", package), there or name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *modules})


def as_array(x: Any, name: str, least_ndim: int = 0) -> Any:
    """An array of JAX as it is, and anything else as a NumPy array with one of JAX's dtypes.

    **Arguments:**

    - `x`: an array, a list or tuple of numbers, or a Python number.
    - `name`: the name of the argument, for errors.
    - `least_ndim`: the least number of axes that the array must have.

    **Raises:** `TypeError` for what is no array of numbers or booleans. `ValueError` for integers
    that JAX's dtype does not hold: JAX itself would wrap them around.
    """
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        if not isinstance(x, list | tuple | bool | int | float):
            raise TypeError(f"{name} must be an array, got {type(x).__name__}.")
        x = _from_list(x, name)
    if isinstance(x, np.ndarray | np.generic):
        x = _in_jax_dtype(np.asarray(x), name)
    elif not (isinstance(x, jax.Array) or isinstance(x.dtype, np.dtype)):
        raise TypeError(f"{name} must be an array of NumPy or JAX, got {type(x).__name__}.")
    if x.ndim < least_ndim:
        raise ValueError(f"{name} must have at least {least_ndim} axis, got shape {x.shape}.")
    return x


def _from_list(x: Any, name: str) -> np.ndarray:
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x)):
        raise TypeError(f"{name} must be an array, got a list of arrays; use jnp.stack.")
    try:
        return np.asarray(x)
    except ValueError as e:
        raise ValueError(f"{name} must be an array, got a list of unequal lengths, {x!r}.") from e


def _in_jax_dtype(x: np.ndarray, name: str) -> np.ndarray:
    if x.dtype == object and x.size and all(isinstance(y, int) for y in x.flat):
        raise ValueError(f"{name} must fit an integer dtype, got {x.tolist()}.")
    if x.dtype.kind not in "biufcV" or x.dtype.names:  # "V" includes bfloat16 and float8
        raise TypeError(f"{name} must be an array of numbers or booleans, got {x.dtype}.")
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    if dtype.kind in "iu" and dtype != x.dtype:
        bounds = np.iinfo(dtype)
        check_bounds(x, name, int(bounds.min), int(bounds.max))
    return np.asarray(x, dtype)


def accumulation_dtype(*dtypes) -> jnp.dtype:
    """The dtype that sums are kept in: float64 if any of the dtypes is, else float32."""
    return jnp.dtype(jnp.float64 if jnp.float64 in dtypes else jnp.float32)


def widened(x: Any, *dtypes) -> Any:
    """Floats in the dtype of sums with those of `dtypes`, and anything else as it is.

    The gradient of what is repeated or sent to several devices is a sum. What is widened before
    that has a wide sum, which rounds once, on its way back to `x`. `summed_wide` in `_jax` does the
    same for the tangents of a linear function alone.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x.astype(accumulation_dtype(x.dtype, *dtypes))


def concrete(value: Any) -> np.ndarray | None:
    """The value of a number or array as NumPy's, or None where it is traced or elsewhere. Where
    each process has all of an array, it is known to each.
    """
    if isinstance(value, float | int | np.generic):
        return np.asarray(value)
    if isinstance(value, Tracer) or not isinstance(value, jax.Array | np.ndarray):
        return None
    if isinstance(value, jax.Array):
        here = value.is_fully_addressable or value.is_fully_replicated
        if value.is_deleted() or not here:
            return None
    return np.asarray(value)


def unfolded(x: Any) -> Any:
    """An array of which XLA computes nothing while it compiles, unless it is small.

    XLA evaluates what depends on constants alone, number by number. It took 8 s to sort 2^20
    constants, and 100 s to find the classes of blocks in a mask of 4096 x 4096.
    """
    return x if at_most(x.size, 2**14) else lax.optimization_barrier(x)


REACH = 2**30
"""The bound of positions, which are from -REACH to before REACH; what is added to them is within
+-REACH. The sum or difference of two such numbers is within +-2^31 and does not wrap around.
"""


class Static(eqx.Module):
    """A static value in a field that may also hold an array.

    It has no leaves: its value is part of the tree structure.
    """

    value: Any = eqx.field(static=True)


def is_known(x: Any) -> bool:
    """Whether NumPy can have the value: it is no tracer, and no other host holds a part of it."""
    if isinstance(x, jax.Array):
        return not isinstance(x, Tracer) and x.is_fully_addressable
    return isinstance(x, np.ndarray | np.generic | int | float)


def at_most(n: Any, limit: int) -> bool:
    """Whether a size is known to be at most `limit`; one that `jax.export` leaves open is not."""
    return isinstance(n, int) and n <= limit


def iota(n: Any) -> Any:
    """The numbers `0, 1, ..., n - 1` as int32, as NumPy's unless `jax.export` leaves `n` open."""
    xp = np if isinstance(n, int) else jnp
    return xp.arange(n, dtype=np.int32)


def unwrap(x: Any) -> Any:
    """The value in a `Static`, or anything else as it is."""
    return x.value if isinstance(x, Static) else x


class _Constant:
    """The descriptor of a field that may hold a number as `Static`; reading gives the number."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return self
        try:
            return unwrap(module.__dict__[self.name])
        except KeyError:
            raise AttributeError(f"{owner.__name__} has no {self.name} yet.") from None

    def __set__(self, module: Any, value: Any) -> None:
        module.__dict__[self.name] = value


_Module = TypeVar("_Module", bound=type)


def with_constants(*names: str) -> Callable[[_Module], _Module]:
    """A decorator of an `eqx.Module` class: where a field with one of these names holds a `Static`,
    reading it gives the value.

    JAX flattens a module by its `__dict__`, and so finds the `Static`, which has no leaves. Then no
    gradient, optimiser or weight decay moves the value, and functions under `jax.jit` see a number.
    The fields are converted by `as_constant`, which an array passes unchanged.
    """

    def decorate(cls: _Module) -> _Module:
        for name in names:
            setattr(cls, name, _Constant(name))
        return cls

    return decorate


def as_constant(x: Any) -> Any:
    """A Python or NumPy number as a `Static` float, anything else as it is."""
    number = isinstance(x, float | int | np.floating | np.integer) and not isinstance(x, bool)
    if number and isinstance(x, int) and abs(x) > sys.float_info.max:
        raise ValueError(f"An integer of {x.bit_length()} bits is beyond the range of floats.")
    return Static(float(x)) if number else x


def as_ids(x: Any, name: str, least_ndim: int = 0) -> Any:
    """An array of integers in the dtype that it has, for ids, which are only compared."""
    x = as_array(x, name, least_ndim)
    if not jnp.issubdtype(x.dtype, np.integer):
        raise TypeError(f"{name} must be integers, got {x.dtype} {x.shape}; cast by .astype(int).")
    return x


def as_int32(
    x: Any, name: str, least_ndim: int = 0, least: int = -(2**31), most: int = 2**31 - 1
) -> Any:
    """An array of integers as int32, without any that wraps around.

    Values that are known must be within the bounds. Traced values are trusted where all values of
    their dtype are int32. Traced int64, the default dtype of integers in 64-bit mode, raises when
    the program runs, unless it is within the bounds. Traced uint32 and uint64 are refused.

    **Arguments:**

    - `x`, `name`, `least_ndim`: the array, its name in errors, and the least number of its axes.
    - `least`, `most`: the bounds, both inclusive.

    **Raises:** `ValueError` or `TypeError` with the remedy.
    """
    x = as_ids(x, name, least_ndim)
    if not isinstance(x, jax.Array | np.ndarray):  # a `jax.ShapeDtypeStruct`, say
        return x
    bounds = np.iinfo(x.dtype)
    if bounds.min >= least and bounds.max <= most:
        return int32(x)

    return int32(within(x, name, least, most))


def positions_in_reach(x: Any, name: str, least_ndim: int = 0) -> Any:
    """Positions as int32 within `REACH`, so that sums and differences of two are int32 too."""
    return as_int32(x, name, least_ndim, -REACH, REACH - 1)


def int32_field(name: str) -> Any:
    """A field of int32 arrays.

    Other leaves pass as they are, as trees of axes and of filters hold None or booleans there.
    """

    def convert(x: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray | list):
            return x
        return jnp.asarray(as_int32(x, name))

    return eqx.field(converter=convert)


def as_int(
    x: Any, name: str, least: int | None = None, static: bool = False, added: bool = False
) -> Any:
    """A Python int as a `Static`, and an int array as int32.

    **Arguments:**

    - `x`, `name`: the integer or array, and its name in errors.
    - `least`: the least value that a Python int may have.
    - `static`: whether it must be a Python int.
    - `added`: whether it is added to positions, so that arrays too must be within `REACH`.
    """
    if isinstance(x, int | np.integer) and not isinstance(x, bool):
        if abs(int(x)) > REACH:
            raise ValueError(f"{name} must be within +-2**30, got {x}.")
        if least is not None and x < least:
            raise ValueError(f"{name} must be at least {least}, got {x}.")
        return Static(int(x))
    if static:
        raise TypeError(f"{name} must be a Python int, got {x!r}.")
    if isinstance(x, bool | float):
        raise TypeError(f"{name} must be an int or an int array, got {x!r}.")
    return as_int32(x, name, 0, -REACH, REACH) if added else as_int32(x, name)


def as_size(x: Any, name: str, least: int = 0) -> int:
    """A Python int of at least `least`, from a Python or NumPy integer."""
    return as_int(x, name, least, static=True).value


def as_sizes(x: Any, name: str) -> tuple[int, ...]:
    """A tuple of sizes, from a tuple or list of integers."""
    if not isinstance(x, tuple | list):
        raise TypeError(f"{name} must be a tuple of ints, got {x!r}.")
    return tuple(as_size(n, name) for n in x)


def as_number(x: Any, name: str) -> float:
    """A Python float, from a real number of Python or NumPy."""
    if isinstance(x, bool) or not isinstance(x, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a Python number, got {x!r}.")
    return float(x)


def as_flag(x: Any, name: str) -> bool:
    """A Python or NumPy boolean. **Raises:** `TypeError` for anything else, traced ones too."""
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name} is True or False: it is static. Got {x!r}.")
    return bool(x)


def check_floating(**arrays: Any) -> None:
    """**Raises:** `TypeError` for an array that is not of real floats, by its keyword."""
    for name, x in arrays.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating point, got {x.dtype}; cast it first.")


def check_cap(cap: Any, name: str) -> None:
    """**Raises:** `ValueError` for a soft cap that is known to be none. If it is learned, a step of
    an optimiser may change its sign, on which `c * tanh(x / c)` does not depend.
    """
    known = concrete(cap)
    if known is None:
        return
    learned = not isinstance(cap, int | float)
    if not (np.isfinite(known) & (known != 0) & (learned | (known > 0))).all():
        must = "finite and not 0" if learned else "positive and finite"
        raise ValueError(f"{name} must be {must}, got {known}.")


def as_dtype(dtype: Any, name: str) -> np.dtype:
    """A dtype that JAX has. **Raises:** `TypeError` for what is no dtype, and `ValueError` for a
    dtype of 64 bits that JAX would halve.
    """
    try:
        found = jnp.dtype(dtype)
        if found.kind not in "biufcV" or found.names:
            raise TypeError("no dtype of JAX")
    except (TypeError, ValueError) as e:
        raise TypeError(f"{name} must be a dtype such as jnp.float32, got {dtype!r}.") from e
    check_64_bits(name, found)
    return found


def check_64_bits(name: str, dtype: Any) -> None:
    """**Raises:** `ValueError` for a dtype that JAX would silently halve."""
    if dtype is not None and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"{name}={jnp.dtype(dtype).name} needs the 64-bit mode of JAX, which is off: set "
            "jax.config.update('jax_enable_x64', True), or choose float32."
        )


def int32(x: Any) -> Any:
    """An array of integers cast to int32, at once if it is known."""
    return x if x.dtype == np.int32 else eagerly(lambda xp, x: x.astype(np.int32), x)


def eagerly(fn: Callable, x: Any) -> Any:
    """The result of `fn(np, x)` or `fn(jnp, x)`, computed at once if `x` is known, even under a
    trace.
    """
    if isinstance(x, np.ndarray) or not is_known(x):
        return fn(np if isinstance(x, np.ndarray) else jnp, x)
    with jax.ensure_compile_time_eval():
        return fn(jnp, x)


def even_block(tokens: int, most: int = 256) -> int | None:
    """The largest size from `most` down to 64 that divides the number of tokens, or None.

    Keys of a cache are cut into blocks of such a size, so that the last block needs no padded copy
    of them. Smaller blocks mean more visits, larger ones more keys that are masked. Both bounds
    were chosen by trial. The decoding cases of `python tests/measure bench` show their effect.
    """
    return next((n for n in range(most, 63, -1) if tokens % n == 0), None)


def within(x: Any, name: str, least: int, most: int) -> Any:
    """Returns an array of integers that are within the bounds.

    Traced integers of at most 32 bits are trusted.

    **Raises:** `ValueError` for known integers that are not, and `TypeError` for traced uint32 and
    uint64. With traced int64 the program raises when it runs.
    """
    from ._run_time import raise_if  # which makes a primitive

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


def without_defaults(self: Any, **how: Any) -> Any:
    """The `__pdoc__` of a module, by which Equinox prints it: a constructor call that leaves out
    defaults.

    A constructor that needs no arguments is called with those that were printed so far, and says
    what the next field would be. So a field that follows from another one is left out, too. Else
    the defaults are those of the parameters with the names of fields, and a field without one is
    left out where it is None.

    **Arguments:**

    - `how`: the options of `wadler_lindig.pdoc`, which it passes on.
    """
    if not how["hide_defaults"]:
        return None
    import wadler_lindig as wl  # calls this, so that it is there without being a dependency

    parameters, shown = inspect.signature(type(self)).parameters, {}
    for field in dataclasses.fields(self):
        public = field.name.removeprefix("_")  # as of a property for a field that may be `Static`
        name = public if public in parameters else field.name
        if not field.repr or not hasattr(self, name):
            continue
        value = getattr(self, name)
        if not same_value(value, _default(type(self), field, name, shown)):
            shown[name] = value
    return wl.bracketed(
        begin=wl.TextDoc(f"{type(self).__name__}("),
        docs=wl.named_objs(shown.items(), **how),
        sep=wl.comma,
        end=wl.TextDoc(")"),
        indent=how["indent"],
    )


def _default(cls: Any, field: Any, name: str, given: dict[str, Any]) -> Any:
    """What a constructor makes a field of this public name, if it gets these arguments."""
    parameters = inspect.signature(cls).parameters
    needed = [p for p in parameters.values() if p.default is p.empty and p.kind not in _ANY_NUMBER]
    if not needed and given.keys() <= parameters.keys():
        try:
            return getattr(cls(**given), name)
        except Exception:  # leaves may be any objects, as after `jax.tree.map`
            pass
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return parameters[name].default if name in parameters else None


_ANY_NUMBER = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def same_value(x: Any, y: Any) -> bool:
    """Whether two values are known to be the same, without comparing what arrays hold."""
    try:
        (xs, of_x), (ys, of_y) = jax.tree.flatten(x), jax.tree.flatten(y)
        return of_x == of_y and all(map(_same_leaf, xs, ys))
    except Exception:  # objects of any kind may refuse to be compared
        return False


def _same_leaf(x: Any, y: Any) -> bool:
    arrays = jax.Array | np.ndarray | jax.ShapeDtypeStruct
    if isinstance(x, arrays) or isinstance(y, arrays):
        return x is y
    return type(x) is type(y) and bool(x == y)
