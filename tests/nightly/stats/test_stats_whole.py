"""Statistics of attention, in every strategy."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_stats as unit
from _programs import DEFAULT_CODE
from jax.sharding import AxisType
from test_stats import (
    ARRAYS,
    by_hand,
    close,
    expected,
    H,
    MASK,
    statistics,
    STRATEGIES,
    T,
    with_gradients,
)

from eqattn import (
    ALiBi,
    AttentionMetadata,
    Blockwise,
    Causal,
    Dense,
    KeyPadding,
    Ragged,
    Ring,
    Selected,
    stats,
    Zigzag,
)
from eqattn.scores import Operand


OF_A_CALL = ("entropy", "cost", "mass")


@pytest.mark.parametrize("cls, n, own", unit.STRATEGIES)
def test_all_probabilities_give_the_same(cls, n, own, x64):
    unit.test_all_probabilities_give_the_same(cls, n, own, x64)


@pytest.mark.parametrize("cls", [Dense, Ragged])
def test_other_strategies_give_the_same(cls, x64):
    found = jax.jit(ft.partial(statistics, cls=cls))(jax.tree.map(jnp.asarray, ARRAYS))
    want = by_hand(ARRAYS)
    close(found, {name: np.asarray(want[name]) for name in found})


def test_tokens_of_a_layout_keep_their_statistics(x64):
    """Positions, not places: in the order of a zigzag ring, all but the bias, which has places."""
    layout, n = Zigzag(), 2
    mesh = jax.make_mesh((n,), ("sp",), (AxisType.Auto,), devices=jax.devices()[:n])
    arrays = {name: jnp.asarray(x) for name, x in ARRAYS.items()}
    plain = arrays | {"bias": jnp.zeros((H, 1, 1))}
    order = lambda x: layout.permute(x, n)
    with jax.set_mesh(mesh):
        own = dict(names=("entropy", "mass"), axis_name="sp", layout=layout)
        ring = ft.partial(statistics, cls=Ring, order=order, **own)
        found = jax.tree.map(lambda x: layout.unpermute(x, n), jax.jit(ring)(plain))
    want = by_hand(plain)
    close(found, {name: np.asarray(want[name]) for name in found})


@pytest.mark.parametrize("kind", unit.KNOWN)
def test_parts_that_know_the_logsumexp_add_up(kind):
    unit.test_parts_that_know_the_logsumexp_add_up(kind)


def test_the_largest_logit_of_a_head_on_an_automatic_mesh():
    unit.test_the_largest_logit_of_a_head_takes_one_collective(False)


def test_stored_keys_of_eight_bits():
    unit.test_stored_keys("eight bits")


@pytest.mark.parametrize("cls, n, own", [(Dense, 1, {}), *STRATEGIES])
def test_a_call_hands_over_its_logsumexp(cls, n, own, x64):
    """Values and gradients are the same, those of sinks through the logsumexp."""
    mesh = jax.make_mesh((n,), ("sp",), (AxisType.Auto,), devices=jax.devices()[:n])
    own = own | dict(names=OF_A_CALL, of_a_call=True)
    with jax.set_mesh(mesh):
        arrays = {name: jnp.asarray(x) for name, x in ARRAYS.items()}
        found = with_gradients(ft.partial(statistics, cls=cls, **own))(arrays)
    gradients, want = expected(found[1].keys())
    close(found, (gradients, {name: want[name] for name in found[1]}))


def test_memory_is_linear_in_the_tokens():
    def temporary(tokens):
        def loss(q, k):
            return stats.entropy(q, k, mask=Causal()).sum()

        args = [jax.ShapeDtypeStruct((tokens, h, 32), jnp.float32) for h in (2, 1)]
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*args).compile(DEFAULT_CODE)
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(4096) <= 4.2 * temporary(1024)


def test_what_is_not_there():
    """A key with a bias of -inf is as one that is masked, and what is masked may hold anything.
    So may a list of keys leave it out.
    """
    q, k = (jnp.asarray(ARRAYS[n][:1], jnp.float32) for n in "qk")
    strategy = Blockwise(AttentionMetadata(blocksize_q=8, blocksize_k=8))
    cost = jnp.ones(T).at[0].set(jnp.nan)
    others = jnp.broadcast_to(jnp.arange(1, T, dtype=jnp.int32), (1, 1, T, T - 1))
    masked = dict(mask=Causal() & KeyPadding(jnp.array([T]), jnp.array([1])))
    hidden = dict(bias=jnp.zeros((1, T)).at[0, 0].set(-jnp.inf), mask=Causal())
    listed = dict(mask=Causal() & Selected(others))
    cosine = lambda z, b, h, q, k, x: x * jnp.cos(z)

    @jax.jit
    def found(q):
        def loss(q):
            mean = stats.expectation(cosine, q, k, strategy, arrays=[Operand(cost, "s")], **masked)
            return jnp.sin(mean).sum(), mean

        ways = [stats.entropy(q, k, strategy, **way) for way in (masked, hidden, listed)]
        return ways, jax.grad(loss, has_aux=True)(q)

    (want, *others), finite = found(q)
    assert all(jnp.isfinite(x).all() for x in finite) and want[0, 1:].min() >= 0
    for x in others:
        np.testing.assert_allclose(x, want, atol=5e-6)


def test_forward_mode_of_an_entropy(x64):
    """Its derivative along a direction, which is a second derivative of the logsumexp."""
    arrays = {name: jnp.asarray(x) for name, x in ARRAYS.items()}
    moved = jax.tree.map(jnp.cos, arrays)

    def entropy(a):
        metadata = AttentionMetadata(softmax_aux=a["sinks"], logits_soft_cap=a["cap"])
        call = dict(mask=MASK, bias=a["bias"], score=ALiBi(a["slopes"]))
        return stats.entropy(a["q"], a["k"], Blockwise(metadata), **call)

    found = jax.jit(lambda a: jax.jvp(entropy, (a,), (moved,)))(arrays)
    close(found, jax.jvp(lambda a: by_hand(a)["entropy"], (arrays,), (moved,)))


def test_gradients_of_a_logsumexp_that_is_given_of_blocks():
    unit.test_gradients_of_a_logsumexp_that_is_given(Blockwise)
