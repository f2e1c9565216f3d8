"""The masks that a mask is combined from, and what follows from them term by term."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._misc import is_known
from ._base import AbstractMask, And, Not, Or


def leaf_terms(mask: AbstractMask | None) -> list[AbstractMask]:
    """The masks that a mask is combined from by `&`, `|` and `~`; none for None."""
    if isinstance(mask, And | Or):
        return [leaf for term in mask.terms for leaf in leaf_terms(term)]
    if isinstance(mask, Not):
        return leaf_terms(mask.term)
    return [] if mask is None else [mask]


def map_terms(mask: AbstractMask, fn: Callable[[AbstractMask], AbstractMask]) -> AbstractMask:
    """Applies `fn` to the terms of a mask, and combines the results as the terms were combined."""
    if isinstance(mask, And | Or):
        return type(mask)(tuple(map_terms(term, fn) for term in mask.terms))
    if isinstance(mask, Not):
        return Not(map_terms(mask.term, fn))
    return fn(mask)


def moved_positions(mask: AbstractMask | None, places: Any) -> Any:
    """The positions of the tokens at these places, `[n]` or `[*b, n]`, under a mask that
    `check_positions` has passed.
    """
    movers = [term for term in leaf_terms(mask) if term.moves_positions]
    return movers[0].positions_of(places) if movers else places


def check_call(mask: AbstractMask | None, *sizes: Any) -> None:
    """**Raises:** `ValueError` for a mask that does not fit a call, as far as operands do not tell.

    **Arguments:**

    - `sizes`: the batch axes, the numbers of query heads, key/value heads, queries and keys, and
        the positions of keys, or None.
    """
    check_positions(mask)
    for term in leaf_terms(mask):
        if term.needs_positions and sizes[-1] is None:
            raise ValueError(
                f"The mask holds that of a cache whose keys do not lie in the order of their "
                f"positions, {term!r}: give kv_positions=cache.positions, too."
            )
        if term.selects:
            term.check_call(*sizes)  # pyright: ignore[reportAttributeAccessIssue]


def check_positions(mask: AbstractMask | None) -> None:
    """**Raises:** `ValueError` if two terms of a mask move positions, unless they are known to be
    equal.
    """
    movers = [term for term in leaf_terms(mask) if term.moves_positions]
    for other in movers[1:]:
        if not _equal(movers[0], other):
            raise ValueError(
                f"The mask holds two that say where tokens stand, {movers[0]!r} and {other!r}: "
                "make one of both, such as one Tree of all tokens."
            )


def _equal(a: Any, b: Any) -> bool:
    """Whether two masks are known to be equal."""
    (xs, of_a), (ys, of_b) = jax.tree.flatten(a), jax.tree.flatten(b)
    same = lambda x, y: x is y or (is_known(x) and is_known(y) and np.array_equal(x, y))
    return of_a == of_b and all(map(same, xs, ys))


def placed(
    mask: Any, batch_shape: tuple[int, ...], heads: int, q: Any, k: Any, lists: bool = True
) -> tuple[Any, Any, Any]:
    """The mask of tokens at these places, and their positions under it.

    **Arguments:**

    - `mask`: a mask or None.
    - `batch_shape`: the batch axes of its arrays, which `B` flattens.
    - `heads`: the number of query heads.
    - `q`, `k`: the places of queries and keys, int32 `[B|1, t]` and `[B|1, s]`.
    - `lists`: whether a list of keys becomes an array of bools. Otherwise it stays.

    **Returns:** the mask, and the positions `[B|1, t]` and `[B|1, s]`.
    """
    terms = leaf_terms(mask)
    lead = lambda x: x.reshape(*(batch_shape if x.shape[0] != 1 else ()), x.shape[-1])
    if not any(term.by_place for term in terms):
        return mask, q, k
    rows, columns = lead(q), lead(k)

    def flat(x):
        xp = np if isinstance(x, np.ndarray) else jnp
        whole = any(n != 1 for n in x.shape[:-1])
        x = xp.broadcast_to(x, (*batch_shape, x.shape[-1])) if whole else x
        return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])

    def at(term: Any) -> Any:
        if not term.by_place or (term.selects and not lists):
            return term
        term = term.for_heads(heads) if term.selects else term
        return term.at_places(rows, columns)

    mask, moving = map_terms(mask, at), mask
    q, k = (flat(moved_positions(moving, x)) for x in (rows, columns))
    return mask, q, k


def split_list(mask: AbstractMask | None) -> tuple[Any, Any, Any]:
    """The term of a mask that lists keys, and the mask if that term is True, and if it is False.

    A list that is not negated can only add to what is visible. So a mask `f` of a list `L` and
    other terms is `L & f(True) | f(False)`. The listed keys are visited under `f(True)`, and all
    keys under `f(False)`.

    **Returns:** the term or None, and the two masks, which are True or False where they do not
    depend on the pair.

    **Raises:** `ValueError` if there are several lists, or one is negated.
    """
    lists = [term for term in leaf_terms(mask) if term.selects]
    if not lists:
        return None, mask, mask
    if _negates_list(mask):
        raise ValueError(
            "A list of keys cannot be negated: what it does not list would be visited. Take "
            "~DenseMask(mask.as_array(t, s)) where an array of all pairs fits."
        )
    if len(lists) > 1:
        raise ValueError(
            f"The mask holds {len(lists)} lists of keys, and a visit gathers those of one: join "
            "their indices for `|`, or keep those in both for `&`."
        )
    shown, hidden = (
        given(mask, lambda x, to=to: to if x.selects else None) for to in (True, False)
    )
    return lists[0], shown, hidden


def _negates_list(mask: AbstractMask | None) -> bool:
    if isinstance(mask, Not):
        return any(term.selects for term in leaf_terms(mask))
    return isinstance(mask, And | Or) and any(map(_negates_list, mask.terms))


def given(mask: Any, value_of: Callable[[AbstractMask], bool | None]) -> Any:
    """A mask where the values of some terms are known: what `value_of` a term is not None.

    **Returns:** the mask of the other terms, or True or False where that does not depend on them.
    """
    if isinstance(mask, Not):
        term = given(mask.term, value_of)
        return not term if isinstance(term, bool) else Not(term)
    if not isinstance(mask, And | Or):
        value = None if mask is None else value_of(mask)
        return mask if value is None else value
    # A True term of `&` and a False one of `|` change nothing; the other way round, they decide.
    neutral = isinstance(mask, And)
    cases = [given(term, value_of) for term in mask.terms]
    if any(x is (not neutral) for x in cases):
        return not neutral
    left = [x for x in cases if x is not neutral]
    return (left[0] if len(left) == 1 else type(mask)(tuple(left))) if left else neutral


def live_blocks(
    mask: Any,
    q_ends: np.ndarray,
    kv_ends: np.ndarray,
    batch_shape: tuple[int, ...],
    heads: int,
    kv_heads: int,
    moved: bool | None = None,
) -> np.ndarray:
    """Whether each block of positions may hold a visible pair, bool `[rows, columns]`, as far as
    this is known while tracing. An array of ids, for example, may hide anything or nothing.

    **Arguments:**

    - `q_ends`, `kv_ends`: the least and the greatest position of each block, int arrays
        `[rows, 2]` and `[columns, 2]`.
    - `moved`: whether a term moves positions. These blocks are of places then, and what the other
        terms show there is not known.
    """
    if moved is None:
        moved = any(term.moves_positions for term in leaf_terms(mask))
    both = (q_ends, kv_ends, batch_shape, heads, kv_heads)
    anything = np.ones((len(q_ends), len(kv_ends)), bool)
    if isinstance(mask, And | Or):
        terms = np.stack([live_blocks(term, *both, moved=moved) for term in mask.terms])
        return np.all(terms, axis=0) if isinstance(mask, And) else np.any(terms, axis=0)
    if mask is None or mask.selects or any(set(o.axes) & set("ts") for o in mask.operands()):
        return anything
    if moved and not (isinstance(mask, AbstractMask) and mask.moves_positions):
        return anything
    from ._intervals.classify import classify

    table = classify(
        mask,
        batch_shape=batch_shape,
        heads=heads,
        kv_heads=kv_heads,
        q_positions=q_ends.reshape(1, -1).astype(np.int32),
        kv_positions=kv_ends.reshape(1, -1).astype(np.int32),
        block_q=2,
        block_k=2,
    )
    return np.any(table > 0, axis=(0, 1)) if isinstance(table, np.ndarray) else anything
