"""Ulysses and hybrid rings under every transform, in kernels and on explicit axes."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest
import ring.test_heads as unit
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from ring.common import (
    by_hand,
    checkpointed,
    close,
    expected,
    forward_mode,
    gradient,
    grid_of,
    hvp,
    k,
    mapped,
    mesh_of,
    q,
    scanned,
    SEGMENTS,
    twice,
    v,
)
from ring.test_heads import hybrid, ulysses

from eqattn import Ulysses


def run(fn, mesh, transform, args=(q, k, v)):
    with jax.set_mesh(mesh):
        return jax.jit(transform(fn))(*args)


def with_ids(mesh, check, **kwargs):
    fn = by_hand(mesh, check, **kwargs)
    return lambda *xs: fn(*xs, SEGMENTS)


def test_numbers_of_heads_of_ulysses():
    unit.test_numbers_of_heads_in_own_shard_map(1)


@pytest.mark.parametrize("heads, group", [(2, 1), (4, 1)])
def test_dropout_in_own_shard_map(heads, group):
    unit.test_dropout_in_own_shard_map(heads, group)


@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize("transform", [hvp, twice, forward_mode, mapped, scanned, checkpointed])
def test_transform(transform, places):
    fn, mesh = (ulysses, mesh_of(4)) if places == 1 else (hybrid, grid_of(places, 2))
    close(run(fn, mesh, transform), expected(transform))


def test_kernels():
    """The TPU's, interpreted: what each device folds is what they know."""
    args, want = [x.astype(jnp.float32) for x in (q, k, v)], expected()
    kwargs = dict(runtime_dtype=jnp.float32, platform="interpret")
    for mesh, own in ((mesh_of(4), dict(cls=Ulysses)), (grid_of(2, 2), dict(head_axis="hp"))):
        fn = with_ids(mesh, False, **own, **kwargs)
        with jax.enable_x64(False):
            close(jax.jit(gradient(fn))(*args), want, 1e-5)


@pytest.mark.parametrize("check", [True, False])
def test_more_of_own_shard_maps(check):
    close(jax.jit(gradient(with_ids(mesh_of(2), check, cls=Ulysses)))(q, k, v), expected())
    fn = with_ids(grid_of(2, 4), check, head_axis="hp")
    close(jax.jit(gradient(fn))(q, k, v), expected())
    close(jax.jit(hvp(fn))(q, k, v), expected(hvp))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_mesh_of_the_metadata_and_explicit_axes(kind):
    for fn, mesh in ((ulysses, mesh_of(4, kind)), (hybrid, grid_of(2, 2, kind))):
        want, names = expected(), P(None, mesh.axis_names)
        placed = [jax.device_put(x, NamedSharding(mesh, names)) for x in (q, k, v)]
        close(jax.jit(gradient(ft.partial(fn, mesh=mesh)))(q, k, v), want)
        close(jax.jit(gradient(ft.partial(fn, mesh=mesh)))(*placed), want)
        close(run(fn, mesh, gradient, placed), want)


def test_own_shard_map():
    close(jax.jit(gradient(with_ids(mesh_of(4), True, cls=Ulysses)))(q, k, v), expected())
