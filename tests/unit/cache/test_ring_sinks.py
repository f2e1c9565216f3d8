"""Ring buffers that keep the first tokens, against a model in float64 NumPy that has all tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _caches import B, D, H, K, step, V

from eqattn import Causal, SlidingWindow
from eqattn.cache import LatentKVCache, RingBufferCache


SINKS, WINDOW, NEW = 3, 5, 3
CAPACITY = SINKS + WINDOW + NEW - 1  # the least that suffices
MASK = Causal() & SlidingWindow(WINDOW - 1, 0, sinks=SINKS)
# How many tokens each row takes: two rows wrap around more than once, a third one hardly fills.
PARTS = [[3, 1, 0], [3, 2, 1], [3, 3, 0], [0, 3, 1], [3, 3, 1], [3, 1, 1], [2, 3, 3], [3, 3, 2]]


def ring(k=K, d=D, v=V, **kwargs):
    return RingBufferCache.empty(B, CAPACITY, k, d, v, sinks=SINKS, **kwargs)


FORMS = {
    "arrays": lambda: ring(dtype=jnp.float64),
    "bits": lambda: ring(dtype=jnp.float64, bits=True),
    "bfloat16": lambda: ring(dtype=jnp.bfloat16),
    "latents": lambda: LatentKVCache(ring(1, D - V, V, dtype=jnp.float64)),
}


def model(q, k, v, cotangent):
    """The output of one query `[h, d]`, the newest of its tokens, and the gradient that reaches it
    from a cotangent of the output. Keys are `[s, k, d]`.
    """
    last = len(k) - 1
    seen = [p for p in range(len(k)) if p < SINKS or last - p < WINDOW]
    k, v = (x[seen].repeat(H // x.shape[1], 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    logits = np.einsum("hd,shd->hs", q, k) * scale
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    worth = np.einsum("shv,hv->hs", v, cotangent)
    moved = p * (worth - (p * worth).sum(-1, keepdims=True))
    return np.einsum("hs,shv->hv", p, v), np.einsum("hs,shd->hd", moved, k) * scale


@jax.jit
def run(cache, q, k, v, counts, cotangent):
    def attend(q):
        cache_, out = step(cache, q, k, v, counts, mask=MASK)
        return out, cache_

    out, back, cache = jax.vjp(attend, q, has_aux=True)
    return cache, out, back(cotangent)[0]


def check_contents(cache, rows):
    """Of `rows`, all keys that each row has had. The order of the last ones is that of the turn."""
    key = cache.key if isinstance(cache.key, jax.Array) else cache.key.materialise()
    held, key = np.asarray(cache.positions), np.asarray(key, float)
    for row, keys in enumerate(rows):
        every = list(range(len(keys)))
        kept = every[:SINKS] + every[SINKS:][-(CAPACITY - SINKS) :]
        assert sorted(p for p in held[row] if p >= 0) == kept
        first = every[:SINKS] + [-1] * (SINKS - len(keys))
        assert held[row, :SINKS].tolist() == first
        for place in np.flatnonzero(held[row] >= 0):
            np.testing.assert_array_equal(key[row, place], keys[held[row, place]])


@pytest.mark.parametrize("form", FORMS)
def test_decoding_is_the_model(form, x64):
    """Values, gradients and contents over rows of their own lengths, which move and lose drafts."""
    cache, rng = FORMS[form](), np.random.default_rng(0)
    latents, dtype = form == "latents", cache.key.dtype
    rows = [[np.zeros((0, n, D)), np.zeros((0, n, V))] for n in [1 if latents else K] * B]
    atol = 0.04 if form == "bfloat16" else 1e-13
    draw = lambda *sizes: jnp.asarray(rng.standard_normal((B, NEW, *sizes)), dtype)
    for i, counts in enumerate(PARTS):
        if i == 5:
            order = [2, 0, 1]
            cache, rows = cache.reorder(jnp.array(order)), [rows[j] for j in order]
        if i == 6:  # as many as the last part had
            left = [len(keys) - n for (keys, _), n in zip(rows, PARTS[5])]
            cache = cache.truncate(jnp.array(left, jnp.int32))
            rows = [[x[:n] for x in row] for row, n in zip(rows, left)]
        q, k, v, cotangent = draw(H, D), draw(K, D), draw(K, V), draw(H, V)
        if latents:
            k, v = k[:, :, :1, V:], v[:, :, :1]
        cache, out, gradient = run(cache, q, k, v, jnp.array(counts, jnp.int32), cotangent)
        k = jnp.concatenate([v, k], -1) if latents else k
        q, k, v, cotangent, out, gradient = (
            np.asarray(x, np.float64) for x in (q, k, v, cotangent, out, gradient)
        )
        for row, n in enumerate(counts):
            for j in range(n):
                new = (x[row, j : j + 1] for x in (k, v))
                rows[row] = [np.concatenate(pair) for pair in zip(rows[row], new)]
                want = model(q[row, j], *rows[row], cotangent[row, j])
                for got, x in zip((out, gradient), want):
                    np.testing.assert_allclose(got[row, j], x, rtol=0, atol=atol)
        assert cache.length.tolist() == [len(keys) for keys, _ in rows]
        if i < 6:  # until drafts were dropped, in whose places nothing older comes back
            check_contents(cache, [keys for keys, _ in rows])
    assert max(map(int, cache.length)) > CAPACITY + 4


def test_what_a_row_loses_with_its_drafts(unchecked):
    """The first tokens come back only where they are appended again."""
    k = jnp.ones((1, 5, 1, 2))
    cache = RingBufferCache.empty(1, 7, 1, 2, sinks=2).append(k, k).append(k, k)
    assert cache.held.tolist() == [[0, 1, 7, 8, 9, 5, 6]]
    assert cache.truncate([6]).held.tolist() == [[0, 1, -1, -1, -1, 5, -1]]
    cache = cache.truncate([1])
    assert cache.held.tolist() == [[0] + [-1] * 6] and cache.sinks == 2
    assert cache.append(k, k).held.tolist() == [[0, 1, 2, 3, 4, 5, -1]]


def test_only_one_that_is_asked_to_keeps_the_first_tokens(unchecked):
    caches = [RingBufferCache.empty(1, 7, 1, 2, sinks=n) for n in (0, np.int64(2))]
    assert [x.sinks for x in caches] == [x.keeps_first for x in caches] == [0, 2]
    assert [LatentKVCache(x).keeps_first for x in caches] == [0, 2]
    assert len(jax.tree.leaves(caches[1])) == 4 and type(caches[1].sinks) is int
    assert RingBufferCache(*jax.tree.leaves(caches[0])).sinks == 0


@pytest.mark.parametrize(
    "sinks, kind, message",
    [
        (-1, ValueError, "sinks must be at least 0, got -1"),
        (1.0, TypeError, "sinks must be a Python int, got 1.0"),
        (True, TypeError, "sinks must be a Python int, got True"),
        (np.array([1]), TypeError, "sinks must be a Python int"),
        (7, ValueError, "sinks=7 need a capacity of at least 8, got 7"),
    ],
)
def test_impossible_sinks_raise(sinks, kind, message, unchecked):
    with pytest.raises(kind, match=message):
        RingBufferCache.empty(1, 7, 1, 2, sinks=sinks)


def test_too_many_tokens_for_the_places_after_the_sinks():
    cache, k = RingBufferCache.empty(1, 7, 1, 2, sinks=3), jnp.ones((1, 5, 1, 2))
    with pytest.raises(ValueError, match="RingBufferCache of 7 with sinks=3, which takes 4 at"):
        cache.append(k, k)
    with pytest.raises(ValueError, match="5 new tokens do not fit a RingBufferCache of 4, which"):
        RingBufferCache.empty(1, 4, 1, 2).append(k, k)
