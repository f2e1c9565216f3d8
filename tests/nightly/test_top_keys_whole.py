"""`top_keys` in every strategy."""

import pytest
import test_top_keys as unit

from eqattn import Blockwise, Dense, Ring


@pytest.mark.parametrize("name", unit.STRATEGIES)
def test_it_lists_what_sorting_lists(name, x64):
    unit.test_it_lists_what_sorting_lists(name, x64)


def test_keys_of_a_tree_in_a_ring():
    unit.test_keys_of_a_tree_are_listed_by_their_places(Ring)


@pytest.mark.parametrize("strategy", [Blockwise(), Dense()], ids=["blockwise", "dense"])
def test_keys_that_are_stored_as_bits(strategy):
    unit.test_keys_that_are_stored_as_bits(strategy)
