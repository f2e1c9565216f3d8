"""The masks that a mask is combined from."""

from collections.abc import Callable

from ._base import AbstractMask, And, Not, Or


def leaf_terms(mask: AbstractMask | None) -> list[AbstractMask]:
    """The masks that a mask is combined from by `&`, `|` and `~`; none for None."""
    if isinstance(mask, And | Or):
        return [leaf for term in mask.terms for leaf in leaf_terms(term)]
    if isinstance(mask, Not):
        return leaf_terms(mask.term)
    return [] if mask is None else [mask]


def map_terms(mask: AbstractMask, fn: Callable[[AbstractMask], AbstractMask]) -> AbstractMask:
    """The same combination by `&` and `|` of masks that `fn` makes of its terms."""
    if isinstance(mask, And | Or):
        return type(mask)(tuple(map_terms(term, fn) for term in mask.terms))
    return fn(mask)
