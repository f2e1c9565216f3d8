"""Writes strategies and metadata to files, and reads them.

A saved strategy, or saved metadata, is one file: a line of JSON, then the bytes of the leaves.

    {"eqattn": 2, "library": "...", "object": ..., "leaves": {"bytes": ..., "sha256": ...}, ...}
    the bytes of the first leaf, the second, ... without anything between them

The line has five keys. `eqattn` is the version of the format, and `library` the version of eqattn
that wrote the file. `object` is the description that `describe` makes. `leaves` says how many bytes
the leaves have, and gives their hash. `sha256` is a hash of the rest of the line. The leaves come
in the order of `jax.tree.leaves`, and are little-endian. Equinox's own format is not used because
it makes void dtypes of float8, and of NumPy's bfloat16.

Describes trees of modules as strict JSON, without the values of their leaves.

What JSON has no type for is an object with one key, its tag. `_config/json.py` defines some tags.
This module adds `$tuple`, `$dtype`, `$enum`, `$strategy`, `$metadata` and `$object` (a module,
dataclass or named tuple). It also adds `$leaf` (the type of a leaf) and `$constant` (a static value
in a field that may also hold a leaf). For example, `Blockwise()` begins with

    {"$strategy": {"name": "blockwise", "fields": {"metadata": {"$metadata": {...}}, ...}}}

Converts what files of earlier formats hold to the current one.
"""

import dataclasses
import enum
import hashlib
import io
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload, Protocol, runtime_checkable, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh

from ._config.json import decode, encode, restored
from ._config.metadata import AttentionMetadata
from ._config.platform import NOT_GIVEN
from ._misc import constants_of, Static, unwrap
from ._version import __version__
from .strategies import AttentionImpl
from .strategies._registry import AttentionRegistry


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The type of a leaf. `kind` says what it is: an array of `"jax"` or of `"numpy"`, a NumPy
    `"scalar"`, or a Python `"float"` or `"complex"`.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...] = ()
    weak_type: bool = False

    def __str__(self) -> str:
        if self.kind in ("float", "complex"):
            return f"a Python {self.kind}"
        kind = {"jax": "an array", "numpy": "a NumPy array", "scalar": "a NumPy scalar"}[self.kind]
        return f"{kind} {self.dtype}{list(self.shape)}"


def leaf_of(x: Any) -> Leaf | None:
    """The type of a leaf that has plain bytes; None for anything else.

    **Raises:** `TypeError` for an array whose elements are not numbers, such as random keys.
    """
    if isinstance(x, np.generic):
        return Leaf("scalar", x.dtype.name)
    if type(x) in (float, complex):
        return Leaf(type(x).__name__, np.dtype(type(x)).name)
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise TypeError(f"{x.dtype} has no plain bytes; save jax.random.key_data of a key.")
        if np.dtype(x.dtype).kind in "OSUMm" or np.dtype(x.dtype).names:
            raise TypeError(f"an array of {x.dtype} is not of numbers.")
        kind = "numpy" if isinstance(x, np.ndarray) else "jax"
        return Leaf(kind, x.dtype.name, tuple(x.shape), getattr(x, "weak_type", False))
    return None


def describe(x: Any, at: str = "", static: bool = False) -> Any:
    """The JSON data from which `restore` makes the tree again, with a `Leaf` for each leaf.

    **Arguments:**

    - `x`: the tree, or a part of it.
    - `at`: the path of `x` in the tree, for messages.
    - `static`: whether `x` is in a static field, in which numbers are values and not leaves.

    **Raises:** `TypeError`, naming the field, for what has no exact text.
    """

    def inside(item: Any, name: Any, static: bool = static) -> Any:
        return describe(item, f"{at}.{name}" if at else str(name), static)

    try:
        leaf = None if static else leaf_of(x)
        if leaf is not None:
            return {"$leaf": dataclasses.asdict(leaf) | {"shape": list(leaf.shape)}}
        if isinstance(x, enum.Enum):
            # Flags that are combined have no member's name.
            named = x.name in type(x).__members__
            return {"$enum": [_path(type(x)), x.name if named else x.value]}
        if isinstance(x, np.dtype):
            return {"$dtype": x.name}
        if isinstance(x, Static):
            return {"$constant": inside(x.value, "value", True)}
        if type(x) is AttentionMetadata:
            values = {f: vars(x)[f.name] for f in dataclasses.fields(x)}
            leaves = {
                f.name: inside(v, f.name)
                for f, v in values.items()
                if not (static or f.metadata.get("static")) and leaf_of(v)
            }
            data = {f.name: leaves.get(f.name) or encode(unwrap(v)) for f, v in values.items()}
            return {"$metadata": data}
        if dataclasses.is_dataclass(type(x)):
            # To JAX, a dataclass that is no module is one leaf, with all that it holds.
            fixed = static or not isinstance(x, eqx.Module)
            get = vars(x).get if isinstance(x, eqx.Module) else lambda name: getattr(x, name)
            fields = {
                f.name: inside(get(f.name), f.name, fixed or f.metadata.get("static", False))
                for f in dataclasses.fields(x)
            }
            if isinstance(x, AttentionImpl):
                return {"$strategy": {**_identity(type(x)), "fields": fields}}
            return {"$object": {"class": _path(type(x)), "fields": fields}}
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            fields = {n: inside(getattr(x, n), n) for n in type(x)._fields}  # pyright: ignore
            return {"$object": {"class": _path(type(x)), "fields": fields}}
        if type(x) is tuple:
            return {"$tuple": [inside(item, i) for i, item in enumerate(x)]}
        if type(x) is list:
            return [inside(item, i) for i, item in enumerate(x)]
        if type(x) is dict:
            for name in x:
                _check_plain(name)
            return {name: inside(x[name], name) for name in sorted(encode(dict.fromkeys(x)))}
        _check_plain(x)
        return encode(x)
    except _Refused:
        raise
    except TypeError as e:
        raise _Refused(f"{at}: {e}" if at else str(e)) from None


class _Refused(TypeError):
    """A `TypeError` that names its field already."""


def _check_plain(x: Any) -> None:
    """**Raises:** `TypeError` for what would come back as a plain value of another class."""
    numpy = isinstance(x, np.generic) and not isinstance(x, str)
    for plain in (tuple, list, Mapping, str, int, float):
        if isinstance(x, plain) and type(x) not in (bool, int, str, float) and not numpy:
            name = "dict" if plain is Mapping else plain.__name__
            raise TypeError(f"{type(x).__name__} {x!r} would come back as {name}: make it one.")


def restore(data: Any) -> Any:
    """The inverse of `describe`. **Raises:** `ValueError` for a class that is not imported here."""
    if isinstance(data, list):
        return [restore(item) for item in data]
    if not isinstance(data, Mapping):
        return data
    tag = _tag(data)
    body: Any = data.get(tag)
    if tag == "$leaf":
        return Leaf(**{**body, "shape": tuple(body["shape"])})
    if tag == "$constant":
        return Static(restore(body))
    if tag == "$tuple":
        return tuple(restore(item) for item in body)
    if tag == "$dtype":
        return jnp.dtype(body)
    if tag == "$enum":
        cls, member = _class(body[0]), body[1]
        return cls[member] if isinstance(member, str) else cls(member)
    if tag == "$metadata":
        leaves = {name: restore(v) for name, v in body.items() if _is_leaf(v)}
        metadata = AttentionMetadata.from_dict(body | dict.fromkeys(leaves))
        return _with_fields(metadata, leaves)
    if tag == "$strategy":
        if "name" not in body:
            raise ValueError(
                f"The strategy {body['class']} was not registered when it was saved: pass like=."
            )
        try:
            cls = AttentionRegistry.get(body["name"])
        except ValueError as e:
            raise ValueError(f"{e} Register the class first, or pass like=.") from None
        return _instance(cls, body["fields"])
    if tag == "$object":
        return _instance(_class(body["class"]), body["fields"])
    if tag:
        return decode(data)
    return {name: restore(item) for name, item in data.items()}


def differences(a: Any, b: Any, at: str = "") -> Iterator[tuple[str, str, str]]:
    """Where two descriptions differ: the path of each field, and the text of both values."""
    if isinstance(a, Mapping) and isinstance(b, Mapping) and _tag(a) == _tag(b):
        tag = _tag(a)
        if tag in ("$metadata", "$strategy", "$object", "$tuple"):
            yield from differences(a[tag], b[tag], at)
            return
        if not tag:
            for name in dict.fromkeys((*a, *b)):
                path = at if name in ("fields", "name", "class") else f"{at}.{name}".strip(".")
                yield from differences(a.get(name, _ABSENT), b.get(name, _ABSENT), path)
            return
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, pair in enumerate(zip(a, b)):
            yield from differences(*pair, f"{at}.{i}".strip("."))
        return
    if _text(a) != _text(b):
        yield at or "kind", _text(a), _text(b)


def with_defaults(data: Any, like: Any) -> Any:
    """A description with the defaults of fields that classes have had only since it was written. A
    strategy is called as it is now: it may have been registered, or removed, since.

    **Arguments:**

    - `data`: the description.
    - `like`: what it is compared with, whose classes have the fields.
    """
    tag = _tag(data) if isinstance(data, Mapping) else ""
    body: Any = data.get(tag) if tag else None
    if not isinstance(body, Mapping) or not isinstance(body.get("fields"), Mapping):
        return data
    if not dataclasses.is_dataclass(type(like)):
        return data
    fields = dict(body["fields"])
    for f in dataclasses.fields(like):
        if f.name in fields:
            fields[f.name] = with_defaults(fields[f.name], getattr(like, f.name, None))
        elif (default := _default_of(f)) is not dataclasses.MISSING:
            static = f.metadata.get("static", False) or not isinstance(like, eqx.Module)
            fields[f.name] = describe(default, f.name, static)
    body = {**body, "fields": fields}
    if tag == "$strategy" and isinstance(like, AttentionImpl) and _is_named(type(like), body):
        body = {**_identity(type(like)), "fields": fields}
    return {tag: body}


_ABSENT = {"$absent": None}


def _text(data: Any) -> str:
    """A description as text for people to read."""
    if isinstance(data, list):
        return f"[{', '.join(map(_text, data))}]"
    if not isinstance(data, Mapping):
        return repr(data)
    tag = _tag(data)
    body: Any = data.get(tag)
    if tag == "$leaf":
        return str(restore(data))
    if tag == "$absent":
        return "nothing"
    if tag in ("$dtype", "$float"):
        return body
    if tag == "$enum":
        return ".".join(map(str, body))
    if tag == "$constant":
        return _text(body)
    if tag == "$tuple":
        return f"({', '.join(map(_text, body))})"
    if tag == "$metadata":
        return "AttentionMetadata"
    if tag in ("$object", "$strategy"):
        return body.get("name") or body["class"]
    return json.dumps(body if tag else data)


def _tag(data: Mapping[str, Any]) -> str:
    """The tag that says how to read an object; empty for a plain dictionary."""
    name = next(iter(data), "")
    return name if name.startswith("$") else ""


def _is_leaf(data: Any) -> bool:
    return isinstance(data, Mapping) and _tag(data) == "$leaf"


def _names(cls: Any) -> tuple[str, ...]:
    names = cls.get_impl_name()
    return (names,) if isinstance(names, str) else names


def _is_named(cls: Any, body: Mapping[str, Any]) -> bool:
    """Whether a described strategy is of this class, registered or not, then and now."""
    if "class" in body:
        return body["class"] == _path(cls)
    found = body["name"] in AttentionRegistry.list_implementations()
    # A class that has inherited the name of another is not meant by it.
    return body["name"] in _names(cls) and (not found or AttentionRegistry.get(body["name"]) is cls)


def _default_of(field: dataclasses.Field) -> Any:
    """The default of a field; `MISSING` if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _identity(cls: Any) -> dict[str, str]:
    name = _names(cls)[0]
    registered = name in AttentionRegistry.list_implementations()
    if registered and AttentionRegistry.get(name) is cls:
        return {"name": name}
    return {"class": _path(cls)}


_PUBLIC = ("eqattn", *(f"eqattn.{m}" for m in "masks scores cache nn strategies".split()))
"""The modules whose names are public, so that they stay wherever the code behind them moves."""


def _path(cls: type) -> str:
    """The path of a class for a file. It is public, so that files stay readable when code moves."""
    for module in (*_PUBLIC, "jax.lax"):
        if _at(f"{module}:{cls.__qualname__}") is cls:
            return f"{module}:{cls.__qualname__}"
    if cls.__module__.partition(".")[0] == "eqattn":
        raise TypeError(f"{cls.__qualname__} is private to eqattn, and no file may depend on it.")
    return f"{cls.__module__}:{cls.__qualname__}"


def found_at(path: str) -> Any:
    """The object that a path in a file stands for; None if it is not imported here.

    Format 1 wrote private modules, such as `eqattn._scores`. Their names are looked up among the
    public ones.
    """
    module, _, name = path.partition(":")
    if path == "eqattn._mask_data:Fixed":
        return Static
    if module.startswith("eqattn.") and "._" in module:
        return next(filter(None, (_at(f"{public}:{name}") for public in _PUBLIC)), None)
    return _at(path)


def _at(path: str) -> Any:
    module, _, names = path.partition(":")
    found: Any = sys.modules.get(module)  # nothing is imported: a file must not choose what runs
    if module in _PUBLIC and found is not None:
        first, _, names = names.partition(".")
        found = getattr(found, first, None)  # but for names that eqattn itself imports late
    for name in filter(None, names.split(".")):
        found = vars(found).get(name) if hasattr(found, "__dict__") else None
    return found


def _class(path: str) -> Any:
    found, module = found_at(path), path.partition(":")[0]
    if not (isinstance(found, type) and (_is_data(found))):
        raise ValueError(f"The file needs the class {path}: import {module} first, or pass like=.")
    return found


def _is_data(cls: type) -> bool:
    return issubclass(cls, enum.Enum) or dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")


def _fields(cls: Any) -> dict[str, dataclasses.Field]:
    return {f.name: f for f in dataclasses.fields(cls)}


def _instance(cls: Any, described: Mapping[str, Any]) -> Any:
    """An object with the described fields. Fields that the class has gained since get defaults."""
    values = {name: restore(item) for name, item in described.items()}
    if issubclass(cls, tuple):
        return cls(**values)
    unknown = sorted(set(values) - set(_fields(cls)))
    if unknown:
        raise ValueError(f"{cls.__name__} has no {unknown}; its fields are {list(_fields(cls))}.")
    for name, field in _fields(cls).items():
        if name in values:
            continue
        values[name] = _default_of(field)
        if values[name] is dataclasses.MISSING:
            raise ValueError(
                f"The file has no {name!r}, which {cls.__name__} has had only since then: give the "
                "field a default."
            )
    return _with_fields(object.__new__(cls), values)


def _with_fields(module: Any, values: Mapping[str, Any]) -> Any:
    """Sets fields of a new object, as Equinox's unflattening does. No converter runs again."""
    for name, value in values.items():
        object.__setattr__(module, name, value)
    return module


def upgraded(described: Any, content: bytes) -> tuple[Any, bytes]:
    """Converts the description and the bytes of the leaves of a file from format 1 to format 2.

    In format 1, a number in a field that may also hold an array was a leaf. In format 2 it is a
    constant, which is described with its value and has no bytes among those of the leaves.
    """
    kept, at = [], 0

    def visit(x: Any, names: Sequence[str] = (), tag: str = "") -> Any:
        """Returns `x` in format 2. Its fields `names` may hold a constant."""
        if isinstance(x, list):
            return [visit(item) for item in x]
        if not isinstance(x, Mapping):
            return x
        if "$leaf" in x:
            kept.append(take(x["$leaf"]))
            return x
        if "$metadata" in x:
            return {
                "$metadata": visit(x["$metadata"], constants_of(AttentionMetadata), "$metadata")
            }
        if "$object" in x:
            body, cls = x["$object"], found_at(x["$object"]["class"])
            names = constants_of(cls) if isinstance(cls, type) else ()
            return {"$object": {**body, "fields": visit(body["fields"], names)}}
        return {
            name: constant(item, tag) if name in names and _is_number(item) else visit(item)
            for name, item in x.items()
        }

    def take(leaf: Mapping[str, Any]) -> bytes:
        nonlocal at
        start, dtype = at, jnp.dtype(leaf["dtype"])
        at += math.prod(leaf["shape"]) * dtype.itemsize
        return content[start:at]

    def constant(x: Mapping[str, Any], tag: str) -> Any:
        value = encode(np.frombuffer(take(x["$leaf"]), "<f8").item())
        return value if tag == "$metadata" else {"$constant": value}

    return visit(described), b"".join(kept)


def _is_number(x: Any) -> bool:
    return isinstance(x, Mapping) and "$leaf" in x and x["$leaf"]["kind"] == "float"


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
