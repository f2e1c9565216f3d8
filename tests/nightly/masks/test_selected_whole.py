"""`Selected` in all cases of `test_selected.py`, and where tokens are sharded."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_selected as unit
from test_selected import DEFAULT_CODE, K, RNG

from eqattn import attention, Causal, Contiguous, Selected


@pytest.mark.parametrize("name", unit.CASES)
def test_it_is_the_dense_mask(name):
    unit.test_it_is_the_dense_mask_that_it_stands_for(name)


@pytest.mark.parametrize("name", unit.BLOCKS)
def test_all_blocks_are_visited_where_they_lie(name):
    unit.test_blocks_are_visited_where_they_lie(name)


def test_pages_of_eight_bits_are_read_where_they_lie():
    unit.test_pages_are_read_where_they_lie("int8", K)


def test_keys_of_contiguous_pieces_are_gathered_first():
    unit.test_keys_that_are_gathered_first(Contiguous())


@pytest.mark.parametrize("dtype", [jnp.float16, np.float32])
def test_memory_of_other_dtypes(dtype):
    unit.test_memory_is_that_of_what_is_listed_whatever_the_dtype(dtype)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("batch, heads", [(1, 1), (2, 1), (2, 2)])
def test_no_key_is_copied_whole(batch, heads, mapped):
    unit.test_no_key_is_copied_whole_under_vmap(batch, heads, mapped)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_every_window_of_few_keys(listed, batched):
    unit.test_a_window_of_few_keys_copies_none(listed, batched)


def test_blocks_of_each_query_cost_no_more_than_all_keys():
    """A quarter of the blocks for each query and head, as in MoBA. Copies of the listed keys took ten
    times as long as all keys, and much memory.
    """
    t, h, size = 1024, 2, 128
    arrays = [jnp.ones((1, t, h, 64))] * 3
    indices = jnp.asarray(RNG.integers(0, t // size, (1, h, t, 2)))

    def call(q, k, v, indices):
        mask = Causal() if indices is None else Causal() & Selected(indices, 1, size)
        return attention(q, k, v, mask=mask).attention_outputs

    took, memory = [], []
    for given in (indices, None):
        program = jax.jit(call).lower(*arrays, given).compile()
        took.append([])
        for _ in range(5):
            begin = time.perf_counter()
            jax.block_until_ready(program(*arrays, given))
            took[-1].append(time.perf_counter() - begin)
        memory.append(program.memory_analysis().temp_size_in_bytes)
    assert min(took[0]) < 3 * min(took[1]) and memory[0] < 1.5 * memory[1]


def test_work_and_memory_do_not_grow_with_the_keys_that_are_not_listed():
    """Of 16,384 keys, 64 are listed for each of 64 queries, 1/256 of the pairs: a backward pass then
    takes less than 1/8 of the time, and memory as for some copies of keys and values.
    """
    t, s, n, h, d = 64, 16384, 64, 16, 32
    q, k = jnp.ones((1, t, h, d)), jnp.ones((1, s, 1, d))
    indices = jnp.asarray(RNG.integers(0, s, (1, 1, t, n)))

    def loss(q, k, v, indices):
        mask = None if indices is None else Selected(indices)
        return attention(q, k, v, mask=mask).attention_outputs.sum()

    took = []
    for given in (indices, None):
        program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, given).compile()
        took.append([])
        for _ in range(3):
            begin = time.perf_counter()
            jax.block_until_ready(program(q, k, k, given))
            took[-1].append(time.perf_counter() - begin)
        if given is not None:
            assert program.memory_analysis().temp_size_in_bytes < 8 * k.nbytes
    assert min(took[0]) < min(took[1]) / 8


def test_the_gradient_of_a_gradient_keeps_no_copies():
    """All copies of keys and values together take 64 MiB."""
    q = jnp.ones((1, 1024, 2, 64))
    mask = Selected(jnp.asarray(RNG.integers(0, 1024, (1, 1, 1024, 64))))

    def gradient(q, k, v):
        loss = lambda *xs: jnp.sin(attention(*xs, mask=mask).attention_outputs).sum()
        return jax.grad(loss, (0, 1, 2))(q, k, v)

    second = jax.grad(lambda *xs: sum(jnp.cos(x).sum() for x in gradient(*xs)), (0, 1, 2))
    temporary = [
        jax.jit(f).lower(q, q, q).compile(DEFAULT_CODE).memory_analysis().temp_size_in_bytes
        for f in (gradient, second)
    ]
    assert temporary[1] < 5 * temporary[0]
