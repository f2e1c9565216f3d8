"""The grid of blocks: its axes, the classes of blocks, and where arrays lie on it.

The axes of a grid are `(*batch, rows, columns)` and are named by negative indices: `ROW` is -2 and
`COL` is -1, and attention has the batch axes `HEAD` and `BATCH`. Names count from the end so that
they stay right when `vmap` puts a further batch axis in front.

The sizes of blocks, and what the best of them depend on.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array


BATCH, HEAD, ROW, COL = -4, -3, -2, -1


FEW_ROWS = 256
"""The most rows, queries times heads, that a TPU's kernel for decoding takes.

That kernel multiplies each row with the keys of all heads, and most of these products are wasted.
They cost nothing while the kernel waits for memory; with more rows, the matrix units set the pace.
The limit is as large as the matrix units of a v6e, 256 x 256. No search for a better one is
recorded: the `decode*` kernels of `python tests/measure tpu-report` show what a step costs.
"""


# The class of a block: no pair is visible, some are or may be, all are. Visits skip what is empty
# and evaluate the mask where it is partial. The order matters: the class of a block under two
# conditions is the lesser of the two, and an itinerary visits greater classes first.
EMPTY, PARTIAL, FULL = 0, 1, 2
DIAGONAL = 3  # A partial block in which the first rows see no key of the later half.


@dataclasses.dataclass(frozen=True)
class KnownTable:
    """A table that is known while a program is traced, as something that can be hashed.

    **Arguments:**

    - `shape`, `classes`: the shape of the table, and the bytes of its int8 entries.
    """

    shape: tuple[int, ...]
    classes: bytes

    @classmethod
    def of(cls, table: np.ndarray) -> "KnownTable":
        return cls(table.shape, table.astype(np.int8).tobytes())

    @property
    def array(self) -> np.ndarray:
        return np.frombuffer(self.classes, np.int8).reshape(self.shape)


Parts = tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]
"""Classes of blocks, each with the kinds of the parts of its blocks, by rows and then by keys."""


@dataclasses.dataclass(frozen=True)
class BlockGrid:
    """The grid of a visit, what lies on it, and how it is visited.

    **Arguments:**

    - `grid`: the sizes of its axes, `(*batch, rows, columns)`. In a ring it is the grid of one
        device, with its rows and columns. An array with both axes then holds the columns of all
        devices.
    - `block`: the `(columns, rows)` of one block of logits.
    - `in_axes`: the grid axes that each operand has.
    - `table_axes`: the grid axes of the table, which holds `EMPTY`, `PARTIAL` or `FULL` for each
        block. Without a table every pair is visited.
    - `known`: the table itself, where it is known while the program is traced. A lowering may use
        it in place of the argument, which holds the same.
    - `ring`: a `Rotation` if columns rotate around a mesh axis, a `Gathering` if each device
        gathers them; None if they stay.
    - `fused`: whether a transpose finds all its results in one visit of the grid. Otherwise one
        visit finds the results that move with columns, and another visit the rest.
    - `ragged`: whether the batch elements on a device are visited one by one, even small ones,
        because their live columns differ.
    - `live_pairs`: if positive, the table alone tells which blocks each batch element sees, and it
        has at most so many live pairs for each of them. No visit may then have one block of several
        elements, whose function would show each what only some of them see. If the layout is
        `ragged`, functions mask that.
    - `whole`: whether each batch element sees all or nothing of each block.
    - `lowering`: the `Lowering` that visits the blocks, as in `lowering.py`; None means `XLA`.
    - `stage`: the name by which a lowering recognises the visit. It is `"fold"`, `"tangent"` for
        the tangent of a fold, `"backward"` for the transpose of a tangent, and empty for others.
    - `pages`: the sizes of further axes `0, 1, ...`, which are not visited in order. The index on
        axis `i` is the number that operand `lookups[i]` holds for the pair of blocks.
    - `lookups`: the index of that operand, for each axis of `pages`.
    - `corner`: how many rows, the first ones, may see no key of the later half of a block. Where
        it is positive, the table may hold `DIAGONAL`.
    - `parts`: what is known of all masked blocks of each class that occurs, `PARTIAL` or
        `DIAGONAL`. The rows and the keys of a block are cut into equal parts. Each part of the rows
        has the kinds of those of the keys: `EMPTY`, `PARTIAL` or `FULL`. Each row has a live block
        then. If nothing is known, it is empty.
    - `shared`: the operands of the logits of a fold that its values read, too. They come before the
        operands that only values read.
    - `transposed`: whether loops compute the logits of a fold as `[rows, keys]`, see
        `fold_step.py`. Then they transpose its first operand, the queries.
    - `differentiated`: whether a visit is part of a derivative, whose sweeps compute the same
        logits as `[keys, rows]`.
    - `batch_invariant`: whether a grid of one pair of blocks is visited as larger grids are. Then
        the pair has the bits that it would have among others.
    - `tokens`: the `Tokens` that rows and columns were cut from, so that a lowering can read and
        write these where they lie. It is empty where they lie otherwise.
    - `padded`: the number of keys, if these lie in place and the last block is padded; else 0.
        Loops then read windows of the keys, see `padded_columns.py`.
    """

    grid: tuple[int, ...]
    block: tuple[int, int]
    in_axes: tuple[tuple[int, ...], ...]
    table_axes: tuple[int, ...] | None = None
    known: KnownTable | None = None
    ring: Any = None
    fused: bool = True
    ragged: bool = False
    live_pairs: int = 0
    whole: bool = False
    lowering: Any = None
    stage: str = ""
    pages: tuple[int, ...] = ()
    lookups: tuple[int, ...] = ()
    corner: int = 0
    parts: Parts = ()
    shared: tuple[int, ...] = ()
    transposed: bool = False
    differentiated: bool = False
    batch_invariant: bool = False
    tokens: tuple[Any, ...] = ()
    padded: int = 0

    def size(self, axis: int) -> int:
        """The number of indices on an axis of the grid, or of `pages` if it is not negative."""
        return self.pages[axis] if axis >= 0 else self.grid[axis]

    def shape(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """The leading sizes of an array with these grid axes."""
        devices = 1 if self.ring is None or not {ROW, COL} <= set(axes) else self.ring.size
        return tuple(self.size(a) * (devices if a == COL else 1) for a in axes)

    def only(self, kept: Sequence[int]) -> "BlockGrid":
        """The layout of a visit that has only the operands `kept`, in their order there."""
        ring = None if self.ring is None else self.ring.only(kept)
        in_axes = tuple(self.in_axes[i] for i in kept)
        lookups = tuple(kept.index(i) for i in self.lookups)
        return dataclasses.replace(self, in_axes=in_axes, ring=ring, lookups=lookups)

    @property
    def batch(self) -> tuple[int, ...]:
        """The names of the batch axes, the outermost first."""
        return tuple(range(-len(self.grid), ROW))

    @property
    def own_pages(self) -> bool:
        """Whether batch elements look up different pages. Then they are visited one by one."""
        return any(a in self.batch for i in self.lookups for a in self.in_axes[i])

    @property
    def listed(self) -> int:
        """The number of entries of the table, in a ring of the table of one hop. Without a table,
        it is the number of pairs of rows and columns.
        """
        axes = self.table_axes if self.ring is None else self.ring.table_axes
        return math.prod(self.columns if a == COL else self.size(a) for a in axes or (ROW, COL))

    @property
    def columns(self) -> int:
        """The number of columns in one visit. If columns are gathered, they are those of all
        devices.
        """
        return self.grid[COL] * (1 if self.ring is None else self.ring.together)

    @property
    def sides(self) -> tuple[int, int]:
        """The rows and columns of a table. If `ragged`, it has the rows of all batch elements."""
        return (self.listed // self.columns if self.ragged else self.grid[ROW]), self.columns

    @property
    def group(self) -> int:
        """How many heads a row has the queries of, if that is known of the `tokens`; else 1."""
        return next((tokens.group for tokens in self.tokens if tokens.axis == ROW), 1)

    def split(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Separates the arguments of a primitive into the table, or None, and the operands."""
        return (None, args) if self.table_axes is None else (args[0], args[1:])

    def split_known(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The same as `split`, with a NumPy array for a table that is known."""
        table, operands = self.split(args)
        return table if self.known is None else self.known.array, operands

    def without_corners(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The same as `split`, with a table in which `DIAGONAL` is replaced by `PARTIAL`."""
        table, operands = self.split(args)
        return self._as_partial(table), operands

    def known_without_corners(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The same as `without_corners`, with a NumPy array for a table that is known."""
        table, operands = self.split_known(args)
        return self._as_partial(table), operands

    def _as_partial(self, table: Any) -> Any:
        if table is None or not self.corner:
            return table
        xp = np if isinstance(table, np.ndarray) else jnp
        return xp.where(table == DIAGONAL, np.int8(PARTIAL), table)


def moves(axes: tuple[int, ...]) -> bool:
    """Whether an array with these axes has another block for each column, by columns or pages."""
    return any(a == COL or a >= 0 for a in axes)


def replaced(xs: Sequence, where: Sequence[int], by: Sequence) -> list:
    """A list of `xs` with the entries at the indices `where` replaced."""
    new = dict(zip(where, by))
    return [new.get(i, x) for i, x in enumerate(xs)]


def _window(x: Any, axes: tuple[int, ...], at: dict) -> tuple[list, list]:
    """The start and the size of the slice of `x` at the given grid indices."""
    start = [jnp.int32(at.get(a, 0)) for a in axes] + [jnp.int32(0)] * (x.ndim - len(axes))
    size = [1 if a in at else n for a, n in zip(axes, x.shape)] + list(x.shape[len(axes) :])
    return start, size


def pick(x: Any, axes: tuple[int, ...], at: dict) -> Any:
    """The block of `x` at the given grid indices; grid axes not in `at` are kept whole."""
    if not any(a in at for a in axes):
        return x
    start, size = _window(x, axes, at)
    kept = [n for a, n in zip(axes, size) if a not in at] + size[len(axes) :]
    return lax.dynamic_slice(x, start, size, allow_negative_indices=False).reshape(kept)


def put(x: Array, axes: tuple[int, ...], at: dict, block: Array) -> Array:
    """Replaces in `x` the block that `pick` returns."""
    if not any(a in at for a in axes):
        return block
    start, size = _window(x, axes, at)
    return lax.dynamic_update_slice(x, block.reshape(size), start, allow_negative_indices=False)


def unsigned_zeros(x: Array) -> Array:
    """A sum of which each zero is +0, for sums whose bits are fixed.

    Where dropout drops all keys that a row sees, all products are zeros, of either sign. The sign
    of their sum was seen to depend on the number of rows for which XLA had compiled it.
    """
    return jnp.where(x == 0, jnp.zeros((), x.dtype), x)


class BlockRequest(NamedTuple):
    """The properties of a call that its best block sizes depend on.

    **Arguments:**

    - `queries`, `keys`: the numbers of query and key tokens.
    - `group`: the number of query heads that a block has for each of its queries.
    - `dtype`, `head_dim`: the dtype and the head dim of the queries.
    - `in_place`: whether keys and values are read where they lie in memory.
    - `page_size`: the tokens of a page if keys lie in pages, else 0.
    - `itemsize`, `token_nbytes`: the bytes of a number, and of all keys and values of a token on
        one device, as they are stored.
    - `together`: the number of batch elements times that of key heads.
    - `fixed`: whether results may not depend on the number of keys, nor on their pages.
    - `reads_pairs`: whether a number for each pair of tokens is read, which may lie in place.
    """

    queries: int
    keys: int
    group: int
    dtype: Any
    head_dim: int
    in_place: bool
    page_size: int = 0
    itemsize: int = 4
    token_nbytes: int = 0
    together: Any = 1
    fixed: bool = False
    reads_pairs: bool = False


class BlockSizes(NamedTuple):
    """The tokens of the blocks that are fastest for a lowering. Pages in a block are whole."""

    queries: int
    keys: int


def even_size(tokens: Any, most: int) -> int:
    """The size of blocks that are as few as possible, a multiple of 8 up to about `most` tokens.

    Blocks of `most` tokens and a padded rest took longer, in float32 without a mask. On an Intel
    Xeon, gradients of 160 tokens took 2.2 times as long, and those of 300 tokens 2.3 times.
    """
    if not isinstance(tokens, int) or tokens <= most:
        return most
    size = -(-tokens // -(-tokens // most))
    return min(-(-size // 8) * 8, most)


def whole_size(tokens: Any, most: int) -> int:
    """The size of the largest blocks, up to `most` tokens, that divide them all and are not small
    for that. Otherwise it is that of even blocks, the last of which is padded.
    """
    if isinstance(tokens, int) and tokens > most:
        divisors = (n for n in range(most, most // 3, -1) if tokens % n == 0)
        return next(divisors, even_size(tokens, most))
    return even_size(tokens, most)
