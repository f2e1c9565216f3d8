"""Lists of blocks of keys, as tables of the blocks that are visited.

Where a list names blocks of keys for blocks of queries, it says which blocks of the grid are live.
These are visited where they lie. Nothing is gathered, and no gradient is scattered.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from .._sweep.lowering import Lowering, XLA
from .blocking import Blocking, choose_blocking
from .problem import Problem
from .storage import AbstractStored


_LEAST = 32
"""The least rows of logits and the least keys of a block that is visited by itself. What a visit
takes besides its products is some microseconds on a CPU, as long as products of 32 x 32 take.
"""


def blocking_of(
    problem: Problem, selection: Any, block_q: int | None, block_k: int | None, lowering: Lowering
) -> Blocking | None:
    """The blocking in which a list names whole blocks; None where its keys are gathered instead.

    XLA visits the batch elements and heads of a block one after the other on a CPU only. Elsewhere,
    it would visit what any of them lists.

    **Arguments:**

    - `problem`: the problem.
    - `selection`: the list, a `Selected`.
    - `block_q`, `block_k`, `lowering`: as for `choose_blocking`.
    """
    t, s, heads, kv_heads = problem.sizes
    *lead, lists, _, _ = selection.indices.shape
    alike = set(lead) <= {1} and lists == 1
    gathered = (
        lowering is not XLA
        or not (alike or jax.default_backend() == "cpu")
        or lists not in (1, kv_heads)
        or problem.kv_positions is not None
        or isinstance(problem.key, AbstractStored)
        or isinstance(problem.value, AbstractStored)
    )
    if gathered or not (isinstance(t, int) and isinstance(s, int)):
        return None
    best = choose_blocking(problem, block_q, block_k, lowering=lowering)
    sizes = (selection.block_q, best.block_q), (selection.block_k, best.block_k)
    block_q, block_k = (max(n for n in range(1, most + 1) if size % n == 0) for size, most in sizes)
    if min(block_q * (heads // kv_heads), block_k) < _LEAST:
        return None
    return choose_blocking(problem, block_q, block_k, lowering=lowering)


def live_blocks(problem: Problem, selection: Any, blocking: Blocking) -> Bool[Array, "b k r c"]:
    """Which blocks of a blocking a list names, in rows and columns."""
    indices = selection.rows_of(problem.batch_shape)
    count = -(-problem.sizes[1] // selection.block_k)
    places = jnp.where(indices < 0, count, indices)  # beyond the blocks, and so dropped
    own = [np.arange(n, dtype=np.int32).reshape(-1, *[1] * (3 - i))
           for i, n in enumerate(indices.shape[:3])]  # fmt: skip
    at = (*map(jnp.asarray, own), places)
    live = jnp.zeros((*indices.shape[:3], count), bool).at[at].set(True, mode="drop")
    live = jnp.repeat(live, selection.block_q // blocking.block_q, 2)[:, :, : blocking.rows]
    return jnp.repeat(live, selection.block_k // blocking.block_k, 3)[..., : blocking.columns]
