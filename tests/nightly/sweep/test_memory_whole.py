"""Memory of every order of differentiation."""

import pytest
import test_memory as unit


@pytest.mark.parametrize("name", unit.ORDERS)
def test_linear_in_the_sequence(name):
    unit.test_linear_in_the_sequence(name)


@pytest.mark.parametrize("name", unit.ARRAYS)
def test_in_arrays_of_the_size_of_the_query(name):
    unit.test_in_arrays_of_the_size_of_the_query(name)


@pytest.mark.parametrize("name, heads, mebibytes", unit.BENCHMARK)
def test_at_the_size_of_the_benchmark(name, heads, mebibytes):
    unit.test_at_the_size_of_the_benchmark(name, heads, mebibytes)


def test_a_mapped_gradient_is_one_of_a_batch():
    unit.test_a_mapped_call_is_one_of_a_batch("grad")


@pytest.mark.parametrize("keys", [256, 600])
def test_no_turn_of_a_gradient_copies_what_it_adds_to(keys):
    unit.test_no_turn_of_a_gradient_copies_what_it_adds_to(keys)
