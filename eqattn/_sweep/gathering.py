"""Visiting the columns of all devices of a mesh axis at once.

The columns are gathered, and each device visits its own rows. What columns collect is then summed
over the devices.

As a ring, this is only another way to run the loops of a sweep, so there is no derivative code
here. The gradient of a gathered column is an accumulator that is scattered.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from .._jax import jaxpr_as_fun
from .grid import COL, GridLayout, ROW


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

    def table(self, operands: Sequence, layout: GridLayout) -> tuple:
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
    layout: GridLayout,
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
