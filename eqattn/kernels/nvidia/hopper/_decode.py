"""The softmax fold of `Ragged` as one kernel for Hopper: keys and values stay where they lie.

A program has up to 64 rows of one key head, and a share of the blocks that they see. Its last
warpgroup looks up pages, and copies tiles of keys and values into shared memory, as many ahead as
fit. Numbers of 8 bits are also widened there, by one warpgroup for keys and one for values. The
first warpgroup multiplies. With few rows most of these products are wasted, but memory
sets the pace. The blocks of a row are shared out to several programs, so that the whole chip reads.
Each program makes a Carry, and XLA merges the Carries.

Values that are the first part of their keys, as latents are, are read once. If values have more
numbers than the registers of a warpgroup hold, two warpgroups multiply. Each computes the logits of
all rows, and half of the numerator.

Values that are not finite are left to a second kernel, see `_two_visits.py`. One kernel for both
would have more registers than two programs on a multiprocessor may have.

The fold of `Ragged` as a kernel for Hopper: the arrays that it reads and writes.

Keys and values that stay where they lie in memory, as the kernel for few rows on a Hopper reads
them.

With heads and numbers on one axis, a program copies `n` columns of `[tokens, heads * n]`.

Numbers of 8 bits are copied as they are. The warpgroup that copies then widens them in shared
memory to bfloat16, which is exact, as both sides of a product need the same dtype. The scales of
the vectors are multiplied into logits and probabilities. A copy cannot pick the scales of one head,
so XLA sorts them by head before the kernel.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ...._jax import abstract
from ...._sweep.grid import BlockGrid, FULL, PARTIAL
from ..._program import LOG2E
from .._chip import LONGEST
from .._operands import padded, rounded_up
from .._operations import Value
from .._plans import across, listed_in_order, online_step
from .._program import PairProgram
from .._stored import (
    keys_in,
    PROGRAMS,
    shares_of,
    stored_in,
    StoredArrays,
    StoredPlan,
    StoredProgram,
    StoredSizes,
    unsupported_pieces,
)
from . import _mosaic as mosaic
from ._forward import NonFiniteFallback
from ._mosaic import clean_values, meet
from ._traverse import called


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


def unsupported_storage(layout: BlockGrid, logits: Any, operands: Sequence[Any]) -> str:
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


@dataclasses.dataclass(frozen=True)
class Plan(StoredPlan, NonFiniteFallback):
    """A fold by this kernel, on a `layout` with padded rows.

    **Arguments:** those of `StoredPlan`, and

    - `stored`: the dtype in which keys and values are stored.
    """

    sizes: Sizes
    keys: tuple[Source, ...]
    values: tuple[Source, ...]
    stored: Any

    @property
    def spreads(self) -> bool:
        return PARTIAL in self.programs or self.sizes.padded_keys != self.sizes.keys

    @property
    def computing(self) -> int:
        return len(self.sizes.widths)

    @property
    def scaled(self) -> list[Source]:
        return [x for x in (*self.keys, *self.values) if x.scaled]

    def scratch(self) -> tuple:
        """Allocates shared memory and barriers. The memory is `(queries, keys, values, what varies
        with keys, scales, wider tiles of keys and values, results, poison)`. The barriers are
        `(queries, keys, values have arrived)`, `(keys, values are free)` and `(keys, values are
        wide)`. Each is a list where there may be several. Wider tiles exist for numbers of 8 bits
        only. At the last barrier the warpgroups that multiply meet.
        """
        s, stored = self.sizes, self.stored
        of = ft.partial(mosaic.vectors, s.stages, s.tile_k)
        vectors = [of(self.operands[i].dtype) for i in self.staged]
        deep = s.tile_k if s.shared else 0  # products sum over these keys, as over values
        kept = s.stages, s.tile_rows
        tiles = lambda sizes, deep: [mosaic.matrices((*kept, n), stored, deep) for n in sizes]
        memory = (
            [mosaic.matrices((TILE, n), self.dtype, deep) for n in s.dims],
            tiles(s.dims, deep * (not s.eight)),
            tiles([x.size for x in self.values], s.tile_k * (not s.eight)),
            vectors,
            [of(jnp.float32) for _ in self.scaled],
            [mosaic.matrices((s.wide, s.tile_rows, n), self.dtype, deep) for n, deep in s.widened],
            [mosaic.SMEM((TILE, s.staged), jnp.float32) for _ in s.widths],
            [mosaic.vectors(1, max(s.tile_k, TILE), jnp.float32) for _ in s.widths],
        )
        keys = sum(x.count for x in (*self.keys, *self.scaled)) + len(vectors)
        values = sum(x.count for x in self.values)
        arrived = (
            mosaic.Barrier(num_arrivals=len(s.dims)),
            mosaic.Barrier(num_arrivals=keys, num_barriers=s.stages),
            [mosaic.Barrier(num_arrivals=values, num_barriers=s.stages) for _ in self.values],
        )
        free = mosaic.Barrier(num_arrivals=len(s.widths), num_barriers=s.stages)
        ready = mosaic.Barrier(num_barriers=s.wide)
        wide = [ready] * s.eight, [ready] * (s.eight * len(self.values))
        both = [mosaic.Barrier(num_arrivals=len(s.widths))] * self.again
        return memory, arrived, (free, [free] * len(self.values)), wide, both

    def visit(self, refs: Sequence[Any], scratch: Sequence[Any]) -> None:
        program = Program(self, refs, scratch)
        workers = [ft.partial(program.compute, i) for i in range(self.computing)]
        mosaic.share_out(workers, program.copying)


class Program(StoredProgram):
    """One program of the kernel, on references, with what all its warpgroups know."""

    def __init__(self, plan: Plan, refs: Sequence, scratch: Sequence):
        super().__init__(plan, refs, lax.axis_index("program"))
        self.memory, self.arrived, self.free, self.wide, self.both = scratch

    def slot(self, step: Any) -> Any:
        return lax.rem(step - self.first, jnp.int32(self.plan.sizes.stages))

    def wide_slot(self, step: Any) -> Any:
        return lax.rem(step - self.first, jnp.int32(self.plan.sizes.wide))

    @property
    def copying(self) -> list[Any]:
        """What the last warpgroups do, each one. One copies all tiles. Numbers of 8 bits are also
        widened, which takes longer than the copies. So keys and values have a warpgroup each.
        """
        if not self.plan.sizes.eight:
            return [self.copy]
        return [ft.partial(self.widen, which) for which in range(self.plan.sizes.widening)]

    def send_queries(self) -> None:
        """Begins to copy the queries."""
        place = self.places.place(self.plan.layout.in_axes[0])
        for q, q_tile in zip(self.q, self.memory[0]):
            mosaic.copy_in(q.at[place, mosaic.ds(self.start, TILE)], q_tile, self.arrived[0])

    def copy(self) -> None:
        """Copies tiles into slots that are free."""
        stages, (k_free, v_free) = self.plan.sizes.stages, self.free
        self.send_queries()

        def in_turn(step, _):
            for barrier, send in zip((k_free, *v_free), (self.send_keys, self.send_values)):
                again = step - self.first >= stages
                mosaic.when(again)(ft.partial(mosaic.barrier_wait, barrier.at[self.slot(step)]))
                send(step)
            return ()

        lax.fori_loop(self.first, self.last, in_turn, ())

    def widen(self, which: int) -> None:
        """Copies tiles of keys (0) or of values (1), and widens those that have arrived. The
        warpgroup that multiplies must be done with the step whose wide tile is replaced. The slot
        of that step then takes the next tile to be copied.
        """
        stages, (k_free, v_free) = self.plan.sizes.stages, self.free
        _, k_arrived, v_arrived = self.arrived
        send = (self.send_keys, self.send_values)[which]
        free, arrived = (k_free, *v_free)[which], (k_arrived, *v_arrived)[which]
        narrow, wide = self.memory[1 + which], self.wide_tiles()[which]
        if which == 0:
            self.send_queries()
        for i in range(stages):
            mosaic.when(self.first + i < self.last)(ft.partial(send, self.first + i))

        def go_on(done):
            mosaic.barrier_wait(free.at[self.slot(done)])
            mosaic.when(done + stages < self.last)(lambda: send(done + stages))

        def in_turn(step, _):
            done = step - self.plan.sizes.wide
            mosaic.when(done >= self.first)(ft.partial(go_on, done))
            slot, place = self.slot(step), self.wide_slot(step)
            mosaic.barrier_wait(arrived.at[slot])
            for tile, into in zip(narrow, wide):
                mosaic.widen(tile.at[slot], into.at[place])
            mosaic.commit_smem()
            mosaic.barrier_arrive(self.wide[which][0].at[place])
            return ()

        lax.fori_loop(self.first, self.last, in_turn, ())

    def send_keys(self, step: Any) -> None:
        """Begins to copy what the logits of a step read, and the scales of its values."""
        plan, (column, start) = self.plan, self.where(step)
        slot, arrived = self.slot(step), self.arrived[1].at[self.slot(step)]
        _, tiles, _, vectors, scales, *_ = self.memory
        self.send_tiles(0, step, tiles, arrived)
        for i, vector in zip(plan.staged, vectors):
            place = self.places.place(plan.operands[i].axes, column)
            from_ = self.given[i].at[place, mosaic.ds(start, plan.sizes.tile_k)]
            mosaic.copy_in(from_, mosaic.vector(vector, slot, plan.sizes.tile_k), arrived)
        rows = iter(scales)
        for tables, group, refs in zip(self.tables, (plan.keys, plan.values), (self.k, self.v)):
            for source, given in zip(group, refs):
                if source.scaled:
                    at = self.places.place(source.axes, column), start, self.head
                    row = mosaic.vector(next(rows), slot, plan.sizes.tile_k)
                    source.copy_scales(given, tables, at, row, arrived)

    def send_values(self, step: Any) -> None:
        self.send_tiles(1, step, self.memory[2], self.arrived[2][0].at[self.slot(step)])

    def send_tiles(self, which: int, step: Any, tiles: Sequence, arrived: Any) -> None:
        """Begins to copy tiles of keys (0) or values (1)."""
        plan, (column, start) = self.plan, self.where(step)
        group, refs = ((plan.keys, self.k), (plan.values, self.v))[which]
        for source, given, tile in zip(group, refs, tiles):
            at = self.places.place(source.axes, column), start, self.head
            into = tile.at[self.slot(step)]
            source.copy(given, self.tables[which], at, into, plan.sizes.tile_k, arrived)

    def wide_tiles(self) -> tuple[list, list]:
        """The wider tiles of keys and those of values."""
        n = len(self.plan.keys)
        return self.memory[5][:n], self.memory[5][n:]

    def by_part(self, scales: Sequence) -> tuple[list, list]:
        """The scales of each part of the keys, and those of the values; None where it has none."""
        left = iter(scales)
        of = lambda sources: [next(left) if x.scaled else None for x in sources]
        return of(self.plan.keys), of(self.plan.values)

    def compute(self, worker: int) -> None:
        """What each of the other warpgroups does, for its columns of the values."""
        plan, width = self.plan, self.plan.sizes.widths[worker]
        rows = mosaic.ds(self.start, TILE)
        near = {i: self.read(i) for i, x in plan.operands.items() if not (x.staged or x.moves)}
        filled = lambda shape, x: lax.full(shape, x, jnp.float32)
        acc = mosaic.held(filled((TILE, width), 0.0), "pairs")
        den, top = (mosaic.held(filled((TILE,), x), "own") for x in (0.0, -jnp.inf))
        mosaic.barrier_wait(self.arrived[0])
        state, begin = (acc, den, top), self.first
        classes = ((FULL, self.full), (PARTIAL, self.last))
        if plan.again:
            classes = ((min(plan.programs), self.last),)
        for c, end in classes:
            if c in plan.programs:
                step = ft.partial(self.step, worker, plan.programs[c], near)
                state = lax.fori_loop(begin, end, step, state)
                begin = end
        acc, den, top = state
        num, dens, tops, *checks = self.results
        if worker == 0:
            mosaic.store(den, dens.at[self.out, rows])
            mosaic.store(top * (1 / LOG2E), tops.at[self.out, rows])
        columns = mosaic.ds(sum(plan.sizes.widths[:worker]), width)
        to = num.at[self.out, self.tile, :, columns]
        mosaic.store_some(acc, to, self.memory[6][worker])
        for check in checks:
            plan.note(check, worker, acc, mosaic.vector(self.memory[7][worker], 0, TILE))

    def read(self, i: int, step: Any = None, slot: Any = None) -> Value:
        """An operand of the logits at a step, whose keys are in a slot."""
        x, tile_k = self.plan.operands[i], self.plan.sizes.tile_k
        if x.staged:
            vector = self.memory[3][self.plan.staged.index(i)]
            return x.read_staged(mosaic.vector(vector, slot, tile_k))
        column, start = (None, None) if step is None else self.where(step)
        return x.read(self.given[i], self.places.place(x.axes, column), self.start, start, tile_k)

    def step(self, worker: int, program: PairProgram, near: dict, step: Any, state: tuple) -> tuple:
        """Adds a tile of keys to the Carry."""
        plan, slot = self.plan, self.slot(step)
        q_tiles, k_tiles, v_tiles, _, scales, *_ = self.memory
        k_arrived, (k_free, v_free) = self.arrived[1], self.free
        sizes = plan.sizes
        shape = TILE, sizes.tile_k
        row = lambda x: mosaic.vector(x, slot, sizes.tile_k)
        of = lambda x: None if x is None else mosaic.load(row(x), "other")
        mosaic.barrier_wait(k_arrived.at[slot])
        k_scales, v_scales = ([of(x) for x in xs] for xs in self.by_part(scales))
        keys, values = ([x.at[slot] for x in tiles] for tiles in (k_tiles, v_tiles))
        if sizes.eight:
            at = self.wide_slot(step), mosaic.ds(0, sizes.tile_k)
            keys, values = ([x.at[at] for x in tiles] for tiles in self.wide_tiles())
            mosaic.barrier_wait(self.wide[0][0].at[at[0]])
        # One after the other, as registers have no room for two beside long latents.
        products = [mosaic.pairs_of(x)[0] for x in zip(q_tiles, keys)]
        for i, scale in enumerate(k_scales):
            if scale is not None:
                products[i] = products[i] * lax.broadcast_in_dim(scale, shape, [1])
        s = ft.reduce(jnp.add, products)
        read = lambda i: near[i] if i in near else self.read(i, step, slot)
        s, *weights = program(s, read, {"r": TILE, "k": sizes.tile_k}, False)
        if sizes.padded_keys != sizes.keys:
            inside = mosaic.iota(s.shape, 1) + self.where(step)[1] < jnp.int32(sizes.keys)
            s = jnp.where(inside, s, -jnp.inf)
        if plan.interpreted:  # it does not know that the barrier suffices after reads
            mosaic.commit_smem()
        if plan.values:
            mosaic.barrier_arrive(k_free.at[slot])
        else:
            v_scales = k_scales[:1]
        (value, *_), (first, n) = values or keys, (sum(sizes.widths[:worker]), sizes.widths[worker])
        value = value if n == sizes.width else value.at[:, mosaic.ds(first, n)]
        if plan.again:
            self.wait_for_values(step)
            acc, den, top = state
            v_scales, nan_flag = self.clean(worker, value, v_scales, s)
            acc = jnp.where(across(nan_flag, acc) == 0, acc, jnp.float32(jnp.nan))  # 0 may be -0
            state = acc, den, top
        for scale in v_scales:
            if scale is not None:
                scale = lax.broadcast_in_dim(scale, shape, [1])
                weights = [x * scale for x in weights] or [scale]
        in_order = None if plan.interpreted else mosaic.in_order
        factor = jnp.float32(LOG2E)
        acc, den, now, weighted = online_step(state, s, weights, factor, plan.dtype, in_order)
        if not plan.again:
            self.wait_for_values(step)
        (acc,) = mosaic.weighted([acc], [(weighted, value)], plan.interpreted)
        for free in v_free or [k_free]:
            mosaic.barrier_arrive(free.at[slot])
        return acc, den, now

    def wait_for_values(self, step: Any) -> None:
        """Waits until the values of a step have arrived, and are wide."""
        wide = [x.at[self.wide_slot(step)] for x in self.wide[1]]
        for arrived in wide or [x.at[self.slot(step)] for x in self.arrived[2]]:
            mosaic.barrier_wait(arrived)

    def clean(self, worker: int, value: Any, scales: Sequence, s: Any) -> tuple[list, Any]:
        """Replaces what is not finite by 0 in a tile of values and in their scales.

        **Returns:** the scales, and the poison of each row: NaN if it sees a key whose value is not
        finite, else 0.
        """
        keys, total = self.plan.sizes.tile_k, jnp.float32(0)
        if jnp.issubdtype(self.plan.stored, jnp.floating):
            if len(self.plan.sizes.widths) > 1:  # both read logits from the same tile
                meet(self.both[0])
            nan_flag = mosaic.vector(self.memory[7][worker], 0, keys)
            clean_values(value, self.plan.sizes.width, nan_flag)
            total = mosaic.load(nan_flag, "other")
        cleaned = []
        for scale in scales:
            if scale is not None:
                total = total + scale * 0
                scale = jnp.where(jnp.abs(scale) < jnp.inf, scale, jnp.float32(0))
            cleaned.append(scale)
        total = lax.broadcast_in_dim(total, s.shape, [1])
        return cleaned, jnp.where(s == -jnp.inf, jnp.float32(0), total).sum(1)


def visit_stored(steps: dict[int, Any], layout: BlockGrid, *args: Any, interpreted: bool) -> list:
    """Numerator, denominator and maximum of each row of the grid, with its grid axes in front."""
    run = lambda *xs: _visit(steps, layout, xs, interpreted)
    return called(run, interpreted, *args)


def _visit(steps: dict[int, Any], layout: BlockGrid, args: Sequence, interpreted: bool) -> list:
    arrays = StoredArrays(steps, layout, args, mosaic.native(interpreted))
    sizes = Sizes.of(layout, arrays.stored)

    def sources(group):
        size = lambda part: arrays.operands[part.array].shape[-1]
        return tuple(
            Source(arrays.axes_of(x), size(x), sizes.heads, arrays.pages, x.scales is not None)
            for x in (group[0] if group else ())
        )

    plan = Plan(
        **arrays.planned(sizes),
        keys=sources(arrays.keys),
        values=sources(arrays.values),
        stored=arrays.stored.parts[0].dtype,
        shares=shares_of(layout, sizes, PROGRAMS // (1 + sizes.alone)),
        interpreted=interpreted,
    )
    inputs, operands, pieces = arrays.queries(sizes), arrays.operands, (arrays.keys, arrays.values)
    for group in filter(None, pieces):
        inputs += [operands[i].reshape(-1) for i in arrays.tables_of(group)]
    for part in (part for group in pieces for part in zip(*group)):
        inputs += [
            flat_heads(operands[x.array], layout.in_axes[x.array], sizes.piece) for x in part
        ]
        scales = [operands[x.scales] for x in part if x.scales is not None]
        inputs += [scales_by_head(x, sizes.heads, sizes.piece) for x in scales]
    inputs += listed_in_order(arrays.table, list(steps))
    inputs += [x.array for x in plan.operands.values()]
    lead = plan.shares * plan.places
    shapes = (lead, sizes.tiles, sizes.written, sizes.width), *[(lead, sizes.padded_rows)] * 2
    out = [abstract(args[-1], x, jnp.float32) for x in shapes]
    count = len(sizes.widths) + max(sizes.widening, 1)
    found = plan.run(out, inputs, "eqattn_decode", plan.count, interpreted, count)
    return arrays.merged(found, sizes, plan.shares)
