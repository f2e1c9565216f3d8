"""Sums over the live pairs of a grid by one Pallas kernel: the backward of attention.

The list of pairs is sorted by the axis that the results keep. So their accumulators stay in vector
memory from the first pair of a row or column to its last. Results of all rows may stay there
meanwhile, if they fit: one visit then gives the gradients of queries, keys and values. Blocks that
are empty are not on the list, so they cost nothing.

`visit_sum` plans a kernel, a `_Sum`, whose `kernel` is one step on references to vector memory.

A step of the backward's kernel for wide matrix units, which has logits as `[rows, keys]`.

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

`TransposedSums` finds these sums in a program; `_transposed.py` evaluates the blocks that they add
up.

The evaluation of a program with blocks of logits as `[rows, keys]`, window by window.
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

from ..._jax import abstract, Literal, primitives
from ..._pairs import POINTWISE
from ..._sweep.differences import along_diagonals_p
from ..._sweep.grid import BlockGrid, COL, DIAGONAL, EMPTY, FULL, PARTIAL, ROW
from ..._sweep.products import dot_p
from ._chip import STAYING, VMEM, wide_units
from ._grid import KernelGrid, SumResult
from ._operands import (
    abstract_blocks,
    heads_of_rows,
    KernelOperand,
    matrix,
    nbytes_of,
    pairs_in_place,
    PairsOperand,
    turns,
    vmem_shape,
)
from ._products import LANES, product_of
from ._program import Evaluation, Program
from ._windows import of_corner, size_of, Window
from ._work_list import FIRST, kind_of, LAST, row_of, work_list


class TransposedEvaluation(Evaluation):
    """An evaluation whose windows of blocks of logits are transposed: `[rows, keys]`.

    Whole values lie as in any `Evaluation`. Numbers that vary only with rows are computed as a row,
    and then copied as a column into each of the lanes, once.
    """

    transposed = True

    def _block(self, v: Any, window: Window) -> Any:
        eqn, (keys, rows) = self.program.maker(v), window
        if v.aval.size == 1:
            return self.value(v)
        if min(v.aval.shape) == 1:
            return self.from_side(v, v.aval.shape[1] == 1, lambda flip: self.value(v, flip))
        if eqn is not None and eqn.primitive is dot_p:
            (a, b), (i, j) = eqn.invars, eqn.params["contract"]
            dtype = eqn.params["operand_dtype"]
            left, right = self.narrow(b, j == 0, dtype), self.narrow(a, i == 1, dtype)
            return product_of(left[rows], right[:, keys], (1, 0), eqn.params["precision"])
        if eqn is not None and eqn.primitive is along_diagonals_p:
            return self.repeated_diagonals(eqn)
        if eqn is not None and eqn.primitive is lax.select_n_p:
            return self._selected(eqn)
        if eqn is not None and eqn.primitive is lax.broadcast_in_dim_p:
            return self._broadcast(v, self.value(eqn.invars[0]), None)
        if eqn is not None and eqn.primitive in POINTWISE:
            return self.pointwise(eqn, self.block)
        x = self.value(v, True)
        if x.dtype == jnp.bool_:
            return x.astype(jnp.int32)[rows, keys] != 0
        return x[rows, keys]

    def _spread(self, v: Any, x: Any, factor: float) -> Any:
        return self._broadcast(v, x, factor)

    def _repeated(self, x: Any, shape: tuple[int, ...]) -> Any:
        assert self.window is not None
        sides = [min(n, size_of(w)) for n, w in zip(shape, self.window)]
        return lax.broadcast(x, sides[::-1])

    def _broadcast(self, v: Any, x: Any, factor: float | None) -> Any:
        """The window of a broadcast `v` of `x`: one number, or those of the rows or of the keys."""
        if x.size == 1:  # also if it has axes, which are those of neither keys nor rows
            return self._repeated(x.reshape(()), v.aval.shape)
        if x.ndim == 1:
            (axis,) = self.program.maker(v).params["broadcast_dimensions"]
            of_keys, row = bool(axis == 0), x.reshape(1, -1)
        else:
            of_keys = x.shape[1] == 1
            row = x.T if of_keys else x
        y = self.from_side((v, factor), of_keys, lambda _: row)
        assert self.window is not None
        keys, rows = map(size_of, self.window)
        return jnp.broadcast_to(y, (rows, keys))

    def transposed_part(self, v: Any, flip: bool, dtype: Any, part: slice) -> Any:
        """The columns `part` of a value in the dtype that a product reads, transposed if `flip`.

        If that takes a transpose, each part is transposed separately, at the same time as the
        products of its windows.
        """
        if self.lies_flipped(v) == flip:
            return self.narrow(v, flip, dtype)[:, part]
        key = "part", v, dtype, part.start, part.stop
        if key not in self.done:
            self.done[key] = self.narrow(v, not flip, dtype)[part].T
        return self.done[key]


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
class _Product:
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


class TransposedSums:
    """The sums of a program, in a form in which windows `[rows, keys]` add to them.

    Its attribute `possible` says whether all results have that form. What is added to such a result
    consists of products with blocks that depend on logits, with selections and factors around them.
    Or it is such a block itself, where the results are `of_pairs`. `transposed` says of each
    argument whether a product would transpose it as a whole.

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
        self.sums: list[_Product] = [x for x in found if x is not None]
        wishes: dict = {}
        for eqn in self.firsts:
            for v, c, transposed in zip(eqn.invars, eqn.params["contract"], (1, 0)):
                wishes.setdefault(program.root(v), []).append(c == transposed)
        self.transposed = [all(wishes.get(v, [False])) for v in jaxpr.invars]

    def _depends(self, v: Any) -> bool:
        return not isinstance(v, Literal) and v in self.blocks

    def _sum(self, out: Any, accumulator: Any) -> _Product | None:
        eqn = self.program.maker(out)
        if eqn is None or eqn.primitive not in _ADD:
            return None
        if accumulator not in eqn.invars or eqn.invars[0] is eqn.invars[1]:
            return None
        (rest,) = [v for v in eqn.invars if v is not accumulator]
        if self.of_pairs:
            own = self._depends(rest) and self._dots(rest) is None
            return _Product(rest, None, True, {}) if own else None
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
        return _Product(rest, kept, flipped, made)

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
    def transposed_again(self) -> list[Any]:
        """The blocks that sums over keys read transposed, each with the dtype of that."""
        found = {}
        for x in self.sums:
            for eqn, at in x.dots.values() if x.kept == ROW else ():
                found[eqn.invars[at], eqn.params["operand_dtype"] or jnp.float32] = None
        return [*found]

    def add(
        self,
        run: TransposedEvaluation,
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
        - `scratch`: for each of `transposed_again` two references, for this window and the one
        before.
        """
        ahead = self._begun(run, parts[0])
        late: Callable[[], None] = lambda: None
        for n, window in enumerate(parts):
            here = ahead
            if n + 1 < len(parts):
                ahead = self._begun(run, parts[n + 1])
            late()
            transposed = {}
            for (v, dtype), refs in zip(self.transposed_again, scratch):
                transposed[v, dtype] = ref = refs[n % 2].at[
                    : size_of(window[0]), : size_of(window[1])
                ]
                ref[...] = here.block(v).astype(dtype).T
            for i, x in enumerate(self.sums if self.of_pairs else ()):
                add(i, window[::-1], here.block(x.rest))
            self._add(COL, here, window, transposed, add)
            late = ft.partial(self._add, ROW, here, window, transposed, add)
        late()

    def _add(
        self, kept: int, run: TransposedEvaluation, window: Window, transposed: dict, add: Callable
    ) -> None:
        """Adds what a window contributes to the sums that are `kept` for keys, or for rows."""
        for i, x in enumerate(self.sums):
            if x.kept == kept:
                add(i, window[kept == ROW], self._added(run, x, x.rest, window, transposed))

    def _begun(self, run: TransposedEvaluation, window: Window) -> TransposedEvaluation:
        """The evaluation of a window, with its products of keys and queries."""
        here = run.at(window)
        for eqn in self.firsts:
            here.block(eqn.outvars[0])
        return here

    def _added(
        self, run: TransposedEvaluation, x: _Product, v: Any, window: Window, transposed: dict
    ) -> Any:
        """What a window adds to a sum, `[D, keys]` or `[D, rows]`."""
        keep, summed = window if x.kept == COL else window[::-1]
        if v in x.dots:
            eqn, at = x.dots[v]
            other, axis = eqn.invars[1 - at], eqn.params["contract"][1 - at]
            dtype = eqn.params["operand_dtype"]
            left = run.transposed_part(other, axis == 0, dtype, summed)
            if x.kept == ROW:
                right = transposed[eqn.invars[at], dtype or jnp.float32][...]
            else:
                right = run.block(eqn.invars[at])
                right = right if dtype is None else right.astype(dtype)
            return product_of(left, right, (1, 0), eqn.params["precision"])
        if isinstance(v, Literal) or v.aval.ndim == 0:
            return run.value(v)
        eqn = self.program.maker(v)
        if eqn is not None and eqn.primitive in POINTWISE:
            return run.pointwise(eqn, lambda u: self._added(run, x, u, window, transposed))
        return run.value(v, x.flipped)[:, keep]


@dataclasses.dataclass(frozen=True)
class TransposedStep:
    """A step of the kernel that adds windows `[rows, keys]`.

    **Arguments:**

    - `layout`: the grid of the visit.
    - `forms`: the sums of each class of block.
    """

    layout: BlockGrid
    forms: dict[int, TransposedSums]

    @classmethod
    def of(
        cls,
        layout: BlockGrid,
        programs: dict[int, Program],
        wanted: Sequence[int],
        of_pairs: bool = False,
    ) -> "TransposedStep | None":
        """The step of these programs, or None if another form of it serves, or serves better."""
        step = cls(layout, {c: TransposedSums(p, wanted, of_pairs) for c, p in programs.items()})
        possible = all(x.possible for x in step.forms.values())
        return step if possible and suits(step) else None

    @property
    def main(self) -> TransposedSums:
        """The sums of a block all of whose pairs are visible."""
        return self.forms[max(self.forms)]

    @property
    def corner(self) -> list[Window]:
        """The windows that a pair of class `DIAGONAL` skips; empty if such a pair is on no list."""
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
        return [
            pltpu.VMEM(shape, dtype) for _, dtype in self.main.transposed_again for _ in range(2)
        ]

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
        - `add`: as for `TransposedSums.add`.
        - `scratch`: references to the memory of that name.
        """
        pairs = [scratch[i : i + 2] for i in range(0, len(scratch), 2)]
        forms = [(c, c, []) for c in self.forms]
        if self.corner:
            forms.append((DIAGONAL, PARTIAL, self.corner))
        for own, c, skip in forms:
            parts = windows(*self.layout.block, masked=c != max(self.forms))
            parts = [x for x in parts if x not in skip]

            @pl.when(kind == own)
            def _(sums=self.forms[c], parts=parts):
                sums.add(TransposedEvaluation(sums.program, load, flipped), parts, add, pairs)


def suits(step: TransposedStep) -> bool:
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


def together(
    layout: BlockGrid, start: Sequence, axes: Sequence[tuple[int, ...]], into: Sequence | None
) -> tuple[list[int], list[int]]:
    """The outputs that one kernel computes, and which of them stay in vector memory meanwhile.

    **Returns:** the indices of the outputs that keep columns, and of those that keep the rows of
    the same batch elements. Both are empty if the latter do not fit into vector memory, or if the
    layout wants two visits.
    """
    columns = next((a for a in axes if COL in a and ROW not in a), None)
    if columns is None or not layout.fused:
        return [], []
    group = [i for i, a in enumerate(axes) if a == columns]
    rows = (*[a for a in columns if a != COL], ROW)
    stay = [i for i, a in enumerate(axes) if a == rows]
    nbytes = sum(nbytes_of(vmem_shape(start[i].shape), start[i].dtype) for i in stay)
    copies = 2 if into is None else 4  # one is filled while the one before is written
    return (group, stay) if copies * layout.grid[ROW] * nbytes <= STAYING else ([], [])


@dataclasses.dataclass(frozen=True)
class _Sum:
    """The plan of one kernel.

    **Arguments:**

    - `grid`: the kernel's grid. Batch axes that are summed over are inside of the list, so that a
        result stays in place while all of its terms are added.
    - `lead`, `summed`: the batch axes that the results keep, and the others.
    - `group`, `stay`: the outputs whose accumulators are a kept block, and all rows.
    - `accumulators`: the number of the sweep's outputs.
    - `results`: those of the kernel, by their index in the sweep.
    - `programs`: the block function of each class.
    - `operands`: the number of the sweep's operands, read or not.
    - `given`: the operands that a program reads, by index.
    - `old`: the accumulators of an earlier visit to go on with, by the index of the output.
    - `transposed`: the step that adds windows `[rows, keys]`, or None.
    """

    grid: KernelGrid
    lead: tuple[int, ...]
    summed: tuple[int, ...]
    group: list[int]
    stay: list[int]
    accumulators: int
    results: dict[int, SumResult]
    programs: dict[int, Program]
    operands: int
    given: dict[int, KernelOperand]
    old: dict[int, KernelOperand]
    transposed: TransposedStep | None

    @property
    def apart(self) -> list[int]:
        """The results whose sums have additional memory."""
        return [i for i, x in self.results.items() if x.apart]

    def kernel(self, work_ref: Any, *refs: Any) -> None:
        """One step: adds what a pair contributes to the accumulators of its row and column."""
        left = list(refs)
        take = lambda keys: {i: left.pop(0) for i in keys}
        ins, olds, outs, sums, kept = (
            take(keys) for keys in (self.given, self.old, self.results, self.apart, self.kept)
        )
        sums = outs | sums
        order = self.grid.order
        ids = [pl.program_id(i) for i in range(len(order))]
        pair = self.grid.pair(ids, work_ref)
        first, last = (pair & FIRST) != 0, (pair & LAST) != 0
        at = ids[len(self.lead)]
        begin, end = at == 0, at == pl.num_programs(len(self.lead)) - 1
        for a in self.summed:
            here = ids[order.index(a)]
            first, last = first & (here == 0), last & (here == self.grid.layout.grid[a] - 1)
            begin = begin & (here == 0)
            end = end & (here == self.grid.layout.grid[a] - 1)

        def clear(those):
            for i in those:
                start = jnp.zeros_like(sums[i])
                if i in self.old:
                    start = olds[i][...].T if self.results[i].flipped else olds[i][...]
                sums[i][...] = start

        def write(those):
            for i in those:
                self.results[i].write(outs[i], lambda at: sums[i][at].astype(outs[i].dtype))

        @pl.when(first)
        def _():
            clear(self.group)
            for i, ref in kept.items():
                ref[...] = self.read(i, ids, work_ref, ins).T

        pl.when(begin)(lambda: clear(self.stay))
        if self.transposed:
            self.add_transposed(pair, ids, work_ref, ins, sums, kept, left)
        else:
            self.add(pair, ids, work_ref, ins, sums)
        pl.when(last)(lambda: write(self.group))
        rounded = [i for i in self.stay if i in self.apart]
        if rounded:
            pl.when(end)(lambda: write(rounded))

    @property
    def kept(self) -> list[int]:
        """The operands whose blocks change only from one group of the list to the next. Additional
        memory holds their transposes from the first pair of a group to its last.
        """
        if not self.transposed:
            return []
        transposed = self.transposed.main.transposed[self.accumulators :]
        kept = {*self.lead, ROW if self.results[self.group[0]].axes[-1] == ROW else COL}
        return [
            i
            for i, x in self.given.items()
            if transposed[i] and len(x.shape) == 2 and kept.issuperset(x.axes)
        ]

    @property
    def scratch(self) -> list:
        """The additional memory: for sums that are `apart`, for operands that are `kept`, and for
        blocks that are transposed twice.
        """
        found = [pltpu.VMEM(self.results[i].total, self.results[i].aval.dtype) for i in self.apart]
        for i in self.kept:
            x = self.given[i]
            found.append(pltpu.VMEM(x.shape[::-1], x.array.dtype))
        return found + (self.transposed.scratch if self.transposed else [])

    def read(self, i: int, ids: Sequence, work_ref: Any, ins: dict, as_row: bool = False) -> Any:
        """The block of an operand."""
        return self.grid.read(self.given[i], ins[i], ids, (work_ref,), as_row=as_row)

    def add_transposed(
        self,
        pair: Any,
        ids: Sequence,
        work_ref: Any,
        ins: dict,
        sums: dict,
        kept: dict,
        scratch: Sequence,
    ) -> None:
        """Adds what the program of the pair's class contributes, by windows `[rows, keys]`.

        **Arguments:** those of `add`, and

        - `kept`: the references of the operands that are `kept`.
        - `scratch`: those of blocks turned again.
        """
        step = self.transposed
        assert step is not None
        n, order = self.accumulators, [*self.results]
        load: list = [None] * (n + self.operands)
        for i in self.given:
            load[n + i] = ft.partial(self.read, i, ids, work_ref, ins, as_row=True)
        for i, ref in kept.items():
            load[n + i] = lambda ref=ref: ref[...]
        flipped = [False] * n
        rows = {i for i, x in self.given.items() if x.is_column}
        rows |= {i for i, x in self.given.items() if x.flipped}
        flipped += [i in kept or i in rows for i in range(self.operands)]

        def add(j, part, y):
            i = order[j]
            if step.main.of_pairs:
                sums[i][part] += y
                return
            where = (row_of(pair), slice(None), part) if i in self.stay else (slice(None), part)
            sums[i][where] += y

        step.run(kind_of(pair), load, flipped, add, scratch)

    def add(self, pair: Any, ids: Sequence, work_ref: Any, ins: dict, sums: dict):
        """Replaces accumulators by what the program of the pair's class makes of them."""
        at = {i: (sums[i], row_of(pair) if i in self.stay else ...) for i in self.results}
        n = self.accumulators
        load: list = [None] * (n + self.operands)
        for i, (ref, where) in at.items():
            load[i] = lambda i=i, ref=ref, where=where: ref[where].reshape(
                self.results[i].aval.shape
            )
        for i in self.given:
            load[n + i] = ft.partial(self.read, i, ids, work_ref, ins)
        flipped = [False] * n
        flipped += [i in self.given and self.given[i].flipped for i in range(self.operands)]
        for c, program in self.programs.items():

            @pl.when(kind_of(pair) == c)
            def _(program=program):
                for i, y in zip(self.results, program(load, flipped)):
                    ref, where = at[i]
                    ref[where] = y.reshape(self.results[i].block)


def _plan(  # noqa: PLR0913 (the arguments that every visit of a lowering has)
    steps: dict[int, Callable],
    layout: BlockGrid,
    args: Sequence,
    start: Sequence,
    kept: tuple[int, ...],
    group: list[int],
    stay: list[int],
    into: Sequence | None,
    dtypes: Sequence,
) -> tuple[_Sum, Any]:
    """The plan of the kernel of `visit_sum`, and its list of pairs."""
    dtypes = dtypes or [x.dtype for x in start]
    held = [abstract(args[-1], x.shape, x.dtype) for x in start]
    blocks = abstract_blocks(layout.split(args)[1], layout.in_axes)
    n, wanted = len(held), [*group, *stay]

    def program(step):
        return Program(lambda *xs: step(list(xs[:n]), list(xs[n:])), [*held, *blocks], wanted)

    programs = {c: program(step) for c, step in sorted(steps.items(), reverse=True)}
    windows = {i: pairs_in_place(held[i].shape, layout) for i in wanted}
    of_pairs = into is None and None not in windows.values()
    transposed = TransposedStep.of(layout, programs, wanted, of_pairs)
    if not (transposed and of_pairs):
        windows = {}
    summed = tuple(a for a in layout.batch if a not in kept)
    lead = tuple(a for a in layout.batch if a in kept)
    table_axes = list(layout.table_axes or (ROW, COL))[:-2]
    if transposed is None or not transposed.corner or set(table_axes) & set(summed):
        table, operands = layout.known_without_corners(args)
    else:
        table, operands = layout.split_known(args)
    for a in set(table_axes) & set(summed):
        table = _alike(table, table_axes.index(a))
        table_axes.remove(a)
    work, length = work_list(table, layout, kept, max(steps))
    grid = KernelGrid(layout, (*lead, None, *summed), tuple(table_axes), length)

    results = {i: SumResult(held[i], kept, kept, dtypes[i]) for i in group}
    all_rows = (layout.grid[ROW],)
    results |= {i: SumResult(held[i], (*lead, ROW), lead, dtypes[i], all_rows) for i in stay}

    for j, i in enumerate(wanted):
        last = into is None and i in stay and results[i].apart and turns(held[i])
        flipped = transposed is not None and transposed.main.sums[j].flipped
        heads = heads_of_rows(layout) if last else 1
        form: Any = dict(flipped=flipped, transposed=last, heads=heads, window=windows.get(i))
        results[i] = dataclasses.replace(results[i], **form)
    main = next(iter(programs.values()))

    def flips(i):  # queries, which a step needs both ways, lie as projections write them
        rows = turns(blocks[i]) and ROW in layout.in_axes[i] and kept[-1] == COL
        if not transposed:
            queries = rows and blocks[i].shape[1] == layout.block[1] != blocks[i].shape[0]
            return queries or (matrix(blocks[i]) and main.flipped[n + i])
        return rows and transposed.main.transposed[n + i]

    given = {}
    for i, x in enumerate(operands):
        if any(p.reads[n + i] for p in programs.values()):
            axes, flipped = layout.in_axes[i], flips(i)
            heads, pairs = _heads_of(blocks[i], axes, flipped, layout), None
            if not main.multiplied[n + i]:
                pairs = PairsOperand.of(x, axes, layout, transposed is not None)
            given[i] = pairs or KernelOperand(x, axes, flipped, heads=heads)
    old = {
        i: KernelOperand(x.reshape(*layout.shape(y.lies), *y.whole), y.lies, as_lies=True)
        for i, y in results.items()
        if into is not None and (x := into[i]) is not None
    }
    shared = results, programs, len(operands), given, old, transposed
    return _Sum(grid, lead, summed, group, stay, n, *shared), work


def _heads_of(block: Any, axes: tuple[int, ...], flipped: bool, layout: BlockGrid) -> int:
    """How many heads an operand is given by. One that has the queries of rows as vectors is, unless
    these are as long as they are many.
    """
    rows, features = layout.block[1], block.shape[::-1] if flipped else block.shape
    vectors = matrix(block) and features[0] == rows != features[1]
    return heads_of_rows(layout) if vectors and axes[-1:] == (ROW,) else 1


def visit_sum(  # noqa: PLR0913 (the arguments that every visit of a lowering has)
    steps: dict[int, Callable],
    layout: BlockGrid,
    args: Sequence,
    start: Sequence,
    kept: tuple[int, ...],
    group: list[int],
    stay: list[int],
    into: Sequence | None,
    dtypes: Sequence,
    interpret: Any,
) -> list:
    """Some outputs of a sweep, by one kernel.

    **Arguments:**

    - `steps`, `layout`, `args`, `start`, `into`, `dtypes`: as for `traverse`.
    - `kept`: the grid axes that the outputs `group` keep.
    - `group`, `stay`: the indices of the outputs, as `together` gives them. Those of `stay` keep
        rows, and the same batch axes as `group`.
    - `interpret`: whether to interpret the kernel.

    **Returns:** the outputs `group`, then `stay`.
    """
    plan, work = _plan(steps, layout, args, start, kept, group, stay, into, dtypes)
    grid, given, old, results = plan.grid, plan.given, plan.old, plan.results
    outs = [*results.values()]
    call = pl.pallas_call(
        plan.kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid.grid,
            in_specs=[
                *[grid.block_spec(x) for x in given.values()],
                *[grid.spec(x.axes, x.block) for x in old.values()],
            ],
            out_specs=[grid.spec_of_result(y) for y in outs],
            scratch_shapes=plan.scratch,
        ),
        out_shape=[abstract(args[-1], grid.sizes_of_result(y), y.dtype) for y in outs],
        input_output_aliases={1 + len(given) + j: [*results].index(i) for j, i in enumerate(old)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=tuple("parallel" if a in kept else "arbitrary" for a in grid.order),
            vmem_limit_bytes=VMEM,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="eqattn_sum_pairs" if any(y.window for y in outs) else "eqattn_sum",
    )
    ys = call(work, *grid.arrays([*given.values()]), *[x.array for x in old.values()])
    ys = [x.from_written(y, layout) for x, y in zip(outs, ys)]
    return [y.reshape(*layout.shape(x.axes), *x.aval.shape) for x, y in zip(outs, ys)]


def _alike(table: Any, axis: int) -> Any:
    """The class of a block for all elements of an axis at once: partial where they differ.

    A step that sums over a batch axis visits the same pair for each of its elements.
    """
    xp: Any = np if isinstance(table, np.ndarray) else jnp
    least, most = table.min(axis), table.max(axis)
    return xp.where(least == FULL, FULL, xp.where(most == EMPTY, EMPTY, PARTIAL))
