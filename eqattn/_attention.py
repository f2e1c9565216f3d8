"""The public entry."""

from typing import Any

from jaxtyping import Array, Float, PRNGKeyArray

from ._config.metadata import AttentionMetadata
from ._misc import as_array, check_floating
from ._output import AttentionOutput
from ._problem.problem import MaskLike, ScoreLike
from ._problem.storage import AbstractStored
from .strategies import AttentionImpl, Blockwise
from .strategies._checks import check_strategy


def attention(
    query: Float[Array, "*b t h d"],
    key_: Float[Array | AbstractStored, "*b s k d"],
    value: Float[Array | AbstractStored, "*b s k v"],
    strategy: AttentionImpl | None = None,
    *,
    mask: MaskLike = None,
    bias: Float[Array, "..."] | None = None,
    score: ScoreLike = None,
    key: PRNGKeyArray | None = None,
    inference: bool = False,
    q_offset: Any = None,
    q_positions: Any = None,
    kv_positions: Any = None,
    return_weights: bool = False,
    return_logsumexp: bool = False,
    return_carry: bool = False,
) -> AttentionOutput:
    r"""Exact attention.

    Logits are `scale * (q . k)`, then the soft cap `c * tanh(x / c)`, then `bias`, then the
    scores in order, then the mask. Scale, soft cap, sinks, dropout, dtypes and block sizes are the
    strategy's metadata.

    **Arguments:**

    - `query`: `[*b, t, h, d]`, any number of leading axes (also none).
    - `key_`: `[*b, s, k, d]`; `h` is a multiple of `k`.
    - `value`: `[*b, s, k, v]`.
    - `strategy`: where and in which order pairs are visited. By default
        `Blockwise(AttentionMetadata(runtime_dtype=query.dtype))`.
    - `mask`: what is visible: a module of `eqattn.masks`, or a boolean array broadcastable to
        `[*b, h, t, s]`, or None (everything).
    - `bias`: added to the logits; broadcastable to `[*b, h, t, s]`.
    - `score`: a module of `eqattn.scores`, or a sequence of them.
    - `key`: for dropout, required if the metadata's `dropout_prob` is positive and not `inference`.
    - `inference`: switches dropout off.
    - `q_offset`: added to the positions of the queries: an integer, or an integer array `[*b]`.
    - `q_positions`, `kv_positions`: explicit positions, `[*b, t]` and `[*b, s]`.
    - `return_weights`, `return_logsumexp`, `return_carry`: further fields of the output.

    **Returns:**

    An [`eqattn.AttentionOutput`][]: `attention_outputs` `[*b, t, h, v]` in the metadata's
    `runtime_dtype`, and if asked for `attention_weights` `[*b, h, t, s]`, `logsumexp` `[*b, t, h]`
    and `carry`. Logsumexp and Carry include the sinks: to merge Carries of parts of the keys, give
    the sinks to one of them. A query that sees no key has output 0, logsumexp `-inf` (with sinks,
    theirs) and zero gradients.

    **Raises:**

    `ValueError` or `TypeError` at trace time, naming the shapes and the remedy.
    """
    if strategy is None:
        query = as_array(query, "query")
        check_floating(query=query)
        strategy = Blockwise(AttentionMetadata(runtime_dtype=query.dtype))
    check_strategy(strategy)
    return strategy(
        query,
        key_,
        value,
        mask=mask,
        bias=bias,
        score=score,
        key=key,
        inference=inference,
        q_offset=q_offset,
        q_positions=q_positions,
        kv_positions=kv_positions,
        return_weights=return_weights,
        return_logsumexp=return_logsumexp,
        return_carry=return_carry,
    )
