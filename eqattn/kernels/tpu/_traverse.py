"""The choice of the kernels that make up one visit of the grid.

Scales of quantised keys and values, laid out for the kernel that reads them as a matrix.

A cache keeps the scales of a block as a row `[1, keys * groups]`, which the decoding kernel reads
as it is. The forward kernel needs a matrix `[keys, groups]`. No kernel can turn a row into a
matrix, so XLA does it before the kernel.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from ..._jax import evaluated, Literal, varying_axes
from ..._sweep.grid import BlockGrid
from ..._sweep.steps import FoldStep
from .._program import flat_jaxpr, replaced_jaxpr
from ._backward import together, visit_sum
from ._decode import decode_programs, visit_decode
from ._forward import visit_fold
from ._lists import in_turns, turning


def with_matrices(
    steps: dict[int, Any], layout: BlockGrid, args: Sequence
) -> tuple[dict, Sequence]:
    """The steps and the arguments of a fold, with rows given as the matrices that they become.

    An argument is changed if all its uses, in the block functions of all classes, reshape the row
    to the same matrix.
    """
    n = len(next(iter(steps.values())).logits.in_avals)
    programs = {c: [flat_jaxpr(s.logits), flat_jaxpr(s.values)] for c, s in steps.items()}
    shapes: dict[int, set] = {}
    for pair in programs.values():
        for start, closed in zip((0, n), pair):
            for v in closed.jaxpr.outvars:
                if v in closed.jaxpr.invars:
                    shapes.setdefault(start + closed.jaxpr.invars.index(v), set()).add(None)
            for eqn in closed.jaxpr.eqns:
                for v in eqn.invars:
                    if not isinstance(v, Literal) and v in closed.jaxpr.invars:
                        i = start + closed.jaxpr.invars.index(v)
                        moved = eqn.primitive is lax.reshape_p and v.aval.shape[:-1] == (1,)
                        shapes.setdefault(i, set()).add(
                            eqn.outvars[0].aval.shape if moved else None
                        )
    found = {i: next(iter(s)) for i, s in shapes.items() if len(s) == 1 and None not in s}
    found = {i: s for i, s in found.items() if len(s) == 2 and s[0] > 1}
    if not found:
        return steps, args
    new = {}
    for c, (logits, values) in programs.items():
        own, others = ({i - k: s for i, s in found.items() if 0 <= i - k} for k in (0, n))
        own = {i: s for i, s in own.items() if i < n}
        fields = dict(logits=_reading(logits, own), values=_reading(values, others))
        new[c] = dataclasses.replace(steps[c], **fields)
    table, operands = layout.split(args)
    operands = [
        x.reshape(*x.shape[: len(a)], *found[i]) if i in found else x
        for i, (x, a) in enumerate(zip(operands, layout.in_axes))
    ]
    return new, operands if layout.table_axes is None else [table, *operands]


def _reading(closed: Any, matrices: dict[int, tuple[int, ...]]) -> Any:
    """A program whose arguments `matrices` have these shapes already, without the reshapes."""
    given = {closed.jaxpr.invars[i] for i in matrices}

    def evaluate(eqn, xs):
        there = eqn.primitive is lax.reshape_p and eqn.invars[0] in given
        return xs if there else evaluated(eqn, xs)

    shapes = [matrices.get(i, v.aval.shape) for i, v in enumerate(closed.jaxpr.invars)]
    return replaced_jaxpr(closed, shapes, evaluate)


def traverse(  # noqa: PLR0913 (the arguments that every visit of a lowering has)
    steps: dict[int, Callable[..., Any]],
    layout: BlockGrid,
    args: Sequence[Any],
    start: Sequence[Any],
    axes: Sequence[tuple[int, ...]],
    *,
    finish: Any = list,
    into: Sequence[Any] | None = None,
    dtypes: Sequence[Any] = (),
    interpret: Any = False,
) -> list[Any]:
    """`eqattn._sweep.loops.traverse` by kernels, with the same arguments and results.

    A fold is one kernel. A sweep has one kernel for all outputs that keep the same axes. Where the
    outputs of rows can stay in vector memory, they join the kernel for those of columns.

    **Arguments:** those of `eqattn._sweep.loops.traverse`, and

    - `dtypes`: the dtypes to which the sums of a sweep are rounded, if not those of `start`.
    - `interpret`: whether to interpret the kernels; or what `pl.pallas_call` takes under that name.
    """
    if interpret and varying_axes(*args):
        raise ValueError(
            "platform='interpret' cannot run under jax.shard_map(..., check_vma=True), which "
            "interpreted kernels do not know; use check_vma=False."
        )
    axis = turning(layout, axes) if into is None else None
    again = ft.partial(traverse, steps, start=start, interpret=interpret)
    if all(isinstance(step, FoldStep) for step in steps.values()):
        if axis is not None:
            visit = ft.partial(again, axes=axes, finish=finish)
            return in_turns(visit, layout, args, axes, axis, max(steps))
        forms = decode_programs(steps, layout, args) if into is None else None
        if forms is not None:
            return visit_decode(forms, steps, layout, args, axes[0], interpret)
        first: Any = next(iter(steps.values()))
        if first.grouped:
            steps, args = with_matrices(steps, layout, args)
        return visit_fold(steps, layout, args, axes[0], finish, into, interpret)
    # A kernel that sums over batch elements visits the same pairs for all of them. So where these
    # have tables of their own, it keeps their axes, and the sums are outside.
    own = (layout.table_axes or ())[:-2] if layout.live_pairs and axis is None else ()
    wide = [a if {*own} <= {*a} else tuple(sorted({*a, *own})) for a in axes]
    if into is None and (axis is not None or wide != [*axes]):
        last = dtypes or [x.dtype for x in start]
        summed = [w != a or axis not in (None, *a) for a, w in zip(axes, wide)]
        inner = [x.dtype if some else d for some, d, x in zip(summed, last, start)]
        visit = ft.partial(again, axes=wide, dtypes=inner)
        if axis is None:
            found = visit(layout, args)
        else:
            found = in_turns(visit, layout, args, axes, axis, max(steps))
        lacking = [tuple(w.index(x) for x in w if x not in a) for a, w in zip(axes, wide)]
        return finish([x.sum(n).astype(d) for x, n, d in zip(found, lacking, last)])
    results: list[Any] = [None] * len(axes)
    main, stay = together(layout, start, axes, into)
    for kept in dict.fromkeys(axes):
        group = [i for i, a in enumerate(axes) if a == kept and i not in stay]
        staying = stay if group == main else []
        if group:
            outs = visit_sum(
                steps, layout, args, start, kept, group, staying, into, dtypes, interpret
            )
            for i, y in zip([*group, *staying], outs):
                results[i] = y
    return finish(results) if into is None else results
