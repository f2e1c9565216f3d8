"""The tests of tests/unit/ring with all of their values, and what takes longer."""

import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parents[2] / "unit"))


@pytest.fixture(autouse=True)
def wide(x64):
    """In float64, as those of tests/unit/ring."""
