"""Sharded arrays: all that may be placed, and every strategy."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_sharding as unit
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from test_sharding import close, few, gradient, HEADS, ids, k, mesh, output, q, v

from eqattn import (
    AllGather,
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    MaskFn,
    PartitionAxis,
    Ring,
    Segments,
    Ulysses,
)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("name", unit.ALONE)
def test_query_of_no_mesh(name, ring):
    unit.test_query_of_no_mesh(name, ring)


OWNERS = ids


@pytest.mark.parametrize("strategy", [Blockwise, Ring, Ulysses, AllGather])
def test_functions_read_global_arrays_on_explicit_axes(strategy, monkeypatch):
    """As a notebook has them. The function of a mask becomes one of its arrays."""
    same = MaskFn(lambda b, h, q, k: OWNERS[b, q] == OWNERS[b, k])
    metadata = AttentionMetadata(sequence_axis_name="dp", partition_axis=PartitionAxis(None))
    run = lambda *xs: attention(*xs, strategy(metadata), mask=same).attention_outputs
    want = run(*few), gradient(run)(*few)
    on = mesh(AxisType.Explicit)
    with jax.set_mesh(on):
        for spec in (P(), P(None, "dp")):
            placed = jax.device_put(ids, NamedSharding(on, spec))
            monkeypatch.setitem(globals(), "OWNERS", placed)
            args = [jax.device_put(x, NamedSharding(on, P(None, "dp"))) for x in few]
            close((run(*args), jax.jit(gradient(run))(*args)), want)


def test_shard_map_replicated_parameter():
    """A replicated scale inside: its gradient and second derivative are summed over devices."""

    def loss(scale, fn):
        return jnp.sum(jnp.sin(fn(scale, q, k, v)))

    def local(scale, q, k, v):
        mask = Causal() & Segments(jnp.zeros(q.shape[:2], jnp.int32))
        return output(q, k, v, mask=mask, scale=scale)

    for check in (True, False):
        sharded = jax.shard_map(
            local, mesh=mesh(AxisType.Auto), in_specs=(P(), HEADS, HEADS, HEADS),
            out_specs=HEADS, check_vma=check,
        )  # fmt: skip
        scale = jnp.float32(0.3)
        for transform in (jax.grad, lambda f: jax.jvp(jax.grad(f), (scale,), (scale,))[1]):
            run = lambda fn: (
                jax.jit(transform(ft.partial(loss, fn=fn)))(scale)
                if transform is jax.grad
                else jax.jit(lambda: transform(ft.partial(loss, fn=fn)))()
            )
            got, want = run(sharded), run(local)
            np.testing.assert_allclose(got, want, rtol=2e-4)
