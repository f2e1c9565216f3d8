"""Everything in this folder runs by `-m slow`."""

from pathlib import Path

import pytest


def pytest_ignore_collect(config):
    """The many cases here take seconds to list, which the default run is spared."""
    return True if config.getoption("markexpr") == "not slow" else None


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
