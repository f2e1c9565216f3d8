"""Masks and scores for packed queries: each batch element is a block of queries, from one row or
from several.

A mask and a score are functions of the row `b`. But here the batch index is that of a block, not of
a row. So the row to which a block, or each query in it, belongs becomes an operand. It travels with
the block and replaces `b`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    """A mask that reads the row from an operand.

    **Arguments:**

    - `mask`: the mask of rows.
    - `held`: the row, and the operands of the mask for each block.
    """

    mask: AbstractMask
    held: tuple[Operand, ...]

    def operands(self) -> tuple[Operand, ...]:
        return self.held

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return self.mask.visible(ids[0], h, q, k, *ids[1:])


class _Transform(eqx.Module):
    """The `transform` of a score that reads the row from an operand."""

    score: AbstractScore

    def __call__(self, logit: Any, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return self.score.transform(logit, ids[0], h, q, k, *ids[1:])


class PackedRows(NamedTuple):
    """The rows that packed queries belong to.

    **Arguments:**

    - `row`: the row of each block, int32 `[blocks]`, or of each of its queries, `[blocks, q]`.
    - `rows`, `heads`: the numbers of rows and of query heads.
    - `tokens`: the packed queries of each block, int32 `[blocks, q]`, for lists of keys.
    - `token`: the place of each query among those of its row, int32 `[blocks, q]`, where arrays may
        have an entry for each query or key; else None.
    - `sizes`: how many queries and keys a row has in such arrays.
    """

    row: Array
    rows: int
    heads: int
    tokens: Array
    token: Array | None = None
    sizes: tuple[int, int] = (1, 1)

    @property
    def operand(self) -> Operand:
        """The row of each block or query."""
        return Operand(self.row, "bt"[: self.row.ndim])

    def of_blocks(self, operand: Operand, name: str) -> Operand | None:
        """An operand of rows as one of blocks; None if it is the same for all rows and queries.

        **Raises:** `ValueError` if its shape does not allow it.
        """
        given = f"{name} holds an array {tuple(operand.array.shape)} (axes {operand.axes!r}). "
        try:
            x = jnp.asarray(canonical(operand, (self.rows,), self.heads, *self.sizes, name))
        except ValueError as e:
            raise ValueError(
                f"{given}Queries are packed here, so arrays may be per row ({self.rows}) or head "
                f"({self.heads}), not per query or key: use a function of positions, or call "
                "attention with the rows apart."
            ) from e
        if x.shape[0] == x.shape[2] == 1:
            return None
        if self.token is None:
            return Operand.of_canonical(x[self.row])
        if x.shape[3] > 1:
            raise ValueError(
                f"{given}Keys are read for several of the {self.rows} rows and of their queries at "
                "once, so an array per key must be the same for all of them: use a function of "
                "positions, or attention with Causal() & cache.mask()."
            )
        # [blocks, q, H, 1, *f], as the axes of indices go in front where a slice is between them.
        at = [i if n > 1 else 0 * i for i, n in zip((self.row, self.token), x.shape[::2])]
        return Operand.of_canonical(jnp.moveaxis(x[at[0], :, at[1]], 1, 2))


def mask_of_rows(mask: AbstractMask | None, rows: PackedRows) -> Any:
    """Turns a mask of rows, or None, into a mask of blocks.

    **Raises:** `ValueError` if the mask holds arrays that have no entries for blocks.
    """

    def of_blocks(term):
        if term.selects:
            return term.of_packed(rows.tokens)  # pyright: ignore[reportAttributeAccessIssue]
        if rows.token is None and (moved := term.of_rows(rows.row)) is not None:
            return moved
        held = _held(term, term.visible, (), rows)
        return term if held is None else _OfRows(term, held)

    return None if mask is None else map_terms(mask, of_blocks)


def scores_of_rows(
    scores: Sequence[AbstractScore], rows: PackedRows, dtype: Any
) -> tuple[AbstractScore, ...]:
    """Turns scores of rows into scores of blocks, as `mask_of_rows` does. The `dtype` is that of
    the query.
    """
    logit = (jax.ShapeDtypeStruct((), accumulation_dtype(dtype)),)
    of_blocks = [_held(s, s.transform, logit, rows) for s in scores]
    return tuple(
        score if held is None else ScoreFn(_Transform(score), held)
        for score, held in zip(scores, of_blocks)
    )


def _held(
    part: Any, fn: Callable, lead: tuple[Any, ...], rows: PackedRows
) -> tuple[Operand, ...] | None:
    """The operands of a mask or score for blocks, after one that holds the rows. It is None where
    neither the operands nor the function depend on the row or on the place of a query.

    **Arguments:**

    - `part`: the mask or score.
    - `fn`: its function of a pair, `fn(*lead, b, h, q, k, *operands)`.
    - `lead`: the arguments in front of `b`, as abstract values.
    """
    operands = named_operands(part)
    moved = [rows.of_blocks(operand, name) for name, operand in operands]
    read = [((), np.int32)] * 4 + [(o.feature_shape, o.array.dtype) for _, o in operands]
    scalars = [jax.ShapeDtypeStruct(n, jax.dtypes.canonicalize_dtype(d)) for n, d in read]
    jaxpr = jax.make_jaxpr(fn)(*lead, *scalars).jaxpr
    b = jaxpr.invars[len(lead)]
    depends = any(x is b for eqn in jaxpr.eqns for x in eqn.invars)
    if not depends and all(x is None for x in moved):
        return None
    same = (operand for _, operand in operands)
    return rows.operand, *(old if new is None else new for old, new in zip(same, moved))
