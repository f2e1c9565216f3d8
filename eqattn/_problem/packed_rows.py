"""Masks and scores for packed queries, where a batch element is a block of one row's queries.

A mask and a score are functions of the row `b`. Here the batch index counts blocks instead of rows.
So the row of each block becomes an operand, which travels with the block, and replaces `b`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._misc import accumulation_dtype
from .._pairs import canonical, Operand
from ..masks._base import AbstractMask, named_operands
from ..masks._terms import map_terms
from ..scores._base import AbstractScore
from ..scores._function import ScoreFn


class _OfRows(AbstractMask):
    """A mask that reads the row of a block from an operand.

    **Arguments:**

    - `mask`: the mask of rows.
    - `held`: the row of each block, and the operands of the mask for each block.
    """

    mask: AbstractMask
    held: tuple[Operand, ...]

    def operands(self) -> tuple[Operand, ...]:
        return self.held

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return self.mask.visible(ids[0], h, q, k, *ids[1:])


class _Transform(eqx.Module):
    """The `transform` of a score that reads the row of a block from an operand."""

    score: AbstractScore

    def __call__(self, logit: Any, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return self.score.transform(logit, ids[0], h, q, k, *ids[1:])


def mask_of_rows(
    mask: AbstractMask | None, row: Array, rows: int, heads: int, tokens: Array
) -> Any:
    """Turns a mask of rows into a mask of blocks.

    **Arguments:**

    - `mask`: the mask of rows, or None.
    - `row`: the row of each block, int32 `[blocks]`.
    - `rows`: the number of rows.
    - `heads`: the number of query heads.
    - `tokens`: the packed queries of each block, int32 `[blocks, q]`, for lists of keys.

    **Raises:** `ValueError` if the mask holds arrays per query or key other than lists.
    """

    def of_blocks(term):
        if term.selects:
            return term.of_packed(tokens)  # pyright: ignore[reportAttributeAccessIssue]
        moved = term.of_rows(row)
        if moved is not None:
            return moved
        held = _held(term, term.visible, (), row, rows, heads)
        return term if held is None else _OfRows(term, held)

    return None if mask is None else map_terms(mask, of_blocks)


def scores_of_rows(
    scores: Sequence[AbstractScore], row: Array, rows: int, heads: int, dtype: Any
) -> tuple[AbstractScore, ...]:
    """Turns scores of rows into scores of blocks, as `mask_of_rows` does. The `dtype` is that of
    the query.
    """
    logit = (jax.ShapeDtypeStruct((), accumulation_dtype(dtype)),)
    of_blocks = [_held(s, s.transform, logit, row, rows, heads) for s in scores]
    return tuple(
        score if held is None else ScoreFn(_Transform(score), held)
        for score, held in zip(scores, of_blocks)
    )


def _held(
    part: Any, fn: Callable, lead: tuple[Any, ...], row: Array, rows: int, heads: int
) -> tuple[Operand, ...] | None:
    """The operands of a mask or score for blocks, after one that holds the row of each block. It is
    None where neither the operands nor the function depend on the row.

    **Arguments:**

    - `part`: the mask or score.
    - `fn`: its function of a pair, `fn(*lead, b, h, q, k, *operands)`.
    - `lead`: the arguments in front of `b`, as abstract values.
    """
    operands, moved, depends = named_operands(part), [Operand(row, "b")], False
    for name, operand in operands:
        try:
            x = canonical(operand, (rows,), heads, 1, 1, name)
        except ValueError as e:
            raise ValueError(
                f"{name} holds an array {tuple(operand.array.shape)} (axes {operand.axes!r}). "
                f"Queries are packed here, so arrays may be per row ({rows}) or head ({heads}), "
                "not per query or key: use a function of positions, or call attention with the "
                "rows apart."
            ) from e
        depends |= x.shape[0] > 1
        moved.append(Operand.of_canonical(jnp.asarray(x)[row]) if x.shape[0] > 1 else operand)
    read = [((), np.int32)] * 4 + [(o.feature_shape, o.array.dtype) for _, o in operands]
    scalars = [jax.ShapeDtypeStruct(n, jax.dtypes.canonicalize_dtype(d)) for n, d in read]
    jaxpr = jax.make_jaxpr(fn)(*lead, *scalars).jaxpr
    b = jaxpr.invars[len(lead)]
    depends |= any(x is b for eqn in jaxpr.eqns for x in eqn.invars)
    return tuple(moved) if depends else None
