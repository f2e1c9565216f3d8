"""Describes trees of modules as strict JSON, without the values of their leaves.

What JSON has no type for is an object with one key, its tag. `_config/json.py` defines some tags.
This module adds `$tuple`, `$dtype`, `$enum`, `$strategy`, `$metadata` and `$object` (a module,
dataclass or named tuple). It also adds `$leaf` (the type of a leaf) and `$constant` (a static value
in a field that may also hold a leaf). For example, `Blockwise()` begins with

    {"$strategy": {"name": "blockwise", "fields": {"metadata": {"$metadata": {...}}, ...}}}
"""

import dataclasses
import enum
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._config.json import decode, encode
from .._config.metadata import AttentionMetadata
from .._misc import Static, unwrap
from ..strategies import AttentionImpl
from ..strategies._registry import AttentionRegistry


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
