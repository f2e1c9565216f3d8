"""A call over a cache that forgets where its queries stand raises, over every kind of cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import ALiBi, attention, Blockwise, Causal, KeyPadding, Ragged, SlidingWindow
from eqattn.cache import (
    KVCache,
    LatentKVCache,
    PagedKVCache,
    QuantizedKVCache,
    RingBufferCache,
    StackedKVCache,
    StackedPagedKVCache,
)


B, N, D = 2, 6, 4
RNG = np.random.default_rng(0)
Q, K, V = (jnp.asarray(RNG.normal(size=(B, N, 1, D)), jnp.float32) for _ in range(3))

CACHES = {
    "contiguous": lambda: KVCache.empty(B, 64, 1, D),
    "bits": lambda: KVCache.empty(B, 64, 1, D, bits=True),
    "ring buffer": lambda: RingBufferCache.empty(B, 64, 1, D),
    "paged": lambda: PagedKVCache.empty(B, 64, 16, 8, 1, D).reserve(N),
    "quantized": lambda: QuantizedKVCache.empty(B, 64, 1, D),
    "latent": lambda: LatentKVCache(KVCache.empty(B, 64, 1, D, D)),
    "stacked": lambda: StackedKVCache.empty(2, B, 64, 1, D).layer(1),
    "stacked pages": lambda: StackedPagedKVCache.empty(2, B, 64, 16, 8, 1, D).reserve(N).layer(1),
}
POSITIONAL = {
    "causal": dict(mask=Causal()),
    "window": dict(mask=SlidingWindow(2, 0)),
    "score": dict(score=ALiBi(jnp.ones(1))),
}


def call(cache, query, mask=None, q_offset=None, score=None):
    shown = cache.mask() if mask is None else mask & cache.mask()
    query = jnp.concatenate([query, query], -1) if isinstance(cache, LatentKVCache) else query
    out = attention(
        query, cache.key, cache.value, Ragged(), mask=shown, score=score,
        q_offset=q_offset, kv_positions=cache.positions,
    )  # fmt: skip
    return out.attention_outputs


def plain(cache, query, first=None, counts=None):
    """Causal float64 attention of queries from `first` on; of all keys with None."""
    latent = isinstance(cache, LatentKVCache)
    k, v = (np.concatenate([V, K], -1), V) if latent else (K, V)
    q = np.concatenate([query, query], -1) if latent else query
    q, k, v = (np.asarray(x[:, :, 0], np.float64) for x in (q, k, v))
    z = np.einsum("btd,bsd->bts", q, k) / np.sqrt(q.shape[-1])
    seen = np.full(z.shape, True)
    if first is not None:
        seen = np.arange(N)[None, None] <= first + np.arange(q.shape[1])[None, :, None]
    if counts is not None:
        seen = seen & (np.arange(N)[None, None] < np.asarray(counts)[:, None, None])
    p = np.exp(np.where(seen, z, -np.inf))
    return np.einsum("bts,bsd->btd", p / p.sum(-1, keepdims=True), v)[:, :, None]


def close(name, got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-2 if name == "quantized" else 1e-5)


# Every kind and every reason. tests/nightly/cache has all pairs.
CALLS = [(name, "causal") for name in CACHES] + [("ring buffer", "window"), ("paged", "score")]


@pytest.mark.parametrize("name, what", CALLS)
def test_a_forgotten_offset_raises(name, what):
    cache = CACHES[name]().append(K, V)
    with pytest.raises(ValueError, match=r"q_offset is missing.*than the 2 queries.*\[6, 6\]"):
        call(cache, Q[:, -2:], **POSITIONAL[what])
    call(cache, Q[:, -2:], q_offset=0, **POSITIONAL[what])


@pytest.mark.parametrize("name", ["contiguous", "paged"])
def test_it_raises_as_a_program_runs(name):
    run = jax.jit(lambda cache, q: call(cache, q, Causal()))
    cache = CACHES[name]()
    with pytest.raises(Exception, match="q_offset is missing"):
        jax.block_until_ready(run(cache.append(K, V), Q[:, -2:]))


@pytest.mark.parametrize(
    "name, jit",
    [("ring buffer", True), ("quantized", False), ("stacked pages", True)],
)
def test_what_needs_no_offset_does_not_raise(name, jit):
    """A prompt in an empty cache, also with counts, and a call in which no position matters."""

    def prefill(cache, counts=None):
        cache = cache.append(K, V, counts)
        return cache, call(cache, Q, Causal())

    cross = functools.partial(call, query=Q[:, -2:])
    if jit:
        prefill, cross = jax.jit(prefill), jax.jit(cross)
    cache, out = prefill(CACHES[name]())
    close(name, out, plain(cache, Q, 0))
    close(name, cross(cache), plain(cache, Q[:, -2:]))
    counts = jnp.array([6, 3])
    cache, out = prefill(CACHES[name](), counts)
    close(name, out, plain(cache, Q, 0, counts))


@pytest.mark.parametrize("name", ["bits", "latent", "stacked"])
def test_the_right_offset(name):
    cache = CACHES[name]().append(K[:, :4], V[:, :4])
    offset = cache.length
    cache = cache.append(K[:, 4:], V[:, 4:])
    close(name, call(cache, Q[:, 4:], Causal(), offset), plain(cache, Q[:, 4:], 4))


def test_other_masks_and_strategies():
    """A plain `KeyPadding` asks for nothing, and every strategy asks where the cache's does."""
    cache = CACHES["contiguous"]().append(K, V)
    masked = functools.partial(attention, Q[:, -2:], cache.key, cache.value)
    masked(mask=Causal() & KeyPadding(6))
    with pytest.raises(ValueError, match="q_offset is missing"):
        masked(Blockwise(), mask=~(Causal() & cache.mask()))
