"""The backward's kernel in its form for wide matrix units: windows of logits `[rows, keys]`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from _tpu_races import without_races
from matrix import oracle, oracle_masks as om

from eqattn import (
    ALiBi,
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    ScoreFn,
    Segments,
    SlidingWindow,
)
from eqattn._sweep.products import dot
from eqattn.kernels.tpu import _backward_step as _step
from eqattn.kernels.tpu._program import Program
from eqattn.masks._base import AbstractMask


T, SIZE = 56, 32
IDS = np.repeat(np.array([[0, 1, 2]]), [13, 26, 17], axis=1)
MASKS: dict[str, tuple[AbstractMask, np.ndarray]] = {
    "causal": (Causal(), om.causal(T, T)),
    "window": (Causal() & SlidingWindow(30, 0), om.causal(T, T) & om.window(T, T, 30, 0)),
    "segments": (Causal() & Segments(jnp.asarray(IDS)), om.causal(T, T) & om.segments(IDS, IDS)),
}


@pytest.fixture
def steps(monkeypatch):
    """The steps that ran in this form, for windows of 16 keys and 16 rows, or 8 if masked."""
    found = []
    monkeypatch.setattr(_step, "WINDOW", (16, 16))
    monkeypatch.setattr(_step, "suits", lambda step: found.append(step) or True)
    return found


def how(**kw):
    given = dict(platform="interpret", blocksize_q=SIZE, blocksize_k=SIZE)
    return AttentionMetadata(runtime_dtype=jnp.float32, **given | kw)


@pytest.mark.parametrize(
    "mask, heads, fused",
    [("causal", (4, 2), True), ("window", (2, 2), False), ("segments", (2, 1), True)],
)
def test_gradients(mask, heads, fused, steps):
    shapes = (heads[0], 16), (heads[1], 16), (heads[1], 8), (heads[0], 8)
    q, k, v, ct = (normal(i, 1, T, *shape) for i, shape in enumerate(shapes))
    ours, visible = MASKS[mask]
    metadata = how(blocksize_q=SIZE * heads[1] // heads[0])

    @jax.jit  # so that segments are classified at run time
    def run(q, k, v, ours):
        strategy = Blockwise(metadata, fused_backward=fused)
        out, transpose = jax.vjp(
            lambda *x: attention(*x, strategy, mask=ours).attention_outputs, q, k, v
        )
        return transpose(ct)

    got = run(q, k, v, ours)
    assert len(steps) == 2 - fused
    assert {s.kept for step in steps for s in step.main.sums} == {-1, -2}
    assert all(step.corner for step in steps)
    problem = oracle.Problem(*[np.float64(x) for x in (q, k, v)], scale=1 / 4, mask=visible)
    want = oracle.vjp(problem, np.float64(ct), np.zeros((1, T, heads[0])))
    for x, name in zip(got, "qkv", strict=True):
        np.testing.assert_allclose(x, want[name], rtol=0, atol=1e-5)


def test_races_and_memory_that_nothing_wrote(steps):
    q, k, v = (normal(i, 1, T, 2, 8) for i in range(3))

    def f(platform):
        strategy = Blockwise(how(platform=platform))
        return jax.grad(
            lambda *x: (attention(*x, strategy, mask=Causal()).attention_outputs ** 2).sum(),
            (0, 1, 2),
        )

    got, count = without_races(f("interpret"), q, k, v)
    assert count == 2 and len(steps) == 1
    want = jax.tree.leaves(f("xla")(q, k, v))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_a_number_of_each_head(steps):
    """It is a block `[1, 1]`, and was cut as if it were one of keys."""
    q, k, v = (normal(i, 1, T, 2, 8) for i in range(3))
    most = jnp.array([0.2, -0.3])
    score = ScoreFn(lambda s, b, h, q, k: jnp.where(s > most[h], s, most[h]))

    def run(platform):
        strategy = Blockwise(how(platform=platform))
        f = lambda *x: (attention(*x, strategy, score=score).attention_outputs ** 2).sum()
        return jax.jit(jax.grad(f, (0, 1, 2)))(q, k, v)

    got, want = run("interpret"), run("xla")
    assert len(steps) == 1
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_what_has_no_such_form(steps):
    """The gradient of a bias is no product with logits: its kernel, and only that, has another form."""
    q, k, v = (normal(i, 1, T, 2, 8) for i in range(3))
    bias = normal(3, 1, 2, T, T)
    strategy = Blockwise(how())
    loss = lambda b, s, *x: (
        attention(*x, strategy, bias=b, score=ALiBi(s)).attention_outputs ** 2
    ).sum()
    jax.jit(jax.grad(loss, (0, 1, 2))).lower(bias, jnp.ones(2), q, k, v)
    assert [[s.kept for s in step.main.sums] for step in steps] == [[-2]]


def sums(f, *shapes):
    avals = [jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes]
    return _step.TurnedSums(Program(f, avals), [0])


def test_sums_that_are_not_linear_in_their_products():
    """Each window adds to a sum, so what is added must be the sum of what windows add."""
    shapes = (32, 8), (32, 8), (8, 16), (16, 8)
    logits = lambda k, q: dot(k, q, (1, 0))
    weighted = lambda k, q, do: dot(jnp.exp(logits(k, q)), do, (1, 0))
    finite = lambda x, y: jnp.where(jnp.isfinite(x), y, 0.0)
    assert sums(lambda a, *x: [a + weighted(*x)], *shapes).possible
    assert sums(lambda a, k, *x: [a + 2 * finite(k, weighted(k, *x))], *shapes).possible
    for f in (
        lambda a, k, *x: [a + (weighted(k, *x) + k)],
        lambda a, k, *x: [a + weighted(k, *x) * weighted(k, *x)],
        lambda a, k, *x: [a + jnp.where(jnp.isfinite(k), weighted(k, *x), 1.0)],
        lambda a, k, *x: [a * weighted(k, *x)],
        lambda a, k, *x: [k + weighted(k, *x)],
        lambda a, k, q, do: [a + logits(k, q) @ do],
    ):
        assert not sums(f, *shapes).possible
