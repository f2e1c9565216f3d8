"""All cases of the tests in tests/matrix that run few of theirs."""

import pytest
from matrix import (
    test_export as export,
    test_interactions as interactions,
    test_narrow_sums as narrow_sums,
    test_operand_dtypes as operand_dtypes,
    test_without_jit as without_jit,
)


@pytest.mark.parametrize("strategy, name", [*export.CASES, *export.LISTED])
def test_any_batch(strategy, name):
    export.test_any_batch(strategy, name)


@pytest.mark.parametrize("strategy, name", export.CASES)
def test_any_batch_and_length(strategy, name):
    export.test_any_batch_and_length(strategy, name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("direction", interactions.DIRECTIONS)
@pytest.mark.parametrize("heads", interactions.HEADS, ids=interactions.name_of)
@pytest.mark.parametrize("target", interactions.TARGETS)
def test_all_with_all(target, heads, direction, dropout, dtype):
    interactions.check(target, heads, direction, dropout, dtype, interactions.LENGTHS)


@pytest.mark.parametrize("strategy, slopes", narrow_sums.CROSSED)
def test_gradients_round_once(strategy, slopes):
    narrow_sums.test_gradients_round_once(strategy, slopes)


@pytest.mark.parametrize("strategy, transform, slopes, dtype, operand", operand_dtypes.CASES)
def test_operands_of_any_dtype(strategy, transform, slopes, dtype, operand, x64):
    operand_dtypes.test_operands_of_any_dtype(strategy, transform, slopes, dtype, operand, x64)


@pytest.mark.parametrize("case", without_jit.CASES, ids=without_jit.name_of)
def test_without_jit(case):
    without_jit.test_transform(case)
