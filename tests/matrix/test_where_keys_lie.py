"""Keys that lie in pages or on several devices, over the axes of the matrix."""

import pytest

from .cases import invalid, with_every_mask
from .test_conformance import check


LENGTHS = ((16, 16), (32, 48))
TARGETS = {"paged": 1, "ragged_keys": 4, "paged_keys": 4}


def of_each(axis: str) -> list:
    """A case for each value of an axis and each target."""
    found = []
    for target, devices in TARGETS.items():
        of_value = {}
        for i, case in enumerate(with_every_mask()):
            case = case | {"target": (target, devices), "length": LENGTHS[i % len(LENGTHS)]}
            if target != "ragged_keys":
                case["lead"] = (2,)
            if invalid(case) is None:
                of_value[case[axis]] = case
        found += of_value.values()
    return found


EACH = "transform", "mask", "operands", "score"
# Most values are as without pages or devices, so all of them run at night.
FEW = [
    *(("transform", "paged", x) for x in ("grad", "vmap_grad")),
    *(("transform", "ragged_keys", "hvp"), ("transform", "paged_keys", "grad")),
    *(("mask", "ragged_keys", "tree"), ("operands", "ragged_keys", "bfloat16")),
]


@pytest.mark.parametrize("axis, target, value", FEW)
def test_some_values(axis, target, value):
    (case,) = (c for c in of_each(axis) if c["target"][0] == target and c[axis] == value)
    check(case)
