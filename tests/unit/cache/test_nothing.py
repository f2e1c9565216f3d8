"""Caches of no rows, of vectors without numbers, and calls for no rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _caches import MAKE

from eqattn import (
    attention,
    Blockwise,
    cascade_attention,
    Causal,
    nn,
    Ragged,
    ragged_attention,
    ragged_gqa,
    reference_gqa,
)
from eqattn.cache import (
    KVCache,
    LatentKVCache,
    PagedKVCache,
    QuantizedKVCache,
    RingBufferCache,
    StackedKVCache,
    StackedPagedKVCache,
)


FORMS = {
    "dense": lambda **kw: KVCache.empty(1, 32, **kw),
    "int8": lambda **kw: QuantizedKVCache.empty(1, 32, **kw),
    "float8": lambda **kw: QuantizedKVCache.empty(1, 32, stored="float8_e4m3fn", **kw),
    "paged int8": lambda **kw: PagedKVCache.empty(1, 32, 4, 8, **kw, stored="int8").reserve([8]),
    "stacked": lambda **kw: StackedKVCache.empty(2, 1, 64, **kw).layer(1),
}


@pytest.mark.parametrize("form", FORMS)
def test_latents_without_rotary_features(form):
    layer = nn.LatentAttention(
        2, 12, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=0, v_head_dim=4, key=jax.random.key(1)
    )  # fmt: skip
    x = jax.random.normal(jax.random.key(0), (4, 12))
    cache = LatentKVCache(FORMS[form](kv_heads=1, head_dim=0, value_dim=8))
    got, want = layer(x, "causal", cache=cache)[1], layer(x, "causal")
    rounded = form in ("int8", "float8", "paged int8")
    np.testing.assert_allclose(got, want, atol=0.1 if rounded else 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_values_without_numbers(form):
    cache = FORMS[form](kv_heads=1, head_dim=4, value_dim=0)
    k = jnp.ones((1, 3, 1, 4))
    cache = cache.append(k, k[..., :0])
    out = attention(k, cache.key, cache.value, Ragged(), mask=cache.mask())
    assert out.attention_outputs.shape == (1, 3, 1, 0)


@pytest.mark.parametrize("make", [KVCache, RingBufferCache, QuantizedKVCache])
def test_caches_of_no_rows(make):
    x = jnp.zeros((0, 3, 2, 4))
    assert make.empty(0, 64, 2, 4).append(x, x).length.shape == (0,)


def test_a_layer_of_no_rows():
    x = jnp.zeros((0, 3, 2, 4))
    cache = StackedKVCache.empty(2, 0, 64, 2, 4).layer(0).append(x, x)
    out = attention(x, cache.key, cache.value, Ragged(), mask=Causal() & cache.mask())
    assert out.attention_outputs.shape == x.shape


def test_packed_queries_of_no_rows():
    x, none = jnp.zeros((0, 3, 2, 4)), jnp.zeros(0, jnp.int32)
    kw = dict(kv_positions=jnp.zeros((0, 3), jnp.int32))
    assert ragged_attention(x[:, 0], x, x, jnp.zeros(1, jnp.int32), none, Ragged(), **kw).attention_outputs.shape == (0, 2, 4)  # fmt: skip


@pytest.mark.parametrize("n", [0, 1, 5])
def test_padding_of_no_rows(n):
    """As of a server whose rows have all ended."""
    keys, none = jnp.zeros((0, 3, 2, 4)), jnp.zeros(0, jnp.int32)
    flags = dict(return_carry=True, return_logsumexp=True, return_max_logits=True)
    args = jnp.ones((n, 4, 4)), keys, keys, jnp.zeros(1, jnp.int32), none, Ragged()
    out = ragged_attention(*args, **flags)
    assert out.attention_outputs.shape == (n, 4, 4) and not out.attention_outputs.any()
    assert out.logsumexp.shape == (n, 4) and (out.logsumexp == -jnp.inf).all()
    assert out.carry.numerator.shape == (n, 4, 4) and (out.max_logits == -jnp.inf).all()


def test_pages_without_parts():
    cache = PagedKVCache.empty(2, 0, pages=1, page_size=4, kv_heads=2, head_dim=4)
    new = jnp.ones((2, 1, 2, 4))
    assert cache.append(new, new, [0, 0]).length.tolist() == [0, 0]
    with pytest.raises(Exception, match="cache is full"):
        jax.block_until_ready(cache.append(new, new, [1, 0]))


@pytest.mark.parametrize("b, t", [(0, 3), (2, 0)])
def test_a_cascade_of_nothing(b, t):
    cache = PagedKVCache.empty(b, 32, pages=8, page_size=4, kv_heads=2, head_dim=4)
    flags = dict(return_carry=True, return_logsumexp=True, return_max_logits=True)
    out = cascade_attention(
        jnp.zeros((b, t, 4, 4)), cache, Ragged(), q_offset=cache.length, **flags
    )
    assert out.attention_outputs.shape == (b, t, 4, 4) and out.logsumexp.shape == (b, t, 4)
    assert out.max_logits.shape == (b, t, 4) and out.carry.numerator.shape == (b, t, 4, 4)


@pytest.mark.parametrize("kind", MAKE)
def test_no_rows_are_chosen(kind, unchecked):
    cache = MAKE[kind](jnp.float32)
    assert cache.reorder([]).length.shape == (0,)
    if kind.startswith("paged"):
        np.testing.assert_array_equal(cache.release([]).table, cache.table)


def test_places_of_a_ring_buffer_that_do_not_fit(unchecked):
    x = jnp.zeros((2, 12, 1, 4))
    with pytest.raises(ValueError, match=r"held \(2, 5\) must be \[b, capacity\] = \(2, 12\)"):
        RingBufferCache(x, x, jnp.zeros((2, 5), jnp.int32), jnp.zeros(2, jnp.int32))


def test_positions_of_no_rows():
    z, none = jnp.zeros, jnp.zeros((0, 2), jnp.int32)
    q, k = z((0, 2, 2, 4)), z((0, 2, 1, 4))
    cache = RingBufferCache.empty(batch=0, capacity=16, kv_heads=1, head_dim=4).append(k, k)
    for strategy, keys, at in (
        (Ragged(), (cache.key, cache.value), dict(kv_positions=cache.positions)),
        (Blockwise(), (k, k), dict(q_positions=none, kv_positions=none)),
    ):
        assert attention(q, *keys, strategy, mask=Causal(), **at).attention_outputs.shape == q.shape


def test_references_of_no_rows():
    z = jnp.zeros
    arrays = z((0, 4, 5)), z((0, 6, 2, 5)), z((0, 6, 2, 3)), z(0, jnp.int32)
    for fn in (ragged_gqa, reference_gqa):
        assert [x.shape for x in fn(*arrays)] == [(0, 4, 3), (0, 4, 1), (0, 4, 1)]


@pytest.mark.parametrize("kind, layers", [(PagedKVCache, ()), (StackedPagedKVCache, (2,))])
def test_a_pool_has_pages(kind, layers):
    with pytest.raises(ValueError, match="pages=0 must be at least 1"):
        kind.empty(*layers, 1, 10, 0, 5, 1, 4)
