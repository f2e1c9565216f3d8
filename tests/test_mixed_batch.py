"""`ragged_attention`: packed queries of rows with their own lengths, against each row by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import oracle

from eqattn import (
    ALiBi,
    attention,
    AttentionMetadata,
    Causal,
    Dense,
    KeyPadding,
    Ragged,
    ragged_attention,
    Segments,
    SlidingWindow,
)
from eqattn.cache import PagedKVCache, Quantized


H, K, D, V, S = 4, 2, 8, 6, 40
LENGTHS = np.array([40, 7, 0, 23, 30], np.int32)
COUNTS = np.array([11, 1, 0, 5, 1], np.int32)
CU = np.concatenate([[0], np.cumsum(COUNTS)]).astype(np.int32)
N = int(CU[-1]) + 3  # three are padding


def arrays(dtype=np.float64):
    rng = np.random.default_rng(0)
    shapes = ((N, H, D), (len(LENGTHS), S, K, D), (len(LENGTHS), S, K, V))
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]


def metadata(**kwargs):
    return AttentionMetadata(**{**dict(runtime_dtype=jnp.float64), **kwargs})


def one_by_one(q, k, v, mask=None, starts=None, causal=True, **kwargs):
    """Each row through the plain softmax."""
    outs = []
    for row, (length, count) in enumerate(zip(LENGTHS.tolist(), COUNTS.tolist(), strict=True)):
        shown = KeyPadding(length, 0 if starts is None else int(starts[row]))
        for more in (Causal() if causal else None, mask):
            shown = shown if more is None else shown & more
        out = attention(
            q[CU[row] : CU[row] + count], k[row], v[row], Dense(metadata()), mask=shown,
            q_offset=length - count, return_logsumexp=True, **kwargs,
        )  # fmt: skip
        outs.append((out.attention_outputs, out.logsumexp))
    out, lse = (jnp.concatenate(x) for x in zip(*outs, strict=True))
    pad = N - len(out)
    return jnp.pad(out, ((0, pad), (0, 0), (0, 0))), jnp.pad(
        lse, ((0, pad), (0, 0)), constant_values=-np.inf
    )


def run(q, k, v, block_q=16, size=8, **kwargs):
    strategy = Ragged(metadata(blocksize_k=size))
    out = ragged_attention(
        q, k, v, jnp.asarray(CU), jnp.asarray(LENGTHS), strategy, block_q=block_q,
        return_logsumexp=True, **kwargs,
    )  # fmt: skip
    return out.attention_outputs, out.logsumexp


def close(xs, ys, tolerance=1e-13):
    for x, y in zip(xs, ys, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


@pytest.mark.parametrize("block_q", [1, 3, 16])
@pytest.mark.parametrize("size", [8, 7, None])
def test_rows_by_themselves(block_q, size, x64):
    q, k, v = arrays()
    close(jax.jit(lambda *a: run(*a, block_q=block_q, size=size))(q, k, v), one_by_one(q, k, v))


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(mask=SlidingWindow(4, 0)),
        dict(causal=False),
        dict(starts=np.array([3, 0, 0, 20, 30], np.int32)),
        dict(score=ALiBi(jnp.linspace(0.1, 0.4, H))),
    ],
    ids=["window", "not causal", "starts", "alibi"],
)
def test_masks_and_scores(kwargs, x64):
    q, k, v = arrays()
    if "score" in kwargs:
        kwargs = dict(score=ALiBi(jnp.linspace(0.1, 0.4, H, dtype=jnp.float64)))
    given = {n: jnp.asarray(x) if n == "starts" else x for n, x in kwargs.items()}
    close(run(q, k, v, **given), one_by_one(q, k, v, **kwargs))


def test_cap_sinks_and_bias_against_the_oracle(x64):
    q, k, v = arrays()
    slopes, sinks = np.linspace(0.1, 0.4, H), np.linspace(-1, 1, H)
    md = metadata(blocksize_k=8, logits_soft_cap=2.0, softmax_aux=jnp.asarray(sinks))
    got = ragged_attention(
        q, k, v, jnp.asarray(CU), jnp.asarray(LENGTHS), Ragged(md), block_q=4,
        score=ALiBi(jnp.asarray(slopes)), return_logsumexp=True,
    )  # fmt: skip
    for row, (end, count) in enumerate(zip(LENGTHS.tolist(), COUNTS.tolist(), strict=True)):
        mine, position = slice(CU[row], CU[row] + count), end - count + np.arange(count)
        distance = position[:, None] - np.arange(S)
        visible = (distance >= 0) & (np.arange(S) < end)
        of = oracle.Problem(
            *(np.asarray(x)[None] for x in (q[mine], k[row], v[row])), scale=D**-0.5,
            mask=visible, cap=2.0, slopes=slopes, distance=abs(distance), sinks=sinks,
        )  # fmt: skip
        found = oracle.forward(of)
        close([x[mine] for x in (got.attention_outputs, got.logsumexp)],
              [found.out[0], found.lse[0]])  # fmt: skip


def test_gradients(x64):
    q, k, v = arrays()
    loss = lambda fn: lambda *a: jnp.sum(jnp.sin(fn(*a)[0]))
    for transform in (lambda f: jax.grad(f, (0, 1, 2)),
                      lambda f: lambda *a: jax.jvp(jax.grad(f, (0, 1, 2)), a, a)[1]):  # fmt: skip
        got = jax.jit(transform(loss(lambda *a: run(*a, block_q=4))))(q, k, v)
        close(got, jax.jit(transform(loss(one_by_one)))(q, k, v), 1e-12)


def test_a_paged_cache(x64):
    q, k, v = arrays()
    cache = PagedKVCache.empty(5, S, 30, 8, K, D, V, jnp.float64).reserve(LENGTHS)
    cache = cache.append(k, v, jnp.asarray(LENGTHS))
    close(run(q, cache.key, cache.value, size=None), one_by_one(q, k, v))


def test_eight_bits(x64):
    q, k, v = arrays()
    stored = [Quantized.quantize(x) for x in (k, v)]
    close(run(q, *stored), one_by_one(q, *(x.materialise() for x in stored)), 1e-6)


def test_unused_keys_and_padding_may_hold_anything(x64):
    q, k, v = arrays()
    hidden = np.arange(S) >= LENGTHS[:, None]
    dirty = [jnp.where(hidden[..., None, None], jnp.nan, x) for x in (k, v)]
    got = run(q.at[int(CU[-1]) :].set(jnp.nan), *dirty)
    for x, y in zip(got, run(q, k, v), strict=True):
        assert (x == y).all()


def test_errors():
    q, k, v = arrays(np.float32)
    cu, lengths, strategy = jnp.asarray(CU), jnp.asarray(LENGTHS), Ragged(AttentionMetadata())
    with pytest.raises(ValueError, match="b \\+ 1 boundaries"):
        ragged_attention(q, k, v, cu[1:], lengths, strategy)
    with pytest.raises(ValueError, match="arrays per row"):
        mask = Segments(jnp.zeros((5, 1), jnp.int32), jnp.zeros((5, S), jnp.int32))
        ragged_attention(q, k, v, cu, lengths, strategy, mask=mask)
