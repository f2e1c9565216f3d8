"""Rings under further transforms and on explicit axes, and dropout in a `jax.shard_map` of one's own."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring.test_contexts as unit
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from ring.common import (
    attend,
    by_hand,
    checkpointed,
    close,
    expected,
    forward_mode,
    gradient,
    hvp,
    k,
    mesh_of,
    q,
    scanned,
    SEGMENTS,
    strategy,
    twice,
    v,
)
from ring.test_contexts import FOUR, four_axes

from eqattn import attention, Blockwise, masks as m
from eqattn._ring.layout import Zigzag
from eqattn.strategies.ring import Ring


@pytest.mark.parametrize("transform", [twice, hvp, forward_mode, scanned, checkpointed])
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


def test_mesh_of_the_metadata():
    fn = gradient(ft.partial(attend, mesh=mesh_of(2)))
    close(jax.jit(fn)(q, k, v), expected())


def test_explicit_mesh_of_the_metadata():
    mesh = mesh_of(2, AxisType.Explicit)
    placed = [jax.device_put(x, NamedSharding(mesh, P(None, "sp"))) for x in (q, k, v)]
    fn = gradient(ft.partial(attend, mesh=mesh))
    close(jax.jit(fn)(*placed), expected())
    close(jax.jit(fn)(q, k, v), expected())


def test_four_explicit_axes():
    mesh = four_axes(AxisType.Explicit)
    placed = [jax.device_put(x, NamedSharding(mesh, FOUR)) for x in (q, k, v)]
    with jax.set_mesh(mesh):
        close(jax.jit(gradient(attend))(*placed), expected())


def test_own_shard_map_transforms():
    fn = lambda *xs: by_hand(mesh_of(2), True)(*xs, SEGMENTS)
    close(jax.jit(hvp(fn))(q, k, v), expected(hvp))


def test_own_shard_map_zigzag():
    layout = Zigzag()

    def fn(*xs):
        xs = [layout.permute(x, 2) for x in (*xs, SEGMENTS)]
        return layout.unpermute(by_hand(mesh_of(2), True, layout=layout)(*xs), 2)

    close(jax.jit(gradient(fn))(q, k, v), expected())


def test_equinox():
    class Model(eqx.Module):
        strategy: Ring
        weight: jax.Array

        def __call__(self, q, k, v):
            mask = m.Causal() & m.Segments(SEGMENTS)
            return attention(q * self.weight, k, v, self.strategy, mask=mask).attention_outputs

    @eqx.filter_jit
    @eqx.filter_grad
    def grads(model, q, k, v):
        return jnp.sum(jnp.sin(model(q, k, v)))

    one = Model(strategy(Blockwise), jnp.float64(1.5))
    many = Model(strategy(Ring, mesh=mesh_of(4)), jnp.float64(1.5))
    close(grads(many, q, k, v).weight, grads(one, q, k, v).weight)


def test_narrow_dtypes():
    """As accurate as Blockwise, in the dtype of the inputs."""
    dtype = jnp.bfloat16
    xs = [x.astype(dtype) for x in (q, k, v)]

    def run(cls, xs, dtype):
        fn = ft.partial(attend, cls=cls, runtime_dtype=dtype)
        return jax.jit(gradient(lambda *ys: fn(*ys).astype(jnp.float64)))(*xs)

    exact = run(Blockwise, [x.astype(jnp.float64) for x in xs], jnp.float64)
    one = run(Blockwise, xs, dtype)
    with jax.set_mesh(mesh_of(2)):
        many = run(Ring, xs, dtype)
    for x, y, z in zip(*map(jax.tree.leaves, (exact, one, many)), strict=True):
        assert z.dtype == y.dtype
        x, y, z = (np.asarray(a.astype(jnp.float64)) for a in (x, y, z))
        unit = float(jnp.finfo(dtype).eps) * np.abs(x).max()
        assert np.abs(z - x).max() <= 1.5 * np.abs(y - x).max() + unit


def test_own_shard_map():
    for check in (True, False):
        fn = lambda *xs: by_hand(mesh_of(4 if check else 2), check)(*xs, SEGMENTS)
        close(jax.jit(gradient(fn))(q, k, v), expected())


def test_eager():
    close(gradient(ft.partial(attend, mesh=mesh_of(4)))(q, k, v), expected())
