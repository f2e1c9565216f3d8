"""Latents: values that are the first features of the keys, in every kind of cache, against an oracle
that has them twice.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _programs import DEFAULT_CODE
from matrix import oracle, oracle_masks as om

from eqattn import attention, AttentionMetadata, Causal, Ragged, ragged_attention
from eqattn.cache import (
    KVCache,
    LatentKV,
    LatentKVCache,
    PagedKVCache,
    Quantized,
    QuantizedKVCache,
    RingBufferCache,
    StackedKVCache,
)


B, T, H, RANK, ROTARY, CAPACITY = 2, 9, 4, 12, 4, 64
SCALE = 0.3
SIZES = dict(kv_heads=1, head_dim=ROTARY, value_dim=RANK)


def paged(dtype, batch=B, capacity=CAPACITY, **sizes):
    cache = PagedKVCache.empty(
        batch, capacity, batch * capacity // 16, 16, dtype=dtype, **(SIZES | sizes)
    )
    return LatentKVCache(cache.reserve(min(2 * T, capacity)))


MAKE = {
    "dense": lambda dtype: LatentKVCache.empty(B, CAPACITY, RANK, ROTARY, dtype),
    "bits": lambda dtype: LatentKVCache(
        KVCache.empty(B, CAPACITY, **SIZES, dtype=dtype, bits=True)
    ),
    "paged": paged,
    "ring buffer": lambda dtype: LatentKVCache(
        RingBufferCache.empty(B, CAPACITY, **SIZES, dtype=dtype)
    ),
    "stacked": lambda dtype: LatentKVCache(
        StackedKVCache.empty(2, B, CAPACITY, **SIZES, dtype=dtype).layer(1)
    ),
    "int8": lambda dtype: LatentKVCache(QuantizedKVCache.empty(B, CAPACITY, **SIZES, dtype=dtype)),
    "paged int8": lambda dtype: paged(dtype, stored=jnp.int8),
}


def tokens(dtype, t=T, heads=H, rank=RANK, rotary=ROTARY, batch=B):
    rng = np.random.default_rng(0)
    shapes = ((batch, t, heads, rank + rotary), (batch, t, 1, rotary), (batch, t, 1, rank))
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]


def step(cache, query, rest, latent, counts=None, **metadata):
    offset = cache.length
    cache = cache.append(rest, latent, counts)
    key = cache.key
    out = attention(
        query,
        key,
        key.c_kv,
        Ragged(AttentionMetadata(softmax_scale=SCALE, **metadata)),
        mask=Causal() & cache.mask(),
        q_offset=offset,
        kv_positions=cache.positions,
    )
    return cache, out.attention_outputs


def problem(query, rest, latent):
    q, k, v = (
        np.asarray(x, np.float64) for x in (query, np.concatenate([latent, rest], -1), latent)
    )
    return oracle.Problem(q, k, v, scale=SCALE, mask=om.causal(T, T))


@pytest.mark.parametrize("name", ["dense", "paged"])
def test_steps_are_the_whole(name, x64):
    """A prompt, then tokens; also by `cache.value` in place of `cache.key.c_kv`."""
    query, rest, latent = tokens(jnp.float64)

    @jax.jit
    def run(cache):
        outs = []
        for part in (slice(0, 8), slice(8, 9)):
            cache, out = step(cache, *(x[:, part] for x in (query, rest, latent)))
            outs.append(out)
        again = attention(
            query[:, -1:],
            cache.key,
            cache.value,
            Ragged(AttentionMetadata(softmax_scale=SCALE)),
            mask=cache.mask(),
            kv_positions=cache.positions,
        )
        less = cache.reorder(jnp.array([1, 0])).truncate(jnp.array([3, 4]))
        return outs, again.attention_outputs, less.length

    outs, again, length = run(MAKE[name](jnp.float64))
    want = oracle.forward(problem(query, rest, latent)).out
    np.testing.assert_allclose(jnp.concatenate(outs, 1), want, rtol=0, atol=1e-13)
    np.testing.assert_allclose(again, want[:, -1:], rtol=0, atol=1e-13)
    assert length.tolist() == [3, 4]


@pytest.mark.parametrize("name", ["paged int8"])
def test_eight_bits_are_close(name):
    query, rest, latent = tokens(jnp.float32)
    _, out = jax.jit(step)(MAKE[name](jnp.float32), query, rest, latent)
    want = oracle.forward(problem(query, rest, latent)).out
    assert np.linalg.norm(out - want) < 0.01 * np.linalg.norm(want)


@pytest.mark.parametrize("name", ["dense", "paged"])
def test_gradients(name, x64):
    """A latent gets what it is worth as part of a key and as a value."""
    query, rest, latent = tokens(jnp.float64)
    cache = MAKE[name](jnp.float64)
    ct = jnp.asarray(np.random.default_rng(1).standard_normal((B, T, H, RANK)))

    @jax.jit
    def grads(*args):
        return jax.vjp(lambda *args: step(cache, *args)[1], *args)[1](ct)

    of = oracle.vjp(problem(query, rest, latent), np.asarray(ct), np.zeros((B, T, H)))
    want = of["q"], of["k"][..., RANK:], of["k"][..., :RANK] + of["v"]
    for got, expected in zip(grads(query, rest, latent), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_rows_under_vmap(x64):
    query, rest, latent = tokens(jnp.float64)
    one = LatentKVCache.empty(1, CAPACITY, RANK, ROTARY, jnp.float64)
    caches = jax.tree.map(lambda x: jnp.stack([x] * B), one)
    _, out = jax.jit(jax.vmap(step))(caches, *(x[:, None] for x in (query, rest, latent)))
    want = oracle.forward(problem(query, rest, latent)).out
    np.testing.assert_allclose(out[:, 0], want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["paged"])
def test_packed_rows(name, x64):
    query, rest, latent = tokens(jnp.float64)
    strategy = Ragged(AttentionMetadata(softmax_scale=SCALE))

    @jax.jit
    def run(cache):
        cache = cache.append(rest, latent)
        key, packed = cache.key, jnp.concatenate([query[0, 4:], query[1, 8:]])
        return ragged_attention(packed, key, key.c_kv, jnp.array([0, 5, 6]), cache.length, strategy)

    out = run(MAKE[name](jnp.float64))
    want = oracle.forward(problem(query, rest, latent)).out
    want = np.concatenate([want[0, 4:], want[1, 8:]])
    np.testing.assert_allclose(out.attention_outputs, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name, tolerance", [("dense", 1e-5), ("paged int8", 0.05)])
def test_kernels_of_tpus(name, tolerance):
    """Interpreted. They read the latents as keys and as values."""
    query, rest, latent = tokens(jnp.float32)

    @jax.jit
    def run(cache, query, rest, latent):
        cache = cache.append(rest[:, :-1], latent[:, :-1])
        last = [x[:, -1:] for x in (query, rest, latent)]
        return step(cache, *last, platform="interpret", backend="tpu")[1]

    out = run(MAKE[name](jnp.float32), query, rest, latent)
    want = oracle.forward(problem(query, rest, latent)).out[:, -1:]
    np.testing.assert_allclose(out, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "kind, dtype", [("dense", jnp.float32), ("paged", jnp.bfloat16), ("int8", jnp.float32)]
)
def test_each_byte_is_read_once(kind, dtype):
    """DeepSeek V3's sizes. A step has two loops over blocks, one for those with masked pairs, and
    each reads a block of latents once. It copies no cache, and takes little memory.
    """
    capacity, heads, rank, rotary = 8192, 16, 512, 64
    sizes = dict(kv_heads=1, head_dim=rotary, value_dim=rank)
    if kind == "paged":
        cache = paged(dtype, 1, capacity, **sizes)
    elif kind == "int8":
        cache = LatentKVCache(QuantizedKVCache.empty(1, capacity, **sizes, dtype=dtype))
    else:
        cache = LatentKVCache.empty(1, capacity, rank, rotary, dtype)
    args = tokens(dtype, 1, heads, rank, rotary, 1)
    compiled = jax.jit(step, donate_argnums=0).lower(cache, *args).compile(DEFAULT_CODE)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes <= 2 * 2**20
    arrays = [x for x in jax.tree.leaves(cache) if x.ndim > 2]
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in arrays)
    keys = 16 if kind == "paged" else 64
    for size in (rank, rotary):
        reads = re.findall(
            rf"= (\w+)\[[\d,]*{keys},{size}\]\S* dynamic-slice\(", compiled.as_text()
        )
        assert len(reads) == 2, reads


def test_both_parts_fit():
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        LatentKVCache.empty(2, 8, 0, 4)
    with pytest.raises(ValueError, match="make it with kv_heads=1"):
        LatentKVCache(KVCache.empty(1, 64, 2, 8))
    x = jnp.zeros((1, 8, 1, 4))
    with pytest.raises(ValueError, match=r"must be of the same tokens, heads and dtype"):
        LatentKV(x, x[:, :4])
    with pytest.raises(ValueError, match="must be of the same tokens, heads and dtype"):
        LatentKV(x, Quantized.quantize(x.astype(jnp.bfloat16)))
    with pytest.raises(ValueError, match="do not fit a cache"):
        LatentKVCache.empty(1, 64, 12, 4).append(jnp.zeros((1, 1, 1, 12)), jnp.zeros((1, 1, 1, 4)))
