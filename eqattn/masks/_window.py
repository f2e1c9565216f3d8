"""The mask of local attention: a query sees a window of keys around it."""

import functools
import operator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._misc import as_int
from .._pairs import Operand
from ._base import AbstractMask


def _side(size: Any, name: str) -> int | None:
    """A side of a window. **Raises:** `ValueError` for one that lies beyond the query, with the
    mask that has it, as a call of flash-attn may have such sides.
    """
    if size is None:
        return None
    if isinstance(size, jax.Array):
        raise TypeError(
            f"{name} of a SlidingWindow is a static int, got {size!r}; a function may close over a "
            "size that is traced, and blocks are skipped all the same: "
            "Causal() & MaskFn(lambda b, h, q, k: q - k <= left)."
        )
    size = as_int(size, name, static=True).value
    if size < 0:
        beyond = (
            f"keys from {-size} after the query on are ~Causal({-size - 1})"
            if name == "left"
            else f"keys up to {-size} before the query are Causal({size})"
        )
        raise ValueError(
            f"{name} must be at least 0, got {size}. No bound is None (-1 in flash-attn); {beyond}."
        )
    return size


class SlidingWindow(AbstractMask):
    """A query sees itself, `left` keys before it and `right` after: `-right <= q - k <= left`.

    **Arguments:**

    - `left`, `right`: static ints of at least 0, both inclusive; None means no bound on that side.
        Where flash-attn has a negative right side, `-w`, the keys end `w` before the query: these
        are `Causal(-w)`. Those of a negative left side begin `w` after it: `~Causal(w - 1)`.
    - `sinks`: the number of first keys that every query sees, on both sides of the window. The
        default is 0. `&` with another mask (`Causal()`) still hides them where that mask does.

    **Raises:** `ValueError` for negative sizes, `TypeError` for sizes that are no ints.
    """

    left: int | None = eqx.field(static=True)
    right: int | None = eqx.field(static=True)
    sinks: int = eqx.field(static=True)

    def __init__(self, left: Any, right: Any, sinks: Any = 0):
        self.left, self.right = _side(left, "left"), _side(right, "right")
        self.sinks = as_int(sinks, "sinks", least=0, static=True).value

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        # Keys below `sinks` are visible anyway, so that clamping the key to `sinks` in the distance
        # changes no result. It makes bounds exact. A block that holds sinks and later keys then has
        # the distances of the later keys only. It is full where these are within the window.
        distance = q - (jnp.maximum(k, self.sinks) if self.sinks else k)
        terms = [] if self.left is None else [distance <= self.left]
        terms += [] if self.right is None else [distance >= -self.right]
        inside = functools.reduce(operator.and_, terms, jnp.asarray(True))
        return (k < self.sinks) | inside if self.sinks else inside
