"""Which calls have kernels, on which device, and what is said where there is none."""

import functools as ft
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from _kernels import drawn, EACH, HOPPER, how, kernels, mesh_of, NAMES, NEWEST, newest, NVIDIA
from _stored_rows import Doubled

from eqattn import (
    ALiBi,
    attention,
    AttentionMetadata,
    BlockCausal,
    Blockwise,
    Causal,
    Dense,
    KeyPadding,
    MaskFn,
    PrefixLM,
    Ragged,
    Ring,
    ScoreFn,
    Segments,
    SlidingWindow,
    T5Bias,
)
from eqattn._sweep.lowering import XLA
from eqattn.cache import Pages
from eqattn.kernels import lowering_for
from eqattn.kernels.nvidia import hopper as gpu, triton
from eqattn.kernels.nvidia.hopper import GPULowering
from eqattn.kernels.nvidia.triton import TritonLowering
from eqattn.scores import AbstractScore


FAR = ScoreFn(lambda s, b, h, q, k: s + jnp.ones(64)[q * k % 64])  # no kernel looks that up


def arrays(backend: str, dtype: Any = None):
    xs = drawn(backend, width=16, batch=2)[0].values()
    return [x if dtype is None else x.astype(dtype) for x in xs]


def run_of(strategy, **given: Any):
    given = dict(mask=Causal()) | given
    return lambda *xs: attention(*xs, strategy, **given).attention_outputs


def summed(run):
    return lambda *xs: run(*xs).astype(jnp.float32).sum()


def scanned(run):
    return lambda q, k, v: jax.lax.scan(lambda c, _: (run(c, k, v), None), q, length=3)[0]


# What is made of a call, and how many kernels that has: of TPUs, where one visit gives all gradients
# and forward mode has a kernel, and of GPUs.
FOUND: dict[str, Any] = {
    "call": (lambda run: run, 1, 1),
    "gradient of queries": (lambda run: jax.grad(summed(run)), 2, 2),
    "gradients": (lambda run: jax.grad(jax.checkpoint(summed(run)), (0, 1, 2)), 2, 3),
    "vmap": (lambda run: jax.vmap(jax.grad(summed(run))), 2, 2),
    "scan": (scanned, 1, 1),
    "tangent": (lambda run: lambda q, *kv: jax.jvp(lambda q: run(q, *kv), (q,), (q,)), 2, 1),
    "linearize": (lambda run: lambda *xs: jax.linearize(run, *xs)[1](*xs), 2, 1),
}


@EACH
@pytest.mark.parametrize("name", FOUND)
def test_kernels_are_found(name, backend):
    make, of_tpu, of_gpu = FOUND[name]
    xs = [x[None] if name == "vmap" else x for x in arrays(backend)]
    sizes = dict(blocksize_q=8, blocksize_k=16) if backend == "tpu" else {}
    run = make(run_of(how(backend, "pallas", **sizes)))
    assert kernels(backend, run, *xs) == (of_tpu if backend == "tpu" else of_gpu)


@NVIDIA
@pytest.mark.parametrize("shape", [(2, 4, 1, 48), (2, 4, 40, 1)])
def test_the_gradient_of_a_bias_of_one_side_runs_as_loops(shape, backend):
    """And those of queries, keys and values as kernels beside it."""
    strategy, bias = how(backend, "pallas"), jnp.ones(shape, jnp.bfloat16)
    f = lambda q, k, v, bias: summed(run_of(strategy, bias=bias))(q, k, v)
    assert kernels(backend, jax.grad(f, (0, 3)), *arrays(backend), bias) == 2


def test_gradients_of_float32_run_as_loops_beside_triton():
    run = run_of(how("triton", "pallas", runtime_dtype=None))
    assert kernels("triton", jax.grad(summed(run)), *arrays("tpu")) == 1


FIELDS = [
    ("tpu", "tpu", "any", 1),
    ("tpu", "auto", "tpu", 1),
    ("tpu", "pallas", "tpu", 1),
    ("tpu", "xla", "tpu", 0),
    ("tpu", "auto", "cpu", 0),
    pytest.param("cuda", "gpu", "any", 1, marks=newest),
    pytest.param("cuda", "gpu", "cuda", 1, marks=newest),
    pytest.param("cuda", "pallas", "cuda", 1, marks=newest),
    ("triton", "triton", "any", 1),
    ("triton", "gpu", "triton", 1),
    ("triton", "triton", "cuda", 1),
    ("triton", "auto", "triton", 0),
]


@pytest.mark.parametrize("device, platform, backend, count", FIELDS)
def test_static_fields_choose(device, platform, backend, count):
    strategy = how(backend, platform, runtime_dtype=None)
    assert kernels(device, run_of(strategy), *arrays(device)) == count
    if platform == device == "triton" or backend == "triton":
        assert strategy.metadata.backend == "triton"
    if platform != "xla" and backend != "cpu":
        of = "forward_tpu" if device == "tpu" else "forward_cuda"
        assert strategy.selected_forward() == of
    assert strategy.supports(mask=Causal())


def test_one_trace_for_equal_fields():
    traces = []

    @jax.jit
    def f(strategy, *xs):
        traces.append(strategy.metadata.platform)
        return run_of(strategy)(*xs)

    for platform in ("interpret", "xla", "interpret", "xla"):
        for scale in (0.3, 0.4):
            f(how("tpu", platform, softmax_scale=jnp.array(scale)), *arrays("tpu"))
    assert [str(p) for p in traces] == ["interpret", "xla"]


@pytest.mark.parametrize(
    "capability, kind",
    [("8.0", TritonLowering), ("9.0", GPULowering), ("10.0", TritonLowering), (None, GPULowering)],
)
def test_the_chip_of_the_process_chooses(capability, kind, monkeypatch):
    """Between the kernels of `platform="gpu"`; who interprets has no chip."""

    class Device:
        compute_capability = capability

    def local(backend):
        assert backend == "cuda"
        if capability is None:
            raise RuntimeError("Unknown backend cuda")
        return [Device()]

    monkeypatch.setattr(gpu.jax, "local_devices", local)
    for backend in ("gpu", "cuda"):
        assert type(lowering_for(backend, "pallas")) is kind
        assert type(lowering_for(backend, "interpret")) is GPULowering
    assert type(lowering_for("triton", "interpret")) is TritonLowering
    assert lowering_for("triton", "auto") is None


@pytest.mark.parametrize(
    "backend, chip",
    [("gpu", "9.0"), ("cuda", "9.0"), ("cuda", "10.0"), ("cuda", ""), ("rocm", "9.0")],
)
def test_kernels_by_default_are_those_measured(backend, chip, monkeypatch):
    """On Hopper, and there for what the kernels can do. All else runs in loops with their blocks."""
    monkeypatch.setattr(gpu, "capability", lambda: chip)
    automatic = how(backend, "auto", runtime_dtype=None)
    count, xs = ft.partial(kernels, "cuda"), arrays("cuda")
    assert count(run_of(automatic), *xs) == (chip == "9.0" and backend != "rocm" and NEWEST)
    assert count(run_of(automatic), *arrays("cuda", jnp.float32)) == 0
    for score in (T5Bias(jnp.ones((8, 4))), FAR):
        assert count(run_of(automatic, score=score), *xs) == 0
    for sizes in ((264, 264), (64, 264), (64, 0)) if chip == "9.0" else ():
        q, v = (jnp.zeros((1, 8, 1, n), jnp.bfloat16) for n in sizes)
        assert count(jax.grad(summed(run_of(automatic))), q, q, v) == 0
    assert automatic.supports(mask=Causal())
    fixed = Blockwise(automatic.metadata, bitwise=True)
    assert count(run_of(fixed), *xs) == 0


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(gpu, "capability", lambda: "9.0")
    return AttentionMetadata(backend="cuda")


def test_only_versions_of_jax_that_were_tried(on_hopper, monkeypatch):
    """A kernel that does not run leaves its blocks to no loop, either."""
    assert (lowering_for("cuda", "auto") is not None) == NEWEST
    for version in ((0, 11, 2), (0, 13, 0)):
        monkeypatch.setattr(jax, "__version_info__", version)
        assert lowering_for("cuda", "auto") is None
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    assert lowering_for("cuda", "auto") == GPULowering("auto")
    with jax.enable_x64(True):
        assert lowering_for("cuda", "auto") is None


def inputs(tokens=64, dim=64):
    return [jnp.zeros((2, n, 2, dim), jnp.bfloat16) for n in (tokens, 64, 64)]


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint16, jnp.int32])
def test_ids_of_any_integers(dtype, on_hopper):
    """Ids of documents are widened. A function has the numbers of the caller, and of 8 bits there
    is no kernel.
    """
    count, ids = ft.partial(kernels, "cuda"), jnp.zeros((2, 64), dtype)
    both = lambda run: (count(run, *inputs()), count(jax.grad(summed(run)), *inputs()))
    found = both(run_of(Blockwise(on_hopper), mask=Segments(ids)))
    assert found == ((1, 2) if NEWEST else (0, 0))
    one = run_of(Ragged(on_hopper), mask=Segments(ids[:, :1], ids))
    assert count(one, *inputs(1)) == NEWEST
    row = ids[0]
    same = MaskFn(lambda b, h, q, k: row[q] <= row[k] + row[k])
    eight = jnp.dtype(dtype).itemsize == 1
    found = both(run_of(Blockwise(on_hopper), mask=same))
    assert found == ((0, 0) if eight or not NEWEST else (1, 2))


def test_values_without_numbers(on_hopper):
    q, k, v = inputs()
    assert kernels("cuda", run_of(Blockwise(on_hopper)), q, k, v[..., :0]) == 0
    mask = KeyPadding(jnp.array([3, 5]))
    run = lambda q, k, v: attention(q, k, v, Ragged(on_hopper), mask=mask).logsumexp
    assert kernels("cuda", run, q[:, :1], k, v[..., :0]) == 0


@newest
def test_sizes_that_an_export_leaves_open(on_hopper):
    """They run in loops, and who asks for kernels is told."""
    (n,) = jax.export.symbolic_shape("n")
    args = [jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype) for x in inputs()]
    sizes = on_hopper.replace(blocksize_q=64, blocksize_k=64)
    export = lambda x: jax.export.export(jax.jit(run_of(Blockwise(x))), platforms=["cuda"])(*args)
    assert "mosaic_gpu" not in export(sizes).mlir_module()
    with pytest.raises(ValueError, match="sizes that jax.export leaves open"):
        export(sizes.replace(platform="pallas"))


@pytest.mark.parametrize("page", [0, 64])
def test_caches_that_kernels_cannot_read(page, on_hopper):
    """Values of a user's own run in loops, and so do pages of keys beside values in order."""
    q, k, v = inputs(1)
    key = Pages(k.reshape(-1, 64, *k.shape[2:]), jnp.arange(2)[:, None]) if page else k
    value = v if page else Doubled(v)
    assert kernels("cuda", run_of(Ragged(on_hopper), mask=None), q, key, value) == 0


class Rounded(AbstractScore):
    """A score of a user's own with an operation that no kernel has."""

    def transform(self, logit, b, h, q, k, *operands):
        return logit + jax.lax.erf(logit)


LOOPS: dict[str, Any] = {
    "table": dict(score=FAR),
    "own": dict(score=Rounded()),
    "function": dict(mask=MaskFn(lambda b, h, q, k: jax.lax.population_count(q * k) < 9)),
    "long vectors": dict(),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_have_their_own_blocks(name, on_hopper, monkeypatch):
    """Where kernels lack an operation or vectors are long. Who asks for kernels is told."""
    sizes, choose = [], type(XLA).choose_blocks
    note = lambda self, request: sizes.append(request.head_dim) or choose(self, request)
    monkeypatch.setattr(type(XLA), "choose_blocks", note)
    args = inputs(dim=272 if name == "long vectors" else 64)
    assert kernels("cuda", run_of(Blockwise(on_hopper), **LOOPS[name]), *args) == 0
    assert args[0].shape[-1] in sizes
    if NEWEST and name != "long vectors":
        asked = run_of(Blockwise(on_hopper.replace(platform="pallas")), **LOOPS[name])
        with pytest.raises(ValueError, match="which the compiler of kernels does not know"):
            kernels("cuda", asked, *args)


def test_other_devices_have_none():
    rocm = how("rocm", "gpu")
    with pytest.raises(ValueError, match="no Pallas kernel for blockwise on rocm.*'xla' or 'auto'"):
        run_of(rocm)(*arrays("cuda"))
    assert "on rocm" in rocm.supports(mask=Causal()).reason
    for backend, name in (("tpu", "tpu"), ("any", "gpu")):
        given: Any = dict(platform="tpu" if name == "tpu" else "gpu")
        with pytest.raises(ValueError, match=f"no Pallas kernel for dense on {name}"):
            run_of(Dense(AttentionMetadata(**given)))(*arrays("cuda"))
    for strategy in (Blockwise, Ragged):
        with pytest.raises(ValueError, match="on an NVIDIA GPU cannot run on .*cpu"):
            run_of(how("any", "gpu", strategy))(*arrays("cuda"))
    for platform, said in (("tpu", "'pallas' on a TPU cannot run on .*cpu"), ("triton", "cannot run on .*cpu")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            run_of(how("any", platform))(*arrays(platform))
    assert not Dense(AttentionMetadata()).supports(platform="tpu")


def refuses(backend: str, said: str, *args, **given: Any):
    """Who asks for kernels is told, compiled or interpreted, and XLA code runs for who does not."""
    for platform in ("pallas", "interpret"):
        with pytest.raises(ValueError, match=said):
            kernels(backend, run_of(how(backend, platform, runtime_dtype=None), **given), *args)
    automatic = run_of(how(backend, "auto", runtime_dtype=None), **given)
    assert kernels(backend, automatic, *args) == 0


WIDE = [jnp.zeros((1, 8, 1, 264), jnp.bfloat16)] * 3


def test_what_there_is_no_kernel_for():
    refuses("tpu", "bfloat16 and float32, not float16.*platform='auto'", *arrays("tpu", "float16"))
    refuses("tpu", "has a (gather|dynamic_slice)", *arrays("tpu"), score=FAR)
    refuses("cuda", "bfloat16 and float16, not float32", *arrays("cuda", "float32"))
    if NEWEST:
        refuses("cuda", "up to 256 numbers, not 264 and 264", *WIDE)
        refuses("cuda", "has a (gather|dynamic_slice), which the comp", *arrays("cuda"), score=FAR)
    else:
        refuses("cuda", "written for jax 0.12", *arrays("cuda"))
    refuses(
        "triton", "has a (gather|dynamic_slice), which the compiler", *arrays("triton"), score=FAR
    )
    refuses("triton", "up to 256 numbers, not 264 and 264", *WIDE)
    of_blocks = MaskFn(lambda b, h, q, k: jnp.ones((64, 64))[q // 8, k // 8] > 0)
    refuses("tpu", "MaskFn has a .* platform='auto' or 'xla'", *arrays("tpu"), mask=of_blocks)
    for backend in ("tpu", "cuda", "triton"):
        assert not how(backend, "pallas").supports(score=FAR)


def test_no_kernel_for_two_platforms_or_64_bits():
    export = lambda strategy, *on: jax.export.export(jax.jit(run_of(strategy)), platforms=on)
    with pytest.raises(ValueError, match="cannot run on .'cpu', 'tpu'."):
        export(how("tpu", "pallas"), "cpu", "tpu")(*arrays("tpu"))
    with jax.enable_x64(True):
        with pytest.raises(ValueError, match="32 bits"):
            run_of(how("tpu"))(*arrays("tpu"))
        program = export(how("tpu", "auto"), "tpu")(*arrays("tpu")).mlir_module()
        assert NAMES["tpu"] not in program


def test_only_versions_of_jax_with_pallas_triton(monkeypatch):
    monkeypatch.setattr(triton, "available", lambda: False)
    with pytest.raises(ValueError, match="Pallas Triton is no longer in jax"):
        kernels("triton", run_of(how("triton", "pallas")), *arrays("triton"))


@pytest.mark.parametrize("backend", ["tpu", HOPPER])
def test_the_compiler_does_not_split_kernels(backend):
    mesh, place = mesh_of(2, "dp"), jax.P("dp")
    of = jax.sharding.NamedSharding(mesh, place)
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of) for x in arrays(backend)]
    assert kernels(backend, run_of(how(backend, "auto")), *args) == 0
    run = run_of(how(backend, "pallas"))
    with pytest.raises(ValueError, match="call under jax.set_mesh.*partition_axis.*shard_map"):
        kernels(backend, run, *args)
    own = jax.shard_map(run, mesh=mesh, in_specs=place, out_specs=place, check_vma=False)
    assert kernels(backend, own, *args) == 1


@EACH
@pytest.mark.parametrize("check_vma", [False, True])
def test_in_every_hop_of_a_ring(check_vma, backend):
    """At home and at the hops, and so are gradients. What is interpreted is not checked by JAX."""
    place, ring = jax.P(None, "sp"), ft.partial(Ring, axis_name="sp")
    of = lambda platform: lambda *xs: run_of(how(backend, platform, ring))(*xs)
    specs: Any = dict(in_specs=place, out_specs=place, check_vma=check_vma)
    args: Any = dict(axis="sp", size=4) if backend == "triton" else {}
    specs |= {} if backend == "triton" else dict(mesh=mesh_of(4))
    own = jax.shard_map(of("pallas"), **specs)
    assert kernels(backend, own, *arrays(backend), **args) >= 2
    if backend == "tpu" and check_vma:
        assert kernels("tpu", jax.grad(summed(own), (0, 1, 2)), *arrays("tpu")) >= 4
        with pytest.raises(ValueError, match="check_vma=False"):
            jax.shard_map(of("interpret"), **specs)(*arrays("tpu"))


@pytest.mark.parametrize("backend", ["tpu", HOPPER])
def test_exported(backend):
    """Written where there is no such device, and read again, the program still has its kernels."""
    unchecked = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    platforms = ["tpu" if backend == "tpu" else "cuda"]
    run = jax.grad(summed(run_of(how(backend, "pallas"))), (0, 1, 2))
    exported = jax.export.export(jax.jit(run), platforms=platforms, disabled_checks=unchecked)
    read = jax.export.deserialize(exported(*arrays(backend)).serialize())
    assert list(read.platforms) == platforms and NAMES[backend] in read.mlir_module()


IDS = np.repeat(np.arange(3, dtype=np.int32), 16)
MASKS = {
    "causal": Causal(),
    "segments": Segments(jnp.asarray(IDS[:40]), jnp.asarray(IDS)),
    "not": ~SlidingWindow(3, 5) | KeyPadding(jnp.array([7, 9])),
    "blocks": BlockCausal(7),
    "prefix": PrefixLM(jnp.array([7, 9])),
    "function": MaskFn(lambda b, h, q, k: ((q * 7 + k * 3) % 5 < 3) & (b + h != 2)),
}


def _wave(s, b, h, q, k):
    d = (q - k).astype(s.dtype)
    return s + jnp.cos(d) - jnp.log1p(abs(d)) + jnp.where(h % 2 == 0, jnp.tanh(d), jnp.sign(s))


SCORES = {"none": None, "alibi": ALiBi(jnp.ones(4)), "function": ScoreFn(_wave)}


@NVIDIA
@pytest.mark.parametrize("mask, score", list(zip(MASKS, [*SCORES] * 2)))
def test_masks_and_scores_are_inlined(mask, score, backend):
    """The compilers take them: they verify a program when it is lowered."""
    rate = 0.1 if score != "none" and backend == "triton" else 0.0
    strategy = how(backend, "pallas", logits_soft_cap=20.0, dropout_prob=rate)
    key = jax.random.key(0) if rate else None
    run = run_of(strategy, mask=MASKS[mask], score=SCORES[score], key=key)
    assert kernels(backend, run, *arrays(backend)) == 1
