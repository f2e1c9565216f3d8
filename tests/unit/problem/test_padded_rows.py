"""Rows that pad the last block of queries see no pair that all queries are denied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import attention, AttentionMetadata, Blockwise, Causal, DenseMask, MaskFn, Ring, ScoreFn
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


def _judge(strategy, arrays, visible, *bias, added=0.0, **call) -> None:
    """Judges the gradients of query, key, value and a bias by those of plain formulas in float64,
    in which what is not finite is 0.

    **Arguments:**

    - `visible`: which pairs are visible, `[t, s]`.
    - `added`: what scores add to the logits.
    """
    given = *arrays, *bias

    def total(q, k, v, *bias):
        found = attention(q, k, v, strategy, bias=bias[0] if bias else None, **call)
        return jnp.sum(jnp.sin(found.attention_outputs))

    def plain(q, k, v, *bias):
        s = jnp.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
        s = s + bias[0] if bias else s + added
        p = jax.nn.softmax(jnp.where(visible[None], s, -jnp.inf), -1)
        return jnp.sum(jnp.sin(jnp.einsum("hts,shd->thd", p, v)))

    indices = tuple(range(len(given)))
    found = jax.jit(jax.grad(total, indices))(*given)
    with jax.enable_x64(True):
        wide = [jnp.nan_to_num(np.asarray(x, np.float64), posinf=0) for x in given]
        wanted = jax.grad(plain, indices)(*wide)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6)
    unseen = ~visible.any(0)
    assert not np.any(np.asarray(found[1])[unseen]) and not np.any(np.asarray(found[2])[unseen])


def _places(queries: int = T, keys: int = S) -> tuple:
    return np.arange(queries)[:, None], np.arange(keys)[None]


def _shown(arrays: list) -> list:
    """The arrays with numbers where the key was not finite."""
    return [x.at[UNSEEN].set(1) if len(x) == S else x for x in arrays]


@pytest.mark.parametrize("how", PLATFORMS)
def test_a_dense_and_a_causal_mask(how):
    q, k = _places()
    visible = np.asarray(_dense()) & (k <= q + 5)
    assert not visible[:, UNSEEN].any()
    _judge(_blockwise(how), _arrays(), visible, mask=DenseMask(_dense()) & Causal(5))


@pytest.mark.parametrize("how", PLATFORMS)
def test_a_dense_mask_and_a_table_of_differences(how):
    q, k = _places()
    table = jnp.arange(-40, 40) >= -5  # of q - k, as the causal mask
    near = MaskFn(lambda b, h, q, k: table[q - k + 40])
    visible = np.asarray(_dense()) & (k <= q + 5)
    _judge(_blockwise(how), _arrays(), visible, mask=DenseMask(_dense()) & near)


@pytest.mark.parametrize("how", PLATFORMS)
def test_a_table_of_rows_and_one_of_differences(how):
    q, k = _places()
    table, early = jnp.arange(-40, 40) >= -5, jnp.arange(T) < 9
    near = MaskFn(lambda b, h, q, k: table[q - k + 40] & (early[q] | (k != UNSEEN)))
    visible = (k <= q + 5) & ((q < 9) | (k != UNSEEN))
    _judge(_blockwise(how), _arrays(), visible, mask=near)


@pytest.mark.parametrize("how", PLATFORMS)
def test_a_table_of_differences_alone(how):
    """It shows the key to a query after the last one."""
    q, k = _places()
    query, key, value = _shown(_arrays())
    arrays = [query, *(x.at[T + 5].set(jnp.nan) for x in (key, value))]
    table = jnp.arange(-40, 40) >= -5
    mask = MaskFn(lambda b, h, q, k: table[q - k + 40])
    _judge(_blockwise(how), arrays, k <= q + 5, mask=mask)


@pytest.mark.parametrize("how", PLATFORMS)
def test_a_bias_that_is_nan_where_the_mask_hides(how):
    q, k = _places()
    visible = k <= q + 5
    bias = jnp.asarray(np.where(visible, 0, np.nan), jnp.float32)[None]
    _judge(_blockwise(how), _shown(_arrays()), visible, bias, mask=Causal(5))


@pytest.mark.parametrize("how", PLATFORMS)
def test_a_function_that_is_singular_where_the_mask_hides(how):
    q, k = _places()
    gap = np.abs(q + 5 - k).astype(np.float32)
    far = ScoreFn(lambda s, b, h, q, k, x: s - jnp.log(x), (Operand(jnp.asarray(gap), "ts"),))
    call = dict(mask=MaskFn(lambda b, h, q, k: k != q + 5), score=far)
    added = -np.log(np.maximum(gap, 1, dtype=np.float64))[None]
    _judge(_blockwise(how), _shown(_arrays()), gap > 0, added=added, **call)


@pytest.mark.parametrize("how", PLATFORMS)
@pytest.mark.parametrize("t", [9, 13])
def test_a_last_block_whose_queries_see_all_keys(how, t):
    """The bias is not finite where queries of the first block are denied a key."""
    q, k = _places(t, 16)
    bias = jnp.asarray(np.where(k <= q + 7, 0, np.nan), jnp.float32)[None]
    arrays = [x[:n] for x, n in zip(_shown(_arrays(t)), (t, 16, 16))]
    _judge(_blockwise(how), arrays, k <= q + 7, bias, mask=Causal(7))


@pytest.mark.parametrize("how", PLATFORMS)
def test_a_last_block_whose_queries_see_all_keys_of_a_table_of_differences(how):
    """The table is not finite for a query after the last one, which a window would hide."""
    q, k = _places(13, 8)
    table = jnp.asarray(np.where(np.arange(40) <= 12 + 8, 1.0, np.nan), jnp.float32)
    more = ScoreFn(lambda s, b, h, q, k: s + table[q - k + 8])
    call = dict(mask=MaskFn(lambda b, h, q, k: q - k <= 12), score=more)
    assert (q - k <= 12).all()
    arrays = [x[:n] for x, n in zip(_arrays(13), (13, 8, 8))]
    _judge(_blockwise(how), arrays, q - k <= 12, added=1.0, **call)


def _ring() -> Ring:
    mesh = jax.make_mesh((2,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    return Ring(AttentionMetadata(blocksize_q=4, blocksize_k=8, mesh=mesh))


def test_rows_that_several_devices_pad():
    q, k = _places()
    visible = np.asarray(_dense()) & (k <= q + 5)
    _judge(_ring(), _arrays(), visible, mask=DenseMask(_dense()) & Causal(5))


def test_a_full_block_of_a_ring():
    """The last of the queries of each device sees all keys of a block, those that pad it do not."""
    q, k = _places(10, 10)
    bias = jnp.asarray(np.where(k <= q, 0, np.nan), jnp.float32)[None]
    _judge(_ring(), [x[:10] for x in _arrays()], k <= q, bias, mask=Causal())
