"""What the tests of the ring share."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from eqattn import attention, AttentionMetadata, Blockwise, masks as m
from eqattn.strategies.ring import Ring


B, H, K, D, V = 2, 4, 2, 4, 5


def mesh_of(n, kind=AxisType.Auto):
    return jax.make_mesh((n,), ("sp",), devices=jax.devices()[:n], axis_types=(kind,))


def grid_of(places, group, kind=AxisType.Auto):
    """A mesh for a ring of `places`, each of a `group` of devices that exchange heads."""
    devices = jax.devices()[: places * group]
    return jax.make_mesh((places, group), ("sp", "hp"), devices=devices, axis_types=(kind,) * 2)


T = 16
with jax.enable_x64(True):
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = ((H, D), (K, D), (K, V))
    q, k, v = (jax.random.normal(key, (B, T, *s), jnp.float64) for key, s in zip(keys, sizes))
SEGMENTS = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (B, T)), -1), jnp.int32)


def strategy(cls, **kwargs):
    own = {x: kwargs.pop(x) for x in ("axis_name", "head_axis", "layout") if x in kwargs}
    options = dict(runtime_dtype=jnp.float64, blocksize_q=4, blocksize_k=4)
    return cls(AttentionMetadata(**{**options, **kwargs}), **own)


def attend(q, k, v, ids=SEGMENTS, cls=Ring, **kwargs):
    mask = m.Causal() & m.Segments(ids)
    return attention(q, k, v, strategy(cls, **kwargs), mask=mask).attention_outputs


def loss(fn):
    return lambda *xs: jnp.sum(jnp.sin(fn(*xs)))


def gradient(fn):
    return jax.value_and_grad(loss(fn), (0, 1, 2))


def hvp(fn):
    return lambda *xs: jax.jvp(jax.grad(loss(fn), (0, 1, 2)), xs, tuple(map(jnp.cos, xs)))


def twice(fn):
    inner = jax.grad(loss(fn), (0, 1, 2))
    return jax.grad(lambda *xs: sum(jnp.sum(jnp.cos(g)) for g in inner(*xs)), (0, 1, 2))


def forward_mode(fn):
    return lambda *xs: jax.jvp(fn, xs, tuple(map(jnp.cos, xs)))


def mapped(fn):
    both = lambda *xs: jax.vmap(lambda *ys: gradient(fn)(*ys))(*[jnp.stack([x, x + 1]) for x in xs])
    return both


def scanned(fn):
    def run(*xs):
        step = lambda c, _: (c + fn(c[..., :D], *xs[1:])[..., :1], None)
        return jax.lax.scan(step, xs[0], None, length=2)[0]

    return gradient(run)


def checkpointed(fn):
    return gradient(jax.checkpoint(fn))


@ft.cache
def expected(transform=gradient):
    with jax.set_mesh(mesh_of(1)):
        want = jax.jit(transform(ft.partial(attend, cls=Blockwise)))(q, k, v)
    return jax.tree.map(np.asarray, want)


def close(xs, ys, tolerance=1e-13):
    for x, y in zip(jax.tree.leaves(xs), jax.tree.leaves(ys), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        scale = max(1.0, np.max(abs(y), initial=0, where=np.isfinite(y)))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale)


SP = P(None, "sp")


def by_hand(mesh, check, **kwargs):
    """In a `shard_map` of one's own: a function of queries, keys, values and segment ids."""
    names = P(None, mesh.axis_names)

    def local(q, k, v, ids):
        return attend(q, k, v, ids, axis_name="sp", **kwargs)

    return jax.shard_map(local, mesh=mesh, in_specs=(names,) * 4, out_specs=names, check_vma=check)


def raises(message, fn, *args):
    with pytest.raises(ValueError, match=message):
        fn(*args)
