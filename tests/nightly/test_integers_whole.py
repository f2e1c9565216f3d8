"""Every argument with every traced integer that does not fit."""

import pytest
import test_integers as unit


@pytest.mark.parametrize("value", unit.FAR.values(), ids=unit.FAR)
@pytest.mark.parametrize("name", unit.TRACED)
def test_traced_int64_that_does_not_fit_raises(name, value, x64):
    unit.test_traced_int64_that_does_not_fit_raises(name, value, x64)
