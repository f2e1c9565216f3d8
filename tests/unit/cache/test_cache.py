"""Caches: appending token by token is attention over all tokens."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _caches import (
    B,
    CAPACITY,
    D,
    EXACT,
    FEW,
    FEW_EXACT,
    K,
    MAKE,
    paged,
    step,
    tokens,
    V,
    whole,
)  # fmt: skip
from _compiled import programs

from eqattn import attention, AttentionMetadata, Blockwise, Causal, Ragged, SlidingWindow, Tree
from eqattn.cache import KVCache, PagedKVCache, Pages, Quantized, QuantizedKVCache, RingBufferCache


@pytest.mark.parametrize("name", FEW_EXACT)
def test_steps_are_the_whole(name, x64):
    q, k, v = tokens(12)
    cache, outs = MAKE[name](jnp.float64), []
    stepped = jax.jit(step)
    for start, stop in ((0, 5), (5, 6), (6, 9), (9, 12)):
        cache, out = stepped(cache, *(x[:, start:stop] for x in (q, k, v)))
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, 1), whole(q, k, v), rtol=0, atol=1e-13)
    assert cache.length.tolist() == [12] * B


@pytest.mark.parametrize("name", FEW_EXACT)
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
    with pytest.raises(
        ValueError, match=r"order of their positions.*kv_positions=cache\.positions"
    ):
        attention(q[:, :1], cache.key, cache.value, mask=cache.mask(), q_offset=39)


@pytest.mark.parametrize("name, tolerance", [("paged int8", 0.01), ("float8", 0.06)])
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


@pytest.mark.parametrize("name", ["int8"])
def test_eight_bits_have_no_gradient(name):
    """Asked for one of what is appended, they raise; a gradient of the queries is as ever."""
    cache, (q, k, v) = MAKE[name](jnp.float32), tokens(3, jnp.float32)
    loss = lambda q, k, v: step(cache, q, k, v)[1].sum()
    for i in (1, 2):
        for derivative in (jax.grad, jax.jacfwd):
            with pytest.raises(NotImplementedError, match="8 bits.*stop their gradient"):
                derivative(loss, i)(q, k, v)
    held = step(cache, q, k, v)[0]
    other, held = KVCache.empty(B, CAPACITY, K, D, V), (held.key, held.value)
    held = [x.materialise()[:, :3] for x in held]
    want = jax.grad(lambda q: step(other, q, *held)[1].sum())(q)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(q, k, v), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", FEW)
def test_no_rows(name):
    cache = MAKE[name](jnp.float32).reorder(jnp.zeros(0, jnp.int32))
    cache, out = step(cache, *(x[:0] for x in tokens(3, jnp.float32)))
    assert out.shape == (0, 3, 4, V) and cache.length.shape == (0,)


@pytest.mark.parametrize("pages", [False])
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
    with pytest.raises(ValueError, match="must divide 2 heads, got 3 devices"):
        QuantizedKVCache.empty(B, CAPACITY, K, D, V, head_shares=3)
    with pytest.raises(ValueError, match=r"scales \(3, 5, 2\) do not fit.*\(3, 1, 10\)"):
        Quantized(jnp.zeros((3, 5, 2, 8), jnp.int8), jnp.zeros((3, 5, 2)), jnp.float32)


@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16, jnp.uint8, jnp.int4, jnp.int16])
def test_what_cannot_hold_eight_bits(stored):
    with pytest.raises(ValueError, match="int8 or a float8 dtype.*got " + jnp.dtype(stored).name):
        QuantizedKVCache.empty(B, CAPACITY, K, D, V, stored=stored)
    with pytest.raises(ValueError, match="int8 or a float8 dtype"):
        PagedKVCache.empty(B, CAPACITY, 20, 4, K, D, V, stored=stored)
    with pytest.raises(ValueError, match="int8 or a float8 dtype"):
        Quantized.quantize(jnp.ones((1, 2, 3, 4)), stored)


@pytest.mark.parametrize("name", FEW)
def test_unused_places_may_hold_anything(name):
    q, k, v = tokens(6, jnp.float32)
    cache = MAKE[name](jnp.float32)
    counts = jnp.array([6, 2, 0], jnp.int32)

    def dirty(x):
        if jnp.issubdtype(x.dtype, jnp.unsignedinteger):  # all bits set are a NaN
            return jnp.full_like(x, jnp.iinfo(x.dtype).max)
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.full_like(x, jnp.nan) if floating else x

    clean = step(cache, q, k, v, counts)[1]
    spoiled = step(jax.tree.map(dirty, cache), q, k, v, counts)[1]
    for row, n in enumerate(counts.tolist()):
        assert (clean[row, :n] == spoiled[row, :n]).all()


@pytest.mark.parametrize("name", FEW_EXACT)
def test_truncate_drops_drafts(name, x64):
    q, k, v = tokens(10)
    cache, _ = step(MAKE[name](jnp.float64), *(x[:, :6] for x in (q, k, v)))
    drafts = tokens(3, seed=1)
    drafted, _ = step(cache, *drafts)
    back = drafted.truncate(jnp.full(B, 6, jnp.int32))
    _, got = step(back, *(x[:, 6:] for x in (q, k, v)))
    np.testing.assert_allclose(got, whole(q, k, v)[:, 6:], rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", FEW)
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


@pytest.mark.parametrize("name", FEW)
def test_too_many_tokens_raise(name):
    _, k, v = tokens(CAPACITY + 1, jnp.float32)
    cache = MAKE[name](jnp.float32)
    if cache.overwrites:
        with pytest.raises(ValueError, match="in parts"):
            cache.append(k, v)
        return
    full = cache.append(k[:, 1:], v[:, 1:])
    more = lambda c: c.append(k[:, :1], v[:, :1])
    for append in (jax.jit(more), more):
        with pytest.raises(Exception, match="cache is full"):
            jax.block_until_ready(append(full))


@pytest.mark.parametrize("name", MAKE)
def test_an_append_outside_of_jit_is_one_program(name):
    """It was up to 21. Another has the same one, and as many tokens as it is told."""
    _, k, v = tokens(3, jnp.float32)
    cache, counts = MAKE[name](jnp.float32), np.array([3, 1, 2], np.int32)
    assert programs(lambda: cache.append(k, v, counts)) == 1
    once = cache.append(k, v, counts)
    assert programs(lambda: once.append(k, v, counts[::-1].copy())) == 0
    assert once.append(k, v, counts[::-1].copy()).length.tolist() == [5, 2, 5]


def test_wrong_arguments_raise(unchecked):
    _, k, v = tokens(2, jnp.float32)
    cache = MAKE["dense"](jnp.float32)
    for key, value in ((k[:2], v[:2]), (k[..., :4], v), (k, v[:, :1]), (k[0], v[0])):
        with pytest.raises(ValueError, match="do not fit a cache"):
            cache.append(key, value)
    with pytest.raises(TypeError, match="counts must be integers"):
        cache.append(k, v, jnp.ones(B))
    with pytest.raises(Exception, match="number of new tokens, 2"):
        jax.block_until_ready(cache.append(k, v, jnp.array([1, 3, 0])).key)
    with pytest.raises(Exception, match="more tokens than it has"):
        jax.block_until_ready(cache.truncate(jnp.array([0, 1, 0])).length)


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


def test_blocks_of_keys_are_pages():
    """All pages of a call have one size, and a block of keys is a page."""
    q, caches = jnp.zeros((B, 1, 4, D)), {n: paged_by(n) for n in (4, 8)}
    run = lambda key, value, size, **kw: attention(
        q, caches[key].key, caches[value].value, Ragged(AttentionMetadata(blocksize_k=size), **kw)
    )
    for size in (None, 4):
        assert run(4, 4, size).attention_outputs.shape == (B, 1, 4, V)
    with pytest.raises(ValueError, match=r"one size, got \[4\] and 8; leave blocksize_k None"):
        run(4, 4, 8)
    with pytest.raises(ValueError, match=r"one size, got \[4, 8\] and None"):
        run(4, 8, None)
    with pytest.raises(ValueError, match="give the metadata blocksize_k=4"):
        run(4, 4, None, bitwise=True)


def paged_by(size):
    return PagedKVCache.empty(B, CAPACITY, 20, size, K, D, V).reserve(4)


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


def test_lists_and_ints_are_arrays(unchecked):
    _, k, v = tokens(4, jnp.float32)
    for make in (MAKE["dense"], MAKE["ring buffer"], MAKE["paged"]):
        cache = make(jnp.float32)
        assert cache.append(k, v, [1, 2, 0]).length.tolist() == [1, 2, 0]
        assert cache.append(k, v, 3).truncate([2, 3, 1]).length.tolist() == [2, 3, 1]


NO_PAGES = PagedKVCache.empty(2, CAPACITY, 20, 4, K, D)
ERRORS = {
    "counts": (lambda c, k, v: c.append(k, v, [1, 2]), ValueError, r"counts must be an int or integers \[3\]"),
    "shapes": (lambda c, k, v: KVCache(k, v[:2], c.length), ValueError, r"got \(3, 4, 2, 8\), \(2, 4, 2, 6\) and"),
    "float counts": (lambda c, k, v: c.append(k, v, 1.5), TypeError, "counts must be integers"),
    "lengths": (lambda c, k, v: c.truncate([1, 2]), ValueError, r"lengths must be integers \(3,\)"),
    "rows": (lambda c, k, v: NO_PAGES.release(1), ValueError, r"such as \[1\]"),
    "float pages": (lambda c, k, v: NO_PAGES.reserve([16.9, 0]), TypeError, "counts must be integers"),
    "fewer pages": (lambda c, k, v: NO_PAGES.reserve([-5, 0]), ValueError, "at least 0"),
    "pages of other rows": (lambda c, k, v: NO_PAGES.reserve([1, 2, 3]), ValueError, r"integers \(2,\)"),
    "page size": (lambda c, k, v: PagedKVCache.empty(2, 8, 20, 0, K, D), ValueError, "page_size=0 tokens and pages=20 must be"),
    "shares": (lambda c, k, v: QuantizedKVCache.empty(2, 8, K, D, head_shares=0), ValueError, "must divide 2 heads, got 0 devices"),
    "bits of eight bits": (lambda c, k, v: KVCache.empty(2, 8, K, D, bits=True, stored=jnp.int8), ValueError, "bits=True keeps .* stored=int8 quantizes them: give one"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, unchecked):
    call, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        call(KVCache.empty(B, CAPACITY, K, D, V), *tokens(4, jnp.float32)[1:])
