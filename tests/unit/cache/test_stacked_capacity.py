"""A stack of caches takes the capacities that a single cache takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import attention, Causal, Ragged, ragged_attention, Selected
from eqattn.cache import LatentKVCache, StackedKVCache


B, N, D = 2, 5, 4
RNG = np.random.default_rng(0)
Q, K, V = (jnp.asarray(RNG.normal(size=(B, N, 1, D)), jnp.float32) for _ in range(3))


def plain(q, k, v, seen):
    q, k, v = (np.asarray(x[:, :, 0], np.float64) for x in (q, k, v))
    z = np.where(seen, np.einsum("btd,bsd->bts", q, k) / np.sqrt(q.shape[-1]), -np.inf)
    p = np.exp(z - z.max(-1, keepdims=True))
    return np.einsum("bts,bsd->btd", p / p.sum(-1, keepdims=True), v)[:, :, None]


CAPACITIES = 5, 32, 100, 257, 1021


@pytest.mark.parametrize("capacity, bits", [(5, True), (257, False), (1021, True)])
def test_every_capacity(capacity, bits):
    stack = StackedKVCache.empty(2, B, capacity, 1, D, bits=bits)
    assert stack.key.shape == (2, B, capacity, 1, D)

    @jax.jit
    def run(stack):
        cache = stack.layer(jnp.int32(1)).append(K, V)
        call = lambda query, **how: attention(
            query, cache.key, cache.value, Ragged(), q_offset=0, **how
        )
        indices = jnp.broadcast_to(jnp.array([3, 1]), (B, 1, N, 2))
        return (
            call(Q, mask=Causal() & cache.mask()).attention_outputs,
            call(Q, mask=Selected(indices)).attention_outputs,
        )

    causal, listed = run(stack)
    seen = np.tril(np.ones((N, N), bool))
    np.testing.assert_allclose(causal, plain(Q, K, V, seen), rtol=0, atol=1e-5)
    np.testing.assert_allclose(listed, plain(Q, K, V, np.isin(range(N), [1, 3])), rtol=0, atol=1e-5)


@pytest.mark.parametrize("capacity", [5])
def test_packed_queries_and_latents(capacity):
    cache = StackedKVCache.empty(2, B, capacity, 1, D).layer(0).append(K, V)
    packed = jnp.concatenate([Q[0, 3:], Q[1, 2:]])
    out = ragged_attention(packed, cache.key, cache.value, jnp.array([0, 2, 5]), cache.length)
    want = plain(Q, K, V, np.tril(np.ones((N, N), bool)))
    want = np.concatenate([want[0, 3:], want[1, 2:]])
    np.testing.assert_allclose(out.attention_outputs, want, rtol=0, atol=1e-5)

    latent = LatentKVCache(StackedKVCache.empty(2, B, capacity, 1, D, D).layer(1)).append(K, V)
    wide = jnp.concatenate([Q, Q], -1)
    out = attention(wide, latent.key, latent.value, Ragged(), mask=Causal() & latent.mask())
    both = jnp.concatenate([V, K], -1)
    want = plain(wide, both, V, np.tril(np.ones((N, N), bool)))
    np.testing.assert_allclose(out.attention_outputs, want, rtol=0, atol=1e-5)
