"""Numbers that the diagonals of a block share, as kernels read them.

An array has one number for each difference of a query and a key. A kernel reads it for each pair,
at a place that a thread computes. A tile has a few hundred differences, so that most of its numbers
come from the first-level cache. As an array of pairs they would come from memory.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._sweep.differences import cut_diagonals_p
from ..._sweep.grid import BlockGrid
from ._operands import Operand, ROWS, Side, WARPGROUP
from ._operations import Value
from ._program import BlockProgram


def sizes_of(program: BlockProgram, i: int) -> tuple[int, int] | None:
    """How many queries of how many heads a block has, if its diagonals share the numbers of an
    argument. None if they do not.
    """
    for eqn in program.jaxpr.eqns:
        if eqn.primitive is cut_diagonals_p:
            if program.root(eqn.invars[0]) is program.jaxpr.invars[i]:
                return eqn.params["queries"], eqn.params["heads"]
    return None


class DiagonalOperand(Operand):
    """An operand with the numbers of all diagonals.

    **Arguments:**

    - `x`: the numbers, `[heads|1, n]` behind the `axes` of the grid.
    - `axes`, `layout`, `side`, `lengths`: as for `Operand`.
    - `queries`, `heads`: how many queries of how many heads a block has.

    `array` is one vector, with `numbers` of them for each head. A row of a tile reads them one
    behind the other. So they are there in the reverse order where a row of a tile has keys.
    """

    def __init__(
        self,
        x: Any,
        axes: tuple[int, ...],
        layout: BlockGrid,
        side: Side,
        lengths: dict[str, int],
        queries: int,
        heads: int,
    ):
        self.axes, self.side, self.bool = axes, side, x.dtype == jnp.bool_
        self.kind, self.queries, self.heads = side.kinds, queries, heads
        keys, rows = layout.block
        # What pads a block of rows or keys reads numbers beyond, which are dropped or masked.
        before, after = lengths["k"] - keys, lengths["r"] - rows
        x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (before, after)], mode="edge")
        self.least, (self.rows, self.numbers) = before + keys - 1, x.shape[-2:]
        if self.bool:
            x = x.astype(jnp.int32)
        elif jnp.issubdtype(x.dtype, jnp.floating):
            x = x.astype(jnp.float32)
        x = x[..., ::-1] if side is ROWS else x
        self.array, self.dtype = x.reshape(-1), x.dtype

    def _of_rows(self, place: Any, at: tuple, rows: Any) -> tuple[Any, Any]:
        """Where the numbers of some rows begin, and which of them is that of the first key."""
        (start, *last), of = at, place * jnp.int32(self.rows)
        if self.heads > 1:
            head = lax.div(rows, jnp.full_like(rows, self.queries))
            head = jnp.minimum(head, self.heads - 1)  # rows that pad a block have no head
            rows = rows - head * self.queries
            of = of + head if self.rows > 1 else of
        rows = jnp.minimum(rows, last[0]) if last else rows
        return of * self.numbers, rows + (start + self.least)

    def repeats(self, at: tuple, tile: int) -> bool:
        """Whether each row of a tile has the numbers of the row before, moved by one. The tile has
        rows of one head then, and as many queries.

        **Arguments:**

        - `at`: the further arguments of `cut_diagonals`.
        - `tile`: how many rows of a block it has.
        """
        return len(at) == 1 and (self.heads == 1 or self.queries % tile == 0)

    def places(self, place: Any, at: tuple, own: Any, other: Any, tile: int, others: Any) -> Any:
        """Finds where the numbers of a tile lie in the `array`. Those of its first column suffice,
        `[own]`, if the next columns have the numbers behind. Otherwise it finds all, `[own, tile]`.

        **Arguments:**

        - `place`: the index of the block on the grid axes of the operand.
        - `at`: the further arguments of `cut_diagonals`.
        - `own`: the rows or keys of the program, in the block of its side.
        - `other`, `tile`: where the tile begins on the other side, and its length.
        - `others`: a function that returns what lies on the other side, `[own, tile]`.
        """
        if self.side is ROWS:
            begin, i = self._of_rows(place, at, own)
            return begin + (self.numbers - 1) - i + other
        if self.repeats(at, tile):
            begin, i = self._of_rows(place, at, other)
            return begin + i - own
        begin, i = self._of_rows(place, at, others())
        return begin + i - lax.broadcast_in_dim(own, i.shape, [0])

    def tile(
        self, ref: Any, place: Any, at: tuple, own: Any, other: Any, tile: int, interpreted: bool
    ) -> Value:
        """Reads the numbers of a tile for a warpgroup of the kernels for Hopper.

        **Arguments:** those of `places` and of `Operand.read`.
        """
        from .hopper import _matrices as gathering, _mosaic as mosaic

        mine = mosaic.iota((WARPGROUP,), 0) + own
        others = lambda: mosaic.iota((WARPGROUP, tile), 1) + other
        first = self.places(place, at, mine, other, tile, others)
        repeats = self.repeats(at, WARPGROUP if self.side is ROWS else tile)
        return self.value(gathering.gathered(ref, first, tile, interpreted, repeats))
