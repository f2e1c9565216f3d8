"""Lists of keys of rows on each device: all lists, and wherever axes are."""

import pytest
import test_listed_rows as unit


@pytest.mark.parametrize("name", unit.CASES)
def test_each_device_folds_its_own_rows(name):
    unit.test_each_device_folds_its_own_rows(name)


@pytest.mark.parametrize("where", unit.WHERE)
def test_lists_wherever_axes_are(where):
    unit.test_lists_wherever_axes_are(where)
