"""Users' functions in the mask and the scores of a call."""

from typing import Any

import jax
import numpy as np

from .._closure import Closure, closure_of
from .._misc import accumulation_dtype
from ..masks._function import MaskFn
from ..scores._function import ScoreFn


def opened(tree: Any, dtype: Any) -> Any:
    """A mask or scores in which users' functions are `Closure`s.

    **Arguments:**

    - `tree`: the mask or the scores.
    - `dtype`: the dtype of the query. Functions that must be traced are given logits of its sums.
    """

    def one(part: Any) -> Any:
        if not isinstance(part, ScoreFn | MaskFn) or isinstance(part._fn, Closure):
            return part
        held, new = part._fn, closure_of(part.fn) or _traced(part, dtype)
        return jax.tree.map(lambda x: new if x is held else x, part, is_leaf=lambda x: x is held)

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, ScoreFn | MaskFn))


def _traced(part: Any, dtype: Any) -> Closure:
    # Few calls need these imports, which take long.
    from .._traced import traced
    from .lookups import of_scalars, scalars_of

    scalars = scalars_of(part, np.zeros((), accumulation_dtype(dtype)))
    return traced(of_scalars(part, scalars)[0], scalars)
