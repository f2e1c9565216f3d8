"""Finds the cycles of one step of a kernel's grid in its schedule.

The grid is a loop of the schedule, and what a kernel does under a condition is a region that a
branch skips. Of all ways through the body of the loop, the shortest one through a region with
products is a step. It skips what only the first and the last step of a row do, and what is seldom
done. Regions under one predicate are skipped or taken together.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from .schedule import Branch, Schedule


# Steps are distinguished by their products. One that has nearly as many as the most does the same
# work. One that skips a corner, the later half of the keys for the first half of the queries, has
# three quarters of them; on a causal diagonal of D = 64 it may have 71%. The margin of 5%, chosen
# by trial, is for products that are not of blocks.
_ALIKE = 0.95
_LESS = 0.7


@dataclasses.dataclass(frozen=True)
class Region:
    """The cycles from `start` up to, but not including, `stop`."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def holds(self, other: "Region") -> bool:
        return self.start <= other.start and other.stop <= self.stop


@dataclasses.dataclass(frozen=True)
class Step:
    """The regions of a schedule that a way through a loop passes."""

    schedule: Schedule
    pieces: tuple[Region, ...]

    @property
    def cycles(self) -> int:
        return sum(p.length for p in self.pieces)

    def total(self, per_cycle: np.ndarray) -> int:
        return int(sum(per_cycle[p.start : p.stop].sum() for p in self.pieces))

    def share(self, slot: str) -> float:
        """The share of the slots of a kind that is used."""
        schedule = self.schedule
        return self.total(schedule.slots[slot]) / (self.cycles * schedule.capacity[slot])

    @property
    def products(self) -> int:
        """How many cycles the matrix units are occupied by products, added up over the units."""
        return self.total(self.schedule.products)

    @property
    def matrix_share(self) -> float:
        return self.products / (self.cycles * self.schedule.chip.matrix_units)


class Steps:
    """The steps of a kernel.

    **Arguments:**

    - `schedule`: the schedule of the kernel.
    - `innermost`: whether a step is a trip of the innermost loop around the products.
    - `cleans`: whether a form of the step, the longest one, has further products to find the rows
        that see a value that is not finite. That form is left out.

    It has these attributes. `full` is the step of a pair of blocks that is not masked. `masked` is
    that of a masked pair, or None if there is only one kind. `edges` are the cycles of what a row
    of blocks does beyond its steps, one after the other. `corner` is the step of a masked pair
    whose corner is skipped. `after` is the step of a full pair that follows such a pair; a kernel
    without a lag treats it as `full`. `skips` says whether the kernel skips corners. If not, these
    two are `masked` and `full`. `edge` is that of another masked pair that skips something, as at
    the edge of a window. It takes longer than these two.

    **Raises:** `ValueError` if there are no products.
    """

    def __init__(self, schedule: Schedule, innermost: bool = False, cleans: bool = False):
        self.schedule, self.delay = schedule, schedule.chip.delay
        self.pick = min if innermost else max
        self.loops = [
            Region(b.target, b.at + 1 + self.delay) for b in schedule.branches if b.target <= b.at
        ]
        self.skipped = [
            Region(b.at + 1 + self.delay, b.target)
            for b in schedule.branches
            if b.target > b.at + 1 + self.delay
        ]
        everything = Region(0, schedule.cycles)
        working = [r for r in (everything, *self.loops, *self.skipped) if self.work(r)]
        if not working:
            raise ValueError("the kernel has no products")
        hot = [r for r in working if not any(r != x and r.holds(x) for x in working)]
        hot = list(dict.fromkeys(self.around(r, working) for r in hot))
        steps = [(s, r) for r in hot if (s := self.through(self.loop_of(r), [r])) is not None]
        steps.sort(key=lambda sr: sr[0].cycles)
        steps = steps[:-1] if cleans else steps
        most = max(s.products for s, _ in steps)
        less = [s for s, _ in steps if _LESS * most <= s.products < _ALIKE * most]
        steps = [(s, r) for s, r in steps if s.products >= _ALIKE * most]
        self.full, region = steps[0]
        # Where one form is left out, the longest of the others has the mask.
        self.masked = steps[-1 if cleans else 1][0] if len(steps) > 1 else None
        masked = self.masked or self.full
        # Those for values that are not finite take longer than the two that skip a corner.
        self.skips = 0 < len(less) < 5
        after_and_corner = [self.full, *less] if len(less) == 1 else less[:2]
        self.after, self.corner = after_and_corner if self.skips else (self.full, masked)
        self.edge = less[2] if len(less) > 2 else masked
        loop = self.loop_of(region)
        idle = [
            r
            for r in self.skipped
            if loop.holds(r) and not self.work(r) and not any(h.holds(r) for h in hot)
        ]
        idle = [r for r in idle if not any(r != x and x.holds(r) for x in idle)]
        ways = [self.through(loop, [region, r]) for r in idle]
        self.edges = [w.cycles - self.full.cycles for w in ways if w is not None]

    def work(self, region: Region) -> int:
        return int(self.schedule.products[region.start : region.stop].sum())

    def around(self, region: Region, working: Sequence[Region]) -> Region:
        """The outermost region that holds this one and has further products outside of it. Within
        such a region, this one is done only in some trips.
        """
        loop = self.loop_of(region)
        found = [region]
        for outer in self.skipped:
            inner = [r for r in working if r != outer and outer.holds(r)]
            inner = [r for r in inner if not any(r != x and x.holds(r) for x in inner)]
            own = self.work(outer) > sum(map(self.work, inner))
            if outer.holds(region) and loop.holds(outer) and own:
                found.append(outer)
        return max(found, key=lambda r: r.length)

    def loop_of(self, region: Region) -> Region:
        """The loop around a region whose trips are steps. The outermost loop is the grid."""
        around = [x for x in self.loops if x.holds(region)]
        return self.pick(around, key=lambda x: x.length, default=Region(0, self.schedule.cycles))

    def through(self, loop: Region, regions: Sequence[Region]) -> Step | None:
        """The shortest way through the body of a loop and these regions of it, if there is one."""
        inside = [
            b
            for b in self.schedule.branches
            if loop.start <= b.at and b.at + 1 + self.delay < loop.stop
        ]
        names = [b.predicate for b in inside]
        shared = {n for n in names if names.count(n) > 1 and n is not None}
        known: dict = {}

        def onward(at: int, decided: frozenset) -> tuple[int, tuple[Region, ...]] | None:
            if (at, decided) not in known:
                known[at, decided] = shortest(at, decided)
            return known[at, decided]

        def shortest(at, decided):
            branch = next((b for b in inside if b.at >= at), None)
            if branch is None:
                return loop.stop - at, (Region(at, loop.stop),)
            here, best = Region(at, branch.at + 1 + self.delay), None
            for taken in self._choices(branch, loop, regions):
                then = decided
                if branch.predicate in shared:
                    value = branch.value == taken
                    if (branch.predicate, not value) in decided:
                        continue
                    then = decided | {(branch.predicate, value)}
                rest = onward(branch.target if taken else here.stop, then)
                if rest is not None and (best is None or here.length + rest[0] < best[0]):
                    best = here.length + rest[0], (here, *rest[1])
            return best

        found = onward(loop.start, frozenset())
        return None if found is None else Step(self.schedule, found[1])

    def _choices(self, branch: Branch, loop: Region, regions: Sequence[Region]) -> list[bool]:
        skipped = Region(branch.at + 1 + self.delay, branch.target)
        back, leaves = branch.target <= branch.at, branch.target >= loop.stop
        # A loop within the body is taken to run once, so no way jumps back or leaves the loop.
        if back or leaves or skipped.length < 0:
            return [] if branch.predicate is None else [False]
        choices = [False] if branch.predicate is not None else []
        if not any(skipped.start <= r.start < skipped.stop for r in regions):
            choices.append(True)
        return choices
