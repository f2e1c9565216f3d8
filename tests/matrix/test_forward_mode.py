"""Tangents where all logits of a row move by nearly the same: the output hardly does, and errors must
be as small as its tangent, whatever the products round.
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqattn
from eqattn import masks as m
from eqattn._problem.storage import Stored

from . import bound, oracle, oracle_masks


T, SHIFT = 24, 30.0
# Strategy, devices, platform and dtype: each multiplies narrow operands. On a CPU only kernels do,
# so "gpu" makes a strategy believe that it is elsewhere.
NARROW = (
    ("blockwise", 1, "interpret", "bfloat16"),
    ("ragged", 1, "interpret", "bfloat16"),
    ("ring", 2, "gpu", "bfloat16"),
    ("blockwise", 1, "gpu", "float16"),
)


def arguments(dtype, seed=0):
    """q, k, v, a bias and sinks that hold more than half of most rows; their tangents."""
    rng = np.random.default_rng(seed)
    shapes = dict(q=(1, T, 2, 8), k=(1, T, 1, 8), v=(1, T, 1, 8), bias=(1, 2, T, T), sinks=(2,))
    dtypes = dict.fromkeys(shapes, dtype) | dict(sinks=np.float32)
    draw = {n: rng.standard_normal(x) for n, x in shapes.items()}
    moved = {n: 0.1 * rng.standard_normal(x) for n, x in shapes.items()}
    draw["sinks"] = draw["sinks"] + 4
    moved |= {n: moved[n] + SHIFT for n in ("bias", "sinks")}
    return [{n: jnp.asarray(x, dtypes[n]) for n, x in xs.items()} for xs in (draw, moved)]


def attend(strategy, platform, xs, mask=m.Causal()) -> dict[str, Any]:
    metadata = eqattn.AttentionMetadata(
        runtime_dtype=jnp.float32,
        platform="xla" if platform == "gpu" else platform,
        softmax_aux=xs.get("sinks"),
        blocksize_q=8,
        blocksize_k=8,
    )
    impl = eqattn.AttentionRegistry.create(strategy, metadata)
    q, k, v, bias = (xs[n] for n in ("q", "k", "v", "bias"))
    if strategy == "ragged":
        k, v = Stored(k), Stored(v)  # Arrays would be copied for so many queries.
    output = eqattn.attention(q, k, v, impl, mask=mask, bias=bias, return_logsumexp=True)
    return {"out": output.attention_outputs, "lse": output.logsumexp}


def directly(f, xs, moved):
    return jax.jvp(f, (xs,), (moved,))[1]


def linearized(f, xs, moved):
    return jax.linearize(f, xs)[1](moved)


def vectorised(f, xs, moved):
    xs, moved = jax.tree.map(lambda x: jnp.stack([x, x]), (xs, moved))
    tangents = jax.vmap(lambda xs, moved: directly(f, xs, moved))(xs, moved)
    return jax.tree.map(lambda x: x[1], tangents)


@contextlib.contextmanager
def at(devices, platform, monkeypatch):
    with monkeypatch.context() as patch:
        if platform == "gpu":
            patch.setattr(jax, "default_backend", lambda: "gpu")
        if devices == 1:
            yield
            return
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((devices,), ("sp",), auto, devices=jax.devices()[:devices])
        with jax.set_mesh(mesh):
            yield


CASES = [(directly, x) for x in NARROW] + [(f, NARROW[-1]) for f in (linearized, vectorised)]


def judged(xs, moved, tangents, dtype, **how) -> dict[str, float]:
    """The errors over their bounds, of causal attention."""
    precision = bound.precision_of(dtype, **how)
    exact: list[dict[str, Any]] = [
        {n: np.asarray(x).astype(precision.reference) for n, x in a.items()} for a in (xs, moved)
    ]
    problem = oracle.Problem(**exact[0], scale=8**-0.5, mask=oracle_masks.causal(T, T))
    reference = bound.tangents(problem, exact[1], precision)
    return {n: bound.excess(x, reference[n]) for n, x in tangents.items()}


@pytest.mark.parametrize("transform, how", CASES)
def test_logits_that_move_alike(transform, how, monkeypatch):
    strategy, devices, platform, dtype = how
    xs, moved = arguments(dtype)
    with at(devices, platform, monkeypatch):
        program = jax.jit(lambda *a: transform(lambda xs: attend(strategy, platform, xs), *a))
        assert f"operand_dtype={dtype}" in str(jax.make_jaxpr(program)(xs, moved))
        tangents = program(xs, moved)
    ratios = judged(xs, moved, tangents, dtype)
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize("how", NARROW)
@pytest.mark.parametrize("sinks_move", [False, True])
def test_few_keys_that_move_far_beside_sinks(sinks_move, how, monkeypatch):
    """The mean of a row is nearly that of its sinks, and far from that of its keys: a sum about the
    latter has errors of the distance between the two. A Carry has them, as sinks are added later.
    """
    strategy, devices, platform, dtype = how
    xs, moved = arguments(dtype)
    shift = SHIFT if sinks_move else 0
    far = np.where(np.arange(T) % 8 == 1, 1000.0, 0.0) + shift
    moved = jax.tree.map(jnp.zeros_like, moved) | {
        "bias": jnp.broadcast_to(far, moved["bias"].shape).astype(dtype),
        "sinks": jnp.full_like(moved["sinks"], shift),
    }
    call = lambda xs: attend(strategy, platform, xs)
    with at(devices, platform, monkeypatch):
        tangents = jax.jit(lambda *a: directly(call, *a))(xs, moved)
    ratios = judged(xs, moved, tangents, dtype, carried=strategy != "blockwise")
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize("how", NARROW[1:])
def test_rows_that_see_nothing(how, monkeypatch):
    """Of all keys, or of a block of them: the mean about which a sum is taken has no weight there."""
    strategy, devices, platform, dtype = how
    xs, moved = arguments(dtype)
    del xs["sinks"], moved["sinks"]
    mask = m.Causal(-5) & m.SlidingWindow(9, 0)
    call = lambda xs: attend(strategy, platform, xs, mask)
    with at(devices, platform, monkeypatch):
        tangents = jax.jit(lambda *a: directly(call, *a))(xs, moved)
    precision = bound.precision_of(dtype)
    exact: list[dict[str, Any]] = [
        {n: np.asarray(x).astype(precision.reference) for n, x in a.items()} for a in (xs, moved)
    ]
    seen = oracle_masks.causal(T, T, -5) & oracle_masks.window(T, T, 9, 0)
    problem = oracle.Problem(**exact[0], scale=8**-0.5, mask=seen)
    reference = bound.tangents(problem, exact[1], precision)
    ratio = bound.excess(tangents["out"], reference["out"])
    assert ratio <= 1 and not np.asarray(tangents["out"])[:, :5].any(), ratio


@pytest.mark.parametrize("how", NARROW[:2])
def test_gradients_are_those_of_plain_sums(how):
    """They have the mean of a row before they visit it. Where rows are finished in their visit, the
    tangent is a primitive, whose program has the refined sum.
    """
    strategy, _, platform, dtype = how
    xs, moved = arguments(dtype)
    call = lambda xs: jnp.sum(attend(strategy, platform, xs)["out"])  # noqa: E731
    forward = jax.make_jaxpr(lambda xs, moved: directly(call, xs, moved))(xs, moved)
    backward = jax.make_jaxpr(jax.grad(call))(xs)
    refined = "attention_refined" if strategy == "ragged" else "attention_attend_tangent"
    assert refined in str(forward)
    for name in ("attention_attend_tangent", "attention_refined"):
        assert name not in str(backward)
