"""Numbers of pairs of every kind are not copied."""

import pytest
import test_token_pairs as unit


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("kind", unit.KINDS)
def test_they_are_not_copied(kind, group):
    unit.test_they_are_not_copied(kind, group)
