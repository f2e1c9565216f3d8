"""Numbers of all pairs, which kernels for TPUs read and write where they lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from _tpu_lowered import text_of
from _turns import excesses
from matrix import oracle_masks as om

from eqattn import attention, AttentionMetadata, Blockwise, Causal
from eqattn._sweep.grid import BATCH, COL, GridLayout, HEAD, ROW
from eqattn._sweep.tokens import Tokens
from eqattn.kernels.tpu import _operands
from eqattn.kernels.tpu._grid import KernelGrid
from eqattn.kernels.tpu._operands import MOST_READS, PairsOperand


GROUP, QUERIES, KEYS = 2, 32, 128
TOKENS = Tokens(ROW, 4 * QUERIES, QUERIES, group=GROUP), Tokens(COL, 3 * KEYS, KEYS)
LAYOUT = GridLayout((2, 4, 4, 3), (KEYS, GROUP * QUERIES), (), tokens=TOKENS)
GRID = KernelGrid(LAYOUT, (BATCH, HEAD, None), (), 12)
AXES = [(BATCH, HEAD, ROW, COL), (HEAD, ROW, COL), (BATCH, ROW, COL), (ROW, COL)]


def window(spec, x, at: dict) -> jax.Array:
    """What a kernel finds in a reference, given where its pair is: the list, of one word, says so."""
    ids = at[BATCH], at[HEAD], 0
    word = jnp.asarray([at[ROW] << 18 | at[COL] << 4], jnp.int32)
    sizes = [1 if n is None else n for n in spec.block_shape]
    starts = [int(i) * n for i, n in zip(spec.index_map(*ids, word), sizes, strict=True)]
    found = x[tuple(slice(i, i + n) for i, n in zip(starts, sizes))]
    return found.reshape([n for n in spec.block_shape if n is not None])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.bool_])
@pytest.mark.parametrize("axes", AXES)
def test_a_block_is_a_window(axes, dtype):
    x = normal(0, *LAYOUT.shape(axes), KEYS, GROUP * QUERIES)
    x = x > 0 if dtype == jnp.bool_ else x.astype(dtype)
    found = PairsOperand.of(x, axes, LAYOUT)
    assert found is not None and not found.resident
    (whole,) = GRID.arrays([found])
    assert whole.shape[-3:] == (GROUP, 4 * QUERIES, 3 * KEYS)
    assert whole.dtype == (jnp.int8 if dtype == jnp.bool_ else dtype)
    for at in ({BATCH: 1, HEAD: 2, ROW: 3, COL: 1}, {BATCH: 0, HEAD: 3, ROW: 1, COL: 2}):
        block = found.read(window(GRID.block_spec(found), whole, at))
        assert block.dtype == dtype
        assert np.array_equal(block.T, x[tuple(at[a] for a in axes)])


def test_heads_that_a_step_visits_are_windows_of_one_array():
    axes = AXES[0]
    single = Tokens(ROW, 4 * QUERIES, QUERIES), TOKENS[1]
    layout = GridLayout((2, 4, 4, 3), (KEYS, QUERIES), (), tokens=single)
    x = normal(0, *layout.shape(axes), KEYS, QUERIES)
    found = PairsOperand.of(x, axes, layout)
    assert found is not None
    halved = GridLayout((2, 2, 4, 3), (KEYS, QUERIES), (), tokens=single)
    grid = KernelGrid(halved, (BATCH, HEAD, None), (), 12, abreast=2)
    (whole,) = grid.arrays([found])
    part = window(grid.block_spec(found), whole, {BATCH: 1, HEAD: 1, ROW: 3, COL: 2})
    for head in range(2):
        assert np.array_equal(found.read(part, (head,)).T, x[1, 2 + head, 3, 2])


def test_what_stays_blocks():
    """Those of rows, keys or features, those that fill no registers, and those in which all heads
    of a group have the same numbers.
    """
    axes, block = AXES[0], (KEYS, GROUP * QUERIES)
    of = lambda *block, tokens=TOKENS: PairsOperand.of(
        jnp.zeros((2, 4, 4, 3, *block)),
        axes,
        GridLayout((2, 4, 4, 3), (KEYS, GROUP * QUERIES), (), tokens=tokens),
    )
    assert of(*block) is not None
    for other in ((KEYS, 1), (1, GROUP * QUERIES), (KEYS, 1, QUERIES), (*block, 5), (KEYS, KEYS)):
        assert of(*other) is None
    padded = Tokens(ROW, 4 * QUERIES - 1, QUERIES, group=GROUP), TOKENS[1]
    assert of(*block, tokens=padded) is not None and of(*block, tokens=()) is None
    for queries, keys in ((16, 128), (32, 64)):
        tokens = Tokens(ROW, 4 * queries, queries), Tokens(COL, 3 * keys, keys)
        layout = GridLayout((2, 4, 4, 3), (keys, queries), (), tokens=tokens)
        assert PairsOperand.of(jnp.zeros((2, 4, 4, 3, keys, queries)), axes, layout) is None


@pytest.mark.parametrize("batch, near", [(MOST_READS, True), (MOST_READS + 1, False)])
def test_narrow_numbers_that_many_share_are_copied(batch, near):
    """Unless a step need not transpose them."""
    layout = GridLayout((batch, 4, 4, 3), LAYOUT.block, (), tokens=TOKENS)
    axes = (HEAD, ROW, COL)
    x = jnp.zeros((4, 4, 3, *LAYOUT.block))
    for dtype in (jnp.bfloat16, jnp.bool_):
        assert (PairsOperand.of(x.astype(dtype), axes, layout) is not None) == near
        assert PairsOperand.of(x.astype(dtype), axes, layout, turned=True) is not None
    assert PairsOperand.of(x, axes, layout) is not None


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "heads, kv_heads, tokens, d, shape",
    [
        (4, 2, (64, 256), 16, (2, 4)),
        (2, 2, (64, 256), 16, (1, 2)),
        (2, 2, (32, 128), 128, (2, 2)),
        (4, 2, (50, 200), 16, (2, 4)),
    ],
    ids=["grouped", "shared by the batch", "one block, and vectors as long", "padded"],
)
def test_numbers_and_gradients(heads, kv_heads, tokens, d, shape, fused, monkeypatch):
    """Of blocks that fill registers. The matrix has small ones."""
    found = []
    put_together = lambda *xs, f=_operands.joined: found.append(xs[2]) or f(*xs)
    monkeypatch.setattr(_operands, "joined", put_together)
    t, s = tokens
    inputs = [normal(0, 2, t, heads, d), *(normal(i, 2, s, kv_heads, d) for i in (1, 2))]
    inputs.append(normal(3, *shape, t, s))
    ct = normal(4, 2, t, heads, d)
    metadata = AttentionMetadata(platform="interpret", blocksize_q=32, blocksize_k=128)
    strategy = Blockwise(metadata, fused_backward=fused)

    @jax.jit
    def run(*xs):
        def call(q, k, v, bias):
            return attention(q, k, v, strategy, mask=Causal(), bias=bias).attention_outputs

        out, transpose = jax.vjp(call, *xs)
        return out, *transpose(ct)

    worst = excesses(run(*inputs), inputs, ct, om.causal(t, s))
    assert max(worst.values()) <= 1, worst
    # One for the output, one for each kernel of the gradients, and none for queries or values.
    assert found == [(heads // kv_heads, 32, 128)] * (3 if fused else 4)


def test_its_gradient_is_written_where_it_belongs():
    """In float32, too, where other steps have logits as `[keys, queries]`."""
    q, bias = jnp.zeros((1, 512, 2, 64)), jnp.zeros((1, 2, 512, 512))
    strategy = Blockwise(AttentionMetadata(platform="tpu", blocksize_q=128, blocksize_k=128))

    def loss(bias):
        return attention(q, q, q, strategy, bias=bias).attention_outputs.sum()

    lines = text_of(jax.grad(loss), bias).splitlines()
    (call,) = [x for x in lines if "tpu_custom_call" in x and "eqattn_sum_pairs" in x]
    assert call.endswith("-> tensor<2x1x512x512xf32>")
