"""The softmax fold of the live pairs of a grid as one kernel for Hopper.

A program has 128 rows of one block, and two warpgroups with 64 rows each. They take turns: while
the tensor cores multiply for one, the other computes its exponentials. Tiles of keys and values are
copied into shared memory, as many ahead as fit. A third warpgroup does so for vectors of up to 128
numbers, and otherwise the second one, which comes later than the first.

With a third warpgroup, registers are shared out by `setmaxnreg`. An assembler that makes a part of
a larger program ignores that. XLA takes such a one, libnvJitLink, where it finds it. Each thread
then has 168 registers. That is enough for shorter vectors. When an H200 timed it, a causal forward
of 128 numbers had 216 bytes of spills. It was still faster than with two warpgroups: 559 and 529
TFLOP/s. It spills nothing since values that are not finite have a second kernel, see
`_two_visits.py`. For 256 numbers it was less than half as fast: 241 and 546.

Inside, logits and maxima are in units of `log 2`, so that `exp` of a logit is a power of two.

The fold as a kernel: the arrays that it reads and writes.

Folds that visit blocks a second time where something is not finite.

By a product, a value that is not finite reaches all rows, and not only those that see its key. That
is against the contract of `_sweep/nonfinite.py`. It is rare. So a first kernel multiplies what is
there, and says for each program whether its sums are finite. A second kernel follows. Its programs
visit their blocks again if the sums are not, and clean the tiles in shared memory. Otherwise they
do nothing.

Other ways have a price. To look at all values before the first visit takes the time of reading
them. One kernel for both visits has more registers than the first one, or spills more. If XLA
decided, the host would have to wait for the device.

Backward passes do look before, as the sums of a gradient would take shared memory that long vectors
leave no room for.
"""

import abc
import copy
import dataclasses
import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ...._jax import abstract
from ...._sweep.grid import BlockGrid, COL, FULL, PARTIAL, ROW
from ..._program import LOG2E
from .._diagonals import DiagonalOperand
from .._operands import divided, first_row, padded, ROWS, Sizes, TILE
from .._operations import Value
from .._plans import FoldArrays, FoldPlan, online_step, place_of, Visit
from .._program import PairProgram, scale_beside
from . import _mosaic as mosaic
from ._matrices import Matrix
from ._mosaic import clean_together


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonFiniteFallback(abc.ABC):
    """A plan whose blocks are visited once or twice, each time by a kernel.

    **Arguments:**

    - `again`: whether this is the second visit.
    """

    again: bool = False

    @property
    @abc.abstractmethod
    def spreads(self) -> bool:
        """Whether what is not finite may reach results that it must not reach."""

    @property
    def computing(self) -> int:
        """How many warpgroups of a program have results."""
        return 2

    @abc.abstractmethod
    def scratch(self) -> tuple:
        """Allocates shared memory and barriers."""

    @abc.abstractmethod
    def visit(self, refs: Sequence[Any], scratch: Sequence[Any]) -> None:
        """What a program does with its references. After the results comes, if the first visit is
        followed by another one, an array for `note`.
        """

    def _body(self, *refs: Any) -> None:
        inner = len(self.scratch())
        given, scratch = refs[:-inner], refs[-inner:]
        if not self.again:
            self.visit(given, scratch)
            return
        check, *rest = given
        found = [check[i, lax.axis_index("program")] for i in range(self.computing)]
        mosaic.when(ft.reduce(jnp.add, found) != 0)(lambda: self.visit(rest, scratch))

    def note(self, check: Any, warpgroup: Any, sums: Any, memory: Any) -> None:
        """Notes whether the sums `[rows, n]` of a warpgroup are finite: by 0, or else by NaN.

        **Arguments:**

        - `check`: the array, `[warpgroups, programs]`.
        - `memory`: shared memory for a number of each row.
        """
        mosaic.store((sums * 0).sum(1), memory)
        mosaic.commit_smem()
        check[warpgroup, lax.axis_index("program")] = mosaic.load(memory, "other").sum()

    def run(
        self,
        out: Sequence[Any],
        inputs: Sequence[Any],
        name: str,
        programs: int,
        interpreted: bool,
        warpgroups: int = 2,
    ) -> list[Any]:
        """What the visits have computed.

        **Arguments:**

        - `out`: the shapes and dtypes of the results.
        - `inputs`: what the kernels read.
        - `name`, `programs`, `interpreted`, `warpgroups`: as for `mosaic.kernel`.
        """

        def kernel(plan, out, *inputs):
            given = plan._body, out, programs, name + "_again" * plan.again, plan.scratch()
            return mosaic.kernel(*given, interpreted, warpgroups)(*inputs)

        if not self.spreads:
            return kernel(self, out, *inputs)
        check = abstract(inputs[0], (self.computing, programs), jnp.float32)
        *found, check = kernel(self, [*out, check], *inputs)
        again = dataclasses.replace(self, again=True)
        return mosaic.in_place(lambda *refs: kernel(again, [], check, *inputs, *refs), found)


@dataclasses.dataclass(frozen=True)
class Plan(FoldPlan, NonFiniteFallback):
    """A fold by this kernel."""

    @property
    def spreads(self) -> bool:
        # The last tile of a block that is no whole tiles holds keys of the next block, too. Rows do
        # not see these if they do not visit that block.
        uneven = self.sizes.padded_keys != self.sizes.keys
        return super().spreads or (self.table_axes is not None and uneven)

    @property
    def parts(self) -> int:
        """How many tiles a block of keys has."""
        return self.sizes.padded_keys // self.sizes.tile_k

    @property
    def stages_parts(self) -> bool:
        """Whether an output needs additional shared memory on its way out, for a part of its
        columns. If it has the shape of the queries, their memory serves, as copies take whole tiles
        of a matrix.
        """
        return self.sizes.padded_dim != self.sizes.padded_width

    def scratch(self) -> tuple:
        """Allocates shared memory and barriers. The memory is `(queries, keys, values, what varies
        with keys, poison, part of an output)`. The barriers are `(queries, keys, values have
        arrived)` and `(keys, values are free)`. One more says whose turn it is, and at the last one
        both warpgroups meet.
        """
        s = self.sizes
        of = ft.partial(mosaic.vectors, s.stages, s.tile_k)
        vectors = [of(self.operands[i].dtype) for i in self.staged]
        memory = (
            mosaic.matrices((2, mosaic.WARPGROUP, s.padded_dim), self.dtype),
            mosaic.matrices((s.stages, s.tile_k, s.padded_dim), self.dtype),
            mosaic.matrices((s.stages, s.tile_k, s.padded_width), self.dtype),
            vectors,
            [mosaic.SMEM((2, s.tile_k), jnp.float32)] * self.spreads,
            [mosaic.matrices((2, mosaic.WARPGROUP, 64), self.dtype)] * self.stages_parts,
        )
        keys = self.key.copies(s.tile_k) + len(vectors)
        arrived = (
            mosaic.Barrier(num_arrivals=self.query.copies(mosaic.WARPGROUP), num_barriers=2),
            mosaic.Barrier(num_arrivals=keys, num_barriers=s.stages),
            mosaic.Barrier(num_arrivals=self.value.copies(s.tile_k), num_barriers=s.stages),
        )
        free = (mosaic.Barrier(num_arrivals=2, num_barriers=s.stages),) * 2
        return memory, arrived, free, *(mosaic.Barrier(num_arrivals=2),) * 2

    def visit(self, refs: Sequence[Any], scratch: Sequence[Any]) -> None:
        program = Program(self, refs, scratch)
        (mosaic.specialise if self.sizes.copied_apart else Program.compute)(program)


class Program:
    """One program of the kernel, on references, with what all its warpgroups know."""

    def __init__(self, plan: Plan, refs: Sequence, scratch: Sequence):
        self.plan, refs = plan, list(refs)
        self.q, self.k, self.v = (refs.pop(0) for _ in range(3))
        listed = [refs.pop(0) for _ in range(3)] if plan.table_axes is not None else []
        self.given = {i: refs.pop(0) for i in plan.operands}
        self.old = [refs.pop(0) for _ in range(3)] if plan.continued else []
        self.ends = [refs.pop(0) for _ in plan.ending.given]
        self.results = refs
        self.memory, self.arrived, self.free, self.turn, self.both = scratch
        self.warpgroup = lax.axis_index("warpgroup")
        tiles, order = plan.sizes.padded_rows // TILE, listed[0] if listed else None
        self.place = ft.partial(place_of, plan, ROWS, tiles, order)
        visit = Visit.of(plan, ROWS, tiles, listed, lax.axis_index("program"))
        self.places, self.column = visit.places, visit.column
        self.start = first_row(visit.tile, self.warpgroup)
        self.full, self.live = (n * jnp.int32(plan.parts) for n in (visit.full, visit.live))

    def where(self, step: Any) -> tuple[Any, Any]:
        """The column of a step, and the first key of the tile in its block."""
        at, part = divided(step, self.plan.parts)
        return self.column(at), part * jnp.int32(self.plan.sizes.tile_k)

    def slot(self, step: Any) -> Any:
        return lax.rem(step, jnp.int32(self.plan.sizes.stages))

    def send_keys(self, slot: Any, where: tuple[Any, Any]) -> None:
        """Begins to copy what the logits of a step read."""
        plan, places, (column, start) = self.plan, self.places, where
        _, k_tiles, _, vectors, *_ = self.memory
        arrived = self.arrived[1].at[slot]
        plan.key.copy_in(self.k, places, column, start, k_tiles.at[slot], arrived)
        for i, vector in zip(plan.staged, vectors):
            at = places.place(plan.operands[i].axes, column)
            from_ = self.given[i].at[at, mosaic.ds(start, plan.sizes.tile_k)]
            mosaic.copy_in(from_, mosaic.vector(vector, slot, plan.sizes.tile_k), arrived)

    def send_values(self, slot: Any, where: tuple[Any, Any]) -> None:
        """Begins to copy the values of a step."""
        tile, arrived = self.memory[2].at[slot], self.arrived[2].at[slot]
        self.plan.value.copy_in(self.v, self.places, *where, tile, arrived)

    def copy(self) -> None:
        """What a third warpgroup does: it copies the tiles of all steps."""

        def send(step, _):
            again, slot, where = step >= self.plan.sizes.stages, self.slot(step), self.where(step)
            for free, begin in zip(self.free, (self.send_keys, self.send_values)):
                mosaic.when(again)(ft.partial(mosaic.barrier_wait, free.at[slot]))
                begin(slot, where)
            return ()

        lax.fori_loop(jnp.int32(0), self.live, send, ())

    def begin(self) -> None:
        """Begins to copy the tiles of the first steps, if there is no third warpgroup."""
        if self.plan.sizes.copied_apart:
            return

        def send(step, _):
            slot, where = self.slot(step), self.where(step)
            self.send_keys(slot, where)
            self.send_values(slot, where)
            return ()

        first = jnp.minimum(self.live, jnp.int32(self.plan.sizes.stages))
        first = jnp.where(self.warpgroup == 1, first, jnp.int32(0))
        lax.fori_loop(jnp.int32(0), first, send, ())

    def refill(self, which: int, step: Any) -> None:
        """Begins to copy the next tile into the slot of a step, as soon as both warpgroups have
        read it. Without a third warpgroup the second one does so, as the first has read it before.

        **Arguments:**

        - `which`: 0 for keys and 1 for values.
        - `step`: -1 stands for no step.
        """
        if self.plan.sizes.copied_apart:
            return
        following, slot = step + jnp.int32(self.plan.sizes.stages), self.slot(step)

        def go_on():
            mosaic.barrier_wait(self.free[which].at[slot])
            (self.send_keys, self.send_values)[which](slot, self.where(following))

        wanted = (self.warpgroup == 1) & (step >= 0) & (following < self.live)
        mosaic.when(wanted)(go_on)

    def compute(self) -> None:
        """What each of the warpgroups does, for its rows."""
        plan, width = self.plan, self.plan.sizes.padded_width
        q_tile = self.memory[0].at[self.warpgroup]
        q_arrived, k_arrived, _ = self.arrived
        here = q_arrived.at[self.warpgroup]
        plan.query.copy_in(self.q, self.places, None, self.start, q_tile, here)
        self.begin()
        near = {i: self.read(i) for i, x in plan.operands.items() if not (x.staged or x.moves)}
        scale = jnp.float32(1) if plan.scale is None else near[plan.scale].array
        positive, other = scale_beside(scale, plan.added)
        self.factor = LOG2E * positive
        if not self.old:
            filled = lambda shape, x: lax.full(shape, x, jnp.float32)
            n = mosaic.WARPGROUP
            acc = mosaic.held(filled((n, width), 0.0), "pairs")
            den = mosaic.held(filled((n,), 0.0), "own")
            top = mosaic.held(filled((n,), -jnp.inf), "own")
        else:
            at = self.places.block, mosaic.ds(self.start, mosaic.WARPGROUP)
            acc = mosaic.load(self.old[0].at[at], "pairs")
            den, top = (mosaic.load(x.at[at], "own") for x in self.old[1:])
            top = top * LOG2E
        mosaic.barrier_wait(here)
        if plan.scale is not None:  # it is positive and large enough in most calls
            mosaic.when(other < 1)(ft.partial(self.multiply, q_tile, other))
        mosaic.when(self.live > 0)(lambda: mosaic.barrier_wait(k_arrived.at[0]))
        mosaic.when(self.warpgroup == 1)(self.next_turn)
        state, begin = (acc, den, top), jnp.int32(0)
        for c, end in ((FULL, self.full), (PARTIAL, self.live)):
            if c in plan.programs and not plan.again:
                step = ft.partial(self.step, plan.programs[c], near, False)
                state = lax.fori_loop(begin, end, step, state)
                begin = end
        mosaic.when(self.warpgroup == 0)(self.next_turn)
        if plan.again:
            step = lambda *x: self.anew().step(plan.programs[min(plan.programs)], {}, True, *x)
            state = lax.fori_loop(begin, self.live, step, state)
        acc, den, top = state
        self.write((acc, den, top * (1 / LOG2E)))
        if plan.spreads and not plan.again:
            memory = self.memory[4][0].at[self.warpgroup, mosaic.ds(0, mosaic.WARPGROUP)]
            plan.note(self.results[-1], self.warpgroup, acc, memory)

    def multiply(self, tile: Any, factor: Any) -> None:
        """Multiplies a tile in shared memory with a number."""
        for part in mosaic.parts_of(tile):
            part[...] = mosaic.load(part, "pairs") * factor.astype(self.plan.dtype)
        mosaic.commit_smem()

    def write(self, accs: tuple) -> None:
        """Writes the results of the rows. Narrow ones pass through shared memory."""
        plan, sizes, here = self.plan, self.plan.sizes, self.anew()
        places, start = here.places, here.start

        def read(i):
            x = plan.ending.given[i]
            return x.read(self.ends[i], places.place(x.axes), start, None, 0)

        lengths = dict(r=mosaic.WARPGROUP, v=sizes.padded_width)
        memory = (self.memory[5][0] if plan.stages_parts else self.memory[0]).at[self.warpgroup]
        for x, ref, place in zip(plan.ending(accs, read, lengths), self.results, plan.results):
            if place is None:
                mosaic.store(x, ref.at[places.block, mosaic.ds(start, mosaic.WARPGROUP)])
            else:
                place.store(x, ref, places, start, memory)

    def anew(self) -> "Program":
        """The same program, for which the compiler computes again where its rows are. Otherwise it
        would keep this in registers, with all that was read there.
        """
        other, interpreted = copy.copy(self), self.plan.interpreted
        other.warpgroup = mosaic.anew(self.warpgroup, interpreted)
        program = mosaic.anew(lax.axis_index("program"), interpreted)
        other.places, _, tile = self.place(program)
        other.start = first_row(tile, other.warpgroup)
        return other

    def next_turn(self) -> None:
        mosaic.barrier_arrive(self.turn)
        mosaic.barrier_wait(self.turn)

    def read_piece(
        self, held: dict[int, Value], step: Any, slot: Any, first: int, i: int, at: tuple = ()
    ) -> Value:
        """An operand of the logits for a piece of the keys of a step, which are in a slot.

        **Arguments:**

        - `held`: what was read and serves for all pieces.
        - `first`: the first key of the piece in its tile.
        - `at`: as for `read`.
        """
        x = self.plan.operands[i]
        if not x.by_piece:
            if i not in held:
                held[i] = self.read(i, step)
            return held[i]
        if x.staged:
            vector = self.memory[3][self.plan.staged.index(i)]
            return x.read_staged(vector.at[slot, mosaic.ds(first, mosaic.PIECE)])
        return self.read(i, step, first, at)

    def read(self, i: int, step: Any = None, first: int = 0, at: tuple = ()) -> Value:
        """Reads an operand of the logits at a step, from global memory. If diagonals share its
        numbers, `at` says where they lie.
        """
        x = self.plan.operands[i]
        column, start = (None, None) if step is None else self.where(step)
        start = None if start is None else start + first
        place = x.place(self.places, column)
        if isinstance(x, DiagonalOperand):
            where = self.start, start, mosaic.PIECE, self.plan.interpreted
            return x.tile(self.given[i], place, at, *where)
        return x.read(self.given[i], place, self.start, start, mosaic.PIECE)

    def logits(
        self, program: PairProgram, near: dict, step: Any, slot: Any, cleans: bool
    ) -> list[Any]:
        """Evaluates a block function on the tile of keys in a slot, and frees the slot. The logits
        are still to be multiplied by the `factor`.
        """
        sizes, apart = self.plan.sizes, self.plan.scale is not None
        lengths = {"r": mosaic.WARPGROUP, "k": mosaic.PIECE}
        # For fewer features, the other loops have registers for the addresses of all parts.
        warpgroup = self.warpgroup
        if cleans or sizes.padded_dim > 128:
            warpgroup = mosaic.anew(warpgroup, self.plan.interpreted)
        q_tile, k_tile = self.memory[0].at[warpgroup], self.memory[1].at[slot]

        def meanwhile():
            self.refill(1, step - 1)
            if not cleans:
                self.next_turn()

        (s,) = mosaic.pairs_of((q_tile, k_tile), meanwhile=meanwhile)
        read = ft.partial(self.read_piece, dict(near), step, slot)
        start = self.where(step)[1]

        def of(first):
            product = mosaic.piece(s, first)
            x, *weights = program(product, ft.partial(read, first), lengths, apart)
            if sizes.padded_keys != sizes.keys:
                inside = mosaic.iota(x.shape, 1) + (start + first) < jnp.int32(sizes.keys)
                x = jnp.where(inside, x, -jnp.inf)
            return [x, *weights]

        found = mosaic.piecewise(of, sizes.tile_k)
        if self.plan.interpreted:  # it does not know that the barrier suffices after reads
            mosaic.commit_smem()
        mosaic.barrier_arrive(self.free[0].at[slot])
        return found

    def step(
        self, program: PairProgram, near: dict, cleans: bool, step: Any, state: tuple
    ) -> tuple:
        """Adds a tile of keys to the Carry. With `cleans`, its values may not be finite. Then the
        warpgroups take no turns, as they clean the tile together.
        """
        plan, slot = self.plan, self.slot(step)
        _, k_arrived, v_arrived = self.arrived
        if cleans:  # registers hold no logits yet
            mosaic.barrier_wait(v_arrived.at[slot])
            self.clean(self.memory[2].at[slot])
        s, *weights = self.logits(program, near, step, slot, cleans)
        if cleans:  # registers hold no factors of values yet
            acc, den, top = state
            den = den + self.nan_flag(s)
            if not plan.interpreted:
                s, den = mosaic.in_order(s, den)
            state = acc, den, top
        in_order = None if plan.interpreted else mosaic.in_order
        acc, den, now, weighted = online_step(state, s, weights, self.factor, plan.dtype, in_order)
        if not cleans:
            mosaic.barrier_arrive(self.turn)
        self.refill(0, step)
        if not cleans:
            mosaic.barrier_wait(v_arrived.at[slot])
            mosaic.barrier_wait(self.turn)

        def meanwhile():
            following = step + 1
            at = k_arrived.at[self.slot(following)]
            mosaic.when(following < self.live)(lambda: mosaic.barrier_wait(at))

        factors = [(weighted, self.memory[2].at[slot])]
        (acc,) = mosaic.weighted([acc], factors, plan.interpreted, meanwhile)
        mosaic.barrier_arrive(self.free[1].at[slot])
        return acc, den, now

    def nan_flag(self, s: Any) -> Any:
        """Adds up, for each row, the poison that `clean` noted for the keys that the row sees."""
        nan_flag, total = self.memory[4][0].at[self.warpgroup], jnp.float32(0)
        for first in range(0, s.shape[1], mosaic.PIECE):
            x = mosaic.piece(s, first)
            bad = mosaic.load(nan_flag.at[mosaic.ds(first, mosaic.PIECE)], "other")
            bad = lax.broadcast_in_dim(bad, x.shape, [1])
            total = total + jnp.where(x == -jnp.inf, 0.0, bad)
        return total.sum(1)

    def clean(self, tile: Any) -> None:
        """Replaces what is not finite in a tile of values, and notes the poison of its keys: NaN
        for one whose value is not finite, else 0. Otherwise the product would bring what is not
        finite to all rows, and not only to those that see the key.
        """
        found = mosaic.held(lax.full(tile.shape[:1], 0.0, jnp.float32), "own")
        for part in mosaic.parts_of(tile):
            fine = jnp.abs(mosaic.load(part, "pairs")) < jnp.inf
            found = found + jnp.where(fine, jnp.float32(0), jnp.float32(jnp.nan)).sum(1)
        warpgroup = mosaic.anew(self.warpgroup, self.plan.interpreted)
        mosaic.store(found, self.memory[4][0].at[warpgroup])
        mosaic.commit_smem()
        clean_together(tile, warpgroup, self.both)


def visit_fold(
    steps: dict[int, Any],
    layout: BlockGrid,
    args: Sequence,
    finish: Any,
    into: Sequence | None,
    interpreted: bool,
) -> list:
    """What `finish` makes of each row of the grid, with its grid axes in front."""
    arrays = FoldArrays(steps, layout, args, finish, mosaic.native(interpreted))
    old = None if into is None or into[0] is None else [jnp.swapaxes(into[0], -1, -2), *into[1:]]
    plan, kept = _plan(arrays, old is not None, interpreted), (*layout.batch, ROW)
    lie, shape = (plan.sizes.padded_rows, plan.sizes.padded_width), layout.shape(kept)
    inputs = arrays.inputs(plan, [_padded_blocks(x, len(kept), lie) for x in old or ()])
    ends, places = plan.ending.results, math.prod(shape)
    out = [
        abstract(args[-1], (places, *lie[: 1 + wide]) if place is None else place.written, dtype)
        for (dtype, wide, _), place in zip(ends, plan.results)
    ]
    count, groups = places * (plan.sizes.padded_rows // TILE), 2 + plan.sizes.copied_apart
    found = plan.run(out, inputs, "eqattn_fold", count, interpreted, groups)
    return [
        _blocks(x, arrays, shape, wide, transposed) if place is None else place.blocks(x)
        for x, place, (_, wide, transposed) in zip(found, plan.results, ends)
    ]


def _plan(arrays: FoldArrays, continued: bool, interpreted: bool) -> Plan:
    """The kernel of a fold."""
    layout, keys, rows = arrays.layout, arrays.keys, arrays.rows
    sizes = Sizes(rows, keys, arrays.dim, arrays.width)
    found = arrays.planned(dict(r=sizes.padded_rows, k=sizes.padded_keys))
    q_axes, k_axes, v_axes = arrays.axes
    of_rows, of_keys, kept = (ROW, rows), (COL, keys), (*layout.batch, ROW)
    results: list[Matrix | None] = []
    for result, is_wide, transposed in found["ending"].results:
        place = Matrix(
            layout, kept, *of_rows, sizes.width, sizes.padded_rows, transposed=not transposed
        )
        by_copies = is_wide and result == arrays.dtype and sizes.padded_width <= sizes.padded_dim
        results.append(place if by_copies else None)
    return Plan(
        **found,
        sizes=sizes,
        query=Matrix(layout, q_axes, *of_rows, sizes.dim, sizes.padded_rows, transposed=True),
        key=Matrix(layout, k_axes, *of_keys, sizes.dim, sizes.padded_keys, transposed=False),
        value=Matrix(layout, v_axes, *of_keys, sizes.width, sizes.padded_keys, transposed=False),
        results=results,
        continued=continued,
        interpreted=interpreted,
    )


def _blocks(
    x: Any, arrays: FoldArrays, shape: tuple[int, ...], wide: bool, transposed: bool
) -> Any:
    """The blocks of a result that lies as the kernel has it, padded, without what pads them."""
    x = x[:, : arrays.rows, : arrays.width] if wide else x[:, : arrays.rows]
    x = x.reshape(*shape, *x.shape[1:])
    return jnp.swapaxes(x, -1, -2) if wide and not transposed else x


def _padded_blocks(x: Any, lead: int, lengths: Sequence[int]) -> Any:
    """Blocks with the axes of the grid in one, padded to some lengths."""
    x = x.reshape(-1, *x.shape[lead:])
    for axis, size in zip(range(1, x.ndim), lengths):
        x = padded(x, axis, size)
    return x
