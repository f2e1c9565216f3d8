"""Numbers that the diagonals of a block share, as kernels read them.

An array has one number for each difference of a query and a key. A kernel reads it for each pair,
at a place that a thread computes. A tile has a few hundred differences, so that most of its numbers
come from the first-level cache. As an array of pairs they would come from memory.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._sweep.grid import GridLayout
from ._operands import Operand, ROWS, Side, WARPGROUP
from ._operations import Value


class DiagonalOperand(Operand):
    """An operand with the numbers of all diagonals.

    **Arguments:**

    - `x`: the numbers, `[heads|1, n]` behind the `axes` of the grid.
    - `axes`, `layout`, `side`, `lengths`: as for `Operand`.
    - `queries`, `heads`: how many queries of how many heads a block has.

    `array` is one vector with all of them. `first` is the index in a row of `numbers` of the number
    of the first query and the first key, if that of the last key has the index 0.
    """

    def __init__(
        self,
        x: Any,
        axes: tuple[int, ...],
        layout: GridLayout,
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
        self.first, (self.rows, self.numbers) = before + keys - 1, x.shape[-2:]
        if self.bool:
            x = x.astype(jnp.int32)
        elif jnp.issubdtype(x.dtype, jnp.floating):
            x = x.astype(jnp.float32)
        self.array, self.dtype = x.reshape(-1), x.dtype

    def of_rows(self, place: Any, at: tuple, rows: Any) -> Any:
        """The places of the numbers of some rows of a block and its first key. Those of the next
        keys come before.

        **Arguments:**

        - `place`: the index of the block on the grid axes of the operand.
        - `at`: the further arguments of `cut_diagonals`.
        - `rows`: a row, or several.
        """
        (start, *last), of = at, place * jnp.int32(self.rows)
        if self.heads > 1:
            head = lax.div(rows, jnp.full_like(rows, self.queries))
            head = jnp.minimum(head, self.heads - 1)  # rows that pad a block have no head
            rows = rows - head * self.queries
            of = of + head if self.rows > 1 else of
        rows = jnp.minimum(rows, last[0]) if last else rows
        return of * self.numbers + rows + (start + self.first)

    def tile(
        self, ref: Any, place: Any, at: tuple, own: Any, other: Any, tile: int, interpreted: bool
    ) -> Value:
        """Reads the numbers of a tile for a warpgroup of the kernels for Hopper.

        **Arguments:** those of `of_rows` and of `Operand.read`.
        """
        from . import _gathering as gathering, _mosaic as mosaic

        mine, of_rows = mosaic.iota((WARPGROUP,), 0) + own, self.side is ROWS
        # A tile has the rows of one head, which are apart as its queries are.
        same = self.heads == 1 or self.queries % (WARPGROUP if of_rows else tile) == 0
        diagonal = same and len(at) == 1
        if of_rows:
            first, step = self.of_rows(place, at, mine) - other, -1
        elif diagonal:
            first, step = self.of_rows(place, at, other) - mine, 1
        else:
            shape = WARPGROUP, tile
            rows = self.of_rows(place, at, mosaic.iota(shape, 1) + other)
            first, step = rows - lax.broadcast_in_dim(mine, shape, [0]), 0
        return self.value(gathering.gathered(ref, first, step, tile, interpreted, diagonal))
