"""Short calls compile in seconds, whatever their heads and dropout are.

A part of what `nightly/test_compile_time.py` compiles: the product of the axes that decide how a
forward of one block is fused.
"""

import itertools

import pytest

from matrix.compile_time import Case, KINDS, not_in_time


LENGTHS = 2, 4, 16
HEADS = (2, 2), (4, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_short_forwards_compile_in_time(kind):
    axes = LENGTHS, HEADS, (False, True)
    cases = [Case(kind, n, *h, drop, False, "float32") for n, h, drop in itertools.product(*axes)]
    assert not_in_time(cases) == []
