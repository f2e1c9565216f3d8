"""In which order programs for NVIDIA GPUs visit the blocks of their side."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from eqattn._sweep.grid import BATCH, FULL, GridLayout, HEAD, PARTIAL
from eqattn.kernels.gpu._lists import _together, CACHED, Visit
from eqattn.kernels.gpu._operands import COLUMNS, ROWS
from eqattn.kernels.gpu._plans import listed, listed_in_order


BATCHES, HEADS, TILES = 2, 6, 2


def plan_of(rows: int, columns: int, streamed: int, lists: bool):
    """As much of a plan as an order depends on, of 12 batch elements."""
    layout = GridLayout((BATCHES, HEADS, rows, columns), (1, 1), ())
    return types.SimpleNamespace(
        layout=layout,
        programs={FULL: None, PARTIAL: None},
        table_axes=() if lists else None,
        streamed_bytes=streamed,
    )


@pytest.mark.parametrize("side", [ROWS, COLUMNS])
@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("together", [1, 2, 6, 12])
def test_each_block_is_visited_once_by_each_program(together, lists, side):
    rows, columns = 5, 7
    plan = plan_of(rows, columns, CACHED // together, lists)
    table = np.random.default_rng(0).choice([0, PARTIAL, FULL], (rows, columns)).astype(np.int8)
    mine = table if side is ROWS else table.T
    arrays = [jnp.asarray(x) for x in listed(mine if lists else None, (FULL, PARTIAL))]
    own, seen = mine.shape[0], []
    for program in range(BATCHES * HEADS * own * TILES):
        visit = Visit.of(plan, side, TILES, arrays, jnp.int32(program))
        element = tuple(int(visit.places.at[a]) for a in (BATCH, HEAD))
        at = int(visit.places.at[side.own])
        seen.append((*element, at, int(visit.tile)))
        if lists:
            live = int(visit.live)
            others = [int(visit.column(i)) for i in range(live)]
            assert sorted(others) == np.flatnonzero(mine[at]).tolist()
            full = mine[at, others[: int(visit.full)]]
            assert (full == FULL).all() and visit.full == (mine[at] == FULL).sum()
        else:
            assert visit.live == visit.full == mine.shape[1] and visit.column(3) == 3
    assert len(set(seen)) == len(seen)
    # Programs beside each other have the same few elements, and each of these all of its blocks.
    group = together * own * TILES
    parts = [seen[i : i + group] for i in range(0, len(seen), group)]
    assert all(len({x[:2] for x in part}) == together for part in parts)
    if lists:  # and the longest lists come first
        lengths = [(mine[x[2]] > 0).sum() for x in parts[0]]
        assert lengths == sorted(lengths, reverse=True)


def test_how_many_are_visited_together():
    assert _together(12, CACHED // 12) == 12 and _together(12, CACHED // 11) == 6
    assert _together(12, 10 * CACHED) == 1  # a single one does not fit
    assert _together(7, CACHED // 3) == 1  # a prime number of elements
    assert _together(1, 0) == 1


def test_decoding_reads_lists_of_rows_as_they_lie():
    table = np.asarray([[PARTIAL, 0, 0], [FULL, FULL, PARTIAL]], np.int8)
    ranks, _, counts = listed(table, (FULL, PARTIAL))
    assert ranks.tolist() == [1, 0] and counts.reshape(-1, 2).tolist() == [[2, 3], [0, 1]]
    _, counts = listed_in_order(table, (FULL, PARTIAL))
    assert counts.reshape(-1, 2).tolist() == [[0, 1], [2, 3]]
    assert listed(None, (FULL,)) == listed_in_order(None, (FULL,)) == []
