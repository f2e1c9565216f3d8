"""The class of each block of a problem: whether none, some or all of its pairs are visible."""

import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._sweep.grid import BATCH, COL, DIAGONAL, EMPTY, FULL, HEAD, PARTIAL, Parts, ROW
from .._sweep.lowering import XLA
from ..masks._base import AbstractMask
from .problem import Problem
from .tiling import BlockOperand, choose_tiling, Tiling


def classes_of(
    mask: AbstractMask,
    tiling: Tiling,
    batch_shape: tuple[int, ...],
    q: Any,
    k: Any,
    indices: tuple[Any, Any] = (None, None),
) -> Any:
    """The class of each block under a mask.

    **Arguments:**

    - `mask`: the mask.
    - `tiling`: the sizes of the blocks.
    - `batch_shape`: the batch axes that the mask's operands may have.
    - `q`, `k`: the positions of the query and key tokens, `[B|1, T]` and `[B|1, S]`.
    - `indices`: the indices of the batch elements and of the heads; None means `0, 1, ...`.

    **Returns:** int8 `[B|1, K|1, rows, columns]`, a NumPy array where all is known at trace time.
    Where the blocking has a `corner`, the keys of partial blocks are also cut into halves. If each
    head has its own keys, their queries are cut so too. A block is a `DIAGONAL` if none of the
    first queries sees any of the later keys.
    """
    of_blocks = _classifier(mask, tiling, batch_shape, q, k, indices)
    table = of_blocks(block_q=tiling.block_q, block_k=tiling.block_k)
    if not tiling.corner:
        return table
    parts = 2 if tiling.group == 1 else 1
    fine = of_blocks(block_q=tiling.block_q // parts, block_k=tiling.block_k // 2)
    skipped = fine[:, :, ::parts, 1::2] == EMPTY
    xp = np if isinstance(table, np.ndarray) else jnp
    if skipped.shape[-1] < table.shape[-1]:  # The last block has no later half.
        skipped = xp.pad(skipped, [(0, 0)] * 3 + [(0, 1)], constant_values=True)
    return xp.where((table == PARTIAL) & skipped, np.int8(DIAGONAL), table)


def _classifier(
    mask: AbstractMask,
    tiling: Tiling,
    batch_shape: tuple[int, ...],
    q: Any,
    k: Any,
    indices: tuple[Any, Any],
) -> Callable[..., Any]:
    """What tells the classes of blocks of any size; with the arguments of `classes_of`."""
    # Imported on first use, as it takes half of the time that importing eqattn takes.
    from ..masks._intervals.classify import classify

    return ft.partial(
        classify,
        mask,
        batch_shape=batch_shape,
        heads=tiling.kv_heads * tiling.group,
        kv_heads=tiling.kv_heads,
        q_positions=q,
        kv_positions=k,
        indices=indices,
    )


STEP = 256
"""The keys and queries of a part of a block: the side of a matrix unit."""


_FINE = 2**20
"""For how many parts of all blocks it is found out what is known of them. With parts of 256 tokens,
these are 262,144 tokens, which take less than half a second.
"""


def subtile_classes(problem: Problem, tiling: Tiling, table: np.ndarray, hides_rows: bool) -> Parts:
    """Finds the parts of 256 keys and 256 queries that are empty, or full, in all masked blocks of
    a class.

    On causal diagonals, only the parts on the diagonal have a mask. At the edge of a window it is
    the same, and what is empty is on the other side.

    **Arguments:**

    - `table`: the classes of the blocks, `[..., rows, columns]`, which are known.
    - `hides_rows`: whether rows that pad the last block are masked.

    **Returns:** each class of masked blocks and its parts, by rows and then by keys. It is empty if
    all parts have a mask.
    """
    sides = tiling.block_q, tiling.block_k
    if not tiling.corner or problem.mask is None or sides[1] < 2 * STEP:
        return ()
    if tiling.fixed:  # They depend on all blocks of a class, and so would the bits of a row.
        return ()
    # A row without a live block is visited once, as if its first block were a masked one.
    if any(n % STEP for n in sides) or (table == EMPTY).all(-1).any():
        return ()
    if sides[0] > sides[1]:  # Nobody has compared the steps of such blocks.
        return ()
    counts = tuple(n // STEP for n in sides)
    if tiling.rows * tiling.columns * math.prod(counts) > _FINE:
        return ()
    given = problem.b_indices, problem.h_indices
    of_blocks = _classifier(problem.mask, tiling, problem.batch_shape, *problem.positions(), given)
    fine = of_blocks(block_q=STEP, block_k=STEP)
    if not isinstance(fine, np.ndarray):
        return ()
    if tiling.keys % STEP:  # A padded key is hidden, but its position may not be.
        last = np.arange(fine.shape[-1]) == fine.shape[-1] - 1
        fine = np.where(last, np.minimum(fine, np.int8(PARTIAL)), fine)
    if hides_rows and tiling.queries % STEP:
        last = np.arange(fine.shape[-2]) == fine.shape[-2] - 1
        fine = np.where(last[:, None], np.minimum(fine, np.int8(PARTIAL)), fine)
    sizes = tiling.rows * counts[0], tiling.columns * counts[1]
    pads = [(0, 0), (0, 0), *((0, n - m) for n, m in zip(sizes, fine.shape[2:]))]
    # What pads the last queries may see anything, unless it is masked. No query sees keys that pad.
    padded = np.pad(fine, pads[:3] + [(0, 0)], constant_values=-1)
    padded = np.pad(padded, [(0, 0)] * 3 + pads[3:], constant_values=EMPTY)
    parts = padded.reshape(*fine.shape[:2], tiling.rows, counts[0], tiling.columns, counts[1])
    parts = np.moveaxis(parts, 4, 3)
    lead = np.broadcast_shapes(parts.shape[:4], table.shape)
    parts = np.broadcast_to(parts, (*lead, *counts))
    found = []
    for kind in (PARTIAL, DIAGONAL):
        each = parts[np.broadcast_to(table, lead) == kind]
        empty = ((each == EMPTY) | (each == -1)).all(0)
        full = ((each == FULL) | (not hides_rows and each == -1)).all(0)
        known = np.where(empty, EMPTY, np.where(full, FULL, PARTIAL))
        if len(each):
            # The queries of a block's heads are one after the other.
            found.append((kind, tuple(map(tuple, known.tolist())) * tiling.group))
    return tuple(found) if any(n != PARTIAL for _, x in found for row in x for n in row) else ()


def table_of(problem: Problem, tiling: Tiling, live: Any = None):
    """The class of each block `[B|1, K|1, rows, columns]`, or None if all are full. A block is
    empty where `live` is False at all entries of its last two axes, and partial where it is False
    at some.
    """
    table = None
    if problem.mask is not None:
        given = problem.b_indices, problem.h_indices
        at = *problem.positions(), given
        table = classes_of(problem.mask, tiling, problem.batch_shape, *at)
    if tiling.keys % tiling.block_k:  # The keys that pad the last block must be masked.
        if table is None:
            table = np.full((1, 1, tiling.rows, tiling.columns), FULL, np.int8)
        last = np.arange(tiling.columns) == tiling.columns - 1
        last = last.reshape(1, 1, 1, -1)
        xp = np if isinstance(table, np.ndarray) else jnp
        table = xp.where(last & (table == FULL), np.int8(PARTIAL), table)
    if live is not None:
        table = np.int8(FULL) if table is None else table
        some = jnp.where(live.all((-2, -1)), table, jnp.minimum(table, np.int8(PARTIAL)))
        table = jnp.where(live.any((-2, -1)), some, np.int8(EMPTY))
    return table


_VISIT = 3000
"""How many pairs of queries and keys take as long as the start of a visit, on a CPU. On one core of
an AMD EPYC, windows of 16 to 2048 of 2048 tokens were timed in blocks of 64, 128 and 256. The times
were as if it were 1500 to 4200. The benchmarks `cpu-f32-window-*` measure the effect.
"""


_MORE = 1.06
"""How many times as many pairs larger blocks may visit. On v6e and v7x, a pair of blocks of twice
the sides takes 0.93 of the time of four; see `forward, T=32768` in `tpu-report --tune`.
"""


def choose_live_tiling(
    problem: Problem, block_q: int | None, block_k: int | None, **how: Any
) -> Tiling:
    """Chooses the blocking of a problem on one device, by what its mask hides. Where the caller
    gave no sizes, a mask without arrays may hide much of the blocks that `choose_tiling` chooses.
    Then XLA code for a CPU gets halves or quarters of them. A window of 64 tokens is visited in
    blocks of 64 x 64. Where it hides little of larger ones, kernels may get these.

    **Arguments:** those of `choose_tiling`.
    """
    chosen, lowering = choose_tiling(problem, block_q, block_k, **how), how.get("lowering", XLA)
    if block_q is not None or block_k is not None or chosen.in_place or chosen.fixed:
        return chosen
    if lowering is not XLA:
        return _enlarged(problem, chosen, **how)
    # There are 16 times as many pairs of quarters.
    known = problem.mask is not None and chosen.rows * chosen.columns <= _FINE // 16
    if jax.default_backend() != "cpu" or not known:
        return chosen
    if jax.tree.leaves((problem.mask, *_given_positions(problem))):
        return chosen
    problem = problem.at_places()
    table = table_of(problem, chosen)
    # Smaller blocks hide more only where these are partial.
    if not isinstance(table, np.ndarray) or 4 * np.sum(table == PARTIAL) <= np.sum(table != EMPTY):
        return chosen
    found = [chosen]
    while len(found) < 3 and min(found[-1].block) >= 128:
        queries, keys = (-(-n // 16) * 8 for n in (found[-1].block_q, found[-1].block_k))
        found.append(choose_tiling(problem, queries, keys, **how))
    return min(found, key=ft.partial(_visited_pairs, problem))


def _enlarged(problem: Problem, chosen: Tiling, **how: Any) -> Tiling:
    """The larger blocks of a kernel, or the chosen ones where these may be faster."""
    sizes = how["lowering"].larger_blocks(problem)
    if sizes is None or jax.tree.leaves((problem.mask, *_given_positions(problem))):
        return chosen
    larger, problem = choose_tiling(problem, *sizes, **how), problem.at_places()
    tables = [table_of(problem, x) for x in (chosen, larger)]
    tables = [np.full((1, 1, 1, 1), FULL, np.int8) if x is None else x for x in tables]
    if not all(isinstance(x, np.ndarray) for x in tables):
        return chosen
    before, now = (
        float(np.mean(table != EMPTY)) * x.rows * x.columns * math.prod(x.block)
        for x, table in zip((chosen, larger), tables)
    )
    if now > _MORE * before:
        return chosen
    if (tables[1] == FULL).all():
        return larger
    kinds = {kind for kind, _ in subtile_classes(problem, larger, tables[1], False)}
    return larger if kinds == {DIAGONAL} else chosen


FEW = 32
"""For how many rows a CPU copies no key, see `_has_few_rows` in `strategies/_on_device.py`."""


def sees_few_keys(problem: Problem) -> bool:
    """Whether a CPU should read keys where they lie, as each is shown to few rows by a mask without
    arrays. Rows are queries times query heads of a key head, and few on average. A copy of all keys
    would take longer than the visit. There must be 8 times as many keys as rows, as in a window at
    the end of a long text.
    """
    t, s, heads, kv_heads = problem.sizes
    known = problem.mask is not None and isinstance(t, int) and isinstance(s, int)
    if jax.default_backend() != "cpu" or not known:
        return False
    rows = t * (heads // kv_heads)
    arrays = jax.tree.leaves((problem.mask, *_given_positions(problem)))
    if arrays or not 0 < 8 * rows <= s:
        return False
    problem = problem.at_places()
    tiling = choose_tiling(problem, None, None, in_place=True)
    table = table_of(problem, tiling)
    return isinstance(table, np.ndarray) and rows * float(np.mean(table != EMPTY)) <= FEW


def _given_positions(problem: Problem) -> tuple[Any, ...]:
    """The positions that a call gives as arrays. Their numbers are known in eager calls only, so
    choices that followed them would make new programs.
    """
    return problem.q_positions, problem.kv_positions, problem.q_shift


def _visited_pairs(problem: Problem, tiling: Tiling) -> float:
    """What a visit of the live blocks takes, in pairs of a query and a key."""
    live = float(np.mean(table_of(problem, tiling) != EMPTY)) * tiling.rows * tiling.columns
    return live * (_VISIT + math.prod(tiling.block))


def plan_of(problem: Problem, tiling: Tiling, live: Any, padded: Sequence[BlockOperand] | None):
    """The table of live blocks, a NumPy array where it is known, its grid axes, and the classes
    that can occur. The arguments are those of `table_of`, and

    - `padded`: the operands if rows that pad the last block are masked, else None. The block is
        then partial where its queries see all keys, unless these pad it.
    """
    table, fixed = table_of(problem, tiling, live), tiling.fixed
    if padded is not None and table is not None and not _pads_from_block(padded, tiling):
        ends = np.arange(1, tiling.rows + 1) % (tiling.rows // tiling.parts) == 0
        xp = np if isinstance(table, np.ndarray) else jnp
        table = xp.where(ends[None, None, :, None] & (table == FULL), np.int8(PARTIAL), table)
    if table is None or fixed:
        placed = (None, None) if table is None else on_grid(as_partial(table))
        return *placed, (PARTIAL,) if fixed else (FULL,)
    if tiling.rows * tiling.columns == 1 and live is None:
        return None, None, (PARTIAL,)
    classes = (PARTIAL, FULL)
    if isinstance(table, np.ndarray):
        present = set(np.unique(table))
        # A visit of several batch elements or heads at once masks where these differ.
        if DIAGONAL in present or table.min((0, 1)).tolist() != table.max((0, 1)).tolist():
            present.add(PARTIAL)
        classes = tuple(c for c in classes if c in present) or (PARTIAL,)
        if len(present) == 1 and EMPTY not in present:
            return None, None, classes
    return *on_grid(table), classes


def as_partial(table: Any) -> Any:
    """A table in which full blocks are partial ones, so that rows are visited in the order of their
    keys. Otherwise full blocks come first, and whether a block is full depends on all of its
    queries. So the order of the keys of a row would depend on the rows beside it.
    """
    xp = np if isinstance(table, np.ndarray) else jnp
    return xp.minimum(table, np.int8(PARTIAL))


def on_grid(table: Any) -> tuple[Any, tuple[int, ...]]:
    """A table `[B|1, K|1, rows, columns]` without its axes of size 1, and the grid axes it has."""
    axes = [a for a, n in zip((BATCH, HEAD), table.shape) if n != 1] + [ROW, COL]
    shape = [n for n in table.shape[:2] if n != 1] + list(table.shape[2:])
    return table.reshape(shape), tuple(axes)


def _pads_from_block(operands: Sequence[BlockOperand], tiling: Tiling) -> bool:
    """Whether queries of the last block pad it in arrays of pairs, and nothing else varies by
    pairs. So where these see all keys, the block needs no mask.
    """
    last = tiling.queries % tiling.block_q
    plain = all(type(x) is BlockOperand for x in operands)
    return plain and tiling.parts == 1 and 2 * last >= tiling.block_q


def varies_by_pairs(operands: Sequence[BlockOperand]) -> bool:
    """Whether an operand varies with both of a pair: by itself, in windows or as a product."""
    return reads_pairs(operands) or any(type(x) is not BlockOperand for x in operands)


def reads_pairs(operands: Sequence[BlockOperand]) -> bool:
    """Whether an operand has a number for each pair of a block. Those with windows, which are of a
    class of their own, have not.
    """
    plain = (x for x in operands if type(x) is BlockOperand)
    blocks = (x.array.shape[len(x.axes) : x.array.ndim - x.features] for x in plain)
    return any(1 not in (keys, math.prod(rows)) for keys, *rows in filter(None, blocks))
