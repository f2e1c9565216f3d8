"""A score and a mask of every kind of function, everywhere."""

import pytest
import test_kinds_of_functions as unit


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "new"])
@pytest.mark.parametrize("kind", unit.KINDS)
@pytest.mark.parametrize(
    "test",
    [
        unit.test_a_score_reads_the_array_that_is_there_now,
        unit.test_a_mask_reads_the_array_that_is_there_now,
        unit.test_on_a_ring_of_eight_devices,
        unit.test_in_a_layer,
    ],
)
def test_all_kinds(test, kind, kept, x64):
    test(kind, kept)
