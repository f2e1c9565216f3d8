"""Functions whose derivatives follow a rule of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import attention, Blockwise, Causal, Dense, Ragged, ScoreFn


def slope(x):
    return 10 * (1 - jnp.tanh(x) ** 2)


@jax.custom_vjp
def by_vjp(x):
    return jnp.tanh(x)


by_vjp.defvjp(lambda x: (by_vjp(x), x), lambda x, ct: (ct * slope(x),))


@jax.custom_jvp
def by_jvp(x):
    return jnp.tanh(x)


by_jvp.defjvp(lambda xs, ts: (by_jvp(*xs), ts[0] * slope(xs[0])))
Q = jax.random.normal(jax.random.key(0), (2, 8, 2, 4))


def loss(fn, strategy, q):
    score = ScoreFn(lambda logit, b, h, i, j: fn(logit))
    return attention(q, q, q, strategy, score=score, mask=Causal()).attention_outputs.var()


def of_gradient(fn, strategy, q):
    return jnp.sin(jax.grad(lambda q: loss(fn, strategy, q))(q)).sum()


@pytest.mark.parametrize("f, strategy", [(loss, Ragged()), (of_gradient, Blockwise())])
def test_a_rule_of_custom_vjp_is_that_of_custom_jvp(f, strategy):
    gradient = lambda fn: jax.jit(jax.grad(lambda q: f(fn, strategy, q)))(Q)
    got, want, plain = map(gradient, (by_vjp, by_jvp, jnp.tanh))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * abs(want).max())
    assert abs(plain - want).max() > 0.1 * abs(want).max()


def test_custom_vjp_has_no_forward_mode_and_none_in_dense():
    for strategy in (Blockwise(), Dense()):
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(lambda q: loss(by_vjp, strategy, q), (Q,), (Q,))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.grad(lambda q: loss(by_vjp, Dense(), q))(Q)
