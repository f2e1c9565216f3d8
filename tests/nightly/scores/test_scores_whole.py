"""What functions hold, in every strategy, and a learned cap in every kernel."""

import pytest
import test_scores as unit


@pytest.mark.parametrize("strategy", unit.STRATEGIES)
@pytest.mark.parametrize("name", unit.FUNCTIONS)
def test_gradient_of_what_a_function_holds(name, strategy, x64):
    unit.test_gradient_of_what_a_function_holds(name, strategy, x64)


def test_a_learned_cap_in_kernels_of_triton():
    unit.test_a_learned_cap_may_change_its_sign("triton")
