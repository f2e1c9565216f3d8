"""What the kernels of `Ragged` for either compiler have in common: a program's place on the grid,
and its share of the blocks.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._sweep.grid import ROW
from ._lists import visited
from ._operands import divided, Places, ROWS
from ._plans import VisitPlan
from ._stored_arrays import StoredSizes


@dataclasses.dataclass(frozen=True)
class StoredPlan(VisitPlan):
    """A fold whose keys and values stay where they lie, on a `layout` with padded rows.

    **Arguments:** those of `VisitPlan`, and

    - `sizes`: how a block of the caches is cut.
    - `keys`: where each part of a key comes from.
    - `values`: where the values come from; empty where they are the first part of the keys.
    - `shares`: in how many parts the blocks of a row are cut.
    """

    sizes: StoredSizes
    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    shares: int

    @property
    def parts(self) -> int:
        """How many tiles a block of keys has."""
        return self.sizes.padded_keys // self.sizes.tile_k

    @property
    def places(self) -> int:
        """How many rows of blocks the grid has."""
        return math.prod(self.layout.shape((*self.layout.batch, ROW)))

    @property
    def count(self) -> int:
        """How many programs there are."""
        return self.shares * self.places * self.sizes.tiles


class StoredProgram:
    """One program of a kernel, on references.

    **Arguments:**

    - `plan`: the plan.
    - `refs`: the references, in the order in which they are taken here. A source of keys or values
        says how many `tables` and `arrays` it has.
    - `program`: the index of the program.
    """

    def __init__(self, plan: Any, refs: Sequence[Any], program: Any):
        self.plan, refs = plan, list(refs)
        take = lambda n: [refs.pop(0) for _ in range(n)]
        self.q = take(len(plan.keys))
        groups = plan.keys, plan.values
        self.tables = [take(group[0].tables) for group in groups if group]
        self.k, self.v = ([take(source.arrays) for source in group] for group in groups)
        listed = take(2) if plan.table_axes is not None else []
        self.given = {i: refs.pop(0) for i in plan.operands}
        self.results = refs
        layout, sizes = plan.layout, plan.sizes
        rest, self.tile = divided(program, sizes.tiles)
        rest, row = divided(rest, layout.grid[ROW])
        share, element = divided(rest, math.prod(layout.shape(layout.batch)))
        self.start = self.tile * jnp.int32(sizes.tile_r)
        self.head, _ = divided(self.tile, sizes.tiles // sizes.heads)
        self.places = Places.of(layout, ROWS, element, row)
        self.out = share * jnp.int32(plan.places) + self.places.place((*layout.batch, ROW))
        full, live, self.column = visited(plan, self.places, row, listed)
        full, live = (n * jnp.int32(plan.parts) for n in (full, live))
        each = lax.div(live + jnp.int32(plan.shares - 1), jnp.int32(plan.shares))
        self.first = share * each
        self.last = jnp.minimum(self.first + each, live)
        self.full = jnp.clip(full, self.first, self.last)

    def where(self, step: Any) -> tuple[Any, Any]:
        """The column of a step, and the first key of the tile in its block."""
        at, part = divided(step, self.plan.parts)
        return self.column(at), part * jnp.int32(self.plan.sizes.tile_k)
