"""What is given as a number is a constant: no transformation and no optimiser moves it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqattn import attention, AttentionMetadata, Blockwise, Causal, Dense
from eqattn.nn import MultiheadAttention
from eqattn.scores import SoftCap


T, D = 6, 8
X = jax.random.normal(jax.random.key(0), (T, D))
Q, K, V = jax.random.normal(jax.random.key(1), (3, T, 2, D))


def learnt(number, learned):
    return jnp.asarray(number, jnp.float32) if learned else number


def strategies(learned):
    sinks = jnp.asarray([0.5, -0.5])
    metadata = AttentionMetadata(
        softmax_scale=learnt(0.3, learned), logits_soft_cap=learnt(2.0, learned), softmax_aux=sinks
    )
    for cls in (Blockwise, Dense):
        yield cls(metadata), lambda s: (attention(Q, K, V, s).attention_outputs ** 2).sum()


def layers(learned):
    layer = MultiheadAttention(
        2,
        D,
        softmax_scale=learnt(0.3, learned),
        logits_soft_cap=learnt(2.0, learned),
        score=SoftCap(learnt(1.5, learned)),
        key=jax.random.key(2),
    )
    yield layer, lambda layer: (layer(X, mask=Causal()) ** 2).sum()


def scores(learned):
    yield (
        SoftCap(learnt(1.5, learned)),
        lambda score: (attention(Q, K, V, score=score).attention_outputs ** 2).sum(),
    )


def numbers(x):
    """The scales and caps of an object, in a fixed order."""
    if isinstance(x, SoftCap):
        return [x.cap]
    if isinstance(x, MultiheadAttention):
        return [x.softmax_scale, x.logits_soft_cap, x.score.cap]  # pyright: ignore
    return [x.metadata.softmax_scale, x.metadata.logits_soft_cap]


OPTIMISERS = {
    "adam": optax.adam(1e-1),
    "adamw": optax.adamw(1e-1, weight_decay=0.5),
    "sgd": optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1e-1, momentum=0.9)),
}


def trained(x, loss, optimiser, steps=3):
    state = optimiser.init(x)

    @jax.jit
    def step(x, state):
        updates, state = optimiser.update(jax.grad(loss)(x), state, x)
        return optax.apply_updates(x, updates), state

    with jax.numpy_dtype_promotion("standard"):  # for optax
        for _ in range(steps):
            x, state = step(x, state)
    return x


@pytest.mark.parametrize("kind, optimiser", [(strategies, "adam"), (scores, "sgd")])
def test_optimisers_move_arrays_and_no_numbers(kind, optimiser):
    for x, loss in kind(learned=False):
        after = trained(x, loss, OPTIMISERS[optimiser])
        assert numbers(after) == numbers(x) and all(type(n) is float for n in numbers(after))
        pairs = zip(jax.tree.leaves(x), jax.tree.leaves(after), strict=True)
        assert all((a != b).any() for a, b in pairs if isinstance(a, jax.Array))  # not `dropout`
    for x, loss in kind(learned=True):
        after = trained(x, loss, OPTIMISERS[optimiser])
        assert all(a != b for a, b in zip(numbers(x), numbers(after), strict=True))


@pytest.mark.parametrize("kind", [strategies, scores])
def test_a_number_and_an_array_give_the_same_values_and_gradients(kind):
    for (x, loss), (y, _) in zip(kind(learned=False), kind(learned=True), strict=True):
        np.testing.assert_allclose(loss(x), loss(y), rtol=1e-6)
        given = {jax.tree_util.keystr(p): g for p, g in leaves_of(jax.grad(loss)(x))}
        every = {jax.tree_util.keystr(p): g for p, g in leaves_of(jax.grad(loss)(y))}
        constants = {name for name in every if name.split(".")[-1] in CONSTANTS}
        assert set(given) == set(every) - constants and len(constants) == len(numbers(x))
        for name, g in given.items():
            np.testing.assert_allclose(g, every[name], rtol=1e-4, atol=1e-6)


leaves_of = jax.tree_util.tree_leaves_with_path
CONSTANTS = ("softmax_scale", "logits_soft_cap", "cap")


def test_a_vmap_over_gradients_and_a_scan_see_the_number():
    strategy, loss = next(iter(strategies(learned=False)))
    seen = []

    def step(strategy, x):
        seen.append(strategy.metadata.softmax_scale)
        return jax.tree.map(lambda a: a + x, strategy), loss(strategy)

    jax.lax.scan(step, strategy, jnp.ones(3))
    jax.vmap(step, (None, 0))(strategy, jnp.ones(3))
    jax.vmap(jax.grad(lambda s, x: step(s, x)[1]), (None, 0))(strategy, jnp.ones(3))
    assert set(seen) == {0.3}


def test_an_equal_number_does_not_retrace_and_another_does():
    traces = []
    f = jax.jit(lambda score: traces.append(None) or score.cap)
    for cap in (2, 2.0, np.float32(2)):
        assert f(SoftCap(cap)) == 2
    assert len(traces) == 1 and f(SoftCap(3.0)) == 3 and len(traces) == 2


def test_a_tree_of_any_objects_has_the_structure_of_the_strategy():
    """Numbers that are put in the place of arrays, such as norms, stay leaves."""
    strategy, _ = next(iter(strategies(learned=True)))
    norms = jax.tree.map(lambda x: float(jnp.linalg.norm(x)), strategy)
    assert jax.tree.structure(norms) == jax.tree.structure(strategy)
    assert eqx.tree_equal(jax.tree.map(lambda a, _: a, strategy, norms), strategy)
