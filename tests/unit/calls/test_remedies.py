"""Errors that name what a caller meant, and defaults that calls share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import attention, AttentionMetadata, Blockwise, Causal, ragged_attention, SlidingWindow


RNG = np.random.default_rng(0)
Q, K, V = (jnp.asarray(RNG.normal(size=(1, 6, 2, 4)), jnp.float32) for _ in range(3))


def test_keys_by_the_name_of_other_libraries():
    with pytest.raises(TypeError, match=r"key_=.*key= is the random key of dropout"):
        attention(query=Q, key=K, value=V)
    attention(query=Q, key_=K, value=V, key=jax.random.key(0))
    attention(Q, K, value=V, key=jax.random.key(0))


@pytest.mark.parametrize("name", ["is_causal", "causal"])
def test_causal_by_the_name_of_other_libraries(name):
    with pytest.raises(TypeError, match=rf"no {name}=.*mask='causal'.*Causal\(\)"):
        attention(Q, K, V, **{name: True})


def test_other_wrong_keywords_are_those_of_python():
    with pytest.raises(TypeError, match="unexpected keyword argument|nonsense"):
        attention(Q, K, V, nonsense=1)


def test_ragged_attention_has_a_default_strategy():
    out = ragged_attention(Q[0, 4:], K, V, jnp.array([0, 2]), jnp.array([6])).attention_outputs
    q, k, v = (np.asarray(x[0], np.float64) for x in (Q, K, V))
    z = np.where(np.tril(np.ones((6, 6), bool)), np.einsum("thd,shd->hts", q, k) / 2, -np.inf)
    p = np.exp(z - z.max(-1, keepdims=True))
    want = np.einsum("hts,shd->thd", p / p.sum(-1, keepdims=True), v)[4:]
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-6)


def test_packed_keys_are_sent_to_packed_segments():
    # A type checker of run-time annotations would name the axes only.
    with pytest.raises(Exception, match=r"packed_segments|key_"):
        ragged_attention(Q[0], K[0], V[0], [0, 6], [6])
    plain = ragged_attention
    while hasattr(plain, "__wrapped__"):
        plain = plain.__wrapped__
    with pytest.raises(ValueError, match=r"key_ \(6, 2, 4\).*packed too.*packed_segments"):
        plain(Q[0], K[0], V[0], jnp.array([0, 6]), jnp.array([6]))


@pytest.mark.parametrize("name", ["left", "right"])
def test_a_traced_window_names_the_recipe(name):
    def call(n):
        sizes = dict(left=1, right=1) | {name: n}
        return attention(Q, K, V, mask=Causal() & SlidingWindow(**sizes)).attention_outputs

    with pytest.raises(TypeError, match=rf"{name} of a SlidingWindow.*MaskFn\(lambda b, h, q, k"):
        jax.jit(call)(3)


def test_platforms_with_kernels_are_listed_in_words():
    strategy = Blockwise(AttentionMetadata(platform="pallas", backend="rocm"))
    with pytest.raises(ValueError, match=r"Its Pallas kernels are for tpu, gpu, cuda and triton\."):
        attention(Q, K, V, strategy)
