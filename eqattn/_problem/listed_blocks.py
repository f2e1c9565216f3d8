"""Turns lists of blocks of keys into tables that say which blocks are visited.

Where a list names blocks of keys, it says which blocks of the grid are live. These are visited
where they lie. Nothing is gathered, and no gradient is scattered.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from .._sweep.grid import ROW
from .._sweep.lowering import Lowering, XLA
from .blocking import Blocking, choose_blocking
from .problem import Problem
from .storage import AbstractStored


_COPY = 18
"""The number of pairs that are visited in the time in which a key and its value are copied. On one
core of an AMD EPYC, 64 features of float32 took about 60 ns to copy, and 3.4 ns a pair to visit.
"""


def blocking_of(
    problem: Problem, selection: Any, block_q: int | None, block_k: int | None, lowering: Lowering
) -> Blocking | None:
    """The blocking in which a list names whole blocks of keys; None where its keys are gathered
    instead.

    A block of queries has one list, if blocks of the list are large enough. Otherwise, its queries
    or heads have several lists. XLA visits what any of them names, and masks the rest. For kernels,
    keys are gathered then: they know a list by its table alone.

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
    queries, keys = _part(size, best.block_q), _part(selection.block_k, best.block_k)
    least_rows, least_keys = lowering.least_listed
    if queries * group < least_rows:
        queries = best.block_q // size * size
    if queries * group < least_rows or keys < least_keys:
        return None
    apart = max(queries // size, 1) * (group if lists > kv_heads else 1)
    if lowering is not XLA:
        if apart > 1:
            return None
        blocking = choose_blocking(problem, queries, keys, lowering=lowering)
        # A list of pairs may have one more for each row or column without a live one.
        pairs = live_pairs(selection, blocking) + max(blocking.grid[ROW:])
        most = lowering.most_pairs
        return blocking if most is None or pairs <= most else None
    listed, rows = n * selection.block_k, queries * group
    # Products of few rows, as those of copies, take about twice as long.
    if apart > 1 and min(s, apart * listed) * rows > listed * (apart * _COPY + 2 * rows):
        return None
    return choose_blocking(problem, queries, keys, lowering=lowering)


def _part(size: int, most: int) -> int:
    """The largest equal part of a block that is at most so large."""
    return max(n for n in range(1, most + 1) if size % n == 0)


def live_pairs(selection: Any, blocking: Blocking) -> int:
    """The most pairs of blocks that a list makes live, for each batch element and head."""
    listed = selection.indices.shape[-1] * (selection.block_k // blocking.block_k)
    return blocking.rows * max(min(listed, blocking.columns), 1)


def live_blocks(problem: Problem, selection: Any, blocking: Blocking) -> Bool[Array, "b k r c g q"]:
    """Which blocks of a blocking a list names, in rows and columns. Where it names others for each
    head or each query of a row, the last two axes are these. Otherwise they are of size 1.
    """
    indices = selection.rows_of(problem.batch_shape)
    count = -(-problem.sizes[1] // selection.block_k)
    places = jnp.where(indices < 0, count, indices)  # this is out of range, and so dropped
    own = [np.arange(n, dtype=np.int32).reshape(-1, *[1] * (3 - i))
           for i, n in enumerate(indices.shape[:3])]  # fmt: skip
    at = (*map(jnp.asarray, own), places)
    batch, lists, rows = indices.shape[:3]
    live = jnp.zeros((batch, lists, rows, count), bool).at[at].set(True, mode="drop")
    live = jnp.repeat(live, selection.block_k // blocking.block_k, 3)[..., : blocking.columns]
    each = max(blocking.block_q // selection.block_q, 1)  # a row has so many lists
    live = jnp.repeat(live, max(selection.block_q // blocking.block_q, 1), 2)
    live = live[:, :, : blocking.rows * each]
    live = blocking.pad(live, 2, blocking.rows * each, edge=False)
    heads = min(lists, blocking.kv_heads)
    live = live.reshape(batch, heads, lists // heads, blocking.rows, each, blocking.columns)
    live = live.transpose(0, 1, 3, 5, 2, 4)
    return live if each == 1 else jnp.repeat(live, selection.block_q, 5)
