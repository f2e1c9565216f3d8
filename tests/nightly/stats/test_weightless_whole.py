"""Pairs that weigh nothing, in every strategy."""

import pytest
import test_weightless as unit

from eqattn import Blockwise, Dense, Ragged


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("strategy", [Blockwise(), Ragged(), Dense()])
def test_the_mean_of_a_function_of_the_logit(strategy, known, x64):
    unit.test_the_mean_of_a_function_of_the_logit(strategy, known, x64)


@pytest.mark.parametrize("strategy", [Blockwise(), Dense()])
@pytest.mark.parametrize("fn", unit.FUNCTIONS)
def test_a_function_need_not_be_finite_there(strategy, fn, x64):
    unit.test_a_function_need_not_be_finite_there(strategy, fn, x64)
