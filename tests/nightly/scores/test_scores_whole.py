"""What functions hold, in every strategy, and a learned cap in every kernel."""

import pytest
import test_scores as unit


@pytest.mark.parametrize("strategy", unit.STRATEGIES)
@pytest.mark.parametrize("name", unit.FUNCTIONS)
def test_gradient_of_what_a_function_holds(name, strategy, x64):
    unit.test_gradient_of_what_a_function_holds(name, strategy, x64)


@pytest.mark.parametrize("backend", ["tpu", "triton"])
def test_a_learned_cap_in_kernels(backend):
    unit.test_a_learned_cap_may_change_its_sign(backend)


def test_every_gradient_of_dense(x64):
    unit.test_order_of_operations_and_every_gradient("dense", x64)
    unit.test_a_score_may_be_singular_where_it_is_masked("dense", x64)


@pytest.mark.parametrize("shape", [(), (unit.H, 1, unit.S)], ids=str)
def test_bias_of_any_shape_has_its_gradient(shape, x64):
    unit.test_bias_of_any_shape_has_its_gradient(shape, x64)
