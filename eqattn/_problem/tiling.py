"""The grid that a problem is cut into, and arrays as blocks on it.

The grid is `(B, K, rows, columns)`: batch, key/value heads, query blocks, key blocks. The rows of
a block are the queries of all heads that share a key/value head, so keys and values are never
repeated; blocks of logits are `[keys, group * queries]`.

Operands of keys and values that stay as they lie in memory.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._misc import iota
from .._sweep.grid import BATCH, BlockRequest, COL, HEAD, ROW
from .._sweep.lowering import Lowering, XLA
from .._sweep.sweep import block_dtype
from .._sweep.tokens import can_lie, padded, Padding, permuted, Tokens
from .mesh import split_axis
from .problem import Problem
from .storage import AbstractStored, as_stored, in_pages, Pages, StackLayer


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The sizes of the grid and of its blocks.

    **Arguments:**

    - `batch`, `kv_heads`: the first two sizes of the grid.
    - `group`: the number of query heads that share a key/value head.
    - `queries`, `keys`: the numbers of tokens.
    - `block_q`, `block_k`: the tokens of a block.
    - `parts`: the number of equal parts that queries and keys are cut into. Each part is cut into
        blocks by itself, so that no block lies on two devices.
    - `shards`: the number of devices whose keys an array holds that varies with queries and keys.
    - `in_place`: whether keys and values are read where they lie in memory, with their heads inside
        of the blocks. Then a row of the grid has all query heads of a device, and `kv_heads` is the
        number of devices that heads are sharded over.
    - `together`: the number of pages of a block, or 1.
    - `halves`: whether there is a class `DIAGONAL`. In such a partial block, no query of the first
        half sees any key of the later half.
    - `fixed`: whether blocks keep their size where there are fewer tokens, and any number of them
        is visited in the same way.
    - `joins`: whether the code that visits blocks puts those of pairs together, even padded ones.
    """

    batch: int
    kv_heads: int
    group: int
    queries: int
    keys: int
    block_q: int
    block_k: int
    parts: int = 1
    shards: int = 1
    in_place: bool = False
    together: int = 1
    halves: bool = False
    fixed: bool = False
    joins: bool = False

    @property
    def rows(self) -> int:
        return self.parts * -(-self.queries // (self.parts * self.block_q))

    @property
    def columns(self) -> int:
        return self.parts * -(-self.keys // (self.parts * self.block_k))

    @property
    def grid(self) -> tuple[int, ...]:
        return (self.batch, self.kv_heads, self.rows, self.columns)

    @property
    def block(self) -> tuple[int, int]:
        return (self.block_k, self.group * self.block_q)

    @property
    def corner(self) -> int:
        """How many of the first rows of a block may skip the later half of its keys. They are half
        of a head's queries, or all rows where several heads share keys. It is 0 where no block is
        cut so.
        """
        if not self.halves or self.block_k % 2 or (self.group == 1 and self.block_q % 2):
            return 0
        return self.block_q // 2 if self.group == 1 else self.group * self.block_q

    @property
    def tokens(self) -> tuple[Tokens, ...]:
        """What `rows_of` and `columns_of` cut, for code that reads it where it lies. Of several
        parts, each is padded, so that tokens do not lie behind each other.
        """
        if self.parts > 1 or self.in_place:
            return ()
        rows = Tokens(ROW, self.queries, self.block_q, self.group)
        return rows, Tokens(COL, self.keys, self.block_k)

    @property
    def pairs_lie(self) -> bool:
        """Whether pairs are read where they lie, at least where no block of them is padded."""
        return self.joins or can_lie(self.tokens, self.grid)

    @property
    def padded_in_place(self) -> int:
        """The number of keys in place, if the last of several blocks is padded; else 0."""
        known = self.in_place and self.parts == 1 and isinstance(self.keys, int)
        return self.keys if known and self.keys > self.block_k and self.keys % self.block_k else 0

    def pad(self, x: Any, axis: int, n: int, by: Padding, parts: int | None = None) -> Any:
        """Pads each part of an axis, to `n` in all, as `padded` pads an axis."""
        if x.shape[axis] == n:
            return x
        parts = self.parts if parts is None else parts
        if parts == 1:
            return padded(x, axis, n, by)
        lead, rest = x.shape[:axis], x.shape[axis + 1 :]
        part = -(-x.shape[axis] // parts)
        x = padded(x, axis, part * parts, by).reshape(*lead, parts, part, *rest)
        return padded(x, axis + 1, n // parts, by).reshape(*lead, n, *rest)

    def own_rows(self, x: Any, axes: str) -> Any:
        """Pads what a single query has of an array to a whole block, if blocks are `fixed`. The
        array is `[B|1, H|1, T|1, S|1]`, perhaps with features, and belongs to an operand with these
        `axes`. XLA compiles computations of one row to other bits than those of a block, and
        gradients too.
        """
        if not self.fixed or self.queries != 1 or "t" not in axes:
            return x
        return self.pad(jnp.asarray(x), 2, self.block_q, "last", parts=1)

    def rows_of(self, x: Any) -> Array:
        """Turns queries `[B, T, H, D]` into blocks `[B, K, rows, D, group * block_q]`."""
        x = self.pad(x, 1, self.rows * self.block_q, "zeros")
        x = x.reshape(self.batch, self.rows, self.block_q, self.kv_heads, self.group, x.shape[-1])
        x = x.transpose(0, 3, 1, 5, 4, 2)
        return x.reshape(*x.shape[:4], self.group * self.block_q)

    def from_rows(self, x: Array) -> Array:
        """Turns blocks `[B, K, rows, group * block_q]` into `[B, T, H]`. Both may have a last axis
        `V`.
        """
        x = x.reshape(*x.shape[:3], self.group, self.block_q, *x.shape[4:])
        x = x.transpose(0, 2, 4, 1, 3, *range(5, x.ndim))
        heads = self.kv_heads * self.group
        rest, part = x.shape[5:], -(-self.queries // self.parts)
        padded = self.rows // self.parts * self.block_q
        if self.parts > 1:
            x = x.reshape(self.batch, self.parts, padded, heads, *rest)[:, :, :part]
            padded = self.parts * part
        return x.reshape(self.batch, padded, heads, *rest)[:, : self.queries]

    def columns_of(self, x: Any, flat: bool = False) -> Array:
        """Turns keys or values `[B, S, K, D]` into blocks. They may lack the last axis.

        | form | blocks |
        |---|---|
        | copied | `[B, K, columns, block_k, D]` |
        | in place | `[B, columns, block_k, K, D]` |
        | in place, sharded heads | `[B, devices, columns, block_k, K / devices, D]` |
        | `flat`, from `[B, devices, S * n]` | `[B, devices, columns, 1, block_k * n]` |

        The last form loses the axis of devices if there is only one.
        """
        tokens = self.columns * self.block_k
        if flat:
            x = self.pad(x, 2, tokens * (x.shape[2] // self.keys), "zeros")
            x = x.reshape(self.batch, self.kv_heads, self.columns, 1, -1)
            return x[:, 0] if self.kv_heads == 1 else x
        x = self.pad(x, 1, tokens, "zeros")
        if self.in_place:
            x = x.reshape(self.batch, self.columns, self.block_k, *x.shape[2:])
            if self.kv_heads == 1:
                return x
            return jnp.moveaxis(split_axis(x, 3, self.kv_heads, outside=True), 3, 1)
        # The axis of size 1 makes XLA:CPU copy once, not twice, on the way into a loop.
        x = x.reshape(self.batch, self.columns, 1, self.block_k, *x.shape[2:])
        return jnp.moveaxis(x, 4, 1).squeeze(3)

    def pages_of(self, x: Any, flat: bool = False) -> Array:
        """Turns pages `[pages, page size, K, D]` into
        `[devices, pages, page size, K / devices, D]`, and those that are `flat`,
        `[pages, devices, n]`, into `[devices, pages, 1, n]`. For one device they stay as they are.
        """
        if self.kv_heads == 1:
            return x
        if flat:
            return jnp.moveaxis(x, 1, 0)[:, :, None]
        return jnp.moveaxis(split_axis(x, 2, self.kv_heads, outside=True), 2, 0)

    def tables_of(self, table: Array) -> list[Array]:
        """Splits a table `[B, pages of a row]` into one `[B, columns]` for each page of a block."""
        table = self.pad(table, 1, self.columns * self.together, "zeros")
        return [table[:, i :: self.together] for i in range(self.together)]

    def pairs_of(self, x: Array | np.ndarray) -> tuple[Array | np.ndarray, tuple[int, ...]]:
        """Turns a canonical operand `[B|1, H|1, T|1, S|1]`, perhaps with features, into blocks.

        **Returns:** blocks `[keys|1, rows|1]`, or `[keys, group|1, queries|1]` where rows would be
        larger than `x` is, and then the features; and the grid axes in front of them, those on
        which `x` varies.
        """
        b, h, t, s, *last = x.shape
        columns = self.columns * (self.shards if t != 1 else 1)
        by: Padding = "last" if 1 in (t, s) else "again"
        if t != 1:
            x = self.pad(x, 2, self.rows * self.block_q, by)
        if s != 1:
            parts = self.parts * columns // self.columns
            x = self.pad(x, 3, columns * self.block_k, by, parts=parts)
        sizes = (
            (b, 1) if b == 1 else (self.batch, 1),
            (1, 1) if h == 1 else (self.kv_heads, self.group),
            (1, 1) if t == 1 else (self.rows, self.block_q),
            (1, 1) if s == 1 else (columns, self.block_k),
        )
        cut = [n for pair in sizes for n in pair] + last
        lie = self.pairs_lie
        x = permuted(x, cut, (0, 2, 4, 6, 7, 3, 5, 1, *range(8, len(cut))), lie)
        # Axes with several blocks are kept. In a ring, the only block of a device differs from that
        # of others, so axes on which `x` varies are kept, too. A `fixed` block is like several.
        alone = self.shards > 1 or self.fixed
        kept = [n != 1 or (alone and m != 1) for (n, _), m in zip(sizes, (b, h, t, s))]
        axes = tuple(a for a, keep in zip((BATCH, HEAD, ROW, COL), kept) if keep)
        keys, group, queries = x.shape[4:7]
        lead = [n for (n, _), keep in zip(sizes, kept) if keep]
        x = x.reshape(*lead, keys, group, queries, *last)
        if last:
            whole = (group, queries) in ((1, 1), (self.group, self.block_q))
            return x.reshape(*lead, keys, -1, *last) if whole else x, axes
        if keys == 1 and group * queries != 1:
            static = isinstance(x, np.ndarray) and isinstance(self.block_q, int)
            xp = np if static else jnp
            x = xp.broadcast_to(x, (*x.shape[:-2], self.group, self.block_q))
        if keys == 1 or x.shape[-2:] in ((1, 1), (self.group, self.block_q)):
            x = x.reshape(*x.shape[:-2], -1)
        return x, axes

    def from_pairs(self, x: Array, axes: tuple[int, ...], features: bool = False) -> Array:
        """Undoes `pairs_of`. The padding stays."""
        last = x.shape[x.ndim - features :]
        sizes, block = dict(zip(axes, x.shape)), x.shape[len(axes) : x.ndim - features]
        b, k, rows, columns = (sizes.get(a, 1) for a in (BATCH, HEAD, ROW, COL))
        if len(block) == 2:
            block = (block[0], 1, 1) if block[1] == 1 else (block[0], self.group, self.block_q)
        x = x.reshape(b, k, rows, columns, *block, *last)
        if HEAD not in axes and self.kv_heads > 1:  # `pairs_of` only broadcast it to the block.
            x = x[:, :, :, :, :, :1]
        if ROW not in axes:
            x = x[:, :, :, :, :, :, :1]
        lie = self.pairs_lie
        x = permuted(x, x.shape, (0, 1, 5, 2, 6, 3, 4, *range(7, x.ndim)), lie)
        return x.reshape(b, x.shape[1] * x.shape[2], rows * x.shape[4], columns * block[0], *last)


@dataclasses.dataclass(frozen=True)
class BlockOperand:
    """An array cut into blocks.

    **Arguments:**

    - `role`: what the array means to the problem, such as `"query"`, `"page"`, `"scale"`, `"valid"`
        or the index `"q_position"` of a pair. `"row"` and `"column"` are the first tokens of a
        block. The role of what a mask or a score reads is `"of "` and the name of its class.
    - `array`: the blocks, with grid axes in front of the axes of one block.
    - `axes`: the grid axes that the array has.
    - `features`: whether the last axis of a block is one of features.
    """

    role: str
    array: Any
    axes: tuple[int, ...]
    features: bool = False

    @property
    def read(self) -> tuple[tuple[int, ...], Any]:
        """The shape and the dtype of what a mask or score reads of it at a pair."""
        return self.array.shape[-1:] if self.features else (), block_dtype(self.array)

    def on_rows(self, x: Array, tiling: Tiling) -> Array:
        """Broadcasts one of its blocks to `[keys|1, rows|1]`. Features are the last axis."""
        if x.ndim - self.features == 2:
            return x
        keys, last = x.shape[0], x.shape[3:]
        x = jnp.broadcast_to(x, (keys, tiling.group, tiling.block_q, *last))
        return x.reshape(keys, -1, *last)


def check_open_length(name: str, n: Any, field: str, block: int | None, parts: int) -> None:
    """Raises, with the remedy, unless a length that `jax.export` leaves open is a multiple of a
    known block size in each of `parts` parts. In the message, 128 is an example of a block size.
    """
    if isinstance(n, int):
        return
    example = (block or 128) * parts
    if block is None or n % example != 0:
        raise ValueError(
            f"{name} has {n} tokens, a symbolic length: its blocks must be of one size that is "
            f"known. Give the strategy an AttentionMetadata({field}=) of a size, and export for "
            f"multiples of it: jax.export.symbolic_shape('{example}*n'). Or take Dense."
        )


def choose_tiling(  # noqa: PLR0913 (what a call gives, each checked here)
    problem: Problem,
    block_q: int | None,
    block_k: int | None,
    parts: int = 1,
    shards: int = 1,
    in_place: bool = False,
    lowering: Lowering = XLA,
    devices: int = 1,
    fixed: bool = False,
) -> Tiling:
    """Chooses the blocking of a `problem`.

    **Arguments:**

    - `block_q`, `block_k`: the tokens of a block; None lets the lowering choose.
    - `parts`, `shards`, `in_place`: as for `Tiling`.
    - `lowering`: the code that visits the blocks.
    - `devices`: with `in_place`, the number of devices that heads are sharded over.
    - `fixed`: whether blocks keep their size where there are fewer tokens, and are padded.

    **Raises:** `ValueError` if a symbolic length has no known blocks, or if pages differ in size
    from each other or from `block_k`.
    """
    t, s, heads, kv_heads = problem.sizes
    if in_place:
        kv_heads = devices
    group = heads // kv_heads
    check_open_length("query", t, "blocksize_q", block_q, parts)
    check_open_length("key", s, "blocksize_k", block_k, parts)
    pages = {x.page_size for x in (problem.key, problem.value) if isinstance(x, Pages)}
    if len(pages | ({block_k} if pages and block_k else set())) > 1:
        remedy = (
            f"give the metadata blocksize_k={min(pages)}" if fixed else "leave blocksize_k None"
        )
        raise ValueError(
            f"Pages of keys and values and blocksize_k must have one size, got {sorted(pages)} and "
            f"{block_k}; {remedy}."
        )
    page = next(iter(pages), 0)
    if block_q is None or block_k is None:
        dtype, head_dim = problem.query.dtype, problem.query.shape[-1]
        keys = s if block_k is None else block_k  # A symbolic length always has a given block.
        contents = [x.content if isinstance(x, Pages) else x for x in (problem.key, problem.value)]
        itemsize = as_stored(contents[0]).itemsize
        nbytes = sum(math.prod(x.shape[-2:]) for x in contents) * itemsize // devices
        together = math.prod(problem.batch_shape) * kv_heads
        kept = page, itemsize, nbytes, together, fixed, parts == 1 and problem.reads_pairs
        request = BlockRequest(t, keys, group, dtype, head_dim, in_place, *kept)
        best = lowering.choose_blocks(request)
        block_q = best.queries if block_q is None else block_q
        block_k = best.keys if block_k is None else block_k
    return Tiling(
        batch=math.prod(problem.batch_shape),
        kv_heads=kv_heads,
        group=group,
        queries=t,
        keys=s,
        block_q=block_q
        if fixed or not isinstance(t, int)
        else min(block_q, max(-(-t // parts), 1)),
        block_k=block_k
        if fixed or not isinstance(s, int)
        else min(block_k, max(-(-s // parts), 1)),
        parts=parts,
        shards=shards,
        in_place=in_place,
        together=block_k // page if page else 1,
        halves=lowering.skips_corners and not in_place,
        fixed=fixed,
        joins=lowering.joins_pairs,
    )


def as_device_array(x: Any) -> Array:
    """An array as JAX's. Of many numbers that count up, such as the positions of a long sequence,
    the program then holds no copy, but counts too. After some number they may stay the same, as
    padding does.

    A program of 131,072 tokens held 2 MB of positions for each pass of each layer. A few thousand
    stay a constant, since a GPU would need a microsecond to start a kernel that counts.
    """
    if isinstance(x, np.ndarray) and x.size > 2**14 and x.dtype == np.int32:
        first, last = x.reshape(-1)[[0, -1]]
        if np.array_equal(x, np.minimum(iota(x.size) + first, last).reshape(x.shape)):
            return jnp.minimum(jnp.arange(x.size, dtype=x.dtype) + first, last).reshape(x.shape)
    return jnp.asarray(x)


class InPlace(NamedTuple):
    """Operands of keys and values that stay in place.

    **Arguments:**

    - `keys`, `values`: their arrays. Each page of a block is a separate operand.
    - `tables`: for each axis that is looked up, the pages of each block, or the layer.
    - `sizes`: how many pages or layers there are, for each of these axes.
    """

    keys: tuple[BlockOperand, ...]
    values: tuple[BlockOperand, ...]
    tables: tuple[BlockOperand, ...]
    sizes: tuple[int, ...]


def in_shares(x: AbstractStored, tiling: Tiling, lowering: Lowering) -> AbstractStored:
    """Keys or values in as many shares of heads as the blocking has.

    For a pool of pages, other shares would copy the scales of all pages, and gather them where
    devices share the heads. Loops of ordinary JAX read any number of shares, so the pool stays.
    """
    as_they_are = x.table is not None and tiling.kv_heads == 1 and lowering.drops_single_axes
    return x if as_they_are else x.in_shares(tiling.kv_heads)


def single_axes(x: AbstractStored, tiling: Tiling, lowering: Lowering) -> list[tuple[int, ...]]:
    """For each array of `x`, the axes of size 1 that its blocks lose."""
    if not lowering.drops_single_axes:
        return [()] * len(x.arrays)
    one_head = x.shape[2] == tiling.kv_heads
    shares = [a.shape[-2] == tiling.kv_heads for a in x.arrays]
    return [(0,) * n if flat else (1,) * one_head for flat, n in zip(x.flat, shares)]


def in_place(held: Sequence[AbstractStored], tiling: Tiling, lowering: Lowering) -> InPlace:
    """Cuts keys and values, `held` as they are stored, into operands where they lie."""
    placed, tables, sizes = [], [], ()
    shared = tiling.kv_heads > 1
    for role, x in zip(("key", "value"), held):
        single = single_axes(x, tiling, lowering)
        if x.table is None:
            axes, lead, cut = (BATCH, HEAD, COL) if shared else (BATCH, COL), 0, tiling.columns_of
            if isinstance(x, StackLayer):
                axes, lead, cut = (len(tables), *axes), 1, jax.vmap(tiling.columns_of)
                tables.append(BlockOperand("page", x.index, ()))
                sizes += (len(x.arrays[0]),)
            # The axis of a single head goes before the padding, which loops can then undo.
            early = [one == (1,) and not shared for one in single]
            arrays = [lax.squeeze(a, [lead + 2] * e) for a, e in zip(x.arrays, early)]
            found = [(cut(a, flat=f) if f else cut(a), axes) for a, f in zip(arrays, x.flat)]
            single = [() if e else one for one, e in zip(single, early)]
            if lead and len(x.arrays) and x.shape[0] == 1 and lowering.drops_single_axes:
                # Behind the axis of layers, XLA:CPU copied all of these for the axis of one row.
                kept = tuple(axis for axis in axes if axis != BATCH)
                found = [(lax.squeeze(a, [axes.index(BATCH)]), kept) for a, _ in found]
        else:
            pools = [tiling.pages_of(a, flat) for a, flat in zip(x.arrays, x.flat)]
            found = []
            for table in tiling.tables_of(x.table):
                axes = (HEAD, len(tables)) if shared else (len(tables),)
                found += [(a, axes) for a in pools]
                tables.append(BlockOperand("page", table, (BATCH, COL)))
                sizes += (len(x.arrays[0]),)
        lie = [
            BlockOperand(role, lax.squeeze(a, [len(axes) + i for i in one]), axes)
            for (a, axes), one in zip(found, single * len(found))
        ]
        placed.append(tuple(lie))
    keys, values = placed
    return InPlace(keys, values, tuple(tables), sizes)


def layers_in_pages(problem: Problem) -> Problem:
    """The problem with `in_pages` of its keys and values."""
    key, value = in_pages(problem.key), in_pages(problem.value)
    return dataclasses.replace(problem, key=key, value=value)
