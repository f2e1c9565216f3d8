"""Rows that pad the last block of queries see no pair that all queries are denied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import (
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    DenseMask,
    MaskFn,
    Ring,
    ScoreFn,
)
from eqattn.scores import Operand


T, S, UNSEEN = 12, 22, 14
PLATFORMS = [
    dict(platform="xla"),
    dict(platform="interpret", backend="tpu"),
    dict(platform="interpret", backend="triton"),
]


def _blockwise(how: dict) -> Blockwise:
    return Blockwise(AttentionMetadata(blocksize_q=8, blocksize_k=8, **how))


def _arrays(queries: int = T) -> list:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(n, 1, 8)).astype(np.float32) for n in (queries, S, S))
    k[UNSEEN], v[UNSEEN] = np.nan, np.inf
    return [jnp.asarray(x) for x in (q, k, v)]


def _dense() -> jax.Array:
    """With `Causal(5)`, no query sees the key: the first nine do not for that, the others here."""
    dense = np.ones((T, S), bool)
    dense[9:, UNSEEN] = False
    return jnp.asarray(dense)


def _gradients(how: dict, mask: object, score: object = None) -> list:
    def total(q, k, v):
        found = attention(q, k, v, _blockwise(how), mask=mask, score=score)
        return jnp.sum(jnp.sin(found.attention_outputs))

    return jax.jit(jax.grad(total, (0, 1, 2)))(*_arrays())


def _plain(visible: np.ndarray) -> list:
    """The gradients of plain formulas. The key that nobody sees is 0 there."""
    q, k, v = _arrays()
    k, v = (x.at[UNSEEN].set(0) for x in (k, v))

    def total(q, k, v):
        s = jnp.einsum("thd,shd->hts", q, k, precision="highest") * q.shape[-1] ** -0.5
        p = jax.nn.softmax(jnp.where(visible, s, -jnp.inf), -1)
        return jnp.sum(jnp.sin(jnp.einsum("hts,shd->thd", p, v, precision="highest")))

    return jax.grad(total, (0, 1, 2))(q, k, v)


def _check(found: list, visible: np.ndarray) -> None:
    for x, y in zip(found, _plain(visible)):
        np.testing.assert_allclose(x, y, atol=2e-6)
    assert not np.any(found[1][UNSEEN]) and not np.any(found[2][UNSEEN])


def _places() -> tuple:
    return np.arange(T)[:, None], np.arange(S)[None]


@pytest.mark.parametrize("how", PLATFORMS)
def test_a_dense_and_a_causal_mask(how):
    q, k = _places()
    visible = np.asarray(_dense()) & (k <= q + 5)
    assert not visible[:, UNSEEN].any()
    _check(_gradients(how, DenseMask(_dense()) & Causal(5)), visible)


@pytest.mark.parametrize("how", PLATFORMS)
def test_a_dense_mask_and_a_table_of_differences(how):
    q, k = _places()
    table = jnp.arange(-40, 40) >= -5  # of q - k, as the causal mask
    near = MaskFn(lambda b, h, q, k: table[q - k + 40])
    visible = np.asarray(_dense()) & (k <= q + 5)
    _check(_gradients(how, DenseMask(_dense()) & near), visible)


@pytest.mark.parametrize("how", PLATFORMS)
def test_a_table_of_rows_and_one_of_differences(how):
    q, k = _places()
    table, early = jnp.arange(-40, 40) >= -5, jnp.arange(T) < 9
    near = MaskFn(lambda b, h, q, k: table[q - k + 40] & (early[q] | (k != UNSEEN)))
    visible = (k <= q + 5) & ((q < 9) | (k != UNSEEN))
    _check(_gradients(how, near), visible)


@pytest.mark.parametrize("how", PLATFORMS)
def test_a_bias_that_is_nan_where_the_mask_hides(how):
    q, k = _places()
    visible = k <= q + 5
    bias = jnp.asarray(np.where(visible, 0, np.nan), jnp.float32)[None]
    arrays = [x.at[UNSEEN].set(1) if len(x) == S else x for x in _arrays()]

    def total(bias, *arrays):
        found = attention(*arrays, _blockwise(how), mask=Causal(5), bias=bias)
        return jnp.sum(jnp.sin(found.attention_outputs))

    found = jax.jit(jax.grad(total, (0, 1, 2, 3)))(bias, *arrays)
    clean = jax.jit(jax.grad(total, (0, 1, 2, 3)))(jnp.nan_to_num(bias), *arrays)
    for x, y in zip(found, clean):
        np.testing.assert_allclose(x, y, atol=2e-6)


@pytest.mark.parametrize("how", PLATFORMS)
def test_a_function_that_is_singular_where_the_mask_hides(how):
    q, k = _places()
    gaps = Operand(jnp.asarray(np.abs(q + 5 - k), jnp.float32), "ts")
    arrays = [x.at[UNSEEN].set(1) if len(x) == S else x for x in _arrays()]
    far = ScoreFn(lambda s, b, h, q, k, gap: s - jnp.log(gap), (gaps,))
    mask = MaskFn(lambda b, h, q, k: k != q + 5)

    def total(*arrays):
        found = attention(*arrays, _blockwise(how), mask=mask, score=far)
        return jnp.sum(jnp.sin(found.attention_outputs))

    for x in jax.jit(jax.grad(total, (0, 1, 2)))(*arrays):
        assert jnp.isfinite(x).all()


@pytest.mark.parametrize("how", PLATFORMS)
@pytest.mark.parametrize("t", [9, 13])
def test_a_last_block_whose_queries_see_all_keys(how, t):
    """The bias is not finite where queries of the first block are denied a key."""
    s = 16
    q, k = np.arange(t)[:, None], np.arange(s)[None]
    bias = jnp.asarray(np.where(k <= q + 7, 0, np.nan), jnp.float32)[None]
    arrays = [x[:n].at[UNSEEN:].set(1) for x, n in zip(_arrays(t), (t, s, s))]

    def total(bias, *arrays):
        found = attention(*arrays, _blockwise(how), mask=Causal(7), bias=bias)
        return jnp.sum(jnp.sin(found.attention_outputs))

    found = jax.jit(jax.grad(total, (0, 1, 2, 3)))(bias, *arrays)
    clean = jax.jit(jax.grad(total, (0, 1, 2, 3)))(jnp.nan_to_num(bias), *arrays)
    for x, y in zip(found, clean):
        np.testing.assert_allclose(x, y, atol=2e-6)


def test_rows_that_several_devices_pad():
    q, k = _places()
    visible = np.asarray(_dense()) & (k <= q + 5)
    mesh = jax.make_mesh((2,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    how = AttentionMetadata(blocksize_q=4, blocksize_k=8, mesh=mesh)
    mask = DenseMask(_dense()) & Causal(5)

    def total(q, k, v):
        return jnp.sum(jnp.sin(attention(q, k, v, Ring(how), mask=mask).attention_outputs))

    _check(jax.jit(jax.grad(total, (0, 1, 2)))(*_arrays()), visible)


@pytest.mark.parametrize("how", PLATFORMS)
def test_a_last_block_whose_queries_see_all_keys_of_a_table_of_differences(how):
    """The table is not finite for a query after the last one, which a window would hide."""
    t, s = 13, 8
    places = np.arange(t)[:, None] - np.arange(s)[None]
    table = jnp.asarray(np.where(np.arange(40) <= 12 + 8, 1.0, np.nan), jnp.float32)
    scores = ScoreFn(lambda s, b, h, q, k: s + table[q - k + 8])
    mask = MaskFn(lambda b, h, q, k: q - k <= 12)
    arrays = [x[:n] for x, n in zip(_arrays(t), (t, s, s))]
    assert (places <= 12).all()

    def total(*arrays):
        found = attention(*arrays, _blockwise(how), mask=mask, score=scores)
        return jnp.sum(jnp.sin(found.attention_outputs))

    for x in jax.jit(jax.grad(total, (0, 1, 2)))(*arrays):
        assert jnp.isfinite(x).all()


@pytest.mark.parametrize("how", PLATFORMS)
def test_a_table_of_differences_alone(how):
    """It shows the key to a query after the last one."""
    q, k, v = _arrays()
    arrays = [q, *(x.at[UNSEEN].set(1).at[T + 5].set(jnp.nan) for x in (k, v))]
    table = jnp.arange(-40, 40) >= -5
    mask = MaskFn(lambda b, h, q, k: table[q - k + 40])

    def total(*arrays):
        found = attention(*arrays, _blockwise(how), mask=mask)
        return jnp.sum(jnp.sin(found.attention_outputs))

    for x in jax.jit(jax.grad(total, (0, 1, 2)))(*arrays):
        assert jnp.isfinite(x).all()


def test_a_full_block_of_a_ring():
    """The last of the queries of each device sees all keys of a block, those that pad it do not."""
    mesh = jax.make_mesh((2,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    how = AttentionMetadata(blocksize_q=4, blocksize_k=8, mesh=mesh)
    places = np.arange(10)
    bias = jnp.asarray(np.where(places[None] <= places[:, None], 0, np.nan), jnp.float32)[None]
    arrays = [x[:10] for x in _arrays()]

    def total(bias, *arrays):
        found = attention(*arrays, Ring(how), mask=Causal(), bias=bias)
        return jnp.sum(jnp.sin(found.attention_outputs))

    for x in jax.jit(jax.grad(total, (0, 1, 2, 3)))(bias, *arrays):
        assert jnp.isfinite(x).all()
