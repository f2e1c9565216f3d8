"""`Neighbourhood` in a ring, and on more grids."""

import pytest
import test_neighbourhood as unit


@pytest.mark.parametrize("shape, tile, window, causal", unit.CASES)
def test_it_is_what_its_definition_says(shape, tile, window, causal):
    unit.test_it_is_what_its_definition_says(shape, tile, window, causal)


def test_in_rings_with_tokens_of_text():
    unit.test_in_kernels_and_rings_with_tokens_of_text("zigzag")
