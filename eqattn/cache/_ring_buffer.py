"""A cache for windows."""

from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._misc import int32_field
from .._problem.storage import Bits
from ._base import (
    AbstractCache,
    check_dtype,
    check_lengths,
    check_new,
    check_row_shapes,
    check_rows,
    check_sizes,
    empty_store,
    new_positions,
    rows_of,
    write,
)


class RingBufferCache(AbstractCache):
    """The last `capacity` tokens of each row, for sliding windows: a token at position `p` lies at
    `p % capacity`.

    Attention needs `kv_positions=cache.positions`, and sees the right keys if `capacity` is at
    least the window plus the number of tokens that are appended at a time, less one.

    **Arguments:**

    - `key`, `value`: `[b, capacity, k, d]` and `[b, capacity, k, v]`, arrays or
        [`eqattn.cache.Bits`][]; see also `RingBufferCache.empty`.
    - `held`: int32 `[b, capacity]`, the position of the token in each place, -1 for none.
    - `length`: int32 `[b]`, all tokens so far.
    """

    key: Float[Array | Bits, "b s k d"]
    value: Float[Array | Bits, "b s k v"]
    held: Int[Array, "b s"] = int32_field("held")
    length: Int[Array, " b"] = int32_field("length")

    overwrites: ClassVar[bool] = True

    def __check_init__(self) -> None:
        check_row_shapes(self)

    @property
    def positions(self) -> Int[Array, "b s"] | None:
        return self.held

    @classmethod
    def empty(
        cls,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: Any = jnp.float32,
        bits: bool = False,
    ) -> "RingBufferCache":
        """Without tokens; on a CPU, numbers of bfloat16 are written fastest as
        [`bits`][eqattn.cache.Bits].
        """
        check_sizes(
            batch=batch,
            capacity=capacity,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
        )
        check_dtype(dtype)
        value_dim = head_dim if value_dim is None else value_dim
        key, value = (
            empty_store((batch, capacity, kv_heads, dim), dtype, bits)
            for dim in (head_dim, value_dim)
        )
        held = jnp.full((batch, capacity), -1, jnp.int32)
        return cls(key, value, held, jnp.zeros(batch, jnp.int32))

    def append(
        self,
        key: Float[Array, "b t k d"],
        value: Float[Array, "b t k v"],
        counts: Int[Array, " b"] | None = None,
    ) -> "RingBufferCache":
        counts = check_new(self, key, value, counts)
        t, capacity = jnp.shape(key)[1], self.key.shape[1]
        if t > capacity:
            raise ValueError(
                f"{t} new tokens do not fit a RingBufferCache of {capacity}; append them in parts, "
                "so that each part is attended to before it is overwritten."
            )
        position = new_positions(self, t)
        kept = position < (self.length + counts)[:, None]
        slots = jnp.where(kept, position % capacity, capacity + position)
        return RingBufferCache(
            write(self.key, key, slots),
            write(self.value, value, slots),
            write(self.held, position, slots),
            self.length + counts,
        )

    def truncate(self, lengths: Int[Array, " b"]) -> "RingBufferCache":
        """With the first `lengths` tokens. What newer tokens have overwritten is not there again:
        as many older tokens are missing as newer ones are dropped.
        """
        lengths = check_lengths(lengths, self.length)
        held = jnp.where(self.held < lengths[:, None], self.held, -1)
        return RingBufferCache(self.key, self.value, held, lengths)

    def reorder(self, rows: Int[Array, " n"]) -> "RingBufferCache":
        rows = check_rows(self, rows)
        key, value = rows_of(self.key, rows), rows_of(self.value, rows)
        return RingBufferCache(key, value, self.held[rows], self.length[rows])
