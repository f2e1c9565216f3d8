"""Maps over some axes of a mesh, of every strategy, mask and score."""

import pytest
import ring.test_own_partial_maps as unit


@pytest.mark.parametrize("score", unit.SCORES)
@pytest.mark.parametrize("name, mask, check", unit.CASES)
def test_other_axes_stay_automatic(name, mask, check, score):
    unit.test_other_axes_stay_automatic(name, mask, check, score)


@pytest.mark.parametrize("score", ["module", "closure"])
@pytest.mark.parametrize("name", unit.SHARDED)
def test_a_table_is_sharded_over_the_axis_of_heads(name, score):
    unit.test_a_table_is_sharded_over_the_axis_of_heads(name, score)
