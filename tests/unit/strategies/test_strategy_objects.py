"""JAX's plain transformations over strategies as values, and strategies of users."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import (
    attention,
    AttentionImpl,
    AttentionMetadata,
    AttentionOutput,
    Blockwise,
    Causal,
    Dense,
)


T, S, H, K, D = 4, 5, 2, 1, 3
CLASSES = [Blockwise, Dense]
LEARNED = ("softmax_scale", "logits_soft_cap", "softmax_aux")


@pytest.fixture(autouse=True)
def _x64(x64):
    pass


def qkv():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s)) for s in ((T, H, D), (S, K, D), (S, K, D))]


def strategy(cls=Blockwise, scale=0.7, cap=1.5, sinks=(0.5, -0.5), **kwargs):
    return cls(
        AttentionMetadata(
            runtime_dtype=jnp.float64,
            softmax_scale=scale,
            logits_soft_cap=cap,
            softmax_aux=jnp.asarray(sinks, jnp.float64),
            **kwargs,
        )
    )


def learnable(cls=Blockwise, **kwargs):
    return strategy(cls, jnp.asarray(0.7, jnp.float64), jnp.asarray(1.5, jnp.float64), **kwargs)


def loss(strategy):
    out = attention(*qkv(), strategy, mask=Causal(1), return_logsumexp=True)
    weights = jnp.arange(T * H * D, dtype=jnp.float64).reshape(T, H, D)
    return (weights * out.attention_outputs).sum() + (out.logsumexp**2).sum()


def plain(scale, cap, sinks):
    """The same in `jax.numpy`, from its definition."""
    q, k, v = qkv()
    k, v = (jnp.repeat(x, H // K, 1) for x in (k, v))
    z = jnp.einsum("thd,shd->hts", q, k) * scale
    z = cap * jnp.tanh(z / cap)
    visible = np.arange(S) <= np.arange(T)[:, None] + 1
    z = jnp.where(visible[None], z, -jnp.inf)
    z = jnp.concatenate([z, jnp.broadcast_to(sinks[:, None, None], (H, T, 1))], -1)
    out = jnp.einsum("hts,shd->thd", jax.nn.softmax(z, -1)[..., :-1], v)
    lse = jax.nn.logsumexp(z, -1).T
    weights = jnp.arange(T * H * D, dtype=jnp.float64).reshape(T, H, D)
    return (weights * out).sum() + (lse**2).sum()


def parameters(strategy):
    return [getattr(strategy.metadata, name) for name in LEARNED]


def assert_close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)


# Plain transformations


@pytest.mark.parametrize("cls", CLASSES)
def test_the_leaves_are_the_parameters(cls):
    """All else is static, so that plain transformations take the object."""
    for s, n in ((strategy(cls), 1), (learnable(cls, blocksize_q=2), 3)):
        leaves = jax.tree.leaves(s)
        assert len(leaves) == n and all(map(eqx.is_inexact_array, leaves))
    assert jax.tree.leaves(cls(AttentionMetadata())) == []
    hash(cls(AttentionMetadata())), hash(jax.tree.structure(learnable(cls)))


@pytest.mark.parametrize("cls", [Blockwise])
def test_grad(cls):
    """Of the plain kind, with respect to all that is learned."""
    s = learnable(cls)
    value, gradient = jax.jit(jax.value_and_grad(loss))(s)
    assert type(gradient) is cls and gradient.metadata.blocksize_q is None
    args = [jnp.asarray(x, jnp.float64) for x in parameters(s)]
    want, wants = jax.jit(jax.value_and_grad(plain, (0, 1, 2)))(*args)
    assert_close(value, want)
    for got, want in zip(parameters(gradient), wants):
        assert_close(got, want)


@pytest.mark.parametrize("cls", [Blockwise])
def test_hessian(cls):
    """Forward over reverse, over the whole object."""
    s = learnable(cls)
    args = parameters(s)
    want = jax.jit(jax.hessian(plain, (0, 1, 2)))(*args)
    got = jax.jit(jax.hessian(loss))(s)
    for row, name in zip(want, LEARNED):
        for a, b in zip(parameters(getattr(got.metadata, name)), row):
            assert_close(a, b)


def test_vmap_over_an_ensemble_of_strategies():
    scales, caps = jnp.asarray([0.3, 0.7, 1.1]), jnp.asarray([1.0, 1.5, 9.0])
    sinks = jnp.asarray([[0.0, 1.0], [0.5, -0.5], [-1.0, 2.0]])
    stack = lambda *xs: jax.tree.map(lambda *x: jnp.stack([jnp.asarray(y) for y in x]), *xs)
    many = stack(*[strategy(scale=a, cap=c, sinks=s) for a, c, s in zip(scales, caps, sinks)])
    want = jax.vmap(jax.value_and_grad(plain, (0, 1, 2)))(scales, caps, sinks)
    value, gradient = jax.jit(jax.vmap(jax.value_and_grad(loss)))(many)
    assert_close(value, want[0])
    for a, b in zip(parameters(gradient), want[1]):
        assert_close(a, b)


def test_vmap_over_one_parameter():
    scales = jnp.asarray([0.3, 0.7])
    many = eqx.tree_at(lambda s: s.metadata.softmax_scale, learnable(), scales)
    axes = jax.tree.map(lambda _: None, many)
    axes = eqx.tree_at(lambda s: s.metadata.softmax_scale, axes, 0, is_leaf=lambda x: x is None)
    got = jax.vmap(loss, (axes,))(many)
    assert_close(got, [loss(strategy(scale=float(a))) for a in scales])


def test_scan_over_strategies_is_gradient_descent():
    """A strategy as the carry of a scan: what an optimiser does."""

    def step(s, _):
        value, gradient = jax.value_and_grad(loss)(s)
        return jax.tree.map(lambda x, g: x - 1e-4 * g, s, gradient), value

    _, losses = jax.jit(lambda s: jax.lax.scan(step, s, None, length=5))(learnable())
    assert (jnp.diff(losses) < 0).all()


def test_jit_traces_once_for_equal_structures():
    traces = []

    @jax.jit
    def f(s):
        traces.append(None)
        return loss(s)

    values = [f(learnable()), f(strategy(scale=jnp.float64(0.9), cap=jnp.float64(1.5)))]
    assert len(traces) == 1 and values[0] != values[1]
    f(learnable(blocksize_q=2))
    assert len(traces) == 2


# Equinox's convention


@pytest.mark.parametrize("cls", [Blockwise])
def test_filter_grad_keeps_python_floats_constant(cls):
    gradient = eqx.filter_grad(loss)(strategy(cls)).metadata
    assert [x.shape for x in jax.tree.leaves(gradient)] == [(H,)]
    gradient = eqx.filter_grad(loss)(learnable(cls)).metadata
    assert all(getattr(gradient, name) is not None for name in LEARNED)


def test_filter_jit_and_partition():
    assert_close(eqx.filter_jit(loss)(strategy()), loss(strategy()))
    arrays, static = eqx.partition(strategy(), eqx.is_inexact_array)
    assert len(jax.tree.leaves(arrays)) == 1 and jax.tree.leaves(static) == []
    assert_close(loss(eqx.combine(arrays, static)), loss(strategy()))


def test_apply_updates_leaves_floats_alone():
    s = strategy()
    updated = eqx.apply_updates(s, eqx.filter_grad(loss)(s))
    assert updated.metadata.softmax_scale == 0.7
    assert (updated.metadata.softmax_aux != s.metadata.softmax_aux).all()


def test_a_model_with_a_strategy_inside():
    """Plain `jax.grad` and `jax.jit` over a module that has one as a field."""

    class Model(eqx.Module):
        weight: jax.Array
        strategy: AttentionImpl

        def __call__(self, x):
            q, k, v = jnp.split((x @ self.weight).reshape(T, 1, 3 * D), 3, -1)
            return self.strategy(q, k, v, mask=Causal()).attention_outputs

    x = jax.random.normal(jax.random.key(1), (T, D), jnp.float64)
    weight = jax.random.normal(jax.random.key(2), (D, 3 * D), jnp.float64)
    f = jax.jit(jax.grad(lambda model: (model(x) ** 2).sum()))
    one = f(Model(weight, strategy(sinks=(0.5,))))
    two = f(Model(weight, strategy(Dense, sinks=(0.5,))))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert_close(a, b)


# One for another


def test_swapping_blockwise_for_dense_changes_nothing():
    """The same metadata; only the class differs."""
    metadata = learnable().metadata
    for how in (loss, lambda s: jax.jit(jax.grad(loss))(s).metadata):
        a, b = how(Blockwise(metadata)), how(Dense(metadata))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert_close(x, y)


def test_calling_a_strategy_is_attention():
    q, k, v = qkv()
    s = strategy()
    kwargs = dict(mask=Causal(), q_offset=1, return_logsumexp=True, return_carry=True)
    a, b = s(q, k, v, **kwargs), attention(q, k, v, s, **kwargs)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)
    assert_close(a.carry.output(), a.attention_outputs)
    assert_close(a.carry.logsumexp(), a.logsumexp)


# A user's own


def test_a_users_strategy_needs_a_name_and_forward_native(registry):
    seen = {}

    @registry.register
    class Mean(AttentionImpl):
        """Attends to all keys equally."""

        @classmethod
        def get_impl_name(cls):
            return "mean"

        def forward_native(self, q, k, v, mask=None, bias=None, init_bias=None,
                           deterministic=False, dropout_rng=None, causal=True):  # fmt: skip
            seen.update(mask=mask, causal=causal, deterministic=deterministic, key=dropout_rng)
            out = jnp.broadcast_to(v.mean(-3, keepdims=True), (*q.shape[:-1], v.shape[-1]))
            return AttentionOutput(attention_outputs=out * self.metadata.softmax_scale)

    q, k, v = qkv()
    mine = registry.create("mean", AttentionMetadata(softmax_scale=jnp.asarray(2.0)))
    mask, key = Causal(), jax.random.key(0)
    out = attention(q, k, v, mine, mask=mask, key=key, inference=True).attention_outputs
    assert_close(out, jnp.broadcast_to(2 * v.mean(0, keepdims=True), (T, H, D)))
    assert seen == dict(mask=mask, causal=False, deterministic=True, key=key)
    assert_close(mine(q, k, v).attention_outputs, out)

    f = lambda s: s(q, k, v).attention_outputs.sum()
    assert_close(jax.jit(jax.grad(f))(mine).metadata.softmax_scale, out.sum() / 2)
    assert_close(jax.vmap(lambda q: mine(q, k, v).attention_outputs)(q[None])[0], out)
    with pytest.raises(ValueError, match="return_logsumexp: not supported by Mean"):
        attention(q, k, v, mine, return_logsumexp=True)
    with pytest.raises(ValueError, match="score: not supported by Mean"):
        mine(q, k, v, score=lambda *_: 0)


def test_a_users_strategy_may_wrap_one_of_ours(registry):
    """And add a parameter of its own, which is learned with the others."""

    @registry.register
    class Tempered(AttentionImpl):
        metadata: AttentionMetadata
        temperature: jax.Array | float = 1.0

        @classmethod
        def get_impl_name(cls):
            return "tempered"

        def forward_native(self, q, k, v, mask=None, **kwargs):
            return Blockwise(self.metadata).forward_native(
                q / self.temperature, k, v, mask, **kwargs
            )

    assert_close(loss(registry.create("tempered", strategy().metadata)), loss(strategy()))
    half = Tempered(learnable().metadata, jnp.asarray(2.0, jnp.float64))
    assert_close(loss(half), loss(strategy(scale=0.35)))
    gradient = jax.grad(loss)(half)
    scale = gradient.metadata.softmax_scale
    assert_close(gradient.temperature, -0.7 / 2 * scale)
