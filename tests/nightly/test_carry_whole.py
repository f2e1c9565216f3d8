"""Gradients through every conversion of a Carry."""

import pytest
import test_carry as unit


@pytest.mark.parametrize("route, convert", unit.ROUTES)
def test_gradient(route, convert, x64):
    unit.test_gradient(route, convert, x64)
