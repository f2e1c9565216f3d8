"""What policies of `jax.checkpoint` can keep of a call: with the name `"attention_output"`, the
backward pass visits no key anew to have the forward's results.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


@pytest.fixture
def mesh():
    auto = (jax.sharding.AxisType.Auto,)
    with jax.set_mesh(jax.make_mesh((2,), ("sp",), auto, devices=jax.devices()[:2])):
        yield


@pytest.mark.parametrize(
    "strategy",
    [
        Blockwise(),
        Blockwise(INTERPRET),
        Ragged(),
        Ring(),
        Ulysses(),
    ],
    ids=["blockwise", "kernel", "ragged", "ring", "ulysses"],
)
def test_a_named_output_is_not_computed_anew(strategy, mesh):
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
    got, want = jax.jit(grads[NAMES])(x, w), jax.jit(jax.grad(run, (0, 1)))(x, w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


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
