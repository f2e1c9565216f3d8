"""Rings under further transforms, and dropout in a `jax.shard_map` of one's own."""

import functools as ft

import jax
import pytest
import ring.test_contexts as unit
from jax.sharding import AxisType, PartitionSpec as P
from ring.common import checkpointed, close, hvp, k, q, scanned, strategy, twice, v

from eqattn import attention, Blockwise, masks as m
from eqattn.strategies.ring import Ring


@pytest.mark.parametrize("transform", [twice, hvp, scanned, checkpointed])
def test_transform(transform):
    unit.test_transform(transform, 2)


def test_own_shard_map_dropout():
    """The bits of the whole arrays, also where batch and heads are sharded."""
    mesh = jax.make_mesh((2, 2, 2), ("dp", "tp", "sp"), axis_types=(AxisType.Auto,) * 3)
    key = jax.random.key(3)

    def run(q, k, v, cls, **kwargs):
        s = strategy(cls, dropout_prob=0.5, **kwargs)
        return attention(q, k, v, s, mask=m.Causal(), key=key).attention_outputs

    want = jax.jit(ft.partial(run, cls=Blockwise))(q, k, v)
    for check in (True, False):
        spec = P("dp", "sp", "tp")
        fn = jax.shard_map(
            ft.partial(run, cls=Ring, axis_name="sp"), mesh=mesh, in_specs=(spec,) * 3,
            out_specs=spec, check_vma=check,
        )  # fmt: skip
        close(jax.jit(fn)(q, k, v), want)
