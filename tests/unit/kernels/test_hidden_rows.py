"""Rows that an additive bias hides, as one of -1e10 for padding: kernels' gradients are finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from matrix import oracle

from eqattn import attention, AttentionMetadata, Blockwise, Ragged


T, SEEN, H, D = 64, 40, 2, 16
newest = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the kernel is written for jax 0.12 and newer"
)
KERNELS = [
    ("tpu", Blockwise, jnp.float32),
    ("tpu", Blockwise, jnp.bfloat16),
    ("tpu", Ragged, jnp.float32),
    pytest.param("cuda", Blockwise, jnp.bfloat16, marks=newest),
    pytest.param("triton", Blockwise, jnp.bfloat16, marks=newest),
]


SIZES = [-1e10, *(pytest.param(x, marks=pytest.mark.slow) for x in (-1e8, -1e9, -1e30))]


def hidden(size):
    """The bias of padding, which hides keys from all queries, and all keys from its queries."""
    bias = np.zeros((1, 1, T, T), np.float32)
    bias[..., SEEN:], bias[..., SEEN:, :] = size, size
    return bias


def function(backend, strategy, dtype, bias):
    metadata = AttentionMetadata(
        platform="interpret",
        backend=backend,
        runtime_dtype=jnp.float32,
        blocksize_q=32,
        blocksize_k=32,
    )
    call = lambda q, k, v: attention(q, k, v, strategy(metadata), bias=jnp.asarray(bias))
    return lambda *xs: call(*(x.astype(dtype) for x in xs)).attention_outputs


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend, strategy, dtype", KERNELS)
def test_rows_without_cotangents_add_nothing(backend, strategy, dtype, size):
    """They added NaN to the gradients of all keys and values: powers of two overflowed."""
    q, k, v, g = (normal(i, 1, T, H, D) for i in range(4))
    q, k, v = (x.astype(dtype).astype(jnp.float32) for x in (q, k, v))
    g = g.at[:, SEEN:].set(0)
    f = function(backend, strategy, dtype, hidden(size))
    got = jax.jit(lambda *xs: jax.vjp(f, *xs)[1](g))(q, k, v)
    inside = np.arange(T) < SEEN
    problem = oracle.Problem(
        *(np.float64(x) for x in (q, k, v)), scale=D**-0.5, mask=inside[:, None] & inside
    )
    want = oracle.vjp(problem, np.float64(g), np.zeros((1, T, H)))
    atol = 1e-5 if dtype == jnp.float32 else 3e-2
    for name, x in zip("qkv", got):
        np.testing.assert_allclose(x, want[name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend, strategy, dtype", KERNELS)
def test_hidden_rows_have_finite_gradients_and_tangents(backend, strategy, dtype, size):
    q, k, v, g = (normal(i, 1, T, H, D) for i in range(4))
    f = function(backend, strategy, dtype, hidden(size))
    out, pull = jax.vjp(f, q, k, v)
    tangents = [] if backend != "tpu" else [jax.jvp(f, (q, k, v), (k, v, q))[1]]
    for x in (out, *pull(g), *tangents):
        assert np.isfinite(x).all()
