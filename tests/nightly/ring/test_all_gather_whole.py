"""`AllGather` under further transforms, in kernels and on explicit axes."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from ring.common import (
    by_hand,
    checkpointed,
    close,
    expected,
    forward_mode,
    gradient,
    hvp,
    k,
    mapped,
    mesh_of,
    q,
    scanned,
    SEGMENTS,
    SP,
    strategy,
    twice,
    v,
)
from ring.test_all_gather import gathered

from eqattn import AllGather, attention, Blockwise, masks as m


def run(fn, mesh, transform, args=(q, k, v)):
    with jax.set_mesh(mesh):
        return jax.jit(transform(fn))(*args)


@pytest.mark.parametrize("transform", [hvp, twice, forward_mode, mapped, scanned, checkpointed])
def test_transform(transform):
    close(run(gathered, mesh_of(4), transform), expected(transform))


def test_kernels():
    """The TPU's, interpreted: what each device visits is what they know."""
    args, want = [x.astype(jnp.float32) for x in (q, k, v)], expected()
    fn = ft.partial(gathered, runtime_dtype=jnp.float32, platform="interpret", mesh=mesh_of(4))
    with jax.enable_x64(False):
        close(jax.jit(gradient(fn))(*args), want, 1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_mesh_of_the_metadata_and_explicit_axes(kind):
    mesh = mesh_of(4, kind)
    placed = [jax.device_put(x, NamedSharding(mesh, SP)) for x in (q, k, v)]
    close(jax.jit(gradient(ft.partial(gathered, mesh=mesh)))(q, k, v), expected())
    close(run(gathered, mesh, gradient, placed), expected())


def test_lengths_that_do_not_divide_and_windows():
    call = lambda mask, *xs, **kw: attention(*xs, strategy(**kw), mask=mask).attention_outputs
    short = [x[:, :13] for x in (q, k, v)]
    for mask in (m.SlidingWindow(3, 0), m.Causal()):
        fn = ft.partial(call, mask, cls=AllGather, mesh=mesh_of(4))
        close(jax.jit(fn)(*short), jax.jit(ft.partial(call, mask, cls=Blockwise))(*short))


@pytest.mark.parametrize("check, transform", [(True, mapped), (False, hvp)])
def test_own_shard_map(check, transform):
    fn = by_hand(mesh_of(4), check, cls=AllGather)
    found = jax.jit(transform(lambda *xs: fn(*xs, SEGMENTS)))(q, k, v)
    close(found, expected(transform))
