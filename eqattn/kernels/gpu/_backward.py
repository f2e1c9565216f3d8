"""Sums over the live pairs of a grid by kernels for Hopper: the gradients of queries, keys and
values.

A program has 128 queries or 128 keys of one block, and adds up the gradients of these over the
other side. So no two programs add to the same number, and results are the same in each run. A
program has two warpgroups. Each has 64 of its queries or keys, and holds their sums in registers.
The second one also copies tiles of the other side into shared memory before they are needed. A
third one for copies would need `setmaxnreg`, see `_forward.py`: libnvJitLink halved the speed of
gradients then.

Gradients of queries take one kernel. Gradients of keys and values take another one, or two where
the sums of both would not fit into registers.
"""

import collections
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._sweep.grid import FULL, PARTIAL
from . import _mosaic as mosaic
from ._cleaning import clean, clean_together
from ._diagonals import DiagonalOperand
from ._lists import place_of, Visit
from ._operands import divided, first_row, Places, ROWS
from ._operations import Value
from ._program import Run
from ._sum_plan import Plan
from ._sum_program import SumProgram


class Program:
    """One program of the kernel, on references."""

    @classmethod
    def run(cls, plan: Plan, *refs: Any) -> None:
        """What a program does with its references."""
        scratch = len(plan.scratch())
        cls(plan, refs[:-scratch], refs[-scratch:]).compute()

    def __init__(self, plan: Plan, refs: Sequence, scratch: Sequence):
        self.plan, refs = plan, list(refs)
        self.matrices = {i: refs.pop(0) for i in (*plan.own, *plan.streamed)}
        dirty = {i: refs.pop(0) for i in plan.cleaned}
        listed = [refs.pop(0) for _ in range(plan.lists)] if plan.table_axes is not None else []
        self.given = {i: refs.pop(0) for i in plan.operands}
        self.results = dict(zip(plan.wanted, refs))
        (own, tiles, vectors, self.part), (self.here, self.arrived), self.free, self.both = scratch
        self.own, self.tiles = dict(zip(plan.own, own)), tiles
        self.vectors = dict(zip(plan.staged, vectors))
        self.warpgroup = lax.axis_index("warpgroup")
        full, live = self.find(listed)
        self.full, self.live = (n * jnp.int32(plan.parts) for n in (full, live))
        self.dirty = jnp.int32(0)
        for i, ref in dirty.items():
            place = self.places.place(plan.watched(i))
            self.dirty = jnp.maximum(self.dirty, ref[place])
        clean = 1 - self.dirty
        self.plain, self.full = self.live * clean, self.full * clean

    def find(self, listed: Sequence) -> tuple[Any, Any]:
        """Finds where the program is.

        **Arguments:**

        - `listed`: the references to the lists of live blocks, or nothing.

        **Returns:** how many full blocks it visits, and how many blocks at all.
        """
        plan, order = self.plan, listed[0] if listed else None
        self.place = ft.partial(place_of, plan, plan.side, plan.tiles, order)
        visit = Visit.of(plan, plan.side, plan.tiles, listed, lax.axis_index("program"))
        self.places, self.column = visit.places, visit.column
        self.start = first_row(visit.tile, self.warpgroup)
        return visit.full, visit.live

    def places_at(self, step: Any) -> Places:
        """Where the program is on the grid at a step; None stands for all steps."""
        return self.places

    def where(self, step: Any) -> tuple[Any, Any]:
        """The block of the other side at a step, and where in it the tile begins."""
        at, part = divided(step, self.plan.parts)
        return self.column(at), part * jnp.int32(self.plan.tile)

    def send(self, n: int, step: Any) -> None:
        """Begins to copy the tile of a matrix of the other side at a step, and what goes with it.

        **Arguments:**

        - `n`: which of the matrices.
        """
        plan, (block, start), slot = self.plan, self.where(step), self.slot(n, step)
        i, arrived, tile = plan.streamed[n], self.arrived[n].at[slot], self.tiles[n].at[slot]
        self.fetch(i, step, tile, arrived)
        for j, vector in self.vectors.items() if n == 0 else ():
            place = self.places_at(step).place(plan.operands[j].axes, block)
            part = self.given[j].at[place, mosaic.ds(start, plan.tile)]
            mosaic.copy_in(part, mosaic.vector(vector, slot, plan.tile), arrived)

    def fetch(self, i: int, step: Any, tile: Any, arrived: Any) -> None:
        """Begins to copy the tile of a matrix at a step."""
        block, start = self.where(step)
        matrix, places = self.plan.matrices[i], self.places_at(step)
        matrix.copy_in(self.matrices[i], places, block, start, tile, arrived)

    def begin(self) -> None:
        """Begins to copy the tiles of the first steps."""
        for n, stages in enumerate(self.plan.stages):

            def send(step, _, n=n):
                self.send(n, step)
                return ()

            first = jnp.minimum(self.live, jnp.int32(stages))
            first = jnp.where(self.warpgroup == 1, first, jnp.int32(0))
            lax.fori_loop(jnp.int32(0), first, send, ())

    def refill(self, n: int, step: Any) -> None:
        """Begins to copy the next tile of a matrix into the slot of a step, as soon as both
        warpgroups have read it. The second warpgroup does so.
        """
        following = step + jnp.int32(self.plan.stages[n])

        def go_on():
            mosaic.barrier_wait(self.free[n].at[self.slot(n, step)])
            self.send(n, following)

        mosaic.when((self.warpgroup == 1) & (following < self.live))(go_on)

    def compute(self) -> None:
        """What each of the warpgroups does, for its part of the block."""
        plan = self.plan
        for i, here in zip(plan.own, self.here):
            tile, here = self.own[i].at[self.warpgroup], here.at[self.warpgroup]
            matrix = plan.matrices[i]
            matrix.copy_in(self.matrices[i], self.places, None, self.start, tile, here)
        self.begin()
        near = {i: self.read(i) for i in self.near}
        zeros = lambda n: lax.full((mosaic.WARPGROUP, n), 0.0, jnp.float32)
        sums = tuple(mosaic.held(zeros(plan.widths[o]), "pairs") for o in plan.wanted)
        for here in self.here:
            mosaic.barrier_wait(here.at[self.warpgroup])
        begin = jnp.int32(0)
        for c, end in ((FULL, self.full), (PARTIAL, self.plain)):
            if c in plan.programs:
                step = ft.partial(self.step, plan.programs[c], near, False)
                sums = lax.fori_loop(begin, end, step, sums)
                begin = end
        if plan.cleaned:
            # What is not finite is rare, so the loop that looks for it is another one.
            program = plan.programs[PARTIAL]
            if own := sorted(program.cleaned_first & set(plan.own)):
                mosaic.when(self.dirty > 0)(ft.partial(self.clean_own, own))
            step = ft.partial(self.step, program, near, True)
            sums = lax.fori_loop(begin, self.live, step, sums)
        self.write(sums)

    @property
    def near(self) -> list[int]:
        """The operands that are read once and serve at all steps."""
        return [i for i, x in self.plan.operands.items() if not (x.staged or x.moves)]

    def clean_own(self, own: Sequence[int]) -> None:
        """Replaces what is not finite by 0 in some matrices of the part of the block."""
        for i in own:
            for part in mosaic.parts_of(self.own[i].at[self.warpgroup]):
                clean(part)
        mosaic.commit_smem()

    def write(self, sums: Sequence) -> None:
        """Writes the results. Those in the dtype of the matrices pass through shared memory."""
        plan = self.plan
        memory = {plan.features[i]: x for i, x in self.own.items()}
        indices = lax.axis_index("program"), self.warpgroup
        program, warpgroup = (mosaic.anew(i, plan.interpreted) for i in indices)
        places, _, tile = self.place(program)
        start = first_row(tile, warpgroup)
        for o, x in zip(plan.wanted, sums):
            ref, place, x = self.results[o], plan.results[o], x.astype(plan.dtypes[o])
            if place is None:
                mosaic.store(x, ref.at[places.block, mosaic.ds(start, mosaic.WARPGROUP)])
            else:
                through = memory[place.features] if place.features in memory else self.part[0]
                place.store(x, ref, places, start, through.at[self.warpgroup])

    def read_piece(
        self, held: dict[int, Value], step: Any, first: int, i: int, at: tuple = ()
    ) -> Value:
        """An operand for a piece of the other side at a step.

        **Arguments:**

        - `held`: what was read and serves for all pieces.
        - `first`: the first query or key of the piece in its tile.
        - `at`: as for `read`.
        """
        x = self.plan.operands[i]
        if not x.by_piece:
            if i not in held:
                held[i] = self.read(i, step)
            return held[i]
        if x.staged:
            piece = mosaic.ds(first, mosaic.PIECE)
            return x.read_staged(self.vectors[i].at[self.slot(0, step), piece])
        return self.read(i, step, first, at)

    def read(self, i: int, step: Any = None, first: int = 0, at: tuple = ()) -> Value:
        """Reads an operand at a step, from global memory. If diagonals share its numbers, `at` says
        where they lie.
        """
        x = self.plan.operands[i]
        block, start = (None, None) if step is None else self.where(step)
        start = None if start is None else start + first
        place = x.place(self.places_at(step), block)
        if isinstance(x, DiagonalOperand):
            where = self.start, start, mosaic.PIECE, self.plan.interpreted
            return x.tile(self.given[i], place, at, *where)
        return x.read(self.given[i], place, self.start, start, mosaic.PIECE)

    def slot(self, n: int, step: Any) -> Any:
        """Where the tile of a matrix of the other side lies at a step."""
        return lax.rem(step, jnp.int32(self.plan.stages[n]))

    def step(self, program: SumProgram, near: dict, cleans: bool, step: Any, sums: tuple) -> tuple:
        """Adds what a tile of the other side contributes. With `cleans`, what is not finite in it
        is replaced by 0 before those products that the program wants to read finite numbers.
        """
        plan = self.plan
        gradients = [program.gradient(o) for o in plan.wanted]
        dots = program.dots([g.pairs for g in gradients])
        inner = collections.Counter(program.factors(eqn)[plan.side is ROWS] for eqn in dots)
        summed = {g.matrix for g in gradients}
        tile = lambda i: self.tile(i, step)
        waited: set[int] = set()
        first = program.cleaned_first - set(plan.own) if cleans else set()

        def factors(eqn):
            """The own matrix and the tile of a product, once the tile has arrived."""
            both = program.factors(eqn)
            mine, i = both if plan.side is ROWS else both[::-1]
            self.wait(i, step, waited)
            if i in first:
                clean_together(tile(i), self.warpgroup, self.both)
                first.discard(i)
            warpgroup = mosaic.anew(self.warpgroup, plan.interpreted)
            return self.own[mine].at[warpgroup], tile(i)

        def done(eqn):
            """Lets go of a tile after the last of its products, or cleans it."""
            i = program.factors(eqn)[plan.side is ROWS]
            inner[i] -= 1
            if not inner[i] and i not in summed and i != plan.streamed[0]:
                self.release(i, step)
            if not inner[i] and i in summed and cleans and i in program.cleaned:
                # What is masked must not meet a probability of 0, as `_sweep/nonfinite.py` says.
                clean_together(tile(i), self.warpgroup, self.both)

        found: list[Any] = []
        for some in [[eqn] for eqn in dots] if cleans else [dots]:
            found += mosaic.pairs_of(*map(factors, some))
            for eqn in some:
                done(eqn)
        products = {eqn.outvars[0]: x for eqn, x in zip(dots, found)}
        cast = ft.partial(self.as_factor, program, step)
        pairs = self.pairs(program, near, step, gradients, products, cast)
        for gradient in gradients:
            self.wait(gradient.matrix, step, waited)
        tiles = [tile(gradient.matrix) for gradient in gradients]
        new = mosaic.weighted(sums, list(zip(pairs, tiles)), plan.interpreted)
        for i in sorted(summed | {plan.streamed[0]}, key=plan.streamed.index, reverse=True):
            self.release(i, step)
        return tuple(new)

    def pairs(
        self,
        program: SumProgram,
        near: dict,
        step: Any,
        gradients: list,
        products: dict[Any, Any],
        cast: Callable[[Any, int], Any],
        begin: int = 0,
    ) -> list[Any]:
        """Computes the blocks of pairs from which the gradients are made at a step, given its
        products, whose first column is `begin`. `cast(x, first)` is applied to each piece, which
        begins at column `first`.
        """
        plan, held = self.plan, dict(near)
        sizes: dict[str, int] = dict(zip(plan.side.kinds, (mosaic.WARPGROUP, mosaic.PIECE)))

        def of(first):
            read = ft.partial(self.read_piece, held, step, begin + first)
            product = lambda eqn: mosaic.piece(products[eqn.outvars[0]], first)
            run = Run(program, product, read, sizes, plan.origin)
            found = [run.times(gradient.pairs, None, {}) for gradient in gradients]
            return [cast(x.spread(plan.side.kinds, sizes), begin + first) for x in found]

        return mosaic.piecewise(of, next(iter(products.values())).shape[1])

    def as_factor(self, program: SumProgram, step: Any, x: Any, first: int) -> Any:
        """A piece of pairs as it is multiplied with the other side."""
        plan, start = self.plan, self.where(step)[1]
        if plan.other % plan.tile:
            inside = mosaic.iota(x.shape, 1) + (start + first) < jnp.int32(plan.other)
            x = jnp.where(inside, x, jnp.float32(0))
        if not plan.interpreted and program.cleaned:
            # Otherwise the compiler would mask after rounding, and unpack each number for that.
            (x,) = mosaic.in_order(x)
        return x.astype(plan.dtype)

    def tile(self, i: int, step: Any) -> Any:
        """The tile of a matrix in shared memory."""
        n = self.plan.streamed.index(i)
        return self.tiles[n].at[self.slot(n, step)]

    def wait(self, i: int, step: Any, waited: set[int]) -> None:
        """Waits until the tile of a matrix has arrived, once a step."""
        if i not in waited:
            n = self.plan.streamed.index(i)
            mosaic.barrier_wait(self.arrived[n].at[self.slot(n, step)])
            waited.add(i)

    def release(self, i: int, step: Any) -> None:
        """Lets the next tile of a matrix take the place of one that was read."""
        n = self.plan.streamed.index(i)
        if self.plan.interpreted:  # it does not know that the barrier suffices after reads
            mosaic.commit_smem()
        mosaic.barrier_arrive(self.free[n].at[self.slot(n, step)])
        self.refill(n, step)
