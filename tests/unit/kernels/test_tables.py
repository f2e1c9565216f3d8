"""What masks and scores read in tables by query and by key, in kernels for TPUs: as products."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _kernels import check, drawn, how, judge, results
from matrix import bound, oracle, oracle_masks as om

from eqattn import attention, Causal, MaskFn, Ragged, ScoreFn
from eqattn._problem import tables


T, H = 96, 4
RNG = np.random.default_rng(0)
SEEN = RNG.random((6, 12)) < 0.6
ADDED = RNG.standard_normal((H, 6, 12)).astype(np.float32)
ROWS, KEYS = (np.arange(T) // n for n in (16, 8))
VISIBLE = om.causal(T, T) & SEEN[ROWS[:, None], KEYS]
IDS = RNG.integers(0, 6, T)


def run(q, k, v, platform="interpret", mask=None, score=None, **more):
    strategy = how("tpu", platform, blocksize_q=32, blocksize_k=48, runtime_dtype=q.dtype)
    both = Causal() if mask is None else Causal() & mask
    return attention(q, k, v, strategy, mask=both, score=score, **more).attention_outputs


def by_blocks(table):
    return MaskFn(lambda b, h, q, k: jnp.asarray(table)[q // 16, k // 8])


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
    "of three axes": (
        lambda seen, b, h, q, k: seen[q // 32, q // 16 % 2, k // 8],
        SEEN.reshape(3, 2, 12),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    """The numbers of each, and the gradients of the first."""
    fn, seen = MASKS[name]
    mask = MaskFn(eqx.Partial(fn, jnp.asarray(seen)))
    assert how("tpu", "pallas").supports(mask=mask)
    (given, ct), narrow = drawn("tpu", T, T), name == "of blocks"
    if narrow:
        given, ct = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (given, ct))
    judge(lambda q, k, v: run(q, k, v, mask=mask), given, ct if narrow else None, mask=VISIBLE)


SCORES = {
    "of blocks": (lambda w, s, b, h, q, k: s + w[h, q // 16, k // 8], ADDED),
    "by ids": (lambda w, s, b, h, q, k: s + w[h, jnp.asarray(IDS)[q], k // 8], ADDED),
    "shared by heads": (lambda w, s, b, h, q, k: s + w[q // 16, k // 8], ADDED[0]),
    "of queries": (lambda w, s, b, h, q, k: s + w[h, 0, k // 8] + w[h, q // 16, k // 8], ADDED),
}


@pytest.mark.parametrize("name", ["by ids", "shared by heads", "of queries"])
def test_scores(name):
    """And the gradient of the table, which is a sum over the pairs that read each entry."""
    fn, table = SCORES[name]
    given, ct = drawn("tpu", T, T)
    f = lambda q, k, v, w: run(q, k, v, score=ScoreFn(eqx.Partial(fn, w)))
    found = results(f, given | dict(w=jnp.asarray(table)), ct)
    of_table = found.pop("w")
    at = np.ogrid[:H, :T, :T]
    of_pairs = lambda w: jnp.broadcast_to(fn(w, 0.0, 0, *at), (1, H, T, T))
    with jax.enable_x64(True):
        bias, transpose = jax.vjp(of_pairs, jnp.asarray(table, jnp.float64))
        check(found, given, ct, mask=om.causal(T, T), bias=np.asarray(bias))
        arrays = {n: np.float64(x) for n, x in given.items()}
        problem = oracle.Problem(**arrays, scale=1 / 4, mask=om.causal(T, T), bias=np.asarray(bias))
        ends = np.float64(ct), np.zeros((1, T, H))
        precision = bound.precision_of(np.float32)
        want = bound.grads(problem, *ends, precision)["bias"]
        sums = lambda x: np.asarray(transpose(jnp.asarray(np.broadcast_to(x, (1, H, T, T))))[0])
        # The errors of the pairs of an entry add up, and so do the roundings of their sum.
        terms = bound.growth(int(sums(np.ones(())).max())) * precision.u * sums(abs(want.primal))
        limit, want = sums(want.error) + terms, sums(want.primal)
    assert (abs(np.float64(of_table) - want) <= limit).all()


def test_an_infinite_entry_hides_its_pairs():
    given, ct = drawn("tpu", T, T)
    w = jnp.where(SEEN, 0.0, -jnp.inf)
    score = ScoreFn(lambda s, b, h, q, k: s + w[q // 16, k // 8])
    judge(lambda q, k, v: run(q, k, v, score=score), given, ct, mask=VISIBLE)


def test_places_outside_of_a_table():
    """They are moved to its edge, as `jax.numpy` does."""
    given, _ = drawn("tpu", T, T)
    mask = MaskFn(lambda b, h, q, k: jnp.asarray(SEEN)[q // 8, k // 4] | (q == k))
    rows, keys = (np.minimum(np.arange(T) // n, size - 1) for n, size in ((8, 6), (4, 12)))
    visible = SEEN[rows[:, None], keys] | np.eye(T, dtype=bool)
    judge(lambda q, k, v: run(q, k, v, mask=mask), given, mask=visible & om.causal(T, T))


def test_forward_mode_and_second_derivatives():
    """As XLA code has them: no oracle knows a table that multiplies."""
    q, k, v = drawn("tpu", T, T)[0].values()

    def f(platform, w):
        score = ScoreFn(lambda s, b, h, q, k: s * (1 + w[h, q // 16, k // 8]))
        return jnp.sum(run(q, k, v, platform, score=score) ** 2)

    w, dw = jnp.asarray(ADDED), jnp.ones(ADDED.shape) + jnp.asarray(ADDED) ** 2

    @jax.jit
    def orders(w):
        each = [ft_of(p) for p in ("interpret", "xla")]
        return [(jax.jvp(f, (w,), (dw,)), jax.jvp(jax.grad(f), (w,), (dw,))) for f in each]

    ft_of = lambda platform: lambda w: f(platform, w)
    got, want = orders(w)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)


def test_on_a_mesh():
    """Batch elements and heads lie on several devices, and each reads its part of the tables."""
    given, ct = drawn("tpu", T, T, batch=2)
    ids = RNG.integers(0, 6, (2, T))
    seen = MaskFn(lambda b, h, q, k: jnp.asarray(SEEN)[q // 16, k // 8] | (q == k))
    score = ScoreFn(lambda s, b, h, q, k: s + jnp.asarray(ADDED)[h, jnp.asarray(ids)[b, q], k // 8])
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    with jax.set_mesh(jax.make_mesh((2, 2), ("dp", "tp"), kinds, devices=jax.devices()[:4])):
        place = lambda x: jax.device_put(x, jax.P("dp", None, "tp"))
        placed = {n: place(x) for n, x in given.items()}
        found = results(lambda q, k, v: run(q, k, v, mask=seen, score=score), placed, place(ct))
    bias = ADDED[:, ids[:, :, None], KEYS].swapaxes(0, 1)
    visible = om.causal(T, T) & (SEEN[ROWS[:, None], KEYS] | np.eye(T, dtype=bool))
    check(found, given, ct, bias=np.float64(bias), mask=visible)


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
        support = how("tpu", "pallas").supports(mask=MaskFn(fn))
        assert not support.ok and "the compiler of kernels does not know" in support.reason, name
    assert not how("tpu", "pallas", Ragged).supports(mask=by_blocks(SEEN))
    places = dict(q_positions=np.arange(T), kv_positions=np.arange(T))
    assert not how("tpu", "pallas").supports(mask=by_blocks(SEEN), **places)


def test_empty_blocks_of_a_table_are_not_visited():
    """The table of live blocks is that of the function itself."""
    q, k, v = drawn("tpu", T, T)[0].values()
    seen = jnp.asarray(np.arange(3)[:, None] == np.arange(2))
    mask = MaskFn(lambda b, h, q, k: seen[q // 32, k // 48])
    strategy = how("tpu", blocksize_q=32, blocksize_k=48)
    bad = v.at[:, 48:].set(jnp.nan)
    out = jax.jit(lambda v: attention(q, k, v, strategy, mask=mask).attention_outputs)(bad)
    assert np.isfinite(out[:, :32]).all() and np.isnan(out[:, 32:64]).all()
    assert mask.sparsity(T, T, block_q=32, block_k=48).empty == 4 / 6
