"""The arrays of a visit as a kernel reads them: one axis for all axes of the grid, then a block.

A kernel has one program for each tile of rows. An array lies in memory as `[places, ...]`, with all
its batch axes in one. `Places` finds the place in it for a program and a column.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._sweep.grid import BlockGrid, COL, ROW
from ..._sweep.tokens import joined, sizes_of
from ._chip import TILE, WARPGROUP
from ._operations import Value
from ._program import PairProgram


def padded(x: Any, axis: int, n: int) -> Any:
    """Pads an axis of an array with zeros at its end, to the length `n`."""
    if x.shape[axis] == n:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, n - x.shape[axis])
    return jnp.pad(x, widths)


def rounded_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def divided(x: Any, n: int) -> tuple[Any, Any]:
    """Quotient and remainder."""
    if n == 1:
        return x, jnp.int32(0)
    return lax.div(x, jnp.int32(n)), lax.rem(x, jnp.int32(n))


def first_row(tile: Any, warpgroup: Any) -> Any:
    """The first row of a warpgroup in its block, of which the program has one `tile`."""
    return tile * jnp.int32(TILE) + warpgroup * jnp.int32(WARPGROUP)


def scale_of(programs: dict[int, PairProgram], layout: BlockGrid) -> int | None:
    """The argument that is the scale in every class of block, and one number for all blocks."""
    scale, *others = {program.scale for program in programs.values()}
    return None if others or scale is None or layout.in_axes[scale] else scale


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How a block of the grid is cut and padded for the kernel.

    **Arguments:**

    - `rows`, `keys`: the numbers of rows and keys of a block, before they are padded.
    - `dim`, `width`: the sizes of a query and of a value, before they are padded.
    """

    rows: int
    keys: int
    dim: int
    width: int

    @property
    def tile_k(self) -> int:
        """The keys that are multiplied at once. There are fewer of them where vectors are long, as
        registers and shared memory hold a fixed number of numbers.
        """
        most = 128 if max(self.padded_dim, self.padded_width) <= 128 else 64
        return min(most, rounded_up(self.keys, 64))

    @property
    def stages(self) -> int:
        """How many tiles of keys and values shared memory holds."""
        return 4 if max(self.padded_dim, self.padded_width) <= 64 else 2

    @property
    def copied_apart(self) -> bool:
        """Whether a third warpgroup copies tiles. For longer vectors it would take registers that
        the others need; see `_forward.py`.
        """
        return max(self.padded_dim, self.padded_width) <= 128

    @property
    def padded_rows(self) -> int:
        return rounded_up(self.rows, TILE)

    @property
    def padded_keys(self) -> int:
        return rounded_up(self.keys, self.tile_k)

    @property
    def padded_dim(self) -> int:
        return rounded_up(self.dim, 64)

    @property
    def padded_width(self) -> int:
        return rounded_up(self.width, 64)


@dataclasses.dataclass(frozen=True)
class Side:
    """The side of the pairs of which a program has one block. It visits the live blocks of the
    other side.

    **Arguments:**

    - `own`, `other`: the axes of the grid.
    - `kinds`: the letters of the two sides in kinds, `"r"` for rows and `"k"` for keys. The own
        side comes first, as a program holds pairs `[own, other]`.
    """

    own: int
    other: int
    kinds: str


ROWS = Side(ROW, COL, "rk")
COLUMNS = Side(COL, ROW, "kr")


def indices(layout: BlockGrid, axes: Sequence[int], element: Any) -> dict[int, Any]:
    """The index on each of some axes of the grid, for an element that is counted over them."""
    at: dict[int, Any] = {}
    for axis in reversed(axes):
        at[axis] = jnp.int32(0)
        if layout.grid[axis] > 1:
            n = jnp.int32(layout.grid[axis])
            at[axis], element = lax.rem(element, n), lax.div(element, n)
    return at


@dataclasses.dataclass(frozen=True)
class Places:
    """Where a program is on the grid: its index on each batch axis, and on the axis of its side."""

    layout: BlockGrid
    side: Side
    at: dict[int, Any]

    @classmethod
    def of(cls, layout: BlockGrid, side: Side, element: Any, own: Any) -> "Places":
        """Finds the place of a program. **Arguments:** the batch element, counted over all batch
        axes, and the block of the side.
        """
        return cls(layout, side, {side.own: own, **indices(layout, layout.batch, element)})

    @property
    def block(self) -> Any:
        """The index of the block among all blocks of its side."""
        return self.place((*self.layout.batch, self.side.own))

    def with_other(self, other: Any) -> dict[int, Any]:
        """The index on each axis, at a block of the other side."""
        return {**self.at, self.side.other: other}

    def place(self, axes: Sequence[int], other: Any = None) -> Any:
        """The index of a block in an array with these axes of the grid, at a block of the other
        side.
        """
        where, index = self.with_other(other), jnp.int32(0)
        for axis in axes:
            index = index * jnp.int32(self.layout.grid[axis]) + where[axis]
        return index


class Operand:
    """What a block function reads of an array on the grid.

    **Arguments:**

    - `x`, `axes`: the array, with these axes of the grid in front of its blocks. A block is
        `[keys|1, rows|1]`, `[keys, heads|1, queries|1]`, `[rows]`, `[keys]`, or a vector that no
        pair indexes.
    - `layout`, `side`: the grid of the visit, and the side of its programs.
    - `lengths`: the lengths to which the kernel pads a block of rows (`"r"`) and one of keys
        (`"k"`).

    `kind` is the kind of its `Value`, or None for a vector that no pair indexes. `array` is what
    the kernel is given: `[places, own, other]`, without the sides with which it does not vary.
    """

    def __init__(
        self,
        x: Any,
        axes: tuple[int, ...],
        layout: BlockGrid,
        side: Side,
        lengths: dict[str, int],
    ):
        lead, block = x.shape[: len(axes)], x.shape[len(axes) :]
        self.axes, self.side, self.bool = axes, side, x.dtype == jnp.bool_
        places, (keys, rows) = math.prod(lead), layout.block
        if len(block) == 3:  # it is the same for the heads of a group, or for their queries
            heads = block[1] if block[1] > 1 else rows // block[2]
            x = jnp.broadcast_to(x, (*lead, keys, heads, rows // heads))
            block = (keys, rows)
        self.kind: str | None = None
        if len(block) == 2:
            varies = dict(r=block[1] > 1, k=block[0] > 1)
            self.kind = "".join(a for a in side.kinds if varies[a])
            if self.kind == "rk":
                x = jnp.swapaxes(x.reshape(places, keys, rows), 1, 2)
        elif not block:
            self.kind = ""
        elif ROW in axes or COL in axes:
            self.kind = "r" if ROW in axes else "k"
        sizes = dict(r=rows, k=keys)
        shape = block if self.kind is None else tuple(sizes[a] for a in self.kind)
        x = x.reshape(places, *shape)
        for axis, name in enumerate(self.kind or ""):
            x = padded(x, axis + 1, lengths[name])
        if self.bool:
            x = x.astype(jnp.int8 if self.both else jnp.int32)
        elif not self.both and jnp.issubdtype(x.dtype, jnp.floating):
            x = x.astype(jnp.float32)
        self.array, self.dtype = x, x.dtype

    @property
    def both(self) -> bool:
        """Whether it differs from pair to pair."""
        return self.kind is not None and len(self.kind) == 2

    @property
    def staged(self) -> bool:
        """Whether it travels with the blocks of the other side."""
        return self.kind == self.side.kinds[1]

    @property
    def moves(self) -> bool:
        """Whether a program reads it again in each tile, although it is not staged."""
        return self.side.other in self.axes or self.both

    def place(self, places: Places, other: Any) -> Any:
        """Where the block lies in the array, at a block of the other side."""
        return places.place(self.axes, other)

    transposed = False
    """Whether the array has queries before keys, and a program holds pairs `[keys, rows]`."""

    def at(self, place: Any, parts: dict[str, Any]) -> tuple:
        """Where a part of the block lies in the array.

        **Arguments:**

        - `place`: what `place` returned.
        - `parts`: the part of the rows (`"r"`) and that of the keys (`"k"`), as slices.
        """
        return place, *(parts[a] for a in self.kind or "")

    def value(self, x: Any) -> Value:
        """Turns what was loaded into an argument of the block function."""
        if self.kind is None:
            return Value("", None, x)
        if self.bool:
            x = x != 0
        elif jnp.issubdtype(self.dtype, jnp.floating):
            x = x.astype(jnp.float32)
        return Value(self.kind, x)

    def read(self, ref: Any, place: Any, own: Any, other: Any, tile: int) -> Value:
        """Reads the operand for a tile, from global memory.

        **Arguments:**

        - `ref`, `place`: the `array`, and the index of the block in it.
        - `own`, `other`: where the tile begins on the two sides.
        - `tile`: its length on the other side.
        """
        from .hopper import _mosaic as mosaic

        if self.kind is None:
            return self.value(tuple(ref[place, i] for i in range(self.array.shape[1])))
        if self.kind == "":
            return self.value(ref[place])
        mine, others = self.side.kinds
        parts = {mine: mosaic.ds(own, WARPGROUP), others: mosaic.ds(other, tile)}
        part = ref.at[self.at(place, parts)]
        if not self.both:
            return self.value(mosaic.load(part, "own"))
        return self.value(
            mosaic.load_transposed(part) if self.transposed else mosaic.load(part, "pairs")
        )

    @property
    def by_piece(self) -> bool:
        """Whether it varies along the other side, so that it is read for each piece of a tile."""
        return self.kind is not None and self.side.kinds[1] in self.kind

    def read_staged(self, ref: Any) -> Value:
        """Reads the operand for a tile, from shared memory."""
        from .hopper import _mosaic as mosaic

        return self.value(mosaic.load(ref, "other"))


class PairsOperand(Operand):
    """Numbers of all pairs of tokens, which a kernel reads where they lie.

    As blocks, they would be a copy, as large as all pairs are. `array` is
    `[elements, heads, queries, keys]` instead, and a block is a window of it.
    """

    def __init__(self, x: Any, axes: tuple[int, ...], layout: BlockGrid, side: Side, sizes: tuple):
        self.axes, self.side, self.bool, self.kind = axes, side, x.dtype == jnp.bool_, side.kinds
        self.heads, self.queries, self.keys = sizes
        self.group = layout.block[1] // self.queries
        x = joined(jnp.asarray(x), axes, sizes)
        x = x.reshape(-1, self.heads, *x.shape[-2:])
        self.array = x.astype(jnp.int8) if self.bool else x
        self.dtype = self.array.dtype

    @classmethod
    def of(
        cls,
        x: Any,
        axes: tuple[int, ...],
        layout: BlockGrid,
        side: Side,
        lengths: dict[str, int],
    ) -> "PairsOperand | None":
        """An array as such an operand, if a block is a window of all pairs that tiles divide."""
        sizes = sizes_of(x.shape[len(axes) :], layout)
        if sizes is None or (lengths["k"], lengths["r"]) != layout.block:
            return None
        if layout.block[1] != sizes[1] and sizes[1] % TILE:
            return None
        return cls(x, axes, layout, side, sizes)

    def place(self, places: Places, other: Any) -> Any:
        """The element, and the first query and key of the block."""
        lead, at = [a for a in self.axes if a not in (ROW, COL)], places.with_other(other)
        first = at[ROW] * jnp.int32(self.queries), at[COL] * jnp.int32(self.keys)
        return places.place(lead, other), *first

    def at(self, place: Any, parts: dict[str, Any]) -> tuple:
        """Where a part of the block lies, whose rows are those of one head."""
        (element, query, key), rows, keys = place, parts["r"], parts["k"]
        head, first = divided(rows.start, self.queries) if self.group > 1 else (0, rows.start)
        moved = lambda part, start: dataclasses.replace(part, start=start)
        head = jnp.int32(0) if self.heads == 1 else head
        return element, head, moved(rows, query + first), moved(keys, key + keys.start)

    @property
    def transposed(self) -> bool:
        return self.kind == "kr"
