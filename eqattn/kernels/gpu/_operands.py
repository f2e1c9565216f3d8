"""The arrays of a visit as a kernel reads them: the axes of the grid in one, then a block.

A kernel is one program for each tile of rows. Whatever its grid has of batch axes, an array lies in
memory as `[places, ...]`, and `Places` finds the place of a program and a column in it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._sweep.grid import COL, GridLayout, ROW
from ._operations import Value
from ._pair_program import PairProgram


WARPGROUP = 64
"""How many rows one warpgroup multiplies at once."""

TILE = 2 * WARPGROUP
"""The rows of a program: two warpgroups multiply, in turn."""


def padded(x: Any, axis: int, n: int) -> Any:
    """An array with zeros behind it, to the length `n` of an axis."""
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


def scale_of(programs: dict[int, PairProgram], layout: GridLayout) -> int | None:
    """The argument that is the scale in every class of block, and one number for all blocks."""
    scale, *others = {program.scale for program in programs.values()}
    return None if others or scale is None or layout.in_axes[scale] else scale


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How a block of the grid is cut and padded for the kernel.

    **Arguments:**

    - `rows`, `keys`, `dim`, `width`: of a block, of a query and of a value, as they are given.
    """

    rows: int
    keys: int
    dim: int
    width: int

    @property
    def tile_k(self) -> int:
        """The keys that are multiplied at once: fewer where rows of them are long, for registers
        and shared memory hold as many numbers.
        """
        most = 128 if max(self.padded_dim, self.padded_width) <= 128 else 64
        return min(most, rounded_up(self.keys, 64))

    @property
    def stages(self) -> int:
        """How many tiles of keys and values shared memory holds."""
        return 4 if max(self.padded_dim, self.padded_width) <= 64 else 2

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
    """Which side of the pairs a program has one block of. It visits the live blocks of the other.

    **Arguments:**

    - `own`, `other`: the axes of the grid.
    - `kinds`: the kinds of what varies with them, in this order: a program holds pairs
        `[own, other]`.
    """

    own: int
    other: int
    kinds: str


ROWS = Side(ROW, COL, "rk")
COLUMNS = Side(COL, ROW, "kr")


@dataclasses.dataclass(frozen=True)
class Places:
    """Where a program is on the grid: the index on each batch axis, and on that of its side."""

    layout: GridLayout
    side: Side
    at: dict[int, Any]

    @classmethod
    def of(cls, layout: GridLayout, side: Side, element: Any, own: Any) -> "Places":
        """**Arguments:** which batch element, of all batch axes in one, and which block."""
        at: dict[int, Any] = {side.own: own}
        for axis in reversed(layout.batch):
            n = jnp.int32(layout.grid[axis])
            if layout.grid[axis] == 1:
                at[axis] = jnp.int32(0)
            else:
                at[axis], element = lax.rem(element, n), lax.div(element, n)
        return cls(layout, side, at)

    @classmethod
    def of_rows(
        cls,
        layout: GridLayout,
        side: Side,
        tiles: int,
        order: Any,
        program: Any,
        warpgroup: Any,
    ) -> tuple["Places", Any]:
        """Where the rows of a warpgroup are, or its keys, and the first of them in their block.

        **Arguments:**

        - `tiles`: how many programs a block has.
        - `order`: the blocks of the side in the order in which they are begun; None if that is the
            order in which they lie.
        - `program`, `warpgroup`: the indices.
        """
        rest, element = divided(program, math.prod(layout.shape(layout.batch)))
        own, tile = divided(rest, tiles)
        own = own if order is None else order[own]
        start = tile * jnp.int32(TILE) + warpgroup * jnp.int32(WARPGROUP)
        return cls.of(layout, side, element, own), start

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

    - `x`, `axes`: the array, with these axes of the grid in front of its blocks, `[keys|1,
        rows|1]`, `[keys, heads|1, queries|1]`, `[rows]`, `[keys]`, or of no pair at all.
    - `layout`, `side`: of the visit.
    - `lengths`: of a block of rows (`"r"`) and of keys (`"k"`), as the kernel pads them.

    `kind` is that of `Value`, or None for a vector that no pair indexes. `array` is what the kernel
    is given, `[places, own, other]` without the axes that it does not vary with.
    """

    def __init__(
        self,
        x: Any,
        axes: tuple[int, ...],
        layout: GridLayout,
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
        """Whether a program reads it anew in each tile, though it is not staged."""
        return self.side.other in self.axes or self.both

    def value(self, x: Any) -> Value:
        """What the block function is given, from what was loaded."""
        if self.kind is None:
            return Value("", None, x)
        if self.bool:
            x = x != 0
        elif jnp.issubdtype(self.dtype, jnp.floating):
            x = x.astype(jnp.float32)
        return Value(self.kind, x)

    def read(self, ref: Any, place: Any, own: Any, other: Any, tile: int) -> Value:
        """Its part of a tile, from global memory.

        **Arguments:**

        - `ref`: the `array`. `place`: which block of it.
        - `own`, `other`: where the tile begins on either side.
        - `tile`: its length on the other side.
        """
        from . import _mosaic as mosaic

        if self.kind is None:
            return self.value(tuple(ref[place, i] for i in range(self.array.shape[1])))
        if self.kind == "":
            return self.value(ref[place])
        mine = mosaic.ds(own, WARPGROUP)
        if not self.both:
            return self.value(mosaic.load(ref.at[place, mine], "own"))
        return self.value(mosaic.load(ref.at[place, mine, mosaic.ds(other, tile)], "pairs"))

    @property
    def by_piece(self) -> bool:
        """Whether it differs from one of the others to the next."""
        return self.kind is not None and self.side.kinds[1] in self.kind

    def read_staged(self, ref: Any) -> Value:
        """Its part of a tile, from shared memory."""
        from . import _mosaic as mosaic

        return self.value(mosaic.load(ref, "other"))
