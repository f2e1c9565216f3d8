"""The cases of `tests/matrix/kernels` for Hopper. Mosaic interprets them in jax 0.12 only."""

import jax
import pytest
from matrix.kernels.test_kernel_cases import cases, check


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="Mosaic GPU of jax 0.12 is needed")
@pytest.mark.parametrize("case", cases("gpu"))
def test_interactions_on_hopper(case):
    check(case)
