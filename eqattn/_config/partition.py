"""Which mesh axes shard which axis of an attention tensor: `PartitionAxis` and its manager."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
from jax.sharding import PartitionSpec

from .._jax import names_of
from .._misc import without_defaults
from .platform import NOT_GIVEN, RuntimeMode


AxisType = str | tuple[str, ...] | None


def _axis(value: Any) -> AxisType:
    """Mesh axis names in canonical form: None, one name, or a tuple of at least two names."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or not all(isinstance(n, str) for n in value):
        raise TypeError(f"A mesh axis is a name, a tuple of names or None, got {value!r}.")
    if len(set(value)) != len(value):
        raise ValueError(f"A mesh axis is repeated in {tuple(value)}.")
    return tuple(value) if len(value) > 1 else (value[0] if value else None)


def _field(default: Any) -> Any:
    return eqx.field(static=True, converter=_axis, default=default)


class PartitionAxis(eqx.Module):
    """The mesh axes over which each logical axis of an attention tensor is sharded.

    Each is a mesh axis name, a tuple of names (sharded over their product, the first outermost),
    or None (not sharded). The `generation_*` axes hold in the modes `__autoregressive__` and
    `__insert__`, the others in `__train__` and `__prefill__`. All fields are static.

    **Arguments:**

    - `batch_axis`: shards the batch, default `("fsdp", "dp")`.
    - `sequence_axis`: shards sequences, default `"sp"`.
    - `query_sequence_axis`, `key_sequence_axis`: shard the queries and the keys of a sequence,
        default `sequence_axis`.
    - `head_axis`: shards the query's heads, default `"tp"`.
    - `kv_head_axis`: shards the key's and value's heads, default `head_axis`.
    - `attention_dim_axis`: shards the query's and output's head dim, default None.
    - `attention_kv_dim_axis`: shards the key's and value's head dim, default `attention_dim_axis`.
    - `bias_head_sequence_axis`: shards the heads of a bias, default None.
    - `bias_key_sequence_axis`: shards the keys of a bias or mask, default None.
    - `generation_batch_axis`, `generation_head_axis`, `generation_kv_head_axis`,
        `generation_key_sequence_axis`: replace the axis without `generation_` in these modes; by
        default they equal it.
    - `generation_query_sequence_axis`, `generation_attention_dim_axis`,
        `generation_attention_kv_dim_axis`: likewise, default None.

    **Raises:** `TypeError` or `ValueError` unless each is a name, distinct names or None.
    """

    __pdoc__ = without_defaults

    batch_axis: AxisType = _field(("fsdp", "dp"))
    sequence_axis: AxisType = _field("sp")
    query_sequence_axis: AxisType = _field(NOT_GIVEN)
    head_axis: AxisType = _field("tp")
    kv_head_axis: AxisType = _field(NOT_GIVEN)
    key_sequence_axis: AxisType = _field(NOT_GIVEN)
    attention_dim_axis: AxisType = _field(None)
    attention_kv_dim_axis: AxisType = _field(NOT_GIVEN)
    bias_head_sequence_axis: AxisType = _field(None)
    bias_key_sequence_axis: AxisType = _field(None)
    generation_batch_axis: AxisType = _field(NOT_GIVEN)
    generation_query_sequence_axis: AxisType = _field(None)
    generation_head_axis: AxisType = _field(NOT_GIVEN)
    generation_kv_head_axis: AxisType = _field(NOT_GIVEN)
    generation_key_sequence_axis: AxisType = _field(NOT_GIVEN)
    generation_attention_dim_axis: AxisType = _field(None)
    generation_attention_kv_dim_axis: AxisType = _field(None)

    def __post_init__(self) -> None:
        for name, source in _FOLLOWS.items():
            if getattr(self, name) is NOT_GIVEN:
                setattr(self, name, getattr(self, source))


# Each of these fields, when it is left out, takes the value of the other.
_FOLLOWS = {
    "query_sequence_axis": "sequence_axis",
    "key_sequence_axis": "sequence_axis",
    "kv_head_axis": "head_axis",
    "attention_kv_dim_axis": "attention_dim_axis",
    "generation_batch_axis": "batch_axis",
    "generation_head_axis": "head_axis",
    "generation_kv_head_axis": "kv_head_axis",
    "generation_key_sequence_axis": "key_sequence_axis",
}

# This maps logical names to fields. The upper-case forms with underscores ("__BATCH__") are the
# same names.
_LOGICAL = {
    "batch": "batch_axis",
    "length": "sequence_axis",
    "query_length": "query_sequence_axis",
    "kv_length": "key_sequence_axis",
    "head": "head_axis",
    "kv_head": "kv_head_axis",
    "head_dim": "attention_dim_axis",
    "kv_head_dim": "attention_kv_dim_axis",
    "bias_head_seq": "bias_head_sequence_axis",
    "bias_kv_seq": "bias_key_sequence_axis",
}


def batch_and_heads(axes: PartitionAxis, queries: int) -> tuple[AxisType, AxisType]:
    """The axes that shard the batch and the key heads of a call, which generates if it has one
    query.
    """
    if queries == 1:
        return axes.generation_batch_axis, axes.generation_kv_head_axis
    return axes.batch_axis, axes.kv_head_axis


def _check_fields(argument: str, cls: Any, given: Mapping) -> None:
    """**Raises:** `ValueError` if a mapping has keys that are not fields of the class."""
    names = list(cls.__dataclass_fields__)
    if unknown := sorted(set(given) - set(names), key=str):
        raise ValueError(f"{argument} has no {unknown}: the fields of {cls.__name__} are {names}.")


def as_partition_axis(value: Any) -> PartitionAxis:
    """A `PartitionAxis` as it is, or made from a mapping or the attributes of another object.

    A foreign object may call the generation axes `decode_*`; attributes that attention has no use
    for (`hidden_state_axis`, ...) are not read.
    """
    if isinstance(value, PartitionAxis):
        return value
    names = list(PartitionAxis.__dataclass_fields__)
    if isinstance(value, Mapping):
        _check_fields("partition_axis", PartitionAxis, value)
        return PartitionAxis(**value)
    if not hasattr(value, "batch_axis"):
        raise TypeError(f"partition_axis must be a PartitionAxis or like one, got {value!r}.")
    found = {}
    for name in names:
        alias = name.replace("generation_", "decode_")
        axis = getattr(value, name, getattr(value, alias, NOT_GIVEN))
        if axis is not NOT_GIVEN and axis is not Ellipsis:
            found[name] = axis
    return PartitionAxis(**found)


class PartitionManager(eqx.Module):
    """Resolves the logical axes of an array to a `PartitionSpec`.

    **Arguments:**

    - `partition_axis`: the mesh axes of each logical axis, a
        [`PartitionAxis`][eqattn.compat.PartitionAxis], default `PartitionAxis()`.
    """

    __pdoc__ = without_defaults

    partition_axis: PartitionAxis = eqx.field(
        converter=as_partition_axis, default_factory=PartitionAxis
    )

    def resolve(self, axes: Sequence[Any], mode: RuntimeMode | str) -> PartitionSpec:
        """Returns the specification of an array with the given logical axes.

        **Arguments:**

        - `axes`: one entry per array axis: None or `"_"` (not sharded), a logical name
            (`"batch"`, `"length"`, `"query_length"`, `"kv_length"`, `"head"`, `"kv_head"`,
            `"head_dim"`, `"kv_head_dim"`, `"bias_head_seq"`, `"bias_kv_seq"`; any case,
            surrounding underscores ignored), or a sequence of logical names.
        - `mode`: a [`RuntimeMode`][eqattn.compat.RuntimeMode] or its string.

        **Returns:** a `PartitionSpec` without trailing Nones. It follows from names alone: mesh
        axes that a mesh lacks or that do not divide an array are kept.

        **Raises:** `ValueError` for an unknown logical name or mode, and if one mesh axis would
        shard two array axes.
        """
        mode = RuntimeMode(mode)
        entries = [self._entry(axis, mode) for axis in axes]
        used = [n for e in entries for n in names_of(e)]
        twice = sorted({n for n in used if used.count(n) > 1})
        if twice:
            raise ValueError(
                f"Mesh axes {twice} would each shard two axes of {tuple(axes)} in mode "
                f"{mode.value!r}: {entries}; change the PartitionAxis."
            )
        return trimmed(PartitionSpec(*entries))

    def _entry(self, axis: Any, mode: RuntimeMode) -> AxisType:
        if axis is None or axis == "_":
            return None
        if not isinstance(axis, str):
            entries = [self._entry(a, mode) for a in axis]
            return _axis([n for e in entries for n in names_of(e)])
        field = _LOGICAL.get(axis.strip("_").lower())
        if field is None:
            raise ValueError(f"Unknown logical axis {axis!r}; the names are {list(_LOGICAL)}.")
        generation = "generation_" + field
        use = mode.generates and hasattr(self.partition_axis, generation)
        return getattr(self.partition_axis, generation if use else field)


def as_partition_manager(value: Any) -> PartitionManager:
    """A `PartitionManager` as it is, or made from a mapping or what holds a `PartitionAxis`."""
    if isinstance(value, PartitionManager):
        return value
    if isinstance(value, Mapping):
        _check_fields("partition_manager", PartitionManager, value)
        return PartitionManager(**value)
    axis = getattr(value, "partition_axis", getattr(value, "paxis", None))
    if axis is None:
        raise TypeError(f"partition_manager must be a PartitionManager, got {value!r}.")
    return PartitionManager(as_partition_axis(axis))


def trimmed(spec: PartitionSpec) -> PartitionSpec:
    """The same specification without trailing Nones, so that equal ones compare equal."""
    entries = list(spec.partitions)
    while entries and entries[-1] is None:
        entries.pop()
    return spec.update(partitions=tuple(entries))


def with_axes_kept(
    spec: PartitionSpec,
    preserved: Sequence[int] | None,
    source: PartitionSpec | None,
    rank: int | None,
) -> PartitionSpec:
    """The specification in which only some array axes stay sharded.

    **Arguments:**

    - `preserved`: the indices of the array axes that stay sharded; None keeps `spec` as it is.
    - `source`: the specification whose entries the preserved axes get; None means `spec`.
    - `rank`: the number of axes of the array; None means as many as the specifications name.

    **Raises:** `ValueError` for an index out of range.
    """
    if preserved is None:
        return spec
    named = (spec if source is None else source).partitions
    rank = max(len(named), len(spec.partitions)) if rank is None else rank
    entries: list[Any] = [None] * rank
    for index in map(operator.index, preserved):
        if not 0 <= index < rank:
            raise ValueError(f"preserved index {index} is not an axis of {rank} axes.")
        entries[index] = named[index] if index < len(named) else None
    return trimmed(PartitionSpec(*entries))


def fitted(spec: PartitionSpec, shape: Sequence[int], mesh: Any) -> PartitionSpec:
    """The part of a specification that an array of a shape can have on a mesh.

    The mesh axes of each entry are taken in order. A mesh axis stays in the entry if the mesh has
    it, and if the array axis can be cut into that many pieces. The number of pieces is the product
    of the axis sizes that stay, this one included.

    **Raises:** `ValueError` if the specification shards more axes than the array has.
    """
    entries = list(spec.partitions)
    extra = [e for e in entries[len(shape) :] if e is not None]
    if extra:
        raise ValueError(f"{spec} has more entries than shape {tuple(shape)} has axes.")
    kept = []
    for entry, size in zip(entries, shape):
        if entry is None or entry is PartitionSpec.UNCONSTRAINED:
            kept.append(entry)
            continue
        names, product = [], 1
        for name in names_of(entry):
            count = mesh.shape.get(name)
            if count is not None and size % (product * count) == 0:
                names.append(name)
                product *= count
        kept.append(_axis(names))
    return trimmed(spec.update(partitions=tuple(kept)))


def check_axis_name(field: str, name: Any) -> None:
    """**Raises:** `TypeError` unless a field of a strategy names one axis of a mesh, or is None."""
    if name is not None and not (isinstance(name, str) and name):
        raise TypeError(f"{field} is the name of one mesh axis, got {name!r}.")
