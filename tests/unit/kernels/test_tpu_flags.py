"""Dense masks in kernels for TPUs: a kernel is given 8 bits for each pair, where these fill registers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal

from eqattn import attention, AttentionMetadata, Blockwise, DenseMask, Ragged
from eqattn.kernels.tpu._operands import KernelOperand


B, T, H, K, D = 2, 256, 4, 2, 64
SEEN = np.random.default_rng(3).random((B, H, T, T)) < 0.4
SEEN[0, 1, 5] = False
MASKS = {
    "of each head": SEEN,
    "of a batch element": SEEN[:, :1],
    "of all": SEEN[0, 0],
    "with a short last block": SEEN[..., :200],
}


def dense(seen, q, k, v):
    """In plain JAX. Rows that see nothing are 0."""
    k, v = (jnp.repeat(x, H // K, 2) for x in (k, v))
    z = jnp.einsum("bthd,bshd->bhts", q, k) / D**0.5
    seen = jnp.broadcast_to(seen, z.shape)
    p = jax.nn.softmax(jnp.where(seen, z, -1e30), where=seen)
    return jnp.einsum("bhts,bshd->bthd", jnp.where(seen, p, 0), v)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("strategy", [Blockwise, Ragged])
def test_values_and_gradients(strategy, name):
    seen = MASKS[name]
    s = seen.shape[-1]
    q, k, v = normal(0, B, T, H, D), normal(1, B, s, K, D), normal(2, B, s, K, D)
    metadata = AttentionMetadata(platform="interpret", blocksize_q=128, blocksize_k=128)

    def ours(q, k, v):
        mask = DenseMask(jnp.asarray(seen))
        return attention(q, k, v, strategy(metadata), mask=mask).attention_outputs

    def results(fn):
        loss = lambda *xs: jnp.sin(3 * fn(*xs)).sum()
        return jax.jit(lambda *xs: (fn(*xs), jax.grad(loss, (0, 1, 2))(*xs)))

    run = results(ours)
    assert re.search(r"tensor<(\d+x)*128x(128|256)xi8>", run.lower(q, k, v).as_text())
    got, want = run(q, k, v), results(lambda *xs: dense(seen, *xs))(q, k, v)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "block, dtype",
    [((128, 128), jnp.int8), ((32, 256), jnp.int8), ((1, 128), jnp.int32), ((128, 1), jnp.int32)]
    + [((16, 128), jnp.int32), ((32, 64), jnp.int32)],
)
def test_flags_that_fill_registers_take_8_bits(block, dtype):
    flags = np.random.default_rng(4).random((2, *block)) < 0.5
    x = KernelOperand(jnp.asarray(flags), (-1,))
    assert x.array.dtype == dtype
    for at in range(2):
        ref = x.array[at] if not x.resident else x.array
        found = x.read(ref, (at,) if x.resident else ())
        assert found.dtype == bool and np.array_equal(found, flags[at])
