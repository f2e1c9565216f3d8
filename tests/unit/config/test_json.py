import enum
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _metadata_fields import arrays, FIELDS, FLOATS
from _same import same
from hypothesis import given, settings, strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec as P

from eqattn._config.json import decode, encode
from eqattn._config.metadata import AttentionMetadata
from eqattn._config.platform import Backend, Platform


def through_json(value):
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


def bits(array):
    return np.asarray(array).tobytes()


@settings(deadline=None, max_examples=60)
@given(arrays(dtypes=(*FLOATS, "int32", "uint8", "bool")).filter(lambda a: a.dtype != bool))
def test_numpy_arrays_keep_every_bit(array):
    out = through_json(array)
    assert type(out) is np.ndarray
    assert (out.dtype, out.shape, bits(out)) == (array.dtype, array.shape, bits(array))


@settings(deadline=None, max_examples=60)
@given(arrays())
def test_jax_arrays_keep_every_bit(array):
    array = jnp.asarray(array)
    out = through_json(array)
    assert isinstance(out, jax.Array) and out.dtype == array.dtype and out.shape == array.shape
    assert bits(out) == bits(array)


def test_byte_order_is_native_after_the_round_trip():
    array = np.arange(3, dtype=">f4")
    out = through_json(array)
    assert out.dtype == np.float32 and out.dtype.isnative and np.array_equal(out, array)


@settings(deadline=None)
@given(st.floats())
def test_floats_are_exact(x):
    out = through_json(x)
    assert type(out) is float and np.float64(out).tobytes() == np.float64(x).tobytes() or x != x
    assert (x != x) == (out != out)


def test_float64_arrays_need_x64():
    with jax.enable_x64(True):
        text = json.dumps(encode(jnp.asarray(1 / 3)))
        assert decode(json.loads(text)).dtype == jnp.float64
        assert decode(json.loads(text)) == 1 / 3
    with jax.enable_x64(False), pytest.raises(ValueError, match="float64 needs jax_enable_x64"):
        decode(json.loads(text))


def specs():
    names = st.sampled_from([None, "a", ("b", "c"), P.UNCONSTRAINED])
    return st.lists(names, max_size=4, unique_by=str).map(lambda e: P(*e))


@given(specs())
def test_partition_specs(spec):
    assert through_json(spec) == spec
    spec = spec.update(unreduced={"x"}, reduced={"y"})
    assert through_json(spec) == spec
    kinds = getattr(jax.sharding, "UnreducedKind", ())
    for kind in kinds:
        kinded = spec.update(unreduced_kind=kind)
        assert through_json(kinded) == kinded and through_json(kinded).unreduced_kind is kind


@pytest.mark.parametrize("kind", list(AxisType))
def test_meshes(kind):
    for mesh in (
        Mesh(np.array(jax.devices()[:1]), ("sp",), axis_types=(kind,)),
        Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("a", "b")),
        AbstractMesh((2, 3), ("a", "b"), axis_types=(kind, AxisType.Auto)),
        Mesh(np.array(jax.devices()[:1]), ("sp",)).abstract_mesh,
    ):
        m = AttentionMetadata(mesh=mesh)
        out = AttentionMetadata.from_json(m.to_json())
        assert same(out, m) and out.mesh == mesh and out.mesh.axis_types == mesh.axis_types


MESH_OF_16 = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, Mesh
from eqattn import AttentionMetadata
devices = np.array(jax.devices())[::-1].reshape(2, 8)  # not in the default order
types = (AxisType.Explicit, AxisType.Auto)
m = AttentionMetadata(mesh=Mesh(devices, ("dp", "sp"), axis_types=types))
text = m.to_json() if len(sys.argv) == 1 else sys.argv[1]
out = AttentionMetadata.from_json(text)
assert out.mesh == m.mesh and hash(out.mesh) == hash(m.mesh) and out.mesh.axis_types == types
assert [d.id for d in out.mesh.devices.flat] == list(range(16))[::-1]
assert jax.tree.structure(out) == jax.tree.structure(m)
print(text)
"""


def test_mesh_of_16_devices_and_their_absence():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=16"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    out = subprocess.run(
        [sys.executable, "-c", MESH_OF_16], env=env, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    body = json.loads(out.stdout)["mesh"]["$mesh"]
    assert body["shape"] == [2, 8] and body["axis_names"] == ["dp", "sp"]
    assert body["axis_types"] == ["Explicit", "Auto"] and body["device_ids"] == [*range(16)][::-1]
    # This process has fewer devices.
    absent = [i for i in range(16)[::-1] if i >= len(jax.devices("cpu"))]
    with pytest.raises(ValueError, match=f"cpu devices \\{absent}.*absent".replace("]", r"\]")):
        AttentionMetadata.from_json(out.stdout)
    assert AttentionMetadata.from_json(out.stdout, mesh=None).mesh is None
    mesh = Mesh(np.array(jax.devices()[:1]), ("sp",))
    assert AttentionMetadata.from_json(out.stdout, mesh=mesh).mesh == mesh
    gone = {**body, "platform": "tpu", "shape": [2, 4], "device_ids": [*range(8)][::-1]}
    with pytest.raises(ValueError, match=r"tpu devices \[7, 6, 5, 4, 3, 2, 1, 0\].*\(0 tpu"):
        AttentionMetadata.from_dict({"mesh": {"$mesh": gone}})


@settings(deadline=None, max_examples=100)
@given(st.fixed_dictionaries(FIELDS))
def test_metadata_round_trip(values):
    for name in ("softmax_scale", "logits_soft_cap", "softmax_aux"):
        if isinstance(values[name], np.ndarray):
            values[name] = jnp.asarray(values[name])
    m = AttentionMetadata(**values)
    for out in (
        AttentionMetadata.from_json(m.to_json()),
        AttentionMetadata.from_json(m.to_json(indent=2, sort_keys=True)),
        AttentionMetadata.from_dict(m.to_dict()),
    ):
        assert jax.tree.structure(out) == jax.tree.structure(m)
        assert hash(jax.tree.structure(out)) == hash(jax.tree.structure(m))
        for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(m), strict=True):
            assert isinstance(a, float) == isinstance(b, float)
            assert np.asarray(a).dtype == np.asarray(b).dtype and bits(a) == bits(b)
            assert np.shape(a) == np.shape(b)
    json.loads(m.to_json(), parse_constant=pytest.fail)


def test_plain_dict_and_unknown_names():
    m = AttentionMetadata.from_dict({"runtime_dtype": "bfloat16", "platform": "TPU"})
    assert m.runtime_dtype == jnp.bfloat16 and m.backend is Backend.TPU
    with pytest.raises(ValueError, match="block_q.*blocksize_q"):
        AttentionMetadata.from_dict({"block_q": 3})
    with pytest.raises(TypeError):
        AttentionMetadata.from_json("[1]")


def test_what_has_no_value_cannot_be_serialised():
    m = AttentionMetadata(softmax_scale=jax.ShapeDtypeStruct((), jnp.float32))
    with pytest.raises(TypeError, match="ShapeDtypeStruct"):
        m.to_dict()
    with pytest.raises(TypeError, match="outside of jax.jit"):
        jax.jit(lambda s: AttentionMetadata(softmax_scale=s).to_json())(1.0)
    with pytest.raises(TypeError, match="key<"):
        encode(jax.random.key(0))
    with pytest.raises(TypeError, match="object"):
        encode(object())
    with pytest.raises(TypeError, match="'\\$x'"):
        encode({"$x": 1})


def test_a_numpy_scalar_comes_back_as_one():
    """In a static field, it came back as an array, which has no hash."""
    for x in (np.int64(3), np.float32(0.1), np.bool_(True)):
        got = decode(encode(x))
        assert type(got) is type(x) and got == x and hash(got) == hash(x)
    assert isinstance(decode(encode(np.array(3))), np.ndarray)


def test_corrupt_array():
    body = encode(np.zeros(3, np.float32))["$array"]
    with pytest.raises(ValueError, match=r"12 bytes.*float32\[4\]"):
        decode({"$array": {**body, "shape": [4]}})


@pytest.mark.parametrize("spoil", ["\n", " ", "*", "====", "\u00e9", "A"])
def test_corrupt_base64(spoil):
    """Characters that are no base64 are an error, not skipped; nor may any be missing."""
    data = AttentionMetadata(softmax_aux=np.arange(3.0, dtype=np.float32)).to_dict()
    text = data["softmax_aux"]["$array"]["base64"]
    for corrupt in (text[:4] + spoil + text[4:], text[:-4]):
        data["softmax_aux"]["$array"]["base64"] = corrupt
        with pytest.raises(ValueError):
            AttentionMetadata.from_dict(data)


ARRAY = encode(np.zeros(2, np.float32))["$array"]
MESH = encode(Mesh(np.array(jax.devices()[:2]), ("sp",)))["$mesh"]


@pytest.mark.parametrize(
    "data",
    [
        {"$array": 1},
        {"$float": None},
        *({"$array": ARRAY | x} for x in ({"shape": None}, {"shape": [None]}, {"base64": None})),
        *({"$array": ARRAY | x} for x in ({"dtype": "bfloat17"}, {"kind": "torch"})),
        *({"$mesh": MESH | x} for x in ({"platform": True}, {"platform": [1]}, {"shape": [3]})),
        *({"$mesh": MESH | x} for x in ({"device_ids": [{}, {}]}, {"axis_names": [1.5]})),
        {"$mesh": None},
        {"$spec": 3},
    ],
    ids=str,
)
def test_what_to_dict_does_not_write_is_named(data):
    """It raised `TypeError` from inside of NumPy or JAX; a kind of its own became NumPy's."""
    with pytest.raises(ValueError):
        AttentionMetadata.from_dict({"softmax_aux": data})


@pytest.mark.parametrize("number", [0.3, 3])
def test_a_scalar_keeps_its_weak_type(number):
    """Without it, the first call of a restored strategy compiled a second program."""
    weak, strong = jnp.asarray(number), jnp.asarray(np.float32(number))
    assert weak.weak_type and through_json(weak).weak_type
    assert not strong.weak_type and not through_json(strong).weak_type
    assert bits(through_json(weak)) == bits(weak) and through_json(weak).dtype == weak.dtype


def test_an_integer_beyond_floats_has_a_message():
    with pytest.raises(ValueError, match="1329 bits is beyond the range of floats"):
        AttentionMetadata(softmax_scale=10**400)


@pytest.mark.parametrize("x", [float("inf"), float("-inf")])
def test_infinities_keep_their_sign(x):
    assert decode(json.loads(json.dumps(encode(x), allow_nan=False))) == x


def test_enums_become_their_plain_values():
    kind = enum.Enum("kind", {"one": "a name"})
    assert encode(kind.one) == "a name" and type(encode(Platform.AUTO)) is str
