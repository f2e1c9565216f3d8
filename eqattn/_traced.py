"""A user's function as what one trace of it finds, where its code does not tell all that it reads.

The trace runs the function itself, so that it reads whatever the function reads, in whatever
objects: `self.scale` of an ordinary object, the parameter of a layer of Flax. The arrays among this
are constants of the trace, those of a transformation around the call too. They become the leaves of
a `Closure`. All else is a program of operations on scalars. Programs are compared by value, so that
a cache of compiled functions has one entry for all calls that differ in their arrays only.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._closure import Closure, Recipe
from ._jax import interpret, jaxprs_in_params, primitives, vary, varying_axes


def traced(fn: Callable, scalars: Sequence[Any]) -> Closure:
    """A function as a `Closure` of the arrays that it reads now.

    **Arguments:**

    - `fn`: a function of scalars, or of vectors of features. It is called.
    - `scalars`: its arguments, as abstract values. The function of the `Closure` casts to these.

    **Returns:** a `Closure` whose function takes the same arguments. If `fn` calls functions that a
    program cannot compare, such as branches, loops, and those with derivatives of their own, this
    function is `fn` itself, and no cache may hold it.
    """
    found = _program(jax.make_jaxpr(lambda *xs: fn(*xs))(*scalars))
    if found is None:
        return Closure((), Recipe(None, lambda _: fn))
    arrays, steps, result = found
    dtypes = tuple(x.dtype for x in scalars)
    again = lambda xs: _Program(tuple(xs), steps, result, dtypes)
    return Closure(tuple(arrays), Recipe(("traced", steps, result, dtypes), again))


class _Program:
    """A function that runs the steps of a program."""

    def __init__(self, arrays, steps, result, dtypes):
        self.arrays, self.steps, self.result, self.dtypes = arrays, steps, result, dtypes

    def __call__(self, *scalars: Any) -> Any:
        done: list[Any] = []
        args = [jnp.asarray(x).astype(dtype) for x, dtype in zip(scalars, self.dtypes, strict=True)]
        given = {"argument": args, "array": self.arrays, "step": done}

        def read(kind: str, *at: Any) -> Any:
            if kind == "value":
                data, dtype, shape = at
                return np.frombuffer(data, dtype).reshape(shape)
            x = given[kind][at[0]]
            return x[at[1]] if kind == "step" else x

        for primitive, params, ins in self.steps:
            xs = [read(*x) for x in ins]
            # They varied alike when the function was traced, perhaps outside of a `shard_map`.
            axes = varying_axes(*xs)
            xs = [vary(x, axes) for x in xs] if axes else xs
            ys = primitive.bind(*xs, **dict(params))
            done.append(ys if primitive.multiple_results else [ys])
        return read(*self.result)


def _program(closed: Any) -> tuple[list, tuple, tuple] | None:
    """The arrays, the steps and the result of a jaxpr with one result. Calls in it are inlined. It
    is None if the steps cannot be compared.

    Each step is a primitive, its parameters, and where it has its arguments from. The same says
    what the result is: `("argument", i)`, `("array", i)`, `("step", i, j)`, or `("value", ...)`.
    """
    arrays, steps = [], []

    def constant(x: Any) -> tuple:
        if isinstance(x, jax.Array):
            arrays.append(x)
            return "array", len(arrays) - 1
        x = np.asarray(x)
        return "value", x.tobytes(), x.dtype, x.shape

    def literal(v: Any) -> tuple:
        return constant(np.asarray(v.val, v.aval.dtype))

    def evaluate(eqn: Any, xs: list) -> list:
        if eqn.primitive is primitives.jit_p:
            inner = eqn.params["jaxpr"]
            return interpret(inner.jaxpr, list(map(constant, inner.consts)), xs, evaluate, literal)
        if eqn.effects or list(jaxprs_in_params(eqn.params)):
            raise _Incomparable
        steps.append((eqn.primitive, tuple(sorted(eqn.params.items())), tuple(xs)))
        return [("step", len(steps) - 1, i) for i in range(len(eqn.outvars))]

    args = [("argument", i) for i in range(len(closed.jaxpr.invars))]
    consts = list(map(constant, closed.consts))
    try:
        (result,) = interpret(closed.jaxpr, consts, args, evaluate, literal)
        hash(tuple(steps))
    except (_Incomparable, TypeError):
        return None
    return arrays, tuple(steps), result


class _Incomparable(Exception):
    """A step whose parameters are not values."""
