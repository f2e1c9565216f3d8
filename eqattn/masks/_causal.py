"""Causal masks: a query sees no later key, or none of a later chunk.

The mask of local attention: a query sees a window of keys around it.
"""

import functools
import operator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._misc import as_int, unwrap
from .._pairs import Operand
from ._base import AbstractMask, int_operand


class Causal(AbstractMask):
    """A query sees the keys up to its own position: `k <= q + offset`.

    **Arguments:**

    - `offset`: a Python int, which is static, or an int array, scalar or one per batch element
        `[*b]`. The default is 0. If positions begin at 0 and the `t` queries are the last of `s`
        tokens, give `s - t`.
    """

    _offset: Any

    def __init__(self, offset: Any = 0):
        self._offset = as_int(offset, "offset", added=True)

    @property
    def offset(self) -> Any:
        return unwrap(self._offset)

    def operands(self) -> tuple[Operand, ...]:
        return int_operand(self._offset)

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        (offset,) = ids or (self.offset,)
        return k <= (q if ids == () and offset == 0 else q + offset)


class PrefixLM(AbstractMask):
    """A causal mask in which every query also sees the whole prefix: `k < prefix` or `k <= q`.

    **Arguments:**

    - `prefix`: the number of tokens in the prefix: a Python int, which is static, or an int array,
        scalar or `[*b]`.
    """

    _prefix: Any

    def __init__(self, prefix: Any):
        self._prefix = as_int(prefix, "prefix")

    @property
    def prefix(self) -> Any:
        return unwrap(self._prefix)

    def operands(self) -> tuple[Operand, ...]:
        return int_operand(self._prefix)

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        (prefix,) = ids or (self.prefix,)
        return (k < prefix) | (k <= q)


class AbstractChunks(AbstractMask):
    """A mask that depends on the chunks of `size` positions that a query and a key lie in.

    **Arguments:**

    - `size`: the number of positions in a chunk, a static int of at least 1.
    """

    size: int = eqx.field(static=True)

    def __init__(self, size: Any):
        self.size = as_int(size, "size", least=1, static=True).value

    def operands(self) -> tuple[Operand, ...]:
        return ()


class BlockCausal(AbstractChunks):
    """A query sees all keys of its own chunk and of earlier ones: `k//size <= q//size`.

    **Arguments:**

    - `size`: the number of positions in a chunk, a static int of at least 1.
    """

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return _chunk(k, self.size) <= _chunk(q, self.size)


class ChunkedCausal(AbstractChunks):
    """A query sees the keys of its own chunk up to itself: `k//size == q//size` and `k <= q`.

    **Arguments:**

    - `size`: the number of positions in a chunk, a static int of at least 1.
    """

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return (_chunk(k, self.size) == _chunk(q, self.size)) & (k <= q)


def _chunk(x, size):
    # An arithmetic shift is a floor division by a power of two, in one operation per pair.
    if size & (size - 1):
        return x // size
    return jax.lax.shift_right_arithmetic(x, jnp.asarray(size.bit_length() - 1, x.dtype))


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
