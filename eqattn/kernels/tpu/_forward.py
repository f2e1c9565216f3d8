"""The softmax fold of the live pairs of a grid by one Pallas kernel.

A step computes the logits of one pair and, of the pair before it, the exponentials and their
product with the values. Neither waits for the other, so the matrix units work on one while the
vector units work on the other. The pipeline runs on from one row to the next.
"""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..._jax import abstract
from ..._sweep.grid import EMPTY, GridLayout
from .._program import LOG2E
from ._chip import SPARE, VMEM
from ._forward_step import FoldSpec, FoldStepBody
from ._grid import abstract_blocks, KernelGrid, KernelOperand, matrix, nbytes_of
from ._program import Program
from ._work_list import FIRST, kind_of, LAST


def visit_fold(
    steps: dict[int, Any],
    layout: GridLayout,
    args: Sequence,
    kept: tuple[int, ...],
    finish: Callable,
    into: Sequence | None,
    interpret: Any,
) -> list:
    """Numerator, denominator and maximum: new ones, finished, or those of `into` gone on with.

    Inside, logits and maxima are those of powers of two.
    """
    table, operands = layout.split(args)
    grid, work = KernelGrid.of(table, layout, kept, max(steps), drain=1)
    keys, rows = layout.block
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

    def given_to(programs, start):
        """Those of the operands from `start` on that are read."""
        main, found = programs[max(programs)], {}
        for i, flipped in enumerate(main.flipped):
            if any(p.reads[i] for p in programs.values()):
                flipped = matrix(blocks[start + i]) and flipped
                found[i] = KernelOperand(operands[start + i], layout.in_axes[start + i], flipped)
        return found

    value = form.values[form.full]
    value.flipped[0] = value.flipped[0] or matrix(blocks[n])  # the left of a product
    ahead, behind = given_to(form.logits, 0), given_to(form.values, n)
    shapes = [(form.width, rows), (1, rows), (1, rows)]
    # Finished denominators and maxima are one array: each array costs every step 30 to 50 cycles.
    out_blocks = shapes if into is not None else [(rows, form.width), (2, rows)]
    start = [
        KernelOperand(x, kept, as_lies=x.ndim == len(kept) + 2) for x in into or () if x is not None
    ]

    def kernel(work_ref, *refs):
        tables, refs = refs[: len(layout.lookups)], list(refs[len(layout.lookups) :])
        take = lambda keys: {i: refs.pop(0) for i in keys}
        ins, vals, olds, outs = (
            take(k) for k in (ahead, behind, range(len(start)), range(len(out_blocks)))
        )
        num, den, top, s, most, *weights = refs
        ids = [pl.program_id(i) for i in range(len(grid.order))]
        pair, before = (grid.pair(ids, work_ref, lag) for lag in (0, 1))
        read = ft.partial(grid.read, ids=ids, refs=(work_ref, *tables))
        load: list = [None] * n
        for i, x in ahead.items():
            load[i] = ft.partial(read, x, ins[i])
        fetch: list = [None] * (len(operands) - n)
        for i, x in behind.items():
            fetch[i] = ft.partial(read, x, vals[i], lag=1)
        lie = [i in ahead and ahead[i].flipped for i in range(n)]
        lie_before = [i in behind and behind[i].flipped for i in range(len(fetch))]
        state = num, den, top, s, most, weights
        body = FoldStepBody(form, load, lie, fetch, lie_before, *state)
        running, ended = ids[-1] > 0, (before & LAST) != 0

        def go_on():
            num[...], den[...], top[...] = olds[0][...], olds[1][...], olds[2][...] * LOG2E

        if start:
            pl.when(running & ((before & FIRST) != 0))(go_on)
        body.run(pair, before)
        if form.hides:  # what it has added must not count, whatever its values are
            pl.when(running & (kind_of(before) == EMPTY))(go_on if start else body.clear)

        # What the first step adds, nobody wrote: it goes where the end of the first row will go.
        @pl.when(running & ended if start else ~running | ended)
        def _():
            accs = [num[...], den[...], top[...] * (1 / LOG2E)]
            if into is None:
                y, *both = finish([accs[0].T if form.grouped else accs[0], accs[1][0], accs[2][0]])
                accs = [y, jnp.stack(both)]
            for ref, y in zip(outs.values(), accs):
                ref[...] = y.reshape(ref.shape)
            if not start:
                body.clear()  # for the next row, while values move out

    square = (keys, rows)
    scratch = [pltpu.VMEM(shape, jnp.float32) for shape in (*shapes, square, (1, rows))]
    scratch += [pltpu.VMEM(square, jnp.float32)] * form.weighted
    given = [*ahead.values(), *behind.values(), *start]
    nbytes = sum(nbytes_of(x.shape, x.dtype) for x in scratch if len(x.shape) == 2)
    nbytes += sum(x.nbytes for x in given)
    nbytes += sum(2 * nbytes_of(block, jnp.dtype(jnp.float32)) for block in out_blocks)

    tables = [operands[i] for i in layout.lookups]
    first = 1 + len(tables) + len(ahead) + len(behind)
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(layout.lookups),
            grid=grid.grid,
            in_specs=[
                *[grid.block_spec(x) for x in ahead.values()],
                *[grid.block_spec(x, lag=1) for x in behind.values()],
                *[grid.spec(x.axes, x.block, 1) for x in start],
            ],
            out_specs=[grid.spec(kept, block, 1) for block in out_blocks],
            scratch_shapes=scratch,
        ),
        out_shape=[
            abstract(args[-1], (*grid.leading_sizes(kept), *block), jnp.float32)
            for block in out_blocks
        ],
        input_output_aliases={first + i: i for i in range(len(start))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * (len(grid.order) - 1) + ("arbitrary",),
            # What it does not need, XLA may give to the operands.
            vmem_limit_bytes=min(VMEM, 2 * nbytes + SPARE),
            disable_bounds_checks=not layout.lookups,  # whose pages are the caller's
        ),
        interpret=interpret,
        name="eqattn_fold",
    )
    num, *rest = call(work, *tables, *grid.arrays(given))
    num = num.reshape(*layout.shape(kept), *num.shape[-2:])
    both = [x.reshape(*layout.shape(kept), -1, rows) for x in rest]
    den, top = (
        (both[0][..., i, :] for i in (0, 1)) if into is None else (x[..., 0, :] for x in both)
    )
    return [num, den, top]
