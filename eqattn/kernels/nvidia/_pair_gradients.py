"""Gradients of what a score reads for each pair, such as a bias.

The gradient of a bias is the block of cotangents of logits itself, and not its product with a
matrix. It is summed over the axes that the bias does not have, such as the batch. A program has a
tile of the bias, visits the batch elements that read it, and writes their sum once.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._jax import Literal
from ..._sweep.differences import cut_diagonals_p
from ..._sweep.grid import BlockGrid, COL, FULL, ROW
from ._operands import divided, indices, Places, rounded_up, ROWS, Side
from ._operations import is_identity
from ._plans import listed_in_order, SumArrays, SumPlan, visited
from ._sum_program import Gradient, SumProgram


_BAND = 8
"""The most tiles of rows that neighbouring programs have. These read the same keys from the cache,
and other programs read the same rows. It was chosen by counting bytes, and not timed.
"""


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(v.aval.shape)


class PairSumProgram(SumProgram):
    """The block function of one class of blocks, for results that have a number for each pair."""

    by_side = False

    def _gradient(self, v: Any) -> Gradient | None:
        shared, (keys, rows) = False, self.layout.block
        while not isinstance(v, Literal) and _shape(v) != (keys, rows):
            eqn = self.made_by.get(v)
            if eqn is None:
                return None
            (x, *_), y = eqn.invars, v
            if eqn.primitive is lax.reduce_sum_p:
                if math.prod(_shape(x)) > math.prod(_shape(y)):
                    if shared or eqn.params["axes"] != (1,) or len(_shape(x)) != 3:
                        return None
                    shared = True
            elif not _keeps_order(eqn):
                return None
            v = x
        if isinstance(v, Literal):
            return None
        return Gradient(ROWS, v, None, False)

    def why_not(self, wanted: Sequence[int]) -> str:
        if reason := super().why_not(wanted):
            return reason
        eqns, _ = self.needed([self.gradient(i).pairs for i in wanted])
        if any(eqn.primitive is cut_diagonals_p for eqn in eqns):
            return "numbers that diagonals share"
        dots = self.dots([self.gradient(i).pairs for i in wanted])
        read = [i for eqn in dots for i in self.factors(eqn)]
        both = any(read.count(i) > 1 for i in self.cleaned_first)
        # A tile is cleaned before all products.
        return "a matrix that is read with and without what is not finite" if both else ""

    def fits(self, axes: Sequence[int]) -> bool:
        # Results do not have the axis of a single block.
        return all(a in axes or self.layout.grid[a] == 1 for a in (ROW, COL))


def one_each(wanted: Sequence[int]) -> list[tuple[Side, list[int]]]:
    """The results that each kernel computes: one."""
    return [(ROWS, [i]) for i in wanted]


def _keeps_order(eqn: Any) -> bool:
    """Whether an operation changes the shape of an array only, and no number and no order."""
    if eqn.primitive is lax.reshape_p:
        return eqn.params["dimensions"] is None
    if eqn.primitive in (lax.broadcast_in_dim_p, lax.squeeze_p):
        return math.prod(_shape(eqn.invars[0])) == math.prod(_shape(eqn.outvars[0]))
    return is_identity(eqn)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Where the tiles of a result lie that has a number for each pair.

    Where blocks are cut from tokens, the result is `[elements, heads, queries, keys]`, as a bias
    lies in memory. So XLA copies nothing. Otherwise it is `[blocks, 1, rows, keys]`.

    **Arguments:**

    - `layout`: the grid.
    - `kept`: the batch axes of the result.
    - `rows`: the number of rows that a block of the result has.
    - `lengths`: the numbers of rows and keys to which a block is padded.
    - `whole`: whether it is written as a bias lies in memory.
    - `multiples`: what the numbers of queries and keys there are rounded up to. A few keys are
        rounded up as queries are.
    """

    layout: BlockGrid
    kept: tuple[int, ...]
    rows: int
    lengths: tuple[int, int]
    whole: bool
    multiples: tuple[int, int]

    @property
    def group(self) -> int:
        """How many heads a block has in the whole result."""
        return self.rows // self.sides[0].block

    @property
    def sides(self) -> list[Any]:
        """The tokens of rows and of columns."""
        return [next((x for x in self.layout.tokens if x.axis == a), None) for a in (ROW, COL)]

    @property
    def written(self) -> tuple[int, ...]:
        """The shape of the array that a kernel writes."""
        if not self.whole:
            return math.prod(self.layout.shape((*self.kept, ROW, COL))), 1, *self.lengths
        queries, keys = self.sides
        elements = math.prod(self.layout.shape(self.kept))
        few, many = self.multiples
        rows = rounded_up(queries.count, few)
        columns = rounded_up(keys.count, many if keys.count > many else few)
        return elements, self.group, rows, columns

    def blocks(self, x: Any) -> Any:
        """Turns what a kernel wrote into blocks `[*kept, rows, columns, keys, rows of a block]`."""
        lead = self.layout.shape((*self.kept, ROW, COL))
        keys, rows = self.layout.block[0], self.rows
        if not self.whole:
            return jnp.swapaxes(x[:, 0, :rows, :keys], 1, 2).reshape(*lead, keys, rows)
        queries, columns = self.sides
        x = x[:, :, : queries.count, : columns.count]
        missing = [lead[-2] * queries.block - x.shape[2], lead[-1] * keys - x.shape[3]]
        x = jnp.pad(x, [(0, 0), (0, 0), *((0, n) for n in missing)])
        x = x.reshape(*lead[:-2], self.group, lead[-2], queries.block, lead[-1], keys)
        n = len(lead) - 2
        x = lax.transpose(x, (*range(n), n + 1, n + 3, n + 4, n, n + 2))
        return x.reshape(*lead, keys, rows)

    def element(self, places: Places) -> Any:
        """The index on the first axis of the array, for a program."""
        return places.place(self.kept if self.whole else (*self.kept, ROW, COL), places.at[COL])


@dataclasses.dataclass(frozen=True)
class PairVisit:
    """What a program with a tile of a result visits.

    **Arguments:**

    - `layout`: the grid.
    - `kept`: the batch axes of the result.
    - `chosen`: the other batch axes that the table has. Its lists say which elements are live.
    - `rest`: all other batch axes. All their elements are visited.
    - `tiles`: how many tiles a block of the result has along its rows and its columns.
    - `parts`: how many steps the heads take that share numbers.
    """

    layout: BlockGrid
    kept: tuple[int, ...]
    chosen: tuple[int, ...]
    rest: tuple[int, ...]
    tiles: tuple[int, int]
    parts: int

    @property
    def programs(self) -> int:
        """The number of programs."""
        return math.prod((*self.layout.shape((*self.kept, ROW, COL)), *self.tiles))

    @property
    def turns(self) -> int:
        """How many steps a program takes for each element on its list."""
        return self.parts * math.prod(self.layout.shape(self.rest))

    @property
    def most(self) -> int:
        """The most steps of a program."""
        return self.turns * math.prod(self.layout.shape(self.chosen))

    def place(self, program: Any) -> tuple[Places, Any, Any]:
        """Finds where a program is, without the axes over which it sums.

        **Returns:** its place, and which tiles it has along the rows and the columns of its block.
        """
        rows, columns = (self.layout.grid[a] * n for a, n in zip((ROW, COL), self.tiles))
        band = next(n for n in range(min(_BAND, rows), 0, -1) if rows % n == 0)
        left, row = divided(program, band)
        left, column = divided(left, columns)
        element, outer = divided(left, rows // band)
        row, row_tile = divided(outer * jnp.int32(band) + row, self.tiles[0])
        column, column_tile = divided(column, self.tiles[1])
        at = {ROW: row, COL: column, **indices(self.layout, self.kept, element)}
        return Places(self.layout, ROWS, at), row_tile, column_tile

    def live(self, plan: SumPlan, places: Places, listed: Sequence) -> tuple[Any, Any, Any]:
        """The fields `full`, `live` and `column` of a `Visit`, whose columns are the elements of
        the axes `chosen`.
        """
        if not listed:
            return jnp.int32(max(plan.programs) == FULL), jnp.int32(1), lambda at: jnp.int32(0)
        columns = jnp.int32(self.layout.grid[COL])
        return visited(plan, places, places.at[ROW] * columns + places.at[COL], listed)

    def part(self, step: Any) -> Any:
        """Which of the `parts` a step has."""
        return divided(step, self.parts)[1]

    def at(self, places: Places, column: Any, step: Any) -> Places:
        """Where a program is at a step."""
        step, turn = divided(divided(step, self.parts)[0], self.turns // self.parts)
        at = indices(self.layout, self.chosen, column(step))
        at |= indices(self.layout, self.rest, turn)
        return dataclasses.replace(places, at={**places.at, **at})


class PairArrays(SumArrays):
    """What a kernel is given for a result that has a number for each pair.

    **Arguments:** those of `SumArrays`, and

    - `axes`: the grid axes of the result.
    - `multiple`: the number of which the first row of a head must be a multiple.

    `rows` is the number of rows of a block that the kernel writes. `heads` is how many heads share
    these. It is 1 where the kernel cannot begin at the rows of each head. Then `apart` is how many
    heads XLA sums up.
    """

    def __init__(
        self,
        programs: dict[int, SumProgram],
        side: Side,
        wanted: int,
        layout: BlockGrid,
        args: Sequence[Any],
        axes: tuple[int, ...],
        multiple: int = 1,
    ):
        super().__init__(programs, side, [wanted], layout, args)
        self.own, self.streamed = [], [*self.own, *self.streamed]
        rows = math.prod(_shape(self.first.jaxpr.outvars[wanted])) // self.other
        together = rows % multiple == 0
        self.rows, self.apart = (rows, 1) if together else (self.length, self.length // rows)
        self.heads = self.length // self.rows
        of_table = (layout.table_axes or ()) if self.table is not None else ()
        self.axes, self.kept = axes, tuple(a for a in axes if a in layout.batch)
        gone = [a for a in layout.batch if a not in axes]
        self.chosen = tuple(a for a in gone if a in of_table)
        self.rest = tuple(a for a in gone if a not in of_table)
        self.of_lists = tuple(a for a in of_table[:-2] if a in axes)

    def planned(self, lengths: dict[str, int], place: Callable[..., Any]) -> dict[str, Any]:
        axes = None if self.table is None else self.of_lists
        return super().planned(lengths, place) | dict(table_axes=axes)

    def visit(self, tiles: tuple[int, int], parts: int) -> PairVisit:
        """What programs visit. Arguments are those of `PairVisit`."""
        return PairVisit(self.layout, self.kept, self.chosen, self.rest, tiles, parts)

    def lists(self) -> list[Any]:
        """The live elements of each pair of blocks; none where every pair is visited."""
        if self.table is None:
            return []
        axes = self.layout.table_axes or ()
        order = (*self.of_lists, ROW, COL, *self.chosen)
        table = self.table.transpose([axes.index(a) for a in order])
        table = table.reshape(*self.layout.shape(self.of_lists), -1, self._count)
        return listed_in_order(table, list(self.programs))

    @property
    def _count(self) -> int:
        return math.prod(self.layout.shape(self.chosen))

    def result(self, blocks: Any) -> Any:
        """The result of its blocks `[*axes, keys, rows]`."""
        (o,) = self.wanted
        lead = self.layout.shape(self.axes)
        if self.apart > 1:
            blocks = blocks.reshape(*blocks.shape[:-1], self.apart, -1).sum(-2)
        return blocks.reshape(*lead, *_shape(self.first.jaxpr.outvars[o]))
