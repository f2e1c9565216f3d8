"""Layers that go on from a cache, against float64 NumPy of the whole sequence."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from _programs import DEFAULT_CODE
from test_multihead import reference, rms, turn

from eqattn import (
    AttentionMetadata,
    Blockwise,
    Causal,
    ChunkedCausal,
    DenseMask,
    KeyPadding,
    MaskFn,
    Selected,
    SlidingWindow,
)
from eqattn.cache import KVCache, PagedKVCache, QuantizedKVCache, RingBufferCache, StackedKVCache
from eqattn.nn import MultiheadAttention, Rotary, rotary, with_strategy


T, SIZE, HEADS, KV_HEADS, DIM = 9, 24, 4, 2, 6
WINDOW, CAPACITY = (3, 0), 16
HELD = KV_HEADS, DIM


@ft.cache
def make(seed=0, dtype=jnp.float64, **kwargs):
    kwargs = dict(rotary=Rotary(), qk_norm="rms", gating="headwise", window=WINDOW) | kwargs
    key = jax.random.key(seed)
    layer = MultiheadAttention(HEADS, SIZE, num_kv_heads=KV_HEADS, dtype=dtype, key=key, **kwargs)
    return eqx.tree_at(
        lambda m: m.softmax_aux, layer, normal(9, HEADS, dtype=dtype), is_leaf=lambda x: x is None
    )


def whole(layer, x, rounded=lambda x: x):
    """Causal attention in the window. `rounded` is what storage makes of keys and values."""

    def process(q, k, v):
        q, k = (rms(x, 1.0) for x in (q, k))
        q, k = (turn(x, np.arange(len(x)), DIM) for x in (q, k))
        return q, rounded(k), rounded(v)

    def logits(z):
        back = np.arange(len(x))[:, None] - np.arange(len(x))
        return np.where((back >= 0) & (back <= WINDOW[0]), z, -np.inf)

    def gate(out):
        weight = np.asarray(layer.gate_proj.weight, float)
        return out / (1 + np.exp(-(np.asarray(x, float) @ weight.T)))[..., None]

    sinks = np.asarray(layer.softmax_aux, float)[:, None, None]
    return reference(layer, x, x, x, logits, process, sinks, gate=gate)


def eight_bits(x):
    scale = np.abs(x).max(-1, keepdims=True) / 127
    return np.round(x / scale) * scale


def paged(rows=1, **kwargs):
    cache = PagedKVCache.empty(rows, CAPACITY, 2 * rows * CAPACITY // 4, 4, *HELD, **kwargs)
    return cache.reserve(CAPACITY)


KINDS = {
    "dense": lambda **kwargs: KVCache.empty(1, CAPACITY, *HELD, **kwargs),
    "ring buffer": lambda **kwargs: RingBufferCache.empty(1, 8, *HELD, **kwargs),
    "paged": paged,
    "int8": lambda **kwargs: QuantizedKVCache.empty(1, CAPACITY, *HELD, **kwargs),
}


@ft.partial(jax.jit, donate_argnums=1)
def step(layer, cache, x, counts=None):
    return layer(x, mask="causal", cache=cache, counts=counts)


@pytest.mark.parametrize("name", ["ring buffer", "paged", "int8"])
def test_a_prompt_and_then_token_by_token(name, x64):
    layer, x = make(), normal(0, T, SIZE, dtype=jnp.float64)
    cache, outs = KINDS[name](dtype=jnp.float64), []
    for i, j in ((0, 5), *((i, i + 1) for i in range(5, T))):
        cache, out = step(layer, cache, x[i:j])
        outs.append(out)
    want, tolerance = whole(layer, x), 1e-12
    if name == "int8":
        assert np.abs(np.concatenate(outs) - want).max() > 1e-4
        want, tolerance = whole(layer, x, eight_bits), 1e-6  # scales are float32
    np.testing.assert_allclose(np.concatenate(outs), want, rtol=0, atol=tolerance)
    assert cache.length.tolist() == [T]


def test_the_largest_logit_of_each_query(x64):
    """Sinks do not count."""
    layer = make(rotary=None, qk_norm=None, gating=None, window=None)
    x, found = normal(0, T, SIZE, dtype=jnp.float64), []

    def logits(z):
        z = np.where(np.tril(np.ones((T, T), bool)), z, -np.inf)
        found.append(z.max(-1).T)
        return z

    sinks = np.asarray(layer.softmax_aux, float)[:, None, None]
    want = reference(layer, x, x, x, logits, sinks=sinks), found[0]
    got = layer(x, mask="causal", return_max_logits=True)
    cache, parts = KINDS["dense"](dtype=jnp.float64), []
    for part in (x[:5], x[5:]):
        cache, more = layer(part, mask="causal", cache=cache, return_max_logits=True)
        parts.append(more)
    for pair in (got, jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)):
        for a, b in zip(pair, want):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", ["mapped", "in front"])
def test_rows_of_unequal_length(form, x64):
    """A prompt, a shorter one and none, and then more of each."""
    layer, x = make(), normal(1, 3, T, SIZE, dtype=jnp.float64)
    want = np.stack([whole(layer, row) for row in x])
    empty = KVCache.empty(3, CAPACITY, *HELD, dtype=jnp.float64)
    mapped = jax.jit(jax.vmap(step, (None, 0, 0, 0)))
    cache, run = (empty, mapped) if form == "mapped" else (paged(3, dtype=jnp.float64), step)
    done = np.zeros(3, int)
    for counts in ([5, 2, 0], [1, 5, 3]):
        at = done[:, None] + np.minimum(np.arange(5), np.array(counts)[:, None])
        cache, out = run(layer, cache, x[np.arange(3)[:, None], at], jnp.array(counts, jnp.int32))
        for row, n in enumerate(counts):
            new = want[row, done[row] : done[row] + n]
            np.testing.assert_allclose(out[row, :n], new, rtol=0, atol=1e-12)
        done += counts
        assert cache.length.tolist() == done.tolist()


@pytest.fixture(scope="module")
def layers():
    return eqx.filter_vmap(lambda seed: make.__wrapped__(seed, jnp.float32))(jnp.arange(3))


@pytest.mark.parametrize("mapped", [False, True])
def test_a_scan_over_layers(mapped, layers):
    """With rows in front; and of one sequence, mapped over caches with an axis in front."""
    x = normal(2, 2, T, SIZE)
    empty = ft.partial(StackedKVCache.empty, 3, capacity=64, kv_heads=KV_HEADS, head_dim=DIM)
    caches = jax.vmap(lambda _: empty(batch=1))(jnp.arange(2)) if mapped else empty(batch=2)

    arrays, rest = eqx.partition(layers, eqx.is_array)

    def model(caches, x):
        def one(carry, args):
            (caches, x), (i, arrays) = carry, args
            layer = eqx.combine(arrays, rest)
            cache, out = layer(x, mask="causal", cache=caches.layer(i))
            return (cache.stack, x + out), None

        return jax.lax.scan(one, (caches, x), (jnp.arange(3), arrays))[0]

    run = jax.jit(jax.vmap(model) if mapped else model, donate_argnums=0)
    outs = []
    for i in range(0, T, 3):
        caches, out = run(caches, x[:, i : i + 3])
        outs.append(out)
    want = np.asarray(x, float)
    for i in range(3):
        layer = eqx.combine(jax.tree.map(lambda leaf: leaf[i], arrays), rest)
        want = want + np.stack([whole(layer, row) for row in want])
    np.testing.assert_allclose(np.concatenate(outs, 1), want, rtol=0, atol=2e-5)


def test_cross_attention_over_a_filled_cache(x64):
    layer = make(rotary=None, qk_norm=None, gating=None, window=None)
    x, memory = (normal(seed, n, SIZE, dtype=jnp.float64) for seed, n in ((3, T), (4, 7)))
    sinks = np.asarray(layer.softmax_aux, float)[:, None, None]
    hide = lambda z: np.where(np.arange(7) < 6, z, -np.inf)
    want = reference(layer, x, memory, memory, hide, sinks=sinks)
    cache = KVCache.empty(1, CAPACITY, *HELD, dtype=jnp.float64)
    read = jax.jit(lambda x, mask, cache, **call: layer(x, None, None, mask, cache=cache, **call),
                   static_argnames="append")  # fmt: skip
    # Without values, they are those of the keys.
    fill = jax.jit(lambda x, mask, cache: layer(x, memory, None, mask, cache=cache))
    cache, first = fill(x[:4], KeyPadding(jnp.array(6)), cache)
    filled, rest = read(x[4:], KeyPadding(jnp.array(6)), cache, append=False)
    np.testing.assert_allclose(np.concatenate([first, rest]), want, rtol=0, atol=1e-12)
    assert eqx.tree_equal(filled, cache)
    # A mask's array has the cache's places; a query's position is what the call says it is.
    mask = DenseMask(jnp.arange(CAPACITY)[None] < 6) & Causal(-3)
    _, got = read(x[4:], mask, cache, append=False, q_positions=jnp.arange(4, T))
    hide = lambda z: np.where(np.arange(7) < np.minimum(np.arange(2, 7), 6)[:, None], z, -np.inf)
    want = reference(layer, x[4:], memory, memory, hide, sinks=sinks)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


def test_process_heads_strategy_and_empty_places():
    """`process_heads` is of one sequence. Places without a token are hidden without a mask too."""
    seen = []

    def process(q, k, v):
        seen.append((q.shape, k.shape, v.shape))
        return q, k, 2 * v

    layer = make(rotary=None, qk_norm=None, gating=None, window=None, dtype=jnp.float32)
    x = normal(5, T, SIZE)
    sinks = np.asarray(layer.softmax_aux, float)[:, None, None]
    want = reference(layer, x, x, x, process=lambda q, k, v: (q, k, 2 * v), sinks=sinks)
    layer = with_strategy(layer, Blockwise(AttentionMetadata(blocksize_k=4)))
    seen_all = SlidingWindow(T - 1, None)  # a ring buffer has to know
    run = jax.jit(lambda cache: layer(x, mask=seen_all, cache=cache, process_heads=process))
    _, got = run(RingBufferCache.empty(1, 2 * T, *HELD))
    np.testing.assert_allclose(got, want, rtol=0, atol=4e-6)
    assert seen == [((T, HEADS, DIM), (T, KV_HEADS, DIM), (T, KV_HEADS, DIM))]
    with pytest.raises(ValueError, match="does not read; use Ragged"):
        layer(x, cache=KINDS["paged"]())


def test_a_mapped_row_is_written_in_place():
    cache = KVCache.empty(4, 4096, *HELD)
    run = jax.jit(jax.vmap(step, (None, 0, 0)), donate_argnums=1)
    lowered = run.lower(make(dtype=jnp.float32), cache, normal(6, 4, 1, SIZE))
    memory = lowered.compile(DEFAULT_CODE).memory_analysis()
    assert memory.alias_size_in_bytes >= cache.key.nbytes + cache.value.nbytes
    assert memory.temp_size_in_bytes < cache.key.nbytes / 4


@pytest.mark.parametrize(
    "mask, fits",
    [
        (SlidingWindow(4, 0), True),
        (SlidingWindow(5, 0), False),
        (Causal(), False),
        ("causal", False),
        (None, False),
        (Causal() & SlidingWindow(4, None), True),
        (Causal() & (SlidingWindow(1, 0) | SlidingWindow(5, 0)), False),
        (SlidingWindow(4, 0, sinks=1), False),
        (ChunkedCausal(5), True),
        (ChunkedCausal(6), False),
        (MaskFn(lambda b, h, q, k: (q - k < 5) & (k <= q)), True),
        (MaskFn(lambda b, h, q, k: q - k < 4 + h), False),
        (Causal() & (SlidingWindow(1, 0) | MaskFn(lambda b, h, q, k: k % 20 == 10)), False),
        (SlidingWindow(4, 0) & KeyPadding(jnp.array(3)), True),
        (KeyPadding(jnp.array(3)), False),
        (MaskFn(lambda b, h, q, k: (q - k < 2) & (k <= q)), True),
    ],
    ids=range(16),
)
def test_a_ring_buffer_knows_what_a_mask_may_show(mask, fits):
    """The four keys before each of four tokens are all that a ring of eight still has."""
    layer, x = make(window=None, dtype=jnp.float32), normal(3, 12, SIZE)
    run = jax.jit(lambda cache, x: layer(x, mask=mask, cache=cache))
    cache, outs = RingBufferCache.empty(1, 8, *HELD), []
    if not fits:
        with pytest.raises(ValueError, match="SlidingWindow.4, 0."):
            run(cache, x[:4])
        return
    for i in range(0, 12, 4):
        cache, out = run(cache, x[i : i + 4])
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs), layer(x, mask=mask), rtol=0, atol=1e-5)


def test_a_list_of_keys_and_a_window_over_a_ring_buffer():
    layer, x, near = make(window=None, dtype=jnp.float32), normal(3, 10, SIZE), SlidingWindow(4, 0)
    cache, chosen = RingBufferCache.empty(1, 9, *HELD), np.full((1, 10, 3), -1)
    chosen[0, 9] = 9, 7, 5
    run = eqx.filter_jit(layer)
    for start, stop in ((0, 4), (4, 8), (8, 9)):
        cache, _ = run(x[start:stop], mask=near, cache=cache)
    _, out = run(x[9:], mask=near & Selected(chosen[:, 9:]), cache=cache)
    want = run(x, mask=near & Selected(chosen))[9:]
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="SlidingWindow.8, 0."):
        layer(x[9:], mask=Selected(chosen[:, 9:]), cache=cache)


@pytest.mark.parametrize("append, dtype", [(False, "int32"), (True, "int32"), (False, "uint8")])
def test_older_queries_over_a_ring_buffer(append, dtype):
    """Ten tokens are in a ring of eight. A query that looks back at overwritten ones raises, where
    it was answered from those that are left (error 0.7). Positions may have no sign.
    """
    layer = make(rotary=None, qk_norm=None, gating=None, window=(3, 0), dtype=jnp.float32)
    x = normal(5, 10, SIZE)
    sinks = np.asarray(layer.softmax_aux, float)[:, None, None]
    far = np.arange(10)[:, None] - np.arange(10)
    hide = lambda z: np.where((far >= 0) & (far <= 3), z, -np.inf)
    want = reference(layer, x, x, x, hide, sinks=sinks)
    run = jax.jit(lambda cache, *xs, **kw: layer(*xs, mask="causal", cache=cache, **kw))
    cache = RingBufferCache.empty(1, 8, *HELD)
    for i in range(0, 8 if append else 10, 2):
        cache, _ = run(cache, x[i : i + 2])

    @jax.jit
    def read(cache, query, at):
        new = (x[8:], x[8:]) if append else ()
        call = dict(mask="causal", q_positions=at, cache=cache, append=append)
        return layer(query, *new, **call)[1]

    for position, held in ((7, True), (5, True), (4, False), (2, False)):
        args = cache, jnp.stack([x[position]] * 2), jnp.full(2, position, dtype)
        if held:
            got = np.asarray(read(*args))
            np.testing.assert_allclose(got, np.stack([want[position]] * 2), rtol=0, atol=4e-6)
        else:
            with pytest.raises(Exception, match="q_positions are too old"):
                jax.block_until_ready(read(*args))


@pytest.mark.parametrize("window", [None, WINDOW], ids=["mask", "layer"])
def test_a_ring_buffer_knows_what_truncating_lost(window):
    """A ring of 8 has the tokens 4 to 11 of 12. The next token is shown three before it."""
    layer, x = make(window=window, dtype=jnp.float32), normal(3, 14, SIZE)
    mask = SlidingWindow(*WINDOW) if window is None else None
    run = jax.jit(lambda cache, x: layer(x, mask=mask, cache=cache))
    cache = RingBufferCache.empty(1, 8, *HELD)
    for i in range(0, 12, 4):
        cache, _ = run(cache, x[i : i + 4])
    want = whole(layer, x)
    for kept in (12, 11, 7, 6, 2, 0):
        less, new = cache.truncate(jnp.array([kept])), slice(kept, kept + 2)
        if 0 < kept < 7:
            with pytest.raises(Exception, match="truncated"):
                jax.block_until_ready(run(less, x[new]))
        else:
            np.testing.assert_allclose(run(less, x[new])[1], want[new], rtol=0, atol=1e-5)


def test_counts_may_be_plain_numbers(unchecked):
    for x, counts in ((X, 3), (X[None], 3), (X[None], [3])):
        cache, _ = LAYER(x, cache=KINDS["dense"](), counts=counts)
        assert cache.length.tolist() == [3]
    assert rotary([[[1.0, 2.0]]], [0]).tolist() == [[[1.0, 2.0]]]


KEY = jax.random.key(0)
LAYER = make(dtype=jnp.float32)
X = normal(7, T, SIZE)
ERRORS = [
    (lambda: LAYER(X, counts=jnp.array(1)), ValueError, "pass cache= too"),
    (lambda: LAYER(X, append=False), ValueError, "pass cache= too"),
    (lambda: LAYER(X, X, cache=KINDS["dense"](), append=False), ValueError, "leave out key_"),
    (lambda: LAYER(X, cache=()), TypeError, "such as a KVCache.*got tuple"),
    (lambda: LAYER(X, cache=KVCache.empty(3, 9, *HELD)), ValueError, r"length \(3,\).*jax.vmap over both"),
    (lambda: LAYER(X[None], cache=KVCache.empty(3, 9, *HELD)), ValueError, r"\[1, tokens, features\]"),
    (lambda: LAYER(X[None], X, cache=KINDS["dense"]()), ValueError, r"key_ must be \[1, tokens"),
    (lambda: LAYER(X, cache=KINDS["dense"](), kv_positions=jnp.arange(T)), ValueError, "kv_positions: the cache knows"),
    (lambda: LAYER(X, cache=KINDS["dense"](dtype=jnp.bfloat16)), TypeError, "is of bfloat16.*dtype=jnp.float32"),
    (lambda: LAYER(X, cache=KINDS["ring buffer"]()), ValueError, "RingBufferCache of 12, got 8"),
    (lambda: LAYER(X, cache=KVCache.empty(1, 9, 4, 6)), ValueError, "do not fit a cache"),
    (lambda: LAYER(X[:, :7]), ValueError, r"\(9, 7\) has 7 features.* made for 24"),
    (lambda: LAYER(X, process_heads=lambda q, k, v: q), ValueError, "three arrays of query, key and value, got"),
    (lambda: LAYER(X[None], cache=KINDS["dense"](), counts=[1, 2]), ValueError, r"an int or integers \[1\]"),
    (lambda: LAYER(X, cache=KVCache.empty(1, 9, *HELD), counts=jnp.array([3])), ValueError, r"counts of one sequence .* must be an int.*got \(1,\)"),
    (lambda: MultiheadAttention(0, 32, key=KEY), ValueError, "num_heads must be at least 1"),
    (lambda: MultiheadAttention(64, 32, key=KEY), ValueError, "at most query_size=32"),
    (lambda: MultiheadAttention(4, 32, dropout_p="a", key=KEY), TypeError, "dropout_p must be a number"),
    (lambda: rotary(normal(0, 3, 1, 4), [0, 1, 2], scaling=2.0), TypeError, "such as YaRNScaling"),
    (lambda: Rotary(dim=3), ValueError, "even number"),
    (lambda: Rotary(dim=2.0), TypeError, "even int"),
    (lambda: jax.vmap(lambda c: LAYER(X, cache=c), (PagedKVCache(None, None, 0, 0),))(paged(2)), ValueError, "PagedKVCache would copy.*rows in front"),
    (lambda: jax.vmap(lambda c: LAYER(X, cache=c.layer(0)), 1)(StackedKVCache.empty(2, 2, 64, *HELD)), ValueError, "LayerCache would copy"),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("call, kind, message", ERRORS, ids=[m for *_, m in ERRORS])
def test_errors(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
