"""What policies of `jax.checkpoint` can keep of a call: with the name `"attention_output"`, the
backward pass visits no key anew to have the forward's results.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix import bound, oracle, oracle_masks

from eqattn import attention, AttentionMetadata, Blockwise, Dense, Ragged, Ring, Ulysses


T, H, D = 32, 2, 8
POLICIES = jax.checkpoint_policies
NAMES = POLICIES.save_only_these_names("attention_output")
INTERPRET = AttentionMetadata(platform="interpret", blocksize_q=16, blocksize_k=16)
VISITS = ("attention_fold", "attention_attend")


def equations(jaxpr, counts=None):
    """How often each primitive stands in a jaxpr, those within others included."""
    counts = collections.Counter() if counts is None else counts
    for eqn in jaxpr.eqns:
        counts[eqn.primitive.name] += 1
        for inner in jax.tree.leaves([*eqn.params.values()], is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                equations(inner, counts)
    return counts


def layer(strategy, x, w):
    """With a projection before the attention and one after it, as layers have."""
    heads = (x @ w).reshape(1, T, H, D)
    out = attention(heads, heads, heads, strategy, mask="causal").attention_outputs
    return (out.reshape(T, H * D) @ w).sum()


def exact(x, w, precision):
    """The gradients of `layer`, with their bounds, by the pullback of the oracle."""
    x, w = (bound.Bounded.exact(a, precision) for a in (x, w))
    ones = np.ones((T, H * D))
    heads = np.reshape(np.einsum("ti,ij->tj", x, w), (1, T, H, D))
    mask = oracle_masks.causal(T, T)
    plain = oracle.Problem(q=ones, k=ones, v=ones, scale=D**-0.5, mask=mask)
    problem = bound.bounded(plain, precision).replace(q=heads, k=heads, v=heads)
    ct = np.reshape(np.einsum("tj,ij->ti", ones, w), (1, T, H, D))
    found = oracle.vjp(problem, ct, np.zeros((1, T, H)))
    g = np.reshape(found["q"] + found["k"] + found["v"], (T, H * D))
    out = np.reshape(oracle.forward(problem).out, (T, H * D))
    of_w = np.einsum("ti,tj->ij", x, g) + np.einsum("ti,tj->ij", out, ones)
    return np.einsum("tj,ij->ti", g, w), of_w


@pytest.fixture
def mesh():
    auto = (jax.sharding.AxisType.Auto,)
    with jax.set_mesh(jax.make_mesh((2,), ("sp",), auto, devices=jax.devices()[:2])):
        yield


STRATEGIES = {
    "blockwise": Blockwise(),
    "kernel": Blockwise(INTERPRET),
    "ragged": Ragged(),
    "ring": Ring(),
    "ulysses": Ulysses(),
}


@pytest.mark.parametrize("name", ["blockwise", "ring"])
def test_a_named_output_is_not_computed_anew(name, mesh):
    strategy = STRATEGIES[name]
    x, w = jax.random.normal(jax.random.key(0), (2, T, H * D))
    w = w[: H * D] / 4
    run = lambda x, w: layer(strategy, x, w)
    grads = {
        policy: jax.grad(jax.checkpoint(run, policy=policy), (0, 1))
        for policy in (NAMES, POLICIES.nothing_saveable)
    }
    visits = {
        policy: sum(equations(jax.make_jaxpr(g)(x, w).jaxpr)[name] for name in VISITS)
        for policy, g in grads.items()
    }
    assert visits == {NAMES: 1, POLICIES.nothing_saveable: 2}
    want = exact(x, w, bound.precision_of(np.float32, normalised=True))
    for policy in grads:
        for got, of in zip(jax.jit(grads[policy])(x, w), want, strict=True):
            assert bound.excess(got, of) <= 1, policy


@pytest.mark.parametrize("strategy", [Blockwise(), Blockwise(INTERPRET), Dense()])
def test_what_is_kept_is_linear_in_the_tokens(strategy):
    """The output, its logsumexp, and of narrow dtypes what rounding leaves out of the output: no
    more than the float32 output and two numbers a row.
    """
    x = jax.random.normal(jax.random.key(0), (1, T, H, D), jnp.bfloat16)
    call = lambda x: attention(x, x, x, strategy, mask="causal").attention_outputs
    vjp = jax.vjp(jax.checkpoint(call, policy=NAMES), x)[1]
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(vjp)) - x.nbytes
    assert x.nbytes <= kept <= 4 * (x.size + 2 * T * H)
