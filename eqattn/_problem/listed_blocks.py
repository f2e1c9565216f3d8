"""Turns lists of blocks of keys into tables that say which blocks are visited.

Where a list names blocks of keys, it says which blocks of the grid are live. These are visited
where they lie. Nothing is gathered, and no gradient is scattered.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool

from .._misc import iota
from .._pairs import Operand
from .._sweep.grid import ROW
from .._sweep.lowering import Lowering, XLA
from ..masks._base import AbstractMask
from .blocking import Blocking, choose_blocking
from .bound import BoundMask
from .problem import Problem
from .storage import AbstractStored


_WORD = 32
"""The bits of a word, one for each block."""

_MOST_WORDS = 8
"""The most words that a kernel looks through for each pair of query and key."""


def blocking_of(
    problem: Problem, selection: Any, block_q: int | None, block_k: int | None, lowering: Lowering
) -> Blocking | None:
    """The blocking in which a list names whole blocks of keys; None where its keys are gathered
    instead.

    A block of queries has one list, if blocks of the list are large enough. Otherwise, its queries
    or heads have several lists. It visits what any of them names, and masks the rest.

    XLA visits the batch elements and heads of a block one after the other on a CPU only. Elsewhere,
    it would visit what any of them lists. Kernels always do, and skip blocks that are not listed.

    **Arguments:**

    - `problem`: the problem.
    - `selection`: the list, a `Selected`.
    - `block_q`, `block_k`, `lowering`: as for `choose_blocking`.
    """
    t, s, heads, kv_heads = problem.sizes
    *lead, lists, _, n = selection.indices.shape
    alike = set(lead) <= {1} and lists == 1
    gathered = (
        not (alike or lowering is not XLA or jax.default_backend() == "cpu")
        or problem.kv_positions is not None
        or isinstance(problem.key, AbstractStored)
        or isinstance(problem.value, AbstractStored)
    )
    if gathered or not (isinstance(t, int) and isinstance(s, int)):
        return None
    group, size = heads // kv_heads, selection.block_q
    best = choose_blocking(problem, block_q, block_k, lowering=lowering)
    queries, keys = _part(size, best.block_q, t), _part(selection.block_k, best.block_k, s)
    least_rows, least_keys = lowering.least_listed
    if queries * group < least_rows:
        queries = best.block_q // size * size
    if queries * group < least_rows or keys < least_keys:
        return None
    apart = max(queries // size, 1) * (group if lists > kv_heads else 1)
    listed, rows = n * selection.block_k, queries * group
    if apart > 1:
        # Products of few rows, as those of copies, take about twice as long.
        visited, copied = min(s, apart * listed) * rows, apart * lowering.copy_pairs + 2 * rows
        if visited > listed * copied:
            return None
    blocking = choose_blocking(problem, queries, keys, lowering=lowering)
    if lowering is XLA:
        return blocking
    # A list of pairs may have one more for each row or column without a live one.
    pairs = live_pairs(selection, blocking) + max(blocking.grid[ROW:])
    fits = lowering.most_pairs is None or pairs <= lowering.most_pairs
    words = 0 if apart == 1 else -(-s // selection.block_k) / _WORD
    return blocking if fits and words <= _MOST_WORDS else None


def _part(size: int, most: int, tokens: int) -> int:
    """The largest equal part of a block that is at most so large; all tokens if both have them."""
    if tokens <= min(size, most):
        return most
    return max(n for n in range(1, most + 1) if size % n == 0)


def live_pairs(selection: Any, blocking: Blocking) -> int:
    """The most pairs of blocks that lists make live, for each batch element and key head."""
    *_, lists, _, n = selection.indices.shape
    apart = max(blocking.block_q // selection.block_q, 1)
    apart *= blocking.group if lists > blocking.kv_heads else 1
    listed = apart * n * (selection.block_k // blocking.block_k)
    return blocking.rows * max(min(listed, blocking.columns), 1)


class _OnList(AbstractMask):
    """Whether the block of a key is on the list of the query. `row_lists` gives it its operands."""

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        *words, block = ids
        word = words[0]
        for i, x in enumerate(words[1:], 1):
            word = jnp.where(block >= np.int32(_WORD * i), x, word)
        return (word >> (block % np.int32(_WORD))) & np.int32(1) != 0


def row_lists(problem: Problem, selection: Any, lowering: Lowering) -> AbstractMask:
    """A mask of a list of blocks, for kernels whose blocks have queries with other lists. Each
    query has a bit for each block. So no array has an entry for each pair.
    """
    t, s, heads, _ = problem.sizes
    rows = selection.for_heads(heads).rows_of(problem.batch_shape)
    blocks = -(-s // selection.block_k)
    on = named(rows, -(-blocks // _WORD) * _WORD, lowering)
    on = jnp.repeat(on, selection.block_q, 2)[:, :, :t].reshape(*rows.shape[:2], t, -1, _WORD)
    bit = (np.uint32(1) << np.arange(_WORD, dtype=np.uint32)).reshape(1, 1, 1, 1, -1)
    bits = jnp.where(on, bit, np.uint32(0)).sum(-1, dtype=jnp.uint32)
    words = lax.bitcast_convert_type(bits, jnp.int32)
    of_key = (np.arange(s, dtype=np.int32) // np.int32(selection.block_k)).reshape(1, 1, 1, s)
    each = tuple(words[..., i, None] for i in range(words.shape[-1]))
    return BoundMask(_OnList(), (*each, of_key))


def named(indices: Array, count: int, lowering: Lowering) -> Bool[Array, "b h r c"]:
    """Which of so many blocks the rows `[B|1, h, rows, n]` of a list name.

    On a CPU, the names are marked in an array. For kernels, each block is compared with all names.
    To compile a forward for a v6e then took 4 s of CPU time, with 8 heads of 4096 queries. Marks
    took 24 s.
    """
    if lowering is not XLA:
        blocks = np.arange(count, dtype=np.int32).reshape(1, 1, 1, 1, -1)
        return (indices[..., None] == blocks).any(-2)
    places = jnp.where(indices < 0, count, indices)  # this is out of range, and so dropped
    own = [iota(n).reshape(-1, *[1] * (3 - i)) for i, n in enumerate(indices.shape[:3])]
    at = (*map(jnp.asarray, own), places)
    return jnp.zeros((*indices.shape[:3], count), bool).at[at].set(True, mode="drop")


def live_blocks(
    problem: Problem, selection: Any, blocking: Blocking, lowering: Lowering
) -> Bool[Array, "b k r c g q"]:
    """Which blocks of a blocking a list names, in rows and columns. Where it names others for each
    head or each query of a row, the last two axes are these. Otherwise they are of size 1.
    """
    indices = selection.rows_of(problem.batch_shape)
    count = -(-problem.sizes[1] // selection.block_k)
    live = named(indices, count, lowering)
    batch, lists, rows = live.shape[:3]
    live = jnp.repeat(live, selection.block_k // blocking.block_k, 3)[..., : blocking.columns]
    each = max(blocking.block_q // selection.block_q, 1)  # a row has so many lists
    live = jnp.repeat(live, max(selection.block_q // blocking.block_q, 1), 2)
    live = live[:, :, : blocking.rows * each]
    live = blocking.pad(live, 2, blocking.rows * each, "zeros")
    heads = min(lists, blocking.kv_heads)
    live = live.reshape(batch, heads, lists // heads, blocking.rows, each, blocking.columns)
    live = live.transpose(0, 1, 3, 5, 2, 4)
    return live if each == 1 else jnp.repeat(live, selection.block_q, 5)
