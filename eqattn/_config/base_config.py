"""Reading metadata out of a model's configuration object."""

from collections.abc import Iterable, Mapping
from typing import Any

from .._misc import NOT_GIVEN
from .platform import device_of_platform


# A field that is not here is read from the attribute of the same name.
_ATTRIBUTES = {
    "runtime_dtype": ("runtime_dtype", "attn_dtype", "dtype", "torch_dtype"),
    "runtime_softmax_dtype": ("runtime_softmax_dtype", "attn_softmax_dtype"),
    "scan_ring_attention": ("scan_ring_attention", "scan_attention_layers"),
    "logits_soft_cap": ("logits_soft_cap", "attn_logit_softcapping"),
    "dropout_prob": (),
    "base_config": (),
}


def attributes(field: str) -> tuple[str, ...]:
    """The attributes of a config that a field is read from, in order."""
    return _ATTRIBUTES.get(field, (field,))


def read(config: Any, name: str) -> Any:
    """An attribute of an object or item of a mapping; None if it is absent or unset."""
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return None if value is NOT_GIVEN or value is Ellipsis else value


def read_fields(config: Any, fields: Iterable[str], given: Mapping) -> dict[str, Any]:
    """What a config says about the fields that are not given.

    **Raises:** `ValueError` if it has none of the attributes that are read.
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
    # What is given wins as a whole, also over the other way to say the same.
    if "partition_axis" in given or "partition_manager" in given:
        found.pop("partition_axis", None)
        found.pop("partition_manager", None)
    if device_of_platform(given.get("platform")) is not None:
        found.pop("backend", None)
    return {field: value for field, value in found.items() if field not in given}
