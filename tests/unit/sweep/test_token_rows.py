"""Rows are read and written where their tokens lie as they are in arrays of blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal

from eqattn import attention, Causal
from eqattn._sweep.grid import BATCH, BlockGrid, COL, HEAD, pick, put, ROW
from eqattn._sweep.tokens import by_tokens, TokenRows, Tokens


AT = {BATCH: 1, HEAD: 2, ROW: 3}
LAYOUT = BlockGrid((2, 3, 4, 5), (8, 12), (), tokens=(Tokens(ROW, 24, 6, group=2),))
ROWS = (BATCH, HEAD, ROW)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_block_is_read_and_written_in_place(transposed):
    turn = (lambda x: jnp.swapaxes(x, -1, -2)) if transposed else lambda x: x
    x = turn(normal(0, 2, 3, 4, 12, 7))
    found = by_tokens(x, ROWS, LAYOUT, transposed)
    assert isinstance(found, TokenRows)
    assert np.array_equal(found.blocks(LAYOUT), x)
    assert np.array_equal(found.pick(AT), pick(x, ROWS, AT))
    new = turn(normal(1, 12, 7))
    assert np.array_equal(found.put(AT, new).blocks(LAYOUT), put(x, ROWS, AT, new))


def test_other_arrays_stay_blocks():
    """Such are vectors, arrays of pairs, and tokens of which the last block is padded."""
    x = normal(0, 2, 3, 4, 12, 7)
    padded = dataclasses.replace(LAYOUT, tokens=(Tokens(ROW, 23, 6, group=2),))
    assert by_tokens(x, ROWS, padded, False) is x
    assert by_tokens(x[..., 0], ROWS, LAYOUT, False).ndim == 4
    assert by_tokens(x, (HEAD, ROW, COL), LAYOUT, False) is x


def test_a_gradient_of_queries_is_summed_over_a_batch_in_place():
    """Where a batch shares queries, each row of their gradient is added to by several elements."""
    q, k = normal(0, 512, 4, 64), normal(1, 2, 512, 2, 64)
    f = lambda q, k: attention(q[None], k[None], k[None], mask=Causal()).attention_outputs
    loss = lambda q, k: jnp.sin(f(q, k)).sum()
    found = jax.jit(jax.grad(lambda q: jax.vmap(loss, (None, 0))(q, k).sum()))(q)
    expected = sum(jax.grad(loss)(q, x) for x in k)
    assert np.allclose(found, expected, atol=1e-5)
