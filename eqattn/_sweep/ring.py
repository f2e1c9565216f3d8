"""Visiting the columns of all devices of a ring. Rows stay; columns and what they collect rotate.

A ring is only another way to run the loops of a sweep. The derivatives of sweeps hold for visits in
all orders, so there is no derivative code here.

Visiting the columns of all devices of a mesh axis at once.

The columns are gathered, and each device visits its own rows. What columns collect is then summed
over the devices.

As a ring, this is only another way to run the loops of a sweep, so there is no derivative code
here. The gradient of a gathered column is an accumulator that is scattered.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._jax import jaxpr_as_fun, vary, varying_axes
from .grid import BlockGrid, COL, EMPTY, FULL, replaced, ROW


@dataclasses.dataclass(frozen=True)
class ColumnsOfDevices:
    """The columns of all devices along a mesh axis that is manual where the sweep runs.

    **Arguments:**

    - `axis`, `size`: the name of the mesh axis and its number of devices.
    - `classify`: a jaxpr that returns the table of a visit; None visits every pair.
    - `reads`: the indices of the operands that `classify` reads, as they are at the visit.
    - `table_axes`: the grid axes of the table.
    - `rank`: the number of grid axes that `classify` was traced for.
    """

    axis: str
    size: int
    classify: Any = dataclasses.field(default=None, kw_only=True)
    reads: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)
    table_axes: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)
    rank: int = dataclasses.field(default=0, kw_only=True)

    @property
    def together(self) -> int:
        """The number of devices whose columns one visit has."""
        return 1

    def only(self, kept: Sequence[int]) -> Any:
        """The same for a visit that has only the operands `kept`, `reads` among them."""
        return dataclasses.replace(self, reads=tuple(kept.index(i) for i in self.reads))

    def table(self, operands: Sequence, layout: BlockGrid) -> tuple:
        """The table of one visit, as a list of one or none, and its grid axes."""
        if self.classify is None:
            return (), None
        fn, table_axes = jaxpr_as_fun(self.classify), self.table_axes
        reads = [(operands[i], layout.in_axes[i]) for i in self.reads]
        for axis in range(-self.rank - 1, -len(layout.grid) - 1, -1):  # Axes added by vmap.
            mapped = [0 if axis in axes else None for _, axes in reads]
            if any(m == 0 for m in mapped):
                fn, table_axes = jax.vmap(fn, mapped), (axis, *table_axes)
        return fn(*[x for x, _ in reads]), table_axes


@dataclasses.dataclass(frozen=True)
class Gathering(ColumnsOfDevices):
    """Each device gathers the columns of all, in the order of the devices."""

    @property
    def together(self) -> int:
        return self.size


def _has_columns_only(axes: tuple[int, ...]) -> bool:
    """Whether an array is sharded by columns. One with rows, too, holds those of all devices."""
    return COL in axes and ROW not in axes


def gathered_traverse(
    steps: dict[int, Callable],
    layout: BlockGrid,
    args: Sequence,
    start: Sequence,
    axes: Sequence[tuple[int, ...]],
    *,
    finish: Callable = list,
    traverse: Callable,
) -> list:
    """Runs `traverse` over the columns of all devices, as the `Gathering` of the layout says.

    | axes | operand | accumulator |
    |---|---|---|
    | rows | stays | stays |
    | columns, not rows | is gathered | is summed over devices, each of which keeps its columns |
    | none | stays | stays, a sum over all columns |
    """
    gathering = layout.ring

    def gather(x, axes):
        return lax.all_gather(x, gathering.axis, axis=axes.index(COL), tiled=True)

    def scatter(x, axes):
        at = axes.index(COL)
        return lax.psum_scatter(x, gathering.axis, scatter_dimension=at, tiled=True)

    operands = [gather(x, a) if _has_columns_only(a) else x for x, a in zip(args, layout.in_axes)]
    table, table_axes = gathering.table(operands, layout)
    grid = (*layout.grid[:COL], layout.columns)
    whole = dataclasses.replace(layout, ring=None, grid=grid, table_axes=table_axes, known=None)
    new = traverse(steps, whole, [*table, *operands], start, axes, finish=finish)
    return [scatter(x, a) if _has_columns_only(a) else x for x, a in zip(new, axes)]


@dataclasses.dataclass(frozen=True)
class Rotation(ColumnsOfDevices):
    """The hops over a mesh axis that is manual where the sweep runs.

    At shift `s`, a device visits the columns of the device `s` places before it. It visits its own
    columns first, then the shifts `1 ... ahead`, then `-1 ... -behind`. In a ring of 4 with
    `ahead=2` and `behind=1`, device 0 visits the columns of the devices 0, 3, 2 and 1.

    **Arguments:** those of `ColumnsOfDevices`, whose visit is a hop, and

    - `ahead`, `behind`: how many hops columns travel up and down the ring.
    - `unroll`: whether the hops are written out instead of looped over.
    """

    ahead: int
    behind: int
    unroll: bool = False

    def move(self, xs: Sequence[Array], by: int) -> list[Array]:
        """Sends arrays `by` places up the ring."""
        to = [(i, (i + by) % self.size) for i in range(self.size)]
        return [lax.ppermute(x, self.axis, to) for x in xs]


def in_rows(rows: range, table: Sequence[Array], axes: Any, layout: BlockGrid) -> tuple:
    """A table in which all rows but these are empty, as a list of one, and its grid axes."""
    (whole,) = table or [jnp.full(layout.grid[ROW:], FULL, jnp.int8)]
    row = lax.broadcasted_iota(jnp.int32, whole.shape, whole.ndim + ROW)
    inside = (rows.start <= row) & (row < rows.stop)
    return [jnp.where(inside, whole, jnp.int8(EMPTY))], axes or (ROW, COL)


@dataclasses.dataclass(frozen=True)
class _RingVisit:
    """One device's visit of the columns of all devices.

    **Arguments:**

    - `steps`, `layout`, `args`, `start`, `axes`, `traverse`: as for `ring_traverse`.
    - `here`: the index of this device on the mesh axis of the ring.

    Its properties are lists of indices.
    """

    steps: dict[int, Callable]
    layout: BlockGrid
    args: Sequence
    start: Sequence
    axes: Sequence[tuple[int, ...]]
    traverse: Callable
    here: Array

    def _where(self, axes: Sequence[tuple[int, ...]], columns: bool, rows: bool) -> list[int]:
        return [i for i, a in enumerate(axes) if (COL in a) == columns and (ROW in a) == rows]

    @property
    def rides(self) -> list[int]:
        """The operands that ride along with the columns."""
        return self._where(self.layout.in_axes, columns=True, rows=False)

    @property
    def split(self) -> list[int]:
        """The operands that hold the columns of all devices."""
        return self._where(self.layout.in_axes, columns=True, rows=True)

    @property
    def returns(self) -> list[int]:
        """The accumulators that ride along with the columns, and are sent home at the end."""
        return self._where(self.axes, columns=True, rows=False)

    @property
    def slots(self) -> list[int]:
        """The accumulators that hold the columns of all devices."""
        return self._where(self.axes, columns=True, rows=True)

    @property
    def stays(self) -> list[int]:
        """The accumulators without columns."""
        return [i for i, a in enumerate(self.axes) if COL not in a]

    def visit(
        self, shift: Any, columns: Sequence, state: Sequence, rows: range | None = None
    ) -> tuple[list, list]:
        """Visits the columns of one hop, or some rows of it.

        **Returns:** the accumulators of the columns, of this visit alone, and all accumulators.
        """
        layout, args, axes, ring = self.layout, self.args, self.axes, self.layout.ring
        width = layout.grid[COL]
        at = (self.here - shift) % ring.size * width

        def mine(x, axes):
            return lax.dynamic_slice_in_dim(x, at, width, axes.index(COL))

        own = [mine(args[i], layout.in_axes[i]) for i in self.split]
        operands = replaced(args, [*self.rides, *self.split], [*columns, *own])
        table, table_axes = ring.table(operands, layout)
        if rows is not None:
            table, table_axes = in_rows(rows, table, table_axes, layout)
        local = dataclasses.replace(layout, ring=None, table_axes=table_axes, known=None)
        into = replaced([None] * len(axes), self.stays, [state[i] for i in self.stays])
        into = replaced(into, self.slots, [mine(state[i], axes[i]) for i in self.slots])
        new = self.traverse(self.steps, local, [*table, *operands], self.start, axes, into=into)
        put = [
            lax.dynamic_update_slice_in_dim(state[i], new[i], at, axes[i].index(COL))
            for i in self.slots
        ]
        return [new[i] for i in self.returns], replaced(new, self.slots, put)

    def walk(self, step: int, length: int, columns: list, state: list) -> tuple[list, list]:
        """Makes the hops `step, 2 step, ...` and sends home what the columns collected.

        Every move is issued before the visit that it can hide behind. So what columns collect
        travels one hop late: at hop `h` the sum up to hop `h - 1` arrives and joins the hop's own.
        """
        ring = self.layout.ring

        def hop(h, columns, total, state, last=False):
            ahead = columns if last else ring.move(columns, step)
            arrived = total if total is None else ring.move(total, step)
            total, state = self.visit(h * step, columns, state)
            if arrived is not None:
                total = [x + y for x, y in zip(arrived, total)]
            return ahead, total, state

        total, first = (None, 2) if self.returns else ([], 1)
        if first == 2 and length > 1:
            columns, total, state = lax.optimization_barrier(hop(1, columns, total, state))
        carry: Any = (columns, total, state)
        if length > first and (ring.unroll or length == first + 1):
            # Without the barriers, the moves of one hop mix with the visit of another, and some
            # have nothing to hide behind.
            for h in range(first, length):
                carry = lax.optimization_barrier(hop(h, *carry))
        elif length > first:
            carry, _ = lax.scan(
                lambda c, h: (hop(h, *c), None), carry, jnp.arange(first, length, dtype=jnp.int32)
            )
        _, total, state = hop(length, *carry, last=True)
        if total:
            total, state = lax.optimization_barrier((total, state))
        return ring.move(total, -step * length), state


def ring_traverse(
    steps: dict[int, Callable],
    layout: BlockGrid,
    args: Sequence,
    start: Sequence,
    axes: Sequence[tuple[int, ...]],
    *,
    finish: Callable = list,
    traverse: Callable,
) -> list:
    """Runs `traverse`, over the columns of all devices if the layout has a ring or gathers them.

    What an operand or an accumulator does in a ring follows from its grid axes:

    | axes | operand | accumulator |
    |---|---|---|
    | rows, not columns | stays | stays |
    | columns, not rows | rides along with its columns | rides along, and is sent home at the end |
    | both | holds the columns of all devices: each hop reads its own | each hop writes its own |
    | none | stays | stays, and is a sum over all hops |
    """
    ring = layout.ring
    if ring is None:
        return traverse(steps, layout, args, start, axes, finish=finish)
    if isinstance(ring, Gathering):
        return gathered_traverse(steps, layout, args, start, axes, finish=finish, traverse=traverse)
    here = lax.axis_index(ring.axis)
    ring_visit = _RingVisit(steps, layout, args, start, axes, traverse, here)
    returns, mixed = ring_visit.returns, varying_axes(*args)
    state: list = [None] * len(axes)
    for i in ring_visit.slots:
        empty = jnp.zeros(layout.shape(axes[i]) + start[i].shape, start[i].dtype)
        state[i] = vary(empty, mixed)
    home = [args[i] for i in ring_visit.rides]
    walks = [(step, n) for step, n in ((1, ring.ahead), (-1, ring.behind)) if n]
    departing = [ring.move(home, step) for step, _ in walks]
    # The second half of the device's own rows comes last, so that the way home hides behind it.
    half = layout.grid[ROW] // 2 if returns and walks else 0
    total, state = ring_visit.visit(0, home, state, range(half) if half else None)
    arriving = []
    for (step, length), columns in zip(walks, departing):
        # Without it, small columns might go on before this visit, and nothing would hide their
        # first move.
        columns, state = lax.optimization_barrier((columns, state))
        collected, state = ring_visit.walk(step, length, columns, state)
        arriving.append(collected)
    if half:
        rest, state = ring_visit.visit(0, home, state, range(half, layout.grid[ROW]))
        # Without it, what is done with the rest might be scheduled before the way home.
        *arriving, state = lax.optimization_barrier((*arriving, rest, state))
    for more in arriving:
        total = [x + y for x, y in zip(total, more)]
    return finish(replaced(state, returns, total))
