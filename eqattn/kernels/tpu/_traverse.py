"""The choice of the kernels that make up one visit of the grid."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

from ..._jax import varying_axes
from ..._sweep.fold_step import FoldStep
from ..._sweep.grid import GridLayout
from ._backward import together, visit_sum
from ._decode import decode_programs, visit_decode
from ._forward import visit_fold
from ._lists import in_turns, turning
from ._scales import with_matrices


def traverse(
    steps: dict[int, Callable[..., Any]],
    layout: GridLayout,
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
