"""Layers over a ring buffer that keeps the first tokens, against float64 NumPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from test_layer_cache import HELD, make, SIZE
from test_multihead import reference

from eqattn import Causal, KeyPadding, MaskFn, SlidingWindow
from eqattn.cache import LatentKVCache, RingBufferCache
from eqattn.nn import LatentAttention


T = 14
MASK = Causal() & SlidingWindow(3, 0, sinks=2)
PLAIN = dict(rotary=None, qk_norm=None, gating=None)


def by_hand(layer, x, left, sinks):
    far = np.arange(len(x))[:, None] - np.arange(len(x))
    seen = (far >= 0) & ((far <= left) | (np.arange(len(x)) < sinks))
    hide = lambda z: np.where(seen, z, -np.inf)
    return reference(
        layer, x, x, x, hide, sinks=np.asarray(layer.softmax_aux, float)[:, None, None]
    )


@pytest.mark.parametrize("window, new", [(None, 3), ((3, 0), 2)])
def test_decoding(window, new, x64):
    """A window of the layer has no sinks, so that it hides the first tokens."""
    layer, x = make(window=window, **PLAIN), normal(0, T, SIZE, dtype=jnp.float64)
    cache, outs = RingBufferCache.empty(1, 2 + 3 + new, *HELD, dtype=jnp.float64, sinks=2), []
    run = jax.jit(lambda cache, x: layer(x, mask=MASK, cache=cache))
    for i in range(0, T, new):
        cache, out = run(cache, x[i : i + new])
        outs.append(out)
    want = by_hand(layer, x, 3, 0 if window else 2)
    np.testing.assert_allclose(np.concatenate(outs), want, rtol=0, atol=1e-12)
    assert cache.held[0, :2].tolist() == [0, 1]


def test_latents():
    layer = LatentAttention(
        2, 16, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4,
        key=jax.random.key(0),
    )  # fmt: skip
    x, outs, run = normal(1, T, 16), [], eqx.filter_jit(layer)
    cache = LatentKVCache(RingBufferCache.empty(1, 7, 1, 4, 8, sinks=2))
    for i in range(0, T, 2):
        cache, out = run(x[i : i + 2], mask=MASK, cache=cache)
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs), run(x, mask=MASK), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="LatentKVCache of 7 with sinks=2 holds the first 2 and"):
        layer(x[:2], mask=Causal(), cache=cache)


@pytest.mark.parametrize(
    "mask, capacity, sinks",
    [
        (SlidingWindow(4, 0, sinks=2), 8, 2),
        (SlidingWindow(3, 0, sinks=3), 8, 3),
        (SlidingWindow(40, 0, sinks=9), 51, 9),
        (SlidingWindow(3, 0) | KeyPadding(jnp.array(5)), 10, 5),
        (SlidingWindow(4, 0), 6, 0),
        (SlidingWindow(3, 0) | MaskFn(lambda b, h, q, k: k == 2048), None, None),
        (Causal(), None, None),
    ],
    ids=range(7),
)
def test_a_mask_that_shows_more_says_what_it_needs(mask, capacity, sinks):
    """A ring of 7 has the first two tokens, and the three before each of two new ones."""
    layer, x = make(window=None, dtype=jnp.float32), normal(3, 2, SIZE)
    call = lambda n, sinks: layer(
        x, mask=mask, cache=RingBufferCache.empty(1, n, *HELD, sinks=sinks)
    )
    remedy = r"add a window such as SlidingWindow\(3, 0, sinks=2\) to the mask, take a larger"
    with pytest.raises(ValueError, match=remedy) as raised:
        call(7, 2)
    if capacity is None:
        assert "all are in" not in str(raised.value)
        return
    size = f"{capacity} with sinks={sinks}" if sinks else f"{capacity}"
    assert f"(all are in a RingBufferCache of {size}):" in str(raised.value)
    call(capacity, sinks)
    with pytest.raises(ValueError, match="are overwritten"):
        call(capacity - 1, sinks)


def test_a_ring_without_sinks_says_how_many_a_mask_has():
    layer, x = make(window=None, dtype=jnp.float32), normal(3, 4, SIZE)
    with pytest.raises(
        ValueError, match=r"RingBufferCache of 9 with sinks=1\): .*0\) to the mask, take"
    ):
        layer(x, mask=SlidingWindow(4, 0, sinks=1), cache=RingBufferCache.empty(1, 8, *HELD))


def test_a_window_of_the_layer_needs_places_after_the_sinks():
    layer, cache = make(dtype=jnp.float32), RingBufferCache.empty(1, 7, *HELD, sinks=2)
    layer(normal(3, 2, SIZE), mask="causal", cache=cache)
    with pytest.raises(ValueError, match="need a RingBufferCache of 8, got 7 with sinks=2; append"):
        layer(normal(3, 3, SIZE), mask="causal", cache=cache)


def test_what_truncating_lost():
    """Of 12 tokens, the first two and 4 to 11 are there. The first two are never lost."""
    layer, x = make(window=None, dtype=jnp.float32, **PLAIN), normal(3, T, SIZE)
    run = jax.jit(lambda cache, x: layer(x, mask=MASK, cache=cache))
    cache = RingBufferCache.empty(1, 10, *HELD, sinks=2)
    for i in range(0, 12, 4):
        cache, _ = run(cache, x[i : i + 4])
    want = by_hand(layer, x, 3, 2)
    for kept in (12, 7, 6, 3, 2, 1, 0):
        less, new = cache.truncate(jnp.array([kept])), slice(kept, kept + 2)
        if 2 < kept < 7:
            with pytest.raises(Exception, match="truncated"):
                jax.block_until_ready(run(less, x[new]))
        else:
            np.testing.assert_allclose(run(less, x[new])[1], want[new], rtol=0, atol=1e-5)
