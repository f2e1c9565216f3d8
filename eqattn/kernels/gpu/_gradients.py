"""A backward pass by kernels, and by loops for the results that these do not compute."""

from collections.abc import Callable, Sequence
from typing import Any

from ..._sweep import loops
from ..._sweep.grid import GridLayout
from ..._sweep.sum_step import steps_of
from ._operations import Native
from ._sum_program import SumProgram


def by_kernels(
    forms: dict[type[SumProgram], tuple[Callable[..., Any], Callable[..., Any]]],
    native: Native,
    layout: GridLayout,
    args: Sequence[Any],
    start: Sequence[Any],
    axes: Sequence[tuple[int, ...]],
    *,
    visits: Sequence[tuple[int, Any]],
    vectorise: bool,
    finish: Callable[..., Any] = list,
    into: Sequence[Any] | None = None,
    dtypes: Sequence[Any] = (),
) -> list[Any]:
    """Does what `eqattn._sweep.loops.traverse` does for a backward pass. Gradients of queries, keys
    and values, and of a bias of queries and keys, are computed by kernels, and others by the loops.

    **Arguments:** those of `eqattn._sweep.loops.traverse`, and

    - `forms`: how block functions are read, each with two functions. The first one says which
        results each kernel computes, and their side. It gets the programs of all classes, and the
        results that have this form. The second one runs a kernel. It gets the programs, the side,
        the results with the grid axes that they are to have, and their dtypes.
    - `native`: as for `BlockProgram`.
    - `visits`: pairs of a class of blocks and the jaxpr of its block function.
    - `vectorise`: whether loops have the batch axes inside of their blocks.
    - `dtypes`: the dtypes to which the sums are rounded, if not those of `start`.
    """
    wide = [x.dtype for x in start]
    results: list[Any] = [None] * len(axes)
    rest = list(range(len(axes)))
    for form, (kernels, run) in forms.items():
        programs = {c: form(jaxpr, layout, native) for c, jaxpr in visits}
        why_not = lambda i: any(not p.fits(axes[i]) or p.why_not([i]) for p in programs.values())
        able = [i for i in rest if not why_not(i)]
        rest = [i for i in rest if i not in able]
        for side, wanted in kernels(programs, able):
            natural = (*layout.batch, side.own)
            kept = {i: natural if form.by_side else axes[i] for i in wanted}
            whole = {i: into is None and axes[i] == kept[i] for i in wanted}
            rounded = {i: (dtypes or wide)[i] if whole[i] else wide[i] for i in wanted}
            for i, x in zip(wanted, run(programs, side, kept, rounded)):
                missing = [n for n, a in enumerate(kept[i]) if a not in axes[i]]
                x = x.sum(missing) if missing else x
                results[i] = x if into is None or into[i] is None else into[i] + x
    if rest:
        some = lambda xs: [xs[i] for i in rest]
        sums = loops.traverse(
            steps_of(visits, layout, axes, rest, vectorise),
            layout,
            args,
            some(start),
            some(axes),
            vectorise=vectorise,
            into=None if into is None else some(into),
        )
        for i, x in zip(rest, sums):
            results[i] = x
    return finish(results) if into is None else results
