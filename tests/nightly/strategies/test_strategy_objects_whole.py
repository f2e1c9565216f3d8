"""Transformations over `Dense` as a value."""

import test_strategy_objects as unit
from test_strategy_objects import _x64  # noqa: F401, a fixture for all tests

from eqattn import Dense


def test_derivatives():
    unit.test_grad(Dense)
    unit.test_hessian(Dense)
    unit.test_filter_grad_keeps_python_floats_constant(Dense)
