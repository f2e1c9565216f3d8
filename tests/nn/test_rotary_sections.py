"""Rotary positions of several axes, as of images and video."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn.nn import rotary


SECTIONS = (1, 2, 1)


def definition(x, positions, sections, theta=10_000.0):
    """M-RoPE by its definition, in complex float64: pair `i` turns by the axis of its section."""
    half = x.shape[-1] // 2
    axis = [n for n, size in enumerate(sections) for _ in range(size)]
    turned = np.array(x, np.complex128)[..., :half] + 1j * np.array(x, np.float64)[..., half:]
    for i in range(half):
        angle = positions[..., axis[i]] * theta ** (-i / half)
        turned[..., i] *= np.exp(1j * angle)[..., None]
    return np.concatenate([turned.real, turned.imag], -1)


def test_each_section_turns_by_its_own_axis():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 5, 3, 8)), jnp.float32)
    at = rng.integers(-1000, 100_000, (2, 5, 3))
    run = jax.jit(lambda x, at: rotary(x, at, sections=SECTIONS))
    got = run(x, at), run(x, at[0]), run(x, jnp.asarray(at % 50, jnp.float32))
    wants = at, np.broadcast_to(at[0], at.shape), at % 50
    for y, positions in zip(got, wants):
        np.testing.assert_allclose(y, definition(x, positions, SECTIONS), rtol=0, atol=1e-5)
    same = np.repeat(np.arange(5)[:, None], 3, -1)
    np.testing.assert_array_equal(run(x, same), jax.jit(rotary)(x, np.arange(5)))


def test_products_depend_on_differences_along_each_axis():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 8))
    dot = lambda a, b: (rotary(q, a, sections=SECTIONS) * rotary(k, b, sections=SECTIONS)).sum()
    a, b, shift = np.array([[3, 9, 2]]), np.array([[1, 4, 7]]), np.array([[100, 20, 3]])
    np.testing.assert_allclose(dot(a, b), dot(a + shift, b + shift), atol=1e-5)
    assert abs(dot(a, b) - dot(a + shift, b)) > 1e-3


@pytest.mark.parametrize(
    "sections, shape, message",
    [
        ((2, 1), (5, 2), "add up to the 4 pairs of 8 features that turn, got .2, 1., 3 pairs"),
        (SECTIONS, (5,), "number of sections"),
        (SECTIONS, (5, 2), "got shape .5, 2."),
        (None, (5, 3), "got shape .5, 3."),
    ],
)
def test_errors(sections, shape, message):
    with pytest.raises(ValueError, match=message):
        rotary(jnp.ones((5, 1, 8)), np.zeros(shape, int), sections=sections)
