"""Loops on a CPU visit several blocks of a list in one step."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix.oracle import exact

from eqattn import (
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    Dense,
    DenseMask,
    Selected,
    SlidingWindow,
)
from eqattn._sweep import lowering
from eqattn._sweep.grid import BlockGrid
from eqattn._sweep.steps import at_columns


B, T, H, K, SIZE = 2, 130, 4, 2, 64
DROPPING = AttentionMetadata(dropout_prob=0.3)


def listed(lists: int, s: int, n: int) -> tuple[Any, np.ndarray]:
    """Lists of unequal lengths with names that stand twice, and the pairs that they show."""
    rng, blocks = np.random.default_rng(3), -(-s // SIZE)
    indices = rng.integers(-1, blocks, (B, lists, -(-T // SIZE), n))
    indices[0, 0, 0, 1:] = -1  # a list of one
    indices[1, 0, 1] = -1  # an empty one
    indices[0, -1, 1] = rng.permutation(blocks)[:n]  # so many that a row takes several steps
    seen = (indices[..., None] == np.arange(blocks)).any(-2).repeat(SIZE, 2).repeat(SIZE, 3)
    return jnp.asarray(indices, jnp.int32), seen[:, :, :T, :s].repeat(H // lists, 1)


def drawn(s: int, dtype: Any = jnp.float32) -> tuple[Any, ...]:
    rng = np.random.default_rng(4)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    return draw(B, T, H, 8), draw(B, s, K, 8), draw(B, s, K, 6), draw(H, T, s)


# Lists, keys, names, what else hides pairs, whether there is a bias, and the metadata.
CASES = {
    "of whole blocks": (K, 640, 7, lambda x: x, False, AttentionMetadata()),
    "of whole blocks with a bias": (K, 640, 7, lambda x: x, True, AttentionMetadata()),
    "beside a mask": (K, 600, 7, lambda x: x & Causal(400), True, AttentionMetadata()),
    "of all heads": (1, 600, 5, lambda x: x & SlidingWindow(300, 300), False, AttentionMetadata()),
    "of each head": (H, 640, 4, lambda x: x, True, AttentionMetadata()),
    "with a short last block": (K, 600, 7, lambda x: x, False, AttentionMetadata()),
    "with dropout": (K, 600, 7, lambda x: x & Causal(400), True, DROPPING),
}


MAPPED = [(x, mapped) for x in CASES for mapped in (False, True)]
MAPPED.remove(("with dropout", True))  # a mapped call draws other bits


@pytest.mark.parametrize("name, mapped", [("beside a mask", True)])
def test_values_and_derivatives(name, mapped, monkeypatch):
    """They are those of all pairs, in both modes and in second order."""
    lists, s, n, combined, biased, metadata = CASES[name]
    indices, seen = listed(lists, s, n)
    arrays = drawn(s)[: 4 if biased else 3]
    found, choose = [], lowering.columns_together
    note = lambda *args: found.append(choose(*args)) or found[-1]
    monkeypatch.setattr(lowering, "columns_together", note)

    def call(mask, strategy, q, k, v, *bias):
        more: dict[str, Any] = dict(bias=bias[0]) if bias else {}
        more |= dict(key=jax.random.key(0)) if metadata is DROPPING else {}
        out = attention(q, k, v, strategy, mask=combined(mask), return_logsumexp=True, **more)
        sees = jnp.isfinite(out.logsumexp)
        return out.attention_outputs, jnp.where(sees, out.logsumexp, 0)

    def ours(q, k, v, *bias):
        one = lambda i, *x: call(Selected(i, SIZE, SIZE), Blockwise(metadata), *x, *bias)
        return jax.vmap(one)(indices, q, k, v) if mapped else one(indices, q, k, v)

    def results(fn):
        loss = lambda *xs: sum(jnp.sin(3 * y).sum() for y in fn(*xs))
        gradients = jax.grad(loss, tuple(range(len(arrays))))
        run = lambda *xs: (jax.jvp(fn, xs, xs), jax.jvp(gradients, xs, xs))
        return jax.jit(run)(*arrays)

    dense = DenseMask(jnp.asarray(seen))
    got, want = results(ours), results(lambda *xs: call(dense, Dense(metadata), *xs))
    assert found and max(found) > 1
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=3e-4 * max(1, float(jnp.abs(y).max())))


@pytest.mark.parametrize("dtype, atol", [(jnp.float32, 2e-6), (jnp.bfloat16, 2e-2)])
def test_a_key_that_is_not_finite_spoils_the_rows_that_see_it(dtype, atol):
    indices, seen = listed(K, 640, 7)
    q, k, v, _ = drawn(640, dtype)
    v = v.at[0, 70, 0].set(jnp.nan)
    run = jax.jit(lambda *x: attention(*x, mask=Selected(indices, SIZE, SIZE)).attention_outputs)
    got = np.asarray(run(q, k, v), np.float32)
    spoiled = np.zeros((B, T, H), bool)
    spoiled[0, :, : H // K] = seen[0, : H // K, :, 70].T
    assert (np.isnan(got).all(-1) == spoiled).all() and spoiled.any() and not spoiled.all()
    want = exact(q, k, jnp.nan_to_num(v), visible=seen)[0]
    np.testing.assert_allclose(got[~spoiled], want[~spoiled], rtol=0, atol=atol)


def test_products_of_a_step_are_joined():
    """Those with what columns share, and sums over columns; not those that each column has."""
    from eqattn._sweep.products import dot

    rng = np.random.default_rng(5)
    a, b = (jnp.asarray(rng.normal(size=(3, 4, 5)), jnp.float32) for _ in range(2))
    c = jnp.asarray(rng.normal(size=(5, 2)), jnp.float32)

    def f(a, b, c):
        shared, own = dot(a, c, (1, 0)), dot(a, b, (0, 0))
        return [shared, own, dot(c, c, (0, 0)), 2 * own, dot(b, a, (0, 0)), dot(b, c, (1, 0))]

    summed = [False, False, True, True, True, True]
    run = lambda *xs: at_columns(f, xs, [True, True, False], 3, summed)
    got = run(a, b, c)
    each = [f(x, y, c) for x, y in zip(a, b)]
    for i, whole in enumerate(summed):
        want = jnp.stack([x[i] for x in each])
        np.testing.assert_allclose(got[i], want.sum(0) if whole else want, rtol=0, atol=1e-5)
    shapes = re.findall(r":f32\[([0-9,]*)\] = attention_dot", str(jax.make_jaxpr(run)(a, b, c)))
    assert sorted(shapes) == ["12,2", "12,2", "2,2", "3,5,5", "5,5"]


@pytest.mark.parametrize(
    "block, listed, columns",
    [((64, 64), 6, 6), ((64, 64), 7, 3), ((64, 256), 6, 3), ((128, 64), 6, 3), ((256, 256), 6, 1)],
)
def test_how_many_columns_a_step_visits(block, listed, columns):
    class Context:
        class module_context:  # noqa: N801
            platforms = ("cpu",)

    layout = BlockGrid((1, 2, 5, 9), block, (), live_pairs=5 * listed)
    assert lowering.columns_together(Context, layout) == columns
    Context.module_context.platforms = ("cuda",)
    assert lowering.columns_together(Context, layout) == 1
