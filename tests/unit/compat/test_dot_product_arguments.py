"""Arguments of `dot_product_attention` that `jax.nn` takes, and errors that name what was given."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import dot_product_attention


Q = jax.random.normal(jax.random.key(0), (1, 9, 2, 4))


def windowed(left, right):
    q = np.asarray(Q[0], np.float64)
    place = np.arange(9)
    seen = (place <= place[:, None] + right) & (place >= place[:, None] - left)
    z = np.where(seen, np.einsum("thd,shd->hts", q, q) / 2, -np.inf)
    p = np.exp(z - z.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", p / p.sum(-1, keepdims=True), q)[None]


@pytest.mark.parametrize("size", [np.array([3, 1]), jnp.array([3, 1]), [3, 1], (jnp.int32(3), 1)])
@pytest.mark.parametrize("jit", [False, True])
def test_a_window_may_be_any_pair(size, jit):
    call = functools.partial(dot_product_attention, Q, Q, Q)
    arrays = not isinstance(size, list)
    run = jax.jit(lambda n: call(local_window_size=n)) if jit and arrays else None
    out = run(size) if run else call(local_window_size=size)
    np.testing.assert_allclose(out, windowed(3, 1), rtol=0, atol=1e-6)
    theirs = jax.nn.dot_product_attention(Q, Q, Q, local_window_size=tuple(size))
    np.testing.assert_allclose(out, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [np.array([3, 1, 2]), jnp.ones((2, 1), int), (3,), "3"])
def test_other_windows_raise(size):
    with pytest.raises(ValueError, match="int or .left, right."):
        dot_product_attention(Q, Q, Q, local_window_size=size)
    with pytest.raises(TypeError, match="local_window_size"):
        dot_product_attention(Q, Q, Q, local_window_size=jnp.array([3.0, 1.0]))


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_shapes_in_errors_are_those_that_were_given(name):
    made = jnp.ones if name == "bias" else lambda shape: jnp.ones(shape, bool)
    for shape in ((9, 8), (3, 9, 9), (8,)):
        text = rf"{name} of shape {re.escape(str(shape))} does not.*\(1, 2, 9, 9\).*may be missing"
        with pytest.raises(ValueError, match=text):
            dot_product_attention(Q, Q, Q, **{name: made(shape)})
    for shape in ((9, 9), (2, 1, 9), (9,), ()):
        dot_product_attention(Q[0], Q[0], Q[0], **{name: made(shape)})


def test_shapes_of_one_sequence():
    narrow = Q[0].astype(jnp.float16)
    with pytest.raises(ValueError, match=r"query \(9, 2, 4\) float32, key \(9, 2, 4\) float16"):
        dot_product_attention(Q[0], narrow, narrow)
