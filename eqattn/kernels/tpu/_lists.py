"""The lengths of lists of pairs, and visits in turns where the lists are too long.

All lists of a kernel lie in scalar memory. Where each batch element or head has a list of its own,
they may be too long together, but not each. Then a kernel visits some of them at a time. Where one
list is too long, a kernel visits some rows at a time.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ..._misc import at_most
from ..._sweep.grid import BlockGrid, COL, EMPTY, ROW


MOST_PAIRS = 2**17
"""The most pairs on the lists of a kernel. A pair takes four bytes. Scalar memory has 1 MiB from v4
on, as `smem_capacity_bytes` in `pltpu.get_tpu_info()` says, and these take half of it.
"""


def listed(layout: BlockGrid) -> int:
    """The most pairs of blocks that the lists of a visit may hold.

    A list that is made on the device has room for all pairs, or for as many as may be live. A known
    list holds only live pairs. There is one more pair for each row or column without a live one.
    """
    known, sides = layout.known, layout.sides
    if known is not None and layout.ring is None:
        live = (known.array != EMPTY).sum((-2, -1)).max()
        return int(np.prod(known.array.shape[:-2]) * (live + max(sides)))
    pairs, lists = math.prod(sides), layout.listed // math.prod(sides)
    # A gradient of what varies over pairs has all of them on its list.
    of_pairs = any({ROW, COL} <= {*axes} for axes in layout.in_axes)
    if layout.live_pairs and not of_pairs:
        pairs = min(pairs, layout.live_pairs + max(sides))
    return lists * pairs


def has_turns(layout: BlockGrid) -> bool:
    """Whether a visit can be made in turns. The rows of caches are visited one by one already, and
    each hop of a ring goes on with the results of the last.
    """
    return not layout.ragged and layout.ring is None


def _apart(layout: BlockGrid) -> list[int]:
    """The axes whose elements have lists of their own that may be visited in turns."""
    if layout.known is not None or not has_turns(layout):
        return []
    return [a for a in (layout.table_axes or ())[:-2] if not at_most(layout.size(a), 1)]


def turning(layout: BlockGrid, axes: Sequence[tuple[int, ...]]) -> int | None:
    """The outermost axis whose elements are to be visited in turns, if some are.

    The lists may be too long together. Or a result, on the grid axes `axes`, has a number for each
    pair, and is a sum over elements with tables of their own. In turns, it needs no array for each
    element.
    """
    apart = _apart(layout)
    if not at_most(listed(layout), MOST_PAIRS) and has_turns(layout):
        return apart[0] if apart else ROW
    sums = [a for a in axes if layout.live_pairs and {ROW, COL} <= {*a}]
    return next((x for x in apart if any(x not in a for a in sums)), None)


def in_turns(
    visit: Callable[[BlockGrid, Sequence[Any]], list[Array]],
    layout: BlockGrid,
    args: Sequence[Any],
    axes: Sequence[tuple[int, ...]],
    axis: int,
    default_class: int,
) -> list[Array]:
    """Visits the elements of a batch axis one after the other, or some rows at a time.

    **Arguments:**

    - `visit`: a function of a layout and its arguments that returns arrays.
    - `layout`, `args`: those of all elements.
    - `axes`: the grid axes of the results. Those without the axis are sums over it. Results of a
        fold all have the same axes, however many they are.
    - `axis`: the batch axis, or `ROW`.
    - `default_class`: the class of all blocks without a table.
    """
    if axis == ROW and layout.table_axes is None:  # The rows that pad the last turn see nothing.
        args = [jnp.full(layout.grid[ROW:], default_class, jnp.int8), *args]
        layout = dataclasses.replace(layout, table_axes=(ROW, COL))
    whole = layout.grid[axis]
    size = _rows_of_a_turn(layout) if axis == ROW else 1
    count = -(-whole // size)
    grid = tuple(size if a == axis else n for a, n in zip((*layout.batch, ROW, COL), layout.grid))
    of_one = dataclasses.replace(layout, grid=grid)
    if axis == ROW:  # The rows of a turn, and so their table, are known only when it runs.
        count_of = lambda x: size * x.block if x.axis == ROW else x.count
        tokens = tuple(dataclasses.replace(x, count=count_of(x)) for x in layout.tokens)
        of_one = dataclasses.replace(of_one, known=None, parts=(), tokens=tokens)
    places = [layout.table_axes or (), *layout.in_axes]

    def padded(x: Any, at: int) -> Array:
        return jnp.pad(x, [(0, (count * size - whole) * (i == at)) for i in range(jnp.ndim(x))])

    args = [
        padded(x, place.index(axis)) if axis in place else x
        for x, place in zip(args, places, strict=True)
    ]

    def one(i: Any) -> list[Array]:
        cut = [
            lax.dynamic_slice_in_dim(x, i * size, size, place.index(axis)) if axis in place else x
            for x, place in zip(args, places, strict=True)
        ]
        return visit(of_one, cut)

    like = jax.eval_shape(one, jnp.int32(0))
    of_results = axes if len(axes) == len(like) else [axes[0]] * len(like)
    at = [a.index(axis) if axis in a else None for a in of_results]

    def add(sums: list[Any], i: Array) -> tuple[list[Any], list[Any]]:
        found = one(i)
        sums = [None if x is None else x + y for x, y in zip(sums, found)]
        return sums, [None if n is None else y for n, y in zip(at, found)]

    def joined(y: Array, n: int) -> Array:
        y = jnp.moveaxis(y, 0, n)
        y = y.reshape(*y.shape[:n], -1, *y.shape[n + 2 :])
        return lax.slice_in_dim(y, 0, whole, axis=n)

    zeros = [jnp.zeros(x.shape, x.dtype) if n is None else None for n, x in zip(at, like)]
    sums, each = lax.scan(add, zeros, jnp.arange(count, dtype=jnp.int32))
    return [x if n is None else joined(y, n) for n, x, y in zip(at, sums, each)]


def _rows_of_a_turn(layout: BlockGrid) -> int:
    """How many rows a turn visits, such that turns are as few and as even as possible. The list of
    a turn has room for all pairs of its rows, and for one more pair for each column.
    """
    rows, columns = layout.grid[ROW:]
    most = max(MOST_PAIRS // columns - 1, 1)
    return -(-rows // -(-rows // most))
