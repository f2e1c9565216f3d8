"""Cuts packed queries, which lie one row after the other, into blocks of one row each."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from .._carry import Carry
from .._output import AttentionOutput
from ..masks._packed import packed_segments


class Places(NamedTuple):
    """The two-way map between packed queries and blocks that belong to one row each.

    For rows of 3 and 1 queries and blocks of 2, the live blocks are, with `x` for padding:

        tokens   [0, 1] [2, x] [3, x]
        row         0      0      1
        first       0      2      0
    """

    row: Array  # [blocks]: the row that a block belongs to
    live: Array  # [blocks]: whether the block has any queries
    first: Array  # [blocks]: the place of its first query among the queries of its row
    tokens: Array  # [blocks, block_q]: the packed queries of a block; padding is out of range
    token_block: Array  # [n]: the block that holds a query; out of range for padding
    token_offset: Array  # [n]: the place of a query within that block


def places_of(boundaries: Array, n: int, size: int) -> Places:
    rows = len(boundaries) - 1
    # Each row has at most one block that is not full, so there are at most n // size full blocks
    # and `rows` others. This bound is static, as shapes must be; the blocks beyond are not live.
    most = n // size + rows
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
    return Places(row, live, first, tokens, token_block, within % size)


def queries_of(packed: Array, place: Places) -> Array:
    """The queries of each block, and zeros for padding."""
    if not len(packed):
        return jnp.zeros((*place.tokens.shape, *packed.shape[1:]), packed.dtype)
    return jnp.take(packed, place.tokens, axis=0, mode="fill", fill_value=0)


def packed_output(output: AttentionOutput, place: Places) -> AttentionOutput:
    """Packs the output of the blocks again. Padding gets the output of a query that sees no key."""
    blocks, low = len(place.row), -jnp.inf
    seen = place.token_block < blocks
    own = jnp.minimum(place.token_block, blocks - 1), place.token_offset

    def packed(x: Array | None, padding: float = 0.0) -> Any:
        if x is None:
            return None
        x = x[own]
        return jnp.where(seen.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.asarray(padding, x.dtype))

    c = output.carry
    return AttentionOutput(
        attention_outputs=packed(output.attention_outputs),
        logsumexp=packed(output.logsumexp, low),
        carry=c and Carry(packed(c.numerator), packed(c.denominator), packed(c.max_so_far, low)),
        max_logits=packed(output.max_logits, low),
    )


def check_strategy(strategy: Any, function: str) -> None:
    if not getattr(strategy, "reads_stored", False):
        raise TypeError(
            f"{function} reads the blocks of rows as pages, which needs the strategy "
            f"Ragged(metadata), got {type(strategy).__name__}."
        )
    if strategy.metadata.dropout_prob:
        raise ValueError(
            f"dropout_prob={strategy.metadata.dropout_prob}: {function} is for inference and "
            "has no dropout; use metadata.replace(dropout_prob=0.0)."
        )
