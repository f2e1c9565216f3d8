"""Masks and scores of one pair as functions of scalars, and such with further operands."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._jax import abstract, replay, vary, varying_axes
from ..masks._base import AbstractMask, visible
from ..masks._terms import map_terms
from ..scores._base import AbstractScore
from ..scores._wrapper import AbstractWrapper
from .closed_score import dtype_read
from .problem import Problem


def without_calls(fn: Callable, avals: Sequence[Any]) -> Any:
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


def scalar_like(problem: Problem) -> Array:
    """A number with the dtype of logits, which varies over the mesh axes of the call."""
    return vary(jnp.zeros((), problem.accumulation_dtype), varying_axes(problem.query))


def given_to(part: Any, own: tuple, problem: Problem, at: Sequence[Any]) -> list[Array]:
    """What a mask or a score is given at some indices, with the arrays of its own operands."""
    like, scored = scalar_like(problem), isinstance(part, AbstractScore)
    arrays = [jnp.asarray(problem.canonical(x)) for x in own]
    if scored:
        arrays = [x.astype(dtype_read(x, like.dtype)) for x in arrays]
    axes = varying_axes(like)
    return [vary(jnp.asarray(x), axes) for x in (*[like] * scored, *at, *arrays)]


def with_parts(problem: Problem, one: Callable) -> Problem:
    """The problem with what a function makes of each of its masks and scores."""
    mask = None if problem.mask is None else map_terms(problem.mask, one)
    return dataclasses.replace(problem, mask=mask, scores=tuple(map(one, problem.scores)))


class _FoundMask(AbstractMask):
    """A mask with further operands, after its own."""

    mask: AbstractMask
    found: tuple[Any, ...]
    finish: Callable = eqx.field(static=True)

    may_lack_kernels: ClassVar[bool] = True

    def operands(self) -> tuple[Any, ...]:
        return (*self.mask.operands(), *self.found)

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return self.finish(self.mask, (b, h, q, k, *ids), self.found)


class _FoundScore(AbstractWrapper):
    """A score with further operands, after its own."""

    score: AbstractScore
    found: tuple[Any, ...]
    finish: Callable = eqx.field(static=True)

    def operands(self) -> tuple[Any, ...]:
        return (*self.score.operands(), *self.found)

    def transform(self, logit: Any, b: Any, h: Any, q: Any, k: Any, *operands: Any) -> Any:
        return self.finish(self.score, (logit, b, h, q, k, *operands), self.found)


def with_found(part: Any, found: tuple[Any, ...], finish: Callable) -> Any:
    """A mask or a score with further operands.

    **Arguments:**

    - `part`: the mask or the score.
    - `found`: the operands.
    - `finish`: a function of the part, the scalars of a pair, and the operands. The last scalars
        are what the operands have at the pair. It returns what the part is there.
    """
    kind: Any = _FoundScore if isinstance(part, AbstractScore) else _FoundMask
    return kind(part, found, finish)
