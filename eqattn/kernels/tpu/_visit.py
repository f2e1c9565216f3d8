"""Sums over the live pairs of a grid by one Pallas kernel: the backward of attention.

The pairs lie in a list that is sorted by the axis that the results keep, so that their
accumulators stay in vector memory from the first pair to the last. Blocks that are empty are not on
the list: they cost nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ..._compat import abstract
from ..._traverse import COL, EMPTY, FULL, Layout, PARTIAL, ROW
from ._inline import Program
from ._work import abstract_blocks, FIRST, kind_of, LAST, lies_as, matrix, Operand, Steps, work_list


def visit_sum(
    steps: dict[int, Callable],
    layout: Layout,
    args: Sequence,
    start: Sequence,
    kept: tuple[int, ...],
    group: list[int],
    into: Sequence | None,
    interpret: Any,
) -> list:
    """The outputs `group`, all on the axes `kept`, of a sweep; its `steps` add to what is there."""
    table, operands = layout.split(args)
    summed = tuple(a for a in layout.batch if a not in kept)
    order = tuple(a for a in layout.batch if a in kept)
    order = (*order, None, *summed)  # a result stays in place while all of its terms are added
    table_axes = list(layout.table_axes or (ROW, COL))[:-2]
    for a in set(table_axes) & set(summed):
        table = _alike(table, table_axes.index(a))
        table_axes.remove(a)
    work, length = work_list(table, layout, kept, max(steps))
    grid = Steps(layout, order, tuple(table_axes), length)

    held = [abstract(args[-1], x.shape, x.dtype) for x in start]
    blocks, n = abstract_blocks(operands, layout.in_axes), len(held)

    def program(step):
        return Program(lambda *xs: step(list(xs[:n]), list(xs[n:])), [*held, *blocks], group)

    programs = {c: program(step) for c, step in sorted(steps.items(), reverse=True)}
    main = next(iter(programs.values()))
    given = {
        i: Operand(x, layout.in_axes[i], matrix(blocks[i]) and main.flipped[n + i])
        for i, x in enumerate(operands)
        if any(p.reads[n + i] for p in programs.values())
    }
    flipped = [False] * n + [i in given and given[i].flipped for i in range(len(operands))]
    old = {i: Operand(into[i], kept) for i in group if into is not None and into[i] is not None}

    def kernel(work_ref, *refs):
        refs = list(refs)
        take = lambda keys: {i: refs.pop(0) for i in keys}
        ins, olds, outs, sums = (take(keys) for keys in (given, old, group, group))
        ids = [pl.program_id(i) for i in range(len(order))]
        pair = grid.pair(ids, work_ref)
        first, last = (pair & FIRST) != 0, (pair & LAST) != 0
        for a in summed:
            here = ids[order.index(a)]
            first, last = first & (here == 0), last & (here == layout.grid[a] - 1)

        @pl.when(first)
        def _():
            for i in group:
                sums[i][...] = olds[i][...] if i in old else jnp.zeros_like(sums[i])

        load: list = [None] * (n + len(operands))
        for i in group:
            load[i] = lambda i=i: sums[i][...].reshape(held[i].shape)
        for i in given:
            load[n + i] = lambda i=i: given[i].read(ins[i])
        for c, program in programs.items():

            @pl.when(kind_of(pair) == c)
            def _(program=program):
                for i, y in zip(group, program(load, flipped)):
                    sums[i][...] = y.reshape(sums[i].shape)

        @pl.when(last)
        def _():
            for i in group:
                outs[i][...] = sums[i][...]

    place = [lies_as(held[i].shape) for i in group]
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid.grid,
            in_specs=[grid.spec(x.axes, x.block) for x in (*given.values(), *old.values())],
            out_specs=[grid.spec(kept, block) for block in place],
            scratch_shapes=[pltpu.VMEM(b, held[i].dtype) for i, b in zip(group, place)],
        ),
        out_shape=[
            abstract(args[-1], (*layout.shape(kept), *b), held[i].dtype)
            for i, b in zip(group, place)
        ],
        input_output_aliases={1 + len(given) + j: group.index(i) for j, i in enumerate(old)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=tuple("parallel" if a in kept else "arbitrary" for a in order),
            vmem_limit_bytes=VMEM,
        ),
        interpret=interpret,
        name="eqattn_sum",
    )
    ys = call(work, *[x.array for x in (*given.values(), *old.values())])
    return [y.reshape(*layout.shape(kept), *held[i].shape) for i, y in zip(group, ys)]


def _alike(table: Array, axis: int) -> Array:
    """The class of blocks over a whole axis: partial where they differ."""
    least, most = table.min(axis), table.max(axis)
    return jnp.where(least == FULL, FULL, jnp.where(most == EMPTY, EMPTY, PARTIAL))


VMEM = 60 * 2**20  # of 64 MiB on a v7x, 95 on a v5p, 128 on others
