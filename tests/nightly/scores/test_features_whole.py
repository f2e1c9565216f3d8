"""Operands with features, in every strategy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_features as unit
from test_features import (
    ARRAYS,
    assert_equal,
    B,
    BLOCKS,
    D,
    F,
    H,
    Indexer,
    K,
    near,
    normal,
    plain,
    T,
)

from eqattn import attention, Blockwise, Causal, ScoreFn, Selected
from eqattn.scores import Operand


@pytest.mark.parametrize("name", unit.STRATEGIES)
def test_a_second_product_in_masks_and_scores(name, x64):
    unit.test_a_second_product_in_masks_and_scores(name, x64)


def test_what_is_masked_and_infinite_reaches_nothing(x64):
    unit.test_what_is_masked_reaches_nothing(np.inf, x64)


def test_maps_lists_of_keys_and_heads(x64):
    """Under `vmap`, with keys that are gathered, and with features of each head."""
    q, k, v, query, weights, key = ARRAYS

    def one(q, k, v, query, weights, key):
        mask = Causal() & near(query, key)
        return attention(q, k, v, mask=mask, score=Indexer(query, weights, key)).attention_outputs

    assert_equal(jax.jit(jax.vmap(one))(*ARRAYS), plain(*ARRAYS))
    every = Selected(np.broadcast_to(np.arange(T), (1, T, T)))

    def listed(*xs):
        mask = every & Causal() & near(xs[3], xs[5])
        return attention(*xs[:3], mask=mask, score=Indexer(*xs[3:])).attention_outputs

    assert_equal(jax.jit(listed)(*ARRAYS), plain(*ARRAYS))
    seen = near(query, key).as_array(T, T, batch_shape=(B,))
    products = np.einsum("btf,bsf->bts", query[..., :F], key)
    np.testing.assert_array_equal(seen[:, 0], (products > 0) | (np.arange(T) == 0))
    of_heads = normal(H, 3), normal(B, T, 3)
    score = ScoreFn(
        lambda logit, b, h, q, k, x, y: logit + x @ y,
        (Operand(of_heads[0], "hf"), Operand(of_heads[1], "bsf")),
    )
    got = jax.jit(lambda *xs: attention(*xs, Blockwise(BLOCKS), score=score))(q, k, v)
    logits = jnp.einsum("bthd,bshd->bhts", q, k.repeat(H // K, 2)) * D**-0.5
    logits = logits + jnp.einsum("hf,bsf->bhs", *of_heads)[:, :, None]
    want = jnp.einsum("bhts,bshv->bthv", jax.nn.softmax(logits, -1), v.repeat(H // K, 2))
    assert_equal(got.attention_outputs, want)
