"""The softmax fold of few rows over caches by one Pallas kernel: memory sets its pace.

A step reads one block of a cache, all its heads at once. It computes the logits of the block, and
adds the block before it to the Carry of its row by the usual online softmax. Products, maxima and
exponentials of one block wait for each other, but not for those of the other block. The pipeline is
that of `_forward.py`: it runs on from one row to the next. The blocks of values and of results have
a `lag` of 1. The first step adds memory that was not written yet. The sum is cleared in the second
step, where the row begins.

`visit_decode` plans the kernel, a `_Decode`, whose `kernel` is one step on references.

Blocks of a cache, which a kernel copies itself.

The blocks of other operands are copied by Pallas. At each step it checks for each operand whether
the next block is a new one, and starts and awaits each copy separately. That takes some 40 cycles.
A block of a paged cache is made of many pages, 32 in `decode, pages of 64` on a v7x. In a cache,
every step has a new block. So here copies are started without a check, and copies of one shape are
awaited together.

The copies for step `s + 1` are started in step `s`, into the half of a buffer that step `s` does
not read. The first step also starts its own copies. The last step awaits copies that no step reads.

Block functions evaluated in the form that suits few rows: `[rows, keys * groups]`.

A block of a cache holds `[keys, groups, n]` as it lies in memory. Read as a matrix
`[keys * groups, n]`, its product with all rows has a column for each key of each group. Of 2 keys,
2 groups and 4 rows, the columns and those that belong to a row (`x`) are

               key 0          key 1
           group 0  group 1  group 0  group 1
    row 0     x                 x               rows 0 and 1 are the heads of group 0,
    row 1     x                 x               rows 2 and 3 those of group 1
    row 2              x                 x
    row 3              x                 x

The other products are waste, of units that would wait for memory anyway. In return nothing is
moved about in vector registers. What follows need not waste anything: a row uses other columns than
the rows of another group, so they can share a row of registers. `OwnColumns` folds rows so.
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
from ..._jax import abstract, Literal
from ..._sweep.grid import BlockGrid, COL, EMPTY, FEW_ROWS
from ..._sweep.products import grouped_dot_p
from ._chip import cores, VMEM
from ._grid import KernelGrid, split_at, tables_of
from ._operands import abstract_blocks, KernelOperand
from ._products import LANES, product_of, SUBLANES
from ._program import Evaluation, POINTWISE, Program
from ._work_list import FIRST, in_parts, kind_of, LAST


@dataclasses.dataclass(frozen=True)
class BlockCopies:
    """The copies of blocks of one shape and dtype.

    **Arguments:**

    - `grid`: the grid of the kernel.
    - `operands`: those with such blocks, by index. Each page of a block is one of them.
    - `lag`: how many steps before the current one the blocks belong to, 0 or 1.
    """

    grid: KernelGrid
    operands: dict[int, KernelOperand]
    lag: int

    @classmethod
    def of(
        cls, grid: KernelGrid, operands: dict[int, KernelOperand], lag: int
    ) -> list["BlockCopies"]:
        """The copies for those of the operands that are `copied`."""
        kinds: dict[Any, dict[int, KernelOperand]] = {}
        for i, x in operands.items():
            if copied(x):
                kinds.setdefault((x.block, x.array.dtype), {})[i] = x
        return [cls(grid, same, lag) for same in kinds.values()]

    @property
    def scratch(self) -> list:
        """Both halves of the buffer, and a semaphore for each."""
        x = next(iter(self.operands.values()))
        buffer = pltpu.VMEM((2, len(self.operands), *x.block), x.array.dtype)
        return [buffer, pltpu.SemaphoreType.DMA((2,))]

    def run(
        self, ids: Sequence, work: Sequence, refs: dict, buffer: Any, semaphores: Any
    ) -> dict[int, Callable[[], Any]]:
        """Starts the copies for the next step, and awaits those for this one.

        **Arguments:**

        - `ids`: the indices of the step on the kernel's grid.
        - `work`: the list, and the tables of pages.
        - `refs`: the operands in main memory, by index.
        - `buffer`, `semaphores`: the references of `scratch`.

        **Returns:** for each operand, a function that reads its block.
        """
        step = ids[-1]
        here = lax.rem(step, 2)

        def start(half: Any, lag: int) -> None:
            for n, (i, x) in enumerate(self.operands.items()):
                at = tuple(self.grid.index(x.axes, ids, work, lag))
                block, place = refs[i].at[at], buffer.at[half, n]
                pltpu.make_async_copy(block, place, semaphores.at[half]).start()

        def wait(half: Any) -> None:
            """Awaits as many bytes as a half of the buffer has."""
            place = buffer.at[half]
            pltpu.make_async_copy(place, place, semaphores.at[half]).wait()

        pl.when(step == 0)(lambda: start(here, self.lag))
        wait(here)
        start(1 - here, self.lag - 1)
        pl.when(step == pl.num_programs(len(ids) - 1) - 1)(lambda: wait(1 - here))

        def reader(n: int, x: KernelOperand) -> Callable[[], Any]:
            return lambda: x.read(buffer.at[here, n])

        return {i: reader(n, x) for n, (i, x) in enumerate(self.operands.items())}


def copied(x: KernelOperand) -> bool:
    """Whether an operand has another block of a cache at each step."""
    return x.cached and not x.resident and any(a >= 0 or a == COL for a in x.axes)


COLUMNS = 1024
"""The columns of logits that are computed at one time.

The number was chosen by trial; `decode` in `python tests/measure tpu-report` shows its effect.
"""


_MOVED = {  # they change no number: what depends on keys or rows alone is broadcast when it is used
    lax.broadcast_in_dim_p,
    lax.reshape_p,
    lax.squeeze_p,
    lax.transpose_p,
}


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some features of a `Matrix`.

    **Arguments:**

    - `rows`: `[keys * groups, n]`, as stored.
    - `scale`: the factor of each row, `[1, keys * groups]`; None means 1. It multiplies the logits
        or the probabilities, which are fewer numbers than the matrix has.
    """

    rows: Array
    scale: Array | None

    def scaled(self, part: slice) -> Array | None:
        """The factors of a part of the rows."""
        return None if self.scale is None else self.scale[:, part]


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix of keys or values whose scales are still to be multiplied in.

    **Arguments:**

    - `pieces`: its features, one piece after the other. There are several if they have different
        scales.
    """

    pieces: tuple[Piece, ...]

    @property
    def only(self) -> Piece:
        """All of it, where it is one piece, as that of values is."""
        (piece,) = self.pieces
        return piece

    def times(self, by: Array) -> "Matrix":
        """The matrix with a factor for each row, `[1, keys * groups]`."""
        scales = (by if x.scale is None else x.scale * by for x in self.pieces)
        return Matrix(tuple(Piece(x.rows, y) for x, y in zip(self.pieces, scales)))

    @classmethod
    def beside(cls, matrices: Sequence["Matrix"]) -> "Matrix":
        """The features of all of these, as one piece if none has a scale."""
        pieces = [x for m in matrices for x in m.pieces]
        if any(x.scale is not None for x in pieces):
            return cls(tuple(pieces))
        return cls((Piece(jnp.concatenate([x.rows for x in pieces], 1), None),))

    @classmethod
    def below(cls, matrices: Sequence["Matrix"]) -> "Matrix":
        """The rows of all of these, whose pieces are alike."""
        pieces = []
        for parts in zip(*[m.pieces for m in matrices], strict=True):
            scales = [x.scale for x in parts if x.scale is not None]
            rows = jnp.concatenate([x.rows for x in parts])
            pieces.append(Piece(rows, jnp.concatenate(scales, 1) if scales else None))
        return cls(tuple(pieces))


def _of_features(concatenation: Any) -> bool:
    """Whether parts of vectors are joined, and not keys."""
    return concatenation.params["dimension"] == concatenation.outvars[0].aval.ndim - 1


@dataclasses.dataclass(frozen=True)
class OwnColumns:
    """Which columns of the flat form are a row's own, and rows that are folded by that.

    Rows are cut into tiles of `height` rows, and each group has all its rows in one of these. All
    tiles are folded into one, which holds in each column the tile of the column's group. Of the
    example above, with tiles of two rows,

               key 0          key 1
           group 0  group 1  group 0  group 1
    0      row 0    row 2    row 0    row 2
    1      row 1    row 3    row 1    row 3

    Where a tile has several groups, a column also holds rows that do not own it. These numbers mean
    nothing, and `unfold` leaves them out.

    **Arguments:**

    - `keys`, `groups`, `rows`: the sizes of a block.
    """

    keys: int
    groups: int
    rows: int

    @property
    def columns(self) -> int:
        return self.keys * self.groups

    @property
    def height(self) -> int:
        """The rows of a tile; all rows where groups would lie in several tiles."""
        share = self.rows // self.groups
        if share % SUBLANES == 0:
            return share
        return self.rows if SUBLANES % share or self.rows % SUBLANES else SUBLANES

    @property
    def period(self) -> int:
        """After how many columns, in whole registers, the pattern of groups begins again."""
        period = math.lcm(LANES, self.groups)
        return self.columns if self.columns % period else period

    @property
    def parts(self) -> list[slice]:
        """The columns that are computed at one time. The compiler keeps the order in which they
        are, so that one part is exponentiated while another is multiplied.
        """
        sizes = range(self.period, max(COLUMNS, self.period) + 1, self.period)
        size = max(n for n in sizes if self.columns % n == 0)
        return [slice(i, i + size) for i in range(0, self.columns, size)]

    def pattern(self) -> list[KernelOperand]:
        """Whether a column is a row's own, `[rows, period]`; none if all columns are."""
        if self.groups == 1:
            return []
        row, column = np.arange(self.rows)[:, None], np.arange(self.period)[None]
        own = row // (self.rows // self.groups) == column % self.groups
        return [KernelOperand(own.astype(np.float32), ())]


@dataclasses.dataclass(frozen=True)
class FoldedRows:
    """Folds rows in a kernel, and unfolds them again.

    **Arguments:**

    - `own`: their columns.
    - `pattern`: that of `own`, as read in the kernel: one array or none.
    """

    own: OwnColumns
    pattern: Sequence[Array]

    def fold(self, x: Array) -> Array:
        """Folds `[rows, columns]` to `[height, columns]`."""
        height = self.own.height
        tiles = [x[i : i + height] for i in range(0, self.own.rows, height)]
        folded = tiles[0]
        for mine, tile in list(zip(self._masks(x.shape[1]), tiles))[1:]:
            folded = jnp.where(mine, tile, folded)
        return folded

    def unfold(self, x: Array, other: float) -> Array:
        """Unfolds numbers to `[rows, columns]`, with `other` in the columns of other rows."""
        masks = self._masks(x.shape[1])
        return jnp.concatenate([jnp.where(mine, x, other) for mine in masks]) if masks else x

    def spread(self, x: Array, width: int) -> Array:
        """Folds a number for each row, `[rows, 1]`, to `[height, width]`."""
        period = self.own.period
        x = self.fold(jnp.broadcast_to(x, (self.own.rows, period)))
        return jnp.concatenate([x] * (width // period), 1)

    def reduced(self, op: Callable[[Array, Array], Array], x: Array) -> Array:
        """Reduces by `op` the columns of the same group, which are a period apart."""
        period = self.own.period
        return ft.reduce(op, [x[:, i : i + period] for i in range(0, x.shape[1], period)])

    def _masks(self, width: int) -> list[Array]:
        height, times = self.own.height, width // self.own.period
        return [
            jnp.concatenate([x[i : i + height]] * times, 1) > 0
            for x in self.pattern
            for i in range(0, self.own.rows, height)
        ]


class PackedGQADecode:
    """A program of blocks, and the role of each of its arguments in the flat form.

    The roles are `"query"`, `[n, rows]`; `"matrix"`, keys or values `[keys, groups, n]` or parts of
    these; `"scales"`, the factors `[1, keys * groups]` of a matrix; `"column"`, `[keys, 1]`, and
    `"row"`, `[1, rows]`, such as positions; and `"plain"`, single numbers and vectors. An argument
    that is none of these makes the flat form impossible, as a block `[keys, rows]` of a bias does.

    **Arguments:**

    - `program`: the logits, or the values, of a block.
    - `keys`, `groups`, `rows`: the sizes of a block.
    """

    def __init__(self, program: Program, keys: int, groups: int, rows: int):
        self.program, self.sizes = program, (keys, groups, rows)
        eqns = [e for e in program.jaxpr.eqns if any(v in program.needed for v in e.outvars)]
        dots = [e for e in eqns if e.primitive is grouped_dot_p]
        self.query = {program.root(e.invars[1]) for e in dots}
        of_matrix = {e.invars[0] for e in dots} | {v for v in program.outs if v.aval.ndim == 3}
        for e in reversed(eqns):
            if not of_matrix.isdisjoint(e.outvars):
                of_matrix |= {v for v in e.invars if not isinstance(v, Literal)}
        self.roles: list[str] = []
        for v in program.jaxpr.invars:
            shape = v.aval.shape
            if v in self.query:
                role = "query"
            elif v in of_matrix:
                role = "matrix" if len(shape) == 3 else "scales"
            elif v.aval.size == 1 or len(shape) == 1:
                role = "plain"
            elif shape == (keys, 1):
                role = "column"
            elif shape == (1, rows):
                role = "row"
            else:
                role = "" if program.reads[len(self.roles)] else "plain"
            self.roles.append(role)
        known = _MOVED | POINTWISE | {grouped_dot_p, lax.concatenate_p}
        plain = {v for v, r in zip(program.jaxpr.invars, self.roles) if r == "plain"}
        plain |= set(program.jaxpr.constvars)
        self.possible = "" not in self.roles and keys > 1
        # Only logits can be summed over several pieces of a `Matrix`.
        joins = any(e.primitive is lax.concatenate_p and _of_features(e) for e in eqns)
        self.possible &= bool(dots) or not (joins and "scales" in self.roles)
        for e in eqns:
            repeats = e.primitive is lax.broadcast_in_dim_p and e.invars[0].aval.size == 1
            if not repeats and all(isinstance(v, Literal) or v in plain for v in e.invars):
                plain |= set(e.outvars)
            elif e.primitive not in known or any(
                v in plain and v.aval.size > 1 for v in e.invars if not isinstance(v, Literal)
            ):
                self.possible = False
        self.plain = plain

    def operand(self, i: int, x: Any, axes: tuple[int, ...]) -> KernelOperand:
        """Argument `i` in the form in which the kernel reads it.

        What is given for each key is repeated for each group, and rows become columns.
        """
        keys, groups, _ = self.sizes
        role, lead = self.roles[i], x.shape[: len(axes)]
        if role == "query":
            return KernelOperand(x, axes, flipped=True)
        if role == "column":
            x = jnp.repeat(x.reshape(*lead, 1, keys), groups, -1)
        elif role == "scales":
            x = x.reshape(*lead, 1, -1)
        elif role == "matrix" and groups == 1:  # such an axis may lie anywhere
            x = jnp.squeeze(x, -2)
        elif role == "row":
            return KernelOperand(jnp.swapaxes(x, -1, -2), axes, as_lies=True)
        return KernelOperand(x, axes, cached=role in ("matrix", "scales"))

    def evaluate(
        self, load: Sequence[Callable | None], folded: FoldedRows, part: slice | None = None
    ) -> "_Evaluation":
        """Evaluates the program in a kernel, for all columns or for a part of them.

        **Arguments:**

        - `load`: for each argument a function that reads it.
        - `folded`: the object that folds its rows.
        - `part`: the columns; None for all.
        """
        return _Evaluation(self, load, folded, part or slice(0, folded.own.columns))


class _Evaluation:
    """One evaluation of a program in the flat form: as `Evaluation`, a value is computed on demand.

    An equation on blocks `[keys | 1, rows | 1]` is applied to `[height | 1, keys * groups | 1]`.
    """

    def __init__(
        self,
        wide: PackedGQADecode,
        load: Sequence[Callable | None],
        folded: FoldedRows,
        part: slice,
    ):
        self.wide, program = wide, wide.program
        self.folded, self.part = folded, part
        flipped = [role == "query" for role in wide.roles]
        self.run = Evaluation(program, load, flipped)
        self.load = dict(zip(program.jaxpr.invars, zip(load, wide.roles)))
        self.done: dict = {}

    def value(self, v: Any) -> Any:
        """The value of a variable: a `Matrix`, or an array `[height | 1, keys * groups | 1]`."""
        if isinstance(v, Literal) or v in self.wide.plain:
            x = jnp.asarray(self.run.value(v))
            return x.reshape(1, 1) if x.size == 1 else x
        if v not in self.done:
            self.done[v] = self._value(v)
        return self.done[v]

    def _value(self, v):
        if v in self.load:
            load, role = self.load[v]
            assert load is not None
            x = load()
            if role == "column":
                return x[:, self.part]
            if role == "row":
                return self.folded.spread(x, self.part.stop - self.part.start)
            if role != "matrix":
                return x
            return Matrix((Piece(x.reshape(-1, x.shape[-1]), None),))
        eqn = self.wide.program.maker(v)
        if eqn.primitive is grouped_dot_p:
            dtype, precision = eqn.params["operand_dtype"], eqn.params["precision"]
            k = self.value(eqn.invars[0])
            q = self.run.narrow(eqn.invars[1], True, dtype)
            logits, at = [], 0
            for x in k.pieces:
                own, at = q[:, at : at + x.rows.shape[1]], at + x.rows.shape[1]
                s = product_of(own, x.rows[self.part].astype(q.dtype), (1, 1), precision)
                s, by = self.folded.fold(s), x.scaled(self.part)
                logits.append(s if by is None else s * by)
            return ft.reduce(jnp.add, logits)
        if eqn.primitive in _MOVED:
            return self.value(eqn.invars[0])
        if eqn.primitive is lax.concatenate_p:
            join = Matrix.beside if _of_features(eqn) else Matrix.below
            return join([self.value(x) for x in eqn.invars])
        if eqn.primitive is lax.select_n_p and v.aval.ndim == 3:
            test = self.wide.program.maker(eqn.invars[0])
            assert test is not None and test.primitive is lax.is_finite_p, eqn
            return self.value(eqn.invars[2])  # the kernel checks for what is not finite
        xs = [self.value(x) for x in eqn.invars]
        if any(isinstance(x, Matrix) for x in xs):
            return self._of_matrix(eqn, xs)
        shape = jnp.broadcast_shapes(*[x.shape for x in xs])
        xs = [jnp.broadcast_to(x, shape) for x in xs]
        params = {k: None if k == "sharding" else p for k, p in eqn.params.items()}
        return eqn.primitive.bind(*xs, **params)

    def _of_matrix(self, eqn, xs):
        if eqn.primitive is lax.convert_element_type_p:  # it is widened with the other operand
            return xs[0]
        assert eqn.primitive is lax.mul_p, eqn
        matrix, by = xs if isinstance(xs[0], Matrix) else xs[::-1]
        return matrix.times(by)


def decode_programs(steps: dict[int, Any], layout: BlockGrid, args: Sequence) -> dict | None:
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
        logits = PackedGQADecode(Program(s.evaluate_logits, blocks[:n]), keys, groups, rows)
        forms[c] = logits if len(logits.program.outs) == 1 else None
    forms["values"] = PackedGQADecode(Program(_first(step), blocks[n:]), keys, groups, rows)
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
    logits: dict[int, PackedGQADecode]
    values: PackedGQADecode
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
    forms: dict, steps: dict[int, Any], layout: BlockGrid, args: Sequence, kept: tuple[int, ...]
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
    layout: BlockGrid,
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
