"""Scores in the kernels for NVIDIA GPUs: functions of a user's own with their derivatives, and how
exact the operations are that the kernels write themselves.
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _gpu_lowered import kernels, text_of
from matrix import bound, oracle, oracle_masks as om

from eqattn import ALiBi, attention, AttentionMetadata, Blockwise, Causal, MaskFn, ScoreFn
from eqattn.kernels.gpu import _operations as operations


newest = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the kernel is written for jax 0.12 and newer"
)
T, S, H, K, D = 70, 90, 2, 1, 16
SHAPES = [(1, T, H, D), (1, S, K, D), (1, S, K, D)]


def metadata(platform, **kw):
    return AttentionMetadata(platform=platform, backend="cuda", runtime_dtype=jnp.bfloat16, **kw)


def arrays():
    return [jax.random.normal(jax.random.key(i), x, jnp.bfloat16) for i, x in enumerate(SHAPES)]


def call(q, k, v, score: Any, mask: Any = None, platform="gpu"):
    how = Blockwise(metadata(platform))
    return attention(q, k, v, how, mask=mask, score=score).attention_outputs


def judged(fn: Any, given: Any, seen: Any = None, **problem: Any):
    """Output and gradients of the kernels, interpreted, within the bound of the oracle.

    **Arguments:**

    - `fn`: the score, given learned arrays.
    - `given`: these arrays, by what the oracle calls them. `seen`: the mask.
    - `problem`: the rest of what the oracle is told.
    """
    q, k, v = arrays()
    g = jax.random.normal(jax.random.key(3), q.shape, jnp.bfloat16)

    @jax.jit
    def run(given, q, k, v, g):
        f = lambda given, *xs: call(*xs, fn(**given), seen, "interpret")
        out, pull = jax.vjp(f, given, q, k, v)
        of_given, *rest = pull(g)
        return dict(out=out, **dict(zip("qkv", rest)), **of_given)

    wide = [np.float64(x) for x in (q, k, v)]
    exact: Any = oracle.Problem(*wide, **dict(scale=D**-0.5) | problem)
    precision = bound.precision_of(jnp.bfloat16)
    want = bound.grads(exact, np.float64(g), np.zeros((1, T, H)), precision)
    want["out"] = bound.values(exact, precision)["out"]
    found = run(given, q, k, v, g)
    worst = {n: bound.excess(np.asarray(x), want[n]) for n, x in found.items()}
    assert max(worst.values()) <= 1, worst


@newest
def test_learned_functions():
    """A soft cap and ALiBi as a user writes them, where a table is read by head. The derivative of
    a function under a mask is that at visible pairs.
    """
    slopes, cap = jnp.array([0.05, 0.2]), jnp.float32(2.5)

    def score(slopes, cap):
        near = lambda h, q, k: slopes[h] * jnp.abs(q - k).astype(jnp.float32)
        return ScoreFn(lambda s, b, h, q, k: cap * jnp.tanh(s / cap) - near(h, q, k))

    distance = np.abs(np.arange(T)[:, None] - np.arange(S))
    given = dict(slopes=np.float64(slopes), cap=np.float64(cap), distance=distance)
    judged(score, dict(slopes=slopes, cap=cap), Causal(), mask=om.causal(T, S), **given)


@newest
@pytest.mark.parametrize("factor", [-0.8, 0.0])
def test_a_factor_behind_a_score(factor):
    """It multiplies what is no product of queries and keys, so that its sign is not theirs."""
    slopes = jnp.array([0.05, 0.2])
    scores = [
        ScoreFn(lambda s, b, h, q, k: s - slopes[h] * jnp.abs(q - k).astype(s.dtype)),
        ScoreFn(lambda s, b, h, q, k, f=jnp.float32(factor): s * f),
    ]
    q, k, v = arrays()
    got = jax.jit(ft.partial(call, score=scores, platform="interpret"))(q, k, v)
    factor = float(np.float32(factor))
    distance = np.abs(np.arange(T)[:, None] - np.arange(S))
    exact: Any = oracle.Problem(
        *[np.float64(x) for x in (q, k, v)],
        scale=factor * D**-0.5,
        slopes=factor * np.float64(slopes),
        distance=distance,
    )
    want = bound.values(exact, bound.precision_of(jnp.bfloat16))["out"]
    assert bound.excess(np.asarray(got), want) <= 1


@newest
@pytest.mark.parametrize("factor", [-0.8, 0.0, 0.7])
def test_a_factor_behind_an_odd_score(factor):
    """It multiplies maxima, and has its sign with the queries, as a score that is odd allows."""
    scores = [
        ScoreFn(lambda s, b, h, q, k: jnp.tanh(s)),
        ScoreFn(lambda s, b, h, q, k, f=jnp.float32(factor): s * f),
    ]
    q, k, v = arrays()
    got = jax.jit(ft.partial(call, score=scores, platform="interpret"))(q, k, v)
    factor = float(np.float32(factor))
    problem = dict(scale=factor * D**-0.5) | (dict(cap=np.float64(factor)) if factor else {})
    exact: Any = oracle.Problem(*[np.float64(x) for x in (q, k, v)], **problem)
    want = bound.values(exact, bound.precision_of(jnp.bfloat16))["out"]
    assert bound.excess(np.asarray(got), want) <= 1


@newest
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-15, 0.3])
def test_what_is_added_is_divided_by_the_scale(scale, backend):
    """It must keep its sign and stay finite, whatever the scale is. A slope is one number for each
    block of a head that has its own keys.
    """
    slopes, (q, k, v) = jnp.array([0.05, 0.2]), arrays()
    k, v = (jnp.concatenate([x, x[:, ::-1]], 2) for x in (k, v))
    fields = dict(softmax_scale=jnp.float32(scale), runtime_dtype=jnp.bfloat16)
    how = Blockwise(AttentionMetadata(platform="interpret", backend=backend, **fields))

    def run(q, k, v, slopes):
        more = dict(score=ALiBi(slopes), mask=Causal(40))
        return attention(q, k, v, how, **more).attention_outputs

    exact: Any = oracle.Problem(
        *[np.float64(x) for x in (q, k, v)],
        scale=float(np.float32(scale)),
        slopes=np.float64(slopes),
        distance=np.abs(np.arange(T)[:, None] - np.arange(S)),
        mask=om.causal(T, S, 40, 0),
    )
    precision, g = bound.precision_of(jnp.bfloat16), jax.random.normal(jax.random.key(3), q.shape)
    g = g.astype(jnp.bfloat16)
    got, pull = jax.vjp(jax.jit(run), q, k, v, slopes)
    want = bound.grads(exact, np.float64(g), np.zeros(q.shape[:-1]), precision)
    want |= {"out": bound.values(exact, precision)["out"]}
    for name, x in zip(("out", "q", "k", "v", "slopes"), (got, *pull(g))):
        assert bound.excess(np.asarray(x), want[name]) <= 1, name


def many(s, b, h, q, k):
    """Most operations that there are, of floats and of integers."""
    x = (q - k).astype(s.dtype)
    x = jnp.sin(x) + jnp.cos(s) * jax.nn.sigmoid(x) + jnp.log1p(jnp.abs(x)) + jnp.log(x * x + 1)
    x = x + jnp.clip(s, -3, 3) ** 2 + jnp.sqrt(jnp.exp(-abs(x))) + jax.nn.softplus(s)
    x = x + jnp.floor(s) + jnp.ceil(x) + jnp.round(s) + jax.nn.relu(s)
    near = ((q // 3) % 4 == k % 4) | (((q ^ k) & 1) == 0) & ~(q > k + 5)
    return jnp.where(near, x, jnp.where(s > 0, jnp.sign(s) / (1 + s * s), -s))


@newest
@pytest.mark.parametrize("sign", [-2.0, 2.0])
def test_a_factor_of_a_maximum_may_be_negative(sign):
    """A factor moved into the maximum whatever its sign, which made a minimum of it."""
    a, b = jnp.float32(0.3), jnp.float32(0.7)
    score = lambda: ScoreFn(lambda s, *at: s * jnp.maximum(a, b) * sign)
    judged(score, {}, scale=D**-0.5 * 0.7 * sign)


@newest
def test_a_predicate_may_be_known():
    """The predicate of a selection is a literal then, which was looked for among variables."""
    seen = MaskFn(lambda b, h, q, k: jnp.bool_(True))
    score = lambda: ScoreFn(lambda s, *at: jnp.where(jnp.bool_(False), -s, s * 0.7))
    judged(score, {}, seen, scale=D**-0.5 * 0.7)


@newest
def test_a_score_may_ignore_its_logit():
    """The gradient of values then has no product that a kernel could begin with, and has none."""
    distance = np.abs(np.arange(T)[:, None] - np.arange(S))
    score = lambda: ScoreFn(lambda s, b, h, q, k: -0.25 * jnp.abs(q - k).astype(s.dtype))
    judged(score, {}, scale=0.0, slopes=np.full(H, 0.25), distance=distance)


@newest
def test_functions_are_inlined():
    """The compiler takes them and their derivatives, also where these read a visible pair, and a
    learned number unless there is none.
    """
    learned = jnp.float32(0.7)
    score = ScoreFn(lambda s, *at: many(jnp.cos(learned * s), *at))
    loss = lambda *xs: call(*xs, score, Causal()).astype(jnp.float32).sum()
    assert kernels(jax.grad(loss, (0, 1, 2)), *arrays()) == 3
    assert Blockwise(metadata("gpu")).supports(score=score)


@newest
def test_no_rough_instruction_is_taken():
    """Of tanh, sine and cosine, the chip's own have 11 bits, or are wrong for large angles. What the
    kernels write instead is judged below.
    """
    score = ScoreFn(lambda s, b, h, q, k: jnp.tanh(s) + jnp.sin(s) + jnp.cos(s))
    loss = lambda *xs: call(*xs, score).astype(jnp.float32).sum()
    text = text_of(jax.grad(loss), *arrays())
    assert "ex2.approx" in text
    assert not any(f"{name}.approx" in text for name in ("tanh", "sin", "cos"))


RANGES = {"sin": 3e5, "cos": 3e5, "tanh": 20, "floor": 1e4, "ceil": 1e4, "logistic": 80, "log1p": 9}


@pytest.mark.parametrize("name", RANGES)
def test_what_kernels_write_themselves(name):
    """Within four units of the last place of 1, or of the number if that is greater."""
    random = np.random.RandomState(0)
    x = random.uniform(-RANGES[name], RANGES[name], 100_000) * random.uniform(0, 1, 100_000) ** 4
    x = np.concatenate([x, np.arange(-9, 9), np.pi / 2 * np.arange(-99, 99)]).astype(np.float32)
    x = np.abs(x) if name == "log1p" else x
    exact = {"logistic": lambda x: 1 / (1 + np.exp(-x))}.get(name) or getattr(np, name)
    got, want = np.asarray(operations._WRITTEN[name](x)), exact(x.astype(np.float64))
    assert (np.abs(got - want) <= 4 * 2.0**-24 * np.maximum(1, np.abs(want))).all()
    if name in ("floor", "ceil"):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("power", [-3, -1, 0, 1, 2, 7, 12])
def test_whole_powers(power):
    x = np.linspace(-2, 2, 30, dtype=np.float32)
    got = operations._WRITTEN["integer_pow"](x, y=power)
    np.testing.assert_allclose(got, x.astype(np.float64) ** power, rtol=1e-6)


REFUSED = {
    "rem": lambda s, b, h, q, k: s % jnp.float32(3),
    "sinh": lambda s, b, h, q, k: jnp.sinh(s),
    "gather": lambda s, b, h, q, k: s + jnp.ones(200)[q + k],
    "scan": lambda s, b, h, q, k: jax.lax.fori_loop(0, 3, lambda _, x: x * 2, s),
    "numbers of bfloat16": lambda s, b, h, q, k: s.astype(jnp.bfloat16) * 2,
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("platform", ["gpu", "interpret"])
def test_functions_that_there_is_no_kernel_for(name, platform):
    score = ScoreFn(REFUSED[name])
    with pytest.raises(ValueError, match=f"no kernel.*a ScoreFn has (a )?{name}"):
        call(*arrays(), score, platform=platform)
    assert name in Blockwise(metadata("gpu")).supports(score=score).reason


@newest
def test_the_body_of_a_loop_is_not_taken_for_a_call():
    """One turn of it would be evaluated, and the mask be another."""
    mask = MaskFn(lambda b, h, q, k: jax.lax.fori_loop(0, 3, lambda _, x: x + 7, k * q) <= 99)
    with pytest.raises(ValueError, match="has a scan"):
        kernels(ft.partial(call, score=None, mask=mask), *arrays())
    assert "has a scan" in Blockwise(metadata("gpu")).supports(mask=mask).reason
