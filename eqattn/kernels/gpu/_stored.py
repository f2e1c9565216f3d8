"""Keys and values that stay where they lie in memory, as the kernel for few rows on a Hopper reads
them.

With heads and numbers on one axis, a program copies `n` columns of `[tokens, heads * n]`.

Numbers of 8 bits are copied as they are. The warpgroup that copies then widens them in shared
memory to bfloat16, which is exact, as both sides of a product need the same dtype. The scales of
the vectors are multiplied into logits and probabilities. A copy cannot pick the scales of one head,
so XLA sorts them by head before the kernel.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from ..._sweep.grid import GridLayout
from . import _mosaic as mosaic
from ._lowering import LONGEST
from ._operands import padded, rounded_up
from ._parts import keys_in
from ._stored_arrays import stored_in, StoredSizes, unsupported_pieces


TILE = 64
"""The most keys of a tile, and the rows of a program."""

LARGEST = 256
"""How many columns of a value a warpgroup adds up. With vectors up to this size, a single warpgroup
of a program computes.
"""

STEP = 16
"""The tokens of a page or a tile, and the numbers of a vector, are multiples of this."""

_SHARED_MEMORY = 108 * 1024
"""The bytes of shared memory of a program, without some vectors and barriers. A multiprocessor has
228 kB, of which 1 kB per program is reserved, so that two programs fit. One of them multiplies
while the other one waits.
"""

_ALL_SHARED_MEMORY = 216 * 1024
"""The bytes of shared memory of a program that has a multiprocessor for itself."""


class Sizes(StoredSizes):
    """How a block of a cache is cut for the kernel."""

    @property
    def tile_r(self) -> int:
        return TILE

    @property
    def widths(self) -> list[int]:
        """The number of columns of a value that each of the computing warpgroups adds up: as many
        as its registers hold. Each warpgroup computes all logits again.
        """
        return [min(self.width - i, LARGEST) for i in range(0, self.width, LARGEST)]

    @property
    def most_keys(self) -> int:
        """The most keys of a tile. There are fewer where vectors are long, as shared memory holds
        several tiles.
        """
        return TILE if self.dim <= LARGEST else TILE // 2

    @property
    def written(self) -> int:
        """The rows of a tile that are written. A copy has whole eighths of a tile."""
        return min(rounded_up(self.of_head, 8), TILE)

    @property
    def piece(self) -> int:
        """The number of tokens that are copied at once: those of a page, or a part of a block."""
        if self.pages > 1:
            return self.keys // self.pages
        whole = [n for n in range(STEP, self.most_keys + 1, STEP) if self.keys % n == 0]
        return max(whole, default=min(rounded_up(self.keys, STEP), self.most_keys))

    @property
    def tile_k(self) -> int:
        return self.piece * max(self.pages, 1)

    @property
    def tile_rows(self) -> int:
        """The number of keys that a tile has room for. Numbers of 8 bits are widened in groups of
        64 keys.
        """
        return rounded_up(self.tile_k, TILE) if self.eight else self.tile_k

    @property
    def alone(self) -> bool:
        """Whether a multiprocessor has registers for one program only. Widening numbers takes 168
        registers a thread, and two warpgroups that multiply take all.
        """
        return self.eight or len(self.widths) > 1

    @property
    def widening(self) -> int:
        """How many warpgroups widen numbers of 8 bits: one for keys, and one for their values."""
        return self.eight * (1 + (not self.shared))

    @property
    def staged(self) -> int:
        """How many columns of the results are written at once."""
        most = TILE // 2 if self.alone else TILE
        return max(n for n in range(STEP, most + 1, STEP) if not any(w % n for w in self.widths))

    @property
    def widened(self) -> list[tuple[int, int]]:
        """The tiles into which numbers of 8 bits are widened, for keys and for values. Each is
        given by the size of a vector, and by how many vectors a product sums over.
        """
        keys = [(n, self.tile_k * self.shared) for n in self.dims]
        values = [] if self.shared else [(self.width, self.tile_k)]
        return [*keys, *values] if self.eight else []

    @property
    def wide(self) -> int:
        """How many tiles of numbers of 8 bits are kept wide. With two, one is widened while the
        other is multiplied.
        """
        return 2 if self._stages(2) >= 2 else 1

    @property
    def stages(self) -> int:
        """How many tiles of keys and values shared memory holds, beside queries and results."""
        return max(min(self._stages(self.wide), 4), 2)

    def _stages(self, wide: int) -> int:
        """How many tiles fit beside so many `wide` ones."""
        own = TILE * (2 * self.dim + 4 * self.staged * len(self.widths))
        own += 2 * wide * self.tile_rows * sum(n for n, _ in self.widened)
        each = self.tile_rows * (self.dim + self.width * (not self.shared)) * (2 - self.eight)
        memory = _ALL_SHARED_MEMORY if self.alone else _SHARED_MEMORY
        return (memory - own) // each


def unsupported_storage(layout: GridLayout, logits: Any, operands: Sequence[Any]) -> str:
    """Why the kernel cannot read a cache; empty if it can.

    **Arguments:**

    - `logits`: the block function.
    - `operands`: all operands of the visit, or arrays with their shapes and dtypes.
    """
    if reason := unsupported_pieces(layout, logits, operands):
        return reason
    stored = stored_in(layout, logits, operands)
    sizes, query = Sizes.of(layout, stored), stored.query
    scaled = any(part.scales is not None for part in keys_in(logits)[0])
    if scaled and query.dtype != jnp.bfloat16:
        return f"its queries are bfloat16 where keys have 8 bits, not {query.dtype}"
    step = 2 * STEP if scaled else STEP
    if any(x % step or not x for x in (*sizes.dims, sizes.width)):
        return (
            f"vectors that it reads where they lie are multiples of {step} numbers, not "
            f"{' and '.join(map(str, sizes.dims))} and {sizes.width}"
        )
    most = LONGEST if sizes.shared and not scaled else LARGEST
    if max(sizes.dim, sizes.width) > most:
        return f"its vectors have up to {most} numbers, not {sizes.dim} and {sizes.width}"
    if sizes.pages and (sizes.keys // sizes.pages) % STEP:
        return f"its pages are multiples of {STEP} tokens, not {sizes.keys // sizes.pages}"
    if sizes.tile_k > 2 * sizes.most_keys:
        return f"its blocks of pages have up to {2 * sizes.most_keys} tokens, not {sizes.keys}"
    return ""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a program's tiles come from, for the values or for one part of the keys.

    **Arguments:**

    - `axes`: the grid axes of the array, which include `COL`, or of the table of its pages.
    - `size`: how many numbers a vector has.
    - `heads`: how many heads a block has.
    - `pieces`: how many pages a tile has; 0 where tokens lie in order.
    - `scaled`: whether there is a scale for each vector.
    """

    axes: tuple[int, ...]
    size: int
    heads: int
    pieces: int
    scaled: bool

    @property
    def count(self) -> int:
        """How many copies bring a tile. Its scales take as many."""
        return max(self.pieces, 1)

    @property
    def tables(self) -> int:
        return self.pieces

    @property
    def arrays(self) -> int:
        return self.count * (1 + self.scaled)

    def copy(
        self,
        refs: Sequence[Any],
        tables: Sequence[Any],
        at: Any,
        tile: Any,
        keys: int,
        arrived: Any,
    ) -> None:
        """Copies a tile into shared memory.

        **Arguments:**

        - `refs`: the arrays, `[places, tokens, heads * size]`, then their scales `[places * heads,
            tokens]`; and `tables` of their pages.
        - `at`: the place of the block on the grid, the first token in it, and the head.
        - `tile`: the shared memory that it is copied to.
        - `keys`: how many keys a tile has.
        - `arrived`: the barrier that waits for the copies.
        """
        columns = mosaic.ds(at[2] * jnp.int32(self.size), self.size)
        for i, where, from_, to in self._pieces(tables, at, keys):
            into = tile if tile.shape[0] == to.size else tile.at[to]
            mosaic.copy_in(refs[i].at[where, from_, columns], into, arrived)

    def copy_scales(
        self, refs: Sequence[Any], tables: Sequence[Any], at: Any, row: Any, arrived: Any
    ) -> None:
        """Copies the scales of a tile into a `row` of shared memory; the rest is as in `copy`."""
        for i, where, from_, to in self._pieces(tables, at, row.shape[0]):
            into = row if self.count == 1 else row.at[to]
            place = where * jnp.int32(self.heads) + at[2]
            mosaic.copy_in(refs[self.count + i].at[place, from_], into, arrived)

    def _pieces(self, tables: Sequence[Any], at: Any, keys: int) -> Iterator[tuple]:
        """Yields for each copy its index, its place in the array, and its tokens there and in the
        tile.
        """
        place, start, _ = at
        n = keys // self.count
        for i in range(self.count):
            where = tables[i][place] if self.pieces else place
            yield i, where, mosaic.ds(start, n), mosaic.ds(i * n, n)


def flat_heads(x: Any, axes: tuple[int, ...], piece: int) -> Any:
    """An array `[*grid, tokens, heads, n]` as `[places, tokens, heads * n]`: the same memory, where
    the tokens are whole pieces.
    """
    x = x.reshape(math.prod(x.shape[: len(axes)]), x.shape[-3], -1)
    return padded(x, 1, rounded_up(x.shape[1], piece))


def scales_by_head(x: Any, heads: int, piece: int) -> Any:
    """Scales `[*grid, 1, tokens * heads]` as `[places * heads, tokens]`, padded to whole pieces."""
    x = jnp.swapaxes(x.reshape(-1, x.shape[-1] // heads, heads), 1, 2)
    x = x.reshape(-1, x.shape[-1])
    return padded(x, 1, rounded_up(x.shape[1], piece))
