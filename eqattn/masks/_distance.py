"""A check that what uses distances between positions is not combined with a mask that has none."""

from typing import Any

from ._base import AbstractMask
from ._terms import leaf_terms


def check_distances(mask: AbstractMask | None, *others: Any) -> None:
    """Raises `ValueError` where distances between positions are used, and have no meaning.

    **Arguments:**

    - `mask`: the mask, each of whose terms may use distances, or say that positions are none.
    - `others`: scores and rotary embeddings, which may use distances too.
    """
    terms = leaf_terms(mask)
    names = lambda parts: " and ".join(dict.fromkeys(type(part).__name__ for part in parts))
    far = names(x for x in (*terms, *others) if x.uses_distance)
    flat = names(x for x in terms if not x.positions_are_distances)
    if far and flat:
        raise ValueError(
            f"{far} would take distances between positions, which in a {flat} are places among the "
            "drafts instead of depths. Give the depths explicitly: a MaskFn with row_operands= and "
            "col_operands=, a ScoreFn with Operands, a bias; and for a layer, no rotary=, but "
            "process_heads= that turns queries and keys by rotary(x, depths). A chain of drafts, "
            "whose known parents are -1, 0, 1, ..., needs none of this."
        )
