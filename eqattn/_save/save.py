"""A saved strategy, or saved metadata, is one file: a line of JSON, then the bytes of the leaves.

    {"eqattn": 2, "library": "...", "object": ..., "leaves": {"bytes": ..., "sha256": ...}, ...}
    the bytes of the first leaf, the second, ... without anything between them

The line has five keys. `eqattn` is the version of the format, and `library` the version of eqattn
that wrote the file. `object` is the description that `describe` makes. `leaves` says how many bytes
the leaves have, and gives their hash. `sha256` is a hash of the rest of the line. The leaves come
in the order of `jax.tree.leaves`, and are little-endian. Equinox's own format is not used because
it makes void dtypes of float8, and of NumPy's bfloat16.
"""

import hashlib
import io
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, overload, Protocol, runtime_checkable, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh

from .._config.json import encode, restored
from .._config.metadata import AttentionMetadata
from .._config.platform import NOT_GIVEN
from .._version import __version__
from ..strategies import AttentionImpl
from .describe import describe, differences, Leaf, leaf_of, restore, with_defaults
from .upgrade import upgraded


_Saved = TypeVar("_Saved", bound=AttentionMetadata | AttentionImpl)
_Path = str | os.PathLike[str]

_VERSION = 2
_START = b'{"eqattn": '


@runtime_checkable
class _Writable(Protocol):
    def write(self, data: bytes, /) -> object: ...


@runtime_checkable
class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...
    def readline(self) -> bytes: ...


def save(path_or_file: _Path | _Writable, obj: AttentionMetadata | AttentionImpl) -> None:
    """Writes a strategy or metadata to a file, exactly. [`eqattn.load`][] reads it.

    **Arguments:**

    - `path_or_file`: a path, whose file is replaced, or a file open for writing in binary mode,
        which is written at its current position.
    - `obj`: a strategy, also of a class of your own, or an
        [`AttentionMetadata`][eqattn.AttentionMetadata]. Leaves are arrays of any dtype, of JAX or
        NumPy, and Python numbers. Static fields hold numbers, text, dtypes, enums, meshes,
        `PartitionSpec`s, modules and dataclasses, also in tuples, lists and dictionaries.

    **Raises:** `TypeError`, naming the field, for what has no exact value: functions, traced
    arrays, random keys. Nothing is written then.
    """
    if not isinstance(obj, AttentionMetadata | AttentionImpl):
        raise TypeError(
            "save takes a strategy or an AttentionMetadata, eqx.tree_serialise_leaves any other "
            f"tree; got {type(obj).__name__}."
        )
    described = describe(obj)
    leaves = [x for x in jax.tree.leaves(obj) if leaf_of(x) is not None]
    if len(leaves) != _line(described).count(b'{"$leaf": '):
        raise TypeError(f"{type(obj).__name__} has leaves that are not in its fields.")
    content = b"".join(map(_bytes_of, leaves))
    header = {
        "eqattn": _VERSION,
        "library": __version__,
        "object": described,
        "leaves": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()},
    }
    header["sha256"] = _digest(header)
    data = _line(header) + b"\n" + content
    if isinstance(path_or_file, str | os.PathLike):
        Path(path_or_file).write_bytes(data)
    else:
        path_or_file.write(data)


@overload
def load(path_or_file: _Path | _Readable, like: _Saved, *, mesh: Any = ...) -> _Saved: ...
@overload
def load(path_or_file: _Path | _Readable, like: None = None, *, mesh: Any = ...) -> Any: ...
def load(path_or_file: _Path | _Readable, like: Any = None, *, mesh: Any = NOT_GIVEN) -> Any:
    """Reads what [`eqattn.save`][] wrote. The tree structure is equal, and the leaves are equal to
    the bit.

    Nothing is imported or unpickled. A class must be registered with
    [`AttentionRegistry`][eqattn.AttentionRegistry], or be imported already.

    **Arguments:**

    - `path_or_file`: a path, or a file open for reading in binary mode. It is read from its current
        position, and left where `save` ended.
    - `like`: a strategy or metadata that the file must equal in all but the values of its leaves.
        Its leaves may be `jax.ShapeDtypeStruct`s, and its class need not be registered. With None,
        the file may hold anything.
    - `mesh`: a mesh, or None, that takes the place of each mesh in the file. The devices of those
        in the file are then not looked for.

    **Returns:** a strategy or an [`AttentionMetadata`][eqattn.AttentionMetadata]. JAX arrays are
    on the default device.

    **Raises:** `ValueError` for a file that `save` did not write, that is truncated or damaged, or
    that differs from `like` (naming each field, and both values); and if a class, a device of a
    mesh, or `jax_enable_x64` is missing here.
    """
    if not isinstance(mesh, Mesh | AbstractMesh | None | type(NOT_GIVEN)):
        raise TypeError(f"mesh is a jax.sharding.Mesh, an AbstractMesh or None, got {mesh!r}.")
    if not isinstance(like, AttentionMetadata | AttentionImpl | None):
        raise TypeError(
            f"like is a strategy, an AttentionMetadata or None, got {type(like).__name__}."
        )
    if isinstance(path_or_file, str | os.PathLike):
        with open(path_or_file, "rb") as file:
            header, content = _read(file)
            if file.read(1):
                raise ValueError(
                    "The file is damaged, or holds more than one object: it goes on where save "
                    "ended. Pass an open file to read one after the other."
                )
    else:
        header, content = _read(path_or_file)
    described = header["object"]
    if mesh is not NOT_GIVEN:
        described = _with_mesh(described, encode(mesh))
    if like is None:
        try:
            leaves, structure = jax.tree.flatten(restore(described))
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"The header of the file is not as save writes it: {e!r}.") from e
    else:
        found = [f"{at}: {a} in the file, {b} in like" for at, a, b in _compare(described, like)]
        if found:
            raise ValueError("The file differs from like. " + "; ".join(found) + ".")
        leaves, structure = jax.tree.flatten(like)
        leaves = [leaf_of(x) or x for x in leaves]
    return jax.tree.unflatten(structure, _filled(leaves, content))


def _compare(described: Any, like: Any) -> Any:
    """The differences between a description and `like`, both as a file has them."""
    lines = _line(with_defaults(described, like)), _line(describe(like))
    return differences(*map(json.loads, lines))


def _line(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, allow_nan=False).encode()


def _digest(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(_line(header)).hexdigest()


def _read(file: _Readable) -> tuple[dict[str, Any], bytes]:
    """Reads and checks a file. Returns the header and the bytes of the leaves, in this format."""
    # A text file cannot even be read: the bytes of leaves are no text.
    start = "" if isinstance(file, io.TextIOBase) else file.read(len(_START))
    if isinstance(start, str):
        raise ValueError("The file is open in text mode: open it with mode 'rb'.")
    if start != _START:
        raise ValueError(
            "The file is empty." if not start else "The file was not written by eqattn.save."
        )
    line = start + file.readline()
    if not line.endswith(b"\n"):
        raise ValueError("The file is truncated: it ends within its header.")
    try:
        header = json.loads(line)
        version, digest = header["eqattn"], header.pop("sha256", None)
    except (ValueError, KeyError, RecursionError):
        raise ValueError("The header of the file is damaged.") from None
    if version not in (1, _VERSION):
        raise ValueError(
            f"The file has format {version} of eqattn {header.get('library')}; this one reads "
            f"formats 1 to {_VERSION}. Install another eqattn, or save again with that one."
        )
    if digest != _digest(header):
        raise ValueError("The header of the file is damaged, or was edited.")
    size = header["leaves"]["bytes"]
    content = file.read(size)
    if len(content) < size:
        raise ValueError(f"The file is truncated: {len(content)} of {size} bytes of leaves.")
    if hashlib.sha256(content).hexdigest() != header["leaves"]["sha256"]:
        raise ValueError("The leaves in the file are damaged.")
    if version == 1:
        header["object"], content = upgraded(header["object"], content)
    return header, content


def _with_mesh(data: Any, mesh: Any) -> Any:
    if isinstance(data, list):
        return [_with_mesh(item, mesh) for item in data]
    if not isinstance(data, Mapping):
        return data
    return mesh if "$mesh" in data else {name: _with_mesh(x, mesh) for name, x in data.items()}


def _bytes_of(x: Any) -> bytes:
    if isinstance(x, Tracer | jax.ShapeDtypeStruct):
        raise TypeError(
            f"{x} has no value to save: save outside of jax.jit, jax.grad, jax.vmap and "
            "jax.eval_shape."
        )
    array = np.asarray(x)
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _filled(leaves: list[Any], content: bytes) -> list[Any]:
    """Puts values from the `content` of a file in the place of the types of leaves."""
    filled, at = [], 0
    for leaf in leaves:
        if isinstance(leaf, Leaf):
            dtype = jnp.dtype(leaf.dtype)
            end = at + math.prod(leaf.shape) * dtype.itemsize
            raw = np.frombuffer(content[at:end], dtype.newbyteorder("<"))
            filled.append(_value(leaf, raw.astype(dtype).reshape(leaf.shape)))
            at = end
        else:
            filled.append(leaf)
    return filled


def _value(leaf: Leaf, data: np.ndarray) -> Any:
    if leaf.kind == "numpy":
        return data
    if leaf.kind != "jax":
        return data[()] if leaf.kind == "scalar" else data.item()
    if jax.dtypes.canonicalize_dtype(data.dtype) != data.dtype:
        raise ValueError(f"The file has arrays of {leaf.dtype}, which need jax_enable_x64.")
    return restored(data, leaf.weak_type)
