"""`QuantizedKVCache`, which holds keys and values in eight bits."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._misc import int32_field
from .._problem.storage import Quantized
from ._base import (
    AbstractCache,
    appends,
    check_lengths,
    checked_dims,
    with_rows,
    write_slots,
)
from ._writes import write


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
