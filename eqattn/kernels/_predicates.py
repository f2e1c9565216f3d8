"""Operations on predicates, written with `and`, `or` and `not`.

The compilers of kernels know those three, `xor`, equality and conversions. That of TPUs has no
selection between predicates, and fails at some that are ordered.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


_WRITTEN: dict[Any, Callable] = {
    lax.max_p: lax.bitwise_or,
    lax.min_p: lax.bitwise_and,
    lax.lt_p: lambda x, y: lax.bitwise_and(lax.bitwise_not(x), y),
    lax.le_p: lambda x, y: lax.bitwise_or(lax.bitwise_not(x), y),
    lax.gt_p: lambda x, y: lax.bitwise_and(x, lax.bitwise_not(y)),
    lax.ge_p: lambda x, y: lax.bitwise_or(x, lax.bitwise_not(y)),
}


def _is_predicate(x: Any) -> bool:
    return jnp.result_type(x) == jnp.bool_


def written(eqn: Any, xs: Sequence[Any]) -> Any:
    """The result of an equation by operations that all compilers of kernels have; None for one that
    is left as it is.
    """
    if eqn.primitive is lax.select_n_p:
        which, *cases = xs
        plain = _is_predicate(which) and not _is_predicate(cases[0])
        return None if plain else _selected(which, cases)
    known = eqn.primitive in _WRITTEN and all(map(_is_predicate, xs))
    return _WRITTEN[eqn.primitive](*xs) if known else None


def _selected(which: Any, cases: Sequence[Any]) -> Any:
    """The case of a selection that a predicate or a number picks."""
    if not _is_predicate(which):
        # Branches of `lax.cond` and `lax.switch` are picked by numbers.
        *others, found = cases
        for i, x in reversed([*enumerate(others)]):
            picked = lax.eq(which, np.asarray(i, jnp.result_type(which))[()])
            found = _selected(picked, (found, x))
        return found
    if len(cases) == 1 or not _is_predicate(cases[0]):
        return lax.select_n(which, *cases)
    off, on = cases
    on, off = lax.bitwise_and(which, on), lax.bitwise_and(lax.bitwise_not(which), off)
    return lax.bitwise_or(on, off)
