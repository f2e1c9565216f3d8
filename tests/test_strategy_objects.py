"""Strategies as PyTrees: plain `jax.grad`, `jit`, `vmap` and `hessian` over the object."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import (
    attention,
    AttentionImpl,
    AttentionMetadata,
    AttentionOutput,
    AttentionRegistry,
    Blockwise,
    Causal,
    Dense,
)


Q = jax.random.normal(jax.random.key(0), (2, 9, 4, 8))


def loss(strategy):
    return jnp.sum(jnp.sin(attention(Q, Q, Q, strategy, mask=Causal()).attention_outputs))


def learnable(cls):
    sinks = jnp.array([0.1, -0.2, 0.3, 1.0])
    return cls(
        AttentionMetadata(
            softmax_scale=jnp.array(0.4), logits_soft_cap=jnp.array(5.0), softmax_aux=sinks
        )
    )


@pytest.mark.parametrize("name", ["softmax_scale", "logits_soft_cap", "softmax_aux"])
def test_gradients_of_the_object(name):
    got, want = (
        getattr(jax.grad(loss)(learnable(cls)).metadata, name) for cls in (Blockwise, Dense)
    )
    assert np.abs(want).max() > 1e-3
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_other_transforms_of_the_object():
    strategy = learnable(Blockwise)
    np.testing.assert_allclose(jax.jit(loss)(strategy), loss(strategy), rtol=1e-6)
    many = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), strategy)
    twice = jax.tree.map(lambda x: 2 * x, strategy)
    expected = jnp.stack([loss(strategy), loss(twice)])
    np.testing.assert_allclose(jax.vmap(loss)(many), expected, rtol=1e-5)
    got, want = (jax.hessian(loss)(learnable(cls)) for cls in (Blockwise, Dense))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


def test_python_floats_are_constants_to_equinox():
    strategy = Blockwise(AttentionMetadata(softmax_scale=0.4))
    assert eqx.filter_grad(loss)(strategy).metadata.softmax_scale is None
    assert jax.grad(loss)(strategy).metadata.softmax_scale != 0


def test_a_users_strategy_runs_through_attention():
    class Mean(AttentionImpl):
        @classmethod
        def get_impl_name(cls):
            return "mean-of-values"

        def forward_native(
            self, q, k, v, mask=None, bias=None, init_bias=None, deterministic=False,
            dropout_rng=None, causal=True,
        ):  # fmt: skip
            mean = jnp.broadcast_to(v.mean(-3, keepdims=True), q.shape)
            return AttentionOutput(attention_outputs=mean)

    AttentionRegistry.register(Mean)
    strategy = AttentionRegistry.create("mean-of-values", AttentionMetadata())
    out = attention(Q, Q, Q, strategy).attention_outputs
    np.testing.assert_allclose(out[:, :1], Q.mean(1, keepdims=True), rtol=1e-6)
    with pytest.raises(ValueError, match="return_carry.*Mean"):
        attention(Q, Q, Q, strategy, return_carry=True)


def test_swapping_the_strategy_changes_nothing():
    for inference in (True, False):
        metadata = AttentionMetadata(dropout_prob=0.2, softmax_scale=0.3)
        a, b = (
            attention(
                Q, Q, Q, cls(metadata), mask=Causal(), key=jax.random.key(2), inference=inference
            ).attention_outputs
            for cls in (Blockwise, Dense)
        )
        np.testing.assert_allclose(a, b, atol=3e-6)
