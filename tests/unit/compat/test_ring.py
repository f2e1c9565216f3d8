"""Every parameter of the seeds' function has one meaning, on one device and (as a subprocess of
`test_ring.py` shows of the strategy beneath it) on several.
"""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix import bound, oracle

import eqattn
from eqattn import BwdParams, dropout_mask, FwdParams, masks as m, Ring, ring_attention, RingAttn


B, T, H, K, D, V = 2, 9, 4, 2, 4, 3
I, J = np.arange(T)[:, None], np.arange(T)[None]
IDS = np.array([[0, 0, 0, 1, 1, 1, 1, 2, -1], [0, 1, 1, 1, 1, 1, 2, 2, 2]], np.int32)
ONES = np.ones((T, T), bool)


def qkv(scale=1.0):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(B, T, H, D), (B, T, K, D), (B, T, K, V)]
    return [scale * jax.random.normal(k, s) for k, s in zip(keys, shapes)]


def problem(q, k, v, visible=ONES, *, bias=0.0, scale=None, cap=None, sinks=None, keep=None):
    def logits(z):
        z = z * (1 / math.sqrt(D) if scale is None else scale)
        return (z if cap is None else cap * np.tanh(z / cap)) + np.asarray(bias)

    return oracle.plain_problem(q, k, v, logits, visible, sinks, keep, 0.4)


def check(want, **kwargs):
    got = ring_attention(*qkv(), **kwargs)
    assert got.dtype == np.float32
    bound.check(want, got)


def windowed(left, right, sinks=0):
    return ((I - J <= left) & (J - I <= right)) | (sinks > J)


SAME = (IDS[:, :, None] == IDS[:, None]) & (IDS[:, :, None] >= 0) & (IDS[:, None] >= 0)
BIAS = jax.random.normal(jax.random.key(5), (1, H, T, T))
AUX = jax.random.normal(jax.random.key(6), (H, 2))

CASES = {
    "nothing": ({}, {}),
    "causal": (dict(causal=True), dict(visible=J <= I)),
    "sliding_window int": (dict(sliding_window=2), dict(visible=windowed(2, 2))),
    "sliding_window pair": (dict(sliding_window=(3, 0)), dict(visible=windowed(3, 0))),
    "sliding_window list": (dict(sliding_window=[3, 0]), dict(visible=windowed(3, 0))),
    "attention_sink_size": (
        dict(sliding_window=(1, 0), attention_sink_size=2, causal=True),
        dict(visible=windowed(1, 0, 2) & (J <= I)),
    ),
    "chunk_size": (dict(chunk_size=4), dict(visible=(J <= I) & (I // 4 == J // 4))),
    "causal_block_size": (dict(causal_block_size=4), dict(visible=J // 4 <= I // 4)),
    "causal_block_size for causal": (
        dict(causal_block_size=4, causal=True),
        dict(visible=J // 4 <= I // 4),
    ),
    "segments": (dict(q_segment_ids=IDS, kv_segment_ids=IDS), dict(visible=SAME[:, None])),
    "query segments alone": (dict(q_segment_ids=IDS), dict(visible=SAME[:, None])),
    "key segments alone": (dict(kv_segment_ids=IDS), dict(visible=SAME[:, None])),
    "softmax_aux per head": (dict(softmax_aux=AUX[:, 0]), dict(sinks=AUX[:, :1])),
    "softmax_aux per head, several": (dict(softmax_aux=AUX), dict(sinks=AUX)),
    "softmax_aux shared": (dict(softmax_aux=AUX[0]), dict(sinks=np.repeat(AUX[:1], H, 0))),
    "bias": (dict(bias=BIAS, causal=True), dict(bias=BIAS, visible=J <= I)),
    "logits_soft_cap": (dict(logits_soft_cap=0.5), dict(cap=0.5)),
    "softmax_scale": (dict(softmax_scale=2.0), dict(scale=2.0)),
    "masks combine": (
        dict(q_segment_ids=IDS, causal=True, sliding_window=3),
        dict(visible=SAME[:, None] & (J <= I) & windowed(3, 3)),
    ),
    "block sizes": (dict(query_chunk_size=2, key_chunk_size=5, causal=True), dict(visible=J <= I)),
    "FwdParams": (dict(fwd_params=FwdParams(3, 4), causal=True), dict(visible=J <= I)),
    "fused": (dict(fused_backward=True, causal=True), dict(visible=J <= I)),
}


# Each parameter, alone or with others. tests/nightly/compat has all cases.
FEW = (
    "sliding_window int", "attention_sink_size", "chunk_size", "causal_block_size for causal",
    "query segments alone", "softmax_aux per head, several", "softmax_aux shared", "bias",
    "logits_soft_cap", "softmax_scale", "masks combine", "block sizes", "FwdParams", "fused",
)  # fmt: skip


@pytest.mark.parametrize("name", FEW)
def test_meaning(name):
    kwargs, reference = CASES[name]
    arrays = {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in kwargs.items()}
    check(problem(*qkv(), **reference), **arrays)


def test_mask_builder_is_called_per_head_with_the_whole_lengths():
    calls = []

    def builder(*args):
        calls.append(args)
        return m.SlidingWindow(args[3] // 2, 0)

    visible = np.stack([windowed(h // 2, 0) for h in range(H)])
    check(problem(*qkv(), visible), mask_builder=builder)
    assert calls == [(T, T, H, h, H // K) for h in range(H)]


def test_dropout():
    key = jax.random.key(7)
    keep = np.asarray(dropout_mask(key, (B,), H, T, T, 0.4))
    check(problem(*qkv(), keep=keep), pdrop=0.4, dropout_rng=key, deterministic=False)
    check(problem(*qkv()), pdrop=0.4, dropout_rng=key)
    with pytest.raises(ValueError, match="dropout"):
        ring_attention(*qkv(), pdrop=0.4, deterministic=False)


def test_one_or_two_backward_visits():
    """Equal gradients, and twice the visits."""

    def gradients(fused):
        def loss(q, k, v, bias):
            out = ring_attention(
                q, k, v, bias=bias, causal=True, fused_backward=fused, key_chunk_size=4
            )
            return jnp.sum(jnp.sin(out))

        f = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
        text = str(jax.make_jaxpr(f)(*qkv(), BIAS))
        return f(*qkv(), BIAS), text.count("attention_sweep[")

    (one, n_one), (two, n_two) = gradients(True), gradients(False)
    assert (n_one, n_two) == (1, 2)
    for a, b in zip(one, two):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_policy_and_prevent_cse():
    def text(**kwargs):
        f = jax.grad(lambda q, k, v: ring_attention(q, k, v, **kwargs).sum())
        return str(jax.make_jaxpr(f)(*qkv()))

    policy = jax.checkpoint_policies.nothing_saveable
    assert "remat" not in text()
    assert "prevent_cse=True" in text(policy=policy)
    assert "prevent_cse=False" in text(policy=policy, prevent_cse=False)


def test_dtypes():
    q, k, v = qkv()
    half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    assert ring_attention(*half).dtype == jnp.bfloat16
    assert ring_attention(*half, dtype=jnp.float32).dtype == jnp.float32
    wide = ring_attention(*half, dtype=jnp.float32)
    rounded = ring_attention(*half, dtype=jnp.float32, float32_logits=False)
    assert 1e-5 < np.max(np.abs(wide - rounded)) < 1e-1


def test_precision_reaches_the_products():
    text = str(jax.make_jaxpr(lambda *a: ring_attention(*a, precision="bfloat16"))(*qkv()))
    assert "HIGHEST" not in text.split("attention_fold")[1]


def test_learned_scale_cap_and_sinks():
    def loss(scale, cap, aux):
        q, k, v = qkv()
        return ring_attention(
            q, k, v, softmax_scale=scale, logits_soft_cap=cap, softmax_aux=aux
        ).sum()

    args = jnp.asarray(0.4), jnp.asarray(1.5), AUX
    for got, i in zip(jax.grad(loss, (0, 1, 2))(*args), range(3)):
        step = 1e-2
        direction = jnp.ones_like(args[i])
        ends = [loss(*args[:i], args[i] + s * direction, *args[i + 1 :]) for s in (step, -step)]
        assert abs(got.sum() - (ends[0] - ends[1]) / (2 * step)) < 2e-3 * max(1, abs(got.sum()))


def test_names_and_signature():
    assert RingAttn is Ring
    assert eqattn.AttentionRegistry.get("ring") is Ring
    names = list(inspect.signature(ring_attention).parameters.values())
    seeds = (
        "query key value q_segment_ids kv_segment_ids softmax_aux bias mask_builder sliding_window "
        "chunk_size causal logits_soft_cap softmax_scale axis_name fwd_params bwd_params "
        "fused_backward"
    ).split()
    assert [p.name for p in names[: len(seeds)]] == seeds
    assert all(p.kind == p.KEYWORD_ONLY for p in names[len(seeds) :])


@pytest.mark.parametrize(
    "kwargs, match",
    [
        (dict(axis_name="sp"), "sp.*mesh"),
        (dict(attention_sink_size=2), "sliding_window"),
        (dict(fwd_params=FwdParams(4), bwd_params=BwdParams(8)), "q_blocksize.*query_chunk_size"),
        (dict(sliding_window=-1), "at least 0, got -1"),
        (dict(softmax_aux=jnp.zeros((3, 2))), "softmax_aux"),
        (dict(bias=jnp.zeros((5, 7))), r"\(5, 7\)"),
        (dict(q_segment_ids=jnp.zeros((B, T + 1), jnp.int32)), str(T + 1)),
    ],
)
def test_errors(kwargs, match, unchecked):
    with pytest.raises(ValueError, match=match):
        ring_attention(*qkv(), **kwargs)


def test_policy_must_be_callable():
    with pytest.raises(TypeError, match="policy"):
        ring_attention(*qkv(), policy="dots")  # type: ignore
