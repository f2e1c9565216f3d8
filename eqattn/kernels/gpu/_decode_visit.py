"""The fold of `Ragged` as a kernel for Hopper: the arrays that it reads and writes."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..._jax import abstract
from ..._sweep.grid import GridLayout
from . import _mosaic as mosaic
from ._decode import Plan
from ._plans import listed_in_order
from ._stored import flat_heads, scales_by_head, Sizes, Source
from ._stored_arrays import PROGRAMS, shares_of, StoredArrays
from ._traverse import called


def visit_stored(steps: dict[int, Any], layout: GridLayout, *args: Any, interpreted: bool) -> list:
    """Numerator, denominator and maximum of each row of the grid, with its grid axes in front."""
    run = lambda *xs: _visit(steps, layout, xs, interpreted)
    return called(run, interpreted, *args)


def _visit(steps: dict[int, Any], layout: GridLayout, args: Sequence, interpreted: bool) -> list:
    arrays = StoredArrays(steps, layout, args, mosaic.native(interpreted))
    sizes = Sizes.of(layout, arrays.stored)

    def sources(group):
        size = lambda part: arrays.operands[part.array].shape[-1]
        return tuple(
            Source(arrays.axes_of(x), size(x), sizes.heads, arrays.pages, x.scales is not None)
            for x in (group[0] if group else ())
        )

    plan = Plan(
        **arrays.planned(sizes),
        keys=sources(arrays.keys),
        values=sources(arrays.values),
        stored=arrays.stored.parts[0].dtype,
        shares=shares_of(layout, sizes, PROGRAMS // (1 + sizes.alone)),
        interpreted=interpreted,
    )
    inputs, operands, pieces = arrays.queries(sizes), arrays.operands, (arrays.keys, arrays.values)
    for group in filter(None, pieces):
        inputs += [operands[i].reshape(-1) for i in arrays.tables_of(group)]
    for part in (part for group in pieces for part in zip(*group)):
        inputs += [
            flat_heads(operands[x.array], layout.in_axes[x.array], sizes.piece) for x in part
        ]
        scales = [operands[x.scales] for x in part if x.scales is not None]
        inputs += [scales_by_head(x, sizes.heads, sizes.piece) for x in scales]
    inputs += listed_in_order(arrays.table, list(steps))
    inputs += [x.array for x in plan.operands.values()]
    lead = plan.shares * plan.places
    shapes = (lead, sizes.tiles, sizes.written, sizes.width), *[(lead, sizes.padded_rows)] * 2
    out = [abstract(args[-1], x, jnp.float32) for x in shapes]
    count = len(sizes.widths) + max(sizes.widening, 1)
    found = plan.run(out, inputs, "eqattn_decode", plan.count, interpreted, count)
    return arrays.merged(found, sizes, plan.shares)
