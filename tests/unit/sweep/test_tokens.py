"""Tokens behind blocks: a cut is undone, and what is undone is not copied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import attention, AttentionMetadata, Blockwise
from eqattn._problem.problem import Problem
from eqattn._problem.tiling import choose_tiling, Tiling
from eqattn._sweep.grid import BATCH, COL, even_size, HEAD, ROW, whole_size
from eqattn._sweep.tokens import joined, padded


AXES = {ROW: (BATCH, HEAD, ROW), COL: (BATCH, HEAD, COL)}


def tiling(**kw):
    sizes = dict(batch=2, kv_heads=3, group=2, queries=21, keys=10, block_q=8, block_k=4)
    return Tiling(**sizes | kw)


@pytest.mark.parametrize("group", [1, 2])
def test_blocks_are_made_of_tokens_and_tokens_of_blocks(group):
    made = tiling(group=group)
    rows, columns = made.tokens
    sizes = dict(zip((BATCH, HEAD, ROW, COL), made.grid))
    q = np.random.default_rng(0).standard_normal((2, 21, 3 * group, 5)).astype(np.float32)
    q = jnp.asarray(q)
    k = q[:, :10, :3]
    blocks = {ROW: made.rows_of(q), COL: made.columns_of(k)}
    for tokens, x, transposed in ((rows, q, True), (columns, k, False)):
        lie, axes = blocks[tokens.axis], AXES[tokens.axis]
        for flip in (False, True):
            form = jnp.swapaxes(lie, -1, -2) if flip else lie
            np.testing.assert_array_equal(tokens.joined(form, axes, transposed != flip), x)
            np.testing.assert_array_equal(tokens.cut(x, axes, sizes, transposed != flip), form)


def test_other_axes_stay_in_front():
    rows, _ = tiling(batch=1).tokens
    x = np.arange(7 * 3 * 3 * 5 * 16).reshape(7, 3, 3, 5, 16)
    got = rows.joined(jnp.asarray(x), (-5, HEAD, ROW), transposed=True)
    want = x.reshape(7, 3, 3, 5, 2, 8).transpose(0, 2, 5, 1, 4, 3).reshape(7, 24, 6, 5)
    np.testing.assert_array_equal(got, want[:, :21])


@pytest.mark.parametrize("group", [1, 2])
def test_nothing_is_copied(group):
    """Neither what is cut and joined again, with its padding, nor what is joined and cut."""
    made = tiling(group=group)
    rows, columns = made.tokens
    sizes = dict(zip((BATCH, HEAD, ROW, COL), made.grid))

    def there_and_back(q, k, out):
        out = rows.cut(out, AXES[ROW], sizes, transposed=False)
        return (
            rows.joined(made.rows_of(q), AXES[ROW], transposed=True),
            columns.joined(made.columns_of(k), AXES[COL]),
            made.from_rows(out),
        )

    heads = 3 * group
    args = [jnp.ones((2, n, h, 5)) for n, h in ((21, heads), (10, 3), (21, heads))]
    text = jax.jit(there_and_back).lower(*args).compile().as_text()
    assert not [x for x in (" transpose(", " pad(", " fusion(", " slice(") if x in text], text


def test_parts_do_not_lie_behind_each_other():
    assert tiling(parts=3).tokens == ()


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
def test_what_pads(dtype, xp):
    x = xp.asarray(np.arange(10).reshape(2, 5) % 7).astype(dtype)
    same = lambda found, *ends: np.testing.assert_array_equal(
        found, np.concatenate([x, *(np.asarray(e).reshape(2, -1) for e in ends)], 1)
    )
    same(padded(x, 1, 7, "zeros"), np.zeros((2, 2), dtype))
    same(padded(x, 1, 7, "last"), x[:, 4], x[:, 4])
    same(padded(x, 1, 7, "again"), x[:, 3:])
    same(padded(x, 1, 10, "again"), x)
    same(padded(x, 1, 11, "again"), *[x[:, 4]] * 6)
    assert isinstance(padded(x, 1, 7, "again"), np.ndarray) == (xp is np)
    assert padded(x, 0, 4, "again").shape == (4, 5)


@pytest.mark.parametrize("by", ["last", "again"])
def test_what_pads_has_no_gradient(by):
    ones = jax.grad(lambda x: padded(x, 0, 8, by).sum())(jnp.zeros(5))
    np.testing.assert_array_equal(ones, np.ones(5))


def test_padded_pairs_are_put_together():
    """Nothing is copied but by the padding, which is entries from the end."""
    made = tiling(batch=1, joins=True)

    def there_and_back(x):
        blocks, axes = made.pairs_of(x)
        return joined(blocks, axes, (made.group, made.block_q, made.block_k))

    x = np.random.default_rng(0).standard_normal((1, 6, 21, 10)).astype(np.float32)
    compiled = jax.jit(there_and_back).lower(x).compile()
    want = np.concatenate([x, x[:, :, 18:]], 2)
    want = np.concatenate([want, want[..., 8:]], 3)[0]
    np.testing.assert_array_equal(compiled(x), want)
    assert "transpose" not in compiled.as_text()


def test_blocks_that_divide_a_length():
    """Unless they were far smaller."""
    sizes = [whole_size(n, 256) for n in (100, 256, 257, 640, 1000, 1900, 2 * 431)]
    assert sizes == [256, 256, even_size(257, 256), 160, 250, 190, even_size(862, 256)]


def test_parts_of_a_length_are_even():
    """Their pairs are copied anyway, and blocks that divide the whole need not divide a part."""
    q, bias = jnp.zeros((1, 1900, 1, 8)), jnp.zeros((1, 1900, 1900))
    problem = Problem.from_call(q, q, q, AttentionMetadata(), bias=bias)
    sizes = [choose_tiling(problem, None, None, parts=n).block for n in (1, 4)]
    assert sizes == [(190, 190), (even_size(1900, 256),) * 2]


def test_pairs_of_an_odd_length_are_not_copied():
    """On a CPU: a bias of 8 heads has 12 MiB, and its gradient too."""
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    q, bias = like(1, 620, 8, 32), like(8, 620, 620)
    strategy = Blockwise(AttentionMetadata())

    def loss(q, k, v, bias):
        return attention(q, k, v, strategy, bias=bias).attention_outputs.sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(q, q, q, bias).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**23
