"""The fold on devices that each hold some of the keys of every row, and all of the queries."""

import math
from typing import Any

import equinox as eqx
from jax.sharding import AxisType, PartitionSpec as P

from .._carry import Carry
from .._jax import compiled
from .._problem.mesh import current_mesh, shard_map_wide, whole, with_kernel
from .._problem.problem import cached, Problem
from .._problem.shards import merged_over, ShardedKeys, with_wide_sums
from ._fold import fold_on_device


def keys_place(axis: str, given: Any) -> tuple[int, Any]:
    """How many devices a mesh axis has, and the mesh if the axis is automatic there, else None.

    **Raises:** `ValueError`, with the remedy, without a mesh that has the axis.
    """
    mesh = current_mesh(given)
    if mesh is None or axis not in mesh.shape:
        found = "there is no mesh" if mesh is None else f"the mesh has {tuple(mesh.axis_names)}"
        raise ValueError(
            f"axis_name={axis!r} of Ragged names the axis over which keys are sharded, and "
            f"{found}. Call under jax.set_mesh, give the metadata a mesh, or call inside "
            "jax.shard_map; Ragged(metadata) reads keys on one device."
        )
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    if kinds[axis] == AxisType.Explicit:
        raise ValueError(
            f"axis_name={axis!r} of Ragged is an explicit axis of the mesh; make it automatic, or "
            "call inside of your own jax.shard_map."
        )
    return mesh.shape[axis], None if kinds[axis] == AxisType.Manual else mesh


@compiled  # outside of `jax.jit`, JAX cannot look at known arrays inside of a `shard_map`
@cached
def fold_over_keys(
    problem: Problem, *, axis, n, mesh, given_mesh, partition, lowering, **options
) -> Carry:
    """Folds a problem whose keys are sharded over the `n` devices of a mesh axis.

    **Arguments:**

    - `mesh`: the mesh in which the axis is automatic; None if it is manual already.
    - `given_mesh`, `partition`: as for `with_kernel`, for a lowering that XLA cannot split.
    - `options`: keyword arguments of `fold_on_device`.
    """
    problem = with_wide_sums(problem, lowering, "query")  # whose gradient is a sum over devices
    sharded = ShardedKeys.of(problem, axis, inside=mesh is None)
    sharded.check(n, axis, inside=mesh is None)

    def visit(sharded: ShardedKeys) -> Carry:
        own, manual = sharded.problem(axis, n), None
        if not lowering.splits_over_devices:
            sizes = math.prod(own.batch_shape), own.sizes[3]
            manual = with_kernel(None, given_mesh, partition, sizes)
        return merged_over(fold_on_device(own, lowering=lowering, manual=manual, **options), axis)

    if mesh is None:
        return visit(sharded)
    of_scores = lambda x: (x.rest.scores, x.consts)
    sharded = eqx.tree_at(of_scores, sharded, whole(of_scores(sharded), mesh, {axis}))
    arrays, static = eqx.partition(sharded, eqx.is_array)
    return shard_map_wide(
        lambda arrays: visit(eqx.combine(arrays, static)),
        mesh=mesh,
        in_specs=(arrays.specs(axis),),
        out_specs=P(),
        names={axis},
    )(arrays)
