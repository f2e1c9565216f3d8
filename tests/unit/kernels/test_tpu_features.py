"""Kernels that read and write features innermost, as projections do, and turn blocks themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from _tpu_races import without_races
from matrix import bound, oracle, oracle_masks as om

from eqattn import attention, AttentionMetadata, Blockwise, Causal
from eqattn.kernels.tpu import _backward, _backward_step, _forward, _operands
from eqattn.strategies import AttentionImpl


T, D, SIZE = 56, 16, 32


@pytest.fixture
def plans(monkeypatch):
    """The plans of kernels, for registers of 8 lanes, so that small blocks fill some."""
    found = []

    def noted(plan):
        def run(*args):
            made = plan(*args)
            found.append(made[0])
            return made

        return run

    monkeypatch.setattr(_operands, "LANES", 8)
    monkeypatch.setattr(_backward_step, "WINDOW", (16, 16))
    monkeypatch.setattr(_backward_step, "suits", lambda step: True)
    for module in (_forward, _backward):
        monkeypatch.setattr(module, "_plan", noted(module._plan))
    return found


def how(dtype) -> AttentionImpl:
    sizes = dict(blocksize_q=SIZE // 2, blocksize_k=SIZE)
    return Blockwise(AttentionMetadata(runtime_dtype=dtype, platform="interpret", **sizes))


def draw(dtype, heads=4, kv_heads=2):
    shapes = (heads, D), (kv_heads, D), (kv_heads, 8), (heads, 8)
    return [normal(i, 1, T, *shape).astype(dtype) for i, shape in enumerate(shapes)]


def problem(q, k, v):
    arrays = [np.float64(x) for x in (q, k, v)]
    return oracle.Problem(*arrays, scale=D**-0.5, mask=om.causal(T, T))


@pytest.mark.parametrize("wide", [True, False], ids=["wide", "narrow"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_and_gradients(dtype, wide, plans, monkeypatch):
    monkeypatch.setattr(_backward_step, "suits", lambda step: wide)  # matrix units
    q, k, v, g = draw(dtype)
    f = lambda *x: attention(*x, how(dtype), mask=Causal()).attention_outputs

    @jax.jit
    def run(q, k, v, g):
        out, transpose = jax.vjp(f, q, k, v)
        return f(q, k, v), out, *transpose(g)

    alone, beside, *grads = run(q, k, v, g)
    folds = [p for p in plans if isinstance(p, _forward._Fold)]
    assert [(p.ahead[0].flipped, p.early) for p in folds] == [(True, True)] * 2
    assert [(p.ahead[0].heads, p.heads) for p in folds] == [(2, 2)] * 2
    (sums,) = [p for p in plans if isinstance(p, _backward._Sum)]
    assert (sums.turned is not None) == wide
    # Of float32, the sums for queries are what is written.
    turned = [x.heads for x in sums.results.values() if x.turned]
    assert turned == [2] * (dtype == jnp.bfloat16)
    assert sum(x.flipped for x in sums.given.values()) == 1
    assert [x.heads for x in sums.given.values()].count(2) == 2  # queries and cotangents
    precision = bound.precision_of(dtype)
    out = bound.values(problem(q, k, v), precision)["out"]
    assert max(bound.excess(np.asarray(x), out) for x in (alone, beside)) <= 1
    want = bound.grads(problem(q, k, v), np.float64(g), np.zeros((1, T, 4)), precision)
    worst = {n: bound.excess(np.asarray(x), want[n]) for n, x in zip("qkv", grads)}
    assert max(worst.values()) <= 1, worst


def test_values_that_are_not_finite(plans):
    """They are turned a step before they are added, and still reach only the rows that see them."""
    q, k, v, _ = draw(jnp.float32)
    seen = SIZE + 3
    bad = v.at[0, seen, 1].set(jnp.inf)
    out = attention(q, k, bad, how(jnp.float32), mask=Causal()).attention_outputs
    (plan,) = plans
    assert plan.early and plan.form.poisons
    assert not np.isfinite(out[0, seen:, 2:]).any()
    want = oracle.forward(problem(q, k, v)).out
    np.testing.assert_allclose(out[0, :seen], want[0, :seen], rtol=0, atol=1e-5)
    np.testing.assert_allclose(out[0, :, :2], want[0, :, :2], rtol=0, atol=1e-5)


def test_races_and_memory_that_nothing_wrote(plans):
    q, k, v, _ = draw(jnp.float32, 1, 1)
    f = lambda *x: attention(*x, how(jnp.float32), mask=Causal()).attention_outputs
    got, count = without_races(f, q, k, v)
    assert count == 1 and plans[0].early
    want = oracle.forward(problem(q, k, v)).out
    np.testing.assert_allclose(got[0], want, rtol=0, atol=1e-5)


def test_projections_keep_their_order():
    """Their results stay apart from the transposes after them, where kernels read these."""
    q, k, v, _ = draw(jnp.float32)

    def held(platform):
        strategy = Blockwise(AttentionMetadata(platform=platform))
        f = lambda *x: attention(*x, strategy, mask=Causal()).attention_outputs
        return str(jax.make_jaxpr(f)(q, k, v)).count("optimization_barrier")

    assert held("interpret") == 3 and held("xla") == 0
