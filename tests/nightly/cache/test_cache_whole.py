"""What tests/unit/cache/test_cache.py asks of few kinds of caches, of all."""

import pytest
import test_cache as unit
from _caches import EXACT, MAKE


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(
    "test",
    [
        unit.test_steps_are_the_whole,
        unit.test_rows_of_unequal_length,
        unit.test_truncate_drops_drafts,
    ],
)
def test_exact_caches(test, name, x64):
    test(name, x64)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(
    "test",
    [
        unit.test_no_rows,
        unit.test_unused_places_may_hold_anything,
        unit.test_reorder,
        unit.test_too_many_tokens_raise,
    ],
)
def test_all_caches(test, name):
    test(name)


@pytest.mark.parametrize("name", ["paged int8", "float8"])
def test_eight_bits_have_no_gradient(name):
    unit.test_eight_bits_have_no_gradient(name)


def test_eight_bits_are_close():
    unit.test_eight_bits_are_close("int8", 0.01)


def test_scales_in_shares_of_the_heads():
    unit.test_scales_in_shares_of_the_heads(True)
