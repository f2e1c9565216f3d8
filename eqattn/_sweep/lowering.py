"""Which code runs a visit of the grid: loops of ordinary JAX, or a kernel that was registered."""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from .._jax import partitioned_automatically
from .._misc import at_most
from .grid import COL, Layout, ROW
from .loops import traverse


@dataclasses.dataclass(frozen=True)
class Tag:
    """What a kernel needs to recognise a hot visit: the stage (`"fold"`, `"tangent"` or
    `"backward"`), a static description of score and mask, and the role of each operand/result.
    """

    stage: str
    spec: Hashable
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def loops_over_batch(ctx, layout: Layout) -> bool:
    """Whether to loop over the batch axes: on one CPU, unless the blocks are tiny."""
    if layout.pages:
        return True
    if layout.ragged:
        return not partitioned_automatically(ctx)
    cpu = tuple(ctx.module_context.platforms) == ("cpu",)
    logits = math.prod(layout.shape(layout.batch)) * math.prod(layout.block)
    small = at_most(logits, 2**20 if layout.grid[ROW] == layout.grid[COL] == 1 else 2**17)
    return cpu and not small and not partitioned_automatically(ctx)


def loops(vectorise: bool) -> dict[str, Any]:
    """To run a visit as loops of ordinary JAX."""
    return dict(vectorise=vectorise, traverse=ft.partial(traverse, vectorise=vectorise))


Traverse = Callable[..., list]
Chooser = Callable[[Any, Layout, Tag | None, Sequence], Traverse | None]
_kernels: list[Chooser] = []


def register_kernel(chooser: Chooser) -> Chooser:
    """Adds a function that returns a kernel for a visit, or None where it has none."""
    _kernels.append(chooser)
    return chooser


def code_for(ctx, layout: Layout, tag: Tag | None, visits: Sequence) -> dict[str, Any]:
    """How to run a visit of the grid: as loops of ordinary JAX, or as a kernel."""
    for chooser in _kernels:
        if (kernel := chooser(ctx, layout, tag, visits)) is not None:
            return dict(vectorise=False, traverse=kernel)
    return loops(not loops_over_batch(ctx, layout))
