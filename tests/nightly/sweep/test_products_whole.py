"""Products of blocks, of every length."""

import pytest
import test_products as unit


@pytest.mark.parametrize("lead", unit.LEADS, ids=["one", "many"])
@pytest.mark.parametrize("few", unit.FEW)
@pytest.mark.parametrize("n", unit.LENGTHS)
@pytest.mark.parametrize("contract", unit.CONTRACT)
def test_products_and_their_gradients(contract, n, few, lead):
    unit.test_products_and_their_gradients(contract, n, few, lead)


@pytest.mark.parametrize("few", unit.FEW)
@pytest.mark.parametrize("n", unit.LENGTHS)
@pytest.mark.parametrize("contract", unit.CONTRACT)
def test_what_the_multiplier_reads(contract, n, few):
    unit.test_what_the_multiplier_reads(contract, n, few)
