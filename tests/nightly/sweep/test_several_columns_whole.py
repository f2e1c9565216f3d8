"""Several blocks of a list in one step, of every kind of list."""

import pytest
import test_several_columns as unit


@pytest.mark.parametrize("name, mapped", unit.MAPPED)
def test_values_and_derivatives(name, mapped, monkeypatch):
    unit.test_values_and_derivatives(name, mapped, monkeypatch)
