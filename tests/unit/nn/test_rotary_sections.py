"""Rotary positions of several axes, as of images and video, against float64 NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from _sections import turned_by_axes

from eqattn import nn
from eqattn.nn import rotary


SECTIONS = (1, 2, 1)


def grid(*shape):
    """The coordinates of the tokens of a grid, row by row: `[tokens, axes]`."""
    return np.stack(np.unravel_index(np.arange(math.prod(shape)), shape), -1)


@pytest.mark.parametrize("axial, interleaved", [(False, True), (True, False)])
def test_each_section_turns_by_its_own_axis(axial, interleaved):
    given = dict(sections=SECTIONS, axial=axial, interleaved=interleaved)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 5, 3, 8)), jnp.float32)
    at = rng.integers(-1000, 100_000, (2, 5, 3))
    run = jax.jit(lambda x, at: rotary(x, at, **given))
    got = run(x, at), run(x, at[0]), run(x, jnp.asarray(at % 50, jnp.float32))
    wants = at, np.broadcast_to(at[0], at.shape), at % 50
    for y, positions in zip(got, wants):
        np.testing.assert_allclose(y, turned_by_axes(x, positions, **given), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(jax.vmap(run)(x, at), got[0])
    module = nn.Rotary(**given)
    np.testing.assert_array_equal(jax.jit(module)(x, at), got[0])


def test_equal_coordinates_are_one_position():
    """Those of text in M-RoPE, whose frequencies are those of all pairs."""
    x, place = normal(1, 5, 3, 8), np.arange(5)
    same = np.repeat(place[:, None], 3, -1)
    text = jax.jit(lambda x, at: rotary(x, at, sections=SECTIONS))(x, same)
    np.testing.assert_array_equal(text, jax.jit(rotary)(x, place))
    restarted = rotary(x, same, sections=SECTIONS, axial=True)
    assert np.abs(restarted - text)[1:].max() > 1e-2


SCALINGS = None, nn.YaRNScaling(4.0, 64), nn.NTKScaling(3.0)
THETAS = 1e4, jnp.float32(500.0)


@pytest.mark.parametrize("scaling, theta", [(SCALINGS[1], THETAS[0]), (SCALINGS[2], THETAS[1])])
def test_one_axis_is_plain_rotary(scaling, theta):
    x, place = normal(2, 2, 7, 3, 8), np.random.default_rng(3).integers(-9999, 9999, (2, 7))
    given = dict(scaling=scaling, dim=6, interleaved=True)
    want = rotary(x, place, theta, **given)
    for axial in (False, True):
        got = rotary(x, place[..., None], theta, sections=(3,), axial=axial, **given)
        np.testing.assert_array_equal(got, want)


def test_sections_of_one_size_turn_alike():
    """Each section of an axial embedding is a plain one of the features of its pairs."""
    x, at = normal(4, 6, 2, 24), grid(1, 2, 3)
    got = rotary(x, at, sections=(4, 2, 6), axial=True, interleaved=True)
    parts = jnp.split(x, [8, 12], -1)
    want = [rotary(part, p, interleaved=True) for part, p in zip(parts, at.T)]
    np.testing.assert_array_equal(got, jnp.concatenate(want, -1))
    empty = rotary(x, at, sections=(0, 0, 12), axial=True)
    np.testing.assert_array_equal(empty, rotary(x, at[:, 2]))


@pytest.mark.parametrize(
    "scaling, theta", [(nn.LinearScaling(4.0), 100.0), (nn.NTKScaling(4.0), jnp.float32(100.0))]
)
def test_a_scaling_changes_each_section_by_itself(scaling, theta):
    x, at, sections = normal(5, 12, 1, 12), grid(3, 4), (2, 4)
    given = dict(scaling=scaling, sections=(*sections, 0), axial=True)
    got = rotary(x, np.pad(at, ((0, 0), (0, 1))), theta, **given)
    linear = isinstance(scaling, nn.LinearScaling)
    frequencies = [
        100.0 ** (-j / n) / 4 if linear else (100.0 * 4 ** (n / (n - 1))) ** (-j / n)
        for n in sections
        for j in range(n)
    ]
    want = turned_by_axes(x, at, sections, frequencies=frequencies)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("axial", [True])
def test_gradients(axial):
    """By the heads, the coordinates and the base; that by the heads turns back."""
    x, weights = normal(6, 2, 4, 3, 8), normal(7, 2, 4, 3, 8)
    at, theta = np.random.default_rng(8).uniform(-3, 3, (4, 3)), 30.0

    def loss(x, at, theta):
        return jnp.vdot(weights, rotary(x, at, theta, sections=SECTIONS, axial=axial))

    def want(at, theta):
        turned = turned_by_axes(x, at, SECTIONS, axial=axial, theta=theta)
        return np.vdot(np.asarray(weights, float), turned)

    args = x, jnp.asarray(at, jnp.float32), jnp.float32(theta)
    by_x, by_at, by_theta = jax.jit(jax.grad(loss, (0, 1, 2)))(*args)
    back = turned_by_axes(weights, -at, SECTIONS, axial=axial, theta=theta)
    np.testing.assert_allclose(by_x, back, rtol=0, atol=1e-5)
    step = 1e-5
    for n in np.ndindex(at.shape):
        d = np.zeros_like(at)
        d[n] = step
        slope = (want(at + d, theta) - want(at - d, theta)) / (2 * step)
        np.testing.assert_allclose(by_at[n], slope, rtol=1e-4, atol=1e-5)
    slope = (want(at, theta + step) - want(at, theta - step)) / (2 * step)
    np.testing.assert_allclose(by_theta, slope, rtol=1e-4, atol=1e-5)
    whole = jax.grad(loss)(x, grid(2, 2, 1), theta)
    back = turned_by_axes(weights, -grid(2, 2, 1), SECTIONS, axial=axial, theta=theta)
    np.testing.assert_allclose(whole, back, rtol=0, atol=2e-6)


def test_dtypes(x64):
    x, at = normal(9, 12, 2, 8), grid(2, 2, 3) * 1000
    given = dict(sections=SECTIONS, axial=True)
    low = x.astype(jnp.bfloat16)
    got = rotary(low, at, **given)
    assert got.dtype == jnp.bfloat16
    wide = rotary(low.astype(jnp.float32), at, **given)
    np.testing.assert_array_equal(got, wide.astype(jnp.bfloat16))  # rounded once
    want = turned_by_axes(low.astype(jnp.float32), at, **given)
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=2**-8, atol=1e-5)
    high = x.astype(jnp.float64)
    np.testing.assert_allclose(
        rotary(high, at, **given), turned_by_axes(high, at, **given), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("axial", [False, True])
def test_products_depend_on_differences_along_each_axis(axial):
    """On a grid, the products of one query and one key are the same wherever both are moved to."""
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 8))

    def product(a, b):
        x, y = (
            rotary(jnp.repeat(x, len(at), 0), at, sections=(2, 2), axial=axial)[:, 0]
            for x, at in ((q, a), (k, b))
        )
        return np.asarray(jnp.matmul(x, y.T, precision="highest"))

    tokens, products = grid(4, 5), {}
    for (i, j), x in np.ndenumerate(product(tokens, tokens)):
        products.setdefault(tuple(tokens[i] - tokens[j]), []).append(x)
    assert len(products) == 7 * 9
    for several in products.values():
        np.testing.assert_allclose(several, several[0], rtol=0, atol=1e-5)
    firsts = sorted(x[0] for x in products.values())
    assert np.diff(firsts).min() > 1e-5  # and each difference has its own
    far = product(np.array([[100_003, 5]]), np.array([[100_001, -60_000]]))
    near = product(np.array([[2, 60_005]]), np.array([[0, 0]]))
    np.testing.assert_allclose(far, near, rtol=0, atol=1e-5)


X = jnp.ones((5, 1, 8))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "given, shape, kind, message",
    [
        (dict(sections=(2, 1)), (5, 2), ValueError, "add up to the 4 pairs of 8 features that turn, got .2, 1., 3 pairs; dim="),
        (dict(sections=(2, 1), dim=8), (5, 2), ValueError, "4 pairs of 8 features"),
        (dict(sections=SECTIONS), (5,), ValueError, r"\[t, axes\] = \(5, 3\).*\(5, 1, 8\).*sections=\(1, 2, 1\), got shape \(5,\)"),
        (dict(sections=SECTIONS), (5, 2), ValueError, r"got shape \(5, 2\)"),
        (dict(sections=SECTIONS, axial=True), (4, 3), ValueError, r"\(5, 3\).*got shape \(4, 3\)"),
        (dict(), (5, 3), ValueError, r"\[t\] = \(5,\).*sections=None, got shape \(5, 3\)"),
        (dict(axial=True), (5,), ValueError, "pass sections= too"),
        (dict(sections=4), (5, 1), TypeError, "sections must be a tuple of ints, got 4"),
        (dict(sections=(5, -1)), (5, 2), ValueError, "sections must be .*-1"),
        (dict(sections=SECTIONS, axial=1), (5, 3), TypeError, "axial is True or False"),
        (dict(sections=SECTIONS, axial=True, scaling=nn.NTKScaling(2.0)), (5, 3), ValueError, "in each section, got dim=2"),
    ],
)  # fmt: skip
def test_errors(given, shape, kind, message):
    with pytest.raises(kind, match=message):
        rotary(X, np.zeros(shape, int), **given)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "given, kind, message",
    [
        (dict(axial=True), ValueError, "pass sections= too"),
        (dict(sections=(2, 1), dim=8), ValueError, "4 pairs of 8 features .* 3 pairs; dim="),
        (dict(sections=8), TypeError, "sections must be a tuple of ints, got 8"),
        (dict(sections=SECTIONS, axial="yes"), TypeError, "axial is True or False"),
    ],
)
def test_errors_of_the_module(given, kind, message):
    with pytest.raises(kind, match=message):
        nn.Rotary(**given)


def test_leaves():
    module = nn.Rotary(sections=[2, 2], axial=True)
    assert jax.tree.leaves(module) == [] and module.sections == (2, 2) and module.axial
    assert module == nn.Rotary(sections=(2, 2), axial=True) != nn.Rotary(sections=(2, 2))
    assert hash(module) == hash(nn.Rotary(sections=(2, 2), axial=True))
