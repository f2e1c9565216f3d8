"""The repr of a module leaves out what its constructor fills in by itself."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eqattn import (
    AllGather,
    AttentionImpl,
    AttentionMetadata,
    Blockwise,
    Causal,
    Dense,
    nn,
    PartitionAxis,
    PartitionManager,
    Ragged,
    Ring,
    ScoreFn,
    SlidingWindow,
    Ulysses,
    Zigzag,
)


EXPECTED = {
    "Blockwise()": Blockwise(),
    "Dense()": Dense(),
    "Ragged()": Ragged(),
    "AllGather()": AllGather(),
    "Ulysses()": Ulysses(),
    "AttentionMetadata()": AttentionMetadata(),
    "PartitionAxis()": PartitionAxis(),
    "PartitionManager()": PartitionManager(),
    "Ring(layout=Zigzag())": Ring(layout=Zigzag()),
    "Ring(axis_name='sp')": Ring(axis_name="sp"),
    "Blockwise(metadata=AttentionMetadata(dropout_prob=0.1))": Blockwise(
        AttentionMetadata(dropout_prob=0.1)
    ),
    "AttentionMetadata(softmax_aux=f32[4])": AttentionMetadata(softmax_aux=jnp.zeros(4)),
    "AttentionMetadata(softmax_scale=0.5)": AttentionMetadata(softmax_scale=0.5),
    # What follows from one axis is left out, and so is the manager of it.
    "AttentionMetadata(partition_axis=PartitionAxis(batch_axis='data'))": AttentionMetadata(
        partition_axis=PartitionAxis(batch_axis="data")
    ),
    "PartitionAxis(generation_batch_axis=None)": PartitionAxis(generation_batch_axis=None),
    "Rotary()": nn.Rotary(),
    "Rotary(theta=500.0, dim=4)": nn.Rotary(500.0, dim=4),
    "Rotary(scaling=LinearScaling(factor=2.0))": nn.Rotary(scaling=nn.LinearScaling(2.0)),
}


@pytest.mark.parametrize("text", EXPECTED)
def test_defaults_are_left_out(text):
    assert repr(EXPECTED[text]) == text


@pytest.mark.parametrize("text", [x for x in EXPECTED if "[" not in x])
def test_the_text_makes_the_same_object(text):
    names = {x.__name__: x for x in map(type, EXPECTED.values())}
    made = eval(text, names | dict(Zigzag=Zigzag, LinearScaling=nn.LinearScaling))
    assert eqx.tree_equal(made, EXPECTED[text])


def test_layers():
    layer = nn.MultiheadAttention(2, 8, key=jax.random.key(0))
    text = repr(layer)
    assert "None" not in text.replace("bias=None", "") and "num_heads=2" in text
    assert "use_query_bias" not in text and "strategy" not in text
    text = repr(nn.with_strategy(layer, Ring(layout=Zigzag())))
    assert "strategy=Ring(layout=Zigzag())" in text
    wide = nn.MultiheadAttention(2, 8, use_query_bias=True, window=3, key=jax.random.key(0))
    assert "use_query_bias=True" in repr(wide) and "window=(3, 3)" in repr(wide)


class Own(AttentionImpl):
    """A strategy of a user's, whose metadata are required."""

    metadata: AttentionMetadata
    size: int = eqx.field(static=True, default=3)
    mask: object = None

    @classmethod
    def get_impl_name(cls):
        return "own_of_short_repr"

    def forward_native(self, q, k, v, **kwargs):
        raise NotImplementedError


def test_modules_of_users():
    assert repr(Own(AttentionMetadata())) == "Own(metadata=AttentionMetadata())"
    assert repr(Own(AttentionMetadata(), 4)) == "Own(metadata=AttentionMetadata(), size=4)"
    masked = Own(AttentionMetadata(), mask=Causal() & SlidingWindow(3, 0))
    assert "mask=Causal() & SlidingWindow(left=3, right=0)" in repr(masked)

    def capped(z, b, h, q, k):
        return z

    assert "capped" in repr(ScoreFn(capped)) and "()" not in repr(ScoreFn(capped))


def test_it_never_raises():
    """Not for leaves of any kind, nor for traced ones."""
    strategy = Blockwise(AttentionMetadata(softmax_aux=jnp.zeros(4), softmax_scale=jnp.ones(())))
    for leaf in (None, object(), jnp.zeros((2, 2, 2)), jax.ShapeDtypeStruct((3,), int), "x"):
        assert repr(jax.tree.map(lambda _, leaf=leaf: leaf, strategy)).startswith("Blockwise(")
    texts = []
    jax.jit(lambda s: texts.append(repr(s)))(strategy)
    assert "softmax_scale" in texts[0] and "softmax_aux" in texts[0]
    assert "hide_defaults" not in repr(strategy)
