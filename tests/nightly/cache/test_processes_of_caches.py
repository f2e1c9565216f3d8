"""Every kind of cache in the processes of tests/unit/cache."""

import exported
import pytest
from test_exported import test_the_batch_may_stay_open as check_open_batch
from test_full_caches import checked


@pytest.mark.parametrize("name", exported.KINDS)
def test_the_batch_may_stay_open(name):
    check_open_batch(name)


def test_all_devices_raise():
    assert len(checked()) == 33
