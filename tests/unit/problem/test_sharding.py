"""Sharded arrays and `shard_map`, on eight virtual devices."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqattn import attention, AttentionMetadata, Blockwise, Causal, KeyPadding, Ring, Segments, Tree


B, T, H, K, D = 4, 150, 8, 4, 16
HEADS = P("dp", None, "tp", None)
keys = jax.random.split(jax.random.key(0), 3)
q, k, v = (jax.random.normal(key, (B, T, h, D)) for key, h in zip(keys, (H, K, K), strict=True))
lengths = jnp.array([5, 30, 100, 150])


def mesh(kind):
    return jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(kind,) * 2)


def placed(kind):
    return [jax.device_put(x, NamedSharding(mesh(kind), HEADS)) for x in (q, k, v)]


def attend(q, k, v, mask=Causal(), scale=0.3, **kwargs):
    metadata = AttentionMetadata(softmax_scale=scale, blocksize_q=64, blocksize_k=64)
    return attention(q, k, v, Blockwise(metadata), mask=mask, **kwargs)


def output(*args, **kwargs):
    return attend(*args, **kwargs).attention_outputs


def gradient(fn):
    return jax.grad(lambda *a: jnp.sum(jnp.sin(fn(*a))), (0, 1, 2))


@ft.cache
def expected():
    return jax.jit(gradient(output))(q, k, v)


def close(xs, ys):
    for x, y in zip(jax.tree.leaves(xs), jax.tree.leaves(ys), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=3e-6 * float(jnp.max(abs(y))))


def without_gathering(fn, args):
    compiled = jax.jit(fn).lower(*args).compile()
    text = compiled.as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text, collective
    result = compiled(*args)
    for x in jax.tree.leaves(result):
        assert x.sharding.spec[:3] == HEADS[:3], x.sharding
    return result


def test_automatic_mesh():
    close(without_gathering(gradient(output), placed(AxisType.Auto)), expected())


def test_automatic_mesh_with_lengths():
    fn = gradient(ft.partial(output, mask=Causal() & KeyPadding(lengths)))
    close(without_gathering(fn, placed(AxisType.Auto)), jax.jit(fn)(q, k, v))


def test_explicit_mesh():
    with jax.set_mesh(mesh(AxisType.Explicit)):
        close(without_gathering(gradient(output), placed(AxisType.Explicit)), expected())


def test_explicit_mesh_eager():
    with jax.set_mesh(mesh(AxisType.Explicit)):
        close(gradient(output)(*placed(AxisType.Explicit)), expected())


def test_explicit_mesh_vmap():
    one = lambda *xs: output(*[x[None] for x in xs])[0]
    with jax.set_mesh(mesh(AxisType.Explicit)):
        got = without_gathering(jax.vmap(one), placed(AxisType.Explicit))
    close(got, output(q, k, v))


def test_explicit_mesh_all_outputs():
    fn = ft.partial(attend, return_logsumexp=True, return_carry=True)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        got = without_gathering(fn, placed(AxisType.Explicit))
    close(got, fn(q, k, v))


@pytest.mark.parametrize("explicit", ["dp", "tp"])
def test_a_ring_beside_an_axis_of_another_kind(explicit):
    """Of arrays without a mesh, outside of `jax.jit`."""
    kinds = [AxisType.Explicit if a == explicit else AxisType.Auto for a in ("dp", "tp")]
    xs = [x[:, :16] for x in (q, k, v)]
    with jax.set_mesh(jax.make_mesh((4, 2), ("dp", "tp"), axis_types=tuple(kinds))):
        close(
            attention(*xs, Ring(axis_name="tp")).attention_outputs,
            output(*xs, mask=None, scale=None),
        )


ALONE = {  # what is placed, of a call whose query was made before `jax.set_mesh`
    "keys": lambda place: dict(keys=[place(x, HEADS) for x in few[1:]]),
    "bias": lambda place: dict(bias=place(bias, P(None, "tp"))),
    "ids": lambda place: dict(mask=Causal() & Segments(place(ids, P("dp")))),
    "sinks": lambda place: dict(sinks=place(sinks, P("tp"))),
    "tree": lambda place: dict(parents=place(parents, P("dp"))),
}
few = [x[:, :16] for x in (q, k, v)]
bias, sinks = jax.random.normal(keys[0], (1, H, 16, 16)), jnp.linspace(-1.0, 1.0, H)
parents = jnp.asarray([[i // (b + 1) - 1 for i in range(16)] for b in range(B)], jnp.int32)
ids = jnp.arange(16, dtype=jnp.int32)[None] // jnp.array([[3], [5], [8], [16]], jnp.int32)


@pytest.mark.parametrize("name, ring", [("keys", True), ("tree", False)])
def test_query_of_no_mesh(name, ring):
    """Some of a call has explicit axes in its type, and the query has no mesh."""

    def call(q, given):
        metadata = AttentionMetadata(softmax_aux=given.get("sinks"), sequence_axis_name="dp")
        strategy = Ring(metadata) if ring else Blockwise(metadata)
        more = {n: given[n] for n in ("bias", "mask") if n in given}
        if "parents" in given:  # where they are traced
            more["mask"] = Tree(given["parents"])
        return attention(q, *given.get("keys", few[1:]), strategy, **more).attention_outputs

    loss = lambda q, given: jnp.sin(call(q, given)).sum()
    gradient = jax.jit(jax.grad(loss))
    want = ALONE[name](lambda x, spec: x)
    want = call(few[0], want), gradient(few[0], want)
    on = mesh(AxisType.Explicit)
    with jax.set_mesh(on):
        given = ALONE[name](lambda x, spec: jax.device_put(x, NamedSharding(on, spec)))
        close((call(few[0], given), gradient(few[0], given)), want)


def in_shard_map(check_vma, **kwargs):
    fn = jax.shard_map(
        output, mesh=mesh(AxisType.Auto), in_specs=HEADS, out_specs=HEADS, check_vma=check_vma
    )
    close(jax.jit(gradient(fn))(q, k, v), expected())


def test_shard_map_checked():
    in_shard_map(True)


def test_shard_map_unchecked():
    in_shard_map(False)


def test_shard_map_partly_manual():
    fn = jax.shard_map(
        output, mesh=mesh(AxisType.Auto), in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"}
    )
    close(jax.jit(gradient(fn))(q, k, v), expected())
