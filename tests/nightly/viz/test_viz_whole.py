"""Figures of every size."""

import pytest
import test_viz as unit
from test_viz import closed  # noqa: F401, a fixture for all tests

from eqattn import Causal, Contiguous, SlidingWindow, Zigzag


@pytest.mark.parametrize("mask", [unit.SHORT, unit.LONG], ids=["short", "long"])
@pytest.mark.parametrize("size", unit.SIZES, ids=str)
def test_no_title_is_cut(mask, size):
    unit.test_no_title_is_cut(mask, size)


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(100, 0) & Causal(), None])
@pytest.mark.parametrize("layout", [Contiguous(), Zigzag()])
def test_ring(layout, mask):
    unit.test_ring(layout, mask)
