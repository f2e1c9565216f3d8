"""Cuts a `Problem` into blocks: operands, a table of live blocks, and functions that turn the
operands of a block into logits and values.

Dropout of a problem: the words of each row, and the factors on the probabilities of a block.
"""

import copy
import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._jax import summed_wide, varying_axes
from .._misc import accumulation_dtype, widened
from .._pairs import Operand, over_block
from .._sweep.grid import BATCH, BlockGrid, COL, DIAGONAL, EMPTY, FULL, HEAD, PARTIAL, ROW
from .._sweep.lowering import Lowering, XLA
from .._sweep.nonfinite import cleaned, cleaned_in_kernel, masked_dot, scaled
from .._sweep.products import dot
from ..masks._base import AbstractMask, visible
from ..scores._base import AbstractScore
from ..scores._dropout import is_kept, kept_factor, row_words
from .block_classes import as_partial, classes_of, on_grid, plan_of, reads_pairs, varies_by_pairs
from .closed_score import BoundMask, ClosedScore
from .lookups import Diagonals, Differences
from .problem import Problem
from .shards import HeadExchange
from .storage import as_stored
from .tiling import as_device_array, BlockOperand, in_place, in_shares, single_axes, Tiling


WORDS = ("first_word", "second_word")
"""The roles of the operands that hold the words of each row."""


def words_of(problem: Problem, spread: HeadExchange) -> dict[str, Array]:
    """The words `[B, H, T, 1]` of each row, by role; none without dropout.

    Where devices exchange tokens for heads, the words belong to the heads and tokens that this
    device has after the exchange. It knows the positions of these tokens.
    """
    if problem.seed is None or problem.rate == 0:
        return {}
    b, h, q, _ = (jnp.asarray(x) for x in problem.indices())
    if spread.inside:
        heads = h.reshape(h.shape[0], problem.sizes[3], -1)  # of each key/value head, its queries'
        h = spread.tokens_to_heads(heads, (BATCH, HEAD)).reshape(h.shape[0], -1, 1, 1)
    return dict(zip(WORDS, row_words(problem.seed, b, h, q)))


def weights_of(problem: Problem, named: dict[str, Array], dtype: jnp.dtype) -> list[Array]:
    """The factors on the probabilities of a block `[keys, rows]`; an empty list without dropout.

    **Arguments:**

    - `named`: the blocks of the problem's operands, by role, each `[keys|1, rows|1]`.
    """
    if WORDS[0] not in named:
        return []
    words = named[WORDS[0]], named[WORDS[1]]
    keep = is_kept(words, named["kv_position"], problem.rate)
    return [jnp.where(keep, np.asarray(kept_factor(problem.rate), dtype), 0)]


WHOLE = ("q_position", "kv_position", "kv_place", "valid", "valid_rows", *WORDS)
"""The roles of what holds the tokens of all devices that exchange heads, and is not gathered."""


class BlockOperands:
    """The operands of a problem's blocks, and the functions that turn them into logits and values.

    **Attributes:**

    - `operands`: what the logits read, in the order in which `logits` takes their blocks. The
        query, the keys and the tables of their pages come first. The scale follows if it multiplies
        products and not keys. Then come the four indices of a pair, and which keys are not padding.
        What scores and then the mask read follows. Last are which rows are not padding, if padding
        is masked, and the two dropout words of each row.
    - `values`: what the values read.
    - `keys`: which of the operands hold keys.
    - `groups`: which of the operands each score and then the mask reads.
    - `pages`: how many pages there are on each axis of the grid that is looked up, or layers.
    - `lookups`: for each of these axes, the index of the operand that holds the page or layer.
    - `products`: keyword arguments of `dot`, as sorted pairs.
    - `post_scale`: whether the scale multiplies the products instead of the keys.
    - `live`: which blocks are visible at most, by `live_blocks`; None if all are.
    - `hides_rows`: whether the mask hides all keys from rows that pad the last block. It does so
        where something varies by pairs, which is padded otherwise than numbers of rows are. Such a
        row may be like none of the queries. It could see a key that none of them sees.
    """

    def __init__(
        self,
        problem: Problem,
        tiling: Tiling,
        spread: HeadExchange = HeadExchange(),
        lowering: Lowering = XLA,
        live: Any = None,
        places: bool = False,
    ):
        self.problem, self.tiling, self.spread, self.live = problem, tiling, spread, live
        self.lowering, self.sent, self.local = lowering, bool(spread.axes), False
        dtype, acc = problem.query.dtype, problem.accumulation_dtype
        wide = dtype == acc or not lowering.multiplies_narrow()
        # Arrays that are sent stay narrow, as that is fewer bytes. So do arrays that are read in
        # place: widening them would read all of a cache, and only visited blocks are needed.
        stored = dtype if self.sent or tiling.in_place or not wide else acc
        precision = problem.precision
        if precision is None and dtype == acc:
            precision = lax.Precision.HIGHEST
        self.products = (("operand_dtype", None if wide else dtype), ("precision", precision))
        query, scale = problem.query.astype(stored), jnp.asarray(problem.scale, acc)
        self.post_scale = stored != acc or tiling.in_place or tiling.fixed
        self.pages = self.lookups = ()
        rows = BlockOperand("query", tiling.rows_of(query), (BATCH, HEAD, ROW))
        self.operands: tuple[BlockOperand, ...] = (rows,)
        self.values: tuple[BlockOperand, ...] = ()
        if tiling.in_place:
            self._store()
        else:
            key, value = (x.astype(stored) for x in (problem.key, problem.value))
            # The scale multiplies the keys and not the query. Blocks of the query are transposed,
            # and XLA:CPU is slow at arithmetic in a transposed copy: 2.4 ns for each entry.
            key = key if self.post_scale else scaled(key, scale)
            columns = (BATCH, HEAD, COL)
            self.operands += (BlockOperand("key", tiling.columns_of(key), columns),)
            # Values of size 0, of which only the logsumexp is wanted, have nothing to clean. Nor
            # have those that all rows see, where no score can make a logit infinite.
            seen = problem.mask is None and live is None and not problem.scores
            seen = seen and tiling.columns * tiling.block_k == tiling.keys
            clean = lowering.cleans_values or value.shape[-1] == 0 or seen
            xs = [value] if clean else cleaned(value, precision)
            self.values = tuple(BlockOperand("value", tiling.columns_of(x), columns) for x in xs)
        self.keys = slice(1, len(self.operands) - len(self.lookups))
        if self.post_scale:
            self._add("scale", scale.reshape(1, 1, 1, 1))
        for name, x in zip(("batch", "head", "q_position", "kv_position"), problem.indices()):
            self._add(name, tiling.own_rows(x, "t" if name == "q_position" else ""))
        if places and problem.kv_places is not None:
            self._add("kv_place", problem.kv_places[:, None, None, :])
        whole = spread.local(tiling) if spread.inside else tiling
        padded = whole.columns * whole.block_k
        self.padded = padded != whole.keys
        if self.padded:
            valid = np.ones((1, 1, 1, whole.keys), bool)
            self._add("valid", whole.pad(valid, 3, padded, "zeros"))
        if live is not None and lowering is XLA:
            blocks, axes = on_grid(live[..., None, :, :])
            self.operands += (BlockOperand("live", blocks, axes),)
        start, parts = len(self.operands), problem.parts
        self.groups = [self._add_reads_of(part) for part in parts]
        if any(isinstance(x, Diagonals) for x in self.operands):
            self._add_starts()
        padded, of_pairs = whole.rows * whole.block_q, varies_by_pairs(self.operands[start:])
        self.hides_rows = padded != whole.queries and problem.mask is not None and of_pairs
        if self.hides_rows:
            valid = np.ones((1, 1, whole.queries, 1), bool)
            self._add("valid_rows", whole.pad(valid, 2, padded, "zeros"))
        for name, x in words_of(problem, spread).items():
            self._add(name, x)
        self.scores = self.closed_scores()

    def _store(self) -> None:
        """Adds the operands of keys and values that stay in place, and of where these are found."""
        key, value = (as_stored(x) for x in (self.problem.key, self.problem.value))
        both = [key, value if value.arrays or self.lowering.shares_blocks else key.c_kv]
        self.held = [in_shares(x, self.tiling, self.lowering) for x in both]
        placed = in_place(self.held, self.tiling, self.lowering)
        self.values, self.pages = placed.values, placed.sizes
        start = len(self.operands) + len(placed.keys)
        self.lookups = tuple(range(start, start + len(placed.tables)))
        self.operands += (*placed.keys, *placed.tables)

    def _add(self, role: str, x: Any) -> None:
        """Adds an operand from an array `[B|1, H|1, T|1, S|1]`, perhaps with features."""
        whole = self.spread.inside and role in WHOLE
        tiling = self.spread.local(self.tiling) if whole else self.tiling
        blocks, axes = tiling.pairs_of(x)
        self.operands += (BlockOperand(role, as_device_array(blocks), axes, x.ndim > 4),)

    def _add_reads_of(self, part: AbstractScore | AbstractMask) -> slice:
        """Adds what a score or mask reads, and returns which of the operands that is."""
        start, scored = len(self.operands), isinstance(part, AbstractScore)
        role = f"of {type(part).__name__}"  # No other role has a space.
        canonical = self.canonical_wide if scored else self.problem.canonical
        for operand in part.operands():
            if isinstance(operand, Differences):
                kind = operand.windows if self.lowering.needs_windows else operand.diagonals
                self.operands += (kind(role, self.tiling),)
                continue
            self._add(role, self.tiling.own_rows(canonical(operand), operand.axes))
        return slice(start, len(self.operands))

    def _add_starts(self) -> None:
        """Adds the indices of the first query and the first key of each block."""
        sides = ("row", ROW, self.tiling.block_q), ("column", COL, self.tiling.block_k)
        for role, axis, size in sides:
            starts = np.arange(self.tiling.grid[axis], dtype=np.int32) * np.int32(size)
            self.operands += (BlockOperand(role, jnp.asarray(starts)[:, None, None], (axis,)),)

    def index(self, role: str) -> int:
        """The index of the first operand with a role."""
        return next(i for i, x in enumerate(self.operands) if x.role == role)

    @property
    def places(self) -> int:
        """The index of the operand that says where each key lies."""
        moved = any(x.role == "kv_place" for x in self.operands)
        return self.index("kv_place" if moved else "kv_position")

    def layout(self, tiling: Tiling, table_axes: tuple[int, ...] | None) -> BlockGrid:
        """The grid on which blocks of this blocking are visited."""
        more: Any = dict(pages=self.pages, lookups=self.lookups, corner=tiling.corner)
        more |= dict(batch_invariant=tiling.fixed, ring=self.spread.ring, lowering=self.lowering)
        more |= dict(block=tiling.block, padded=tiling.padded_in_place)
        if self.live is not None and self.problem.mask is None and not self.padded:
            more["whole"] = self.live.shape[-2:] == (1, 1)
        return BlockGrid(
            grid=self.tiling.grid,
            in_axes=tuple(x.axes for x in self.operands),
            table_axes=table_axes,
            ragged=tiling.in_place or (self.live is not None and self.lowering is XLA),
            tokens=() if self.sent else self.tiling.tokens,
            **more,
            shared=() if self.values else tuple(range(self.keys.start, self.keys.stop)),
            transposed=self._transposed(tiling),
        )

    def _transposed(self, tiling: Tiling) -> bool:
        """Whether loops turn the logits of a fold. They would transpose copied blocks of pairs."""
        several = tiling.in_place and self.problem.sizes[3] > tiling.kv_heads
        copied = not self.tiling.pairs_lie and reads_pairs(self.operands[self.keys.stop :])
        if several or tiling.fixed or self.sent or copied:
            return False
        return self.lowering is XLA and jax.default_backend() == "cpu"

    def stored(self, which: int, blocks: Sequence[Array]) -> Array:
        """Decodes a block of keys (`which` is 0) or values (1) that are read in place.

        **Returns:** `[keys, heads, d]`, or `[keys, d]` if a single head's axis is dropped.
        """
        x = self.held[which]
        if not x.arrays:  # The values are part of the keys, whose blocks these are.
            return x.decode(self.stored(0, blocks))
        n, single = len(x.arrays), single_axes(x, self.tiling, self.lowering)
        blocks = [jnp.expand_dims(a, single[i % n]) for i, a in enumerate(blocks)]
        pages = [x.decode(*blocks[i : i + n]) for i in range(0, len(blocks), n)]
        block = pages[0] if len(pages) == 1 else jnp.concatenate(pages)
        alone = block.shape[1] == 1 and self.lowering.drops_single_axes
        return (block[:, 0] if alone else block).astype(self.problem.accumulation_dtype)

    def on(self, tiling: Tiling) -> "BlockOperands":
        """The same operands, to be visited in other blocks, such as those of one device."""
        new = copy.copy(self)
        new.tiling, new.local = tiling, tiling.grid[:2] != self.tiling.grid[:2]
        return new

    def closed_scores(self, consts: Sequence | None = None) -> list[ClosedScore]:
        """The scores as functions of all that they read; `consts` replace what each closes over."""
        closed, acc = [], self.problem.accumulation_dtype
        axes = varying_axes(*(x.array for x in (*self.operands, *self.values)))
        for i, score in enumerate(self.problem.scores):
            own = self.operands[self.groups[i]]
            read = [x.read for x in own]
            closed.append(ClosedScore.of(score, acc, read, consts and consts[i], axes))
        return closed

    def reading(self, consts: Sequence, **parts: Any) -> "BlockOperands":
        """The same operands with another mask and scores, and `consts` that each score reads."""
        new = copy.copy(self)
        new.problem = dataclasses.replace(self.problem, **parts)
        new.scores = new.closed_scores(consts)
        return new

    def weigh(self, c: int) -> Callable:
        """The function `values` of the fold for a block of class `c`. It keeps the contract of
        `_sweep/nonfinite.py`: where a pair may be masked, it returns clean values and their poison.
        """
        if not (self.tiling.in_place or self.lowering.cleans_values):
            return lambda clean, *nan_flag: [clean, *nan_flag]
        precision = dict(self.products)["precision"]

        def fn(*blocks):
            value = self.stored(1, blocks) if self.tiling.in_place else blocks[0]
            if c == FULL:
                return [value]
            if self.lowering.cleans_values:
                return cleaned_in_kernel(value)
            return cleaned(value, precision)

        return fn

    def canonical_wide(self, operand: Operand) -> Array | np.ndarray:
        """An operand of a score in canonical form, such that its gradient rounds once.

        That gradient is a sum over the axes that the operand is broadcast to. An operand smaller
        than the logits is widened before it is broadcast, so that the sum is wide. One as large as
        the logits would take too much memory. Its gradient is summed inside of the blocks and
        rounded, and `summed_wide` keeps the remaining sums, over leading axes and devices, wide.
        """
        array, acc = operand.array, self.problem.accumulation_dtype
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return self.problem.canonical(operand)
        large = operand.axes.endswith("ts") and 1 not in (*array.shape[-2:], self.tiling.block_k)
        if large and self.spread.size == 1 and accumulation_dtype(array.dtype) == acc:
            form = lambda x: self.problem.canonical(Operand(x, operand.axes))
            return summed_wide(form, array)
        operand = Operand(widened(array, acc), operand.axes)
        return self.problem.canonical(operand)

    @property
    def reads(self) -> list[int]:
        """The indices of the operands that `classify` reads."""
        own = [] if self.problem.mask is None else range(len(self.operands))[self.groups[-1]]
        return [*[self.index(role) for role in self.where], *own]

    @property
    def where(self) -> tuple[str, ...]:
        """The roles of the operands that `classify` reads before those of the mask."""
        local = ("batch", "head") if self.local else ()
        padded = [("valid", self.padded), ("valid_rows", self.hides_rows)]
        return ("q_position", "kv_position", *local, *(role for role, given in padded if given))

    def classify(self, *blocks: Array) -> Array:
        """The table of one hop, `[rows, columns]` or `[B, K, rows, columns]`."""
        tiling, read = self.tiling, [self.operands[i] for i in self.reads]
        whole = [tiling.from_pairs(x, y.axes, y.features) for x, y in zip(blocks, read)]
        at, whole = dict(zip(self.where, whole)), whole[len(self.where) :]
        q, k = at["q_position"][:, 0, :, 0], at["kv_position"][:, 0, 0]
        # Positions of a single token are not padded to the blocks of all devices.
        q = jnp.broadcast_to(q, (len(q), tiling.rows * tiling.block_q))
        k = jnp.broadcast_to(k, (len(k), at["valid"].shape[3])) if self.padded else k
        rows, columns = tiling.rows, k.shape[1] // tiling.block_k
        table = jnp.full((1, 1, rows, columns), FULL, jnp.int8)
        if self.padded:
            valid = at["valid"].reshape(1, 1, 1, columns, -1)
            padded = jnp.where(valid.any(-1), jnp.int8(PARTIAL), jnp.int8(EMPTY))
            table = jnp.where(valid.all(-1), table, padded)
        if self.problem.mask is not None:
            mask = BoundMask(self.problem.mask, tuple(whole))
            indices = None, None
            if self.local:
                indices = at["batch"][:, 0, 0, 0], at["head"][0, :, 0, 0]
            classes = classes_of(mask, tiling, (tiling.batch,), q, k, indices)
            corner = (classes == DIAGONAL) & (table != EMPTY)
            table = jnp.where(corner, jnp.int8(DIAGONAL), jnp.minimum(table, classes))
        if self.hides_rows:
            valid = at["valid_rows"].reshape(1, 1, rows, 1, -1)
            table = jnp.where(valid.all(-1), table, jnp.minimum(table, jnp.int8(PARTIAL)))
        table = as_partial(table) if tiling.fixed else table
        if table.shape[:2] == (1, 1):
            return table[0, 0]
        return jnp.broadcast_to(table, (*tiling.grid[:2], rows, columns))

    def plan(self, shown: Problem):
        """The table of live blocks, a NumPy array where it is known, its grid axes, and the classes
        that can occur. The mask is that of `shown`, the problem before it had `Differences`.
        """
        fixed = self.tiling.fixed
        if self.sent:  # Each hop makes its own table.
            some = self.problem.mask is not None or self.padded
            return None, None, (PARTIAL,) if fixed else (PARTIAL, FULL) if some else (FULL,)
        return plan_of(shown, self.tiling, self.live, self.operands if self.hides_rows else None)

    def hidden(self, s: Array, mask: Array) -> Array:
        """Logits with `-inf` where the mask is False.

        Masked products are 0 already. If neither the scale nor a score nor rounding came after, the
        masked logits still are.
        """
        problem = self.problem
        changed = self.post_scale or problem.scores or problem.logits_dtype is not None
        if self.lowering.cleans_values or changed:
            return jnp.where(mask, s, -jnp.inf)
        # So 0 or -inf can be added. XLA:CPU would run a selection in place as masked stores, which
        # are ten times slower on a processor without AVX-512.
        return s + jnp.where(mask, 0, -jnp.inf)

    def logits(self, c: int) -> Callable:
        """The function `logits` of the fold for a block of class `c`. It returns the logits and,
        with dropout, the factor on their probabilities.
        """
        problem, tiling = self.problem, self.tiling
        acc = problem.accumulation_dtype

        def fn(*blocks):
            q, *k = blocks[: self.keys.stop]
            k = self.stored(0, k) if tiling.in_place else k[0]
            first = self.keys.stop + len(self.lookups)
            read = [y.on_rows(x, tiling) for x, y in zip(blocks[first:], self.operands[first:])]
            named = {y.role: x for x, y in zip(read, self.operands[first:])}
            pairs = [named[n] for n in ("batch", "head", "q_position", "kv_position")]
            if "row" in named:
                both, of = (named["row"], named["column"], tiling), self.operands[first:]
                read = [y.at(x, *both) if isinstance(y, Diagonals) else x for x, y in zip(read, of)]
            own = [read[g.start - first : g.stop - first] for g in self.groups]
            mask = None
            if c == PARTIAL:
                parts = [named[x] for x in ("valid", "valid_rows", "live") if x in named]
                if problem.mask is not None:
                    parts.append(over_block(visible(problem.mask), [*pairs, *own[-1]]))
                mask = ft.reduce(jnp.logical_and, parts) if parts else jnp.ones((1, 1), bool)
                mask = jnp.broadcast_to(mask, tiling.block)
            if mask is None:
                s = dot(k, q, (1, 0), **dict(self.products))
            else:  # The mask comes before the scale, whose gradient sums products.
                s = jnp.where(mask, masked_dot(k, q, self.products), 0)
            if self.post_scale:
                s = s * named["scale"]
            weight = weights_of(problem, named, acc)
            for part, score, xs in zip(problem.scores, self.scores, own):
                y = score(mask, s, *pairs, *xs)
                s, weight = (s, [y]) if part.weighs else (y, weight)
            if problem.logits_dtype is not None:
                s = s.astype(problem.logits_dtype).astype(acc)
            if mask is not None:
                s = self.hidden(s, mask)
            return [s, *weight]

        return fn
