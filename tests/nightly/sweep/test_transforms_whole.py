"""Every transform of JAX of `test_transforms.py`."""

import pytest
import test_transforms as unit
from test_transforms import _x64  # noqa: F401, a fixture for all tests


@pytest.mark.parametrize("name", unit.TRANSFORMS)
def test_transform(name):
    unit.test_transform(name)
