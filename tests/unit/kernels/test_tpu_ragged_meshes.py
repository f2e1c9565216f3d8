"""The kernels of `Ragged` over the axes of a mesh that shard rows and heads."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tpu_compile import compile_all
from _tpu_lowered import kernels
from _tpu_rows import arrays, call, close, dense, kept_as, LENGTHS, seen
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from matrix import oracle, oracle_masks as om

from eqattn import (
    ALiBi,
    attention,
    AttentionMetadata,
    Carry,
    Causal,
    KeyPadding,
    MaskFn,
    PartitionAxis,
    Ragged,
)
from eqattn._problem.storage import Pages, Quantized


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def mesh_of(dp, tp, names=("dp", "tp"), kind=AUTO):
    return jax.make_mesh((dp, tp), names, (kind,) * 2, devices=jax.devices()[: dp * tp])


def keep_in_hbm(mesh, q, k, v):
    """Rows over the first axis, heads over the second; of pages, heads alone."""
    rows, heads = mesh.axis_names
    put = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))

    def cache(x, rows=rows):
        if isinstance(x, Pages):
            return Pages(cache(x.content, None), put(x._table, rows))
        if isinstance(x, Quantized):
            scales = put(x.scales, rows, heads)
            return Quantized(put(x.values, rows, None, heads), scales, x.dtype)
        return put(x, rows, None, heads)

    return put(q, rows, None, heads), cache(k), cache(v)


CASES = [
    # t, key heads, devices that share rows, and heads; how the cache is kept
    (1, 8, 2, 4, None, False, AUTO),
    (3, 4, 2, 4, jnp.int8, False, EXPLICIT),
    (1, 4, 2, 2, None, True, EXPLICIT),
    (1, 4, 1, 4, jnp.int8, True, AUTO),
    (140, 4, 4, 2, None, False, AUTO),
]


@pytest.mark.parametrize("t, kv_heads, dp, tp, stored, in_pages, kind", CASES)
def test_numbers(t, kv_heads, dp, tp, stored, in_pages, kind):
    q, *kv = arrays(t, 8, kv_heads, keys=160 if t > 48 else 48)
    (k, v), plain = zip(*[kept_as(x, stored, in_pages, tp) for x in kv])
    sizes = {} if in_pages else {"blocksize_k": 16 if t < 48 else 80}
    with jax.set_mesh(mesh_of(dp, tp, kind=kind)):
        mesh = jax.sharding.get_mesh()
        args = keep_in_hbm(mesh, q, k, v)
        run = jax.jit(lambda *x: call(*x, **sizes)).lower(*args).compile()
        got = run(*args)
    close(got, dense(q, *plain, seen(t, kv[0].shape[1])))
    for collective in ("all-gather", "all-to-all", "all-reduce", "collective-permute"):
        assert collective not in run.as_text(), collective
    assert got.attention_outputs.sharding.spec[2] == "tp"


def test_what_differs_by_row_and_head():
    """A mask, a score and sinks of each head, and the gradients, which run as XLA."""
    exact = [np.float64(x) for x in arrays(3, 8, 4)]
    t, s, scale = 3, 48, 16**-0.5
    exact += [np.linspace(0.1, 0.4, 8), np.linspace(-1, 1, 8)]
    own = MaskFn(lambda b, h, q, k: (q - k < 9 + 4 * h) & (k != b))

    def f(q, k, v, slopes, sinks):
        metadata = AttentionMetadata(platform="interpret", blocksize_k=16, softmax_aux=sinks)
        mask, score = Causal() & own, ALiBi(slopes)
        output = attention(q, k, v, Ragged(metadata), mask=mask, score=score, q_offset=s - t)
        return output.attention_outputs

    q, k, v, *others = (jnp.asarray(x, jnp.float32) for x in exact)
    with jax.set_mesh(mesh_of(2, 4)):
        out, transpose = jax.vjp(
            jax.jit(f), *keep_in_hbm(jax.sharding.get_mesh(), q, k, v), *others
        )
        grads = jax.jit(transpose)(jnp.cos(out))
    b, h, i, j = np.ogrid[: len(q), :8, s - t : s, :s]
    shown = (j <= i) & (i - j < 9 + 4 * h) & (j != b)
    q, k, v, slopes, sinks = exact
    distance = om.distance(t, s, s - t)
    problem = oracle.Problem(q, k, v, scale, shown, slopes=slopes, sinks=sinks, distance=distance)
    want = oracle.forward(problem)
    np.testing.assert_allclose(out, want.out, rtol=0, atol=2e-6)
    of = oracle.vjp(problem, np.cos(want.out), np.zeros_like(want.lse))
    for got, name in zip(grads, ("q", "k", "v", "slopes", "sinks"), strict=True):
        np.testing.assert_allclose(got, of[name], rtol=1e-5, atol=1e-5)


def test_a_row_cut_over_devices():
    """Each has a part of the keys, of one row none that is seen; the Carries are merged."""
    q, k, v = arrays(1)
    lengths, n = jnp.asarray(LENGTHS), 3
    strategy = Ragged(AttentionMetadata(platform="interpret", blocksize_k=8))

    def part(q, k, v):
        shown = KeyPadding(lengths - jax.lax.axis_index("keys") * k.shape[1])
        carry = attention(q, k, v, strategy, mask=shown, return_carry=True).carry
        parts = jax.lax.all_gather(carry, "keys")
        return ft.reduce(Carry.merge, [jax.tree.map(lambda x: x[i], parts) for i in range(n)])

    mesh = jax.make_mesh((n,), ("keys",), (AUTO,), devices=jax.devices()[:n])
    specs = P(), P(None, "keys"), P(None, "keys")
    whole = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    carry = jax.jit(whole)(q, k, v)
    for got, want in zip(carry.finalise(), dense(q, k, v, seen(1, 48)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_found():
    q, *kv = arrays(1, 8, 4)
    k, v = (kept_as(x, jnp.int8, True)[0] for x in kv)

    def f(platform="auto", **kw):
        metadata = AttentionMetadata(platform=platform, backend="tpu", **kw)
        return lambda *x: attention(*x, Ragged(metadata)).attention_outputs

    with jax.set_mesh(mesh_of(2, 4)):
        assert kernels(f(), q, k, v) == 1
        with pytest.raises(ValueError, match="cannot split it.*partition_axis says and as divides"):
            kernels(f("pallas"), *arrays(1, 6, 3))  # three key heads over four devices
        assert kernels(f(), *arrays(1, 6, 3)) == 0
    with jax.set_mesh(mesh_of(2, 4, ("data", "model"))):
        assert kernels(f(), q, k, v) == 0  # nobody said what they shard
        axes = PartitionAxis(batch_axis="data", head_axis="model")
        assert kernels(f(partition_axis=axes), q, k, v) == 1


def test_compiled_for_a_mesh():
    """Of caches of 65,536 tokens nothing is copied, and nothing is sent."""
    cases = ("decode, mesh", "pages, mesh", "int8 pages, mesh")
    for case, got in compile_all("v5e", cases).items():
        assert (got.get("kernels"), got.get("collectives")) == (1, 0), got
        assert got["temporary"] <= 2**20, got
