"""`Neighbourhood` in a ring."""

import test_neighbourhood as unit


def test_in_rings_with_tokens_of_text():
    unit.test_in_kernels_and_rings_with_tokens_of_text("zigzag")
