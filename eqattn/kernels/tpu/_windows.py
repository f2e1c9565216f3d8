"""The windows in which a step of the forward computes the logits of a block, and adds them."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from ..._sweep.grid import BlockGrid, DIAGONAL, EMPTY, FULL, PARTIAL


WINDOW = 512
"""The side of a window of logits: the larger, the fewer steps; the smaller, the fewer spills.

With windows, half as many registers spill. The useful cycles of full pairs went from 42.4 to 50.0%
on v6e, and from 90.6 to 92.3% on v5e. This was measured with D = 128, and includes other steps of
that change. Masked windows are half as wide, as a mask takes registers, too; that was chosen by
trial. `forward` in `python tests/measure tpu-report` measures both.
"""


Window = tuple[slice, slice]
"""The keys and the rows that a window of logits has."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A window of a block of logits.

    **Arguments:**

    - `at`, `to`: its keys and its rows.
    - `kind`: whether none, some or all of its pairs are visible: `EMPTY`, `PARTIAL` or `FULL`.
    """

    at: slice
    to: slice
    kind: int


def size_of(part: slice) -> int:
    """How many keys or rows a part has."""
    return part.stop - part.start


def cut(start: int, stop: int, size: int) -> list[slice]:
    """Slices of this size; the last one is shorter if it does not divide."""
    return [slice(i, min(i + size, stop)) for i in range(start, stop, size)]


def _even(n: int, m: int) -> list[slice]:
    return cut(0, n, m if n % m == 0 else n)


def windows(layout: BlockGrid, kind: int, *, half: bool = False) -> list[Part]:
    """The windows of a block, in the order in which they are computed.

    A side that the size of a window does not divide is not cut.

    **Arguments:**

    - `kind`: the class of each window.
    - `half`: whether they have half as many rows.
    """
    keys, rows = layout.block
    width = WINDOW // 2 if half else WINDOW
    return [Part(at, to, kind) for to in _even(rows, width) for at in _even(keys, WINDOW)]


def only_corners(layout: BlockGrid) -> bool:
    """Whether all masked blocks are known to be of class `DIAGONAL`, with known parts."""
    return [kind for kind, _ in layout.parts] == [DIAGONAL]


def with_known_parts(layout: BlockGrid, kind: int, *, half: bool = False) -> list[Part]:
    """The windows of a masked block of class `PARTIAL` or `DIAGONAL`. Of those whose parts are
    known, only some have a mask. On a causal diagonal, a step took 1908 cycles instead of 2159 on
    v6e.

    **Arguments:**

    - `half`: whether windows have half as many rows; of known parts, as many keys as rows.
    """
    if known := dict(layout.parts).get(kind):
        return _of_parts(layout, known, WINDOW // 2 if half else WINDOW)
    return with_corner(layout, kind, half=half)


def with_corner(layout: BlockGrid, kind: int, *, half: bool = False) -> list[Part]:
    """The windows of a masked block. Those in the corner of a `DIAGONAL` are `EMPTY`, or none if
    the corner cuts through a window.
    """
    parts = windows(layout, PARTIAL, half=half)
    empty = of_corner(layout, [(x.at, x.to) for x in parts]) if kind == DIAGONAL else []
    return [dataclasses.replace(x, kind=EMPTY) if (x.at, x.to) in empty else x for x in parts]


def _of_parts(layout: BlockGrid, known: Any, depth: int) -> list[Part]:
    """Windows of the parts that follow each other and are of one kind, of `depth` keys at most."""
    (keys, rows), parts = layout.block, []
    size, width = keys // len(known[0]), rows // len(known)
    for to, kinds in zip(cut(0, rows, width), known):
        start = 0
        for kind, run in itertools.groupby(kinds):
            stop = start + size * len(list(run))
            most = stop - start if kind == EMPTY else depth
            parts += [Part(x, to, kind) for x in cut(start, stop, most)]
            start = stop
    return parts


def beside(layout: BlockGrid, ahead: Sequence[Part]) -> list[Part]:
    """The windows of a full pair that are added while the windows `ahead` of a masked pair are
    computed.

    They have half as many rows as others. Where all masked blocks are corners, they have half as
    many keys, too. On a causal diagonal that took 1908 cycles on v6e, instead of 1952 to 1999 with
    all keys of a window, and in other orders.
    """
    parts = windows(layout, FULL, half=True)
    if not only_corners(layout) or all(x.kind != EMPTY for x in ahead):
        return parts
    return [Part(at, x.to, FULL) for x in parts for at in cut(x.at.start, x.at.stop, WINDOW // 2)]


def of_corner(layout: BlockGrid, parts: Sequence[tuple[slice, slice]]) -> list[tuple[slice, slice]]:
    """The parts of a block that make up its corner: the later half of its keys, and the first
    `corner` rows.

    There are none if the corner cuts through a part.
    """
    keys, _ = layout.block
    inside = [(a, b) for a, b in parts if 2 * a.start >= keys and b.stop <= layout.corner]
    size = sum((a.stop - a.start) * (b.stop - b.start) for a, b in inside)
    return inside if 2 * size == keys * layout.corner else []


def in_turn(ahead: Sequence[Part], behind: Sequence[Part]) -> list[tuple[Part, list[Part]]]:
    """The windows of a pair in the order in which they are computed, which the compiler's scheduler
    keeps. Each comes with those windows of the pair before that are added at the same time.

    Logits of the pair before are read before those of the pair take their place.
    """
    width = max(size_of(x.to) for x in ahead)
    place = lambda x: (x.to.start // width, x.at.start, x.to.start)
    left = sorted((x for x in behind if x.kind != EMPTY), key=place)
    found = []
    for x in sorted(ahead, key=place):
        end = x.to.start // width, x.at.stop
        now = [y for y in left if place(y) < end]
        left = left[len(now) :]
        found.append((x, now))
    return found
