"""A call of attention whose statistics are asked for."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._calls.attention import attention, check_strategy
from .._carry.rows import joint_logit
from .._jax import vary, varying_axes
from .._misc import as_array
from .._output import AttentionOutput
from .._problem.arguments import as_scores, as_sinks
from .._problem.storage import AbstractStored
from ..scores._base import AbstractScore
from ..scores._bias import as_bias
from ..strategies import AttentionImpl, Blockwise
from ..strategies._base import with_metadata
from ..strategies._fold_strategy import AbstractFoldStrategy
from ..strategies._on_device import AbstractOnDevice
from ._scores import Factor, Known, Moved


class Call:
    """One call of attention, of which the statistics ask for the logsumexp alone.

    **Attributes:**

    - `rows`, `keys`: the shapes `(*b, t, h)` of rows and `(*b, h, 1, s)` of a bias on the keys.
    - `dtype`: the dtype of sums.
    - `known`: the logsumexp of the call with its sinks `[*b, t, h]`; None if it must be computed.
    """

    def __init__(
        self,
        query: Any,
        key_: Any,
        strategy: AttentionImpl | None,
        call: dict,
        logsumexp: Any = None,
    ):
        strategy = Blockwise() if strategy is None else strategy
        check_strategy(strategy)
        self.query = jnp.asarray(as_array(query, "query", 3))
        self.stored = isinstance(key_, AbstractStored)
        if self.stored:  # may be pages of a pool: their own values
            self.key = self.value = key_
        else:
            self.key = jnp.asarray(as_array(key_, "key_", 3))
            self.value = jnp.ones_like(self.key[..., :1])
        metadata = strategy.metadata
        *batch, tokens, heads, _ = self.query.shape
        self.rows, self.keys = (*batch, tokens, heads), (*batch, heads, 1, self.key.shape[-3])
        self.dtype = jnp.float64 if self.query.dtype == jnp.float64 else jnp.float32
        sinks = as_sinks(metadata.softmax_aux, heads)
        self.sinks = None if sinks is None else joint_logit(sinks.astype(self.dtype))
        self.strategy = with_metadata(strategy, metadata.replace(softmax_aux=None))
        bias, score = call.pop("bias"), as_scores(call.pop("score"))
        self.scores = score if bias is None else (as_bias(bias), *score)
        self.options = call
        self.known = None if logsumexp is None else self._known(logsumexp)

    def _known(self, logsumexp: Any) -> Array:
        known = jnp.asarray(as_array(logsumexp, "logsumexp"))
        if known.shape != self.rows or not jnp.issubdtype(known.dtype, jnp.floating):
            raise ValueError(
                f"logsumexp {known.dtype}{list(known.shape)} is not that of the rows "
                f"{list(self.rows)} [*b, t, h] of the query {self.query.shape}; pass the field of "
                "that name of attention(..., return_logsumexp=True)."
            )
        return known.astype(self.dtype)

    def attend(self, value: Any, *more: AbstractScore, **wanted: bool) -> AttentionOutput:
        """Attention over some values without sinks, under further scores."""
        return attention(
            self.query,
            self.key,
            value,
            self.strategy,
            score=(*self.scores, *more),
            inference=True,
            **wanted,
            **self.options,
        )

    def logsumexp(self, *more: AbstractScore) -> Array:
        """The logsumexp `[*b, t, h]` over the keys, without sinks, under further scores."""
        out = self.attend(self.unweighed, *more, return_logsumexp=True)
        return out.logsumexp.astype(self.dtype)

    def total(self, *more: AbstractScore) -> Array:
        r"""The sum over the keys $\sum_j e^{s_{ij} - L_i}$ `[*b, t, h]` for the known logsumexp,
        under further scores.

        Its value is not computed, as only derivatives matter. Where parts of the keys are merged,
        it is the number of parts.
        """
        known = self.known
        assert known is not None
        carry = self.attend(self.unweighed, *more, Known(known), return_carry=True).carry
        seen = known != -jnp.inf
        known, origin = (jnp.where(seen, x, 0) for x in (known, carry.max_so_far))
        # The origin is a gauge, and has no derivative.
        share = jnp.exp(jax.lax.stop_gradient(origin).astype(self.dtype) - known)
        return jnp.where(seen, carry.denominator.astype(self.dtype) * share, 0)

    @property
    def unweighed(self) -> Any:
        """The values of a visit of which nothing is read but the denominator: of size 0, if they
        may be.
        """
        return self.value[..., :0] if self.weighs else self.value

    @property
    def weighs(self) -> bool:
        """Whether values of any size can have other factors than those of dropout. Kernels would
        round these, and what is stored is its own values.
        """
        strategy = self.strategy
        if not isinstance(strategy, AbstractFoldStrategy) or self.stored:
            return False
        return not strategy.may_run_kernels(self.query.dtype)

    def expectation(self, fn: AbstractScore) -> tuple[Array, Array]:
        """Computes the logsumexp without sinks, and the expectation of `fn` over the keys."""
        if self.weighs:
            carry = self.attend(self.value, Factor(fn), return_carry=True).carry
            return carry.logsumexp(), carry.output()[..., 0]
        return self.along(fn, self.logsumexp)

    def along(self, fn: AbstractScore, row: Callable[[Moved], Array]) -> tuple[Array, Array]:
        """A function of the logits of each row, and its derivative as these move along `fn`."""
        amounts = (jnp.zeros((), self.dtype),), (jnp.ones((), self.dtype),)
        return jax.jvp(lambda amount: row(Moved(fn, amount)), *amounts)

    def sum(self, fn: AbstractScore) -> Array:
        r"""The sum over the keys $\sum_j p_{ij} f_{ij}$, whose probabilities the sinks lessen."""
        if self.known is not None:
            return self.along(fn, self.total)[1]
        logsumexp, mean = self.expectation(fn)
        return mean * self.share(logsumexp)

    def no_bias(self) -> Array:
        """A bias of each key `[*b, h, 1, s]`, of zeros. Over devices it lies as the keys do, and so
        will its gradient.

        **Raises:** `ValueError` for keys that devices share without JAX knowing it, in a
        `jax.shard_map` of the caller's that does not track what varies. The logsumexp is a sum
        over devices, and JAX takes its gradient there for one, too.
        """
        axis = self.strategy.keys_axis() if isinstance(self.strategy, AbstractOnDevice) else None
        own = jax.sharding.get_abstract_mesh().manual_axes
        if axis in own and axis not in varying_axes(*jax.tree.leaves(self.key)):
            raise ValueError(
                f"stats.mass of keys {self.key.shape} that devices share over axis_name={axis!r} "
                "needs a jax.shard_map with check_vma=True, or whole arrays outside of it."
            )
        heads = jnp.zeros_like(self.query.sum((-3, -1)), self.dtype)[..., None, None]
        if isinstance(self.key, AbstractStored):
            nothing = jnp.broadcast_to(heads, self.keys)
            whole = self.key.table is not None  # Each device has all of a table of pages.
            return nothing if whole else vary(nothing, varying_axes(*jax.tree.leaves(self.key)))
        return heads + jnp.zeros_like(self.key.sum((-2, -1)), self.dtype)[..., None, None, :]

    def with_sinks(self, logsumexp: Array) -> Array:
        """The logsumexp over the keys and the sinks."""
        if self.sinks is None:
            return logsumexp
        sinks = jnp.broadcast_to(self.sinks, logsumexp.shape)
        return jnp.logaddexp(logsumexp, sinks)

    def share(self, logsumexp: Array) -> Array:
        """The sum of the probabilities of the keys: 1, or less by what the sinks take."""
        seen = logsumexp != -jnp.inf
        safe = jnp.where(seen, logsumexp, 0)
        return jnp.where(seen, jnp.exp(safe - self.with_sinks(safe)), 0)
