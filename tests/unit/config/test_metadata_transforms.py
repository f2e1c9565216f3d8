import copy
import pickle
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _same import same

from eqattn._config.metadata import AttentionMetadata


def learned(**kwargs):
    return AttentionMetadata(
        jnp.float32,
        softmax_scale=jnp.float32(0.3),
        logits_soft_cap=jnp.float32(2.0),
        softmax_aux=jnp.asarray([0.1, -0.2], jnp.float32),
        blocksize_q=16,
        **kwargs,
    )


def loss(m, x):
    logits = m.logits_soft_cap * jnp.tanh(m.softmax_scale * x / m.logits_soft_cap)
    return jnp.sum(jnp.sin(logits)) + jnp.sum(jnp.square(m.softmax_aux)) * m.softmax_scale


def test_leaves_are_never_looked_into_when_traced_or_abstract():
    @jax.jit
    def f(m, scale):
        m = m.replace(softmax_scale=scale, logits_soft_cap=-jnp.abs(scale), blocksize_k=4)
        assert m.blocksize_k == 4
        return m.softmax_scale

    assert f(learned(), 3.0) == 3.0
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    m = AttentionMetadata(softmax_scale=shape, logits_soft_cap=shape)
    assert jax.eval_shape(lambda m: m.softmax_scale * 2, m).shape == ()
    out = jax.eval_shape(lambda m: m, learned())
    assert isinstance(out.softmax_aux, jax.ShapeDtypeStruct)


def test_any_object_can_be_a_leaf_of_the_tree():
    m, marker = learned(), object()
    out = jax.tree.map(lambda _: marker, m)
    assert isinstance(out, AttentionMetadata)
    assert out.softmax_scale is out.softmax_aux is marker and out.blocksize_q == 16
    axes = jax.tree.map(lambda _: 0, m)
    none = jax.tree.map(lambda _: None, m)
    assert axes.softmax_scale == 0 and jax.tree.leaves(none) == []
    arrays, rest = eqx.partition(m, eqx.is_inexact_array)
    assert same(eqx.combine(arrays, rest), m)
    assert eqx.tree_at(lambda m: m.softmax_scale, m, jnp.float32(9)).softmax_scale == 9


def test_plain_grad_jit_hessian_agree_with_finite_differences(x64):
    m = jax.tree.map(lambda a: a.astype(jnp.float64), learned())
    x = jnp.linspace(0.1, 2.0, 7)
    grads = jax.jit(jax.grad(loss))(m, x)
    assert isinstance(grads, AttentionMetadata) and grads.blocksize_q == 16
    assert jax.tree.structure(grads) == jax.tree.structure(m)
    eps = 1e-6
    for field in ("softmax_scale", "logits_soft_cap"):
        up = m.replace(**{field: getattr(m, field) + eps})
        down = m.replace(**{field: getattr(m, field) - eps})
        np.testing.assert_allclose(
            getattr(grads, field), (loss(up, x) - loss(down, x)) / (2 * eps), rtol=1e-7
        )
    np.testing.assert_allclose(grads.softmax_aux, 2 * m.softmax_aux * m.softmax_scale, rtol=1e-12)
    hessian = jax.hessian(loss)(m, x)
    np.testing.assert_allclose(
        hessian.softmax_aux.softmax_aux, 2 * m.softmax_scale * jnp.eye(2), rtol=1e-12
    )
    np.testing.assert_allclose(hessian.softmax_scale.softmax_aux, 2 * m.softmax_aux, rtol=1e-12)
    value, tangent = jax.jvp(loss, (m, x), (grads, x))
    assert value.shape == tangent.shape == ()


@pytest.mark.parametrize("grad", [jax.grad, eqx.filter_grad])
def test_a_number_is_constant_and_an_array_learned(grad):
    m = AttentionMetadata(softmax_scale=0.5, logits_soft_cap=jnp.float32(3))
    seen = []

    def f(m):
        seen.append(type(m.softmax_scale))
        return m.softmax_scale * m.logits_soft_cap

    grads = grad(f)(m)
    assert seen == [float] and jax.tree.leaves(grads) == [0.5]
    assert grads.logits_soft_cap == 0.5 and grads.softmax_scale == 0.5  # static, as `blocksize_q`
    assert jax.jit(f)(m) == eqx.filter_jit(f)(m) == 1.5
    moved = eqx.apply_updates(m, grads)
    assert type(moved.softmax_scale) is float and (moved.softmax_scale, moved.logits_soft_cap) == (
        0.5,
        3.5,
    )


def test_constants_and_arrays_change_places():
    m = AttentionMetadata(softmax_scale=0.5)
    learnt = m.replace(softmax_scale=jnp.float32(0.5))
    assert len(jax.tree.leaves(learnt)) == 1 and same(learnt.replace(softmax_scale=0.5), m)
    assert same(AttentionMetadata.from_json(m.to_json()), m)
    assert same(pickle.loads(pickle.dumps(m)), m) and same(copy.deepcopy(m), m)
    with pytest.raises(TypeError, match="0.5 is not a leaf"):
        eqx.tree_at(lambda m: m.softmax_scale, m, jnp.float32(0.5))
    none = AttentionMetadata()
    learnt = eqx.tree_at(lambda m: m.softmax_scale, none, jnp.ones(()), is_leaf=lambda x: x is None)
    assert learnt.softmax_scale == 1 and "softmax_scale=f32[]" in repr(learnt)
    for m_, is_leaf in ((none, lambda x: x is None), (learnt, None)):
        moved = eqx.tree_at(lambda m: m.softmax_scale, m_, 0.25, is_leaf=is_leaf)
        assert jax.tree.leaves(moved) == [0.25]  # nothing is converted to a constant
    assert "softmax_scale=0.5" in repr(m)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(learnt)]
    assert paths == [".softmax_scale"]


def test_vmap_over_metadata():
    scales = jnp.asarray([0.1, 0.2, 0.3], jnp.float32)
    many = jax.vmap(lambda s: AttentionMetadata(softmax_scale=s, logits_soft_cap=2.0 * s))(scales)
    assert many.softmax_scale.shape == (3,)
    ones = jnp.ones(3, jnp.float32)
    out = jax.vmap(lambda m, x: m.softmax_scale * x + m.logits_soft_cap)(many, ones)
    np.testing.assert_allclose(out, 3 * scales, rtol=1e-6)
    grads = jax.vmap(jax.grad(lambda m: m.softmax_scale**2))(many)
    np.testing.assert_allclose(grads.softmax_scale, 2 * scales, rtol=1e-6)
    axes = AttentionMetadata(softmax_scale=None).replace()
    assert jax.tree.leaves(axes) == []
    shared = jax.vmap(lambda m, x: m.softmax_scale * x, in_axes=(None, 0))(
        AttentionMetadata(softmax_scale=0.5), scales
    )
    np.testing.assert_allclose(shared, 0.5 * scales)
    out = eqx.filter_vmap(lambda m: m.softmax_scale * 2, in_axes=eqx.if_array(0))(many)
    np.testing.assert_allclose(out, 2 * scales, rtol=1e-6)


def test_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("sp",))
        m = learned(mesh=mesh)
        jax.grad(loss)(m.replace(runtime_dtype="bfloat16"), jnp.ones(2, jnp.float32))
        AttentionMetadata.from_json(m.to_json())
