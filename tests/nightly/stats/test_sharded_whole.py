"""The mass of keys of each device, in other strategies."""

import pytest
import test_sharded as unit

from eqattn import AllGather, Ragged, Ulysses


@pytest.mark.parametrize("cls", [Ragged, Ulysses, AllGather])
def test_mass_of_the_keys_of_each_device(cls):
    unit.test_mass_of_the_keys_of_each_device(cls)
