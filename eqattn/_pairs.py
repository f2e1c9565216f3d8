"""Functions of one (query, key) pair and the arrays that travel with them.

A mask and a score are written once, as functions of scalars. These are the flattened batch index
`b`, the query head `h` and the positions `q` and `k`. One number of each array that the mask or
score holds, called an operand, follows. If an array has features, the function receives a vector of
it instead. Strategies, kernels and the block classification all evaluate this same function.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ._jax import Literal, primitives
from ._misc import as_array


POINTWISE = {
    getattr(lax, f"{name}_p")
    for name in (
        "abs add and ceil clamp convert_element_type cos div eq erf exp exp2 expm1 floor ge gt "
        "integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow rem round "
        "rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sqrt square "
        "sub tanh xor"
    ).split()
} | {primitives.add_jaxvals_p}
"""Operations of which a part of the result needs that part of the arguments only."""


class Operand(eqx.Module):
    """An array that a mask or score reads at each (query, key) pair.

    **Arguments:**

    - `array`: the array. It has the axes that `axes` names, each of full size or 1.
    - `axes`: the axes of the array. They are some of `"b"` (all leading batch axes), `"h"` (query
        head), `"t"` (query) and `"s"` (key), in that order, and then perhaps `"f"` (features). With
        features, the mask or score reads a vector `[f]` at each pair, and may multiply vectors. The
        product of a vector of the query and one of the key, `x @ y`, is then a product of matrices
        for a block.

    **Raises:** `ValueError` for other axes or another order.
    """

    array: Any = eqx.field(converter=lambda x: as_array(x, "array"))
    axes: str = eqx.field(static=True)

    def __check_init__(self) -> None:
        if not isinstance(self.axes, str) or self.axes != "".join(
            a for a in "bhtsf" if a in self.axes
        ):
            raise ValueError(
                f"axes must be some of 'bhtsf' (batch, head, query, key, features), in this order, "
                f"got {self.axes!r} for an array {self.array.shape}; transpose the array to it."
            )

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """The shape of what is read at each pair: `(f,)` with features, else `()`."""
        return tuple(self.array.shape[-1:]) if self.axes.endswith("f") else ()

    @property
    def of_pairs(self) -> bool:
        """Whether it is an array with a number for each pair of query and key."""
        return self.axes.endswith("ts") and min(self.array.shape[-2:]) > 1

    @classmethod
    def of_canonical(cls, array: Any) -> "Operand":
        """The operand whose canonical form is this array."""
        return cls(array, "bhtsf"[: array.ndim])


def as_operands(arrays: Any, name: str = "arrays") -> tuple[Operand, ...]:
    """**Raises:** `TypeError`, with the remedy, unless it is a tuple or list of `Operand`s."""
    if not isinstance(arrays, tuple | list):
        raise TypeError(f"{name} must be a tuple of Operands, got {type(arrays).__name__}.")
    for x in arrays:
        if not isinstance(x, Operand):
            raise TypeError(
                f"{name} must be Operands such as Operand(array, 'bh'), which say what the "
                f"axes are, got {type(x).__name__}."
            )
    return tuple(arrays)


def canonical(
    operand: Operand, batch_shape: Sequence[int], heads: int, t: int, s: int, name: str = "operand"
) -> Array | np.ndarray:
    """An operand as an array `[B|1, H|1, T|1, S|1]`, with all batch axes flattened, and then its
    axis of features if it has one.

    **Raises:** `ValueError` with both shapes if it does not broadcast to `[*batch, h, t, s]`.
    """
    array, axes = operand.array, operand.axes
    full = (*batch_shape, heads, t, s)
    sizes = {"h": heads, "t": t, "s": s}
    tail, last = [a for a in axes if a not in "bf"], operand.feature_shape
    ndim = array.ndim - len(last)
    lead, rest = (
        array.shape[: max(ndim - len(tail), 0)],
        array.shape[max(ndim - len(tail), 0) : ndim],
    )
    ok = ndim >= len(tail) and len(lead) <= len(batch_shape) and ("b" in axes or not lead)
    padded = (1,) * (len(batch_shape) - len(lead)) + tuple(lead)
    ok = ok and all(n in (1, m) for n, m in zip(padded, batch_shape))
    ok = ok and all(n in (1, sizes[a]) for a, n in zip(tail, rest))
    if not ok:
        shape, own = tuple(array.shape), len(batch_shape)
        per_row = axes == "hts" and own and shape[:own] == tuple(batch_shape) and ndim == own + 2
        remedy = f", and one per batch element is {(*shape[:own], 1, *shape[own:])}" * per_row
        raise ValueError(
            f"{name} of shape {shape} (axes '{axes}') does not broadcast to "
            f"[*batch, heads, queries, keys] = {full}; each axis must be 1 or the full size"
            f"{remedy}."
        )
    if all(n == 1 for n in padded):
        flat = (1,)
    elif padded == tuple(batch_shape):
        flat = (math.prod(batch_shape),)
    else:
        xp = np if isinstance(array, np.ndarray) else jnp
        array = array.reshape(*padded, *rest, *last)
        array = xp.broadcast_to(array, (*batch_shape, *rest, *last))
        flat = (math.prod(batch_shape),)
    size = dict(zip(tail, rest))
    return array.reshape(*flat, *(size.get(a, 1) for a in "hts"), *last)


def over_block(fn: Callable, args: Sequence[Array]) -> Array:
    """Evaluates a scalar function at every pair of a block.

    Axes of size 1 are shared: `fn` is not mapped over an axis on which all arguments have size 1.
    Then what depends only on the row, say, is computed once for each row.

    **Arguments:**

    - `fn`: a function of scalars and of vectors.
    - `args`: arrays `[keys|1, rows|1]`, or `[keys|1, rows|1, f]` for vectors, one for each argument
        of `fn`.

    **Returns:** `[keys|1, rows|1]`.
    """
    # A length that `jax.export` leaves open differs from 1; it is not known to be more.
    shape = tuple(next((a.shape[i] for a in args if a.shape[i] != 1), 1) for i in (0, 1))
    for axis in (1, 0):  # the map over rows is the inner one
        in_axes = tuple(0 if a.shape[axis] != 1 else None for a in args)
        if any(a == 0 for a in in_axes):
            fn = jax.vmap(fn, in_axes)
    squeezed = [a.reshape(tuple(n for n in a.shape[:2] if n != 1) + a.shape[2:]) for a in args]
    return jnp.asarray(fn(*squeezed)).reshape(shape)


def read_by(jaxpr: Any, result: int) -> set[int]:
    """The arguments of a jaxpr, by index, that one of its results may depend on."""
    found = {x for x in jaxpr.outvars[result : result + 1] if not isinstance(x, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if not found.isdisjoint(eqn.outvars):
            found.update(x for x in eqn.invars if not isinstance(x, Literal))
    return {i for i, x in enumerate(jaxpr.invars) if x in found}


def scalar_result(fn: Callable, names: str, *args: Any) -> Any:
    """The result of a user's function of one pair, which is called with the arguments `names` and
    then the operands.

    **Raises:** `TypeError` with the remedy if the function takes other arguments, or combines
    features of unequal sizes. A branch on a traced value raises it, too. So does a Python number
    that is made of one, and a NumPy array or a list that is read at one.
    """
    name = getattr(fn, "__qualname__", type(fn).__name__)
    try:
        return fn(*args)
    except (jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError) as e:
        raise TypeError(
            f"{name} gives a traced scalar to NumPy or to a list: read `jnp.asarray(array)[i]` "
            "instead of `array[i]`, and call functions of jax.numpy."
        ) from e
    except (TypeError, ValueError) as e:
        plain = isinstance(e, TypeError) and not isinstance(e, jax.errors.JAXTypeError)
        if plain and not _takes(fn, args):
            raise TypeError(
                f"{name} is called as fn({names}), with {len(args)} arguments, and does not take "
                f"these: {e}."
            ) from e
        if isinstance(e, jax.errors.TracerBoolConversionError):
            raise TypeError(
                f"{name} asks whether a traced scalar is true: write `&`, `|` and `~` for `and`, "
                "`or` and `not`, and jnp.where(condition, x, y) for `if`."
            ) from e
        if isinstance(e, jax.errors.ConcretizationTypeError):
            raise TypeError(
                f"{name} makes a Python number of a traced scalar: write `x.astype(s.dtype)` or "
                "`x.astype(jnp.int32)` for `float(x)` and `int(x)`, leave out `.item()`, and call "
                "functions of jax.numpy in the place of those of math."
            ) from e
        features = [x.shape[0] for x in args if jnp.ndim(x) == 1]
        if len(set(features)) > 1:
            raise TypeError(
                f"{name} fails with operands of {' and '.join(map(str, features))} features: "
                f"{e} Give those that it combines, such as [t, f] and [s, f], as many features."
            ) from e
        raise


def _takes(fn: Callable, args: Sequence[Any]) -> bool:
    """Whether a function takes this number of arguments, as far as its signature is known."""
    try:
        inspect.signature(fn).bind(*args)
    except TypeError:
        return False
    except ValueError:
        return True
    return True
