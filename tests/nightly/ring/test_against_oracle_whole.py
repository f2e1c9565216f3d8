"""Every feature of the ring against the oracle, on any number of devices and in every layout."""

import pytest
from ring.test_against_oracle import balanced, CASES, compare, head_names, names

from eqattn._ring.layout import Contiguous, Zigzag


EVERYTHING = [
    (name, n, layout)
    for name in sorted({name for name, *_ in CASES})
    for n in (1, 2, 3, 4, 8)
    for layout in (Contiguous(), Zigzag())
]
MORE_HEADS = [
    (name, n, group, layout)
    for name in sorted({name for name, *_ in CASES})
    for n, group in ((1, 2), (1, 4), (2, 2), (4, 2), (2, 4))
    for layout in (Contiguous(), Zigzag())
    if n > 1 or layout == Contiguous()
]


@pytest.mark.parametrize("name, n, layout", CASES, ids=names(CASES))
def test_feature(name, n, layout):
    compare(name, n, layout, t=32 if n == 8 else 24)


@pytest.mark.parametrize("name", sorted({name for name, *_ in CASES}))
@pytest.mark.parametrize(
    "n, group, chunk", [(2, 1, 3), (4, 1, 3), (8, 1, 3), (2, 2, 3), (4, 1, 12), (2, 2, 24)]
)
def test_every_feature_in_a_balanced_layout(name, n, group, chunk):
    compare(name, n, balanced(n, 48, chunk), t=48, group=group)


@pytest.mark.parametrize("name, n, layout", EVERYTHING, ids=names(EVERYTHING))
def test_every_feature_on_any_number_of_devices(name, n, layout):
    compare(name, n, layout, t=48)


@pytest.mark.parametrize("name, n, layout", EVERYTHING, ids=names(EVERYTHING))
def test_every_feature_with_gathered_keys(name, n, layout):
    compare(name, n, layout, t=48, gathers=True)


@pytest.mark.parametrize("name, n, group, layout", MORE_HEADS, ids=head_names(MORE_HEADS))
def test_every_feature_with_exchanged_heads(name, n, group, layout):
    compare(name, n, layout, t=48, group=group)
