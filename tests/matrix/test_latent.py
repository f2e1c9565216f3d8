"""Values that are the first features of the keys, over the axes of the matrix."""

import pytest

from .cases import covering, invalid, name_of
from .test_conformance import check


def of_each(axis: str) -> list:
    """A case for each value of an axis. The default run takes those that need all the rest."""
    cases = [c | {"target": ("latent", 1), "lead": (2,)} for c in covering(2)]
    cases = [c for c in cases if invalid(c) is None]
    of_value = {c[axis]: c for c in cases}
    most = ("grad", "hvp", "vmap_grad")
    marks = {value: () if value in most else pytest.mark.slow for value in of_value}
    return [pytest.param(c, marks=marks[x], id=name_of(c)) for x, c in of_value.items()]


@pytest.mark.parametrize("case", of_each("transform"))
def test_every_transform(case):
    check(case)
