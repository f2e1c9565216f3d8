"""What masks and scores read in tables by query and by key, in kernels for TPUs: as products."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from matrix import bound, oracle, oracle_masks as om

from eqattn import attention, AttentionMetadata, Blockwise, Causal, MaskFn, Ragged, ScoreFn
from eqattn._problem import tables


T, H, K, D = 96, 4, 2, 16
RNG = np.random.default_rng(0)
SEEN = RNG.random((6, 12)) < 0.6
ADDED = RNG.standard_normal((H, 6, 12)).astype(np.float32)
ROWS, KEYS = (np.arange(T) // n for n in (16, 8))
IDS = RNG.integers(0, 6, T)


def strategy(kind=Blockwise, platform="interpret"):
    sizes = dict(blocksize_q=32, blocksize_k=48)
    return kind(AttentionMetadata(platform=platform, backend="tpu", **sizes))


def draw(dtype=jnp.float32):
    shapes = (H, K, K, H)
    return [normal(i, 1, T, h, D).astype(dtype) for i, h in enumerate(shapes)]


def check(q, k, v, g, run, mask, bias=None, change=None):
    """Outputs, gradients and, with a `change` of the table, tangents within the bound."""
    arrays = (np.float64(x) for x in (q, k, v))
    problem = oracle.Problem(*arrays, scale=D**-0.5, mask=mask, bias=bias)
    precision, ends = bound.precision_of(q.dtype), (np.float64(g), np.zeros((1, T, H)))
    (out, *grads), table = run
    want = bound.values(problem, precision)["out"], bound.grads(problem, *ends, precision)
    worst = [bound.excess(np.asarray(out, np.float64), want[0])]
    worst += [bound.excess(np.asarray(x, np.float64), want[1][n]) for n, x in zip("qkv", grads)]
    assert max(worst) <= 1, worst
    if table is not None:
        of_pairs = want[1]["bias"].primal
        np.testing.assert_allclose(table, change(of_pairs), rtol=2e-5, atol=2e-5)


MASKS = {
    "of blocks": (lambda seen, b, h, q, k: seen[q // 16, k // 8], SEEN),
    "of integers": (lambda seen, b, h, q, k: seen[q // 16, k // 8] > 5, SEEN * 10),
    "of large integers": (
        lambda seen, b, h, q, k: seen[q // 16, k // 8] == 2**30 + 1,
        np.where(SEEN, 2**30 + 1, -(2**31)).astype(np.int32),
    ),
    "in two steps": (lambda seen, b, h, q, k: seen[q // 16][k // 8], SEEN),
    "turned": (lambda seen, b, h, q, k: seen[k // 8, q // 16], SEEN.T),
    "not": (lambda seen, b, h, q, k: ~seen[q // 16, k // 8], ~SEEN),
    "of three axes": (lambda seen, b, h, q, k: seen[q // 32, q // 16 % 2, k // 8], SEEN.reshape(3, 2, 12)),
}  # fmt: skip


FIRST = (
    ("of blocks", jnp.bfloat16),
    *((x, jnp.float32) for x in ("of large integers", "of three axes")),
)


@pytest.mark.parametrize(
    "name, dtype",
    [
        pytest.param(*x, marks=() if x in FIRST else pytest.mark.slow)
        for x in itertools.product(MASKS, (jnp.float32, jnp.bfloat16))
    ],
)
def test_masks(name, dtype):
    fn, seen = MASKS[name]
    mask = Causal() & MaskFn(eqx.Partial(fn, jnp.asarray(seen)))
    assert strategy(platform="pallas").supports(mask=mask)
    q, k, v, g = draw(dtype)
    f = lambda q, k, v: attention(q, k, v, strategy(), mask=mask).attention_outputs
    out, pull = jax.vjp(f, q, k, v)
    check(q, k, v, g, ((out, *pull(g)), None), om.causal(T, T) & SEEN[ROWS[:, None], KEYS])


SCORES = {
    "of blocks": (lambda w, s, b, h, q, k: s + w[h, q // 16, k // 8], ADDED),
    "by ids": (lambda w, s, b, h, q, k: s + w[h, jnp.asarray(IDS)[q], k // 8], ADDED),
    "shared by heads": (lambda w, s, b, h, q, k: s + w[q // 16, k // 8], ADDED[0]),
    "of queries": (lambda w, s, b, h, q, k: s + w[h, 0, k // 8] + w[h, q // 16, k // 8], ADDED),
}


@pytest.mark.parametrize(
    "name", ["by ids", *(pytest.param(x, marks=pytest.mark.slow) for x in SCORES if x != "by ids")]
)
def test_scores(name):
    """And the gradient of the table, which is a sum over the pairs that read each entry."""
    fn, table = SCORES[name]
    q, k, v, g = draw()

    @jax.jit
    def run(w, q, k, v, g):
        def f(w, q, k, v):
            score = ScoreFn(eqx.Partial(fn, w))
            return attention(q, k, v, strategy(), mask=Causal(), score=score).attention_outputs

        out, pull = jax.vjp(f, w, q, k, v)
        return out, pull(g)

    out, (dw, *grads) = run(jnp.asarray(table), q, k, v, g)
    at = np.ogrid[:H, :T, :T]
    of_pairs = lambda w: jnp.broadcast_to(fn(w, 0.0, 0, *at), (1, H, T, T))
    with jax.enable_x64(True):
        bias, transpose = jax.vjp(of_pairs, jnp.asarray(table, jnp.float64))
        change = lambda x: transpose(jnp.asarray(x, jnp.float64))[0]
        check(q, k, v, g, ((out, *grads), dw), om.causal(T, T), np.asarray(bias), change)


def test_an_infinite_entry_hides_its_pairs():
    q, k, v, g = draw()
    w = jnp.where(SEEN, 0.0, -jnp.inf)
    score = ScoreFn(lambda s, b, h, q, k: s + w[q // 16, k // 8])
    f = lambda q, k, v: attention(q, k, v, strategy(), mask=Causal(), score=score).attention_outputs
    out, pull = jax.vjp(f, q, k, v)
    check(q, k, v, g, ((out, *pull(g)), None), om.causal(T, T) & SEEN[ROWS[:, None], KEYS])


def test_places_outside_of_a_table():
    """They are moved to its edge, as `jax.numpy` does."""
    q, k, v, _ = draw()
    mask = MaskFn(lambda b, h, q, k: jnp.asarray(SEEN)[q // 8, k // 4] | (q == k))
    out = attention(q, k, v, strategy(), mask=mask).attention_outputs
    rows, keys = (np.minimum(np.arange(T) // n, size - 1) for n, size in ((8, 6), (4, 12)))
    visible = SEEN[rows[:, None], keys] | np.eye(T, dtype=bool)
    problem = oracle.Problem(*map(np.float64, (q, k, v)), scale=D**-0.5, mask=visible)
    np.testing.assert_allclose(out, oracle.forward(problem).out, rtol=0, atol=1e-5)


def test_forward_mode_and_second_derivatives():
    q, k, v, g = draw()

    def f(platform, w):
        score = ScoreFn(lambda s, b, h, q, k: s * (1 + w[h, q // 16, k // 8]))
        how = strategy(platform=platform)
        out = attention(q, k, v, how, mask=Causal(), score=score).attention_outputs
        return jnp.sum(out**2)

    w, dw = jnp.asarray(ADDED), jnp.ones(ADDED.shape) + jnp.asarray(ADDED) ** 2
    for order in (jax.jvp, lambda f, *x: jax.jvp(jax.grad(f), *x)):
        got, want = (order(lambda w, p=p: f(p, w), (w,), (dw,)) for p in ("interpret", "xla"))
        for x, y in zip(got, want):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)


def test_on_a_mesh():
    """Batch elements and heads lie on several devices, and each reads its part of the tables."""
    q, k, v, _ = (jnp.concatenate([x, -x]) for x in draw())
    ids = jnp.asarray(RNG.integers(0, 6, (2, T)), jnp.int32)

    def f(platform, q, k, v, w):
        seen = MaskFn(lambda b, h, q, k: jnp.asarray(SEEN)[q // 16, k // 8] | (q == k))
        score = ScoreFn(lambda s, b, h, q, k: s + w[h, ids[b, q], k // 8])
        how = strategy(platform=platform)
        return attention(q, k, v, how, mask=seen, score=score).attention_outputs

    def run(platform, *xs):
        loss = lambda *xs: jnp.sum(jnp.sin(f(platform, *xs)))
        return f(platform, *xs), *jax.grad(loss, (0, 1, 2, 3))(*xs)

    xs = q, k, v, jnp.asarray(ADDED)
    want = jax.jit(run, static_argnums=0)("xla", *xs)
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    with jax.set_mesh(jax.make_mesh((2, 2), ("dp", "tp"), kinds, devices=jax.devices()[:4])):
        specs = [jax.P("dp", None, "tp")] * 3 + [jax.P()]
        placed = [jax.device_put(x, spec) for x, spec in zip(xs, specs)]
        got = jax.jit(run, static_argnums=0)("interpret", *placed)
    for x, y in zip(got, want):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_what_stays_without_a_kernel():
    """Too many places, places that depend on both, keys that heads see elsewhere, and caches."""
    many = np.zeros((tables.MOST_PLACES + 1,) * 2, bool)
    refused = {
        "many": lambda b, h, q, k: jnp.asarray(many)[q, k],
        "both": lambda b, h, q, k: jnp.asarray(SEEN)[(q + k) // 32, k // 8],
        "heads": lambda b, h, q, k: jnp.asarray(SEEN)[h + q // 32, (k + h) // 16],
        "wide": lambda b, h, q, k: jnp.asarray(SEEN, jnp.uint32)[q // 16, k // 8] > 0,
    }
    for name, fn in refused.items():
        support = strategy(platform="pallas").supports(mask=MaskFn(fn))
        assert not support.ok and "the compiler of kernels does not know" in support.reason, name
    mask = MaskFn(lambda b, h, q, k: jnp.asarray(SEEN)[q // 16, k // 8])
    assert not strategy(Ragged, "pallas").supports(mask=mask)
    places = dict(q_positions=np.arange(T), kv_positions=np.arange(T))
    assert not strategy(platform="pallas").supports(mask=mask, **places)


def test_empty_blocks_of_a_table_are_not_visited():
    """The table of live blocks is that of the function itself."""
    q, k, v, _ = draw()
    seen = jnp.asarray(np.arange(3)[:, None] == np.arange(2))
    mask = MaskFn(lambda b, h, q, k: seen[q // 32, k // 48])
    bad = v.at[:, 48:].set(jnp.nan)
    out = attention(q, k, bad, strategy(), mask=mask).attention_outputs
    assert np.isfinite(out[:, :32]).all() and np.isnan(out[:, 32:64]).all()
    assert mask.sparsity(T, T, block_q=32, block_k=48).empty == 4 / 6
