"""Kernels inside of a `jax.shard_map` of the caller, where JAX checks what varies over the mesh."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from eqattn import attention, AttentionMetadata, Blockwise, masks as m


MASKS = {
    "causal": m.Causal(),
    "window": m.Causal() & m.SlidingWindow(20, 0),
    "padding": m.KeyPadding(100),
    "prefix": m.PrefixLM(7),
    "function": m.MaskFn(lambda b, h, q, k: k <= q + 3),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_have_kernels_where_types_are_checked(name):
    """A constant that is made to vary counted as a look-up: a bare `AssertionError`."""
    mesh = jax.make_mesh((2,), ("dp",), (AxisType.Auto,), devices=jax.devices()[:2])
    strategy = Blockwise(AttentionMetadata(platform="tpu"))

    @jax.jit
    @ft.partial(jax.shard_map, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    def call(q):
        return attention(q, q, q, strategy, mask=MASKS[name]).attention_outputs

    q = jnp.ones((4, 256, 2, 128), jnp.bfloat16)
    assert "tpu_custom_call" in call.trace(q).lower(lowering_platforms=("tpu",)).as_text()
