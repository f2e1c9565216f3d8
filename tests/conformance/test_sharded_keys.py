"""Keys that are sharded over devices, over the axes of the matrix."""

import pytest

from .cases import covering, invalid, name_of
from .test_conformance import check


EVEN = ((16, 16), (32, 48))


def of_each(axis: str, always: tuple) -> list:
    """A case for each value of an axis, all but some of them slow."""
    found = {}
    for i, case in enumerate(covering(2)):
        case = case | {"target": ("ragged_keys", 4), "length": EVEN[i % len(EVEN)]}
        if invalid(case) is None:
            found[case[axis]] = case
    marks = {value: () if value in always else pytest.mark.slow for value in found}
    return [pytest.param(c, marks=marks[x], id=name_of(c)) for x, c in found.items()]


@pytest.mark.parametrize("case", of_each("transform", ("grad", "hvp", "vmap_grad")))
def test_every_transform(case):
    check(case)


@pytest.mark.parametrize("case", of_each("mask", ()))
def test_every_mask(case):
    check(case)


@pytest.mark.parametrize("case", of_each("operands", ("bfloat16",)))
def test_every_dtype_of_operands(case):
    check(case)


@pytest.mark.parametrize("case", of_each("score", ()))
def test_every_score(case):
    check(case)
