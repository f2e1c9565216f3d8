import dataclasses
import subprocess
import sys
import textwrap
import types
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqattn._metadata import AttentionMetadata, Backend, PartitionAxis, Platform
from eqattn._partition import PartitionManager
from jax.sharding import AbstractMesh


SEED_ORDER = (
    "runtime_dtype runtime_softmax_dtype sequence_axis_name mesh platform backend partition_axis "
    "partition_manager base_config scan_ring_attention softmax_scale dropout_prob blocksize_q "
    "blocksize_k blocksize_b logits_soft_cap softmax_aux"
).split()


def same(a, b):
    """Equal trees: structure, hash of the structure, and leaves to the bit."""
    sa, sb = jax.tree.structure(a), jax.tree.structure(b)
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b))
    return (
        sa == sb
        and hash(sa) == hash(sb)
        and all(type(x) is type(y) and np.array_equal(x, y) for x, y in leaves)
    )


def learned(**kwargs):
    return AttentionMetadata(
        jnp.float32,
        softmax_scale=jnp.float32(0.3),
        logits_soft_cap=jnp.float32(2.0),
        softmax_aux=jnp.asarray([0.1, -0.2], jnp.float32),
        blocksize_q=16,
        **kwargs,
    )


def loss(m, x):
    logits = m.logits_soft_cap * jnp.tanh(m.softmax_scale * x / m.logits_soft_cap)
    return jnp.sum(jnp.sin(logits)) + jnp.sum(jnp.square(m.softmax_aux)) * m.softmax_scale


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
    assert m.runtime_dtype == jnp.float32 and m.runtime_softmax_dtype is None
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
            out = f(AttentionMetadata(softmax_scale=scale, **kwargs), 2.0)
            assert np.allclose(out, 2 * scale)
    assert traces == 1
    f(AttentionMetadata(softmax_scale=0.5, blocksize_q=9), 2.0)
    assert traces == 2


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
        ("Jax", "tpu", ("xla", "tpu")),
        (None, "TPU", ("auto", "tpu")),
        (Platform.PALLAS, None, ("pallas", "any")),
    ],
)
def test_platform_and_backend(platform, backend, expected):
    m = AttentionMetadata(platform=platform, backend=backend)
    assert (m.platform, m.backend) == expected
    assert isinstance(m.platform, Platform) and isinstance(m.backend, Backend)


@pytest.mark.parametrize("platform, backend", [("tpu", "gpu"), ("gpu", "cpu"), ("tpu", "CUDA")])
def test_platform_that_names_another_device_raises(platform, backend):
    with pytest.raises(ValueError, match=f"platform='{platform}'.*backend='{backend.lower()}'"):
        AttentionMetadata(platform=platform, backend=backend)


def test_unknown_platform_and_backend_list_the_names():
    with pytest.raises(ValueError, match="platform 'triton'.*auto.*xla.*pallas"):
        AttentionMetadata(platform="triton")
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
        (dict(logits_soft_cap=jnp.asarray(0.0)), "logits_soft_cap must be positive"),
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
        (dict(runtime_dtype=None), "runtime_dtype"),
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


def test_leaves_are_never_looked_into_when_traced_or_abstract():
    @jax.jit
    def f(m, scale):
        m = m.replace(softmax_scale=scale, logits_soft_cap=-jnp.abs(scale), blocksize_k=4)
        assert m.blocksize_k == 4
        return m.softmax_scale

    assert f(learned(), 3.0) == 3.0
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    m = AttentionMetadata(softmax_scale=shape, logits_soft_cap=shape)
    assert jax.eval_shape(lambda m: m.softmax_scale * 2, m).shape == ()
    out = jax.eval_shape(lambda m: m, learned())
    assert isinstance(out.softmax_aux, jax.ShapeDtypeStruct)


def test_any_object_can_be_a_leaf_of_the_tree():
    m, marker = learned(), object()
    out = jax.tree.map(lambda _: marker, m)
    assert isinstance(out, AttentionMetadata)
    assert out.softmax_scale is out.softmax_aux is marker and out.blocksize_q == 16
    axes = jax.tree.map(lambda _: 0, m)
    none = jax.tree.map(lambda _: None, m)
    assert axes.softmax_scale == 0 and jax.tree.leaves(none) == []
    arrays, rest = eqx.partition(m, eqx.is_inexact_array)
    assert same(eqx.combine(arrays, rest), m)
    assert eqx.tree_at(lambda m: m.softmax_scale, m, jnp.float32(9)).softmax_scale == 9


# Base configs


class Config:
    attn_dtype = "bfloat16"
    attn_softmax_dtype = jnp.float32
    sequence_axis_name = "ring"
    mesh = AbstractMesh((2,), ("ring",))
    platform = "jax"
    backend = None
    partition_axis = types.SimpleNamespace(batch_axis="dp", head_axis="m", decode_head_axis="n")
    scan_attention_layers = False
    blocksize_q, blocksize_k, blocksize_b = 32, 64, 1
    attn_logit_softcapping = 30
    dropout_prob = 0.9
    hidden_size = 7


@pytest.mark.parametrize(
    "config",
    [Config, Config(), {k: v for k, v in vars(Config).items() if not k.startswith("__")}],
    ids=["class", "object", "mapping"],
)
def test_from_config_reads_the_table(config):
    m = AttentionMetadata.from_config(config, softmax_scale=0.25, dropout_prob=0.1)
    assert same(
        m,
        AttentionMetadata(
            "bfloat16", "float32", "ring", Config.mesh, "xla", "any",
            PartitionAxis(batch_axis="dp", head_axis="m", generation_head_axis="n"),
            scan_ring_attention=False, softmax_scale=0.25, dropout_prob=0.1,
            blocksize_q=32, blocksize_k=64, blocksize_b=1, logits_soft_cap=30.0,
        ),
    )  # fmt: skip
    assert same(m, AttentionMetadata(base_config=config, softmax_scale=0.25, dropout_prob=0.1))
    assert AttentionMetadata.from_config(config, None).dropout_prob == 0.0


def test_what_is_given_wins_over_the_base_config():
    axis = PartitionAxis(head_axis="given")
    m = AttentionMetadata("float16", base_config=Config, partition_axis=axis, blocksize_q=None)
    assert m.runtime_dtype == jnp.float16 and m.blocksize_q is None and m.blocksize_k == 64
    assert m.partition_axis == axis == m.partition_manager.partition_axis
    config = dict(backend="tpu", partition_manager=PartitionManager(axis), platform="pallas")
    m = AttentionMetadata(base_config=config, platform="gpu", partition_axis=PartitionAxis())
    assert m.backend is Backend.GPU and m.partition_axis == PartitionAxis()
    assert AttentionMetadata(base_config=config).partition_axis == axis


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", jnp.bfloat16])
@pytest.mark.parametrize("name", ["dtype", "torch_dtype", "attn_dtype", "runtime_dtype"])
def test_dtype_of_a_config(name, dtype):
    assert AttentionMetadata(base_config={name: dtype}).runtime_dtype == jnp.bfloat16


def test_base_config_is_read_once():
    config = types.SimpleNamespace(blocksize_q=8)
    m = AttentionMetadata(base_config=config)
    config.blocksize_q = 99
    assert m.blocksize_q == 8 and m.base_config is None and same(m, m.replace())
    assert same(m, AttentionMetadata(blocksize_q=8))
    assert same(m, AttentionMetadata(base_config=m))


@pytest.mark.parametrize("config", [object(), {}, {"hidden_size": 3}, "config"])
def test_config_with_nothing_to_read_raises(config):
    with pytest.raises(ValueError, match="none of the attributes.*attn_dtype"):
        AttentionMetadata(base_config=config)


# replace and set_attrs_carefully


def test_replace_converts_and_checks():
    m = learned(platform="tpu")
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


def test_set_attrs_carefully_returns_a_new_instance():
    m = AttentionMetadata(blocksize_q=8)
    assert m.set_attrs_carefully("blocksize_q", 1).blocksize_q == 8
    out = m.set_attrs_carefully("blocksize_k", 512)
    assert out.blocksize_k == 512 and m.blocksize_k is None and out is not m
    assert m.set_attrs_carefully("runtime_softmax_dtype", "f4", "attn_softmax_dtype") is not m
    config = {"kv_block": 64, "blocksize_k": None}

    def pick(*args, **kwargs):
        return m.set_attrs_carefully("blocksize_k", 512, *args, **kwargs).blocksize_k

    assert pick("kv_block", base_config=config) == 64
    assert pick("kv_block", False, base_config=config) == 512
    assert pick(base_config=config) == 512
    assert pick("absent", base_config=config) == 512
    with pytest.raises(ValueError, match="kv_block.*base_config="):
        pick("kv_block")
    with pytest.raises(ValueError, match="block_q"):
        m.set_attrs_carefully("block_q", 1)


# Backends


def run(code, **env):
    import os

    env = {**os.environ, **env}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True
    )


def test_import_and_construction_start_no_backend():
    # This platform does not exist, so that whatever starts a backend raises.
    result = run(
        """
        import numpy as np, jax
        from eqattn._metadata import AttentionMetadata
        from eqattn._registry import AttentionRegistry
        from jax.sharding import AbstractMesh
        m = AttentionMetadata("bfloat16", mesh=AbstractMesh((2,), ("sp",)), platform="tpu",
            softmax_scale=0.1, softmax_aux=np.zeros(3, np.float32), logits_soft_cap=3)
        m = AttentionMetadata.from_json(m.replace(blocksize_q=3).to_json())
        m.get_shardings("train")
        try:
            jax.devices()
        except RuntimeError:
            print("no backend")
        """,
        JAX_PLATFORMS="nonexistent",
    )
    assert result.stdout.strip() == "no backend", result.stderr


# Transformations


def test_plain_grad_jit_hessian_agree_with_finite_differences(x64):
    m = jax.tree.map(lambda a: a.astype(jnp.float64), learned())
    x = jnp.linspace(-2.0, 2.0, 7)
    grads = jax.jit(jax.grad(loss))(m, x)
    assert isinstance(grads, AttentionMetadata) and grads.blocksize_q == 16
    assert jax.tree.structure(grads) == jax.tree.structure(m)
    eps = 1e-6
    for field in ("softmax_scale", "logits_soft_cap"):
        up = m.replace(**{field: getattr(m, field) + eps})
        down = m.replace(**{field: getattr(m, field) - eps})
        np.testing.assert_allclose(
            getattr(grads, field), (loss(up, x) - loss(down, x)) / (2 * eps), rtol=1e-7
        )
    np.testing.assert_allclose(grads.softmax_aux, 2 * m.softmax_aux * m.softmax_scale, rtol=1e-12)
    hessian = jax.hessian(loss)(m, x)
    np.testing.assert_allclose(
        hessian.softmax_aux.softmax_aux, 2 * m.softmax_scale * jnp.eye(2), rtol=1e-12
    )
    np.testing.assert_allclose(hessian.softmax_scale.softmax_aux, 2 * m.softmax_aux, rtol=1e-12)
    value, tangent = jax.jvp(loss, (m, x), (grads, x))
    assert value.shape == tangent.shape == ()


def test_plain_grad_of_python_floats():
    m = AttentionMetadata(softmax_scale=0.5, logits_soft_cap=3.0)
    grads = jax.grad(lambda m: m.softmax_scale**2 + jnp.log(m.logits_soft_cap))(m)
    assert np.allclose(grads.softmax_scale, 1.0) and np.allclose(grads.logits_soft_cap, 1 / 3)
    assert jax.jit(lambda m: m.softmax_scale * 2)(m) == 1.0


def test_a_float_is_constant_and_an_array_learned_for_filter_grad():
    m = AttentionMetadata(softmax_scale=0.5, logits_soft_cap=jnp.float32(3))
    grads = eqx.filter_grad(lambda m: m.softmax_scale * m.logits_soft_cap)(m)
    assert grads.softmax_scale is None and grads.logits_soft_cap == 0.5
    assert eqx.filter_jit(lambda m: m.softmax_scale)(m) == 0.5
    assert type(eqx.apply_updates(m, grads).softmax_scale) is float


def test_vmap_over_metadata():
    scales = jnp.asarray([0.1, 0.2, 0.3], jnp.float32)
    many = jax.vmap(lambda s: AttentionMetadata(softmax_scale=s, logits_soft_cap=2.0 * s))(scales)
    assert many.softmax_scale.shape == (3,)
    out = jax.vmap(lambda m, x: m.softmax_scale * x + m.logits_soft_cap)(many, jnp.ones(3))
    np.testing.assert_allclose(out, 3 * scales, rtol=1e-6)
    grads = jax.vmap(jax.grad(lambda m: m.softmax_scale**2))(many)
    np.testing.assert_allclose(grads.softmax_scale, 2 * scales, rtol=1e-6)
    axes = AttentionMetadata(softmax_scale=None).replace()
    assert jax.tree.leaves(axes) == []
    shared = jax.vmap(lambda m, x: m.softmax_scale * x, in_axes=(None, 0))(
        AttentionMetadata(softmax_scale=0.5), scales
    )
    np.testing.assert_allclose(shared, 0.5 * scales)
    out = eqx.filter_vmap(lambda m: m.softmax_scale * 2, in_axes=eqx.if_array(0))(many)
    np.testing.assert_allclose(out, 2 * scales, rtol=1e-6)


def test_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("sp",))
        m = learned(mesh=mesh)
        jax.grad(loss)(m.replace(runtime_dtype="bfloat16"), jnp.ones(2))
        AttentionMetadata.from_json(m.to_json())
