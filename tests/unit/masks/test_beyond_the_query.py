"""Windows that lie wholly before or after the query, which flash-attn writes with negative sides."""

import numpy as np
import pytest

from eqattn import Causal, SlidingWindow


T = 12


@pytest.mark.parametrize("w", [1, 2, 5])
@pytest.mark.parametrize("left", [None, 7])
def test_a_negative_right_side(w, left):
    """Keys in `[q - left, q - w]`."""
    q, k = np.ogrid[:T, :T]
    want = (k <= q - w) & (True if left is None else k >= q - left)
    mask = Causal(-w) & SlidingWindow(left, None)
    np.testing.assert_array_equal(np.asarray(mask.as_array(T, T))[0], want)
    with pytest.raises(
        ValueError, match=rf"right must .* got -{w}\. .* {w} before .* Causal\(-{w}\)"
    ):
        SlidingWindow(left, -w)


@pytest.mark.parametrize("w", [1, 2, 5])
@pytest.mark.parametrize("right", [None, 7])
def test_a_negative_left_side(w, right):
    """Keys in `[q + w, q + right]`."""
    q, k = np.ogrid[:T, :T]
    want = (k >= q + w) & (True if right is None else k <= q + right)
    mask = ~Causal(w - 1) & SlidingWindow(None, right)
    np.testing.assert_array_equal(np.asarray(mask.as_array(T, T))[0], want)
    with pytest.raises(
        ValueError, match=rf"left must .* got -{w}\. .* {w} after .* ~Causal\({w - 1}\)"
    ):
        SlidingWindow(-w, right)
