"""The softmax fold of `Ragged` as one kernel for Hopper: keys and values stay where they lie.

A program has up to 64 rows of one key head, and a share of the blocks that they see. One of its two
warpgroups copies tiles of keys and values into shared memory, as many ahead as it holds, and looks
up their pages. The other one multiplies. With few rows most of these products are wasted, but
memory sets the pace. So that all of the chip reads, the blocks of a row are shared out to several
programs, of which each makes a Carry. Carries are merged by XLA.

A value that is not finite makes a numerator so, whoever sees it. Where there is one, XLA's loops do
the visit again, by the contract of `_sweep/nonfinite.py`.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._carry import change_of_origin
from ..._jax import abstract
from ..._sweep import loops
from ..._sweep.grid import COL, FULL, GridLayout, PARTIAL, ROW
from .._program import LOG2E
from . import _mosaic as mosaic
from ._lists import lists
from ._online import online_step
from ._operands import divided, Operand, padded, Places, ROWS
from ._program import PairProgram, Value
from ._stored import (
    flat_heads,
    matrices_in,
    of_one_head,
    rows_by_head,
    Sizes,
    sizes_of,
    Source,
    TILE,
)
from ._traverse import _called


PROGRAMS = 1056
"""How many programs there should be at least: eight for each of the 132 multiprocessors of an H200,
so that those which end early leave little idle.
"""

LEAST_TILES = 8
"""How many tiles a share should have, as each writes a Carry."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a kernel computes, and from what. `shares` is in how many parts the blocks of a row are
    cut, and the rest is as in `_forward.Plan`, for a `layout` with padded rows.
    """

    layout: GridLayout
    sizes: Sizes
    programs: dict[int, PairProgram]
    operands: dict[int, Operand]
    keys: Source
    values: Source
    table_axes: tuple[int, ...] | None
    dtype: Any
    shares: int
    interpreted: bool

    @property
    def staged(self) -> list[int]:
        return [i for i, x in self.operands.items() if x.staged]

    @property
    def parts(self) -> int:
        """How many tiles a block of keys has."""
        return self.sizes.padded_keys // self.sizes.tile_k

    @property
    def count(self) -> int:
        """How many programs there are."""
        places = math.prod(self.layout.shape((*self.layout.batch, ROW)))
        return self.shares * places * self.sizes.tiles

    def scratch(self) -> tuple:
        """Shared memory and barriers: `(queries, keys, values, results, what varies with keys)`,
        `(queries, keys, values have arrived)`, and `(keys, values are free)`.
        """
        s = self.sizes
        vectors = [mosaic.SMEM((s.stages, s.tile_k), self.operands[i].dtype) for i in self.staged]
        memory = (
            mosaic.matrices((TILE, s.dim), self.dtype),
            mosaic.matrices((s.stages, s.tile_k, s.dim), self.dtype),
            mosaic.matrices((s.stages, s.tile_k, s.width), self.dtype),
            mosaic.SMEM((TILE, s.staged), jnp.float32),
            vectors,
        )
        arrived = (
            mosaic.Barrier(),
            mosaic.Barrier(num_arrivals=self.keys.count + len(vectors), num_barriers=s.stages),
            mosaic.Barrier(num_arrivals=self.values.count, num_barriers=s.stages),
        )
        return memory, arrived, (mosaic.Barrier(num_barriers=s.stages),) * 2


class Program:
    """One program of the kernel, on references: what both kinds of its warpgroups know."""

    def __init__(self, plan: Plan, refs: Sequence, scratch: Sequence):
        self.plan, refs = plan, list(refs)
        self.q = refs.pop(0)
        of_pages = lambda source: [refs.pop(0) for _ in range(source.pieces)]
        self.tables = of_pages(plan.keys), of_pages(plan.values)
        self.k, self.v = ([refs.pop(0) for _ in range(s.count)] for s in (plan.keys, plan.values))
        listed = [refs.pop(0) for _ in range(2)] if plan.table_axes is not None else []
        self.given = {i: refs.pop(0) for i in plan.operands}
        self.results = refs
        self.memory, self.arrived, self.free = scratch
        layout, sizes = plan.layout, plan.sizes
        rest, self.tile = divided(lax.axis_index("program"), sizes.tiles)
        rest, row = divided(rest, layout.grid[ROW])
        share, element = divided(rest, math.prod(layout.shape(layout.batch)))
        self.start = self.tile * jnp.int32(TILE)
        self.head, _ = divided(self.tile, sizes.tiles // sizes.heads)
        self.places = Places.of(layout, ROWS, element, row)
        self.at_row = self.places.place((*layout.batch, ROW))
        self.out = share * jnp.int32(plan.count // plan.shares // sizes.tiles) + self.at_row
        columns = jnp.int32(layout.grid[COL])
        full, live = columns if max(plan.programs) == FULL else jnp.int32(0), columns
        self.columns = None
        if listed:
            table = self.places.place(plan.table_axes or ())
            full, live = (listed[1][table, row, i] for i in (0, 1))
            self.columns = listed[0].at[table, row]
        full, live = (n * jnp.int32(plan.parts) for n in (full, live))
        each = lax.div(live + jnp.int32(plan.shares - 1), jnp.int32(plan.shares))
        self.first = jnp.minimum(share * each, live)
        self.last = jnp.minimum(self.first + each, live)
        self.full = jnp.clip(full, self.first, self.last)

    def where(self, step: Any) -> tuple[Any, Any]:
        """The column of a step, and the first key of its tile in there."""
        at, part = divided(step, self.plan.parts)
        column = at if self.columns is None else self.columns[at]
        return column, part * jnp.int32(self.plan.sizes.tile_k)

    def slot(self, step: Any) -> Any:
        return lax.rem(step - self.first, jnp.int32(self.plan.sizes.stages))

    def copy(self) -> None:
        """What the second warpgroup does."""
        plan, stages = self.plan, self.plan.sizes.stages
        _, k_tiles, v_tiles, _, vectors = self.memory
        (_, k_arrived, v_arrived), (k_free, v_free) = self.arrived, self.free

        def send(step, _):
            slot, (column, start) = self.slot(step), self.where(step)
            again = step - self.first >= stages
            mosaic.when(again)(lambda: mosaic.barrier_wait(k_free.at[slot]))
            at = self.places.place(plan.keys.axes, column), start, self.head
            plan.keys.copy(self.k, self.tables[0], at, k_tiles.at[slot], k_arrived.at[slot])
            for i, vector in zip(plan.staged, vectors):
                place = self.places.place(plan.operands[i].axes, column)
                keys = mosaic.ds(start, plan.sizes.tile_k)
                mosaic.copy_in(self.given[i].at[place, keys], vector.at[slot], k_arrived.at[slot])
            mosaic.when(again)(lambda: mosaic.barrier_wait(v_free.at[slot]))
            at = self.places.place(plan.values.axes, column), start, self.head
            plan.values.copy(self.v, self.tables[1], at, v_tiles.at[slot], v_arrived.at[slot])
            return ()

        lax.fori_loop(self.first, self.last, send, ())

    def compute(self) -> None:
        """What the first one does."""
        plan = self.plan
        rows = mosaic.ds(self.start, TILE)
        place = self.places.place(plan.layout.in_axes[0])
        mosaic.copy_in(self.q.at[place, rows], self.memory[0], self.arrived[0])
        near = {i: self.read(i) for i, x in plan.operands.items() if not (x.staged or x.moves)}
        filled = lambda shape, x: lax.full(shape, x, jnp.float32)
        acc = mosaic.held(filled((TILE, plan.sizes.width), 0.0), "pairs")
        den, top = (mosaic.held(filled((TILE,), x), "own") for x in (0.0, -jnp.inf))
        mosaic.barrier_wait(self.arrived[0])
        state, begin = (acc, den, top), self.first
        for c, end in ((FULL, self.full), (PARTIAL, self.last)):
            if c in plan.programs:
                step = ft.partial(self.step, plan.programs[c], near)
                state = lax.fori_loop(begin, end, step, state)
                begin = end
        acc, den, top = state
        num, dens, tops = self.results
        mosaic.store(den, dens.at[self.out, rows])
        mosaic.store(top * (1 / LOG2E), tops.at[self.out, rows])
        mosaic.store_some(acc, num.at[self.out, self.tile], self.memory[3])

    def read(self, i: int, step: Any = None, slot: Any = None) -> Value:
        """An operand of the logits at a step, whose keys are in a slot."""
        x, tile_k = self.plan.operands[i], self.plan.sizes.tile_k
        if x.staged:
            return x.read_staged(self.memory[4][self.plan.staged.index(i)].at[slot])
        column, start = (None, None) if step is None else self.where(step)
        return x.read(self.given[i], self.places.place(x.axes, column), self.start, start, tile_k)

    def step(self, program: PairProgram, near: dict, step: Any, state: tuple) -> tuple:
        """Adds a tile of keys to the Carry."""
        plan, slot = self.plan, self.slot(step)
        q_tile, k_tiles, v_tiles, *_ = self.memory
        (_, k_arrived, v_arrived), (k_free, v_free) = self.arrived, self.free
        sizes = plan.sizes
        mosaic.barrier_wait(k_arrived.at[slot])
        s = mosaic.pairs_of(q_tile, k_tiles.at[slot])
        read = lambda i: near[i] if i in near else self.read(i, step, slot)
        s, *weights = program(s, read, {"r": TILE, "k": sizes.tile_k}, LOG2E, False)
        if sizes.padded_keys != sizes.keys:
            inside = mosaic.iota(s.shape, 1) + self.where(step)[1] < jnp.int32(sizes.keys)
            s = jnp.where(inside, s, -jnp.inf)
        if plan.interpreted:  # which does not know that the barrier suffices after mere reads
            mosaic.commit_smem()
        mosaic.barrier_arrive(k_free.at[slot])
        acc, den, now, weighted = online_step(state, s, weights, None, plan.dtype, plan.interpreted)
        mosaic.barrier_wait(v_arrived.at[slot])
        acc = mosaic.weighted(acc, weighted, v_tiles.at[slot], plan.interpreted)
        mosaic.barrier_arrive(v_free.at[slot])
        return acc, den, now


def _shares(layout: GridLayout, sizes: Sizes) -> int:
    """In how many parts the blocks of a row are cut."""
    programs = math.prod(layout.shape((*layout.batch, ROW))) * sizes.tiles
    tiles = layout.grid[COL] * (sizes.padded_keys // sizes.tile_k)
    return max(min(-(-PROGRAMS // programs), tiles // LEAST_TILES), 1)


def visit_stored(
    steps: dict[int, Any], layout: GridLayout, args: Sequence, interpreted: bool
) -> list:
    """Numerator, denominator and maximum of each row of the grid, with its grid axes in front."""
    table, operands = layout.split(args)
    first = steps[max(steps)]
    n = len(first.logits.in_avals)
    where, query = matrices_in(first.logits), operands[0]
    places = where, range(n, n + len(where))
    kv = [[operands[i] for i in at] for at in places]
    pages = len(where) if layout.pages else 0
    sizes = sizes_of(layout, kv[0][0], kv[1][0], pages)
    programs = {c: PairProgram(of_one_head(step.logits)) for c, step in steps.items()}
    wide = dataclasses.replace(layout, block=(sizes.keys, sizes.padded_rows))
    lengths = dict(r=sizes.padded_rows, k=sizes.padded_keys)
    given = {}
    for i in range(n):
        if any(p.reads[i] for p in programs.values()):
            x = rows_by_head(operands[i], layout.in_axes[i], sizes)
            given[i] = Operand(x, layout.in_axes[i], wide, ROWS, lengths)

    q = query.reshape(-1, sizes.dim, sizes.heads, sizes.of_head)  # where rows may be a single one
    q = padded(q, 3, sizes.padded_rows // sizes.heads).reshape(-1, sizes.dim, sizes.padded_rows)
    q = jnp.swapaxes(q, -1, -2)
    inputs, sources = [q], []
    for xs, at in zip(kv, places):
        axes = [layout.in_axes[i] for i in at]
        if pages:
            found = [layout.lookups[max(a)] for a in axes]
            inputs += [operands[i].reshape(-1) for i in found]
            axes = [layout.in_axes[i] for i in found]
        sources.append(Source(axes[0], xs[0].shape[-1], pages))
    for xs, at in zip(kv, places):
        inputs += [flat_heads(x, layout.in_axes[i], sizes.piece) for x, i in zip(xs, at)]
    if table is not None:
        _, order, counts = lists(table, tuple(steps))
        inputs += [x.reshape(-1, *x.shape[-2:]) for x in (order, counts)]
    inputs += [x.array for x in given.values()]
    plan = Plan(
        layout=wide,
        sizes=sizes,
        programs=programs,
        operands=given,
        keys=sources[0],
        values=sources[1],
        table_axes=None if table is None else (layout.table_axes or ())[:-2],
        dtype=query.dtype,
        shares=_shares(layout, sizes),
        interpreted=interpreted,
    )

    def body(*refs):
        scratch = len(plan.scratch())
        program = Program(plan, refs[:-scratch], refs[-scratch:])
        warpgroup = lax.axis_index("warpgroup")
        mosaic.when(warpgroup == 0)(program.compute)
        mosaic.when(warpgroup == 1)(program.copy)

    kept = layout.shape((*layout.batch, ROW))
    lead = plan.shares * math.prod(kept)
    out = [abstract(args[-1], x, jnp.float32) for x in (
        (lead, sizes.tiles, sizes.written, sizes.width), *[(lead, sizes.padded_rows)] * 2
    )]  # fmt: skip
    run = mosaic.kernel(
        body, out, plan.count, "eqattn_decode", plan.scratch(), interpreted, warpgroups=2
    )
    found = run(*inputs)

    def of_rows(x, *rest):
        x = x.reshape(plan.shares, *kept, sizes.heads, -1, *rest)
        x = lax.slice_in_dim(x, 0, sizes.of_head, axis=2 + len(kept))
        return x.reshape(plan.shares, *kept, sizes.rows, *rest)

    return merged(of_rows(found[0], sizes.width), *map(of_rows, found[1:]))


def merged(num: Any, den: Any, top: Any) -> list:
    """One Carry of several, `[shares, ...]`."""
    if len(num) == 1:
        return [num[0], den[0], top[0]]
    most = top.max(0)
    _, scale = change_of_origin(most[None], top)
    return [(num * scale[..., None]).sum(0), (den * scale).sum(0), most]


def traverse_stored(
    steps: dict[int, Callable[..., Any]],
    layout: GridLayout,
    args: Sequence[Any],
    start: Sequence[Any],
    axes: Sequence[tuple[int, ...]],
    *,
    finish: Callable[..., Any] = list,
    into: Sequence[Any] | None = None,
    interpreted: bool = False,
) -> list[Any]:
    """`eqattn._sweep.loops.traverse` of a fold whose keys and values stay in place."""
    assert into is None, "what is read in place does not travel around a ring"
    run = lambda *xs: visit_stored(steps, layout, xs, interpreted)
    num, den, top = _called(run, interpreted, *args)

    def again():
        return loops.traverse(steps, layout, args, start, axes, finish=finish, vectorise=False)

    return lax.cond(jnp.isfinite(num).all(), lambda: [num, den, top], again)
