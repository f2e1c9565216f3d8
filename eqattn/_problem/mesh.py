"""Folds over several devices: the mesh axes that are made manual, and what each device holds."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, reshard
from jaxtyping import Array

from .._jax import automatic, explicit_axes, is_narrow, names_of, varying_axes
from .._sweep.grid import BATCH, COL, HEAD, ROW
from ..masks._base import leaf_terms
from .storage import AbstractStored


@dataclasses.dataclass(frozen=True)
class ManualAxes:
    """The axes of a mesh that are made manual for a fold, and what they shard.

    **Arguments:**

    - `mesh`: the mesh of the context in which the fold is called, or one given by the caller.
    - `batch`, `heads`: the axes that shard the grid's batch elements and key/value heads.
    - `tokens`: the axis of a ring. It shards rows, and the columns of arrays without rows.
    - `others`: the axes that shard nothing.
    - `group`: the axis over which tokens are exchanged for heads. Outside of the fold it shards
        tokens, next to the axis of a ring. In the fold, each of its `n` devices has every `n`-th
        head. So heads that are sharded over other axes stay on their devices.
    """

    mesh: Any
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    group: tuple[str, ...] = ()

    @property
    def names(self) -> set[str]:
        """The names of all these axes."""
        return {*self.batch, *self.heads, *self.tokens, *self.others, *self.group}

    @property
    def size(self) -> int:
        """The number of devices that exchange tokens for heads."""
        return math.prod(self.mesh.shape[n] for n in self.group)

    def parts(self, axis: int) -> int:
        """The number of devices that a grid axis is sharded over."""
        names = {BATCH: self.batch, HEAD: (*self.heads, *self.group)}.get(axis, self.tokens)
        return math.prod(self.mesh.shape[n] for n in names)

    def partition(self, axes: tuple[int, ...], at_rest: bool = False) -> P:
        """How an array with these grid axes is spread over the devices in the fold, or outside of
        it if `at_rest`. With an exchange, an array's heads have two axes, split by `split_axis`.
        """
        tokens = (*self.tokens, *self.group) if at_rest else self.tokens
        spread = {BATCH: self.batch, HEAD: self.heads, token_axis(axes): tokens}
        entries: list[Any] = []
        for a in axes:
            entries.append(spread.get(a) or (P.UNCONSTRAINED if at_rest else None))
            if a == HEAD and self.group:
                entries.append(None if at_rest else self.group)
        return P(*entries)

    def shard_map(
        self, fn: Callable[..., Any], in_axes: Any, out_axes: Sequence[Any]
    ) -> Callable[..., Any]:
        """Makes `fn` run on each device's part of arrays with the given grid axes.

        There is no explicit exchange of tokens for heads. An array is constrained to the sharding
        that it has at rest and then enters the fold with another, and the compiler moves it. So one
        axis of heads is split in two before the fold, `cut`, of which a device has one entry.
        """
        in_axes, n = tuple(in_axes), self.size

        def each(fn, tree, *rest):
            grid = lambda x: isinstance(x, tuple) and all(isinstance(a, int) for a in x)
            return jax.tree.map(fn, tree, *rest, is_leaf=grid)

        def rest(axes, x):
            spec = self.partition(axes, at_rest=True)
            return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

        def cut(axes, x):
            if n == 1 or HEAD not in axes:
                return x
            x = split_axis(x, axes.index(HEAD), n)
            return rest(axes, x) if ROW in axes or COL in axes else x

        def visit(*args):
            own = lambda axes, x: x.squeeze(axes.index(HEAD) + 1) if HEAD in axes else x
            outs = fn(*(each(own, in_axes, args) if n > 1 else args))
            if n > 1:
                outs = [jnp.expand_dims(x, a.index(HEAD) + 1) for x, a in zip(outs, out_axes)]
            return outs

        def run(*args):
            outs = shard_map_wide(
                visit,
                mesh=self.mesh,
                in_specs=each(self.partition, in_axes),
                out_specs=each(self.partition, list(out_axes)),
                names=self.names,
            )(*each(cut, in_axes, args))
            if n > 1:
                outs = [merged_axes(rest(a, x), a.index(HEAD)) for x, a in zip(outs, out_axes)]
            return outs

        return run


def shard_map_wide(
    fn: Callable[..., Any], *, mesh: Any, in_specs: tuple, out_specs: Any, names: set[str]
) -> Callable[..., Any]:
    """Makes `fn` run on each device's part of arrays, as `jax.shard_map` with these `axis_names`.

    The gradient of what several devices have is a sum over them. So narrow floats of which they
    have the same part cross into the map in float32, in which JAX then adds up.

    **Raises:** `ValueError` if a size is symbolic, as in an export with an open batch.
    """

    def crossing(spec: P, xs: Any) -> Any:
        named = {name for entry in spec for name in names_of(entry)}
        alone = all(mesh.shape[name] == 1 for name in names - named)
        wide = lambda x: x.astype(jnp.float32) if is_narrow(x) and not alone else x
        return jax.tree.map(wide, xs)

    def run(*args):
        shapes = [x.shape for x in jax.tree.leaves(args)]
        if mesh.size > 1 and not all(isinstance(n, int) for shape in shapes for n in shape):
            raise ValueError(
                f"Over the {mesh.size} devices of a mesh, sizes must be numbers, got {shapes}: JAX "
                "would end the process that loads this export. Export a program for each size."
            )
        dtypes = jax.tree.map(lambda x: x.dtype, args)
        wide = jax.tree.map(crossing, in_specs, args, is_leaf=lambda x: isinstance(x, P))
        return jax.shard_map(
            lambda *xs: fn(*jax.tree.map(lambda x, d: x.astype(d), xs, dtypes)),
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=names,
            # Checked if it is checked around this call.
            check_vma=bool(varying_axes(*jax.tree.leaves(args))),
        )(*wide)

    return run


def whole(tree: Any, mesh: Any, names: set[str]) -> Any:
    """Makes each device of a map over the axes `names` have all of the arrays, also where others
    stay automatic. In a map over one of three axes, one may gather from an array that an automatic
    axis shards. XLA (of jaxlib 0.10.2 and 0.12.0.1) ends the process there.
    """
    if names == set(mesh.axis_names):
        return tree
    everywhere = NamedSharding(mesh, P())
    place = lambda x: lax.with_sharding_constraint(x, everywhere) if eqx.is_array(x) else x
    return jax.tree.map(place, tree)


def distinct(tree: Any, manual: ManualAxes) -> tuple[list[Any], Callable[[Sequence], Any]]:
    """The arrays of a tree that all devices read, each once, and a function from those inside of a
    `jax.shard_map` to the tree. What is the same array outside is then the same one inside.
    """
    arrays, static = eqx.partition(tree, eqx.is_array)
    leaves, treedef = jax.tree.flatten(arrays)
    once = {id(x): x for x in leaves}
    where = [list(once).index(id(x)) for x in leaves]
    rebuilt = lambda new: eqx.combine(jax.tree.unflatten(treedef, [new[i] for i in where]), static)
    return whole(list(once.values()), manual.mesh, manual.names), rebuilt


def current_mesh(given: Any) -> Any:
    """The mesh of the context. Without one, it is the given mesh with all its axes automatic, or
    None.
    """
    context = jax.sharding.get_abstract_mesh()
    return context if not context.empty else given and automatic(given)


def lists_own_keys(problem: Any) -> bool:
    """Whether a mask lists keys, so that the mesh axes that shard batch and heads are made manual
    (see `listed_rows`). XLA decides how caches are sharded, and where `types_are_checked`.
    """
    if not any(term.selects for term in leaf_terms(problem.mask)):
        return False
    arrays = problem.query, problem.key, problem.value
    stored = any(isinstance(x, AbstractStored) for x in arrays)
    return not stored and not types_are_checked(problem)


def types_are_checked(problem: Any) -> bool:
    """Whether a call is inside of a `jax.shard_map` of the caller that checks types. There JAX 0.10
    and 0.12 cannot lower the gradient of a second checked one, over axes that are still automatic.
    """
    return bool(varying_axes(problem.query, problem.key, problem.value))


def on_mesh_of(x: Array, others: Any) -> Array:
    """An array, on the mesh of others whose types have explicit axes. An array that was made before
    `jax.set_mesh` has no mesh in its type. Then each device gets all of it.
    """
    if explicit_axes(x):
        return x
    for other in jax.tree.leaves(others):
        if isinstance(other, jax.Array) and explicit_axes(other):
            return reshard(x, NamedSharding(jax.typeof(other).sharding.mesh, P()))
    return x


def token_axis(axes: tuple[int, ...]) -> int:
    """The grid axis whose tokens are sharded in an array with these axes."""
    return ROW if ROW in axes else COL


def split_axis(x: Array, axis: int, n: int, outside: bool = False) -> Array:
    """Splits an axis in two. The inner one, or the outer one if `outside`, has size `n`."""
    sizes = (n, x.shape[axis] // n) if outside else (x.shape[axis] // n, n)
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])


def merged_axes(x: Array, axis: int) -> Array:
    """Merges an axis with the next one."""
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def with_kernel(
    place: ManualAxes | None, mesh: Any, partition: tuple, sizes: tuple[int, int]
) -> ManualAxes | None:
    """The manual axes that a kernel needs, as the compiler cannot split it over devices.

    **Arguments:**

    - `place`: the axes that are made manual anyway, or None.
    - `mesh`: the mesh of the metadata, which is used if the context has none.
    - `partition`: the names of the axes that shard the batch, of those that shard the heads, and of
        those known to shard nothing.
    - `sizes`: the sizes of the batch and of the key/value heads.

    **Returns:** the axes of `place` and those of `partition` that divide the sizes and are
    automatic here; None if there are none.
    """
    mesh = current_mesh(mesh) if place is None else place.mesh
    if mesh is None or mesh.empty:
        return place
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    free = [n for n, kind in kinds.items() if kind == AxisType.Auto]
    free = [n for n in free if place is None or n not in place.names]
    chosen = []
    *shards, idle = partition
    for names, size in zip(shards, sizes):
        kept = []
        for name in names_of(names):
            if name in free and size % mesh.shape[name] == 0:
                size //= mesh.shape[name]
                kept.append(name)
        free = [n for n in free if n not in kept]
        chosen.append(tuple(kept))
    alone = tuple(n for n in free if mesh.shape[n] == 1 or n in idle)
    if place is None and all(mesh.shape[n] == 1 for n in {*chosen[0], *chosen[1], *alone}):
        return None
    place = ManualAxes(mesh) if place is None else place
    return dataclasses.replace(place, batch=chosen[0], heads=chosen[1], others=alone)
