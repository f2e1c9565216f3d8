"""Caches: appending token by token is attention over all tokens."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqattn import (
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    Dense,
    Ragged,
    SlidingWindow,
    Tree,
)
from eqattn.cache import (
    KVCache,
    PagedKVCache,
    Pages,
    Quantized,
    QuantizedKVCache,
    RingBufferCache,
    StackedKVCache,
)


B, H, K, D, V = 3, 4, 2, 8, 6
CAPACITY = 24


def paged(stored=None, dtype=jnp.float32):
    cache = PagedKVCache.empty(B, CAPACITY, 20, 4, K, D, V, dtype, stored)
    shuffled = jnp.asarray(np.random.default_rng(0).permutation(20)[:18].reshape(B, 6), jnp.int32)
    return eqx.tree_at(lambda c: c.table, cache, shuffled)


MAKE = {
    "dense": lambda dtype: KVCache.empty(B, CAPACITY, K, D, V, dtype),
    "ring buffer": lambda dtype: RingBufferCache.empty(B, CAPACITY, K, D, V, dtype),
    "paged": lambda dtype: paged(dtype=dtype),
    "int8": lambda dtype: QuantizedKVCache.empty(B, CAPACITY, K, D, V, dtype),
    "paged int8": lambda dtype: paged(jnp.int8, dtype),
    "float8": lambda dtype: QuantizedKVCache.empty(B, CAPACITY, K, D, V, dtype, jnp.float8_e4m3fn),
}
EXACT = ("dense", "ring buffer", "paged")


def tokens(t, dtype=jnp.float64, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((B, t, H, D), (B, t, K, D), (B, t, K, V))
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]


def step(cache, q, k, v, counts=None, mask=Causal(), strategy=Ragged):
    offset, dtype = cache.length, q.dtype
    cache = cache.append(k, v, counts)
    out = attention(
        q, cache.key, cache.value, strategy(AttentionMetadata(runtime_dtype=dtype)),
        mask=mask & cache.mask(), q_offset=offset, kv_positions=cache.positions,
    )  # fmt: skip
    return cache, out.attention_outputs


def whole(q, k, v, mask=Causal()):
    strategy = Dense(AttentionMetadata(runtime_dtype=q.dtype))
    return attention(q, k, v, strategy, mask=mask).attention_outputs


@pytest.mark.parametrize("name", EXACT)
def test_steps_are_the_whole(name, x64):
    q, k, v = tokens(12)
    cache, outs = MAKE[name](jnp.float64), []
    stepped = jax.jit(step)
    for start, stop in ((0, 5), (5, 6), (6, 9), (9, 12)):
        cache, out = stepped(cache, *(x[:, start:stop] for x in (q, k, v)))
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, 1), whole(q, k, v), rtol=0, atol=1e-13)
    assert cache.length.tolist() == [12] * B


@pytest.mark.parametrize("name", EXACT)
def test_rows_of_unequal_length(name, x64):
    """Each row takes its first `counts` tokens, in every step."""
    q, k, v = tokens(12)
    cache = MAKE[name](jnp.float64)
    want = whole(q, k, v)
    done = np.zeros(B, int)
    for counts in ([3, 0, 4], [0, 2, 3], [4, 4, 1]):
        at = np.minimum(done[:, None] + np.arange(4), 11)
        pieces = [x[np.arange(B)[:, None], at] for x in (q, k, v)]
        cache, out = step(cache, *pieces, counts=jnp.asarray(counts, jnp.int32))
        for row, n in enumerate(counts):
            there = slice(done[row], done[row] + n)
            np.testing.assert_allclose(out[row, :n], want[row, there], rtol=0, atol=1e-13)
        done += counts
        assert cache.length.tolist() == done.tolist()


def test_a_ring_buffer_forgets_what_the_window_hides(x64):
    q, k, v = tokens(40)
    window = Causal() & SlidingWindow(5, 0)
    cache, outs = RingBufferCache.empty(B, 8, K, D, V, jnp.float64), []
    for start in range(0, 40, 3):
        cache, out = step(cache, *(x[:, start : start + 3] for x in (q, k, v)), mask=window)
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, 1), whole(q, k, v, window), rtol=0, atol=1e-13)
    assert sorted(cache.positions[0].tolist()) == list(range(32, 40))


@pytest.mark.parametrize(
    "name, tolerance", [("int8", 0.01), ("paged int8", 0.01), ("float8", 0.06)]
)
def test_eight_bits_are_close(name, tolerance):
    q, k, v = tokens(12, jnp.float32)
    cache, out = step(MAKE[name](jnp.float32), q, k, v)
    want = whole(q, k, v)
    error = float(jnp.linalg.norm(out - want) / jnp.linalg.norm(want))
    assert 0 < error < tolerance
    held = cache.key.materialise()[:, :12]
    exact, _ = step(KVCache.empty(B, CAPACITY, K, D, V), q, held, cache.value.materialise()[:, :12])
    _, again = step(exact.truncate(jnp.zeros(B, jnp.int32)), q, held, exact.value[:, :12])
    np.testing.assert_allclose(out, again, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_quantized_numbers(dtype):
    x = tokens(5, jnp.float32)[1].at[0, 0, 0].set(0)
    q = Quantized.quantize(x, dtype)
    assert q.values.dtype == dtype and q.shape == x.shape and q.dtype == x.dtype
    step = 1 / 254 if dtype == jnp.int8 else 2**-4
    most = jnp.abs(x).max(-1, keepdims=True)
    assert (jnp.abs(q.materialise() - x) <= step * most * 1.0001).all()
    assert (q.materialise()[0, 0, 0] == 0).all()


@pytest.mark.parametrize("pages", [False, True])
def test_scales_in_shares_of_the_heads(pages):
    """However many devices share the heads, the numbers are the same; here all are on one."""

    def filled(shares):
        if pages:
            cache = PagedKVCache.empty(
                B, CAPACITY, 20, 4, K, D, V, stored=jnp.int8, head_shares=shares
            )
            cache = cache.reserve(CAPACITY)
        else:
            cache = QuantizedKVCache.empty(B, CAPACITY, K, D, V, head_shares=shares)
        q, k, v = tokens(5, jnp.float32)
        cache, _ = step(cache, q, k, v, jnp.array([5, 0, 3]))
        return step(cache, q, k, v, jnp.array([1, 5, 2]))

    (one, out), (two, again) = filled(1), filled(2)
    held = [x.key_pages if pages else x.key for x in (one, two)]
    assert [x.scales.shape[-2] for x in held] == [1, 2]
    if not pages:  # the first row took all five tokens: of each share the one head it has
        of_heads = jnp.abs(tokens(5, jnp.float32)[1][0]).max(-1).T / 127
        np.testing.assert_allclose(held[1].scales[0, :, :5], of_heads, rtol=1e-6)
    for x, y in zip((one.key, one.value), (two.key, two.value)):
        np.testing.assert_array_equal(x.materialise(), y.materialise())
    np.testing.assert_allclose(out, again, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="2 heads cannot be shared by 3 devices"):
        QuantizedKVCache.empty(B, CAPACITY, K, D, V, head_shares=3)
    with pytest.raises(ValueError, match=r"scales \(3, 5, 2\) do not fit.*\(3, 1, 10\)"):
        Quantized(jnp.zeros((3, 5, 2, 8), jnp.int8), jnp.zeros((3, 5, 2)), jnp.float32)


@pytest.mark.parametrize("name", MAKE)
def test_unused_places_may_hold_anything(name):
    q, k, v = tokens(6, jnp.float32)
    cache = MAKE[name](jnp.float32)
    counts = jnp.array([6, 2, 0], jnp.int32)

    def dirty(x):
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.full_like(x, jnp.nan) if floating else x

    clean = step(cache, q, k, v, counts)[1]
    spoiled = step(jax.tree.map(dirty, cache), q, k, v, counts)[1]
    for row, n in enumerate(counts.tolist()):
        assert (clean[row, :n] == spoiled[row, :n]).all()


@pytest.mark.parametrize("name", EXACT)
def test_truncate_drops_drafts(name, x64):
    q, k, v = tokens(10)
    cache, _ = step(MAKE[name](jnp.float64), *(x[:, :6] for x in (q, k, v)))
    drafts = tokens(3, seed=1)
    drafted, _ = step(cache, *drafts)
    back = drafted.truncate(jnp.full(B, 6, jnp.int32))
    _, got = step(back, *(x[:, 6:] for x in (q, k, v)))
    np.testing.assert_allclose(got, whole(q, k, v)[:, 6:], rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", MAKE)
def test_reorder(name):
    q, k, v = tokens(6, jnp.float32)
    cache, _ = step(MAKE[name](jnp.float32), *(x[:, :5] for x in (q, k, v)))
    rows = jnp.array([2, 0, 1])
    _, want = step(cache, *(x[:, 5:] for x in (q, k, v)))
    _, got = step(cache.reorder(rows), *(x[rows, 5:] for x in (q, k, v)))
    np.testing.assert_allclose(got, want[rows], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("rows", [[0, 2, 3], [-1, 0, 1]])
def test_rows_that_are_not_there_raise(name, rows, unchecked):
    """Else the nearest row would be taken, and two rows of a paged cache write to one page."""
    cache = MAKE[name](jnp.float32)
    with pytest.raises(Exception, match="rows must be between 0 and 2"):
        jax.block_until_ready(cache.reorder(jnp.array(rows)).length)
    with pytest.raises(ValueError, match="rows must be integers"):
        cache.reorder(jnp.array([0.0, 1.0]))
    if isinstance(cache, PagedKVCache):
        with pytest.raises(Exception, match="rows must be between 0 and 2"):
            jax.block_until_ready(cache.release(jnp.array(rows)).length)
        with pytest.raises(ValueError, match="A mask of rows"):
            cache.release(jnp.array([True]))


@pytest.mark.parametrize("name", MAKE)
def test_too_many_tokens_raise(name):
    _, k, v = tokens(CAPACITY + 1, jnp.float32)
    cache = MAKE[name](jnp.float32)
    if name == "ring buffer":
        with pytest.raises(ValueError, match="in parts"):
            cache.append(k, v)
        return
    full = cache.append(k[:, 1:], v[:, 1:])
    with pytest.raises(Exception, match="cache is full"):
        jax.block_until_ready(jax.jit(lambda c: c.append(k[:, :1], v[:, :1]))(full))


def test_wrong_arguments_raise(unchecked):
    _, k, v = tokens(2, jnp.float32)
    cache = MAKE["dense"](jnp.float32)
    for key, value in ((k[:2], v[:2]), (k[..., :4], v), (k, v[:, :1]), (k[0], v[0])):
        with pytest.raises(ValueError, match="do not fit a cache"):
            cache.append(key, value)
    with pytest.raises(ValueError, match="counts must be integers"):
        cache.append(k, v, jnp.ones(B))
    with pytest.raises(Exception, match="number of new tokens, 2"):
        jax.block_until_ready(cache.append(k, v, jnp.array([1, 3, 0])).key)
    with pytest.raises(Exception, match="more tokens than it has"):
        jax.block_until_ready(cache.truncate(jnp.array([0, 1, 0])).length)


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
    with pytest.raises(Exception, match="cannot be doubled"):
        jax.block_until_ready(cache.reorder(jnp.array([0, 0, 1])).length)


def test_written_in_place():
    """The memory of a donated cache is that of the new one, plain `jax.jit`."""
    for name in ("dense", "paged", "int8", "ring buffer"):
        cache = MAKE[name](jnp.float32)
        _, k, v = tokens(1, jnp.float32)
        append = jax.jit(lambda c, k, v: c.append(k, v), donate_argnums=0)
        compiled = append.lower(cache, k, v).compile().memory_analysis()
        big = sum(x.nbytes for x in jax.tree.leaves(cache) if x.ndim > 1 and x.dtype != jnp.int32)
        assert compiled.alias_size_in_bytes >= big
        assert compiled.temp_size_in_bytes < big / 2, (name, compiled.temp_size_in_bytes, big)


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
    with pytest.raises(ValueError, match="multiple of 64"):
        StackedKVCache.empty(3, B, 61, K, D)


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
        compiled = jitted.lower(stacked, *tokens(1, jnp.float32)).compile().memory_analysis()
        assert compiled.alias_size_in_bytes >= stacked.key.nbytes + stacked.value.nbytes
        sizes.append(compiled.temp_size_in_bytes)
    assert sizes[1] - sizes[0] < stacked.key.nbytes / 3 / 10  # a tenth of one layer's keys


@pytest.mark.parametrize("name", ["dense", "paged", "ring buffer"])
def test_sharded_heads_are_not_gathered(name):
    mesh = jax.make_mesh((2,), ("tp",), (AxisType.Auto,), devices=jax.devices()[:2])
    heads = lambda x: NamedSharding(mesh, P(*[None] * (x.ndim - 2), "tp") if x.ndim == 4 else P())
    q, k, v = tokens(1, jnp.float32)
    cache = MAKE[name](jnp.float32).append(*tokens(5, jnp.float32, seed=1)[1:])
    args = jax.tree.map(lambda x: jax.device_put(x, heads(x)), (cache, q, k, v))
    run = jax.jit(step).lower(*args).compile()
    collectives = r"= (\S+) (?:all-gather|all-to-all|all-reduce|collective-permute)\S*\("
    # The branches that raise tell each device the outcome of the first one's callback.
    for moved in re.findall(collectives, run.as_text()):
        assert re.match(rf"s32\[{B}(,1)?\]", moved), moved
    new, out = run(*args)
    assert out.sharding.spec == P(None, None, "tp")
    np.testing.assert_allclose(out, step(cache, q, k, v)[1], rtol=0, atol=1e-6)


def test_drafts_of_a_tree(x64):
    """The draft tokens see their ancestors among themselves, and all of the cache."""
    parents = jnp.array([-1, 0, 0, 1, 2], jnp.int32)
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]
    q, k, v = tokens(5, seed=1)
    cache = KVCache.empty(B, CAPACITY, K, D, V, jnp.float64).append(*tokens(7)[1:])
    md = AttentionMetadata(runtime_dtype=jnp.float64)
    seen = attention(q, cache.key, cache.value, Ragged(md), mask=cache.mask(), return_carry=True)
    drafts = attention(q, k, v, Ragged(md), mask=Tree(parents, start=0), return_carry=True)
    together = seen.carry.merge(drafts.carry).output()
    for i, path in enumerate(paths):
        path = jnp.array(path)
        _, want = step(cache, q[:, path], k[:, path], v[:, path])
        np.testing.assert_allclose(together[:, i], want[:, -1], rtol=0, atol=1e-13)


def test_only_ragged_reads_what_is_not_an_array():
    q, k, v = tokens(3, jnp.float32)
    cache = paged().append(k, v)
    assert isinstance(cache.key, Pages)
    with pytest.raises(ValueError, match="materialise"):
        attention(q, cache.key, cache.value, Blockwise(AttentionMetadata()))
    md = AttentionMetadata(runtime_dtype=jnp.float32)
    mask = Causal() & cache.mask()
    got = attention(q, cache.key, cache.value, Ragged(md), mask=mask).attention_outputs
    dense = [x.materialise() for x in (cache.key, cache.value)]
    want = attention(q, *dense, Blockwise(md), mask=mask).attention_outputs
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_gradients_reach_pages(x64):
    q, k, v = tokens(5)
    cache = paged(dtype=jnp.float64).append(k, v)
    mask = Causal() & cache.mask()

    def loss(cache, strategy, read):
        md = AttentionMetadata(runtime_dtype=jnp.float64)
        out = attention(q, read(cache.key), read(cache.value), strategy(md), mask=mask)
        return jnp.sum(jnp.sin(out.attention_outputs))

    floats = lambda c: eqx.partition(c, eqx.is_inexact_array)
    move, rest = floats(cache)
    one = lambda m: loss(eqx.combine(m, rest), Ragged, lambda x: x)
    two = lambda m: loss(eqx.combine(m, rest), Blockwise, lambda x: x.materialise())
    for transform in (jax.grad, lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (x,))[1]):
        got, want = (jax.jit(transform(f))(move) for f in (one, two))
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-12)
