"""`KVCache`, which holds each row in one piece."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._misc import int32_field
from .._problem.storage import AbstractStored
from ._base import (
    AbstractCache,
    appends,
    check_lengths,
    check_row_shapes,
    checked_dims,
    empty_pair,
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
