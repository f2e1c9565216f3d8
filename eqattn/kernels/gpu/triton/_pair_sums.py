"""Gradients of what a score reads for each pair, as a kernel in Pallas Triton.

A program has some rows and keys of a result. At each step it adds the cotangents of the logits of
another batch element, or of another head that shares the numbers.
"""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from ...._sweep.grid import COL, FULL, PARTIAL, ROW
from .._operands import rounded_up, Side
from .._pair_gradients import PairVisit, Tiles
from .._sum_program import SumProgram
from . import _triton as triton
from ._backward import Plan, Program
from ._forward import power_of_two


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How blocks are cut and padded.

    **Arguments:**

    - `side`: the side of rows.
    - `rows`: the rows of a block of the result.
    - `keys`: the keys of a block.
    - `heads`: how many heads share numbers.
    - `widths`: the sizes of the vectors of all matrices.
    """

    side: Side
    rows: int
    keys: int
    heads: int
    widths: tuple[int, ...]

    @property
    def own(self) -> int:
        """The rows of a tile. Two tiles of each matrix take 96 KiB of shared memory."""
        return min(32 if self.large else 64, power_of_two(self.rows))

    @property
    def streamed(self) -> int:
        """The keys of a tile."""
        return min(16 if self.large else 32, power_of_two(self.keys))

    @property
    def large(self) -> bool:
        """Whether vectors are so long that tiles have fewer of them."""
        return max(map(power_of_two, self.widths)) > 128

    @property
    def warps(self) -> int:
        return 4 if self.large else 8

    @property
    def tiles(self) -> tuple[int, int]:
        """How many tiles a block of the result has."""
        return -(-self.rows // self.own), -(-self.keys // self.streamed)

    @property
    def padded(self) -> tuple[int, int]:
        """The lengths of blocks on either side, padded."""
        rows = (self.heads - 1) * self.rows + self.tiles[0] * self.own
        return rows, rounded_up(self.keys, self.streamed)


@dataclasses.dataclass(frozen=True)
class PairPlan(Plan):
    """Sums of blocks of pairs by this kernel.

    **Arguments:** those of `Plan`, and

    - `visit`: what programs visit.
    - `written`: where the result lies.
    """

    sizes: Any
    visit: PairVisit
    written: Tiles

    lists: ClassVar[int] = 2

    @property
    def count(self) -> int:
        return self.visit.programs


class PairSums(Program):
    """One program of the kernel, on references."""

    plan: PairPlan

    def find(self, listed: Sequence) -> None:
        plan, sizes = self.plan, self.plan.sizes
        self.home, row, column = plan.visit.place(triton.program_id(0))
        self.places = self.home
        self.start = self.first_row = row * jnp.int32(sizes.own)
        self.first_key = column * jnp.int32(sizes.streamed)
        full, live, self.column = plan.visit.live(plan, self.home, listed)
        self.ends = {FULL: full, PARTIAL: live}

    def run(self) -> None:
        plan, sizes = self.plan, self.plan.sizes
        self.near = {
            i: self.read(i) for i, x in plan.operands.items() if x.kind == "" and not x.axes
        }
        zeros = total = lax.full((sizes.own, sizes.streamed), 0.0, jnp.float32)
        begin, turns = jnp.int32(0), jnp.int32(plan.visit.turns)
        for c in sorted(plan.programs, reverse=True):
            end, step = self.ends[c] * turns, ft.partial(self.add, plan.programs[c], False)
            total, begin = lax.fori_loop(begin, end, step, total), end

        def again():
            step = ft.partial(self.add, plan.programs[PARTIAL], True)
            return lax.fori_loop(jnp.int32(0), self.ends[PARTIAL] * turns, step, zeros)

        if plan.cleaned:
            total = triton.unless_finite((total,), again, total)
        self.write(total)

    def add(self, program: SumProgram, cleans: bool, step: Any, total: Any) -> Any:
        """Adds what a step contributes."""
        plan, sizes = self.plan, self.plan.sizes
        self.places = plan.visit.at(self.home, self.column, step)
        head = plan.visit.part(step) * jnp.int32(sizes.rows)
        self.start = head + self.first_row
        column = self.home.at[COL]
        self.own = rows = self.start + lax.iota(jnp.int32, sizes.own)
        keys = self.first_key + lax.iota(jnp.int32, sizes.streamed)
        tiles, even = {}, sizes.rows % sizes.own == 0
        for i in plan.streamed:
            if plan.side.other in plan.layout.in_axes[i]:
                tiles[i] = self.rows(i, column, keys, sizes.streamed)
            else:
                tiles[i] = self.rows(i, None, rows, sizes.own, even)
        read = ft.partial(self.read, other=column, part=triton.ds(self.first_key, sizes.streamed))
        (x,) = self.pairs(program, cleans, tiles, read)
        return total + x

    def write(self, total: Any) -> None:
        """Writes the tile, without what lies behind the last query or key."""
        plan, sizes, (o,) = self.plan, self.plan.sizes, self.plan.wanted
        written, home, shape = plan.written, self.home, total.shape
        row = self.first_row + lax.broadcasted_iota(jnp.int32, shape, 0)
        key = self.first_key + lax.broadcasted_iota(jnp.int32, shape, 1)
        inside = (row < sizes.rows) & (key < sizes.keys)
        head = jnp.zeros_like(row)
        if written.whole:
            queries, keys = written.sides
            if written.group > 1:
                head = lax.div(row, jnp.full_like(row, queries.block))
            row = row - head * queries.block + home.at[ROW] * jnp.int32(queries.block)
            key = key + home.at[COL] * jnp.int32(keys.block)
            inside = inside & (row < queries.count) & (key < keys.count)
        element = jnp.broadcast_to(written.element(home), shape)
        x = total.astype(plan.dtypes[o])
        triton.put(self.results[o], x, (element, head, row, key), inside)
