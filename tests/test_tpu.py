"""The kernels for TPUs: chosen by static fields, found wherever they are called from, free of races,
and compiled by the compiler of TPUs. Their numbers: conformance/ with the target "tpu".
"""

import functools as ft
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import eqattn.kernels.tpu
from eqattn import (
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    KeyPadding,
    Ragged,
    Ring,
    ScoreFn,
    SlidingWindow,
)

from ._tpu_compile import CASES, TOPOLOGIES


SHAPES = [(2, 40, 4, 16), (2, 48, 2, 16), (2, 48, 2, 8)]


def metadata(**kw):
    given = dict(runtime_dtype=jnp.float32, blocksize_q=8, blocksize_k=16)
    return AttentionMetadata(**given | kw)


def arrays(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, SHAPES)]


def call(q, k, v, strategy=None, mask=Causal()):
    strategy = strategy or Blockwise(metadata(platform="tpu"))
    return attention(q, k, v, strategy, mask=mask).attention_outputs


def kernels(f, *args) -> int:
    lowered = jax.jit(f).trace(*args).lower(lowering_platforms=("tpu",))
    return lowered.as_text().count("@tpu_custom_call")


def summed(*args):
    return call(*args).sum()


@pytest.mark.parametrize(
    "f, count",
    [
        (call, 1),
        (jax.grad(summed), 2),
        (jax.grad(summed, (1, 2)), 2),
        (jax.grad(summed, (0, 1, 2)), 3),
        (jax.grad(jax.checkpoint(summed), (0, 1, 2)), 3),
        (jax.vmap(jax.grad(summed)), 2),
        (lambda q, k, v: jax.lax.scan(lambda c, _: (call(c, k, v), None), q, length=3)[0], 1),
        (lambda q, k, v: jax.jvp(lambda q: call(q, k, v), (q,), (q,)), 1),
    ],
)
def test_the_kernel_is_found(f, count):
    q, k, v = arrays()
    if f is not call and "vmap" in repr(f):
        q, k, v = (x[None] for x in (q, k, v))
    v = jnp.concatenate([v, v], -1)  # as wide as the query, for the scan
    assert kernels(f, q, k, v) == count


def test_static_fields_choose():
    q, k, v = arrays()
    chosen = lambda **kw: kernels(ft.partial(call, strategy=Blockwise(metadata(**kw))), q, k, v)
    assert chosen(platform="auto", backend="tpu") == chosen(platform="pallas", backend="tpu") == 1
    assert chosen(platform="xla", backend="tpu") == chosen(platform="auto", backend="cpu") == 0
    assert Blockwise(metadata(platform="tpu")).selected_forward() == "forward_tpu"


def test_one_trace_for_equal_fields():
    traces = []

    @jax.jit
    def f(strategy, q, k, v):
        traces.append(strategy.metadata.platform)
        return call(q, k, v, strategy)

    q, k, v = arrays()
    for platform in ("interpret", "xla", "interpret", "xla"):
        f(Blockwise(metadata(platform=platform, softmax_scale=0.3)), q, k, v)
        f(Blockwise(metadata(platform=platform, softmax_scale=0.4)), q, k, v)
    assert [str(p) for p in traces] == ["interpret", "xla"]


def test_what_there_is_no_kernel_for():
    q, k, v = arrays()
    with pytest.raises(ValueError, match="platform='pallas' on a TPU cannot run on .*cpu"):
        call(q, k, v)
    with pytest.raises(ValueError, match="bfloat16 and float32, not float16.*platform='auto'"):
        call(*arrays(jnp.float16))
    score = ScoreFn(lambda s, b, h, q, k: s + jnp.cos(q - k))
    for platform in ("interpret", "tpu"):
        with pytest.raises(
            ValueError, match=f"{'interpret' if platform == 'interpret' else 'pallas'}.*ScoreFn"
        ):
            attention(q, k, v, Blockwise(metadata(platform=platform)), score=score)
    automatic = Blockwise(metadata(platform="auto", backend="tpu"))
    assert kernels(lambda *x: attention(*x, automatic, score=score).attention_outputs, q, k, v) == 0
    assert kernels(ft.partial(call, strategy=automatic), *arrays(jnp.float16)) == 0
    assert not Ragged(metadata()).supports(platform="tpu")
    with pytest.raises(ValueError, match="no Pallas kernel for ragged"):
        call(q, k, v, Ragged(metadata(platform="interpret")))


def test_the_compiler_does_not_split_kernels():
    q, k, v = arrays()
    mesh = jax.make_mesh((2,), ("dp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in (q, k, v)]
    automatic = Blockwise(metadata(platform="auto", backend="tpu"))
    assert kernels(ft.partial(call, strategy=automatic), *args) == 0
    with pytest.raises(ValueError, match="inside jax.shard_map"):
        kernels(call, *args)
    own = jax.shard_map(call, mesh=mesh, in_specs=place.spec, out_specs=place.spec, check_vma=False)
    assert kernels(own, *args) == 1


@pytest.mark.parametrize("check_vma", [False, True])
def test_inside_a_ring(check_vma):
    """The kernel goes on with the Carry of the hops before."""
    q, k, v = arrays()
    mesh = jax.make_mesh((4,), ("sp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    place = jax.sharding.PartitionSpec(None, "sp")

    def run(platform):
        ring = Ring(metadata(platform=platform), axis_name="sp")
        f = jax.shard_map(
            ft.partial(call, strategy=ring),
            mesh=mesh,
            in_specs=place,
            out_specs=place,
            check_vma=check_vma,
        )
        loss = lambda *x: (f(*x) ** 2).sum()
        return f(q, k, v), jax.grad(loss, (0, 1, 2))(q, k, v)

    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5),
        run("interpret"),
        run("xla"),
    )


@pytest.mark.parametrize("mask", [Causal() & SlidingWindow(9, 2), KeyPadding(jnp.array([7, 33]))])
def test_races_and_memory_that_nothing_wrote(mask, monkeypatch):
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    traverse = eqattn.kernels.tpu.traverse
    seen = []

    def patched(*args, interpret, **kw):
        seen.append(interpret)
        return traverse(*args, interpret=params, **kw)

    monkeypatch.setattr(eqattn.kernels.tpu, "traverse", patched)
    q, k, v = (x[:, :24] for x in arrays())
    loss = lambda strategy: lambda *x: (call(*x, strategy, mask) ** 2).sum()
    got = jax.value_and_grad(loss(Blockwise(metadata(platform="interpret"))), (0, 1, 2))(q, k, v)
    want = jax.value_and_grad(loss(Blockwise(metadata(platform="xla"))), (0, 1, 2))(q, k, v)
    assert len(seen) >= 2
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_garbage_stays_where_it_is_masked(garbage):
    q, k, v = arrays()
    lengths = jnp.array([7, 33])
    hidden = jnp.arange(48)[None, :, None, None] >= lengths[:, None, None, None]
    bad = lambda x: jnp.where(hidden, garbage, x)
    strategy = Blockwise(metadata(platform="interpret"))
    f = lambda q, k, v: (call(q, k, v, strategy, KeyPadding(lengths)) ** 2).sum()
    clean = jax.value_and_grad(f, (0, 1, 2))(q, k, v)
    dirty = jax.value_and_grad(f, (0, 1, 2))(q, bad(k), bad(v))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    # One that is seen makes the rows that see it NaN, and no others.
    seen = v.at[0, 5, 0, 3].set(garbage)
    out = call(q, k, seen, strategy, Causal())
    nan = np.isnan(np.asarray(out)).any(-1)
    assert nan[0, 5:, :2].all() and not nan[0, :5].any() and not nan[0, :, 2:].any()
    assert not nan[1].any()


def compile_all(chip: str, cases: tuple[str, ...]) -> dict:
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu, which compiles for TPUs, is not installed")
    script = pathlib.Path(__file__).with_name("_tpu_compile.py")
    env = {**os.environ, "PYTHONPATH": str(script.parents[1])}
    env.pop("XLA_FLAGS", None)
    out = subprocess.run(
        [sys.executable, str(script), chip, *cases], env=env, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr[-2000:]
    return {r["case"]: r for r in map(json.loads, out.stdout.splitlines())}


@pytest.mark.parametrize(
    "chip, cases",
    [
        ("v5e", ("causal", "segments", "bias", "dropout", "grouped", "tail")),
        ("v6e", ("causal", "lengths", "cap", "float32")),
        ("v5p", ("window", "sinks")),
        ("v7x", ("causal", "wide")),
    ],
)
def test_compiled_for_a_tpu(chip, cases):
    for case, got in compile_all(chip, cases).items():
        assert got.get("kernels", 0) >= 3, got


@pytest.mark.slow
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_every_feature_compiled_for_a_tpu(chip):
    reports = compile_all(chip, ())
    assert set(reports) == set(CASES)
    for case, got in reports.items():
        assert got.get("kernels", 0) >= (1 if case == "forward" else 3), got
