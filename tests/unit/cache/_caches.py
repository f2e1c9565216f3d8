"""What the tests of caches share: one of each kind, tokens, and a step of attention over them."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from eqattn import attention, AttentionMetadata, Causal, Dense, Ragged
from eqattn.cache import KVCache, LatentKVCache, PagedKVCache, QuantizedKVCache, RingBufferCache


B, H, K, D, V = 3, 4, 2, 8, 6
CAPACITY = 24


def paged(stored=None, dtype=jnp.float32, bits=False):
    cache = PagedKVCache.empty(B, CAPACITY, 20, 4, K, D, V, dtype, stored, bits=bits)
    shuffled = jnp.asarray(np.random.default_rng(0).permutation(20)[:18].reshape(B, 6), jnp.int32)
    return eqx.tree_at(lambda c: c.table, cache, shuffled)


MAKE = {
    "dense": lambda dtype: KVCache.empty(B, CAPACITY, K, D, V, dtype),
    "ring buffer": lambda dtype: RingBufferCache.empty(B, CAPACITY, K, D, V, dtype),
    "ring buffer with sinks": lambda dtype: RingBufferCache.empty(
        B, CAPACITY, K, D, V, dtype, sinks=3
    ),
    "paged": lambda dtype: paged(dtype=dtype),
    "int8": lambda dtype: KVCache.empty(B, CAPACITY, K, D, V, dtype, stored=jnp.int8),
    "paged int8": lambda dtype: paged(jnp.int8, dtype),
    "float8": lambda dtype: QuantizedKVCache.empty(B, CAPACITY, K, D, V, dtype, jnp.float8_e4m3fn),
    "bits": lambda dtype: KVCache.empty(B, CAPACITY, K, D, V, dtype, bits=True),
    "ring buffer bits": lambda dtype: RingBufferCache.empty(B, CAPACITY, K, D, V, dtype, bits=True),
    "paged bits": lambda dtype: paged(dtype=dtype, bits=True),
}
EXACT = (
    "dense", "ring buffer", "ring buffer with sinks", "paged", "bits", "ring buffer bits",
    "paged bits",
)  # fmt: skip
# One of each form of keys and order of places. tests/nightly/cache has all.
FEW = "dense", "ring buffer with sinks", "paged bits", "int8", "paged int8"
FEW_EXACT = tuple(name for name in FEW if name in EXACT)


def tokens(t, dtype=jnp.float64, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((B, t, H, D), (B, t, K, D), (B, t, K, V))
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]


def step(cache, q, k, v, counts=None, mask=Causal(), strategy=Ragged):
    offset, dtype = cache.length, q.dtype
    cache = cache.append(k, v, counts)
    value = cache.key.c_kv if isinstance(cache, LatentKVCache) else cache.value
    out = attention(
        q, cache.key, value, strategy(AttentionMetadata(runtime_dtype=dtype)),
        mask=mask & cache.mask(), q_offset=offset, kv_positions=cache.positions,
    )  # fmt: skip
    return cache, out.attention_outputs


def whole(q, k, v, mask=Causal()):
    strategy = Dense(AttentionMetadata(runtime_dtype=q.dtype))
    return attention(q, k, v, strategy, mask=mask).attention_outputs
