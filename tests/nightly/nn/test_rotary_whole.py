"""Every scaling of rotary positions in every way of tests/unit/nn."""

import jax.numpy as jnp
import pytest
import test_rotary as unit
import test_rotary_sections as sections

from eqattn import nn


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


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [None, 8, 2, 0])
def test_formula(dim, interleaved):
    unit.test_formula(dim, interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("axial", [False, True])
def test_each_section_turns_by_its_own_axis(axial, interleaved):
    sections.test_each_section_turns_by_its_own_axis(axial, interleaved)


@pytest.mark.parametrize("theta", sections.THETAS)
@pytest.mark.parametrize("scaling", sections.SCALINGS)
def test_one_axis_is_plain_rotary(scaling, theta):
    sections.test_one_axis_is_plain_rotary(scaling, theta)


@pytest.mark.parametrize("scaling", [nn.LinearScaling(4.0), nn.NTKScaling(4.0)])
@pytest.mark.parametrize("theta", [100.0, jnp.float32(100.0)])
def test_a_scaling_changes_each_section_by_itself(scaling, theta):
    sections.test_a_scaling_changes_each_section_by_itself(scaling, theta)


def test_gradients_of_sections():
    sections.test_gradients(False)
