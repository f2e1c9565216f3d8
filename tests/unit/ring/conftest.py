import pytest


@pytest.fixture(autouse=True)
def wide(x64):
    """In float64, unless a test says otherwise."""
