r"""Statistics of attention probabilities, as derivatives of the logsumexp.

Let $L_i = \log \sum_j e^{s_{ij}}$ be the logsumexp of row $i$ over its keys, and $p_{ij} =
e^{s_{ij} - L_i}$. If each logit moves by $\epsilon f_{ij}$, then

$$
\frac{d L_i}{d \epsilon} = \sum_j p_{ij} f_{ij}, \qquad
\frac{\partial}{\partial b_j} \sum_i w_i L_i = \sum_i w_i p_{ij} \quad \text{for a bias } b_j .
$$

So the mass that a key receives is a gradient, and the expectation of any function $f$ of a pair is
a tangent. It is also an output of attention, over values of 1 with $f$ as the factor on each
probability, as that of dropout is. That takes one visit of the blocks, where a tangent takes two.
All are visits that the fold has already: they run under every strategy, skip the blocks that a mask
empties, and are differentiable themselves. Who knows $L_i$ from a call of attention hands it over.
Then the visit that finds it is left out, and that of the derivative remains.

Sinks join the denominator alone. They are left out of $L$. Let $L'$ be the logsumexp of the keys
and the sinks. Then each probability is multiplied by the share of the keys, $e^{L - L'}$.

A call of attention whose statistics are asked for.

The scores by which a call of attention finds its statistics.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._calls.attention import attention, check_strategy
from .._carry import joint_logit
from .._jax import vary, varying_axes
from .._misc import as_array
from .._output import AttentionOutput
from .._pairs import Operand
from .._problem.problem import as_scores, as_sinks, MaskLike, ScoreLike
from .._problem.storage import AbstractStored
from ..scores._base import AbstractScore, AbstractWrapper, as_bias
from ..scores._function import ScoreFn
from ..strategies import AttentionImpl, Blockwise
from ..strategies._base import with_metadata
from ..strategies._fold_strategy import AbstractFoldStrategy
from ..strategies._on_device import AbstractOnDevice


class Logit(AbstractScore):
    """The logit itself."""

    finite_when_masked: ClassVar[bool] = True

    def transform(self, logit: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return logit


class Distance(AbstractScore):
    """How far apart the query and the key of a pair are."""

    finite_when_masked: ClassVar[bool] = True

    def transform(self, logit: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return abs(q - k).astype(logit.dtype)


def _of_visible(score: AbstractScore, logit: Any, *rest: Any) -> Any:
    """What a user's function returns for a pair. It is 0 for a pair that weighs nothing, as the
    function need not be finite there.
    """
    hidden = logit == -jnp.inf
    found = score.transform(jnp.where(hidden, 0, logit), *rest)
    return jnp.where(hidden, jnp.zeros_like(found), found)


class Factor(AbstractScore):
    """A function of the pair, which is a score, as the factor on the probability."""

    score: AbstractScore

    weighs: ClassVar[bool] = True

    def operands(self) -> tuple[Operand, ...]:
        return self.score.operands()

    def transform(self, logit: Any, b: Any, h: Any, q: Any, k: Any, *operands: Any) -> Any:
        return _of_visible(self.score, logit, b, h, q, k, *operands)


@jax.custom_jvp
def _at_zero(logit: Any, x: Any) -> Any:
    """`logit + x` where `x` is 0, which is not read, and has its derivatives."""
    del x
    return logit


@_at_zero.defjvp
def _at_zero_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return _at_zero(*primals), tangents[0] + tangents[1]


class KeyBias(AbstractScore):
    """A bias of each key `[*b, h, 1, s]`, which is 0."""

    bias: Float[Array, "..."]

    finite_when_masked: ClassVar[bool] = True

    def operands(self) -> tuple[Operand, ...]:
        return (Operand(self.bias, "bhts"),)

    def transform(self, logit: Any, b: Any, h: Any, q: Any, k: Any, *operands: Any) -> Any:
        return _at_zero(logit, operands[0].astype(logit.dtype))


class Surprise(AbstractScore):
    """How much the key of a pair surprises, `-log p` for a known logsumexp of each row."""

    known: Float[Array, "..."]

    finite_when_masked: ClassVar[bool] = True

    def operands(self) -> tuple[Operand, ...]:
        return (Operand(jnp.swapaxes(self.known, -1, -2), "bht"),)

    def transform(self, logit: Any, b: Any, h: Any, q: Any, k: Any, *operands: Any) -> Any:
        return operands[0] - logit


class Known(AbstractScore):
    """The logit itself, of rows whose logsumexp is known."""

    known: Float[Array, "..."]

    finite_when_masked: ClassVar[bool] = True
    recalls: ClassVar[bool] = True

    def operands(self) -> tuple[Operand, ...]:
        return (Operand(jnp.swapaxes(self.known, -1, -2), "bht"),)

    def transform(self, logit: Any, b: Any, h: Any, q: Any, k: Any, *operands: Any) -> Any:
        return logit


class Moved(AbstractWrapper):
    """The logit, moved by `amount` times a function of the pair, which is a score."""

    score: AbstractScore
    amount: Float[Array, ""]

    def operands(self) -> tuple[Operand, ...]:
        return (*self.score.operands(), Operand(self.amount, ""))

    def transform(self, logit: Any, b: Any, h: Any, q: Any, k: Any, *operands: Any) -> Any:
        *own, amount = operands
        return logit + amount.astype(logit.dtype) * _of_visible(self.score, logit, b, h, q, k, *own)


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


def _options(mask, bias, score, q_offset, q_positions, kv_positions) -> dict[str, Any]:
    where = dict(q_offset=q_offset, q_positions=q_positions, kv_positions=kv_positions)
    return dict(mask=mask, bias=bias, score=score, **where)


def expectation(  # noqa: PLR0913 (the options of the call whose weights are meant)
    fn: Callable[..., Any] | AbstractScore,
    query: Float[Array, "*b t h d"],
    key_: Float[Array | AbstractStored, "*b s k d"],
    strategy: AttentionImpl | None = None,
    *,
    arrays: Sequence[Operand] = (),
    logsumexp: Float[Array, "*b t h"] | None = None,
    mask: MaskLike = None,
    bias: Any = None,
    score: ScoreLike = None,
    q_offset: Any = None,
    q_positions: Any = None,
    kv_positions: Any = None,
) -> Float[Array, "*b t h"]:
    r"""The expectation of a function of a pair under the softmax, $\sum_j p_{ij} f_{ij}$.

    **Arguments:**

    - `fn`: a function `fn(logit, b, h, q, k, *operands)` of scalars, as that of
        [`eqattn.ScoreFn`][]; or a score, whose `transform` it is. `logit` is the final one.
    - `query`, `key_`, `strategy`, `mask`, `bias`, `score`, `q_offset`, `q_positions`,
        `kv_positions`: as for [`eqattn.attention`][]. Dropout does not count.
    - `arrays`: the [`eqattn.scores.Operand`][]s of which `fn` receives one scalar each.
    - `logsumexp`: the `logsumexp` of `attention(..., return_logsumexp=True)` with the same
        arguments, sinks included. It saves a visit of the blocks. The $p_{ij}$ are
        $e^{s_{ij} - L_i}$ with this $L_i$, whose gradient is part of that of the result.

    **Returns:** `[*b, t, h]`, float32 or wider. It is 0 for a query that sees no key. With sinks,
    the probabilities of the keys add up to less than one.

    **Raises:** what [`eqattn.attention`][] raises.
    """
    if not isinstance(fn, AbstractScore):
        fn = ScoreFn(fn, arrays)
    elif len(arrays):
        raise ValueError(f"arrays are operands of a function; {type(fn).__name__} has its own.")
    options = _options(mask, bias, score, q_offset, q_positions, kv_positions)
    return Call(query, key_, strategy, options, logsumexp).sum(fn)


def entropy(  # noqa: PLR0913 (the options of the call whose weights are meant)
    query: Float[Array, "*b t h d"],
    key_: Float[Array | AbstractStored, "*b s k d"],
    strategy: AttentionImpl | None = None,
    *,
    logsumexp: Float[Array, "*b t h"] | None = None,
    mask: MaskLike = None,
    bias: Any = None,
    score: ScoreLike = None,
    q_offset: Any = None,
    q_positions: Any = None,
    kv_positions: Any = None,
) -> Float[Array, "*b t h"]:
    r"""Computes the entropy of the attention of each query, $-\sum_j p_{ij} \log p_{ij}$, in nats.

    It is the logsumexp less the expectation of the logit. Their difference is small next to them
    where a query sees little but one key, and then accurate to the roundoff of a logit. With
    `logsumexp`, it is the expectation of their difference, and a visit less.

    **Arguments:** those of [`eqattn.stats.expectation`][].

    **Returns:** `[*b, t, h]`, float32 or wider. It is 0 for a query that sees no key. With sinks,
    the sum is over the keys alone, whose probabilities sum to less than one.
    """
    options = _options(mask, bias, score, q_offset, q_positions, kv_positions)
    call = Call(query, key_, strategy, options, logsumexp)
    if call.known is not None:
        return call.sum(Surprise(call.known))
    logsumexp, mean = call.expectation(Logit())
    seen = logsumexp != -jnp.inf
    safe = jnp.where(seen, logsumexp, 0)
    return jnp.where(seen, call.share(logsumexp) * (call.with_sinks(safe) - mean), 0)


def effective_window(  # noqa: PLR0913 (the options of the call whose weights are meant)
    query: Float[Array, "*b t h d"],
    key_: Float[Array | AbstractStored, "*b s k d"],
    strategy: AttentionImpl | None = None,
    *,
    mask: MaskLike = None,
    bias: Any = None,
    score: ScoreLike = None,
    q_offset: Any = None,
    q_positions: Any = None,
    kv_positions: Any = None,
) -> Float[Array, "*b t h"]:
    r"""Computes the width of the causal window in which uniform attention would be as far from its
    query as here. It is $1 + 2 \sum_j p_{ij} |i - j|$, where the $p_{ij}$ of the keys sum to one.

    The mean distance in a uniform window of `w` keys, the query's own included, is `(w - 1) / 2`.

    **Arguments:** those of [`eqattn.stats.expectation`][] without `logsumexp`, which does not tell
    the sum of the probabilities where there are sinks.

    **Returns:** `[*b, t, h]`, float32 or wider. It is 0 for a query that sees no key.
    """
    options = _options(mask, bias, score, q_offset, q_positions, kv_positions)
    logsumexp, mean = Call(query, key_, strategy, options).expectation(Distance())
    return jnp.where(logsumexp != -jnp.inf, 1 + 2 * mean, 0)


def mass(  # noqa: PLR0913 (the options of the call whose weights are meant)
    query: Float[Array, "*b t h d"],
    key_: Float[Array | AbstractStored, "*b s k d"],
    strategy: AttentionImpl | None = None,
    *,
    weights: Any = None,
    logsumexp: Float[Array, "*b t h"] | None = None,
    mask: MaskLike = None,
    bias: Any = None,
    score: ScoreLike = None,
    q_offset: Any = None,
    q_positions: Any = None,
    kv_positions: Any = None,
) -> Float[Array, "*b s h"]:
    r"""The probability that each key receives from all queries, $\sum_i w_i p_{ij}$.

    A cache that must forget keeps the keys that received most.

    **Arguments:** those of [`eqattn.stats.expectation`][], and

    - `weights`: an array, broadcastable to the rows `[*b, t, h]`, that says how much each query
        counts; None means 1. Ones for the last few queries and zeros for the others ask which keys
        these look at.

    **Returns:** `[*b, s, h]`, float32 or wider. In a `jax.shard_map` of your own over the tokens,
    these are the keys of the device.

    **Raises:** what [`eqattn.attention`][] raises, and `ValueError` in such a `jax.shard_map` with
    `check_vma=False` for `Ragged(metadata, axis_name=...)`.
    """
    options = _options(mask, bias, score, q_offset, q_positions, kv_positions)
    call = Call(query, key_, strategy, options, logsumexp)
    weights = jnp.ones((), call.dtype) if weights is None else as_array(weights, "weights")
    fits = weights.ndim <= len(call.rows) and all(
        n in (1, m) for n, m in zip(weights.shape[::-1], call.rows[::-1])
    )
    if not fits:
        raise ValueError(
            f"weights {weights.shape} do not broadcast to the rows {call.rows} [*b, t, h]; give "
            "each axis its full size or 1."
        )
    weights, nothing = jnp.broadcast_to(weights.astype(call.dtype), call.rows), call.no_bias()
    if call.known is None:
        found, pull = jax.vjp(lambda bias: call.logsumexp(KeyBias(bias)), nothing)
        weights = weights * call.share(found)
    else:
        found, pull = jax.vjp(lambda bias: call.total(KeyBias(bias)), nothing)
    # Added to zeros, they are sharded as the rows are, also where the mesh axes are explicit.
    (received,) = pull(weights + jnp.zeros_like(found))
    return jnp.swapaxes(received[..., 0, :], -1, -2)
