"""The fold as a kernel: the arrays that it reads and writes."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..._jax import abstract
from ..._sweep.grid import COL, GridLayout, ROW
from . import _mosaic as mosaic
from ._forward import Plan
from ._matrices import Matrix
from ._operands import padded, Sizes, TILE
from ._plans import FoldArrays


def visit_fold(
    steps: dict[int, Any],
    layout: GridLayout,
    args: Sequence,
    finish: Any,
    into: Sequence | None,
    interpreted: bool,
) -> list:
    """What `finish` makes of each row of the grid, with its grid axes in front."""
    arrays = FoldArrays(steps, layout, args, finish, mosaic.native(interpreted))
    old = None if into is None or into[0] is None else [jnp.swapaxes(into[0], -1, -2), *into[1:]]
    plan, kept = _plan(arrays, old is not None, interpreted), (*layout.batch, ROW)
    lie, shape = (plan.sizes.padded_rows, plan.sizes.padded_width), layout.shape(kept)
    inputs = arrays.inputs(plan, [_padded_blocks(x, len(kept), lie) for x in old or ()])
    ends, places = plan.ending.results, math.prod(shape)
    out = [
        abstract(args[-1], (places, *lie[: 1 + wide]) if place is None else place.written, dtype)
        for (dtype, wide, _), place in zip(ends, plan.results)
    ]
    count, groups = places * (plan.sizes.padded_rows // TILE), 2 + plan.sizes.copied_apart
    found = plan.run(out, inputs, "eqattn_fold", count, interpreted, groups)
    return [
        _blocks(x, arrays, shape, wide, turned) if place is None else place.blocks(x)
        for x, place, (_, wide, turned) in zip(found, plan.results, ends)
    ]


def _plan(arrays: FoldArrays, continued: bool, interpreted: bool) -> Plan:
    """The kernel of a fold."""
    layout, keys, rows = arrays.layout, arrays.keys, arrays.rows
    sizes = Sizes(rows, keys, arrays.dim, arrays.width)
    found = arrays.planned(dict(r=sizes.padded_rows, k=sizes.padded_keys))
    q_axes, k_axes, v_axes = arrays.axes
    of_rows, of_keys, kept = (ROW, rows), (COL, keys), (*layout.batch, ROW)
    results: list[Matrix | None] = []
    for result, is_wide, turned in found["ending"].results:
        place = Matrix(layout, kept, *of_rows, sizes.width, sizes.padded_rows, turned=not turned)
        by_copies = is_wide and result == arrays.dtype and sizes.padded_width <= sizes.padded_dim
        results.append(place if by_copies else None)
    return Plan(
        **found,
        sizes=sizes,
        query=Matrix(layout, q_axes, *of_rows, sizes.dim, sizes.padded_rows, turned=True),
        key=Matrix(layout, k_axes, *of_keys, sizes.dim, sizes.padded_keys, turned=False),
        value=Matrix(layout, v_axes, *of_keys, sizes.width, sizes.padded_keys, turned=False),
        results=results,
        continued=continued,
        interpreted=interpreted,
    )


def _blocks(x: Any, arrays: FoldArrays, shape: tuple[int, ...], wide: bool, turned: bool) -> Any:
    """The blocks of a result that lies as the kernel has it, padded, without what pads them."""
    x = x[:, : arrays.rows, : arrays.width] if wide else x[:, : arrays.rows]
    x = x.reshape(*shape, *x.shape[1:])
    return jnp.swapaxes(x, -1, -2) if wide and not turned else x


def _padded_blocks(x: Any, lead: int, lengths: Sequence[int]) -> Any:
    """Blocks with the axes of the grid in one, padded to some lengths."""
    x = x.reshape(-1, *x.shape[lead:])
    for axis, size in zip(range(1, x.ndim), lengths):
        x = padded(x, axis, size)
    return x
