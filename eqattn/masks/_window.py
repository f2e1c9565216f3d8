"""Windows."""

import functools
import operator
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from .._misc import as_int
from .._pairs import Operand
from ._base import AbstractMask


class SlidingWindow(AbstractMask):
    """A query sees `left` keys before it and `right` after it: `-right <= q - k <= left`.

    **Arguments:**

    - `left`, `right`: ints >= 0, both inclusive; None is unbounded.
    - `sinks`: the first `sinks` keys are visible to every query, on both sides of the window. `&`
        with another mask (`Causal()`) still hides them where that mask does.

    **Raises:** `ValueError` for negative sizes, `TypeError` for sizes that are no ints.
    """

    left: int | None = eqx.field(static=True)
    right: int | None = eqx.field(static=True)
    sinks: int = eqx.field(static=True)

    def __init__(self, left: Any, right: Any, sinks: Any = 0):
        self.left = None if left is None else as_int(left, "left", least=0, static=True).value
        self.right = None if right is None else as_int(right, "right", least=0, static=True).value
        self.sinks = as_int(sinks, "sinks", least=0, static=True).value

    @property
    def uses_distance(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.left is not None or self.right not in (None, 0)

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        # Clamping the key leaves the result as it is and makes the bounds of a block exact.
        distance = q - (jnp.maximum(k, self.sinks) if self.sinks else k)
        terms = [] if self.left is None else [distance <= self.left]
        terms += [] if self.right is None else [distance >= -self.right]
        inside = functools.reduce(operator.and_, terms, jnp.asarray(True))
        return (k < self.sinks) | inside if self.sinks else inside
