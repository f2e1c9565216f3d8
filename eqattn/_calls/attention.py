"""`attention()`, the entry of the library: it checks the strategy and calls it."""

import functools as ft
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from .._config.metadata import AttentionMetadata
from .._output import AttentionOutput
from .._problem.problem import MaskLike, ScoreLike
from .._problem.storage import AbstractStored
from ..masks._base import AbstractMask
from ..strategies import AttentionImpl, Blockwise


_Call = TypeVar("_Call", bound=Callable[..., AttentionOutput])

_CAUSAL = {"is_causal", "causal"}
"""What other libraries call a causal mask."""


def _with_remedies(call: _Call) -> _Call:
    """A decorator of `attention`, which says what the keywords of other libraries are here."""

    @ft.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for name in _CAUSAL & kwargs.keys():
            raise TypeError(
                f"attention has no {name}=: a causal mask is mask='causal', or mask=Causal(), "
                "which combines with others by `&`."
            )
        if len(args) < 2 and "key" in kwargs and "key_" not in kwargs:
            raise TypeError(
                "attention takes the keys by position or as key_=, and key= is the random key of "
                "dropout: call attention(query, key, value), or name key_=."
            )
        return call(*args, **kwargs)

    return wrapped  # pyright: ignore[reportReturnType]


@_with_remedies
def attention(  # noqa: PLR0913 (one argument for each option of a call)
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
    return_max_logits: bool = False,
) -> AttentionOutput:
    r"""Computes exact attention.

    Logits are `scale * (q . k)`, then the soft cap `c * tanh(x / c)`, then `bias`, then the scores
    in order, then the mask. Scale, soft cap, sinks, dropout, dtypes and block sizes are the
    strategy's metadata.

    **Arguments:**

    - `query`: the queries, `[*b, t, h, d]`, with any number of leading axes `*b`, or none.
    - `key_`: the keys, `[*b, s, k, d]`, where `h` is a multiple of `k`.
    - `value`: the values, `[*b, s, k, v]`.
    - `strategy`: where and in which order pairs are visited. The default is `Blockwise()`.
    - `mask`: which pairs are visible. It is a module of `eqattn.masks`, a boolean array
        broadcastable to `[*b, h, t, s]`, or a name: `"causal"` means `Causal()`, and `"full"` means
        None, which shows every pair.
    - `bias`: an array that is added to the logits and is broadcastable to `[*b, h, t, s]`.
    - `score`: a module of `eqattn.scores`, or a sequence of them.
    - `key`: the random key of the dropout. It is required if the metadata's `dropout_prob` is
        positive, unless `inference` is set.
    - `inference`: whether dropout is switched off.
    - `q_offset`: an integer, or an integer array `[*b]`, that is added to the query positions. An
        integer is part of the program, so each new one compiles a new program; an array is data.
    - `q_positions`, `kv_positions`: explicit positions, `[*b, t]` and `[*b, s]`.
    - `return_weights`, `return_logsumexp`, `return_carry`, `return_max_logits`: whether the output
        also has that field.

    **Returns:**

    An [`eqattn.AttentionOutput`][]. Its `attention_outputs` `[*b, t, h, v]` have the metadata's
    `runtime_dtype`, by default the query's dtype. If asked for, it also has `attention_weights`
    `[*b, h, t, s]`, `logsumexp` `[*b, t, h]`, `carry` and `max_logits` `[*b, t, h]`, the largest
    logit of each query. Logsumexp and Carry include the sinks, and `max_logits` does not. To merge
    Carries of parts of the keys, give the sinks to one of them only. A query that sees no key has
    output 0, zero gradients, and the logsumexp `-inf`, or that of the sinks if there are any.

    **Raises:**

    `ValueError` or `TypeError` at trace time; the message names the shapes and the remedy.
    """
    strategy = _default() if strategy is None else strategy
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
        return_max_logits=return_max_logits,
    )


@ft.cache
def _default() -> AttentionImpl:
    """The strategy of calls that name none. It holds no arrays, so one serves them all."""
    return Blockwise()


def check_strategy(strategy: Any) -> None:
    """**Raises:** `TypeError`, with the remedy, unless it is a strategy."""
    if isinstance(strategy, AttentionImpl):
        return
    if isinstance(strategy, AbstractMask | jax.Array | np.ndarray | list):
        raise TypeError(
            f"strategy must be an AttentionImpl such as Blockwise(metadata), got "
            f"{type(strategy).__name__}; pass masks by name, mask=, and biases bias=."
        )
    if isinstance(strategy, AttentionMetadata):
        raise TypeError(
            "strategy must be an AttentionImpl, got AttentionMetadata(...); make one of it: "
            "Blockwise(metadata)."
        )
    raise TypeError(
        f"strategy must be an AttentionImpl such as Blockwise(metadata), got {strategy!r}; "
        "AttentionRegistry.create(name, metadata) makes one from a name."
    )
