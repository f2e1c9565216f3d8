"""Gradients that are sums over several visits, or over devices, and round once."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from .._jax import varying_axes
from .._misc import accumulation_dtype, widened
from .._pairs import Operand
from .._sweep.lowering import Lowering
from ..scores._base import AbstractScore
from .bound import BoundScore
from .closed_score import HeldScore, read_of
from .problem import Problem
from .storage import AbstractStored, Pages


class Widened(AbstractStored):
    """Stored numbers that are read in the dtype of sums. So a query in that dtype reads them, too.

    **Arguments:**

    - `stored`: the numbers, without a table.
    """

    stored: AbstractStored

    @property
    def arrays(self) -> tuple[Shaped[Array, "..."], ...]:
        return self.stored.arrays

    @property
    def flat(self) -> tuple[bool, ...]:
        return self.stored.flat

    def in_shares(self, n: int) -> AbstractStored:
        return Widened(self.stored.in_shares(n))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> Any:
        return accumulation_dtype(self.stored.dtype)

    @property
    def itemsize(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.stored.itemsize

    @property
    def first(self) -> Any:
        first = self.stored.first
        return None if first is None else Widened(first)

    def decode(self, *arrays: Shaped[Array, "..."]) -> Float[Array, "..."]:
        return self.stored.decode(*arrays).astype(self.dtype)


def wide_pages(pages: Pages) -> Pages:
    """Pages whose numbers are read in the dtype of sums."""
    return Pages(Widened(pages.stored), pages._table, pages.devices)


def with_wide_sums(problem: Problem, lowering: Lowering, *names: str) -> Problem:
    """A problem in which these of query, key and value are in the dtype of sums, where the lowering
    computes products in that dtype anyway: XLA does on a CPU. A gradient that is a sum over visits
    or devices then rounds once. Elsewhere, each visit rounds its part, as products of float32 would
    take several times as long.

    What is stored in another form stays as it is: of that, only visited blocks are needed.
    """
    if lowering.multiplies_narrow():
        return problem
    arrays = {name: getattr(problem, name) for name in names}
    arrays = {n: x for n, x in arrays.items() if not isinstance(x, AbstractStored)}
    acc = problem.accumulation_dtype
    return dataclasses.replace(problem, **{n: widened(x, acc) for n, x in arrays.items()})


def read_twice(problem: Problem, lowering: Lowering, in_place: bool = False) -> Problem:
    """A problem that is visited in two parts. What scores read, and the scale, are in the dtype of
    sums, so that their gradients, each a sum over both visits, round once. What varies over pairs
    stays as it is: each pair is in one of the visits.

    Where `with_wide_sums` says so, the query is in that dtype, too. So are keys and values that are
    not read `in_place`.
    """
    acc = problem.accumulation_dtype
    problem = with_wide_sums(problem, lowering, "query", *(() if in_place else ("key", "value")))
    axes = varying_axes(*[x for x in jax.tree.leaves(problem) if eqx.is_array(x)])
    of_pairs = lambda o: 1 not in problem.canonical(o).shape[2:4]
    scores = scores_in_sums(problem.scores, acc, axes, of_pairs)
    scale = widened(problem.scale, acc) if eqx.is_array(problem.scale) else problem.scale
    return dataclasses.replace(problem, scores=scores, scale=scale)


def scores_in_sums(
    scores: Sequence[AbstractScore],
    acc: Any,
    axes: Any,
    of_pairs: Callable[[Operand], bool] = lambda o: False,
) -> tuple[AbstractScore, ...]:
    """Scores that hold their arrays in the dtype of sums `acc`.

    **Arguments:**

    - `axes`: the mesh axes over which anything that the scores see varies.
    - `of_pairs`: which operands with axes of queries and of keys vary over both. They stay.
    """
    arrays = [x for x in jax.tree.leaves(scores) if eqx.is_array(x)]
    if not any(jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != acc for x in arrays):
        return tuple(scores)

    def of_sums(score: AbstractScore) -> BoundScore:
        def read(o: Operand) -> Operand:
            whole = set("ts") <= set(o.axes) and of_pairs(o)
            return o if whole else Operand(widened(o.array, acc), o.axes)

        given = tuple(map(read, score.operands()))
        dtypes = [(o.feature_shape, read_of(o.array, acc)[1]) for o in given]
        return BoundScore(HeldScore.of(score, acc, dtypes, axes=axes), given)

    return tuple(map(of_sums, scores))
