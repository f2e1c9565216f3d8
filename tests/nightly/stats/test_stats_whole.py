"""Statistics of attention, in every strategy."""

import pytest
import test_stats as unit

from eqattn import Dense


@pytest.mark.parametrize("cls, n, own", unit.STRATEGIES)
def test_all_probabilities_give_the_same(cls, n, own, x64):
    unit.test_all_probabilities_give_the_same(cls, n, own, x64)


@pytest.mark.parametrize("cls, n, own", [(Dense, 1, {}), *unit.STRATEGIES])
def test_a_call_hands_over_its_logsumexp(cls, n, own, x64):
    unit.test_a_call_hands_over_its_logsumexp(cls, n, own, x64)


def test_dense_gives_the_same(x64):
    unit.test_other_strategies_give_the_same(Dense, x64)


def test_stored_keys_of_eight_bits():
    unit.test_stored_keys("eight bits")
