"""Visiting the live blocks of a grid: the loops that sweeps and the softmax fold share.

JAX never differentiates these loops, as the primitives that run them define their derivatives. So
loop bounds may depend on data, and empty blocks cost nothing.

Columns whose last block is padded, read where their tokens lie.

Keys of a cache are cut into blocks of a fixed size for all capacities, and the last block is
padded. As an array that would be a copy of all keys. The loops undo the padding instead, so that
XLA drops the copy, and read each block as a window of the tokens:

    tokens  0 1 2 3 4 5 6 7 8 9        blocks of 4:  0 1 2 3 | 4 5 6 7 | 8 9 - -

The last block is padded when it is read, in a separate loop. It is the last one that a row visits,
as it is never full, and blocks of a class are visited in order.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._jax import vary, varying_axes
from .._misc import unfolded
from .grid import BlockGrid, COL, DIAGONAL, EMPTY, FULL, moves, PARTIAL, pick, put, replaced, ROW
from .tokens import by_pairs, sum_by_pairs, sums_by_tokens, TokenPairs, TokenRows


class PaddedColumns(eqx.Module):
    """An operand whose blocks are windows of its tokens, except the last block, which is padded.

    **Arguments:**

    - `tokens`: `[*axes, tokens, ...]`, with the grid axes but the columns in front.
    - `block`: the tokens of a block, fewer than there are.
    """

    tokens: Array
    block: int = eqx.field(static=True)

    @property
    def dtype(self) -> Any:
        return self.tokens.dtype

    def pick(self, axes: tuple[int, ...], at: dict, last: bool) -> Array:
        """The block at the given grid indices, the column among them; see `pick` of `grid.py`.
        `last` says whether that is the last column.
        """
        n, lead = len(axes) - 1, self.tokens.shape[: len(axes) - 1]
        length, *rest = self.tokens.shape[n:]
        left = length % self.block
        # This depends on the turn, so that XLA pads no last block of a row that does not see it.
        first = jnp.int32(at[COL]) * jnp.int32(self.block)
        start = [*(jnp.int32(at.get(a, 0)) for a in axes[:n]), first, *[jnp.int32(0)] * len(rest)]
        size = left if last else self.block
        sizes = [*(1 if a in at else m for a, m in zip(axes, lead)), size, *rest]
        found = lax.dynamic_slice(self.tokens, start, sizes, allow_negative_indices=False)
        found = found.reshape(*(m for a, m in zip(axes, lead) if a not in at), size, *rest)
        if not last:
            return found
        axis = found.ndim - len(rest) - 1
        return jnp.pad(found, [(0, (self.block - left) * (i == axis)) for i in range(found.ndim)])


def without_padding(x: Array, axes: tuple[int, ...], layout: BlockGrid) -> Any:
    """An operand of the loops, as `PaddedColumns` if the layout says that its columns are padded
    and its blocks hold several numbers of each key.
    """
    n, block = len(axes), layout.block[0]
    lies = axes[-1:] == (COL,) and ROW not in axes and x.ndim > n and x.shape[n] == block
    if not (layout.padded and lies and math.prod(x.shape[n + 1 :]) > 1):
        return x
    tokens = x.reshape(*x.shape[: n - 1], -1, *x.shape[n + 1 :])
    return PaddedColumns(lax.slice_in_dim(tokens, 0, layout.padded, axis=n - 1), block)


PLACED = TokenRows, TokenPairs


def _loop(lo, hi, body, state, opaque):
    """A loop from `lo` to `hi`; of a known single turn, that turn without a loop.

    If it is to be `opaque`, it stays a loop of which XLA does not know the number of turns.
    """
    if opaque:
        hi = lax.optimization_barrier(jnp.int32(hi))
    elif isinstance(lo, int) and isinstance(hi, int) and hi - lo == 1:
        return body(lo, state)
    return lax.fori_loop(jnp.int32(lo), jnp.int32(hi), body, state)


def kv_order(table: Any, classes: Sequence[int]) -> tuple[Array, list[Array]]:
    """The order in which each row visits its columns: those of the greatest class first.

    **Returns:** the sorted columns of each row, and per class how many columns are of that class or
    a greater one. For `classes` `(FULL, PARTIAL)`, the row of a table

        columns  0  1  2  3          order  0  2  1  3
        class    F  P  F  -          ends   2 (full), 3 (full and partial)

    has full blocks at the positions 0 and 1 of `order`, a partial one at 2, and skips the rest.
    """
    # One number that has the class and then the column: XLA:CPU sorts one array some five times as
    # fast as one by another.
    table, n = unfolded(table), jnp.int32(table.shape[-1])
    here = lax.broadcasted_iota(jnp.int32, table.shape, table.ndim - 1)
    order = lax.sort((np.int32(DIAGONAL) - table.astype(jnp.int32)) * n + here) % n
    ends = [jnp.sum(table >= c, -1, dtype=jnp.int32, keepdims=True) for c in classes]
    return order, ends


def _shared_table(table: Any) -> Array:
    """The table `[rows, columns]` of batch elements that are visited together. A block is full if
    it is full for all of them, and empty only if it is empty for all.
    """
    lead = tuple(range(table.ndim - 2))
    least, most = table.min(lead), table.max(lead)
    return jnp.where(least == FULL, FULL, jnp.where(most == EMPTY, EMPTY, PARTIAL))


def _of_pairs(axes: tuple[int, ...]) -> bool:
    """Whether an array varies with queries and with keys."""
    return {ROW, COL} <= {*axes}


def _pick(x: Any, axes: tuple[int, ...], at: dict) -> Array:
    """The block of an array at the given grid indices."""
    return x.pick(at) if isinstance(x, PLACED) else pick(x, axes, at)


def _put(x: Any, axes: tuple[int, ...], at: dict, block: Array) -> Any:
    """Replaces the block that `_pick` returns."""
    return x.put(at, block) if isinstance(x, PLACED) else put(x, axes, at, block)


def _block_at(x: Any, axes: tuple[int, ...], at: dict, last: bool) -> Array:
    """The block of an operand that `_pick` returns. `last` is as for `PaddedColumns.pick`."""
    return x.pick(axes, at, last) if isinstance(x, PaddedColumns) else _pick(x, axes, at)


def _blocks_at(operands: Sequence, layout: BlockGrid, at: dict) -> list:
    """The blocks of all operands at a point of the grid, the pages that it looks up included."""
    at = dict(at)
    for i, lookup in enumerate(layout.lookups):
        at[i] = pick(operands[lookup], layout.in_axes[lookup], at)
    return [_pick(x, a, at) for x, a in zip(operands, layout.in_axes)]


def _is_held(x: Any, axes: tuple[int, ...], layout: BlockGrid) -> bool:
    """Whether an operand is one that `_read_in_turn` ties to the step."""
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return (layout.ragged or isinstance(x, TokenPairs)) and narrow and moves(axes)


def _read_in_turn(t: Any, at: dict, operands: Sequence, held: Sequence[bool]) -> tuple[Any, list]:
    """Ties narrow floats that are read in place to the step `t`, so that XLA cannot convert them
    ahead of it.

    To slice bfloat16 or float8, XLA:CPU converts the whole array. If the conversion does not depend
    on the step, XLA moves it in front of the loop. The program then holds a wide copy of a cache.
    Where a row is a single step without a loop, only the indices `at` of the row change.
    """
    operands, narrow = list(operands), [i for i, x in enumerate(held) if x]
    if not narrow:
        return t, operands
    here = [jnp.int32(x) for x in (t, *at.values())]
    (t, *_), *tied = lax.optimization_barrier((here, *[operands[i] for i in narrow]))
    return t, replaced(operands, narrow, tied)


@dataclasses.dataclass(frozen=True)
class _RowVisit:
    """Visits the live columns of one row.

    **Arguments:**

    - `steps`, `layout`, `axes`, `finish`: as for `traverse`.
    - `operands`: the arrays on the grid.
    - `order`, `ends`: the itinerary of all rows, or None and an empty list without a table.
    - `table_axes`: the grid axes of `order` and `ends`.
    - `fresh`: the first content of a row of each accumulator.
    - `held`: which operands are tied to a step, and so picked there.
    - `complete`: whether each accumulator is complete after one row.

    If the layout is `batch_invariant`, loops are opaque. What is compiled for a turn, and with it
    the order of sums inside, could else depend on the number of turns. For the same reason a
    barrier ties what a turn reads to the turn. Where there is one block, it is the same in each
    turn, and XLA would compute ahead of the loop what depends on nothing else. A product that is
    not compiled together with its sum is then rounded before it is added.

    Loops are opaque, too, where several loops add to a block of one array. Otherwise XLA replaces a
    loop of one turn by that turn, and copies the whole array between two such turns. For 8 images
    of 197 tokens, which are two blocks of keys, the gradient then took 3.4 times as long.
    """

    steps: dict[int, Callable]
    layout: BlockGrid
    operands: Sequence
    order: Any
    ends: list[Array]
    table_axes: tuple[int, ...]
    axes: Sequence[tuple[int, ...]]
    fresh: list[Array]
    complete: list[bool]
    finish: Callable
    held: Sequence[bool]

    def __call__(self, at: dict, accs: list) -> list:
        """Visits the live columns of one row, which is at the grid indices `at`."""
        layout, axes, finish = self.layout, self.axes, self.finish
        both = zip(self.operands, layout.in_axes, self.held)
        operands = [x if moves(a) or tied else _pick(x, a, at) for x, a, tied in both]
        local = [
            new if once else x if moves(a) else _pick(x, a, at)
            for x, a, new, once in zip(accs, axes, self.fresh, self.complete)
        ]

        def visit(step, t, local, last=False):
            t, near = _read_in_turn(t, at, operands, self.held)
            column = t
            if self.order is not None:
                column = pick(self.order, self.table_axes, {**at, COL: t})
            here = {**at, COL: column}
            for i, lookup in enumerate(layout.lookups):
                table, a = near[lookup], layout.in_axes[lookup]
                here[i] = pick(table, a, here) if moves(a) else table
            both = zip(near, layout.in_axes, self.held)
            blocks = [_block_at(x, a, here, last) if moves(a) or tied else x for x, a, tied in both]
            old = [_pick(x, a, here) if moves(a) else x for x, a in zip(local, axes)]
            if layout.batch_invariant:
                _, blocks = lax.optimization_barrier((jnp.int32(t), blocks))
            new = step(old, blocks)
            return [_put(x, a, here, y) if moves(a) else y for x, a, y in zip(local, axes, new)]

        lo, padded = 0, any(isinstance(x, PaddedColumns) for x in operands)
        several = len(self.steps) > 1 or padded
        opaque = layout.batch_invariant or (several and any(map(moves, axes)))
        for n, c in enumerate(sorted(self.steps, reverse=True)):
            hi = end = layout.grid[COL]
            if self.ends:
                hi = end = pick(self.ends[n], self.table_axes, {**at, COL: 0})
            turn = ft.partial(visit, self.steps[c])
            if padded and n == len(self.steps) - 1:
                end = hi - self._ends_with_padding(at, hi)
            local = _loop(lo, end, turn, local, opaque)
            if end is not hi:
                local = _loop(end, hi, ft.partial(turn, last=True), local, opaque)
            lo = hi
        local = finish(local)
        return [x if moves(a) else _put(old, a, at, x) for old, x, a in zip(accs, local, axes)]

    def _ends_with_padding(self, at: dict, end: Any) -> Any:
        """Whether the last of the `end` columns that a row visits is the padded last one of the
        grid, as 1 or 0.
        """
        if self.order is None:
            return 1
        column = pick(self.order, self.table_axes, {**at, COL: jnp.maximum(end - 1, 0)})
        return (column == self.layout.grid[COL] - 1).astype(jnp.int32)


def traverse(  # noqa: PLR0913 (the parts of a visit, which rules bind one by one)
    steps: dict[int, Callable],
    layout: BlockGrid,
    args: Sequence,
    start: Sequence,
    axes: Sequence[tuple[int, ...]],
    *,
    finish: Callable = list,
    vectorise: bool,
    into: Sequence | None = None,
) -> list:
    """Visits the live pairs: an outer loop over rows, and inner ones over their live columns.
    Full blocks come first.

    **Arguments:**

    - `steps`: per class of block, a function `(accumulator blocks, operand blocks) -> blocks`. On
        a grid of one pair it gets None for the accumulators, and returns finished blocks.
    - `layout`, `args`: the grid, and the arrays on it: a table if there is one, then the operands.
    - `start`, `axes`: the first content of a block of each accumulator, and the grid axes that the
        accumulator keeps.
    - `finish`: a function of the accumulators' blocks, applied once their row is complete. It is
        for accumulators that keep every axis but the columns.
    - `vectorise`: whether the batch axes stay whole in the blocks instead of being looped over.
        An axis that the compiler partitions over devices must not be looped over.
    - `into`: accumulators of an earlier visit to go on with; None makes new ones. With `into`,
        `finish` is not applied.

    **Returns:** the accumulators, with their grid axes in front of the axes of a block.
    """
    table, operands = layout.without_corners(args)
    batch = () if vectorise else layout.batch
    if layout.whole and not vectorise:
        steps = {FULL: steps[FULL]}
    single = math.prod(layout.shape((*batch, ROW, COL))) == 1
    single = single and not layout.batch_invariant and not (layout.pages and any(map(moves, axes)))
    if into is None and table is None and single:
        at = dict.fromkeys((*batch, ROW, COL), 0)
        new = steps[max(steps)](None, _blocks_at(operands, layout, at))
        return [
            y.reshape(layout.shape(a) + x.shape)
            for x, y, a in zip(jax.eval_shape(finish, start), new, axes)
        ]

    # Loops read and write arrays without axes of size 1. Beside them, the XLA:CPU of jaxlib 0.10
    # gives what is transposed another memory layout than what a loop reads. The two have the same
    # order, but XLA copies all of the array. Without these copies, 256 images of 48 to 96 tokens
    # took 0.6 to 0.9 of the time, and 0.77 of the memory. A step of 64 rows over 128 keys of
    # float32 took 0.33 of the time.
    looped = () if layout.batch_invariant or layout.pages else (*batch, ROW, COL)
    dropped = {a for a in looped if layout.grid[a] == 1}
    windows = not (vectorise or layout.batch_invariant)
    if windows:
        both = zip(operands, layout.in_axes)
        operands = [by_pairs(x, a, layout) if _of_pairs(a) else x for x, a in both]
    thin = lambda axes: tuple(a for a in axes if a not in dropped)
    placed = lambda x: isinstance(x, PLACED)
    squeeze = lambda x, a: x if placed(x) else x.reshape(layout.shape(thin(a)) + x.shape[len(a) :])
    whole = lambda x, a: x.reshape(layout.shape(a) + x.shape[len(thin(a)) :])
    found = _looped(
        steps,
        dataclasses.replace(layout, in_axes=tuple(map(thin, layout.in_axes))),
        table,
        [squeeze(x, a) for x, a in zip(operands, layout.in_axes)],
        start,
        [thin(a) for a in axes],
        outer=thin((*batch, ROW)),
        finish=finish if into is None else list,
        vectorise=vectorise,
        into=into and [x if x is None else squeeze(x, a) for x, a in zip(into, axes)],
        held=[_is_held(x, a, layout) for x, a in zip(operands, layout.in_axes)],
        mixed=varying_axes(*jax.tree.leaves(args)),
        places=axes,
        windows=windows and into is None,
    )
    return [x.blocks(layout) if placed(x) else whole(x, a) for x, a in zip(found, axes)]


def _looped(  # noqa: PLR0913 (the parts of a visit, which rules bind one by one)
    steps: dict[int, Callable],
    layout: BlockGrid,
    table: Any,
    operands: Sequence,
    start: Sequence,
    axes: Sequence[tuple[int, ...]],
    *,
    outer: tuple[int, ...],
    finish: Callable,
    vectorise: bool,
    into: Sequence | None,
    held: Sequence[bool],
    mixed: frozenset,
    places: Sequence[tuple[int, ...]],
    windows: bool,
) -> list:
    """Visits the live pairs by loops. The arguments are those of `traverse`, but

    - `table`, `operands`: what its `args` are made of.
    - `outer`: the axes to loop over outside of the columns, the outermost first.
    - `held`: which operands are tied to a step, see `_read_in_turn`.
    - `mixed`: the mesh axes over which the arguments vary.
    - `places`: the grid axes of the accumulators, those of size 1 included.
    - `windows`: whether new accumulators of pairs lie as `TokenPairs`.
    """
    batch = () if vectorise else layout.batch

    def filled(axes, block):
        return vary(jnp.broadcast_to(block, layout.shape(axes) + block.shape), mixed)

    # An accumulator is complete after one row if nothing of another row or batch element is added
    # to it. It then starts again in each row, and what is stored is its finished block.
    complete = [into is None and {*outer} <= {*a} and not moves(a) for a in axes]
    whole = [tuple(a for a in x if a in layout.batch and a not in batch) for x in axes]
    fresh = [filled(a, block) for a, block in zip(whole, start)]
    done = [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(finish, start)]
    accumulators = [filled(a, x if once else y)
                    for a, x, y, once in zip(axes, done, start, complete)]  # fmt: skip
    if into is not None:
        accumulators = [x if old is None else old for x, old in zip(accumulators, into)]
    elif layout.transposed and layout.stage and layout.grid[ROW] != 1 and not vectorise:
        accumulators = sums_by_tokens(accumulators, axes, places, layout, operands)
    if windows:
        made = zip(accumulators, axes, places)
        accumulators = [sum_by_pairs(x, a, b, layout) if _of_pairs(b) else x for x, a, b in made]
    order, ends = None, []
    table_axes = layout.table_axes or ()
    if table is not None:
        if vectorise:
            table, table_axes = _shared_table(table), (ROW, COL)
        order, ends = kv_order(table, sorted(steps, reverse=True))
        order, ends = vary(order, mixed), [vary(x, mixed) for x in ends]

    if layout.padded:
        operands = [without_padding(x, a, layout) for x, a in zip(operands, layout.in_axes)]
    how = order, ends, table_axes, axes, fresh, complete, finish, held
    row = _RowVisit(steps, layout, operands, *how)

    def nest(left: list, at: dict, accs: list) -> list:
        """Loops over the axes `left`, and visits a row inside of them."""
        if not left:
            return row(at, accs)
        a, *left = left
        turn = lambda i, accs: nest(left, {**at, a: i}, accs)
        return _loop(0, layout.grid[a], turn, accs, layout.batch_invariant)

    return nest([*outer], dict.fromkeys((*batch, ROW), 0), accumulators)
