"""A step of the fold's kernel: the logits of one pair, and what the pair before it adds.

Both are computed in windows of the block of logits, in turn. Nothing of one waits for the other.
Logits and their maxima are in units of `log 2`: for a logit `s` the kernel holds `s * log2(e)`, so
that `exp(s)` is a power of two, as the hardware computes them.
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
from ..._sweep.grid import CORNER, GridLayout
from .._program import LOG2E
from ._chip import sums_by_product, wide_units
from ._products import product_of, spread_groups, weighted_groups
from ._program import Evaluation, Program
from ._work_list import kind_of


WINDOW = 512
"""The side of a window of logits: the larger, the fewer steps; the smaller, the fewer spills.

Windows halved the spilled registers, which brought full pairs from 42.4 to 50.0% useful cycles on
v6e and from 90.6 to 92.3% on v5e (D = 128, other steps of that change included). Masked windows are
half as wide, as a mask takes registers of its own; that was chosen by trial. `forward` in
`python -m eqattn tpu-report` measures both.
"""


ONES = 16
"""The rows of ones that sum probabilities in a product.

One row would do, but 16 rows of bfloat16 fill a register, so that none holds values and ones.
"""


def windows(keys: int, rows: int, masked: bool) -> list[tuple[slice, slice]]:
    """The windows of a block of logits `[keys, rows]`, in the order in which they are computed.

    The compiler's scheduler keeps that order. A side that `WINDOW` does not divide is not cut.
    """

    def cut(n, m):
        m = m if n % m == 0 else n
        return [slice(i, i + m) for i in range(0, n, m)]

    sides = cut(keys, WINDOW), cut(rows, WINDOW // 2 if masked else WINDOW)
    return [(at, to) for to in sides[1] for at in sides[0]]


def skipped(layout: GridLayout, masked: bool) -> list[tuple[slice, slice]]:
    """The windows that make up the corner of a block."""
    return of_corner(layout, windows(*layout.block, masked))


def of_corner(
    layout: GridLayout, parts: Sequence[tuple[slice, slice]]
) -> list[tuple[slice, slice]]:
    """Those of the parts of a block that make up its corner: the later half of its keys, and the
    first `corner` rows.

    There are none if the corner cuts through a part.
    """
    keys, _ = layout.block
    inside = [(a, b) for a, b in parts if 2 * a.start >= keys and b.stop <= layout.corner]
    size = sum((a.stop - a.start) * (b.stop - b.start) for a, b in inside)
    return inside if 2 * size == keys * layout.corner else []


@dataclasses.dataclass(frozen=True)
class FoldSpec:
    """What a kernel computes in a block.

    **Arguments:**

    - `layout`: the grid of the visit.
    - `logits`, `values`: a program for each class of block.
    - `width`: the size of the last axis of values.
    - `grouped`: whether a block of values holds those of several groups of rows, `[keys, groups,
        width]`.
    - `narrow`: the dtype in which products read their operands; None leaves these as they are.
    - `precision`: that of the products, as for `lax.dot_general`.
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
        form of the step evaluates a mask, so the `EMPTY` pair counts as if it were visible.
        """
        return self.some == self.full and not self.poisons and self.layout.table_axes is not None

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
    - `aside`: does a part of what a step does besides, for which no unit waits. It is given which,
        and of how many.
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
    given: Callable[[], Array] | None

    def clear(self) -> None:
        """Sets the Carry of the row to the empty one."""
        self.num[...], self.den[...] = jnp.zeros_like(self.num), jnp.zeros_like(self.den)
        self.top[...] = jnp.full_like(self.top, -jnp.inf)

    def total(self) -> Array:
        """A sum of the values of this pair if they are `given`, else of the pair before. It is
        finite only if all of them are. If it overflows, that costs only time.
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

    def visit(self, c: int, weighed: int, skip: Sequence = (), skip_before: Sequence = ()) -> None:
        """Computes the logits of the pair, and adds what the pair before it contributes.

        In each window, `s` and `weights` still hold those of the pair before when they are read,
        and those of the pair itself afterwards. The maxima `most` of the pair before are known, so
        the sums are brought to the new maximum in the first window of each row; see
        `change_of_origin`.

        **Arguments:**

        - `c`: the class whose program computes the logits.
        - `weighed`: the class whose program gives the values of the pair before.
        - `skip`: the windows of the pair in which nothing is visible.
        - `skip_before`: the windows of the pair before in which nothing is visible.
        """
        form, (keys, rows) = self.form, self.form.layout.block
        logits, values = form.logits[c], form.values[weighed]
        ahead = Evaluation(logits, self.load, self.lie)
        behind = Evaluation(values, self.fetch, self.lie_before)
        value = behind.narrow(values.outs[0], not form.grouped, form.narrow)
        was = self.top[...]
        now = jnp.maximum(was, self.most[...])
        origin, scale = change_of_origin(now, was, jnp.exp2)
        parts = windows(keys, rows, masked=c != form.full)
        parts = [(slice(0, keys), slice(0, rows))] if form.grouped else parts
        for n, (at, to) in enumerate(parts):
            if self.aside:
                self.aside(n, len(parts))
            new, weights, first = (), (), at.start == 0
            if (at, to) in skip:
                s = jnp.full((at.stop - at.start, to.stop - to.start), -jnp.inf, jnp.float32)
                weights = [jnp.zeros_like(s)] * len(self.weights)
            else:
                run = ahead.at((at, to))
                s = run.times(logits.outs[0], LOG2E)
                weights = [run.block(v) for v in logits.outs[1:]]
            if (at, to) not in skip_before:
                p = jnp.exp2(self.s[at, to] - origin[:, to])
                q = p * self.weights[0][at, to] if form.weighted else p
                q = q if form.narrow is None else q.astype(form.narrow)
                new = self.terms(value, at, p, q)
            self.s[at, to] = s
            for ref, w in zip(self.weights, weights):
                ref[at, to] = w
            if (at, to) not in skip:
                highest = s.max(0, keepdims=True)
                self.most[:, to] = highest if first else jnp.maximum(self.most[:, to], highest)
            for ref, term in new:
                old = ref[:, to]
                ref[:, to] = (old * scale[:, to] if first else old) + term
        self.top[...] = now

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

    The logits of a partial pair need the mask, those of a full one do not. Once its logits are
    -inf where hidden, a partial pair adds to the Carry like a full one, unless some of its
    values are not finite. So the forms are

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
        partial pair looks through its values beside its products, and the next step reads what it
        found. Without the reference, the next step looks first.
    """
    form, kind, last = bodies[0].form, kind_of(pair), kind_of(before)
    full, some = form.full, form.some
    skip, skip_before = (skipped(form.layout, masked) for masked in (True, False))

    def look() -> Array:
        """Returns 1 if some value is not finite, else 0."""
        total = ft.reduce(jnp.add, [body.total() for body in bodies])
        return jnp.isnan(jnp.sum(total * 0)).astype(jnp.int32)

    def visit(*how):
        for body in bodies:
            body.visit(*how)

    def partial(*how):
        if found is not None:
            found[0] = look()
        visit(*how)

    def poison():
        for body in bodies:
            body.poison()

    def plain():
        visit(full, full)

    def masked():
        partial(some, full)

    def without_corner():
        partial(some, full, skip)

    def after_corner():
        visit(full, full, (), skip_before)

    def unclean():
        poison()
        partial(some, some)

    def other():
        lax.cond(
            kind == full,
            after_corner if skip else plain,
            lambda: lax.cond(kind == CORNER, without_corner, masked) if skip else masked(),
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
