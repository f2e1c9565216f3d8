"""Counts the cycles of a whole kernel: of every step that its list of pairs makes it run."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from eqattn._problem.block_classes import classes_of
from eqattn._problem.tiling import Tiling
from eqattn._sweep.grid import BlockGrid, COL, DIAGONAL, EMPTY, FULL, ROW
from eqattn.kernels.tpu._grid import KernelGrid as Grid
from eqattn.kernels.tpu._work_list import FIRST, kind_of, work_list
from eqattn.masks._causal import Causal

from .steps import Steps


@dataclasses.dataclass(frozen=True)
class Count:
    """What its list of pairs makes a kernel do."""

    full: int  # steps on pairs of blocks that are not masked
    masked: int  # steps on masked pairs
    corner: int  # steps on masked pairs whose corner is skipped
    after: int  # steps on full pairs that follow such a pair
    rows: int  # rows of blocks, or columns where these are kept
    lists: int  # lists of pairs: one for each head, unless heads share one
    beside: int  # rows that end though they never began: one at the first step of each list

    def cycles(self, steps: Steps, once: Sequence[int] = ()) -> int:
        """Adds up the cycles of all steps and those at the ends of rows.

        **Arguments:**

        - `once`: the edges, by index, that are done once for each list and not for each row.
        """
        kinds = (self.full, steps.full), (self.masked, steps.masked or steps.full)
        kinds += (self.corner, steps.corner), (self.after, steps.after)
        often = (self.lists if i in once else self.rows for i in range(len(steps.edges)))
        edges = sum(n * e for n, e in zip(often, steps.edges)) + self.beside * steps.edges[-1]
        return sum(n * step.cycles for n, step in kinds if n) + edges


def count(
    tokens: int,
    tile: tuple[int, int],
    heads: int,
    kept: tuple[int, ...],
    lag: int,
    corners: bool,
    group: int = 1,
) -> Count:
    """Counts the steps of causal attention.

    **Arguments:**

    - `tokens`: how many queries, and how many keys, there are.
    - `heads`: how many heads keys have.
    - `tile`: how many rows, queries of all heads that share keys, and how many keys a block has.
    - `kept`: the axes of the grid that the kernel's results have.
    - `lag`: how many steps before its current pair is another pair that the kernel works on too.
        This number of further steps, which are not masked, follows the last pair of a list.
    - `corners`: whether the kernel skips the corners of masked pairs.
    - `group`: how many query heads share a key head.
    """
    rows, keys = tile
    at = np.arange(tokens, dtype=np.int32)[None]
    tiling = Tiling(1, heads, group, tokens, tokens, rows // group, keys, halves=corners)
    table = classes_of(Causal(), tiling, (1,), at, at)[0, 0]
    layout = BlockGrid(tiling.grid, (keys, rows), (), (ROW, COL), corner=tiling.corner)
    if lag:
        grid, packed = Grid.of(table, layout, kept, FULL, drain=lag)
        lists, pairs = math.prod(grid.grid[:-1]), grid.length
    else:
        packed, pairs = work_list(table, layout, kept, FULL)
        lists = heads
    packed = np.asarray(packed)[: int(pairs) + lag]
    kinds = np.asarray(kind_of(packed))
    corner, full = kinds == DIAGONAL, kinds == FULL
    after = full & (np.roll(corner, 1) & (np.arange(len(kinds)) > 0)) & bool(lag)
    masked = ~full & ~corner & (kinds != EMPTY)
    each = full & ~after, masked, corner, after, (packed & FIRST) != 0
    counts = [lists * int(x.sum()) for x in each]
    return Count(*counts, lists=lists, beside=lists if lag else 0)


def visible_pairs(tokens: int) -> int:
    """How many pairs causal attention has in one head. This is the work that has to be done,
    however it is cut into blocks.
    """
    return tokens * (tokens + 1) // 2
