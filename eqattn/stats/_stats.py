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
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._misc import as_array
from .._pairs import Operand
from .._problem.arguments import MaskLike, ScoreLike
from .._problem.storage import AbstractStored
from ..scores._base import AbstractScore
from ..scores._function import ScoreFn
from ..strategies import AttentionImpl
from ._call import Call
from ._scores import Distance, KeyBias, Logit, Surprise


def _options(mask, bias, score, q_offset, q_positions, kv_positions) -> dict[str, Any]:
    where = dict(q_offset=q_offset, q_positions=q_positions, kv_positions=kv_positions)
    return dict(mask=mask, bias=bias, score=score, **where)


def expectation(
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


def entropy(
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


def effective_window(
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


def mass(
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
