"""The mask of sequences that share a row: a query sees only its own segment.

Sequences that are packed one after the other, given by the boundaries between them.

Masks that hide padding: keys or queries beyond the length of their sequence.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from .._misc import as_ids, as_int, as_int32, concrete, eagerly, REACH, Static, unwrap
from .._pairs import Operand
from ._base import AbstractMask, int_operand


class Segments(AbstractMask):
    """A query sees the keys of its own segment. An id below 0 is padding: it sees nothing and
    nothing sees it.

    **Arguments:**

    - `q_ids`: an int array `[*b, t]`, the segment of each query.
    - `kv_ids`: an int array `[*b, s]`, the segment of each key. The default is `q_ids`.
    """

    q_ids: Any
    kv_ids: Any

    def __init__(self, q_ids: Any, kv_ids: Any = None):
        self.q_ids = as_ids(q_ids, "q_ids", least_ndim=1)
        self.kv_ids = self.q_ids if kv_ids is None else as_ids(kv_ids, "kv_ids", least_ndim=1)

        dtypes = self.q_ids.dtype, self.kv_ids.dtype
        if len({d.kind for d in dtypes}) > 1:
            raise TypeError(f"q_ids and kv_ids must both be signed or unsigned, got {dtypes}.")

    def operands(self) -> tuple[Operand, ...]:
        # Ids are equal if each is at most the other. So each id travels twice: as `low` on the
        # smaller side of a comparison, and as `high` on the larger side. Padding has the greatest
        # integer as `low` and the least as `high`. A pair with padding then fails a comparison, as
        # ids are at least 0. The least `low` and the greatest `high` of a block are those of its
        # segments alone, wherever it holds padding. So the block is empty exactly where the range
        # of its queries' ids does not meet that of its keys' ids.
        dtype = np.promote_types(self.q_ids.dtype, self.kv_ids.dtype)
        # Kernels for GPUs compare no numbers of 8 bits.
        dtype = np.promote_types(dtype, f"{dtype.kind}4")
        out_of_reach = np.iinfo(dtype).max, np.iinfo(dtype).min
        operands = []
        for ids, axes in ((self.q_ids, "bt"), (self.kv_ids, "bs")):
            for limit in out_of_reach:
                x = eagerly(lambda xp, x: _move_padding(xp, x.astype(dtype), limit), ids)
                operands.append(Operand(x, axes))
        return tuple(operands)

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        q_low, q_high, k_low, k_high = ids
        return (q_low <= k_high) & (k_low <= q_high)


def _move_padding(xp, ids, limit):
    return ids if ids.dtype.kind == "u" else xp.where(ids < ids.dtype.type(0), limit, ids)


class PackedSegments(NamedTuple):
    """The sequence of each packed token, and its position there.

    **Arguments:**

    - `ids`: int32 `[n]`, the number of the token's sequence, -1 for padding.
    - `positions`: int32 `[n]`, the position of the token in its sequence, 0 for padding.
    """

    ids: Int[Array | np.ndarray, " n"]
    positions: Int[Array | np.ndarray, " n"]


def packed_segments(
    cu_seqlens: Int[Array | np.ndarray, " m1"] | Sequence[int],
    tokens: int,
    cu_seqlens_k: Int[Array | np.ndarray, " m1"] | Sequence[int] | None = None,
) -> PackedSegments:
    """Computes the segment ids and the positions of packed tokens from the boundaries of their
    sequences:

        ids, positions = packed_segments(cu_seqlens, len(query))
        query, key_ = rotary(query, positions), rotary(key_, positions)
        attention(query, key_, value, Ragged(metadata), mask=Causal() & Segments(ids))

    Only blocks with pairs of one sequence are visited, forward and backward, also if the boundaries
    are traced.

    If queries and keys have different boundaries, the queries of a sequence are its last tokens, as
    in flash-attn's function of variable lengths. They know so from the boundaries of the keys:

        q = packed_segments(cu_seqlens_q, len(query), cu_seqlens_k)
        kv = packed_segments(cu_seqlens_k, len(key_))
        attention(query, key_, value, mask=Causal() & Segments(q.ids, kv.ids),
                  q_positions=q.positions, kv_positions=kv.positions)

    **Arguments:**

    - `cu_seqlens`: an int array `[m + 1]` that starts at 0 and does not decrease. Sequence `i` has
        the tokens from `cu_seqlens[i]` to before `cu_seqlens[i + 1]`. Tokens after the last
        sequence are padding. For batches use `jax.vmap`.
    - `tokens`: the number of tokens, padding included.
    - `cu_seqlens_k`: the boundaries of the keys, where the tokens are queries, of as many
        sequences. The last query of a sequence then has the position of its last key, and the ones
        before count down from there, below 0 where a sequence has more queries than keys.

    **Returns:** a `PackedSegments`, of NumPy arrays unless some boundaries are a JAX array.

    **Raises:** `ValueError` for another shape. If the boundaries are known, it is also raised where
    they decrease, do not begin at 0 or end after the last token.
    """
    given = as_int32(cu_seqlens, "cu_seqlens")
    tokens = as_int(tokens, "tokens", least=0, static=True).value
    check_boundaries(given, tokens, "cu_seqlens")
    keys = given if cu_seqlens_k is None else as_int32(cu_seqlens_k, "cu_seqlens_k")
    check_boundaries(keys, tokens if cu_seqlens_k is None else REACH, "cu_seqlens_k")
    if keys.shape != given.shape:
        raise ValueError(
            f"cu_seqlens {given.shape} and cu_seqlens_k {keys.shape} are boundaries of the same "
            "sequences, [sequences + 1] each; a sequence without queries has two equal ones."
        )
    xp = jnp if isinstance(given, jax.Array) or isinstance(keys, jax.Array) else np
    token = np.arange(tokens, dtype=np.int32)
    ids = xp.searchsorted(given[1:], token, side="right").astype(np.int32)
    inside = ids < len(given) - 1
    # Where position 0 of each sequence would be among the tokens: as far before its end as it has
    # keys. Padding has the entry after these.
    start = xp.append(given[1:] - xp.diff(keys), np.int32(0))[ids]
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


class KeyPadding(AbstractMask):
    """Only the keys at positions `starts <= k < lengths` are visible.

    **Arguments:**

    - `lengths`: the position after the last visible key: a Python int, which is static, or an int
        array, scalar or `[*b]`.
    - `starts`: the position of the first visible key, likewise. The default is 0.
    """

    _lengths: Any
    _starts: Any

    def __init__(self, lengths: Any, starts: Any = 0):
        if "bool" in str(getattr(lengths, "dtype", "")):
            raise TypeError(
                f"lengths must be integers [*b], got bools {lengths.shape}: give mask.sum(-1) if "
                "padding comes last, else the mask DenseMask(mask[..., None, None, :])."
            )
        self._lengths = as_int(lengths, "lengths")
        self._starts = as_int(starts, "starts")

    @property
    def lengths(self) -> Any:
        return unwrap(self._lengths)

    @property
    def starts(self) -> Any:
        return unwrap(self._starts)

    def operands(self) -> tuple[Operand, ...]:
        return int_operand(self._lengths) + int_operand(self._starts)

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        given = iter(ids)
        length = self.lengths if isinstance(self._lengths, Static) else next(given)
        start = self.starts if isinstance(self._starts, Static) else next(given)
        return (k >= start) & (k < length)


class QueryPadding(AbstractMask):
    """Only the queries at positions `q < lengths` see anything.

    **Arguments:**

    - `lengths`: the position after the last query: a Python int, which is static, or an int array,
        scalar or `[*b]`.
    """

    _lengths: Any

    def __init__(self, lengths: Any):
        self._lengths = as_int(lengths, "lengths")

    @property
    def lengths(self) -> Any:
        return unwrap(self._lengths)

    def operands(self) -> tuple[Operand, ...]:
        return int_operand(self._lengths)

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        (length,) = ids or (self.lengths,)
        return q < length
