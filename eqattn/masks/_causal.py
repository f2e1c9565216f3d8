"""Masks: which key a query may see, as functions of one (query, key) pair.

A mask is a PyTree of call-time data: its arrays are leaves, its sizes and functions are static (so
a mask without arrays has no leaves, and equal masks have equal treedefs). Masks combine with `&`,
`|` and `~`; a bool array operand is wrapped in `Dense`.
"""

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

    - `offset`: a Python int (static), or an int array: scalar or one per batch element `[*b]`.
        With `t` queries at the end of `s` keys and positions from 0, `offset = s - t`.
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
    """Causal, but every query sees the whole prefix: `k < prefix` or `k <= q`.

    **Arguments:**

    - `prefix`: a Python int (static), or an int array: scalar or `[*b]`.
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
    """A mask that depends on the chunks of `size` positions that a query and a key lie in."""

    size: int = eqx.field(static=True)

    uses_distance = True

    def __init__(self, size: Any):
        self.size = as_int(size, "size", least=1, static=True).value

    def operands(self) -> tuple[Operand, ...]:
        return ()


class BlockCausal(AbstractChunks):
    """Causal between chunks of `size` positions, all visible within one: `k//size <= q//size`."""

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return _chunk(k, self.size) <= _chunk(q, self.size)


class ChunkedCausal(AbstractChunks):
    """Causal within chunks of `size` positions, nothing between: `k//size == q//size`, `k <= q`."""

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return (_chunk(k, self.size) == _chunk(q, self.size)) & (k <= q)


def _chunk(x, size):
    if size & (size - 1):
        return x // size
    return jax.lax.shift_right_arithmetic(x, jnp.asarray(size.bit_length() - 1, x.dtype))
