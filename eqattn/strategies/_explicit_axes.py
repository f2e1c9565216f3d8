"""Calls whose arrays have explicit mesh axes: what types tell of them, and how they run without."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AxisType, PartitionSpec as P
from jaxtyping import Array

from .._jax import explicit_axes, mapped_axes, names_of, sharding_of, without_explicit_axes
from .._problem.storage import as_stored


def known_partition(declared: tuple[Any, Any], q: Array, *others: Any) -> tuple[Any, ...]:
    """Reads from the types of arrays on an explicit mesh which axes shard the batch, which shard
    the heads, and which shard no array.

    Types do not tell what automatic axes of the same mesh shard. Those among the `declared` ones,
    for the batch and for the heads, are taken at their word, as on a mesh of automatic axes.
    """
    mesh = jax.typeof(q).sharding.mesh
    batch, *rest, _, heads, _ = (None, *sharding_of(q))[-max(4, q.ndim) :]
    of_types = (None if any(rest) else batch, heads)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    automatic = [[n for n in names_of(e) if kinds.get(n) == AxisType.Auto] for e in declared]
    shards = [(*names_of(own), *more) for own, more in zip(of_types, automatic)]
    arrays = [x for x in jax.tree.leaves((q, *others)) if eqx.is_array(x)]
    entries = [e for x in arrays for e in sharding_of(x)]
    used = {n for e in entries for n in names_of(e)}
    hidden = mapped_axes(mesh)  # these are in use, by an axis of `jax.vmap`
    idle = tuple(n for n in explicit_axes(q) if n not in used | hidden)
    return *shards, idle


def result_specs(q: Array, features: Any = None) -> dict[str, Any]:
    """The specs of all results by name, if they are sharded like the query. The `features` are the
    mesh axes that shard those of the values.
    """
    *batch, t, heads, _ = sharding_of(q)
    rows, values = P(*batch, t, heads), P(*batch, t, heads, features)
    return {
        "outputs": values,
        "weights": P(*batch, heads, t, None),
        "logsumexp": rows,
        "carry": (values, rows, rows),
        "max_logits": rows,
    }


def sharded_as_query(run: Callable, args: tuple, wanted: Sequence[str]) -> dict:
    """Calls `run` where the compiler propagates shardings. Results are sharded like the query."""
    _, q, _, v, _ = args
    numbers = as_stored(v).arrays[:1]  # There are none if the values are part of the keys.
    specs = result_specs(q, sharding_of(numbers[0])[-1] if numbers else None)
    return without_explicit_axes(run, args, q, {name: specs[name] for name in wanted})
