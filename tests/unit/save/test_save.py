"""`eqattn.save` and `eqattn.load`."""

import collections
import dataclasses
import enum
import io
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _metadata_fields import FIELDS
from hypothesis import given, settings, strategies as st
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

import eqattn
from eqattn import (
    AttentionImpl,
    AttentionMetadata,
    AttentionOutput,
    AttentionRegistry,
    Blockwise,
    Dense,
    load,
    PartitionAxis,
    PartitionManager,
    Ragged,
    Ring,
    save,
    Zigzag,
)


def through_file(obj, **kwargs):
    file = io.BytesIO()
    save(file, obj)
    size = file.tell()
    file.seek(0)
    out = load(file, **kwargs)
    assert file.tell() == size
    return out


def assert_same(a, b):
    """Equal structure, and leaves of equal type to the bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert hash(jax.tree.structure(a)) == hash(jax.tree.structure(b))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y)
        assert np.asarray(x).dtype == np.asarray(y).dtype and np.shape(x) == np.shape(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
        assert getattr(x, "weak_type", None) == getattr(y, "weak_type", None)


@settings(deadline=None, max_examples=60)
@given(st.fixed_dictionaries(FIELDS))
def test_any_metadata(values):
    for name in ("softmax_scale", "logits_soft_cap", "softmax_aux"):
        if isinstance(values[name], np.ndarray):
            values[name] = jnp.asarray(values[name])
    metadata = AttentionMetadata(**values)
    assert_same(through_file(metadata), metadata)
    assert_same(through_file(Blockwise(metadata), like=Blockwise(metadata)), Blockwise(metadata))


DTYPES = "float32 bfloat16 float16 float8_e4m3fn float8_e5m2".split()


@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_of_any_dtype(dtype, kind):
    dtype = jnp.dtype(dtype)
    raw = np.random.default_rng(0).integers(0, 256, 24 * dtype.itemsize, dtype=np.uint8)
    aux = kind(raw.view(dtype).reshape(4, 6))  # NaN payloads and subnormals among them
    metadata = AttentionMetadata(
        softmax_aux=jnp.zeros((4, 6)), softmax_scale=0.1, logits_soft_cap=1e308
    )
    metadata = eqx.tree_at(lambda m: m.softmax_aux, metadata, aux)  # NaN is refused when it is made
    assert_same(through_file(metadata), metadata)
    assert_same(through_file(metadata, like=metadata), metadata)


def test_weak_types_and_numpy_scalars():
    metadata = AttentionMetadata(jnp.bfloat16, softmax_scale=jnp.array(0.3))
    assert metadata.softmax_scale.weak_type
    assert_same(through_file(metadata), metadata)
    scaled = eqx.tree_at(lambda m: m.softmax_scale, metadata, np.float32(0.3))
    assert_same(through_file(scaled), scaled)


def test_float64(x64):
    metadata = AttentionMetadata(softmax_aux=jnp.array([1 / 3, -0.0]))
    file = io.BytesIO()
    save(file, metadata)
    file.seek(0)
    assert_same(load(file), metadata)
    file.seek(0)
    with (
        jax.enable_x64(False),
        pytest.raises(ValueError, match="float64, which need jax_enable_x64"),
    ):
        load(file)


@pytest.mark.parametrize(
    "strategy",
    [
        Blockwise(AttentionMetadata(), precision=jax.lax.Precision.HIGHEST, fused_backward=False),
        Blockwise(AttentionMetadata(), precision=jax.lax.DotAlgorithmPreset.TF32_TF32_F32),
        Blockwise(AttentionMetadata(), precision=("highest", "default")),
        Ragged(AttentionMetadata(softmax_aux=jnp.arange(3.0))),
        Dense(AttentionMetadata(), precision="highest"),
        Ring(AttentionMetadata(), "x", AbstractMesh((4,), ("x",)), Zigzag()),
        Ring(AttentionMetadata(mesh=Mesh(np.array(jax.devices()[:2]), ("sp",)))),
    ],
    ids=lambda s: s.get_impl_name(),
)
def test_every_strategy(strategy, tmp_path):
    path = tmp_path / "strategy"  # no suffix is added
    save(path, strategy)
    assert_same(load(path), strategy)
    assert_same(load(str(path), like=strategy), strategy)
    assert_same(load(path, like=eqx.filter_eval_shape(lambda: strategy)), strategy)


def test_an_ensemble_of_strategies():
    keys = jax.random.split(jax.random.key(0), 3)

    def make(key):
        return Blockwise(AttentionMetadata(softmax_aux=jax.random.normal(key, (4, 2))))

    strategy = eqx.filter_vmap(make)(keys)
    assert strategy.metadata.softmax_aux.shape == (3, 4, 2)
    assert_same(through_file(strategy), strategy)


class Colour(enum.Enum):
    RED = object()


class Pair(NamedTuple):
    low: int
    high: float


class Part(eqx.Module):
    weight: Any
    size: int = eqx.field(static=True)


@dataclasses.dataclass(frozen=True)
class Options:
    name: str
    sizes: tuple[int, ...]


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(AttentionRegistry, "_registry", dict(AttentionRegistry._registry))
    return AttentionRegistry.register


def mine(name="test-mine"):
    """A new class each time, which only the registry can find."""

    class Mine(AttentionImpl):
        metadata: AttentionMetadata
        part: Part
        table: dict
        pairs: list
        options: Options = eqx.field(static=True)
        colour: Colour = eqx.field(static=True)
        pair: Pair = eqx.field(static=True)
        spec: P = eqx.field(static=True)
        nan: float = eqx.field(static=True)

        def __init__(self, metadata):  # of metadata alone: the other fields are its own
            self.metadata = metadata
            self.part = Part(jnp.array([1.5, jnp.nan], jnp.bfloat16), 3)
            self.table = {"z": np.arange(2.0), "a": 0.1, "n": None, "text": "t"}
            self.pairs = [Pair(1, 0.25), (jnp.int8(3), True)]
            self.options = Options("o", (1, (2, 3)))
            self.colour = Colour.RED
            self.pair = Pair(10**30, float("inf"))
            self.spec = P("a", ("b", "c"), None)
            self.nan = (jnp.dtype("bfloat16"), 1.0, True)

        @classmethod
        def get_impl_name(cls):
            return name

        def forward_native(self, q, k, v, mask=None, **kwargs):
            return AttentionOutput(attention_outputs=v * self.table["a"])

    return Mine


def test_a_strategy_of_yours(registered):
    cls = registered(mine())
    strategy = cls(AttentionMetadata(softmax_scale=2.0))
    trained = jax.tree.map(lambda x: x * 3 if eqx.is_inexact_array(x) else x, strategy)
    out = through_file(trained)
    assert type(out) is cls
    assert_same(out, trained)
    assert_same(through_file(trained, like=strategy), trained)


def test_a_strategy_in_a_strategy(registered):
    @registered
    class Outer(AttentionImpl):
        inner: AttentionImpl

        @classmethod
        def get_impl_name(cls):
            return "test-outer", "test-alias"

        def forward_native(self, q, k, v, mask=None, **kwargs):
            return self.inner(q, k, v, mask=mask)

    metadata = AttentionMetadata(softmax_aux=jnp.arange(4.0))
    strategy = Outer(metadata.replace(softmax_scale=0.5), Ring(metadata, layout=Zigzag()))
    assert_same(through_file(strategy), strategy)
    like = eqx.tree_at(lambda s: s.inner, strategy, Blockwise(metadata))
    with pytest.raises(ValueError, match="inner: 'ring' in the file, 'blockwise' in like"):
        through_file(strategy, like=like)


def test_a_class_that_is_not_registered(registered):
    strategy = mine()(AttentionMetadata())
    assert_same(through_file(strategy, like=strategy), strategy)
    with pytest.raises(ValueError, match="Mine was not registered when it was saved: pass like="):
        through_file(strategy)

    class Renamed(Blockwise):
        """Inherits the name of another: it must not come back as that."""

    with pytest.raises(ValueError, match="Renamed was not registered"):
        through_file(Renamed(AttentionMetadata()))
    with pytest.raises(ValueError, match="kind: .*Renamed.* in the file, 'blockwise' in like"):
        through_file(Renamed(AttentionMetadata()), like=Blockwise(AttentionMetadata()))


def test_a_class_that_is_registered_no_longer(registered):
    file = io.BytesIO()
    save(file, registered(mine())(AttentionMetadata()))
    del AttentionRegistry._registry["test-mine"]
    file.seek(0)
    with pytest.raises(ValueError, match="'test-mine'.*Register the class first, or pass like="):
        load(file)


def test_like_of_a_class_that_was_registered_before_or_since(registered):
    """`like` is the class, whatever the registry says of it; the file was refused."""
    cls = mine()
    strategy = cls(AttentionMetadata())
    before, since = io.BytesIO(), io.BytesIO()
    save(before, strategy)
    registered(cls)
    save(since, strategy)
    for file, there in ((before, True), (since, True), (before, False), (since, False)):
        if not there:
            AttentionRegistry._registry.pop("test-mine", None)
        file.seek(0)
        assert_same(load(file, like=strategy), strategy)
    like = registered(mine())(AttentionMetadata())  # of another class of the same name
    since.seek(0)
    assert type(load(since, like=like)) is type(like)
    since.seek(0)
    with pytest.raises(ValueError, match="'test-mine' in the file, .*Mine' in like"):
        load(since, like=strategy)


def strategy_with(**fields):
    """Of one name, whatever its fields."""

    def get_impl_name(cls):
        return "test-fields"

    body = {"get_impl_name": classmethod(get_impl_name), "__annotations__": {}}
    body["forward_native"] = lambda self, q, k, v: None
    for name, default in fields.items():
        body["__annotations__"][name] = Any
        body[name] = eqx.field(static=True, default=default)
    AttentionRegistry._registry.pop("test-fields", None)
    return AttentionRegistry.register(type("Mine", (AttentionImpl,), body))


def test_fields_that_came_and_went(registered):
    file = io.BytesIO()
    save(file, strategy_with(a=1)(AttentionMetadata()))
    file.seek(0)
    newer = strategy_with(a=2, b=3)
    out = load(file)
    assert type(out) is newer and (out.a, out.b) == (1, 3)
    file.seek(0)
    assert load(file, like=newer(AttentionMetadata(), 1)).b == 3  # the default of a field that came
    strategy_with(a=dataclasses.MISSING, b=dataclasses.MISSING)
    for like in (None, AttentionRegistry.get("test-fields")(AttentionMetadata(), 1, 2)):
        file.seek(0)
        with pytest.raises(ValueError, match="give the field a default|b: nothing in the file, 2"):
            load(file, like=like)
    newer = strategy_with(a=2, b=3)
    file.seek(0)
    with pytest.raises(ValueError, match="b: 3 in the file, 4 in like"):
        load(file, like=newer(AttentionMetadata(), 1, 4))
    strategy_with(b=3)
    file.seek(0)
    with pytest.raises(
        ValueError, match=r"Mine has no \['a'\]; its fields are \['metadata', 'b'\]"
    ):
        load(file)


DIFFERENT = {
    "metadata.blocksize_q: 128 in the file, None in like": dict(blocksize_q=128),
    "metadata.runtime_dtype: 'bfloat16' in the file, None": dict(runtime_dtype="bfloat16"),
    "metadata.softmax_scale: 0.5 in the file, None": dict(softmax_scale=0.5),
    r"metadata.softmax_aux: an array float32\[3\] in the file": dict(softmax_aux=jnp.ones(3)),
    r"metadata.softmax_aux: an array bfloat16\[4\] in the file, an array float32\[4\]": dict(
        softmax_aux=jnp.ones(4, jnp.bfloat16)
    ),
    "metadata.dropout_prob: 0.5 in the file, 0.0": dict(dropout_prob=0.5),
    "metadata.scan_ring_attention: False in the file, True": dict(scan_ring_attention=False),
    "metadata.partition_axis.head_axis: 'x' in the file, 'tp'": dict(
        partition_axis=dict(head_axis="x")
    ),
    'metadata.mesh: {"shape": .* in the file, None in like': dict(mesh=AbstractMesh((2,), ("a",))),
}


@pytest.mark.parametrize("message", DIFFERENT)
def test_another_metadata_is_refused(message):
    like = Blockwise(AttentionMetadata(softmax_aux=jnp.ones(4)))
    other = Blockwise(like.metadata.replace(**DIFFERENT[message]))
    with pytest.raises(ValueError, match=message):
        through_file(other, like=like)


def test_another_strategy_is_refused():
    metadata = AttentionMetadata()
    ring = Ring(metadata, layout=Zigzag())
    for like, message in {
        Dense(metadata): "kind: 'ring' in the file, 'dense' in like",
        metadata: "ring in the file, AttentionMetadata in like",
        Ring(metadata): "layout: 'eqattn:Zigzag' in the file, 'eqattn:Contiguous' in like",
        Ring(metadata, layout=Zigzag(), precision=jax.lax.Precision.HIGH): (
            "precision: None in the file, jax.lax:Precision.HIGH in like"
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            through_file(ring, like=like)
    with pytest.raises(
        ValueError, match="blocksize_k: 3 .*; metadata.blocksize_q: 2|blocksize_q.*k: 3"
    ):
        through_file(AttentionMetadata(blocksize_q=2, blocksize_k=3), like=metadata)


def test_another_mesh():
    mesh = AbstractMesh((2, 4), ("a", "sp"))
    strategy = Ring(AttentionMetadata(mesh=mesh), mesh=mesh)
    there = Mesh(np.array(jax.devices()[:1]), ("sp",))
    out = through_file(strategy, mesh=there)
    assert out.metadata.mesh == there and out.mesh == there
    assert through_file(strategy, mesh=None).mesh is None
    assert_same(through_file(strategy, like=out, mesh=there), out)


def test_absent_devices():
    code = (
        "import sys, jax, numpy as np, eqattn\n"
        "mesh = jax.sharding.Mesh(np.array(jax.devices()), ('sp',))\n"
        "eqattn.save(sys.stdout.buffer, eqattn.Ring(eqattn.AttentionMetadata(mesh=mesh)))"
    )
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=16", "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = str(Path(eqattn.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(ValueError, match="cpu devices .*absent.*Pass `mesh=`"):
        load(io.BytesIO(done.stdout))
    assert load(io.BytesIO(done.stdout), mesh=None) == Ring(AttentionMetadata())


class Sizes(tuple):
    """A tuple of a class of its own."""


class Real(float):
    """A float of a class of its own."""


class Parts(enum.Flag):
    FIRST = 1
    SECOND = 2


@pytest.mark.parametrize("value", [Parts.FIRST, Parts.FIRST | Parts.SECOND, Parts(0)])
def test_flags(registered, value):
    strategy = strategy_with(a=value)(AttentionMetadata())
    assert_same(through_file(strategy), strategy)
    assert_same(through_file(strategy, like=strategy), strategy)


def test_what_cannot_be_saved(registered, tmp_path):
    path = tmp_path / "x"
    with pytest.raises(TypeError, match=r"^a: .*function"):
        save(path, strategy_with(a=len)(AttentionMetadata()))
    with pytest.raises(TypeError, match=r"^a\.b\.1: .*set"):
        save(path, strategy_with(a=None)(AttentionMetadata(), {"b": (0, {1})}))
    ordered, text = collections.OrderedDict(b=1, a=2), np.str_("t")
    keys = {text: 1}
    for value, name in (
        (Sizes((1, 2)), "tuple"), (ordered, "dict"), (text, "str"), (Real(1), "float"), (keys, "str")
    ):  # fmt: skip
        with pytest.raises(TypeError, match=rf"^a: .* would come back as {name}: make it one"):
            save(path, strategy_with(a=None)(AttentionMetadata(), value))
    key = eqx.tree_at(lambda m: m.part.weight, mine()(AttentionMetadata()), jax.random.key(0))
    with pytest.raises(TypeError, match=r"^part\.weight: .*key_data"):
        save(path, key)
    words = eqx.tree_at(lambda m: m.part.weight, mine()(AttentionMetadata()), np.array(["a"]))
    with pytest.raises(TypeError, match=r"^part\.weight: an array of <U1 is not of numbers"):
        save(path, words)
    with pytest.raises(TypeError, match="outside of jax.jit"):
        jax.jit(lambda s: save(path, AttentionMetadata(softmax_scale=s)))(1.0)
    assert not path.exists()


def test_a_loaded_strategy_does_not_retrace():
    traced = []

    @jax.jit
    def run(strategy):
        traced.append(1)
        return strategy.metadata.softmax_scale * 2

    strategy = Blockwise(AttentionMetadata(softmax_scale=jnp.array(0.5)))
    assert run(strategy) == run(through_file(strategy)) == 1
    assert len(traced) == 1


@dataclasses.dataclass(frozen=True)
class Plain:
    """No module: to JAX a leaf, whatever it holds."""

    number: float


def test_what_only_looks_like_leaves_or_defaults(registered):
    """Numbers in a dataclass are not leaves of the tree, and what a field holds is not replaced by
    what its factory would make.
    """
    manager = PartitionManager(PartitionAxis(batch_axis="rows"))
    cls = strategy_with(manager=None, plain=None)
    strategy = cls(AttentionMetadata(), manager, Plain(0.25))
    out = through_file(strategy)
    assert out.manager == manager and out.plain == Plain(0.25)

    class Holds(AttentionImpl):
        metadata: AttentionMetadata
        plain: Any

        @classmethod
        def get_impl_name(cls):
            return "test-holds"

        def forward_native(self, q, k, v, mask=None, **kwargs):
            return AttentionOutput(attention_outputs=v)

    out = through_file(registered(Holds)(AttentionMetadata(), Plain(0.25)))
    assert out.plain == Plain(0.25)


def test_weak_types_make_no_difference():
    weak, strong = jnp.asarray(2.0), jnp.float32(2.0)
    assert weak.weak_type and not strong.weak_type
    for one, other in ((weak, strong), (strong, weak)):
        like = AttentionMetadata(softmax_scale=other)
        out = through_file(AttentionMetadata(softmax_scale=one), like=like)
        assert float(out.softmax_scale) == 2
