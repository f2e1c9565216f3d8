"""The fold as a kernel in Pallas Triton: the arrays that it reads and writes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from ...._jax import abstract, varying_axes
from ...._sweep.fold_step import Finish, FoldStep
from ...._sweep.grid import COL, GridLayout, PARTIAL, ROW
from .._ending import Ending, kept
from .._lists import lists
from .._operands import Operand, padded, ROWS, scale_of
from .._program import PairProgram
from . import _triton as triton, NATIVE
from ._forward import Plan, Program, Sizes, STAGES
from ._rows import Rows


def traverse(
    steps: dict[int, Callable[..., Any]],
    layout: GridLayout,
    args: Sequence[Any],
    start: Sequence[Any],
    axes: Sequence[tuple[int, ...]],
    *,
    finish: Callable[..., Any] = list,
    into: Sequence[Any] | None = None,
    interpreted: bool = False,
) -> list[Any]:
    """`eqattn._sweep.loops.traverse` of a fold, as one kernel."""
    del start, axes  # A Carry keeps all batch axes and rows.
    check_axes(interpreted, args)
    plan, inputs = _plan(steps, layout, args, finish, into, interpreted)
    sizes, shape = plan.sizes, layout.shape((*layout.batch, ROW))
    out = [
        abstract(args[-1], (plan.count // plan.tiles, sizes.padded_rows), dtype)
        if place is None
        else abstract(args[-1], place.written, dtype)
        for (dtype, *_), place in zip(plan.ending.results, plan.results)
    ]
    run = triton.kernel(
        lambda *refs: Program(plan, refs).run(),
        out,
        plan.count,
        "eqattn_fold",
        sizes.warps,
        STAGES,
        interpreted,
    )
    results = zip(run(*inputs), plan.results)
    return [
        x[:, : sizes.rows].reshape(*shape, sizes.rows) if place is None else place.blocks(x)
        for x, place in results
    ]


def check_axes(interpreted: bool, args: Sequence[Any]) -> None:
    """**Raises:** `ValueError` where the interpreter does not know what varies over devices."""
    if interpreted and varying_axes(*args):
        raise ValueError(
            "platform='interpret' cannot run under jax.shard_map(..., check_vma=True), which "
            "interpreted kernels do not know; use check_vma=False."
        )


def _plan(
    steps: dict[int, Any],
    layout: GridLayout,
    args: Sequence[Any],
    finish: Any,
    into: Sequence[Any] | None,
    interpreted: bool,
) -> tuple[Plan, list[Any]]:
    """The kernel of a fold, and the arrays that it reads."""
    table, operands = layout.known_without_corners(args)
    first = steps[max(steps)]
    assert isinstance(first, FoldStep) and not first.grouped
    n = len(first.logits.in_avals)
    (query, key, *_), value = operands[:n], operands[n]
    q_axes, k_axes, v_axes = (layout.in_axes[i] for i in (0, 1, n))
    programs = {c: PairProgram(step.logits, NATIVE) for c, step in steps.items()}
    keys, rows = layout.block
    dtype = jnp.dtype(dict(first.products)["operand_dtype"] or query.dtype)
    sizes = Sizes(rows, keys, query.shape[-2], first.width, dtype.itemsize)
    wanted = [i for i in range(n) if any(p.reads[i] for p in programs.values())]
    lengths = dict(r=sizes.padded_rows, k=sizes.padded_keys)
    given = {i: Operand(operands[i], layout.in_axes[i], layout, ROWS, lengths) for i in wanted}
    q = Rows(layout, q_axes, ROW, rows, sizes.dim, turned=True)
    k = Rows(layout, k_axes, COL, keys, sizes.dim, turned=False)
    v = Rows(layout, v_axes, COL, keys, sizes.width, turned=False)
    inputs = [x.given(y, dtype) for x, y in ((q, query), (k, key), (v, value))]
    if PARTIAL in programs:
        along = [i for i, a in enumerate(v_axes) if a == COL]
        bad = ~jnp.isfinite(value).all((*along, value.ndim - 2, value.ndim - 1))
        inputs.append(bad.astype(jnp.int32).reshape(-1))
    if table is not None:
        ranks, order, counts = lists(table, tuple(steps))
        inputs += [ranks, *(x.reshape(-1, *x.shape[-2:]) for x in (order, counts))]
    inputs += [x.array for x in given.values()]
    owned, old = (*layout.batch, ROW), None
    if into is not None and into[0] is not None:
        old = Rows(layout, owned, ROW, rows, sizes.width, turned=True, in_place=False)
        vectors = [x.reshape(-1, rows) for x in into[1:]]
        inputs += [old.given(into[0], jnp.float32)]
        inputs += [padded(x, 1, sizes.padded_rows) for x in vectors]
    ending = Ending(finish if into is None else Finish(kept), operands, layout, lengths, NATIVE)
    inputs += [x.array for x in ending.given]
    place = lambda turned: Rows(
        layout, owned, ROW, rows, sizes.width, turned=not turned, in_place=into is None
    )
    plan = Plan(
        layout=layout,
        sizes=sizes,
        programs=programs,
        operands=given,
        query=q,
        key=k,
        value=v,
        old=old,
        results=[place(turned) if wide else None for _, wide, turned in ending.results],
        scale=scale_of(programs, layout),
        table_axes=None if table is None else (layout.table_axes or ())[:-2],
        dtype=dtype,
        ending=ending,
        interpreted=interpreted,
    )
    return plan, inputs
