"""A step of the backward's kernel for wide matrix units, which has logits as `[rows, keys]`.

A product streams its left operand through the matrix units, which hold a part of the right operand.
Units that are 256 wide hold 256 of its columns, so sums with `D = 128` columns leave half of them
empty. So all sums are computed as `[D, keys]` or `[D, rows]`, with the head dim in the left
operand. The products of a step for `D = 128` and 1024 x 1024 pairs then stream 14 * 1024 rows, not
20 * 1024:

    s  = q k^T      [rows, keys]       1024 rows for each 256 keys     4 * 1024
    dp = do v^T     [rows, keys]                                       4 * 1024
    dv^T += do^T p  [D, keys]          128 rows for each 256 keys      2 * 1024
    dk^T += q^T ds  [D, keys]          and each 256 of the rows        2 * 1024
    dq^T += k^T ds^T  [D, rows]                                        2 * 1024

`ds^T` comes from units for transposes, which have nothing else to do. The blocks are cut into
windows. Three stages run at the same time: `s` and `dp` of the next window, `p`, `ds`, `dv` and
`dk` of this one, and `dq` of the window before. So nothing waits for another stage.

`TurnedSums` finds these sums in a program; `_turned.py` evaluates the blocks that they add up.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ..._jax import Literal, primitives
from ..._pairs import POINTWISE
from ..._sweep.grid import COL, CORNER, GridLayout, PARTIAL, ROW
from ..._sweep.products import dot_p
from ._chip import wide_units
from ._products import LANES, product_of
from ._program import Program
from ._turned import TurnedEvaluation
from ._windows import of_corner, size_of, Window


WINDOW = 256, 512
"""The keys and the rows of a window of logits.

The sizes 256 x 256, 256 x 512, 512 x 512 and 256 x 1024 were compared in a prototype. A full pair
with D = 128 took 4460, 4218, 4483 and 4507 cycles on v6e. With the rows as the inner loop it took
4434. Masked windows have half as many rows, as a mask takes registers, too: that brought 6105
cycles to 5710. `backward` in `python tests/measure tpu-report` measures it again.
"""


_ADD = lax.add_p, primitives.add_jaxvals_p


def windows(keys: int, rows: int, masked: bool) -> list[Window]:
    """The windows of a block, in the order in which they are computed.

    A side that `WINDOW` does not divide is not cut.
    """

    def cut(n, m):
        m = m if n % m == 0 else n
        return [slice(i, i + m) for i in range(0, n, m)]

    sides = cut(keys, WINDOW[0]), cut(rows, WINDOW[1] // 2 if masked else WINDOW[1])
    return [(at, to) for to in sides[1] for at in sides[0]]


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A result that adds products with blocks of logits to an accumulator.

    **Arguments:**

    - `rest`: what is added.
    - `kept`: `COL` or `ROW`, whose gradient it is; None for a gradient of pairs.
    - `flipped`: whether it is `[keys, D]` or `[rows, D]` in the program; a step adds the transpose.
    - `dots`: the equations of the products, and for each the index of the block in its operands.
    """

    rest: Any
    kept: int | None
    flipped: bool
    dots: dict[Any, tuple[Any, int]]


class TurnedSums:
    """The sums of a program, in a form in which windows `[rows, keys]` add to them.

    Its attribute `possible` says whether all results have that form. What is added to such a result
    consists of products with blocks that depend on logits, with selections and factors around them.
    Or it is such a block itself, where the results are `of_pairs`. `turned` says of each argument
    whether a product would transpose it as a whole.

    **Arguments:**

    - `program`: the block function, whose result `i` adds to the argument `wanted[i]`.
    - `wanted`: the indices of its results.
    - `of_pairs`: whether its results have a number for each pair.
    """

    def __init__(self, program: Program, wanted: Sequence[int], of_pairs: bool = False):
        self.program, self.of_pairs = program, of_pairs
        jaxpr = program.jaxpr
        self.blocks: set = set()
        self.firsts = []
        for eqn in jaxpr.eqns:
            of_blocks = any(v in self.blocks for v in eqn.invars if not isinstance(v, Literal))
            needed = any(v in program.needed for v in eqn.outvars)
            if needed and eqn.primitive is dot_p and not of_blocks:
                self.firsts.append(eqn)
            if of_blocks or eqn.primitive is dot_p:
                self.blocks |= set(eqn.outvars)
        found = [self._sum(v, jaxpr.invars[i]) for v, i in zip(program.outs, wanted)]
        self.possible = bool(self.firsts) and None not in found
        self.sums: list[_Sum] = [x for x in found if x is not None]
        wishes: dict = {}
        for eqn in self.firsts:
            for v, c, turned in zip(eqn.invars, eqn.params["contract"], (1, 0)):
                wishes.setdefault(program.root(v), []).append(c == turned)
        self.turned = [all(wishes.get(v, [False])) for v in jaxpr.invars]

    def _depends(self, v: Any) -> bool:
        return not isinstance(v, Literal) and v in self.blocks

    def _sum(self, out: Any, accumulator: Any) -> _Sum | None:
        eqn = self.program.maker(out)
        if eqn is None or eqn.primitive not in _ADD:
            return None
        if accumulator not in eqn.invars or eqn.invars[0] is eqn.invars[1]:
            return None
        (rest,) = [v for v in eqn.invars if v is not accumulator]
        if self.of_pairs:
            own = self._depends(rest) and self._dots(rest) is None
            return _Sum(rest, None, True, {}) if own else None
        if (dots := self._dots(rest)) is None:
            return None
        sides = {(ROW if c == 0 else COL, at == 0) for at, c in dots.values()}
        if len(sides) != 1:
            return None
        ((kept, flipped),) = sides
        # Rows lie as `[D, rows]` in a program, so their sums need no transpose.
        if min(out.aval.shape) == 1 or (flipped and kept == ROW):
            return None
        made = {v: (self.program.maker(v), at) for v, (at, _) in dots.items()}
        return _Sum(rest, kept, flipped, made)

    def _dots(self, v: Any) -> dict | None:
        """The products that `v` is a linear function of, element by element, by their result.

        **Returns:** for each the index of the block in its operands, and which of the block's axes
        it sums over; None where `v` has another form.
        """
        eqn = self.program.maker(v)
        if eqn is None or not self._depends(v):
            return None
        of_blocks = [self._depends(x) for x in eqn.invars]
        if eqn.primitive is dot_p:
            if sum(of_blocks) != 1:
                return None
            at = of_blocks.index(True)
            return {v: (at, eqn.params["contract"][at])}
        linear = eqn.primitive in (lax.neg_p, lax.convert_element_type_p)
        linear |= eqn.primitive is lax.mul_p and sum(of_blocks) == 1
        linear |= eqn.primitive in _ADD and all(of_blocks)
        if eqn.primitive is lax.select_n_p and not of_blocks[0]:
            linear = all(b or self._zero(x) for b, x in zip(of_blocks[1:], eqn.invars[1:]))
        if not linear:
            return None
        parts = [self._dots(x) for x, b in zip(eqn.invars, of_blocks) if b]
        if any(p is None for p in parts):
            return None
        return {k: x for p in parts if p is not None for k, x in p.items()}

    def _zero(self, v: Any) -> bool:
        eqn = self.program.maker(v)
        if eqn is not None and eqn.primitive is lax.broadcast_in_dim_p:
            v = eqn.invars[0]
        return isinstance(v, Literal) and not np.any(v.val)

    @property
    def turned_again(self) -> list[Any]:
        """The blocks that sums over keys read transposed, each with the dtype of that."""
        found = {}
        for x in self.sums:
            for eqn, at in x.dots.values() if x.kept == ROW else ():
                found[eqn.invars[at], eqn.params["operand_dtype"] or jnp.float32] = None
        return [*found]

    def add(
        self,
        run: TurnedEvaluation,
        parts: Sequence[Window],
        add: Callable[[int, Any, Array], None],
        scratch: Sequence[Sequence[Any]],
    ) -> None:
        """Adds what some windows contribute.

        **Arguments:**

        - `run`: the evaluation of a pair.
        - `parts`: the windows.
        - `add`: a function of the index of a sum, a slice of its keys or rows, or the slices of
            both, and what is added there.
        - `scratch`: for each of `turned_again` two references, for this window and the one before.
        """
        ahead = self._begun(run, parts[0])
        late: Callable[[], None] = lambda: None
        for n, window in enumerate(parts):
            here = ahead
            if n + 1 < len(parts):
                ahead = self._begun(run, parts[n + 1])
            late()
            turned = {}
            for (v, dtype), refs in zip(self.turned_again, scratch):
                turned[v, dtype] = ref = refs[n % 2].at[: size_of(window[0]), : size_of(window[1])]
                ref[...] = here.block(v).astype(dtype).T
            for i, x in enumerate(self.sums if self.of_pairs else ()):
                add(i, window[::-1], here.block(x.rest))
            self._add(COL, here, window, turned, add)
            late = ft.partial(self._add, ROW, here, window, turned, add)
        late()

    def _add(
        self, kept: int, run: TurnedEvaluation, window: Window, turned: dict, add: Callable
    ) -> None:
        """Adds what a window contributes to the sums that are `kept` for keys, or for rows."""
        for i, x in enumerate(self.sums):
            if x.kept == kept:
                add(i, window[kept == ROW], self._added(run, x, x.rest, window, turned))

    def _begun(self, run: TurnedEvaluation, window: Window) -> TurnedEvaluation:
        """The evaluation of a window, with its products of keys and queries."""
        here = run.at(window)
        for eqn in self.firsts:
            here.block(eqn.outvars[0])
        return here

    def _added(self, run: TurnedEvaluation, x: _Sum, v: Any, window: Window, turned: dict) -> Any:
        """What a window adds to a sum, `[D, keys]` or `[D, rows]`."""
        keep, summed = window if x.kept == COL else window[::-1]
        if v in x.dots:
            eqn, at = x.dots[v]
            other, axis = eqn.invars[1 - at], eqn.params["contract"][1 - at]
            dtype = eqn.params["operand_dtype"]
            left = run.turned_part(other, axis == 0, dtype, summed)
            if x.kept == ROW:
                right = turned[eqn.invars[at], dtype or jnp.float32][...]
            else:
                right = run.block(eqn.invars[at])
                right = right if dtype is None else right.astype(dtype)
            return product_of(left, right, (1, 0), eqn.params["precision"])
        if isinstance(v, Literal) or v.aval.ndim == 0:
            return run.value(v)
        eqn = self.program.maker(v)
        if eqn is not None and eqn.primitive in POINTWISE:
            return run.pointwise(eqn, lambda u: self._added(run, x, u, window, turned))
        return run.value(v, x.flipped)[:, keep]


@dataclasses.dataclass(frozen=True)
class TurnedStep:
    """A step of the kernel that adds windows `[rows, keys]`.

    **Arguments:**

    - `layout`: the grid of the visit.
    - `forms`: the sums of each class of block.
    """

    layout: GridLayout
    forms: dict[int, TurnedSums]

    @classmethod
    def of(
        cls,
        layout: GridLayout,
        programs: dict[int, Program],
        wanted: Sequence[int],
        of_pairs: bool = False,
    ) -> "TurnedStep | None":
        """The step of these programs, or None if another form of it serves, or serves better."""
        step = cls(layout, {c: TurnedSums(p, wanted, of_pairs) for c, p in programs.items()})
        possible = all(x.possible for x in step.forms.values())
        return step if possible and suits(step) else None

    @property
    def main(self) -> TurnedSums:
        """The sums of a block all of whose pairs are visible."""
        return self.forms[max(self.forms)]

    @property
    def corner(self) -> list[Window]:
        """The windows that a pair of class `CORNER` skips; empty if such a pair is on no list."""
        if not self.layout.corner or PARTIAL not in self.forms:
            return []
        return of_corner(self.layout, windows(*self.layout.block, masked=True))

    @property
    def scratch(self) -> list:
        """Memory for blocks that are transposed twice. Each has two parts, for a window and for the
        window before.
        """
        at, to = windows(*self.layout.block, masked=False)[0]
        shape = size_of(at), size_of(to)
        return [pltpu.VMEM(shape, dtype) for _, dtype in self.main.turned_again for _ in range(2)]

    def run(
        self,
        kind: Any,
        load: Sequence[Callable | None],
        flipped: Sequence[bool],
        add: Callable[[int, Any, Array], None],
        scratch: Sequence[Any],
    ) -> None:
        """Adds what a pair of class `kind` contributes.

        **Arguments:**

        - `load`, `flipped`: those of `Evaluation`.
        - `add`: as for `TurnedSums.add`.
        - `scratch`: references to the memory of that name.
        """
        pairs = [scratch[i : i + 2] for i in range(0, len(scratch), 2)]
        forms = [(c, c, []) for c in self.forms]
        if self.corner:
            forms.append((CORNER, PARTIAL, self.corner))
        for own, c, skip in forms:
            parts = windows(*self.layout.block, masked=c != max(self.forms))
            parts = [x for x in parts if x not in skip]

            @pl.when(kind == own)
            def _(sums=self.forms[c], parts=parts):
                sums.add(TurnedEvaluation(sums.program, load, flipped), parts, add, pairs)


def suits(step: TurnedStep) -> bool:
    """Whether a kernel is faster with this step: where matrix units are wide, products read
    bfloat16, and gradients of keys or values are summed.

    On v5e it would take 10754 cycles for a full pair instead of 10506. A kernel for the queries
    alone would take 3322 on v6e instead of 3040. Products of float32 were not measured.

    It is also faster for gradients of pairs, which lie as `[rows, keys]`.
    """
    if step.main.of_pairs:
        return True
    dtypes = {e.params["operand_dtype"] for x in step.forms.values() for e in x.firsts}
    even = not any(n % LANES for n in step.layout.block)
    of_keys = any(x.kept == COL for x in step.main.sums)
    return wide_units() and of_keys and even and dtypes == {jnp.dtype(jnp.bfloat16)}
