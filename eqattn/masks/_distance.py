"""Which masks make the difference of two positions a distance, and who takes it for one."""

from typing import Any

from ._base import AbstractMask
from ._terms import leaf_terms


def check_distances(mask: AbstractMask | None, *others: Any) -> None:
    """Raises where a term of the mask, or a score or rotary embedding among the others, uses
    distances next to a term in which positions are none.
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
