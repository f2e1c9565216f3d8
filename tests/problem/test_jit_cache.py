"""The cache of traces tells apart what Python calls equal."""

import jax.numpy as jnp

from eqattn._problem.jit_cache import cached


def test_equal_values_of_other_types_have_traces_of_their_own():
    f = cached(lambda x: jnp.asarray(x))
    assert [f(x).dtype.kind for x in (1, True, 1.0)] == ["i", "b", "f"]
