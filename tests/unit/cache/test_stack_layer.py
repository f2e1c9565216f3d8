"""Keys and values of one layer, read in the arrays of all layers, or as pages by what reads no stack."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix.oracle import exact

from eqattn import (
    attention,
    AttentionMetadata,
    Blockwise,
    cascade_attention,
    Causal,
    KeyPadding,
    Ragged,
    ragged_attention,
    Selected,
    top_keys,
)
from eqattn._problem.storage import StackLayer
from eqattn.cache import Bitcast, StackedKVCache


L, B, T, H, K, S, D = 3, 2, 3, 4, 2, 192, 8
LENGTHS = np.array([100, 150], np.int32)
RNG = np.random.default_rng(0)
KEYS, VALUES = (RNG.normal(size=(L, B, S, K, D)) for _ in range(2))
QUERY = RNG.normal(size=(B, T, H, D))


def stack_of(keys=KEYS, values=VALUES, dtype=jnp.float64):
    lengths = jnp.asarray(np.tile(LENGTHS, (L, 1)))
    return StackedKVCache(jnp.asarray(keys, dtype), jnp.asarray(values, dtype), lengths)


def attend(keys, values, query, index, more=None, **kwargs):
    layer = stack_of(keys, values, query.dtype).layer(index)
    mask = Causal() & layer.mask()
    mask = mask if more is None else mask & more
    strategy = Ragged(AttentionMetadata(**kwargs))
    at = dict(mask=mask, q_offset=LENGTHS - T)
    return attention(query, layer.key, layer.value, strategy, **at).attention_outputs


SEEN = np.arange(S) <= (LENGTHS[:, None] - T + np.arange(T))[..., None]


def dense(keys, values, query, index):
    """Plain attention, of which JAX finds the gradients."""
    k, v = (jnp.repeat(x[index], H // K, 2) for x in (keys, values))
    s = jnp.einsum("bthd,bshd->bhts", query, k) / np.sqrt(D)
    p = jax.nn.softmax(jnp.where(SEEN[:, None], s, -jnp.inf), -1)
    return jnp.einsum("bhts,bshd->bthd", p, v)


def wanted(index, seen=SEEN):
    return exact(QUERY, KEYS[index], VALUES[index], visible=seen[:, None])[0]


def near(got, want, atol=1e-5):
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def as_float32(*xs):
    return [jnp.asarray(x, jnp.float32) for x in xs]


@pytest.mark.parametrize("index", [1])
def test_gradients_reach_one_layer(x64, index):
    args = [*map(jnp.asarray, (KEYS, VALUES, QUERY))]
    tangents = tuple(jnp.asarray(RNG.normal(size=x.shape)) for x in args)

    def derivatives(fn):
        at = lambda *xs: fn(*xs, jnp.int32(index))
        slope = jax.grad(lambda *xs: (at(*xs) ** 2).sum(), (0, 1, 2))
        return jax.jit(lambda *xs: (at(*xs), jax.jvp(slope, xs, tangents)))(*args)

    (out, *found), (_, *want) = derivatives(attend), derivatives(dense)
    near(out, wanted(index), 1e-12)
    jax.tree.map(lambda x, y: near(x, y, 1e-11), found, want)


AXES = [(None, None, 0, 0), (0, 1, None, None), (None, None, None, 0), (0, 0, None, 0)]


@pytest.mark.parametrize(
    "axes, platform", [(AXES[0], "auto"), (AXES[1], "interpret"), (AXES[2], "auto")]
)
def test_layers_under_vmap(axes, platform):
    """Each of two elements may look up another layer, or read another stack."""
    args = KEYS, VALUES, QUERY, np.array(1, np.int32)
    of_second = lambda x: (x + 1) % L if x.ndim == 0 else x[::-1]
    args = [x if a is None else np.stack([x, of_second(x)], a) for x, a in zip(args, axes)]
    args = *as_float32(*args[:3]), jnp.asarray(args[3])
    got = jax.vmap(ft.partial(attend, platform=platform), axes)(*args)
    near(got, jax.vmap(dense, axes)(*args))


@pytest.mark.parametrize("backend, index", [("tpu", 2), ("triton", 0)])
def test_kernels(backend, index):
    args = as_float32(KEYS, VALUES, QUERY)
    got = attend(*args, jnp.int32(index), platform="interpret", backend=backend)
    near(got, wanted(index))


def test_what_reads_pages():
    """Lists of keys, packed queries, and rows that share nothing."""
    query, cache = *as_float32(QUERY), stack_of(dtype=jnp.float32).layer(1)
    listed = np.stack([np.sort(RNG.choice(100, 20, replace=False)) for _ in range(B * T)])
    listed = listed.reshape(B, 1, T, 20).astype(np.int32)
    seen = SEEN & (listed[:, 0, :, :, None] == np.arange(S)).any(2)
    near(attend(*as_float32(KEYS, VALUES), query, jnp.int32(1), Selected(listed)), wanted(1, seen))
    ends, packed = jnp.arange(B + 1) * T, query.reshape(B * T, H, D)
    out = ragged_attention(packed, cache.key, cache.value, ends, cache.length, strategy=Ragged())
    near(out.attention_outputs.reshape(query.shape), wanted(1))
    out = cascade_attention(query, cache, q_offset=cache.length - T)
    near(out.attention_outputs, wanted(1))


@pytest.mark.parametrize("heads", [1, K])
def test_keys_and_values_of_different_layers(heads):
    keys, values = KEYS[:, :, :, :heads], VALUES[:, :, :, :heads]
    query, stack = *as_float32(QUERY), stack_of(keys, values, jnp.float32)
    mask = KeyPadding(LENGTHS)
    got = attention(query, stack.layer(0).key, stack.layer(2).value, Ragged(), mask=mask)
    seen = (np.arange(S) < LENGTHS[:, None])[:, None, None]
    near(got.attention_outputs, exact(QUERY, keys[0], values[2], visible=seen)[0])


def test_the_greatest_logits_of_a_layer():
    query, cache = *as_float32(QUERY), stack_of(dtype=jnp.float32).layer(2)
    got = top_keys(query, cache.key, 5, strategy=Ragged(), mask=KeyPadding(LENGTHS))
    logits = np.einsum("bthd,bshd->bhts", QUERY, np.repeat(KEYS[2], H // K, 2)) / np.sqrt(D)
    logits = np.where(np.arange(S) < LENGTHS[:, None, None, None], logits, -np.inf)
    assert (got.indices == np.argsort(-logits, -1)[..., :5]).all()


def test_the_form_of_a_layer():
    cache = stack_of(dtype=jnp.bfloat16).layer(1)
    bits = StackedKVCache.empty(L, B, S, K, D, dtype=jnp.bfloat16, bits=True).layer(1)
    assert isinstance(bits.stack.key, Bitcast)
    for key in (cache.key, bits.key):
        assert (key.shape, key.dtype, key.ndim, key.itemsize) == ((B, S, K, D), jnp.bfloat16, 4, 2)
    assert (cache.key.materialise() == cache.stack.key[1]).all()
    query = jnp.zeros((B, T, H, D), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"key_ .* which Blockwise does not read; use Ragged"):
        attention(query, cache.key, cache.value, Blockwise())


@pytest.mark.parametrize("capacity, size", [(192, 192), (256, 128), (320, 160), (512, 128)])
def test_pages_of_a_layer(capacity, size):
    """Where 128 divides the capacity, they are the blocks of a `bitwise` strategy."""
    for rows in (2, 0):
        layer = StackedKVCache.empty(L, rows, capacity, K, D).layer(1)
        pages = layer.key.pages()
        assert pages.page_size == size and pages.shape == (rows, capacity, K, D)
        first = rows * (capacity // size)
        assert (pages.table.reshape(-1) == np.arange(first, 2 * first)).all()
        nothing = StackLayer(jnp.zeros((L, rows, capacity, K, 0)), jnp.int32(1))
        assert nothing.pages().shape == (rows, capacity, K, 0)
