"""The rules of `test_interval_rules.py` for every dtype."""

import pytest
import test_interval_rules as unit
from test_interval_rules import FLOATS, INTS, wide  # noqa: F401, a fixture for all tests


@pytest.mark.parametrize("dtype", [*INTS, *FLOATS])
def test_functions_of_one_number(dtype):
    unit.test_functions_of_one_number_are_sound(dtype)


@pytest.mark.parametrize("dtype", [*INTS, *FLOATS])
def test_functions_of_two_numbers(dtype):
    unit.test_functions_of_two_numbers_are_sound(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_known_floats(dtype):
    unit.test_known_floats_are_rounded_too(dtype)


@pytest.mark.parametrize("dtype", [*INTS, *FLOATS])
def test_traced_rules(dtype):
    unit.test_rules_are_sound_when_traced(dtype)


@pytest.mark.parametrize("old", ["bool", *INTS, *FLOATS])
def test_casts(old):
    unit.test_casts_are_sound(old)
