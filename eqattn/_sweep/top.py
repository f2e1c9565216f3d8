"""The greatest logits of each row, and the places of their keys, as one more visit of the grid.

Lists of the `n` greatest form a commutative monoid, as Carries do. Two lists of disjoint keys merge
to the `n` greatest of both, in any order of merges. Equal logits are ordered by place, lower places
first. So a visit needs a list for each row and one block of logits.

Which keys are listed does not move with the operands, but their logits do. Each of these logits is
a sum over pairs that leaves out all other pairs, that is, a sweep. So the tangent of the values is
a sweep, and all further derivatives follow from it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._jax import ad, is_zero, jaxpr_as_fun, Primitive, vary, varying_axes, zero_tangent
from .fold import with_tables_of_hops
from .grid import BlockGrid, PARTIAL, replaced, ROW
from .ring import ring_traverse
from .steps import evaluate
from .sweep import block_aval, closure_convert, primitive_rules, sweep


NONE = -1  # the place of an entry that lists no key; its logit is -inf


def greatest(
    values: Array, places: Array, count: int, ordered: bool = False
) -> tuple[Array, Array]:
    """The `count` greatest entries of lists on the last axis, the greatest first. Of equal values,
    the lower place comes first, and NaN comes before all numbers.

    **Arguments:**

    - `ordered`: whether equal values are known to be in the order of their places. Then XLA's own
        selection is enough, which on a CPU is some ten times as fast as a sort by two keys.
    """
    missing = count - values.shape[-1]
    if missing > 0:
        widths = [(0, 0)] * (values.ndim - 1) + [(0, missing)]
        values = jnp.pad(values, widths, constant_values=-jnp.inf)
        places = jnp.pad(places, widths, constant_values=NONE)
    if ordered:
        return _selected(values, places, count)
    values, places = lax.sort((values, -places), num_keys=2)
    return values[..., : -count - 1 : -1], -places[..., : -count - 1 : -1]


def _selected(values: Array, places: Array, count: int) -> tuple[Array, Array]:
    """The `count` greatest entries. Of equal values, the first ones are taken."""
    # XLA's selection compares bits, by which -0 is below 0, and NaN has a sign.
    same = jnp.where(values == 0, 0, jnp.where(jnp.isnan(values), jnp.nan, values))
    _, at = lax.top_k(same, count)
    return jnp.take_along_axis(values, at, -1), jnp.take_along_axis(places, at, -1)


def _some_greatest(values: Array, places: Array, count: int) -> tuple[Array, Array]:
    """The entries that `greatest` returns, in any order.

    Which entries these are depends on places only where there are equal values on both sides of
    the end of the list. Without such, XLA's selection finds them.
    """
    found = _selected(values, places, count)
    least = found[0][..., -1:]
    known = (least == -jnp.inf) | ((values >= least).sum(-1, keepdims=True) == count)
    return lax.cond(known.all(), lambda: found, lambda: greatest(values, places, count))


def top(  # noqa: PLR0913 (the parts of a visit, which rules bind one by one)
    logits: dict[int, Callable],
    operands: Sequence,
    layout: BlockGrid,
    *,
    count: int,
    place: int,
    ordered: bool = False,
    table: Any = None,
    classify: Callable | None = None,
    reads: Sequence[int] = (),
) -> list:
    """Lists the greatest logits of each row.

    **Arguments:**

    - `logits`, `operands`, `layout`, `table`, `classify`, `reads`: as for `fold`.
    - `count`: how many logits are listed.
    - `place`: the index of the operand that holds the place of each key, int32 `[keys, 1]`.
    - `ordered`: whether places rise along the columns of one device.

    **Returns:** the logits and the places, with the batch and row axes of the grid in front of
    blocks `[rows, count]`. Where a row has fewer logits above -inf, the other entries are -inf and
    -1.
    """
    if ordered and len(logits) > 1:
        # A visit takes columns of one class in their order. So there must be one class.
        logits, layout = {PARTIAL: logits[PARTIAL]}, dataclasses.replace(layout, known=None)
        table = jnp.minimum(table, np.int8(PARTIAL))
    axes = varying_axes(*operands, *([] if table is None else [table]))
    operands, in_axes, ring = with_tables_of_hops(operands, layout, classify, reads, axes)
    avals = [block_aval(x, a) for x, a in zip(operands, in_axes)]
    visits, consts = closure_convert(logits, avals)
    in_axes = (*in_axes, *[()] * len(consts))
    layout = dataclasses.replace(layout, in_axes=in_axes, ring=ring, stage="top", shared=())
    lead = [] if layout.table_axes is None else [vary(table, axes)]
    rows = (*layout.batch, ROW)
    return top_p.bind(
        *lead,
        *operands,
        *[vary(x, axes) for x in consts],
        visits=visits,
        layout=layout,
        out_axes=(rows, rows),
        count=count,
        place=place,
        ordered=ordered,
    )


def execute(  # noqa: PLR0913 (the parts of a visit, which rules bind one by one)
    *args, visits, layout, out_axes, count, place, ordered, vectorise, traverse, finishes=False
) -> list:
    """Evaluates the visit that `select_lowering` chose."""
    del finishes
    steps = {}
    for c, jaxpr in visits:

        def logits_of(blocks, jaxpr=jaxpr):
            values = evaluate(jaxpr, blocks)[0].T
            places = jnp.broadcast_to(blocks[place].T, values.shape)
            return values, jnp.where(values == -jnp.inf, jnp.int32(NONE), places)

        for axis in reversed(layout.batch if vectorise else ()):
            mapped = [0 if axis in a else None for a in layout.in_axes]
            logits_of = jax.vmap(logits_of, (mapped,), axis_size=layout.grid[axis])

        def step(accs, blocks, logits_of=logits_of):
            values, places = logits_of(blocks)
            if accs is None:
                return list(greatest(values, places, count, ordered))
            values = jnp.concatenate([accs[0], values], -1)
            places = jnp.concatenate([accs[1], places], -1)
            return list((_selected if ordered else _some_greatest)(values, places, count))

        steps[c] = step
    shape, dtype = (layout.block[1], count), visits[0][1].out_avals[0].dtype
    start = [np.full(shape, -np.inf, dtype), np.full(shape, NONE, np.int32)]

    def finish(accs):
        values, places = accs
        return list(accs if ordered else greatest(values, places, count))

    return ring_traverse(steps, layout, args, start, out_axes, finish=finish, traverse=traverse)


def _block_shapes(avals, *, layout, visits, count, **kw):
    shape = layout.block[1], count
    return [(shape, visits[0][1].out_avals[0].dtype), (shape, jnp.dtype(jnp.int32))]


top_p = Primitive("attention_top_keys")
_STATIC = ("visits", "layout", "out_axes", "count", "place", "ordered")
primitive_rules(top_p, execute, _STATIC, _block_shapes)


def _at_places(x: Array, places: Array, wanted: Array) -> Array:
    """The entries of a block `[keys, rows]` at some places `[rows, n]` of its keys, and 0 at places
    outside of the block. The places of the keys are `[keys, 1]`, in any order.
    """
    places = places[:, 0]
    order = jnp.argsort(places)  # stable: padding has equal places, and the first counts
    at = jnp.searchsorted(places[order], wanted)
    slot = order[jnp.minimum(at, len(places) - 1)]
    return jnp.where(places[slot] == wanted, jnp.take_along_axis(x.T, slot, 1), 0)


def _jvp(primals, tangents, *, visits, layout, out_axes, count, place, ordered):
    # With j(i, r) the key of entry r of row i, which is held fixed, the values are
    #
    #     y_ir = s_{i j(i, r)} = sum_j [j = j(i, r)] s_ij,
    #
    # a sum over pairs. So their tangent is the sum of [j = j(i, r)] ds_ij over the same pairs.
    static = dict(visits=visits, layout=layout, out_axes=out_axes)
    values, places = top_p.bind(*primals, **static, count=count, place=place, ordered=ordered)
    table, primals = layout.split(primals)
    _, tangents = layout.split(tangents)
    active, n = [i for i, t in enumerate(tangents) if not is_zero(t)], len(primals)

    def tangent(logits):
        def g(*blocks):
            full, wanted, moved = blocks[:n], blocks[n], blocks[n + 1 :]
            h = lambda *xs: logits(*replaced(full, active, xs))[0]
            ds = jax.jvp(h, tuple(full[i] for i in active), tuple(moved))[1]
            return [_at_places(ds, full[place], wanted)]

        return g

    read = visits[0][1].in_avals
    moved = [tangents[i].astype(read[i].dtype) for i in active]
    (moved_values,) = sweep(
        {c: tangent(jaxpr_as_fun(jaxpr)) for c, jaxpr in visits},
        [*primals, places, *moved],
        [*layout.in_axes, out_axes[1], *[layout.in_axes[i] for i in active]],
        out_axes[:1],
        layout=dataclasses.replace(layout, stage=""),
        table=table,
    )
    return [values, places], [moved_values, zero_tangent(places)]


ad.primitive_jvps[top_p] = _jvp
