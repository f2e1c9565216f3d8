"""The mask of sequences that share a row: a query sees only its own segment."""

from typing import Any

import numpy as np

from .._misc import as_ids, eagerly
from .._pairs import Operand
from ._base import AbstractMask


class Segments(AbstractMask):
    """A query sees the keys of its own segment. An id below 0 is padding: it sees nothing and
    nothing sees it.

    **Arguments:**

    - `q_ids`: an int array `[*b, t]`, the segment of each query.
    - `kv_ids`: an int array `[*b, s]`, the segment of each key. The default is `q_ids`.
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
        # Ids are equal if each is at most the other. So each id travels twice: as `low` on the
        # smaller side of a comparison, and as `high` on the larger side. Padding has the greatest
        # integer as `low` and the least as `high`. A pair with padding then fails a comparison, as
        # ids are at least 0. The least `low` and the greatest `high` of a block are those of its
        # segments alone, wherever it holds padding. So the block is empty exactly where the range
        # of its queries' ids does not meet that of its keys' ids.
        dtype = np.promote_types(self.q_ids.dtype, self.kv_ids.dtype)
        # Kernels for GPUs compare no numbers of 8 bits.
        dtype = np.promote_types(dtype, f"{dtype.kind}4")
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
