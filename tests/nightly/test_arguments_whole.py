"""All strange arguments of all entries."""

import pytest
from test_arguments import check, ENTRIES


@pytest.mark.parametrize("name", ENTRIES)
def test_all_strange_arguments(name):
    check(name, 1)
