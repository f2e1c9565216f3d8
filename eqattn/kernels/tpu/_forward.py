"""The softmax fold of the live pairs of a grid by one Pallas kernel.

A step computes the logits of one pair and, of the pair before it, the exponentials and their
product with the values. Neither waits for the other, so the matrix units work on one while the
vector units work on the other. The pipeline runs on from one row to the next. Where pairs 0 and 1
are those of one row, and pair 2 is that of another, the steps are

    step                   0      1      2      3 (drains)
    logits of pair         0      1      2      unused
    adds pair              none   0      1      2
    row whose end it is                  first  second

So a step reads the values and writes the results of the pair before: both have a `lag` of 1. What
step 0 adds comes from memory that was not written yet. The result goes where the end of the first
row will be written later, and is cleared.

`visit_fold` plans the kernel, a `_Fold`, whose `kernel` is one step on references to vector memory.
The products and the softmax of a step are in `_forward_step.py`.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..._jax import abstract
from ..._sweep.fold_step import Finish
from ..._sweep.grid import COL, EMPTY, GridLayout, HEAD, ROW
from ..._sweep.tokens import from_heads
from .._program import LOG2E
from ._chip import heads_abreast, SPARE, VMEM
from ._forward_step import FoldSpec, FoldStepBody, run
from ._grid import KernelGrid, split_at, tables_of
from ._operands import (
    abstract_blocks,
    heads_of_rows,
    KernelOperand,
    matrix,
    nbytes_of,
    PairsOperand,
    turns,
)
from ._products import LANES
from ._program import Program
from ._work_list import FIRST, kind_of, LAST


@dataclasses.dataclass(frozen=True)
class _Fold:
    """The plan of the kernel.

    **Arguments:**

    - `grid`: the kernel's grid.
    - `form`: what is computed in a block.
    - `ahead`, `behind`: the operands that logits read, and those that values read, by index.
    - `early`: whether a step turns its values for the step that adds them.
    - `ends`: the operands that `finish` reads.
    - `start`: numerator, denominator and maximum of an earlier visit to go on with, or none.
    - `finish`: what becomes of these three once their row is complete. None leaves them.
    - `heads`: how many heads a row has the queries of, if what becomes of them is written by head.
    """

    grid: KernelGrid
    form: FoldSpec
    ahead: dict[int, KernelOperand]
    behind: dict[int, KernelOperand]
    early: bool
    ends: list[KernelOperand]
    start: list[KernelOperand]
    finish: Finish | None
    heads: int

    @property
    def carry(self) -> list[tuple[int, int]]:
        """The shapes of numerator, denominator and maximum of a row of blocks."""
        _, rows = self.form.layout.block
        return [(self.form.width, rows), (1, rows), (1, rows)]

    @property
    def outs(self) -> list[Any]:
        """The shapes and dtypes of the results' blocks.

        The vectors of a finished row, such as denominators and maxima, are one array. Each array
        costs every step 30 to 50 cycles in the schedules of `tpu-report`. In a ring they are
        separate arrays, so that its moves hide. Matrices have an axis of `heads` where that is not
        1.
        """
        like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in self.carry]
        ends = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.ends]
        found = jax.eval_shape(self.finished, like, ends)
        if self.heads == 1:
            return found
        *matrices, vectors = found
        shape = lambda x: (self.heads, x.shape[0] // self.heads, x.shape[1])
        return [*[jax.ShapeDtypeStruct(shape(x), x.dtype) for x in matrices], vectors]

    @property
    def scratch(self) -> list:
        """The vector memory for each head that a step visits. It holds the Carry, and the logits of
        the pair before, with their maxima and dropout weights. It also holds the transposed values
        of this pair and of the pair before.
        """
        keys, rows = self.form.layout.block
        carry = (*self.carry, (keys, rows), (1, rows))
        shapes: list[tuple[Any, Any]] = [(x, jnp.float32) for x in carry]
        shapes += [((keys, rows), jnp.float32)] * self.form.weighted
        if self.early:
            x = self.behind[0]
            shapes.append(((2, *x.shape[::-1]), x.array.dtype))
        return [pltpu.VMEM((self.grid.abreast, *shape), dtype) for shape, dtype in shapes]

    @property
    def flags(self) -> list:
        """The `found` of `run`, if a step has the values of its pair and not only those of the pair
        before.
        """
        looks = self.early and self.form.poisons and self.form.some != self.form.full
        return [pltpu.SMEM((1,), jnp.int32)] * (looks and [*self.behind] == [0])

    @property
    def given(self) -> list[KernelOperand]:
        return [*self.ahead.values(), *self.behind.values(), *self.ends, *self.start]

    @property
    def nbytes(self) -> int:
        """The bytes of vector memory that operands, results and scratch take."""
        nbytes = sum(nbytes_of(x.shape, x.dtype) for x in self.scratch)
        nbytes += self.grid.abreast * sum(x.nbytes for x in self.given)
        return nbytes + self.grid.abreast * sum(2 * nbytes_of(x.shape, x.dtype) for x in self.outs)

    def kernel(self, work_ref: Any, *refs: Any) -> None:
        """One step: the logits of its pair, what the pair before adds, and the ends of rows."""
        grid, form, start = self.grid, self.form, self.start
        tables, others = split_at(refs, len(form.layout.lookups))
        left = list(others)
        take = lambda keys: {i: left.pop(0) for i in keys}
        counts = (len(x) for x in (self.ends, start, self.outs))
        keys = (self.ahead, self.behind, *map(range, counts))
        ins, vals, ends, olds, outs = map(take, keys)
        ids = [pl.program_id(i) for i in range(len(grid.order))]
        pair, before = (grid.pair(ids, work_ref, lag) for lag in (0, 1))
        read = ft.partial(grid.read, ids=ids, refs=(work_ref, *tables))
        running, ended = ids[-1] > 0, (before & LAST) != 0
        scratch, flags = split_at(left, len(left) - len(self.flags))
        bodies = []
        for head in range(grid.abreast):
            num, den, top, s, most, *others = [ref.at[head] for ref in scratch]
            weights, turned = split_at(others, form.weighted)
            of_head = ft.partial(read, head=head)
            load, lie = _readers(form.logits[form.full], self.ahead, ins, of_head)
            fetch, lie_before = _readers(
                form.values[form.full], self.behind, vals, ft.partial(of_head, lag=1)
            )
            aside = given = settle = None
            if self.early:
                there, here = (turned[0].at[i] for i in range(2))
                aside = ft.partial(_turn, here, self.behind[0], vals[0], of_head)
                settle = ft.partial(_copy, here, there)
                fetch[0], lie_before[0] = (lambda there=there: there[...]), True
                if flags:
                    given = ft.partial(of_head, self.behind[0], vals[0])
            state = num, den, top, s, most, weights
            bodies.append(
                FoldStepBody(form, load, lie, fetch, lie_before, *state, aside, settle, given)
            )

        def clear():
            for body in bodies:
                body.clear()

        def go_on():
            (body,) = bodies
            body.num[...], body.den[...] = olds[0][...], olds[1][...]
            body.top[...] = olds[2][...] * LOG2E

        if start:
            pl.when(running & ((before & FIRST) != 0))(go_on)
        run(bodies, pair, before, *flags)
        if form.hides:  # what it has added must not count
            pl.when(running & (kind_of(before) == EMPTY))(go_on if start else clear)

        # What the first step adds was not written yet. It goes where the end of the first row will
        # go.
        @pl.when(running & ended if start else ~running | ended)
        def _():
            for head, body in enumerate(bodies):
                accs = [body.num[...], body.den[...], body.top[...] * (1 / LOG2E)]
                given = zip(self.ends, ends.values())
                blocks = [read(x, ref, lag=1, head=head) for x, ref in given]
                for ref, y in zip(outs.values(), self.finished(accs, blocks)):
                    place = ref.at[head] if grid.abreast > 1 else ref
                    place[...] = y.reshape(place.shape)
            if not start:
                clear()  # the next row needs it, and values move out meanwhile

    def finished(self, accs: Sequence, blocks: Sequence) -> list:
        """What the kernel writes at the end of a row, from its Carry and what `finish` reads."""
        if self.finish is None:
            return list(accs)
        num, den, top = accs
        ys = self.finish([num.T if self.form.grouped else num, den[0], top[0]], *blocks)
        vectors = [y for y in ys if y.ndim == 1]
        return [*[y for y in ys if y.ndim == 2], jnp.stack(vectors)]


def _turn(ref: Any, x: KernelOperand, given: Any, read: Callable, part: int, parts: int) -> None:
    """Writes a part of the block of an operand transposed."""
    size = x.shape[0] // parts
    if size % LANES == 0:
        here = slice(part * size, part * size + size)
        ref[:, here] = read(x, given)[here].T
    elif part == 0:
        ref[...] = read(x, given).T


def _copy(source: Any, target: Any) -> None:
    target[...] = source[...]


def _readers(
    program: Program, operands: dict[int, KernelOperand], refs: dict, read: Callable
) -> tuple[list, list[bool]]:
    """How an `Evaluation` of the program reads each argument, and which of them lie transposed."""
    load: list = [None] * len(program.reads)
    for i, x in operands.items():
        load[i] = ft.partial(read, x, refs[i], as_row=True)
    flipped = {i for i, x in operands.items() if x.flipped or x.is_column}
    return load, [i in flipped for i in range(len(load))]


def _plan(
    steps: dict[int, Any],
    layout: GridLayout,
    args: Sequence,
    kept: tuple[int, ...],
    finish: Any,
    into: Sequence | None,
) -> tuple[_Fold, Any]:
    """The plan of the kernel of `visit_fold`, and its list of pairs."""
    table, operands = layout.split_known(args)
    full = steps[max(steps)]
    n = len(full.logits.in_avals)
    blocks = abstract_blocks(operands, layout.in_axes)
    form = FoldSpec(
        layout=layout,
        logits={c: Program(step.evaluate_logits, blocks[:n]) for c, step in steps.items()},
        values={c: Program(step.evaluate_values, blocks[n:]) for c, step in steps.items()},
        width=full.width,
        grouped=full.grouped,
        narrow=dict(full.products)["operand_dtype"],
        precision=dict(full.products)["precision"],
    )
    abreast = _heads_abreast(form, kept) if into is None else 1
    grid, work = KernelGrid.of(table, layout, kept, max(steps), drain=1, abreast=abreast)

    def given_to(programs, start):
        """The operands from `start` on that a program of some class reads."""
        main, found = programs[max(programs)], {}
        for i, flipped in enumerate(main.flipped):
            if any(p.reads[i] for p in programs.values()):
                x, axes = operands[start + i], layout.in_axes[start + i]
                flipped = matrix(blocks[start + i]) and flipped
                pairs = None if main.multiplied[i] else PairsOperand.of(x, axes, layout)
                found[i] = pairs or KernelOperand(x, axes, flipped)
        return found

    value = form.values[form.full]
    whole: Finish | None = finish if into is None else None
    if whole is None:  # they are the left side of a product
        value.flipped[0] = value.flipped[0] or matrix(blocks[n])
    ahead, behind = given_to(form.logits, 0), given_to(form.values, n)
    early, heads = False, 1
    if whole is not None and not form.grouped:
        main, heads = form.logits[form.full], heads_of_rows(layout)
        for i, x in ahead.items():
            if main.held[i] and COL not in x.axes and turns(blocks[i]):
                own = heads if x.axes[-1:] == (ROW,) else 1
                ahead[i] = KernelOperand(operands[i], x.axes, flipped=True, heads=own)
        early = 0 in behind and not behind[0].flipped and turns(blocks[n])
    start = [
        KernelOperand(x, kept, as_lies=x.ndim == len(kept) + 2) for x in into or () if x is not None
    ]
    reads = () if whole is None else whole.reads
    ends = [KernelOperand(operands[i], layout.in_axes[i]) for i in reads]
    return _Fold(grid, form, ahead, behind, early, ends, start, whole, heads), work


def _heads_abreast(form: FoldSpec, kept: tuple[int, ...]) -> int:
    """How many heads a step visits, which must have the same pairs. With dropout it is one, as its
    instructions are many.
    """
    layout = form.layout
    together = HEAD in kept and not layout.ragged and not layout.pages and not form.weighted
    if not together or HEAD in (layout.table_axes or ()):
        return 1
    heads = heads_abreast(math.prod(layout.block), form.width)
    return 1 if layout.grid[HEAD] % heads else heads


def visit_fold(
    steps: dict[int, Any],
    layout: GridLayout,
    args: Sequence,
    kept: tuple[int, ...],
    finish: Any,
    into: Sequence | None,
    interpret: Any,
) -> list:
    """Folds the live pairs, and returns what `finish` makes of the Carry of each row. With `into`,
    it continues those Carries and returns Carries.

    **Arguments:**

    - `steps`, `layout`, `args`, `finish`, `into`: as for `traverse`.
    - `kept`: the grid axes that the results keep.
    - `interpret`: whether to interpret the kernel.
    """
    plan, work = _plan(steps, layout, args, kept, finish, into)
    grid = plan.grid
    _, operands = layout.split(args)
    tables = tables_of(layout, operands)
    first = 1 + len(tables) + len(plan.given) - len(plan.start)
    call = pl.pallas_call(
        plan.kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(layout.lookups),
            grid=grid.grid,
            in_specs=[
                *[grid.block_spec(x) for x in plan.ahead.values()],
                *[grid.block_spec(x, int(not plan.early or i > 0)) for i, x in plan.behind.items()],
                *[grid.block_spec(x, lag=1) for x in plan.ends],
                *[grid.spec(x.axes, x.block, 1) for x in plan.start],
            ],
            out_specs=[grid.spec_of(kept, x.shape, 1) for x in plan.outs],
            scratch_shapes=[*plan.scratch, *plan.flags],
        ),
        out_shape=[abstract(args[-1], grid.sizes_of(kept, x.shape), x.dtype) for x in plan.outs],
        input_output_aliases={first + i: i for i in range(len(plan.start))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * (len(grid.order) - 1) + ("arbitrary",),
            # What it does not need, XLA may give to the operands. What keys take once they are
            # decoded is not counted: 13 MiB for 512 latents of 8 bits.
            vmem_limit_bytes=VMEM if layout.ragged else min(VMEM, 2 * plan.nbytes + SPARE),
            disable_bounds_checks=not layout.lookups,  # the caller may give any page
        ),
        interpret=interpret,
        name="eqattn_fold",
    )
    ys = call(work, *tables, *grid.arrays(plan.given))
    ys = [
        # Heads that are visited together are one axis again first, so that XLA can drop the turn.
        from_heads(y.reshape(*layout.shape(kept[:-1]), *y.shape[-4:]))
        if len(x.shape) == 3
        else y.reshape(*layout.shape(kept), *y.shape[-2:])
        for x, y in zip(plan.outs, ys)
    ]
    if into is not None:
        return [ys[0], *[y[..., 0, :] for y in ys[1:]]]
    *matrices, vectors = ys
    return [*matrices, *[vectors[..., i, :] for i in range(vectors.shape[-2])]]
