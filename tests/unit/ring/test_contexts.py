"""Where and how a ring can be called, against Blockwise; and its errors."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqattn import attention, Blockwise, masks as m
from eqattn._ring.layout import Zigzag
from eqattn.strategies.ring import Ring

from .common import (
    attend,
    close,
    expected,
    gradient,
    H,
    k,
    loss,
    mapped,
    mesh_of,
    q,
    raises,
    SEGMENTS,
    SP,
    strategy,
    T,
    v,
)


@pytest.mark.parametrize("transform, n", [(mapped, 2)])
def test_transform(transform, n):
    with jax.set_mesh(mesh_of(n)):
        close(jax.jit(transform(attend))(q, k, v), expected(transform))


def test_explicit_mesh():
    mesh = mesh_of(2, AxisType.Explicit)
    placed = [jax.device_put(x, NamedSharding(mesh, P(None, "sp"))) for x in (q, k, v)]
    with jax.set_mesh(mesh):
        close(jax.jit(gradient(attend))(*placed), expected())
        out = attend(*placed)
        assert jax.typeof(out).sharding.spec == P(None, "sp", None, None), jax.typeof(out)
        close(jax.jit(attend)(q, k, v), expected(lambda fn: fn))


FOUR = P("dp", "sp", "tp")


def four_axes(kind):
    return jax.make_mesh((1, 2, 2, 2), ("fsdp", "dp", "tp", "sp"), axis_types=(kind,) * 4)


def test_one_manual_axis_of_four():
    mesh = four_axes(AxisType.Auto)
    placed = [jax.device_put(x, NamedSharding(mesh, FOUR)) for x in (q, k, v)]
    with jax.set_mesh(mesh):
        compiled = jax.jit(gradient(attend)).lower(*placed).compile()
    text = compiled.as_text()
    for collective in ("all-gather", "all-to-all"):
        assert collective not in text, collective
    value, grads = compiled(*placed)
    close((value, grads), expected())
    assert all(g.sharding.spec[:3] == FOUR[:3] for g in grads), grads[0].sharding


def test_own_shard_map_with_parameters():
    """A replicated scale, and a bias sharded by rows: their gradients too."""
    bias = jax.random.normal(jax.random.key(5), (1, H, T, T))

    def ring(q, k, v, bias, scale):
        s = strategy(Ring, softmax_scale=scale, axis_name="sp")
        return attention(q, k, v, s, mask=m.Causal(), bias=bias).attention_outputs

    def one(q, k, v, bias, scale):
        s = strategy(Blockwise, softmax_scale=scale)
        return attention(q, k, v, s, mask=m.Causal(), bias=bias).attention_outputs

    args = (q, k, v, bias, jnp.float64(0.3))
    want = jax.jit(jax.grad(loss(one), range(5)))(*args)
    for check in (True, False):
        fn = jax.shard_map(
            ring, mesh=mesh_of(2), in_specs=(SP, SP, SP, P(None, None, "sp"), P()),
            out_specs=SP, check_vma=check,
        )  # fmt: skip
        close(jax.jit(jax.grad(loss(fn), range(5)))(*args), want)


def test_inside_a_shard_map_over_another_axis():
    mesh = jax.make_mesh((2, 4), ("dp", "sp"), axis_types=(AxisType.Auto,) * 2)
    for check in (False,):
        fn = jax.shard_map(
            attend, mesh=mesh, in_specs=(P("dp"),) * 4, out_specs=P("dp"), axis_names={"dp"},
            check_vma=check,
        )  # fmt: skip
        close(jax.jit(gradient(lambda *xs: fn(*xs, SEGMENTS)))(q, k, v), expected())


def test_one_device():
    close(attend(q, k, v), expected(lambda fn: fn), 0)
    close(attend(q, k, v, mesh=mesh_of(1)), expected(lambda fn: fn), 0)


def test_lengths_that_do_not_divide():
    short = [x[:, :13] for x in (q, k, v)]
    want = jax.jit(gradient(ft.partial(attend, ids=SEGMENTS[:, :13], cls=Blockwise)))(*short)
    with jax.set_mesh(mesh_of(4)):
        close(jax.jit(gradient(ft.partial(attend, ids=SEGMENTS[:, :13])))(*short), want)


def test_few_keys():
    """Fewer keys than devices, or none: the others have nothing to give."""
    for s in (0, 3):
        run = lambda cls: attention(q, k[:, :s], v[:, :s], strategy(cls)).attention_outputs
        want = run(Blockwise)
        with jax.set_mesh(mesh_of(4)):
            close(run(Ring), np.asarray(want))


def test_one_key_for_each_device_raises():
    local = lambda q, k, v: attend(q, k, v, SEGMENTS[:, :1], axis_name="sp")
    fn = jax.shard_map(local, mesh=mesh_of(4), in_specs=SP, out_specs=SP)
    raises("needs two or more", jax.jit(fn), *[x[:, :4] for x in (q, k, v)])


def test_cross_attention_with_positions():
    def run(q, k, v, cls):
        out = attention(
            q, k[:, :12], v[:, :12], strategy(cls), mask=m.Causal() & m.SlidingWindow(5, 1),
            q_offset=jnp.array([3, -2]), return_carry=True, return_logsumexp=True,
        )  # fmt: skip
        return out.attention_outputs, out.logsumexp, out.carry

    with jax.set_mesh(mesh_of(4)):
        close(jax.jit(ft.partial(run, cls=Ring))(q, k, v), run(q, k, v, Blockwise))


# Errors, each with its remedy.


def test_a_missing_axis_raises():
    other = jax.make_mesh((2,), ("dp",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    raises("no 'sp'", ft.partial(attend, mesh=other), q, k, v)
    raises("no 'ring'", ft.partial(attend, mesh=mesh_of(2), axis_name="ring"), q, k, v)
    raises("there is no mesh", ft.partial(attend, axis_name="ring"), q, k, v)
    with jax.set_mesh(other):
        raises("no 'sp'", attend, q, k, v)


def test_lengths_that_zigzag_cannot_hold_raise():
    short = [x[:, :14] for x in (q, k, v)]
    fn = ft.partial(attend, ids=SEGMENTS[:, :14], mesh=mesh_of(4), layout=Zigzag())
    raises("pad them to a multiple of 8", fn, *short)


def test_ids_that_are_not_sharded_like_tokens_raise():
    local = lambda q, k, v: attend(q, k, v, axis_name="sp")
    fn = jax.shard_map(local, mesh=mesh_of(4), in_specs=SP, out_specs=SP)
    raises("does not broadcast", jax.jit(fn), q, k, v)
