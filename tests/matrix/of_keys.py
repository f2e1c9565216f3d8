"""The cases of what reads queries and keys, and no values: `top_keys` and statistics."""

from collections.abc import Callable, Collection

from .cases import Case, covering, invalid


# No kernel is one of these, and cascades have none.
TARGETS = ("blockwise", 1), ("dense", 1), ("ring", 2), ("ragged", 1)
MORE = ("ring", 4), ("ulysses", 2), ("all_gather", 2), ("paged", 1), ("latent", 1)
MORE += ("int8", 1), ("ring_buffer", 1)


def cases_of(strength: int, fits: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """Those of the array that `fits` says."""
    taken = lambda case: case["target"] in TARGETS + MORE and fits(case) and not invalid(case)
    return list(filter(taken, covering(strength)))


def one_of_each(cases: Collection[Case], targets: Collection = TARGETS) -> list[Case]:
    """A case for each of the targets, with keys enough. All others run at night."""
    last = {case["target"]: case for case in cases if case["length"] == (32, 48)}
    return [last[target] for target in targets]
