"""Solves with Jacobians of linear maps, in both modes and strategies."""

import jax
import pytest
import test_linear_solves as unit
from test_linear_solves import _as_users_run_it  # noqa: F401, a fixture for all tests


@pytest.mark.parametrize("name", unit.STRATEGIES)
def test_the_gradient_of_a_root(name):
    unit.test_the_gradient_of_a_root(name)


@pytest.mark.parametrize("name", unit.STRATEGIES)
@pytest.mark.parametrize("jacobian", [jax.jacfwd, jax.jacrev])
def test_a_solve_with_the_jacobian_of_a_linear_map(name, jacobian):
    unit.test_a_solve_with_the_jacobian_of_a_linear_map(name, jacobian)
