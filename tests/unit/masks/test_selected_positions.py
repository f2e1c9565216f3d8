"""A `Selected` lists keys by their positions, wherever these are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix.oracle import exact

from eqattn import attention, AttentionMetadata, Blockwise, Causal, Dense, Ragged, Selected, stats
from eqattn.cache import RingBufferCache


RNG = np.random.default_rng(0)
BLOCKS = AttentionMetadata(blocksize_q=4, blocksize_k=4)


def arrays(t, s):
    return [
        jnp.asarray(RNG.normal(size=(2, n, h, 4)), jnp.float32) for n, h in ((t, 4), (s, 2), (s, 2))
    ]


def test_known_lists_of_positions_beyond_the_places():
    """Outside of `jax.jit`, where the list and the positions are known: those of a ring buffer are
    beyond its capacity. A list may name some that are there no longer, or not yet.
    """
    q, k, v = arrays(3, 11)

    @jax.jit
    def filled(k, v):
        cache = RingBufferCache.empty(2, 8, 2, 4).append(k[:, :6], v[:, :6])
        return cache.append(k[:, 6:], v[:, 6:])

    cache = filled(k, v)
    listed = RNG.integers(1, 13, (2, 1, 3, 5))
    mask = Selected(listed) & Causal() & cache.mask()
    place = dict(q_offset=8, kv_positions=cache.positions)
    got = attention(q, cache.key, cache.value, Ragged(BLOCKS), mask=mask, **place)
    seen = (listed[..., None] == np.arange(11)).any(-2)
    seen = seen & (np.arange(11) <= np.arange(8, 11)[:, None]) & (np.arange(11) >= 3)
    want = exact(q, k, v, visible=seen)[0]
    np.testing.assert_allclose(got.attention_outputs, want, atol=1e-6)


@pytest.mark.parametrize(
    "strategy", [Blockwise(BLOCKS), Ragged(BLOCKS), Dense()], ids=lambda s: s.get_impl_name()
)
def test_two_keys_at_one_position_cannot_be_listed(strategy):
    """They would be both for one strategy, and one of them for another."""
    q, k, v = arrays(2, 4)
    mask = Selected(np.zeros((2, 1, 2, 2), int))
    with pytest.raises(ValueError, match=r"two keys at position 1.*its own"):
        attention(q, k, v, strategy, mask=mask, kv_positions=jnp.array([0, 1, 1, 2]))
    # What is below 0 is no key.
    out = attention(q, k, v, strategy, mask=mask, kv_positions=jnp.array([0, -1, -1, 2]))
    np.testing.assert_allclose(out.attention_outputs, v[:, :1].repeat(2, 2).repeat(2, 1), atol=1e-6)


def test_mass_of_listed_keys(x64):
    """Nothing is weighed there: the values have no features."""
    q, k = (jnp.asarray(RNG.normal(size=(2, 12, h, 4))) for h in (4, 2))
    listed = RNG.integers(-1, 12, (2, 1, 12, 5))
    seen = (listed[..., None] == np.arange(12)).any(-2)

    def by_hand(q, k):
        logits = jnp.einsum("bthd,bshd->bhts", q, k.repeat(2, 2)) / 2
        e = jnp.where(seen, jnp.exp(logits), 0)
        total = e.sum(-1, keepdims=True)
        return (e / jnp.where(total == 0, 1, total)).sum(2).swapaxes(1, 2)

    def found(q, k):
        out = stats.mass(q, k, mask=Selected(listed))
        none = attention(q, k, k[..., :0], mask=Selected(listed), return_logsumexp=True)
        return out, none.attention_outputs.shape, none.logsumexp

    def both(fn):
        def loss(q, k):
            mass, *rest = fn(q, k)
            return jnp.sin(3 * mass).sum(), (mass, rest)

        return jax.jit(lambda q, k: jax.grad(loss, (0, 1), has_aux=True)(q, k))(q, k)

    gradients, (mass, (shape, logsumexp)) = both(found)
    wanted = both(lambda q, k: (by_hand(q, k),))
    assert tuple(map(int, shape)) == (2, 12, 4, 0)
    np.testing.assert_allclose(logsumexp, exact(q, k, k, visible=seen)[1], atol=1e-12)
    for x, y in zip((*gradients, mass), (*wanted[0], wanted[1][0])):
        np.testing.assert_allclose(x, y, atol=1e-12)
