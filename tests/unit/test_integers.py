"""No integer wraps around: what does not fit raises, at once where it is known."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import (
    attention,
    AttentionMetadata,
    cache,
    Causal,
    dot_product_attention,
    KeyPadding,
    MaskFn,
    nn,
    packed_segments,
    PrefixLM,
    QueryPadding,
    Ragged,
    ragged_attention,
    ragged_gqa,
    reference_gqa,
    Segments,
    Tree,
)
from eqattn.masks import Operand


pytestmark = pytest.mark.usefixtures("unchecked")
B, T, H, D = 2, 4, 2, 4
WRAPS = [2**31, 2**32 + 1, -(2**31) - 1, 2**63 - 1]


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


QKV = [ones(B, T, H, D)] * 3
ROWS = ones(3, H, D), *[ones(B, T, H, D)] * 2
RAGGED = Ragged(AttentionMetadata())
CU, LENGTHS = np.array([0, 1, 3]), np.array([3, 4])
KV = cache.KVCache.empty(B, T, H, D)
PAGED = cache.PagedKVCache.empty(B, 8, 4, 4, H, D)
STACK = cache.StackedKVCache.empty(2, B, 64, H, D)
LAYER = nn.MultiheadAttention(2, 8, key=jax.random.key(0))
PARTS = jnp.zeros((3, 1, H, D)), jnp.zeros((3, 1, H, D))

# What takes integers: the name of the argument, and a call with a value in an array.
TAKERS = {
    "Causal": ("offset", lambda x, array: Causal(array([0, x]))),
    "PrefixLM": ("prefix", lambda x, array: PrefixLM(array([0, x]))),
    "KeyPadding": ("lengths", lambda x, array: KeyPadding(array([0, x]))),
    "KeyPadding of lists": ("lengths", lambda x, array: KeyPadding([0, x])),
    "KeyPadding, starts": ("starts", lambda x, array: KeyPadding(3, array([0, x]))),
    "QueryPadding": ("lengths", lambda x, array: QueryPadding(array([0, x]))),
    "Segments": ("q_ids", lambda x, array: Segments(array([0, x]))),
    "Segments, keys": ("kv_ids", lambda x, array: Segments(array([0, 1]), array([0, x]))),
    "Tree": ("parents", lambda x, array: Tree(array([-1, x]))),
    "Tree, start": ("start", lambda x, array: Tree(array([-1, 0]), array([0, x]))),
    "MaskFn, rows": ("row_operands", lambda x, array: MaskFn(lambda *_: True, [array([0, x])])),
    "MaskFn, columns": ("col_operands", lambda x, array: MaskFn(lambda *_: True, (), [array([0, x])])),
    "Operand": ("array", lambda x, array: Operand(array([0, x]), "t")),
    "as_array": ("q_positions", lambda x, array: Causal().as_array(2, 2, q_positions=array([0, x]))),
    "sparsity": ("kv_positions", lambda x, array: Causal().sparsity(2, 2, kv_positions=array([0, x]))),
    "q_offset": ("q_offset", lambda x, array: attention(*QKV, mask="causal", q_offset=array([0, x]))),
    "q_positions": ("q_positions", lambda x, array: attention(*QKV, mask="causal", q_positions=array([0, 1, 2, x]))),
    "kv_positions": ("kv_positions", lambda x, array: attention(*QKV, mask="causal", kv_positions=array([0, 1, 2, x]))),
    "ragged, cu": ("cu_q_lens", lambda x, array: ragged_attention(*ROWS, array([0, 1, x]), LENGTHS, RAGGED)),
    "ragged, lengths": ("lengths", lambda x, array: ragged_attention(*ROWS, CU, array([x, 4]), RAGGED)),
    "ragged, starts": (
        "starts", lambda x, array: ragged_attention(*ROWS, CU, LENGTHS, RAGGED, starts=array([x, 4]))
    ),
    "ragged_gqa": ("lengths", lambda x, array: ragged_gqa(ones(B, H, D), *QKV[1:], array([x, 1]))),
    "ragged_gqa, starts": (
        "starts", lambda x, array: ragged_gqa(ones(B, H, D), *QKV[1:], array([4, 4]), array([x, 1]))
    ),
    "reference_gqa": ("lengths", lambda x, array: reference_gqa(ones(B, H, D), *QKV[1:], array([x, 1]))),
    "packed_segments": ("cu_seqlens", lambda x, array: packed_segments(array([0, x]), T)),
    "dot_product_attention": (
        "key_value_seq_lengths",
        lambda x, array: dot_product_attention(*QKV, key_value_seq_lengths=array([1, x])),
    ),
    "rotary": ("positions", lambda x, array: nn.rotary(QKV[0], array([0, 1, 2, x]))),
    "layer": ("q_positions", lambda x, array: LAYER(ones(2, 8), mask="causal", q_positions=array([0, x]))),
    "layer, keys": ("kv_positions", lambda x, array: LAYER(ones(2, 8), mask="causal", kv_positions=array([0, x]))),
    "layer, counts": (
        "counts", lambda x, array: LAYER(ones(B, 2, 8), cache=KV, counts=array([0, x]))
    ),
    "append": ("counts", lambda x, array: KV.append(*QKV[:2], array([1, x]))),
    "truncate": ("lengths", lambda x, array: KV.truncate(array([0, x]))),
    "reorder": ("rows", lambda x, array: KV.reorder(array([0, x]))),
    "reserve": ("counts", lambda x, array: PAGED.reserve(array([0, x]))),
    "release": ("rows", lambda x, array: PAGED.release(array([0, x]))),
    "layer of a stack": ("index", lambda x, array: STACK.layer(array(x))),
    "length of a cache": ("length", lambda x, array: cache.KVCache(*QKV[:2], array([0, x]))),
    "length of a ring": (
        "length", lambda x, array: cache.RingBufferCache(*QKV[:2], np.zeros((B, T), int), array([0, x]))
    ),
    "held of a ring": (
        "held", lambda x, array: cache.RingBufferCache(*QKV[:2], array([[0, 1, 2, 3], [0, 1, 2, x]]), array([0, 0]))
    ),
    "table of pages": (
        "table", lambda x, array: cache.PagedKVCache(*PARTS, array([[0], [x]]), array([0, 0]))
    ),
    "length of pages": (
        "length", lambda x, array: cache.PagedKVCache(*PARTS, array([[0], [1]]), array([0, x]))
    ),
    "pages": ("table", lambda x, array: cache.Pages(PARTS[0], array([[0], [x]]))),
    "length of a stack": (
        "length", lambda x, array: cache.StackedKVCache(STACK.key, STACK.value, array([[0, 0], [0, x]]))
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", ["eager", "eval_shape"])
@pytest.mark.parametrize("name", TAKERS)
def test_what_does_not_fit_raises(name, how):
    argument, call = TAKERS[name]
    for value in WRAPS:
        with pytest.raises(ValueError) as caught:
            if how == "eager":
                call(value, np.array)
            else:
                jax.eval_shape(lambda: (call(value, np.array), None)[1])
        assert argument in str(caught.value), caught.value


# With integers of 64 bits, ids and operands of functions keep them, and others must still fit.
KEEP = ("Segments", "MaskFn", "Operand")


@pytest.mark.parametrize("array", [np.array, jnp.array], ids=["NumPy", "jax"])
@pytest.mark.parametrize("name", [n for n in TAKERS if not n.startswith(KEEP)])
def test_what_does_not_fit_raises_in_64_bits(name, array, x64):
    argument, call = TAKERS[name]
    with pytest.raises(ValueError, match=argument):
        call(2**32 + 1, array)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32])
def test_known_values_that_fit_are_taken_in_any_dtype(dtype):
    q = jax.random.normal(jax.random.key(0), (B, T, H, D))
    want = attention(q, q, q, mask=Causal() & KeyPadding(jnp.array([3, 2])), q_offset=1)
    got = attention(
        q, q, q,
        mask=Causal() & KeyPadding(np.array([3, 2], dtype)),
        q_positions=np.arange(1, T + 1, dtype=dtype),
        kv_positions=np.arange(T, dtype=dtype),
    )  # fmt: skip
    np.testing.assert_array_equal(got.attention_outputs, want.attention_outputs)


@pytest.mark.parametrize(
    "argument, call",
    [
        ("lengths", lambda x: KeyPadding(x).as_array(T, T, batch_shape=(B,))),
        (
            "q_positions",
            lambda x: attention(*QKV, q_positions=jnp.zeros((B, T), x.dtype) + x[:, None]),
        ),
        ("q_offset", lambda x: attention(*QKV, q_offset=x)),
        ("positions", lambda x: nn.rotary(ones(B, H, D), x)),
        ("counts", lambda x: KV.append(*QKV[:2], x)),
    ],
)
def test_traced_unsigned_integers_are_refused(argument, call):
    with pytest.raises(TypeError, match=rf"{argument}.*uint32.*astype\(jnp.int32\)"):
        jax.eval_shape(lambda x: (call(x), None)[1], jax.ShapeDtypeStruct((B,), "uint32"))


FAR = {"above": 2**33, "below": -(2**33), "just above": 2**31}


TRACED = [n for n in TAKERS if not n.startswith((*KEEP, "reserve"))]


# Each argument with one of the values; tests/nightly has all.
@pytest.mark.parametrize("name, value", list(zip(TRACED, itertools.cycle(FAR.values()))))
def test_traced_int64_that_does_not_fit_raises(name, value, x64):
    """When the program runs. `reserve` has no place in a program."""
    argument, call = TAKERS[name]

    @jax.jit
    def run(x):
        result = call(x, lambda given: jnp.stack(jax.tree.leaves(jax.tree.map(jnp.int64, given))))
        return [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array)]

    with pytest.raises(Exception, match=argument):
        jax.block_until_ready(run(jnp.int64(value)))


def test_traced_int64_that_fits_is_taken(x64):
    """`jnp.arange` is int64 there: it must work."""
    seen = jax.jit(lambda n: KeyPadding(n).as_array(1, 6, batch_shape=(4,)))(
        jnp.array([9, 0, 3, 6])
    )
    assert seen.sum((1, 2, 3)).tolist() == [6, 0, 3, 6]
    q = jax.random.normal(jax.random.key(0), (T, H, D), jnp.float32)
    want = attention(q, q, q, mask=Causal()).attention_outputs
    at = jnp.arange(T)
    assert at.dtype == jnp.int64
    for given in (dict(q_positions=at, kv_positions=at), dict(q_offset=at[0])):
        got = jax.jit(lambda g: attention(q, q, q, mask=Causal(), **g).attention_outputs)(given)
        # One unit in the last place of the values, whose mean a row is: jax 0.12 fuses otherwise.
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def test_positions_keep_room_for_differences():
    """The difference of two positions, and their sum with an offset, must fit int32."""
    reach = 2**30
    window = lambda **at: attention(*QKV, q_positions=np.array([0, 1, 2, 3]), **at)
    with pytest.raises(ValueError, match=r"kv_positions.*2\*\*30"):
        window(kv_positions=np.array([0, 1, 2, reach], np.int32))
    for offset in (reach, np.array(reach, np.int32), reach - T + 1):
        with pytest.raises(ValueError, match=r"q_offset.*2\*\*30"):
            attention(*QKV, q_offset=offset)
    last = attention(*QKV, mask=Causal(), q_offset=reach - T)
    np.testing.assert_array_equal(last.attention_outputs, ones(B, T, H, D))
    with pytest.raises(ValueError, match=r"offset.*2\*\*30"):
        Causal(np.array([reach + 1], np.int32))


@pytest.mark.parametrize(
    "x", [np.array([1, 2**63 + 7], np.uint64), [2**63, 2**64 - 1], [1, 2**70]], ids=str
)
def test_values_beyond_int64(x):
    with pytest.raises(ValueError, match="lengths must (be from .* got|fit an integer dtype)"):
        KeyPadding(x)
