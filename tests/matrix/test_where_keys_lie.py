"""Keys that lie in pages or on several devices, over the axes of the matrix."""

import pytest

from .cases import covering, invalid, name_of
from .test_conformance import check


LENGTHS = ((16, 16), (32, 48))
TARGETS = {"paged": 1, "ragged_keys": 4, "paged_keys": 4}


def of_each(axis: str, **always: tuple) -> list:
    """A case for each value of an axis and each target. All are slow but for the values of some
    targets.
    """
    found = []
    for target, devices in TARGETS.items():
        of_value = {}
        for i, case in enumerate(covering(2)):
            case = case | {"target": (target, devices), "length": LENGTHS[i % len(LENGTHS)]}
            if target != "ragged_keys":
                case["lead"] = (2,)
            if invalid(case) is None:
                of_value[case[axis]] = case
        for value, case in of_value.items():
            marks = () if value in always.get(target, ()) else pytest.mark.slow
            found.append(pytest.param(case, marks=marks, id=name_of(case)))
    return found


@pytest.mark.parametrize(
    "case",
    of_each("transform", paged=("grad", "vmap_grad"), ragged_keys=("hvp",), paged_keys=("grad",)),
)
def test_every_transform(case):
    check(case)


@pytest.mark.parametrize("case", of_each("mask", ragged_keys=("tree",)))
def test_every_mask(case):
    check(case)


@pytest.mark.parametrize("case", of_each("operands", ragged_keys=("bfloat16",)))
def test_every_dtype_of_operands(case):
    check(case)


@pytest.mark.parametrize("case", of_each("score"))
def test_every_score(case):
    check(case)
