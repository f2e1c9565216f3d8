"""Masks and scores that choose among predicates, compare them or branch, in all kernels. That they
compile for TPUs: test_tpu.py, the cases of predicates.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _gpu_lowered import kernels as of_hopper
from _predicates import any_odd, MASKS
from _tpu_lowered import kernels as of_tpu
from _triton_lowered import kernels as of_triton

from eqattn import attention, AttentionMetadata, Blockwise, Causal, MaskFn, ScoreFn


T, S, H, K, D = 40, 48, 2, 1, 16
SHAPES = [(1, T, H, D), (1, S, K, D), (1, S, K, D)]
old = jax.__version_info__ < (0, 12)
newest = pytest.mark.skipif(old, reason="it is interpreted with jax 0.12 and newer")
BACKENDS = ["tpu", pytest.param("cuda", marks=newest), pytest.param("triton", marks=newest)]


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, x, jnp.bfloat16) for key, x in zip(keys, SHAPES)]


def called(platform, backend, mask=None, score=None):
    how = Blockwise(
        AttentionMetadata(platform=platform, backend=backend, runtime_dtype=jnp.float32)
    )
    return lambda *xs: attention(*xs, how, mask=mask, score=score).attention_outputs


def chosen(s, b, h, q, k):
    return jnp.where(any_odd(b, h, q, k), s, s - 1)


def branched(s, b, h, q, k):
    return jax.lax.cond(q > k, lambda: s, lambda: 0.5 * s) + (q >= k).astype(s.dtype)


def judge(backend, tolerance=1e-2, **given):
    """Output and gradients of kernels, interpreted, are those of XLA code."""

    def run(platform, device):
        f = called(platform, device, **given)
        return jax.jit(jax.value_and_grad(lambda xs: (f(*xs) ** 2).sum()))(arrays())

    found, wanted = run("interpret", backend), run("xla", "any")
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        got, want = np.float32(got), np.float32(want)
        assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks(backend):
    """Only a mask that each of these takes part in says so of all."""
    judge(backend, mask=MaskFn(any_odd))


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_mask(backend, name):
    judge(backend, mask=MaskFn(MASKS[name]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores(backend):
    judge(backend, mask=Causal(), score=[ScoreFn(chosen), ScoreFn(branched)])


LOWERED = [
    ("tpu", of_tpu),
    pytest.param("cuda", of_hopper, marks=newest),
    pytest.param("triton", of_triton, marks=newest),
]


@pytest.mark.parametrize("backend, count", LOWERED)
@pytest.mark.parametrize("name", MASKS)
def test_kernels_have_them(backend, count, name):
    how = AttentionMetadata(platform="pallas", backend=backend)
    assert Blockwise(how).supports(mask=MaskFn(MASKS[name]))
    assert count(called("pallas", backend, mask=MaskFn(MASKS[name])), *arrays()) == 1


@pytest.mark.parametrize("backend, count", LOWERED)
def test_what_stops_gradients_is_the_value_in_kernels(backend, count):
    """The derivative is taken before."""
    stopped = ScoreFn(lambda s, b, h, q, k: s * jax.lax.stop_gradient(jnp.tanh(s)))
    assert Blockwise(AttentionMetadata(platform="pallas", backend=backend)).supports(score=stopped)
    assert count(called("pallas", backend, score=stopped), *arrays()) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_stops_gradients(backend):
    judge(backend, score=ScoreFn(lambda s, b, h, q, k: s * jax.lax.stop_gradient(jnp.tanh(s))))


LACKING = {
    "any": (lambda b, h, q, k: jnp.any(jnp.stack([q >= k, q < 5])), ("stack", "concatenate")),
    "argmax": (lambda b, h, q, k: jnp.argmax(jnp.stack([q, k])) == 0, ("stack", "concatenate")),
    "a branch for all": (
        lambda b, h, q, k: jax.lax.cond(h == 0, lambda: q >= k, lambda: q <= k),
        ("cond",),
    ),
}


@pytest.mark.parametrize("backend", ["tpu", "cuda", "triton"])
@pytest.mark.parametrize("platform", ["pallas", "interpret"])
@pytest.mark.parametrize("name", LACKING)
def test_what_kernels_lack_is_named(backend, platform, name):
    """In the same words by `supports` and by the call, of a mask and of a score."""
    fn, operations = LACKING[name]
    how = Blockwise(AttentionMetadata(platform=platform, backend=backend))
    score = ScoreFn(lambda s, b, h, q, k: jnp.where(fn(b, h, q, k), s, -s))
    for given in (dict(mask=MaskFn(fn)), dict(score=score)):
        reason = how.supports(**given).reason
        assert any(f"has a {x}," in reason for x in operations), reason
        with pytest.raises(ValueError) as caught:
            attention(*arrays(), how, **given)
        assert str(caught.value) == reason


@pytest.mark.parametrize("name", LACKING)
def test_auto_runs_what_kernels_lack_as_xla_code(name):
    mask = MaskFn(LACKING[name][0])
    assert of_tpu(called("auto", "tpu", mask=mask), *arrays()) == 0
