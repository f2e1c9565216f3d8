"""A backward pass by kernels, and by loops for the results that these do not compute."""

from collections.abc import Callable, Sequence
from typing import Any

from ..._sweep import loops
from ..._sweep.grid import GridLayout
from ..._sweep.sweep import steps_of
from ._operands import Side
from ._operations import Native
from ._sum_program import SumProgram


def by_kernels(
    kernels: Callable[[dict, list[int]], list[tuple[Side, list[int]]]],
    run: Callable[[dict, Side, list[int], dict[int, Any]], list[Any]],
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
    and values are computed by kernels, and others, such as that of a bias, by the loops.

    **Arguments:** those of `eqattn._sweep.loops.traverse`, and

    - `kernels`: a function that says which results each kernel computes. It gets the programs of
        all classes, and the results that are for kernels.
    - `run`: a function that runs one kernel. It gets the programs, the side, the results and their
        dtypes.
    - `native`: as for `BlockProgram`.
    - `visits`: pairs of a class of blocks and the jaxpr of its block function.
    - `vectorise`: whether loops have the batch axes inside of their blocks.
    - `dtypes`: the dtypes to which the sums are rounded, if not those of `start`.
    """
    wide = [x.dtype for x in start]
    programs = {c: SumProgram(jaxpr, layout, native) for c, jaxpr in visits}
    why_not = [next(filter(None, (p.why_not([i]) for p in programs.values())), "")
               for i in range(len(axes))]  # fmt: skip
    results: list[Any] = [None] * len(axes)
    for side, wanted in kernels(programs, [i for i, x in enumerate(why_not) if not x]):
        natural = (*layout.batch, side.own)
        whole = {i: into is None and axes[i] == natural for i in wanted}
        rounded = {i: (dtypes or wide)[i] if whole[i] else wide[i] for i in wanted}
        for i, x in zip(wanted, run(programs, side, wanted, rounded)):
            missing = [n for n, a in enumerate(natural) if a not in axes[i]]
            x = x.sum(missing) if missing else x
            results[i] = x if into is None or into[i] is None else into[i] + x
    if rest := [i for i, x in enumerate(why_not) if x]:
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
