"""The oracle against finite differences and complex steps of its own forward, and against loops
that share no einsum.
"""

import itertools

import numpy as np
import pytest

from . import bound, oracle, oracle_masks
from .oracle import Problem


def make(seed=0, b=2, t=5, s=6, h=4, kv=2, d=3, dv=4, dtype=np.float64, **features) -> Problem:
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype)

    extra = {}
    if features.get("mask"):
        extra["mask"] = rng.random((b, h, t, s)) < 0.6
        extra["mask"][0, 0, 1] = False
    if "bias" in features:
        extra["bias"] = normal(*features["bias"])
    if features.get("cap"):
        extra["cap"] = dtype(1.7)
    if features.get("slopes"):
        extra |= {"slopes": normal(h), "distance": oracle_masks.distance(t, s, 1)}
    if features.get("table"):
        extra |= {"table": normal(8, h), "bucket": oracle_masks.t5_bucket(t, s, 8, True, 16)}
    if "sinks" in features:
        extra["sinks"] = normal(*features["sinks"])
    if features.get("dropout"):
        extra |= {"keep": rng.random((b, h, t, s)) < 0.7, "rate": 0.3}
    q, k, v = normal(b, t, h, d), normal(b, s, kv, d), normal(b, s, kv, dv)
    return Problem(q=q, k=k, v=v, scale=dtype(0.6), **extra)


FEATURES = {
    "plain": {},
    "mask": dict(mask=True),
    "bias_full": dict(bias=(2, 4, 5, 6)),
    "bias_key": dict(bias=(2, 1, 1, 6)),
    "bias_row": dict(bias=(1, 4, 5, 1), mask=True),
    "cap": dict(cap=True, mask=True),
    "slopes_table": dict(slopes=True, table=True),
    "sinks_H": dict(sinks=(4,), mask=True),
    "sinks_Hn": dict(sinks=(4, 3)),
    "sinks_1n": dict(sinks=(1, 3)),
    "all": dict(
        mask=True, bias=(1, 4, 5, 6), cap=True, slopes=True, table=True, sinks=(4, 2), dropout=True
    ),
}


def directions(problem, seed=1):
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(np.shape(x)) for n, x in problem.arguments().items()}


def cotangents(problem, seed=2):
    f = oracle.forward(problem)
    rng = np.random.default_rng(seed)
    return rng.standard_normal(f.out.shape), rng.standard_normal(f.lse.shape)


def inner(f, ct_out, ct_lse):
    return np.sum(f.out * ct_out) + np.sum(np.where(np.isfinite(f.lse), f.lse, 0) * ct_lse)


def moved(problem, step, tangents):
    return problem.replace(**{n: getattr(problem, n) + step * t for n, t in tangents.items()})


@pytest.mark.parametrize("name", FEATURES)
def test_gradient_is_the_finite_difference_in_longdouble(name):
    problem = make(dtype=np.longdouble, **FEATURES[name])
    cts = cotangents(problem)
    grads = oracle.vjp(problem, *cts)
    assert grads.keys() == problem.arguments().keys()
    step = np.longdouble(2.0) ** -20
    for argument in grads:
        direction = {argument: directions(problem)[argument]}
        difference = [
            inner(oracle.forward(moved(problem, sign * step, direction)), *cts) for sign in (1, -1)
        ]
        expected = (difference[0] - difference[1]) / (2 * step)
        actual = np.sum(grads[argument] * direction[argument])
        assert abs(actual - expected) <= 1e-9 * (1 + abs(expected)), argument


@pytest.mark.parametrize("name", FEATURES)
def test_tangent_and_hvp_are_complex_steps(name):
    problem = make(**FEATURES[name])
    along = directions(problem)
    step = 1e-40
    stepped = oracle.forward(moved(problem, 1j * step, along))
    tangent = oracle.jvp(problem, along)
    np.testing.assert_allclose(tangent["out"], stepped.out.imag / step, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(tangent["lse"], stepped.lse.imag / step, rtol=1e-11, atol=1e-12)

    precision = bound.precision_of(np.float64)
    cts = cotangents(problem)
    by_dual = bound.hvps(problem, *cts, along, precision)
    for n, expected in oracle.hvp(problem, *cts, along).items():
        np.testing.assert_allclose(
            by_dual[n].primal.astype(float), expected, rtol=1e-10, atol=1e-11, err_msg=n
        )


def test_forward_against_loops():
    problem = make(**FEATURES["all"])
    f = oracle.forward(problem)
    b, t, s, h, kv = problem.sizes
    for i, j, n in itertools.product(range(b), range(h), range(t)):
        keys = [m for m in range(s) if problem.mask[i, j, n, m]]
        logits = []
        for m in keys:
            x = 0.6 * float(problem.q[i, n, j] @ problem.k[i, m, j // (h // kv)])
            z = 1.7 * np.tanh(x / 1.7) + problem.bias[0, j, n, m]
            z += -problem.slopes[j] * abs(n + 1 - m) + problem.table[problem.bucket[n, m], j]
            logits.append(z)
        weights = np.exp(logits)
        total = weights.sum() + np.exp(problem.sinks[j]).sum()
        kept = [w * problem.keep[i, j, n, m] / 0.7 for w, m in zip(weights, keys, strict=True)]
        out = (
            sum(
                (w * problem.v[i, m, j // (h // kv)] for w, m in zip(kept, keys, strict=True)),
                np.zeros(4),
            )
            / total
        )
        np.testing.assert_allclose(f.out[i, n, j], out, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(f.lse[i, n, j], np.log(total), rtol=1e-12, atol=1e-13)


def test_a_function_of_pairs_is_the_feature_that_it_computes():
    """With any leading axes."""
    problem = make(mask=True, cap=True, sinks=(4, 2))
    cap, lead = problem.cap, (2, 1)

    def soft_cap(z):
        assert z.shape == (*lead, 4, 5, 6)
        t = np.tanh(z / cap)
        return cap * t, lambda g: (g * (1 - t * t), np.sum(g * (t - z / cap * (1 - t * t))))

    xs = (x.reshape(*lead, *x.shape[1:]) for x in (problem.q, problem.k, problem.v))
    mask, rest = problem.mask.reshape(*lead, 4, 5, 6), dict(sinks=problem.sinks)
    other = oracle.of_any_axes(*xs, mask, (soft_cap,), scale=problem.scale, **rest)
    cts = cotangents(problem)
    want, found = (oracle.vjp(x, *cts) for x in (problem, other))
    (found["cap"],) = found.pop("scores")
    assert found.keys() == want.keys()
    for n, x in want.items():
        np.testing.assert_allclose(found[n], x, rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(oracle.forward(other).out, oracle.forward(problem).out)


def test_fully_masked_row_and_garbage():
    problem = make(**FEATURES["mask"])
    mask = problem.mask.copy()
    mask[1, :, :, 2] = mask[0, :, 3] = False
    problem = problem.replace(mask=mask)
    dirty_k, dirty_v, dirty_q = problem.k.copy(), problem.v.copy(), problem.q.copy()
    dirty_k[1, 2], dirty_v[1, 2], dirty_q[0, 3] = np.nan, np.inf, np.nan
    dirty = problem.replace(k=dirty_k, v=dirty_v, q=dirty_q)
    cts = cotangents(problem)
    f, g = oracle.forward(dirty), oracle.vjp(dirty, *cts)
    np.testing.assert_array_equal(f.out, oracle.forward(problem).out)
    assert (
        np.all(f.out[0, 3] == 0) and np.all(np.isneginf(f.lse[0, 3])) and np.all(g["q"][0, 3] == 0)
    )
    for n, expected in oracle.vjp(problem, *cts).items():
        np.testing.assert_array_equal(g[n], expected)


def test_empty_keys():
    f = oracle.forward(make(s=0))
    assert f.out.shape == (2, 5, 4, 4) and np.all(f.out == 0) and np.all(np.isneginf(f.lse))


def test_t5_bucket_matches_the_published_formula_off_the_boundaries():
    relative = np.arange(200)[None] - 100
    n = np.abs(relative)
    with np.errstate(divide="ignore"):
        large = 8 + (np.log(n / 8) / np.log(128 / 8) * 8 + 1e-9).clip(-8).astype(int)
    expected = (relative > 0) * 16 + np.where(n < 8, n, np.minimum(large, 15))
    np.testing.assert_array_equal(
        oracle_masks.t5_bucket(1, 200, 32, True, 128, q_offset=100), expected
    )
