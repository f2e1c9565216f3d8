"""Values that are the first features of the keys, over the axes of the matrix."""

import pytest

from .cases import covering, invalid
from .test_conformance import check


def of_each_transform() -> dict:
    """A case for each."""
    cases = [c | {"target": ("latent", 1), "lead": (2,)} for c in covering(2)]
    return {c["transform"]: c for c in cases if invalid(c) is None}


@pytest.mark.parametrize("transform", ["grad", "hvp", "vmap_grad"])
def test_transforms_that_need_all_others(transform):
    check(of_each_transform()[transform])
