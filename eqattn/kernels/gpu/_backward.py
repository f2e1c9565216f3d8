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
import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._sweep.grid import FULL, PARTIAL
from . import _mosaic as mosaic
from ._cleaning import clean, clean_together
from ._diagonals import DiagonalOperand
from ._lists import place_of, Visit
from ._operands import divided, first_row, rounded_up, ROWS, TILE
from ._operations import Value
from ._plans import SumPlan
from ._program import Run
from ._sum_program import SumProgram


STREAMED = 64
"""The least number of queries or keys of the other side that a tile has."""

REGISTERS = 128
"""How many registers of a thread may hold sums. A thread has 255, and the pairs of a tile take as
many as the sums.
"""

FEW_REGISTERS = 64
"""With so many registers for sums, or fewer, the pairs of tiles with twice `STREAMED` fit, too."""

SHARED = 227 * 1024
"""The bytes of shared memory that a program may have."""


@dataclasses.dataclass(frozen=True)
class Plan(SumPlan):
    """Sums by this kernel.

    **Arguments:** those of `SumPlan`, and

    - `length`, `other`: the lengths of a block on the side and on the other, before they are
        padded.
    - `tile`: how many queries or keys of the other side are multiplied at once.
    """

    length: int
    other: int
    tile: int

    @property
    def tiles(self) -> int:
        """How many programs a block has."""
        return rounded_up(self.length, TILE) // TILE

    @property
    def parts(self) -> int:
        """How many tiles a block of the other side has."""
        return rounded_up(self.other, self.tile) // self.tile

    @property
    def features(self) -> dict[int, int]:
        """The number of features of each matrix, padded."""
        return {i: x.features for i, x in self.matrices.items()}

    @property
    def widths(self) -> dict[int, int]:
        """The number of features of each result, padded."""
        program = self.programs[max(self.programs)]
        return {o: self.features[program.gradient(o).matrix] for o in self.wanted}

    @property
    def stages_parts(self) -> bool:
        """Whether some result needs additional shared memory on its way out, for a part of its
        columns. This is so where no matrix of the program has its shape.
        """
        held = [self.features[i] for i in self.own]
        return any(x is not None and x.features not in held for x in self.results.values())

    @property
    def stages(self) -> list[int]:
        """How many tiles of each matrix of the other side shared memory holds."""
        rest = len(self.streamed) - 1
        own = sum(self.features[i] for i in self.own) + mosaic.WARPGROUP * self.stages_parts
        for stages in ([2] * (1 + rest), [2] + [1] * rest):
            tiles = sum(n * self.features[i] for n, i in zip(stages, self.streamed))
            # A vector takes a kilobyte, as its address is a multiple of that.
            numbers = 2 * mosaic.WARPGROUP * own + self.tile * tiles
            if 2 * numbers + 1024 * (1 + len(self.staged)) <= SHARED:
                return stages
        return [1] * (1 + rest)

    def scratch(self) -> tuple:
        """Allocates shared memory and barriers. The memory is `(own matrices, tiles, vectors beside
        tiles, part of a result)`. The barriers are `(own matrices, tiles have arrived)`, `tiles are
        free`, and one at which both warpgroups meet.
        """
        own = [
            mosaic.matrices((2, mosaic.WARPGROUP, self.features[i]), self.dtype) for i in self.own
        ]
        tiles = [
            mosaic.matrices((n, self.tile, self.features[i]), self.dtype)
            for i, n in zip(self.streamed, self.stages)
        ]
        of = ft.partial(mosaic.vectors, self.stages[0], self.tile)
        vectors = [of(self.operands[i].dtype) for i in self.staged]
        with_it = [self.matrices[i].copies(self.tile) for i in self.streamed]
        with_it[0] += len(vectors)
        arrived = [
            mosaic.Barrier(num_arrivals=x, num_barriers=n) for x, n in zip(with_it, self.stages)
        ]
        free = [mosaic.Barrier(num_arrivals=2, num_barriers=n) for n in self.stages]
        mine = [self.matrices[i].copies(mosaic.WARPGROUP) for i in self.own]
        here = [mosaic.Barrier(num_arrivals=x, num_barriers=2) for x in mine]
        square = (2, mosaic.WARPGROUP, mosaic.WARPGROUP)
        part = [mosaic.matrices(square, self.dtype)] * self.stages_parts
        return (own, tiles, vectors, part), (here, arrived), free, mosaic.Barrier(num_arrivals=2)

    def body(self, *refs: Any) -> None:
        """What a program does with its references."""
        scratch = len(self.scratch())
        Program(self, refs[:-scratch], refs[-scratch:]).compute()


class Program:
    """One program of the kernel, on references."""

    def __init__(self, plan: Plan, refs: Sequence, scratch: Sequence):
        self.plan, refs = plan, list(refs)
        self.matrices = {i: refs.pop(0) for i in (*plan.own, *plan.streamed)}
        dirty = {i: refs.pop(0) for i in plan.cleaned}
        listed = [refs.pop(0) for _ in range(3)] if plan.table_axes is not None else []
        self.given = {i: refs.pop(0) for i in plan.operands}
        self.results = dict(zip(plan.wanted, refs))
        (own, tiles, vectors, self.part), (self.here, self.arrived), self.free, self.both = scratch
        self.own, self.tiles = dict(zip(plan.own, own)), tiles
        self.vectors = dict(zip(plan.staged, vectors))
        self.warpgroup = lax.axis_index("warpgroup")
        order = listed[0] if listed else None
        self.place = ft.partial(place_of, plan, plan.side, plan.tiles, order)
        visit = Visit.of(plan, plan.side, plan.tiles, listed, lax.axis_index("program"))
        self.places, self.column = visit.places, visit.column
        self.start = first_row(visit.tile, self.warpgroup)
        self.full, self.live = (n * jnp.int32(plan.parts) for n in (visit.full, visit.live))
        self.dirty = jnp.int32(0)
        for i, ref in dirty.items():
            axes = [a for a in plan.layout.in_axes[i] if a != plan.side.other]
            self.dirty = jnp.maximum(self.dirty, ref[self.places.place(axes)])
        clean = 1 - self.dirty
        self.plain, self.full = self.live * clean, self.full * clean

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
        plan.matrices[i].copy_in(self.matrices[i], self.places, block, start, tile, arrived)
        for j, vector in self.vectors.items() if n == 0 else ():
            place = self.places.place(plan.operands[j].axes, block)
            part = self.given[j].at[place, mosaic.ds(start, plan.tile)]
            mosaic.copy_in(part, mosaic.vector(vector, slot, plan.tile), arrived)

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
        near = {i: self.read(i) for i, x in plan.operands.items() if not (x.staged or x.moves)}
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
        place = self.places.place(x.axes, block)
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
        pairs = self.pairs(program, near, step, gradients, products)
        for gradient in gradients:
            self.wait(gradient.matrix, step, waited)
        tiles = [tile(gradient.matrix) for gradient in gradients]
        new = mosaic.weighted(sums, list(zip(pairs, tiles)), plan.interpreted)
        for i in sorted(summed | {plan.streamed[0]}, key=plan.streamed.index, reverse=True):
            self.release(i, step)
        return tuple(new)

    def pairs(
        self, program: SumProgram, near: dict, step: Any, gradients: list, products: dict[Any, Any]
    ) -> list[Any]:
        """Computes the blocks of pairs from which the gradients are made at a step, given its
        products.
        """
        plan, held = self.plan, dict(near)
        sizes: dict[str, int] = dict(zip(plan.side.kinds, (mosaic.WARPGROUP, mosaic.PIECE)))
        start = self.where(step)[1]

        def of(first):
            read = ft.partial(self.read_piece, held, step, first)
            product = lambda eqn: mosaic.piece(products[eqn.outvars[0]], first)
            run, found = Run(program, product, read, sizes, plan.origin), []
            for gradient in gradients:
                x = run.times(gradient.pairs, None, {}).spread(plan.side.kinds, sizes)
                if plan.other % plan.tile:
                    inside = mosaic.iota(x.shape, 1) + (start + first) < jnp.int32(plan.other)
                    x = jnp.where(inside, x, jnp.float32(0))
                if not plan.interpreted and program.cleaned:
                    # Otherwise the compiler would mask after rounding, and unpack each number for
                    # that.
                    (x,) = mosaic.in_order(x)
                found.append(x.astype(plan.dtype))
            return found

        return mosaic.piecewise(of, plan.tile)

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
