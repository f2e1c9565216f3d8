"""`AttentionMetadata`, the one immutable module that configures a strategy.

How the arguments of `AttentionMetadata` are read from a model's configuration object.
"""

import json
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, SupportsIndex

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float

from .._misc import (
    as_constant,
    as_flag,
    check_cap,
    concrete,
    Static,
    with_constants,
    without_defaults,
)
from .partition import as_partition_axis, as_partition_manager, PartitionAxis, PartitionManager
from .platform import (
    Backend,
    device_of_platform,
    NOT_GIVEN,
    NotGiven,
    Platform,
    resolve_target,
    RuntimeMode,
)


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


def _dtype(value: Any) -> np.dtype | None:
    if value is None:
        return None
    text = str(value)
    try:
        dtype = jnp.dtype(text.removeprefix("torch.") if text.startswith("torch.") else value)
    except TypeError as e:
        raise TypeError(f"A runtime dtype is a dtype such as 'bfloat16', got {value!r}.") from e
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize > 8:
        raise ValueError(f"A runtime dtype must be a floating dtype of JAX, got {dtype.name}.")
    return jnp.dtype(dtype.name)  # the name drops any byte order but the native one


def _leaf(value: Any) -> Any:
    """None as it is, a number as a constant, or a floating-point array of any kind as it is."""
    value = as_constant(value)
    if value is None or isinstance(value, Static):
        return value
    dtype = getattr(value, "dtype", None)
    if dtype is None or not hasattr(value, "shape") or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"softmax_scale, logits_soft_cap and softmax_aux are floats, floating-point arrays or "
            f"None, got {value!r}."
        )
    return value


def _size(name: str) -> Callable[[Any], int | None]:
    """The converter of a field that holds an int or None."""

    def convert(value: Any) -> int | None:
        if value is None:
            return None
        if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an integer or None, got {value!r}.")
        try:
            return operator.index(value)
        except TypeError as e:
            raise TypeError(f"{name} must be an integer or None, got {value!r}.") from e

    return convert


def _flag(value: Any) -> bool:
    return as_flag(value, "scan_ring_attention")


def _probability(value: Any) -> float:
    if isinstance(value, jax.Array | bool) or not isinstance(value, float | int | np.number):
        raise TypeError(f"dropout_prob is a Python number: it is static. Got {value!r}.")
    return float(value)


def _static(default: Any, converter: Any = None) -> Any:
    return eqx.field(static=True, converter=converter, default=default)


@with_constants("softmax_scale", "logits_soft_cap")
class AttentionMetadata(eqx.Module):
    """How attention is computed: its dtypes, devices, scale and blocks. It is immutable.

    The only leaves are those of `softmax_scale`, `logits_soft_cap` and `softmax_aux` that are
    floating-point arrays. So `jax.grad`, `jax.jit`, `jax.vmap` and their `eqx.filter_*` versions
    all work over it. An array is learned. A number is a constant: like all else it is static, so
    that no gradient, optimiser or weight decay moves it, and another number retraces. What is
    static is hashable and canonical: equal metadata, however spelled, have equal tree structures
    and do not retrace.

    Use `replace` to exchange anything: it converts and checks, as the constructor does. Use
    `eqx.tree_at` to exchange an array for another, or None for an array with
    `is_leaf=lambda x: x is None`. It exchanges leaves and converts nothing. So it raises at a
    number, which is no leaf, and a number that it puts in the place of an array or None is a leaf,
    which `jax.grad` and optimisers move.

    Neither import nor construction starts a JAX backend.

    **Arguments:** all can be given by position, in this order.

    - `runtime_dtype`: the dtype of the output, a floating dtype or its name. None, the default,
        means the dtype of the query.
    - `runtime_softmax_dtype`: a floating dtype that logits are rounded to. With None, the default,
        they are not rounded.
    - `sequence_axis_name`: the mesh axis that a ring shards sequences over, default `"sp"`.
    - `mesh`: a `Mesh`, an `AbstractMesh`, or None for the mesh of the context, if one is needed.
    - `platform`: a [`Platform`][eqattn.Platform] or its name in any case, default `AUTO`. `"tpu"`,
        `"gpu"` and `"triton"` mean that backend with `PALLAS`, `"jax"` means `XLA`.
    - `backend`: a [`Backend`][eqattn.Backend] or its name in any case, default `ANY`.
    - `partition_axis`: a [`PartitionAxis`][eqattn.compat.PartitionAxis], default `PartitionAxis()`.
    - `partition_manager`: a [`PartitionManager`][eqattn.compat.PartitionManager], by default the
        one of `partition_axis`. Given alone, it sets `partition_axis`.
    - `base_config`: an object or mapping whose attributes fill the arguments that are left out.
        It is read once, here, and not kept: the attribute is always None. See below.
    - `scan_ring_attention`: whether the hops of a ring are a rolled loop, default True.
    - `softmax_scale`: the factor of the logits, a number or a scalar array, or None for
        `1/sqrt(head_dim)`.
    - `dropout_prob`: the probability of dropping an attention probability, a static number in
        `[0, 1)`, default 0.0.
    - `blocksize_q`, `blocksize_k`, `blocksize_b`: the numbers of queries, keys and batch elements
        in a block, at least 1. None, the default, lets the strategy choose.
    - `logits_soft_cap`: the cap `c > 0` in `c * tanh(logit / c)`, or None for no cap.
    - `softmax_aux`: sink logits, `[num_heads]`, `[num_heads, n]` or `[1, n]`, or None. Heads are
        compared with the query's when attention is called.

    **Raises:** `ValueError` or `TypeError` for values outside of these, as far as they are
    concrete: traced and abstract arrays are never looked into.

    !!! info "What is read from `base_config`"

        | argument | attribute, the first that is not None |
        |---|---|
        | `runtime_dtype` | `runtime_dtype`, `attn_dtype`, `dtype`, `torch_dtype` |
        | `runtime_softmax_dtype` | `runtime_softmax_dtype`, `attn_softmax_dtype` |
        | `scan_ring_attention` | `scan_ring_attention`, `scan_attention_layers` |
        | `logits_soft_cap` | `logits_soft_cap`, `attn_logit_softcapping` |
        | `sequence_axis_name`, `mesh`, `platform`, `backend`, `partition_axis`, |
        | `partition_manager`, `softmax_scale`, `softmax_aux`, `blocksize_q/k/b` | the same name |

        An argument that is given always wins; so does `partition_axis` over the config's
        `partition_manager`, and a platform that names a device over the config's `backend`.
        `dropout_prob` is never read, as it differs between training and use. A config with none
        of these attributes raises.
    """

    __pdoc__ = without_defaults

    runtime_dtype: np.dtype | None = _static(None, _dtype)
    runtime_softmax_dtype: np.dtype | None = _static(None, _dtype)
    sequence_axis_name: str = _static("sp")
    mesh: Mesh | AbstractMesh | None = _static(None)
    platform: Platform = _static(Platform.AUTO)
    backend: Backend = _static(Backend.ANY)
    partition_axis: PartitionAxis = eqx.field(default_factory=PartitionAxis)
    partition_manager: PartitionManager = eqx.field(default_factory=PartitionManager)
    base_config: None = _static(None)
    scan_ring_attention: bool = _static(True, _flag)
    softmax_scale: float | Float[Array, ""] | None = eqx.field(default=None, converter=_leaf)
    dropout_prob: float = _static(0.0, _probability)
    blocksize_q: int | None = _static(None, _size("blocksize_q"))
    blocksize_k: int | None = _static(None, _size("blocksize_k"))
    blocksize_b: int | None = _static(None, _size("blocksize_b"))
    logits_soft_cap: float | Float[Array, ""] | None = eqx.field(default=None, converter=_leaf)
    softmax_aux: Float[Array, "..."] | None = eqx.field(default=None, converter=_leaf)

    def __init__(  # noqa: PLR0913 (the seeds' fields)
        self,
        runtime_dtype: Any = NOT_GIVEN,
        runtime_softmax_dtype: Any = NOT_GIVEN,
        sequence_axis_name: str | NotGiven = NOT_GIVEN,
        mesh: Mesh | AbstractMesh | None | NotGiven = NOT_GIVEN,
        platform: Platform | str | None | NotGiven = NOT_GIVEN,
        backend: Backend | str | None | NotGiven = NOT_GIVEN,
        partition_axis: Any = NOT_GIVEN,
        partition_manager: Any = NOT_GIVEN,
        base_config: Any = None,
        scan_ring_attention: bool | np.bool_ | NotGiven = NOT_GIVEN,
        softmax_scale: Any = NOT_GIVEN,
        dropout_prob: float | int | np.number | NotGiven = NOT_GIVEN,
        blocksize_q: SupportsIndex | None | NotGiven = NOT_GIVEN,
        blocksize_k: SupportsIndex | None | NotGiven = NOT_GIVEN,
        blocksize_b: SupportsIndex | None | NotGiven = NOT_GIVEN,
        logits_soft_cap: Any = NOT_GIVEN,
        softmax_aux: Any = NOT_GIVEN,
    ):
        given = dict(locals())
        values = {
            name: given[name]
            for name in _FIELDS
            if given[name] is not NOT_GIVEN and given[name] is not Ellipsis
        }
        if base_config is not None:
            values |= read_fields(base_config, _FIELDS, values)
        values["base_config"] = None
        values["platform"], values["backend"] = resolve_target(
            values.get("platform"), values.get("backend")
        )
        values["partition_axis"], values["partition_manager"] = _partition(values)
        for name, field in _FIELDS.items():
            setattr(self, name, values.get(name, field.default))

    def __check_init__(self) -> None:
        if not isinstance(self.sequence_axis_name, str) or not self.sequence_axis_name:
            raise TypeError(f"sequence_axis_name is a name, got {self.sequence_axis_name!r}.")
        if self.mesh is not None and not isinstance(self.mesh, Mesh | AbstractMesh):
            raise TypeError(f"mesh is a Mesh, an AbstractMesh or None, got {self.mesh!r}.")
        if not 0 <= self.dropout_prob < 1:
            raise ValueError(f"dropout_prob must be in [0, 1), got {self.dropout_prob}.")
        for name in ("blocksize_q", "blocksize_k", "blocksize_b"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, or None for automatic; got {size}.")
        scale = concrete(self.softmax_scale)
        if scale is not None and not np.all(np.isfinite(scale)):
            raise ValueError(f"softmax_scale must be finite, got {scale}.")
        check_cap(self.logits_soft_cap, "logits_soft_cap")
        if self.softmax_aux is not None and np.ndim(self.softmax_aux) not in (1, 2):
            raise ValueError(
                "softmax_aux must be [num_heads], [num_heads, n] or [1, n], got shape "
                f"{np.shape(self.softmax_aux)}."
            )
        sinks = concrete(self.softmax_aux)
        if sinks is not None and (np.isnan(sinks) | (sinks == np.inf)).any():
            raise ValueError(
                f"softmax_aux must be finite, or -inf for no sink, got {sinks.tolist()}."
            )

    @classmethod
    def from_config(
        cls, config: Any, softmax_scale: Any = NOT_GIVEN, dropout_prob: float | int = 0.0
    ) -> "AttentionMetadata":
        """The metadata of a model's configuration, which is read as `base_config` is.

        **Arguments:**

        - `config`: any object or mapping with some of the attributes of `base_config`.
        - `softmax_scale`: the factor of the logits. If given, even as None, it wins over `config`.
        - `dropout_prob`: the probability of dropout, which is not read from `config`.

        **Raises:** `ValueError` if `config` has none of the attributes that are read.
        """
        if config is None:
            raise ValueError(
                "config must be an object or mapping to read, got None; AttentionMetadata() has "
                "the defaults."
            )
        return cls(base_config=config, softmax_scale=softmax_scale, dropout_prob=dropout_prob)

    def replace(self, **kwargs: Any) -> "AttentionMetadata":
        """Returns a copy with some arguments changed, converted and checked as in the constructor.

        `partition_axis` and `partition_manager` follow each other. A platform that names a device
        sets the backend too. `base_config` fills what is None here and not in `kwargs`.

        **Raises:** `TypeError` for an unknown name.
        """
        unknown = sorted(set(kwargs) - set(_FIELDS))
        if unknown:
            raise TypeError(f"AttentionMetadata has no {unknown}; its fields are {list(_FIELDS)}.")
        values = {name: getattr(self, name) for name in _FIELDS if name not in kwargs}
        if "partition_axis" in kwargs or "partition_manager" in kwargs:
            values.pop("partition_axis", None)
            values.pop("partition_manager", None)
        if device_of_platform(kwargs.get("platform")) is not None:
            values.pop("backend", None)
        if kwargs.get("base_config") is not None:
            values = {name: value for name, value in values.items() if value is not None}
        return type(self)(**values, **kwargs)

    def set_attrs_carefully(
        self,
        attr_name: str,
        default: Any,
        pickup_name: str | None = None,
        use_base_config: bool = True,
        *,
        base_config: Any = None,
    ) -> "AttentionMetadata":
        """Returns a copy in which the attribute has a value. One that is not None stays as it is.

        **Arguments:**

        - `attr_name`: the name of the field.
        - `default`: the value of the field, unless `base_config` has one.
        - `pickup_name`: the attribute of `base_config` to read, default `attr_name`.
        - `use_base_config`: whether to read `base_config` at all.
        - `base_config`: an object or mapping. The one that was given to the constructor was read
            there, and is not kept.

        **Raises:** `ValueError` for an unknown field, and if `pickup_name` is an attribute that
        construction does not read and no `base_config` is given to read it from.
        """
        if attr_name not in _FIELDS or attr_name == "base_config":
            raise ValueError(f"AttentionMetadata has no {attr_name!r} to set: {list(_FIELDS)}.")
        if getattr(self, attr_name) is not None:
            return self.replace()
        value = default
        if use_base_config and base_config is not None:
            found = read(base_config, pickup_name or attr_name)
            value = default if found is None else found
        elif use_base_config and pickup_name not in (None, *attributes(attr_name)):
            raise ValueError(
                f"pickup_name={pickup_name!r} is read from a base_config, which is not kept after "
                "construction: pass base_config=, or use_base_config=False for the default."
            )
        return self.replace(**{attr_name: value})

    def get_shardings(
        self, mode: RuntimeMode | str, BTHD: bool = True, qkv_mni_sharding: bool = False
    ) -> tuple[PartitionSpec, ...]:
        """The shardings of the tensors of one call, which `partition_manager` resolves.

        **Arguments:**

        - `mode`: a [`RuntimeMode`][eqattn.compat.RuntimeMode] or its string.
        - `BTHD`: whether query, key, value and output are `[batch, time, heads, dim]`; else they
            are `[batch, heads, time, dim]`. Bias and mask are `[batch, heads, queries, keys]` in
            both cases.
        - `qkv_mni_sharding`: whether keys and values are sharded as queries are, over `head_axis`
            and `attention_dim_axis`, which suits keys with as many heads as queries.

        **Returns:** six `PartitionSpec`s without trailing Nones: those of query, key, value, bias,
        mask and attention output. They name the mesh axes of `partition_axis`, also those that
        `mesh` lacks; `create_stable_sharding` of a strategy fits one to an array and mesh.
        """

        if not isinstance(mode, str):
            raise TypeError(f"mode must be a RuntimeMode or its string, got {mode!r}.")
        BTHD = as_flag(BTHD, "BTHD")
        qkv_mni_sharding = as_flag(qkv_mni_sharding, "qkv_mni_sharding")

        def spec(*axes: str | None) -> PartitionSpec:
            return self.partition_manager.resolve(axes, mode)

        head, dim = ("head", "head_dim") if qkv_mni_sharding else ("kv_head", "kv_head_dim")
        if BTHD:
            query = spec("batch", "query_length", "head", "head_dim")
            key = spec("batch", "kv_length", head, dim)
        else:
            query = spec("batch", "head", "query_length", "head_dim")
            key = spec("batch", head, "kv_length", dim)
        bias = spec("batch", "bias_head_seq", "query_length", "bias_kv_seq")
        mask = spec("batch", None, "query_length", "bias_kv_seq")
        return query, key, key, bias, mask, query

    def to_dict(self) -> dict[str, Any]:
        """All fields but `base_config` as strict JSON data; `from_dict` restores them exactly.

        Arrays keep their bits and dtype but not their sharding. A mesh keeps its shape, axis
        names, axis types and device ids. **Raises:** `TypeError` if a leaf is traced or abstract.
        """
        from .json import encode  # Few programs write or read metadata.

        return {name: encode(getattr(self, name)) for name in _FIELDS if name != "base_config"}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, mesh: Any = NOT_GIVEN) -> "AttentionMetadata":
        """The metadata that `to_dict` wrote, or that has plain values such as `"bfloat16"`.

        **Arguments:**

        - `data`: the fields by name. Those that are left out get their defaults.
        - `mesh`: a mesh in place of the stored one, whose devices are then not looked for.

        **Raises:** `ValueError` for an unknown name, and for a mesh whose devices are absent, which
        it names.
        """
        from .json import check_names, decode

        check_names(cls, data)
        if mesh is not NOT_GIVEN:
            data = {**data, "mesh": None}
        values = {name: decode(value) for name, value in data.items()}
        return cls(**(values if mesh is NOT_GIVEN else values | {"mesh": mesh}))

    def to_json(self, **kwargs: Any) -> str:
        """Writes the data of `to_dict` as strict JSON text. `kwargs` are passed to `json.dumps`."""
        return json.dumps(self.to_dict(), **{"allow_nan": False, **kwargs})

    @classmethod
    def from_json(cls, json_str: str, *, mesh: Any = NOT_GIVEN) -> "AttentionMetadata":
        """The metadata that `to_json` wrote; `mesh` is that of `from_dict`."""
        return cls.from_dict(json.loads(json_str), mesh=mesh)


_FIELDS = AttentionMetadata.__dataclass_fields__


def _partition(values: Mapping) -> tuple[PartitionAxis, PartitionManager]:
    axis, manager = values.get("partition_axis"), values.get("partition_manager")
    axis = None if axis is None else as_partition_axis(axis)
    manager = None if manager is None else as_partition_manager(manager)
    if manager is None:
        axis = PartitionAxis() if axis is None else axis
        return axis, PartitionManager(axis)
    if axis is not None and axis != manager.partition_axis:
        raise ValueError(
            f"partition_axis {axis} and partition_manager {manager} disagree; give one of them."
        )
    return manager.partition_axis, manager
