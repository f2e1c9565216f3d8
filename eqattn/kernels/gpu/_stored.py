"""Keys and values that stay where they lie in memory, as the kernel for few rows reads them.

A block of a cache holds all its heads, `[tokens, heads, n]`, and a program has the rows of one
head. With heads and numbers on one axis, it copies `n` columns of `[tokens, heads * n]`. A block
has the rows of all heads, one head after the other. The rows of each head are padded to whole
tiles:

    2 heads with 3 rows each, in tiles of 4      0 1 2 -   3 4 5 -

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

from ..._jax import evaluated, Literal
from ..._sweep.grid import GridLayout
from ..._sweep.products import dot_p, grouped_dot_p
from .._program import flat_jaxpr, replaced_jaxpr
from . import _mosaic as mosaic
from ._operands import padded, rounded_up
from ._parts import keys_in


TILE = 64
"""The most keys of a tile, and the rows of a program."""

LARGEST = 256
"""How many columns of a value a warpgroup adds up. With vectors up to this size, a single warpgroup
of a program computes.
"""

LONGEST = 576
"""The most numbers of a key that is longer than its value, as DeepSeek's latents are."""

EIGHT_BITS = ("int8", "float8_e4m3fn", "float8_e5m2")
"""The dtypes of 8 bits that the compiler widens."""

STEP = 16
"""The tokens of a page or a tile, and the numbers of a vector, are multiples of this."""

_SHARED_MEMORY = 108 * 1024
"""The bytes of shared memory of a program, without some vectors and barriers. A multiprocessor has
228 kB, of which 1 kB per program is reserved, so that two programs fit. One of them multiplies
while the other one waits.
"""

_ALL_SHARED_MEMORY = 216 * 1024
"""The bytes of shared memory of a program that has a multiprocessor for itself."""


def of_one_head(closed: Any) -> Any:
    """Turns the block function of logits into a function for one head, whose keys are
    `[tokens, n]`. The kernel itself multiplies these. So the operations that make the keys are left
    out, and the product becomes that of two matrices.
    """
    flat = flat_jaxpr(closed)
    needed = set(flat.jaxpr.outvars)
    for eqn in reversed(flat.jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            first = eqn.primitive is grouped_dot_p
            needed |= {v for v in eqn.invars[first:] if not isinstance(v, Literal)}

    def evaluate(eqn, xs):
        if needed.isdisjoint(eqn.outvars):
            return [None] * len(eqn.outvars)
        if eqn.primitive is grouped_dot_p:
            keys, _, n = eqn.invars[0].aval.shape
            return [dot_p.bind(jnp.zeros((keys, n), xs[1].dtype), xs[1], **eqn.params)]
        return evaluated(eqn, xs)

    return replaced_jaxpr(flat, [v.aval.shape for v in flat.jaxpr.invars], evaluate)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How a block of a cache is cut for the kernel.

    **Arguments:**

    - `rows`, `keys`, `heads`: how many rows, keys and key heads a block has.
    - `dims`: the sizes of the parts of a key.
    - `width`: the size of a value.
    - `pages`: how many pages a block has; 0 where tokens lie in order.
    - `eight`: whether numbers have 8 bits.
    - `shared`: whether a value is the first part of its key.
    """

    rows: int
    keys: int
    heads: int
    dims: tuple[int, ...]
    width: int
    pages: int
    eight: bool = False
    shared: bool = False

    @property
    def dim(self) -> int:
        """The size of a query."""
        return sum(self.dims)

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
    def of_head(self) -> int:
        """The rows of a head."""
        return self.rows // self.heads

    @property
    def padded_rows(self) -> int:
        """The rows of all heads, where each head is padded to whole tiles."""
        return self.heads * rounded_up(self.of_head, TILE)

    @property
    def tiles(self) -> int:
        return self.padded_rows // TILE

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
        """The keys that are multiplied at once."""
        return self.piece * max(self.pages, 1)

    @property
    def padded_keys(self) -> int:
        return rounded_up(self.keys, self.tile_k)

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
    def stages(self) -> int:
        """How many tiles of keys and values shared memory holds, beside queries and results."""
        own = TILE * (2 * self.dim + 4 * self.staged * len(self.widths))
        own += 2 * self.tile_rows * sum(n for n, _ in self.widened)
        each = self.tile_rows * (self.dim + self.width * (not self.shared)) * (2 - self.eight)
        memory = _ALL_SHARED_MEMORY if self.alone else _SHARED_MEMORY
        return max(min((memory - own) // each, 4), 2)


def sizes_of(layout: GridLayout, parts: Sequence[Any], value: Any, pages: int, query: Any) -> Sizes:
    """The `Sizes` of a visit.

    **Arguments:**

    - `parts`: an array on the grid for each part of the keys.
    - `value`: the same for the values; None where they are the first part of the keys.
    - `pages`: how many pages a block has.
    - `query`: the queries.
    """
    keys, rows = layout.block
    sizes, width = tuple(x.shape[-1] for x in parts), (value if value is not None else parts[0])
    eight, shared = parts[0].dtype != query.dtype, value is None
    return Sizes(rows, keys, parts[0].shape[-2], sizes, width.shape[-1], pages, eight, shared)


def unsupported_storage(layout: GridLayout, logits: Any, operands: Sequence[Any]) -> str:
    """Why the kernel cannot read a cache; empty if it can.

    **Arguments:**

    - `logits`: the block function.
    - `operands`: all operands of the visit, or arrays with their shapes and dtypes.
    """
    n, pieces = len(logits.in_avals), keys_in(logits)
    if not pieces:
        return "its keys are stored in a way of their own"
    query, own = operands[0], operands[n:]
    parts = [operands[part.array] for part in pieces[0]]
    value = None if layout.shared else own[0]
    scaled = any(part.scales is not None for part in pieces[0])
    stored = {x.dtype for x in (parts if value is None else [*parts, value])}
    if len(stored) > 1 or (stored != {query.dtype} and not scaled):
        names = " and ".join(sorted(map(str, stored)))
        return f"its keys and values are {names}, and its queries {query.dtype}"
    if scaled and str(*stored) not in EIGHT_BITS:
        return f"in 8 bits it has {', '.join(EIGHT_BITS)}, not {str(*stored)}"
    if scaled and query.dtype != jnp.bfloat16:
        return f"its queries are bfloat16 where keys have 8 bits, not {query.dtype}"
    of_pages = len(pieces) if layout.pages else 0
    sizes = sizes_of(layout, parts, value, of_pages, query)
    step = 2 * STEP if scaled else STEP
    if any(x % step or not x for x in (*sizes.dims, sizes.width)):
        return (
            f"vectors that it reads where they lie are multiples of {step} numbers, not "
            f"{' and '.join(map(str, sizes.dims))} and {sizes.width}"
        )
    most = LONGEST if sizes.shared and not scaled else LARGEST
    if max(sizes.dim, sizes.width) > most:
        return f"its vectors have up to {most} numbers, not {sizes.dim} and {sizes.width}"
    if of_pages and (sizes.keys // of_pages) % STEP:
        return f"its pages are multiples of {STEP} tokens, not {sizes.keys // of_pages}"
    if sizes.tile_k > 2 * sizes.most_keys:
        return f"its blocks of pages have up to {2 * sizes.most_keys} tokens, not {sizes.keys}"
    return ""


def rows_by_head(x: Any, axes: tuple[int, ...], sizes: Sizes) -> Any:
    """Pads the rows of an operand on pairs as the kernel does. Behind its grid axes, it is
    `[keys|1, rows|1]` or `[keys, heads|1, queries|1]`. Any other operand is returned as it is.
    """
    lead, block = x.shape[: len(axes)], x.shape[len(axes) :]
    if len(block) == 3:
        heads = block[1] if block[1] > 1 else sizes.rows // block[2]
        x = jnp.broadcast_to(x, (*lead, block[0], heads, sizes.rows // heads))
        block = (block[0], sizes.rows)
    if len(block) != 2 or block[1] == 1:
        return x
    x = x.reshape(*lead, block[0], sizes.heads, sizes.of_head)
    x = padded(x, x.ndim - 1, sizes.padded_rows // sizes.heads)
    return x.reshape(*lead, block[0], sizes.padded_rows)


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
