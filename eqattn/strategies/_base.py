"""`AttentionImpl`, the base of all strategies: metadata, a name, and one `forward_*` per device.

`Support`, the answer of a strategy's `supports`.
"""

import abc
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from .._config.metadata import AttentionMetadata
from .._config.partition import fitted, with_axes_kept
from .._config.platform import Backend, GPUS, Platform, RuntimeMode
from .._misc import as_array, as_flag, as_size, REACH, without_defaults
from .._output import AttentionOutput
from .._problem.problem import named_mask
from .._problem.storage import AbstractStored
from ..kernels import interpreted_backend, method_on


class Support(NamedTuple):
    """Whether a strategy can do something, and if not, why. It is true or false as `ok` is.

    **Arguments:**

    - `ok`: whether the strategy can do it.
    - `reason`: the message that `attention` would raise; empty if `ok`.
    """

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


BITS = ("batch", "capacity", "chunks", "decode", "devices", "layout")
"""What the bits of a row may not depend on, see the page on numerics."""

_REMEDIES = {
    True: "use Ragged(metadata, bitwise=True)",
    "devices": "use AllGather(metadata, bitwise=True)",
    "layout": "use Ragged(metadata, bitwise=True)",
}


def without_library(strategy: Any, name: str) -> str:
    """Why a strategy does not run a platform that is code of others; empty if it does."""
    if name in strategy.libraries:
        return ""
    return (
        f"platform={name!r}: {type(strategy).__name__} needs parts of the result that it does not "
        "return; use Blockwise(metadata), or platform='xla' or 'auto'."
    )


def varying_bits(strategy: Any, features: Mapping[str, Any]) -> Support:
    """Whether the bits of a row are independent of what `features["bitwise"]` names, if anything.

    **Raises:** `ValueError` for a name that is not in `BITS`.
    """
    kind = features.get("bitwise")
    if kind not in (None, True, *BITS):
        raise ValueError(
            f"bitwise must be one of {BITS}, or True for all but devices, got {kind!r}."
        )
    promised = strategy.promises if getattr(strategy, "bitwise", False) else frozenset()
    asked = {None: set(), True: {*BITS} - {"devices"}}.get(kind, {kind})
    if promised and features.get("dropout") and "batch" in asked:
        return Support(
            False,
            "bitwise: what dropout drops depends on the place in the batch, and so do the bits; "
            "leave it out.",
        )
    missing = [name for name in BITS if name in asked and name not in promised]
    if not missing:
        return Support(True, "")
    remedy = _REMEDIES.get(kind, "use Ragged(metadata, bitwise=True), or Blockwise in the same way")
    reason = (
        f"bitwise: {type(strategy).__name__} may give a row other bits where it depends on "
        f"{', '.join(missing)}; {remedy}."
    )
    return Support(False, reason)


# Keywords of `attention` that a `forward_native` may leave out; a call that uses one then raises.
_PASSED_ON = frozenset(
    "mask bias score key dropout q_offset q_positions kv_positions return_weights return_logsumexp "
    "return_carry return_max_logits".split()
)


def with_metadata(strategy: "AttentionImpl", metadata: AttentionMetadata) -> "AttentionImpl":
    """Returns the strategy with other metadata."""
    return eqx.tree_at(lambda s: s.metadata, strategy, metadata)


class AttentionImpl(eqx.Module):
    """A strategy: where, and in which order, pairs of queries and keys are visited.

    A subclass needs `get_impl_name` and `forward_native`. It is then constructible from metadata
    alone and runs through [`eqattn.attention`][], `AttentionRegistry` and its own call. Its leaves
    must be inexact arrays, Python floats or None, so that `jax.grad`, `jax.jit` and `jax.vmap`
    work over the strategy itself; declare every other field static. A float of your own is a leaf
    that optimisers move, unless it is declared static.

    Which `forward_*` runs follows from static metadata alone, see
    [`selected_forward`][eqattn.AttentionImpl.selected_forward].

    **Arguments:**

    - `metadata`: an [`AttentionMetadata`][eqattn.AttentionMetadata].

    !!! info "For authors"

        Class attributes are `pallas_lowerings`, backends with a Pallas kernel (`"tpu"`, `"cuda"`,
        `"triton"`, `"rocm"`, `"gpu"` for all three); `libraries`, such as `"cudnn"`; `features` of
        `supports`; `promises`, what bits do not depend on if `bitwise`. `unsupported` is a hook.
    """

    __pdoc__ = without_defaults

    metadata: AttentionMetadata

    pallas_lowerings: ClassVar[tuple[str, ...]] = ()
    libraries: ClassVar[tuple[str, ...]] = ()
    promises: ClassVar[frozenset[str]] = frozenset()
    features: ClassVar[frozenset[str]] = frozenset(
        "mask bias score key inference q_offset q_positions kv_positions return_weights "
        "return_logsumexp return_carry return_max_logits dropout bitwise dtype".split()
    )

    def __check_init__(self) -> None:
        if not isinstance(self.metadata, AttentionMetadata):
            raise TypeError(
                f"{type(self).__name__} is built from metadata, an AttentionMetadata, got "
                f"{self.metadata!r}."
            )

    @classmethod
    @abc.abstractmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        """**Returns:** the name, or names, under which the class is registered."""

    @abc.abstractmethod
    def forward_native(  # noqa: PLR0913 (the seeds' forward and its options)
        self,
        q: Float[Array, "*b t h d"],
        k: Float[Array, "*b s k d"],
        v: Float[Array, "*b s k v"],
        mask: Any = None,
        bias: Any = None,
        init_bias: Callable[[], Array] | None = None,
        deterministic: bool = False,
        dropout_rng: Any = None,
        causal: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> AttentionOutput:
        """Computes attention in plain JAX, on any device.

        **Arguments:**

        - `q`, `k`, `v`: queries `[*b, t, h, d]`, keys `[*b, s, k, d]`, values `[*b, s, k, v]`.
        - `mask`: which pairs are visible: a mask, or booleans that broadcast to `[*b, h, t, s]`.
        - `bias`: an array that is added to the logits, broadcastable to `[*b, h, t, s]`.
        - `init_bias`: a function that is called for the bias if both `mask` and `bias` are None.
        - `deterministic`: whether dropout is off.
        - `dropout_rng`: the random key of the dropout, which is required if dropout is on.
        - `causal`: whether a query sees only the keys up to its own position.
        - `args`, `kwargs`: further arguments that a strategy declares; other names raise.
        """

    def forward_tpu(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """Runs on TPUs: `forward_native`, unless a strategy has its own."""
        return self.forward_native(*args, **kwargs)

    def forward_gpu(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """Runs on GPUs of either kind: `forward_native`, unless a strategy has its own."""
        return self.forward_native(*args, **kwargs)

    def forward_cuda(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """Runs on NVIDIA GPUs: `forward_gpu`, unless a strategy has its own."""
        return self.forward_gpu(*args, **kwargs)

    def forward_rocm(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """Runs on AMD GPUs: `forward_gpu`, unless a strategy has its own."""
        return self.forward_gpu(*args, **kwargs)

    def forward_cpu(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """Runs on CPUs: `forward_native`, unless a strategy has its own."""
        return self.forward_native(*args, **kwargs)

    def __call__(  # noqa: PLR0913 (the seeds' forward and its options)
        self,
        query: Float[Array, "*b t h d"],
        key_: Float[Array | AbstractStored, "*b s k d"],
        value: Float[Array | AbstractStored, "*b s k v"],
        *,
        mask: Any = None,
        bias: Any = None,
        score: Any = None,
        key: Any = None,
        inference: Any = False,
        q_offset: Any = None,
        q_positions: Any = None,
        kv_positions: Any = None,
        return_weights: Any = False,
        return_logsumexp: Any = False,
        return_carry: Any = False,
        return_max_logits: Any = False,
    ) -> AttentionOutput:
        """The same as [`eqattn.attention`][] with this strategy. It explains the arguments."""
        flags = dict(return_weights=return_weights, return_logsumexp=return_logsumexp)
        flags |= dict(return_carry=return_carry, return_max_logits=return_max_logits)
        extras = dict(
            score=score,
            q_offset=q_offset,
            q_positions=q_positions,
            kv_positions=kv_positions,
            **{name: as_flag(flag, name) or None for name, flag in flags.items()},
        )
        extras = {name: x for name, x in extras.items() if x is not None}
        usual = dict(mask=named_mask(mask), bias=bias, dropout_rng=key)
        used = [name for name, x in dict(mask=mask, bias=bias, key=key).items() if x is not None]
        if reason := self.undeclared([*used, *extras]):
            raise ValueError(reason)
        usual |= dict(deterministic=inference, causal=False)
        usual = {name: x for name, x in usual.items() if self._declares(name)}
        return self.dispatch(query, key_, value, **usual, **extras)

    def dispatch(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """Runs the selected `forward_*`.

        **Arguments:** those of `forward_native`.

        **Raises:** `ValueError` at trace time if the metadata asks for code that does not exist.
        """
        return getattr(self, self.selected_forward())(*args, **kwargs)

    def selected_forward(self) -> str:
        """The method that `dispatch` runs, which the metadata's `platform` and `backend` choose:

        - `XLA`: `forward_native`, on any backend.
        - `AUTO`: the `forward_*` of the backend; `ANY` stands for the default backend of JAX.
        - `PALLAS`, `CUDNN`: the same, if the strategy has a Pallas kernel there, or the library.

        **Raises:** `ValueError` if there is no such kernel, with the parameter and the reason.
        """
        name, reason = self._select(self.metadata.platform, self.metadata.backend)
        if reason:
            raise ValueError(reason)
        return name

    def _select(self, platform: Platform, backend: Backend) -> tuple[str, str]:
        if platform is Platform.XLA:
            return "forward_native", ""
        if platform is Platform.CUDNN:
            return "forward_cuda", without_library(self, platform.value)
        if platform is Platform.INTERPRET and "tpu" in self.pallas_lowerings:
            return method_on(interpreted_backend(backend, self.pallas_lowerings)), ""
        device = self.current_backend() if backend is Backend.ANY else backend.value
        told_apart = {"cuda", "rocm"} & set(self.pallas_lowerings)
        family = "gpu" if device in GPUS and not told_apart else device
        asked = platform in (Platform.PALLAS, Platform.INTERPRET)
        if asked and not {device, family} & set(self.pallas_lowerings):
            reason = (
                f"platform={platform.value!r}: no Pallas kernel for {self._name()} on {device} "
                "yet: use platform='xla' or 'auto'."
            )
            if self.pallas_lowerings:
                *others, last = self.pallas_lowerings
                there = f"{', '.join(others)} and {last}" if others else last
                reason += f" Its Pallas kernels are for {there}."
            return "", reason
        return method_on(device), ""

    def _name(self) -> str:
        name = self.get_impl_name()
        return name if isinstance(name, str) else name[0]

    def supports(self, **features: Any) -> Support:
        """Tells, without raising, whether a call with these features would run.

        **Arguments:**

        - `features`: keywords of [`eqattn.attention`][] with the values they would have, or True
            for any value. `platform=` and `backend=` take the place of those of the metadata.
            `dtype=` is that of query, key and value, `dropout=True` asks about dropout, and
            `bitwise="batch"` about equal bits. None and False mean that a feature is not used.

        **Returns:** a [`Support`][eqattn.strategies.Support], true unless something is against the
        call. The shapes of query, key and value, and the key of a dropout, are not looked at.

        **Raises:** `ValueError` for a name that is not in `features`.
        """
        known = self.features | {"platform", "backend"}
        unknown = sorted(set(features) - known)
        if unknown:
            raise ValueError(f"{unknown} are not among the features {sorted(known)}.")
        metadata = self.metadata
        if target := {n: features[n] for n in ("platform", "backend") if n in features}:
            metadata = metadata.replace(**target)
        reason = self._select(metadata.platform, metadata.backend)[1]
        used = {n: f for n, f in features.items() if f is not None and f is not False}
        asked = self if metadata is self.metadata else with_metadata(self, metadata)
        reason = reason or self.undeclared(used) or asked.unsupported(used)
        return Support(False, reason) if reason else varying_bits(asked, used)

    def undeclared(self, names: Iterable[str]) -> str:
        """What a call raises if `forward_native` lacks a parameter for one of these keywords of
        [`eqattn.attention`][]; empty if none is missing.
        """
        for name in names:
            parameter = "dropout_rng" if name in ("key", "dropout") else name
            if name in _PASSED_ON and not self._declares(parameter):
                return f"{name}: not supported by {type(self).__name__}.forward_native."
        return ""

    def _declares(self, name: str) -> bool:
        parameters = inspect.signature(self.forward_native).parameters
        return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def unsupported(self, features: Mapping[str, Any]) -> str | None:
        """A hook that says why this strategy cannot do something.

        **Arguments:**

        - `features`: the features in use, by name, as in `supports`. Values may be traced, so only
            their shapes, dtypes and presence may be looked at.

        **Returns:** a message naming the parameter, the strategy and the reason, or None.
        """
        return None

    def get_impl_metadata(self) -> AttentionMetadata:
        """**Returns:** the metadata that the strategy was built from."""
        return self.metadata

    def output_dtype(self, query: Any) -> np.dtype:
        """**Returns:** the metadata's `runtime_dtype`, or the query's dtype if that is None."""
        dtype = self.metadata.runtime_dtype
        return jnp.dtype(query.dtype) if dtype is None else dtype

    def token_positions(self, length: int) -> Int[Array, " length"] | None:
        """A hook that says which positions the tokens of an array have for this strategy, where it
        is called. Code outside of it that embeds positions, such as `rotary`, must use the same.

        **Returns:** int32 `[length]`, or None for `0, 1, ...`
        """
        return None

    def get_mode(
        self, q: Any, BTHD: bool = True, *, cache: Any = None, insert: bool = False
    ) -> RuntimeMode:
        """What a call is part of. It follows from shapes and presence, never from array values.

        **Arguments:**

        - `q`: the query, `[*b, t, h, d]`, or `[*b, h, t, d]` if `BTHD` is False.
        - `BTHD`: whether the token axis comes before the head axis.
        - `cache`: the cache in use, or None.
        - `insert`: whether the call inserts into a cache that serves other rows.

        **Returns:** the first that holds: `__insert__` if `insert`; `__autoregressive__` if there
        is one query; `__prefill__` if there is a cache; `__train__`.
        """
        insert, BTHD = as_flag(insert, "insert"), as_flag(BTHD, "BTHD")
        if not hasattr(q, "shape"):
            raise TypeError(f"q must be an array, got {q!r}.")
        if len(q.shape) < 3:
            raise ValueError(f"The query q has at least 3 axes (time, heads, dim), got {q.shape}.")
        if insert:
            return RuntimeMode.INSERT
        if q.shape[-3 if BTHD else -2] == 1:
            return RuntimeMode.AUTOREGRESSIVE
        return RuntimeMode.TRAIN if cache is None else RuntimeMode.PREFILL

    @staticmethod
    def current_backend() -> Literal["tpu", "gpu", "cpu"]:
        """Returns the default backend of JAX. Asking for it starts that backend.

        **Raises:** `ValueError` for any other backend.
        """
        backend = jax.default_backend()
        backend = "gpu" if backend in ("cuda", "rocm") else backend
        if backend not in ("tpu", "gpu", "cpu"):
            raise ValueError(
                f"backend='any' is {backend!r} here, which has no forward_* method: use "
                "platform='xla', or name a backend."
            )
        return backend

    def create_stable_sharding(
        self,
        state_ps: PartitionSpec | None = None,
        preserved_indices: Sequence[int] | None = None,
        clone_ps: PartitionSpec | None = None,
        dep: PartitionSpec | bool | None = True,
        tensor: Any = None,
    ) -> PartitionSpec | None:
        """A specification that keeps only some axes sharded.

        **Arguments:**

        - `state_ps`: the specification to start from.
        - `preserved_indices`: the array axes that stay sharded; None means all of them.
        - `clone_ps`: where the preserved axes are taken from, by default `state_ps`.
        - `dep`: None or False if what the tensor depends on is absent. The result is None then.
        - `tensor`: an array, or anything with a shape. Mesh axes that do not divide its axis, or
            that the mesh (of the metadata, else of `jax.set_mesh`) lacks, are dropped.

        **Returns:** a `PartitionSpec`, without trailing Nones unless it is `state_ps` itself. It is
        None if `state_ps` is None, or if `dep` is None or False.

        **Raises:** `ValueError` for an index out of range, or for a tensor without a mesh.
        """
        if state_ps is None or dep is None or dep is False:
            return None
        rank = None if tensor is None else len(tensor.shape)
        spec = with_axes_kept(state_ps, preserved_indices, clone_ps, rank)
        if tensor is None:
            return spec
        mesh = self.metadata.mesh
        mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
        if mesh.empty:
            raise ValueError(
                f"The sharding {spec} of a tensor of shape {tuple(tensor.shape)} depends on a "
                "mesh: give metadata.mesh, or call under jax.set_mesh."
            )
        return fitted(spec, tensor.shape, mesh)

    @staticmethod
    def repeat_kv_heads(
        k: Float[Array, "*b s k d"], v: Float[Array, "*b s k v"], num_reps: int
    ) -> tuple[Float[Array, "*b s h d"], Float[Array, "*b s h v"]]:
        """Repeats each key and value head `num_reps` times, one copy after the other.

        No strategy of this package needs it: grouped queries never copy keys and values.

        **Arguments:**

        - `k`, `v`: keys `[*b, s, k, d]` and values `[*b, s, k, v]`.
        - `num_reps`: how many query heads share a key head, at least 1.
        """
        k, v = (jnp.asarray(as_array(x, name)) for name, x in (("k", k), ("v", v)))
        num_reps = as_size(num_reps, "num_reps", -REACH)
        if num_reps < 1 or k.ndim < 3 or k.shape[:-1] != v.shape[:-1]:
            raise ValueError(
                f"repeat_kv_heads takes k [*b, s, k, d], v [*b, s, k, v] and num_reps >= 1, got "
                f"{k.shape}, {v.shape} and {num_reps}."
            )
        return jnp.repeat(k, num_reps, axis=-2), jnp.repeat(v, num_reps, axis=-2)


# `help` of the delegating methods shows the arguments that they pass on. `*args` is left out: it is
# for type checkers, which let any parameters override `*args: Any, **kwargs: Any`.
_parameters = inspect.signature(AttentionImpl.__dict__["forward_native"]).parameters.values()
_signature = inspect.Signature([p for p in _parameters if p.kind is not p.VAR_POSITIONAL])
for _method in ("forward_tpu", "forward_gpu", "forward_cpu", "forward_cuda", "forward_rocm"):
    AttentionImpl.__dict__[_method].__signature__ = _signature
