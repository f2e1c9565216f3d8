"""Tokens as they lie in memory, from which the blocks of a grid are cut.

The primitives read and write blocks. Queries `[batch, tokens, heads, features]` are cut into blocks
before, and outputs put together afterwards. A kernel that reads tokens where they lie asks for what
the blocks were made of: `Tokens.joined` undoes the cut. XLA drops a cut that is undone, so that
nothing is copied.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .grid import HEAD


@dataclasses.dataclass(frozen=True)
class Tokens:
    """How tokens are cut into blocks along one axis of a grid.

    **Arguments:**

    - `axis`: `ROW` or `COL`.
    - `count`: the number of tokens. Blocks have zeros after the last token.
    - `block`: the tokens of a block.
    - `group`: the number of heads that a block has for each of its tokens. It has all tokens of the
        first head, then those of the next.
    """

    axis: int
    count: Any
    block: int
    group: int = 1

    def joined(self, x: Array, axes: tuple[int, ...], turned: bool = False) -> Array:
        """Undoes `cut`.

        **Arguments:**

        - `x`: blocks `[*axes, group * block, features]`, or `[*axes, features, group * block]` if
            they are `turned`.
        - `axes`: the axes of the grid in front, `axis` and `HEAD` among them.

        **Returns:** `[*others, tokens, heads, features]`, with the other axes in front.
        """
        lead, features = x.shape[: len(axes)], x.shape[-2 if turned else -1]
        block = (features, self.group, self.block) if turned else (self.group, self.block, features)
        order, others = self._order(axes, turned)
        x = lax.transpose(x.reshape(*lead, *block), order)
        rows, heads = lead[axes.index(self.axis)], lead[axes.index(HEAD)]
        x = x.reshape(*[lead[i] for i in others], rows * self.block, heads * self.group, features)
        return lax.slice_in_dim(x, 0, self.count, axis=len(others))

    def cut(self, x: Array, axes: tuple[int, ...], sizes: dict[int, int], turned: bool) -> Array:
        """Turns `[*others, tokens, heads, features]` into blocks, as `joined` takes them.

        **Arguments:**

        - `sizes`: the size of each axis of the grid.
        """
        order, others = self._order(axes, turned)
        n, features = len(others), x.shape[-1]
        rows, heads = sizes[self.axis], sizes[HEAD]
        missing = rows * self.block - x.shape[n]
        x = jnp.pad(x, [(0, 0)] * n + [(0, missing), (0, 0), (0, 0)])
        x = x.reshape(*x.shape[:n], rows, self.block, heads, self.group, features)
        inverse = [order.index(i) for i in range(len(order))]
        x = lax.transpose(x, inverse)
        block = (features, -1) if turned else (-1, features)
        return x.reshape(*[sizes[a] for a in axes], *block)

    def _order(self, axes: tuple[int, ...], turned: bool) -> tuple[list[int], list[int]]:
        """Where the axes `[*others, rows, block, heads, group, features]` are in blocks, and where
        the others are.
        """
        n = len(axes)
        features, group, block = (n, n + 1, n + 2) if turned else (n + 2, n, n + 1)
        others = [i for i, a in enumerate(axes) if a not in (self.axis, HEAD)]
        at, head = axes.index(self.axis), axes.index(HEAD)
        return [*others, at, block, head, group, features], others


def by_head(x: Array, heads: int) -> Array:
    """Rows `[*lead, rows, heads * queries, features]`, with all queries of a head together.

    A projection writes them so, and XLA has nothing to copy.

    **Returns:** `[*lead, heads, rows, queries, features]`.
    """
    *lead, n, features = x.shape
    return jnp.swapaxes(x.reshape(*lead, heads, n // heads, features), -3, -4)


def from_heads(x: Array) -> Array:
    """Undoes `by_head`."""
    x = jnp.swapaxes(x, -3, -4)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])
