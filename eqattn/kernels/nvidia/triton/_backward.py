"""Sums over the live pairs of a grid as kernels in Pallas Triton: the gradients of queries, keys
and values.

A program has some queries or some keys of one block, and adds up the gradients of these over the
other side. So no two programs add to one number, and results are the same in each run.

A backward pass as kernels in Pallas Triton: the arrays that they read and write.

Gradients of what a score reads for each pair, as a kernel in Pallas Triton.

A program has some rows and keys of a result. At each step it adds the cotangents of the logits of
another batch element, or of another head that shares the numbers.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from ...._jax import abstract
from ...._sweep.grid import BlockGrid, COL, FULL, PARTIAL, ROW
from .._diagonals import DiagonalOperand
from .._operands import divided, rounded_up, ROWS, Side
from .._operations import Value
from .._pair_gradients import one_each, PairArrays, PairSumProgram, PairVisit, Tiles
from .._plans import SumArrays, SumPlan, Visit
from .._program import Run
from .._sum_program import by_kernels, SumProgram
from . import _pallas as triton
from ._forward import check_axes, power_of_two, STAGES
from ._pallas import NATIVE
from ._rows import along_diagonals, finite, is_near, Rows, shifted, value_of


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How blocks of both sides are cut and padded for a kernel.

    **Arguments:**

    - `side`: the side of the programs.
    - `length`, `other`: the lengths of a block on that side, and on the other.
    - `widths`: the sizes of the vectors of all matrices.
    """

    side: Side
    length: int
    other: int
    widths: tuple[int, ...]

    @property
    def large(self) -> bool:
        """Whether tiles take so many registers and so much shared memory that they are smaller."""
        return max(map(power_of_two, self.widths)) > 128

    @property
    def own(self) -> int:
        """The queries or keys of a program. Keys have two sums, that of their values too."""
        most = 32 if self.large else 128 if self.side is ROWS else 64
        return min(most, power_of_two(self.length))

    @property
    def streamed(self) -> int:
        """The queries or keys of the other side that are multiplied at once."""
        return min(32 if self.large or self.side is ROWS else 64, power_of_two(self.other))

    @property
    def warps(self) -> int:
        return 4 if self.large else 8

    @property
    def padded(self) -> tuple[int, int]:
        """The lengths of blocks on either side, padded."""
        return rounded_up(self.length, self.own), rounded_up(self.other, self.streamed)

    @property
    def tiles(self) -> int:
        """How many programs a block has."""
        return self.padded[0] // self.own


@dataclasses.dataclass(frozen=True)
class Plan(SumPlan):
    """Sums by this kernel, of blocks with these sizes."""

    sizes: Sizes

    lists: ClassVar[int] = 3
    """How many lists of live blocks a program reads, if there is a table."""

    @property
    def count(self) -> int:
        """The number of programs."""
        shape = self.layout.shape((*self.layout.batch, self.side.own))
        return math.prod(shape) * self.sizes.tiles


class Program:
    """One program of the kernel, on references."""

    def __init__(self, plan: Plan, refs: Sequence):
        self.plan, refs = plan, list(refs)
        self.matrices = {i: refs.pop(0) for i in (*plan.own, *plan.streamed)}
        listed = [refs.pop(0) for _ in range(plan.lists)] if plan.table_axes is not None else []
        self.given = {i: refs.pop(0) for i in plan.operands}
        self.results = dict(zip(plan.wanted, refs))
        self.find(listed)

    def find(self, listed: Sequence) -> None:
        """Finds where the program is. **Arguments:** the references to the lists of live blocks, or
        nothing.
        """
        plan, side, sizes = self.plan, self.plan.side, self.plan.sizes
        visit = Visit.of(plan, side, sizes.tiles, listed, triton.program_id(0))
        self.places, self.column = visit.places, visit.column
        self.start = visit.tile * jnp.int32(sizes.own)
        self.own = self.start + lax.iota(jnp.int32, sizes.own)
        self.ends = {FULL: visit.full, PARTIAL: visit.live}

    def run(self) -> None:
        plan, sizes = self.plan, self.plan.sizes
        self.near = {i: self.read(i) for i, x in plan.operands.items() if is_near(x)}
        self.held = {i: self.rows(i, None, self.own, sizes.own) for i in plan.own}
        widths = [power_of_two(plan.results[o].width) for o in plan.wanted]
        zeros = sums = tuple(lax.full((sizes.own, n), 0.0, jnp.float32) for n in widths)
        begin, parts = jnp.int32(0), sizes.padded[1] // sizes.streamed
        for c in sorted(plan.programs, reverse=True):
            end = self.ends[c] * jnp.int32(parts)
            step = ft.partial(self.step, plan.programs[c], False)
            sums, begin = lax.fori_loop(begin, end, step, sums), end

        def again():
            step = ft.partial(self.step, plan.programs[PARTIAL], True)
            end = self.ends[PARTIAL] * jnp.int32(parts)
            return lax.fori_loop(jnp.int32(0), end, step, zeros)

        if plan.cleaned:
            sums = triton.unless_finite(sums, again, sums)
        for o, x in zip(plan.wanted, sums):
            lead, inside = plan.results[o].where(self.places, None, self.own, sizes.own)
            triton.put_rows(self.results[o], x.astype(plan.dtypes[o]), lead, inside)

    def rows(self, i: int, other: Any, rows: Any, tile: int, even: bool = True) -> Any:
        """Some rows of a matrix, of a block on the grid. `even` says whether the index of the first
        one is a multiple of their number.
        """
        matrix = self.plan.matrices[i]
        lead, inside = matrix.where(self.places, other, rows, tile if even else 0)
        return triton.rows(self.matrices[i], lead, inside, (tile, power_of_two(matrix.width)))

    def read(self, i: int, at: tuple = (), other: Any = None, part: Any = None) -> Value:
        """An operand, for a part of a block of the other side. If diagonals share its numbers, `at`
        says where they lie.
        """
        x = self.plan.operands[i]
        place = x.place(self.places, other)
        if isinstance(x, DiagonalOperand):
            return along_diagonals(x, self.given[i], place, at, self.own, part.start, part.size)
        mine, others = self.plan.side.kinds
        parts = {mine: triton.ds(self.start, self.plan.sizes.own), others: part}
        return value_of(x, self.given[i], place, parts)

    def step(self, program: SumProgram, cleans: bool, i: Any, sums: tuple) -> tuple:
        """Adds what the `i`-th tile of the other side contributes. With `cleans`, what is not
        finite is replaced by 0 before those products that the program wants to read finite numbers.
        """
        plan, sizes, size = self.plan, self.plan.sizes, self.plan.sizes.streamed
        at, part = divided(i, sizes.padded[1] // size)
        other, start = self.column(at), part * jnp.int32(size)
        others = start + lax.iota(jnp.int32, size)
        tiles = {i: self.rows(i, other, others, size) for i in plan.streamed}
        last = program.cleaned if cleans else set()
        read = ft.partial(self.read, other=other, part=triton.ds(start, size))
        new = []
        found = self.pairs(program, cleans, self.held | tiles, read)
        for gradient, acc, x in zip((program.gradient(o) for o in plan.wanted), sums, found):
            if sizes.padded[1] != sizes.other:
                inside = lax.broadcast_in_dim(others < sizes.other, x.shape, [1])
                x = jnp.where(inside, x, jnp.float32(0))
            tile = tiles[gradient.matrix]
            # What is masked must not meet a probability of 0, as `_sweep/nonfinite.py` says.
            tile = finite(tile) if gradient.matrix in last else tile
            new.append(acc + triton.product(x.astype(plan.dtype), tile, 0))
        return tuple(new)

    def pairs(
        self, program: SumProgram, cleans: bool, matrices: dict[int, Any], read: Callable
    ) -> Iterator[Any]:
        """The blocks of pairs `[own, other]` from which the gradients are made.

        **Arguments:**

        - `matrices`: the tiles that are multiplied. With `cleans`, what is not finite is replaced
            by 0 in some of them.
        - `read`: a function that reads an operand that is not near.
        """
        plan, sizes = self.plan, self.plan.sizes
        first = program.cleaned_first if cleans else set()
        matrices = {i: finite(x) if i in first else x for i, x in matrices.items()}

        def product(eqn):
            mine, others = program.factors(eqn)[:: 1 if plan.side is ROWS else -1]
            return triton.product(matrices[mine], matrices[others], 1)

        lengths: dict[str, int] = dict(zip(plan.side.kinds, (sizes.own, sizes.streamed)))
        either = lambda i, at=(): self.near[i] if i in self.near else read(i, at)
        run = Run(program, product, either, lengths, plan.origin)
        for o in plan.wanted:
            x = run.times(program.gradient(o).pairs, None, {})
            yield x.spread(plan.side.kinds, lengths)


@dataclasses.dataclass(frozen=True)
class PairSizes:
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


def traverse_sum(
    steps: dict[int, Callable[..., Any]],
    layout: BlockGrid,
    args: Sequence[Any],
    *more: Any,
    interpreted: bool = False,
    **kw: Any,
) -> list[Any]:
    """`eqattn._sweep.loops.traverse` of a backward pass; further arguments are those of
    `by_kernels`.
    """
    del steps  # they have all results, and the loops need some
    check_axes(interpreted, args)
    run, run_pairs = (ft.partial(f, layout, args, interpreted) for f in (_sums, _pair_sums))
    forms = {
        SumProgram: (_kernels_of, run),
        PairSumProgram: (lambda _, wanted: one_each(wanted), run_pairs),
    }
    native = triton.native(interpreted, NATIVE)
    return by_kernels(forms, native, layout, args, *more, **kw)


def _kernels_of(
    programs: dict[int, SumProgram], wanted: Sequence[int]
) -> list[tuple[Side, list[int]]]:
    """The results that each kernel computes: all of a side, or one where vectors are long."""
    program = programs[max(programs)]
    found: list[tuple[Side, list[int]]] = []
    for i in wanted:
        gradient = program.gradient(i)
        short = program.size(gradient.matrix) <= 128
        same = [mine for side, mine in found if side is gradient.side]
        if same and short:
            same[0].append(i)
        else:
            found.append((gradient.side, [i]))
    return found


def _sums(
    layout: BlockGrid,
    args: Sequence[Any],
    interpreted: bool,
    programs: dict[int, SumProgram],
    side: Side,
    wanted: dict[int, tuple[int, ...]],
    dtypes: dict[int, Any],
) -> list[Any]:
    """Some results of one side, by one kernel, with all batch axes and that of the side in front.

    **Arguments:** those of `SumArrays`, and

    - `dtypes`: what results are rounded to.
    """
    arrays = SumArrays(programs, side, list(wanted), layout, args)
    sizes = Sizes(side, arrays.length, arrays.other, tuple(arrays.widths))
    found = arrays.planned(dict(zip(side.kinds, sizes.padded)), ft.partial(Rows, layout))
    found["operands"] = shifted(found["operands"])
    plan = Plan(**found, sizes=sizes, dtypes=dtypes, interpreted=interpreted)
    out = [abstract(args[-1], x.written, dtypes[o]) for o, x in plan.results.items()]
    run = triton.kernel(
        lambda *refs: Program(plan, refs).run(),
        out,
        plan.count,
        f"eqattn_sum_{'rows' if side.kinds == 'rk' else 'columns'}",
        sizes.warps,
        STAGES,
        interpreted,
    )
    done = dict(zip(plan.wanted, run(*arrays.inputs(plan))))
    return [plan.results[o].blocks(done[o]) for o in wanted]


def _pair_sums(
    layout: BlockGrid,
    args: Sequence[Any],
    interpreted: bool,
    programs: dict[int, SumProgram],
    side: Side,
    wanted: dict[int, tuple[int, ...]],
    dtypes: dict[int, Any],
) -> list[Any]:
    """A result that has a number for each pair, by one kernel. Arguments are those of `_sums`."""
    ((o, axes),) = wanted.items()
    arrays = PairArrays(programs, side, o, layout, args, axes)
    sizes = PairSizes(side, arrays.rows, arrays.other, arrays.heads, tuple(arrays.widths))
    found = arrays.planned(dict(zip(side.kinds, sizes.padded)), ft.partial(Rows, layout))
    found["operands"] = shifted(found["operands"])
    whole = {x.axis for x in layout.tokens} >= {side.own, side.other}
    out = sizes.tiles[0] * sizes.own, sizes.padded[1]
    plan = PairPlan(
        **found,
        sizes=sizes,
        dtypes=dtypes,
        interpreted=interpreted,
        visit=arrays.visit(sizes.tiles, arrays.heads),
        written=Tiles(layout, arrays.kept, arrays.rows, out, whole, (1, 1)),
    )
    run = triton.kernel(
        lambda *refs: PairSums(plan, refs).run(),
        [abstract(args[-1], plan.written.written, dtypes[o])],
        plan.count,
        "eqattn_sum_pairs",
        sizes.warps,
        STAGES,
        interpreted,
    )
    (x,) = run(*arrays.inputs(plan))
    return [arrays.result(plan.written.blocks(x))]
