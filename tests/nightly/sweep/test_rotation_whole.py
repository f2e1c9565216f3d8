"""A sweep around a ring, on every route."""

import pytest
import test_rotation as unit


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("n, ahead, behind", unit.ROUTES)
def test_sums_around_a_ring(n, ahead, behind, unroll):
    unit.test_sums_around_a_ring(n, ahead, behind, unroll)
