"""The dtype of the output, of every strategy and query."""

import pytest
import test_output_dtype as unit


@pytest.mark.parametrize("dtype", unit.DTYPES)
@pytest.mark.parametrize("name", unit.NAMES)
def test_the_query_decides(name, dtype, x64):
    unit.test_the_query_decides_and_a_runtime_dtype_overrules_it(name, dtype, x64)
