"""Some cases of the fuzzer of training, and the oracle that it compares with."""

import jax
import numpy as np
import pytest
from matrix import oracle as other, oracle_masks as om

from . import _oracle as oracle
from ._calls import Call, moved
from .train import check, DTYPES


FEW = (  # Each runs in a second or two.
    (3, dict(target="one", transform="gradient")),
    (8, dict(target="many", transform="mapped")),
    (11, dict(target="many", transform="layers")),
    (1, dict(target="manual", transform="forward_mode")),
    (3, dict(target="one", transform="gradient", dtype="bfloat16")),
    (8, dict(target="many", transform="gradient", dtype="bfloat16")),
)


@pytest.mark.parametrize("seed, only", FEW, ids=["-".join(o.values()) for _, o in FEW])
def test_drawn_calls(seed, only):
    error, where = check(seed, **only)
    assert error <= 1, where


@pytest.mark.slow
@pytest.mark.parametrize("target", ["one", "many", "manual"])
@pytest.mark.parametrize("seed", range(40))
def test_more_drawn_calls(seed, target):
    error, where = check(seed, target=target)
    assert error <= 1, where


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("seed", range(20))
def test_more_narrow_calls(seed, dtype):
    error, where = check(seed, dtype=dtype)
    assert error <= 1, where


@pytest.mark.parametrize("seed", range(12))
def test_the_pullback_is_the_derivative(seed):
    """Of all drawn features: complex steps of the values, which subtract nothing."""
    rng = np.random.default_rng(seed)
    call = Call(rng)
    values, cts = call.values(rng), call.cotangents(rng)
    directions = jax.tree.map(lambda x: rng.standard_normal(np.shape(x)), values[0])
    found = call.solve(moved(values, directions))
    tangents = found.output.imag / oracle.STEP, found.logsumexp.imag / oracle.STEP
    forward = sum((t * ct).sum() for t, ct in zip(tangents, cts, strict=True))
    grads = call.gradients(values, cts)
    terms = jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), grads, directions))
    assert abs(forward - sum(terms)) <= 1e-12 * (1 + sum(map(abs, terms)))


def test_functions_agree_with_the_features_of_the_oracle():
    """Scores as functions, with pullbacks of their own, are those that the oracle has by name."""
    rng = np.random.default_rng(0)
    (b, t, s, h, kv, d), normal = (2, 5, 7, 4, 2, 3), rng.standard_normal
    q, k, v = normal((b, t, h, d)), normal((b, s, kv, d)), normal((b, s, kv, 6))
    bias, sinks, slopes, table = normal((b, 1, t, s)), normal((h, 2)), normal(h), normal((8, h))
    cap, scale, mask = 2.5, 0.4, om.causal(t, s, 1)
    problem = other.Problem(
        q=q, k=k, v=v, scale=scale, mask=mask, cap=cap, bias=bias, sinks=sinks,
        slopes=slopes, distance=om.distance(t, s), table=table, bucket=om.t5_bucket(t, s, 8, True, 16),
    )  # fmt: skip
    bucket = lambda p: om.t5_bucket_of(p.k - p.q, 8, True, 16)
    scores = [oracle.soft_cap(cap), oracle.bias(bias), oracle.alibi(slopes)]
    scores.append(oracle.table_of_distances(table, bucket))
    pairs = oracle.Pairs.of((b,), h, t, s)
    found = oracle.attend(q, k, v, mask, pairs, scale=scale, scores=scores, sinks=sinks)
    want, ct = other.forward(problem), normal(found.output.shape)
    ct_lse = normal(found.logsumexp.shape)
    grads, mine = other.vjp(problem, ct, ct_lse), found.pull(ct, ct_lse)
    of_scores = [x for xs in mine["scores"] for x in xs]
    got = [found.output, found.logsumexp, *[mine[n] for n in ("query", "key_", "value", "sinks")]]
    exact = [want.out, want.lse, *[grads[n] for n in ("q", "k", "v", "sinks")]]
    names = ("cap", "bias", "slopes", "table")
    for x, y in zip([*got, *of_scores], [*exact, *[grads[n] for n in names]], strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-13 * (1 + abs(y).max()))
