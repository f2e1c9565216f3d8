"""Calls of every length, number of heads and dtype compile in seconds."""

import itertools

import pytest
from matrix.compile_time import Case, KINDS, not_in_time


pytestmark = pytest.mark.slow

LENGTHS = 1, 2, 3, 4, 8, 15, 16, 17, 32, 33, 64, 128
HEADS = (1, 1), (2, 2), (4, 2), (4, 1), (6, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_compile_in_time(kind, gradient, dtype):
    axes = LENGTHS, HEADS, (False, True)
    cases = [Case(kind, n, *h, drop, gradient, dtype) for n, h, drop in itertools.product(*axes)]
    assert not_in_time(cases) == []
