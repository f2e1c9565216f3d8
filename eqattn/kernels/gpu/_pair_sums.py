"""Gradients of what a score reads for each pair, by a kernel for Hopper.

A program has 128 rows and up to 128 keys of a result, and two warpgroups with 64 of the rows each.
At each step they multiply the tiles of another batch element, and add the cotangents of its logits
in registers. The tiles of the next step are copied as soon as the products have read these.
"""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from ..._sweep.grid import COL, GridLayout, ROW
from . import _mosaic as mosaic
from ._backward import Program
from ._cleaning import clean_together, meet
from ._operands import divided, first_row, Places, TILE, WARPGROUP
from ._pair_gradients import PairVisit, Tiles
from ._sum_plan import Plan, SHARED
from ._sum_program import SumProgram


@dataclasses.dataclass(frozen=True)
class PairPlan(Plan):
    """Sums of blocks of pairs by this kernel.

    **Arguments:** those of `Plan`, and

    - `visit`: what programs visit.
    - `written`: where the result lies.
    - `heads`: how many heads share numbers. A program then has 64 queries, and a warpgroup those of
        every other head.
    """

    visit: PairVisit
    written: Tiles
    heads: int

    lists: ClassVar[int] = 2

    def watched(self, i: int) -> list[int]:
        return [a for a in self.layout.in_axes[i] if a in self.visit.kept]

    def scratch(self) -> tuple:
        """The same as in `Plan`, and memory for the sums of the second warpgroup."""
        (own, tiles, vectors, part), *rest = super().scratch()
        sums = [mosaic.matrices((WARPGROUP, WARPGROUP), jnp.float32)] * (self.heads > 1)
        return (own, tiles, vectors, [*part, *sums]), *rest

    def first_rows(self, tile: Any, part: Any, warpgroup: Any) -> Any:
        """The first row in its block that a warpgroup has of a tile, at a step with a `part` of the
        heads.
        """
        if self.heads == 1:
            return first_row(tile, warpgroup)
        head = part * jnp.int32(2) + warpgroup
        return head * jnp.int32(self.written.rows) + tile * jnp.int32(WARPGROUP)

    def is_of_keys(self, i: int) -> bool:
        """Whether a matrix has the keys of a program, and not the rows."""
        return self.side.other in self.layout.in_axes[i]

    @property
    def rows(self) -> dict[int, int]:
        return {i: self.tile if self.is_of_keys(i) else TILE for i in self.streamed}

    def copies_of(self, i: int) -> int:
        if self.is_of_keys(i):
            return super().copies_of(i)
        return TILE // WARPGROUP * self.matrices[i].copies(WARPGROUP)

    @property
    def parts(self) -> int:
        return self.visit.turns

    @property
    def widths(self) -> dict[int, int]:
        return dict.fromkeys(self.wanted, self.tile)

    @property
    def stages_parts(self) -> bool:
        return True

    @property
    def part_dtype(self) -> Any:
        (dtype,) = self.dtypes.values()
        return dtype

    @property
    def stages(self) -> list[int]:
        """As many as there are steps, up to two, and the same for matrices that are read later if
        there is room.
        """
        n, few = len(self.streamed), min(self.visit.most, 2)
        size = 2 * jnp.dtype(self.part_dtype).itemsize + 4 * (self.heads > 1)
        square = WARPGROUP * WARPGROUP * size
        for twice in range(n, 0, -1):
            stages = [few] * twice + [1] * (n - twice)
            both = zip(stages, self.streamed)
            numbers = sum(s * self.rows[i] * self.features[i] for s, i in both)
            if 2 * numbers + square + 1024 * (1 + len(self.staged)) <= SHARED:
                return stages
        return [1] * n


_FEW = 8, 16, 32
"""Numbers of queries of a block that are copied at once, as fewer than a warpgroup has."""


def written_whole(layout: GridLayout, tile: int) -> bool:
    """Whether tiles can be written where a bias lies in memory. Otherwise some would reach into the
    next block.
    """
    found = {x.axis: x for x in layout.tokens}
    if not {ROW, COL} <= {*found}:
        return False
    rows, columns = found[ROW], found[COL]
    single = rows.group == 1 and layout.grid[ROW] == 1
    even = rows.block % WARPGROUP == 0 or rows.block in _FEW or single
    return even and (columns.block % tile == 0 or layout.grid[COL] == 1)


class PairSums(Program):
    """One program of the kernel, on references."""

    plan: PairPlan

    def find(self, listed: Sequence) -> tuple[Any, Any]:
        self.locate()
        full, live, self.column = self.plan.visit.live(self.plan, self.places, listed)
        return full, live

    def locate(self, step: Any = None) -> None:
        """Finds where the program is, and again where it is needed. Otherwise registers would hold
        it during the products.

        **Arguments:**

        - `step`: the step at which the rows of the warpgroup are found; None for those of the
            result.
        """
        indices = lax.axis_index("program"), lax.axis_index("warpgroup")
        program, warpgroup = (mosaic.anew(i, self.plan.interpreted) for i in indices)
        self.places, self.rows, columns = self.plan.visit.place(program)
        if step is None and self.plan.heads > 1:
            part, warpgroup = jnp.int32(0), jnp.int32(0)
        else:
            part = jnp.int32(0) if step is None else self.plan.visit.part(step)
        self.start = self.plan.first_rows(self.rows, part, warpgroup)
        self.first_key = columns * jnp.int32(self.plan.tile)

    def places_at(self, step: Any) -> Places:
        return self.places if step is None else self.plan.visit.at(self.places, self.column, step)

    def where(self, step: Any) -> tuple[Any, Any]:
        return self.places.at[self.plan.side.other], self.first_key

    @property
    def near(self) -> list[int]:
        visit = self.plan.visit
        moved = {*visit.chosen, *visit.rest, self.plan.side.other}
        fixed = lambda x: not (x.by_piece or moved & {*x.axes})
        same = lambda x: self.plan.heads == 1 or not x.kind
        return [i for i, x in self.plan.operands.items() if fixed(x) and same(x)]

    def fetch(self, i: int, step: Any, tile: Any, arrived: Any) -> None:
        if self.plan.is_of_keys(i):
            super().fetch(i, step, tile, arrived)
            return
        matrix, places = self.plan.matrices[i], self.places_at(step)
        for warpgroup in range(TILE // WARPGROUP):
            part = self.plan.visit.part(step)
            start = self.plan.first_rows(self.rows, part, jnp.int32(warpgroup))
            mine = tile.at[mosaic.ds(warpgroup * WARPGROUP, WARPGROUP)]
            matrix.copy_in(self.matrices[i], places, None, start, mine, arrived)

    def step(self, program: SumProgram, near: dict, cleans: bool, step: Any, sums: tuple) -> tuple:
        plan, (total,) = self.plan, sums
        gradients = [program.gradient(o) for o in plan.wanted]
        dots = program.dots([g.pairs for g in gradients])
        waited: set[int] = set()
        if cleans:
            for i in sorted(program.cleaned_first):
                self.wait(i, step, waited)
                clean_together(self.tile(i, step), self.warpgroup, self.both)
        self.locate(step)
        moving = [i for i, x in plan.operands.items() if not (x.by_piece or i in near)]
        near = near | {i: self.read(i, step) for i in moving}

        def factors(eqn):
            """The rows of the warpgroup and the tile of keys, once both have arrived."""
            both = program.factors(eqn)
            for i in both:
                self.wait(i, step, waited)
            rows, keys = (self.tile(i, step) for i in both)
            start = mosaic.anew(self.warpgroup, plan.interpreted) * jnp.int32(WARPGROUP)
            return rows.at[mosaic.ds(start, WARPGROUP)], keys

        found = mosaic.pairs_of(*map(factors, dots))
        step = mosaic.anew(step, plan.interpreted)
        self.locate(step)
        for i in reversed(plan.streamed):
            self.release(i, step)
        products = {eqn.outvars[0]: x for eqn, x in zip(dots, found)}
        # With a single step there is no sum, which would hold registers.
        add = lambda x, first: mosaic.piece(total, first) + x if plan.visit.most > 1 else x
        if plan.heads % 2 and plan.heads > 1:
            there = plan.visit.part(step) * 2 + self.warpgroup < plan.heads
            add = lambda x, first: mosaic.piece(total, first) + jnp.where(there, x, 0.0)
        return tuple(self.pairs(program, near, step, gradients, products, add))

    def write(self, sums: Sequence) -> None:
        plan, (o,), (x,) = self.plan, self.plan.wanted, sums
        self.locate()
        warpgroup = mosaic.anew(self.warpgroup, plan.interpreted)
        memory, ref = self.part[0].at[warpgroup], self.results[o]
        for first in range(0, plan.tile, WARPGROUP):
            now = lax.slice(x, (0, first), (WARPGROUP, first + WARPGROUP))
            column = self.first_key + jnp.int32(first)

            def send(now=now, column=column):
                mosaic.stage(now.astype(plan.dtypes[o]), memory)
                self._send(ref, column, memory)
                mosaic.wait_for_copies()

            if plan.heads == 1:
                send()
                continue
            other = self.part[1]
            mosaic.when(warpgroup == 1)(lambda now=now: mosaic.stage(now, other))
            meet(self.both)
            both = lambda now=now: now + mosaic.load(other, "pairs")
            mosaic.when(warpgroup == 0)(lambda: send(both()))
            meet(self.both)

    def _send(self, ref: Any, column: Any, memory: Any) -> None:
        """Has 64 rows and keys copied to the result, those of each head apart."""
        written, places, row = self.plan.written, self.places, self.start
        element, block, group = written.element(places), written.lengths[0], 1
        token, key, n = row, column, WARPGROUP
        if written.whole:
            queries, keys = written.sides
            block, group = queries.block, written.group
            n = block if block in _FEW else n
            token = places.at[ROW] * jnp.int32(block)
            # The compiler wants to see that keys begin at a multiple of 64.
            if written.layout.grid[COL] > 1:
                key = places.at[COL] * jnp.int32(keys.block) + column
        for offset in range(0, WARPGROUP, n):
            here = row + jnp.int32(offset)
            head, at = divided(here, block) if group > 1 else (jnp.int32(0), here)
            at = at + token if written.whole else at
            part = memory if n == WARPGROUP else memory.at[mosaic.ds(offset, n)]
            to = ref.at[element, head, mosaic.ds(at, n), mosaic.ds(key, WARPGROUP)]
            inside = (here < block * group) & (at < ref.shape[2]) & (key < ref.shape[3])
            mosaic.when(inside)(ft.partial(mosaic.copy_out, part, to))
