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

A step of the fold's kernel: the logits of one pair, and what the pair before it adds.

Both are computed in windows of the block of logits, in turn. Nothing of one waits for the other.
Logits and their maxima are in units of `log 2`: for a logit `s` the kernel holds `s * log2(e)`. So
`exp(s)` is a power of two, which the hardware computes.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ..._carry import change_of_origin
from ..._jax import abstract
from ..._sweep.grid import BlockGrid, COL, DIAGONAL, EMPTY, FULL, HEAD, PARTIAL, ROW
from ..._sweep.steps import Finish
from ..._sweep.tokens import from_heads
from .._program import LOG2E
from ._chip import most_heads_per_step, SPARE, sums_by_product, VMEM, wide_units
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
from ._products import LANES, product_of, spread_groups, weighted_groups
from ._program import Evaluation, Program
from ._windows import (
    beside,
    in_turn,
    only_corners,
    Part,
    size_of,
    windows,
    with_corner,
    with_known_parts,
)
from ._work_list import FIRST, kind_of, LAST


ONES = 16
"""The rows of ones that sum probabilities in a product.

One row would do, but 16 rows of bfloat16 fill a register, so that none holds values and ones.
"""


@dataclasses.dataclass(frozen=True)
class FoldSpec:
    """What a kernel computes in a block.

    **Arguments:**

    - `layout`: the grid of the visit.
    - `logits`, `values`: a program for each class of block.
    - `width`: the size of the last axis of values.
    - `grouped`: whether a block holds different values for several groups of rows,
        `[keys, groups, width]`.
    - `narrow`: the dtype in which products read their operands; None leaves these as they are.
    - `precision`: the precision of the products, as for `lax.dot_general`.
    """

    layout: BlockGrid
    logits: dict[int, Program]
    values: dict[int, Program]
    width: int
    grouped: bool
    narrow: Any
    precision: Any

    @property
    def full(self) -> int:
        """The class of blocks all of whose pairs are visible."""
        return max(self.logits)

    @property
    def some(self) -> int:
        """The class of blocks of which only some pairs are visible; `full` if there are none."""
        return min(self.logits)

    @property
    def hides(self) -> bool:
        """Whether what an `EMPTY` pair adds must be taken back.

        A row without a live pair has an `EMPTY` one on the list. Where all live blocks are full, no
        form of the step evaluates a mask, so the `EMPTY` pair counts as if it were visible. Where
        the table hides more than the mask does, the mask may show some of it, too.
        """
        masks = self.some != self.full or self.poisons
        return self.layout.live_pairs > 0 or (not masks and self.layout.table_axes is not None)

    @property
    def poisons(self) -> bool:
        """Whether values that are not finite are kept from the rows that do not see them."""
        return len(self.values[self.some].outs) > 1

    @property
    def weighted(self) -> bool:
        """Whether probabilities are multiplied by dropout weights."""
        return len(self.logits[self.full].outs) == 2

    @property
    def sums_by_product(self) -> bool:
        """Whether the product with the values also sums the probabilities.

        It sums what the product reads: probabilities rounded to bfloat16, without dropout weights.
        """
        narrow = self.narrow == jnp.bfloat16
        return narrow and not self.grouped and not self.weighted and sums_by_product()


@dataclasses.dataclass(frozen=True)
class FoldStepBody:
    """A step of the kernel, on references to vector memory.

    **Arguments:**

    - `form`: what the kernel computes.
    - `load`, `lie`: how the blocks of this pair's logits are read, as for `Evaluation`.
    - `fetch`, `lie_before`: how the blocks of the values of the pair before are read.
    - `num`, `den`, `top`: numerator `[width, rows]`, denominator and maximum `[1, rows]` of the
        Carry of the row.
    - `s`, `most`: the logits `[keys, rows]` of the pair before, and their maxima `[1, rows]`.
    - `weights`: the dropout weights of the pair before, `[keys, rows]`: one reference or none.
    - `aside`: a function that does a part of the further work of a step, for which no unit waits.
        It gets the index of the part, and how many parts there are.
    - `given`: reads the values of this pair as they lie, where a step has them to look through.
    """

    form: FoldSpec
    load: Sequence[Callable | None]
    lie: Sequence[bool]
    fetch: Sequence[Callable | None]
    lie_before: Sequence[bool]
    num: Any
    den: Any
    top: Any
    s: Any
    most: Any
    weights: Sequence[Any]
    aside: Callable[[int, int], None] | None
    prune_selects: Callable[[], None] | None
    given: Callable[[], Array] | None

    def clear(self) -> None:
        """Sets the Carry of the row to the empty one."""
        self.num[...], self.den[...] = jnp.zeros_like(self.num), jnp.zeros_like(self.den)
        self.top[...] = jnp.full_like(self.top, -jnp.inf)

    def total(self) -> Array:
        """A sum of the values of this pair if they are `given`, else of the pair before. It is
        finite only if all of them are. An overflow does no harm, but takes time.
        """
        values, early = self.form.values, self.given is not None
        full, some = values[self.form.full], values[self.form.some]
        blocks = ([self.given], [False]) if early else (self.fetch, self.lie_before)
        if len(full.outs) > 1:
            return Evaluation(some, *blocks).value(some.outs[1])
        total = Evaluation(full, *blocks).value(full.outs[0], not early)
        # Where units add narrow numbers, a register of them is added at once.
        while wide_units() and total.ndim == 2 and total.shape[0] % 32 == 0:
            half = total.shape[0] // 2
            total = total[:half] + total[half:]
        return total.astype(jnp.float32).sum(0)

    def nan_flag(self) -> None:
        """Makes the logits of the pair before NaN where a value that is not finite is visible.

        A hidden value must not reach a row, and 0 * inf is NaN. So the values of such a pair are
        replaced by finite ones, and the rows that see them become NaN by their logits.
        """
        # This keeps the contract of `_sweep/nonfinite.py`.
        (keys, rows), some = self.form.layout.block, self.form.values[self.form.some]
        s = self.s[...]
        bad = Evaluation(some, self.fetch, self.lie_before).value(some.outs[1])
        if bad.ndim == 1:
            bad = jnp.broadcast_to(bad.reshape(1, keys), (8, keys)).T[:, :1]
        else:
            bad = spread_groups(bad, rows)
        self.s[...] = jnp.where(s == -jnp.inf, s, s + bad)

    def visit(self, ahead: Sequence[Part], behind: Sequence[Part], weighed: int) -> None:
        """Computes the logits of the pair, and adds what the pair before it contributes.

        In each window, `s` and `weights` still hold those of the pair before when they are read,
        and those of the pair itself afterwards. The maxima `most` of the pair before are known, so
        the sums are brought to the new maximum in the first window of each row; see
        `change_of_origin`.

        **Arguments:**

        - `ahead`, `behind`: the windows of the pair, and those of the pair before.
        - `weighed`: the class whose program gives the values of the pair before.
        """
        form = self.form
        programs = {FULL: form.logits[form.full], PARTIAL: form.logits[form.some]}
        runs = {c: Evaluation(x, self.load, self.lie) for c, x in programs.items()}
        values = form.values[weighed]
        value = Evaluation(values, self.fetch, self.lie_before)
        value = value.narrow(values.outs[0], not form.grouped, form.narrow)
        was = self.top[...]
        now = jnp.maximum(was, self.most[...])
        origin, scale = change_of_origin(now, was, jnp.exp2)
        if form.grouped:
            at, to = (slice(0, n) for n in form.layout.block)
            ahead, behind = [Part(at, to, ahead[0].kind)], [Part(at, to, FULL)]
        count = 2 ** (len(ahead).bit_length() - 1)
        # The first window of a row may be left out. Then another one is where its sums begin. A row
        # whose windows are all left out saw nothing in this pair, and its maximum is what it was.
        begins: dict[int, int] = {}
        for x in behind:
            if x.kind != EMPTY:
                begins[x.to.start] = min(x.at.start, begins.get(x.to.start, x.at.start))
        for n, (part, earlier) in enumerate(in_turn(ahead, behind)):
            if self.aside and n < count:
                self.aside(n, count)
            at, to, new, terms = part.at, part.to, None, []
            if part.kind != EMPTY:
                outs = programs[part.kind].outs
                run = runs[part.kind].at((at, to))
                new = run.times(outs[0], LOG2E), *[run.block(v) for v in outs[1:]]
            for x in earlier:
                p = jnp.exp2(self.s[x.at, x.to] - origin[:, x.to])
                q = p * self.weights[0][x.at, x.to] if form.weighted else p
                q = q if form.narrow is None else q.astype(form.narrow)
                terms += [(x, *y) for y in self.terms(value, x.at, p, q)]
            self.keep(part, new)
            for x, ref, term in terms:
                old = ref[:, x.to]
                begun = x.at.start != begins[x.to.start]
                ref[:, x.to] = (old if begun else old * scale[:, x.to]) + term
        self.top[...] = now
        if self.prune_selects:
            self.prune_selects()

    def keep(self, part: Part, new: Sequence[Any] | None) -> None:
        """Keeps the logits of a window, and its dropout weights, for the next step."""
        at, to = part.at, part.to
        if new is None:
            self.s[at, to] = jnp.full((size_of(at), size_of(to)), -jnp.inf, jnp.float32)
            for ref in self.weights:
                ref[at, to] = jnp.zeros((size_of(at), size_of(to)), jnp.float32)
            if at.start == 0:
                self.most[:, to] = jnp.full((1, size_of(to)), -jnp.inf, jnp.float32)
            return
        s, *weights = new
        self.s[at, to] = s
        for ref, w in zip(self.weights, weights):
            ref[at, to] = w
        highest = s.max(0, keepdims=True)
        first = at.start == 0
        self.most[:, to] = highest if first else jnp.maximum(self.most[:, to], highest)

    def terms(self, value: Any, at: slice, p: Any, q: Any) -> Iterator[tuple[Any, Any]]:
        """The references of the Carry, each with what a window adds to it.

        **Arguments:**

        - `value`: the values of the block, transposed unless they are grouped.
        - `at`: the keys of the window.
        - `p`: the probabilities `[keys, rows]`.
        - `q`: the same with dropout weights, in the dtype that the product reads.
        """
        form = self.form
        if form.grouped:
            yield self.num, weighted_groups(value, q, form.precision)
        elif form.sums_by_product:
            ones = jnp.ones((ONES, at.stop - at.start), form.narrow)
            both = product_of(jnp.concatenate([value[:, at], ones]), q, (1, 0), form.precision)
            yield self.num, both[: form.width]
            yield self.den, both[form.width : form.width + 1]
        else:
            yield self.num, product_of(value[:, at], q, (1, 0), form.precision)
        if not form.sums_by_product:
            yield self.den, p.sum(0, keepdims=True)


def run(bodies: Sequence[FoldStepBody], pair: Any, before: Any, found: Any = None) -> None:  # noqa: C901 (one branch for each form of the step)
    """Runs the form of a step that suits the pair and the one before it, both packed.

    The heads of `bodies` have the same pairs, and nothing of one waits for another.

    The logits of a partial pair need the mask, those of a full one do not. When its hidden logits
    are -inf, a partial pair adds to the Carry like a full one, unless some of its values are not
    finite. So the forms are

    | form             | logits of the pair        | what the pair before adds     |
    |---|---|---|
    | `plain`          | full                      | all windows                   |
    | `masked`         | partial                   | all windows                   |
    | `without_corner` | partial, without a corner | all windows                   |
    | `after_corner`   | full                      | all windows but a corner      |
    | `unclean`        | partial                   | values cleaned, all windows   |

    The forms that skip a corner run only for pairs of class `DIAGONAL`.

    **Arguments:**

    - `found`: a reference to whether some value is not finite, in scalar memory. A step with a
        partial pair looks through its values while it computes products, and the next step reads
        what it found. Without the reference, the next step looks first.
    """
    form, kind, last = bodies[0].form, kind_of(pair), kind_of(before)
    full, some, layout = form.full, form.some, form.layout
    everything, hidden = windows(layout, FULL), windows(layout, PARTIAL, half=True)
    some_hidden = with_known_parts(layout, PARTIAL, half=True)
    corner, after = with_known_parts(layout, DIAGONAL, half=True), with_corner(layout, DIAGONAL)
    alone = only_corners(layout)
    if alone:
        after = with_known_parts(layout, DIAGONAL)
    beside_corner = beside(layout, corner)
    skip = all(any(x.kind == EMPTY for x in parts) for parts in (corner, after))

    def look() -> Array:
        """Returns 1 if some value is not finite, else 0."""
        total = ft.reduce(jnp.add, [body.total() for body in bodies])
        return jnp.isnan(jnp.sum(total * 0)).astype(jnp.int32)

    def visit(*how):
        for body in bodies:
            body.visit(*how)

    def partial(*how):
        visit(*how)
        if found is not None:
            found[0] = look()

    def nan_flag():
        for body in bodies:
            body.nan_flag()

    def plain():
        visit(everything, everything, full)

    def masked():
        partial(some_hidden, beside(layout, some_hidden), full)

    def without_corner():
        partial(corner, beside_corner, full)

    def after_corner():
        visit(everything, after, full)

    def unclean():
        nan_flag()
        if not alone:
            partial(hidden, beside(layout, hidden), some)
            return
        # Windows of the pair before are those of the other forms, so that its bits are, too.
        after_corners = ft.partial(partial, hidden, after, some)
        lax.cond(kind == full, after_corners, ft.partial(partial, hidden, beside_corner, some))

    with_mask = without_corner if alone else masked
    mixed = not alone and corner != some_hidden

    def other():
        lax.cond(
            kind == full,
            after_corner if skip else plain,
            lambda: lax.cond(kind == DIAGONAL, without_corner, masked) if mixed else with_mask(),
        )

    if some == full:
        if form.poisons:
            pl.when(look() != 0)(nan_flag)
        plain()
        return
    # The most frequent step is behind one branch, as each branch costs all steps 10 to 20
    # cycles in the schedules of `tpu-report`.
    dirty, frequent = jnp.int32(0), kind == full
    if skip:
        frequent &= last != DIAGONAL
    if form.poisons:
        known = look if found is None else lambda: found[0]
        dirty = lax.cond(last == full, lambda: jnp.int32(0), known)
        frequent &= dirty == 0
    lax.cond(frequent, plain, lambda: lax.cond(dirty == 0, other, unclean))


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
        return [pltpu.VMEM((self.grid.heads_per_step, *shape), dtype) for shape, dtype in shapes]

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
        nbytes += self.grid.heads_per_step * sum(x.nbytes for x in self.given)
        return nbytes + self.grid.heads_per_step * sum(
            2 * nbytes_of(x.shape, x.dtype) for x in self.outs
        )

    def kernel(self, work_ref: Any, *refs: Any) -> None:  # noqa: C901 (one branch for each form of the step)
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
        for head in range(grid.heads_per_step):
            num, den, top, s, most, *others = [ref.at[head] for ref in scratch]
            weights, transposed = split_at(others, form.weighted)
            of_head = ft.partial(read, head=head)
            load, lie = _readers(form.logits[form.full], self.ahead, ins, of_head)
            fetch, lie_before = _readers(
                form.values[form.full], self.behind, vals, ft.partial(of_head, lag=1)
            )
            aside = given = prune_selects = None
            if self.early:
                there, here = (transposed[0].at[i] for i in range(2))
                aside = ft.partial(_turn, here, self.behind[0], vals[0], of_head)
                prune_selects = ft.partial(_copy, here, there)
                fetch[0], lie_before[0] = (lambda there=there: there[...]), True
                if flags:
                    given = ft.partial(of_head, self.behind[0], vals[0])
            state = num, den, top, s, most, weights
            bodies.append(
                FoldStepBody(
                    form, load, lie, fetch, lie_before, *state, aside, prune_selects, given
                )
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
                    place = ref.at[head] if grid.heads_per_step > 1 else ref
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
    layout: BlockGrid,
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
    heads_per_step = _heads_per_step(form, kept) if into is None else 1
    grid, work = KernelGrid.of(
        table, layout, kept, max(steps), drain=1, heads_per_step=heads_per_step
    )

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


def _heads_per_step(form: FoldSpec, kept: tuple[int, ...]) -> int:
    """How many heads a step visits, which must have the same pairs. With dropout it is one, as its
    instructions are many.
    """
    layout = form.layout
    together = HEAD in kept and not layout.ragged and not layout.pages and not form.weighted
    if not together or HEAD in (layout.table_axes or ()):
        return 1
    heads = most_heads_per_step(math.prod(layout.block), form.width)
    return 1 if layout.grid[HEAD] % heads else heads


def visit_fold(
    steps: dict[int, Any],
    layout: BlockGrid,
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
