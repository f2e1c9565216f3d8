"""The lengths of lists of pairs, and visits in turns where the lists are too long together.

All lists of a kernel lie in scalar memory. Where each batch element or head has a list of its own,
they may be too long together, but not each. Then a kernel visits some of them at a time.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ..._sweep.grid import COL, EMPTY, GridLayout, ROW


MOST_PAIRS = 2**17
"""The most pairs on the lists of a kernel. A pair takes four bytes. Scalar memory has 1
MiB from v4 on, as `smem_capacity_bytes` in `pltpu.get_tpu_info()` says, and these take half of it.
"""


def listed(layout: GridLayout, each: bool = False) -> int:
    """The most pairs of blocks that the lists of a visit may hold.

    A list that is made on the device has room for all pairs, or for as many as may be live. A known
    list holds only live pairs. There is one more pair for each row or column without a live one.

    **Arguments:**

    - `each`: whether to count the pairs of the longest part that is visited at once, where there
        are turns.
    """
    known, sides = layout.known, layout.sides
    if known is not None and layout.ring is None:
        live = (known.array != EMPTY).sum((-2, -1)).max()
        return int(np.prod(known.array.shape[:-2]) * (live + max(sides)))
    lists = layout.listed // math.prod(sides)
    pairs = math.prod(sides)
    # A gradient of what varies over pairs has all of them on its list.
    of_pairs = any({ROW, COL} <= {*axes} for axes in layout.in_axes)
    if layout.live_pairs and not of_pairs:
        pairs = min(pairs, layout.live_pairs + max(sides))
    return pairs if each and turning(layout) is not None else lists * pairs


def turning(layout: GridLayout) -> int | None:
    """The outermost axis whose elements have lists of their own that may be visited in turns."""
    if layout.known is not None or layout.ragged or layout.ring is not None:
        return None
    own = (layout.table_axes or ())[:-2]
    return next((a for a in own if layout.grid[a] > 1), None)


def in_turns(
    visit: Callable[[GridLayout, Sequence[Any]], list[Array]],
    layout: GridLayout,
    args: Sequence[Any],
    axes: Sequence[tuple[int, ...]],
    axis: int,
) -> list[Array]:
    """Visits the elements of a batch axis one after the other.

    **Arguments:**

    - `visit`: a function of a layout and its arguments that returns arrays.
    - `layout`, `args`: those of all elements.
    - `axes`: the grid axes of the results, all of which have the axis. Those of a fold are alike,
        however many results there are.
    - `axis`: the batch axis.
    """
    grid = tuple(1 if a == axis else n for a, n in zip((*layout.batch, ROW, COL), layout.grid))
    of_one = dataclasses.replace(layout, grid=grid)
    places = [layout.table_axes or (), *layout.in_axes]

    def one(i: Array) -> list[Array]:
        cut = [
            lax.dynamic_slice_in_dim(x, i, 1, place.index(axis)) if axis in place else x
            for x, place in zip(args, places, strict=True)
        ]
        return visit(of_one, cut)

    found = lax.map(one, jnp.arange(layout.grid[axis], dtype=jnp.int32))
    alike = [axes[0]] * len(found)
    at = [a.index(axis) for a in (axes if len(axes) == len(found) else alike)]
    return [jnp.moveaxis(jnp.squeeze(x, 1 + i), 0, i) for x, i in zip(found, at, strict=True)]
