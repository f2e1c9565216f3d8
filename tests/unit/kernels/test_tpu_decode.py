"""Decoding by one kernel for TPUs: rows of different heads that share registers.

A row uses the columns of its own group only. `OwnColumns` says how rows are folded by that, and
each case here has another way of folding: against float64, over caches of 8 bits, with a maximum
that only a row of another head in the same register would exceed, and with values that are not
finite.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tpu_compile import compile_all
from matrix.oracle import exact

from eqattn import attention, AttentionMetadata, Causal, KeyPadding, Ragged
from eqattn._problem.storage import Quantized
from eqattn.cache import Joined, Pages
from eqattn.kernels.tpu._decode_program import OwnColumns


FOLDS = {
    # queries, heads, key heads: rows of a tile, columns of a period, columns of a part
    (1, 16, 4): (8, 128, 512),  # two groups in a tile
    (1, 32, 32): (8, 128, 1024),  # eight, and several parts
    (2, 32, 4): (16, 128, 512),  # a group in each tile
    (1, 24, 3): (8, 384, 384),  # a pattern of three registers
    (1, 12, 4): (12, 128, 512),  # groups across tiles: nothing is folded
    (3, 8, 1): (24, 128, 128),  # one group: all columns are everyone's
}


@pytest.mark.parametrize("case", FOLDS)
def test_how_rows_are_folded(case):
    t, heads, groups = case
    own = OwnColumns(128, groups, t * heads)
    assert (own.height, own.period, own.parts[0].stop) == FOLDS[case]
    assert [x for p in own.parts for x in range(p.start, p.stop)] == list(range(128 * groups))
    odd = OwnColumns(24, groups, t * heads)  # of which no register begins where another did
    assert odd.period == 24 * groups or odd.period % 128 == 0
    assert odd.columns % odd.period == 0


def arrays(t, heads, groups, keys=256, dim=8):
    random = np.random.default_rng(0)
    q, k, v = (
        random.standard_normal((2, n, h, dim)).astype(np.float32)
        for n, h in ((t, heads), (keys, groups), (keys, groups))
    )
    # Heads whose logits are so large that exp of them, less another head's maximum, overflows.
    return q * np.where(np.arange(heads) % 3 == 1, 300, 1)[:, None].astype(np.float32), k, v


LENGTHS = np.array([250, 37])


def call(q, k, v, size=128, platform="interpret"):
    lengths = jnp.asarray(LENGTHS)
    metadata = AttentionMetadata(platform=platform, blocksize_k=size)
    q, k, v = (jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in (q, k, v))
    return attention(
        q, k, v, Ragged(metadata), mask=KeyPadding(lengths) & Causal(),
        q_offset=lengths - q.shape[1], return_logsumexp=True,
    )  # fmt: skip


def want(q, k, v):
    at = LENGTHS[:, None] - q.shape[1] + np.arange(q.shape[1])
    return exact(q, k, v, visible=(np.arange(k.shape[1]) <= at[..., None])[:, None])[:2]


@pytest.mark.parametrize("case", [(1, 16, 4), (2, 32, 4), (1, 24, 3)])
def test_rows_that_share_registers(case):
    q, k, v = arrays(*case)
    stored = [Quantized.quantize(jnp.asarray(x), jnp.int8) for x in (k, v)]
    output = call(q, *stored)
    plain = [np.asarray(x.materialise()) for x in stored]
    for x, y in zip((output.attention_outputs, output.logsumexp), want(q, *plain), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("page", [None, 32])
def test_latents_of_8_bits(page):
    """Latents and the rest of a key have scales of their own. Of 24 + 8 features, interpreted."""
    q, k, _ = arrays(1, 8, 1, dim=32)
    parts = [Quantized.quantize(jnp.asarray(x), jnp.int8) for x in (k[..., :24], 50 * k[..., 24:])]
    first, rest = (np.asarray(x.materialise()) for x in parts)
    key = Joined(*parts)
    if page:
        order = np.random.default_rng(1).permutation(2 * 256 // page)
        table = jnp.asarray(np.argsort(order).reshape(2, -1).astype(np.int32))
        pools = (Quantized(*(paged(y, page, order) for y in (x.values, x.scales)), x.dtype)
                 for x in parts)  # fmt: skip
        key = Pages(Joined(*pools), table)
    run = lambda q, key, how: call(q, key, key.first, None if page else 128, how)
    lowered = jax.jit(run, static_argnums=2).trace(q, key, "tpu").lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count('"eqattn_decode"') == 1
    output = run(q, key, "interpret")
    truth = want(q, np.concatenate([first, rest], -1), first)
    for x, y in zip((output.attention_outputs, output.logsumexp), truth, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def paged(x, page, order):
    """An array of tokens, `[rows, tokens, ...]` or scales `[rows, 1, tokens]`, as shuffled pages."""
    tokens = x.shape[1] if x.ndim == 4 else x.shape[2]
    pages = len(x) * tokens // page
    x = x.reshape(pages, page, *x.shape[2:]) if x.ndim == 4 else x.reshape(pages, 1, page)
    return x[order]


@pytest.mark.parametrize("chip", ["v5p", pytest.param("v7x", marks=pytest.mark.slow)])
def test_latents_of_8_bits_are_read_as_they_lie(chip):
    """Of 8192 tokens, only their 64 features besides are copied, which XLA keeps transposed."""
    (got,) = compile_all(chip, ("int8 latents",)).values()
    assert got.get("kernels") == 1 and got["temporary"] <= 1.5 * 2**20, got
    assert got["copied"] <= 8192 * 64, got


@pytest.mark.parametrize("case", [(1, 16, 4), (2, 32, 4)])
def test_a_value_that_is_not_finite_reaches_the_heads_that_see_it(case):
    q, k, v = arrays(*case)
    bad = v.copy()
    bad[0, 5, 1, 3] = np.inf
    got, clean = np.asarray(call(q, k, bad).attention_outputs), want(q, k, v)[0]
    seen = np.asarray(np.isnan(got).all((1, 3)))
    share = case[1] // case[2]
    # A weight that underflows to 0 still makes NaN of what is not finite.
    assert seen[0].nonzero()[0].tolist() == list(range(share, 2 * share)) and not seen[1].any()
    others = ~seen[:, None, :, None] & np.ones_like(got, bool)
    np.testing.assert_allclose(got[others], clean[others], rtol=2e-5, atol=2e-5)
