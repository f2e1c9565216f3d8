"""Memory of every order of differentiation."""

import jax
import jax.numpy as jnp
import pytest
import test_memory as unit
from _programs import DEFAULT_CODE
from test_memory import forward, ORDERS


BENCHMARK = [("forward", 8, 10), ("grad", 8, 18), ("grad", 2, 10)]


@pytest.mark.parametrize("name", unit.ORDERS)
def test_linear_in_the_sequence(name):
    unit.test_linear_in_the_sequence(name)


@pytest.mark.parametrize("name", unit.ARRAYS)
def test_in_arrays_of_the_size_of_the_query(name):
    unit.test_in_arrays_of_the_size_of_the_query(name)


@pytest.mark.parametrize("keys", [256, 600])
def test_no_turn_of_a_gradient_copies_what_it_adds_to(keys):
    unit.test_no_turn_of_a_gradient_copies_what_it_adds_to(keys)


@pytest.mark.parametrize("name, heads, mebibytes", BENCHMARK)
def test_at_the_size_of_the_benchmark(name, heads, mebibytes):
    """With two key heads, it is also their gradient of queries that lies by tokens."""
    q, k = (jax.ShapeDtypeStruct((1, 2048, h, 64), jnp.float32) for h in (8, heads))
    compiled = jax.jit(ORDERS[name]).lower(q, k, k).compile(DEFAULT_CODE)
    assert compiled.memory_analysis().temp_size_in_bytes <= mebibytes * 2**20


@pytest.mark.parametrize("name", ["forward", "grad"])
def test_a_mapped_call_is_one_of_a_batch(name):
    """Queries were copied there, as a cut beside an axis of size 1 was not undone without it."""
    x = jax.ShapeDtypeStruct((2, 1024, 8, 64), jnp.float32)
    found = []
    for call in (forward, jax.vmap(forward)):
        of = lambda *xs, call=call: jnp.sum(jnp.sin(call(*xs)))
        run = jax.grad(of, (0, 1, 2)) if name == "grad" else call
        compiled = jax.jit(run).lower(x, x, x).compile(DEFAULT_CODE)
        found.append(compiled.memory_analysis().temp_size_in_bytes)
    assert found[1] <= 1.02 * found[0]
