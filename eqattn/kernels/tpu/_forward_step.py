"""A step of the fold's kernel: the logits of one pair, and what the pair before it adds.

Both are computed in windows of the block of logits, in turn. Nothing of one waits for the other.
Logits and their maxima are in units of `log 2`: for a logit `s` the kernel holds `s * log2(e)`. So
`exp(s)` is a power of two, which the hardware computes.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from ..._carry import change_of_origin
from ..._sweep.grid import CORNER, EMPTY, FULL, GridLayout, PARTIAL
from .._program import LOG2E
from ._chip import sums_by_product, wide_units
from ._products import product_of, spread_groups, weighted_groups
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
from ._work_list import kind_of


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

    layout: GridLayout
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
    settle: Callable[[], None] | None
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

    def poison(self) -> None:
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
        if self.settle:
            self.settle()

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


def run(bodies: Sequence[FoldStepBody], pair: Any, before: Any, found: Any = None) -> None:
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

    The forms that skip a corner run only for pairs of class `CORNER`.

    **Arguments:**

    - `found`: a reference to whether some value is not finite, in scalar memory. A step with a
        partial pair looks through its values while it computes products, and the next step reads
        what it found. Without the reference, the next step looks first.
    """
    form, kind, last = bodies[0].form, kind_of(pair), kind_of(before)
    full, some, layout = form.full, form.some, form.layout
    everything, hidden = windows(layout, FULL), windows(layout, PARTIAL, half=True)
    some_hidden = with_known_parts(layout, PARTIAL, half=True)
    corner, after = with_known_parts(layout, CORNER, half=True), with_corner(layout, CORNER)
    alone = only_corners(layout)
    if alone:
        after = with_known_parts(layout, CORNER)
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

    def poison():
        for body in bodies:
            body.poison()

    def plain():
        visit(everything, everything, full)

    def masked():
        partial(some_hidden, beside(layout, some_hidden), full)

    def without_corner():
        partial(corner, beside_corner, full)

    def after_corner():
        visit(everything, after, full)

    def unclean():
        poison()
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
            lambda: lax.cond(kind == CORNER, without_corner, masked) if mixed else with_mask(),
        )

    if some == full:
        if form.poisons:
            pl.when(look() != 0)(poison)
        plain()
        return
    # The most frequent step is behind one branch, as each branch costs all steps 10 to 20
    # cycles in the schedules of `tpu-report`.
    dirty, frequent = jnp.int32(0), kind == full
    if skip:
        frequent &= last != CORNER
    if form.poisons:
        known = look if found is None else lambda: found[0]
        dirty = lax.cond(last == full, lambda: jnp.int32(0), known)
        frequent &= dirty == 0
    lax.cond(frequent, plain, lambda: lax.cond(dirty == 0, other, unclean))
