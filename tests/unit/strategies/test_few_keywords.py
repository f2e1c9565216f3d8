"""A strategy of a user that declares few of the keywords of `attention`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import attention, AttentionImpl, AttentionMetadata, AttentionOutput, Causal, Dense


class Plain(AttentionImpl):
    """Attention without anything."""

    @classmethod
    def get_impl_name(cls):
        return "plain"

    def forward_native(self, q, k, v):
        return Dense(self.metadata)(q, k, v)


class Masked(Plain):
    """Attention with a mask, and nothing else."""

    def forward_native(self, q, k, v, mask, causal=True):
        assert not causal
        out = Dense(self.metadata)(q, k, v, mask=mask).attention_outputs
        return AttentionOutput(attention_outputs=out)


class Random(Plain):
    """Attention with a random key, which it only looks at."""

    def forward_native(self, q, k, v, dropout_rng=None):
        assert dropout_rng is not None
        return Dense(self.metadata)(q, k, v)


def test_the_key_of_a_dropout_is_declared_by_another_name():
    q, strategy = jnp.ones((1, 4, 2, 8)), Random(AttentionMetadata())
    assert strategy.supports(dropout=True) and strategy.supports(key=True)
    attention(q, q, q, strategy, key=jax.random.key(0))


@pytest.mark.parametrize("cls", [Plain, Masked])
def test_what_is_not_declared_raises_only_when_it_is_used(cls):
    q = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))
    strategy = cls(AttentionMetadata())
    got = attention(q, q, q, strategy).attention_outputs
    np.testing.assert_array_equal(got, attention(q, q, q, Dense()).attention_outputs)
    uses = dict(
        mask=Causal(),
        bias=jnp.zeros((4, 4)),
        score=(),
        key=jax.random.key(1),
        return_carry=True,
    )
    for name, value in uses.items():
        if cls is Masked and name == "mask":
            got = attention(q, q, q, strategy, mask=value).attention_outputs
            want = attention(q, q, q, Dense(), mask=value).attention_outputs
            np.testing.assert_array_equal(got, want)
            assert strategy.supports(mask=True)
            continue
        if name != "score":
            with pytest.raises(ValueError, match=f"^{name}: not supported by {cls.__name__}"):
                attention(q, q, q, strategy, **{name: value})
        asked = "dropout" if name == "key" else name
        assert not strategy.supports(**{asked: True})
