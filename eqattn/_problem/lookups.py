"""What a function of one pair looks up by its query or by its key alone, as arrays.

`slopes[h]`, `lengths[b]` and `ids[q] == ids[k]` read tables at computed places. The compilers of
kernels cannot, and a loop would do so for each pair. But the places depend on the query, or on the
key, and not on both. So what is found there is computed once for each query or key, outside, and
becomes an operand of the function that is left. Its derivatives are those of an operand and of the
lookup, by JAX.

What depends on both stays in the function, with one exception. Where positions count up, `q - k`
has few values. So `table[q - k]` is computed once for each of them, and blocks read it along their
diagonals, see `_sweep/differences.py`.

Masks and scores of one pair as functions of scalars, and such with further operands.

What a mask or a score reads at the difference of two positions, in the windows of blocks.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._jax import abstract, Literal, only_varies, replay, vary, varying_axes
from .._misc import accumulation_dtype
from .._pairs import Operand, POINTWISE
from .._sweep.differences import along_diagonals, cut_diagonals, padded, window_size
from .._sweep.grid import BATCH, COL, HEAD, ROW
from .._sweep.lowering import Lowering
from ..masks._base import AbstractMask, map_terms, visible
from ..scores._base import AbstractScore, AbstractWrapper
from .closed_score import dtype_read, Held, MOVES, wide_step
from .problem import is_unsure, Problem
from .tiling import BlockOperand, Tiling


def _without_calls(fn: Callable, avals: Sequence[Any]) -> Any:
    """The closed jaxpr of a function, in which calls are inlined."""
    whole = jax.make_jaxpr(fn)(*avals)
    return jax.make_jaxpr(lambda *xs: replay(whole, *xs))(*avals)


def of_scalars(part: Any, scalars: Sequence[Any]) -> tuple[Callable, list, list[str | None]]:
    """A mask or a score as a function of scalars, what is abstract of these, and the axes on which
    each varies; None for a logit.
    """
    own, scored = part.operands(), isinstance(part, AbstractScore)
    # A problem may have different heads in each batch element, see `Problem.h_indices`.
    axes = [*[None] * scored, "b", "bh", "bt", "bs", *[o.axes.rstrip("f") for o in own]]
    fn = part.transform if scored else visible(part)
    # Not a method itself: JAX compares what it traces, and a module's arrays have no truth.
    return lambda *xs: fn(*xs), [abstract(x, x.shape, x.dtype) for x in scalars], axes


def scalars_of(part: Any, like: Any) -> list:
    """What is abstract of the scalars that a mask or a score reads. `like` is an array with the
    dtype of logits, which varies over the mesh axes of the call.
    """
    own, scored = part.operands(), isinstance(part, AbstractScore)
    read = [((), x) for x in (*[like.dtype] * scored, *[jnp.int32] * 4)]
    read += [
        (o.feature_shape, dtype_read(o.array, like.dtype) if scored else o.array.dtype) for o in own
    ]
    return [abstract(like, *x) for x in read]


def _scalar_like(problem: Problem) -> Array:
    """A number with the dtype of logits, which varies over the mesh axes of the call."""
    return vary(jnp.zeros((), problem.accumulation_dtype), varying_axes(problem.query))


def _given_to(part: Any, own: tuple, problem: Problem, at: Sequence[Any]) -> list[Array]:
    """What a mask or a score is given at some indices, with the arrays of its own operands."""
    like, scored = _scalar_like(problem), isinstance(part, AbstractScore)
    arrays = [jnp.asarray(problem.canonical(x)) for x in own]
    if scored:
        arrays = [x.astype(dtype_read(x, like.dtype)) for x in arrays]
    axes = varying_axes(like)
    return [vary(jnp.asarray(x), axes) for x in (*[like] * scored, *at, *arrays)]


class _FoundMask(AbstractMask):
    """A mask with further operands, after its own."""

    mask: AbstractMask
    found: tuple[Any, ...]

    may_lack_kernels: ClassVar[bool] = True

    def operands(self) -> tuple[Any, ...]:
        return (*self.mask.operands(), *self.found)

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return _finished(self.mask, (b, h, q, k, *ids), self.found)


class _FoundScore(AbstractWrapper):
    """A score with further operands, after its own."""

    score: AbstractScore
    found: tuple[Any, ...]

    def operands(self) -> tuple[Any, ...]:
        return (*self.score.operands(), *self.found)

    def transform(self, logit: Any, b: Any, h: Any, q: Any, k: Any, *operands: Any) -> Any:
        return _finished(self.score, (logit, b, h, q, k, *operands), self.found)


@dataclasses.dataclass(frozen=True)
class Windows(BlockOperand):
    """An array whose blocks are windows `[group|1, window]`, see `along_diagonals`."""

    def on_rows(self, x: Array, tiling: Tiling) -> Array:
        return along_diagonals(x, tiling.block_k, tiling.block_q, tiling.group)


@dataclasses.dataclass(frozen=True)
class Diagonals(BlockOperand):
    """An array `[group|1, n]` with the numbers of all diagonals, of which each block cuts a window.

    **Arguments:**

    - `first`: where the window of the first query and the first key begins.
    """

    first: int = 0

    def at(self, x: Array, row: Array, column: Array, tiling: Tiling) -> Array:
        """What the block reads of `x`, whose first query and key are the tokens `row` and `column`.
        Queries that pad the block read what the last query reads, as they stand where it does.

        **Returns:** `[keys, rows]`.
        """
        queries, last = tiling.block_q, None
        start = (row - column).reshape(()) + np.int32(self.first)
        if tiling.queries % queries:
            last = jnp.clip(np.int32(tiling.queries - 1) - row.reshape(()), 0, queries - 1)
        return cut_diagonals(x, start, last, tiling.block_k, queries, tiling.group)


class Differences(Operand):
    """An operand that varies with query and key only by the difference of their positions, which
    count up.

    **Arguments:**

    - `array`: `[B|1, H|1, T + S - 1]`, in the order of the differences. The first number is that of
        the first query and the last key.
    """

    axes: str = eqx.field(static=True, default="ts")

    @property
    def of_pairs(self) -> bool:
        return False

    def diagonals(self, role: str, tiling: Tiling) -> Diagonals:
        """The numbers as they are, for code that can cut a window where it visits a block. A long
        sequence has many more windows than these.
        """
        keys, queries = tiling.block_k, tiling.block_q
        more = tiling.rows * tiling.block_q - tiling.queries + queries
        least = tiling.columns * tiling.block_k - tiling.keys + keys
        whole = jnp.pad(self.array, ((0, 0), (0, 0), (least, more)), mode="edge")
        axes, sizes, group = self._lead(tiling)
        whole = whole.reshape(*sizes, group, -1)
        return Diagonals(role, whole, axes, first=tiling.keys + least - keys)

    def windows(self, role: str, tiling: Tiling) -> Windows:
        """The windows of all blocks. They overlap, so that there are about `2 / block` numbers for
        each pair of query and key.
        """
        keys, queries, count = tiling.block_k, tiling.block_q, self.array.shape[2]
        rows, columns = np.mgrid[: tiling.rows, : tiling.columns]
        starts = rows * queries - columns * keys + tiling.keys - padded(keys)
        size, least = window_size(keys, queries), min(int(starts.min()), 0)
        # Queries of the padding have no cotangent, but a score must be finite for them, too.
        more = max(int(starts.max()) + size - count, 0)
        whole = jnp.pad(self.array, ((0, 0), (0, 0), (-least, more)), mode="edge")
        cut = lambda start: lax.dynamic_slice_in_dim(whole, start, size, axis=-1)
        found = jax.vmap(cut)(jnp.asarray((starts - least).reshape(-1), jnp.int32))
        axes, sizes, group = self._lead(tiling)
        found = jnp.moveaxis(found.reshape(*starts.shape, -1, group, size), 2, 0)
        return Windows(role, found.reshape(*sizes, *starts.shape, group, size), (*axes, ROW, COL))

    def _lead(self, tiling: Tiling) -> tuple[tuple[int, ...], list[int], int]:
        """The grid axes of batch and heads that the array varies on, their sizes, and the number of
        heads that blocks have.
        """
        b, h, _ = self.array.shape
        kv_heads, group = (1, 1) if h == 1 else (tiling.kv_heads, tiling.group)
        kept = [(a, n) for a, n in ((BATCH, b), (HEAD, kv_heads)) if n != 1]
        return tuple(a for a, _ in kept), [n for _, n in kept], group


def reads_differences(problem: Problem, tiling: Tiling, lowering: Lowering) -> bool:
    """Whether what depends on `q - k` becomes `Differences`. Positions must count up, and the
    problem of tokens that several devices share has positions of its own. Where bits are fixed,
    each pair looks up its own number, as what XLA computes for all differences may have other bits
    for other sizes. `counts_up` answers for calls, before their problem is known.
    """
    positions = problem.q_positions is None and problem.kv_positions is None
    apart = not (tiling.in_place or tiling.fixed)
    known = isinstance(tiling.queries, int) and isinstance(tiling.keys, int)
    return lowering.repeats_diagonals and positions and apart and known


_CHEAP = POINTWISE | {lax.broadcast_in_dim_p, lax.reshape_p, lax.squeeze_p}
"""What may be done for each pair. Anything else is done for each query or key, if it can be."""


_SINGULAR = POINTWISE - MOVES - {lax.convert_element_type_p, lax.add_p, lax.sub_p}
"""What may be singular, perhaps only at hidden queries, keys or differences. It is done for each
pair, where masked pairs have safe derivatives. Outside of the blocks, the cotangent of what is
hidden is 0, and 0 times infinity is NaN.
"""


@dataclasses.dataclass(frozen=True)
class Lookups:
    """A function of one pair in two steps: what is looked up, and the rest.

    **Arguments:**

    - `consts`: the arrays that the function closes over.
    - `jaxpr`: the function, of the scalars of a pair.
    - `found`: the variables of what is looked up.
    - `axes`: the axes on which each of them varies, as those of an `Operand`.
    - `reads`: the indices of the scalars that each of them depends on.
    """

    consts: Sequence[Any]
    jaxpr: Any
    found: tuple[Any, ...]
    axes: tuple[str, ...]
    reads: tuple[tuple[int, ...], ...]

    def look_up(self, i: int, scalars: Sequence[Any], acc: Any) -> Any:
        """The result number `i` at the scalars that it depends on, `reads[i]`. Floats narrower than
        the dtype of sums, `acc`, are held in it. So the gradient of a table that is read many times
        rounds once.
        """
        given = dict(zip([self.jaxpr.invars[j] for j in self.reads[i]], scalars))
        return self.run(given, [held(x, acc=acc) for x in self.consts], self.found[i])

    def finish(self, scalars: Sequence[Any], found: Sequence[Any]) -> Any:
        """The function at the scalars of a pair and at what was looked up for it, which is wide."""
        found = [held(x, v.aval.dtype, x.dtype) for x, v in zip(found, self.found)]
        given = dict(zip(self.jaxpr.invars, scalars)) | dict(zip(self.found, found))
        return self.run(given, self.consts, self.jaxpr.outvars[0])

    def run(self, given: dict, consts: Iterable[Any], wanted: Any) -> Any:
        """Evaluates the equations from which the `wanted` variable follows, starting from variables
        that are given.
        """
        env = dict(zip(self.jaxpr.constvars, consts)) | given
        read = lambda v: v.val if isinstance(v, Literal) else env[v]
        for eqn in _needed(self.jaxpr.eqns, [wanted], env):
            env |= zip(eqn.outvars, wide_step(eqn, [read(v) for v in eqn.invars]))
        y = read(wanted)
        return y.wide if isinstance(y, Held) else y


def held(x: Any, dtype: Any = None, acc: Any = jnp.float32) -> Any:
    """A value of this dtype, or of its own, held in the dtype of sums `acc` if that is wider."""
    dtype = jnp.result_type(x) if dtype is None else dtype
    if not jnp.issubdtype(dtype, jnp.floating) or (wide := accumulation_dtype(dtype, acc)) == dtype:
        return x
    return Held(jnp.asarray(x).astype(wide), dtype)


def _needed(eqns: Sequence[Any], wanted: Sequence[Any], known: Any) -> list:
    """Those of the equations that some variables depend on beyond the `known` ones, in order. What
    is wanted may be known, too, where all that a function does is to look up.
    """
    needed, kept = {v for v in wanted if not isinstance(v, Literal) and v not in known}, []
    for eqn in reversed(eqns):
        if needed & set(eqn.outvars):
            kept.append(eqn)
            needed |= {v for v in eqn.invars if not isinstance(v, Literal) and v not in known}
    return kept[::-1]


def lookups_of(
    fn: Callable,
    avals: Sequence[Any],
    axes: Sequence[str | None],
    places: tuple[int, int] | None = None,
) -> Lookups | None:
    """Splits a function of one pair; None if it looks up nothing by its query or its key alone.

    **Arguments:**

    - `fn`: the function of scalars, which returns one.
    - `avals`: the scalars, or what is abstract of them.
    - `axes`: the axes on which each of them varies; None for a logit.
    - `places`: the indices of the positions of query and key. With them, the function is split by
        what it looks up by the difference of these. The difference is an axis `"d"`.
    """
    flat = _without_calls(fn, avals)
    jaxpr = flat.jaxpr
    # For each variable, this holds the axes on which it varies, or None if it varies with queries
    # and keys. Whether it contains a lookup, and on which scalars it depends, follow.
    about: dict = {v: (set(), False, set()) for v in jaxpr.constvars}
    for i, (v, a) in enumerate(zip(jaxpr.invars, axes)):
        about[v] = None if a is None or {"t", "s"} <= set(a) else set(a), False, {i}
    found, moved = {}, {jaxpr.invars[i]: a for i, a in zip(places or (), "ts")}
    active = _differentiated(jaxpr)
    for eqn in jaxpr.eqns:
        xs = [about[v] for v in eqn.invars if not isinstance(v, Literal)]
        within = None if any(x[0] is None for x in xs) else set().union(*[x[0] for x in xs])
        if within is not None and _is_difference(eqn, moved):
            within = within - {"t", "s"} | {"d"}
        within = None if within is not None and len({"t", "s", "d"} & within) > 1 else within
        reads = any(x[1] for x in xs)
        if reads and eqn.primitive in _SINGULAR and not active.isdisjoint(eqn.outvars):
            within = None
        looked = not (eqn.primitive in _CHEAP or only_varies(eqn)) or reads
        of = within, looked and within is not None, set().union(*[x[2] for x in xs])
        about |= dict.fromkeys(eqn.outvars, of)
        if within is None:
            found |= {v: about[v] for v in eqn.invars if not isinstance(v, Literal)}
    found |= {v: about[v] for v in jaxpr.outvars if not isinstance(v, Literal)}
    found = {v: x for v, x in found.items() if x[1] and ("d" in x[0]) is (places is not None)}
    if not found or any(v.aval.shape != () for v in found):
        return None
    return Lookups(
        consts=flat.consts,
        jaxpr=jaxpr,
        found=tuple(found),
        axes=tuple("".join(a for a in "bhtsd" if a in x[0]) for x in found.values()),
        reads=tuple(tuple(sorted(x[2])) for x in found.values()),
    )


def _is_difference(eqn: Any, moved: dict) -> bool:
    """Whether an equation subtracts the position of a query and that of a key, in either order.

    **Arguments:**

    - `moved`: for each variable that is a position plus a constant, whose it is. The result of the
        equation is added, if it is one.
    """
    sides = [moved.get(v) for v in eqn.invars if not isinstance(v, Literal)]
    if eqn.primitive is lax.sub_p and set(sides) == {"t", "s"}:
        return True
    constant = len(sides) == 1 and eqn.primitive in (lax.add_p, lax.sub_p)
    if constant and sides[0] and not isinstance(eqn.invars[0], Literal):
        moved[eqn.outvars[0]] = sides[0]
    return False


def _differentiated(jaxpr: Any) -> set:
    """The floats on which the results of a jaxpr depend by floats alone, so that they have a
    cotangent.
    """
    floats = lambda xs: {
        v for v in xs if not isinstance(v, Literal) and jnp.issubdtype(v.aval.dtype, jnp.inexact)
    }
    found = floats(jaxpr.outvars)
    for eqn in reversed(jaxpr.eqns):
        if not found.isdisjoint(eqn.outvars):
            found |= floats(eqn.invars)
    return found


def split(part: Any, scalars: Sequence[Any], differences: bool = False) -> Lookups | None:
    """What a mask or a score looks up, at scalars that may be abstract; with `differences`, what it
    looks up by `q - k`.

    A trace is valid inside of `jax.shard_map` only if it was made there, so each evaluation traces
    again.
    """
    scored = isinstance(part, AbstractScore)
    places = (2 + scored, 3 + scored) if differences else None
    return lookups_of(*of_scalars(part, scalars), places)


def _finished(part: Any, scalars: Sequence[Any], operands: tuple) -> Any:
    """A mask or a score at a pair, of which the last scalars are what it looks up, `operands`."""
    count = len(operands)
    scalars, found = [jnp.asarray(x) for x in scalars[:-count]], scalars[-count:]
    lookups = split(part, scalars, isinstance(operands[0], Differences))
    assert lookups is not None and len(lookups.found) == count, lookups
    return lookups.finish(scalars, found)


def with_lookups(
    part: Any, like: Any, arrays_of: Callable[[Lookups, tuple], list], differences: bool = False
) -> Any:
    """Returns a score, or a mask that combines no others, whose lookups have become operands. A
    part that looks up nothing is returned as it is.

    **Arguments:**

    - `like`: an array with the dtype of logits, which varies over the mesh axes of the call.
    - `arrays_of`: a function of the lookups and of the part's own operands. It returns the arrays
        of what is found, with the axes that the lookups say; with `differences`, as a `Differences`
        has them.
    - `differences`: whether it is what the part looks up by `q - k`.
    """
    own = part.operands()
    lookups = split(part, scalars_of(part, like), differences)
    if lookups is None:
        return part
    made = zip(arrays_of(lookups, own), lookups.axes)
    found = tuple(Differences(x) if differences else Operand(x, a) for x, a in made)
    return _FoundScore(part, found) if isinstance(part, AbstractScore) else _FoundMask(part, found)


def looked_up(problem: Problem) -> Problem:
    """The problem with what its mask and its scores look up by query or by key as operands."""

    def arrays_of(lookups: Lookups, given: Sequence[Array]) -> list:
        found = zip(_found(lookups, given, problem.accumulation_dtype), lookups.axes)
        return [_as_operand(x, axes, problem) for x, axes in found]

    return _with_found(problem, problem.indices(), arrays_of, False)


def with_differences(problem: Problem) -> Problem:
    """The problem with what its mask and its scores look up by `q - k` as `Differences`. Positions
    must count up.
    """
    t, s, _, _ = problem.sizes
    b, h, _, _ = problem.indices()
    # What depends on the difference alone is found at keys that stand at 0.
    differences = np.arange(1 - s, t, dtype=np.int32)[None] + np.int32(problem.q_start)
    if problem.q_shift is not None:
        differences = differences + problem.q_shift
    at = [b, h, differences[:, None, None], np.zeros((1, 1, 1, 1), np.int32)]
    acc = problem.accumulation_dtype
    arrays_of = lambda lookups, given: [x[:, :, 0] for x in _found(lookups, given, acc)]
    return _with_found(problem, at, arrays_of, True)


def _with_found(
    problem: Problem,
    at: Sequence[Any],
    arrays_of: Callable[[Lookups, Sequence[Array]], list],
    differences: bool,
) -> Problem:
    """The problem with what its mask and its scores look up as operands.

    **Arguments:**

    - `at`: the indices at which it is looked up, each `[B|1, H|1, T|1, S|1]`.
    - `arrays_of`: a function of the lookups and of what they are given, which returns the arrays of
        the operands.
    - `differences`: as for `with_lookups`.
    """
    like = _scalar_like(problem)

    def one(part: Any) -> Any:
        if differences and not is_unsure(part):
            return part
        found_of = lambda lookups, own: arrays_of(lookups, _given_to(part, own, problem, at))
        return with_lookups(part, like, found_of, differences)

    mask = None if problem.mask is None else map_terms(problem.mask, one)
    return dataclasses.replace(problem, mask=mask, scores=tuple(map(one, problem.scores)))


def _found(lookups: Lookups, given: Sequence[Array], acc: Any) -> list[Array]:
    """What is looked up at all that is given, each `[B|1, H|1, T|1, S|1]`, with sums in `acc`."""
    found = []
    for i, reads in enumerate(lookups.reads):
        own = [given[j] for j in reads]
        shape = jnp.broadcast_shapes((1, 1, 1, 1), *[x.shape for x in own])
        flat = [jnp.broadcast_to(x, shape).reshape(-1) for x in own]
        one = lambda *xs, i=i: lookups.look_up(i, xs, acc)
        found.append((jax.vmap(one)(*flat) if flat else one()).reshape(shape))
    return found


def _as_operand(x: Array, axes: str, problem: Problem) -> Array:
    """What was found, with the axes that an `Operand` has."""
    lead = () if x.shape[0] == 1 else problem.batch_shape
    return x.reshape(*lead, *[n for a, n in zip("hts", x.shape[1:]) if a in axes])


def without_lookups(
    part: AbstractMask | AbstractScore, differences: bool
) -> AbstractMask | AbstractScore:
    """The mask or score that is left to kernels, for a look at its operations. Arrays of what is
    looked up have one entry each.

    **Arguments:**

    - `differences`: whether what it looks up by `q - k` is left out, too.
    """
    like = np.zeros((), np.float32)

    def one(x: Any, differences: bool) -> Any:
        def arrays_of(lookups: Lookups, own: tuple) -> list:
            del own
            ranks = [3 if differences else len(a) for a in lookups.axes]
            return [np.zeros((1,) * n, v.aval.dtype) for n, v in zip(ranks, lookups.found)]

        return with_lookups(x, like, arrays_of, differences)

    def both(x: Any) -> Any:
        x = one(x, False)
        return one(x, True) if differences else x

    return map_terms(part, both) if isinstance(part, AbstractMask) else both(part)
