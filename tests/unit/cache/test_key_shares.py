"""What a step over a cache on several devices reads and sends, for every kind of cache: each device
holds its part of the tokens, gets no others, and one Carry of the step's rows is sent.
"""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _moved import moved
from _programs import DEFAULT_CODE
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from matrix.oracle import exact

from eqattn import attention, AttentionMetadata, Causal, Ragged, ragged_attention
from eqattn.cache import (
    KVCache,
    LatentKVCache,
    PagedKVCache,
    QuantizedKVCache,
    RingBufferCache,
    StackedKVCache,
    StackedPagedKVCache,
)


N, B, T, H, K, D, V = 4, 2, 3, 4, 2, 16, 8
RANK, ROTARY = 24, 8
HEADS = dict(kv_heads=K, head_dim=D, value_dim=V)
LATENTS = dict(kv_heads=1, head_dim=ROTARY, value_dim=RANK)


def paged(capacity, cls=PagedKVCache.empty, **own):
    return cls(batch=B, capacity=capacity, pages=capacity // 4, page_size=8, devices=N, **own)


MAKE = {
    "one piece": lambda n: KVCache.empty(B, n, **HEADS),
    "bits": lambda n: KVCache.empty(B, n, **HEADS, dtype=jnp.bfloat16, bits=True),
    "ring buffer": lambda n: RingBufferCache.empty(B, n, **HEADS),
    "int8": lambda n: QuantizedKVCache.empty(B, n, **HEADS),
    "pages": lambda n: paged(n, **HEADS),
    "int8 pages": lambda n: paged(n, **HEADS, stored=jnp.int8),
    "latents": lambda n: LatentKVCache.empty(B, n, RANK, ROTARY),
    "int8 latents": lambda n: LatentKVCache(QuantizedKVCache.empty(B, n, **LATENTS)),
    "pages of latents": lambda n: LatentKVCache(paged(n, **LATENTS)),
    "layers": lambda n: StackedKVCache.empty(2, B, max(n, 64), **HEADS),
    "pages of layers": lambda n: paged(
        n, ft.partial(StackedPagedKVCache.empty, layers=2), **HEADS, stored=jnp.int8
    ),
}


def attend(cache, query, offset, axis="keys"):
    if isinstance(cache, StackedKVCache | StackedPagedKVCache):
        cache = cache.layer(1)
    key = cache.key
    value = key.c_kv if isinstance(cache, LatentKVCache) else cache.value
    mask, strategy = Causal() & cache.mask(), Ragged(AttentionMetadata(), axis_name=axis)
    options = dict(mask=mask, q_offset=offset, kv_positions=cache.positions)
    return attention(query, key, value, strategy, **options).attention_outputs


def sizes_of(name):
    """The features of a query and of a value."""
    return (RANK + ROTARY, RANK) if "latents" in name else (D, V)


@pytest.mark.parametrize("name", ["int8 pages", "layers"])
def test_what_a_step_reads_and_sends(name):
    mesh = jax.make_mesh((N,), ("keys",), (AxisType.Auto,), devices=jax.devices()[:N])
    d, v = sizes_of(name)
    cache = jax.eval_shape(lambda: MAKE[name](2**15))
    placed = MAKE[name](32).key_shardings(mesh, "keys")
    like = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    cache = jax.tree.map(
        like, cache, jax.tree.unflatten(jax.tree.structure(cache), jax.tree.leaves(placed))
    )
    whole = NamedSharding(mesh, P())
    dtype = jnp.bfloat16 if name == "bits" else jnp.float32
    query = like(jax.ShapeDtypeStruct((B, T, H, d), dtype), whole)
    offset = like(jax.ShapeDtypeStruct((B,), jnp.int32), whole)
    with jax.set_mesh(mesh):
        program = jax.jit(attend).lower(cache, query, offset).compile(DEFAULT_CODE)
    names, sent = moved(program)
    assert names == {"all-reduce"} and sent <= 1.05 * B * T * H * (v + 2) * 4
    held = [x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)]
    shared = sum(n for n in held if n > 2**16)  # all but lengths and tables of pages
    memory = program.memory_analysis()
    rest = sum(held) - shared + query.size * dtype(0).itemsize + 64
    assert memory.argument_size_in_bytes <= shared / N + rest
    assert memory.temp_size_in_bytes < shared / N


@pytest.mark.parametrize("name", ["pages of latents"])
def test_latents_on_several_devices(name):
    """A prompt of unequal rows and drafts, against all probabilities in float64."""
    mesh = jax.make_mesh((N,), ("keys",), (AxisType.Auto,), devices=jax.devices()[:N])
    rng, lengths = np.random.default_rng(0), np.zeros(B, int)

    @jax.jit
    def step(cache, query, rest, latent, counts):
        offset = cache.length
        cache = cache.append(rest, latent, counts)
        return cache, attend(cache, query, offset)

    with jax.set_mesh(mesh):
        cache = MAKE[name](32)
        cache = jax.device_put(cache, cache.key_shardings(mesh, "keys"))
        for t, counts in ((9, [9, 4]), (3, [3, 1])):
            draw = lambda h, n, t=t: jnp.asarray(rng.standard_normal((B, t, h, n)), jnp.float32)
            query, new = draw(H, RANK + ROTARY), (draw(1, ROTARY), draw(1, RANK))
            if isinstance(cache.cache, PagedKVCache):
                cache = LatentKVCache(cache.cache.reserve(counts))
            cache, out = step(cache, query, *new, jnp.array(counts))
            lengths = lengths + counts
            keys = np.asarray(cache.key.materialise(), float)[:, :, 0]
            for row, (n, count) in enumerate(zip(lengths, counts)):
                for i in range(count):
                    seen = keys[row, : n - count + i + 1]
                    s = np.asarray(query[row, i], float) @ seen.T * (RANK + ROTARY) ** -0.5
                    p = np.exp(s - s.max(-1, keepdims=True))
                    want = p / p.sum(-1, keepdims=True) @ seen[:, :RANK]
                    np.testing.assert_allclose(out[row, i], want, atol=1e-5)


@pytest.mark.parametrize("name", ["one piece", "ring buffer", "int8 latents"])
def test_devices_that_cannot_share_a_capacity_equally(name):
    mesh = jax.make_mesh((N,), ("keys",), (AxisType.Auto,), devices=jax.devices()[:N])
    with pytest.raises(ValueError, match=r"4 devices .* of which there is a multiple of 4\."):
        MAKE[name](30).key_shardings(mesh, "keys")
    with pytest.raises(ValueError, match="kys"):
        MAKE[name](32).key_shardings(mesh, "kys")


PLACED = {
    "layers": lambda: StackedKVCache.empty(2, B, 64, 1, D),
    "pages of layers": lambda: paged(
        64, StackedPagedKVCache.empty, layers=2, kv_heads=1, head_dim=D
    ),
}


@pytest.mark.parametrize("name", PLACED)
def test_layers_lie_as_their_stack(name):
    """Those of pages were whole on each device."""
    mesh = jax.make_mesh((N,), ("keys",), (AxisType.Auto,), devices=jax.devices()[:N])
    stack = PLACED[name]()
    want = jax.tree.leaves(stack.key_shardings(mesh, "keys"))
    for held in (stack.layer(1), LatentKVCache(stack.layer(1))):
        *got, index = jax.tree.leaves(held.key_shardings(mesh, "keys"))
        assert got == want and index.spec == P()
    spread = [x.spec for x in want if x.spec != P()]
    assert len(spread) == 2 and {x[-1] for x in spread} == {"keys"}
    with pytest.raises(ValueError, match="which there is a multiple of 7"):
        devices = jax.devices()[:7]
        stack.key_shardings(jax.make_mesh((7,), ("keys",), devices=devices), "keys")


def test_layers_on_several_devices():
    """Tokens of a stack that is spread over devices, against one device's."""
    mesh = jax.make_mesh((N,), ("keys",), (AxisType.Auto,), devices=jax.devices()[:N])
    rng, draw = np.random.default_rng(0), lambda h, d: rng.standard_normal((B, T, h, d))
    stack, step = StackedKVCache.empty(2, B, 64, **HEADS), jax.jit(StackedKVCache.layer)
    with jax.set_mesh(mesh):
        stack = jax.device_put(stack, stack.key_shardings(mesh, "keys"))
        for _ in range(9):
            new = [jnp.asarray(draw(K, d), jnp.float32) for d in (D, V)]
            stack = step(stack, 1).append(*new).stack
        query = jnp.asarray(draw(H, D), jnp.float32)
        got = jax.jit(attend)(stack, query, stack.length[1] - T)
    assert (np.asarray(stack.length) == [[0] * B, [9 * T] * B]).all()
    keys, values = (np.asarray(x[1, :, : 9 * T]) for x in (stack.key, stack.value))
    seen = np.tri(9 * T, dtype=bool)[-T:]
    np.testing.assert_allclose(got, exact(query, keys, values, visible=seen)[0], atol=1e-5)


def test_packed_queries_of_layers_on_several_devices():
    """The pages of a stack lie in another order than those that devices share, and raised."""
    mesh = jax.make_mesh((N,), ("keys",), (AxisType.Auto,), devices=jax.devices()[:N])
    rng, lengths = np.random.default_rng(0), np.array([200, 77], np.int32)
    keys, values = (rng.normal(size=(2, B, 256, K, d)).astype(np.float32) for d in (D, V))
    query, ends = rng.normal(size=(B * T, H, D)).astype(np.float32), jnp.arange(B + 1) * T
    stack = StackedKVCache(*map(jnp.asarray, (keys, values)), jnp.asarray([lengths] * 2))
    strategy = Ragged(AttentionMetadata(), axis_name="keys")

    @jax.jit
    def run(stack):
        layer = stack.layer(1)
        out = ragged_attention(query, layer.key, layer.value, ends, layer.length, strategy=strategy)
        return out.attention_outputs

    with jax.set_mesh(mesh):
        got = run(jax.device_put(stack, stack.key_shardings(mesh, "keys")))
    at = lengths[:, None] - T + np.arange(T)
    seen = np.arange(256) <= at[..., None]
    want = exact(query.reshape(B, T, H, D), keys[1], values[1], visible=seen[:, None])[0]
    np.testing.assert_allclose(got, want.reshape(got.shape), rtol=0, atol=1e-5)


def test_pages_that_are_planned():
    """A cache of shapes alone raised a TypeError."""
    mesh = jax.make_mesh((N,), ("keys",), (AxisType.Auto,), devices=jax.devices()[:N])
    got = jax.eval_shape(lambda: paged(64, **HEADS)).key_shardings(mesh, "keys")
    want = paged(64, **HEADS).key_shardings(mesh, "keys")
    assert jax.tree.leaves(got) == jax.tree.leaves(want)
