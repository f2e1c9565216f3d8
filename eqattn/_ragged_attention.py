"""Rows with different numbers of new queries in one call: prompts, single tokens, drafts."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ._attention import attention
from ._carry import Carry
from ._misc import as_array, as_flag, as_int, as_int32, concrete, even_block
from ._output import AttentionOutput
from ._problem.packed_rows import mask_of_rows, scores_of_rows
from ._problem.problem import as_mask, as_scores
from ._problem.storage import (
    AbstractStored,
    as_stored,
    Pages,
)
from .masks._causal import Causal
from .masks._distance import check_distances
from .masks._packed import check_boundaries, packed_segments
from .masks._padding import KeyPadding
from .strategies.ragged import Ragged


def ragged_attention(
    query: Float[Array, "n h d"],
    key_: Float[Array | AbstractStored, "b s k d"],
    value: Float[Array | AbstractStored, "b s k v"],
    cu_q_lens: Int[Array, " b1"],
    lengths: Int[Array, " b"],
    strategy: Ragged,
    *,
    starts: Int[Array, " b"] | None = None,
    mask: Any = None,
    causal: bool = True,
    score: Any = None,
    block_q: int = 16,
    return_logsumexp: bool = False,
    return_carry: bool = False,
) -> AttentionOutput:
    """Attention of queries that are packed one row after the other, each row over its own keys.

    A row's queries are its last tokens: the last of them is at position `lengths - 1`. So one call
    serves rows that enter a prompt, rows that take one token and rows that check drafts.

    **Arguments:**

    - `query`: `[n, h, d]`; row `i` has those from `cu_q_lens[i]` to before `cu_q_lens[i + 1]`.
        Queries after the last row's are padding.
    - `key_`, `value`: `[b, s, k, d]` and `[b, s, k, v]`, such as those of a cache.
    - `cu_q_lens`: int `[b + 1]`, not decreasing, from 0 on.
    - `lengths`, `starts`: int `[b]`, the keys `starts <= position < lengths` of each row are
        visible. `lengths` counts the new queries' keys too.
    - `strategy`: a [`eqattn.Ragged`][].
    - `mask`, `score`: in addition. They get the index of the row as `b`, and may hold arrays per
        row and head, but none per query or key.
    - `causal`: hides the keys after each query.
    - `block_q`: queries that are visited together. Each row fills its last block with padding.

    **Returns:** an [`eqattn.AttentionOutput`][]: `attention_outputs` `[n, h, v]`, and if asked for
    `logsumexp` `[n, h]` and `carry`. Padding has output 0, logsumexp `-inf` and zero gradients.

    **Raises:** `ValueError` or `TypeError` at trace time, naming the shapes and the remedy; also
    for `cu_q_lens` and `lengths` that do not fit, where they are known then.
    """
    mask, scores = as_mask(mask), as_scores(score)
    check_distances(mask, *scores)
    query = jnp.asarray(as_array(query, "query"))
    key_, value = (
        x if isinstance(x, AbstractStored) else jnp.asarray(as_array(x, name))
        for name, x in (("key_", key_), ("value", value))
    )
    cu_q_lens, lengths, starts = _checked(query, key_, value, cu_q_lens, lengths, starts)
    _check_strategy(strategy)
    causal = as_flag(causal, "causal")
    block_q = as_int(block_q, "block_q", least=1, static=True).value
    place = _places(cu_q_lens, len(query), min(block_q, max(len(query), 1)))
    row, rows, heads = place.row, len(lengths), query.shape[1]
    count = cu_q_lens[1:] - cu_q_lens[:-1]
    mask = mask_of_rows(mask, row, rows, heads)
    length = jnp.where(place.live, lengths[row], 0)
    shown = KeyPadding(length, starts[row])
    for more in (Causal() if causal else None, mask):
        shown = shown if more is None else shown & more
    size = strategy.metadata.blocksize_k
    blocks = jnp.take(query, place.tokens, axis=0, mode="fill", fill_value=0)
    output = attention(
        blocks,
        _of_blocks(key_, row, size),
        _of_blocks(value, row, size),
        strategy,
        mask=shown,
        score=scores_of_rows(scores, row, rows, heads, query.dtype) or None,
        q_offset=lengths[row] - count[row] + place.first,
        return_logsumexp=return_logsumexp,
        return_carry=return_carry,
    )
    seen = place.token_block < len(row)
    at = jnp.minimum(place.token_block, len(row) - 1), place.token_offset

    def unpack(x: Array, padding: float = 0.0) -> Array:
        x = x[at]
        return jnp.where(seen.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.asarray(padding, x.dtype))

    out, logsumexp, carry = output.attention_outputs, output.logsumexp, output.carry
    assert out is not None
    if carry is not None:
        carry = Carry(
            unpack(carry.numerator), unpack(carry.denominator), unpack(carry.max_so_far, -jnp.inf)
        )
    return AttentionOutput(
        attention_outputs=unpack(out),
        logsumexp=None if logsumexp is None else unpack(logsumexp, -jnp.inf),
        carry=carry,
    )


def _checked(
    query: Any, key_: Any, value: Any, cu_q_lens: Any, lengths: Any, starts: Any
) -> tuple[Array, Array, Array]:
    """`cu_q_lens`, `lengths` and `starts` as int32 arrays that fit the rest."""
    cu = as_int32(cu_q_lens, "cu_q_lens", 1)
    lengths = as_int32(lengths, "lengths", 1)
    starts = np.zeros(lengths.shape, np.int32) if starts is None else starts
    starts = as_int32(starts, "starts", 1)
    shapes = f"query {query.shape}, key_ {key_.shape}, value {value.shape}"
    if query.ndim != 3 or key_.ndim != 4 or value.ndim != 4:
        raise ValueError(
            f"query must be [n, h, d], packed without a batch axis, key_ [b, s, k, d] and value "
            f"[b, s, k, v], got {shapes}."
        )
    rows, s = key_.shape[:2]
    if (value.shape[0], *cu.shape, *lengths.shape, *starts.shape) != (rows, rows + 1, rows, rows):
        raise ValueError(
            f"cu_q_lens {cu.shape}, lengths {lengths.shape}, starts {starts.shape}, key_ "
            f"{key_.shape} and value {value.shape} do not fit together; b rows have b lengths and "
            "starts, and b + 1 boundaries."
        )
    check_boundaries(cu, len(query), "cu_q_lens")
    known, ends = concrete(cu), concrete(lengths)
    counts = np.zeros(rows, np.int32) if known is None else np.diff(known)
    if ends is not None and ((ends < counts) | (ends > s)).any():
        raise ValueError(
            f"lengths must be at least the rows' numbers of queries, {counts.tolist()}, and at "
            f"most the {s} keys of key_ {key_.shape}: they count the new tokens too. Got "
            f"{ends.tolist()}."
        )
    return jnp.asarray(cu), jnp.asarray(lengths), jnp.asarray(starts)


def _check_strategy(strategy: Any) -> None:
    if not getattr(strategy, "reads_stored", False):
        raise TypeError(
            f"ragged_attention reads the blocks of rows as pages, which needs the strategy "
            f"Ragged(metadata), got {type(strategy).__name__}."
        )
    if strategy.metadata.dropout_prob:
        raise ValueError(
            f"dropout_prob={strategy.metadata.dropout_prob}: ragged_attention is for inference and "
            "has no dropout; use metadata.replace(dropout_prob=0.0)."
        )


class _Places(NamedTuple):
    """Where packed queries lie in blocks of one row each."""

    row: Array  # of each block
    live: Array
    first: Array  # place of a block's first query among those of its row
    tokens: Array  # [blocks, block_q], out of range for padding
    token_block: Array  # of each query, out of range for padding
    token_offset: Array


def _places(boundaries: Array, n: int, size: int) -> _Places:
    rows = len(boundaries) - 1
    most = n // size + rows  # each row has one block that is not full, or none
    counts = boundaries[1:] - boundaries[:-1]
    ends = jnp.cumsum(-(-counts // size))
    block = jnp.arange(most, dtype=jnp.int32)
    row = jnp.searchsorted(ends, block, side="right").astype(jnp.int32)
    live, row = row < rows, jnp.minimum(row, rows - 1)
    begins = ends - -(-counts // size)
    first = (block - begins[row]) * size
    inside = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    tokens = jnp.where(
        live[:, None] & (inside < counts[row][:, None]), boundaries[row][:, None] + inside, n
    )
    owner, within = map(jnp.asarray, packed_segments(boundaries, n))
    token_block = jnp.where(owner >= 0, begins[jnp.maximum(owner, 0)] + within // size, most)
    return _Places(row, live, first, tokens, token_block, within % size)


def _of_blocks(x: Any, row: Array, size: int | None) -> Pages:
    """Keys or values of each block's row, as pages that blocks of one row share."""
    if isinstance(x, Pages):
        return Pages(x.content, x.table[row])
    b, s = x.shape[:2]
    if size is None:
        size = even_block(s) or 128
    size, parts = min(size, s), -(-s // min(size, s))

    def paged(a: Array) -> Array:
        widths = [(0, 0)] * a.ndim
        widths[1] = (0, parts * size - s)
        a = a if parts * size == s else jnp.pad(a, widths)
        return a.reshape(b * parts, size, *a.shape[2:])

    content = as_stored(x).map_tokens(paged)
    table = row[:, None] * parts + np.arange(parts, dtype=np.int32)[None]
    return Pages(content, table)
