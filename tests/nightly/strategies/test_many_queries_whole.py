"""`Ragged` with as many rows as keys: all sizes of `test_many_queries.py` in all dtypes."""

import pytest
import test_many_queries as unit
from matrix.library import KERNELS


@pytest.mark.parametrize("platform", ["xla", KERNELS])
@pytest.mark.parametrize("t, s, kv_heads", unit.SIZES)
def test_results_and_gradients(t, s, kv_heads, platform):
    unit.test_results_and_gradients_are_those_of_blockwise(t, s, kv_heads, platform)


@pytest.mark.parametrize("dtype, atol", unit.DTYPES)
@pytest.mark.parametrize("t, kv_heads", unit.FEW)
def test_few_rows(x64, t, kv_heads, dtype, atol):
    unit.test_few_rows_of_blockwise(x64, t, kv_heads, dtype, atol)
