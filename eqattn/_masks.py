"""Masks: which key a query may see, as functions of one (query, key) pair.

A mask is a PyTree of call-time data: its arrays are leaves, its sizes and functions are static (so
a mask without arrays has no leaves, and equal masks have equal treedefs). Masks combine with `&`,
`|` and `~`; a bool array operand is wrapped in `Dense`.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._mask_base import (
    AbstractMask as AbstractMask,
    And as And,
    Dense as Dense,
    Not as Not,
    Or as Or,
    Sparsity as Sparsity,
)
from ._mask_data import (
    as_array,
    as_ids,
    as_int,
    eagerly,
    Fixed,
    int_operand,
    is_known,
    scalar_result,
    value_of,
)
from ._pairs import Operand


if TYPE_CHECKING:
    _PairFn = Callable[[Any, Any, Any, Any], Any] | Callable[..., Any]
else:  # `MaskFn` checks it itself
    _PairFn = Any


class Causal(AbstractMask):
    """A query sees the keys up to its own position: `k <= q + offset`.

    **Arguments:**

    - `offset`: a Python int (static), or an int array: scalar or one per batch element `[*b]`.
        With `t` queries at the end of `s` keys and positions from 0, `offset = s - t`.
    """

    _offset: Any

    def __init__(self, offset: Any = 0):
        self._offset = as_int(offset, "offset")

    @property
    def offset(self) -> Any:
        return value_of(self._offset)

    def operands(self) -> tuple[Operand, ...]:
        return int_operand(self._offset)

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        (offset,) = ids or (self.offset,)
        return k <= (q if ids == () and offset == 0 else q + offset)


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

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        # Clamping the key leaves the result as it is and makes the bounds of a block exact.
        distance = q - (jnp.maximum(k, self.sinks) if self.sinks else k)
        terms = [] if self.left is None else [distance <= self.left]
        terms += [] if self.right is None else [distance >= -self.right]
        inside = functools.reduce(operator.and_, terms, jnp.asarray(True))
        return (k < self.sinks) | inside if self.sinks else inside


class Segments(AbstractMask):
    """A query sees the keys of its own segment. An id below 0 is padding: it sees nothing and
    nothing sees it.

    **Arguments:**

    - `q_ids`: int `[*b, t]`. `kv_ids`: int `[*b, s]`, by default the queries'.
    """

    q_ids: Any
    kv_ids: Any

    def __init__(self, q_ids: Any, kv_ids: Any = None):
        self.q_ids = as_ids(q_ids, "q_ids", least_ndim=1)
        self.kv_ids = self.q_ids if kv_ids is None else as_ids(kv_ids, "kv_ids", least_ndim=1)

        dtypes = self.q_ids.dtype, self.kv_ids.dtype
        if len({d.kind for d in dtypes}) > 1:
            raise TypeError(f"q_ids and kv_ids must both be signed or unsigned, got {dtypes}.")

    def operands(self) -> tuple[Operand, ...]:
        # Equal ids are `low <= high` both ways. With padding out of reach on either side, a block's
        # bounds are those of its segments alone, wherever it holds padding.
        dtype = np.promote_types(self.q_ids.dtype, self.kv_ids.dtype)
        out_of_reach = np.iinfo(dtype).max, np.iinfo(dtype).min
        operands = []
        for ids, axes in ((self.q_ids, "bt"), (self.kv_ids, "bs")):
            for limit in out_of_reach:
                x = eagerly(lambda xp, x: _move_padding(xp, x.astype(dtype), limit), ids)
                operands.append(Operand(x, axes))
        return tuple(operands)

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        q_low, q_high, k_low, k_high = ids
        return (q_low <= k_high) & (k_low <= q_high)


def _move_padding(xp, ids, limit):
    return ids if ids.dtype.kind == "u" else xp.where(ids < ids.dtype.type(0), limit, ids)


class KeyPadding(AbstractMask):
    """Only the keys at positions `starts <= k < lengths` are visible.

    **Arguments:**

    - `lengths`, `starts`: a Python int (static), or an int array: scalar or `[*b]`.
    """

    _lengths: Any
    _starts: Any

    def __init__(self, lengths: Any, starts: Any = 0):
        self._lengths = as_int(lengths, "lengths")
        self._starts = as_int(starts, "starts")

    @property
    def lengths(self) -> Any:
        return value_of(self._lengths)

    @property
    def starts(self) -> Any:
        return value_of(self._starts)

    def operands(self) -> tuple[Operand, ...]:
        return int_operand(self._lengths) + int_operand(self._starts)

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        given = iter(ids)
        length = self.lengths if isinstance(self._lengths, Fixed) else next(given)
        start = self.starts if isinstance(self._starts, Fixed) else next(given)
        return (k >= start) & (k < length)


class QueryPadding(AbstractMask):
    """Only the queries at positions `q < lengths` see anything.

    **Arguments:**

    - `lengths`: a Python int (static), or an int array: scalar or `[*b]`.
    """

    _lengths: Any

    def __init__(self, lengths: Any):
        self._lengths = as_int(lengths, "lengths")

    @property
    def lengths(self) -> Any:
        return value_of(self._lengths)

    def operands(self) -> tuple[Operand, ...]:
        return int_operand(self._lengths)

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        (length,) = ids or (self.lengths,)
        return q < length


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
        return value_of(self._prefix)

    def operands(self) -> tuple[Operand, ...]:
        return int_operand(self._prefix)

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        (prefix,) = ids or (self.prefix,)
        return (k < prefix) | (k <= q)


class BlockCausal(AbstractMask):
    """Causal between chunks of `size` positions, all visible within one: `k//size <= q//size`."""

    size: int = eqx.field(static=True)

    def __init__(self, size: Any):
        self.size = as_int(size, "size", least=1, static=True).value

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return _chunk(k, self.size) <= _chunk(q, self.size)


class ChunkedCausal(AbstractMask):
    """Causal within chunks of `size` positions, nothing between: `k//size == q//size`, `k <= q`."""

    size: int = eqx.field(static=True)

    def __init__(self, size: Any):
        self.size = as_int(size, "size", least=1, static=True).value

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return (_chunk(k, self.size) == _chunk(q, self.size)) & (k <= q)


def _chunk(x, size):
    if size & (size - 1):
        return x // size
    return jax.lax.shift_right_arithmetic(x, jnp.asarray(size.bit_length() - 1, x.dtype))


class Tree(AbstractMask):
    """Tree-shaped drafts of speculative decoding.

    The draft tokens are at positions `start, ..., start + n - 1`. Each sees every key before
    `start`, itself and its ancestors. All other queries and keys are plain causal.

    **Arguments:**

    - `parents`: int `[n]` or `[*b, n]`, the index of each draft token's parent, or -1.
    - `start`: a Python int (static), or an int array: scalar or `[*b]`.

    **Raises:** `ValueError` if known `parents` are out of range or have a cycle.
    """

    parents: Any
    _start: Any
    _enter: Any
    _leave: Any

    def __init__(self, parents: Any, start: Any = 0):
        self.parents = as_ids(parents, "parents", least_ndim=1)
        self._start = as_int(start, "start")
        n = self.parents.shape[-1]
        if n == 0:
            raise ValueError("parents must name at least one draft token, got shape (0,).")
        known = is_known(self.parents)
        if known:
            _check_forest(np.asarray(self.parents))
        self._enter, self._leave = eagerly(
            _preorder, np.asarray(self.parents) if known else self.parents
        )

    @property
    def start(self) -> Any:
        return value_of(self._start)

    def operands(self) -> tuple[Operand, ...]:
        rows = np.arange(math.prod(self.parents.shape[:-1]), dtype=np.int32)
        return (Operand(rows.reshape(self.parents.shape[:-1]), "b"), *int_operand(self._start))

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        row, start = ids[0], ids[1] if len(ids) > 1 else self.start
        n = self.parents.shape[-1]
        enter, leave = (x.reshape(-1) for x in (self._enter, self._leave))

        def at(table, i):
            return jnp.asarray(table)[row * n + jnp.clip(i, 0, n - 1)]

        i, j = q - start, k - start
        both = (i >= 0) & (i < n) & (j >= 0) & (j < n)
        # In preorder, the descendants of a token are the ones numbered from `enter` to `leave`.
        descends = (at(enter, j) <= at(enter, i)) & (at(enter, i) < at(leave, j))
        return jnp.where(both, descends, k <= q)


def _check_forest(parents):
    n = parents.shape[-1]
    if (parents < -1).any() or (parents >= n).any():
        raise ValueError(f"parents must be -1 or an index below {n}, got {parents.tolist()}.")
    at = parents
    for _ in range(n):
        at = np.where(at < 0, -1, np.take_along_axis(parents, np.maximum(at, 0), -1))
    if (at >= 0).any():
        raise ValueError(f"parents must have no cycle, got {parents.tolist()}.")


def _preorder(xp, parents):
    """When a depth-first walk enters and leaves each token."""
    n = parents.shape[-1]
    own = xp.arange(n, dtype=np.int32)
    own = own.reshape((1,) * (parents.ndim - 1) + (n,))
    above = (parents[..., :, None] == own[..., None, :]) | (own[..., :, None] == own[..., None, :])
    above = above.astype(np.int32)  # [token, ancestor or itself]
    for _ in range(max(n - 1, 1).bit_length()):
        above = (xp.matmul(above, above) > 0).astype(np.int32)
    size = above.sum(-2, dtype=np.int32)
    older = (parents[..., :, None] == parents[..., None, :]) & (
        own[..., None, :] < own[..., :, None]
    )
    step = xp.matmul(older.astype(np.int32), size[..., None])[..., 0]
    step = step + (parents >= 0).astype(np.int32)
    enter = xp.matmul(above, step[..., None])[..., 0]
    return enter, enter + size


class MaskFn(AbstractMask):
    """A mask from a function of one pair.

    **Arguments:**

    - `fn`: `fn(b, h, q, k, *row_ids, *col_ids) -> bool`, scalars in and out, from `jnp` or `lax`
        operations. It may close over arrays (`k < lengths[b]`) but is static itself: a rebuilt
        function is another mask to `jax.jit`. A callable `eqx.Module` or `jax.tree_util.Partial`
        is a PyTree node instead.
    - `row_operands`: arrays `[*b, t]`, `fn` gets one scalar of each. `col_operands`: `[*b, s]`.
    """

    _fn: Any
    row_operands: tuple[Any, ...]
    col_operands: tuple[Any, ...]

    def __init__(self, fn: _PairFn, row_operands: Any = (), col_operands: Any = ()):
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {fn!r}.")
        tree = isinstance(fn, eqx.Module | jax.tree_util.Partial)
        self._fn = fn if tree else Fixed(fn)
        for name, arrays in (("row_operands", row_operands), ("col_operands", col_operands)):
            if not isinstance(arrays, tuple | list):
                raise TypeError(f"{name} must be a tuple of arrays, got {type(arrays).__name__}.")
        self.row_operands = tuple(as_array(x, "row_operands", 1) for x in row_operands)
        self.col_operands = tuple(as_array(x, "col_operands", 1) for x in col_operands)

    @property
    def fn(self) -> Any:
        return value_of(self._fn)

    def operands(self) -> tuple[Operand, ...]:
        rows = tuple(Operand(x, "bt") for x in self.row_operands)
        return rows + tuple(Operand(x, "bs") for x in self.col_operands)

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return scalar_result(self.fn, b, h, q, k, *ids)
