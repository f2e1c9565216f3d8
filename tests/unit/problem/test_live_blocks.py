"""The sizes of blocks follow a mask without arrays."""

from typing import Any

import jax
import numpy as np
import pytest
from _draw import normal
from matrix import bound, oracle

from eqattn import (
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    ChunkedCausal,
    MaskFn,
    Segments,
    SlidingWindow,
)
from eqattn._info import blocks_of
from eqattn._sweep.grid import EMPTY
from eqattn.strategies import _fold


NARROW = dict(
    window=SlidingWindow(15, 0),
    chunks=ChunkedCausal(64),
    function=MaskFn(lambda b, h, q, k: abs(q - k) < 20),
)
LIKE = jax.ShapeDtypeStruct((2, 2048, 4, 16), np.float32)


def sizes(mask, like=LIKE, **metadata):
    tiling, table = blocks_of(Blockwise(AttentionMetadata(**metadata)), like, like, like, mask)
    return (tiling.block_q, tiling.block_k), tiling, table


@pytest.mark.parametrize("name", NARROW)
def test_a_narrow_mask_has_small_blocks(name):
    (_, chosen, table), whole = sizes(NARROW[name]), 2048**2
    visited = np.mean(table != EMPTY) * np.prod(chosen.grid[2:]) * chosen.block_q * chosen.block_k
    assert visited / whole < 0.1  # in blocks of 256 x 256, it was 0.125 to 0.34
    assert sizes(NARROW[name], blocksize_q=256, blocksize_k=256)[0] == (256, 256)


def test_wide_masks_have_large_blocks():
    for mask in (None, Causal(), SlidingWindow(1600, 0), ~Causal()):
        assert sizes(mask)[0] == (256, 256), mask


def test_sizes_that_are_given_are_kept():
    assert sizes(NARROW["window"], blocksize_k=128)[0] == (256, 128)
    assert sizes(NARROW["window"], blocksize_q=128)[0] == (128, 256)


def test_a_mask_with_arrays_has_blocks_of_one_size(monkeypatch):
    """Calls trace them, so that sizes cannot follow what they hold."""
    documents, found = np.arange(2048) // 16, []
    assert sizes(Causal() & Segments(documents))[0] == (256, 256)
    choose = _fold.choose_live_tiling
    note = lambda *args, **kw: found.append(choose(*args, **kw)) or found[-1]
    monkeypatch.setattr(_fold, "choose_live_tiling", note)
    q = normal(0, 1, 2048, 1, 4)
    for given in (
        dict(mask=Causal() & Segments(documents)),
        dict(mask=SlidingWindow(15, 0), q_positions=np.arange(2048)),
        dict(mask=SlidingWindow(15, 0)),
    ):
        jax.eval_shape(lambda q, given=given: attention(q, q, q, **given).attention_outputs, q)
    assert [x.block_q for x in found] == [256, 256, 64]


@pytest.mark.parametrize("t, s", [(256, 256), (300, 520)])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_outputs_and_gradients(t, s, kv_heads):
    mask: Any = SlidingWindow(15, 3)
    q, k, v = normal(0, 1, t, 4, 8), normal(1, 1, s, kv_heads, 8), normal(2, 1, s, kv_heads, 8)
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    chosen, _ = blocks_of(Blockwise(), like[0], like[1], like[2], mask)
    assert chosen.rows * chosen.columns > 4
    at, to = np.arange(t)[:, None], np.arange(s)
    shown = (to >= at - 15) & (to <= at + 3)
    out = jax.jit(lambda *x: attention(*x, mask=mask).attention_outputs)(q, k, v)
    bound.check(oracle.plain_problem(q, k, v, visible=shown), out)
