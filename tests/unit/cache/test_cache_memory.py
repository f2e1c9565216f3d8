"""Where caches lie: pages that are reserved, layers in one array, memory that is written in place,
heads on several devices.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _caches import B, D, K, MAKE, step, tokens, V
from _programs import DEFAULT_CODE
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqattn import attention, AttentionMetadata, Blockwise, Causal, Dense, KeyPadding, Ragged
from eqattn.cache import (
    Bitcast,
    KVCache,
    LatentKVCache,
    PagedKVCache,
    Quantized,
    QuantizedKVCache,
    RingBufferCache,
    StackedKVCache,
    StackedPagedKVCache,
)
from eqattn.nn import MultiheadAttention


@pytest.mark.parametrize("layers", [None, 2])
def test_rows_that_end_may_be_a_traced_mask(layers):
    """It raised from inside of JAX, where the rows that met the end of their text are such a mask."""
    if layers is None:
        cache = PagedKVCache.empty(B, 16, 6, 4, K, D, V).reserve(3)
    else:
        cache = StackedPagedKVCache.empty(layers, B, 16, 6, 4, K, D, V).reserve(3)
    ends = np.arange(B) == 1
    want = cache.release([1])
    for release in (lambda c, m: c.release(m), jax.jit(lambda c, m: c.release(m))):
        got = release(cache, jnp.asarray(ends))
        jax.tree.map(np.testing.assert_array_equal, got, want)
    assert (want.table[1] == -1).all() and (want.table[0] >= 0).any()


def test_pages_are_reserved_and_released():
    cache = PagedKVCache.empty(B, 16, 6, 4, K, D, V)
    _, k, v = tokens(5, jnp.float32)
    with pytest.raises(Exception, match="no page for its new tokens"):
        jax.block_until_ready(cache.append(k, v).length)
    cache = cache.reserve([5, 5, 0]).append(k, v, jnp.array([5, 5, 0]))
    used = np.asarray(cache.table)
    assert (used >= 0).sum(1).tolist() == [2, 2, 0] and len(set(used[used >= 0])) == 4
    assert (cache.reserve(3).table[:2, :2] == cache.table[:2, :2]).all()
    with pytest.raises(ValueError, match="4 pages of 4 tokens are needed and 2 of 6 are free"):
        cache.reserve([8, 8, 0])
    with pytest.raises(ValueError, match="made for 16 a row"):
        cache.reserve([12, 0, 0])
    with pytest.raises(ValueError, match="outside of jax.jit"):
        jax.jit(lambda c: c.reserve(1))(cache)
    released = cache.release(jnp.array([0]))
    assert released.length.tolist() == [0, 5, 0]
    with pytest.raises(Exception, match="no page for its new tokens"):
        jax.block_until_ready(released.append(k, v, jnp.array([1, 0, 0])).length)
    again = released.reserve([0, 8, 4])
    assert len(np.unique(again.table[again.table >= 0])) == 5


def test_written_in_place():
    """The memory of a donated cache is that of the new one, plain `jax.jit`."""
    for name in ("dense", "paged", "int8", "ring buffer", "ring buffer with sinks"):
        cache = MAKE[name](jnp.float32)
        _, k, v = tokens(1, jnp.float32)
        append = jax.jit(lambda c, k, v: c.append(k, v), donate_argnums=0)
        compiled = append.lower(cache, k, v).compile(DEFAULT_CODE).memory_analysis()
        big = sum(x.nbytes for x in jax.tree.leaves(cache) if x.ndim > 1 and x.dtype != jnp.int32)
        assert compiled.alias_size_in_bytes >= big
        assert compiled.temp_size_in_bytes < big / 2, (name, compiled.temp_size_in_bytes, big)


def long_cache(kind, batch, capacity, kv_heads, dtype):
    sizes: Any = dict(kv_heads=kv_heads, head_dim=64, dtype=dtype)
    if kind == "int8":
        return QuantizedKVCache.empty(batch, capacity, **sizes)
    if kind == "paged":
        pages = batch * capacity // 16
        return PagedKVCache.empty(batch, capacity, pages, 16, **sizes).reserve(4)
    if kind == "stacked":
        return StackedKVCache.empty(2, batch, capacity, **sizes)
    return {"dense": KVCache, "ring buffer": RingBufferCache}[kind].empty(batch, capacity, **sizes)


def one_step(cache, q, k, v):
    """Of attention, over the second layer if there are several."""
    if isinstance(cache, StackedKVCache):
        new, out = step(cache.layer(1), q, k, v)
        return new.stack, out
    return step(cache, q, k, v)


KINDS = "dense", "ring buffer", "paged", "stacked", "int8"
SHAPES = (4, 1, 1), (4, 4, 8), (1, 1, 8), (1, 4, 1)  # heads of the keys, new tokens, rows
# Each value of each argument. tests/nightly/cache has all combinations.
STEPS = [
    (kind, (jnp.bfloat16, jnp.float32, jnp.float16)[i % 3], *SHAPES[i % 4])
    for i, kind in enumerate(KINDS)
]


@pytest.mark.parametrize("kind, dtype, kv_heads, new, batch", STEPS)
def test_no_step_copies_the_cache(kind, dtype, kv_heads, new, batch):
    cache = long_cache(kind, batch, 8192, kv_heads, dtype)
    args = [jax.ShapeDtypeStruct((batch, new, n, 64), dtype) for n in (8, kv_heads, kv_heads)]
    compiled = jax.jit(one_step, donate_argnums=0).lower(cache, *args).compile(DEFAULT_CODE)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes <= 2 * 2**20
    held = [x for x in jax.tree.leaves(cache) if x.ndim > 2]
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in held)


@pytest.mark.parametrize("kind, kv_heads", [("int8", 1)])
def test_no_step_copies_a_cache_of_any_capacity(kind, kv_heads):
    """A prime one: the last block of a row is padded when it is read. It was a copy of all keys."""
    cache = long_cache(kind, 8, 8191, kv_heads, jnp.bfloat16)
    args = [jax.ShapeDtypeStruct((8, 1, n, 64), jnp.bfloat16) for n in (8, kv_heads, kv_heads)]
    memory = (
        jax.jit(one_step, donate_argnums=0)
        .lower(cache, *args)
        .compile(DEFAULT_CODE)
        .memory_analysis()
    )
    assert memory.temp_size_in_bytes <= 2**20


@pytest.mark.parametrize(
    "appended, tokens, dtype",
    [(False, 128, jnp.bfloat16), (False, 96, jnp.float32), (True, 96, jnp.bfloat16)],
)
def test_no_step_copies_keys_of_a_single_block(appended, tokens, dtype):
    """XLA gave them another layout, or made all of them wide."""
    q, k = (jax.ShapeDtypeStruct((64, n, 8, 64), dtype) for n in (1, tokens))
    cache = KVCache.empty(64, tokens, 8, 64, dtype=dtype)

    def attend(q, k, v, lengths):
        return attention(q, k, v, Ragged(), mask=KeyPadding(lengths)).attention_outputs

    lowered = jax.jit(attend).lower(q, k, k, jax.ShapeDtypeStruct((64,), jnp.int32))
    if appended:
        lowered = jax.jit(one_step, donate_argnums=0).lower(cache, q, q, q)
    # conftest.py switches these emitters off, and without them XLA copied none of float32.
    emitters = {"xla_cpu_use_fusion_emitters": True} if jax.__version__ < "0.11" else None
    compiled = lowered.compile(emitters)
    assert compiled.memory_analysis().temp_size_in_bytes < k.size * dtype.dtype.itemsize / 4


@pytest.mark.parametrize("dtype, kv_heads, batch", [(jnp.bfloat16, 2, 8)])
def test_no_layer_copies_its_cache(dtype, kv_heads, batch):
    strategy = Ragged(AttentionMetadata(runtime_dtype=dtype))
    made = dict(num_kv_heads=kv_heads, dtype=dtype, strategy=strategy)
    layer = MultiheadAttention(8, 64, key=jax.random.key(0), **made)
    cache = KVCache.empty(batch, 8192, kv_heads, 8, dtype=dtype)
    run = jax.jit(lambda cache, x: layer(x, mask="causal", cache=cache), donate_argnums=0)
    compiled = run.lower(cache, jax.ShapeDtypeStruct((batch, 1, 64), dtype)).compile(DEFAULT_CODE)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes <= min(2**20, jnp.asarray(cache.key).nbytes)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_narrow_floats_are_read_where_they_lie(dtype):
    """Whatever wrote them."""
    key = jax.ShapeDtypeStruct((8, 8192, 4, 64), dtype)
    query = jax.ShapeDtypeStruct((8, 1, 8, 64), jnp.bfloat16)
    if dtype != jnp.bfloat16:
        scales = jax.ShapeDtypeStruct((8, 1, 8192 * 4), jnp.float32)
        key = jax.eval_shape(lambda x, s: Quantized(x, s, jnp.bfloat16), key, scales)

    def attend(query, key, lengths):
        strategy = Ragged(AttentionMetadata(runtime_dtype=jnp.bfloat16))
        return attention(query, key, key, strategy, mask=KeyPadding(lengths)).attention_outputs

    lengths = jax.ShapeDtypeStruct((8,), jnp.int32)
    memory = jax.jit(attend).lower(query, key, lengths).compile(DEFAULT_CODE).memory_analysis()
    assert memory.temp_size_in_bytes <= 2 * 2**20


def test_bits_have_no_gradient():
    """Asked for one, they raise; a gradient of what is not appended is as ever."""
    cache = KVCache.empty(B, 64, K, D, V, bits=True)
    q, k, v = tokens(2, jnp.float32)
    loss = lambda q, k: step(cache, q, k, v)[1].sum()
    with pytest.raises(NotImplementedError, match="bits=False"):
        jax.grad(loss, 1)(q, k)
    other = KVCache.empty(B, 64, K, D, V)
    want = jax.grad(lambda q: step(other, q, k, v)[1].sum())(q)
    np.testing.assert_allclose(jax.grad(loss)(q, k), want, rtol=0, atol=1e-6)


def test_narrow_floats_are_bits_where_that_pays():
    """On a CPU; they read as arrays do, by `jax.numpy`, an index, NumPy and every strategy."""
    q, k, v = tokens(5, jnp.bfloat16)
    empty = dict(batch=B, capacity=64, kv_heads=K, head_dim=D, value_dim=V, dtype=jnp.bfloat16)
    cache, other = KVCache.empty(**empty), KVCache.empty(**empty, bits=False)
    assert isinstance(cache.key, Bitcast) and isinstance(other.key, jax.Array)
    for dtype in (jnp.float16, jnp.float32):
        assert isinstance(KVCache.empty(B, 64, K, D, dtype=dtype).key, jax.Array)
    cache, other = cache.append(k, v), other.append(k, v)
    for read in (jnp.asarray, np.asarray, lambda x: x[:, 2:7]):
        np.testing.assert_array_equal(read(cache.key), read(other.key))
    mask = Causal() & cache.mask()
    for strategy in (Blockwise(), Dense()):
        got, want = (
            attention(q, c.key, c.value, strategy, mask=mask).attention_outputs
            for c in (cache, other)
        )
        np.testing.assert_array_equal(got, want)


def test_bits_are_those_of_their_dtype():
    with pytest.raises(ValueError, match="bits of bfloat16 are uint16, got uint32"):
        Bitcast(jnp.zeros((1, 2, 1, 4), jnp.uint32), jnp.bfloat16)
    with pytest.raises(ValueError, match="give one of the two"):
        PagedKVCache.empty(1, 64, 4, 16, 1, 8, stored=jnp.int8, bits=True)
    x = tokens(2, jnp.bfloat16)[1]
    assert (Bitcast.of(x).materialise() == x).all()
    assert (
        len(Bitcast.of(x)) == len(list(Bitcast.of(x))) == len(x)
    )  # iterating over one never ended


def over_layers(stacked, q, k, v):
    def layer(carry, i):
        stacked, x = carry
        cache, out = step(stacked.layer(i), x, k, v)
        return (cache.stack, x + out.sum(-1, keepdims=True)), None

    return jax.lax.scan(layer, (stacked, q), jnp.arange(len(stacked.length)))[0]


def test_layers_in_one_cache(x64):
    q, k, v = tokens(5)
    stacked = StackedKVCache.empty(3, B, 128, K, D, V, jnp.float64)
    one = KVCache.empty(B, 128, K, D, V, jnp.float64)
    for start, stop in ((0, 3), (3, 5)):
        part = [x[:, start:stop] for x in (q, k, v)]
        stacked, got = jax.jit(over_layers)(stacked, *part)
        want, now = part[0], one
        for _ in range(3):
            now, out = step(one, want, *part[1:])
            want = want + out.sum(-1, keepdims=True)
        one = now
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)
        assert stacked.length.tolist() == [[stop] * B] * 3
    back = stacked.layer(1).truncate(jnp.full(B, 2, jnp.int32)).stack
    assert back.length.tolist() == [[5] * B, [2] * B, [5] * B]
    turned = stacked.layer(2).reorder(jnp.array([2, 0, 1])).stack
    assert (turned.key[2] == stacked.key[2][jnp.array([2, 0, 1])]).all()
    assert (turned.key[:2] == stacked.key[:2]).all()
    with pytest.raises(ValueError, match="as many as the layers have"):
        stacked.layer(0).reorder(jnp.array([0, 1]))
    for index, error in ((7, ValueError), (-1, ValueError), ([0], ValueError), (1.7, TypeError)):
        with pytest.raises(error, match="index must be"):
            stacked.layer(index)
    for index in (3, -1):
        with pytest.raises(Exception, match="index must be one of the 3 layers"):
            jax.block_until_ready(jax.jit(lambda s, i: s.layer(i).length)(stacked, index))


def test_unused_places_of_layers_may_hold_anything():
    q, k, v = tokens(3, jnp.float32)
    stacked = StackedKVCache.empty(2, B, 64, K, D, V)
    dirty = lambda x: jnp.full_like(x, jnp.nan) if x.ndim > 2 else x
    run = jax.jit(over_layers)
    (_, clean), (_, spoiled) = (run(s, q, k, v) for s in (stacked, jax.tree.map(dirty, stacked)))
    assert (clean == spoiled).all()


def test_layers_are_not_copied():
    sizes = []
    for capacity in (256, 4096):
        stacked = StackedKVCache.empty(3, B, capacity, K, D, V)
        jitted = jax.jit(over_layers, donate_argnums=0)
        compiled = (
            jitted.lower(stacked, *tokens(1, jnp.float32)).compile(DEFAULT_CODE).memory_analysis()
        )
        assert compiled.alias_size_in_bytes >= stacked.key.nbytes + stacked.value.nbytes
        sizes.append(compiled.temp_size_in_bytes)
    assert sizes[1] - sizes[0] < stacked.key.nbytes / 3 / 10  # a tenth of one layer's keys


@pytest.mark.parametrize("heads, dtype", [(1, "bfloat16"), ("latents", "int8")])
def test_pages_of_layers_are_not_copied(heads, dtype):
    """With one head, each layer of a scan copied the pages of all layers."""
    latent = heads == "latents"
    kv_heads, d, v = 1 if latent else heads, 16, 64
    kind = dict(stored=jnp.int8) if dtype == "int8" else dict(dtype=dtype)
    run_dtype = "float32" if dtype == "int8" else dtype

    def step(stacked, q, key, value):
        def layer(carry, i):
            stacked, x = carry
            cache = stacked.layer(i)
            cache = (LatentKVCache(cache) if latent else cache).append(key, value)
            keys = cache.key
            values = keys.c_kv if latent else cache.value
            out = attention(x, keys, values, Ragged(), mask=cache.mask()).attention_outputs
            out = jnp.concatenate([out, x[..., v:]], -1) if latent else out[..., :d]
            return ((cache.cache if latent else cache).stack, out), None

        return jax.lax.scan(layer, (stacked, q), jnp.arange(3))[0]

    sizes = []
    for capacity in (256, 4096):
        pages = B * capacity // 64
        stacked = StackedPagedKVCache.empty(3, B, capacity, pages, 64, kv_heads, d, v, **kind)
        new = [jnp.ones((B, 1, kv_heads, n), run_dtype) for n in (d, v)]
        q = jnp.ones((B, 1, 4, d + v if latent else d), run_dtype)
        compiled = jax.jit(step, donate_argnums=0).lower(stacked, q, *new).compile(DEFAULT_CODE)
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    nbytes = sum(x.nbytes for x in jax.tree.leaves(stacked.key_pages))
    assert sizes[1] - sizes[0] < nbytes / 3 / 10  # a tenth of one layer's keys


@pytest.mark.parametrize("name", ["dense", "paged"])
def test_sharded_heads_are_not_gathered(name):
    mesh = jax.make_mesh((2,), ("tp",), (AxisType.Auto,), devices=jax.devices()[:2])
    heads = lambda x: NamedSharding(mesh, P(*[None] * (x.ndim - 2), "tp") if x.ndim == 4 else P())
    q, k, v = tokens(1, jnp.float32)
    cache = MAKE[name](jnp.float32).append(*tokens(5, jnp.float32, seed=1)[1:])
    args = jax.tree.map(lambda x: jax.device_put(x, heads(x)), (cache, q, k, v))
    run = jax.jit(step).lower(*args).compile(DEFAULT_CODE)
    collectives = r"= (\S+) (?:all-gather|all-to-all|all-reduce|collective-permute)\S*\("
    # The branches that raise tell each device the outcome of the first one's callback.
    for moved in re.findall(collectives, run.as_text()):
        assert re.match(rf"s32\[{B}(,1)?\]", moved), moved
    new, out = run(*args)
    assert out.sharding.spec == P(None, None, "tp")
    np.testing.assert_allclose(out, step(cache, q, k, v)[1], rtol=0, atol=1e-6)
