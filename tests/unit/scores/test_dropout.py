"""Dropout: the bits, and attention under them. Their statistics: `test_dropout_statistics.py`."""

import functools as ft
import math

import _draw as draw
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from matrix import bound, oracle, oracle_dropout as od

from eqattn import attention, AttentionMetadata, Blockwise, Causal, Dense, dropout_mask
from eqattn.scores._dropout import dropped, keep_mask, kept_factor, seed_of, threefry


RATE = 0.3
B, T, S, H, K, D = (2,), 5, 7, 4, 2, 3
KEY = jax.random.key(7)


normal = ft.partial(draw.normal, dtype=None)


def metadata(**kwargs):
    return AttentionMetadata(dropout_prob=RATE, **kwargs)


STRATEGIES = {
    "dense": Dense(metadata()),
    "one block": Blockwise(metadata()),
    "blocks 2x3": Blockwise(metadata(blocksize_q=2, blocksize_k=3)),
    "blocks 1x7": Blockwise(metadata(blocksize_q=1, blocksize_k=7)),
    "blocks 5x1": Blockwise(metadata(blocksize_q=5, blocksize_k=1)),
}


# The generator


@pytest.mark.parametrize(
    "counter, key, want",
    [
        ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers_of_random123(counter, key, want):
    """`threefry2x32 20` of the `kat_vectors` of Random123."""
    as_words = lambda xs: tuple(jnp.uint32(x) for x in xs)
    got = threefry(as_words(key), as_words(counter))
    assert tuple(map(int, got)) == want


def test_is_the_generator_of_jax():
    """`fold_in` is Threefry of a counter `(0, data)`."""
    key = jax.random.key(123, impl="threefry2x32")
    words = jax.random.key_data(key)
    for data in (0, 1, 2**31, 2**32 - 1):
        got = threefry((words[0], words[1]), (jnp.uint32(0), jnp.uint32(data)))
        want = jax.random.key_data(jax.random.fold_in(key, jnp.uint32(data)))
        np.testing.assert_array_equal(jnp.stack(got), want)


def test_is_elementwise():
    """Words broadcast, so a block's bits are those of its pairs one by one."""
    q, k = jnp.arange(3, dtype=jnp.uint32)[:, None], jnp.arange(4, dtype=jnp.uint32)[None]
    key = jnp.uint32(5), jnp.uint32(6)
    x, y = threefry(key, (q, k))
    for i in range(3):
        for j in range(4):
            one = threefry(key, (jnp.uint32(i), jnp.uint32(j)))
            assert (x[i, j], y[i, j]) == one


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_bits_are_those_of_the_oracle(rate):
    """Every pair, in NumPy: of batch elements, heads and positions, negative ones and far ones."""
    places = np.array([-(2**30), -7, -1, 0, 1, 2, 1000, 2**20 + 3, 2**30 - 1], np.int32)
    keys = np.concatenate([places, np.arange(200, dtype=np.int32)])
    one = np.array([0, 5], np.int32), np.array([0, 1, 130], np.int32), places, keys
    index = [x.reshape([-1 if i == j else 1 for j in range(4)]) for i, x in enumerate(one)]
    drawn = jax.jit(keep_mask, static_argnums=2)
    for words in ((0, 0), (2**32 - 1, 12345)):
        got = drawn(jnp.asarray(words, jnp.uint32), [jnp.asarray(x) for x in index], rate)
        np.testing.assert_array_equal(got, od.kept_of_words(words, *index, rate))


def test_the_mask_is_that_of_the_oracle():
    places = np.arange(T)[:, None], np.arange(S)[None]
    want = od.kept(KEY, 2, H, *places, RATE)
    np.testing.assert_array_equal(dropout_mask(KEY, B, H, T, S, RATE), want)


# Keys


def test_raw_and_typed_keys_are_the_same():
    raw = jax.random.PRNGKey(7)
    np.testing.assert_array_equal(seed_of(raw), seed_of(jax.random.wrap_key_data(raw)))
    q, k, v = data(np.float32)
    f = jax.jit(lambda key: attention(q, k, v, STRATEGIES["dense"], key=key).attention_outputs)
    np.testing.assert_array_equal(f(raw), f(KEY))


def test_other_generators_work():
    seed = seed_of(jax.random.key(0, impl="rbg"))
    assert seed.shape == (2,) and seed.dtype == jnp.uint32


@pytest.mark.parametrize(
    "key, error, message",
    [
        (3, TypeError, "one key.*3"),
        ("seed", TypeError, "one key.*seed"),
        (jnp.zeros((2,), jnp.int32), TypeError, r"int32 of shape \(2,\)"),
        (jnp.zeros((2, 2), jnp.uint32), TypeError, r"uint32 of shape \(2, 2\)"),
        (jnp.zeros((3,), jnp.uint32), TypeError, r"shape=\(3,\)"),
        (jax.random.split(KEY, 2), ValueError, r"dropout key must be a single key.*\(2,\)"),
    ],
)
def test_what_is_not_one_key_raises(key, error, message, unchecked):
    with pytest.raises(error, match=message):
        attention(*data(np.float32), STRATEGIES["one block"], key=key)


# What attention drops


def data(dtype):
    return [
        normal(i, *B, n, heads, D, dtype=dtype)
        for i, (n, heads) in enumerate(((T, H), (S, K), (S, K)))
    ]


def problem(q, k, v, keep, bias=0.0):
    """Dropout on the probabilities, in the numerator only."""
    logits = lambda z: z / math.sqrt(D) + np.asarray(bias)
    kept = dict(keep=np.asarray(keep), rate=od.dropped_share(RATE))
    return oracle.plain_problem(q, k, v, logits, **kept)


@pytest.mark.parametrize("name", ["dense", "one block", "blocks 2x3"])
def test_every_strategy_and_block_size_drops_the_pairs_of_the_mask(name):
    q, k, v = data(np.float32)
    keep = dropout_mask(KEY, B, H, T, S, RATE)
    got = attention(q, k, v, STRATEGIES[name], key=KEY).attention_outputs
    bound.check(problem(q, k, v, keep), got)


def test_the_weights_show_the_mask():
    """Dropped weights are 0 and the others 1 / (1 - rate) of those without dropout."""
    q, k, v = data(np.float32)
    run = lambda **kwargs: attention(q, k, v, STRATEGIES["dense"], return_weights=True, **kwargs)
    with_, without = (
        np.asarray(run(**x).attention_weights) for x in ({"key": KEY}, {"inference": True})
    )
    keep = np.asarray(dropout_mask(KEY, B, H, T, S, RATE))
    np.testing.assert_allclose(with_, without * keep / (1 - RATE), rtol=1e-6)
    np.testing.assert_array_equal(with_ == 0, ~keep)


def test_logsumexp_and_denominator_know_nothing_of_it():
    q, k, v = data(np.float32)
    for name in ("dense", "blocks 2x3"):
        f = ft.partial(attention, q, k, v, STRATEGIES[name], return_logsumexp=True)
        np.testing.assert_array_equal(f(key=KEY).logsumexp, f(inference=True).logsumexp)


@pytest.mark.parametrize("name", ["blocks 2x3"])
def test_bits_follow_positions(name):
    """The tail of a sequence, or its rows one by one, meet the bits that they meet in the whole."""
    q, k, v = data(np.float32)
    f = jax.jit(
        lambda q, at: attention(q, k, v, STRATEGIES[name], key=KEY, q_offset=at).attention_outputs
    )
    whole = f(q, 0)
    tail = jnp.concatenate([f(q[:, i : i + 1], i) for i in range(T)], 1)
    np.testing.assert_allclose(tail, whole, rtol=1e-6, atol=1e-6)


def test_keys_matter_and_calls_repeat():
    q, k, v = data(np.float32)
    f = jax.jit(lambda key: attention(q, k, v, STRATEGIES["one block"], key=key).attention_outputs)
    np.testing.assert_array_equal(f(KEY), f(KEY))
    assert (f(KEY) != f(jax.random.key(8))).any()


def test_the_mean_over_keys_is_attention_without_dropout():
    q, k, v = data(np.float32)
    n = 2000
    f = lambda key: attention(q, k, v, STRATEGIES["one block"], key=key).attention_outputs
    outs = np.asarray(jax.jit(lambda keys: lax.map(f, keys))(jax.random.split(KEY, n)), np.float64)
    want = np.asarray(attention(q, k, v, STRATEGIES["one block"], inference=True).attention_outputs)
    z = (outs.mean(0) - want) / (outs.std(0) / math.sqrt(n))
    assert abs(z).max() < 5.5  # 120 entries of about N(0, 1)


# On and off


def test_no_key_raises_with_the_remedy():
    q, k, v = data(np.float32)
    for name in ("dense", "one block"):
        for call in (attention, jax.jit(attention, static_argnums=3)):
            with pytest.raises(ValueError, match="dropout_prob=0.3 needs a key: .*key=.*inference"):
                call(q, k, v, STRATEGIES[name])
        with pytest.raises(ValueError, match="dropout_rng=.*deterministic"):
            STRATEGIES[name].forward_native(q, k, v)


@pytest.mark.parametrize("name", ["dense", "blocks 2x3"])
def test_inference_switches_it_off(name):
    q, k, v = data(np.float32)
    off = type(STRATEGIES[name])(STRATEGIES[name].metadata.replace(dropout_prob=0.0))
    want = attention(q, k, v, off).attention_outputs
    for out in (
        attention(q, k, v, STRATEGIES[name], inference=True),
        attention(q, k, v, STRATEGIES[name], inference=True, key=KEY),
        attention(q, k, v, off, key=KEY),
        STRATEGIES[name].forward_native(q, k, v, deterministic=True, causal=False),
    ):
        np.testing.assert_array_equal(out.attention_outputs, want)


@pytest.mark.parametrize("inference", [1, 0, None, "no"])
def test_inference_is_static(inference, unchecked):
    with pytest.raises(TypeError, match="inference.*True or False"):
        attention(*data(np.float32), STRATEGIES["one block"], inference=inference, key=KEY)


@pytest.mark.parametrize("rate", [0.0, 1e-12, 0.5, 1 - 2**-33])
def test_extreme_rates(rate):
    keep = dropout_mask(KEY, (), 1, 64, 64, rate)
    assert keep.shape == (1, 64, 64) and keep.dtype == bool
    if rate != 0.5:
        assert keep.all() if rate < 0.5 else not keep.any()


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5, 1 - 2**-20, 1 - 1.3 * 2**-32, 1 - 2**-33])
def test_the_mean_over_all_words_is_1(rate):
    """Of the 2^32 words of a pair, each as likely as any other, some are kept, times a factor."""
    kept = 2**32 - round(od.dropped_share(rate) * 2**32)
    assert kept == 2**32 - dropped(rate) >= 1
    assert kept_factor(rate) * kept == 2**32


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, math.nan])
def test_rates_outside_raise(rate):
    with pytest.raises(ValueError, match=r"rate must be in \[0, 1\)"):
        dropout_mask(KEY, (), 1, 2, 2, rate)
    with pytest.raises(ValueError, match=r"dropout_prob must be in \[0, 1\)"):
        AttentionMetadata(dropout_prob=rate)


# Gradients


@pytest.mark.parametrize("name", ["blocks 2x3"])
def test_gradients_under_dropout_are_the_differences(name, x64):
    """Of the query, key, value and bias, with the mask held fixed."""
    strategy = type(STRATEGIES[name])(STRATEGIES[name].metadata.replace(runtime_dtype=jnp.float64))
    args = (*data(np.float64), normal(5, H, T, S))
    cotangent = normal(6, *B, T, H, D)
    direction = tuple(normal(7 + i, *x.shape) for i, x in enumerate(args))

    @jax.jit
    @ft.partial(jax.value_and_grad, argnums=(0, 1, 2, 3))
    def f(q, k, v, bias):
        out = attention(q, k, v, strategy, bias=bias, mask=Causal(2), key=KEY)
        return (out.attention_outputs * cotangent).sum()

    value, gradient = f(*args)
    moved = [f(*(x + e * d for x, d in zip(args, direction)))[0] for e in (1e-5, -1e-5)]
    got = sum((g * d).sum() for g, d in zip(gradient, direction))
    np.testing.assert_allclose(got, (moved[0] - moved[1]) / 2e-5, rtol=1e-7)
    causal = np.where(np.arange(S) <= np.arange(T)[:, None] + 2, 0, -np.inf)
    keep = dropout_mask(KEY, B, H, T, S, RATE)
    out = oracle.forward(problem(*args[:3], keep, np.asarray(args[3]) + causal)).out
    np.testing.assert_allclose(value, (out * cotangent).sum(), rtol=1e-12)


def test_the_gradient_of_a_value_shows_which_pairs_are_kept():
    """Of `sum(out)` w.r.t. `v` where all weights are equal: the number of kept queries."""
    z = jnp.zeros((T, 1, D))
    f = lambda v: attention(z, jnp.zeros((S, 1, D)), v, STRATEGIES["blocks 2x3"], key=KEY)
    gradient = jax.jit(jax.grad(lambda v: f(v).attention_outputs.sum()))(jnp.zeros((S, 1, D)))
    count = dropout_mask(KEY, (), 1, T, S, RATE)[0].sum(0)
    want = np.broadcast_to(count[:, None, None] / S / (1 - RATE), (S, 1, D))
    np.testing.assert_allclose(gradient, want, rtol=1e-6)
