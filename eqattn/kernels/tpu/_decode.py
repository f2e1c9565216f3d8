"""The softmax fold of few rows over caches by one Pallas kernel: memory sets its pace.

A step reads one block of a cache, all its heads at once. It computes the logits of the block, and
adds the block before it to the Carry of its row by the usual online softmax. Products, maxima and
exponentials of one block wait for each other, but not for those of the other block. The pipeline is
that of `_forward.py`: it runs on from one row to the next. The blocks of values and of results have
a `lag` of 1. The first step adds memory that was not written yet. The sum is cleared in the second
step, where the row begins.

`visit_decode` plans the kernel, a `_Decode`, whose `kernel` is one step on references.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ..._carry import Carry, change_of_origin
from ..._jax import abstract
from ..._sweep.grid import EMPTY, FEW_ROWS, GridLayout
from ._chip import cores, VMEM
from ._decode_copies import BlockCopies, copied
from ._decode_program import FlatHeadsProgram, FoldedRows, OwnColumns
from ._grid import KernelGrid, split_at, tables_of
from ._operands import abstract_blocks, KernelOperand
from ._products import product_of
from ._program import Program
from ._work_list import FIRST, in_parts, kind_of, LAST


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
    - `own`: which columns of logits are a row's own.
    - `width`: the size of the last axis of values.
    - `narrow`, `precision`: those of products, as in `FoldSpec`.
    """

    grid: KernelGrid
    logits: dict[int, FlatHeadsProgram]
    values: FlatHeadsProgram
    ahead: dict[int, KernelOperand]
    behind: dict[int, KernelOperand]
    own: OwnColumns
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
        """The shapes of the results for a row of blocks. Denominator and maximum lie side by side
        in one array, as each array costs every step some 40 cycles.
        """
        _, rows = self.grid.layout.block
        return [(rows, self.width), (rows, 2)]

    @property
    def scratch(self) -> list:
        """The Carry; the logits of this block and of the one before, with rows folded, and the
        latter's maxima; and what `copies` need.
        """
        shapes = *self.carry, (2, self.own.height, self.own.columns), (self.own.rows, 1)
        buffers = [x for copies in self.copies for x in copies.scratch]
        return [*[pltpu.VMEM(x, jnp.float32) for x in shapes], *buffers]

    @property
    def copies(self) -> list[BlockCopies]:
        """The copies that the kernel makes itself."""
        both = (self.ahead, 0), (self.behind, 1)
        return [c for operands, lag in both for c in BlockCopies.of(self.grid, operands, lag)]

    @property
    def depth(self) -> int:
        """How many axes the kernel's grid has."""
        return len(self.grid.order) + bool(self.grid.parts)

    @property
    def given(self) -> list[KernelOperand]:
        return [*self.ahead.values(), *self.behind.values(), *self.own.pattern()]

    def kernel(self, work_ref: Any, *refs: Any) -> None:
        """One step: adds a block of keys to the Carry of its row."""
        tables, others = split_at(refs, len(self.grid.layout.lookups))
        left = list(others)
        take = lambda keys: {i: left.pop(0) for i in keys}
        outs = range(len(self.outs))
        pattern = range(len(self.own.pattern()))
        ins, vals, pattern, outs = (take(k) for k in (self.ahead, self.behind, pattern, outs))
        num, den, top, logits, most, *buffers = left
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
        fetched: Any = {i: ft.partial(read, x, vals[i], lag=1) for i, x in self.behind.items()}
        for copies in self.copies:
            buffer, semaphores, *buffers = buffers
            given, readers = (vals, fetched) if copies.lag else (ins, load)
            here = copies.run(ids, (work_ref, *tables), given, buffer, semaphores)
            for i, reader in here.items():
                readers[i] = reader
        fetch = list(fetched.values())
        kind, empty = kind_of(pair), kind_of(pair) == EMPTY
        own = lax.rem(ids[-1], 2)
        both = logits.at[own], logits.at[1 - own]
        state = num, den, top, *both, most
        for c in self.logits:  # an empty pair takes the form of a full one
            chosen = (kind == c) | empty if c == max(self.logits) else kind == c
            pl.when(chosen)(lambda c=c: self.visit(c, load, fetch, pattern, state))

        @pl.when(empty)
        def _():
            for ref in (both[0], most):
                ref[...] = jnp.full(ref.shape, -jnp.inf, jnp.float32)

        @pl.when((before & LAST) != 0)
        def _():
            outs[0][...] = num[...]
            outs[1][:, :1], outs[1][:, 1:] = den[...], top[...]

    def visit(
        self, c: int, load: Sequence, fetch: Sequence, pattern: dict, state: Sequence
    ) -> None:
        """Adds the block before, and computes the logits of a block of class `c`.

        Both take the matrix units the longer part of a step. The sum comes first, so that it is
        added, and found to be finite, while logits are computed.

        **Arguments:**

        - `load`, `fetch`: functions that read the arguments of logits and of values.
        - `pattern`: the references of the pattern of `own`.
        - `state`: the references of numerator, denominator and maximum. The logits of this block
            and of the block before follow, and then the maxima. These belong to the block before
            until they are replaced.
        """
        num, den, top, logits, logits_before, most = state
        folded = FoldedRows(self.own, [ref[...] for ref in pattern.values()])
        parts = self.own.parts
        wide = parts[0].stop
        was = top[...]
        now = jnp.maximum(was, most[...])
        origin, scale = change_of_origin(now, was)
        origins = folded.spread(origin, wide)
        v = self.values.evaluate(fetch, folded).value(self.values.program.outs[0]).only

        def add(totals, ys, chosen):
            total = folded.unfold(ft.reduce(jnp.add, totals), 0.0).sum(1, keepdims=True)
            for ref, x in ((num, ft.reduce(jnp.add, ys)), (den, total)):
                ref[...] = jnp.where(chosen, ref[...] * scale + x, ref[...])

        totals, ys = [], []
        for part in parts:
            p = jnp.exp(logits_before[:, part] - origins)
            totals.append(folded.reduced(jnp.add, p))
            ys.append(self.product(folded, p, v.rows[part], v.scaled(part)))
        # This is a selection and no branch, as a branch could not run at the same time as the
        # logits.
        finite = ~jnp.isnan(jnp.sum(ft.reduce(jnp.add, ys) * 0))
        add(totals, ys, finite)
        highest = []
        for part in parts:
            new = self.logits[c].evaluate(load, folded, part).value(self.logits[c].program.outs[0])
            new = jnp.broadcast_to(new, (self.own.height, wide))
            logits[:, part] = new
            highest.append(folded.reduced(jnp.maximum, new))
        highest = folded.unfold(ft.reduce(jnp.maximum, highest), -jnp.inf)
        most[...] = highest.max(1, keepdims=True)

        @pl.when(~finite)
        def _():
            """A value that is not finite makes only those rows NaN that see it: the contract
            of `_sweep/nonfinite.py`.
            """
            totals, ys = [], []
            for part in parts:
                s, by = logits_before[:, part], v.scaled(part)
                values = v.rows[part].astype(jnp.float32)
                ones = jnp.ones((8, self.width), jnp.float32)
                bad = product_of(ones, (~jnp.isfinite(values)).astype(jnp.float32), (1, 1), None)
                bad = bad[:1] > 0
                if by is not None:
                    bad, by = bad | ~jnp.isfinite(by), jnp.where(jnp.isfinite(by), by, 0)
                p = jnp.where(bad, jnp.nan, jnp.exp(s - origins))
                p = jnp.where(s == -jnp.inf, 0, p)
                values = jnp.where(jnp.isfinite(values), values, 0)
                totals.append(folded.reduced(jnp.add, p))
                ys.append(self.product(folded, p, values, by))
            add(totals, ys, True)

        top[...] = now

    def product(self, folded: FoldedRows, p: Any, v: Any, by: Any) -> Array:
        """Folded probabilities times values, whose scales `by` multiply the probabilities."""
        dtype = jnp.float32 if self.narrow is None else self.narrow
        p = folded.unfold(p if by is None else p * by, 0.0)
        return product_of(p.astype(dtype), v.astype(dtype), (1, 0), self.precision)


def _plan(
    forms: dict, steps: dict[int, Any], layout: GridLayout, args: Sequence, kept: tuple[int, ...]
) -> tuple[_Decode, Any, Array | None]:
    """Plans the kernel of `visit_decode`. It returns the plan, the list of pairs, and the `seen` of
    `merged`.
    """
    table, operands = layout.split(args)
    grid, work = KernelGrid.of(table, layout, kept, max(steps), drain=1)
    seen, parts = None, cores()
    if parts > 1 and math.prod(grid.grid[:-1]) == 1:  # they could share nothing else
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
    own = OwnColumns(keys, groups, rows)
    plan = _Decode(grid, logits, values, ahead, behind, own, width, narrow, precision)
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
    # Pages are the caller's. A number that is none would be read beyond the pool. To look for it
    # in the kernel takes two thirds of the time in which a copy starts.
    tables = [jnp.clip(x, 0, n - 1) for x, n in zip(tables_of(layout, operands), layout.pages)]
    lead = () if seen is None else (grid.parts,)
    call = pl.pallas_call(
        plan.kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(tables),
            grid=grid.grid,
            in_specs=[
                *[_spec(grid, x, 0) for x in plan.ahead.values()],
                *[_spec(grid, x, 1) for x in plan.behind.values()],
                *[pl.BlockSpec(memory_space=pltpu.VMEM) for _ in plan.own.pattern()],
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
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="eqattn_decode",
    )
    num, both = call(work, *tables, *[x.array if interpret else keep_in_hbm(x) for x in given])
    den, top = both[..., 0], both[..., 1]
    return [num, den, top] if seen is None else merged(seen, num, den, top, layout.shape(kept))


def _spec(grid: KernelGrid, x: KernelOperand, lag: int) -> pl.BlockSpec:
    """Where the blocks of an operand lie, unless `BlockCopies` fetches them."""
    return pl.BlockSpec(memory_space=pl.ANY) if copied(x) else grid.block_spec(x, lag)


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
