"""The 3-wise covering array: every valid triple of values of any three axes. It takes hours.
`EQATTN_SHARD=i/n` runs the i-th of n equal parts (from 1).
"""

import os

import jax
import pytest
from matrix import (
    of_keys,
    test_conformance as conformance,
    test_statistics as statistics,
    test_top_keys as top_keys,
)
from matrix.cases import covering, interpreted_on_a_gpu, name_of, on_stairs


def part_of(cases) -> list:
    """The part that `EQATTN_SHARD` names."""
    part, parts = (int(x) for x in os.environ.get("EQATTN_SHARD", "1/1").split("/"))
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"EQATTN_SHARD={part}/{parts}: need 1 <= i <= n")
    return list(cases)[part - 1 :: parts]


CASES = [*covering(3), *on_stairs(3)]
CASES += interpreted_on_a_gpu(3, newest=jax.__version_info__ >= (0, 12))


@pytest.mark.parametrize("case", part_of(CASES), ids=name_of)
def test_conformance(case):
    conformance.check(case)


@pytest.mark.parametrize("case", part_of(of_keys.cases_of(3)), ids=name_of)
def test_statistics(case):
    statistics.check(case)


@pytest.mark.parametrize("case", part_of(of_keys.cases_of(3, top_keys.has_lists)), ids=name_of)
def test_top_keys(case):
    top_keys.check(case)
