"""Sums over the live pairs of a grid by one Pallas kernel: the backward of attention.

The pairs lie in a list that is sorted by the axis that the results keep, so that their
accumulators stay in vector memory from the first pair to the last. Results of all rows may stay
there meanwhile, if they fit: so one visit gives the gradients of queries, keys and values. Blocks
that are empty are not on the list: they cost nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ..._jax import abstract
from ..._sweep.grid import COL, EMPTY, FULL, GridLayout, PARTIAL, ROW
from ._chip import STAYING, VMEM
from ._grid import abstract_blocks, KernelGrid, KernelOperand, matrix, nbytes_of, vmem_shape
from ._program import Program
from ._work_list import FIRST, kind_of, LAST, row_of, work_list


def together(
    layout: GridLayout, start: Sequence, axes: Sequence[tuple[int, ...]], into: Sequence | None
) -> tuple[list[int], list[int]]:
    """The outputs that keep columns, and with them those that keep rows of the same batch elements:
    none, if these do not fit into vector memory.
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


def visit_sum(
    steps: dict[int, Callable],
    layout: GridLayout,
    args: Sequence,
    start: Sequence,
    kept: tuple[int, ...],
    group: list[int],
    stay: list[int],
    into: Sequence | None,
    interpret: Any,
) -> list:
    """The outputs `group`, all on the axes `kept`, and `stay`, all on the same batch axes and rows,
    of a sweep; its `steps` add to what is there.
    """
    table, operands = layout.without_corners(args)
    summed = tuple(a for a in layout.batch if a not in kept)
    lead = tuple(a for a in layout.batch if a in kept)
    order = (*lead, None, *summed)  # a result stays in place while all of its terms are added
    table_axes = list(layout.table_axes or (ROW, COL))[:-2]
    for a in set(table_axes) & set(summed):
        table = _alike(table, table_axes.index(a))
        table_axes.remove(a)
    work, length = work_list(table, layout, kept, max(steps))
    grid = KernelGrid(layout, order, tuple(table_axes), length)

    held = [abstract(args[-1], x.shape, x.dtype) for x in start]
    blocks, n = abstract_blocks(operands, layout.in_axes), len(held)

    wanted = [*group, *stay]
    place = {i: vmem_shape(held[i].shape) for i in wanted}
    whole = {i: (layout.grid[ROW], *place[i]) if i in stay else place[i] for i in wanted}
    lies = {i: lead if i in stay else kept for i in wanted}

    def program(step):
        return Program(lambda *xs: step(list(xs[:n]), list(xs[n:])), [*held, *blocks], wanted)

    programs = {c: program(step) for c, step in sorted(steps.items(), reverse=True)}
    main = next(iter(programs.values()))
    given = {
        i: KernelOperand(x, layout.in_axes[i], matrix(blocks[i]) and main.flipped[n + i])
        for i, x in enumerate(operands)
        if any(p.reads[n + i] for p in programs.values())
    }
    flipped = [False] * n + [i in given and given[i].flipped for i in range(len(operands))]
    old = {
        i: KernelOperand(x.reshape(*layout.shape(lies[i]), *whole[i]), lies[i], as_lies=True)
        for i in wanted
        if into is not None and (x := into[i]) is not None
    }

    def kernel(work_ref, *refs):
        refs = list(refs)
        take = lambda keys: {i: refs.pop(0) for i in keys}
        ins, olds, outs, sums = (take(keys) for keys in (given, old, wanted, group))
        ids = [pl.program_id(i) for i in range(len(order))]
        pair = grid.pair(ids, work_ref)
        first, last = (pair & FIRST) != 0, (pair & LAST) != 0
        begin = ids[len(lead)] == 0
        for a in summed:
            here = ids[order.index(a)]
            first, last = first & (here == 0), last & (here == layout.grid[a] - 1)
            begin = begin & (here == 0)

        def clear(refs, those):
            for i in those:
                refs[i][...] = olds[i][...] if i in old else jnp.zeros_like(refs[i])

        pl.when(first)(lambda: clear(sums, group))
        pl.when(begin)(lambda: clear(outs, stay))
        at = {i: (outs[i], row_of(pair)) if i in stay else (sums[i], ...) for i in wanted}

        load: list = [None] * (n + len(operands))
        for i, (ref, where) in at.items():
            load[i] = lambda i=i, ref=ref, where=where: ref[where].reshape(held[i].shape)
        for i in given:
            load[n + i] = lambda i=i: grid.read(given[i], ins[i], ids, (work_ref,))
        for c, program in programs.items():

            @pl.when(kind_of(pair) == c)
            def _(program=program):
                for i, y in zip(wanted, program(load, flipped)):
                    ref, where = at[i]
                    ref[where] = y.reshape(place[i])

        @pl.when(last)
        def _():
            for i in group:
                outs[i][...] = sums[i][...]

    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid.grid,
            in_specs=[
                *[grid.block_spec(x) for x in given.values()],
                *[grid.spec(x.axes, x.block) for x in old.values()],
            ],
            out_specs=[grid.spec(lies[i], whole[i]) for i in wanted],
            scratch_shapes=[pltpu.VMEM(place[i], held[i].dtype) for i in group],
        ),
        out_shape=[
            abstract(args[-1], (*layout.shape(lies[i]), *whole[i]), held[i].dtype) for i in wanted
        ],
        input_output_aliases={1 + len(given) + j: wanted.index(i) for j, i in enumerate(old)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=tuple("parallel" if a in kept else "arbitrary" for a in order),
            vmem_limit_bytes=VMEM,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="eqattn_sum",
    )
    ys = call(work, *[x.array for x in (*given.values(), *old.values())])
    axes = [(*lead, ROW) if i in stay else kept for i in wanted]
    return [y.reshape(*layout.shape(a), *held[i].shape) for i, a, y in zip(wanted, axes, ys)]


def _alike(table: Array, axis: int) -> Array:
    """The class of blocks over a whole axis: partial where they differ."""
    least, most = table.min(axis), table.max(axis)
    return jnp.where(least == FULL, FULL, jnp.where(most == EMPTY, EMPTY, PARTIAL))
