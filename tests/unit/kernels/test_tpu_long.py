"""Long calls have larger blocks on TPUs, where each masked one is a corner with known parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import (
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    KeyPadding,
    MaskFn,
    Segments,
    SlidingWindow,
)
from eqattn._problem import block_classes
from eqattn._problem.block_classes import choose_live_blocking
from eqattn._problem.problem import Problem
from eqattn.kernels import tpu
from eqattn.kernels.tpu import _chip, _windows, TPULowering


def blocks(t, s=None, *, heads=1, dim=128, dtype=jnp.bfloat16, sizes=(None, None), **kw):
    """The queries and keys of a block that a call has."""
    found, fields = [], kw.pop("fields", {})

    def look(query, keys):
        call = {"mask": Causal(), **kw}
        cut = Problem.from_call(query, keys, keys, AttentionMetadata(**fields), **call)
        found.append(choose_live_blocking(cut, *sizes, lowering=TPULowering("pallas")))

    like = lambda n, h: jax.ShapeDtypeStruct((1, n, h, dim), dtype)
    jax.eval_shape(look, like(t, heads), like(s or t, 1))
    return found[0].block_q, found[0].block_k


@pytest.fixture(params=[6, 7])
def wide(request, monkeypatch):
    monkeypatch.setattr(_chip, "generation", lambda: request.param)


LONG, USUAL = (2048, 2048), (1024, 1024)


@pytest.mark.parametrize("t", [16_384, 32_768, 32_668, 131_072])
def test_long_calls_have_larger_blocks(wide, t):
    assert blocks(t) == LONG
    assert blocks(t, mask=None) == (LONG if t % 2048 == 0 else USUAL)  # padded keys have a mask
    assert blocks(t, mask=MaskFn(lambda b, h, q, k: q >= k)) == LONG
    assert blocks(t, sizes=(1024, None)) == USUAL


def test_of_other_lengths(wide):
    """Short calls keep their blocks, as those with a rest that larger ones would pad. Few queries
    may have many keys.
    """
    assert blocks(8192) == blocks(4096) == blocks(16_000) == USUAL
    assert blocks(16_384 + 100) == blocks(17 * 1024) == USUAL
    assert blocks(2048, 131_072, mask=None) == LONG
    assert blocks(1024, 2**18, mask=None) == USUAL
    assert blocks(2**19) == USUAL  # parts of so many blocks are not looked for


@pytest.mark.parametrize(
    "kw",
    [
        dict(mask=Causal() & SlidingWindow(4095, 0)),
        dict(mask=SlidingWindow(20_000, 0)),
        dict(mask=MaskFn(lambda b, h, q, k: q // 1024 == k // 1024)),  # twice as many pairs
        dict(mask=KeyPadding(jnp.array([30_000]))),
        dict(mask=Causal() & Segments(jnp.zeros((1, 32_768), int))),
        dict(q_offset=512),
        dict(bias=jnp.zeros((1, 1, 1, 32_768))),
        dict(dropout_key=jax.random.key(0)),
        dict(fields=dict(logits_soft_cap=30.0)),
        dict(fields=dict(softmax_aux=jnp.zeros(1))),
        dict(fields=dict(softmax_scale=jnp.ones(()))),
        dict(fields=dict(runtime_softmax_dtype=jnp.bfloat16)),
        dict(heads=4),
        dict(dim=64),
        dict(dim=256),
    ],
)
def test_other_calls_keep_their_blocks(wide, kw):
    """Those with other masked blocks, with more work for each pair, and of other sizes."""
    queries, keys = blocks(32_768, **kw)
    assert (queries * kw.get("heads", 1), keys) == USUAL


def test_exact_products_keep_theirs(wide):
    assert blocks(32_768, dtype=jnp.float32) == (512, 512)


@pytest.mark.parametrize("generation", [0, 5])
def test_other_chips_keep_theirs(generation, monkeypatch):
    """Older ones, and one that is not known."""
    monkeypatch.setattr(_chip, "generation", lambda: generation)
    assert blocks(32_768) == USUAL


@pytest.mark.parametrize("mask, t", [(Causal(), 60), (Causal(), 64), (None, 64)])
def test_results_in_larger_ones(mask, t, monkeypatch):
    """With a rest that is padded, too. All sizes are 1/64 or 1/32 of what they are."""
    monkeypatch.setattr(_chip, "generation", lambda: 6)
    monkeypatch.setattr(tpu, "LARGE", 32)
    monkeypatch.setattr(tpu, "LONG", t * t)
    monkeypatch.setattr(block_classes, "STEP", 8)
    monkeypatch.setattr(_windows, "WINDOW", 16)
    assert blocks(t, mask=mask) == (32, 32)
    rng = np.random.default_rng(t)
    query, key_, value, cotangent = (
        jnp.asarray(rng.normal(size=(1, t, 1, 128)), jnp.bfloat16) for _ in range(4)
    )

    def results(platform):
        strategy = Blockwise(AttentionMetadata(platform=platform))
        f = lambda *xs: attention(*xs, strategy, mask=mask).attention_outputs
        out, transpose = jax.vjp(f, query, key_, value)
        return out, *transpose(cotangent)

    for got, want in zip(results("interpret"), results("xla")):
        error = jnp.abs((got - want).astype(jnp.float32)).max()
        assert error <= 2**-7 * jnp.abs(want).max().astype(jnp.float32)
