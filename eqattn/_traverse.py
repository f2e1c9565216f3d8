"""Visiting the live blocks of a grid: the loops that sweeps and the softmax fold share.

Nothing here is ever differentiated, so loop bounds may depend on data.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ._axes import COL as COL, ROW as ROW
from ._compat import vary, varying_axes


EMPTY, PARTIAL, FULL = 0, 1, 2
CORNER = 3  # partial, and no key of the later half is visible to the first rows


@dataclasses.dataclass(frozen=True)
class Layout:
    """The grid, the `(columns, rows)` of one block of logits, and the grid axes of each operand
    and of the table of live blocks.

    The table holds `EMPTY`, `PARTIAL` or `FULL` per block; without one every pair is visited. If
    there is a `corner`, of so many rows, it may hold `CORNER`.
    In a `ring`, the grid is one device's: its rows and its columns. What has both axes holds the
    columns of all devices. `fused`: a transpose finds all its results in one visit of the grid;
    else those of columns in one and the others in another. `ragged`: batch elements are visited one
    by one wherever they lie on one device, however small: their live columns differ. `kernel`: the
    code for the visits that a kernel knows, as from `AbstractExact.kernel`.

    `pages`: sizes of further axes `0, 1, ...`, which are not visited in order: the index on axis
    `i` is what operand `lookups[i]` holds for the pair.
    """

    grid: tuple[int, ...]
    block: tuple[int, int]
    in_axes: tuple[tuple[int, ...], ...]
    table_axes: tuple[int, ...] | None = None
    ring: Any = None
    fused: bool = True
    ragged: bool = False
    kernel: str = ""
    pages: tuple[int, ...] = ()
    lookups: tuple[int, ...] = ()
    corner: int = 0

    def size(self, axis: int) -> int:
        return self.pages[axis] if axis >= 0 else self.grid[axis]

    def shape(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        devices = 1 if self.ring is None or not {ROW, COL} <= set(axes) else self.ring.size
        return tuple(self.size(a) * (devices if a == COL else 1) for a in axes)

    def only(self, kept: Sequence[int]) -> "Layout":
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


def _loop(lo, hi, body, state):
    if isinstance(lo, int) and isinstance(hi, int) and hi - lo == 1:
        return body(lo, state)
    return lax.fori_loop(jnp.int32(lo), jnp.int32(hi), body, state)


def _itinerary(table: Any, classes: Sequence[int]) -> tuple[Array, list[Array]]:
    """Per row: its columns sorted by class, and where each class ends."""
    here = lax.broadcasted_iota(jnp.int32, table.shape, table.ndim - 1)
    _, order = lax.sort((-table, here), num_keys=1)
    ends = [jnp.sum(table >= c, -1, dtype=jnp.int32, keepdims=True) for c in classes]
    return order, ends


def traverse(
    steps: dict[int, Callable],
    layout: Layout,
    args: Sequence,
    start: Sequence,
    axes: Sequence[tuple[int, ...]],
    *,
    finish: Callable = list,
    vectorise: bool,
    into: Sequence | None = None,
) -> list:
    """Visits the live pairs: rows outside, their live columns inside, full blocks first.

    **Arguments:**

    - `steps`: per class of block, a function `(accumulator blocks, operand blocks) -> blocks`. On
        a grid of one pair the accumulators are None, and the blocks returned finished.
    - `start`, `axes`: what a block of each accumulator holds at first, and the grid axes it keeps.
    - `finish`: what becomes of the accumulators' blocks once their row is complete; only for
        accumulators that keep every axis but the columns.
    - `vectorise`: whether the batch axes stay whole in the blocks instead of being looped over.
        What the compiler partitions over devices must not be looped over.
    - `into`: accumulators of an earlier visit to go on with (None: a new one). Nothing is finished.
    """
    table, operands = layout.without_corners(args)
    classes = sorted(steps, reverse=True)
    batch = () if vectorise else layout.batch
    columns = layout.grid[COL]
    mixed = varying_axes(*args)
    single = math.prod(layout.shape((*batch, ROW, COL))) == 1
    if into is None and table is None and single and not (layout.pages and any(map(moves, axes))):
        at = dict.fromkeys((*batch, ROW, COL), 0)
        for i, lookup in enumerate(layout.lookups):
            at[i] = pick(operands[lookup], layout.in_axes[lookup], at)
        new = steps[classes[0]](None, [pick(x, a, at) for x, a in zip(operands, layout.in_axes)])
        return [
            y.reshape(layout.shape(a) + x.shape)
            for x, y, a in zip(jax.eval_shape(finish, start), new, axes)
        ]

    def filled(axes, block):
        return vary(jnp.broadcast_to(block, layout.shape(axes) + block.shape), mixed)

    complete = [  # after one row
        into is None and {ROW, *batch} <= set(a) and not moves(a) for a in axes
    ]
    whole = [tuple(a for a in x if a in layout.batch and a not in batch) for x in axes]
    fresh = [filled(a, block) for a, block in zip(whole, start)]
    done = [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(finish, start)]
    accumulators = [filled(a, x if once else y)
                    for a, x, y, once in zip(axes, done, start, complete)]  # fmt: skip
    if into is not None:
        accumulators = [x if old is None else old for x, old in zip(accumulators, into)]
    order, ends = None, []
    table_axes = layout.table_axes or ()
    if table is not None:
        if vectorise:
            lead = tuple(range(table.ndim - 2))
            least, most = table.min(lead), table.max(lead)
            table = jnp.where(least == FULL, FULL, jnp.where(most == EMPTY, EMPTY, PARTIAL))
            table_axes = (ROW, COL)
        order, ends = _itinerary(table, classes)
        order, ends = vary(order, mixed), [vary(x, mixed) for x in ends]

    def row(at: dict, accs: list) -> list:
        near = [x if moves(a) else pick(x, a, at) for x, a in zip(operands, layout.in_axes)]
        local = [
            new if once else x if moves(a) else pick(x, a, at)
            for x, a, new, once in zip(accs, axes, fresh, complete)
        ]

        def visit(step, t, local):
            here = {**at, COL: t if order is None else pick(order, table_axes, {**at, COL: t})}
            for i, lookup in enumerate(layout.lookups):
                here[i] = pick(near[lookup], layout.in_axes[lookup], here)
            blocks = [pick(x, a, here) if moves(a) else x for x, a in zip(near, layout.in_axes)]
            old = [pick(x, a, here) if moves(a) else x for x, a in zip(local, axes)]
            new = step(old, blocks)
            return [put(x, a, here, y) if moves(a) else y for x, a, y in zip(local, axes, new)]

        lo = 0
        for n, c in enumerate(classes):
            hi = pick(ends[n], table_axes, {**at, COL: 0}) if ends else columns
            local = _loop(lo, hi, ft.partial(visit, steps[c]), local)
            lo = hi
        local = finish(local) if into is None else local
        return [x if moves(a) else put(old, a, at, x) for old, x, a in zip(accs, local, axes)]

    def nest(left: list, at: dict, accs: list) -> list:
        if not left:
            return row(at, accs)
        a, *left = left
        return _loop(0, layout.grid[a], lambda i, accs: nest(left, {**at, a: i}, accs), accs)

    return nest([*batch, ROW], {}, accumulators)
