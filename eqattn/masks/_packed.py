"""Sequences that are packed one after the other, given by the boundaries between them."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from .._misc import as_int, as_int32, concrete


class PackedSegments(NamedTuple):
    """The sequence of each packed token, and its position there.

    **Arguments:**

    - `ids`: int32 `[n]`, the number of the token's sequence, -1 for padding.
    - `positions`: int32 `[n]`, the position of the token in its sequence, 0 for padding.
    """

    ids: Int[Array | np.ndarray, " n"]
    positions: Int[Array | np.ndarray, " n"]


def packed_segments(
    cu_seqlens: Int[Array | np.ndarray, " m1"] | Sequence[int], tokens: int
) -> PackedSegments:
    """Computes the segment ids and the positions of packed tokens from the boundaries of their
    sequences:

        ids, positions = packed_segments(cu_seqlens, len(query))
        query, key_ = rotary(query, positions), rotary(key_, positions)
        attention(query, key_, value, Ragged(metadata), mask=Causal() & Segments(ids))

    Only blocks with pairs of one sequence are visited, forward and backward, also if the boundaries
    are traced. If queries and keys have different boundaries, give `Segments(q_ids, kv_ids)`, and
    for `Causal` both positions as `q_positions` and `kv_positions`.

    **Arguments:**

    - `cu_seqlens`: an int array `[m + 1]` that starts at 0 and does not decrease. Sequence `i` has
        the tokens from `cu_seqlens[i]` to before `cu_seqlens[i + 1]`. Tokens after the last
        sequence are padding. For batches use `jax.vmap`.
    - `tokens`: the number of tokens, padding included.

    **Returns:** a `PackedSegments`, of NumPy arrays unless `cu_seqlens` is a JAX array.

    **Raises:** `ValueError` for another shape. If the boundaries are known, it is also raised where
    they decrease, do not begin at 0 or end after the last token.
    """
    given = as_int32(cu_seqlens, "cu_seqlens")
    tokens = as_int(tokens, "tokens", least=0, static=True).value
    check_boundaries(given, tokens, "cu_seqlens")
    xp = jnp if isinstance(given, jax.Array) else np
    token = np.arange(tokens, dtype=np.int32)
    ids = xp.searchsorted(given[1:], token, side="right").astype(np.int32)
    inside = ids < len(given) - 1
    start = given[xp.minimum(ids, len(given) - 1)]
    return PackedSegments(
        xp.where(inside, ids, np.int32(-1)), xp.where(inside, token - start, np.int32(0))
    )


def check_boundaries(boundaries: Array | np.ndarray, tokens: int, name: str) -> None:
    """Raises `ValueError` unless these are boundaries of `tokens` packed tokens, if known."""
    if boundaries.ndim != 1 or not len(boundaries):
        raise ValueError(
            f"{name} must be [sequences + 1], got {boundaries.shape}; use jax.vmap for batches."
        )
    known = concrete(boundaries)
    if known is not None and (known[0] != 0 or (np.diff(known) < 0).any() or known[-1] > tokens):
        raise ValueError(
            f"{name} must not decrease, from 0 to at most tokens={tokens}, got "
            f"{known.tolist()}; lengths become boundaries by cumsum, with a 0 in front."
        )
