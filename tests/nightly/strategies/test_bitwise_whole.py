"""The bits of thousands of rows: what `test_bitwise.py` does with a few."""

import _bits as bits
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_bitwise as unit
from test_bitwise import D, H, K, many, on_devices, random_call, same

from eqattn import attention, AttentionMetadata, Causal, Ragged
from eqattn.cache import KVCache, StackedKVCache


IN_KERNELS = "Blockwise in kernels", "Ragged in kernels"


@pytest.mark.parametrize("name", ["Blockwise", "Ragged"])
def test_the_bits_of_scores(name):
    """A score of several terms had other bits where there is one block of queries, or one query: a
    product that was computed ahead of the loop was rounded before it was added.
    """
    many(3, "positions", name, False, "float32", ("chunks", "decode"))


def test_the_gradients_of_a_step():
    """That of a bias was a sum over the rows that pad its block, which is compiled to other bits."""
    many(2, "window", "Ragged", True, "bfloat16", ("decode",))


def test_one_query_on_any_number_of_devices():
    """As in decoding: fewer queries than devices, in a block of 8."""
    (q, k, v), (out, lse) = random_call(1, jnp.float32, t=32)
    given = (q[:, :1], k, v), (out[:, :1], lse[:, :1])
    same(on_devices(2, *given), on_devices(1, *given), "devices")


def test_a_batch_that_is_sharded_of_ragged():
    unit.test_a_batch_that_is_sharded(Ragged)


def test_blocks_fill_vectors():
    """Blocks of three queries, each with the rows of one head, had other bits in 27 of 150 cases."""
    case = bits.Case(bits.plain, t=9, s=66, h=4, k=4, d=33, v=17, block=(3, 33), rows=1)
    for seed in range(50):
        bits.check(case, "Ragged", True, jnp.float32, seed, ("decode",))


def dtypes_of(index):
    """Each case has two of the dtypes, and each dtype has two thirds of the cases."""
    dtypes = ["float32", "bfloat16", "float16"]
    del dtypes[index % 3]
    return dtypes


OF_ARRAYS = [
    (name, case, dtype)
    for i, case in enumerate(bits.CASES)
    for name in (["Ragged"] if case not in bits.PLAIN else ["Blockwise", "Ragged"])
    for dtype in dtypes_of(i)
]


@pytest.mark.parametrize("name, case, dtype", OF_ARRAYS)
def test_the_bits_of_many_rows(name, case, dtype):
    """Outputs, logsumexps and gradients: 100 cases of hypothesis each, so 2,400 for `Blockwise` and
    2,800 for `Ragged`. Each has up to three rows.
    """
    many(100, case, name, True, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["window", "segments", "learned", "positions", "prefix"])
@pytest.mark.parametrize("name", IN_KERNELS)
def test_the_bits_of_many_rows_in_kernels(name, case, dtype):
    """2,000 cases of hypothesis for each strategy. Gradients are no part of the contract."""
    many(200, case, name, False, dtype)


@pytest.mark.parametrize("name", IN_KERNELS)
def test_gradients_in_kernels(name):
    """Not promised, and seen to hold."""
    many(100, "some blocks", name, True, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_number_of_devices_in_many_cases(dtype):
    """2,000 rows in all: 250 batches of each dtype, of two rows and on 2 and 4 devices."""
    for seed in range(250):
        given = random_call(seed, dtype)
        want = on_devices(1, *given, optimised=True)
        for n in (2, 4):
            same(on_devices(n, *given, optimised=True), want, (n, seed))


def test_the_bits_of_a_row_in_kernels():
    """Interpreted. A row alone, of several, and token by token; all else is slow."""
    many(3, "some blocks", "Blockwise in kernels", False, "float32", ("batch", "decode"))


def test_a_layer_has_the_blocks_of_any_capacity():
    """That of a stack lies in pages, and these were the largest that divide the capacity."""
    strategy = Ragged(AttentionMetadata(), bitwise=True)
    rng = np.random.default_rng(0)
    query, *new = (jnp.asarray(rng.normal(size=(2, 7, n, D)), jnp.float32) for n in (H, K, K))

    @jax.jit
    def run(cache):
        cache = cache.append(*new)
        where = dict(mask=Causal() & cache.mask(), q_offset=jnp.zeros(2, jnp.int32))
        out = attention(query, cache.key, cache.value, strategy, **where)
        return out.attention_outputs

    sizes = dict(batch=2, kv_heads=K, head_dim=D)
    want = np.asarray(run(KVCache.empty(capacity=128, **sizes))).tobytes()
    for capacity in (192, 640):
        layer = StackedKVCache.empty(2, capacity=capacity, **sizes).layer(1)
        assert np.asarray(run(layer)).tobytes() == want
