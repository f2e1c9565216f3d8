"""`ragged_attention` over caches whose tokens are spread over devices, and over ring buffers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from eqattn import AttentionMetadata, Ragged, ragged_attention, SlidingWindow
from eqattn.cache import KVCache, PagedKVCache, QuantizedKVCache, RingBufferCache


N, B, H, K, D, V, CAPACITY = 4, 3, 4, 2, 8, 6, 24
SIZES = dict(batch=B, capacity=CAPACITY, kv_heads=K, head_dim=D, value_dim=V)
MAKE = {
    "one piece": lambda: KVCache.empty(**SIZES),
    "int8": lambda: QuantizedKVCache.empty(**SIZES),
    "bits": lambda: KVCache.empty(**SIZES, bits=True),
    "ring buffer": lambda: RingBufferCache.empty(**SIZES),
    "pages": lambda: PagedKVCache.empty(**SIZES, pages=36, page_size=2, devices=N).reserve(CAPACITY),
}  # fmt: skip
PARTS, LEFT = ([3, 24, 0], [2, 13, 1]), 5  # how many tokens each row takes, and a window
COUNTS = np.array([1, 3, 0])
CU = np.concatenate([[0], np.cumsum(COUNTS)]).astype(np.int32)


def filled(name):
    """A cache, and all tokens that its rows ever had. The ring buffer has wrapped once."""
    rng, cache = np.random.default_rng(3), MAKE[name]()
    every = [[np.zeros((0, K, n)) for n in (D, V)] for _ in range(B)]
    for counts in PARTS if cache.overwrites else PARTS[1:]:
        new = [rng.standard_normal((B, max(counts), K, n)).astype(np.float32) for n in (D, V)]
        cache = cache.append(*map(jnp.asarray, new), jnp.asarray(counts))
        for row, count in enumerate(counts):
            every[row] = [np.concatenate([x, y[row, :count]]) for x, y in zip(every[row], new)]
    return cache, every


def by_hand(q, every):
    """The last tokens of each row, packed, over the tokens of a window, in NumPy's float64."""
    outs = []
    for row, (count, held) in enumerate(zip(COUNTS, every)):
        for i in range(count):
            position = len(held[0]) - count + i
            k, v = (x[max(position - LEFT, 0) : position + 1].repeat(H // K, 1) for x in held)
            logits = np.einsum("hd,shd->hs", q[CU[row] + i], k) * D**-0.5
            p = np.exp(logits - logits.max(-1, keepdims=True))
            outs.append(np.einsum("hs,shv->hv", p / p.sum(-1, keepdims=True), v))
    return np.stack(outs)


def packed(q, cache, lengths, strategy, **kwargs):
    mask = SlidingWindow(LEFT, 0)
    out = ragged_attention(
        q, cache.key, cache.value, jnp.asarray(CU), lengths, strategy, mask=mask, block_q=2,
        **kwargs,
    )  # fmt: skip
    return out.attention_outputs


# tests/nightly/cache has every kind in both ways.
WAYS = [("one piece", "automatic"), ("ring buffer", "automatic"), ("pages", "manual")]


@pytest.mark.parametrize("name, way", WAYS)
def test_on_devices(name, way):
    """Nothing but one merge of Carries travels, and positions where a ring buffer has them. The six
    keys of a device fill a page, or one and a half.
    """
    mesh = jax.make_mesh((N,), ("keys",), (AxisType.Auto,), devices=jax.devices()[:N])
    cache, every = filled(name)
    q = np.random.default_rng(4).standard_normal((CU[-1], H, D)).astype(np.float32)
    halves = name in ("one piece", "ring buffer")
    strategy = Ragged(AttentionMetadata(blocksize_k=4 if halves else None), axis_name="keys")
    run = lambda q, cache: packed(q, cache, cache.length, strategy, kv_positions=cache.positions)
    shardings = cache.key_shardings(mesh, "keys")
    if way == "manual":
        specs = P(), jax.tree.map(lambda x: x.spec, shardings)
        run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P())
    with jax.set_mesh(mesh):
        cache = jax.device_put(cache, shardings)
        program = jax.jit(run).lower(jnp.asarray(q), cache).compile()
        out = program(jnp.asarray(q), cache)
    atol = 0.05 if name == "int8" else 1e-5
    np.testing.assert_allclose(out, by_hand(q, every), rtol=0, atol=atol)
    gathered = re.findall(r" = (\w+)\[\S* all-(?:gather|to-all)\(", program.as_text())
    assert set(gathered) <= (set() if cache.positions is None else {"s32"}), gathered


def test_a_ring_buffer_without_positions_raises():
    """Also where its lengths are not known before the program runs. It was wrong in silence."""
    cache, every = filled("ring buffer")
    q = np.random.default_rng(4).standard_normal((CU[-1], H, D)).astype(np.float32)
    run = jax.jit(lambda q, cache, at: packed(q, cache, cache.length, Ragged(), kv_positions=at))
    out = run(q, cache, cache.positions)
    np.testing.assert_allclose(out, by_hand(q, every), rtol=0, atol=1e-5)
    with pytest.raises(Exception, match=r"at most the 24 keys.*kv_positions=cache\.positions"):
        jax.block_until_ready(run(q, cache, None))


def test_keys_that_devices_cannot_share():
    k = jnp.zeros((1, 10, K, D))
    mesh = jax.make_mesh((N,), ("keys",), (AxisType.Auto,), devices=jax.devices()[:N])
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match="10 keys.*4 devices of axis 'keys'.*multiple of 4"):
            ragged_attention(
                jnp.zeros((2, H, D)), k, k, jnp.array([0, 2]), jnp.array([5]), Ragged(axis_name="keys")
            )  # fmt: skip
