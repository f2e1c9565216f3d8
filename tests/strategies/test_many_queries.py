"""`Ragged` with as many rows as keys: it copies these, and then has the bits of `Blockwise`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from conformance.build import KERNELS

from eqattn import attention, AttentionMetadata, Blockwise, Causal, KeyPadding, Ragged
from eqattn._problem.problem import Problem
from eqattn._problem.storage import Stored
from eqattn._sweep.lowering import XLA
from eqattn.kernels.gpu import GPULowering


HEADS = 4


def arrays(t, s, kv_heads):
    shapes = (3, t, HEADS, 8), (3, s, kv_heads, 8), (3, s, kv_heads, 8)
    return [normal(i, *shape) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("platform", ["xla", KERNELS])
@pytest.mark.parametrize("t, s, kv_heads", [(24, 24, 4), (12, 44, 1), (37, 37, 2)])
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
        (1, 44, 1, Blockwise(), None, False),
    ],
)
def test_where_keys_stay(t, s, kv_heads, strategy, wrap, in_place):
    """They stay where they are more than the rows, where they are stored, and in `bitwise` calls."""
    q, *kv = arrays(t, s, kv_heads)
    k, v = (x if wrap is None else wrap(x) for x in kv)
    problem = Problem.from_call(q, k, v, strategy.metadata)
    assert strategy.in_place(problem, XLA) is in_place


@pytest.mark.parametrize("dim, in_place", [(64, False), (288, True)])
def test_vectors_that_no_kernel_reads_in_copies(dim, in_place):
    """Those of latents are longer than kernels for NVIDIA GPUs read in other order."""
    q, k, v = (jnp.zeros((1, 4, 1, dim), jnp.bfloat16) for _ in range(3))
    problem = Problem.from_call(q, k, v, AttentionMetadata())
    assert Ragged().in_place(problem, GPULowering("gpu")) is in_place
