"""The cases of what reads queries and keys, and no values: `top_keys` and statistics."""

from collections.abc import Callable, Collection

import pytest

from .cases import Case, covering, invalid, name_of
from .test_conformance import part_of, wants_slow_cases


# No kernel is one of these, and cascades have none.
TARGETS = ("blockwise", 1), ("dense", 1), ("ring", 2), ("ragged", 1)
MORE = ("ring", 4), ("ulysses", 2), ("all_gather", 2), ("paged", 1), ("latent", 1)
MORE += ("int8", 1), ("ring_buffer", 1)


def parametrize(
    metafunc, targets: Collection = TARGETS, fits: Callable[[Case], bool] = lambda case: True
) -> None:
    """Gives `test_3wise` and `test_pairwise` their cases, those that `fits` says. By default, the
    latter runs one of each of `targets`.
    """
    taken_by = lambda case: case["target"] in TARGETS + MORE and fits(case) and not invalid(case)
    if metafunc.function.__name__ == "test_3wise":
        slow = covering(3) if wants_slow_cases(metafunc) else ()
        metafunc.parametrize("case", part_of(list(filter(taken_by, slow))), ids=name_of)
    elif metafunc.function.__name__ == "test_pairwise":
        cases = list(filter(taken_by, covering(2)))
        last = {case["target"]: case for case in cases if case["length"] == (32, 48)}
        chosen = [last[target] for target in targets]
        marks = lambda case: () if case in chosen else pytest.mark.slow
        params = [pytest.param(case, id=name_of(case), marks=marks(case)) for case in cases]
        metafunc.parametrize("case", params)
