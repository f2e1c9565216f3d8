"""Blocks that are read and written where their tokens lie.

Queries are cut into the blocks of rows before a visit, and what rows return is put together after
it. As arrays, both are copies. The loops on a CPU undo the cut, so that XLA drops the copies. They
cut a block from the tokens when they read it, and put it back there. Sums of the gradients of keys
and values lie so, too. With 8 heads of 4096 tokens, a forward needed 17 MB in place of 25, and a
gradient 25 in place of 42.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .grid import COL, GridLayout, HEAD, pick, put, ROW
from .tokens import Tokens


_ADDS: Any = dict(mode="promise_in_bounds", unique_indices=True)


class TokenBlocks(eqx.Module):
    """An array whose blocks `[tokens, features]` are parts of its tokens.

    **Arguments:**

    - `tokens`: `[*others, tokens, heads, features]`, with the other grid axes in front.
    - `axes`: the grid axes of the array.
    - `cut`: how the tokens are cut into blocks.
    - `turned`: whether blocks are `[features, tokens]` instead.
    """

    tokens: Array
    axes: tuple[int, ...] = eqx.field(static=True)
    cut: Tokens = eqx.field(static=True)
    turned: bool = eqx.field(static=True)

    @property
    def dtype(self) -> Any:
        return self.tokens.dtype

    def _window(self, at: dict) -> list:
        first = [at[a] for a in self.axes if a not in (HEAD, self.cut.axis)]
        first += [at.get(self.cut.axis, 0) * self.cut.block, at[HEAD] * self.cut.group, 0]
        return [jnp.int32(i) for i in first]

    def pick(self, at: dict) -> Array:
        """The block at the given grid indices."""
        start, features = self._window(at), self.tokens.shape[-1]
        sizes = [1] * (len(start) - 3) + [self.cut.block, self.cut.group, features]
        x = lax.dynamic_slice(self.tokens, start, sizes, allow_negative_indices=False)
        x = jnp.swapaxes(x.reshape(sizes[-3:]), 0, 1).reshape(-1, features)
        return x.T if self.turned else x

    def put(self, at: dict, block: Array) -> "TokenBlocks":
        """Replaces the block at the given grid indices."""
        start, block = self._window(at), block.T if self.turned else block
        block = jnp.swapaxes(block.reshape(self.cut.group, self.cut.block, -1), 0, 1)
        block = block.reshape(*[1] * (len(start) - 3), *block.shape)
        tokens = lax.dynamic_update_slice(self.tokens, block, start, allow_negative_indices=False)
        return dataclasses.replace(self, tokens=tokens)

    def add(self, at: dict, blocks: Array) -> "TokenBlocks":
        """Adds to the blocks of several columns, which are the first axis of `blocks`."""
        x, n = self.tokens, self.tokens.ndim - 3
        x = x.reshape(*x.shape[:n], -1, self.cut.block, *x.shape[n + 1 :])
        others = [at[a] for a in self.axes if a not in (HEAD, self.cut.axis)]
        x = x.at[(*others, at[self.cut.axis], slice(None), at[HEAD])].add(blocks, **_ADDS)
        return dataclasses.replace(self, tokens=x.reshape(self.tokens.shape))

    def blocks(self, layout: GridLayout) -> Array:
        """The array as blocks."""
        sizes = dict(zip(self.axes, layout.shape(self.axes)))
        return self.cut.cut(self.tokens, self.axes, sizes, self.turned)


def by_tokens(x: Array, axes: tuple[int, ...], layout: GridLayout, turned: bool) -> Any:
    """An array of blocks as `TokenBlocks`, if these are whole blocks of tokens with features.

    **Arguments:**

    - `x`, `axes`: the array, and its grid axes.
    - `turned`: whether its blocks are `[features, tokens]`.
    """
    block, here = x.shape[len(axes) :][:: -1 if turned else 1], {*axes} & {ROW, COL}
    cut = next((t for t in layout.tokens if {t.axis} == here), None)
    if cut is None or layout.ring is not None or HEAD not in axes:
        return x
    whole = isinstance(cut.count, int) and cut.count == layout.size(cut.axis) * cut.block
    if not whole or len(block) != 2 or block[0] != cut.block * cut.group or 1 in block:
        return x
    return TokenBlocks(cut.joined(x, axes, turned), axes, cut, turned)


def queries_by_rows(x: Array, axes: tuple[int, ...], layout: GridLayout) -> Any:
    """Queries of which the loops read blocks `[rows, features]` instead of `[features, rows]`.

    Gradients read each block transposed, too. XLA:CPU fuses this with the read, which is slow where
    tokens are far apart. With 128 features, gradients of 256 tokens took up to 1.05 of the time.
    """
    near = layout.stage == "fold" or x.shape[-2] <= 64
    found = by_tokens(x, axes, layout, turned=True) if near else x
    if isinstance(found, TokenBlocks):
        return dataclasses.replace(found, turned=False)
    return jnp.swapaxes(x, -1, -2)


def _zero(operands: Sequence, dtype: Any) -> Array:
    """The number 0, which XLA cannot know before the last of the operands."""
    x = next(x for x in reversed(operands) if jnp.issubdtype(x.dtype, jnp.floating))
    x = x.tokens if isinstance(x, TokenBlocks) else x
    return (x.reshape(-1)[0] > jnp.inf).astype(dtype)


def sums_by_tokens(
    accumulators: Sequence[Array],
    axes: Sequence[tuple[int, ...]],
    places: Sequence[tuple[int, ...]],
    layout: GridLayout,
    operands: Sequence,
) -> list:
    """The first accumulators of a visit, by tokens where they can be.

    Those of a gradient wait for the last operand, which is a cotangent. XLA:CPU would make zeros
    ahead of the forward, and keep them in the arrays of the gradients. These now hold the numerator
    until then. With 8 heads of 4096 tokens, a gradient needed 34 MB otherwise.

    **Arguments:**

    - `axes`, `places`: the grid axes of each, without and with those of size 1.
    - `operands`: the arrays that the visit reads.
    """
    backward, found = layout.stage == "backward", []
    for x, a, place in zip(accumulators, axes, places):
        whole = x.reshape(layout.shape(place) + x.shape[len(a) :])
        whole = whole + _zero(operands, x.dtype) if backward else whole
        # The gradients of queries come as `[features, rows]`.
        new = by_tokens(whole, place, layout, backward and ROW in place)
        found.append(new if isinstance(new, TokenBlocks) else x)
    return found


def pick_from(x: Any, axes: tuple[int, ...], at: dict) -> Array:
    """The block of an array at the given grid indices."""
    return x.pick(at) if isinstance(x, TokenBlocks) else pick(x, axes, at)


def put_into(x: Any, axes: tuple[int, ...], at: dict, block: Array) -> Any:
    """Replaces the block that `pick_from` returns."""
    return x.put(at, block) if isinstance(x, TokenBlocks) else put(x, axes, at, block)


def add_to(x: Any, axes: tuple[int, ...], at: dict, blocks: Array) -> Any:
    """Adds to the blocks of several columns, which are the first axis of `blocks`."""
    if isinstance(x, TokenBlocks):
        return x.add(at, blocks)
    return x.at[tuple(at[a] for a in axes)].add(blocks, **_ADDS)
