"""The class of each block of a problem: whether none, some or all of its pairs are visible."""

import functools as ft
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._sweep.grid import BATCH, COL, CORNER, EMPTY, FULL, HEAD, PARTIAL, ROW
from ..masks._base import AbstractMask
from .blocking import Blocking
from .problem import Problem


def classes_of(
    mask: AbstractMask,
    blocking: Blocking,
    batch_shape: tuple[int, ...],
    q: Any,
    k: Any,
    indices: tuple[Any, Any] = (None, None),
) -> Any:
    """The class of each block under a mask.

    **Arguments:**

    - `mask`: the mask.
    - `blocking`: the sizes of the blocks.
    - `batch_shape`: the batch axes that the mask's operands may have.
    - `q`, `k`: the positions of the query and key tokens, `[B|1, T]` and `[B|1, S]`.
    - `indices`: the indices of the batch elements and of the heads; None means `0, 1, ...`.

    **Returns:** int8 `[B|1, K|1, rows, columns]`, a NumPy array where all is known at trace time.
    Where the blocking has a `corner`, partial blocks are also cut into halves of their keys and, if
    each head has its own keys, of their queries. A block is a `CORNER` if none of the first queries
    sees any of the later keys.
    """
    # Imported on first use, as it takes half of the time that importing eqattn takes.
    from ..masks._intervals.classify import classify

    of_blocks = ft.partial(
        classify,
        mask,
        batch_shape=batch_shape,
        heads=blocking.kv_heads * blocking.group,
        kv_heads=blocking.kv_heads,
        q_positions=q,
        kv_positions=k,
        indices=indices,
    )
    table = of_blocks(block_q=blocking.block_q, block_k=blocking.block_k)
    if not blocking.corner:
        return table
    parts = 2 if blocking.group == 1 else 1
    fine = of_blocks(block_q=blocking.block_q // parts, block_k=blocking.block_k // 2)
    skipped = fine[:, :, ::parts, 1::2] == EMPTY
    xp = np if isinstance(table, np.ndarray) else jnp
    if skipped.shape[-1] < table.shape[-1]:  # The last block has no later half.
        skipped = xp.pad(skipped, [(0, 0)] * 3 + [(0, 1)], constant_values=True)
    return xp.where((table == PARTIAL) & skipped, np.int8(CORNER), table)


def table_of(problem: Problem, blocking: Blocking, live: Any = None):
    """The class of each block `[B|1, K|1, rows, columns]`, or None if all are full. Where `live` is
    given and False, blocks are empty.
    """
    table = None
    if problem.mask is not None:
        given = problem.b_indices, problem.h_indices
        at = *problem.positions(), given
        table = classes_of(problem.mask, blocking, problem.batch_shape, *at)
    if blocking.keys % blocking.block_k:  # The keys that pad the last block must be masked.
        if table is None:
            table = np.full((1, 1, blocking.rows, blocking.columns), FULL, np.int8)
        last = np.arange(blocking.columns) == blocking.columns - 1
        last = last.reshape(1, 1, 1, -1)
        xp = np if isinstance(table, np.ndarray) else jnp
        table = xp.where(last & (table == FULL), np.int8(PARTIAL), table)
    if live is not None:
        table = jnp.where(live, np.int8(FULL) if table is None else table, np.int8(EMPTY))
    return table


def as_partial(table: Any) -> Any:
    """A table in which full blocks are partial ones, so that rows are visited in the order of their
    keys. Full blocks come first, and what is full depends on the other queries of a block: a row
    would have its keys in another order beside others.
    """
    xp = np if isinstance(table, np.ndarray) else jnp
    return xp.minimum(table, np.int8(PARTIAL))


def on_grid(table: Any) -> tuple[Any, tuple[int, ...]]:
    """A table `[B|1, K|1, rows, columns]` without its axes of size 1, and the grid axes it has."""
    axes = [a for a, n in zip((BATCH, HEAD), table.shape) if n != 1] + [ROW, COL]
    shape = [n for n in table.shape[:2] if n != 1] + list(table.shape[2:])
    return table.reshape(shape), tuple(axes)
