"""Statistics where a visible pair has the logit -inf, which weighs nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import attention, AttentionMetadata, Blockwise, stats


T, S = 3, 5
KEPT = np.arange(S) != 2
RNG = np.random.default_rng(0)
Q, K = RNG.standard_normal((1, T, 1, 4)), RNG.standard_normal((1, S, 1, 4))


def mean_logit(q):
    """The mean of the logits of the kept keys, by the whole matrix."""
    s = jnp.einsum("td,sd->ts", q[0, :, 0], K[0, KEPT, 0]) / 2
    return (jax.nn.softmax(s, -1) * s).sum(-1)


@pytest.mark.parametrize("strategy, known", [(Blockwise(), True)])
def test_the_mean_of_a_function_of_the_logit(strategy, known, x64):
    q, k = jnp.asarray(Q), jnp.asarray(K)
    bias = jnp.where(KEPT, 0, -jnp.inf)[None]

    def mean(q):
        lse = None
        if known:
            lse = attention(q, k, k, bias=bias, return_logsumexp=True).logsumexp
        found = stats.expectation(
            lambda logit, b, h, i, j: logit, q, k, strategy=strategy, bias=bias, logsumexp=lse
        )
        return found.ravel()

    np.testing.assert_allclose(mean(q), mean_logit(q), rtol=1e-12)
    for sign in (1, -1):
        ct = jnp.asarray([1.0, sign, 2.0])
        want = jax.grad(lambda q: ct @ mean_logit(q))(q)
        np.testing.assert_allclose(jax.grad(lambda q: ct @ mean(q))(q), want, atol=1e-12)
    moved = jax.jvp(mean_logit, (q,), (q,))[1]
    np.testing.assert_allclose(jax.jvp(mean, (q,), (q,))[1], moved, rtol=1e-12)


def test_sinks_of_minus_infinity_have_no_gradient(x64):
    q, k = jnp.asarray(Q), jnp.asarray(K)

    def entropy(sinks):
        strategy = Blockwise(AttentionMetadata(softmax_aux=sinks))
        return stats.entropy(q, k, strategy).sum()

    assert jax.grad(entropy)(jnp.full((1, 2), -jnp.inf)).tolist() == [[0, 0]]
    one, more = jnp.array([[0.5]]), jnp.array([[0.5, -jnp.inf]])
    np.testing.assert_allclose(jax.grad(entropy)(more)[:, :1], jax.grad(entropy)(one), rtol=1e-12)


FUNCTIONS = [lambda s: 1 / s, lambda s: s**2]  # singular at 0, and at -inf


@pytest.mark.parametrize("strategy, fn", [(Blockwise(), FUNCTIONS[1])])
def test_a_function_need_not_be_finite_there(strategy, fn, x64):
    """Nor its derivative. It may be singular at any logit that such a pair could be given."""
    q, k = jnp.asarray(Q), jnp.asarray(K)
    bias = jnp.where(KEPT, 0, -jnp.inf)[None]
    of_pair = lambda logit, b, h, i, j: fn(logit)

    def mean(q):
        return stats.expectation(of_pair, q, k, strategy=strategy, bias=bias).ravel()

    def want(q):
        s = jnp.einsum("td,sd->ts", q[0, :, 0], K[0, KEPT, 0]) / 2
        return (jax.nn.softmax(s, -1) * fn(s)).sum(-1)

    np.testing.assert_allclose(mean(q), want(q), rtol=1e-11)
    for got, right in zip(jax.vjp(mean, q)[1](jnp.ones(T)), jax.vjp(want, q)[1](jnp.ones(T))):
        np.testing.assert_allclose(got, right, atol=1e-11 * jnp.abs(right).max())
