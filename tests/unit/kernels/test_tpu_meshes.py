"""The kernels for TPUs over the axes of a mesh that shard batch and heads."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tpu_lowered import kernels
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from matrix import bound, oracle, oracle_masks as om

from eqattn import (
    ALiBi,
    AllGather,
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    MaskFn,
    PartitionAxis,
    Ring,
    Ulysses,
)


def mesh_of(sizes, names, kind=AxisType.Auto):
    """The axis `x` is explicit."""
    count = int(np.prod(sizes))
    kinds = tuple(AxisType.Explicit if n == "x" else kind for n in names)
    return jax.make_mesh(sizes, names, kinds, devices=jax.devices()[:count])


NAMES = "q", "k", "v", "scale", "slopes", "sinks", "bias"


def arrays():
    keys = jax.random.split(jax.random.key(0), 7)
    shapes = (2, 32, 4, 16), (2, 32, 2, 16), (2, 32, 2, 8), (2, 4, 32, 32), (4,), (4,)
    q, k, v, bias, slopes, sinks = (jax.random.normal(x, s) for x, s in zip(keys, shapes))
    return q, k, v, jnp.float32(0.3), abs(slopes), sinks, bias


def attend(strategy, platform, q, k, v, scale, slopes, sinks, bias, mask=Causal(), **kw):
    metadata = AttentionMetadata(
        platform=platform,
        backend="tpu",
        softmax_scale=scale,
        softmax_aux=sinks,
        logits_soft_cap=5.0,
        blocksize_q=8,
        blocksize_k=8,
        **kw,
    )
    key = jax.random.key(1) if "dropout_prob" in kw else None
    score = ALiBi(slopes)
    return attention(q, k, v, strategy(metadata), mask=mask, score=score, bias=bias, key=key)


WEIGHT = np.cos(np.arange(8, dtype=np.float32))


def both(f, *args):
    """The output with the gradient of every argument."""

    def loss(*xs):
        out = f(*xs).attention_outputs
        return (out @ jnp.asarray(WEIGHT)).sum(), out

    (_, out), grads = jax.value_and_grad(loss, tuple(range(len(args))), has_aux=True)(*args)
    return out, *grads


def judge(found, args):
    """Within the bound of the oracle."""
    exact = dict(zip(NAMES, (np.asarray(x, np.float64) for x in args)))
    pairs = dict(mask=om.causal(32, 32), distance=om.distance(32, 32))
    problem = oracle.Problem(**exact, **pairs, cap=np.float64(5))
    precision = bound.precision_of(np.float32, normalised=True)
    cts = np.broadcast_to(np.float64(WEIGHT), (2, 32, 4, 8)), np.zeros((2, 32, 4))
    want = bound.values(problem, precision) | bound.grads(problem, *cts, precision)
    worst = {n: bound.excess(x, want[n]) for n, x in zip(("out", *NAMES), found, strict=True)}
    assert max(worst.values()) <= 1, worst


MESHES = {
    "blocks": (Blockwise, (2, 2), ("dp", "tp"), AxisType.Auto),
    "explicit": (Blockwise, (2, 2), ("data", "model"), AxisType.Explicit),
    "ring": (Ring, (2, 2, 2), ("dp", "sp", "tp"), AxisType.Auto),
    "mixed": (Blockwise, (2, 2, 2), ("dp", "x", "tp"), AxisType.Auto),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow) if x == "ring" else x for x in MESHES],
)
def test_numbers(name):
    strategy, sizes, names, kind = MESHES[name]
    args = arrays()
    batch, heads, tokens = names[0], names[-1], "sp" if "sp" in names else None
    rows = P(batch, tokens, heads)
    specs = [rows, rows, rows, P(), P(heads), P(heads), P(batch, heads, tokens)]

    run = jax.jit(ft.partial(both, ft.partial(attend, strategy, "interpret")))
    with jax.set_mesh(mesh_of(sizes, names, kind)) as mesh:
        mesh = jax.sharding.get_mesh() if mesh is None else mesh
        keep_in_hbm = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, specs)]
        got = run(*keep_in_hbm)
        text = run.lower(*keep_in_hbm).compile().as_text()
    judge(got, args)
    assert "all-gather" not in text and "all-to-all" not in text


@pytest.mark.parametrize("strategy, names", [(Blockwise, ("dp", "tp")), (Ring, ("sp", "tp"))])
def test_indices_of_batch_and_head_are_those_of_the_whole(strategy, names):
    """Dropout, and a mask that differs by batch element and head, are as without a mesh."""
    mask = MaskFn(lambda b, h, q, k: (k <= q + b) & (q - k < 3 + 4 * h))
    args = arrays()
    f = ft.partial(attend, dropout_prob=0.4, mask=mask)
    want = f(Blockwise, "xla", *args).attention_outputs
    with jax.set_mesh(mesh_of((2, 2), names)):
        got = jax.jit(lambda *x: f(strategy, "interpret", *x).attention_outputs)(*args)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_found(kind):
    args = arrays()
    f = lambda strategy, **kw: ft.partial(
        lambda *x: attend(strategy, "auto", *x, **kw).attention_outputs.sum()
    )
    with jax.set_mesh(mesh_of((2, 2), ("dp", "tp"), kind)):
        args = [jax.device_put(x, P()) for x in args]  # if the types say so, all is replicated
        assert kernels(f(Blockwise), *args) == 1
        assert kernels(jax.grad(f(Blockwise), (0, 1, 2)), *args) == 2
    with jax.set_mesh(mesh_of((2, 2, 2), ("dp", "sp", "tp"), kind)):
        args = [jax.device_put(x, P()) for x in arrays()]
        assert kernels(f(Ring), *args) >= 2
        # What might shard something else is left to the compiler, which cannot split kernels.
        assert kernels(f(Blockwise), *args) == (kind == AxisType.Explicit)
    if kind == AxisType.Auto:
        args = arrays()
        with jax.set_mesh(mesh_of((2, 2), ("data", "model"))):
            assert kernels(f(Blockwise), *args) == 0  # nobody said what they shard
            axes = PartitionAxis(batch_axis="data", head_axis="model")
            assert kernels(f(Blockwise, partition_axis=axes), *args) == 1
        with jax.set_mesh(mesh_of((4,), ("tp",))):
            assert kernels(f(Blockwise), *args) == 0  # two key heads
        with jax.set_mesh(mesh_of((2, 2, 2), ("dp", "x", "tp"))):
            args = [jax.device_put(x, P()) for x in args]
            assert kernels(f(Blockwise), *args) == 1


@pytest.mark.parametrize("strategy", [AllGather, Ulysses, Ring])
@pytest.mark.parametrize("t, s", [(17, 1), (1, 29), (1, 1)])
def test_a_single_token_over_several_devices(strategy, t, s):
    """Most devices have padding alone. There was a `TypeError` while the call was lowered."""
    keys = jax.random.split(jax.random.key(0), 3)
    args = [jax.random.normal(x, (1, n, 4, 8)) for x, n in zip(keys, (t, s, s))]
    how = dict(mesh=mesh_of((2,), ("sp",)), platform="interpret", blocksize_q=4, blocksize_k=4)

    def call(*args):
        found = attention(*args, strategy(AttentionMetadata(**how)), mask=Causal(3))
        return jnp.sum(jnp.sin(found.attention_outputs))

    def plain(*args):
        seen = np.tri(t, s, 3, bool)[None, None]
        return jnp.sum(jnp.sin(jax.nn.dot_product_attention(*args, mask=seen)))

    found = jax.jit(jax.value_and_grad(call, (0, 1, 2)))(*args)
    wanted = jax.value_and_grad(plain, (0, 1, 2))(*args)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        np.testing.assert_allclose(x, y, atol=2e-6)
