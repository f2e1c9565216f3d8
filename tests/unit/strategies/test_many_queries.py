"""`Ragged` with as many rows as keys: it copies these, and then has the bits of `Blockwise`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal

from eqattn import attention, AttentionMetadata, Blockwise, Causal, KeyPadding, Ragged
from eqattn._problem.problem import Problem
from eqattn._problem.storage import Stored
from eqattn._sweep.lowering import XLA
from eqattn.kernels.nvidia.hopper import GPULowering


HEADS = 4


def arrays(t, s, kv_heads):
    shapes = (3, t, HEADS, 8), (3, s, kv_heads, 8), (3, s, kv_heads, 8)
    return [normal(i, *shape) for i, shape in enumerate(shapes)]


# tests/nightly/strategies has all platforms of each size, and all sizes of each dtype.
SIZES = [(24, 24, 4), (12, 44, 1), (37, 37, 2)]


@pytest.mark.parametrize("t, s, kv_heads, platform", [(*SIZES[2], "xla")])
def test_results_and_gradients_are_those_of_blockwise(t, s, kv_heads, platform):
    """Whatever the lengths of the rows; one of them is empty."""
    lengths = jnp.array([s, 0, 5])
    metadata = AttentionMetadata(platform=platform, blocksize_q=8, blocksize_k=16)

    @eqx.filter_jit
    def run(strategy, *xs):
        def f(*xs):
            output = attention(
                *xs, strategy, mask=Causal() & KeyPadding(lengths), q_offset=s - t,
                return_logsumexp=True,
            )  # fmt: skip
            return jnp.sum(jnp.sin(output.attention_outputs)), output

        return jax.value_and_grad(f, (0, 1, 2), has_aux=True)(*xs)

    xs = arrays(t, s, kv_heads)
    got, want = (run(strategy(metadata), *xs) for strategy in (Ragged, Blockwise))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
    "t, s, kv_heads, strategy, wrap, in_place",
    [
        (11, 44, 1, Ragged(), None, False),
        (11, 45, 1, Ragged(), None, True),
        (44, 44, 4, Ragged(), Stored, True),
        (44, 44, 4, Ragged(bitwise=True), None, True),
        (11, 44, 1, Blockwise(), None, False),
        (1, 32, 1, Blockwise(), None, True),
        (1, 31, 1, Blockwise(), None, False),
        (8, 256, 1, Blockwise(), None, True),
        (9, 4096, 1, Blockwise(), None, False),
        (1, 32, 1, Blockwise(bitwise=True), None, False),
        (1, 32, 1, Blockwise(AttentionMetadata(platform="interpret")), None, False),
    ],
)
def test_where_keys_stay(t, s, kv_heads, strategy, wrap, in_place):
    """They stay where they are more than the rows, where they are stored, and in `bitwise` calls."""
    q, *kv = arrays(t, s, kv_heads)
    k, v = (x if wrap is None else wrap(x) for x in kv)
    problem = Problem.from_call(q, k, v, strategy.metadata)
    assert strategy.in_place(problem, strategy.lowering(problem)) is in_place


@pytest.mark.parametrize("dim, in_place", [(64, False), (288, True)])
def test_vectors_that_no_kernel_reads_in_copies(dim, in_place):
    """Those of latents are longer than kernels for NVIDIA GPUs read in other order."""
    q, k, v = (jnp.zeros((1, 4, 1, dim), jnp.bfloat16) for _ in range(3))
    problem = Problem.from_call(q, k, v, AttentionMetadata())
    assert Ragged().in_place(problem, GPULowering("gpu")) is in_place


DTYPES = [(jnp.float64, 1e-11), (jnp.bfloat16, 0.03)]
FEW = [(1, 4), (3, 2), (8, 1)]


@pytest.mark.parametrize("t, kv_heads, dtype, atol", [(*FEW[1], *DTYPES[0])])
def test_few_rows_of_blockwise(x64, t, kv_heads, dtype, atol):
    """They read keys as they lie, with a bias, a soft cap, sinks, and a row that sees nothing."""
    s, lengths = 290, jnp.array([290, 0, 201])
    xs = [x.astype(dtype) for x in arrays(t, s, kv_heads)]
    bias, sinks = normal(3, 1, HEADS, t, s), normal(4, HEADS)
    metadata = AttentionMetadata(logits_soft_cap=3.0, softmax_aux=sinks.astype(jnp.float64))
    strategy = Blockwise(metadata)
    problem = Problem.from_call(*xs, metadata)
    assert strategy.in_place(problem, XLA) is (t * HEADS // kv_heads <= 32)

    def ours(q, k, v, bias):
        more = dict(mask=KeyPadding(lengths), bias=bias)
        return attention(q, k, v, strategy, **more).attention_outputs

    def dense(q, k, v, bias):
        """The same as one expression in float64."""
        q, k, v, bias = (x.astype(jnp.float64) for x in (q, k, v, bias))
        k, v = (jnp.repeat(x, HEADS // kv_heads, 2) for x in (k, v))
        z = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(8)
        z = 3 * jnp.tanh(z / 3) + bias
        seen = (jnp.arange(s)[None] < lengths[:, None])[:, None, None]
        p = jnp.where(seen, jnp.exp(jnp.where(seen, z, 0)), 0)
        total = p.sum(-1, keepdims=True) + jnp.exp(sinks.astype(jnp.float64))[None, :, None, None]
        return jnp.einsum("bhts,bshv->bthv", p / total, v)

    found = []
    for fn in (ours, dense):
        loss = lambda *xs, fn=fn: jnp.sum(jnp.sin(fn(*xs).astype(jnp.float64)))
        found.append((fn(*xs, bias), jax.grad(loss, (0, 1, 2, 3))(*xs, bias)))
    close = lambda x, y: np.testing.assert_allclose(
        np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=0, atol=atol
    )
    jax.tree.map(close, *found)
