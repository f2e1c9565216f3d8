"""Every parameter of the seed's function means something."""

import functools as ft
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix import bound, oracle

from eqattn import blockwise_attn, dropout_mask


B, T, S, H, K, D, V = 1, 5, 7, 4, 2, 4, 3
KEY = jax.random.key(3)


def qkv(dtype=jnp.float32, scale=1.0):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(B, T, H, D), (B, S, K, D), (B, S, K, V)]
    return [
        scale * jax.random.normal(k, s, jnp.float32).astype(dtype) for k, s in zip(keys, shapes)
    ]


def problem(q, k, v, *, causal=True, bias=0.0, keep=None):
    logits = lambda z: z / math.sqrt(D) + np.asarray(bias)
    visible = np.arange(S) <= np.arange(T)[:, None] if causal else True
    return oracle.plain_problem(q, k, v, logits, visible, keep=keep, rate=0.5)


def equations(jaxpr, name):
    """All equations of a primitive, also within others."""
    found = []
    for eqn in jaxpr.eqns:
        found += [eqn] * (eqn.primitive.name == name)
        for param in eqn.params.values():
            inner = getattr(param, "jaxpr", param)  # closed or open
            found += equations(inner, name) if hasattr(inner, "eqns") else []
    return found


def test_the_parameters_are_the_seeds():
    names = (
        "query key value bias deterministic dropout_rng attn_pdrop causal query_chunk_size "
        "key_chunk_size dtype policy precision float32_logits prevent_cse"
    ).split()
    assert list(inspect.signature(blockwise_attn).parameters) == names


def test_by_position():
    q, k, v = qkv()
    bias = jnp.ones((S,))
    got = blockwise_attn(
        q, k, v, bias, True, None, 0.5, False, 2, 3, jnp.float32, None, None, True, False
    )
    bound.check(problem(q, k, v, causal=False), got)


@pytest.mark.parametrize("causal", [True, False])
def test_causal(causal):
    q, k, v = qkv()
    got = blockwise_attn(q, k, v, causal=causal)
    bound.check(problem(q, k, v, causal=causal), got)


@pytest.mark.parametrize("shape", [(S,), (H, 1, S), (B, H, T, S)])
def test_bias_joins_the_causal_mask(shape):
    q, k, v = qkv()
    bias = jax.random.normal(KEY, shape)
    got = blockwise_attn(q, k, v, bias)
    bound.check(problem(q, k, v, bias=bias), got)


@pytest.mark.parametrize("query_chunk, key_chunk", [(1, 1), (2, 3), (5, 7), (4, 100), (2048, 2)])
def test_chunks_of_any_size(query_chunk, key_chunk):
    """Values and gradients."""
    for got, want in zip(gradients(query_chunk, key_chunk), gradients()):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        gradients()[0], (oracle.forward(problem(*qkv())).out ** 2).sum(), rtol=1e-5
    )


@ft.cache
def gradients(query_chunk=2048, key_chunk=2048):
    f = ft.partial(loss, query_chunk_size=query_chunk, key_chunk_size=key_chunk)
    return jax.tree.leaves(jax.jit(jax.value_and_grad(f, (0, 1, 2)))(*qkv()))


def test_chunks_are_the_blocks_that_are_visited():
    """The shapes of the products are `[keys, group * queries]`."""
    q, k, v = qkv()
    text = (
        jax.jit(ft.partial(blockwise_attn, query_chunk_size=2, key_chunk_size=3))
        .lower(q, k, v)
        .as_text()
    )
    assert f"tensor<{B}x{K}x3x{H // K * 2}xf32>" in text or f"tensor<3x{H // K * 2}xf32>" in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("inputs", ["float32", "bfloat16"])
def test_dtype_is_the_results(inputs, dtype):
    q, k, v = qkv(inputs)
    got = blockwise_attn(q, k, v, dtype=dtype)
    assert got.dtype == dtype and got.shape == (B, T, H, V)
    wide = blockwise_attn(q, k, v)
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(got, wide.astype(dtype))


def test_float32_logits_false_rounds_them():
    q, k, v = qkv(jnp.bfloat16, scale=4.0)
    wide = np.asarray(blockwise_attn(q, k, v, causal=False))
    rounded = np.asarray(blockwise_attn(q, k, v, causal=False, float32_logits=False))
    narrow = lambda z: (z / math.sqrt(D)).astype(jnp.bfloat16).astype(np.float64)
    want = oracle.exact(q, k, v, narrow)[0]
    bound.check(problem(q, k, v, causal=False), wide)
    # Nothing else changes. A logit in the middle of two numbers of bfloat16 may be either.
    assert abs(rounded - wide).max() > 1e-2
    np.testing.assert_allclose(rounded, want, rtol=1e-4, atol=1e-4)
    q, k, v = qkv()
    np.testing.assert_array_equal(
        blockwise_attn(q, k, v, float32_logits=False), blockwise_attn(q, k, v)
    )


@pytest.mark.parametrize(
    "precision, text",
    [
        (None, "HIGHEST"),
        ("highest", "HIGHEST"),
        (jax.lax.Precision.HIGH, "HIGH"),
        ("default", "DEFAULT"),
    ],
)
def test_precision_is_that_of_the_products(precision, text):
    """Forward and backward. None is exact float32."""
    q, k, v = qkv()
    f = ft.partial(blockwise_attn, precision=precision, causal=False)
    for g in (f, jax.grad(lambda *x: f(*x).sum(), (0, 1, 2))):
        lowered = jax.jit(g).lower(q, k, v).as_text()
        products = [line for line in lowered.splitlines() if "dot_general" in line]
        assert products
        for line in products:
            assert f"precision = [{text}, {text}]" in line, line


def test_dropout():
    q, k, v = qkv()
    drop = ft.partial(blockwise_attn, q, k, v, attn_pdrop=0.5, causal=False)
    keep = np.asarray(dropout_mask(KEY, (B,), H, T, S, 0.5))
    got = drop(deterministic=False, dropout_rng=KEY, query_chunk_size=2, key_chunk_size=3)
    bound.check(problem(q, k, v, causal=False, keep=keep), got)
    np.testing.assert_array_equal(drop(deterministic=True, dropout_rng=KEY), drop())
    np.testing.assert_array_equal(
        blockwise_attn(q, k, v, deterministic=False, dropout_rng=KEY), blockwise_attn(q, k, v)
    )
    with pytest.raises(ValueError, match="0.5.*dropout_rng"):
        drop(deterministic=False)


# Rematerialisation


def loss(q, k, v, **kwargs):
    return (blockwise_attn(q, k, v, **kwargs) ** 2).sum()


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_policy_and_prevent_cse_reach_the_checkpoint(prevent_cse):
    policy = jax.checkpoint_policies.nothing_saveable
    jaxpr = jax.make_jaxpr(ft.partial(loss, policy=policy, prevent_cse=prevent_cse))(*qkv())
    (remat,) = equations(jaxpr.jaxpr, "checkpoint") or equations(jaxpr.jaxpr, "remat2")
    assert remat.params["policy"] is policy
    assert remat.params["prevent_cse"] == prevent_cse or remat.params["prevent_cse"] == (
        prevent_cse,
    )


@pytest.mark.parametrize("policy", [False, None])
def test_without_a_policy_there_is_no_checkpoint(policy):
    jaxpr = jax.make_jaxpr(ft.partial(loss, policy=policy))(*qkv()).jaxpr
    assert not equations(jaxpr, "checkpoint") and not equations(jaxpr, "remat2")


def saved(**kwargs):
    """The shapes that the backward of `loss` holds on to, but for the arguments themselves."""
    args = qkv()
    _, vjp = jax.vjp(ft.partial(loss, **kwargs), *args)
    own = {id(x) for x in args}
    return [x.shape for x in jax.tree.leaves(vjp) if id(x) not in own and jnp.size(x) > 1]


def test_policy_chooses_what_is_saved():
    policies = jax.checkpoint_policies
    nothing = saved(policy=policies.nothing_saveable)
    output = saved(policy=policies.save_only_these_names("attention_output"))
    everything = saved(policy=policies.everything_saveable)
    size = lambda shapes: sum(map(math.prod, shapes))
    # The square's own residual is the output, outside of the checkpoint.
    assert size(nothing) <= B * T * H * V
    assert size(nothing) <= size(output) <= size(everything)
    assert size(nothing) < size(everything)


def test_a_users_policy_is_asked_and_sees_the_names():
    asked = []

    def policy(primitive, *avals, **params):
        asked.append(params.get("name", str(primitive)))
        return params.get("name") == "attention_output"

    gradient = jax.grad(ft.partial(loss, policy=policy), (0, 1, 2))
    for got, want in zip(gradient(*qkv()), jax.grad(loss, (0, 1, 2))(*qkv())):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    assert "attention_output" in asked and len(asked) > 1


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_recomputation_happens_in_the_backward(prevent_cse):
    """With a checkpoint the fold runs twice, and `prevent_cse` keeps it apart from the first."""
    f = lambda **kwargs: jax.jit(jax.grad(ft.partial(loss, **kwargs))).lower(*qkv()).as_text()
    policy = jax.checkpoint_policies.nothing_saveable
    text = f(policy=policy, prevent_cse=prevent_cse)
    assert ("optimization_barrier" in text) == prevent_cse
    assert text.count("stablehlo.exponential") > f().count("stablehlo.exponential")
