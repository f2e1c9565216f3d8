"""Which columns each row of a grid visits, in which order, and in which order rows are visited."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._sweep.grid import FULL, PARTIAL
from ..._sweep.loops import itinerary


def lists(table: Any, classes: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """The live columns of each row.

    **Arguments:**

    - `table`: the class of each pair of blocks, `[*, rows, columns]`. Where it is a NumPy array, so
        are the lists.
    - `classes`: the classes for which there is a block function.

    **Returns:** the rows, with the longest first; the columns of each row, `[*, rows, columns]`,
    with full blocks first; and how many columns are full and how many live, `[*, rows, 2]`.
    """
    if isinstance(table, np.ndarray):
        order = np.argsort(-table.astype(np.int32), axis=-1, kind="stable")
        full, live = ((table >= c).sum(-1) for c in (FULL, PARTIAL))
    else:
        # XLA would sort a table that is known while it compiles, in seconds.
        table = lax.optimization_barrier(table)
        order, ends = itinerary(table, (FULL, PARTIAL))
        full, live = (x[..., 0] for x in ends)
    xp = np if isinstance(table, np.ndarray) else jnp
    if FULL not in classes:
        full = xp.zeros_like(full)
    elif PARTIAL not in classes:
        live = full
    longest = live.reshape(-1, live.shape[-1]).max(0)
    rows = np.argsort(-longest, kind="stable") if xp is np else jnp.argsort(-longest, stable=True)
    counts = xp.stack([full, live], -1)
    return rows.astype(np.int32), order.astype(np.int32), counts.astype(np.int32)
