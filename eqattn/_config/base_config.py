"""How the arguments of `AttentionMetadata` are read from a model's configuration object."""

from collections.abc import Iterable, Mapping
from typing import Any

from .platform import device_of_platform, NOT_GIVEN


# The attributes that a field is read from, in order of preference. A field that is not listed is
# read from the attribute of the same name, and one with an empty tuple is never read.
_ATTRIBUTES = {
    "runtime_dtype": ("runtime_dtype", "attn_dtype", "dtype", "torch_dtype"),
    "runtime_softmax_dtype": ("runtime_softmax_dtype", "attn_softmax_dtype"),
    "scan_ring_attention": ("scan_ring_attention", "scan_attention_layers"),
    "logits_soft_cap": ("logits_soft_cap", "attn_logit_softcapping"),
    "dropout_prob": (),
    "base_config": (),
}


def attributes(field: str) -> tuple[str, ...]:
    """The attributes of a config that a field is read from, in order of preference."""
    return _ATTRIBUTES.get(field, (field,))


def read(config: Any, name: str) -> Any:
    """An attribute of an object, or an item of a mapping; None if it is absent or unset."""
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return None if value is NOT_GIVEN or value is Ellipsis else value


def read_fields(config: Any, fields: Iterable[str], given: Mapping) -> dict[str, Any]:
    """The values that a config has for the fields that are not given.

    **Arguments:**

    - `config`: any object or mapping.
    - `fields`: the names of the fields to look for.
    - `given`: the arguments of the constructor by name, which win over the config.

    **Raises:** `ValueError` if the config has none of the attributes that are read.
    """
    fields = list(fields)
    found = {}
    for field in fields:
        for name in attributes(field):
            value = read(config, name)
            if value is not None:
                found[field] = value
                break
    if not found:
        known = [name for field in fields for name in attributes(field)]
        raise ValueError(
            f"base_config of type {type(config).__name__} has none of the attributes that are "
            f"read: {known}."
        )
    # A given argument also wins over a config that says the same under another name. A partition
    # axis wins over the config's manager, and a platform that names a device over its backend.
    if "partition_axis" in given or "partition_manager" in given:
        found.pop("partition_axis", None)
        found.pop("partition_manager", None)
    if device_of_platform(given.get("platform")) is not None:
        found.pop("backend", None)
    return {field: value for field, value in found.items() if field not in given}
