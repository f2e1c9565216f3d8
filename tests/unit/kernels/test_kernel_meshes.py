"""The kernels over the axes of a mesh that shard batch elements, rows and heads. They are those for TPUs:
who splits a call over a mesh knows nothing of its kernels.
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _kernels import check, drawn, how, kernels, normal, results, wide
from _stored_rows import arrays as rows_of, call, check as check_caches, kept_as, LENGTHS, seen
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from matrix import bound, oracle, oracle_dropout as od, oracle_masks as om

from eqattn import (
    ALiBi,
    AllGather,
    attention,
    AttentionMetadata,
    Blockwise,
    Carry,
    Causal,
    KeyPadding,
    MaskFn,
    masks as m,
    PartitionAxis,
    Ragged,
    Ring,
    Ulysses,
)
from eqattn.cache import Pages, Quantized


def mesh_of(sizes, names, kind=AxisType.Auto):
    """The axis `x` is explicit."""
    kinds = tuple(AxisType.Explicit if n == "x" else kind for n in names)
    return jax.make_mesh(sizes, names, kinds, devices=jax.devices()[: int(np.prod(sizes))])


def arguments():
    given, ct = drawn("tpu", 32, 32, batch=2)
    given |= dict(scale=jnp.float32(0.3), slopes=abs(normal(4, 4)), sinks=normal(5, 4))
    return given | dict(bias=normal(6, 2, 4, 32, 32)), ct


def attend(strategy, platform="interpret", mask: Any = Causal(), **fields: Any):
    """A function of `arguments`."""

    def call(q, k, v, scale, slopes, sinks, bias):
        more: Any = dict(softmax_scale=scale, softmax_aux=sinks, logits_soft_cap=5.0)
        more |= dict(blocksize_q=8, blocksize_k=8) | fields
        key = jax.random.key(1) if "dropout_prob" in fields else None
        given: Any = dict(mask=mask, score=ALiBi(slopes), bias=bias, key=key)
        run = how("tpu", platform, strategy, **more)
        return attention(q, k, v, run, **given).attention_outputs

    return call


MESHES = {
    "blocks": (Blockwise, (2, 2), ("dp", "tp"), AxisType.Auto),
    "explicit": (Blockwise, (2, 2), ("data", "model"), AxisType.Explicit),
    "mixed": (Blockwise, (2, 2, 2), ("dp", "x", "tp"), AxisType.Auto),
    "ring": (Ring, (2, 2, 2), ("dp", "sp", "tp"), AxisType.Auto),
}
DISTANCE = om.distance(32, 32)


@pytest.mark.parametrize("name", MESHES)
def test_numbers(name):
    """Of all arguments, and the gradients of all but for the ring; nothing is sent for them."""
    strategy, sizes, names, kind = MESHES[name]
    given, ct = arguments()
    batch, heads, tokens = names[0], names[-1], "sp" if "sp" in names else None
    specs = dict.fromkeys("qkv", P(batch, tokens, heads)) | dict(scale=P())
    specs |= dict(slopes=P(heads), sinks=P(heads), bias=P(batch, heads, tokens))
    with jax.set_mesh(mesh_of(sizes, names, kind)):
        mesh = jax.sharding.get_mesh()
        place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        placed = {n: place(x, specs[n]) for n, x in given.items()}
        ct = place(ct, specs["q"])
        run = ft.partial(results, attend(strategy), ct=None if name == "ring" else ct)
        text = jax.jit(lambda given: run(given)).lower(placed).compile().as_text()
        found = run(placed)
    ct = None if name == "ring" else jax.device_get(ct)
    check(jax.device_get(found), given, ct, cap=5.0, distance=DISTANCE, mask=om.causal(32, 32))
    assert "all-gather" not in text and "all-to-all" not in text


@pytest.mark.parametrize("strategy, names", [(Blockwise, ("dp", "tp")), (Ring, ("sp", "tp"))])
def test_indices_of_batch_and_head_are_those_of_the_whole(strategy, names):
    """Dropout, and a mask that differs by batch element and head, are as without a mesh."""
    mask = MaskFn(lambda b, h, q, k: (k <= q + b) & (q - k < 3 + 4 * h))
    given, _ = arguments()
    with jax.set_mesh(mesh_of((2, 2), names)):
        found = results(attend(strategy, mask=mask, dropout_prob=0.4), given)
    b, h, i, j = np.ogrid[:2, :4, :32, :32]
    keep = od.kept(jax.random.key(1), 2, 4, *om.grid(32, 32), 0.4)
    more: Any = dict(keep=keep, rate=od.dropped_share(0.4), distance=DISTANCE)
    check(found, given, cap=5.0, mask=(j <= i + b) & (i - j < 3 + 4 * h), **more)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_found(kind):
    args = list(arguments()[0].values())
    loss = lambda strategy, **kw: lambda *x: attend(strategy, "auto", **kw)(*x).sum()
    count = ft.partial(kernels, "tpu")
    with jax.set_mesh(mesh_of((2, 2), ("dp", "tp"), kind)):
        args = [jax.device_put(x, P()) for x in args]  # if the types say so, all is replicated
        assert count(loss(Blockwise), *args) == 1
        assert count(jax.grad(loss(Blockwise), (0, 1, 2)), *args) == 2
    with jax.set_mesh(mesh_of((2, 2, 2), ("dp", "sp", "tp"), kind)):
        args = [jax.device_put(x, P()) for x in arguments()[0].values()]
        assert count(loss(Ring), *args) >= 2
        # What might shard something else is left to the compiler, which cannot split kernels.
        assert count(loss(Blockwise), *args) == (kind == AxisType.Explicit)
    if kind == AxisType.Auto:
        args = list(arguments()[0].values())
        with jax.set_mesh(mesh_of((2, 2), ("data", "model"))):
            assert count(loss(Blockwise), *args) == 0  # nobody said what they shard
            axes = PartitionAxis(batch_axis="data", head_axis="model")
            assert count(loss(Blockwise, partition_axis=axes), *args) == 1
        with jax.set_mesh(mesh_of((4,), ("tp",))):
            assert count(loss(Blockwise), *args) == 0  # two key heads
        with jax.set_mesh(mesh_of((2, 2, 2), ("dp", "x", "tp"))):
            args = [jax.device_put(x, P()) for x in args]
            assert count(loss(Blockwise), *args) == 1


@pytest.mark.parametrize("strategy", [AllGather, Ulysses, Ring])
@pytest.mark.parametrize("t, s", [(17, 1), (1, 29), (1, 1)])
def test_a_single_token_over_several_devices(strategy, t, s):
    """Most devices have padding alone."""
    given, ct = drawn("tpu", t, s, 4, 4, 8, 8)
    fields: Any = dict(mesh=mesh_of((2,), ("sp",)), blocksize_q=4, blocksize_k=4)
    run = how("tpu", strategy=strategy, **fields)
    found = results(lambda q, k, v: attention(q, k, v, run, mask=Causal(3)).attention_outputs, given, ct)  # fmt: skip
    check(found, given, ct, mask=np.tri(t, s, 3, bool)[None, None])


MASKS = {
    "causal": m.Causal(),
    "window": m.Causal() & m.SlidingWindow(20, 0),
    "padding": m.KeyPadding(100),
    "prefix": m.PrefixLM(7),
    "function": m.MaskFn(lambda b, h, q, k: k <= q + 3),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_have_kernels_where_types_are_checked(name):
    """A constant that is made to vary is no look-up."""
    mesh, strategy = mesh_of((2,), ("dp",)), how("tpu", "pallas", runtime_dtype=None)

    @ft.partial(jax.shard_map, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    def call(q):
        return attention(q, q, q, strategy, mask=MASKS[name]).attention_outputs

    assert kernels("tpu", call, jnp.ones((4, 256, 2, 128), jnp.bfloat16)) == 1


def placed(mesh, q, k, v):
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


ROWS = [
    # t, key heads, devices that share rows, and heads; how the cache is kept
    (1, 8, (2, 4), None, 0, AxisType.Auto),
    (3, 4, (2, 4), jnp.int8, 0, AxisType.Explicit),
    (1, 4, (2, 2), None, 16, AxisType.Explicit),
    (1, 4, (1, 4), jnp.int8, 16, AxisType.Auto),
    (140, 4, (4, 2), None, 0, AxisType.Auto),
]


@pytest.mark.parametrize("t, kv_heads, sizes, stored, page, kind", ROWS)
def test_rows_of_caches(t, kv_heads, sizes, stored, page, kind):
    q, *kv = rows_of(t, 8, kv_heads, keys=160 if t > 48 else 48)
    (k, v), plain = zip(*[kept_as(x, stored, page, sizes[1]) for x in kv])
    blocks = {} if page else {"blocksize_k": 16 if t < 48 else 80}
    with jax.set_mesh(mesh_of(sizes, ("dp", "tp"), kind)):
        args = placed(jax.sharding.get_mesh(), q, k, v)
        run = jax.jit(lambda *x: call(*x, **blocks)).lower(*args).compile()
        got = run(*args)
    for collective in ("all-gather", "all-to-all", "all-reduce", "collective-permute"):
        assert collective not in run.as_text(), collective
    assert got.attention_outputs.sharding.spec[2] == "tp"
    found = dict(out=np.asarray(got.attention_outputs), lse=np.asarray(got.logsumexp))
    check_caches(found, q.dtype, [np.float64(q), *plain])


def test_what_differs_by_row_and_head_of_a_cache():
    """A mask, a score and sinks of each head, and the gradients, which run as XLA."""
    given = dict(zip("qkv", rows_of(3, 8, 4)))
    given |= dict(slopes=jnp.linspace(0.1, 0.4, 8), sinks=jnp.linspace(-1, 1, 8))
    own = MaskFn(lambda b, h, q, k: (q - k < 9 + 4 * h) & (k != b))

    def run(q, k, v, slopes, sinks):
        strategy = how("tpu", strategy=Ragged, blocksize_k=16, softmax_aux=sinks)
        more: Any = dict(mask=Causal() & own, score=ALiBi(slopes), q_offset=45)
        return attention(q, k, v, strategy, **more).attention_outputs

    ct = normal(9, 4, 3, 8, 8)
    with jax.set_mesh(mesh_of((2, 4), ("dp", "tp"))):
        kv = placed(jax.sharding.get_mesh(), *(given[n] for n in "qkv"))
        found = results(run, given | dict(zip("qkv", kv)), ct)
    b, h, i, j = np.ogrid[:4, :8, 45:48, :48]
    shown = (j <= i) & (i - j < 9 + 4 * h) & (j != b)
    problem = oracle.Problem(
        **wide(given), scale=1 / 4, mask=shown, distance=om.distance(3, 48, 45)
    )
    # A Carry is rounded before sinks are added.
    precision = bound.precision_of(np.float32, carried=True)
    want = bound.grads(problem, np.float64(ct), np.zeros((4, 3, 8)), precision)
    want |= bound.values(problem, precision)
    worst = {n: bound.excess(np.asarray(x), want[n]) for n, x in found.items()}
    assert max(worst.values()) <= 1, worst


def test_a_row_cut_over_devices():
    """Each has a part of the keys, of one row none that is seen; the Carries are merged."""
    q, k, v = rows_of(1)
    lengths, n = jnp.asarray(LENGTHS), 3
    strategy = how("tpu", strategy=Ragged, blocksize_k=8)

    def part(q, k, v):
        shown = KeyPadding(lengths - jax.lax.axis_index("keys") * k.shape[1])
        carry = attention(q, k, v, strategy, mask=shown, return_carry=True).carry
        parts = jax.lax.all_gather(carry, "keys")
        return ft.reduce(Carry.merge, [jax.tree.map(lambda x: x[i], parts) for i in range(n)])

    specs: Any = dict(in_specs=(P(), P(None, "keys"), P(None, "keys")), out_specs=P())
    mesh = mesh_of((n,), ("keys",))
    carry = jax.jit(jax.shard_map(part, mesh=mesh, check_vma=False, **specs))(q, k, v)
    found = dict(zip(("out", "lse"), carry.finalise()))
    check_caches(found, q.dtype, [np.float64(x) for x in (q, k, v)], seen(1, 48))


def test_kernels_of_caches_are_found():
    q, *kv = rows_of(1, 8, 4)
    k, v = (kept_as(x, jnp.int8, 16)[0] for x in kv)
    count = ft.partial(kernels, "tpu")

    def f(platform="auto", **kw):
        metadata = AttentionMetadata(platform=platform, backend="tpu", **kw)
        return lambda *x: attention(*x, Ragged(metadata)).attention_outputs

    with jax.set_mesh(mesh_of((2, 4), ("dp", "tp"))):
        assert count(f(), q, k, v) == 1
        odd = rows_of(1, 6, 3)  # three key heads over four devices
        with pytest.raises(ValueError, match="cannot split it.*partition_axis says and as divides"):
            count(f("pallas"), *odd)
        assert count(f(), *odd) == 0
    with jax.set_mesh(mesh_of((2, 4), ("data", "model"))):
        assert count(f(), q, k, v) == 0  # nobody said what they shard
        axes = PartitionAxis(batch_axis="data", head_axis="model")
        assert count(f(partition_axis=axes), q, k, v) == 1
