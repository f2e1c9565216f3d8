"""`ragged_attention()`: one call serves rows with different numbers of new queries.

Its method: the packed queries are copied into blocks of `block_q`, each of which belongs to one
row (`places_of`). Each block becomes a batch element of an ordinary call of `attention`, whose keys
are pages of its row (`pages_of_rows`), so no keys are copied. Then the outputs are packed again.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._misc import as_array, as_flag, as_int, as_int32, concrete
from .._output import AttentionOutput
from .._problem.problem import as_mask, as_positions, as_scores
from .._problem.storage import AbstractStored, StackLayer, values_from_keys
from .._run_time import raise_if
from ..masks._base import check_call
from ..masks._causal import Causal
from ..masks._segments import check_boundaries, KeyPadding
from ..strategies import AttentionImpl
from ..strategies._on_device import AbstractOnDevice
from ..strategies.ragged import Ragged
from .attention import attention
from .packing import (
    check_strategy,
    mask_of_rows,
    on_auto_axes,
    packed_output,
    PackedRows,
    pages_of_rows,
    places_of,
    positions_of_pages,
    queries_of,
    scores_of_rows,
    Sharers,
)


@on_auto_axes
def ragged_attention(  # noqa: PLR0913 (one argument for each option of a call)
    query: Float[Array, "n h d"],
    key_: Float[Array | AbstractStored, "b s k d"],
    value: Float[Array | AbstractStored, "b s k v"],
    cu_q_lens: Int[Array, " b1"],
    lengths: Int[Array, " b"],
    strategy: Ragged = Ragged(),
    *,
    starts: Int[Array, " b"] | None = None,
    kv_positions: Int[Array, "#b s"] | None = None,
    mask: Any = None,
    causal: bool = True,
    score: Any = None,
    block_q: int | None = None,
    return_logsumexp: bool = False,
    return_carry: bool = False,
    return_max_logits: bool = False,
) -> AttentionOutput:
    """Computes attention of queries that are packed one row after the other. Each row attends to
    its own keys.

    The queries of a row are its last tokens: the last one is at position `lengths - 1`. So one call
    serves rows that enter a prompt, decode one token or check drafts.

    **Arguments:**

    - `query`: the packed queries, `[n, h, d]`. Row `i` has those from `cu_q_lens[i]` up to, but
        not including, `cu_q_lens[i + 1]`. Queries after those of the last row are padding.
    - `key_`, `value`: keys `[b, s, k, d]` and values `[b, s, k, v]`, such as those of a cache.
    - `cu_q_lens`: the boundaries of the rows in `query`, int `[b + 1]`. They start at 0 and do not
        decrease.
    - `lengths`, `starts`: int `[b]`. The keys `starts <= position < lengths` of each row are
        visible, and `lengths` includes the keys of the new queries. The default start is 0.
    - `kv_positions`: the positions of the keys, int `[b, s]`, such as `cache.positions`: a ring
        buffer needs them. By default they are `0, 1, ...` Then lengths beyond `s` raise when the
        program runs, and `jax.export` cannot write that check: give the positions for it.
    - `strategy`: a [`eqattn.Ragged`][], by default `Ragged()`. With its `axis_name`, devices share
        the keys of each row.
    - `mask`, `score`: a further mask and further scores. They receive the index of the row as `b`.
        They may hold arrays per row and head, but none per query or key. Only a
        [`eqattn.Selected`][] has those of packed queries, `[h, n, keys]`.
    - `causal`: whether a query sees only the keys up to its own position.
    - `block_q`: how many queries are visited together. Each row pads its last block, so a small
        block wastes less, and a large one reads the keys of a long prompt less often. None takes
        16, which was chosen by trial. If there are no more queries than rows, as where each row
        decodes a token, it takes 1.
    - `return_logsumexp`, `return_carry`, `return_max_logits`: whether the output also has that
        field.

    **Returns:** an [`eqattn.AttentionOutput`][]. It has `attention_outputs` `[n, h, v]` and, if
    asked for, `logsumexp` `[n, h]`, `carry` and `max_logits` `[n, h]`. Padding has output 0,
    logsumexp and largest logit `-inf`, and zero gradients.

    **Raises:** `ValueError` or `TypeError` at trace time; the message names the shapes and the
    remedy. This includes `cu_q_lens` and `lengths` that do not fit, if their values are known.
    """
    mask, scores = as_mask(mask), as_scores(score)
    query = jnp.asarray(as_array(query, "query"))
    key_, value = (
        x if isinstance(x, AbstractStored) else jnp.asarray(as_array(x, name))
        for name, x in (("key_", key_), ("value", value))
    )
    check_strategy(strategy, "ragged_attention")
    sharers = _sharers(strategy)
    given, in_order = (cu_q_lens, lengths, starts), sharers if kv_positions is None else None
    cu_q_lens, lengths, starts = _checked((query, key_, value), given, in_order)
    causal = as_flag(causal, "causal")
    most = (1 if len(query) <= len(lengths) else 16) if block_q is None else block_q
    most = as_int(most, "block_q", least=1, static=True).value
    at = as_positions(kv_positions, key_.shape[1], key_.shape[:1], "kv_positions")

    place = places_of(cu_q_lens, len(query), min(most, max(len(query), 1)))
    row, rows, heads = place.row, len(lengths), query.shape[1]
    count = cu_q_lens[1:] - cu_q_lens[:-1]
    check_call(mask, (), heads, key_.shape[2], len(query), key_.shape[1], kv_positions)
    of_rows = PackedRows(row, rows, heads, place.tokens)
    mask = mask_of_rows(mask, of_rows)
    shown = KeyPadding(jnp.where(place.live, lengths[row], 0), starts[row])
    for more in (Causal() if causal else None, mask):
        shown = shown if more is None else shown & more
    size, once = strategy.block_sizes()[1], values_from_keys(key_, value) is not value
    if sharers.devices > 1:  # The pages of a stack lie in one order, not in turn on the devices.
        key_, value = (x.alone() if isinstance(x, StackLayer) else x for x in (key_, value))
    keys = pages_of_rows(key_, row, size, sharers)
    latents = keys.c_kv if once else None
    output = attention(
        queries_of(query, place),
        keys,
        pages_of_rows(value, row, size, sharers) if latents is None else latents,
        strategy,
        mask=shown,
        score=scores_of_rows(scores, of_rows, query.dtype) or None,
        q_offset=lengths[row] - count[row] + place.first,
        kv_positions=positions_of_pages(at, key_, keys, row, sharers),
        return_logsumexp=return_logsumexp,
        return_carry=return_carry,
        return_max_logits=return_max_logits,
    )
    return packed_output(output, place)


def _checked(
    arrays: tuple[Any, Any, Any], given: tuple[Any, Any, Any], in_order: Sharers | None
) -> tuple[Array, Array, Array]:
    """Returns `cu_q_lens`, `lengths` and `starts` as int32 arrays, and raises unless they fit. A
    length may be at most the number of keys of a row, counted over the devices `in_order` that
    share them. If the positions of keys are given, `in_order` is None and lengths have no limit.
    Traced lengths are checked as the program runs.
    """
    (query, key_, value), (cu, lengths, starts) = arrays, given
    cu = as_int32(cu, "cu_q_lens", 1)
    lengths = as_int32(lengths, "lengths", 1)
    starts = np.zeros(lengths.shape, np.int32) if starts is None else starts
    starts = as_int32(starts, "starts", 1)
    shapes = f"query {query.shape}, key_ {key_.shape}, value {value.shape}"
    if query.ndim != 3 or key_.ndim != 4 or value.ndim != 4:
        packed = key_.ndim == value.ndim == 3
        remedy = (
            " Keys that are packed too, as in training, are attention(query, key_, value, "
            "mask=Causal() & Segments(ids)) with the ids of packed_segments(cu_seqlens, tokens)."
        )
        raise ValueError(
            f"query must be [n, h, d], packed without a batch axis, key_ [b, s, k, d] and value "
            f"[b, s, k, v], got {shapes}.{remedy if packed else ''}"
        )
    rows, s = key_.shape[:2]
    most = None if in_order is None else in_order.keys(s)
    if (value.shape[0], *cu.shape, *lengths.shape, *starts.shape) != (rows, rows + 1, rows, rows):
        raise ValueError(
            f"cu_q_lens {cu.shape}, lengths {lengths.shape}, starts {starts.shape}, key_ "
            f"{key_.shape} and value {value.shape} do not fit together; b rows have b lengths and "
            "starts, and b + 1 boundaries."
        )
    check_boundaries(cu, len(query), "cu_q_lens")
    known, ends = concrete(cu), concrete(lengths)
    counts = np.zeros(rows, np.int32) if known is None else np.diff(known)
    ring = "but for a ring buffer, which needs kv_positions=cache.positions"
    if ends is not None and ((ends < counts) | (most is not None and ends > most)).any():
        raise ValueError(
            f"lengths must be at least the rows' numbers of queries, {counts.tolist()}, and at "
            f"most the {most} keys of key_ {key_.shape}, {ring}: they count the new tokens too. "
            f"Got {ends.tolist()}."
        )
    lengths = jnp.asarray(lengths)
    if ends is None and most is not None:
        message = f"lengths must be at most the {most} keys of key_ {key_.shape}, {ring}"
        lengths = raise_if(lengths, lengths > most, message)
    return jnp.asarray(cu), lengths, jnp.asarray(starts)


def _sharers(strategy: AttentionImpl) -> Sharers:
    """The devices that share the keys of each row."""
    axis = strategy.keys_axis() if isinstance(strategy, AbstractOnDevice) else None
    if axis is None:
        return Sharers()
    from ..strategies._key_shards import keys_place

    devices, mesh = keys_place(axis, strategy.metadata.mesh)
    return Sharers(axis, devices, inside=mesh is None)
