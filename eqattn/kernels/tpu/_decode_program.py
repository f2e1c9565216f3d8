"""Block functions evaluated in the form that suits few rows: `[rows, keys * groups]`.

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
from jaxtyping import Array

from ..._jax import Literal
from ..._sweep.products import grouped_dot_p
from ._operands import KernelOperand
from ._products import LANES, product_of, SUBLANES
from ._program import Evaluation, POINTWISE, Program


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


class FlatHeadsProgram:
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
        wide: FlatHeadsProgram,
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
