"""The cache of traces: it tells apart what Python calls equal, and keeps no function's arrays."""

import gc
import types
import weakref

import jax.numpy as jnp

from eqattn._closure import closure_of, function_of
from eqattn._misc import Static
from eqattn._problem.jit_cache import cached


def test_equal_values_of_other_types_have_traces_of_their_own():
    f = cached(lambda x: jnp.asarray(x))
    assert [f(x).dtype.kind for x in (1, True, 1.0)] == ["i", "b", "f"]


def test_what_a_trace_captured_is_freed_with_the_function():
    """Nothing says when a namespace changes, so the function is compared by identity."""
    held = types.SimpleNamespace(array=jnp.arange(3.0))
    fn = lambda x: x + held.array
    call = cached(lambda f, x: function_of(f)(x))
    assert call(closure_of(fn), jnp.ones(3)).sum() == 6
    array = weakref.ref(held.array)
    del fn, held
    gc.collect()
    assert array() is None
