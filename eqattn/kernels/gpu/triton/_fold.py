"""The fold as a kernel in Pallas Triton: the arrays that it reads and writes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from ...._jax import abstract, varying_axes
from ...._sweep.fold_step import Finish, FoldStep
from ...._sweep.grid import COL, GridLayout, ROW
from .._ending import kept
from .._operands import padded
from .._plans import FoldArrays
from . import _triton as triton, native_for
from ._forward import Plan, Program, Sizes, STAGES
from ._rows import Rows, shifted


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
    assert not any(isinstance(x, FoldStep) and x.grouped for x in steps.values())
    finish = finish if into is None else Finish(kept)
    arrays = FoldArrays(
        steps,
        layout,
        args,
        finish,
        triton.native(interpreted, native_for(layout.split(args)[1][0].dtype)),
    )
    plan = _plan(arrays, into is None, into is not None and into[0] is not None, interpreted)
    sizes, shape = plan.sizes, layout.shape((*layout.batch, ROW))
    old = []
    if plan.continued:
        assert into is not None
        old = [plan.old.given(into[0], jnp.float32)]
        old += [padded(x.reshape(-1, sizes.rows), 1, sizes.padded_rows) for x in into[1:]]
    out = [
        abstract(args[-1], (plan.count // plan.tiles, sizes.padded_rows), dtype)
        if place is None
        else abstract(args[-1], place.written, dtype)
        for (dtype, *_), place in zip(plan.ending.results, plan.results)
    ]
    found = _visited(plan, out, arrays.inputs(plan, old))
    return [
        x[:, : sizes.rows].reshape(*shape, sizes.rows) if place is None else place.blocks(x)
        for x, place in zip(found, plan.results)
    ]


def _visited(plan: Plan, out: list[Any], inputs: list[Any]) -> Sequence[Any]:
    """What one or two kernels write, see `Program`.

    **Arguments:**

    - `out`: the shapes and dtypes of the results.
    - `inputs`: what the kernels read.
    """

    def kernel(again: bool, out: list[Any], in_place: dict[int, int]) -> Any:
        body = lambda *refs: Program(plan, refs, again).run()
        name = "eqattn_fold_again" if again else "eqattn_fold"
        given = plan.count, name, plan.sizes.warps, STAGES, plan.interpreted
        return triton.kernel(body, out, *given, in_place)

    if not plan.spreads:
        return kernel(False, out, {})(*inputs)
    check = abstract(inputs[0], (plan.count,), jnp.float32)
    *found, check = kernel(False, [*out, check], {})(*inputs)
    in_place = {1 + len(inputs) + i: i for i in range(len(out))}
    return kernel(True, out, in_place)(check, *inputs, *found)


def check_axes(interpreted: bool, args: Sequence[Any]) -> None:
    """**Raises:** `ValueError` where the interpreter does not know what varies over devices."""
    if interpreted and varying_axes(*args):
        raise ValueError(
            "platform='interpret' cannot run under jax.shard_map(..., check_vma=True), which "
            "interpreted kernels do not know; use check_vma=False."
        )


def _plan(arrays: FoldArrays, in_place: bool, continued: bool, interpreted: bool) -> Plan:
    """The kernel of a fold, whose results may be written `in_place`."""
    layout, keys, rows = arrays.layout, arrays.keys, arrays.rows
    sizes = Sizes(rows, keys, arrays.dim, arrays.width, arrays.dtype.itemsize)
    found = arrays.planned(dict(r=sizes.padded_rows, k=sizes.padded_keys))
    found["operands"] = shifted(found["operands"])
    q_axes, k_axes, v_axes = arrays.axes
    owned = (*layout.batch, ROW)

    def place(turned):
        return Rows(layout, owned, ROW, rows, sizes.width, not turned, in_place)

    return Plan(
        **found,
        sizes=sizes,
        query=Rows(layout, q_axes, ROW, rows, sizes.dim, turned=True),
        key=Rows(layout, k_axes, COL, keys, sizes.dim, turned=False),
        value=Rows(layout, v_axes, COL, keys, sizes.width, turned=False),
        results=[place(turned) if wide else None for _, wide, turned in found["ending"].results],
        continued=continued,
        interpreted=interpreted,
    )
