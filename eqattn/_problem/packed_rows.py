"""Masks and scores of rows where each batch element is a block of one row's queries."""

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
from ..scores._base import AbstractScore
from ..scores._function import ScoreFn


class _OfRows(AbstractMask):
    mask: AbstractMask
    held: tuple[Operand, ...]  # the row of each block, and the mask's operands there

    def operands(self) -> tuple[Operand, ...]:
        return self.held

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return self.mask.visible(ids[0], h, q, k, *ids[1:])


class _Transform(eqx.Module):
    score: AbstractScore

    def __call__(self, logit: Any, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return self.score.transform(logit, ids[0], h, q, k, *ids[1:])


def mask_of_rows(mask: AbstractMask | None, row: Array, rows: int, heads: int) -> Any:
    """A mask of `rows` rows as one of blocks, whose rows are `row` `[blocks]`.

    **Raises:** `ValueError` if it holds arrays per query or key.
    """
    if mask is None:
        return None
    held = _held(mask, mask.visible, (), row, rows, heads)
    return mask if held is None else _OfRows(mask, held)


def scores_of_rows(
    scores: Sequence[AbstractScore], row: Array, rows: int, heads: int, dtype: Any
) -> tuple[AbstractScore, ...]:
    """The same for scores of a query of a dtype."""
    logit = (jax.ShapeDtypeStruct((), accumulation_dtype(dtype)),)
    of_blocks = [_held(s, s.transform, logit, row, rows, heads) for s in scores]
    return tuple(
        score if held is None else ScoreFn(_Transform(score), held)
        for score, held in zip(scores, of_blocks)
    )


def _held(
    part: Any, fn: Callable, lead: tuple[Any, ...], row: Array, rows: int, heads: int
) -> tuple[Operand, ...] | None:
    """The operands of `part` for blocks, that of the rows in front; None where neither they nor
    `fn(*lead, b, ...)` depend on the row.
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
        moved.append(Operand(jnp.asarray(x)[row], "bhts") if x.shape[0] > 1 else operand)
    scalar = lambda dtype: jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(dtype))
    scalars = [scalar(d) for d in (*[np.int32] * 4, *[o.array.dtype for _, o in operands])]
    jaxpr = jax.make_jaxpr(fn)(*lead, *scalars).jaxpr
    b = jaxpr.invars[len(lead)]
    depends |= any(x is b for eqn in jaxpr.eqns for x in eqn.invars)
    return tuple(moved) if depends else None
