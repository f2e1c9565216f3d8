"""Running a fold on each device's part of its arrays."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec as P

from ._compat import automatic, varying_axes
from ._traverse import COL, ROW


BATCH, HEAD = -4, -3  # of the grid that a problem is cut into


@dataclasses.dataclass(frozen=True)
class Manual:
    """The axes of a mesh that are made manual for a fold, and what they shard.

    **Arguments:**

    - `mesh`: that of the context where the fold is called, or one given by the caller.
    - `batch`, `heads`: axes that shard the grid's batch elements and key/value heads.
    - `tokens`: the axis of a ring: it shards rows, and the columns of what has no rows.
    - `others`: axes that shard nothing.
    """

    mesh: Any
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def names(self) -> set[str]:
        return {*self.batch, *self.heads, *self.tokens, *self.others}

    def parts(self, axis: int) -> int:
        """Over how many devices a grid axis is sharded."""
        names = {BATCH: self.batch, HEAD: self.heads}.get(axis, self.tokens)
        return math.prod(self.mesh.shape[n] for n in names)

    def partition(self, axes: tuple[int, ...]) -> P:
        """How an array with these grid axes is spread over the devices."""
        spread = {BATCH: self.batch, HEAD: self.heads, ROW if ROW in axes else COL: self.tokens}
        return P(*[spread.get(a) or None for a in axes])

    def over(self, fn: Callable, in_axes: Any, out_axes: Sequence) -> Callable:
        """`fn` on each device's part of arrays with the given grid axes."""

        def specs(tree):
            grid = lambda x: isinstance(x, tuple) and all(isinstance(a, int) for a in x)
            return jax.tree.map(self.partition, tree, is_leaf=grid)

        def run(*args):
            return jax.shard_map(
                fn,
                mesh=self.mesh,
                in_specs=tuple(specs(tree) for tree in in_axes),
                out_specs=specs(out_axes),
                axis_names=self.names,
                check_vma=bool(varying_axes(*jax.tree.leaves(args))),  # as around us
            )(*args)

        return run


def with_kernel(
    place: Manual | None, mesh: Any, partition: tuple, sizes: tuple[int, int]
) -> Manual | None:
    """The manual axes that a kernel needs, which the compiler cannot split over devices.

    **Arguments:**

    - `place`: the axes that are made manual anyway, if any.
    - `mesh`: that of the metadata; the mesh of the context comes first.
    - `partition`: the names of axes that shard batch and heads, and of those known to shard
        nothing.
    - `sizes`: of the batch and of the key/value heads.

    **Returns:** the axes of `place` and those of `partition` that divide the sizes and are
    automatic here; None if there are none.
    """
    context = jax.sharding.get_abstract_mesh()
    if place is not None:
        mesh = place.mesh
    elif not context.empty:
        mesh = context
    if mesh is None or mesh.empty:
        return place
    mesh = mesh if place is not None or not context.empty else automatic(mesh)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    free = [n for n, kind in kinds.items() if kind == AxisType.Auto]
    free = [n for n in free if place is None or n not in place.names]
    chosen = []
    *shards, idle = partition
    for names, size in zip(shards, sizes):
        kept = []
        for name in (names,) if isinstance(names, str) else names or ():
            if name in free and size % mesh.shape[name] == 0:
                size //= mesh.shape[name]
                kept.append(name)
        free = [n for n in free if n not in kept]
        chosen.append(tuple(kept))
    alone = tuple(n for n in free if mesh.shape[n] == 1 or n in idle)
    if place is None and all(mesh.shape[n] == 1 for n in {*chosen[0], *chosen[1], *alone}):
        return None
    tokens = () if place is None else place.tokens
    return Manual(mesh, chosen[0], chosen[1], tokens, alone)
