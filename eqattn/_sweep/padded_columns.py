"""Columns whose last block is padded, read where their tokens lie.

Keys of a cache are cut into blocks of a fixed size for all capacities, and the last block is
padded. As an array that would be a copy of all keys. The loops undo the padding instead, so that
XLA drops the copy, and read each block as a window of the tokens:

    tokens  0 1 2 3 4 5 6 7 8 9        blocks of 4:  0 1 2 3 | 4 5 6 7 | 8 9 - -

The last block is padded when it is read, in a separate loop. It is the last one that a row visits,
as it is never full, and blocks of a class are visited in order.
"""

import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .grid import COL, GridLayout, ROW


class PaddedColumns(eqx.Module):
    """An operand whose blocks are windows of its tokens, except the last block, which is padded.

    **Arguments:**

    - `tokens`: `[*axes, tokens, ...]`, with the grid axes but the columns in front.
    - `block`: the tokens of a block, fewer than there are.
    """

    tokens: Array
    block: int = eqx.field(static=True)

    @property
    def dtype(self) -> Any:
        return self.tokens.dtype

    def pick(self, axes: tuple[int, ...], at: dict, last: bool) -> Array:
        """The block at the given grid indices, the column among them; see `pick` of `grid.py`.
        `last` says whether that is the last column.
        """
        n, lead = len(axes) - 1, self.tokens.shape[: len(axes) - 1]
        length, *rest = self.tokens.shape[n:]
        left = length % self.block
        # This depends on the turn, so that XLA pads no last block of a row that does not see it.
        first = jnp.int32(at[COL]) * jnp.int32(self.block)
        start = [*(jnp.int32(at.get(a, 0)) for a in axes[:n]), first, *[jnp.int32(0)] * len(rest)]
        size = left if last else self.block
        sizes = [*(1 if a in at else m for a, m in zip(axes, lead)), size, *rest]
        found = lax.dynamic_slice(self.tokens, start, sizes, allow_negative_indices=False)
        found = found.reshape(*(m for a, m in zip(axes, lead) if a not in at), size, *rest)
        if not last:
            return found
        axis = found.ndim - len(rest) - 1
        return jnp.pad(found, [(0, (self.block - left) * (i == axis)) for i in range(found.ndim)])


def without_padding(x: Array, axes: tuple[int, ...], layout: GridLayout) -> Any:
    """An operand of the loops, as `PaddedColumns` if the layout says that its columns are padded
    and its blocks hold several numbers of each key.
    """
    n, block = len(axes), layout.block[0]
    lies = axes[-1:] == (COL,) and ROW not in axes and x.ndim > n and x.shape[n] == block
    if not (layout.padded and lies and math.prod(x.shape[n + 1 :]) > 1):
        return x
    tokens = x.reshape(*x.shape[: n - 1], -1, *x.shape[n + 1 :])
    return PaddedColumns(lax.slice_in_dim(tokens, 0, layout.padded, axis=n - 1), block)
