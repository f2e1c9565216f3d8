"""Blocks of a cache, which a kernel copies itself.

The blocks of other operands are copied by Pallas. At each step it checks for each operand whether
the next block is a new one, and starts and awaits each copy separately. That takes some 40 cycles.
A block of a paged cache is made of many pages, 32 in `decode, pages of 64` on a v7x. In a cache,
every step has a new block. So here copies are started without a check, and copies of one shape are
awaited together.

The copies for step `s + 1` are started in step `s`, into the half of a buffer that step `s` does
not read. The first step also starts its own copies. The last step awaits copies that no step reads.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..._sweep.grid import COL
from ._grid import KernelGrid
from ._operands import KernelOperand


@dataclasses.dataclass(frozen=True)
class BlockCopies:
    """The copies of blocks of one shape and dtype.

    **Arguments:**

    - `grid`: the grid of the kernel.
    - `operands`: those with such blocks, by index. Each page of a block is one of them.
    - `lag`: how many steps before the current one the blocks belong to, 0 or 1.
    """

    grid: KernelGrid
    operands: dict[int, KernelOperand]
    lag: int

    @classmethod
    def of(
        cls, grid: KernelGrid, operands: dict[int, KernelOperand], lag: int
    ) -> list["BlockCopies"]:
        """The copies for those of the operands that are `copied`."""
        kinds: dict[Any, dict[int, KernelOperand]] = {}
        for i, x in operands.items():
            if copied(x):
                kinds.setdefault((x.block, x.array.dtype), {})[i] = x
        return [cls(grid, same, lag) for same in kinds.values()]

    @property
    def scratch(self) -> list:
        """Both halves of the buffer, and a semaphore for each."""
        x = next(iter(self.operands.values()))
        buffer = pltpu.VMEM((2, len(self.operands), *x.block), x.array.dtype)
        return [buffer, pltpu.SemaphoreType.DMA((2,))]

    def run(
        self, ids: Sequence, work: Sequence, refs: dict, buffer: Any, semaphores: Any
    ) -> dict[int, Callable[[], Any]]:
        """Starts the copies for the next step, and awaits those for this one.

        **Arguments:**

        - `ids`: the indices of the step on the kernel's grid.
        - `work`: the list, and the tables of pages.
        - `refs`: the operands in main memory, by index.
        - `buffer`, `semaphores`: the references of `scratch`.

        **Returns:** for each operand, a function that reads its block.
        """
        step = ids[-1]
        here = lax.rem(step, 2)

        def start(half: Any, lag: int) -> None:
            for n, (i, x) in enumerate(self.operands.items()):
                at = tuple(self.grid.index(x.axes, ids, work, lag))
                block, place = refs[i].at[at], buffer.at[half, n]
                pltpu.make_async_copy(block, place, semaphores.at[half]).start()

        def wait(half: Any) -> None:
            """Awaits as many bytes as a half of the buffer has."""
            place = buffer.at[half]
            pltpu.make_async_copy(place, place, semaphores.at[half]).wait()

        pl.when(step == 0)(lambda: start(here, self.lag))
        wait(here)
        start(1 - here, self.lag - 1)
        pl.when(step == pl.num_programs(len(ids) - 1) - 1)(lambda: wait(1 - here))

        def reader(n: int, x: KernelOperand) -> Callable[[], Any]:
            return lambda: x.read(buffer.at[here, n])

        return {i: reader(n, x) for n, (i, x) in enumerate(self.operands.items())}


def copied(x: KernelOperand) -> bool:
    """Whether an operand has another block of a cache at each step."""
    return x.cached and not x.resident and any(a >= 0 or a == COL for a in x.axes)
