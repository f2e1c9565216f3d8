"""The bound is loose enough for a correct implementation and tight enough to see each mistake."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from . import bound, oracle, oracle_masks
from .distributions import DISTRIBUTIONS, draw
from .oracle import Problem


DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


def rounded(x, dtype):
    return np.asarray(x, np.float64).astype(dtype).astype(np.float64)


def make(distribution, dtype, t=64, s=64, h=4, kv=2, d=16, **features) -> Problem:
    q, k, v, scale = draw(distribution, 1, t, s, h, kv, d)
    q, k, v = (rounded(x, dtype) for x in (q, k, v))
    return Problem(q=q, k=k, v=v, scale=scale, mask=oracle_masks.causal(t, s), **features)


def cotangents(problem, dtype):
    rng = np.random.default_rng(5)
    f = oracle.forward(problem)
    return rounded(rng.standard_normal(f.out.shape), dtype), rounded(
        rng.standard_normal(f.lse.shape), np.float32
    )


def naive(arguments, mask, dtype, round_p):
    """A plain float32 softmax attention. `round_p` rounds the probabilities to the input dtype, as
    tensor units ask.
    """
    q, k, v = (arguments[n].astype(jnp.float32) for n in "qkv")
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, 2) for x in (k, v))
    z = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest")
    z = z * arguments["scale"]
    if "cap" in arguments:
        z = arguments["cap"] * jnp.tanh(z / arguments["cap"])
    z = jnp.where(mask, z + arguments["bias"], -jnp.inf)
    sinks = jnp.broadcast_to(
        arguments["sinks"][None, :, None, :], (*z.shape[:3], arguments["sinks"].shape[-1])
    )
    joint = jnp.concatenate([z, sinks], -1)
    top = jax.lax.stop_gradient(joint.max(-1, keepdims=True))
    e = jnp.exp(joint - top)
    den = e.sum(-1, keepdims=True)
    p = (e / den)[..., : k.shape[1]]
    if round_p:  # the product rounds its operand; its cotangent stays float32
        p = p + jax.lax.stop_gradient(p.astype(dtype).astype(jnp.float32) - p)
    out = jnp.einsum("bhts,bshd->bthd", p, v, precision="highest")
    lse = (top + jnp.log(den))[..., 0].transpose(0, 2, 1)
    return out.astype(dtype), lse


@pytest.mark.parametrize("round_p", [False, True], ids=["p_exact", "p_rounded"])
@pytest.mark.parametrize("cap", [None, 20.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_correct_implementation_passes(distribution, dtype, cap, round_p):
    dtype = DTYPES[dtype]
    rng = np.random.default_rng(3)
    features = {} if cap is None else {"cap": np.float64(cap)}
    problem = make(
        distribution,
        dtype,
        bias=rounded(rng.standard_normal((1, 4, 64, 64)), dtype),
        sinks=rounded(rng.standard_normal((4, 2)), np.float32),
        **features,
    )
    ct_out, ct_lse = cotangents(problem, dtype)
    precision = bound.precision_of(dtype)
    kinds = {
        n: np.float32 if n in ("sinks", "scale", "cap") else dtype for n in problem.arguments()
    }
    arguments = {
        n: jnp.asarray(np.asarray(x).astype(kinds[n])) for n, x in problem.arguments().items()
    }

    @jax.jit
    def run(arguments):
        with jax.numpy_dtype_promotion("standard"):
            outputs, pull = jax.vjp(lambda a: naive(a, problem.mask, dtype, round_p), arguments)
            return outputs, pull(
                (jnp.asarray(ct_out.astype(dtype)), jnp.asarray(ct_lse.astype(np.float32)))
            )[0]

    (out, lse), grads = run(arguments)
    references = bound.values(problem, precision)
    assert bound.excess(out, references["out"]) <= 1
    assert bound.excess(lse, references["lse"]) <= 1
    references = bound.grads(problem, ct_out, ct_lse, precision)
    assert {n: e for n in grads if (e := bound.excess(grads[n], references[n])) > 1} == {}


# --- teeth: each mistake is made in the oracle, rounded to the output dtype, and must be found ---


def _caught(problem, defective, dtype, names=None) -> dict[str, bool]:
    """Which results of `defective` violate the bound of `problem`."""
    precision = bound.precision_of(dtype)
    cts = cotangents(problem, dtype)
    wrong = oracle.forward(defective)
    results = {"out": wrong.out, "lse": wrong.lse, **oracle.vjp(defective, *cts)}
    references = {**bound.values(problem, precision), **bound.grads(problem, *cts, precision)}
    kinds = {n: np.float32 if n in ("lse", "sinks", "scale", "cap") else dtype for n in results}
    return {
        n: bound.excess(np.asarray(x).astype(kinds[n]), references[n]) > 1
        for n, x in results.items()
        if n in references
    }


FULL = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_oracle_itself_is_within(distribution, dtype):
    problem = make(distribution, FULL[dtype])
    assert not any(_caught(problem, problem, FULL[dtype]).values())


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("offset", [-1, 1])
def test_causal_off_by_one_is_caught(distribution, dtype, offset):
    problem = make(distribution, FULL[dtype])
    defective = problem.replace(mask=oracle_masks.causal(64, 64, offset))
    caught = _caught(problem, defective, FULL[dtype])
    assert all(caught[n] for n in ("out", "lse", "q", "k", "v")), caught


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("distribution", ["normal", "v_mean_10"])
@pytest.mark.parametrize("row", [5, 31])
def test_one_hidden_or_leaked_pair_is_caught(distribution, dtype, row):
    # Over a mean of 10, bfloat16 may blur one key's gradient by more than one pair's part in it.
    blurred = (dtype, distribution) == ("bf16", "v_mean_10")
    names = ("out", "lse", "q", "v") if blurred else ("out", "lse", "q", "k", "v")
    problem = make(distribution, FULL[dtype])
    mask = np.broadcast_to(problem.mask, (1, 4, 64, 64)).copy()
    heaviest = np.argmax(oracle.forward(problem).p[0, 1, row])
    mask[0, 1, row, heaviest] = False
    caught = _caught(problem, problem.replace(mask=mask), FULL[dtype])
    assert all(caught[n] for n in names), caught
    leak = np.broadcast_to(problem.mask, (1, 4, 64, 64)).copy()
    leak[
        0,
        1,
        row,
        row + 1 + np.argmax(oracle.forward(problem.replace(mask=None)).p[0, 1, row, row + 1 :]),
    ] = True
    caught = _caught(problem, problem.replace(mask=leak), FULL[dtype])
    assert all(caught[n] for n in names), caught


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_non_causal_gradient_is_caught(distribution, dtype):
    problem = make(distribution, FULL[dtype])
    caught = _caught(problem, problem.replace(mask=None), FULL[dtype])
    assert all(caught[n] for n in ("q", "k", "v"))


@pytest.mark.parametrize("dtype", FULL)
def test_forgotten_shared_or_recounted_sinks_are_caught(dtype):
    sinks = np.random.default_rng(8).standard_normal((4, 1))
    problem = make("normal", FULL[dtype], sinks=rounded(sinks, np.float32))
    defects = {
        "forgotten": problem.replace(sinks=np.full((4, 1), -1e30)),
        "pooled": problem.replace(
            sinks=np.broadcast_to(np.log(np.exp(problem.sinks).sum()), (4, 1))
        ),
        "once per block": problem.replace(sinks=problem.sinks + np.log(2)),
    }
    for name, defective in defects.items():
        caught = _caught(problem, defective, FULL[dtype])
        assert all(caught[n] for n in ("out", "lse", "q", "k", "v", "sinks")), (name, caught)


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_zero_gradient_is_caught(distribution, dtype):
    rng = np.random.default_rng(4)
    features = {
        "bias": rounded(rng.standard_normal((1, 4, 1, 64)), FULL[dtype]),
        "sinks": rng.standard_normal(4),
    }
    features |= {"slopes": rng.random(4), "distance": oracle_masks.distance(64, 64), "cap": 9.0}
    problem = make(distribution, FULL[dtype], **features)
    precision = bound.precision_of(FULL[dtype])
    for n, reference in bound.grads(problem, *cotangents(problem, FULL[dtype]), precision).items():
        if dtype == "bf16" and n in ("scale", "cap"):
            continue  # sums over all pairs that nearly cancel: float32 cases judge them
        assert bound.excess(np.zeros(reference.primal.shape, np.float32), reference) > 1, n


@pytest.mark.parametrize("dtype", FULL)
def test_a_dropped_logsumexp_cotangent_is_caught(dtype):
    problem = make("normal", FULL[dtype])
    ct_out, ct_lse = cotangents(problem, FULL[dtype])
    references = bound.grads(problem, ct_out, ct_lse, bound.precision_of(FULL[dtype]))
    wrong = oracle.vjp(problem, ct_out, 0 * ct_lse)
    for n in ("q", "k", "scale"):
        assert bound.excess(wrong[n].astype(np.float32), references[n]) > 1, n


@pytest.mark.parametrize("dtype", FULL)
def test_wrong_dropout_and_wrong_order_are_caught(dtype):
    keep = np.random.default_rng(6).random((1, 4, 64, 64)) < 0.7
    problem = make("normal", FULL[dtype], keep=keep, rate=0.3)
    renormalised = make("normal", FULL[dtype]).replace(mask=problem.mask & keep)
    unscaled = problem.replace(rate=0.0)
    for defective in (renormalised, unscaled):
        caught = _caught(problem, defective, FULL[dtype])
        assert all(caught[n] for n in ("out", "q", "k", "v")), caught
    bias = rounded(np.random.default_rng(7).standard_normal((1, 4, 64, 64)), FULL[dtype])
    capped = make("normal", FULL[dtype], bias=bias, cap=3.0)
    x = oracle.forward(capped).x * capped.scale
    bias_first = 3 * np.tanh((x + bias) / 3) - 3 * np.tanh(x / 3)
    caught = _caught(capped, capped.replace(bias=bias_first), FULL[dtype])
    assert all(caught[n] for n in ("out", "lse", "q", "k", "v")), caught


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_bound_of_out_is_close_to_the_one_the_design_asks_for(distribution):
    """The design asks for u sum p|v| (2 + sqrt D)(1 + kappa). Ours may not exceed twice that plus
    the accumulation.
    """
    problem = make(distribution, np.float32)
    f = oracle.forward(problem)
    v = np.repeat(abs(problem.v), 2, 2)
    mass = np.einsum("bhts,bshd->bthd", f.p, v)
    kappa = problem.scale * np.einsum(
        "bhts,bthd,bshd->bth", f.p, abs(problem.q), np.repeat(abs(problem.k), 2, 2)
    )
    asked = 2**-24 * mass * bound.growth(16) * (1 + kappa[..., None])
    ours = bound.values(problem, bound.precision_of(np.float32))["out"].error
    assert np.median(ours / asked) < 2 + bound.growth(64) / bound.growth(16)
