"""Every parameter of the seed's functional form means something."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import blockwise_attn


def inputs(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(k, (2, 19, 4, 8)).astype(dtype) for k in keys)


def dense(q, k, v, bias=0.0, causal=True):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    s = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1]) + np.asarray(bias, np.float64)
    if causal:
        s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bhts,bshd->bthd", p / p.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("sizes", [(2048, 2048), (1, 1), (5, 3), (3, 16), (16, 5)])
@pytest.mark.parametrize("causal", [True, False])
def test_any_chunk_sizes(sizes, causal):
    args = inputs()
    got = blockwise_attn(
        *args, causal=causal, query_chunk_size=sizes[0], key_chunk_size=sizes[1]
    )
    np.testing.assert_allclose(got, dense(*args, causal=causal), atol=2e-6)


def test_bias_and_its_gradient():
    args = inputs()
    bias = jax.random.normal(jax.random.key(5), (4, 19, 19))
    np.testing.assert_allclose(blockwise_attn(*args, bias), dense(*args, bias), atol=2e-6)
    loss = lambda b: jnp.sum(jnp.sin(blockwise_attn(*args, b, key_chunk_size=8)))
    grad = jax.grad(loss)(bias)
    step = 1e-6
    for index in ((0, 7, 3), (3, 18, 0), (2, 4, 5)):  # the last is masked
        e = np.zeros(bias.shape)
        e[index] = step
        up, down = (np.sin(dense(*args, np.asarray(bias) + s * e)).sum() for s in (1, -1))
        assert abs(float(grad[index]) - (up - down) / (2 * step)) < 1e-5


def test_dtype():
    out = blockwise_attn(*inputs(jnp.bfloat16), dtype=jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    assert blockwise_attn(*inputs(jnp.bfloat16)).dtype == jnp.float32


def test_dropout_needs_a_key_and_is_off_when_deterministic():
    args = inputs()
    plain = blockwise_attn(*args)
    assert jnp.array_equal(blockwise_attn(*args, attn_pdrop=0.5), plain)
    with pytest.raises(ValueError, match="dropout_rng"):
        blockwise_attn(*args, deterministic=False, attn_pdrop=0.5)
    key = jax.random.key(1)
    one = blockwise_attn(*args, deterministic=False, attn_pdrop=0.5, dropout_rng=key)
    two = blockwise_attn(
        *args, deterministic=False, attn_pdrop=0.5, dropout_rng=key, key_chunk_size=5
    )
    assert jnp.abs(one - plain).max() > 0.1
    np.testing.assert_allclose(one, two, atol=2e-6)


def test_float32_logits():
    """Rounded logits of bfloat16 inputs change the result; those of float32 inputs do not."""
    exact, rounded = (
        blockwise_attn(*inputs(jnp.bfloat16), float32_logits=on) for on in (True, False)
    )
    assert 1e-4 < jnp.abs(exact - rounded).max() < 0.1
    same = [blockwise_attn(*inputs(), float32_logits=on) for on in (True, False)]
    assert jnp.array_equal(*same)


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_policy_and_prevent_cse(prevent_cse):
    args = inputs()

    def equations(policy):
        f = lambda *a: blockwise_attn(*a, policy=policy, prevent_cse=prevent_cse)
        return [e for e in jax.make_jaxpr(f)(*args).eqns if "prevent_cse" in e.params]

    assert not equations(False) and not equations(None)
    (remat,) = equations(jax.checkpoint_policies.nothing_saveable)
    assert remat.params["policy"] is jax.checkpoint_policies.nothing_saveable
    assert remat.params["prevent_cse"] is prevent_cse
    with pytest.raises(TypeError, match="policy"):
        blockwise_attn(*args, policy="everything")


def test_outputs_are_named_for_policies():
    jaxpr = str(jax.make_jaxpr(lambda q: blockwise_attn(q, *inputs()[1:]))(inputs()[0]))
    assert "attention_output" in jaxpr


def test_precision_reaches_the_products():
    lowered = lambda p: (
        jax.jit(lambda *a: blockwise_attn(*a, precision=p)).lower(*inputs()).as_text()
    )
    assert "HIGHEST" in lowered(None)
    assert "HIGHEST" not in lowered(jax.lax.Precision.DEFAULT)
