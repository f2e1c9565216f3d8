"""A visit of the grid as kernels for NVIDIA GPUs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from ..._jax import varying_axes
from ..._sweep.fold_step import FoldStep
from ..._sweep.grid import GridLayout
from . import _mosaic as mosaic
from ._forward import visit_fold


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
    del start, axes, finish  # A Carry keeps all batch axes and rows, and its values are finite.
    if interpreted and varying_axes(*args):
        raise ValueError(
            "platform='interpret' cannot run under jax.shard_map(..., check_vma=True), which "
            "interpreted kernels do not know; use check_vma=False."
        )
    for step in steps.values():
        assert isinstance(step, FoldStep) and len(step.values.out_avals) == 2 and not step.grouped

    def run(*xs):
        n = len(args)
        return visit_fold(steps, layout, xs[:n], list(xs[n:]) or None, interpreted)

    before = [x for x in into or () if x is not None]
    num, *both = (mosaic.alone(run) if interpreted else run)(*args, *before)
    return [num if into is None else jnp.swapaxes(num, -1, -2), *both]
