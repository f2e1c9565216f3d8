"""Functions of one (query, key) pair and the arrays that travel with them.

A mask and a score are written once, for scalars: the flattened batch index `b`, the query head
`h`, the positions `q` and `k`, and one scalar of each array ("operand") they carry. Strategies,
kernels and the block classification all evaluate that same function.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ._misc import as_array


class Operand(eqx.Module):
    """An array that a mask or score reads at each (query, key) pair.

    **Arguments:**

    - `array`: the array. It has the axes that `axes` names, each of full size or 1.
    - `axes`: the axes of the array: some of `"b"` (all leading batch axes), `"h"` (query head),
        `"t"` (query) and `"s"` (key), in that order.

    **Raises:** `ValueError` for other axes or another order.
    """

    array: Any = eqx.field(converter=lambda x: as_array(x, "array"))
    axes: str = eqx.field(static=True)

    def __check_init__(self) -> None:
        if not isinstance(self.axes, str) or self.axes != "".join(
            a for a in "bhts" if a in self.axes
        ):
            raise ValueError(
                f"axes must be some of 'bhts' (batch, head, query, key), in this order, got "
                f"{self.axes!r} for an array {self.array.shape}; transpose the array to it."
            )


def canonical(
    operand: Operand, batch_shape: Sequence[int], heads: int, t: int, s: int, name: str = "operand"
) -> Array | np.ndarray:
    """An operand as a rank-4 array `[B|1, H|1, T|1, S|1]`, with all batch axes flattened.

    **Raises:** `ValueError` with both shapes if it does not broadcast to `[*batch, h, t, s]`.
    """
    array, axes = operand.array, operand.axes
    full = (*batch_shape, heads, t, s)
    sizes = {"h": heads, "t": t, "s": s}
    tail = [a for a in axes if a != "b"]
    lead = array.shape[: array.ndim - len(tail)]
    rest = array.shape[array.ndim - len(tail) :]
    ok = array.ndim >= len(tail) and len(lead) <= len(batch_shape) and ("b" in axes or not lead)
    padded = (1,) * (len(batch_shape) - len(lead)) + tuple(lead)
    ok = ok and all(n in (1, m) for n, m in zip(padded, batch_shape))
    ok = ok and all(n in (1, sizes[a]) for a, n in zip(tail, rest))
    if not ok:
        raise ValueError(
            f"{name} of shape {tuple(array.shape)} (axes '{axes}') does not broadcast to "
            f"[*batch, heads, queries, keys] = {full}; each axis must be 1 or the full size."
        )
    if all(n == 1 for n in padded):
        flat = (1,)
    elif padded == tuple(batch_shape):
        flat = (math.prod(batch_shape),)
    else:
        xp = np if isinstance(array, np.ndarray) else jnp
        array = xp.broadcast_to(array.reshape(*padded, *rest), (*batch_shape, *rest))
        flat = (math.prod(batch_shape),)
    size = dict(zip(tail, rest))
    return array.reshape(*flat, *(size.get(a, 1) for a in "hts"))


def over_block(fn: Callable, args: Sequence[Array]) -> Array:
    """Evaluates a scalar function at every pair of a block.

    Axes of size 1 are shared: `fn` is not mapped over an axis on which all arguments have size 1.
    Then what depends only on the row, say, is computed once for each row.

    **Arguments:**

    - `fn`: a function of scalars.
    - `args`: arrays `[keys|1, rows|1]`, one for each argument of `fn`.

    **Returns:** `[keys|1, rows|1]`.
    """
    shape = tuple(max((a.shape[i] for a in args), default=1) for i in (0, 1))
    for axis in (1, 0):  # the map over rows is the inner one
        in_axes = tuple(0 if a.shape[axis] > 1 else None for a in args)
        if any(a == 0 for a in in_axes):
            fn = jax.vmap(fn, in_axes)
    squeezed = [a.reshape(tuple(n for n in a.shape if n > 1)) for a in args]
    return jnp.asarray(fn(*squeezed)).reshape(shape)


def scalar_result(fn: Callable, *args: Any) -> Any:
    """The result of a user's function of one pair.

    **Raises:** `TypeError` with the remedy if the function branches on a traced value.
    """
    try:
        return fn(*args)
    except jax.errors.TracerBoolConversionError as e:
        name = getattr(fn, "__qualname__", type(fn).__name__)
        raise TypeError(
            f"{name} asks whether a traced scalar is true: write `&`, `|` and `~` for `and`, `or` "
            "and `not`, and jnp.where(condition, x, y) for `if`."
        ) from e
