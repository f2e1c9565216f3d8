"""Exact JSON forms of arrays, meshes, specifications and modules.

Everything is strict JSON. What JSON cannot hold exactly is an object with one key, which names its
kind: `$array`, `$mesh`, `$spec` or `$float`. An array has its bytes in base64, little-endian and in
row-major order, so that it comes back bit for bit. It is JAX's (`"jax"`), NumPy's (`"numpy"`) or a
scalar of NumPy (`"scalar"`). One of JAX's with a weak type says so. For example,
`np.float16([1, 2])` is

    {"$array": {"dtype": "float16", "shape": [2], "base64": "ADwAQA==", "kind": "numpy"}}

and an infinite number is `{"$float": "inf"}`. No other name may begin with a `$`.
"""

import base64
import binascii
import enum
import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, PartitionSpec


def encode(value: Any) -> Any:
    """A value as strict JSON data that `decode` turns back into it, bit for bit.

    Modules and mappings become objects, tuples become lists, and dtypes and enums become their
    names. These come back as plain data, which the constructor they are given to converts.

    **Raises:** `TypeError` for tracers, abstract arrays and anything else without a value.
    """
    if isinstance(value, enum.Enum):
        return encode(value.value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and not isinstance(value, np.generic):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return {"$array": _encode_array(value)}
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, Mesh | AbstractMesh):
        return {"$mesh": _encode_mesh(value)}
    if isinstance(value, PartitionSpec):
        return {"$spec": _encode_spec(value)}
    if isinstance(value, eqx.Module):
        return {name: encode(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {_key(name): encode(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    raise TypeError(f"Cannot serialise {value!r} of type {type(value).__name__}.")


def decode(data: Any) -> Any:
    """The value that `encode` wrote.

    **Raises:** `ValueError` if the devices of a mesh are absent, or if an array's dtype needs
    `jax_enable_x64`.
    """
    if isinstance(data, list | tuple):
        return [decode(item) for item in data]
    if not isinstance(data, Mapping):
        return data
    if len(data) == 1:
        (tag, body), *_ = data.items()
        if tag in _DECODERS:
            try:
                return _DECODERS[tag](body)
            except KeyError as e:
                raise ValueError(f"{tag} has no {e}, which to_dict writes: got {body!r}.") from e
            except (TypeError, AttributeError, binascii.Error) as e:
                got = f"{body!r:.200}"
                raise ValueError(f"{tag} is not what to_dict writes ({e}): got {got}.") from e
    return {name: decode(item) for name, item in data.items()}


def check_names(cls: type, data: Any) -> None:
    """Raises `TypeError` or `ValueError` unless `data` maps names of fields of `cls`."""
    names = list(cls.__dataclass_fields__)  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(data, Mapping):
        raise TypeError(f"{cls.__name__} expects an object with fields {names}, got {data!r}.")
    unknown = sorted(set(map(str, data)) - set(names))
    if unknown:
        raise ValueError(f"{cls.__name__} has no {unknown}; its fields are {names}.")


def _key(name: Any) -> str:
    if not isinstance(name, str) or name.startswith("$"):
        raise TypeError(f"A name must be a string that does not start with '$', got {name!r}.")
    return name


def _encode_array(array: Any) -> dict:
    if isinstance(array, Tracer):
        raise TypeError(
            f"Cannot serialise a traced array of shape {array.shape}: serialise outside of "
            "jax.jit, jax.grad and jax.vmap."
        )
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(f"Cannot serialise an array of {array.dtype}: it has no plain bytes.")
    data = np.asarray(array)
    of_numpy = "scalar" if isinstance(array, np.generic) else "numpy"
    little = data.astype(data.dtype.newbyteorder("<"), copy=False)
    body = {
        "dtype": data.dtype.name,
        "shape": list(data.shape),
        "base64": base64.b64encode(little.tobytes()).decode("ascii"),
        "kind": "jax" if isinstance(array, jax.Array) else of_numpy,
    }
    return body | {"weak_type": True} if getattr(array, "weak_type", False) else body


def _decode_array(body: Mapping) -> Any:
    dtype = np.dtype(body["dtype"])
    raw = base64.b64decode(body["base64"], validate=True)
    shape = tuple(body["shape"])
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes do not make an array of {dtype.name}{list(shape)}.")
    data = np.frombuffer(raw, dtype.newbyteorder("<")).astype(dtype).reshape(shape)
    if body["kind"] not in ("jax", "numpy", "scalar"):
        raise ValueError(f"An array is of kind jax, numpy or scalar, got {body['kind']!r}.")
    if body["kind"] != "jax":
        return data[()] if body["kind"] == "scalar" else data
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"An array of {dtype.name} needs jax_enable_x64 to be restored exactly.")
    return _restored(data, body.get("weak_type", False))


def _restored(data: np.ndarray, weak_type: bool) -> jax.Array:
    """JAX's array of some data. A weak type is kept, so that the array promotes, and finds compiled
    programs, as it did.
    """
    array = jnp.asarray(data)
    # JAX makes one of a Python number, which can only be done if that number is exact.
    if weak_type and data.shape == ():
        weak = jnp.asarray(data.item())
        return weak if weak.dtype == data.dtype and weak == array else array
    return array


def _encode_mesh(mesh: Mesh | AbstractMesh) -> dict:
    # A mesh has device ids and their platform. An abstract mesh has None instead, and may have the
    # kind of device that it is for.
    body = {
        "shape": list(mesh.axis_sizes),
        "axis_names": [_key(name) for name in mesh.axis_names],
        "axis_types": [kind.name for kind in mesh.axis_types],
        "device_ids": None,
        "platform": None,
        "abstract_device": None,
    }
    if isinstance(mesh, Mesh):
        body["device_ids"] = [int(d.id) for d in mesh.devices.flat]
        body["platform"] = mesh.devices.flat[0].platform
    elif mesh.abstract_device is not None:
        device = mesh.abstract_device
        body["abstract_device"] = [device.device_kind, device.num_cores, device.platform]
    return body


def _decode_mesh(body: Mapping) -> Mesh | AbstractMesh:
    shape, names = tuple(body["shape"]), tuple(map(_key, body["axis_names"]))
    types = tuple(AxisType[name] for name in body["axis_types"])
    ids, platform = body["device_ids"], body["platform"]
    if ids is None:
        device = body["abstract_device"]
        device = None if device is None else AbstractDevice(*device)
        return AbstractMesh(shape, names, axis_types=types, abstract_device=device)
    if len(ids) != math.prod(shape) or not isinstance(platform, str):
        raise ValueError(f"{len(ids)} devices of {platform!r} make no mesh of {list(shape)}.")
    try:
        present = {d.id: d for d in jax.devices(platform)}
    except RuntimeError:
        present = {}
    absent = [i for i in ids if i not in present]
    if absent:
        raise ValueError(
            f"The mesh {dict(zip(names, shape))} needs the {platform} devices {absent}, which are "
            f"absent here ({len(present)} {platform} devices). Pass `mesh=` to use another mesh."
        )
    devices = np.array([present[i] for i in ids], dtype=object).reshape(shape)
    return Mesh(devices, names, axis_types=types)


def _encode_spec(spec: PartitionSpec) -> dict:
    def entry(e: Any) -> Any:
        if e is PartitionSpec.UNCONSTRAINED:
            return {"unconstrained": True}
        return list(e) if isinstance(e, tuple) else e

    kind = getattr(spec, "unreduced_kind", None)  # JAX before 0.12 only has sums
    return {
        "entries": [entry(e) for e in spec.partitions],
        "unreduced": sorted(spec.unreduced),
        "reduced": sorted(spec.reduced),
        "unreduced_kind": None if kind is None or kind.name == "sum" else kind.name,
    }


def _decode_spec(body: Mapping) -> PartitionSpec:
    def entry(e: Any) -> Any:
        if isinstance(e, Mapping):
            return PartitionSpec.UNCONSTRAINED
        return tuple(e) if isinstance(e, list) else e

    kind: dict[str, Any] = {}
    if body["unreduced_kind"] is not None:
        kinds = getattr(jax.sharding, "UnreducedKind", None)
        if kinds is None:
            raise ValueError(f"unreduced_kind={body['unreduced_kind']!r} needs a newer JAX.")
        kind["unreduced_kind"] = kinds[body["unreduced_kind"]]
    return PartitionSpec(
        *map(entry, body["entries"]),
        unreduced=frozenset(body["unreduced"]),
        reduced=frozenset(body["reduced"]),
        **kind,
    )


_DECODERS = {
    "$array": _decode_array,
    "$mesh": _decode_mesh,
    "$spec": _decode_spec,
    "$float": float,
}
