"""Segments."""

from typing import Any

import numpy as np

from .._misc import as_ids, eagerly
from .._pairs import Operand
from ._base import AbstractMask


class Segments(AbstractMask):
    """A query sees the keys of its own segment. An id below 0 is padding: it sees nothing and
    nothing sees it.

    **Arguments:**

    - `q_ids`: int `[*b, t]`. `kv_ids`: int `[*b, s]`, by default the queries'.
    """

    q_ids: Any
    kv_ids: Any

    def __init__(self, q_ids: Any, kv_ids: Any = None):
        self.q_ids = as_ids(q_ids, "q_ids", least_ndim=1)
        self.kv_ids = self.q_ids if kv_ids is None else as_ids(kv_ids, "kv_ids", least_ndim=1)

        dtypes = self.q_ids.dtype, self.kv_ids.dtype
        if len({d.kind for d in dtypes}) > 1:
            raise TypeError(f"q_ids and kv_ids must both be signed or unsigned, got {dtypes}.")

    def operands(self) -> tuple[Operand, ...]:
        # Equal ids are `low <= high` both ways. With padding out of reach on either side, a block's
        # bounds are those of its segments alone, wherever it holds padding.
        dtype = np.promote_types(self.q_ids.dtype, self.kv_ids.dtype)
        out_of_reach = np.iinfo(dtype).max, np.iinfo(dtype).min
        operands = []
        for ids, axes in ((self.q_ids, "bt"), (self.kv_ids, "bs")):
            for limit in out_of_reach:
                x = eagerly(lambda xp, x: _move_padding(xp, x.astype(dtype), limit), ids)
                operands.append(Operand(x, axes))
        return tuple(operands)

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        q_low, q_high, k_low, k_high = ids
        return (q_low <= k_high) & (k_low <= q_high)


def _move_padding(xp, ids, limit):
    return ids if ids.dtype.kind == "u" else xp.where(ids < ids.dtype.type(0), limit, ids)
