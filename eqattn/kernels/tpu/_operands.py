"""Arrays on the grid as a kernel is given them, and how their blocks lie in vector memory."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from ..._jax import abstract
from ..._misc import at_most
from ..._sweep.grid import BlockGrid
from ..._sweep.tokens import by_head, joined, sizes_of
from ._chip import RESIDENT
from ._products import LANES


def vmem_shape(shape: tuple[int, ...], flipped: bool = False) -> tuple[int, ...]:
    """The shape of a block as it lies in vector memory.

    It is at least a matrix. A column `[n, 1]` lies as a row `[1, n]`: as a column, each of its
    numbers would take a row of 128 lanes.
    """
    if len(shape) < 2:
        return (1, *(shape or (1,)))
    return shape[::-1] if flipped or (len(shape) == 2 and shape[1] == 1) else shape


def nbytes_of(shape: Sequence[int], dtype: Any) -> int:
    """The bytes of vector memory that an array takes.

    Its last two axes are padded to tiles of 8 x 128; a single row is not padded to 8.
    """
    *lead, m, n = shape
    m = m if m == 1 else -(-m // 8) * 8
    return math.prod(lead) * m * -(-n // 128) * 128 * dtype.itemsize


def as_block(x: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """A block of the given shape and dtype, from what lies in vector memory.

    A row becomes a column by the transpose of 8 equal rows, as many as a register has.
    """
    if len(shape) == 2 and shape[1] == 1 and shape[0] > 1:
        x = jnp.broadcast_to(x, (8, shape[0])).T[:, :1]
    if dtype == jnp.bool_:  # Chips compare numbers of 32 bits, and the compiler moves no flags.
        return x.astype(jnp.int32).reshape(shape) != 0
    return x.reshape(shape)


def _form_of_flags(block: tuple[int, ...]) -> tuple[tuple[int, ...], Any]:
    """The shape and the dtype in which a block of flags lies in vector memory. Numbers of 8 bits
    need registers of 32 x 128 that are full.
    """
    sides = block[:1] + block[-1:]
    full = len(block) > 1 and math.prod(sides) == math.prod(block)
    if full and sides[0] % 32 == 0 == sides[1] % LANES:
        return sides, jnp.int8
    return block, jnp.int32


class KernelOperand:
    """An array on the grid, in the form in which the kernel is given it.

    **Arguments:**

    - `x`: the array, `[*axes, *block]`. Booleans are given to the kernel as int8 where
        blocks fill registers, which have 32 x 128 of these, and else as int32.
    - `axes`: its grid axes.
    - `flipped`: whether its blocks are given transposed.
    - `as_lies`: whether blocks keep their shape, columns `[n, 1]` included.
    - `cached`: whether it comes from a cache, which XLA must not copy.
    - `heads`: how many heads a row has the queries of. With more than one, these are given by head,
        see `by_head`. Then blocks are flipped, and `ROW` is the last of the axes.
    """

    def __init__(
        self,
        x: Any,
        axes: tuple[int, ...],
        flipped: bool = False,
        as_lies: bool = False,
        cached: bool = False,
        heads: int = 1,
    ):
        self.axes, self.flipped, self.cached, self.dtype = axes, flipped, cached, x.dtype
        self.heads = heads
        shape = x.shape[len(axes) :]
        self.shape = shape[::-1] if flipped else shape
        self.block = shape if as_lies else vmem_shape(shape, flipped)
        x = jnp.asarray(x)
        if x.dtype == jnp.bool_:
            self.block, stored = _form_of_flags(self.block)
            x = x.astype(stored)
        x = jnp.swapaxes(x, -1, -2) if flipped else x
        if heads > 1:
            self.array = by_head(x, heads)
            self.block = heads, *self.array.shape[-2:]
            return
        self.array = x.reshape(*x.shape[: len(axes)], *self.block)

    window: tuple[int, int, int] | None = None
    """The sizes of a block that is a window of all pairs, see `PairsOperand`."""

    @property
    def resident(self) -> bool:
        """Whether the whole array lies in vector memory all the time.

        It does where its blocks are rows or columns and all of it is small, see `RESIDENT`.
        """
        nbytes = nbytes_of(self.array.shape, self.array.dtype)
        return 1 in self.block and at_most(nbytes, RESIDENT)

    @property
    def nbytes(self) -> int:
        """The bytes of vector memory that it takes: one block is read while the next arrives."""
        if self.resident:
            return nbytes_of(self.array.shape, self.array.dtype)
        return 2 * nbytes_of(self.block, self.array.dtype)

    @property
    def is_column(self) -> bool:
        """Whether a block is a column `[n, 1]`, which lies as a row."""
        return len(self.shape) == 2 and self.shape[0] > 1 == self.shape[1]

    def read(self, ref: Any, at: Sequence = (), as_row: bool = False) -> Array:
        """The block in `ref`; of a resident array, the one at the index `at`.

        **Arguments:**

        - `as_row`: whether a column is returned as the row `[1, n]` as which it lies.
        """
        x = ref[(*at, ...)]
        if as_row and self.is_column:
            x = x.reshape(self.shape[::-1])
            return x != 0 if self.dtype == jnp.bool_ else x
        if x.shape != self.shape or x.ndim == 0 or self.dtype == jnp.bool_:
            return as_block(x, self.shape, self.dtype)
        return x


MOST_READS = 10
"""How often each number of pairs is read where it lies. Numbers that more batch elements or heads
share are copied into blocks, unless they have 32 bits.

To transpose a window when it is read costs cycles each time, and a copy costs bytes once. On v6e, a
step of 1024 x 1024 logits took 2848 cycles with a bias in bfloat16, instead of 2439. The copy of
its 2 MiB takes 4475 at the speed of memory, which is 11 times the difference. A copy of flags has 3
bytes for each, which take 3356 cycles, and a step took 1768 instead of 1432. A block of 32 bits is
read in 4475 cycles, which is longer than the step of 2851.
"""


class PairsOperand(KernelOperand):
    """Numbers of all pairs of tokens, which a kernel reads where they lie.

    As blocks `[keys, rows]`, they would be a copy, as large as all pairs are. For a bias of 64 MiB,
    XLA moved 128 on v6e before a kernel could read it. Instead, a kernel is given windows
    `[heads, queries, keys]` of `[*others, heads, all queries, all keys]`. A block is such a window
    transposed.
    """

    def __init__(self, x: Any, axes: tuple[int, ...], sizes: tuple[int, int, int]):
        heads, queries, keys = self.block = self.window = sizes
        self.axes, self.flipped, self.cached, self.dtype = axes, True, False, x.dtype
        self.heads, self.shape = 1, (heads * queries, keys)
        x = joined(jnp.asarray(x), axes, sizes)
        self.array = x.astype(jnp.int8) if x.dtype == jnp.bool_ else x

    @property
    def resident(self) -> bool:
        """Never."""
        return False

    @staticmethod
    def of(
        x: Any, axes: tuple[int, ...], layout: BlockGrid, transposed: bool = False
    ) -> "PairsOperand | None":
        """An array as such an operand, if it can be one and is faster so; else None.

        **Arguments:**

        - `x`, `axes`: its blocks, and their grid axes.
        - `transposed`: whether a step has logits as `[rows, keys]`, so that it transposes no
        window.
        """
        sizes = pairs_in_place(x.shape[len(axes) :], layout)
        reads = math.prod(n for a, n in zip(layout.batch, layout.grid) if a not in axes)
        near = transposed or x.dtype.itemsize == 4 or at_most(reads, MOST_READS)
        return PairsOperand(x, axes, sizes) if sizes and near else None


def fill_registers(queries: int, keys: int) -> bool:
    """Whether the sides of a window do. Registers hold 32 x 128 numbers of 8 bits, and 8 x 128 of
    32.
    """
    return queries % 32 == 0 == keys % LANES


def pairs_in_place(shape: tuple[int, ...], layout: BlockGrid) -> tuple[int, int, int] | None:
    """The heads, queries and keys of a block, if it can be a window of all pairs; else None.

    **Arguments:**

    - `shape`: the shape of a block.
    """
    if len(shape) != 2 or (sizes := sizes_of(shape, layout)) is None:
        return None
    return sizes if fill_registers(*sizes[1:]) else None


def heads_of_rows(layout: BlockGrid) -> int:
    """How many heads a row has the queries of, if these can be given by head; else 1.

    The queries of one head in a block must fill registers, which have 16 rows of bfloat16.
    """
    return 1 if layout.block[1] // layout.group % 16 else layout.group


def abstract_blocks(operands: Sequence, axes: Sequence[tuple[int, ...]]) -> list:
    """The shapes and dtypes of one block of each operand."""
    return [abstract(x, x.shape[len(a) :], x.dtype) for x, a in zip(operands, axes)]


def matrix(x: Any) -> bool:
    """Whether a block is a matrix, and neither a row nor a column."""
    return len(x.shape) == 2 and min(x.shape) > 1


def turns(x: Any) -> bool:
    """Whether registers hold a block, transposed and not, that are full or half full."""
    return matrix(x) and not max(x.shape) % LANES and not min(x.shape) % (LANES // 2)
