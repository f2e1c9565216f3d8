"""Ulysses, and rings whose places exchange tokens for heads: where they can be called, what they
send, and their errors.
"""

import collections
import functools as ft
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from matrix.oracle import exact

from eqattn import ALiBi, attention, Blockwise, dropout_mask, masks as m, Ring, Ulysses, Zigzag
from eqattn._ring.plan import ring_plan

from .common import (
    attend,
    B,
    close,
    D,
    expected,
    gradient,
    grid_of,
    H,
    k,
    mesh_of,
    q,
    raises,
    SEGMENTS,
    strategy,
    T,
    v,
)


ulysses = ft.partial(attend, cls=Ulysses)
hybrid = ft.partial(attend, head_axis="hp")


@pytest.mark.parametrize("places", [2])
def test_numbers_of_heads_in_own_shard_map(places):
    """Each device has all slopes and sinks, and reads those of the heads that it folds."""
    mesh = mesh_of(4) if places == 1 else grid_of(places, 2)
    own = dict(cls=Ulysses) if places == 1 else dict(cls=Ring, head_axis="hp")
    rng, names = np.random.default_rng(0), P(None, mesh.axis_names)
    slopes, sinks = jnp.asarray(rng.uniform(size=H)), jnp.asarray(rng.normal(size=H))

    def local(q, k, v, slopes, sinks, cls, **kwargs):
        s = strategy(cls, softmax_aux=sinks, **kwargs)
        return attention(q, k, v, s, mask=m.Causal(), score=ALiBi(slopes)).attention_outputs

    fn = ft.partial(local, axis_name="sp", **own)
    specs = dict(in_specs=(names, names, names, P(), P()), out_specs=names)
    got = jax.jit(jax.shard_map(fn, mesh=mesh, **specs))(q, k, v, slopes, sinks)
    at = np.arange(T)
    bias = -np.asarray(slopes)[:, None, None] * abs(at[:, None] - at)
    want = exact(q, k, v, lambda z: z / np.sqrt(D) + bias, at <= at[:, None], sinks)[0]
    close(got, want)


@pytest.mark.parametrize("heads, group", [(4, 2)])
def test_dropout_in_own_shard_map(heads, group):
    """The very bits of the whole arrays, where batch, heads and tokens are sharded.

    Two devices exchange as many key/value heads, or twice as many, which a group of queries reads.
    """
    mesh = jax.make_mesh((2, 2, 2), ("dp", "sp", "hp"), axis_types=(AxisType.Auto,) * 3)
    key, spec = jax.random.key(3), P("dp", ("sp", "hp"))

    def local(q, k, v):
        s = strategy(Ring, dropout_prob=0.5, axis_name="sp", head_axis="hp", layout=Zigzag())
        return attention(q, k, v, s, key=key).attention_outputs

    fn = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=True)
    # All logits are equal, and a value says which key it is: what is kept can be read off.
    zeros, layout = jnp.zeros((B, T, heads * group, D)), Zigzag()
    which = jnp.broadcast_to(jnp.eye(T)[None, :, None], (B, T, heads, T))
    out = jax.jit(fn)(zeros, zeros[:, :, :heads], layout.permute(which, 2))
    kept = layout.unpermute(out, 2).transpose(0, 2, 1, 3) > 0
    want = dropout_mask(key, (B,), heads * group, T, T, 0.5)
    assert (np.asarray(kept) == np.asarray(want)).all()


def test_eager_and_one_device():
    want = expected(lambda fn: fn)
    close(ulysses(q, k, v, mesh=mesh_of(2)), want)
    close(ulysses(q, k, v), want, 0)
    close(ulysses(q, k, v, mesh=mesh_of(1)), want, 0)
    close(hybrid(q, k, v, mesh=grid_of(1, 1)), want, 0)


def collectives(compiled):
    text = compiled.as_text()
    found = re.findall(r" (all-[a-z]+(?:-all)?|[a-z]+-permute|[a-z]+-scatter)(?:-start)?\(", text)
    return collections.Counter(found)


def compiled(fn, mesh, spec, transform=lambda fn: fn):
    args = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k, v)]
    with jax.set_mesh(mesh):
        return jax.jit(transform(fn)).lower(*args).compile(), args


def plain(q, k, v, cls=Ulysses, **kwargs):
    return attention(q, k, v, strategy(cls, **kwargs), mask=m.Causal()).attention_outputs


def test_what_is_sent():
    """All-to-alls of queries, keys, values and which of these are not finite; of numerators and
    denominators; and of the cotangents of all but the flags. Nothing is gathered.
    """
    program, _ = compiled(plain, mesh_of(4), P(None, "sp"))
    assert collectives(program) == {"all-to-all": 6}
    program, _ = compiled(plain, mesh_of(4), P(None, "sp"), gradient)
    assert collectives(program) == {"all-to-all": 11, "all-reduce": 1}  # of the loss


def test_what_a_hybrid_sends_beside_other_axes():
    """Batch and heads stay sharded over their axes."""
    kinds = (AxisType.Auto,) * 4
    mesh = jax.make_mesh((1, 2, 2, 2), ("dp", "tp", "sp", "hp"), axis_types=kinds)
    fn = ft.partial(plain, cls=Ring, head_axis="hp")
    program, args = compiled(fn, mesh, P("dp", ("sp", "hp"), "tp"))
    # A ring of two makes one hop: keys, values, their flags and positions.
    assert collectives(program) == {"all-to-all": 6, "collective-permute": 4}
    assert program.output_shardings.spec[:3] == ("dp", ("sp", "hp"), "tp")
    with jax.set_mesh(mesh_of(1)):
        close(program(*args), jax.jit(ft.partial(plain, cls=Blockwise))(q, k, v))


def test_plan_of_a_hybrid():
    sizes = dict(mask=m.Causal(), heads=32, kv_heads=8, head_dim=128)
    ring, both, one = (ring_plan(8192, n, group=g, **sizes) for n, g in ((8, 1), (2, 4), (1, 8)))
    token = 2 * 8 * 128 * 2  # bytes of keys and values of one token
    assert (ring.forward_bytes, both.forward_bytes) == (7 * 1024 * token, 1024 * token)
    assert one.forward_bytes == one.backward_bytes == ring.exchange_bytes == 0
    for plan, g in ((both, 4), (one, 8)):
        there, back = 32 * 128 * 2 + token, 32 * (128 + 1) * 4
        assert plan.exchange_bytes == 1024 * (there + back) * (g - 1) // g
        assert f"{plan.exchange_bytes:,}" in repr(plan)
    assert "exchange" not in repr(ring)
    assert np.sum(both.flops) * 4 == np.sum(one.flops) * 8


def test_lengths_that_do_not_divide():
    """Padded, and no hop of a window is left out."""
    mask = m.SlidingWindow(3, 0)

    def call(q, k, v, **kwargs):
        return attention(q, k, v, strategy(**kwargs), mask=mask).attention_outputs

    short = [x[:, :13] for x in (q, k, v)]
    hybrid = ft.partial(call, cls=Ring, head_axis="hp", mesh=grid_of(2, 2))
    close(jax.jit(hybrid)(*short), jax.jit(ft.partial(call, cls=Blockwise))(*short))


# Errors, each with its remedy.


def test_heads_that_do_not_divide_raise():
    six = jnp.concatenate([q, q[:, :, :2]], 2)
    fn = ft.partial(plain, mesh=mesh_of(4))
    raises("6 heads .* 4 devices of axis 'sp'.*Ring", fn, six, k, v)


def test_missing_axes_raise():
    raises("no 'hp'", ft.partial(hybrid, mesh=mesh_of(2)), q, k, v)
    raises("there is no mesh", hybrid, q, k, v)
    raises("there is no mesh", ft.partial(ulysses, axis_name="sp"), q, k, v)
    raises("both 'sp'", ft.partial(attend, head_axis="sp", mesh=mesh_of(2)), q, k, v)


def test_one_manual_axis_of_two_raises():
    fn = jax.shard_map(
        lambda q, k, v: hybrid(q, k, v, SEGMENTS[:, :8], axis_name="sp"),
        mesh=grid_of(2, 2), in_specs=P(None, "sp"), out_specs=P(None, "sp"), axis_names={"sp"},
    )  # fmt: skip
    raises("manual over both", jax.jit(fn), q, k, v)


def test_one_query_for_each_device_raises():
    local = lambda q, k, v: plain(q, k, v, axis_name="sp")
    fn = jax.shard_map(local, mesh=mesh_of(4), in_specs=P(None, "sp"), out_specs=P(None, "sp"))
    raises("query .* has one token on each of 4", jax.jit(fn), q[:, :4], k, v)


def test_lengths_that_zigzag_cannot_hold_raise():
    fn = ft.partial(plain, cls=Ring, head_axis="hp", layout=Zigzag(), mesh=grid_of(2, 4))
    raises("pad them to a multiple of 8", fn, *[x[:, :12] for x in (q, k, v)])


def test_a_mask_of_heads_in_a_checked_shard_map():
    """What classifies its blocks closes over arrays: the indices of heads, and numbers."""
    mask = m.MaskFn(lambda b, h, q, k: (k + h) % 7 <= q)

    def local(q, k, v, cls=Ring):
        return attention(q, k, v, strategy(cls), mask=mask).attention_outputs

    fn = jax.shard_map(local, mesh=mesh_of(2), in_specs=P(None, "sp"), out_specs=P(None, "sp"))
    close(jax.jit(fn)(q, k, v), jax.jit(ft.partial(local, cls=Blockwise))(q, k, v))
