"""A strategy of a user's own that folds two parts of the keys and merges their Carries."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _draw import normal

from eqattn import ALiBi, attention, AttentionImpl, AttentionMetadata, Backend, KeyPadding
from eqattn.kernels import method_on
from eqattn.strategies import AbstractFoldStrategy, fold, read_twice


class Halves(AbstractFoldStrategy):
    metadata: AttentionMetadata
    precision: Any = eqx.field(static=True, default=None)

    @classmethod
    def get_impl_name(cls):
        return "halves"

    def fold(self, problem):
        problem = read_twice(problem)
        half = KeyPadding(jnp.int32(problem.sizes[1] // 2))
        first, second = (fold(dataclasses.replace(problem, mask=x)) for x in (half, ~half))
        return first.merge(second), None


def test_gradients_of_parts_round_once():
    """Of 32 heads, some have almost opposite gradients in the two visits, so that their own roundings
    would show.
    """
    q, k, v = (normal(i, 1, 16, 32, 8) for i in range(3))
    slopes = jnp.linspace(0.1, 0.5, 32).astype(jnp.bfloat16)

    @eqx.filter_jit
    def gradient(strategy, slopes):
        def loss(slopes):
            out = attention(q, k, v, strategy, score=ALiBi(slopes)).attention_outputs
            return (out * jnp.cos(jnp.arange(16.0)).reshape(1, 16, 1, 1)).sum()

        return jax.grad(loss)(slopes)

    at = np.arange(16.0)
    distance = np.abs(at[:, None] - at[None])
    logits = np.einsum("bthd,bshd->bhts", *map(np.float64, (q, k))) * 8**-0.5
    logits = logits - np.float64(slopes)[:, None, None] * distance
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    moved = -p * (distance - (p * distance).sum(-1, keepdims=True))  # by a slope
    want = np.einsum("bhts,bshd,t->h", moved, np.float64(v), np.cos(at))
    got = np.float64(gradient(Halves(AttentionMetadata()), slopes))
    ulp = 2.0 ** (np.floor(np.log2(abs(want))) - 7)
    assert (abs(got - want) <= 0.51 * ulp).all(), (got, want, ulp)


def test_every_backend_has_a_method():
    """`supports` said yes where the call then had no method to run."""
    for backend in set(Backend) - {Backend.ANY}:
        assert callable(getattr(AttentionImpl, method_on(backend)))
