"""Masks and scores as functions of a user's own in all kernels: predicates that choose and compare,
learned numbers, most operations, and what is refused. That they compile: the cases of `_tpu_compile`.
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _kernels import drawn, EACH, how, judge, kernels, newest, results
from _predicates import any_odd, MASKS
from matrix import oracle_masks as om

from eqattn import ALiBi, attention, Causal, MaskFn, ScoreFn


T, S, D = 40, 48, 16
DISTANCE = np.abs(np.arange(T)[:, None] - np.arange(S))


def arrays(backend: str, batch=1):
    """Two heads that share one key head, with values as wide as keys."""
    return drawn(backend, T, S, 2, 1, D, D, batch)


def called(platform, backend, **given: Any):
    fields = {n: given.pop(n) for n in ("softmax_scale", "logits_soft_cap") if n in given}
    strategy = how(backend, platform, **fields)
    return lambda q, k, v: attention(q, k, v, strategy, **given).attention_outputs


def shown(fn) -> np.ndarray:
    """The pairs `[1, h, t, s]` that a mask shows, by the function itself on NumPy's indices."""
    at = np.ogrid[:1, :2, :T, :S]
    with jax.numpy_dtype_promotion("standard"):
        pairs = jnp.broadcast_arrays(*(jnp.asarray(x, jnp.int32) for x in at))
        each = jax.vmap(fn)(*(x.reshape(-1) for x in pairs))
    return np.asarray(each, bool).reshape(1, 2, T, S)


def test_masks_of_predicates(interpreted):
    """Only a mask that each of these takes part in says so of all."""
    given, ct = arrays(interpreted)
    mask = MaskFn(any_odd)
    judge(called("interpret", interpreted, mask=mask), given, ct, mask=shown(any_odd))


def chosen(s, b, h, q, k):
    return jnp.where(any_odd(b, h, q, k), s, s - 1)


def test_scores_of_predicates(interpreted):
    """A choice, and a branch that adds a predicate."""
    given, ct = arrays(interpreted)
    branched = lambda s, b, h, q, k: jax.lax.cond(q > k, lambda: s, lambda: s - 0.5)
    added = lambda s, b, h, q, k: s + (q >= k).astype(s.dtype)
    score = [ScoreFn(fn) for fn in (chosen, branched, added)]
    below = np.arange(T)[:, None] - np.arange(S)
    bias = np.where(shown(any_odd), 0.0, -1.0) + np.where(below > 0, 0, -0.5) + (below >= 0)
    run = called("interpret", interpreted, mask=Causal(), score=score)
    judge(run, given, ct, bias=bias, mask=om.causal(T, S))


@EACH
def test_kernels_have_predicates(backend):
    count = ft.partial(kernels, backend)
    for fn in MASKS.values():
        assert how(backend, "pallas").supports(mask=MaskFn(fn))
    run = called("pallas", backend, mask=MaskFn(any_odd))
    assert count(run, *arrays(backend)[0].values()) == 1


@EACH
def test_what_stops_gradients_is_the_value_in_kernels(backend):
    """The derivative is taken before."""
    stopped = ScoreFn(lambda s, b, h, q, k: s * jax.lax.stop_gradient(jnp.tanh(s)))
    assert how(backend, "pallas").supports(score=stopped)
    run = called("pallas", backend, score=stopped)
    assert kernels(backend, run, *arrays(backend)[0].values()) == 1


def test_what_stops_gradients(interpreted):
    """Kernels give the gradients of XLA code, within roundings of their dtype. No plain formula has
    a factor without a derivative.
    """
    given, ct = arrays(interpreted)
    score = ScoreFn(lambda s, b, h, q, k: s * jax.lax.stop_gradient(jnp.tanh(s)))
    found, want = (
        results(called(platform, interpreted, score=score), given, ct)
        for platform in ("interpret", "xla")
    )
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want)):
        x, y = np.float32(x), np.float32(y)
        assert np.abs(x - y).max() <= (1e-5 if interpreted == "tpu" else 1e-2) * np.abs(y).max()


LACKING = {
    "any": (lambda b, h, q, k: jnp.any(jnp.stack([q >= k, q < 5])), ("stack", "concatenate")),
    "argmax": (lambda b, h, q, k: jnp.argmax(jnp.stack([q, k])) == 0, ("stack", "concatenate")),
    "a branch for all": (
        lambda b, h, q, k: jax.lax.cond(h == 0, lambda: q >= k, lambda: q <= k),
        ("cond",),
    ),
    # One turn of its body would be evaluated if it were taken for a call.
    "a loop": (
        lambda b, h, q, k: jax.lax.fori_loop(0, 3, lambda _, x: x + 7, k * q) <= 99,
        ("scan", "while"),
    ),
}


@pytest.mark.parametrize("backend", ["tpu", "cuda", "triton"])
@pytest.mark.parametrize("name", LACKING)
def test_what_kernels_lack_is_named(backend, name):
    """In the same words by `supports` and by the call, of a mask and of a score."""
    fn, operations = LACKING[name]
    strategy = how(backend)
    score = ScoreFn(lambda s, b, h, q, k: jnp.where(fn(b, h, q, k), s, -s))
    for given in (dict(mask=MaskFn(fn)), dict(score=score)):
        reason = strategy.supports(**given).reason
        assert any(f"has a {x}," in reason for x in operations), reason
        with pytest.raises(ValueError) as caught:
            attention(*arrays(backend)[0].values(), strategy, **given)
        assert str(caught.value) == reason


@pytest.mark.parametrize("name", ["any", "a branch for all"])
def test_auto_runs_what_kernels_lack_as_xla_code(name):
    mask = MaskFn(LACKING[name][0])
    assert kernels("tpu", called("auto", "tpu", mask=mask), *arrays("tpu")[0].values()) == 0


def test_learned_functions(interpreted):
    """A soft cap and ALiBi as a user writes them, where a table is read by head. The derivative of
    a function under a mask is that at visible pairs.
    """
    given, ct = arrays(interpreted)

    def run(q, k, v, slopes, cap):
        near = lambda h, q, k: slopes[h] * jnp.abs(q - k).astype(jnp.float32)
        score = ScoreFn(lambda s, b, h, q, k: cap * jnp.tanh(s / cap) - near(h, q, k))
        return called("interpret", interpreted, mask=Causal(), score=score)(q, k, v)

    learned = dict(slopes=jnp.array([0.05, 0.2]), cap=jnp.float32(2.5))
    judge(run, given | learned, ct, distance=DISTANCE, mask=om.causal(T, S))


@pytest.mark.parametrize("factor", [-0.8, 0.0, 0.7])
def test_a_factor_behind_a_score(factor, interpreted):
    """It multiplies maxima, and has its sign with the queries, as a score that is odd allows. Behind
    a bias it multiplies what is no product of queries and keys, so that its sign is not theirs.
    """
    given, _ = arrays(interpreted)
    slopes, factor = jnp.array([0.05, 0.2]), float(np.float32(factor))
    last = ScoreFn(lambda s, b, h, q, k, f=jnp.float32(factor): s * f)
    near = ScoreFn(lambda s, b, h, q, k: s - slopes[h] * jnp.abs(q - k).astype(s.dtype))
    tanh = ScoreFn(lambda s, b, h, q, k: jnp.tanh(s))
    problem = dict(scale=factor * D**-0.5, slopes=factor * np.float64(slopes), distance=DISTANCE)
    judge(called("interpret", interpreted, score=[near, last]), given, **problem)
    problem = dict(scale=factor * D**-0.5) | (dict(cap=np.float64(factor)) if factor else {})
    judge(called("interpret", interpreted, score=[tanh, last]), given, **problem)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-15])
def test_what_is_added_is_divided_by_the_scale(scale, interpreted):
    """It must keep its sign and stay finite, whatever the scale is. A slope is one number for each
    block of a head that has its own keys.
    """
    given, ct = drawn(interpreted, T, S, 2, 2, D, D)

    def run(q, k, v, slopes):
        more: Any = dict(score=ALiBi(slopes), mask=Causal(40), softmax_scale=jnp.float32(scale))
        return called("interpret", interpreted, **more)(q, k, v)

    problem = dict(scale=float(np.float32(scale)), distance=DISTANCE, mask=om.causal(T, S, 40, 0))
    judge(run, given | dict(slopes=jnp.array([0.05, 0.2])), ct, **problem)


SCORES: dict[str, Any] = {
    # A factor moved into a maximum whatever its sign would make a minimum of it.
    "a factor of a maximum": (
        lambda s, *at: s * jnp.maximum(jnp.float32(0.3), jnp.float32(0.7)) * -2.0,
        dict(scale=D**-0.5 * float(np.float32(0.7)) * -2.0),
    ),
    # The predicate of a selection is a literal then.
    "a known predicate": (
        lambda s, *at: jnp.where(jnp.bool_(False), -s, s * 0.5),
        dict(scale=D**-0.5 * 0.5),
    ),
    # The gradient of values then has no product that a kernel could begin with.
    "no logit": (
        lambda s, b, h, q, k: -0.25 * jnp.abs(q - k).astype(s.dtype),
        dict(scale=0.0, slopes=np.full(2, 0.25), distance=DISTANCE),
    ),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_that_are_simplified(name, interpreted):
    (given, ct), (fn, problem) = arrays(interpreted), SCORES[name]
    mask = MaskFn(lambda b, h, q, k: jnp.bool_(True)) if name == "a known predicate" else None
    score = ScoreFn(fn)
    judge(called("interpret", interpreted, mask=mask, score=score), given, ct, **problem)


def test_a_product_with_itself(interpreted):
    """The score is quadratic, so that the numbers of plain float64 stand beside."""
    given, _ = arrays(interpreted)
    square = called("interpret", interpreted, score=ScoreFn(lambda s, *at: s * s))
    got = results(square, given)["out"]
    q, k, v = (np.repeat(np.float64(x), 2 // x.shape[2], 2) for x in given.values())
    x = np.einsum("bthd,bshd->bhts", q, k) * D**-0.5
    p = np.exp(x * x - (x * x).max(-1, keepdims=True))
    want = np.einsum("bhts,bshd->bthd", p / p.sum(-1, keepdims=True), v)
    # A logit's rounding is 2 x^2 times as large in its exponential.
    atol = float(jnp.finfo(got.dtype).eps) * 2 * float((x * x).max())
    np.testing.assert_allclose(np.float64(got), want, rtol=0, atol=atol)


def many(s, b, h, q, k):
    """Most operations that there are, of floats and of integers."""
    x = (q - k).astype(s.dtype)
    x = jnp.sin(x) + jnp.cos(s) * jax.nn.sigmoid(x) + jnp.log1p(jnp.abs(x)) + jnp.log(x * x + 1)
    x = x + jnp.clip(s, -3, 3) ** 2 + jnp.sqrt(jnp.exp(-abs(x))) + jax.nn.softplus(s)
    x = x + jnp.floor(s) + jnp.ceil(x) + jnp.round(s) + jax.nn.relu(s)
    near = ((q // 3) % 4 == k % 4) | (((q ^ k) & 1) == 0) & ~(q > k + 5)
    return jnp.where(near, x, jnp.where(s > 0, jnp.sign(s) / (1 + s * s), -s))


@newest
def test_functions_are_inlined():
    """The compiler of Hopper takes them and their derivatives, also where these read a visible pair, and a
    learned number unless there is none.
    """
    learned = jnp.float32(0.7)
    score = ScoreFn(lambda s, *at: many(jnp.cos(learned * s), *at))
    run = called("pallas", "cuda", mask=Causal(), score=score)
    loss = lambda *xs: run(*xs).astype(jnp.float32).sum()
    given, _ = arrays("cuda")
    assert kernels("cuda", jax.grad(loss, (0, 1, 2)), *given.values()) == 3
    assert how("cuda", "pallas").supports(score=score)


REFUSED = {
    "sinh": (lambda s, b, h, q, k: jnp.sinh(s), ("tpu", "cuda")),
    "gather": (lambda s, b, h, q, k: s + jnp.ones(200)[q + k], ("tpu", "cuda", "triton")),
    "scan": (
        lambda s, b, h, q, k: jax.lax.fori_loop(0, 3, lambda _, x: x * 2, s),
        ("tpu", "cuda", "triton"),
    ),
    "numbers of bfloat16": (
        lambda s, b, h, q, k: s.astype(jnp.bfloat16) * 2,
        ("tpu", "cuda", "triton"),
    ),
    "rem": (lambda s, b, h, q, k: s % jnp.float32(3), ("cuda", "triton")),
    "erf": (lambda s, b, h, q, k: s + jax.lax.erf(s), ("triton",)),
    "lgamma": (lambda s, b, h, q, k: jax.lax.lgamma(s), ("tpu",)),
    "asinh": (lambda s, b, h, q, k: jnp.arcsinh(s), ("tpu",)),
    "expm1": (lambda s, b, h, q, k: jnp.expm1(s), ("tpu",)),
    "cbrt": (lambda s, b, h, q, k: jnp.cbrt(s), ("tpu",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_there_is_no_kernel_for(name):
    fn, backends = REFUSED[name]
    score = ScoreFn(fn)
    for backend in backends:
        run = called("interpret", backend, score=score)
        with pytest.raises(ValueError, match=f"no kernel.*a ScoreFn has (a )?{name}"):
            run(*arrays(backend)[0].values())
        assert name in how(backend, "pallas").supports(score=score).reason
