"""A strategy of a user's own that folds two parts of the keys and merges their Carries."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _draw import normal
from matrix import oracle, oracle_masks as om
from matrix.test_narrow_sums import half_ulps

from eqattn import ALiBi, attention, AttentionImpl, AttentionMetadata, Backend, KeyPadding
from eqattn.kernels import method_on
from eqattn.strategies import AbstractFoldStrategy, accumulate_in_fp32, fold


class Halves(AbstractFoldStrategy):
    metadata: AttentionMetadata
    precision: Any = eqx.field(static=True, default=None)

    @classmethod
    def get_impl_name(cls):
        return "halves"

    def fold(self, problem):
        problem = accumulate_in_fp32(problem)
        half = KeyPadding(jnp.int32(problem.sizes[1] // 2))
        first, second = (fold(dataclasses.replace(problem, mask=x)) for x in (half, ~half))
        return first.merge(second), None


def test_gradients_of_parts_round_once():
    """Some heads have almost opposite gradients in the two visits, so that roundings would show."""
    xs = {n: normal(i, 1, 16, 32, 8).astype(jnp.bfloat16) for i, n in enumerate("qkv")}
    xs["slopes"] = jnp.linspace(0.1, 0.5, 32).astype(jnp.bfloat16)
    ct = normal(3, 1, 16, 32, 8).astype(jnp.bfloat16)

    @eqx.filter_jit
    def gradients(strategy, xs):
        def run(xs):
            score = ALiBi(xs["slopes"])
            return attention(xs["q"], xs["k"], xs["v"], strategy, score=score).attention_outputs

        return jax.vjp(run, xs)[1](ct)[0]

    found = gradients(Halves(AttentionMetadata()), xs)
    exact = {n: np.float64(x) for n, x in xs.items()}
    problem = oracle.Problem(**exact, scale=8**-0.5, distance=om.distance(16, 16))
    want = oracle.vjp(problem, np.float64(ct), np.zeros((1, 16, 32)))
    for name, x in found.items():
        assert half_ulps(x, want[name]) <= 0.75, name


def test_every_backend_has_a_method():
    """`supports` said yes where the call then had no method to run."""
    for backend in set(Backend) - {Backend.ANY}:
        assert callable(getattr(AttentionImpl, method_on(backend)))
