"""The cycles of a whole kernel: every step that its list of pairs makes it run."""

import dataclasses

import numpy as np

from .._mask_base import block_table
from .._masks import Causal
from .._traverse import FULL, Layout
from ..kernels.tpu._work import FIRST, kind_of, work_list
from .steps import Steps


@dataclasses.dataclass(frozen=True)
class Count:
    """What a head's list makes a kernel do: `full` and `masked` steps, `rows` of blocks."""

    full: int
    masked: int
    rows: int

    def cycles(self, steps: Steps) -> int:
        masked = steps.full if steps.masked is None else steps.masked
        each = self.full * steps.full.cycles + self.masked * masked.cycles
        return each + self.rows * steps.edges


def count(tokens: int, tile: tuple[int, int], kept: tuple[int, ...], lag: int) -> Count:
    """The steps of causal attention.

    **Arguments:**

    - `tokens`: queries, and keys.
    - `tile`: queries and keys of a block.
    - `kept`: the axes of the grid that the kernel's results have.
    - `lag`: the kernel works on the pair of this many steps before too; so many more steps, which
        are not masked, follow the last pair.
    """
    queries, keys = tile
    table = block_table(Causal(), tokens, tokens, queries, keys)[0, 0]
    layout = Layout((1, 1, *table.shape), (keys, queries), ())
    packed, pairs = work_list(table, layout, kept, FULL)
    pairs = int(pairs)
    packed = np.asarray(packed)[: pairs + lag]
    masked = np.asarray(kind_of(packed)) != FULL
    rows = int((packed & FIRST != 0).sum())
    return Count(int((~masked).sum()), int(masked.sum()), rows)


def visible_pairs(tokens: int) -> int:
    """Of causal attention: the work that has to be done, however it is cut into blocks."""
    return tokens * (tokens + 1) // 2
