"""Causal masks: a query sees no later key, or none of a later chunk."""

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
