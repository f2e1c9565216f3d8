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

The kernels of a backward pass: which results each computes, and of which arrays it is made.

How sums of gradients on one side are cut into programs, for Hopper.

Gradients of what a score reads for each pair, by a kernel for Hopper.

A program has 128 rows and up to 128 keys of a result, and two warpgroups with 64 of the rows each.
At each step they multiply the tiles of another batch element, and add the cotangents of its logits
in registers. The tiles of the next step are copied as soon as the products have read these.
"""

import collections
import dataclasses
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from ...._jax import abstract
from ...._sweep.grid import BlockGrid, COL, FULL, PARTIAL, ROW
from .._diagonals import DiagonalOperand
from .._operands import divided, first_row, Places, rounded_up, ROWS, Side, TILE, WARPGROUP
from .._operations import Value
from .._pair_gradients import PairArrays, PairVisit, Tiles
from .._plans import place_of, SumArrays, SumPlan, Visit
from .._program import Run
from .._sum_program import SumProgram
from . import _mosaic as mosaic
from ._matrices import Matrix
from ._mosaic import clean, clean_together, meet


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

    lists: ClassVar[int] = 3
    """How many lists of live blocks a program reads, if there is a table."""

    def watched(self, i: int) -> list[int]:
        """The grid axes of what says whether a matrix has numbers that are not finite."""
        return [a for a in self.layout.in_axes[i] if a != self.side.other]

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
            mosaic.matrices((n, self.rows[i], self.features[i]), self.dtype)
            for i, n in zip(self.streamed, self.stages)
        ]
        of = ft.partial(mosaic.vectors, self.stages[0], self.tile)
        vectors = [of(self.operands[i].dtype) for i in self.staged]
        with_it = [self.copies_of(i) for i in self.streamed]
        with_it[0] += len(vectors)
        arrived = [
            mosaic.Barrier(num_arrivals=x, num_barriers=n) for x, n in zip(with_it, self.stages)
        ]
        free = [mosaic.Barrier(num_arrivals=2, num_barriers=n) for n in self.stages]
        mine = [self.matrices[i].copies(mosaic.WARPGROUP) for i in self.own]
        here = [mosaic.Barrier(num_arrivals=x, num_barriers=2) for x in mine]
        square = (2, mosaic.WARPGROUP, mosaic.WARPGROUP)
        part = [mosaic.matrices(square, self.part_dtype)] * self.stages_parts
        return (own, tiles, vectors, part), (here, arrived), free, mosaic.Barrier(num_arrivals=2)

    @property
    def rows(self) -> dict[int, int]:
        """How many rows a tile of each streamed matrix has."""
        return dict.fromkeys(self.streamed, self.tile)

    def copies_of(self, i: int) -> int:
        """How many copies such a tile takes."""
        return self.matrices[i].copies(self.tile)

    @property
    def part_dtype(self) -> Any:
        """The dtype of a part of a result on its way out."""
        return self.dtype


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


def written_whole(layout: BlockGrid, tile: int) -> bool:
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


def kernels_of(
    programs: dict[int, SumProgram], wanted: Sequence[int]
) -> list[tuple[Side, list[int]]]:
    """The results that each kernel computes: all of a side whose sums fit into registers."""
    program, found = programs[max(programs)], []
    for i in wanted:
        gradient = program.gradient(i)
        size = _registers(program, i)
        for n, (side, mine, used) in enumerate(found):
            if side is gradient.side and used + size <= REGISTERS:
                found[n] = (side, [*mine, i], used + size)
                break
        else:
            found.append((gradient.side, [i], size))
    return [(side, mine) for side, mine, _ in found]


def _registers(program: SumProgram, i: int) -> int:
    """How many registers of a thread hold the sum of a result."""
    return rounded_up(program.size(program.gradient(i).matrix), 64) // 2


def visit_sum(
    programs: dict[int, SumProgram],
    side: Side,
    wanted: dict[int, tuple[int, ...]],
    layout: BlockGrid,
    args: Sequence,
    dtypes: dict[int, Any],
    interpreted: bool,
) -> dict[int, Any]:
    """Some results of a sweep, by one kernel.

    **Arguments:**

    - `programs`: the block function of each class.
    - `side`, `wanted`: the results, all of one side, and the grid axes that they are to have.
    - `layout`, `args`: the grid, and the table, if there is one, and the operands on it.
    - `dtypes`: what results are rounded to.

    **Returns:** the results with all batch axes and that of the side in front, `[own, features]`.
    """
    arrays = SumArrays(programs, side, list(wanted), layout, args)
    plan, lengths = _plan(arrays, dtypes, interpreted)
    shape = layout.shape((*layout.batch, side.own))
    places, out = math.prod(shape), []
    for o, place in plan.results.items():
        copied = places, lengths[side.kinds[0]], plan.widths[o]
        out.append(abstract(args[-1], copied if place is None else place.written, dtypes[o]))
    name = "eqattn_sum_" + ("rows" if side is ROWS else "columns")
    body = ft.partial(Program.run, plan)
    run = mosaic.kernel(body, out, places * plan.tiles, name, plan.scratch(), interpreted)
    done, length = {}, arrays.length
    dirty = [_are_dirty(arrays, plan, i) for i in plan.cleaned]
    for (o, place), x in zip(plan.results.items(), run(*arrays.inputs(plan, dirty))):
        gradient = arrays.first.gradient(o)
        if place is not None:
            done[o] = place.blocks(x)
            continue
        width = arrays.first.size(gradient.matrix)
        x = x[:, :length, :width].reshape(*shape, length, width)
        done[o] = jnp.swapaxes(x, -1, -2) if gradient.transposed else x
    return done


def visit_pairs(
    programs: dict[int, SumProgram],
    side: Side,
    wanted: dict[int, tuple[int, ...]],
    layout: BlockGrid,
    args: Sequence,
    dtypes: dict[int, Any],
    interpreted: bool,
) -> dict[int, Any]:
    """A result that has a number for each pair, by one kernel. Arguments are those of `visit_sum`,
    with one result.
    """
    ((o, axes),) = wanted.items()
    arrays = PairArrays(programs, side, o, layout, args, axes, multiple=8)
    # What XLA sums up further is rounded after that.
    dtype = dtypes[o] if arrays.apart == 1 else jnp.float32
    plan = _pair_plan(arrays, {o: dtype}, interpreted)
    out = [abstract(args[-1], plan.written.written, dtype)]
    body, count = ft.partial(PairSums.run, plan), plan.visit.programs
    run = mosaic.kernel(body, out, count, "eqattn_sum_pairs", plan.scratch(), interpreted)
    dirty = [_are_dirty(arrays, plan, i) for i in plan.cleaned]
    (found,) = run(*arrays.inputs(plan, dirty))
    return {o: arrays.result(plan.written.blocks(found)).astype(dtypes[o])}


def _are_dirty(arrays: SumArrays, plan: Plan, i: int) -> Any:
    """Which batch elements of a matrix have a number that is not finite in some block, as one array
    of integers.
    """
    x, axes, kept = arrays.operands[i], arrays.layout.in_axes[i], plan.watched(i)
    along = [n for n, a in enumerate(axes) if a not in kept]
    bad = ~jnp.isfinite(x).all((*along, x.ndim - 2, x.ndim - 1))
    return bad.astype(jnp.int32).reshape(-1)


def _tile(arrays: SumArrays) -> int:
    """How many queries or keys of the other side a kernel multiplies at once. Large tiles are for
    few sums, and for blocks that they fill with whole heads or with a part of one.
    """
    large, axis = 2 * STREAMED, arrays.side.other
    head = next((x.block for x in arrays.layout.tokens if x.axis == axis), arrays.other)
    whole = arrays.other % large == 0 and (head % large == 0 or large % head == 0)
    few = sum(_registers(arrays.first, i) for i in arrays.wanted) <= FEW_REGISTERS
    return large if few and whole else STREAMED


def _placed(arrays: SumArrays, padded: tuple[int, int]) -> Any:
    """The function that says where a matrix lies, for blocks that are padded to these lengths."""
    by_axis = dict(zip((arrays.side.own, arrays.side.other), padded))
    return lambda axes, axis, rows, width, transposed: Matrix(
        arrays.layout, axes, axis, rows, width, by_axis[axis], transposed
    )


def _pair_plan(arrays: PairArrays, dtypes: dict[int, Any], interpreted: bool) -> PairPlan:
    """The kernel of a result that has a number for each pair."""
    layout = arrays.layout
    whole = arrays.other % (2 * STREAMED) == 0
    tile = 2 * STREAMED if whole and max(arrays.widths) <= 128 else STREAMED
    rows = TILE if arrays.heads == 1 else TILE // 2
    out = rounded_up(arrays.rows, rows), rounded_up(arrays.other, tile)
    turns = -(-arrays.heads // 2)
    # The last rows of the last head, or of the one that would follow.
    most = (2 * turns - 1) * arrays.rows + out[0] if arrays.heads > 1 else out[0]
    padded = rounded_up(most, TILE), out[1]
    return PairPlan(
        **arrays.planned(dict(zip(arrays.side.kinds, padded)), _placed(arrays, padded)),
        length=arrays.length,
        other=arrays.other,
        tile=tile,
        dtypes=dtypes,
        interpreted=interpreted,
        visit=arrays.visit((out[0] // rows, out[1] // tile), turns),
        written=Tiles(layout, arrays.kept, arrays.rows, out, written_whole(layout, tile), (8, 64)),
        heads=arrays.heads,
    )


def _plan(
    arrays: SumArrays, dtypes: dict[int, Any], interpreted: bool
) -> tuple[Plan, dict[str, int]]:
    """The kernel of some results, and the lengths of blocks as it pads them."""
    side, tile = arrays.side, _tile(arrays)
    padded = rounded_up(arrays.length, TILE), rounded_up(arrays.other, tile)
    lengths = dict(zip(side.kinds, padded))
    found = arrays.planned(lengths, _placed(arrays, padded))
    widest = max(found["matrices"][i].features for i in arrays.own)
    by_copies = lambda o, x: dtypes[o] == arrays.dtype and x.features <= widest
    found["results"] = {o: x if by_copies(o, x) else None for o, x in found["results"].items()}
    found |= dict(length=arrays.length, other=arrays.other, tile=tile)
    return Plan(**found, dtypes=dtypes, interpreted=interpreted), lengths
