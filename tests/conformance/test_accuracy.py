"""Accuracy on four distributions, with a length at which accumulation shows; the published bound of research section 5."""

import contextlib

import eqattn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import masks as m

from . import bound, oracle, oracle_masks
from .distributions import DISTRIBUTIONS, draw


T, D = 160, 32


def _run(distribution, dtype, strategy, block):
    q, k, v, scale = draw(distribution, 1, T, T, 2, 1, D)
    q, k, v = (jnp.asarray(x).astype(dtype) for x in (q, k, v))
    metadata = eqattn.AttentionMetadata(runtime_dtype=dtype, blocksize_q=block, blocksize_k=block)
    impl = eqattn.AttentionRegistry.create(strategy, metadata)
    ct_out = jnp.asarray(np.random.default_rng(1).standard_normal(q.shape)).astype(dtype)
    ct_lse = jnp.asarray(np.random.default_rng(2).standard_normal((1, T, 2))).astype(jnp.promote_types(dtype, jnp.float32))

    @jax.jit
    def run(q, k, v):
        def call(q, k, v):
            output = eqattn.attention(q, k, v, impl, mask=m.Causal(), return_logsumexp=True)
            return output.attention_outputs, output.logsumexp

        outputs, pull = jax.vjp(call, q, k, v)
        return outputs, pull((ct_out, ct_lse))

    (out, lse), grads = jax.tree.map(np.asarray, run(q, k, v))
    precision = bound.precision_of(dtype)
    exact = [np.asarray(x).astype(precision.reference) for x in (q, k, v)]
    problem = oracle.Problem(*exact, scale=D**-0.5, mask=oracle_masks.causal(T, T))
    cts = [np.asarray(x).astype(precision.reference) for x in (ct_out, ct_lse)]
    return problem, cts, precision, {"out": out, "lse": lse, **dict(zip("qkv", grads, strict=True))}


@pytest.mark.parametrize("block", [32, 512])
@pytest.mark.parametrize("strategy", ["blockwise", "dense"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_within_the_bound(distribution, dtype, strategy, block):
    if strategy == "dense" and block != 512:
        pytest.skip("dense has no blocks")
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        problem, cts, precision, actual = _run(distribution, jnp.dtype(dtype), strategy, block)
    references = {**bound.values(problem, precision), **bound.grads(problem, *cts, precision)}
    ratios = {n: bound.excess(x, references[n]) for n, x in actual.items()}
    assert max(ratios.values()) <= 1, ratios
    if dtype == "float32":
        f = oracle.forward(problem)
        group = problem.q.shape[2] // problem.v.shape[2]
        mass = np.einsum("bhts,bshd->bthd", f.p, np.repeat(abs(problem.v), group, 2))
        sizes = oracle.scores_of(abs(problem.q), abs(problem.k)) * problem.scale
        kappa = np.einsum("bhts,bhts->bth", f.p, sizes)[..., None]
        published = 2.0**-24 * (mass * bound.growth(D) * (1 + kappa) + abs(f.out))
        assert np.max(abs(actual["out"] - f.out) / published) <= 1
