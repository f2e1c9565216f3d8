"""Tokens behind blocks: a cut is undone, and what is undone is not copied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn._problem.blocking import Blocking
from eqattn._sweep.grid import BATCH, COL, HEAD, ROW


AXES = {ROW: (BATCH, HEAD, ROW), COL: (BATCH, HEAD, COL)}


def blocking(**kw):
    sizes = dict(batch=2, kv_heads=3, group=2, queries=21, keys=10, block_q=8, block_k=4)
    return Blocking(**sizes | kw)


@pytest.mark.parametrize("group", [1, 2])
def test_blocks_are_made_of_tokens_and_tokens_of_blocks(group):
    made = blocking(group=group)
    rows, columns = made.tokens
    sizes = dict(zip((BATCH, HEAD, ROW, COL), made.grid))
    q = np.random.default_rng(0).standard_normal((2, 21, 3 * group, 5)).astype(np.float32)
    q = jnp.asarray(q)
    k = q[:, :10, :3]
    blocks = {ROW: made.rows_of(q), COL: made.columns_of(k)}
    for tokens, x, turned in ((rows, q, True), (columns, k, False)):
        lie, axes = blocks[tokens.axis], AXES[tokens.axis]
        for flip in (False, True):
            form = jnp.swapaxes(lie, -1, -2) if flip else lie
            np.testing.assert_array_equal(tokens.joined(form, axes, turned != flip), x)
            np.testing.assert_array_equal(tokens.cut(x, axes, sizes, turned != flip), form)


def test_other_axes_stay_in_front():
    rows, _ = blocking(batch=1).tokens
    x = np.arange(7 * 3 * 3 * 5 * 16).reshape(7, 3, 3, 5, 16)
    got = rows.joined(jnp.asarray(x), (-5, HEAD, ROW), turned=True)
    want = x.reshape(7, 3, 3, 5, 2, 8).transpose(0, 2, 5, 1, 4, 3).reshape(7, 24, 6, 5)
    np.testing.assert_array_equal(got, want[:, :21])


@pytest.mark.parametrize("group", [1, 2])
def test_nothing_is_copied(group):
    """Neither what is cut and joined again, with its padding, nor what is joined and cut."""
    made = blocking(group=group)
    rows, columns = made.tokens
    sizes = dict(zip((BATCH, HEAD, ROW, COL), made.grid))

    def there_and_back(q, k, out):
        out = rows.cut(out, AXES[ROW], sizes, turned=False)
        return (
            rows.joined(made.rows_of(q), AXES[ROW], turned=True),
            columns.joined(made.columns_of(k), AXES[COL]),
            made.from_rows(out),
        )

    heads = 3 * group
    args = [jnp.ones((2, n, h, 5)) for n, h in ((21, heads), (10, 3), (21, heads))]
    text = jax.jit(there_and_back).lower(*args).compile().as_text()
    assert not [x for x in (" transpose(", " pad(", " fusion(", " slice(") if x in text], text


def test_parts_do_not_lie_behind_each_other():
    assert blocking(parts=3).tokens == ()
