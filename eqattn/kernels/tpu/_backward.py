"""Sums over the live pairs of a grid by one Pallas kernel: the backward of attention.

The list of pairs is sorted by the axis that the results keep. So their accumulators stay in vector
memory from the first pair of a row or column to its last. Results of all rows may stay there
meanwhile, if they fit: one visit then gives the gradients of queries, keys and values. Blocks that
are empty are not on the list, so they cost nothing.

`visit_sum` plans a kernel, a `_Sum`, whose `kernel` is one step on references to vector memory.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..._jax import abstract
from ..._sweep.grid import COL, EMPTY, FULL, GridLayout, PARTIAL, ROW
from ._backward_step import TurnedStep
from ._chip import STAYING, VMEM
from ._grid import KernelGrid
from ._operands import (
    abstract_blocks,
    heads_of_rows,
    KernelOperand,
    matrix,
    nbytes_of,
    pairs_in_place,
    PairsOperand,
    turns,
    vmem_shape,
)
from ._program import Program
from ._sum_result import SumResult
from ._work_list import FIRST, kind_of, LAST, row_of, work_list


def together(
    layout: GridLayout, start: Sequence, axes: Sequence[tuple[int, ...]], into: Sequence | None
) -> tuple[list[int], list[int]]:
    """The outputs that one kernel computes, and which of them stay in vector memory meanwhile.

    **Returns:** the indices of the outputs that keep columns, and of those that keep the rows of
    the same batch elements. Both are empty if the latter do not fit into vector memory, or if the
    layout wants two visits.
    """
    columns = next((a for a in axes if COL in a and ROW not in a), None)
    if columns is None or not layout.fused:
        return [], []
    group = [i for i, a in enumerate(axes) if a == columns]
    rows = (*[a for a in columns if a != COL], ROW)
    stay = [i for i, a in enumerate(axes) if a == rows]
    nbytes = sum(nbytes_of(vmem_shape(start[i].shape), start[i].dtype) for i in stay)
    copies = 2 if into is None else 4  # one is filled while the one before is written
    return (group, stay) if copies * layout.grid[ROW] * nbytes <= STAYING else ([], [])


@dataclasses.dataclass(frozen=True)
class _Sum:
    """The plan of one kernel.

    **Arguments:**

    - `grid`: the kernel's grid. Batch axes that are summed over are inside of the list, so that a
        result stays in place while all of its terms are added.
    - `lead`, `summed`: the batch axes that the results keep, and the others.
    - `group`, `stay`: the outputs whose accumulators are a kept block, and all rows.
    - `accumulators`: the number of the sweep's outputs.
    - `results`: those of the kernel, by their index in the sweep.
    - `programs`: the block function of each class.
    - `operands`: the number of the sweep's operands, read or not.
    - `given`: the operands that a program reads, by index.
    - `old`: the accumulators of an earlier visit to go on with, by the index of the output.
    - `turned`: the step that adds windows `[rows, keys]`, or None.
    """

    grid: KernelGrid
    lead: tuple[int, ...]
    summed: tuple[int, ...]
    group: list[int]
    stay: list[int]
    accumulators: int
    results: dict[int, SumResult]
    programs: dict[int, Program]
    operands: int
    given: dict[int, KernelOperand]
    old: dict[int, KernelOperand]
    turned: TurnedStep | None

    @property
    def apart(self) -> list[int]:
        """The results whose sums have additional memory."""
        return [i for i, x in self.results.items() if x.apart]

    def kernel(self, work_ref: Any, *refs: Any) -> None:
        """One step: adds what a pair contributes to the accumulators of its row and column."""
        left = list(refs)
        take = lambda keys: {i: left.pop(0) for i in keys}
        ins, olds, outs, sums, kept = (
            take(keys) for keys in (self.given, self.old, self.results, self.apart, self.kept)
        )
        sums = outs | sums
        order = self.grid.order
        ids = [pl.program_id(i) for i in range(len(order))]
        pair = self.grid.pair(ids, work_ref)
        first, last = (pair & FIRST) != 0, (pair & LAST) != 0
        at = ids[len(self.lead)]
        begin, end = at == 0, at == pl.num_programs(len(self.lead)) - 1
        for a in self.summed:
            here = ids[order.index(a)]
            first, last = first & (here == 0), last & (here == self.grid.layout.grid[a] - 1)
            begin = begin & (here == 0)
            end = end & (here == self.grid.layout.grid[a] - 1)

        def clear(those):
            for i in those:
                start = jnp.zeros_like(sums[i])
                if i in self.old:
                    start = olds[i][...].T if self.results[i].flipped else olds[i][...]
                sums[i][...] = start

        def write(those):
            for i in those:
                self.results[i].write(outs[i], lambda at: sums[i][at].astype(outs[i].dtype))

        @pl.when(first)
        def _():
            clear(self.group)
            for i, ref in kept.items():
                ref[...] = self.read(i, ids, work_ref, ins).T

        pl.when(begin)(lambda: clear(self.stay))
        if self.turned:
            self.add_turned(pair, ids, work_ref, ins, sums, kept, left)
        else:
            self.add(pair, ids, work_ref, ins, sums)
        pl.when(last)(lambda: write(self.group))
        rounded = [i for i in self.stay if i in self.apart]
        if rounded:
            pl.when(end)(lambda: write(rounded))

    @property
    def kept(self) -> list[int]:
        """The operands whose blocks change only from one group of the list to the next. Additional
        memory holds their transposes from the first pair of a group to its last.
        """
        if not self.turned:
            return []
        turned = self.turned.main.turned[self.accumulators :]
        kept = {*self.lead, ROW if self.results[self.group[0]].axes[-1] == ROW else COL}
        return [
            i
            for i, x in self.given.items()
            if turned[i] and len(x.shape) == 2 and kept.issuperset(x.axes)
        ]

    @property
    def scratch(self) -> list:
        """The additional memory: for sums that are `apart`, for operands that are `kept`, and for
        blocks that are transposed twice.
        """
        found = [pltpu.VMEM(self.results[i].total, self.results[i].aval.dtype) for i in self.apart]
        for i in self.kept:
            x = self.given[i]
            found.append(pltpu.VMEM(x.shape[::-1], x.array.dtype))
        return found + (self.turned.scratch if self.turned else [])

    def read(self, i: int, ids: Sequence, work_ref: Any, ins: dict, as_row: bool = False) -> Any:
        """The block of an operand."""
        return self.grid.read(self.given[i], ins[i], ids, (work_ref,), as_row=as_row)

    def add_turned(
        self,
        pair: Any,
        ids: Sequence,
        work_ref: Any,
        ins: dict,
        sums: dict,
        kept: dict,
        scratch: Sequence,
    ) -> None:
        """Adds what the program of the pair's class contributes, by windows `[rows, keys]`.

        **Arguments:** those of `add`, and

        - `kept`: the references of the operands that are `kept`.
        - `scratch`: those of blocks turned again.
        """
        step = self.turned
        assert step is not None
        n, order = self.accumulators, [*self.results]
        load: list = [None] * (n + self.operands)
        for i in self.given:
            load[n + i] = ft.partial(self.read, i, ids, work_ref, ins, as_row=True)
        for i, ref in kept.items():
            load[n + i] = lambda ref=ref: ref[...]
        flipped = [False] * n
        rows = {i for i, x in self.given.items() if x.is_column}
        rows |= {i for i, x in self.given.items() if x.flipped}
        flipped += [i in kept or i in rows for i in range(self.operands)]

        def add(j, part, y):
            i = order[j]
            if step.main.of_pairs:
                sums[i][part] += y
                return
            where = (row_of(pair), slice(None), part) if i in self.stay else (slice(None), part)
            sums[i][where] += y

        step.run(kind_of(pair), load, flipped, add, scratch)

    def add(self, pair: Any, ids: Sequence, work_ref: Any, ins: dict, sums: dict):
        """Replaces accumulators by what the program of the pair's class makes of them."""
        at = {i: (sums[i], row_of(pair) if i in self.stay else ...) for i in self.results}
        n = self.accumulators
        load: list = [None] * (n + self.operands)
        for i, (ref, where) in at.items():
            load[i] = lambda i=i, ref=ref, where=where: ref[where].reshape(
                self.results[i].aval.shape
            )
        for i in self.given:
            load[n + i] = ft.partial(self.read, i, ids, work_ref, ins)
        flipped = [False] * n
        flipped += [i in self.given and self.given[i].flipped for i in range(self.operands)]
        for c, program in self.programs.items():

            @pl.when(kind_of(pair) == c)
            def _(program=program):
                for i, y in zip(self.results, program(load, flipped)):
                    ref, where = at[i]
                    ref[where] = y.reshape(self.results[i].block)


def _plan(
    steps: dict[int, Callable],
    layout: GridLayout,
    args: Sequence,
    start: Sequence,
    kept: tuple[int, ...],
    group: list[int],
    stay: list[int],
    into: Sequence | None,
    dtypes: Sequence,
) -> tuple[_Sum, Any]:
    """The plan of the kernel of `visit_sum`, and its list of pairs."""
    dtypes = dtypes or [x.dtype for x in start]
    held = [abstract(args[-1], x.shape, x.dtype) for x in start]
    blocks = abstract_blocks(layout.split(args)[1], layout.in_axes)
    n, wanted = len(held), [*group, *stay]

    def program(step):
        return Program(lambda *xs: step(list(xs[:n]), list(xs[n:])), [*held, *blocks], wanted)

    programs = {c: program(step) for c, step in sorted(steps.items(), reverse=True)}
    windows = {i: pairs_in_place(held[i].shape, layout) for i in wanted}
    of_pairs = into is None and None not in windows.values()
    turned = TurnedStep.of(layout, programs, wanted, of_pairs)
    if not (turned and of_pairs):
        windows = {}
    summed = tuple(a for a in layout.batch if a not in kept)
    lead = tuple(a for a in layout.batch if a in kept)
    table_axes = list(layout.table_axes or (ROW, COL))[:-2]
    if turned is None or not turned.corner or set(table_axes) & set(summed):
        table, operands = layout.known_without_corners(args)
    else:
        table, operands = layout.split_known(args)
    for a in set(table_axes) & set(summed):
        table = _alike(table, table_axes.index(a))
        table_axes.remove(a)
    work, length = work_list(table, layout, kept, max(steps))
    grid = KernelGrid(layout, (*lead, None, *summed), tuple(table_axes), length)

    results = {i: SumResult(held[i], kept, kept, dtypes[i]) for i in group}
    all_rows = (layout.grid[ROW],)
    results |= {i: SumResult(held[i], (*lead, ROW), lead, dtypes[i], all_rows) for i in stay}

    for j, i in enumerate(wanted):
        last = into is None and i in stay and results[i].apart and turns(held[i])
        flipped = turned is not None and turned.main.sums[j].flipped
        heads = heads_of_rows(layout) if last else 1
        form: Any = dict(flipped=flipped, turned=last, heads=heads, window=windows.get(i))
        results[i] = dataclasses.replace(results[i], **form)
    main = next(iter(programs.values()))

    def flips(i):  # queries, which a step needs both ways, lie as projections write them
        rows = turns(blocks[i]) and ROW in layout.in_axes[i] and kept[-1] == COL
        if not turned:
            queries = rows and blocks[i].shape[1] == layout.block[1] != blocks[i].shape[0]
            return queries or (matrix(blocks[i]) and main.flipped[n + i])
        return rows and turned.main.turned[n + i]

    given = {}
    for i, x in enumerate(operands):
        if any(p.reads[n + i] for p in programs.values()):
            axes, flipped = layout.in_axes[i], flips(i)
            heads, pairs = _heads_of(blocks[i], axes, flipped, layout), None
            if not main.multiplied[n + i]:
                pairs = PairsOperand.of(x, axes, layout, turned is not None)
            given[i] = pairs or KernelOperand(x, axes, flipped, heads=heads)
    old = {
        i: KernelOperand(x.reshape(*layout.shape(y.lies), *y.whole), y.lies, as_lies=True)
        for i, y in results.items()
        if into is not None and (x := into[i]) is not None
    }
    shared = results, programs, len(operands), given, old, turned
    return _Sum(grid, lead, summed, group, stay, n, *shared), work


def _heads_of(block: Any, axes: tuple[int, ...], flipped: bool, layout: GridLayout) -> int:
    """How many heads an operand is given by. One that has the queries of rows as vectors is, unless
    these are as long as they are many.
    """
    rows, features = layout.block[1], block.shape[::-1] if flipped else block.shape
    vectors = matrix(block) and features[0] == rows != features[1]
    return heads_of_rows(layout) if vectors and axes[-1:] == (ROW,) else 1


def visit_sum(
    steps: dict[int, Callable],
    layout: GridLayout,
    args: Sequence,
    start: Sequence,
    kept: tuple[int, ...],
    group: list[int],
    stay: list[int],
    into: Sequence | None,
    dtypes: Sequence,
    interpret: Any,
) -> list:
    """Some outputs of a sweep, by one kernel.

    **Arguments:**

    - `steps`, `layout`, `args`, `start`, `into`, `dtypes`: as for `traverse`.
    - `kept`: the grid axes that the outputs `group` keep.
    - `group`, `stay`: the indices of the outputs, as `together` gives them. Those of `stay` keep
        rows, and the same batch axes as `group`.
    - `interpret`: whether to interpret the kernel.

    **Returns:** the outputs `group`, then `stay`.
    """
    plan, work = _plan(steps, layout, args, start, kept, group, stay, into, dtypes)
    grid, given, old, results = plan.grid, plan.given, plan.old, plan.results
    outs = [*results.values()]
    call = pl.pallas_call(
        plan.kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid.grid,
            in_specs=[
                *[grid.block_spec(x) for x in given.values()],
                *[grid.spec(x.axes, x.block) for x in old.values()],
            ],
            out_specs=[grid.spec_of_result(y) for y in outs],
            scratch_shapes=plan.scratch,
        ),
        out_shape=[abstract(args[-1], grid.sizes_of_result(y), y.dtype) for y in outs],
        input_output_aliases={1 + len(given) + j: [*results].index(i) for j, i in enumerate(old)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=tuple("parallel" if a in kept else "arbitrary" for a in grid.order),
            vmem_limit_bytes=VMEM,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="eqattn_sum_pairs" if any(y.window for y in outs) else "eqattn_sum",
    )
    ys = call(work, *grid.arrays([*given.values()]), *[x.array for x in old.values()])
    ys = [x.from_written(y, layout) for x, y in zip(outs, ys)]
    return [y.reshape(*layout.shape(x.axes), *x.aval.shape) for x, y in zip(outs, ys)]


def _alike(table: Any, axis: int) -> Any:
    """The class of a block for all elements of an axis at once: partial where they differ.

    A step that sums over a batch axis visits the same pair for each of its elements.
    """
    xp: Any = np if isinstance(table, np.ndarray) else jnp
    least, most = table.min(axis), table.max(axis)
    return xp.where(least == FULL, FULL, xp.where(most == EMPTY, EMPTY, PARTIAL))
