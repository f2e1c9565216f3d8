"""Every scaling of rotary positions in every way of tests/unit/nn/test_rotary.py."""

import jax.numpy as jnp
import pytest
import test_rotary as unit


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("name", unit.SCALINGS)
def test_scaling(name, theta):
    unit.test_scaling(name, theta)


@pytest.mark.parametrize("dim", [None, 8])
@pytest.mark.parametrize("name", unit.SCALINGS)
def test_traced_theta_and_positions(name, dim):
    unit.test_traced_theta_and_positions(name, dim)


@pytest.mark.parametrize("scaling", [None, *unit.SCALINGS])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_narrow_theta_only_rounds_itself(dtype, scaling):
    unit.test_a_narrow_theta_only_rounds_itself(dtype, scaling)
