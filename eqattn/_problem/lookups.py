"""What a function of one pair looks up by its query or by its key alone, as arrays.

`slopes[h]`, `lengths[b]` and `ids[q] == ids[k]` read tables at computed places. The compilers of
kernels cannot, and a loop would do so for each pair. But the places depend on the query, or on the
key, and not on both. So what is found there is computed once for each query or key, outside, and
becomes an operand of the function that is left. Its derivatives are those of an operand and of the
lookup, by JAX.

What depends on both, such as `table[q - k]`, stays in the function.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._jax import abstract, evaluated, Literal, only_varies, replay, vary, varying_axes
from .._pairs import Operand
from ..kernels._program import POINTWISE
from ..masks._base import AbstractMask, visible
from ..masks._terms import map_terms
from ..scores._base import AbstractScore
from ..scores._wrapper import AbstractWrapper
from .closed_score import dtype_read
from .problem import Problem


_CHEAP = POINTWISE | {lax.broadcast_in_dim_p, lax.reshape_p, lax.squeeze_p}
"""What may be done for each pair. Anything else is done for each query or key, if it can be."""


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

    def look_up(self, i: int, scalars: Sequence[Any]) -> Any:
        """The result number `i` at the scalars that it depends on, `reads[i]`."""
        given = dict(zip([self.jaxpr.invars[j] for j in self.reads[i]], scalars))
        return self._run(given, [self.found[i]])[0]

    def finish(self, scalars: Sequence[Any], found: Sequence[Any]) -> Any:
        """The function at the scalars of a pair and at what was looked up for it."""
        given = dict(zip(self.jaxpr.invars, scalars)) | dict(zip(self.found, found))
        return self._run(given, self.jaxpr.outvars)[0]

    def _run(self, given: dict, wanted: Sequence[Any]) -> list:
        """Evaluates the equations from which the `wanted` variables follow, starting from variables
        that are given.
        """
        env = dict(zip(self.jaxpr.constvars, self.consts)) | given
        read = lambda v: v.val if isinstance(v, Literal) else env[v]
        for eqn in _needed(self.jaxpr.eqns, wanted, env):
            xs = [read(v) for v in eqn.invars]
            ys = [vary(x, frozenset(eqn.params["axes"])) for x in xs] if only_varies(eqn) else None
            env |= zip(eqn.outvars, evaluated(eqn, xs) if ys is None else ys)
        return [read(v) for v in wanted]


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


def lookups_of(fn: Callable, avals: Sequence[Any], axes: Sequence[str | None]) -> Lookups | None:
    """Splits a function of one pair; None if it looks up nothing by its query or its key alone.

    **Arguments:**

    - `fn`: the function of scalars, which returns one.
    - `avals`: the scalars, or what is abstract of them.
    - `axes`: the axes on which each of them varies; None for a logit.
    """
    whole = jax.make_jaxpr(fn)(*avals)
    flat = jax.make_jaxpr(lambda *xs: replay(whole, *xs))(*avals)  # calls are inlined
    jaxpr = flat.jaxpr
    # For each variable, this holds the axes on which it varies, or None if it varies with queries
    # and keys. Whether it contains a lookup, and on which scalars it depends, follow.
    about: dict = {v: (set(), False, set()) for v in jaxpr.constvars}
    for i, (v, a) in enumerate(zip(jaxpr.invars, axes)):
        about[v] = None if a is None or {"t", "s"} <= set(a) else set(a), False, {i}
    found = {}
    for eqn in jaxpr.eqns:
        xs = [about[v] for v in eqn.invars if not isinstance(v, Literal)]
        within = None if any(x[0] is None for x in xs) else set().union(*[x[0] for x in xs])
        within = None if within is not None and {"t", "s"} <= within else within
        looked = eqn.primitive not in _CHEAP or any(x[1] for x in xs)
        of = within, looked and within is not None, set().union(*[x[2] for x in xs])
        about |= dict.fromkeys(eqn.outvars, of)
        if within is None:
            found |= {v: about[v] for v in eqn.invars if not isinstance(v, Literal)}
    found |= {v: about[v] for v in jaxpr.outvars if not isinstance(v, Literal)}
    found = {v: x for v, x in found.items() if x[1]}
    if not found or any(v.aval.shape != () for v in found):
        return None
    return Lookups(
        consts=flat.consts,
        jaxpr=jaxpr,
        found=tuple(found),
        axes=tuple("".join(a for a in "bhts" if a in x[0]) for x in found.values()),
        reads=tuple(tuple(sorted(x[2])) for x in found.values()),
    )


def split(part: Any, scalars: Sequence[Any]) -> Lookups | None:
    """What a mask or a score looks up, at scalars that may be abstract.

    A trace is valid inside of `jax.shard_map` only if it was made there, so each evaluation traces
    again.
    """
    own, scored = part.operands(), isinstance(part, AbstractScore)
    # A problem may have different heads in each batch element, see `Problem.h_indices`.
    axes = [*[None] * scored, "b", "bh", "bt", "bs", *[o.axes.rstrip("f") for o in own]]
    fn = part.transform if scored else visible(part)
    # Not a method itself: JAX compares what it traces, and a module's arrays have no truth.
    avals = [abstract(x, x.shape, x.dtype) for x in scalars]
    return lookups_of(lambda *xs: fn(*xs), avals, axes)


class _FoundMask(AbstractMask):
    """A mask whose lookups are operands, after its own."""

    mask: AbstractMask
    found: tuple[Operand, ...]

    def operands(self) -> tuple[Operand, ...]:
        return (*self.mask.operands(), *self.found)

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return _finished(self.mask, (b, h, q, k, *ids), len(self.found))


class _FoundScore(AbstractWrapper):
    """A score whose lookups are operands, after its own."""

    score: AbstractScore
    found: tuple[Operand, ...]

    def operands(self) -> tuple[Operand, ...]:
        return (*self.score.operands(), *self.found)

    def transform(self, logit: Any, b: Any, h: Any, q: Any, k: Any, *operands: Any) -> Any:
        return _finished(self.score, (logit, b, h, q, k, *operands), len(self.found))


def _finished(part: Any, scalars: Sequence[Any], count: int) -> Any:
    """A mask or a score at a pair, of which the last `count` scalars are what it looks up."""
    scalars, found = [jnp.asarray(x) for x in scalars[:-count]], scalars[-count:]
    lookups = split(part, scalars)
    assert lookups is not None and len(lookups.found) == count, lookups
    return lookups.finish(scalars, found)


def with_lookups(part: Any, like: Any, arrays_of: Callable[[Lookups, tuple], list]) -> Any:
    """Returns a score, or a mask that combines no others, whose lookups have become operands. A
    part that looks up nothing is returned as it is.

    **Arguments:**

    - `like`: an array with the dtype of logits, which varies over the mesh axes of the call.
    - `arrays_of`: a function of the lookups and of the part's own operands. It returns the arrays
        of what is found, with the axes that the lookups say.
    """
    own, scored = part.operands(), isinstance(part, AbstractScore)
    read = [((), x) for x in (*[like.dtype] * scored, *[jnp.int32] * 4)]
    read += [
        (o.feature_shape, dtype_read(o.array, like.dtype) if scored else o.array.dtype) for o in own
    ]
    lookups = split(part, [abstract(like, *x) for x in read])
    if lookups is None:
        return part
    found = tuple(Operand(x, a) for x, a in zip(arrays_of(lookups, own), lookups.axes))
    return _FoundScore(part, found) if scored else _FoundMask(part, found)


def looked_up(problem: Problem) -> Problem:
    """The problem with what its mask and its scores look up by query or by key as operands."""
    axes, at = varying_axes(problem.query), problem.indices()
    like = vary(jnp.zeros((), problem.accumulation_dtype), axes)

    def one(part: Any) -> Any:
        def arrays_of(lookups: Lookups, own: tuple) -> list:
            scored = isinstance(part, AbstractScore)
            arrays = [jnp.asarray(problem.canonical(x)) for x in own]
            if scored:
                arrays = [x.astype(dtype_read(x, like.dtype)) for x in arrays]
            given = [vary(jnp.asarray(x), axes) for x in (*[like] * scored, *at, *arrays)]
            return [_found(lookups, i, given, problem) for i in range(len(lookups.found))]

        return with_lookups(part, like, arrays_of)

    mask = None if problem.mask is None else map_terms(problem.mask, one)
    return dataclasses.replace(problem, mask=mask, scores=tuple(map(one, problem.scores)))


def _found(lookups: Lookups, i: int, given: Sequence[Array], problem: Problem) -> Array:
    """What is looked up for all queries or keys, with the axes that `lookups.axes[i]` says."""
    own, axes = [given[j] for j in lookups.reads[i]], lookups.axes[i]
    shape = jnp.broadcast_shapes((1, 1, 1, 1), *[x.shape for x in own])
    flat = [jnp.broadcast_to(x, shape).reshape(-1) for x in own]
    one = lambda *xs: lookups.look_up(i, xs)
    values = (jax.vmap(one)(*flat) if flat else one()).reshape(shape)
    lead = () if shape[0] == 1 else problem.batch_shape
    return values.reshape(*lead, *[n for a, n in zip("hts", shape[1:]) if a in axes])


def without_lookups(part: AbstractMask | AbstractScore) -> AbstractMask | AbstractScore:
    """The mask or score that is left to kernels, for a look at its operations. Arrays of what is
    looked up have one entry each.
    """
    like = np.zeros((), np.float32)

    def arrays_of(lookups: Lookups, own: tuple) -> list:
        del own
        return [np.zeros((1,) * len(a), v.aval.dtype) for a, v in zip(lookups.axes, lookups.found)]

    one = lambda x: with_lookups(x, like, arrays_of)
    return map_terms(part, one) if isinstance(part, AbstractMask) else one(part)
