"""A step of the fold's kernel: the logits of one pair, and what the pair before it adds.

Both are computed in windows of the block of logits, in turn. Nothing of one waits for the other.
Logits and maxima are those of powers of two.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..._carry import change_of_origin
from ..._sweep.grid import CORNER, GridLayout
from .._program import LOG2E
from ._chip import sums_by_product
from ._products import product_of, spread_groups, weighted_groups
from ._program import Evaluation, Program
from ._work_list import kind_of


WINDOW = 512
ONES = 16  # rows that one row of a product takes


def windows(keys: int, rows: int, masked: bool) -> list[tuple[slice, slice]]:
    """Parts of a block of logits, one after the other: the compiler's scheduler keeps the order in
    which it is given them, and spills half as many registers. A mask takes registers of its own.
    """

    def cut(n, m):
        m = m if n % m == 0 else n
        return [slice(i, i + m) for i in range(0, n, m)]

    sides = cut(keys, WINDOW), cut(rows, WINDOW // 2 if masked else WINDOW)
    return [(at, to) for to in sides[1] for at in sides[0]]


def skipped(layout: GridLayout, masked: bool) -> list[tuple[slice, slice]]:
    """The windows that the corner of a block consists of; none if it cuts through some."""
    keys, rows = layout.block
    parts = windows(keys, rows, masked)
    inside = [(a, b) for a, b in parts if 2 * a.start >= keys and b.stop <= layout.corner]
    size = sum((a.stop - a.start) * (b.stop - b.start) for a, b in inside)
    return inside if 2 * size == keys * layout.corner else []


@dataclasses.dataclass(frozen=True)
class FoldSpec:
    """What a kernel computes in a block.

    **Arguments:**

    - `logits`, `values`: per class of block. Values have the width `width`; `grouped`, those of
        several groups of rows.
    - `narrow`, `precision`: of the products; None for operands as they are.
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
        return max(self.logits)

    @property
    def some(self) -> int:
        """The class of blocks of which only some pairs are visible, if there are such."""
        return min(self.logits)

    @property
    def hides(self) -> bool:
        """Whether a row that sees nothing has a pair of blocks that no mask hides: all others are
        full.
        """
        return self.some == self.full and not self.poisons and self.layout.table_axes is not None

    @property
    def poisons(self) -> bool:
        """Whether values that are not finite are kept from the rows that do not see them."""
        return len(self.values[self.some].outs) > 1

    @property
    def weighted(self) -> bool:
        """By dropout."""
        return len(self.logits[self.full].outs) == 2

    @property
    def sums_by_product(self) -> bool:
        narrow = self.narrow == jnp.bfloat16
        return narrow and not self.grouped and not self.weighted and sums_by_product()


@dataclasses.dataclass(frozen=True)
class FoldStepBody:
    """A step, on references.

    **Arguments:**

    - `load`, `lie`: how the blocks of the pair's logits are read, as for `Run`; `fetch`,
        `lie_before`: those of the values of the one before.
    - `num`, `den`, `top`: of the Carry of the row, transposed. `s`, `most`: the logits of the last
        pair and their maxima. `weights`: of dropout, none or one.
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

    def clear(self) -> None:
        self.num[...], self.den[...] = jnp.zeros_like(self.num), jnp.zeros_like(self.den)
        self.top[...] = jnp.full_like(self.top, -jnp.inf)

    def run(self, pair: Any, before: Any) -> None:
        """The form of a step that suits two packed pairs."""
        form, kind, last = self.form, kind_of(pair), kind_of(before)
        full, some, visit = form.full, form.some, self.visit
        skip, skip_before = (skipped(form.layout, masked) for masked in (True, False))

        def plain():
            visit(full, full)

        def masked():
            visit(some, full)

        def without_corner():
            visit(some, full, skip)

        def after_corner():
            visit(full, full, (), skip_before)

        def other():
            lax.cond(
                kind == full,
                after_corner if skip else plain,
                lambda: lax.cond(kind == CORNER, without_corner, masked) if skip else masked(),
            )

        if some == full:
            if form.poisons:
                self.poison()
            plain()
            return
        # The most frequent step is behind one branch: each costs all steps 10 to 20 cycles.
        dirty, frequent = jnp.int32(0), kind == full
        if skip:
            frequent &= last != CORNER
        if form.poisons:
            dirty = lax.cond(last == full, lambda: jnp.int32(0), self.poison)
            frequent &= dirty == 0
        lax.cond(frequent, plain, lambda: lax.cond(dirty == 0, other, lambda: visit(some, some)))

    def poison(self) -> Any:
        """Makes the logits NaN where a value that is not finite is seen. Returns 1 if there is one,
        else 0.
        """
        values, (keys, rows) = self.form.values, self.form.layout.block
        full, some = values[self.form.full], values[self.form.some]
        if len(full.outs) == 1:
            total = Evaluation(full, self.fetch, self.lie_before).value(full.outs[0], True)
            total = total.astype(jnp.float32).sum(0)  # if it overflows, that costs only time
        else:
            total = Evaluation(some, self.fetch, self.lie_before).value(some.outs[1])
        dirty = jnp.isnan(jnp.sum(total * 0))

        @pl.when(dirty)
        def _():
            s = self.s[...]
            bad = Evaluation(some, self.fetch, self.lie_before).value(some.outs[1])
            if bad.ndim == 1:
                bad = jnp.broadcast_to(bad.reshape(1, keys), (8, keys)).T[:, :1]
            else:
                bad = spread_groups(bad, rows)
            self.s[...] = jnp.where(s == -jnp.inf, s, s + bad)

        return dirty.astype(jnp.int32)

    def visit(self, c: int, weighed: int, skip: Sequence = (), skip_before: Sequence = ()) -> None:
        """Logits of the pair, of class `c`, and what those of the one before it add. Both without
        those in some windows.
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
        for at, to in [(slice(0, keys), slice(0, rows))] if form.grouped else parts:
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
        """What probabilities `p`, as the product reads them `q`, add to the Carry."""
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
