"""The cache of traces: it tells apart what Python calls equal, and keeps no function's arrays."""

import gc
import types
import weakref

import jax
import jax.numpy as jnp

from eqattn._closure import closure_of, function_of
from eqattn._problem.problem import cached
from eqattn._traced import traced


def test_equal_values_of_other_types_have_traces_of_their_own():
    f = cached(lambda x: jnp.asarray(x))
    assert [f(x).dtype.kind for x in (1, True, 1.0)] == ["i", "b", "f"]


def test_what_a_trace_captured_is_freed_with_what_the_function_is_compared_by():
    class Local:
        shift = 2.0

    call = cached(lambda f, x: function_of(f)(x))
    assert call(closure_of(lambda x: x + Local.shift), jnp.ones(3)).sum() == 9
    local = weakref.ref(Local)
    del Local
    gc.collect()
    assert local() is None


def test_a_function_that_nothing_tells_from_a_later_one_is_not_remembered():
    """Nothing says when a namespace changes, and a branch is no program that could be compared."""
    held = types.SimpleNamespace(array=jnp.arange(3.0))

    def fn(x):
        return jax.lax.cond(x > 0, lambda: x + held.array.sum(), lambda: x)

    call = cached(lambda f, x: function_of(f)(x))
    run = lambda: call(traced(fn, [jax.ShapeDtypeStruct((), jnp.float32)]), jnp.float32(1))
    assert closure_of(fn) is None and run() == 4
    array = weakref.ref(held.array)
    held.array = jnp.arange(4.0)
    assert run() == 7
    gc.collect()
    assert array() is None
