"""A visit of the grid as kernels for NVIDIA GPUs."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

from ...._jax import varying_axes
from ...._sweep.grid import BlockGrid
from ...._sweep.steps import Finish, FoldStep
from .._pair_gradients import one_each, PairSumProgram
from .._plans import kept
from .._sum_program import by_kernels, SumProgram
from . import _mosaic as mosaic
from ._backward import kernels_of, visit_pairs, visit_sum
from ._forward import visit_fold


def traverse(
    steps: dict[int, Callable[..., Any]],
    layout: BlockGrid,
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


def traverse_sum(  # noqa: PLR0913 (the arguments that every visit of a lowering has)
    steps: dict[int, Callable[..., Any]],
    layout: BlockGrid,
    args: Sequence[Any],
    start: Sequence[Any],
    axes: Sequence[tuple[int, ...]],
    *,
    visits: Sequence[tuple[int, Any]],
    vectorise: bool,
    finish: Callable[..., Any] = list,
    into: Sequence[Any] | None = None,
    dtypes: Sequence[Any] = (),
    of_pairs: bool = True,
    interpreted: bool = False,
) -> list[Any]:
    """`eqattn._sweep.loops.traverse` of a backward pass. `of_pairs` says whether a gradient with a
    number for each pair has a kernel. Further arguments are those of `by_kernels`.
    """
    del steps  # they have all results, and the loops need some

    def run(visit, programs, side, kept, rounded):
        def kernel(*xs):
            found = visit(programs, side, kept, layout, xs, rounded, interpreted)
            return [found[i] for i in kept]

        return called(kernel, interpreted, *args)

    forms: dict[type[SumProgram], Any] = {SumProgram: (kernels_of, ft.partial(run, visit_sum))}
    if of_pairs:
        forms[PairSumProgram] = lambda _, wanted: one_each(wanted), ft.partial(run, visit_pairs)
    return by_kernels(
        forms,
        mosaic.native(interpreted),
        layout,
        args,
        start,
        axes,
        visits=visits,
        vectorise=vectorise,
        finish=finish,
        into=into,
        dtypes=dtypes,
    )


def called(run: Callable, interpreted: bool, *args: Any) -> list[Any]:
    """The results of a kernel."""
    if interpreted and varying_axes(*args):
        raise ValueError(
            "platform='interpret' cannot run under jax.shard_map(..., check_vma=True), which "
            "interpreted kernels do not know; use check_vma=False."
        )
    return (mosaic.alone(run) if interpreted else run)(*args)
