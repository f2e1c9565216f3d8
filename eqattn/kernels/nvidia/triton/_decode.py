"""The softmax fold of `Ragged` as a kernel in Pallas Triton: keys and values stay where they lie.

A program has some rows of one key head, and a share of the blocks that they see. It computes the
address of each key, so that a cache may have any number of tokens, and a tile keys of several
pages. With few rows most products are wasted, but memory sets the pace.

Numbers of 8 bits are widened to the dtype of the queries, which is exact. The scales of the vectors
are multiplied into logits and probabilities.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ...._jax import abstract
from ...._sweep.grid import BlockGrid, COL, FULL, PARTIAL
from ..._program import LOG2E
from .._chip import LARGEST_DIM, LONGEST
from .._operations import Value
from .._plans import listed_in_order, online_step
from .._program import PairProgram
from .._stored import (
    Part,
    PROGRAMS,
    shares_of,
    stored_in,
    StoredArrays,
    StoredPlan,
    StoredProgram,
    StoredSizes,
    unsupported_pieces,
)
from . import _pallas as triton
from ._forward import check_axes, power_of_two, STAGES
from ._pallas import native_for
from ._rows import cleaned, is_near, value_of


TILE_BYTES = 40 * 1024
"""The most bytes of the keys and values of a tile. Shared memory holds `STAGES` of these, and all
chips have 99 KiB of it.
"""

MOST_BYTES = 48 * 1024
"""The most bytes of a tile that has the fewest keys. Shared memory holds `STAGES` of these, too."""

MOST_KEYS = 128
"""The most keys of a tile."""


@dataclasses.dataclass(frozen=True)
class Sizes(StoredSizes):
    """How a block of a cache is cut for the kernel.

    **Arguments:** those of `StoredSizes`, and

    - `itemsize`: the bytes of a number of the queries, to which keys and values are widened.
    """

    itemsize: int = 2

    @property
    def padded_dims(self) -> list[int]:
        """The sizes of the parts of a key, padded."""
        return [power_of_two(n) for n in self.dims]

    @property
    def padded_width(self) -> int:
        return power_of_two(self.width)

    @property
    def warps(self) -> int:
        """How many warps a program has."""
        return 8 if self.padded_width > 256 else 4

    @property
    def tile_r(self) -> int:
        """The rows of a program. There are fewer where values are long or exact, as the numerator
        of each row is in registers.
        """
        most = self.warps * 2048 // (self.padded_width * (self.itemsize // 2))
        return max(min(64, most, power_of_two(self.of_head)), 16)

    @property
    def numbers(self) -> int:
        """The numbers of a key and its value, padded."""
        return sum(self.padded_dims) + self.padded_width * (not self.shared)

    @property
    def written(self) -> int:
        """The rows of a tile that are written; the others only pad it."""
        return min(self.of_head, self.tile_r)

    @property
    def tile_k(self) -> int:
        most = MOST_KEYS
        while most > 16 and most * self.numbers * self.itemsize > TILE_BYTES:
            most //= 2
        return min(most, power_of_two(self.keys))


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the values, or one part of the keys, are read from.

    **Arguments:**

    - `axes`: the grid axes of the array, without the columns. If that has pages, the axes are those
        of their table.
    - `size`: how many numbers a vector has.
    - `tokens`: how many tokens the array has, or a page of it.
    - `pages`: how many pages a block has; 0 where tokens lie in order.
    - `pool`: the grid axes of the pages, and how many of these there are on no axis.
    - `scaled`: whether there is a scale for each vector.
    """

    axes: tuple[int, ...]
    size: int
    tokens: int
    pages: int
    pool: tuple[tuple[int, ...], int]
    scaled: bool

    @property
    def tables(self) -> int:
        """How many tables of pages there are: one, with all pages of a block in a row."""
        return min(self.pages, 1)

    @property
    def arrays(self) -> int:
        return 1 + self.scaled


class Plan(StoredPlan):
    """A fold by this kernel."""

    sizes: Sizes
    keys: tuple[Source, ...]
    values: tuple[Source, ...]


class Program(StoredProgram):
    """One program of the kernel, on references."""

    plan: Plan

    def run(self) -> None:
        plan, sizes = self.plan, self.plan.sizes
        own = lax.iota(jnp.int32, sizes.tile_r)
        rows = self.start + own
        place = self.places.place(plan.layout.in_axes[0])
        self.queries = [
            triton.rows(q, (place, rows), None, (sizes.tile_r, n))
            for q, n in zip(self.q, sizes.padded_dims)
        ]
        self.near = {i: self.read(i) for i, x in plan.operands.items() if is_near(x)}
        filled = lambda shape, x: lax.full(shape, x, jnp.float32)
        n = sizes.tile_r
        empty = filled((n, sizes.padded_width), 0.0), filled((n,), 0.0), filled((n,), -jnp.inf)
        state, begin = empty, self.first
        for c, end in ((FULL, self.full), (PARTIAL, self.last)):
            if c in plan.programs:
                step = ft.partial(self.step, plan.programs[c], False)
                state, begin = lax.fori_loop(begin, end, step, state), end

        def again():
            step = ft.partial(self.step, plan.programs[PARTIAL], True)
            return lax.fori_loop(self.first, self.last, step, empty)

        if PARTIAL in plan.programs:
            state = triton.unless_finite(state[:1], again, state)
        acc, den, top = state
        num, dens, tops = self.results
        written = None if sizes.written == n else own < sizes.written
        triton.put_rows(num, acc, (self.out, self.tile, own), written)
        inside = triton.ds(self.start, n)
        dens[self.out, inside] = den
        tops[self.out, inside] = top * (1 / LOG2E)

    def read(self, i: int, column: Any = None, keys: Any = None) -> Value:
        """An operand of the logits, for some keys of a column."""
        x = self.plan.operands[i]
        at = dict(r=triton.ds(self.start, self.plan.sizes.tile_r), k=keys)
        return value_of(x, self.given[i], self.places.place(x.axes, column), at)

    def vectors(
        self, source: Source, refs: Sequence[Any], which: int, column: Any, keys: Any, size: int
    ) -> tuple[Any, Any]:
        """Keys or values of a tile, `[keys, size]`, and their scales, or None.

        **Arguments:**

        - `refs`: the array, and that of its scales.
        - `which`: 0 for keys and 1 for values.
        - `column`, `keys`: the column, and the keys in its block.
        - `size`: the size of a vector, padded.
        """
        sizes, layout = self.plan.sizes, self.plan.layout
        inside, place = None, self.places.place(source.axes)
        if sizes.keys % sizes.tile_k:
            inside = keys < sizes.keys
        if source.pages:
            row = place * jnp.int32(layout.grid[COL]) + column
            page = lax.div(keys, jnp.full_like(keys, source.tokens))
            token = keys - page * source.tokens
            page = jnp.minimum(page, source.pages - 1)
            place, count = self.places.place(source.pool[0]), source.pool[1]
            # Where a row has fewer tokens, the table may hold any number.
            page = jnp.clip(triton.entries(self.tables[which][0], (row, page)), 0, count - 1)
            place = place * jnp.int32(count) + page
        else:
            token = column * jnp.int32(sizes.keys) + keys
            if source.tokens % sizes.keys or sizes.keys % sizes.tile_k:
                there = token < source.tokens
                inside = there if inside is None else inside & there
        tile = triton.rows(refs[0], (place, token, self.head), inside, (sizes.tile_k, size))
        tile = triton.widened(tile, self.plan.dtype)
        if not source.scaled:
            return tile, None
        at = token * jnp.int32(sizes.heads) + self.head
        return tile, triton.entries(refs[1], (place, at), inside)

    def step(self, program: PairProgram, cleans: bool, step: Any, state: tuple) -> tuple:
        """Adds a tile of keys to the Carry. With `cleans`, its values may not be finite."""
        plan, sizes, n = self.plan, self.plan.sizes, self.plan.sizes.tile_k
        column, start = self.where(step)
        keys = start + lax.iota(jnp.int32, n)
        across = lambda x: lax.broadcast_in_dim(x, (sizes.tile_r, n), [1])
        tiles, scales, products = [], [], []
        for source, refs, q, size in zip(plan.keys, self.k, self.queries, sizes.padded_dims):
            tile, scale = self.vectors(source, refs, 0, column, keys, size)
            product = triton.product(q, tile, 1)
            products.append(product if scale is None else product * across(scale))
            tiles.append(tile)
            scales.append(scale)
        here = triton.ds(start, n)
        read = lambda i: self.near[i] if i in self.near else self.read(i, column, here)
        lengths = dict(r=sizes.tile_r, k=n)
        s, *weights = program(ft.reduce(jnp.add, products), read, lengths, False)
        if sizes.keys % n:
            s = jnp.where(across(keys < sizes.keys), s, -jnp.inf)
        value, scale = tiles[0], scales[0]
        for source, refs in zip(plan.values, self.v):
            value, scale = self.vectors(source, refs, 1, column, keys, sizes.padded_width)
        if cleans:
            value, scale, nan_flag = cleaned(s, value, scale)
            acc, den, top = state
            state = acc, den + nan_flag, top
        if scale is not None:
            weights = [x * across(scale) for x in weights] or [across(scale)]
        powers = triton.powers(plan.interpreted)
        factor = jnp.float32(LOG2E)
        acc, den, now, weighted = online_step(state, s, weights, factor, plan.dtype, powers=powers)
        return acc + triton.product(weighted, value, 0), den, now


def visit_stored(
    steps: dict[int, Any], layout: BlockGrid, *args: Any, interpreted: bool
) -> list[Any]:
    """Numerator, denominator and maximum of each row of the grid, with its grid axes in front."""
    check_axes(interpreted, args)
    native = triton.native(interpreted, native_for(layout.split(args)[1][0].dtype))
    arrays = StoredArrays(steps, layout, args, native)
    sizes = Sizes.of(layout, arrays.stored, itemsize=arrays.query.dtype.itemsize)
    groups = arrays.keys, arrays.values
    read = [[_source(arrays, x) for x in (group[0] if group else ())] for group in groups]
    keys, values = (tuple(source for source, _ in group) for group in read)
    plan = Plan(
        **arrays.planned(sizes),
        keys=keys,
        values=values,
        shares=shares_of(layout, sizes, 4 * PROGRAMS // sizes.warps),
        interpreted=interpreted,
    )
    inputs, operands = arrays.queries(sizes), arrays.operands
    for group in groups:
        tables = [operands[i].reshape(-1) for i in arrays.tables_of(group)]
        inputs += [jnp.stack(tables, -1)] if tables else []
    inputs += [x for group in read for _, found in group for x in found]
    inputs += listed_in_order(arrays.table, list(steps))
    inputs += [x.array for x in plan.operands.values()]
    lead = plan.shares * plan.places
    shapes = (lead, sizes.tiles, sizes.written, sizes.width), *[(lead, sizes.padded_rows)] * 2
    out = [abstract(args[-1], x, jnp.float32) for x in shapes]
    body = lambda *refs: Program(plan, refs, triton.program_id(0)).run()
    run = triton.kernel(body, out, plan.count, "eqattn_decode", sizes.warps, STAGES, interpreted)
    return arrays.merged(run(*inputs), sizes, plan.shares)


def _source(arrays: StoredArrays, part: Part) -> tuple[Source, list[Any]]:
    """Where a part of keys or values is read from, and the arrays of it and of its scales."""
    layout, pool = arrays.layout, arrays.layout.in_axes[part.array]
    x, axes = arrays.operands[part.array], tuple(a for a in arrays.axes_of(part) if a != COL)
    heads, size = x.shape[-2:]
    lead, count = tuple(a for a in pool if a < 0), 0
    if arrays.pages:
        tokens, count, places = x.shape[-3], layout.pages[max(pool)], layout.shape(pool)
    else:
        tokens, places = layout.padded or layout.columns * layout.block[0], layout.shape(axes)
    # What pads the last block is left out, so that XLA does not make a padded array.
    of = lambda x, n, *rest: x.reshape(math.prod(places), -1, *rest)[:, :n]
    found = [of(x, tokens, heads, size)]
    if part.scales is not None:
        x = arrays.operands[part.scales].reshape(math.prod(places), 1, -1)
        found += [x[..., : tokens * heads].reshape(len(x), -1)]
    scaled = part.scales is not None
    return Source(axes, size, tokens, arrays.pages, (lead, count), scaled), found


def unsupported_storage(layout: BlockGrid, logits: Any, operands: Sequence[Any]) -> str:
    """Why the kernel cannot read a cache; empty if it can. Arguments are those of
    `eqattn.kernels.gpu._stored.unsupported_storage`.
    """
    if reason := unsupported_pieces(layout, logits, operands):
        return reason
    stored, n = stored_in(layout, logits, operands), len(logits.in_avals)
    sizes = Sizes.of(layout, stored, itemsize=stored.query.dtype.itemsize)
    if not sizes.width:
        return "its values have no numbers"
    most = LONGEST if sizes.shared else LARGEST_DIM
    if max(sizes.dim, sizes.width) > most:
        return f"its vectors have up to {most} numbers, not {sizes.dim} and {sizes.width}"
    if sizes.tile_k * sizes.numbers * sizes.itemsize > MOST_BYTES:
        return f"{STAGES} tiles of its keys and values are more than shared memory holds"
    # What is read for each pair is padded to whole tiles of rows.
    read = [(x, a) for x, a in zip(operands[:n], layout.in_axes) if x.ndim == len(a) + 2]
    if max(math.prod(x.shape[: len(a) + 1]) for x, a in read) * sizes.padded_rows >= 2**31:
        return "it counts the numbers of an array in 31 bits, and rows that it pads have more"
    return ""
