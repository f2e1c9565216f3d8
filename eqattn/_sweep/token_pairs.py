"""Numbers of pairs of tokens, such as those of a bias or of a dense mask, read where they lie.

As blocks, they would be a copy, as large as all pairs are. The loops of a CPU undo the cut instead,
as they do with the queries, so that XLA drops it. A block is then cut from the pairs when it is
visited, and a gradient is put back there.

A copied bias of 8 heads of 2048 tokens took 134 MB. On one core of an AMD EPYC, the copy took as
long as the attention.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .grid import COL, GridLayout, HEAD, ROW
from .tokens import can_lie, permuted


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

    def blocks(self, layout: GridLayout) -> Array:
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


def sizes_of(shape: tuple[int, ...], layout: GridLayout) -> tuple[int, int, int] | None:
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


def by_pairs(x: Any, axes: tuple[int, ...], layout: GridLayout) -> Any:
    """An array of blocks as `TokenPairs`, if these have a number for each pair of tokens.

    Unless the loops are `turned`, functions of logits transpose each window that they read. XLA:CPU
    then reads from rows that are far apart, which takes as long as a copy of all pairs. A copy of
    flags is faster. With windows of flags, gradients under a dense mask took 1.25 of the time on
    one core of an AMD EPYC.

    **Arguments:**

    - `axes`: the grid axes of the array, rows and columns among them.
    """
    shape = x.shape[len(axes) :]
    sizes = sizes_of(shape, layout) if can_lie(layout.tokens, layout.grid) else None
    near = (layout.turned and layout.stage == "fold") or x.dtype.itemsize > 1
    if sizes is None or not near:
        return x
    return TokenPairs(joined(x, axes, sizes), axes, sizes, shape)


def sum_by_pairs(
    x: Array, axes: tuple[int, ...], place: tuple[int, ...], layout: GridLayout
) -> Any:
    """The first accumulator of a visit, by pairs if it can be.

    **Arguments:**

    - `axes`, `place`: its grid axes, without and with those of size 1.
    """
    new = by_pairs(x.reshape(layout.shape(place) + x.shape[len(axes) :]), place, layout)
    return new if isinstance(new, TokenPairs) else x
