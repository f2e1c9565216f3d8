"""A visit of the grid as kernels for NVIDIA GPUs."""

from collections.abc import Callable, Sequence
from typing import Any

from ..._jax import varying_axes
from ..._sweep import loops
from ..._sweep.fold_step import Finish, FoldStep
from ..._sweep.grid import GridLayout
from ..._sweep.sweep import steps_of
from . import _mosaic as mosaic
from ._ending import kept
from ._fold import visit_fold
from ._sum_program import SumProgram
from ._sums import kernels_of, visit_sum


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
    finish = finish if into is None else Finish(kept)
    for step in steps.values():
        assert isinstance(step, FoldStep) and not step.grouped

    def run(*xs):
        n = len(args)
        return visit_fold(steps, layout, xs[:n], finish, list(xs[n:]) or None, interpreted)

    before = [x for x in into or () if x is not None]
    return called(run, interpreted, *args, *before)


def traverse_sum(
    steps: dict[int, Callable[..., Any]],
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
    interpreted: bool = False,
) -> list[Any]:
    """`eqattn._sweep.loops.traverse` of a backward pass: gradients of queries, keys and values by
    kernels, and others, such as that of a bias, by the loops.

    **Arguments:** those of `eqattn._sweep.loops.traverse`, and

    - `visits`: pairs of a class of blocks and the jaxpr of its block function.
    - `vectorise`: whether loops have the batch axes inside of their blocks.
    - `dtypes`: the dtypes to which the sums are rounded, if not those of `start`.
    - `interpreted`: whether kernels are interpreted.
    """
    del steps  # which have all results, of which the loops need some
    wide = [x.dtype for x in start]
    programs = {c: SumProgram(jaxpr, layout) for c, jaxpr in visits}
    why_not = [next(filter(None, (p.why_not([i]) for p in programs.values())), "")
               for i in range(len(axes))]  # fmt: skip
    results: list[Any] = [None] * len(axes)
    for side, wanted in kernels_of(programs, [i for i, x in enumerate(why_not) if not x]):
        natural = (*layout.batch, side.own)
        whole = {i: into is None and axes[i] == natural for i in wanted}
        rounded = {i: (dtypes or wide)[i] if whole[i] else wide[i] for i in wanted}

        def run(*xs, side=side, wanted=wanted, rounded=rounded):
            found = visit_sum(programs, side, wanted, layout, xs, rounded, interpreted)
            return [found[i] for i in wanted]

        for i, x in zip(wanted, called(run, interpreted, *args)):
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


def called(run: Callable, interpreted: bool, *args: Any) -> list[Any]:
    """The results of a kernel."""
    if interpreted and varying_axes(*args):
        raise ValueError(
            "platform='interpret' cannot run under jax.shard_map(..., check_vma=True), which "
            "interpreted kernels do not know; use check_vma=False."
        )
    return (mosaic.alone(run) if interpreted else run)(*args)
