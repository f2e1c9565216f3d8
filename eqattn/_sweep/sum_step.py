"""What a sweep does in one block: it evaluates the block function, and adds up its results."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .fold_step import evaluate
from .grid import GridLayout
from .several_columns import at_columns


@dataclasses.dataclass(frozen=True)
class SumStep:
    """The step of a sweep: `(accumulators, blocks) -> accumulators`.

    **Arguments:**

    - `f`: the block function.
    """

    f: Callable[..., list]

    def __call__(self, accs: Sequence | None, blocks: Sequence) -> list:
        ys = self.f(*blocks)
        return ys if accs is None else [a + y for a, y in zip(accs, ys)]

    def several(
        self, accs: Sequence, blocks: Sequence, moved: Sequence[bool], own: Sequence[bool], n: int
    ) -> list:
        """The same in a step over `n` columns. They are the first axis of blocks that are `moved`.
        Where a column has an `own` accumulator, the result is what is to be added to these.
        """
        ys = at_columns(self.f, blocks, moved, n, [not x for x in own])
        return [y if apart else a + y for a, y, apart in zip(accs, ys, own)]


def _vectorised(f: Callable, layout: GridLayout, out_axes: Sequence) -> Callable:
    """Maps `f` over the grid's batch axes, which are inside of the blocks. Outputs that lack a
    batch axis are summed over it.
    """
    for axis in reversed(layout.batch):
        mapped = [0 if axis in a else None for a in layout.in_axes]

        def g(*xs, f=f, axis=axis, mapped=mapped):
            size = layout.grid[axis]
            ys = jax.vmap(f, mapped, axis_size=size)(*xs)
            return [y if axis in a else y.sum(0) for y, a in zip(ys, out_axes)]

        f = g
    return f


def steps_of(
    visits: Sequence,
    layout: GridLayout,
    out_axes: Sequence,
    wanted: Sequence[int],
    vectorise: bool,
    turned: bool = False,
) -> dict[int, Callable]:
    """The steps by which `traverse` adds up the results `wanted` of block functions. Where they are
    `turned`, the first block, the queries, is read as `[rows, features]`.
    """
    steps: dict[int, Callable] = {}
    for c, jaxpr in visits:

        def f(*blocks: Any, jaxpr: Any = jaxpr) -> list:
            blocks = (jnp.swapaxes(blocks[0], 0, 1), *blocks[1:]) if turned else blocks
            ys = evaluate(jaxpr, blocks)
            return [ys[i] for i in wanted]

        axes = [out_axes[i] for i in wanted]
        steps[c] = SumStep(_vectorised(f, layout, axes) if vectorise else f)
    return steps
