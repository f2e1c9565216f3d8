"""The cycles of a whole kernel: every step that its list of pairs makes it run."""

import dataclasses
import math

import numpy as np

from ..._problem.block_classes import classes_of
from ..._problem.blocking import Blocking
from ..._sweep.grid import COL, CORNER, FULL, GridLayout, ROW
from ...kernels.tpu._grid import KernelGrid as Grid
from ...kernels.tpu._work_list import FIRST, kind_of, work_list
from ...masks._causal import Causal
from .steps import KernelGrid


@dataclasses.dataclass(frozen=True)
class Count:
    """What its list makes a kernel do: steps that are `full`, `masked`, masked but for a `corner`
    that is skipped, and full `after` such a one; `rows` of blocks, and those `beside` them, which
    the first step of a list ends: what is pending there nobody wrote.
    """

    full: int
    masked: int
    corner: int
    after: int
    rows: int
    beside: int

    def cycles(self, steps: KernelGrid) -> int:
        kinds = (self.full, steps.full), (self.masked, steps.masked or steps.full)
        kinds += (self.corner, steps.corner), (self.after, steps.after)
        edges = self.rows * sum(steps.edges) + self.beside * steps.edges[-1]
        return sum(n * step.cycles for n, step in kinds if n) + edges


def count(tokens: int, tile: tuple[int, int], heads: int, kept: tuple[int, ...], lag: int) -> Count:
    """The steps of causal attention.

    **Arguments:**

    - `tokens`: queries, and keys. `heads`: of both.
    - `tile`: queries and keys of a block.
    - `kept`: the axes of the grid that the kernel's results have.
    - `lag`: the kernel works on the pair of this many steps before too; so many more steps, which
        are not masked, follow the last pair of a list. Only such a kernel skips corners.
    """
    queries, keys = tile
    at = np.arange(tokens, dtype=np.int32)[None]
    blocking = Blocking(1, heads, 1, tokens, tokens, queries, keys, halves=bool(lag))
    table = classes_of(Causal(), blocking, (1,), at, at)[0, 0]
    layout = GridLayout(blocking.grid, (keys, queries), (), (ROW, COL), corner=blocking.corner)
    if lag:
        grid, packed = Grid.of(table, layout, kept, FULL, drain=lag)
        lists, pairs = math.prod(grid.grid[:-1]), grid.length
    else:
        packed, pairs = work_list(table, layout, kept, FULL)
        lists = heads
    packed = np.asarray(packed)[: int(pairs) + lag]
    kinds = np.asarray(kind_of(packed))
    corner, full = kinds == CORNER, kinds == FULL
    after = full & (np.roll(corner, 1) & (np.arange(len(kinds)) > 0))
    each = full & ~after, ~full & ~corner, corner, after, (packed & FIRST) != 0
    counts = [lists * int(x.sum()) for x in each]
    return Count(*counts, beside=lists if lag else 0)


def visible_pairs(tokens: int) -> int:
    """Of causal attention, of one head: the work that has to be done, however it is cut into
    blocks.
    """
    return tokens * (tokens + 1) // 2
