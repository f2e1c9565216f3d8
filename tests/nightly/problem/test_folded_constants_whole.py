"""Large constants of every kind are not folded."""

import pytest
import test_folded_constants as unit


@pytest.mark.parametrize("name", unit.CASES)
def test_large_constants_are_not_folded(name):
    unit.test_large_constants_are_not_folded(name)
