"""The softmax fold of few rows over caches by one Pallas kernel: memory sets its pace.

A step reads one block of a cache, all its heads at once. It computes the logits of the block, and
adds the block before it to the Carry of its row by the usual online softmax. Products, maxima and
exponentials of one block wait for each other, but not for those of the other block. The pipeline is
that of `_forward.py`: it runs on from one row to the next, and the blocks of values, and those of
the results, have a `lag` of 1. What the first step adds nobody wrote; it is cleared as its row
begins, in the second step.

`visit_decode` plans the kernel, a `_Decode`, whose `kernel` is one step on references.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ..._carry import Carry, change_of_origin
from ..._jax import abstract
from ..._sweep.grid import EMPTY, FEW_ROWS, GridLayout
from ._chip import cores, VMEM
from ._decode_program import FlatHeadsProgram
from ._grid import abstract_blocks, KernelGrid, KernelOperand, split_at
from ._products import product_of
from ._program import Program
from ._work_list import FIRST, in_parts, kind_of, LAST


COLUMNS = 1024
"""The columns of logits that are computed at one time.

The number was chosen by trial; `decode` in `python -m eqattn tpu-report` shows its effect.
"""


def decode_programs(steps: dict[int, Any], layout: GridLayout, args: Sequence) -> dict | None:
    """The logits of each class of block, and under `"values"` the values, in the flat form.

    **Returns:** None where the general forward kernel must run: for more than `FEW_ROWS` rows, and
    for block functions that have no flat form.
    """
    step, (keys, rows) = steps[max(steps)], layout.block
    if not step.grouped or rows > FEW_ROWS:
        return None
    _, operands = layout.split(args)
    blocks, n = abstract_blocks(operands, layout.in_axes), len(step.logits.in_avals)
    groups = step.values.out_avals[0].shape[1]
    forms = {}
    for c, s in steps.items():
        logits = FlatHeadsProgram(Program(s.evaluate_logits, blocks[:n]), keys, groups, rows)
        forms[c] = logits if len(logits.program.outs) == 1 else None
    forms["values"] = FlatHeadsProgram(Program(_first(step), blocks[n:]), keys, groups, rows)
    return forms if all(f is not None and f.possible for f in forms.values()) else None


def _first(step: Any) -> Callable:
    """The values of a block as stored: the kernel looks itself for numbers that are not finite."""
    return lambda *blocks: step.evaluate_values(*blocks)[:1]


@dataclasses.dataclass(frozen=True)
class _Decode:
    """The plan of the kernel.

    **Arguments:**

    - `grid`: the kernel's grid.
    - `logits`, `values`: the programs in the flat form; `logits` for each class of block.
    - `ahead`, `behind`: the operands that logits read, and those that values read, by index.
    - `belongs`: whether a column is of a row's own group, `[rows, keys * groups]`; none if there is
        one group.
    - `width`: the size of the last axis of values.
    - `narrow`, `precision`: those of products, as in `FoldSpec`.
    """

    grid: KernelGrid
    logits: dict[int, FlatHeadsProgram]
    values: FlatHeadsProgram
    ahead: dict[int, KernelOperand]
    behind: dict[int, KernelOperand]
    belongs: list[KernelOperand]
    width: int
    narrow: Any
    precision: Any

    @property
    def carry(self) -> list[tuple[int, int]]:
        """The shapes of numerator, denominator and maximum of a row of blocks."""
        _, rows = self.grid.layout.block
        return [(rows, self.width), (rows, 1), (rows, 1)]

    @property
    def outs(self) -> list[tuple[int, int]]:
        """The shapes of the results of a row of blocks: the numerator; denominator and maximum side
        by side, as each array costs every step some 40 cycles.
        """
        _, rows = self.grid.layout.block
        return [(rows, self.width), (rows, 2)]

    @property
    def scratch(self) -> list:
        """The Carry, the logits of this block and of the one before, and the latter's maxima."""
        _, rows = self.grid.layout.block
        shapes = *self.carry, (2, rows, self.columns), (rows, 1)
        return [pltpu.VMEM(x, jnp.float32) for x in shapes]

    @property
    def columns(self) -> int:
        """How many columns the logits of a block have: one for each key of each group."""
        return self.grid.layout.block[0] * self.values.sizes[1]

    @property
    def parts(self) -> list[slice]:
        """The columns that are computed at one time. The compiler keeps the order in which they
        are, so that one part is exponentiated while another is multiplied.
        """
        size = COLUMNS if self.columns % COLUMNS == 0 else self.columns
        return [slice(i, i + size) for i in range(0, self.columns, size)]

    @property
    def depth(self) -> int:
        """How many axes the kernel's grid has."""
        return len(self.grid.order) + bool(self.grid.parts)

    @property
    def given(self) -> list[KernelOperand]:
        return [*self.ahead.values(), *self.behind.values(), *self.belongs]

    def kernel(self, work_ref: Any, *refs: Any) -> None:
        """One step: adds a block of keys to the Carry of its row."""
        tables, others = split_at(refs, len(self.grid.layout.lookups))
        left = list(others)
        take = lambda keys: {i: left.pop(0) for i in keys}
        outs = range(len(self.outs))
        ins, vals, mine, outs = (take(k) for k in (self.ahead, self.behind, self.belongs, outs))
        num, den, top, logits, most = left
        ids = [pl.program_id(i) for i in range(self.depth)]
        pair, before = (self.grid.pair(ids, work_ref, lag) for lag in (0, 1))

        @pl.when((before & FIRST) != 0)
        def _():
            num[...], den[...] = jnp.zeros_like(num), jnp.zeros_like(den)
            top[...] = jnp.full_like(top, -jnp.inf)

        load: list = [None] * len(self.logits[max(self.logits)].roles)
        read = ft.partial(self.grid.read, ids=ids, refs=(work_ref, *tables))
        for i, x in self.ahead.items():
            load[i] = ft.partial(read, x, ins[i])
        fetch = [ft.partial(read, x, vals[i], lag=1) for i, x in self.behind.items()]
        kind, empty = kind_of(pair), kind_of(pair) == EMPTY
        own = lax.rem(ids[-1], 2)
        both = logits.at[own], logits.at[1 - own]
        state = num, den, top, *both, most
        for c in self.logits:  # an empty pair takes the form of a full one
            chosen = (kind == c) | empty if c == max(self.logits) else kind == c
            pl.when(chosen)(lambda c=c: self.visit(c, load, fetch, mine, state))

        @pl.when(empty)
        def _():
            for ref in (both[0], most):
                ref[...] = jnp.full(ref.shape, -jnp.inf, jnp.float32)

        @pl.when((before & LAST) != 0)
        def _():
            outs[0][...] = num[...]
            outs[1][:, :1], outs[1][:, 1:] = den[...], top[...]

    def visit(self, c: int, load: Sequence, fetch: Sequence, mine: dict, state: Sequence) -> None:
        """Adds the block before, and computes the logits of a block of class `c`.

        Both take the matrix units the longer part of a step. What the end of the step waits for,
        whether the sum is finite, is computed first.

        **Arguments:**

        - `load`, `fetch`: functions that read the arguments of logits and of values.
        - `mine`: the references of `belongs`.
        - `state`: the references of numerator, denominator and maximum; of the logits of this block
            and of the one before; and of the maxima, of the block before until they are replaced.
        """
        num, den, top, logits, logits_before, most = state
        was = top[...]
        now = jnp.maximum(was, most[...])
        origin, scale = change_of_origin(now, was)
        v = self.values.evaluate(fetch).value(self.values.program.outs[0])

        def add(total, y):
            num[...] = num[...] * scale + y
            den[...] = den[...] * scale + total

        totals, sums = [], []
        for part in self.parts:
            p = jnp.exp(logits_before[:, part] - origin)
            by = None if v.scale is None else v.scale[:, part]
            totals.append(p.sum(1, keepdims=True))
            sums.append(self.product(p, v.rows[part], by))
        total, y = sum(totals[1:], totals[0]), sum(sums[1:], sums[0])
        finite = ~jnp.isnan(jnp.sum(y * 0))
        highest = []
        for part in self.parts:
            new = self.logits[c].evaluate(load, part).value(self.logits[c].program.outs[0])
            new = jnp.broadcast_to(new, (new.shape[0], part.stop - part.start))
            for ref in mine.values():
                new = jnp.where(ref[:, part] > 0, new, -jnp.inf)
            logits[:, part] = jnp.broadcast_to(new, (logits.shape[0], new.shape[1]))
            highest.append(new.max(1, keepdims=True))
        most[...] = jnp.broadcast_to(ft.reduce(jnp.maximum, highest), most.shape)
        pl.when(finite)(lambda: add(total, y))

        @pl.when(~finite)
        def _():
            """A value that is not finite makes only those rows NaN that see it: the contract
            of `_sweep/nonfinite.py`.
            """
            s = logits_before[...]
            p = jnp.exp(s - origin)
            wide = v.rows.astype(jnp.float32)
            ones = jnp.ones((8, self.width), jnp.float32)
            bad = product_of(ones, (~jnp.isfinite(wide)).astype(jnp.float32), (1, 1), None)
            bad, by = bad[:1] > 0, v.scale
            if by is not None:
                bad, by = bad | ~jnp.isfinite(by), jnp.where(jnp.isfinite(by), by, 0)
            q = jnp.where(s == -jnp.inf, 0, jnp.where(bad, jnp.nan, p))
            y = self.product(q, jnp.where(jnp.isfinite(wide), wide, 0), by)
            add(q.sum(1, keepdims=True), y)

        top[...] = now

    def product(self, p: Any, v: Any, by: Any) -> Array:
        """Probabilities times values, whose scales `by` multiply the probabilities."""
        dtype = jnp.float32 if self.narrow is None else self.narrow
        p = p if by is None else p * by
        return product_of(p.astype(dtype), v.astype(dtype), (1, 0), self.precision)


def _plan(
    forms: dict, steps: dict[int, Any], layout: GridLayout, args: Sequence, kept: tuple[int, ...]
) -> tuple[_Decode, Any, Array | None]:
    """The plan of the kernel of `visit_decode`, its list of pairs, and the `seen` of `merged`."""
    table, operands = layout.split(args)
    grid, work = KernelGrid.of(table, layout, kept, max(steps), drain=1)
    seen, parts = None, cores()
    if parts > 1 and math.prod(grid.grid[:-1]) == 1:  # nothing else that they could share
        work, length, seen = in_parts(work, grid.length, parts, math.prod(layout.shape(kept)))
        grid = dataclasses.replace(grid, length=length, parts=parts)
    step, (keys, rows) = steps[max(steps)], layout.block
    groups, width = step.values.out_avals[0].shape[1:]
    n, values = len(step.logits.in_avals), forms["values"]
    narrow, precision = (dict(step.products)[k] for k in ("operand_dtype", "precision"))

    def operand(form, i, at):
        return form.operand(i, operands[at], layout.in_axes[at])

    logits = {c: forms[c] for c in steps}
    read = [i for i in range(n) if any(form.program.reads[i] for form in logits.values())]
    ahead = {i: operand(logits[max(steps)], i, i) for i in read}
    behind = {i: operand(values, i, n + i) for i in range(len(operands) - n)}
    row, column = np.arange(rows)[:, None], np.arange(keys * groups)[None]
    own = (row // (rows // groups) == column % groups).astype(np.float32)
    belongs = [KernelOperand(own, ())] if groups > 1 else []
    plan = _Decode(grid, logits, values, ahead, behind, belongs, width, narrow, precision)
    return plan, work, seen


def visit_decode(
    forms: dict,
    steps: dict[int, Any],
    layout: GridLayout,
    args: Sequence,
    kept: tuple[int, ...],
    interpret: Any,
) -> list:
    """Numerator, denominator and maximum of a fold of few rows.

    **Arguments:**

    - `forms`: what `decode_programs` returns.
    - `steps`, `layout`, `args`: as for `traverse`.
    - `kept`: the grid axes that the results keep.
    - `interpret`: whether to interpret the kernel.
    """
    plan, work, seen = _plan(forms, steps, layout, args, kept)
    grid, given = plan.grid, plan.given
    _, operands = layout.split(args)
    tables = [operands[i] for i in layout.lookups]
    lead = () if seen is None else (grid.parts,)
    call = pl.pallas_call(
        plan.kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(tables),
            grid=grid.grid,
            in_specs=[
                *[grid.block_spec(x) for x in plan.ahead.values()],
                *[grid.block_spec(x, 1) for x in plan.behind.values()],
                *[pl.BlockSpec(memory_space=pltpu.VMEM) for _ in plan.belongs],
            ],
            out_specs=[grid.spec(kept, shape, 1, by_part=True) for shape in plan.outs],
            scratch_shapes=plan.scratch,
        ),
        out_shape=[
            abstract(args[-1], (*lead, *layout.shape(kept), *x), jnp.float32) for x in plan.outs
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * (plan.depth - 1) + ("arbitrary",),
            vmem_limit_bytes=VMEM,
            disable_bounds_checks=not layout.lookups,  # whose pages are the caller's
        ),
        interpret=interpret,
        name="eqattn_decode",
    )
    num, both = call(work, *tables, *[x.array if interpret else keep_in_hbm(x) for x in given])
    den, top = both[..., 0], both[..., 1]
    return [num, den, top] if seen is None else merged(seen, num, den, top, layout.shape(kept))


def keep_in_hbm(x: KernelOperand) -> Array:
    """The array of an operand, which stays in main memory if it is a cache.

    Else XLA would copy the whole cache to vector memory where that has room, however few of its
    blocks are live.
    """
    if not x.cached:
        return x.array
    return pltpu.with_memory_space_constraint(x.array, pltpu.MemorySpace.HBM)


def merged(seen: Array, num: Array, den: Array, top: Array, shape: tuple[int, ...]) -> list:
    """The Carries of all parts of a list, merged into one.

    **Arguments:**

    - `seen`: whether a part has a pair of a row, `[parts, rows of the list]`. If it has none, its
        Carry of that row was never written, and may hold anything.
    - `num`, `den`, `top`: numerators, denominators and maxima, `[parts, *shape, rows, ...]`.
    - `shape`: the sizes of the axes that the results keep.
    """
    seen = seen.reshape(*seen.shape[:1], *shape, 1)
    parts = [
        Carry(
            jnp.where(here[..., None], num[i], 0),
            jnp.where(here, den[i], 0),
            jnp.where(here, top[i], -jnp.inf),
        )
        for i, here in enumerate(seen)
    ]
    whole = ft.reduce(Carry.merge, parts)
    return [whole.numerator, whole.denominator, whole.max_so_far]
