"""Masks in print, by name, and what they say of wrong arguments."""

import tracemalloc

import jax
import numpy as np
import pytest

import eqattn
from eqattn import (
    attention,
    AttentionMetadata,
    BlockCausal,
    Blockwise,
    Causal,
    ChunkedCausal,
    Dense as Dense_,
    DenseMask as Dense,
    KeyPadding,
    MaskFn,
    PrefixLM,
    QueryPadding,
    Segments,
    SlidingWindow,
    Tree,
)
from eqattn.masks import AbstractMask


def same_segment(b, h, q, k, i, j):
    return i == j


def test_repr_evaluates_back():
    here = {name: getattr(eqattn, name) for name in eqattn.__all__}
    here |= dict(same_segment=same_segment)
    for mask in (
        Causal() & ~SlidingWindow(4, None, sinks=2),
        Causal(3) | PrefixLM(2) & BlockCausal(4),
        Dense(np.eye(3, dtype=bool)[:2]),
        Segments(np.array([0, 0, 1]), np.array([0, 1, 1])),
        KeyPadding(5, 1) & QueryPadding(4) & Tree([-1, 0, 0], 3),
        ~(ChunkedCausal(3) | MaskFn(same_segment, ([0, 1, 1],), ([1, 1, 0],))),
    ):
        again = eval(repr(mask), here)
        assert "\n" not in repr(mask) and repr(again) == repr(mask)
        assert jax.tree.structure(again) == jax.tree.structure(mask)
        assert str(mask).splitlines()[0] == repr(mask)


@pytest.mark.parametrize("ask", [AbstractMask.sparsity, AbstractMask.as_array])
def test_arrays_of_a_batch_or_of_heads_say_which_argument_they_need(ask):
    batched = Causal() & KeyPadding(np.array([3, 4]))
    with pytest.raises(ValueError, match=r"KeyPadding has an array \(2,\).*batch_shape=\(2,\)"):
        ask(batched, 8, 8)
    with pytest.raises(ValueError, match=r"batch_shape is \(3,\): give batch_shape=\(2,\)"):
        ask(batched, 8, 8, batch_shape=(3,))
    with pytest.raises(ValueError, match=r"mask has an array \(2, 8, 8\) .* give heads=2"):
        ask(Dense(np.ones((2, 8, 8), bool)), 8, 8)
    ask(batched, 8, 8, batch_shape=(2,)), ask(batched, 8, 8, batch_shape=(5, 2))


def test_a_mask_by_name_and_a_list_of_masks():
    q = jax.random.normal(jax.random.key(0), (6, 2, 4))
    for strategy in (None, Dense_(AttentionMetadata())):
        out = lambda mask: attention(q, q, q, strategy, mask=mask).attention_outputs
        np.testing.assert_array_equal(out("causal"), out(Causal()))
        np.testing.assert_array_equal(out("full"), out(None))
        for wrong in ([Causal(), SlidingWindow(1, 2)], (Causal(), "causal"), ["causal"], []):
            with pytest.raises(TypeError, match="one mask, got a .* combine several, `a & b`"):
                out(wrong)
        with pytest.raises(ValueError, match="one of 'causal', 'full', or None; got 'casual'"):
            out("casual")
    assert Blockwise().supports(mask="causal").ok and not Blockwise().supports(mask="casual").ok


@pytest.mark.parametrize("mask", [SlidingWindow(2**30, 0), KeyPadding(2**30), Causal(2**30)])
def test_a_size_that_means_no_limit_is_no_hint(mask):
    """A picture of as many tokens took 24 bytes for each of them."""
    tracemalloc.start()
    text = str(mask)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "65536 queries" in text and most < 2**25
