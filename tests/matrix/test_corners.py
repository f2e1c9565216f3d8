"""Corners: garbage behind the mask, rows that see nothing, extreme sizes, blocks and logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqattn
from eqattn import masks as m

from . import bound, oracle, oracle_masks


STRATEGIES = ("blockwise", "dense", "ragged")
GARBAGE = (np.nan, np.inf, -np.inf, 3e38)


def draw(seed=0, b=2, t=24, s=24, h=4, kv=2, d=8, dv=8, scale=1.0):
    rng = np.random.default_rng(seed)
    shapes = ((b, t, h, d), (b, s, kv, d), (b, s, kv, dv))
    return tuple(jnp.asarray((scale * rng.standard_normal(x)).astype(np.float32)) for x in shapes)


@functools.cache
def _program(strategy, dtype, block, scale):
    @jax.jit
    def program(q, k, v, mask, sinks, use_ct_lse):
        metadata = eqattn.AttentionMetadata(
            runtime_dtype=dtype,
            softmax_scale=scale,
            softmax_aux=sinks,
            blocksize_q=block[0],
            blocksize_k=block[1],
        )
        impl = eqattn.AttentionRegistry.create(strategy, metadata)

        def call(q, k, v):
            output = eqattn.attention(q, k, v, impl, mask=mask, return_logsumexp=True)
            return output.attention_outputs, output.logsumexp

        (out, lse), pull = jax.vjp(call, q, k, v)
        ct_out, ct_lse = cotangents(out.shape, lse.shape)
        return out, lse, *pull((ct_out, ct_lse * use_ct_lse))

    return program


def run(q, k, v, mask, strategy="blockwise", block=(8, 8), ct_lse=True, sinks=None, scale=None):
    """out, lse and the gradients of q, k, v under fixed random cotangents. Equal calls share a
    program.
    """
    program = _program(strategy, q.dtype, block, scale)
    return [np.asarray(x) for x in program(q, k, v, mask, sinks, jnp.float32(ct_lse))]


def cotangents(out_shape, lse_shape):
    rng = np.random.default_rng(11)
    return tuple(
        jnp.asarray(rng.standard_normal(x).astype(np.float32)) for x in (out_shape, lse_shape)
    )


def check(q, k, v, visible, results, scale=None, **features):
    """Within the bound of the oracle."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    problem = oracle.Problem(
        q, k, v, scale=q.shape[-1] ** -0.5 if scale is None else scale, mask=visible, **features
    )
    precision = bound.precision_of(np.float32)
    out, lse, *grads = results
    cts = [np.asarray(x, np.float64) for x in cotangents(out.shape, lse.shape)]
    references = {**bound.values(problem, precision), **bound.grads(problem, *cts, precision)}
    names = ("out", "lse", "q", "k", "v")
    ratios = {
        n: bound.excess(x, references[n]) for n, x in zip(names, (out, lse, *grads), strict=True)
    }
    assert max(ratios.values()) <= 1, ratios


def same(actual, expected):
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32), err_msg=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("garbage", GARBAGE, ids=str)
def test_masked_keys_and_values_are_never_read(garbage, strategy):
    q, k, v = draw()
    lengths = jnp.asarray([5, 17], jnp.int32)
    hidden = (jnp.arange(24)[None] >= lengths[:, None])[..., None, None]
    mask = m.KeyPadding(lengths) & m.Causal()
    results = {}
    for fill in (0.0, garbage):
        dirty = (jnp.where(hidden, jnp.float32(fill), x) for x in (k, v))
        results[fill] = run(q, *dirty, mask, strategy)
    same(results[garbage], results[0.0])
    assert all(np.isfinite(x).all() for x in results[garbage])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("garbage", GARBAGE, ids=str)
def test_padded_queries_are_never_read(garbage, strategy):
    q, k, v = draw()
    q_ids = jnp.asarray(np.repeat([[0, 1, -1], [0, 0, -1]], 8, 1).astype(np.int32))
    hidden = (q_ids < 0)[..., None, None]
    results = {}
    for fill in (0.0, garbage):
        results[fill] = run(
            *(jnp.where(hidden, jnp.float32(fill), x) for x in (q, k, v)),
            m.Segments(q_ids),
            strategy,
        )
    same(results[garbage], results[0.0])
    out, lse, dq, dk, dv = results[garbage]
    assert np.all(out[:, 16:] == 0) and np.all(np.isneginf(lse[:, 16:]))
    assert all(np.all(x[:, 16:] == 0) for x in (dq, dk, dv))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("order", [1, 2])
def test_masked_keys_and_queries_do_not_reach_the_gradient_of_the_scale(order, strategy):
    """Which is a sum over logits: `0 * nan` must not be one of them."""
    q, k, v = draw()
    unseen, hidden = (jnp.arange(24) >= n for n in (20, 13))
    mask = m.KeyPadding(13) & m.QueryPadding(20)
    ct, _ = cotangents(q.shape, q.shape[:3])

    def loss(scale, q, k, v):
        metadata = eqattn.AttentionMetadata(
            runtime_dtype="float32", softmax_scale=scale, blocksize_q=8, blocksize_k=8
        )
        impl = eqattn.AttentionRegistry.create(strategy, metadata)
        return jnp.vdot(eqattn.attention(q, k, v, impl, mask=mask).attention_outputs, ct)

    gradient, one = jax.grad(loss), jnp.float32(1)

    @jax.jit
    def derivatives(scale, *inputs):
        if order == 1:
            return gradient(scale, *inputs)
        return jax.jvp(lambda s: gradient(s, *inputs), (scale,), (one,))

    results = []
    for fill in (0.0, np.nan, np.inf, 3e38):
        dirty = [jnp.where(hidden[:, None, None], jnp.float32(fill), x) for x in (k, v)]
        spoiled = jnp.where(unseen[:, None, None], jnp.float32(fill), q)
        results.append(np.ravel(derivatives(jnp.float32(0.3), spoiled, *dirty)))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    visible = (~np.asarray(unseen))[:, None] & ~np.asarray(hidden)
    exact = [np.asarray(x, np.float64) for x in (q, k, v)]
    problem = oracle.Problem(*exact, scale=0.3, mask=visible)
    zeros, precision = np.zeros(q.shape[:3]), bound.precision_of(np.float32)
    reference = bound.grads(problem, np.asarray(ct, np.float64), zeros, precision)["scale"]
    assert bound.excess(results[0][0], reference) <= 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("garbage", (np.nan, np.inf), ids=str)
@pytest.mark.parametrize("block", [(8, 8), (5, 7)])
def test_a_visible_nonfinite_value_reaches_exactly_the_rows_that_see_it(strategy, garbage, block):
    q, k, v = draw()
    clean = run(q, k, v, m.Causal(), strategy, block)[0]
    dirty = run(q, k, v.at[0, 9, 1, 3].set(garbage), m.Causal(), strategy, block)[0]
    hit = np.zeros(clean.shape, bool)
    hit[0, 9:, 2:] = True  # as for a key: the whole output of a row that sees it
    assert np.all(np.isnan(dirty[hit]))
    np.testing.assert_array_equal(dirty[~hit], clean[~hit])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_visible_nonfinite_key_reaches_exactly_the_rows_that_see_it(strategy):
    q, k, v = draw()
    clean = run(q, k, v, m.Causal(), strategy)[0]
    dirty = run(q, k.at[0, 9, 1, 3].set(np.nan), v, m.Causal(), strategy)[0]
    hit = np.zeros(clean.shape, bool)
    hit[0, 9:, 2:] = True
    assert np.all(np.isnan(dirty[hit]))
    np.testing.assert_array_equal(dirty[~hit], clean[~hit])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("sinks", [None, "sinks"])
def test_fully_masked_rows(strategy, sinks):
    q, k, v = draw()
    visible = np.random.default_rng(2).random((2, 4, 24, 24)) < 0.5
    visible[:, :, [0, 7, 23]] = False
    visible[1] = False
    aux = None if sinks is None else jnp.asarray([0.5, -1.0, 2.0, 0.0], jnp.float32)
    results = run(q, k, v, m.Dense(jnp.asarray(visible)), strategy, sinks=aux)
    out, lse, dq, dk, dv = results
    assert np.all(out[:, [0, 7, 23]] == 0) and np.all(out[1] == 0)
    expected = -np.inf if aux is None else np.asarray(aux)
    np.testing.assert_array_equal(lse[1], np.broadcast_to(expected, lse[1].shape))
    assert np.all(dq[1] == 0) and np.all(dk[1] == 0) and np.all(dv[1] == 0)
    features = {} if aux is None else {"sinks": np.asarray(aux, np.float64)}
    check(q, k, v, visible, results, **features)


SIZES = [(1, 1), (1, 24), (24, 1), (1, 0), (24, 0), (13, 17), (31, 29), (2, 61)]
BLOCKS = [(1, 1), (7, 5), (1000, 1000), (1, 1000), (1000, 1), (8, 2)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("block", BLOCKS[:2], ids=str)
def test_any_length_with_any_block(size, block):
    t, s = size
    q, k, v = draw(t=t, s=s, dv=5)
    offset = max(s - t, 0)
    results = run(q, k, v, m.Causal(offset), "blockwise", block)
    check(q, k, v, oracle_masks.causal(t, s, offset), results)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_top_left_causal_with_any_block(block):
    q, k, v = draw(t=19, s=23)
    check(q, k, v, oracle_masks.causal(19, 23), run(q, k, v, m.Causal(), "blockwise", block))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_leading_axes_and_no_rows(strategy):
    q, k, v = (x[0] for x in draw())
    results = run(q, k, v, None, strategy)
    check(q[None], k[None], v[None], None, [x[None] for x in results])
    out, lse, *grads = run(q[:0], k, v, None, strategy)
    assert out.shape == (0, 4, 8) and lse.shape == (0, 4)
    assert all(np.all(g == 0) for g in grads)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [1e4, 1e10, 1e20, 1e30])
def test_huge_logits_select_the_largest(strategy, size):
    """Logits up to 1e30: the softmax is an argmax, values are finite, and all gradients but that of
    v are zero.
    """
    rng = np.random.default_rng(3)
    gaps = np.stack([rng.permutation(16) for _ in range(6)]).astype(
        np.float32
    )  # one winner per row, gaps of `size`
    q, k = gaps[None, :, None, :], np.eye(16, dtype=np.float32)[None, :, None, :] * np.float32(size)
    v = rng.standard_normal((1, 16, 1, 4)).astype(np.float32)
    results = run(
        *(jnp.asarray(x) for x in (q, k, v)), None, strategy, (4, 4), ct_lse=False, scale=1.0
    )
    out, lse, dq, dk, dv = results
    assert all(np.isfinite(x).all() for x in results)
    winner = gaps.argmax(-1)
    np.testing.assert_array_equal(out[0, :, 0], v[0, winner, 0])
    np.testing.assert_array_equal(lse[0, :, 0], np.float32(15) * np.float32(size))
    # Only rounding of dp - delta is left, times the size of k.
    assert np.all(dk == 0) or np.max(np.abs(dk)) <= 1e-5
    assert np.all(np.abs(dq) <= 1e-5 * size)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_logits_beyond_float32_are_not_hidden(strategy):
    """q.k overflows to +inf: that is an error of the inputs, and NaN says so."""
    q = jnp.full((1, 2, 1, 4), 1e25, jnp.float32)
    out, *_ = run(q, q, jnp.ones((1, 2, 1, 4), jnp.float32), None, strategy)
    assert np.isnan(out).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_large_inputs_stay_finite(dtype, cap):
    @jax.jit
    def run(q, k, v, size):
        metadata = eqattn.AttentionMetadata(
            runtime_dtype=q.dtype,
            blocksize_q=8,
            blocksize_k=8,
            logits_soft_cap=cap,
            softmax_scale=0.1 / size,
        )
        impl = eqattn.AttentionRegistry.create("blockwise", metadata)

        def loss(q, k, v):
            out = eqattn.attention(q, k, v, impl, mask=m.Causal()).attention_outputs
            return jnp.sum(out.astype(jnp.float32)) / size, out

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    rng = np.random.default_rng(5)
    for size in (1.0, 1e2, 1e4):
        inputs = (
            jnp.asarray((size * rng.standard_normal((1, 20, 2, 8))).clip(-6e4, 6e4).astype(dtype))
            for _ in range(3)
        )
        grads, out = run(*inputs, jnp.float32(size))
        assert all(np.isfinite(np.asarray(x).astype(np.float32)).all() for x in (out, *grads)), size


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strict_promotion_is_on_and_mixed_parameter_dtypes_work(strategy):
    with pytest.raises(Exception, match="promotion"):
        jnp.ones(2, jnp.float32) + jnp.ones(2, jnp.bfloat16)
    q, k, v = (x.astype(jnp.bfloat16) for x in draw(b=1, t=9, s=9))
    metadata = eqattn.AttentionMetadata(
        runtime_dtype=jnp.bfloat16,
        softmax_scale=jnp.asarray(0.3, jnp.float32),
        logits_soft_cap=jnp.asarray(4.0, jnp.float32),
        softmax_aux=jnp.zeros(4, jnp.float32),
    )
    impl = eqattn.AttentionRegistry.create(strategy, metadata)
    bias = jnp.ones((1, 4, 9, 9), jnp.float32)
    out = eqattn.attention(q, k, v, impl, bias=bias, mask=m.Causal()).attention_outputs
    assert out.dtype == jnp.bfloat16
