"""Drawings of masks have the sizes that a mask knows, and say what they leave out."""

import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import Causal, MaskFn, Neighbourhood, Selected, TileOrder


IDS = np.repeat(np.arange(5), 20)


def picture(mask):
    _, *rows, note = str(mask).splitlines()
    return [row.strip("|") for row in rows], note


def blocks(mask, size, cell):
    """The characters of a mask `[t, s]`, from its definition."""
    t, s = mask.shape
    rows = [mask[i : i + cell] for i in range(0, t, cell)]
    cut = lambda row: [row[:, j : j + cell] for j in range(0, s, cell)]
    mark = lambda x: " " if not x.any() else "\u2588" if x.all() else "\u2591"
    return ["".join(2 * mark(x) for x in cut(row)) for row in rows]


def test_a_mask_of_one_head_is_labelled():
    rows, note = picture(MaskFn(lambda b, h, q, k: h == 1))
    assert note.endswith(", first batch element and head") and set("".join(rows)) == {" "}
    _, note = picture(MaskFn(lambda b, h, q, k: (b < 3) & (q >= k)))
    assert note.endswith(", first batch element and head")
    _, note = picture(MaskFn(lambda b, h, q, k: q >= k))
    assert note == "64 queries (down) x 64 keys, blocks of 4 x 4"


@pytest.mark.parametrize("ids", [jnp.asarray(IDS), jnp.asarray(IDS, jnp.uint8)])
@pytest.mark.parametrize("take", [False, True])
def test_arrays_in_a_closure(ids, take):
    read = (lambda i: jnp.take(ids, i)) if take else lambda i: ids[i]
    rows, note = picture(Causal() & MaskFn(lambda b, h, q, k: read(q) == read(k)))
    assert note == "100 queries (down) x 100 keys, blocks of 7 x 7"
    want = (IDS[:, None] == IDS) & (np.arange(100)[:, None] >= np.arange(100))
    want = blocks(want, 100, 7)
    assert [x.replace("\u2591", "\u2588") for x in rows] == [
        x.replace("\u2591", "\u2588") for x in want
    ]


def test_both_lengths_and_rows():
    q_ids, kv_ids = jnp.zeros((3, 32), int), jnp.zeros(48, int)
    _, note = picture(MaskFn(lambda b, h, q, k: q_ids[b, q] == kv_ids[k]))
    assert note == "32 queries (down) x 48 keys, blocks of 2 x 3, first batch element and head"


def test_a_table_that_is_no_axis_of_tokens():
    """One of blocks, of differences or of heads says nothing of the number of tokens."""
    table, near, wide = jnp.eye(8, dtype=bool), jnp.ones(9, bool), jnp.array([1, 2, 3])
    for fn in (
        lambda b, h, q, k: table[q // 8, k // 8],
        lambda b, h, q, k: near[jnp.clip(q - k, 0, 8)],
        lambda b, h, q, k: q - k < wide[h],
    ):
        assert picture(MaskFn(fn))[1].startswith("64 queries (down) x 64 keys")


@pytest.mark.parametrize("grid", [(10, 12), TileOrder((10, 12), (5, 4))])
def test_a_neighbourhood_has_the_tokens_of_its_grid(grid):
    rows, note = picture(Neighbourhood(grid, 5))
    assert note == "120 queries (down) x 120 keys, blocks of 8 x 8" and len(rows) == 15


def test_lists_are_still_drawn():
    assert "queries (down)" in picture(Selected(jnp.zeros((1, 64, 1), int)))[1]
