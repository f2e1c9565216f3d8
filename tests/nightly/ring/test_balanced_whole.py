"""Real documents on up to 256 devices."""

import pytest
import ring.test_balanced as unit


@pytest.mark.parametrize(
    "tokens, n", [(2**16, 16), (2**17, 32), (2**18, 64), (2**19, 128), (2**20, 256)]
)
def test_real_documents(tokens, n):
    unit.test_real_documents(tokens, n)
