"""The table of blocks takes memory that is linear in the tokens, as everything else does."""

import jax
import jax.numpy as jnp
import pytest

from eqattn import attention, Blockwise, Causal, Segments, SlidingWindow
from eqattn._sweep.grid import BlockRequest
from eqattn._sweep.lowering import XLA


def temporary(mask, tokens, *more):
    """The bytes that a compiled forward takes beside its arguments and results."""
    x = jax.ShapeDtypeStruct((1, tokens, 1, 16), jnp.float32)
    more = [jax.ShapeDtypeStruct((1, tokens), jnp.int32) for _ in range(*more)]

    def run(q, k, v, *more):
        return attention(q, k, v, Blockwise(), mask=mask(*more)).attention_outputs

    memory = jax.jit(run).lower(x, x, x, *more).compile().memory_analysis()
    return memory.temp_size_in_bytes


def window(*ids):
    mask = Causal() & SlidingWindow(1023, 0)
    return mask & Segments(*ids) if ids else mask


@pytest.mark.parametrize("traced", [0, 1], ids=["known", "traced"])
def test_four_times_the_tokens_take_four_times_the_memory(traced):
    sizes = [temporary(window, n, traced) for n in (2**17, 2**19, 2**21)]
    for small, large in zip(sizes, sizes[1:]):
        assert large / small <= 5


@pytest.mark.parametrize("group", [1, 4, 8, 64])
@pytest.mark.parametrize("reads_pairs", [False, True])
def test_entries_of_the_table_for_each_row(group, reads_pairs):
    def entries(tokens):
        request = BlockRequest(
            tokens, tokens, group, jnp.float32, 64, False, reads_pairs=reads_pairs
        )
        sizes = XLA.choose_blocks(request)
        return -(-tokens // sizes.queries) * -(-tokens // sizes.keys)

    for tokens in (1000, 2**17, 2**20 + 24, 2**22, 2**24):
        # An odd number of tokens in even blocks has a little more.
        assert entries(tokens) <= 4 * group * tokens * 1.01


def test_sizes_of_usual_lengths():
    """Only tables that would be too long change the blocks that are fastest."""
    for tokens in (2**14, 2**17, 2**18):
        request = BlockRequest(tokens, tokens, 1, jnp.float32, 64, False)
        assert XLA.choose_blocks(request) == (256, 256)
    request = BlockRequest(2**20, 2**20, 1, jnp.float32, 64, False)
    assert XLA.choose_blocks(request) == (512, 512)
