"""The softmax fold of the live pairs of a grid as one kernel for Hopper.

A program has 128 rows of one block. Two of its three warpgroups have 64 of them each. The third
copies tiles of keys and values into shared memory, as many ahead as it holds. The two that compute
take turns: while the tensor cores multiply for one, the other works on its exponentials.

Inside, logits and maxima are those of powers of two.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._jax import abstract
from ..._sweep.grid import COL, FULL, GridLayout, PARTIAL, ROW
from .._program import LOG2E
from . import _mosaic as mosaic
from ._ending import Ending
from ._lists import lists
from ._operands import divided, Operand, padded, Places, ROWS, Sizes, TILE
from ._program import PairProgram, Value


_ORIGIN = float(jnp.finfo(jnp.float32).min)
"""Of the exponents of a row that has seen nothing."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a kernel computes, and from what.

    **Arguments:**

    - `programs`: the logits, per class of block. `operands`: those of their arguments that any of
        them reads.
    - `scale`: the argument that logits are multiplied with last, positive; None if there is not
        one number that all logits are.
    - `value_axes`: the axes of the grid that values lie on.
    - `table_axes`: those of the lists of live columns, without rows and columns; None where every
        pair is visited.
    - `dtype`: of queries, keys and values.
    - `continued`: whether the kernel goes on with an earlier Carry.
    - `ending`: what it writes of the rows.
    """

    layout: GridLayout
    sizes: Sizes
    programs: dict[int, PairProgram]
    operands: dict[int, Operand]
    scale: int | None
    value_axes: tuple[int, ...]
    table_axes: tuple[int, ...] | None
    dtype: Any
    continued: bool
    ending: Ending
    interpreted: bool

    @property
    def elements(self) -> int:
        """How many elements the batch axes of the grid have together."""
        return math.prod(self.layout.shape(self.layout.batch))

    @property
    def staged(self) -> list[int]:
        return [i for i, x in self.operands.items() if x.staged]

    @property
    def parts(self) -> int:
        """How many tiles a block of keys has."""
        return self.sizes.padded_keys // self.sizes.tile_k

    def scratch(self) -> tuple:
        """Shared memory and barriers: `(queries, keys, values, what varies with keys)`, `(queries,
        keys, values have arrived)`, `(keys, values are free)`, and whose turn it is.
        """
        s = self.sizes
        vectors = [mosaic.SMEM((s.stages, s.tile_k), self.operands[i].dtype) for i in self.staged]
        memory = (
            mosaic.matrices((2, mosaic.WARPGROUP, s.padded_dim), self.dtype),
            mosaic.matrices((s.stages, s.tile_k, s.padded_dim), self.dtype),
            mosaic.matrices((s.stages, s.tile_k, s.padded_width), self.dtype),
            vectors,
        )
        arrived = (
            mosaic.Barrier(num_barriers=2),
            mosaic.Barrier(num_arrivals=1 + len(vectors), num_barriers=s.stages),
            mosaic.Barrier(num_barriers=s.stages),
        )
        free = (mosaic.Barrier(num_arrivals=2, num_barriers=s.stages),) * 2
        return memory, arrived, free, mosaic.Barrier(num_arrivals=2)


class Program:
    """One program of the kernel, on references: what both kinds of its warpgroups know."""

    def __init__(self, plan: Plan, refs: Sequence, scratch: Sequence):
        self.plan, refs = plan, list(refs)
        self.q, self.k, self.v, self.poison, dirty = (refs.pop(0) for _ in range(5))
        listed = [refs.pop(0) for _ in range(3)] if plan.table_axes is not None else []
        self.given = {i: refs.pop(0) for i in plan.operands}
        self.old = [refs.pop(0) for _ in range(3)] if plan.continued else []
        self.ends = [refs.pop(0) for _ in plan.ending.given]
        self.results = refs
        self.memory, self.arrived, self.free, self.turn = scratch
        self.warpgroup = lax.axis_index("warpgroup")
        rest, element = divided(lax.axis_index("program"), plan.elements)
        row, self.tile = divided(rest, plan.sizes.padded_rows // TILE)
        self.row = listed[0][row] if listed else row
        self.places = Places.of(plan.layout, ROWS, element, self.row)
        self.at_row = self.places.place((*plan.layout.batch, ROW))
        columns = jnp.int32(plan.layout.grid[COL])
        full, live = columns if max(plan.programs) == FULL else jnp.int32(0), columns
        self.columns = None
        if listed:
            table = self.places.place(plan.table_axes or ())
            full, live = (listed[2][table, self.row, i] for i in (0, 1))
            self.columns = listed[1].at[table, self.row]
        self.full, self.live = (n * jnp.int32(plan.parts) for n in (full, live))
        dirty = dirty[self.places.place([a for a in plan.value_axes if a != COL])]
        self.again = dirty * self.live

    def where(self, step: Any) -> tuple[Any, Any]:
        """The column of a step, and the first key of its tile in there."""
        at, part = divided(step, self.plan.parts)
        column = at if self.columns is None else self.columns[at]
        return column, part * jnp.int32(self.plan.sizes.tile_k)

    def slot(self, step: Any) -> Any:
        return lax.rem(step, jnp.int32(self.plan.sizes.stages))

    def copy(self) -> None:
        """What the third warpgroup does."""
        plan = self.plan
        _, k_tiles, v_tiles, vectors = self.memory
        (_, k_arrived, v_arrived), (k_free, v_free) = self.arrived, self.free
        stages, tile_k = plan.sizes.stages, plan.sizes.tile_k

        def send_key(step, at):
            slot, (column, start) = self.slot(step), at
            keys = mosaic.ds(start, tile_k)
            mosaic.when(step >= stages)(lambda: mosaic.barrier_wait(k_free.at[slot]))
            place = self.places.place(plan.layout.in_axes[1], column)
            mosaic.copy_in(self.k.at[place, keys], k_tiles.at[slot], k_arrived.at[slot])
            for i, vector in zip(plan.staged, vectors):
                at = self.places.place(plan.operands[i].axes, column)
                mosaic.copy_in(self.given[i].at[at, keys], vector.at[slot], k_arrived.at[slot])

        def send(step, _):
            slot, (column, start) = self.slot(step), self.where(step)
            send_key(step, (column, start))
            mosaic.when(step >= stages)(lambda: mosaic.barrier_wait(v_free.at[slot]))
            place, keys = self.places.place(plan.value_axes, column), mosaic.ds(start, tile_k)
            mosaic.copy_in(self.v.at[place, keys], v_tiles.at[slot], v_arrived.at[slot])
            return ()

        def send_again(step, _):
            send_key(self.live + step, self.where(step))
            return ()

        lax.fori_loop(jnp.int32(0), self.live, send, ())
        lax.fori_loop(jnp.int32(0), self.again, send_again, ())

    def compute(self) -> None:
        """What each of the other two does, for its rows."""
        plan, width = self.plan, self.plan.sizes.padded_width
        q_tile = self.memory[0].at[self.warpgroup]
        self.start = self.tile * jnp.int32(TILE) + self.warpgroup * jnp.int32(mosaic.WARPGROUP)
        rows = mosaic.ds(self.start, mosaic.WARPGROUP)
        q_arrived, k_arrived, _ = self.arrived
        place = self.places.place(plan.layout.in_axes[0])
        mosaic.copy_in(self.q.at[place, rows], q_tile, q_arrived.at[self.warpgroup])
        near = {i: self.read(i) for i, x in plan.operands.items() if not (x.staged or x.moves)}
        self.factor = LOG2E * (1.0 if plan.scale is None else near[plan.scale].array)
        if not self.old:
            filled = lambda shape, x: lax.full(shape, x, jnp.float32)
            n = mosaic.WARPGROUP
            acc = mosaic.held(filled((n, width), 0.0), "pairs")
            den = mosaic.held(filled((n,), 0.0), "own")
            top = mosaic.held(filled((n,), -jnp.inf), "own")
        else:
            acc = mosaic.load(self.old[0].at[self.at_row, rows], "pairs")
            den, top = (mosaic.load(x.at[self.at_row, rows], "own") for x in self.old[1:])
            top = top * LOG2E
        mosaic.barrier_wait(q_arrived.at[self.warpgroup])
        mosaic.when(self.live > 0)(lambda: mosaic.barrier_wait(k_arrived.at[0]))
        mosaic.when(self.warpgroup == 1)(self.next_turn)
        state, begin = (acc, den, top), jnp.int32(0)
        for c, end in ((FULL, self.full), (PARTIAL, self.live)):
            if c in plan.programs:
                step = ft.partial(self.step, plan.programs[c], near)
                state = lax.fori_loop(begin, end, step, state)
                begin = end
        mosaic.when(self.warpgroup == 0)(self.next_turn)
        acc, den, top = state
        poison = mosaic.held(lax.full((mosaic.WARPGROUP,), 0.0, jnp.float32), "own")
        program = plan.programs[min(plan.programs)]
        step = ft.partial(self.poisoned, program, near)
        den = den + lax.fori_loop(jnp.int32(0), self.again, step, poison)
        self.write((acc, den, top * (1 / LOG2E)), rows)

    def write(self, accs: tuple, rows: Any) -> None:
        """Writes the results of the rows, narrow ones by way of the memory of their queries."""
        plan, sizes = self.plan, self.plan.sizes

        def read(i):
            x = plan.ending.given[i]
            return x.read(self.ends[i], self.places.place(x.axes), self.start, None, 0)

        lengths = dict(r=mosaic.WARPGROUP, v=sizes.padded_width)
        for x, ref in zip(plan.ending(accs, read, lengths), self.results):
            memory = self.memory[0].at[self.warpgroup] if x.ndim == 2 else None
            mosaic.store(x, ref.at[self.at_row, rows], memory)

    def next_turn(self) -> None:
        mosaic.barrier_arrive(self.turn)
        mosaic.barrier_wait(self.turn)

    def read(self, i: int, step: Any = None, slot: Any = None) -> Value:
        """An operand of the logits at a step, whose keys are in a slot."""
        x, tile_k = self.plan.operands[i], self.plan.sizes.tile_k
        if x.staged:
            vector = self.memory[3][self.plan.staged.index(i)]
            return x.read_staged(vector.at[slot])
        column, start = (None, None) if step is None else self.where(step)
        return x.read(self.given[i], self.places.place(x.axes, column), self.start, start, tile_k)

    def logits(
        self, program: PairProgram, near: dict, step: Any, slot: Any, meanwhile: Any
    ) -> list[Any]:
        """What a block function makes of the tile of keys in a slot, which is free afterwards. The
        logits are still to be multiplied with the `factor` if there is a `scale`.
        """
        sizes, lengths = self.plan.sizes, {"r": mosaic.WARPGROUP, "k": self.plan.sizes.tile_k}
        q_tile, k_tile = self.memory[0].at[self.warpgroup], self.memory[1].at[slot]
        s = mosaic.pairs_of(q_tile, k_tile, meanwhile)
        read = lambda i: near[i] if i in near else self.read(i, step, slot)
        s, *weights = program(s, read, lengths, LOG2E, self.plan.scale is not None)
        if sizes.padded_keys != sizes.keys:
            inside = mosaic.iota(s.shape, 1) + self.where(step)[1] < jnp.int32(sizes.keys)
            s = jnp.where(inside, s, -jnp.inf)
        if self.plan.interpreted:  # which does not know that the barrier suffices after mere reads
            mosaic.commit_smem()
        mosaic.barrier_arrive(self.free[0].at[slot])
        return [s, *weights]

    def step(self, program: PairProgram, near: dict, step: Any, state: tuple) -> tuple:
        """Adds a tile of keys to the Carry."""
        plan, (acc, den, top), slot = self.plan, state, self.slot(step)
        _, k_arrived, v_arrived = self.arrived
        s, *weights = self.logits(program, near, step, slot, self.next_turn)
        across = lambda x, like: lax.broadcast_in_dim(x, like.shape, [0])
        apart = plan.scale is not None
        now = jnp.maximum(top, s.max(1) * self.factor if apart else s.max(1))
        origin = jnp.maximum(now, _ORIGIN)
        scale = jnp.exp2(top - origin)
        p = jnp.exp2((s * self.factor if apart else s) - across(origin, s))
        den = den * scale + p.sum(1)
        weighted = (p * weights[0] if weights else p).astype(plan.dtype)
        acc = acc * across(scale, acc)
        if not plan.interpreted:
            acc, den, now, weighted = mosaic.in_order(acc, den, now, weighted)
        mosaic.barrier_arrive(self.turn)
        mosaic.barrier_wait(v_arrived.at[slot])
        mosaic.barrier_wait(self.turn)

        def meanwhile():
            following = step + 1
            at = k_arrived.at[self.slot(following)]
            mosaic.when(following < self.live)(lambda: mosaic.barrier_wait(at))

        acc = mosaic.weighted(acc, weighted, self.memory[2].at[slot], plan.interpreted, meanwhile)
        mosaic.barrier_arrive(self.free[1].at[slot])
        return acc, den, now

    def poisoned(self, program: PairProgram, near: dict, step: Any, poison: Any) -> Any:
        """Adds NaN for the rows that see a key of a tile whose value is not finite, else 0.

        By the product, what is not finite would reach all rows. So values come without it, and
        where there was some, all tiles of keys come a second time to tell the rows that see it.
        """
        plan, slot = self.plan, self.slot(self.live + step)
        mosaic.barrier_wait(self.arrived[1].at[slot])
        s, *_ = self.logits(program, near, step, slot, lambda: None)
        column, start = self.where(step)
        keys = mosaic.ds(start, plan.sizes.tile_k)
        bad = mosaic.load(self.poison.at[self.places.place(plan.value_axes, column), keys], "other")
        bad = lax.broadcast_in_dim(bad, s.shape, [1])
        return poison + jnp.where(s == -jnp.inf, 0.0, bad).sum(1)


def _scale_of(programs: dict[int, PairProgram], layout: GridLayout) -> int | None:
    """The argument that is the scale in every class of block, and one number for all blocks."""
    scale, *others = {program.scale for program in programs.values()}
    return None if others or scale is None or layout.in_axes[scale] else scale


def visit_fold(
    steps: dict[int, Any],
    layout: GridLayout,
    args: Sequence,
    finish: Any,
    into: Sequence | None,
    interpreted: bool,
) -> list:
    """What `finish` makes of each row of the grid, with its grid axes in front."""
    table, operands = layout.split(args)
    first = steps[max(steps)]
    n = len(first.logits.in_avals)
    (query, key, *_), (value, poison, *_) = operands[:n], operands[n:]
    q_axes, k_axes, v_axes = (layout.in_axes[i] for i in (0, 1, n))
    programs = {c: PairProgram(step.logits) for c, step in steps.items()}
    scale = _scale_of(programs, layout)
    if scale is not None:  # its sign goes to the queries, and the kernel has a positive number
        positive = jnp.maximum(jnp.abs(operands[scale]), jnp.finfo(jnp.float32).tiny)
        query = query * jnp.sign(operands[scale]).astype(query.dtype).reshape(())
        operands = [positive if i == scale else x for i, x in enumerate(operands)]
    keys, rows = layout.block
    sizes = Sizes(rows, keys, query.shape[-2], first.width)
    dtype = dict(first.products)["operand_dtype"]
    wanted = [i for i in range(n) if any(p.reads[i] for p in programs.values())]
    lengths = dict(r=sizes.padded_rows, k=sizes.padded_keys)
    given = {i: Operand(operands[i], layout.in_axes[i], layout, ROWS, lengths) for i in wanted}

    def blocks(x, axes, *padding):
        x = x.reshape(math.prod(x.shape[: len(axes)]), *x.shape[len(axes) :])
        for axis, size in enumerate(padding):
            x = padded(x, axis + 1, size)
        return x

    q = blocks(jnp.swapaxes(query, -1, -2), q_axes, sizes.padded_rows, sizes.padded_dim)
    k = blocks(key, k_axes, sizes.padded_keys, sizes.padded_dim)
    v = blocks(value, v_axes, sizes.padded_keys, sizes.padded_width)
    bad = blocks(poison.astype(jnp.float32), v_axes, sizes.padded_keys)
    moving = [i for i, a in enumerate(v_axes) if a == COL]
    dirty = jnp.isnan(poison).any((*moving, poison.ndim - 1)).astype(jnp.int32).reshape(-1)
    inputs = [q.astype(dtype), k.astype(dtype), v.astype(dtype), bad, dirty]
    if table is not None:
        ranks, order, counts = lists(table, tuple(steps))
        inputs += [ranks, *(x.reshape(-1, *x.shape[-2:]) for x in (order, counts))]
    inputs += [x.array for x in given.values()]

    kept = (*layout.batch, ROW)
    shape = layout.shape(kept)
    old = None if into is None or into[0] is None else [jnp.swapaxes(into[0], -1, -2), *into[1:]]
    if old is not None:
        inputs.append(blocks(old[0], kept, sizes.padded_rows, sizes.padded_width))
        inputs += [blocks(x, kept, sizes.padded_rows) for x in old[1:]]
    ending = Ending(finish, operands, layout, lengths)
    inputs += [x.array for x in ending.given]
    plan = Plan(
        layout=layout,
        sizes=sizes,
        programs=programs,
        operands=given,
        scale=scale,
        value_axes=v_axes,
        table_axes=None if table is None else (layout.table_axes or ())[:-2],
        dtype=dtype,
        continued=old is not None,
        ending=ending,
        interpreted=interpreted,
    )

    def body(*refs):
        scratch = len(plan.scratch())
        registers = (240, 24) if sizes.padded_dim > 128 else (232, 40)
        mosaic.specialise(Program(plan, refs[:-scratch], refs[-scratch:]), *registers)

    places = math.prod(shape)
    wide = lambda is_wide: (sizes.padded_width,) if is_wide else ()
    out = [((places, sizes.padded_rows, *wide(w)), dtype) for dtype, w, _ in ending.results]
    out = [abstract(args[-1], *x) for x in out]
    count = places * (sizes.padded_rows // TILE)
    run = mosaic.kernel(body, out, count, "eqattn_fold", plan.scratch(), interpreted)
    found = []
    for x, (_, is_wide, turned) in zip(run(*inputs), ending.results):
        x = x[:, :rows, : sizes.width] if is_wide else x[:, :rows]
        x = x.reshape(*shape, *x.shape[1:])
        found.append(jnp.swapaxes(x, -1, -2) if is_wide and not turned else x)
    return found
