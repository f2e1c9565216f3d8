"""Where queries are: an offset counts from their own positions, known to Python or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import attention, Causal


B, T, S, D = 2, 3, 7, 4


@pytest.mark.parametrize("offset, traced", [(3, False), ([1, 4], False), (3, True)], ids=str)
def test_an_offset_moves_what_causal_shows(offset, traced):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B, n, 1, D)).astype(np.float32) for n in (T, S, S))
    arrays = [jnp.asarray(x) for x in (q, k, v)]
    call = lambda at: attention(*arrays, mask=Causal(), q_offset=at).attention_outputs
    at = jnp.asarray(offset, jnp.int32) if traced or not isinstance(offset, int) else offset
    got = jax.jit(call)(at) if traced else call(at)
    seen = np.arange(T)[:, None] + np.broadcast_to(offset, B)[:, None, None] >= np.arange(S)
    logits = np.einsum("bthd,bshd->bts", q, k, dtype=np.float64) / np.sqrt(D)
    weights = np.exp(np.where(seen, logits, -np.inf))
    want = np.einsum("bts,bshv->btv", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(got[:, :, 0], want, rtol=1e-5, atol=1e-6)
