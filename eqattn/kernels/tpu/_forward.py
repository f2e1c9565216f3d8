"""The softmax fold of the live pairs of a grid by one Pallas kernel.

A step computes the logits of one pair and, of the pair before it, the exponentials and their
product with the values. Neither waits for the other, so the matrix units work on one while the
vector units work on the other. The pipeline runs on from one row to the next.
"""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..._carry import gauge
from ..._compat import abstract
from ..._traverse import CORNER, Layout
from ._groups import spread_groups, weighted_groups
from ._inline import LOG2E, Program, Run
from ._product import product_of
from ._visit import VMEM
from ._work import abstract_blocks, FIRST, kind_of, LAST, matrix, nbytes_of, Operand, Steps


WINDOW = 512
SPARE = 8 * 2**20  # bytes for the compiler


def either(condition: Any, then: Callable, otherwise: Callable) -> None:
    lax.cond(condition, then, otherwise)


def sums_by_product() -> bool:
    """Whether the sum of the rounded probabilities is one more row of their product with values.
    Where the matrix units are 256 wide they have time for it, as the schedules show: a tenth of a
    step is saved. Elsewhere it would cost a twentieth.
    """
    try:
        return pltpu.get_tpu_info().generation >= 6
    except (ValueError, NotImplementedError):  # no TPU to ask about
        return False


def windows(keys: int, rows: int, masked: bool) -> list[tuple[slice, slice]]:
    """Parts of a block of logits, one after the other: the compiler's scheduler keeps the order in
    which it is given them, and spills half as many registers. A mask takes registers of its own.
    """

    def cut(n, m):
        m = m if n % m == 0 else n
        return [slice(i, i + m) for i in range(0, n, m)]

    sides = cut(keys, WINDOW), cut(rows, WINDOW // 2 if masked else WINDOW)
    return [(at, to) for to in sides[1] for at in sides[0]]


def skipped(layout: Layout, masked: bool) -> list[tuple[slice, slice]]:
    """The windows that the corner of a block consists of; none if it cuts through some."""
    keys, rows = layout.block
    parts = windows(keys, rows, masked)
    inside = [(a, b) for a, b in parts if 2 * a.start >= keys and b.stop <= layout.corner]
    size = sum((a.stop - a.start) * (b.stop - b.start) for a, b in inside)
    return inside if 2 * size == keys * layout.corner else []


def visit_fold(
    steps: dict[int, Any],
    layout: Layout,
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
    grid, work = Steps.of(table, layout, kept, max(steps), drain=1)
    order = grid.order
    full, keys_rows = max(steps), layout.block
    keys, rows = keys_rows
    n = len(steps[full].logits.in_avals)
    blocks = abstract_blocks(operands, layout.in_axes)
    logits = {c: Program(steps[c].evaluate_logits, blocks[:n]) for c in steps}
    values = {c: Program(steps[c].evaluate_values, blocks[n:]) for c in steps}

    def operand(i, programs, at):
        return Operand(operands[i], layout.in_axes[i],
                       matrix(blocks[i]) and programs[full].flipped[at])  # fmt: skip

    def used(programs, i):
        return any(p.reads[i] for p in programs.values())

    ahead = {i: operand(i, logits, i) for i in range(n) if used(logits, i)}
    values[full].flipped[0] = values[full].flipped[0] or matrix(blocks[n])  # the left of a product
    behind = {i: operand(n + i, values, i) for i in range(len(operands) - n) if used(values, i)}
    width, grouped = steps[full].width, steps[full].grouped
    kw = dict(steps[full].products)
    narrow = kw["operand_dtype"]
    weighted = len(logits[full].outs) == 2
    by_product = narrow == jnp.bfloat16 and not grouped and not weighted and sums_by_product()
    ones = 16 if by_product else 0
    shapes = [(width, rows), (1, rows), (1, rows)]
    # Finished denominators and maxima are one array: each array costs every step 30 to 50 cycles.
    out_blocks = shapes if into is not None else [(rows, width), (2, rows)]
    start = [Operand(x, kept, as_lies=x.ndim == len(kept) + 2) for x in into or () if x is not None]

    def kernel(work_ref, *refs):
        tables, refs = refs[: len(layout.lookups)], list(refs[len(layout.lookups) :])
        take = lambda keys: {i: refs.pop(0) for i in keys}
        ins, vals, olds, outs = (
            take(k) for k in (ahead, behind, range(len(start)), range(len(out_blocks)))
        )
        num, den, top, s_ref, most, dirty, *w_ref = refs
        ids = [pl.program_id(i) for i in range(len(order))]
        pair, before = (grid.pair(ids, work_ref, lag) for lag in (0, 1))
        running = ids[-1] > 0

        def begin():  # after the first step, which adds what nobody wrote
            num[...], den[...] = jnp.zeros_like(num), jnp.zeros_like(den)
            top[...] = jnp.full_like(top, -jnp.inf)

        def go_on():
            num[...], den[...], top[...] = olds[0][...], olds[1][...], olds[2][...] * LOG2E

        if start:
            pl.when(running & ((before & FIRST) != 0))(go_on)
        else:
            pl.when(ids[-1] == 1)(begin)

        read = ft.partial(grid.read, ids=ids, refs=(work_ref, *tables))
        load: list = [None] * n
        for i, x in ahead.items():
            load[i] = lambda i=i, x=x: read(x, ins[i])
        fetch: list = [None] * (len(operands) - n)
        for i, x in behind.items():
            fetch[i] = lambda i=i, x=x: read(x, vals[i], lag=1)
        lie_ahead = [i in ahead and ahead[i].flipped for i in range(n)]
        lie_behind = [i in behind and behind[i].flipped for i in range(len(fetch))]

        def poison(c):
            """Makes the logits NaN where a value that is not finite is seen."""
            raw = Run(values[full], fetch, lie_behind).value(values[full].outs[0], True)
            total = raw.astype(jnp.float32).sum(0)  # if it overflows, that costs only time

            @pl.when(jnp.isnan(jnp.sum(total * 0)))
            def _():
                dirty[0] = 1
                s = s_ref[...]
                bad = Run(values[c], fetch, lie_behind).value(values[c].outs[1])
                if bad.ndim == 1:
                    bad = jnp.broadcast_to(bad.reshape(1, keys), (8, keys)).T[:, :1]
                else:
                    bad = spread_groups(bad, rows)
                s_ref[...] = jnp.where(s == -jnp.inf, s, s + bad)

        def visit(c, weighed, skip=(), skip_before=()):
            """Logits of the pair, of class `c`; what the logits of the one before it add. Both
            without those in some windows.
            """
            ahead, behind = Run(logits[c], load, lie_ahead), Run(values[weighed], fetch, lie_behind)
            value = behind.narrow(values[weighed].outs[0], not grouped, narrow)
            was = top[...]
            now = jnp.maximum(was, most[...])
            origin = gauge(now)
            scale = jnp.exp2(was - origin)
            parts = windows(keys, rows, masked=c != full)
            for at, to in [(slice(0, keys), slice(0, rows))] if grouped else parts:
                new, weights, first = (), (), at.start == 0
                if (at, to) in skip:
                    s = jnp.full((at.stop - at.start, to.stop - to.start), -jnp.inf)
                else:
                    run = ahead.at((at, to))
                    s = run.times(logits[c].outs[0], LOG2E)
                    weights = [run.block(v) for v in logits[c].outs[1:]]
                if (at, to) not in skip_before:
                    p = jnp.exp2(s_ref[at, to] - origin[:, to])
                    q = p * w_ref[0][at, to] if weighted else p
                    q = q if narrow is None else q.astype(narrow)
                    new = terms(value, at, p, q)
                s_ref[at, to] = s
                if (at, to) not in skip:
                    highest = s.max(0, keepdims=True)
                    most[:, to] = highest if first else jnp.maximum(most[:, to], highest)
                    for ref, w in zip(w_ref, weights):
                        ref[at, to] = w
                for ref, term in new:
                    old = ref[:, to]
                    ref[:, to] = (old * scale[:, to] if first else old) + term
            top[...] = now

        def terms(value, at, p, q):
            if grouped:
                yield num, weighted_groups(value, q, kw["precision"])
            elif ones:
                left = jnp.concatenate([value[:, at], jnp.ones((ones, at.stop - at.start), narrow)])
                both = product_of(left, q, (1, 0), kw["precision"])
                yield num, both[:width]
                yield den, both[width : width + 1]
            else:
                yield num, product_of(value[:, at], q, (1, 0), kw["precision"])
            if not ones:
                yield den, p.sum(0, keepdims=True)

        some = min(steps)
        skip, skip_before = (skipped(layout, m) for m in (True, False))

        def unmasked():
            if skip and some != full:
                after = kind_of(before) == CORNER
                either(after, lambda: visit(full, full, (), skip_before), lambda: visit(full, full))
            else:
                visit(full, full)

        def masked():
            if skip:
                corner = kind_of(pair) == CORNER
                either(corner, lambda: visit(some, full, skip), lambda: visit(some, full))
            else:
                visit(some, full)

        def clean():
            if some == full:
                visit(full, full)
            else:
                either(kind_of(pair) == full, unmasked, masked)

        if len(values[some].outs) == 1:
            clean()
        else:
            dirty[0] = 0
            pl.when(kind_of(before) != full)(lambda: poison(some))
            either(dirty[0] == 0, clean, lambda: visit(some, some))

        @pl.when(running & ((before & LAST) != 0))
        def _():
            accs = [num[...], den[...], top[...] * (1 / LOG2E)]
            if into is None:
                y, *both = finish([accs[0].T if grouped else accs[0], accs[1][0], accs[2][0]])
                accs = [y, jnp.stack(both)]
            for ref, y in zip(outs.values(), accs):
                ref[...] = y.reshape(ref.shape)
            if not start:
                begin()  # of the next row, while values move out

    square = (keys, rows)
    scratch = [pltpu.VMEM(shape, jnp.float32) for shape in (*shapes, square, (1, rows))]
    scratch += [pltpu.SMEM((1,), jnp.int32)]
    scratch += [pltpu.VMEM(square, jnp.float32)] * weighted
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
                *[grid.place(x) for x in ahead.values()],
                *[grid.place(x, lag=1) for x in behind.values()],
                *[grid.spec(x.axes, x.block, 1) for x in start],
            ],
            out_specs=[grid.spec(kept, block, 1) for block in out_blocks],
            scratch_shapes=scratch,
        ),
        out_shape=[
            abstract(args[-1], (*grid.laid(kept), *block), jnp.float32) for block in out_blocks
        ],
        input_output_aliases={first + i: i for i in range(len(start))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * (len(order) - 1) + ("arbitrary",),
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
