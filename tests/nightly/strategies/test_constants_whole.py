"""Numbers of `test_constants.py` under every optimiser."""

import pytest
import test_constants as unit


@pytest.mark.parametrize("optimiser", unit.OPTIMISERS)
@pytest.mark.parametrize("kind", [unit.strategies, unit.layers, unit.scores])
def test_optimisers_move_no_numbers(kind, optimiser):
    unit.test_optimisers_move_arrays_and_no_numbers(kind, optimiser)


def test_a_number_and_an_array_of_a_layer():
    unit.test_a_number_and_an_array_give_the_same_values_and_gradients(unit.layers)
