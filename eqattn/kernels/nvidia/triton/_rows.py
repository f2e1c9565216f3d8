"""Matrices of tokens as kernels read and write their rows.

Tokens are read and written where they lie, `[batch, tokens, heads, features]`, at addresses that
threads compute. Where tokens move around a ring, blocks are read and written instead.
"""

import copy
import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from ...._sweep.grid import BlockGrid, HEAD
from ...._sweep.tokens import Tokens
from .._diagonals import DiagonalOperand
from .._operands import Operand, Places, rounded_up
from .._operations import Value
from . import _pallas as triton


TOGETHER = 4
"""How many numbers of 32 bits are copied at once, if they lie at a multiple of their size."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Where the rows of blocks of a matrix lie.

    **Arguments:**

    - `layout`: the grid.
    - `axes`, `axis`: the grid axes of the matrix, and the one along which its tokens lie.
    - `rows`, `width`: the numbers of rows and features of a block.
    - `transposed`: whether blocks are `[width, rows]`.
    - `in_place`: whether tokens may be read or written where they lie.
    """

    layout: BlockGrid
    axes: tuple[int, ...]
    axis: int
    rows: int
    width: int
    transposed: bool
    in_place: bool = True

    @property
    def tokens(self) -> Tokens | None:
        """The tokens that the matrix was cut from, if they are read or written in place."""
        found = next((x for x in self.layout.tokens if x.axis == self.axis), None)
        return found if self.in_place and {HEAD, self.axis} <= set(self.axes) else None

    @property
    def _others(self) -> list[int]:
        return [a for a in self.axes if a not in (self.axis, HEAD)]

    def given(self, x: Any, dtype: Any) -> Any:
        """The array that a kernel reads: `[elements, tokens, heads, features]` in place, else
        `[blocks, rows, features]`.
        """
        if self.tokens is not None:
            x = self.tokens.joined(x, self.axes, self.transposed)
            return x.reshape(-1, *x.shape[-3:]).astype(dtype)
        x = jnp.swapaxes(x, -1, -2) if self.transposed else x
        return x.reshape(-1, self.rows, self.width).astype(dtype)

    @property
    def written(self) -> tuple[int, ...]:
        """The shape of the array that a kernel writes."""
        if self.tokens is None:
            return math.prod(self.layout.shape(self.axes)), self.rows, self.width
        elements = math.prod(self.layout.shape(tuple(self._others)))
        return elements, self.tokens.count, self.layout.grid[HEAD] * self.tokens.group, self.width

    def blocks(self, x: Any) -> Any:
        """Turns what a kernel wrote into blocks, with the axes of the grid in front."""
        sizes = {a: self.layout.grid[a] for a in self.axes}
        if self.tokens is None:
            x = x.reshape(*sizes.values(), self.rows, self.width)
            return jnp.swapaxes(x, -1, -2) if self.transposed else x
        x = x.reshape(*[sizes[a] for a in self._others], *x.shape[1:])
        return self.tokens.cut(x, self.axes, sizes, self.transposed)

    def where(self, places: Places, other: Any, rows: Any, tile: int) -> tuple[tuple, Any]:
        """The indices of rows in memory, and which of them there are; None if all are.

        **Arguments:**

        - `places`, `other`: where the block is on the grid.
        - `rows`: the indices of the rows in the block, `[n]`.
        - `tile`: how many rows there are, if the index of the first one is a multiple of that;
            else 0.
        """
        inside = None if tile and self.rows % tile == 0 else rows < self.rows
        if self.tokens is None:
            return (places.place(self.axes, other), rows), inside
        at, block, group = places.with_other(other), self.tokens.block, self.tokens.group
        first, head = at[self.axis] * jnp.int32(block), at[HEAD] * jnp.int32(group)
        heads = lax.div(rows, jnp.full_like(rows, block)) if group > 1 else 0
        token = first + rows - heads * block
        if self.tokens.count % block:
            here = token < self.tokens.count
            inside = here if inside is None else inside & here
        return (places.place(self._others, other), token, head + heads), inside


def is_near(x: Operand) -> bool:
    """Whether a program reads an operand once, and not again for each tile of the other side."""
    return not (x.moves or x.staged)


def value_of(x: Operand, ref: Any, place: Any, parts: dict[str, Any]) -> Value:
    """What a block function is given of an operand. The arguments are its array, and those of
    `Operand.at`.
    """
    if x.kind is None:
        return x.value(tuple(ref[place, i] for i in range(x.array.shape[1])))
    found = ref[x.at(place, parts)]
    return x.value(found.T if x.transposed else found)


def shifted(operands: dict[int, Operand]) -> dict[int, Operand]:
    """Operands, in which numbers that diagonals share are there `TOGETHER` times, each time from
    another one on. So there is a copy in which a row of a tile begins at such a multiple.
    """

    def one(x):
        if not isinstance(x, DiagonalOperand):
            return x
        new, n = copy.copy(x), rounded_up(x.array.size, TOGETHER)
        whole = jnp.pad(x.array, (0, n + TOGETHER - x.array.size))
        new.array = jnp.concatenate([whole[i : i + n] for i in range(TOGETHER)])
        return new

    return {i: one(x) for i, x in operands.items()}


def along_diagonals(
    x: DiagonalOperand, ref: Any, place: Any, at: tuple, own: Any, other: Any, tile: int
) -> Value:
    """What a block function is given of numbers that diagonals share. The arguments are `ref`, an
    array of `shifted` operands, and those of `DiagonalOperand.places`.
    """
    shape = own.shape[0], tile
    behind = lax.broadcasted_iota(jnp.int32, shape, 1)
    places = x.places(place, at, own, other, tile, lambda: behind + other)
    if places.ndim == 1:
        # The copy `i` has at a place the number that lies `i` places behind it.
        n = x.array.size // TOGETHER
        places = triton.multiple_of(places + (places & (TOGETHER - 1)) * (n - 1), (TOGETHER,))
        places = lax.broadcast_in_dim(places, shape, [0]) + behind
    return x.value(triton.entries(ref, [places]))


def _is_finite(x: Any) -> Any:
    return jnp.abs(x.astype(jnp.float32)) < jnp.inf


def finite(x: Any) -> Any:
    """An array with 0 for what is not finite."""
    return jnp.where(_is_finite(x), x, jnp.zeros_like(x))


def cleaned(s: Any, value: Any, scale: Any = None) -> tuple[Any, Any, Any]:
    """Values with 0 for what is not finite, their scales likewise, and the poison of each row: NaN
    if it sees a key whose value is not finite, else 0. By the product, what is not finite would
    reach all rows, and not only those that see its key.

    **Arguments:**

    - `s`: the logits `[rows, keys]`, `-inf` where a pair is masked.
    - `value`, `scale`: the values `[keys, n]`, and the numbers `[keys]` that they are multiplied
        with; None if there are none.
    """
    nan = lambda x: jnp.where(_is_finite(x), jnp.float32(0), jnp.float32(jnp.nan))
    bad, value = nan(value).sum(1), finite(value)
    if scale is not None:
        bad, scale = bad + nan(scale), finite(scale)
    bad = lax.broadcast_in_dim(bad, s.shape, [1])
    return value, scale, jnp.where(s == -jnp.inf, 0.0, bad).sum(1)
