"""What a mask or a score reads in a table by both its query and its key, as products of matrices.

The compilers of kernels cannot look up `table[q // n, k // n]`. But one place depends on the
query, and the other on the key. The query selects a row of the table, and the key a number of the
row. Such a number is the product of the row and a vector, which is 1 at one place and 0 elsewhere.
The numbers of a block are a product of two matrices, which is exact. The derivative is that of the
product.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._jax import Literal
from .._pairs import Operand
from .._sweep.grid import BATCH, COL, HEAD, ROW
from .._sweep.products import dot
from ..masks._base import AbstractMask, map_terms
from ..scores._base import AbstractScore
from .blocking import Blocking, BlockOperand
from .lookups import (
    given_to,
    held,
    Lookups,
    of_scalars,
    scalar_like,
    scalars_of,
    with_found,
    with_parts,
    without_calls,
)
from .problem import is_unsure, Problem


MOST_PLACES = 512
"""The most places on the side of a table whose entries are selected. A product over 128 bools takes
as long as that of queries and keys with 128 features in bfloat16, and one over floats six times.
"""


_LEAST = -float(jnp.finfo(jnp.bfloat16).max)
"""Stands for -inf, which times 0 would be NaN. As a logit, kernels take it for masked. A number of
float32 is multiplied as a sum of three of bfloat16, and lesser ones would overflow as such.
"""


_NARROW = jnp.bool_, jnp.int8, jnp.uint8
"""The dtypes of tables whose numbers bfloat16 has. The gradients of others are sums in float32."""


_SHAPES = lax.squeeze_p, lax.reshape_p


class Reading(NamedTuple):
    """A number that a function of one pair reads in a table.

    **Arguments:**

    - `eqn`: the equation, a slice of size 1 of the table.
    - `out`: the variable of the number itself, which has no axes.
    - `picked`: the axes of the table on which a vector of zeros and a one picks the place.
    - `by_key`: whether the key says that place, and the query the others, or the other way round.
    - `reads`: the indices of the scalars that the others depend on, and that the place does.
    """

    eqn: Any
    out: Any
    picked: tuple[int, ...]
    by_key: bool
    reads: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.eqn.invars[0].aval.shape[i] for i in self.picked)

    def entries(self, table: Any, places: Sequence[Any]) -> Array:
        """All numbers that may be picked where the other places are these, `[n]`."""
        kept = [np.int32(0) if i in self.picked else x for i, x in enumerate(places)]
        sizes = [n if i in self.picked else 1 for i, n in enumerate(table.shape)]
        return lax.dynamic_slice(table, kept, sizes).reshape(-1)

    def vector(self, places: Sequence[Any]) -> Array:
        """The vector that picks a place, `[n]`. As in a slice, what is outside is moved inside."""
        at: Any = np.int32(0)
        for i, n in zip(self.picked, self.sizes):
            at = at * np.int32(n) + jnp.clip(places[i].astype(jnp.int32), 0, n - 1)
        return jnp.arange(math.prod(self.sizes), dtype=jnp.int32) == at


def readings_of(jaxpr: Any, axes: Sequence[str | None]) -> list[Reading]:
    """What a function reads in tables by query and by key.

    **Arguments:**

    - `jaxpr`: the function of scalars, without calls.
    - `axes`: the axes on which each of them varies; None for a logit.
    """
    about: dict = {v: (set(), set()) for v in jaxpr.constvars}
    for i, (v, a) in enumerate(zip(jaxpr.invars, axes)):
        about[v] = {"logit"} if a is None else set(a), {i}
    found, sliced = [], {}
    for eqn in jaxpr.eqns:
        xs = [(set(), set()) if isinstance(v, Literal) else about[v] for v in eqn.invars]
        if (reading := _reading(eqn, xs)) is not None:
            sliced[eqn.outvars[0]] = reading
        scalar = eqn.primitive in _SHAPES and eqn.outvars[0].aval.shape == ()
        if scalar and (reading := sliced.get(eqn.invars[0])) is not None:
            found.append(reading._replace(out=eqn.outvars[0]))
        both = [set().union(*x) for x in zip(*xs)] or [set(), set()]
        about |= dict.fromkeys(eqn.outvars, tuple(both))
    return found


def _reading(eqn: Any, about: Sequence[tuple[set, set]]) -> Reading | None:
    """What an equation reads by query and by key, or None.

    **Arguments:**

    - `about`: the axes on which each argument of the equation varies, and the scalars behind it.
    """
    if eqn.primitive is not lax.dynamic_slice_p or math.prod(eqn.params["slice_sizes"]) != 1:
        return None
    (table, _), *places = about
    by = {side: [i for i, (x, _) in enumerate(places) if side in x] for side in "ts"}
    mixed = any({"t", "s"} <= x or "logit" in x for x, _ in about)
    if mixed or not {"t", "s"} <= set().union(*(x for x, _ in about)) or "d" in table:
        return None
    shape, dtype = eqn.invars[0].aval.shape, eqn.invars[0].aval.dtype
    sides = [side for side in "st" if by[side] and side not in table]
    for side in sorted(sides, key=lambda side: math.prod(shape[i] for i in by[side])):
        apart = [x for i, x in enumerate(about) if i - 1 in by[side]]
        rest = [x for i, x in enumerate(about) if i - 1 not in by[side]]
        # Heads of one group share the keys, and so what the keys say.
        shared = all("h" not in x for x, _ in (apart if side == "s" else rest))
        few = math.prod(shape[i] for i in by[side]) <= MOST_PLACES
        if shared and few and _parts_of(dtype):
            reads = [tuple(sorted(set().union(*(y for _, y in x)))) for x in (rest, apart)]
            return Reading(eqn, None, tuple(by[side]), side == "s", (reads[0], reads[1]))
    return None


def _parts_of(dtype: Any) -> int:
    """How many floats hold a number of a table exactly; 0 if none are known to."""
    if dtype == jnp.float32 or dtype == jnp.bool_:
        return 1
    if not jnp.issubdtype(dtype, jnp.integer):
        return int(dtype == jnp.bfloat16)
    return 1 if dtype.itemsize < 4 else 2 * (dtype == jnp.int32)


def parts(x: Any) -> list[Any]:
    """A number of a table as one or two of float32."""
    if x.dtype == jnp.int32:
        return [y.astype(jnp.float32) for y in (x >> 16, x & 0xFFFF)]
    x = x.astype(jnp.float32)
    return [jnp.where(x == -jnp.inf, _LEAST, x)]


def whole(xs: Sequence[Any], dtype: Any) -> Any:
    """The number of a table that `parts` of it make."""
    if len(xs) == 2:
        high, low = (x.astype(jnp.int32) for x in xs)
        return (high << 16) | low
    if jnp.issubdtype(dtype, jnp.floating):  # held wide, see `Lookups`
        return xs[0]
    return xs[0] > 0.5 if dtype == jnp.bool_ else xs[0].astype(dtype)


def _split(part: Any, scalars: Sequence[Any]) -> tuple[Lookups, list[Reading]]:
    """What a mask or a score reads in tables, at scalars that may be abstract."""
    fn, avals, axes = of_scalars(part, scalars)
    flat = without_calls(fn, avals)
    readings = readings_of(flat.jaxpr, axes)
    found = tuple(x.out for x in readings)
    return Lookups(flat.consts, flat.jaxpr, found, ("ts",) * len(found), ()), readings


def _finished(part: Any, scalars: Sequence[Any], operands: tuple) -> Any:
    """A mask or a score at a pair, of which the last scalars are what `operands` have there."""
    count = len(operands)
    numbers, scalars = [*scalars[-count:]], [jnp.asarray(x) for x in scalars[:-count]]
    lookups, readings = _split(part, scalars)
    found = []
    for dtype in (x.out.aval.dtype for x in readings):
        n = _parts_of(dtype)
        xs, numbers = numbers[:n], numbers[n:]
        found.append(whole(xs, dtype))
    return lookups.finish(scalars, found)


def _vectors(lookups: Lookups, reading: Reading, given: Sequence[Array], picks: bool) -> list:
    """The vectors of one side, each `[B|1, H|1, T|1, S|1, n]`."""
    own = [given[i] for i in reading.reads[picks]]
    shape = jnp.broadcast_shapes((1, 1, 1, 1), *[x.shape for x in own])

    def one(*xs):
        at = dict(zip([lookups.jaxpr.invars[i] for i in reading.reads[picks]], xs))
        get = lambda v: v.val if isinstance(v, Literal) else lookups.run(at, consts, v)
        table, *places = reading.eqn.invars
        consts = [held(x) for x in lookups.consts]
        if picks:
            places = [get(v) if i in reading.picked else None for i, v in enumerate(places)]
            return [reading.vector(places).astype(jnp.float32)]
        places = [None if i in reading.picked else get(v) for i, v in enumerate(places)]
        return parts(reading.entries(get(table), places))

    flat = [jnp.broadcast_to(x, shape).reshape(-1) for x in own]
    found = jax.vmap(one)(*flat) if flat else [x[None] for x in one()]
    return [x.reshape(*shape, -1) for x in found]


def _operands(lookups: Lookups, reading: Reading, given: Sequence[Array]) -> list["Products"]:
    """The operands of what is read in one table."""
    entries, (picks,) = (_vectors(lookups, reading, given, x) for x in (False, True))
    both = [(x, picks) if reading.by_key else (picks, x) for x in entries]
    narrow = reading.out.aval.dtype in _NARROW
    return [Products(x[:, :, :, 0], columns=y[:, 0, 0], narrow=narrow) for x, y in both]


def with_tables(problem: Problem) -> Problem:
    """The problem with what its mask and its scores read in such tables as `Products`."""
    at, like = problem.indices(), scalar_like(problem)

    def one(part: Any) -> Any:
        if not is_unsure(part):
            return part
        lookups, readings = _split(part, scalars_of(part, like))
        given = given_to(part, part.operands(), problem, at) if readings else []
        found = [x for reading in readings for x in _operands(lookups, reading, given)]
        return with_found(part, tuple(found), _finished) if found else part

    return with_parts(problem, one)


def without_tables(part: AbstractMask | AbstractScore) -> AbstractMask | AbstractScore:
    """The mask or score that is left to kernels, for a look at its operations. What it reads in
    tables has one entry each.
    """

    def one(x: Any) -> Any:
        _, readings = _split(x, scalars_of(x, np.zeros((), np.float32)))
        count = sum(_parts_of(r.out.aval.dtype) for r in readings)
        vector = np.zeros((1, 1, 1, 1), np.float32)
        made = tuple(Products(vector, columns=vector[0]) for _ in range(count))
        return with_found(x, made, _finished) if made else x

    return map_terms(part, one) if isinstance(part, AbstractMask) else one(part)


class Products(Operand):
    """An operand that at each pair is the product of a vector of the query and one of the key.

    **Arguments:**

    - `array`: those of the queries, float32 `[B|1, H|1, T, n]`.
    - `columns`: those of the keys, float32 `[B|1, S, n]`.
    - `narrow`: whether bfloat16 has their numbers, so that one product of these is exact.
    """

    axes: str = eqx.field(static=True, default="ts")
    columns: Any = None
    narrow: bool = eqx.field(static=True, default=False)

    @property
    def of_pairs(self) -> bool:
        return False

    def blocks(self, role: str, blocking: Blocking) -> tuple[BlockOperand, BlockOperand]:
        """The matrices of the blocks, that of the queries first."""
        return self._rows(role, blocking), self._columns(role, blocking)

    def _rows(self, role: str, blocking: Blocking) -> "Vectors":
        b, h, _, n = self.array.shape
        kv_heads, group = (1, 1) if h == 1 else (blocking.kv_heads, blocking.group)
        x = blocking.pad(self.array, 2, blocking.rows * blocking.block_q, "zeros")
        x = x.reshape(b, kv_heads, group, blocking.rows, blocking.block_q, n)
        x = jnp.broadcast_to(x, (b, kv_heads, blocking.group, *x.shape[3:]))
        x = x.transpose(0, 1, 3, 5, 2, 4).reshape(b, kv_heads, blocking.rows, n, -1)
        sizes = [m for m in (b, kv_heads) if m != 1]
        axes = tuple(a for a, m in ((BATCH, b), (HEAD, kv_heads)) if m != 1)
        return Vectors(role, x.reshape(*sizes, *x.shape[2:]), (*axes, ROW))

    def _columns(self, role: str, blocking: Blocking) -> "Picks":
        b, _, n = self.columns.shape
        x = blocking.pad(self.columns, 1, blocking.columns * blocking.block_k, "zeros")
        x = x.reshape(b, blocking.columns, blocking.block_k, n)
        return Picks(role, x if b > 1 else x[0], (*[BATCH] * (b > 1), COL), narrow=self.narrow)


@dataclasses.dataclass(frozen=True)
class Vectors(BlockOperand):
    """The vectors of queries, `[n, rows]` in each block."""


@dataclasses.dataclass(frozen=True)
class Picks(BlockOperand):
    """The vectors of keys, `[keys, n]` in each block. They follow those of the queries."""

    narrow: bool = False

    read: ClassVar[Any] = ((), jnp.dtype("float32"))


def _product(picks: Array, vectors: Array, narrow: bool) -> Array:
    if narrow:
        return dot(picks, vectors, (1, 0), operand_dtype=jnp.bfloat16)
    return dot(picks, vectors, (1, 0), precision=lax.Precision.HIGHEST)


def multiplied(read: Sequence[Any], operands: Sequence[BlockOperand]) -> list:
    """The blocks that were read, with products in place of those of `Picks`, and None in place of
    those of the `Vectors` before these.
    """
    found: list = [None if isinstance(y, Vectors) else x for x, y in zip(read, operands)]
    for i, y in enumerate(operands):
        if isinstance(y, Picks):
            found[i] = _product(read[i], read[i - 1], y.narrow)
    return found
