"""The grid of blocks: its axes, the classes of blocks, and where arrays lie on it."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


BATCH, HEAD, ROW, COL = -4, -3, -2, -1


FEW_ROWS = 256
"""Of queries and heads: more of them, and not memory but the units that multiply set the pace."""


EMPTY, PARTIAL, FULL = 0, 1, 2
CORNER = 3  # partial, and no key of the later half is visible to the first rows


@dataclasses.dataclass(frozen=True)
class GridLayout:
    """The grid of a visit, what lies on it, and how it is visited.

    **Arguments:**

    - `grid`: the sizes of its axes, `(*batch, rows, columns)`. In a ring it is one device's: its
        rows and its columns, but an array with both axes holds the columns of all devices.
    - `block`: the `(columns, rows)` of one block of logits.
    - `in_axes`: the grid axes of each operand.
    - `table_axes`: the grid axes of the table, which holds `EMPTY`, `PARTIAL` or `FULL` for each
        block. Without a table every pair is visited.
    - `ring`: the hops, if columns rotate around a mesh axis.
    - `fused`: whether a transpose finds all its results in one visit of the grid. Else it finds
        those of columns in one visit and the others in another.
    - `ragged`: whether batch elements are visited one by one wherever they lie on one device,
        however small they are, as their live columns differ.
    - `lowering`: the code for the visits that it knows, as in `lowering.py`; None is `XLA`.
    - `stage`: which visit this is, so that a lowering recognises those that it knows: `"fold"`;
        `"tangent"`, the tangent of a fold; `"backward"`, the transpose of that; empty for others.
    - `pages`: the sizes of further axes `0, 1, ...`, which are not visited in order: the index on
        axis `i` is what operand `lookups[i]` holds for the pair.
    - `corner`: how many rows, the first ones, may see no key of the later half of a block. Where
        it is positive, the table may hold `CORNER`.
    """

    grid: tuple[int, ...]
    block: tuple[int, int]
    in_axes: tuple[tuple[int, ...], ...]
    table_axes: tuple[int, ...] | None = None
    ring: Any = None
    fused: bool = True
    ragged: bool = False
    lowering: Any = None
    stage: str = ""
    pages: tuple[int, ...] = ()
    lookups: tuple[int, ...] = ()
    corner: int = 0

    def size(self, axis: int) -> int:
        return self.pages[axis] if axis >= 0 else self.grid[axis]

    def shape(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        devices = 1 if self.ring is None or not {ROW, COL} <= set(axes) else self.ring.size
        return tuple(self.size(a) * (devices if a == COL else 1) for a in axes)

    def only(self, kept: Sequence[int]) -> "GridLayout":
        """With some of the operands."""
        ring = None if self.ring is None else self.ring.only(kept)
        in_axes = tuple(self.in_axes[i] for i in kept)
        lookups = tuple(kept.index(i) for i in self.lookups)
        return dataclasses.replace(self, in_axes=in_axes, ring=ring, lookups=lookups)

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(range(-len(self.grid), ROW))

    @property
    def listed(self) -> int:
        """How many entries a table (of one hop) has, or would have without batch axes."""
        axes = self.table_axes if self.ring is None else self.ring.table_axes
        return math.prod(self.size(a) for a in axes or (ROW, COL))

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of a table, whose rows are those of all batch elements if `ragged`."""
        columns = self.grid[COL]
        return (self.listed // columns if self.ragged else self.grid[ROW]), columns

    def split(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The table (or None) and the operands."""
        return (None, args) if self.table_axes is None else (args[0], args[1:])

    def without_corners(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """`split`, where a corner is not told from other partial blocks."""
        table, operands = self.split(args)
        if table is not None and self.corner:
            table = jnp.where(table == CORNER, PARTIAL, table)
        return table, operands


def moves(axes: tuple[int, ...]) -> bool:
    """Whether what has these axes changes with the column."""
    return any(a == COL or a >= 0 for a in axes)


def replaced(xs: Sequence, where: Sequence[int], by: Sequence) -> list:
    """`xs` with the entries at `where` exchanged."""
    new = dict(zip(where, by))
    return [new.get(i, x) for i, x in enumerate(xs)]


def _window(x: Any, axes: tuple[int, ...], at: dict) -> tuple[list, list]:
    """Start and size of the slice of `x` at the given grid indices."""
    start = [jnp.int32(at.get(a, 0)) for a in axes] + [jnp.int32(0)] * (x.ndim - len(axes))
    size = [1 if a in at else n for a, n in zip(axes, x.shape)] + list(x.shape[len(axes) :])
    return start, size


def pick(x: Any, axes: tuple[int, ...], at: dict) -> Any:
    """The block of `x` at the given grid indices; grid axes not in `at` are kept whole."""
    if not any(a in at for a in axes):
        return x
    start, size = _window(x, axes, at)
    kept = [n for a, n in zip(axes, size) if a not in at] + size[len(axes) :]
    return lax.dynamic_slice(x, start, size, allow_negative_indices=False).reshape(kept)


def put(x: Array, axes: tuple[int, ...], at: dict, block: Array) -> Array:
    """`x` with the block that `pick` gives exchanged."""
    if not any(a in at for a in axes):
        return block
    start, size = _window(x, axes, at)
    return lax.dynamic_update_slice(x, block.reshape(size), start, allow_negative_indices=False)
