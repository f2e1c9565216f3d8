"""Block functions as flat jaxprs, for kernels that hold them: shared by all devices.

Operations on predicates, written with `and`, `or` and `not`.

The compilers of kernels know those three, `xor`, equality and conversions. That of TPUs has no
selection between predicates, and fails at some that are ordered.
"""

import functools as ft
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jax import evaluated, interpret, Literal, only_varies
from .._sweep.centred_tangent import evaluate_refined, refined_p


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


LOG2E = math.log2(math.e)
# Equations that evaluate a body once, and the parameters in which they keep it. Other operations
# have a body, too: `scan` evaluates its body once a turn.
_CALLERS = set(
    "call checkpoint closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr "
    "jit pjit remat remat2".split()
)
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")


_LOST = -(2.0**24)


def in_powers_of_two(origin: Any, units: Any) -> Any:
    """The origins of a sweep's exponents in units of `log 2`, and inf for rows without exponents.

    They were rounded in natural units and are rounded again, so they differ from the logits by a
    few of their last places. Such a place is at least 1 beyond 2^24, and powers may overflow from
    1e9 on. A row whose logits are all below -2^24 is hidden by a bias, as one of -1e10 for padding.
    No pair of it adds to a gradient, where an infinite power times a cotangent of 0 would be NaN.

    **Arguments:**

    - `origin`: the origins.
    - `units`: the same in units of `log 2`.
    """
    return jnp.where(origin < _LOST, jnp.finfo(jnp.float32).max, units)


def origin_in(eqn: Any) -> Any:
    """The variable `m` of which an operation makes the finite origin of exponents, or None.

    The origin is `max(m, least)` with the least float. In a row that has seen nothing, `m` is -inf,
    and exponents are `-inf - least = -inf` instead of `-inf + inf`, which is NaN.
    """
    if eqn is None or eqn.primitive is not lax.max_p:
        return None
    v, least = eqn.invars
    finite = isinstance(least, Literal) and least.val == np.finfo(np.float32).min
    return v if finite else None


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns")


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of all that it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from equations(getattr(inner, "jaxpr", inner))


def calls(eqn: Any) -> Any:
    """The body that an equation calls, or None if it calls none."""
    if eqn.primitive.name not in _CALLERS:
        return None
    return next((p for n in _CALLED if (p := eqn.params.get(n)) is not None), None)


def _only_marks(eqn) -> bool:
    """Whether an equation changes nothing but over which devices a value is spread, or how it is
    differentiated. A kernel is one device's, and derivatives are taken before.
    """
    same = eqn.primitive is lax.reshape_p and eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
    return only_varies(eqn) or eqn.primitive.name in ("reshard", "stop_gradient") or same


def _in_place(eqn, xs) -> list:
    """The results of an equation, or of the body that it calls, at `xs`."""
    if _only_marks(eqn):
        return xs
    called = calls(eqn)
    if eqn.primitive is refined_p:
        called = jax.make_jaxpr(ft.partial(evaluate_refined, **eqn.params))(*xs)
    if called is None:
        y = written(eqn, xs)
        return evaluated(eqn, xs) if y is None else [y]
    return interpret(getattr(called, "jaxpr", called), getattr(called, "consts", ()), xs, _in_place)


def flat_jaxpr(closed: Any) -> Any:
    """A closed jaxpr with its calls replaced by their bodies. What it does to predicates is written
    by operations that all compilers have.
    """
    return replaced_jaxpr(closed, [v.aval.shape for v in closed.jaxpr.invars], _in_place)


def replaced_jaxpr(closed: Any, shapes: Sequence, evaluate: Callable) -> Any:
    """A closed jaxpr, traced again.

    **Arguments:**

    - `shapes`: the shapes of its arguments in the new jaxpr.
    - `evaluate`: `(equation, its arguments) -> its results`, as for `interpret`.
    """
    avals = [jax.ShapeDtypeStruct(n, v.aval.dtype) for n, v in zip(shapes, closed.jaxpr.invars)]
    return jax.make_jaxpr(lambda *xs: interpret(closed.jaxpr, closed.consts, xs, evaluate))(*avals)
