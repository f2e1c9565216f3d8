"""Converts what files of earlier formats hold to the current one."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._config.json import encode
from .._config.metadata import AttentionMetadata
from .._misc import constants_of
from .describe import found_at


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
