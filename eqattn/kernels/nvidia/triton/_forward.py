"""The softmax fold of the live pairs of a grid as a kernel in Pallas Triton.

A program has some rows of one block, all of them in registers, and visits its live keys tile by
tile. The compiler divides rows among threads, and copies tiles ahead of their products.

Inside, logits and maxima are in units of `log 2`, so that `exp` of a logit is a power of two.

The fold as a kernel in Pallas Triton: the arrays that it reads and writes.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ...._jax import abstract, varying_axes
from ...._sweep.grid import BlockGrid, COL, FULL, PARTIAL, ROW
from ...._sweep.steps import Finish, FoldStep
from ..._program import LOG2E
from .._diagonals import DiagonalOperand
from .._operands import divided, Operand, padded, rounded_up, ROWS
from .._operations import Value
from .._plans import FoldArrays, FoldPlan, kept, online_step, Visit
from .._program import PairProgram, scale_beside
from . import _pallas as triton
from ._pallas import native_for
from ._rows import along_diagonals, cleaned, is_near, Rows, shifted, value_of


STAGES = 2
"""How many tiles the compiler keeps in shared memory, of which all chips have 99 KiB."""


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest power of two that is not less than both numbers. The compiler knows no other
    sizes, and every axis of a product has 16 numbers at least.
    """
    return max(least, 1 << (n - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How a block of the grid is cut and padded for the kernel.

    **Arguments:**

    - `rows`, `keys`: the numbers of rows and keys of a block, before they are padded.
    - `dim`, `width`: the sizes of a query and of a value, before they are padded.
    - `itemsize`: the bytes of a number of these vectors.
    """

    rows: int
    keys: int
    dim: int
    width: int
    itemsize: int

    @property
    def padded_dim(self) -> int:
        return power_of_two(self.dim)

    @property
    def padded_width(self) -> int:
        return power_of_two(self.width)

    @property
    def large(self) -> bool:
        """Whether tiles take so many registers and so much shared memory that they are smaller."""
        return max(self.padded_dim, self.padded_width) > 128

    @property
    def tile_r(self) -> int:
        """The rows of a program. There are fewer with exact products of float32, which take more
        registers.
        """
        most = 32 if self.itemsize == 4 else 64 if self.large else 128
        return min(most, power_of_two(self.rows))

    @property
    def tile_k(self) -> int:
        """The keys that are multiplied at once. Shared memory has room for tiles of 16 KiB."""
        return min(64 // (1 + self.large) // (self.itemsize // 2), power_of_two(self.keys))

    @property
    def padded_rows(self) -> int:
        return rounded_up(self.rows, self.tile_r)

    @property
    def padded_keys(self) -> int:
        return rounded_up(self.keys, self.tile_k)

    @property
    def warps(self) -> int:
        return 8 if self.tile_r == 128 or self.itemsize == 4 else 4


class Plan(FoldPlan):
    """A fold by this kernel."""

    @property
    def old(self) -> Rows:
        """Where the numerators of an earlier Carry lie."""
        owned, sizes = (*self.layout.batch, ROW), self.sizes
        return Rows(
            self.layout, owned, ROW, sizes.rows, sizes.width, transposed=True, in_place=False
        )

    @property
    def tiles(self) -> int:
        """How many programs a block of rows has."""
        return self.sizes.padded_rows // self.sizes.tile_r

    @property
    def count(self) -> int:
        """The number of programs."""
        return math.prod(self.layout.shape((*self.layout.batch, ROW))) * self.tiles


class Program:
    """One program of the kernel, on references.

    A value that is not finite reaches all rows by a product, and not only those that see its key.
    It is rare, so another kernel visits the blocks `again` where sums are not finite, and keeps it
    apart. A loop for that in the first kernel takes registers that the other loops need. The tiles
    have the same size, so that the bits of what sees none of it do not change.

    **Arguments:**

    - `again`: whether this is the second visit.
    """

    def __init__(self, plan: Plan, refs: Sequence, again: bool):
        self.plan, self.again, refs = plan, again, list(refs)
        self.program, count = triton.program_id(0), len(plan.results)
        self.check: Any = refs.pop(0 if again else -1) if plan.spreads else None
        self.q, self.k, self.v = (refs.pop(0) for _ in range(3))
        listed = [refs.pop(0) for _ in range(3)] if plan.table_axes is not None else []
        self.given = {i: refs.pop(0) for i in plan.operands}
        self.old = [refs.pop(0) for _ in range(3)] if plan.continued else []
        self.given_at_end = [refs.pop(0) for _ in plan.ending.given]
        self.results = refs[-count:]
        sizes = plan.sizes
        visit = Visit.of(plan, ROWS, plan.tiles, listed, self.program)
        self.places, self.column = visit.places, visit.column
        self.start = visit.tile * jnp.int32(sizes.tile_r)
        self.own = self.start + lax.iota(jnp.int32, sizes.tile_r)
        self.ends = {FULL: visit.full, PARTIAL: visit.live}

    def run(self) -> None:
        if self.again:
            triton.when(self.check[self.program] != 0)(self.visit)
        else:
            self.visit()

    def visit(self) -> None:
        plan, sizes = self.plan, self.plan.sizes
        lead, inside = plan.query.where(self.places, None, self.own, sizes.tile_r)
        shape = (sizes.tile_r, sizes.padded_dim)
        self.queries = triton.rows(self.q, lead, inside, shape)
        self.near = {i: self.read(i) for i, x in plan.operands.items() if is_near(x)}
        self.factor = jnp.float32(LOG2E)
        if plan.scale is not None:
            # The maximum of a row is multiplied with a positive number, so the sign goes elsewhere.
            positive, other = scale_beside(self.near[plan.scale].array, plan.added)
            self.factor = LOG2E * positive
            self.queries = self.queries * other.astype(plan.dtype)
        state, begin, parts = self.begin(), jnp.int32(0), sizes.padded_keys // sizes.tile_k
        for c in [PARTIAL] if self.again else sorted(plan.programs, reverse=True):
            end = self.ends[c] * jnp.int32(parts)
            step = ft.partial(self.step, plan.programs[c])
            state, begin = lax.fori_loop(begin, end, step, state), end
        acc, den, top = state
        if plan.spreads and not self.again:
            self.check[self.program] = (acc * 0).sum()
        self.write((acc, den, top * (1 / LOG2E)))

    def begin(self) -> tuple[Any, Any, Any]:
        """The Carry to begin with."""
        plan, n = self.plan, self.plan.sizes.tile_r
        if not plan.continued:
            filled = lambda shape, x: lax.full(shape, x, jnp.float32)
            acc = filled((n, plan.sizes.padded_width), 0.0)
            return acc, filled((n,), 0.0), filled((n,), -jnp.inf)
        lead, inside = plan.old.where(self.places, None, self.own, n)
        acc = triton.rows(self.old[0], lead, inside, (n, plan.sizes.padded_width))
        at = self.places.block, triton.ds(self.start, n)
        den, top = (x[at] for x in self.old[1:])
        return acc, den, top * LOG2E

    def write(self, accs: tuple) -> None:
        """Writes the results of the rows."""
        plan, n = self.plan, self.plan.sizes.tile_r

        def read(i):
            x = plan.ending.given[i]
            return self.value(x, self.given_at_end[i], self.places.place(x.axes))

        lengths = dict(r=n, v=plan.sizes.padded_width)
        for x, ref, place in zip(plan.ending(accs, read, lengths), self.results, plan.results):
            if place is None:
                ref[self.places.block, triton.ds(self.start, n)] = x
            else:
                lead, inside = place.where(self.places, None, self.own, n)
                triton.put_rows(ref, x, lead, inside)

    def read(self, i: int, at: tuple = (), column: Any = None, keys: Any = None) -> Value:
        """An operand of the logits, for some keys of a column. If diagonals share its numbers, `at`
        says where they lie.
        """
        x = self.plan.operands[i]
        place = x.place(self.places, column)
        if isinstance(x, DiagonalOperand):
            return along_diagonals(x, self.given[i], place, at, self.own, keys.start, keys.size)
        return self.value(x, self.given[i], place, keys)

    def value(self, x: Operand, ref: Any, place: Any, keys: Any = None) -> Value:
        """What a block function is given of an operand."""
        at = dict(r=triton.ds(self.start, self.plan.sizes.tile_r), k=keys)
        return value_of(x, ref, place, at)

    def step(self, program: PairProgram, i: Any, state: tuple) -> tuple:
        """Adds the `i`-th tile of keys to the Carry."""
        plan, sizes, size = self.plan, self.plan.sizes, self.plan.sizes.tile_k
        at, part = divided(i, sizes.padded_keys // size)
        column, start = self.column(at), part * jnp.int32(size)
        keys = start + lax.iota(jnp.int32, size)
        lead, inside = plan.key.where(self.places, column, keys, size)
        tile = triton.rows(self.k, lead, inside, (size, sizes.padded_dim))
        s = triton.product(self.queries, tile, 1)
        here = triton.ds(start, size)
        read = lambda i, at=(): self.near[i] if i in self.near else self.read(i, at, column, here)
        lengths = dict(r=sizes.tile_r, k=size)
        s, *weights = program(s, read, lengths, plan.scale is not None)
        if sizes.padded_keys != sizes.keys:
            last = lax.broadcast_in_dim(keys < sizes.keys, s.shape, [1])
            s = jnp.where(last, s, -jnp.inf)
        lead, inside = plan.value.where(self.places, column, keys, size)
        tile = triton.rows(self.v, lead, inside, (size, sizes.padded_width))
        if self.again:
            tile, _, nan_flag = cleaned(s, tile)
            acc, den, top = state
            state = acc, den + nan_flag, top
        powers = triton.powers(plan.interpreted)
        acc, den, now, weighted = online_step(
            state, s, weights, self.factor, plan.dtype, powers=powers
        )
        return acc + triton.product(weighted, tile, 0), den, now


def traverse(
    steps: dict[int, Callable[..., Any]],
    layout: BlockGrid,
    args: Sequence[Any],
    start: Sequence[Any],
    axes: Sequence[tuple[int, ...]],
    *,
    finish: Callable[..., Any] = list,
    into: Sequence[Any] | None = None,
    interpreted: bool = False,
) -> list[Any]:
    """`eqattn._sweep.loops.traverse` of a fold, as one kernel."""
    del start, axes  # A Carry keeps all batch axes and rows.
    check_axes(interpreted, args)
    assert not any(isinstance(x, FoldStep) and x.grouped for x in steps.values())
    finish = finish if into is None else Finish(kept)
    arrays = FoldArrays(
        steps,
        layout,
        args,
        finish,
        triton.native(interpreted, native_for(layout.split(args)[1][0].dtype)),
    )
    plan = _plan(arrays, into is None, into is not None and into[0] is not None, interpreted)
    sizes, shape = plan.sizes, layout.shape((*layout.batch, ROW))
    old = []
    if plan.continued:
        assert into is not None
        old = [plan.old.given(into[0], jnp.float32)]
        old += [padded(x.reshape(-1, sizes.rows), 1, sizes.padded_rows) for x in into[1:]]
    out = [
        abstract(args[-1], (plan.count // plan.tiles, sizes.padded_rows), dtype)
        if place is None
        else abstract(args[-1], place.written, dtype)
        for (dtype, *_), place in zip(plan.ending.results, plan.results)
    ]
    found = _visited(plan, out, arrays.inputs(plan, old))
    return [
        x[:, : sizes.rows].reshape(*shape, sizes.rows) if place is None else place.blocks(x)
        for x, place in zip(found, plan.results)
    ]


def _visited(plan: Plan, out: list[Any], inputs: list[Any]) -> Sequence[Any]:
    """What one or two kernels write, see `Program`.

    **Arguments:**

    - `out`: the shapes and dtypes of the results.
    - `inputs`: what the kernels read.
    """

    def kernel(again: bool, out: list[Any], in_place: dict[int, int]) -> Any:
        body = lambda *refs: Program(plan, refs, again).run()
        name = "eqattn_fold_again" if again else "eqattn_fold"
        given = plan.count, name, plan.sizes.warps, STAGES, plan.interpreted
        return triton.kernel(body, out, *given, in_place)

    if not plan.spreads:
        return kernel(False, out, {})(*inputs)
    check = abstract(inputs[0], (plan.count,), jnp.float32)
    *found, check = kernel(False, [*out, check], {})(*inputs)
    in_place = {1 + len(inputs) + i: i for i in range(len(out))}
    return kernel(True, out, in_place)(check, *inputs, *found)


def check_axes(interpreted: bool, args: Sequence[Any]) -> None:
    """**Raises:** `ValueError` where the interpreter does not know what varies over devices."""
    if interpreted and varying_axes(*args):
        raise ValueError(
            "platform='interpret' cannot run under jax.shard_map(..., check_vma=True), which "
            "interpreted kernels do not know; use check_vma=False."
        )


def _plan(arrays: FoldArrays, in_place: bool, continued: bool, interpreted: bool) -> Plan:
    """The kernel of a fold, whose results may be written `in_place`."""
    layout, keys, rows = arrays.layout, arrays.keys, arrays.rows
    sizes = Sizes(rows, keys, arrays.dim, arrays.width, arrays.dtype.itemsize)
    found = arrays.planned(dict(r=sizes.padded_rows, k=sizes.padded_keys))
    found["operands"] = shifted(found["operands"])
    q_axes, k_axes, v_axes = arrays.axes
    owned = (*layout.batch, ROW)

    def place(transposed):
        return Rows(layout, owned, ROW, rows, sizes.width, not transposed, in_place)

    return Plan(
        **found,
        sizes=sizes,
        query=Rows(layout, q_axes, ROW, rows, sizes.dim, transposed=True),
        key=Rows(layout, k_axes, COL, keys, sizes.dim, transposed=False),
        value=Rows(layout, v_axes, COL, keys, sizes.width, transposed=False),
        results=[
            place(transposed) if wide else None for _, wide, transposed in found["ending"].results
        ],
        continued=continued,
        interpreted=interpreted,
    )
