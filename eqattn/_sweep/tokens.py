"""Tokens as they lie in memory, from which the blocks of a grid are cut.

The primitives read and write blocks. Queries `[batch, tokens, heads, features]` are cut into blocks
before, and outputs put together afterwards. A kernel that reads tokens where they lie asks for what
the blocks were made of: `Tokens.joined` undoes the cut. XLA drops a cut that is undone, so that
nothing is copied.

So do the loops on a CPU, with queries and with what rows return. As `TokenRows`, a row is cut from
the tokens when it is visited, and put back there. With 8 heads of 4096 tokens, a forward needed 25
MiB of temporary arrays and needs 17. Its gradient needed 42 and needs 25.

Numbers of pairs of tokens, such as those of a bias or of a dense mask, read where they lie.

As blocks, they would be a copy, as large as all pairs are. The loops of a CPU undo the cut instead,
as they do with the queries, so that XLA drops it. A block is then cut from the pairs when it is
visited, and a gradient is put back there.

A copied bias of 8 heads of 2048 tokens took 134 MB. On one core of an AMD EPYC, the copy took as
long as the attention.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .grid import BlockGrid, COL, HEAD, ROW


@dataclasses.dataclass(frozen=True)
class Tokens:
    """How tokens are cut into blocks along one axis of a grid.

    **Arguments:**

    - `axis`: `ROW` or `COL`.
    - `count`: the number of tokens. Blocks have zeros after the last token.
    - `block`: the tokens of a block.
    - `group`: the number of heads that a block has for each of its tokens. It has all tokens of the
        first head, then those of the next.
    - `mapped`: the grid axis that `jax.vmap` put in the place of one of size 1, or None.
    """

    axis: int
    count: Any
    block: int
    group: int = 1
    mapped: int | None = None

    def joined(self, x: Array, axes: tuple[int, ...], transposed: bool = False) -> Array:
        """Undoes `cut`.

        **Arguments:**

        - `x`: blocks `[*axes, group * block, features]`, or `[*axes, features, group * block]` if
            they are `transposed`.
        - `axes`: the axes of the grid in front, `axis` and `HEAD` among them.

        **Returns:** `[*others, tokens, heads, features]`, with the other axes in front.
        """
        lead, features = x.shape[: len(axes)], x.shape[-2 if transposed else -1]
        block = (
            (features, self.group, self.block) if transposed else (self.group, self.block, features)
        )
        order, others = self._order(axes, transposed)
        x = x.reshape(*lead, *block)
        if self.mapped is not None:
            # Tokens were cut beside an axis of size 1. Without it, XLA:CPU would not drop the cut.
            n = sum(a <= self.mapped for a in axes)
            x = jnp.expand_dims(x, n)
            order = [*range(n + 1), *(i + 1 for i in order[n:])]
        x = lax.transpose(x, order)
        rows, heads = lead[axes.index(self.axis)], lead[axes.index(HEAD)]
        x = x.reshape(*[lead[i] for i in others], rows * self.block, heads * self.group, features)
        return lax.slice_in_dim(x, 0, self.count, axis=len(others))

    def cut(
        self, x: Array, axes: tuple[int, ...], sizes: dict[int, int], transposed: bool
    ) -> Array:
        """Turns `[*others, tokens, heads, features]` into blocks, as `joined` takes them.

        **Arguments:**

        - `sizes`: the size of each axis of the grid.
        """
        order, others = self._order(axes, transposed)
        n, features = len(others), x.shape[-1]
        rows, heads = sizes[self.axis], sizes[HEAD]
        missing = rows * self.block - x.shape[n]
        x = jnp.pad(x, [(0, 0)] * n + [(0, missing), (0, 0), (0, 0)])
        x = x.reshape(*x.shape[:n], rows, self.block, heads, self.group, features)
        inverse = [order.index(i) for i in range(len(order))]
        x = lax.transpose(x, inverse)
        block = (features, -1) if transposed else (-1, features)
        return x.reshape(*[sizes[a] for a in axes], *block)

    def _order(self, axes: tuple[int, ...], transposed: bool) -> tuple[list[int], list[int]]:
        """Where the axes `[*others, rows, block, heads, group, features]` are in blocks, and where
        the others are.
        """
        n = len(axes)
        features, group, block = (n, n + 1, n + 2) if transposed else (n + 2, n, n + 1)
        others = [i for i, a in enumerate(axes) if a not in (self.axis, HEAD)]
        at, head = axes.index(self.axis), axes.index(HEAD)
        return [*others, at, block, head, group, features], others


Padding = Literal["zeros", "last", "again"]
"""What pads an axis: zeros, its last entry, or its last entries once more."""


def padded(x: Any, axis: int, n: int, by: Padding) -> Any:
    """Pads an axis to `n` entries. `"again"` is for large arrays: XLA:TPU copies these three times
    to put an entry beside them that is repeated, and need not copy them to put several there. Where
    there are not enough entries, it is `"last"`.

    What pads has no gradient: added as a 0, it would change the bits of a gradient that is -0.
    """
    widths, xp, m = [(0, 0)] * x.ndim, np if isinstance(x, np.ndarray) else jnp, x.shape[axis]
    widths[axis] = (0, n - m)
    if by == "zeros":
        return xp.pad(x, widths)
    if by == "again" and n <= 2 * m:
        end = x[(*[slice(None)] * axis, slice(2 * m - n, m))]
        return xp.concatenate([x, end if xp is np else lax.stop_gradient(end)], axis)
    if xp is np or not jnp.issubdtype(x.dtype, jnp.inexact):
        return xp.pad(x, widths, mode="edge")
    whole = jnp.pad(lax.stop_gradient(x), widths, mode="edge")
    return jnp.concatenate([x, lax.slice_in_dim(whole, m, n, axis=axis)], axis)


def permuted(x: Any, sizes: Sequence[int], order: Sequence[int], undone: bool = True) -> Any:
    """An array of these `sizes` with its axes in another order.

    Axes of size 1 are not moved if that is to be `undone`. Beside them, XLA:CPU does not see it.
    Where a copy is left, it takes up to 1.5 of the time without them.
    """
    kept = [i for i, n in enumerate(sizes) if n != 1 or not undone]
    x = x.reshape([sizes[i] for i in kept])
    x = x.transpose([kept.index(i) for i in order if i in kept])
    return x.reshape([sizes[i] for i in order])


def are_whole(tokens: Sequence[Tokens], grid: Sequence[int]) -> bool:
    """Whether the blocks of a grid are cut from tokens, queries as well as keys, and none of them
    is padded.
    """
    cut = {t.axis: t for t in tokens}
    if {*cut} != {ROW, COL} or not all(isinstance(t.count, int) for t in tokens):
        return False
    return all(t.count == grid[a] * t.block for a, t in cut.items())


def can_lie(tokens: Sequence[Tokens], grid: Sequence[int]) -> bool:
    """Whether loops can read pairs where they lie: several blocks, none of them padded.

    A single block is copied fast, and a padded one would have to be put together when it is read.
    With either, forwards took 1.1 of the time.
    """
    return are_whole(tokens, grid) and grid[ROW] * grid[COL] > 1


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


class TokenRows(eqx.Module):
    """An array whose blocks `[tokens, features]` are parts of its tokens.

    **Arguments:**

    - `tokens`: `[*others, tokens, heads, features]`, with the other grid axes in front.
    - `axes`: the grid axes of the array.
    - `cut`: how the tokens are cut into blocks.
    - `transposed`: whether blocks are `[features, tokens]` instead.
    """

    tokens: Array
    axes: tuple[int, ...] = eqx.field(static=True)
    cut: Tokens = eqx.field(static=True)
    transposed: bool = eqx.field(static=True)

    @property
    def dtype(self) -> Any:
        return self.tokens.dtype

    def _window(self, at: dict) -> list:
        first = [at[a] for a in self.axes if a not in (HEAD, ROW)]
        first += [at[ROW] * self.cut.block, at[HEAD] * self.cut.group, 0]
        return [jnp.int32(i) for i in first]

    def pick(self, at: dict) -> Array:
        """The block at the given grid indices."""
        start, features = self._window(at), self.tokens.shape[-1]
        sizes = [1] * (len(start) - 3) + [self.cut.block, self.cut.group, features]
        x = lax.dynamic_slice(self.tokens, start, sizes, allow_negative_indices=False)
        x = jnp.swapaxes(x.reshape(sizes[-3:]), 0, 1).reshape(-1, features)
        return x.T if self.transposed else x

    def put(self, at: dict, block: Array) -> "TokenRows":
        """Replaces the block at the given grid indices."""
        start, block = self._window(at), block.T if self.transposed else block
        block = jnp.swapaxes(block.reshape(self.cut.group, self.cut.block, -1), 0, 1)
        block = block.reshape(*[1] * (len(start) - 3), *block.shape)
        tokens = lax.dynamic_update_slice(self.tokens, block, start, allow_negative_indices=False)
        return dataclasses.replace(self, tokens=tokens)

    def blocks(self, layout: BlockGrid) -> Array:
        """The array as blocks."""
        sizes = dict(zip(self.axes, layout.shape(self.axes)))
        return self.cut.cut(self.tokens, self.axes, sizes, self.transposed)


def by_tokens(x: Array, axes: tuple[int, ...], layout: BlockGrid, transposed: bool) -> Any:
    """An array of blocks as `TokenRows`, if these are whole blocks of tokens with features.

    **Arguments:**

    - `x`, `axes`: the array, and its grid axes.
    - `transposed`: whether its blocks are `[features, tokens]`.
    """
    block = x.shape[len(axes) :][:: -1 if transposed else 1]
    cut = next((t for t in layout.tokens if t.axis == ROW), None)
    if cut is None or layout.ring is not None or COL in axes or not {HEAD, ROW} <= {*axes}:
        return x
    whole = isinstance(cut.count, int) and cut.count == layout.grid[ROW] * cut.block
    if not whole or len(block) != 2 or block[0] != cut.block * cut.group or 1 in block:
        return x
    return TokenRows(cut.joined(x, axes, transposed), axes, cut, transposed)


def _zero(operands: Sequence, dtype: Any) -> Array:
    """The number 0, which XLA cannot know before the last of the operands."""
    x = next(x for x in reversed(operands) if jnp.issubdtype(x.dtype, jnp.floating))
    (x,) = jax.tree.leaves(x)
    return (x.reshape(-1)[0] > jnp.inf).astype(dtype)


def _wait(sums: Sequence[Array], operands: Sequence) -> bool:
    """Whether sums wait for the cotangent: if none is larger than the queries, and so than the
    numerator. With 32 queries of 131,072 keys, the gradient would take 96 MiB instead of 67.
    """
    queries = operands[0].tokens if isinstance(operands[0], TokenRows) else operands[0]
    sizes = [math.prod(x.shape) for x in (queries, *sums)]
    return all(isinstance(n, int) for n in sizes) and max(sizes) == sizes[0]


def sums_by_tokens(
    accumulators: Sequence[Array],
    axes: Sequence[tuple[int, ...]],
    places: Sequence[tuple[int, ...]],
    layout: BlockGrid,
    operands: Sequence,
) -> list:
    """The first accumulators of a visit, by tokens where they can be.

    Those of a gradient wait for the last operand, which is a cotangent. XLA:CPU would make zeros
    ahead of the forward, and keep them in the arrays of the gradients. These now hold the numerator
    until then. Without that, a gradient of 8 heads of 4096 tokens needs 34 MiB.

    **Arguments:**

    - `axes`, `places`: the grid axes of each, without and with those of size 1.
    - `operands`: the arrays that the visit reads.
    """
    backward, found = layout.stage == "backward", []
    late = backward and _wait(accumulators, operands)
    for x, a, place in zip(accumulators, axes, places):
        whole = x.reshape(layout.shape(place) + x.shape[len(a) :])
        whole = whole + _zero(operands, x.dtype) if late else whole
        # The gradients of queries come as `[features, rows]`.
        new = by_tokens(whole, place, layout, transposed=backward)
        found.append(new if isinstance(new, TokenRows) else whole.reshape(x.shape))
    return found


class TokenPairs(eqx.Module):
    """An array of numbers of pairs, whose blocks `[keys, rows]` are windows of it.

    **Arguments:**

    - `pairs`: `[*others, heads, queries, keys]`, with the other grid axes in front.
    - `axes`: the grid axes of the array.
    - `sizes`: the heads, queries and keys of a block.
    - `shape`: the shape of a block, `[keys, heads * queries]` or `[keys, heads, queries]`.
    """

    pairs: Array
    axes: tuple[int, ...] = eqx.field(static=True)
    sizes: tuple[int, int, int] = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True)

    @property
    def dtype(self) -> Any:
        return self.pairs.dtype

    def _window(self, at: dict) -> list:
        first = [at[a] for a in self.axes if a not in (HEAD, ROW, COL)]
        # A grid has no axis of heads where all are in a block, and a single column may be left out.
        first += [at.get(a, 0) * n for a, n in zip((HEAD, ROW, COL), self.sizes)]
        return [jnp.int32(i) for i in first]

    def pick(self, at: dict) -> Array:
        """The block at the given grid indices."""
        start = self._window(at)
        sizes = [1] * (len(start) - 3) + [*self.sizes]
        x = lax.dynamic_slice(self.pairs, start, sizes, allow_negative_indices=False)
        return jnp.moveaxis(x.reshape(self.sizes), 2, 0).reshape(self.shape)

    def put(self, at: dict, block: Array) -> "TokenPairs":
        """Replaces the block at the given grid indices."""
        start, (heads, queries, keys) = self._window(at), self.sizes
        block = jnp.moveaxis(block.reshape(keys, heads, queries), 0, 2)
        block = block.reshape(*[1] * (len(start) - 3), *block.shape)
        pairs = lax.dynamic_update_slice(self.pairs, block, start, allow_negative_indices=False)
        return dataclasses.replace(self, pairs=pairs)

    def blocks(self, layout: BlockGrid) -> Array:
        """The array as blocks. This undoes `joined`."""
        grid = [layout.size(a) for a in self.axes]
        order, cut = _order(self.axes), [*grid, *self.sizes]
        n = len(grid)
        inverse = [order.index(i) for i in (*range(n), n + 2, n, n + 1)]
        return permuted(self.pairs, [cut[i] for i in order], inverse).reshape(*grid, *self.shape)


def _order(axes: tuple[int, ...]) -> list[int]:
    """Where the axes `[*others, key heads, heads, rows, queries, columns, keys]` are in the array
    `[*axes, heads, queries, keys]`.
    """
    n, found = len(axes), [i for i, a in enumerate(axes) if a not in (HEAD, ROW, COL)]
    for i, a in enumerate((HEAD, ROW, COL)):
        found += [*([axes.index(a)] if a in axes else []), n + i]
    return found


def joined(x: Array, axes: tuple[int, ...], sizes: tuple[int, int, int]) -> Array:
    """Undoes the cut of pairs into blocks `[keys, heads * queries]`.

    **Returns:** `[*others, heads, queries, keys]`.
    """
    n, (heads, queries, keys) = len(axes), sizes
    grid, moved = x.shape[:n], {n: n + 1, n + 1: n + 2, n + 2: n}
    order = [moved.get(i, i) for i in _order(axes)]
    x = permuted(x, [*grid, keys, heads, queries], order)
    of = dict(zip(axes, grid))
    others = [of[a] for a in axes if a not in (HEAD, ROW, COL)]
    return x.reshape(*others, *(of.get(a, 1) * n for a, n in zip((HEAD, ROW, COL), sizes)))


def sizes_of(shape: tuple[int, ...], layout: BlockGrid) -> tuple[int, int, int] | None:
    """The heads, queries and keys of a block that has a number for each pair of tokens. It is None
    for other blocks, and if `joined` cannot put together what they were cut from.

    **Arguments:**

    - `shape`: the shape of a block.
    """
    cut = {t.axis: t for t in layout.tokens}
    if layout.ring is not None or {*cut} != {ROW, COL}:
        return None
    (group, queries), keys = (cut[ROW].group, cut[ROW].block), cut[COL].block
    heads = {(keys, group * queries): group, (keys, 1, queries): 1}.get(shape)
    return heads and (heads, queries, keys)


def by_pairs(x: Any, axes: tuple[int, ...], layout: BlockGrid) -> Any:
    """An array of blocks as `TokenPairs`, if these have a number for each pair of tokens.

    Unless the loops are `transposed`, functions of logits transpose each window that they read.
    XLA:CPU then reads from rows that are far apart, which takes as long as a copy of all pairs. A
    copy of flags is faster. With windows of flags, gradients under a dense mask took 1.25 of the
    time on one core of an AMD EPYC.

    **Arguments:**

    - `axes`: the grid axes of the array, rows and columns among them.
    """
    shape = x.shape[len(axes) :]
    sizes = sizes_of(shape, layout) if can_lie(layout.tokens, layout.grid) else None
    near = (layout.transposed and layout.stage == "fold") or x.dtype.itemsize > 1
    if sizes is None or not near:
        return x
    return TokenPairs(joined(x, axes, sizes), axes, sizes, shape)


def sum_by_pairs(x: Array, axes: tuple[int, ...], place: tuple[int, ...], layout: BlockGrid) -> Any:
    """The first accumulator of a visit, by pairs if it can be.

    **Arguments:**

    - `axes`, `place`: its grid axes, without and with those of size 1.
    """
    new = by_pairs(x.reshape(layout.shape(place) + x.shape[len(axes) :]), place, layout)
    return new if isinstance(new, TokenPairs) else x
