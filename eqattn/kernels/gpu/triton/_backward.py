"""Sums over the live pairs of a grid as kernels in Pallas Triton: the gradients of queries, keys
and values.

A program has some queries or some keys of one block, and adds up the gradients of these over the
other side. So no two programs add to one number, and results are the same in each run.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from ...._sweep.grid import FULL, PARTIAL
from .._diagonals import DiagonalOperand
from .._lists import Visit
from .._operands import divided, rounded_up, ROWS, Side
from .._operations import Value
from .._plans import SumPlan
from .._program import Run
from .._sum_program import SumProgram
from . import _triton as triton
from ._forward import power_of_two
from ._rows import along_diagonals, finite, is_near, value_of


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
