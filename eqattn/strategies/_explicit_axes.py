"""What the types of arrays tell about the devices, where axes of a mesh are explicit."""

from typing import Any

import equinox as eqx
import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from .._config.partition import names_of
from .._jax import explicit_axes, sharding_of
from .._problem.storage import as_stored


def known_partition(q: Array, *others: Any) -> tuple[Any, ...]:
    """The mesh axes that shard the batch, those that shard the heads, and those that shard no
    array, as the types of the arrays of an explicit mesh tell.
    """
    batch, *rest, _, heads, _ = (None, *sharding_of(q))[-max(4, q.ndim) :]
    arrays = [x for x in jax.tree.leaves((q, *others)) if eqx.is_array(x)]
    entries = [e for x in arrays for e in sharding_of(x)]
    used = {n for e in entries for n in names_of(e)}
    idle = tuple(n for n in explicit_axes(q) if n not in used)
    return None if any(rest) else batch, heads, idle


def result_specs(q: Array, v: Any) -> dict[str, Any]:
    """How the results of a call are sharded, by name: as the query is."""
    *batch, t, heads, _ = sharding_of(q)
    numbers = as_stored(v).arrays[:1]  # There are none if the values are part of the keys.
    features = sharding_of(numbers[0])[-1] if numbers else None
    rows, values = P(*batch, t, heads), P(*batch, t, heads, features)
    return {
        "outputs": values,
        "weights": P(*batch, heads, t, None),
        "logsumexp": rows,
        "carry": (values, rows, rows),
        "max_logits": rows,
    }
