import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _same import same

from eqattn._config.metadata import AttentionMetadata
from eqattn._config.partition import PartitionAxis, PartitionManager
from eqattn._config.platform import Backend, Platform


SEED_ORDER = (
    "runtime_dtype runtime_softmax_dtype sequence_axis_name mesh platform backend partition_axis "
    "partition_manager base_config scan_ring_attention softmax_scale dropout_prob blocksize_q "
    "blocksize_k blocksize_b logits_soft_cap softmax_aux"
).split()


# Fields and defaults


def test_fields_are_the_seeds_in_its_order():
    assert [f.name for f in dataclasses.fields(AttentionMetadata)] == SEED_ORDER
    values = ["bfloat16", "float32", "ring", None, "xla", "cpu", PartitionAxis(), None, None, False]
    m = AttentionMetadata(*values, 0.5, 0.1, 8, 9, 10, 30.0, jnp.zeros(4))
    assert (m.runtime_dtype, m.runtime_softmax_dtype) == (jnp.bfloat16, jnp.float32)
    assert (m.sequence_axis_name, m.platform, m.backend) == ("ring", Platform.XLA, Backend.CPU)
    assert (m.scan_ring_attention, m.softmax_scale, m.dropout_prob) == (False, 0.5, 0.1)
    assert (m.blocksize_q, m.blocksize_k, m.blocksize_b) == (8, 9, 10)
    assert m.logits_soft_cap == 30.0 and m.softmax_aux.shape == (4,)


def test_defaults():
    m = AttentionMetadata()
    assert m.runtime_dtype is m.runtime_softmax_dtype is None
    assert m.sequence_axis_name == "sp" and m.mesh is None
    assert m.platform is Platform.AUTO and m.backend is Backend.ANY
    assert m.partition_axis == PartitionAxis()
    assert m.partition_manager == PartitionManager(PartitionAxis())
    assert m.base_config is None and m.scan_ring_attention is True
    assert m.softmax_scale is None and m.dropout_prob == 0.0
    assert m.blocksize_q is m.blocksize_k is m.blocksize_b is None
    assert m.logits_soft_cap is None and m.softmax_aux is None
    assert jax.tree.leaves(m) == []


def test_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        AttentionMetadata().softmax_scale = 1.0  # pyright: ignore


# Canonical statics


SPELLINGS = [
    dict(runtime_dtype=d, runtime_softmax_dtype=d, platform=p, backend=b, blocksize_q=n)
    for d, p, b, n in [
        ("float32", "XLA", "Cpu", 8),
        (jnp.float32, Platform.XLA, Backend.CPU, np.int64(8)),
        (np.dtype(np.float32), "jax", "CPU", 8),
        (np.float32, "JAX", "cpu", np.int32(8)),
        (np.dtype(">f4"), "xla", Backend.CPU, 8),
    ]
]


@pytest.mark.parametrize("kwargs", SPELLINGS)
def test_spellings_of_one_value_are_one_tree(kwargs):
    a = AttentionMetadata(softmax_scale=0.5, **SPELLINGS[0])
    b = AttentionMetadata(
        softmax_scale=0.5,
        partition_axis=PartitionAxis(batch_axis=["fsdp", "dp"], head_axis=("tp",)),  # pyright: ignore
        scan_ring_attention=np.bool_(True),  # pyright: ignore
        dropout_prob=0,
        **kwargs,
    )
    assert same(a, b) and a == b and hash(a) == hash(b)
    assert type(b.runtime_dtype) is type(np.dtype("float32")) and b.runtime_dtype.isnative
    assert type(b.blocksize_q) is int and type(b.dropout_prob) is float
    assert type(b.scan_ring_attention) is bool


def test_equal_metadata_do_not_retrace():
    traces = 0

    @jax.jit
    def f(m, x):
        nonlocal traces
        traces += 1
        return m.softmax_scale * x

    for kwargs in SPELLINGS:
        for scale in (0.5, 0.7):
            out = f(AttentionMetadata(softmax_scale=jnp.float32(scale), **kwargs), 2.0)
            assert np.allclose(out, 2 * scale)
    assert traces == 1
    for kwargs in SPELLINGS:
        assert f(AttentionMetadata(softmax_scale=0.5, **kwargs), 2.0) == 1
    assert traces == 2
    f(AttentionMetadata(softmax_scale=0.5, blocksize_q=9), 2.0)
    assert traces == 3


def test_rebuilt_mesh_does_not_retrace():
    traces = 0

    @jax.jit
    def f(m):
        nonlocal traces
        traces += 1
        return m.softmax_scale * 2

    for _ in range(3):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("sp",))
        f(AttentionMetadata(mesh=mesh, softmax_scale=jnp.float32(1)))
    assert traces == 1


def test_filter_jit_retraces_per_python_float_only():
    traces = 0

    @eqx.filter_jit
    def f(m):
        nonlocal traces
        traces += 1
        return m.softmax_scale * 2

    for scale in (jnp.float32(0.5), jnp.float32(0.7)):
        f(AttentionMetadata(softmax_scale=scale))
    assert traces == 1
    for scale in (0.5, 0.7, 0.7):
        f(AttentionMetadata(softmax_scale=scale))
    assert traces == 3


# Platform and backend


@pytest.mark.parametrize(
    "platform, backend, expected",
    [
        ("tpu", None, ("pallas", "tpu")),
        ("TPU", "any", ("pallas", "tpu")),
        ("gpu", "gpu", ("pallas", "gpu")),
        ("gpu", "cuda", ("pallas", "cuda")),
        ("GPU", Backend.ROCM, ("pallas", "rocm")),
        ("triton", None, ("pallas", "triton")),
        ("Triton", "cuda", ("pallas", "triton")),
        ("gpu", "triton", ("pallas", "triton")),
        ("Jax", "tpu", ("xla", "tpu")),
        (None, "TPU", ("auto", "tpu")),
        (Platform.PALLAS, None, ("pallas", "any")),
    ],
)
def test_platform_and_backend(platform, backend, expected):
    m = AttentionMetadata(platform=platform, backend=backend)
    assert (m.platform, m.backend) == expected
    assert isinstance(m.platform, Platform) and isinstance(m.backend, Backend)


@pytest.mark.parametrize(
    "platform, backend", [("tpu", "gpu"), ("gpu", "cpu"), ("tpu", "CUDA"), ("triton", "rocm")]
)
def test_platform_that_names_another_device_raises(platform, backend):
    with pytest.raises(ValueError, match=f"platform='{platform}'.*backend='{backend.lower()}'"):
        AttentionMetadata(platform=platform, backend=backend)


def test_unknown_platform_and_backend_list_the_names():
    with pytest.raises(ValueError, match="platform 'cutlass'.*auto.*xla.*pallas.*'triton'"):
        AttentionMetadata(platform="cutlass")
    with pytest.raises(ValueError, match="backend 'xpu'.*tpu.*rocm"):
        AttentionMetadata(backend="xpu")


# Checks


@pytest.mark.parametrize(
    "kwargs, match",
    [
        (dict(softmax_scale=float("nan")), "softmax_scale must be finite"),
        (dict(softmax_scale=float("inf")), "softmax_scale must be finite"),
        (dict(softmax_scale=jnp.asarray(-jnp.inf)), "softmax_scale must be finite"),
        (dict(softmax_scale=jnp.asarray(jnp.nan, jnp.bfloat16)), "softmax_scale must be finite"),
        (dict(logits_soft_cap=0), "logits_soft_cap must be positive"),
        (dict(logits_soft_cap=-1.0), "logits_soft_cap must be positive"),
        (dict(logits_soft_cap=np.float32(-1.0)), "logits_soft_cap must be positive"),
        (dict(logits_soft_cap=jnp.asarray(0.0)), "logits_soft_cap must be finite and not 0"),
        (dict(logits_soft_cap=float("inf")), "logits_soft_cap must be positive and finite"),
        (dict(dropout_prob=1.0), r"\[0, 1\)"),
        (dict(dropout_prob=-0.1), r"\[0, 1\)"),
        (dict(dropout_prob=float("nan")), r"\[0, 1\)"),
        (dict(blocksize_q=0), "blocksize_q must be at least 1"),
        (dict(blocksize_k=-1), "blocksize_k must be at least 1"),
        (dict(blocksize_b=0), "blocksize_b must be at least 1"),
        (dict(runtime_dtype="int32"), "floating dtype"),
        (dict(runtime_dtype="complex64"), "floating dtype"),
        (dict(runtime_dtype=bool), "floating dtype"),
        (dict(runtime_dtype=np.longdouble), "floating dtype"),
        (dict(runtime_softmax_dtype=jnp.int8), "floating dtype"),
        (dict(softmax_aux=jnp.zeros(())), r"\[num_heads\].*shape \(\)"),
        (dict(softmax_aux=1.0), r"\[num_heads\]"),
        (dict(softmax_aux=jnp.zeros((1, 2, 3))), r"shape \(1, 2, 3\)"),
        (dict(partition_axis=PartitionAxis(), partition_manager=PartitionManager(
            PartitionAxis(head_axis="x"))), "disagree"),
    ],
)  # fmt: skip
def test_bad_values_raise(kwargs, match):
    with pytest.raises(ValueError, match=match):
        AttentionMetadata(**kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(softmax_scale=True),
        dict(softmax_scale="1"),
        dict(softmax_scale=jnp.asarray(1)),
        dict(softmax_scale=object()),
        dict(softmax_aux=[0.1, 0.2]),
        dict(dropout_prob=jnp.float32(0.1)),
        dict(blocksize_q=True),
        dict(blocksize_q=8.0),
        dict(sequence_axis_name=""),
        dict(sequence_axis_name=("a", "b")),
        dict(mesh="mesh"),
        dict(scan_ring_attention=1),
        dict(partition_axis=3),
        dict(partition_manager=3),
        dict(block_q=3),
    ],
)
def test_bad_types_raise(kwargs):
    with pytest.raises(TypeError):
        AttentionMetadata(**kwargs)


def test_numbers_become_python_floats_and_arrays_stay():
    for scale in (2, np.float64(2), np.float32(2), np.int64(2), 2.0):
        m = AttentionMetadata(softmax_scale=scale, logits_soft_cap=scale)
        assert type(m.softmax_scale) is float and m.softmax_scale == 2.0
        assert type(m.logits_soft_cap) is float
    array = jnp.asarray(2.0, jnp.bfloat16)
    assert AttentionMetadata(softmax_scale=array).softmax_scale is array
    numpy = np.zeros(3, np.float32)
    assert AttentionMetadata(softmax_aux=numpy).softmax_aux is numpy


@pytest.mark.parametrize("shape", [(4,), (4, 2), (1, 3), (0,)])
def test_sinks_of_any_heads_pass_construction(shape):
    assert AttentionMetadata(softmax_aux=jnp.zeros(shape)).softmax_aux.shape == shape


# replace


def test_replace_converts_and_checks():
    m = AttentionMetadata(platform="tpu", softmax_scale=jnp.float32(1), blocksize_q=16)
    assert same(m.replace(), m)
    r = m.replace(runtime_dtype="bfloat16", softmax_scale=2, blocksize_q=np.int64(4))
    assert r.runtime_dtype == jnp.bfloat16 and type(r.softmax_scale) is float
    assert r.blocksize_q == 4 and type(r.blocksize_q) is int and m.blocksize_q == 16
    with pytest.raises(ValueError, match="blocksize_q"):
        m.replace(blocksize_q=0)
    with pytest.raises(TypeError, match="block_q"):
        m.replace(block_q=4)


def test_replace_keeps_what_belongs_together():
    m = AttentionMetadata(platform="tpu")
    assert m.replace(platform="gpu").backend is Backend.GPU
    assert m.replace(platform="xla").backend is Backend.TPU
    assert m.replace(backend="cuda").platform is Platform.PALLAS
    with pytest.raises(ValueError, match="backend='cpu'"):
        m.replace(platform="gpu", backend="cpu")
    axis = PartitionAxis(head_axis="x")
    assert m.replace(partition_axis=axis).partition_manager.partition_axis == axis
    assert m.replace(partition_manager=PartitionManager(axis)).partition_axis == axis
    assert m.replace(base_config={"blocksize_q": 3, "backend": "cpu"}).blocksize_q == 3
    assert m.replace(base_config={"blocksize_q": 3, "backend": "cpu"}).backend is Backend.TPU


# Backends


def test_a_mesh_that_is_given_replaces_the_stored_one_unread():
    data = AttentionMetadata(blocksize_q=8).to_dict() | {"mesh": {"$mesh": "of absent devices"}}
    assert AttentionMetadata.from_dict(data, mesh=None) == AttentionMetadata(blocksize_q=8)
