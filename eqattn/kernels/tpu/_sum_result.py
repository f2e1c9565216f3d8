"""An output of the kernel that sums over live pairs: how it lies in vector and in main memory."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ..._sweep.grid import GridLayout
from ..._sweep.token_pairs import TokenPairs
from ..._sweep.tokens import from_heads
from ._operands import vmem_shape


@dataclasses.dataclass(frozen=True)
class SumResult:
    """An output of a kernel.

    **Arguments:**

    - `aval`: the shape and dtype of its block, as a step of the sweep reads it.
    - `axes`: the grid axes that it keeps.
    - `lies`: those of them in front of what lies in vector memory at one time.
    - `dtype`: the dtype in which it is written, once its sum is complete.
    - `rows`: the number of blocks that lie there at one time, if all rows stay: `(rows,)`, or `()`.
    - `flipped`: whether its sum is the transpose of what is written, and so has additional memory.
    - `turned`: whether its blocks are the transposes of its sums, with features innermost.
    - `heads`: how many heads a row has the queries of, if blocks that are turned are written by
        head.
    - `window`: the heads, queries and keys of a block of pairs that is written where these lie, see
        `PairsOperand`; else None.
    """

    aval: Any
    axes: tuple[int, ...]
    lies: tuple[int, ...]
    dtype: Any
    rows: tuple[int, ...] = ()
    flipped: bool = False
    turned: bool = False
    heads: int = 1
    window: tuple[int, int, int] | None = None

    @property
    def block(self) -> tuple[int, ...]:
        """The shape of one block in vector memory."""
        return vmem_shape(self.aval.shape)

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of what lies in vector memory at one time."""
        return (*self.rows, *self.block)

    @property
    def written(self) -> tuple[int, ...]:
        """The shape of what is written of it at one time."""
        if self.window:
            return self.window
        if not self.turned:
            return self.whole
        rows, features = self.block[::-1]
        if self.heads == 1:
            return (*self.rows, rows, features)
        return (self.heads, *self.rows, rows // self.heads, features)

    def write(self, ref: Any, sum_of: Callable[..., Any]) -> None:
        """Writes what lies in vector memory at one time.

        **Arguments:**

        - `sum_of`: a function of a row, or of `...` for all, that returns its sum.
        """
        if self.window:
            ref[...] = sum_of(...).reshape(self.window)
            return
        if not self.turned:
            ref[...] = sum_of(...).T if self.flipped else sum_of(...)
            return
        for row in range(*self.rows):
            block = sum_of(row).T
            if self.heads == 1:
                ref[row] = block
            else:
                ref[:, row] = block.reshape(self.heads, -1, block.shape[-1])

    def from_written(self, x: Any, layout: GridLayout) -> Any:
        """What was written, as the sweep returns it, before its grid axes are restored."""
        if self.window:
            return TokenPairs(x, self.axes, self.window, self.aval.shape).blocks(layout)
        x = from_heads(x) if self.heads > 1 else x
        return jnp.swapaxes(x, -1, -2) if self.turned else x

    @property
    def total(self) -> tuple[int, ...]:
        """The shape of its sum."""
        if self.window:
            return self.block[::-1]
        return self.whole[::-1] if self.flipped else self.whole

    @property
    def apart(self) -> bool:
        """Whether the sum has memory beside what is written. This is so if its place is visited
        several times, or if the sum is rounded.
        """
        return not self.rows or self.dtype != self.aval.dtype
