import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _same import same
from hypothesis import given, settings, strategies as st

from eqattn._carry import Carry
from eqattn._output import AttentionOutput


def output(dtype=jnp.bfloat16):
    x = jnp.linspace(-1.0, 1.0, 2 * 3 * 4 * 5, dtype=jnp.float32)
    out = x.reshape(2, 3, 4, 5)
    weights = x[:72].reshape(2, 4, 3, 3)
    carry = Carry(out, out[..., 0], jnp.full((2, 3, 4), -jnp.inf))
    return AttentionOutput(weights.astype(dtype), out.astype(dtype), out[..., 1], carry)


def test_fields_and_defaults():
    names = [f.name for f in dataclasses.fields(AttentionOutput)]
    assert names == ["attention_weights", "attention_outputs", "logsumexp", "carry", "max_logits"]
    empty = AttentionOutput()
    assert all(getattr(empty, name) is None for name in names) and jax.tree.leaves(empty) == []
    w, o = jnp.zeros((1, 1, 2, 2)), jnp.zeros((1, 2, 1, 3))
    out = AttentionOutput(w, o)
    assert out.attention_weights is w and out.attention_outputs is o
    with pytest.raises(dataclasses.FrozenInstanceError):
        out.carry = None  # pyright: ignore


def test_replace():
    out = output()
    new = out.replace(attention_weights=None)
    assert new.attention_weights is None and new.carry is out.carry
    assert out.attention_weights is not None and same(out.replace(), out)
    with pytest.raises(TypeError):
        out.replace(weights=None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_round_trip(dtype):
    out = output(dtype)
    for back in (
        AttentionOutput.from_json(out.to_json()),
        AttentionOutput.from_json(out.to_json(indent=1)),
        AttentionOutput.from_dict(out.to_dict()),
    ):
        assert same(back, out) and isinstance(back.carry, Carry)
        assert back.attention_outputs.dtype == dtype and back.logsumexp.dtype == jnp.float32
    json.loads(out.to_json(), parse_constant=pytest.fail)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4), st.booleans(), st.booleans())
def test_round_trip_of_any_bits(words, weights, carry):
    x = jnp.asarray(np.array(words, np.uint32).view(np.float32))
    part = Carry(x.reshape(2, 1, 2), x[:2].reshape(2, 1), x[2:].reshape(2, 1))
    out = AttentionOutput(
        attention_weights=x.reshape(1, 2, 2) if weights else None,
        attention_outputs=x.reshape(2, 1, 2),
        carry=part if carry else None,
    )
    back = AttentionOutput.from_json(out.to_json())
    assert jax.tree.structure(back) == jax.tree.structure(out)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(out)):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes() and a.shape == b.shape


def test_float64_round_trip(x64):
    out = AttentionOutput(attention_outputs=jnp.asarray([[[1 / 3]]]))
    back = AttentionOutput.from_json(out.to_json())
    assert back.attention_outputs.dtype == jnp.float64 and same(back, out)


def test_unknown_names_and_traced_arrays_raise():
    with pytest.raises(ValueError, match="cache_view.*attention_outputs"):
        AttentionOutput.from_dict({"cache_view": None})
    with pytest.raises(ValueError, match="Carry has no.*maximum"):
        AttentionOutput.from_dict({"carry": {"maximum": None}})
    with pytest.raises(TypeError, match="outside of jax.jit"):
        jax.jit(lambda o: o.to_json())(output())


def test_is_a_pytree_under_every_transformation():
    out = output(jnp.float32)
    assert same(jax.jit(lambda o: o)(out), out)
    grads = jax.grad(lambda o: jnp.sum(o.attention_outputs**2) + jnp.sum(o.carry.numerator))(out)
    np.testing.assert_array_equal(grads.attention_outputs, 2 * out.attention_outputs)
    np.testing.assert_array_equal(grads.carry.numerator, jnp.ones((2, 3, 4, 5)))
    doubled = jax.vmap(lambda o: jax.tree.map(lambda a: 2 * a, o))(out)
    np.testing.assert_array_equal(doubled.logsumexp, 2 * out.logsumexp)
    shapes = jax.eval_shape(lambda o: o, out)
    assert isinstance(shapes, AttentionOutput) and shapes.carry.denominator.shape == (2, 3, 4)
