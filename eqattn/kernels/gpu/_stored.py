"""Keys and values that stay where they lie in memory, as the kernel for few rows reads them.

A block of a cache holds all its heads, `[tokens, heads, n]`, and a program has the rows of one of
them. With heads and numbers on one axis, it copies `n` columns of `[tokens, heads * n]`. The rows
of a block are those of all heads, one head after the other. Each head's are padded to whole tiles:

    2 heads with 3 rows each, in tiles of 4      0 1 2 -   3 4 5 -
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._jax import evaluated, Literal
from ..._sweep.grid import GridLayout
from ..._sweep.products import dot_p, grouped_dot_p
from .._program import flat_jaxpr, replaced_jaxpr
from . import _mosaic as mosaic
from ._operands import padded, rounded_up


TILE = 64
"""The most keys of a tile, and the rows of a program."""

STEP = 16
"""What the tokens of a page or a tile, and the numbers of a vector, are a multiple of."""

_SHARED_MEMORY = 108 * 1024
"""Of a program, in bytes, beside some vectors and barriers: so that a multiprocessor, which has 228
kB and keeps one for each program, has two. One of them multiplies while the other one waits.
"""

_SAME = {
    lax.broadcast_in_dim_p,
    lax.convert_element_type_p,
    lax.reshape_p,
    lax.squeeze_p,
    lax.copy_p,
}


def matrices_in(closed: Any, v: Any = None) -> list[int]:
    """The arguments of a block function, `[tokens, heads, n]`, that are joined to the keys that it
    multiplies. It is empty if these are anything else.
    """
    jaxpr = flat_jaxpr(closed).jaxpr
    made_by = {x: eqn for eqn in jaxpr.eqns for x in eqn.outvars}
    dots = [eqn for eqn in jaxpr.eqns if eqn.primitive is grouped_dot_p]

    def parts(v: Any) -> list[int]:
        if v in jaxpr.invars:
            return [jaxpr.invars.index(v)] if v.aval.ndim == 3 else [-1]
        eqn = made_by.get(v)
        if eqn is None:
            return [-1]
        if eqn.primitive in _SAME and eqn.invars[0].aval.size == v.aval.size:
            return parts(eqn.invars[0])
        if eqn.primitive is lax.concatenate_p and eqn.params["dimension"] == 0:
            return [i for x in eqn.invars for i in parts(x)]
        return [-1]

    found = parts(dots[0].invars[0]) if len(dots) == 1 else [-1]
    return [] if -1 in found else found


def of_one_head(closed: Any) -> Any:
    """The block function of logits as one of the keys of a head, `[tokens, n]`. The kernel itself
    multiplies these, so what they are made of is left out; the product is that of two matrices.
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

    - `rows`, `keys`: of a block. `heads`: how many key heads it has.
    - `dim`, `width`: of a query and of a value.
    - `pages`: how many pages a block has; 0 where tokens lie in order.
    """

    rows: int
    keys: int
    heads: int
    dim: int
    width: int
    pages: int

    @property
    def of_head(self) -> int:
        """The rows of a head."""
        return self.rows // self.heads

    @property
    def padded_rows(self) -> int:
        """The rows of all heads, each of whose are whole tiles."""
        return self.heads * rounded_up(self.of_head, TILE)

    @property
    def tiles(self) -> int:
        return self.padded_rows // TILE

    @property
    def written(self) -> int:
        """The rows of a tile that are written: a copy has eighths of a tile."""
        return min(rounded_up(self.of_head, 8), TILE)

    @property
    def piece(self) -> int:
        """The tokens that are copied at once: those of a page, or some of them."""
        if self.pages > 1:
            return self.keys // self.pages
        whole = [n for n in range(STEP, TILE + 1, STEP) if self.keys % n == 0]
        return max(whole, default=min(rounded_up(self.keys, STEP), TILE))

    @property
    def tile_k(self) -> int:
        """The keys that are multiplied at once."""
        return self.piece * max(self.pages, 1)

    @property
    def padded_keys(self) -> int:
        return rounded_up(self.keys, self.tile_k)

    @property
    def staged(self) -> int:
        """How many columns of the results are written at once."""
        return max(n for n in range(STEP, TILE + 1, STEP) if self.width % n == 0)

    @property
    def stages(self) -> int:
        """How many tiles of keys and values shared memory holds, beside queries and results."""
        own = TILE * (2 * self.dim + 4 * self.staged)
        each = 2 * self.tile_k * (self.dim + self.width)
        return max(min((_SHARED_MEMORY - own) // each, 4), 2)


def sizes_of(layout: GridLayout, key: Any, value: Any, pages: int) -> Sizes:
    """**Arguments:** an array of keys and one of values, on the grid, and the pages of a block."""
    keys, rows = layout.block
    return Sizes(rows, keys, key.shape[-2], key.shape[-1], value.shape[-1], pages)


def unsupported_storage(layout: GridLayout, logits: Any, operands: Sequence[Any]) -> str:
    """Why the kernel cannot read a cache; empty if it can.

    **Arguments:**

    - `logits`: the block function.
    - `operands`: all operands of the visit, or like them.
    """
    n, found = len(logits.in_avals), matrices_in(logits)
    query, values = operands[0], operands[n : n + len(found)]  # with constants behind
    of_pages = len(found) if layout.pages else 0
    blocks = [x.ndim - len(layout.in_axes[n + i]) for i, x in enumerate(values)]
    if not found or blocks != [3] * len(found):
        return "its keys or values are stored in parts, or in fewer bits than the queries"
    key, value = operands[found[0]], values[0]
    if {key.dtype, value.dtype} != {query.dtype}:
        return (
            f"its keys and values are {key.dtype} and {value.dtype}, and its queries {query.dtype}"
        )
    sizes = sizes_of(layout, key, value, of_pages)
    if sizes.dim % STEP or sizes.width % STEP:
        return (
            f"vectors that it reads where they lie are multiples of {STEP} numbers, not "
            f"{sizes.dim} and {sizes.width}"
        )
    if of_pages and (sizes.keys // of_pages) % STEP:
        return f"its pages are multiples of {STEP} tokens, not {sizes.keys // of_pages}"
    if sizes.tile_k > 2 * TILE:
        return f"its blocks of pages have up to {2 * TILE} tokens, not {sizes.keys}"
    return ""


def rows_by_head(x: Any, axes: tuple[int, ...], sizes: Sizes) -> Any:
    """An operand on pairs, `[keys|1, rows|1]` or `[keys, heads|1, queries|1]` behind its grid axes,
    with rows as the kernel pads them; and anything else as it is.
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
    """Where a program's tiles of keys, or of values, come from.

    **Arguments:**

    - `axes`: the grid axes of the array, `COL` among them, or of the table of its pages.
    - `size`: the numbers of a vector.
    - `pieces`: how many pages a tile has; 0 where tokens lie in order.
    """

    axes: tuple[int, ...]
    size: int
    pieces: int

    @property
    def count(self) -> int:
        """How many copies bring a tile."""
        return max(self.pieces, 1)

    def copy(
        self, refs: Sequence[Any], tables: Sequence[Any], at: Any, tile: Any, arrived: Any
    ) -> None:
        """Copies a tile into shared memory.

        **Arguments:**

        - `refs`: the arrays, `[places, tokens, heads * size]`, and `tables` of their pages.
        - `at`: the place of the block on the grid, the first token in it, and the head.
        - `tile`: where it goes. `arrived`: the barrier that waits for it.
        """
        place, start, head = at
        columns, piece = (
            mosaic.ds(head * jnp.int32(self.size), self.size),
            tile.shape[0] // self.count,
        )
        for i in range(self.count):
            where = tables[i][place] if self.pieces else place
            from_, to = mosaic.ds(start, piece), mosaic.ds(i * piece, piece)
            into = tile if self.count == 1 else tile.at[to]
            mosaic.copy_in(refs[i].at[where, from_, columns], into, arrived)


def flat_heads(x: Any, axes: tuple[int, ...], piece: int) -> Any:
    """An array `[*grid, tokens, heads, n]` as `[places, tokens, heads * n]`: the same memory, where
    the tokens are whole pieces.
    """
    x = x.reshape(math.prod(x.shape[: len(axes)]), x.shape[-3], -1)
    return padded(x, 1, rounded_up(x.shape[1], piece))
