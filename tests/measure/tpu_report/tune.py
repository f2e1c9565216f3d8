"""Compares the block sizes of kernels, to find again those that a lowering chooses."""

import math
from collections.abc import Sequence

from .kernels import AT
from .report import overlays_of, percent
from .rows import Row
from .specification import Kernel


HEADER = ["kernel", "chip", "tile", "cycles of 2^20 pairs", "useful", "whole", "memory"]
HEADER += ["VMEM MiB", "overlays", "chosen"]


def names(kernels: Sequence[Kernel]) -> list[str]:
    """The names of kernels with the blocks that are chosen, and with each of their other sizes.

    **Raises:** `ValueError` for a kernel that has no others.
    """
    found = []
    for kernel in kernels:
        if kernel.sized is None:
            raise ValueError(f"{kernel.name!r} has no other block sizes to compare.")
        found += [kernel.name, *(kernel.sized(*sizes).name for sizes in kernel.sizes)]
    return found


def ranked(rows: Sequence[Row]) -> list[list[str]]:
    """A header, and a line for each size: the kernels by chip, the fastest blocks first.

    Whole kernels are ordered by the share of the products of visible pairs, as large blocks also
    visit what is hidden. Others are ordered by the time of a pair, which is that of memory where
    memory is slower. Of sizes that differ by less than about 1%, the smaller comes first. Blocks
    whose instructions are loaded again in each step come last: no schedule tells how long that
    takes.
    """
    groups: dict[tuple[str, str], dict[tuple[int, int], Row]] = {}
    chosen = {row.key: row.tile for row in rows if AT not in row.kernel}
    for row in rows:
        groups.setdefault((row.kernel.split(AT)[0], row.chip), {})[row.tile] = row
    return [HEADER] + [
        [*key, *_line(row), "yes" if row.tile == chosen.get(key) else ""]
        for key, found in groups.items()
        for row in sorted(found.values(), key=_rank)
    ]


def _line(row: Row) -> list[str]:
    return [
        f"{row.tile[0]} x {row.tile[1]}",
        f"{_cycles_of_pair(row) * 2**20:.0f}",
        *(percent(share) for share in (row.useful, row.whole, row.memory)),
        f"{row.vmem / 2**20:.1f}",
        overlays_of(row),
    ]


def _cycles_of_pair(row: Row) -> float:
    return row.cycles / math.prod(row.tile)


def _rank(row: Row) -> tuple[bool, float, int]:
    if row.whole is None:
        time = _cycles_of_pair(row) * max(1, row.memory or 0)
    else:
        time = 1 / row.whole
    return row.back > 0, round(math.log(time), 2), math.prod(row.tile)
