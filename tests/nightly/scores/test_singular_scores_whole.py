"""Singular scores, in every strategy and with more sizes."""

import pytest
import test_singular_scores as unit


@pytest.mark.parametrize("block, t, lengths, kind, place", unit.CASES)
def test_a_score_may_be_singular(block, t, lengths, kind, place, request):
    unit.test_a_score_may_be_singular_where_nothing_is_visible(
        block, t, lengths, kind, place, request
    )
