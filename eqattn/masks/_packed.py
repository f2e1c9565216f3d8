"""Sequences packed one after the other, known by the boundaries between them."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from .._misc import as_int, as_int32, concrete


class PackedSegments(NamedTuple):
    """Of each packed token: the number of its sequence, and its place in it.

    **Arguments:**

    - `ids`: int32 `[n]`, -1 for padding.
    - `positions`: int32 `[n]`, 0 for padding.
    """

    ids: Int[Array | np.ndarray, " n"]
    positions: Int[Array | np.ndarray, " n"]


def packed_segments(
    cu_seqlens: Int[Array | np.ndarray, " m1"] | Sequence[int], tokens: int
) -> PackedSegments:
    """What masks and positions need to know of packed sequences, from their boundaries:

        ids, positions = packed_segments(cu_seqlens, len(query))
        query, key_ = rotary(query, positions), rotary(key_, positions)
        attention(query, key_, value, Ragged(metadata), mask=Causal() & Segments(ids))

    Only blocks with pairs of one sequence are visited, forward and backward, also if the boundaries
    are traced. Where queries and keys have boundaries of their own, give `Segments(q_ids, kv_ids)`,
    and for `Causal` both positions as `q_positions` and `kv_positions`.

    **Arguments:**

    - `cu_seqlens`: int `[m + 1]`, not decreasing, from 0 on; sequence `i` has the tokens from
        `cu_seqlens[i]` to before `cu_seqlens[i + 1]`. Tokens after the last are padding. For
        batches use `jax.vmap`.
    - `tokens`: how many tokens there are, with padding.

    **Returns:** `ids` and `positions`, NumPy arrays unless `cu_seqlens` is a JAX array.

    **Raises:** `ValueError` for another shape, and where `cu_seqlens` can be looked at, for
    boundaries that decrease, do not begin at 0 or end after the last token.
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
    """Raises unless they are boundaries of so many packed tokens, as far as they are known."""
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
