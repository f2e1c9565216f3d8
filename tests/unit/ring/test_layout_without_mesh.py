"""A layout that is not contiguous says nothing about arrays without the mesh it was made for."""

import jax
import numpy as np
import pytest

from eqattn import AllGather, attention, AttentionMetadata, Balanced, Causal, nn, Ring, Zigzag
from eqattn.nn import with_strategy


STRATEGIES = [
    Ring(layout=Zigzag()),
    AllGather(layout=Zigzag()),
    Ring(layout=Balanced(Causal(), 16, 4)),
]
REMEDY = r"no mesh of several.*jax\.set_mesh.*Contiguous\(\)"


@pytest.mark.parametrize("strategy", [STRATEGIES[0], STRATEGIES[1]])
@pytest.mark.parametrize("mask", [Causal(), None])
def test_calls_raise_with_the_remedy(strategy, mask):
    q = np.ones((1, 16, 2, 4), np.float32)
    with pytest.raises(ValueError, match=REMEDY):
        attention(q, q, q, strategy, mask=mask)
    with pytest.raises(ValueError, match=REMEDY):
        jax.jit(lambda q: attention(q, q, q, strategy, mask=mask).attention_outputs)(q)
    assert "no mesh of several" in strategy.supports(mask=mask).reason


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rotary", [None, nn.Rotary(4)])
def test_layers_raise(strategy, rotary):
    layer = nn.MultiheadAttention(2, 8, rotary=rotary, key=jax.random.key(0))
    with pytest.raises(ValueError, match="layout"):
        with_strategy(layer, strategy)(np.ones((16, 8), np.float32), mask="causal")


def test_a_mesh_of_one_device_is_in_order():
    """One device holds the chunks 0 and 1 of a zigzag, so nothing is moved."""
    mesh = jax.make_mesh((1,), ("sp",), devices=jax.devices()[:1])
    strategy = Ring(AttentionMetadata(mesh=mesh), layout=Zigzag())
    v = np.random.default_rng(0).normal(size=(1, 6, 1, 2)).astype(np.float32)
    zeros = np.zeros_like(v)
    out = attention(zeros, zeros, v, strategy, mask=Causal()).attention_outputs
    want = np.cumsum(v.astype(np.float64), 1) / np.arange(1, 7)[:, None, None]
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-6)
