"""Masks and scores whose operands are other arrays than their own, such as a part of these."""

from collections.abc import Iterable, Sequence
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Array

from .._pairs import Operand
from ..masks._base import AbstractMask
from ..masks._terms import leaf_terms, map_terms
from ..scores._base import AbstractScore
from ..scores._wrapper import AbstractWrapper
from .closed_score import ClosedScore, HeldScore, read_of


class BoundMask(AbstractMask):
    """A mask whose operands are replaced by canonical arrays `[B|1, H|1, T|1, S|1]`, some perhaps
    with features.
    """

    mask: AbstractMask
    arrays: tuple[Array | np.ndarray, ...]

    def operands(self):
        return tuple(map(Operand.of_canonical, self.arrays))

    def visible(self, b, h, q, k, *ids):
        return self.mask.visible(b, h, q, k, *ids)


def terms_beside_lists(mask: AbstractMask | None) -> list[AbstractMask]:
    """The terms of a mask without those that list keys, which have no operands."""
    return [term for term in leaf_terms(mask) if not term.selects]


def with_flat_lists(mask: AbstractMask | None, batch_shape: tuple[int, ...]) -> AbstractMask | None:
    """The mask with lists of keys that have one batch axis in place of `batch_shape`."""

    def flat(term: Any) -> Any:
        if not term.selects:
            return term
        return eqx.tree_at(lambda x: x.indices, term, term.rows_of(batch_shape))

    return None if mask is None else map_terms(mask, flat)


def with_bound_terms(mask: AbstractMask | None, arrays: Any) -> AbstractMask | None:
    """The mask with canonical arrays as operands, a tuple for each of its `terms_beside_lists`."""
    left = iter(arrays)
    bound = lambda term: term if term.selects else BoundMask(term, next(left))
    return None if mask is None else map_terms(mask, bound)


class BoundScore(AbstractWrapper):
    """A score whose operands are replaced by others, such as a part of these, or wider ones."""

    score: AbstractScore
    given: tuple[Operand, ...]

    @classmethod
    def of_canonical(cls, score: AbstractScore, arrays: Iterable[Array]) -> "BoundScore":
        """The score with canonical arrays as operands, as those of a `BoundMask`."""
        return cls(score, tuple(map(Operand.of_canonical, arrays)))

    def operands(self) -> tuple[Operand, ...]:
        return self.given

    def transform(self, logit: Any, b: Any, h: Any, q: Any, k: Any, *operands: Any) -> Any:
        return self.score.transform(logit, b, h, q, k, *operands)


def consts_of(
    scores: Sequence[AbstractScore], arrays: Sequence[Sequence[Array]], acc: Any
) -> tuple[tuple[Array, ...], ...]:
    """The arrays that each score closes over, in the dtype of sums `acc`. Where they cross the
    boundary of a `jax.shard_map`, their gradients are sums over devices.

    **Arguments:**

    - `arrays`: the canonical operands of each score.
    """
    return tuple(
        ClosedScore.of(score, acc, [read_of(x, acc) for x in xs]).consts
        for score, xs in zip(scores, arrays)
    )


def bound_scores(
    scores: Sequence[AbstractScore],
    arrays: Sequence[Sequence[Array]],
    consts: Sequence[Sequence[Array]],
    acc: Any,
    axes: Any,
) -> tuple[BoundScore, ...]:
    """The scores with what is here of their operands, and of what `consts_of` returned. The mesh
    axes over which any of it varies are `axes`.
    """
    return tuple(
        BoundScore.of_canonical(
            HeldScore.of(score, acc, [read_of(x, acc) for x in xs], own, axes), xs
        )
        for score, xs, own in zip(scores, arrays, consts)
    )
