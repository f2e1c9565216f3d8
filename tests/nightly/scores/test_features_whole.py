"""Operands with features, in every strategy."""

import numpy as np
import pytest
import test_features as unit


@pytest.mark.parametrize("name", unit.STRATEGIES)
def test_a_second_product_in_masks_and_scores(name, x64):
    unit.test_a_second_product_in_masks_and_scores(name, x64)


def test_what_is_masked_and_infinite_reaches_nothing(x64):
    unit.test_what_is_masked_reaches_nothing(np.inf, x64)
