"""Kernels for TPUs visit some rows at a time where one list of pairs is too long."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from _turns import excesses, recorded
from matrix import oracle_masks as om

from eqattn import (
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    DenseMask,
    Segments,
    SlidingWindow,
)
from eqattn._sweep.grid import BATCH, HEAD, ROW


T, S, SIZE, D = 104, 120, 8, 16  # 13 rows of 15 blocks, which are no equal turns
IDS = np.sort(np.random.default_rng(1).integers(0, 4, (2, S)))
HIDDEN = np.random.default_rng(2).random((4, T, S)) < 0.7
HIDDEN[1, 16:24] = True  # a row of blocks without a live one
CASES = {
    "full": (None, np.ones((1, 1, T, S), bool), {ROW}),
    "causal": (Causal(), om.causal(T, S), {ROW}),
    "window": (SlidingWindow(20, 0), om.causal(T, S) & ~np.tri(T, S, -21, dtype=bool), {ROW}),
    "segments": (
        Segments(jnp.asarray(IDS[:, :T]), jnp.asarray(IDS)),
        om.segments(IDS[:, :T], IDS),
        {BATCH, ROW},
    ),
    "array": (DenseMask(jnp.asarray(~HIDDEN)), ~HIDDEN[None], {HEAD, ROW}),
}


@pytest.mark.parametrize("kv_heads, shape", [(4, (1, 4, T, S)), (2, (2, 1, T, 1))])
@pytest.mark.parametrize("name", CASES)
def test_rows_in_turns(name, kv_heads, shape, monkeypatch):
    """Outputs and all gradients, where scalar memory holds two rows of pairs."""
    mask, seen, wanted = CASES[name]
    turned = recorded(monkeypatch, most=47)
    q, ct = normal(0, 2, T, 4, D), normal(3, 2, T, 4, D)
    k, v = normal(1, 2, S, kv_heads, D), normal(2, 2, S, kv_heads, D)
    bias = normal(4, *shape)
    metadata = AttentionMetadata(platform="interpret", blocksize_q=SIZE, blocksize_k=SIZE)

    @jax.jit
    def run(*xs):
        def call(q, k, v, bias):
            return attention(q, k, v, Blockwise(metadata), mask=mask, bias=bias).attention_outputs

        out, transpose = jax.vjp(call, *xs)
        return out, *transpose(ct)

    got = run(q, k, v, bias)
    assert {*turned} == wanted
    worst = excesses(got, (q, k, v, bias), ct, seen)
    assert max(worst.values()) <= 1, worst


def test_half_a_million_tokens_have_a_kernel():
    """Their list has 131,840 pairs, and 131,072 fit. It raised that the list is too long."""
    q = jax.ShapeDtypeStruct((1, 2**19, 2, 128), jnp.bfloat16)
    strategy = Blockwise(AttentionMetadata(platform="pallas", backend="tpu"))

    def loss(*xs):
        out = attention(*xs, strategy, mask=Causal()).attention_outputs
        return out.astype(jnp.float32).sum()

    text = (
        jax.jit(jax.grad(loss, (0, 1, 2)))
        .trace(q, q, q)
        .lower(lowering_platforms=("tpu",))
        .as_text()
    )
    assert "tpu_custom_call" in text
