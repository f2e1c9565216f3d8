"""Block functions as flat jaxprs, for kernels that hold them: shared by all devices."""

import functools as ft
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax

from .._jax import evaluated, interpret, only_varies
from .._sweep.centred_tangent import evaluate_refined, refined_p
from ._predicates import written


LOG2E = math.log2(math.e)
# Equations that evaluate a body once, and the parameters in which they keep it. Other operations
# have a body, too: `scan` evaluates its body once a turn.
_CALLERS = set(
    "call checkpoint closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr "
    "jit pjit remat remat2".split()
)
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")


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
