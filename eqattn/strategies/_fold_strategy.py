"""The base of this library's strategies. It turns the arguments of a call into a `Problem`, has the
strategy fold that into a Carry, and turns the Carry into an output.

Calls whose arrays have explicit mesh axes: what types tell of them, and how they run without.

The results of a call, from its Carry or from rows that are finished already.
"""

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
from jaxtyping import Array, PRNGKeyArray

from .._carry import Carry
from .._config.partition import batch_and_heads
from .._config.platform import Backend, Platform
from .._jax import explicit_axes, mapped_axes, names_of, sharding_of, without_explicit_axes
from .._misc import as_array, as_flag, as_int
from .._output import AttentionOutput
from .._problem import problem as arguments
from .._problem.functions import opened
from .._problem.mesh import lists_own_keys, ManualAxes, on_mesh_of, with_kernel
from .._problem.problem import Problem
from .._problem.storage import AbstractStored, as_stored, check_computable
from .._sweep.lowering import Lowering, XLA
from ..kernels import interpreted_backend, lowering_for
from ..masks._base import AbstractMask, check_positions, split_list
from ..masks._causal import Causal
from ..scores._base import as_bias
from ._base import AttentionImpl


def known_partition(declared: tuple[Any, Any], q: Array, *others: Any) -> tuple[Any, ...]:
    """Reads from the types of arrays on an explicit mesh which axes shard the batch, which shard
    the heads, and which shard no array.

    Types do not tell what automatic axes of the same mesh shard. Those among the `declared` ones,
    for the batch and for the heads, are taken at their word, as on a mesh of automatic axes.
    """
    mesh = jax.typeof(q).sharding.mesh
    batch, *rest, _, heads, _ = (None, *sharding_of(q))[-max(4, q.ndim) :]
    of_types = (None if any(rest) else batch, heads)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    automatic = [[n for n in names_of(e) if kinds.get(n) == AxisType.Auto] for e in declared]
    shards = [(*names_of(own), *more) for own, more in zip(of_types, automatic)]
    arrays = [x for x in jax.tree.leaves((q, *others)) if eqx.is_array(x)]
    entries = [e for x in arrays for e in sharding_of(x)]
    used = {n for e in entries for n in names_of(e)}
    hidden = mapped_axes(mesh)  # these are in use, by an axis of `jax.vmap`
    idle = tuple(n for n in explicit_axes(q) if n not in used | hidden)
    return *shards, idle


def result_specs(q: Array, features: Any = None) -> dict[str, Any]:
    """The specs of all results by name, if they are sharded like the query. The `features` are the
    mesh axes that shard those of the values.
    """
    *batch, t, heads, _ = sharding_of(q)
    rows, values = P(*batch, t, heads), P(*batch, t, heads, features)
    return {
        "outputs": values,
        "weights": P(*batch, heads, t, None),
        "logsumexp": rows,
        "carry": (values, rows, rows),
        "max_logits": rows,
    }


def sharded_as_query(run: Callable, args: tuple, wanted: Sequence[str]) -> dict:
    """Calls `run` where the compiler propagates shardings. Results are sharded like the query."""
    _, q, _, v, _ = args
    numbers = as_stored(v).arrays[:1]  # There are none if the values are part of the keys.
    specs = result_specs(q, sharding_of(numbers[0])[-1] if numbers else None)
    return without_explicit_axes(run, args, q, {name: specs[name] for name in wanted})


def attended(spec: Problem, output: Array, logsumexp: Array | None) -> dict[str, Callable]:
    """The same results as those of `finish`, where there is no Carry, and perhaps no logsumexp."""
    both = {"outputs": output} | ({} if logsumexp is None else {"logsumexp": logsumexp})
    shapes = {name: (*spec.batch_shape, *x.shape[1:]) for name, x in both.items()}
    return {name: lambda name=name: both[name].reshape(shapes[name]) for name in both}


def as_output(results: Mapping[str, Any]) -> AttentionOutput:
    """The output that has these results, by name. A Carry is a tuple of its arrays."""
    return AttentionOutput(
        attention_weights=results.get("weights"),
        attention_outputs=results["outputs"],
        logsumexp=results.get("logsumexp"),
        carry=Carry(*results["carry"]) if "carry" in results else None,
        max_logits=results.get("max_logits"),
    )


def finish(spec: Problem, carry: Carry, weights: Any, dtype: Any) -> dict[str, Callable]:
    """The results of a fold by name, with sinks, normalised, and in the caller's batch axes and
    dtype. Each is a function, so that only what is asked for is computed.
    """
    before = carry
    if spec.sinks is not None:
        carry = carry.with_sinks(spec.sinks[None, None])

    def unflatten(x: Array) -> Array:
        return x.reshape(*spec.batch_shape, *x.shape[1:])

    def probabilities() -> Array:
        if spec.sinks is None:
            return weights
        # Without sinks p = exp(s - L), with them p' = exp(s - L'), where L and L' are the
        # logsumexps. So p' = p exp(L - L'); the factor is the share that the sinks leave to keys.
        old = before.logsumexp()
        share = jnp.exp(old - jnp.where(old == -jnp.inf, 0, carry.logsumexp()))
        return weights * jnp.swapaxes(share, 1, 2)[..., None]

    parts = (carry.numerator, carry.denominator, carry.max_so_far)
    return {
        "outputs": lambda: unflatten(carry.output().astype(dtype)),
        "weights": lambda: unflatten(probabilities().astype(dtype)),
        "logsumexp": lambda: unflatten(carry.logsumexp()),
        "carry": lambda: tuple(map(unflatten, parts)),
        "max_logits": lambda: jax.lax.stop_gradient(unflatten(before.max_so_far)),
    }


class AbstractFoldStrategy(AttentionImpl):
    """Exact attention as a fold over (query, key) pairs.

    A subclass defines the field `precision` of products, and visits pairs in an order by `fold`.
    """

    precision: eqx.AbstractVar[Any]

    def __check_init__(self) -> None:
        as_flag(getattr(self, "fused_backward", True), "fused_backward")
        as_flag(getattr(self, "bitwise", False), "bitwise")

    forms_weights: ClassVar[bool] = False
    reads_stored: ClassVar[bool] = False
    fixed_in: ClassVar[tuple[str, ...]] = ()
    """The backends whose kernels may be `fixed`."""

    @property
    def fixed(self) -> bool:
        """Whether the bits of a row are to depend on nothing but the row, as a field `bitwise`
        says. Then only the metadata decide on block sizes, and blocks are visited in order.
        """
        return as_flag(getattr(self, "bitwise", False), "bitwise")

    def block_sizes(self) -> tuple[int | None, int | None]:
        """How many queries and keys a block has; None lets the lowering choose.

        The number of `fixed` queries is a multiple of 8, or one. With other numbers, the last
        queries would not fill a vector register, and code compiled for them may round otherwise.
        """
        queries, keys = self.metadata.blocksize_q, self.metadata.blocksize_k
        if not self.fixed:
            return queries, keys
        queries = queries or 16
        return queries if queries == 1 else -(-queries // 8) * 8, keys or 128

    @abc.abstractmethod
    def fold(self, problem: Problem) -> tuple[Carry, Array | None]:
        """Folds a problem.

        **Returns:** the Carry `[B, T, H, ...]`, without the sinks, and the probabilities
        `[B, H, T, S]`, also without the sinks, or None if the strategy does not form them.
        """

    def attend(self, problem: Problem, dtype: Any) -> tuple[Array, Array | None] | None:
        """A hook for code that finishes rows where it visits their keys, at less cost than through
        a Carry. It is asked where a call needs no Carry and no weights.

        **Returns:** the output `[B, T, H, V]` in `dtype` and the logsumexp `[B, T, H]`, both with
        the sinks; or None, by default, where the `fold` is no dearer. The logsumexp may be None
        where the call does not want it.
        """

    def top(self, problem: Problem, count: int) -> tuple[Array, Array]:
        """A hook for [`eqattn.top_keys`][] that finds the `count` greatest logits of each row, the
        greatest first, and the positions of their keys, `[B, T, H, count]`. By default, each device
        visits all keys for its rows and heads. The mesh axes of these are manual, as XLA would
        gather the logits of all devices to select from them.
        """
        from ._fold import top_on_device

        return top_on_device(
            problem,
            count=count,
            block_q=self.metadata.blocksize_q,
            block_k=self.metadata.blocksize_k,
            in_place=self.reads_stored,
            manual=self.manual(problem, XLA, by_hand=True),
        )

    def lowering(self, problem: Problem) -> Lowering:
        """The code that visits the blocks of the fold. It is the kernels of the device that the
        metadata name, if there are any and they support the call, else loops of ordinary JAX.

        **Raises:** `ValueError` if the platform asks for kernels that do not support the call.
        """
        if (kernels := self._kernels()) is None:
            return XLA
        dtype, vectors = problem.query.dtype, (problem.query, problem.value)
        size = "" if self.reads_stored else kernels.unsupported_vectors(*vectors)
        from ._in_kernels import counts_up, other_kernels, untried_in

        apart = counts_up(self, problem.mask, problem.q_positions, problem.kv_positions)
        parts, reason = (problem.mask, problem.scores), kernels.unsupported_dtype(dtype) or size
        reason = reason or untried_in(kernels, *parts, apart)
        if reason and kernels.required:
            others = "" if size else other_kernels(kernels, *parts, dtype, apart)
            raise ValueError(self._without_kernel(kernels, reason, others))
        return XLA if reason else kernels

    def _kernels(self) -> Lowering | None:
        """The kernels of the platform and the device that the metadata name, if there are any."""
        platform, device = self.metadata.platform, self.metadata.backend.value
        if platform is Platform.XLA or not self.pallas_lowerings:
            return None
        if self.fixed and platform is Platform.AUTO:  # Kernels may refuse a call for its size.
            return None
        if platform is Platform.INTERPRET:
            device = interpreted_backend(device, self.pallas_lowerings)
        elif device == Backend.ANY.value:
            device = self.current_backend()
        if self.fixed and device not in self.fixed_in:
            fixed = " or ".join(self.fixed_in)
            remedy = f"use backend {fixed}, or platform" if fixed else "use platform"
            raise ValueError(
                f"bitwise=True with platform={platform.value!r}: on {device}, kernels of "
                f"{type(self).__name__} have blocks of their own; {remedy}='xla' or 'auto'."
            )
        return lowering_for(device, platform.value) if device in self.pallas_lowerings else None

    def may_run_kernels(self, dtype: Any) -> bool:
        """Whether calls in a dtype run in kernels, if these support all else."""
        return (kernels := self._kernels()) is not None and not kernels.unsupported_dtype(dtype)

    def _without_kernel(self, kernels: Lowering, reason: str, others: str = "") -> str:
        return (
            f"platform={self.metadata.platform.value!r}: there is no kernel of "
            f"{type(self).__name__} for this call on {kernels.device} ({reason}); use "
            f"platform={others}'auto' or 'xla'."
        )

    def partition(self, problem: Problem) -> tuple[Any, ...]:
        """The names of the mesh axes that shard the batch and the heads, and of those known to
        shard nothing.
        """
        if problem.partition is not None:
            return problem.partition
        return *batch_and_heads(self.metadata.partition_axis, problem.sizes[0]), ()

    def manual(
        self,
        problem: Problem,
        lowering: Lowering,
        place: ManualAxes | None = None,
        by_hand: bool = False,
    ) -> ManualAxes | None:
        """The mesh axes to make manual. They are those of `place`, and also those of batch and
        heads if the compiler cannot or should not split the lowering over devices. Next to manual
        axes, XLA splits no all-gather over the others. It does not split gathers of listed keys.
        Where bits are fixed, it should not decide on loops.
        """
        by_hand = by_hand or lists_own_keys(problem)
        if lowering.splits_over_devices and not by_hand:
            return place
        partition = self.partition(problem)
        heads = problem.sizes[3] // (1 if place is None else place.size)  # after the exchange
        sizes = math.prod(problem.batch_shape), heads
        return with_kernel(place, self.metadata.mesh, partition, sizes)

    def shards_tokens(self) -> bool:
        """A hook that says whether several devices hold the tokens of a sequence."""
        return False

    def key_shards(self) -> int:
        """A hook that says of how many devices a bias or a `Dense` mask holds the keys. It is more
        than 1 inside of the caller's own `shard_map` over the tokens.
        """
        return 1

    def check_lists(self, mask: AbstractMask | None) -> None:
        """A hook for masks that list keys, as a `Selected` does. **Raises:** `ValueError` if this
        strategy cannot visit such lists.
        """
        if not self.forms_weights and split_list(mask)[0] is not None and self.fixed:
            raise ValueError(
                "bitwise=True with a list of keys, such as a Selected: listed keys are gathered in "
                "blocks of their own sizes; use the same strategy without bitwise."
            )

    def unsupported(self, features: Mapping[str, Any]) -> str | None:
        if features.get("return_weights") and not self.forms_weights:
            return self._without_weights()
        try:
            reason = self._refused(features)
        except (TypeError, ValueError) as e:
            return str(e)
        return reason or super().unsupported(features)

    def _refused(self, features: Mapping[str, Any]) -> str:
        """Why a call with these features would raise for all shapes; empty if it would not. Some of
        the checks raise instead, with the message of the call.
        """
        self._check_blocks()
        given = {name: x for name, x in features.items() if x is not True}
        as_flag(features.get("inference", False), "inference (deterministic of forward_*)")
        mask, scores = arguments.as_mask(given.get("mask")), arguments.as_scores(given.get("score"))
        check_positions(mask)
        self.check_lists(mask)
        if given.get("bias") is not None:
            as_bias(given["bias"])
        arguments.check_one_offset(features.get("q_offset"), features.get("q_positions"))
        if "q_offset" in given:
            as_int(given["q_offset"], "q_offset")
        arguments.check_precision(self.precision)
        self.key_shards()  # raises where there is no mesh that has the axes
        dtype = jnp.dtype(given["dtype"]) if given.get("dtype") is not None else None
        if dtype is not None:
            check_computable(query=dtype)
        kernels = self._kernels()
        if kernels is None or not kernels.required:
            return ""
        self._check_features(features)
        from ._in_kernels import counts_up, known_refusal, other_kernels

        positions = features.get("q_positions"), features.get("kv_positions")
        asked = mask, scores, dtype, counts_up(self, mask, *positions)
        reason = known_refusal(kernels, *asked)
        return reason and self._without_kernel(kernels, reason, other_kernels(kernels, *asked))

    def _check_features(self, features: Mapping[str, Any]) -> None:
        """**Raises:** `ValueError` if the platform asks for code that no such call can have."""
        if (kernels := self._kernels()) is not None:
            asked = {**features, "precision": self.precision}
            if reason := kernels.unsupported_features(asked, self.metadata):
                raise ValueError(self._without_kernel(kernels, reason))

    def check_without_kernel(self, what: str) -> None:
        """**Raises:** `ValueError` if the platform asks for kernels, of which none does `what`."""
        self._check_blocks()
        kernels = self._kernels()
        if kernels is not None and kernels.required:
            raise ValueError(self._without_kernel(kernels, what))

    def _without_weights(self) -> str:
        return (
            f"return_weights: {type(self).__name__} never forms the weights; use "
            "Dense(metadata) (registry name 'dense')."
        )

    def _check_blocks(self) -> None:
        if self.metadata.blocksize_b not in (None, 1):
            raise ValueError(
                f"blocksize_b={self.metadata.blocksize_b}: {type(self).__name__} visits one batch "
                "element at a time; leave it None or 1."
            )

    def forward_native(  # noqa: PLR0913 (the seeds' forward and its options)
        self,
        q: Array,
        k: Array | AbstractStored,
        v: Array | AbstractStored,
        mask: Any = None,
        bias: Array | None = None,
        init_bias: Callable[[], Array] | None = None,
        deterministic: bool = False,
        dropout_rng: PRNGKeyArray | None = None,
        causal: bool = True,
        *,
        score: Any = None,
        q_offset: Any = None,
        q_positions: Any = None,
        kv_positions: Any = None,
        return_weights: bool = False,
        return_logsumexp: bool = False,
        return_carry: bool = False,
        return_max_logits: bool = False,
    ) -> AttentionOutput:
        """Computes attention for `q` `[*b, t, h, d]`, `k` `[*b, s, k, d]` and `v` `[*b, s, k, v]`.

        **Arguments:**

        - `mask`: a mask module or a boolean array broadcastable to `[*b, h, t, s]`.
        - `bias`: an array, broadcastable to `[*b, h, t, s]`, that is added to the logits. Mask
            and bias combine.
        - `init_bias`: a function that is called for a bias if both mask and bias are None.
        - `deterministic`: whether dropout is off.
        - `dropout_rng`: a random key. It is required if dropout is on.
        - `causal`: whether a query sees only the keys up to its own position (top-left aligned),
            in addition to `mask`.

        The keyword arguments are those of [`eqattn.attention`][].
        """
        self._check_blocks()
        dropout_rng = arguments.choose_dropout_key(self.metadata, deterministic, dropout_rng)
        flags = dict(
            return_weights=as_flag(return_weights, "return_weights"),
            return_logsumexp=as_flag(return_logsumexp, "return_logsumexp"),
            return_carry=as_flag(return_carry, "return_carry"),
            return_max_logits=as_flag(return_max_logits, "return_max_logits"),
        )
        wanted = ["outputs", *(n.removeprefix("return_") for n, flag in flags.items() if flag)]
        if return_weights and not self.forms_weights:
            raise ValueError(self._without_weights())
        bias = arguments.choose_bias(mask, bias, init_bias)
        q, mask, score = as_array(q, "query"), arguments.as_mask(mask), arguments.as_scores(score)
        mask, score = opened(mask, q.dtype), opened(score, q.dtype)
        if as_flag(causal, "causal"):
            mask = Causal() if mask is None else Causal() & mask
        options = dict(
            mask=mask,
            bias=bias,
            score=score,
            dropout_key=dropout_rng,
            q_offset=q_offset,
            q_positions=q_positions,
            kv_positions=kv_positions,
        )
        self._check_features(flags | options | dict(dropout=dropout_rng is not None))

        arguments.check_precision(self.precision)
        q = on_mesh_of(jnp.asarray(q), (self, k, v, options))
        if self.reads_stored:
            from .._problem.storage import values_from_keys

            v = values_from_keys(k, v)
        return _output_of((self, q, k, v, options), wanted)


def _output_of(args: tuple[Any, ...], wanted: Sequence[str]) -> AttentionOutput:
    """The output of a call, sharded as its query is. The `args` are those of `_computed`."""
    if explicit_axes(args[1]):
        strategy, q = args[:2]
        declared = batch_and_heads(strategy.metadata.partition_axis, q.shape[-3])
        partition = known_partition(declared, *args[1:4])
        run = lambda *args: _computed(*args, partition=partition, wanted=wanted)
        results = sharded_as_query(run, args, wanted)
    else:
        results = _computed(*args, partition=None, wanted=wanted)
    return as_output(results)


def _computed(
    strategy: AbstractFoldStrategy,
    q: Array,
    k: Any,
    v: Any,
    options: dict[str, Any],
    *,
    partition: tuple[Any, ...] | None,
    wanted: Sequence[str],
) -> dict[str, Any]:
    """The `wanted` parts of an output, from arguments whose mask and scores are modules.

    `partition` is what is known of the mesh axes that shard the call, see `known_partition`.
    """
    if not strategy.reads_stored:
        k, v = (jnp.asarray(x) if hasattr(x, "__jax_array__") else x for x in (k, v))
    for name, x in (("key_", k), ("value", v)):
        if isinstance(x, AbstractStored) and not strategy.reads_stored:
            raise ValueError(
                f"{name} is {type(x).__name__} {x.shape}, which {type(strategy).__name__} does "
                "not read; use Ragged(metadata), or pass its materialise()."
            )
    shards = strategy.key_shards()
    strategy.check_lists(options["mask"])
    problem = Problem.from_call(
        q,
        k,
        v,
        strategy.metadata,
        precision=strategy.precision,
        shards=shards,
        partition=partition,
        **options,
    )
    dtype = strategy.output_dtype(problem.query)
    found = None
    if not {"carry", "weights", "max_logits"} & set(wanted):
        found = strategy.attend(problem, dtype)
    if found is None:
        carry, weights = strategy.fold(problem)
        results = finish(problem, carry, weights, dtype)
    else:
        results = attended(problem, *found)
    return {name: results[name]() for name in wanted}
