"""`LatentKVCache`, whose values are the first features of its keys."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from .._misc import as_size
from .._problem.storage import AbstractStored, LatentKV, Pages, StackLayer
from ._base import AbstractCache
from ._contiguous import KVCache


class LatentKVCache(AbstractCache):
    """A cache for multi-head latent attention (MLA). Keys and values are made of one latent vector
    per token, which is stored once, and read once for both.

    For each token it holds the latent `c`, `[r]`, and a part `k` of the key, `[p]`. That part has
    rotary positions, and all heads share it. Attention reads the keys `[c, k]` and the values `c`,
    with queries `[r + p]` that the keys' up-projection is absorbed into:

        cache = cache.append(k, c)
        key = cache.key
        attention(query, key, key.c_kv, Ragged(metadata), mask=Causal() & cache.mask(), ...)

    `cache.value` is the same as `cache.key.c_kv`.

    **Arguments:**

    - `cache`: the cache that holds the latents, as its values, and the shared part of the keys, as
        its keys. It has one head, and may be of any kind: paged, quantized, a ring buffer, or
        `stacked.layer(i)`. `LatentKVCache.empty` makes a `KVCache`; of a `PagedKVCache`,
        `LatentKVCache(cache.cache.reserve(1))` reserves pages.

    ??? cite "Reference"

        DeepSeek-AI, *DeepSeek-V2*, 2024 (arXiv:2405.04434), section 2.1.
    """

    cache: AbstractCache

    def __init__(self, cache: AbstractCache):
        self.cache = cache

    def __check_init__(self) -> None:
        if not isinstance(self.cache, AbstractCache):
            raise TypeError(f"cache must be one of eqattn.cache, got {type(self.cache).__name__}.")
        if self.cache.key.shape[-2] != 1:
            raise ValueError(
                f"The latents of a token are one head, which all heads of the query share: got a "
                f"{type(self.cache).__name__} with a key {self.cache.key.shape}; make it with "
                "kv_heads=1."
            )

    @classmethod
    def empty(
        cls,
        batch: int,
        capacity: int,
        rank: int,
        rotary_dim: int,
        dtype: Any = jnp.float32,
        bits: bool | None = None,
    ) -> "LatentKVCache":
        """Makes a cache without tokens, in a `KVCache`.

        **Arguments:**

        - `batch`, `capacity`, `dtype`, `bits`: as for `KVCache.empty`.
        - `rank`: the size of a latent.
        - `rotary_dim`: the size of the shared part of a key.

        **Raises:** `ValueError` or `TypeError` for sizes that are none.
        """
        rank = as_size(rank, "rank", least=1)
        return cls(KVCache.empty(batch, capacity, 1, rotary_dim, rank, dtype, bits))

    @property
    def shares_rows(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.cache.shares_rows

    @property
    def overwrites(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.cache.overwrites

    @property
    def keeps_first(self) -> int:
        return self.cache.keeps_first

    @property
    def length(self) -> Any:
        return self.cache.length

    @property
    def positions(self) -> Any:
        return self.cache.positions

    @property
    def key(self) -> AbstractStored:
        latent, rest = self.cache.value, self.cache.key
        if isinstance(latent, Pages):
            return dataclasses.replace(latent, content=LatentKV(latent.content, rest.content))
        if isinstance(latent, StackLayer):
            return StackLayer(LatentKV(latent.stack, rest.stack), latent.index)
        return LatentKV(latent, rest)

    @property
    def value(self) -> Any:
        return self.cache.value

    def _key_specs(self, axis_name: str) -> dict[int, P]:
        return self.cache._key_specs(axis_name)

    def append(
        self,
        key: Float[Array, "b t k p"],
        value: Float[Array, "b t k r"],
        counts: Int[Array, " b"] | None = None,
    ) -> "LatentKVCache":
        """Returns the cache with new tokens after those of each row.

        **Arguments:**

        - `key`: the shared part of the new keys, `[b, t, 1, p]`.
        - `value`: the new latents, `[b, t, 1, r]`.
        - `counts`: how many of the `t` tokens each row takes; None means all of them.
        """
        return LatentKVCache(self.cache.append(key, value, counts))

    def truncate(self, lengths: Int[Array, " b"]) -> "LatentKVCache":
        return LatentKVCache(self.cache.truncate(lengths))

    def reorder(self, rows: Int[Array, " n"]) -> "LatentKVCache":
        return LatentKVCache(self.cache.reorder(rows))
