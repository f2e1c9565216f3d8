"""`KVCache`, which holds each row in one piece.

`QuantizedKVCache`, which holds keys and values in eight bits.

`RingBufferCache`, which holds the last tokens of each row, and the first ones if asked to.
"""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._misc import as_size, int32_field
from .._problem.storage import AbstractStored
from ._base import (
    AbstractCache,
    appends,
    check_lengths,
    check_row_shapes,
    checked_dims,
    empty_pair,
    new_positions,
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

    @classmethod
    def empty(  # noqa: PLR0913 (one argument for each size of the cache)
        cls,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: Any = jnp.float32,
        bits: bool | None = None,
        stored: Any = None,
        head_shares: int = 1,
    ) -> "KVCache":
        """Makes a cache without tokens. A capacity that is a multiple of 128 is read fastest, as
        its blocks need no padding.

        **Arguments:**

        - `batch`, `capacity`: how many rows there are, and how many tokens each may have.
        - `kv_heads`, `head_dim`, `value_dim`: the number of key heads, and the sizes of a key and
            of a value. The default of `value_dim` is `head_dim`.
        - `dtype`: the dtype of keys and values when they are read, which is that of the queries.
        - `bits`: whether numbers are kept as [`eqattn.cache.Bitcast`][]; None means, where that
            makes writing faster: on a CPU, for bfloat16.
        - `stored`: int8 or a float8 dtype to keep [`eqattn.cache.Quantized`][] numbers in, with a
            scale for each key vector and each value vector; or None.
        - `head_shares`: how many devices share the heads of quantized numbers.
        """
        sizes = dict(batch=batch, capacity=capacity, kv_heads=kv_heads, head_shares=head_shares)
        dims = checked_dims(dtype, head_dim, value_dim, **sizes)
        lead = batch, capacity, kv_heads
        key, value = empty_pair(lead, dims, dtype, bits, stored, head_shares)
        return cls(key, value, jnp.zeros(batch, jnp.int32))

    @appends
    def append(
        self,
        key: Float[Array, "b t k d"],
        value: Float[Array, "b t k v"],
        counts: Int[Array, " b"] | None = None,
    ) -> "KVCache":
        slots, length = write_slots(self, key.shape[1], counts, self.key.shape[1])
        key, value = write(self.key, key, slots), write(self.value, value, slots)
        return dataclasses.replace(self, key=key, value=value, length=length)


class QuantizedKVCache(KVCache):
    """A `KVCache` that is made in 8 bits: `QuantizedKVCache.empty(...)` has the contents of
    `KVCache.empty(..., stored=jnp.int8)`.

    **Arguments:** as for [`eqattn.cache.KVCache`][].
    """

    @classmethod
    def empty(  # pyright: ignore[reportIncompatibleMethodOverride]
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
        """Makes a cache without tokens. The arguments are those of `KVCache.empty`."""
        sizes = batch, capacity, kv_heads, head_dim, value_dim
        return super().empty(*sizes, dtype, stored=stored, head_shares=head_shares)  # pyright: ignore[reportReturnType]


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
