"""Blocks whose parts are known, in all cases of `test_tpu_lists.py`."""

import pytest
import test_tpu_lists as unit


@pytest.mark.parametrize("name, offset, heads, classes", unit.PARTS)
def test_all_known_parts(name, offset, heads, classes, monkeypatch):
    unit.test_known_parts(name, offset, heads, classes, monkeypatch)
