"""`KVCache`, which holds each row in one piece.

`QuantizedKVCache`, which holds keys and values in eight bits.

`RingBufferCache`, which holds the last tokens of each row, and the first ones if asked to.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._misc import as_size, int32_field
from .._problem.storage import AbstractStored, Quantized
from ._base import (
    AbstractCache,
    appends,
    check_lengths,
    check_row_shapes,
    checked_dims,
    empty_pair,
    new_positions,
    with_rows,
    write_slots,
)
from ._writes import write


class KVCache(AbstractCache):
    """A cache that holds the tokens of each row one after the other, up to a fixed capacity.

    **Arguments:**

    - `key`, `value`: the keys `[b, capacity, k, d]` and the values `[b, capacity, k, v]`, as arrays
        or an [`eqattn.cache.AbstractStored`][] with `encode`. `KVCache.empty` makes them.
    - `length`: how many tokens each row has, int32 `[b]`.
    """

    key: Float[Array | AbstractStored, "b s k d"]
    value: Float[Array | AbstractStored, "b s k v"]
    length: Int[Array, " b"] = int32_field("length")

    def __check_init__(self) -> None:
        check_row_shapes(self)

    @property
    def positions(self) -> Int[Array, "b s"] | None:
        return None

    @classmethod
    def empty(
        cls,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: Any = jnp.float32,
        bits: bool | None = None,
    ) -> "KVCache":
        """Makes a cache without tokens. A capacity that is a multiple of 128 is read fastest, as
        its blocks need no padding. `bits` says whether numbers are kept as
        [`eqattn.cache.Bits`][]; None means, where that makes writing faster: on a CPU, for
        bfloat16.
        """
        sizes = dict(batch=batch, capacity=capacity, kv_heads=kv_heads)
        dims = checked_dims(dtype, head_dim, value_dim, **sizes)
        key, value = empty_pair((batch, capacity, kv_heads), dims, dtype, bits)
        return cls(key, value, jnp.zeros(batch, jnp.int32))

    @appends
    def append(
        self,
        key: Float[Array, "b t k d"],
        value: Float[Array, "b t k v"],
        counts: Int[Array, " b"] | None = None,
    ) -> "KVCache":
        slots, length = write_slots(self, key.shape[1], counts, self.key.shape[1])
        return KVCache(write(self.key, key, slots), write(self.value, value, slots), length)

    def truncate(self, lengths: Int[Array, " b"]) -> "KVCache":
        return KVCache(self.key, self.value, check_lengths(lengths, self.length))

    def reorder(self, rows: Int[Array, " n"]) -> "KVCache":
        return with_rows(self, rows)


class QuantizedKVCache(AbstractCache):
    """A `KVCache` in 8 bits. Each key vector and each value vector has its scale, and blocks are
    decoded when they are read.

    **Arguments:**

    - `key`, `value`: keys and values, as [`eqattn.cache.Quantized`][]. `QuantizedKVCache.empty`
        makes them.
    - `length`: how many tokens each row has, int32 `[b]`.
    """

    key: Quantized
    value: Quantized
    length: Int[Array, " b"] = int32_field("length")

    @property
    def positions(self) -> Int[Array, "b s"] | None:
        return None

    @classmethod
    def empty(
        cls,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: Any = jnp.float32,
        stored: Any = jnp.int8,
        head_shares: int = 1,
    ) -> "QuantizedKVCache":
        """Makes a cache without tokens. `stored` is int8 or a float8 dtype, and `dtype` is the
        dtype of the queries. `head_shares` is the number of devices that share the heads.
        """
        sizes = dict(batch=batch, capacity=capacity, kv_heads=kv_heads, head_shares=head_shares)
        key, value = (
            Quantized.zeros((batch, capacity, kv_heads, dim), stored, dtype, head_shares)
            for dim in checked_dims(dtype, head_dim, value_dim, **sizes)
        )
        return cls(key, value, jnp.zeros(batch, jnp.int32))

    @appends
    def append(
        self,
        key: Float[Array, "b t k d"],
        value: Float[Array, "b t k v"],
        counts: Int[Array, " b"] | None = None,
    ) -> "QuantizedKVCache":
        slots, length = write_slots(self, key.shape[1], counts, self.key.shape[1])
        return QuantizedKVCache(
            write(self.key, key, slots),
            write(self.value, value, slots),
            length,
        )

    def truncate(self, lengths: Int[Array, " b"]) -> "QuantizedKVCache":
        return QuantizedKVCache(self.key, self.value, check_lengths(lengths, self.length))

    def reorder(self, rows: Int[Array, " n"]) -> "QuantizedKVCache":
        return with_rows(self, rows)


class RingBufferCache(AbstractCache):
    """A cache of the last `capacity` tokens of each row, for sliding windows. The token at position
    `p` lies at place `p % capacity`.

    With `sinks`, the first `sinks` tokens of each row stay in the first places, as in StreamingLLM.
    The other places hold the last `capacity - sinks` of the other tokens, in the same turn. This is
    for the mask `SlidingWindow(left, 0, sinks=sinks)`.

    Attention needs `kv_positions=cache.positions`; with `cache.mask()`, it raises without them. It
    sees the right keys if `capacity` is at least `sinks + window + n - 1`. Here `n` tokens are
    appended at a time, and the window counts the key of the query itself: it is `left + 1`.

    **Arguments:**

    - `key`, `value`: the keys `[b, capacity, k, d]` and the values `[b, capacity, k, v]`, as arrays
        or an [`eqattn.cache.AbstractStored`][] with `encode`. `RingBufferCache.empty` makes them.
    - `held`: the position of the token at each place, int32 `[b, capacity]`. -1 means that there is
        none.
    - `length`: how many tokens each row has had so far, int32 `[b]`.
    - `sinks`: how many first tokens stay, a static int from 0 to `capacity - 1`.

    **Raises:** `ValueError` for shapes that do not agree, or `sinks` out of range. `TypeError` is
    raised for `sinks` that are no int.

    ??? cite "Reference"

        Xiao et al., *Efficient Streaming Language Models with Attention Sinks*, 2023
        (arXiv:2309.17453), section 3.2.
    """

    key: Float[Array | AbstractStored, "b s k d"]
    value: Float[Array | AbstractStored, "b s k v"]
    held: Int[Array, "b s"] = int32_field("held")
    length: Int[Array, " b"] = int32_field("length")
    sinks: int = eqx.field(static=True, default=0, converter=lambda x: as_size(x, "sinks"))

    overwrites: ClassVar[bool] = True

    def __check_init__(self) -> None:
        check_row_shapes(self)
        keys, held = getattr(self.key, "shape", None), getattr(self.held, "shape", None)
        if keys is not None and held is not None and held != keys[:2]:
            raise ValueError(
                f"held {held} must be [b, capacity] = {keys[:2]}, for keys {keys}; "
                "RingBufferCache.empty makes it."
            )
        if keys is not None and 0 < self.sinks >= keys[1]:
            raise ValueError(
                f"sinks={self.sinks} need a capacity of at least {self.sinks + 1}, got {keys[1]}: "
                "the last tokens are in the places after the sinks."
            )

    @property
    def positions(self) -> Int[Array, "b s"] | None:
        return self.held

    @property
    def keeps_first(self) -> int:
        return self.sinks

    @classmethod
    def empty(
        cls,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: Any = jnp.float32,
        bits: bool | None = None,
        *,
        sinks: int = 0,
    ) -> "RingBufferCache":
        """Makes a cache without tokens. `bits` is as for `KVCache.empty`, and `sinks` as for the
        class.
        """
        sizes = dict(batch=batch, capacity=capacity, kv_heads=kv_heads)
        dims = checked_dims(dtype, head_dim, value_dim, **sizes)
        key, value = empty_pair((batch, capacity, kv_heads), dims, dtype, bits)
        held = jnp.full((batch, capacity), -1, jnp.int32)
        return cls(key, value, held, jnp.zeros(batch, jnp.int32), sinks)

    @appends
    def append(
        self,
        key: Float[Array, "b t k d"],
        value: Float[Array, "b t k v"],
        counts: Int[Array, " b"] | None = None,
    ) -> "RingBufferCache":
        t, capacity = key.shape[1], self.key.shape[1]
        if t > capacity - self.sinks:
            beside = f" with sinks={self.sinks}" if self.sinks else ""
            raise ValueError(
                f"{t} new tokens do not fit a RingBufferCache of {capacity}{beside}, which takes "
                f"{capacity - self.sinks} at a time; append them in parts, so that each part is "
                "attended to before it is overwritten."
            )
        length = self.length + counts  # pyright: ignore[reportOperatorIssue]
        position = new_positions(self, t)
        kept = position < length[:, None]
        slots = jnp.where(kept, self._places(position), capacity + position)
        return RingBufferCache(
            write(self.key, key, slots),
            write(self.value, value, slots),
            write(self.held, position, slots),
            length,
            self.sinks,
        )

    def _places(self, position: Array) -> Array:
        """Where the tokens at these positions lie, of the same shape."""
        first, turn = self.sinks, self.key.shape[1] - self.sinks
        if not first:
            return position % turn
        return jnp.where(position < first, position, first + (position - first) % turn)

    def truncate(self, lengths: Int[Array, " b"]) -> "RingBufferCache":
        """Returns the cache with only the first `lengths` tokens of each row. Tokens that newer
        ones have overwritten do not come back: for each token that is dropped, one fewer older
        token is there. A layer raises if it would see one of them. Sinks are never overwritten.
        """
        lengths = check_lengths(lengths, self.length)
        held = jnp.where(self.held < lengths[:, None], self.held, -1)
        return RingBufferCache(self.key, self.value, held, lengths, self.sinks)

    def reorder(self, rows: Int[Array, " n"]) -> "RingBufferCache":
        return with_rows(self, rows)
