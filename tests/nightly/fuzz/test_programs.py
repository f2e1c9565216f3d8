"""Some cases of the fuzzer of rewritten scores and masks, and calls of the kernels themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import attention, AttentionMetadata, Blockwise

from ._cases import Case, dense, Exact, turned
from .programs import check


DEVICES = ["tpu", *["cuda"] * (jax.__version_info__ >= (0, 12))]


@pytest.mark.parametrize("seed", [*range(4), 107])
def test_drawn_functions(seed):
    """The last one converts a boolean to a boolean, which raised under strict promotion."""
    assert [x for x in check(seed) if not x[0] <= 1] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 1600, 50))
def test_more_drawn_functions(seed):
    wrong = {i: [x for x in check(i) if not x[0] <= 1] for i in range(seed, seed + 50)}
    assert not any(wrong.values()), wrong


@pytest.mark.parametrize("seed", range(12))
def test_derivatives_of_the_oracle(seed):
    """They are its differences, where the drawn functions are smooth."""
    case = Case.draw(seed)
    step = 1e-6
    exact, *moved = (
        Exact.of(case, seed, turned(case.q) + d, noise)
        for d, noise in ((0, 2.0**-22), (step, 0), (-step, 0))
    )
    with np.errstate(all="ignore"):
        slope = (moved[0].logits[0] - moved[1].logits[0]) / (2 * step)
        off = np.abs(slope - exact.rates[0])
        sure = np.abs(exact.rates - exact.rates[0]).max(0) < 1e-4 * (1 + np.abs(exact.rates[0]))
        bound = 1e-4 * (1 + np.abs(slope) + np.abs(exact.logits[0]))
    judged = exact.visible & ~exact.bad & sure & np.isfinite(slope)
    # A step may still pass a kink.
    assert (off <= bound)[judged].mean() > 0.98 if judged.any() else True


@pytest.mark.slow
@pytest.mark.parametrize("backend", DEVICES)
@pytest.mark.parametrize("seed", range(24))
def test_kernels(seed, backend):
    """The kernels, interpreted: outputs and gradients against dense attention in float64."""
    case = Case.draw(seed)
    dtype = jnp.dtype(jnp.float32 if backend == "tpu" else jnp.bfloat16)
    scale = {} if case.scale is None else dict(softmax_scale=jnp.float32(case.scale))
    how = AttentionMetadata(platform="interpret", backend=backend, runtime_dtype=dtype, **scale)
    arrays = [{n: jnp.asarray(x) for n, x in xs.items()} for xs in case.arrays]
    rng = np.random.default_rng([seed, 3])
    shape = 1, 8, case.kv_heads, 8
    k, v = (jnp.asarray(rng.standard_normal(shape) / 2, dtype) for _ in range(2))
    q, g = (jnp.asarray(x, dtype) for x in (case.q, case.g))

    @jax.jit
    def run(arrays, q, k, v, g):
        def f(*xs):
            scores, mask = case.built(arrays)
            return attention(*xs, Blockwise(how), mask=mask, score=scores).attention_outputs

        out, pull = jax.vjp(f, q, k, v)
        return out, *pull(g)

    try:
        found = run(arrays, q, k, v, g)
    except ValueError as e:
        if "which the compiler of kernels does not know" not in str(e):
            raise
        pytest.skip(str(e))
    want = dense(case, seed, *(np.float64(x)[0] for x in (q, k, v, g)))
    for got, (exact, spread, size) in zip(found, want, strict=True):
        # Products in bfloat16 round probabilities and cotangents of logits.
        limit = (2 * float(jnp.finfo(dtype).eps) + 1e-5) * size + 8 * spread + 1e-6
        off = np.abs(np.float64(got)[0] - exact)
        judged = np.isfinite(limit) & (spread <= 0.01 * (size + 1))
        assert (off <= limit)[judged].all(), (str(case), (off / limit)[judged].max())
