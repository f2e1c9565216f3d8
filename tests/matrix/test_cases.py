"""The covering array covers, holds no invalid case, and is small."""

import inspect
import itertools
import pathlib
import re

import numpy as np
import pytest

import eqattn
from eqattn import AttentionImpl, cache, masks, scores, strategies
from eqattn.masks._base import leaf_terms

from .cases import AXES, covering, invalid, MORE, name_of
from .masks import Draw, MASKS


def test_pairwise_covers_every_valid_pair():
    cases = covering(2)
    assert all(invalid(case) is None for case in cases)
    assert len({name_of(case) for case in cases}) == len(cases) <= 400
    for a, b in itertools.combinations(AXES, 2):
        seen = {(case[a], case[b]) for case in cases}
        possible = {(x, y) for x in AXES[a] for y in AXES[b] if invalid({a: x, b: y}) is None}
        assert seen == possible, (a, b, possible - seen)


def test_generation_is_deterministic():
    assert covering.__wrapped__(2) == covering(2)


# The classes that are on no axis or page, and why.
APART = {
    "And": "masks of the axis are combined by it",
    "Or": "masks of the axis are combined by it",
    "Not": "masks of the axis are combined by it",
    "Bias": "the axis `bias` makes it",
    "SoftCap": "the axis `cap` is a soft cap",
    "LayerCache": "a stack gives it",
}
PAGES = {
    "masks": (masks.AbstractMask, masks, "masks.md"),
    "scores": (scores.AbstractScore, scores, "scores.md"),
    "strategies": (AttentionImpl, strategies, "strategies.md"),
    "cache": (cache.AbstractCache, cache, "decoding.md"),
}


def classes_of(room):
    """The concrete classes of a room. All modules of it are imported."""
    base, _, _ = PAGES[room]
    for path in pathlib.Path(eqattn.__file__).parent.glob(f"{room}/*.py"):
        __import__(f"eqattn.{room}.{path.stem}")
    found, left = set(), [base]
    while left:
        cls = left.pop()
        left += cls.__subclasses__()
        ours = cls.__module__.startswith(f"eqattn.{room}.") and cls.__name__[0] != "_"
        if ours and not inspect.isabstract(cls) and not cls.__name__.startswith("Abstract"):
            found.add(cls)
    return found


@pytest.mark.parametrize("room", PAGES)
def test_every_class_is_exported_and_on_its_page(room):
    _, module, page = PAGES[room]
    text = (pathlib.Path(eqattn.__file__).parents[1] / "docs/pages" / page).read_text()
    for cls in classes_of(room):
        assert getattr(module, cls.__name__, None) is cls, f"{cls} is not exported by {module}"
        name = "DenseMask" if cls is masks.Dense else cls.__name__
        assert re.search(rf"\b{name}\b", text) or name in APART, f"{page} does not name {name}"


def test_every_mask_and_strategy_is_on_its_axis():
    """Scores are made where the library is called: `ScoreFn`, `ALiBi` and `T5Bias`."""
    sizes = (2,), 2, 2, 16, 16, 0, False
    kinds = AXES["mask"] + MORE["mask"]
    made = [MASKS[kind](Draw(np.random.default_rng(0), *sizes))[0] for kind in kinds]
    terms = [leaf_terms(x) for x in made if isinstance(x, masks.AbstractMask)]
    made = {type(term).__name__ for some in terms for term in some}
    assert {cls.__name__ for cls in classes_of("masks")} - made == {"And", "Or", "Not"}
    targets = {name for name, _ in AXES["target"] + MORE["target"]}
    assert {cls.get_impl_name() for cls in classes_of("strategies")} <= targets
