"""Numbers that vary only with keys, or only with rows, beside a window of logits.

On the side along which vector registers have lanes, such numbers are a row, which costs nothing to
repeat. On the other side each number must be in all lanes. Units for transposes bring them there
once for a block. The compiler would do it again for each window, number by number.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ..._jax import Literal
from ._products import LANES


class Sides:
    """The part of an `Evaluation` that knows numbers of keys alone, and numbers of rows alone."""

    program: Any
    window: tuple[slice, slice] | None
    done: dict
    value: Callable[..., Any]
    block: Callable[..., Any]
    turned = False
    """Whether windows are `[rows, keys]`, and not `[keys, rows]`."""

    def from_side(self, key: Any, of_keys: bool, row: Callable[[bool], Any]) -> Any:
        """The window of numbers that vary only with keys, or only with rows.

        **Arguments:**

        - `key`: what identifies the numbers.
        - `of_keys`: whether they vary with keys.
        - `row`: a function that returns them as a row, given whether that is a transpose.
        """
        assert self.window is not None
        part, other = self.window if of_keys else self.window[::-1]
        upright = of_keys != self.turned
        if ("side", key) not in self.done:
            x = row(of_keys)
            boolean = x.dtype == jnp.bool_
            x = x.astype(jnp.int32) if boolean else x
            self.done["side", key] = (in_lanes(x) if upright else x), boolean
        x, boolean = self.done["side", key]
        x = columns(x, part, other.stop - other.start) if upright else x[:, part]
        return x != 0 if boolean else x

    def repeated_keys(self, v: Any) -> Any:
        """The window of numbers `[keys]`, which all rows have."""
        x = self.value(v)
        if x.dtype != jnp.bool_:
            return self.from_side(v, True, lambda _: x.reshape(1, -1))
        # The compiler fails to make a row of booleans.
        return self.from_side(v, True, lambda _: x.astype(jnp.int32).reshape(1, -1)) != 0

    def bounds(self, eqn: Any) -> tuple[Any, Any] | None:
        """Turns a comparison of `a - b` with a number `n` into one of `a - n` and `b`. It is None
        for other comparisons.

        See rule 9 of `_program.py`.
        """
        if (comparison := eqn.primitive) not in _BOUNDS or not isinstance(eqn.invars[1], Literal):
            return None
        diff, n = eqn.invars[0], int(eqn.invars[1].val)
        made = self.program.maker(diff)
        if made is None or made.primitive is not lax.sub_p or diff.aval.dtype != jnp.int32:
            return None
        a, b = made.invars
        if 1 not in a.aval.shape or not moves_bound(comparison, n):
            return None
        of_keys = a.aval.shape[1] == 1
        row = lambda flip: moved(comparison, self.value(a, flip), n)
        return self.from_side((a, comparison, n), of_keys, row), self.block(b)


def in_lanes(row: Array | np.ndarray) -> Array:
    """Numbers `[1, n]` as columns, `[n, LANES]`."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def columns(x: Array, part: slice, width: int) -> Array:
    """A part of what `in_lanes` returns, as columns `[part, width]`."""
    if width % LANES:
        return jnp.broadcast_to(x[part, :1], (part.stop - part.start, width))
    return jnp.concatenate([x[part]] * (width // LANES), 1)


_BOUNDS = {lax.le_p: (1, jnp.maximum, -(2**31)), lax.ge_p: (-1, jnp.minimum, 2**31 - 1)}
"""For each comparison with a bound: its sign, and how the other side is kept in range."""


def moves_bound(comparison: Any, n: int) -> bool:
    """Whether `a - b <= n`, or `>=`, is `a - n <= b` by `moved`, whatever the integers `a` and `b`.

    A bound of the other sign would count a saturated number as within it.
    """
    return n * _BOUNDS[comparison][0] >= 0


def moved(comparison: Any, a: Array, n: int) -> Array:
    """The difference `a - n`, saturated, of integers of 32 bits."""
    _, saturate, limit = _BOUNDS[comparison]
    return saturate(a, np.int32(limit + n)) - np.int32(n)
