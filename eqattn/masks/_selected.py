"""The mask of keys that are chosen per query, or per block of queries."""

import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from .._misc import as_int32, as_size, concrete, unfolded
from .._pairs import Operand
from ._base import AbstractMask, Dense


class Selected(AbstractMask):
    """A query sees the keys that are listed for it, in any order.

    Only the listed keys are read: time and memory grow with `t * n`, not with `t * s`. Combined by
    `&`, the keys listed are filtered. Combined by `|`, the other mask is visited as if it were
    alone, and then what the list adds to it.

    The list holds places of keys, `0, ..., s - 1`, or what `kv_positions` says that they are, which
    then must be another number for each key. The queries are those of the call, in their order.

    **Arguments:**

    - `indices`: an int array `[*b, h, rows, n]`. A row is a query or, with `block_q`, the block of
        queries `row * block_q, ...`; and `h` is 1, the number of key/value heads or that of query
        heads. -1 lists nothing. What is listed twice is seen once.
    - `block_q`: how many queries share a row, a static int. The default is 1.
    - `block_k`: the number of keys of a block: index `i` stands for the keys from `i * block_k` to
        before `(i + 1) * block_k`. It is a static int, by default 1.

    **Raises:** `ValueError` or `TypeError` for indices of another form, for known ones below -1 or,
    in a call, beyond the keys; and for known `kv_positions` that two keys have. Traced indices that
    name no key list nothing, and neither do positions that are not in `kv_positions`.

    ??? cite "Reference"

        DeepSeek-AI, *DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models*, 2025
        (arXiv:2512.02556), selects keys per query; Yuan et al., *Native Sparse Attention*, 2025
        (arXiv:2502.11089) and Lu et al., *MoBA*, 2025 (arXiv:2502.13189) select blocks.
    """

    indices: Any
    block_q: int = eqx.field(static=True)
    block_k: int = eqx.field(static=True)

    selects: ClassVar[bool] = True
    by_place: ClassVar[bool] = True

    def __init__(self, indices: Any, block_q: Any = 1, block_k: Any = 1):
        self.indices = as_int32(indices, "indices")
        self.block_q = as_size(block_q, "block_q", least=1)
        self.block_k = as_size(block_k, "block_k", least=1)
        if self.indices.ndim < 3:
            raise ValueError(
                f"indices must be [*b, h, rows, n], got shape {self.indices.shape}; an axis of "
                "size 1 for h shares them among heads."
            )
        known = concrete(self.indices)
        if known is not None and (known < -1).any():
            raise ValueError(
                f"indices {known.shape} must be at least 0, or -1 for none, got {known.min()}; "
                "write -1 where a row lists fewer keys."
            )

    def check_call(
        self,
        batch_shape: tuple[int, ...],
        heads: int,
        kv_heads: int,
        t: int,
        s: int | None = None,
        kv_positions: Any = None,
    ) -> None:
        """**Raises:** `ValueError` unless the list fits a call of these sizes, in which keys are at
        `kv_positions`, or at `0, ..., s - 1`. With `s` None the caller knows where they are.
        """
        *lead, h, rows, _ = self.indices.shape
        padded = (1,) * (len(batch_shape) - len(lead)) + tuple(lead)
        fits = len(lead) <= len(batch_shape) and h in (1, kv_heads, heads)
        fits = fits and all(x in (1, y) for x, y in zip(padded, batch_shape))
        if not fits or rows != -(-t // self.block_q):
            raise ValueError(
                f"Selected indices {self.indices.shape} do not fit [*batch, h, rows, n] with batch "
                f"{batch_shape}, h one of 1, {kv_heads} and {heads}, and {-(-t // self.block_q)} "
                f"rows of {self.block_q} for {t} queries; broadcast or select anew."
            )
        if s is None:
            return
        if kv_positions is not None:
            check_distinct(kv_positions)
        elif not jax.sharding.get_abstract_mesh().manual_axes:  # other devices may have more keys
            known, blocks = concrete(self.indices), -(-s // self.block_k)
            if known is not None and known.size and known.max() >= blocks:
                raise ValueError(
                    f"Selected indices {known.shape} must be below {blocks}, the number of blocks "
                    f"of {self.block_k} of {s} keys, got {known.max()}; -1 stands for none."
                )

    def rows_of(self, batch_shape: tuple[int, ...]) -> Int[Array, "b h r n"]:
        """Returns the indices as `[B|1, h, rows, n]`."""
        *lead, h, rows, n = self.indices.shape
        x = jnp.asarray(self.indices)
        if all(size == 1 for size in lead):
            return x.reshape(1, h, rows, n)
        x = x.reshape(*(1,) * (len(batch_shape) - len(lead)), *x.shape)
        batch = math.prod(batch_shape)  # -1 would not do: rows or entries may be none
        return jnp.broadcast_to(x, (*batch_shape, h, rows, n)).reshape(batch, h, rows, n)

    def for_heads(self, heads: int) -> "Selected":
        """The list with an axis of 1 or of all query heads."""
        h = self.indices.shape[-3]
        if h in (1, heads) or heads % h:
            return self
        return Selected(jnp.repeat(self.indices, heads // h, -3), self.block_q, self.block_k)

    def of_packed(self, tokens: Int[Array, "blocks q"]) -> "Selected":
        """The list of packed queries `[h, t, n]` as that of blocks of them, `[blocks, h, q, n]`.

        **Arguments:**

        - `tokens`: which queries a block has. Those beyond `t` are padding and list nothing.

        **Raises:** `ValueError` if blocks of queries share a row.
        """
        if self.block_q > 1:
            raise ValueError(
                f"Selected indices {self.indices.shape} have rows of block_q={self.block_q} "
                "queries, and packed rows of a batch begin at any query: give each its own, with "
                "jnp.repeat(indices, block_q, -2) and block_q=1."
            )
        given = jnp.pad(jnp.asarray(self.indices), [(0, 0), (0, 1), (0, 0)], constant_values=-1)
        rows = jnp.take(given, jnp.minimum(tokens, given.shape[1] - 1), axis=1)
        return Selected(jnp.moveaxis(rows, 1, 0), 1, self.block_k)

    def at_places(self, q: Any, k: Any) -> AbstractMask:
        """Returns the mask as an array, with one bool for each pair."""
        t = q.shape[-1]
        *lead, h, rows, n = self.indices.shape
        whole_keys = isinstance(k, np.ndarray) and (k == np.arange(k.shape[-1])).all()
        self.check_call(tuple(lead), h, h, t, k.shape[-1] if whole_keys else None)
        listed, _ = distinct(jnp.asarray(self.indices))
        whole = np.broadcast_shapes(tuple(lead), k.shape[:-1])
        wanted = jnp.broadcast_to(jnp.asarray(k) // np.int32(self.block_k), (*whole, k.shape[-1]))
        wanted = jnp.broadcast_to(wanted[..., None, None, :], (*whole, h, rows, k.shape[-1]))
        listed = jnp.broadcast_to(listed, (*whole, h, rows, n))

        def holds(row, wanted):
            at = jnp.searchsorted(row, wanted)
            return row[jnp.minimum(at, n - 1)] == wanted

        for _ in range(len(whole) + 2):
            holds = jax.vmap(holds)
        seen = holds(listed, wanted) if n else jnp.zeros(wanted.shape, bool)
        while seen.ndim > 3 and seen.shape[0] == 1:  # for a call without batch axes
            seen = seen[0]
        return Dense(
            jnp.repeat(seen, self.block_q, -2, total_repeat_length=rows * self.block_q)[..., :t, :]
        )

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        raise TypeError(
            "Selected lists keys and is no function of one pair, so that it cannot be asked for "
            "one here: pass it to attention, with queries that have their own axis of the batch, "
            "or take DenseMask(mask.as_array(t, s))."
        )


def check_distinct(kv_positions: Any) -> None:
    """**Raises:** `ValueError` if two keys are known to be at one position. A list that names this
    position would not say which key is meant. Positions below 0 mean that there is no key, and
    lists do not name them.
    """
    known = concrete(kv_positions)
    if known is None:
        return
    rows = np.sort(known, -1)
    again = (rows[..., 1:] == rows[..., :-1]) & (rows[..., 1:] >= 0)
    if again.any():
        raise ValueError(
            f"kv_positions {known.shape} have two keys at position {rows[..., 1:][again][0]}, and "
            "a Selected lists keys by their positions: give each key its own, or no kv_positions, "
            "and list places."
        )


def distinct(rows: Array) -> tuple[Array, Array]:
    """The indices in rising order, and which of them list a key that none before them does."""
    none = np.int32(2**31 - 1)
    rows = jnp.sort(unfolded(jnp.where(rows < 0, none, rows)))
    again = jnp.pad(rows[..., 1:] == rows[..., :-1], [(0, 0)] * (rows.ndim - 1) + [(1, 0)])
    return rows, (rows != none) & ~again
