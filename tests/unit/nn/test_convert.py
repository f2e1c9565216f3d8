"""Converting Equinox's layers, swapping strategies, and the package itself."""

import inspect
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqattn.nn as nn
from eqattn import AttentionImpl, AttentionMetadata, Blockwise, Dense


T, SIZE = 6, 8
KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (T, SIZE))
MASK = jnp.tril(jnp.ones((T, T), bool))
DENSE = Dense(AttentionMetadata())


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    activation: object

    def __init__(self, key):
        self.norm = eqx.nn.LayerNorm(SIZE)
        self.attention = eqx.nn.MultiheadAttention(
            2, SIZE, use_value_bias=True, dropout_p=0.25, key=key
        )
        self.activation = jax.nn.gelu  # a leaf that is no array

    def __call__(self, x, key=None, inference=None):
        y = jax.vmap(self.norm)(x)
        return x + self.activation(self.attention(y, y, y, MASK, key=key, inference=inference))


class Model(eqx.Module):
    blocks: list
    by_name: dict
    tail: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.blocks = [Block(keys[0]), Block(keys[1])]
        self.by_name = {"last": Block(keys[2])}
        self.tail = jnp.ones(SIZE)

    def __call__(self, x, **kwargs):
        for block in (*self.blocks, self.by_name["last"]):
            x = block(x, **kwargs)
        return x * self.tail[None]


def layers_of(tree, kind):
    is_layer = lambda x: isinstance(x, kind)
    return [x for x in jax.tree.leaves(tree, is_leaf=is_layer) if is_layer(x)]


KWARGS = {
    "default": {},
    "sizes": dict(key_size=5, value_size=7, output_size=3, qk_size=4, vo_size=9),
    "biases": dict(use_query_bias=True, use_key_bias=True, use_value_bias=True, use_output_bias=True),
    "dropout": dict(dropout_p=0.3, inference=True),
    "bfloat16": dict(dtype=jnp.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("name", KWARGS)
def test_a_layer_becomes_what_the_constructor_makes(name):
    theirs = eqx.nn.MultiheadAttention(2, SIZE, key=KEY, **KWARGS[name])
    want = nn.MultiheadAttention(2, SIZE, key=KEY, **KWARGS[name])
    got = nn.from_equinox(theirs)
    assert eqx.tree_equal(got, want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert got.query_proj.weight is theirs.query_proj.weight
    assert type(theirs) is eqx.nn.MultiheadAttention
    assert eqx.tree_equal(nn.from_equinox(theirs, strategy=DENSE).strategy, DENSE)


def test_a_model():
    model = Model(KEY)
    new = nn.from_equinox(model)
    assert layers_of(new, eqx.nn.MultiheadAttention) == []
    assert (
        len(layers_of(new, nn.MultiheadAttention))
        == len(layers_of(model, eqx.nn.MultiheadAttention))
        == 3
    )
    assert type(new) is Model and new.blocks[0].activation is model.blocks[0].activation
    np.testing.assert_allclose(new(X, inference=True), model(X, inference=True), atol=4e-6)
    old_leaves, new_leaves = (jax.tree.leaves(eqx.filter(m, eqx.is_array)) for m in (model, new))
    assert all(a is b for a, b in zip(old_leaves, new_leaves, strict=True))

    loss = lambda model: (model(X, inference=True) ** 2).sum()
    gradients = [jax.tree.leaves(eqx.filter_grad(loss)(m)) for m in (model, new)]
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=4e-5)


def test_what_was_changed_after_construction_is_kept():
    class Doubled(eqx.Module):
        inner: eqx.nn.Linear

        def __call__(self, x, *, key=None):
            return 2 * self.inner(x)

    theirs = eqx.nn.MultiheadAttention(2, SIZE, key=KEY)
    theirs = eqx.tree_at(lambda m: m.query_proj, theirs, replace_fn=Doubled)
    theirs = eqx.tree_at(lambda m: m.dropout.p, theirs, 0.5)
    theirs = eqx.nn.inference_mode(theirs)
    ours = nn.from_equinox(theirs)
    assert (ours.dropout.p, bool(ours.dropout.inference)) == (0.5, True)
    np.testing.assert_allclose(ours(X, X, X), theirs(X, X, X), atol=4e-6)


def test_a_strategy_is_swapped_in_every_layer():
    model = nn.from_equinox(Model(KEY))
    assert [layer.strategy for layer in layers_of(model, nn.MultiheadAttention)] == [None] * 3
    small = Blockwise(AttentionMetadata(blocksize_q=2, blocksize_k=2))
    swapped = model
    for strategy in (DENSE, small, None):
        swapped = nn.with_strategy(swapped, strategy)
        found = [layer.strategy for layer in layers_of(swapped, nn.MultiheadAttention)]
        assert len(found) == 3 and all(eqx.tree_equal(s, strategy) for s in found)
        key = jax.random.key(2)
        np.testing.assert_allclose(swapped(X, key=key), model(X, key=key), atol=4e-6)  # same drops
        assert all(
            a is b for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(swapped), strict=True)
        )
    assert eqx.tree_equal(swapped, model)
    layer = nn.with_strategy(model.blocks[0].attention, DENSE)
    assert eqx.tree_equal(layer.strategy, DENSE) and model.blocks[0].attention.strategy is None


def test_the_strategy_is_what_runs():
    calls = []

    class Recorder(AttentionImpl):
        @classmethod
        def get_impl_name(cls):
            return "recorder of the test of with_strategy"

        def forward_native(self, q, k, v, mask=None, causal=True, **kwargs):
            calls.append(q.shape)
            return DENSE.forward_native(q, k, v, mask=mask, causal=causal, **kwargs)

    model = nn.with_strategy(nn.from_equinox(Model(KEY)), Recorder(AttentionMetadata()))
    model(X, inference=True)
    assert calls == [(T, 2, SIZE // 2)] * 3


def test_strategies_with_parameters():
    """The arrays of a strategy of one's own are leaves of the model, and survive conversion."""

    class Mixed(AttentionImpl):
        share: jax.Array

        def __init__(self, metadata, share=0.5):
            self.metadata, self.share = metadata, jnp.asarray(share)

        @classmethod
        def get_impl_name(cls):
            return "mixed, of the test of strategies with parameters"

        def forward_native(self, q, k, v, mask=None, causal=True, **kwargs):
            out = Dense(self.metadata).forward_native(q, k, v, mask=mask, causal=causal, **kwargs)
            mean = jnp.broadcast_to(v.mean(-3, keepdims=True), out.attention_outputs.shape)
            return out.replace(
                attention_outputs=self.share * out.attention_outputs + (1 - self.share) * mean
            )

    theirs = eqx.nn.MultiheadAttention(2, SIZE, key=KEY)
    layer = nn.from_equinox(theirs, strategy=Mixed(AttentionMetadata(), 0.25))
    slope = jax.grad(lambda m: m(X, X, X).var())(layer).strategy.share
    assert float(layer.strategy.share) == 0.25 and slope != 0
    capped = eqx.tree_at(lambda m: m.logits_soft_cap, layer, 0.1, is_leaf=lambda x: x is None)
    assert np.abs(capped(X, X, X) - layer(X, X, X)).max() > 1e-3


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda: nn.with_strategy(Model(KEY), DENSE), ValueError, "no eqattn.nn.MultiheadAttention in this Model; from_equinox"),
        (lambda: nn.with_strategy([1], DENSE), ValueError, "in this list"),
        (lambda: nn.from_equinox(nn.from_equinox(Model(KEY))), ValueError, "no equinox.nn.MultiheadAttention in this Model; with_strategy"),
        (lambda: nn.with_strategy(nn.from_equinox(Model(KEY)), "dense"), TypeError, "AttentionRegistry.create"),
        (lambda: nn.from_equinox(Model(KEY), strategy="dense"), TypeError, "AttentionRegistry.create"),
        (
            lambda: nn.with_strategy(nn.from_equinox(Model(KEY)), Dense(AttentionMetadata(logits_soft_cap=1.0))),
            ValueError, "give MultiheadAttention logits_soft_cap=",
        ),
    ],
)  # fmt: skip
def test_errors(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_subclasses_are_left_alone():
    """What they change would be lost."""

    class Mine(eqx.nn.MultiheadAttention):
        def __call__(self, *args, **kwargs):
            return 0 * super().__call__(*args, **kwargs)

    both = Mine(2, SIZE, key=KEY), eqx.nn.MultiheadAttention(2, SIZE, key=KEY)
    kept, new = nn.from_equinox(both)
    assert type(kept) is Mine and type(new) is nn.MultiheadAttention


# The package -----------------------------------------------------------------------------------


def test_every_public_name_is_documented():
    page = (Path(__file__).parents[3] / "docs/pages/layers.md").read_text()
    documented = set(re.findall(r"^::: eqattn\.nn\.(\w+)$", page, re.MULTILINE))
    public = {n for n, x in vars(nn).items() if n[0] != "_" and not inspect.ismodule(x)}
    assert documented == public
    assert all(getattr(nn, name).__doc__ for name in public)
