"""Rows with different numbers of new queries in one call: prompts, single tokens, drafts."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ._attention import attention
from ._carry import Carry
from ._masks import Causal, KeyPadding
from ._output import AttentionOutput
from ._packed import packed_segments
from ._problem import as_mask
from ._stored import AbstractStored, apart, as_stored, even_block, joined, Pages, Quantized
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
    - `lengths`, `starts`: the keys `starts <= position < lengths` of each row are visible.
    - `strategy`: a [`eqattn.Ragged`][].
    - `mask`, `score`: in addition; functions of positions and heads, without arrays per row.
    - `causal`: hides the keys after each query.
    - `block_q`: queries that are visited together. Each row fills its last block with padding.

    **Returns:** an [`eqattn.AttentionOutput`][]: `attention_outputs` `[n, h, v]`, and if asked for
    `logsumexp` `[n, h]` and `carry`. Padding has output 0, logsumexp `-inf` and zero gradients.

    **Raises:** `ValueError` at trace time, naming the shapes and the remedy.
    """
    rows, mask = len(lengths), as_mask(mask)
    if cu_q_lens.shape != (rows + 1,) or key_.shape[0] != rows:
        raise ValueError(
            f"cu_q_lens {cu_q_lens.shape}, lengths {lengths.shape} and key_ {key_.shape} do not "
            "fit together; b rows have b + 1 boundaries."
        )
    scores = score if isinstance(score, list | tuple) else [] if score is None else [score]
    for part in (*scores, *([] if mask is None else [mask])):
        if any(o.axes != "h" for o in part.operands()):
            raise ValueError(
                f"{part} holds arrays per row, query or key, which are packed here; call attention "
                "with the rows apart, or use a function of positions."
            )
    block_q = min(block_q, max(len(query), 1))
    place = _places(cu_q_lens.astype(jnp.int32), len(query), block_q)
    row, lengths = place.row, lengths.astype(jnp.int32)
    count = (cu_q_lens[1:] - cu_q_lens[:-1]).astype(jnp.int32)
    starts = jnp.zeros_like(lengths) if starts is None else starts.astype(jnp.int32)
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
        score=score,
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

    if isinstance(x, Quantized):
        scales = paged(apart(x.scales, x.shape[2]))
        content = Quantized(paged(x.values), joined(scales, 1), x.dtype)
    else:
        content = paged(as_stored(x).arrays[0])
    table = row[:, None] * parts + np.arange(parts, dtype=np.int32)[None]
    return Pages(content, table)
