"""Rotary positions against the papers' formulas in float64, at any position."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal

import eqattn.nn as nn


EXTREME = [0, 1, -1, 7, 4095, 131_071, 10**6, -(10**6), 2**30 + 1, 2**31 - 1, -(2**31)]


def plain(dim, theta):
    """Su et al., arXiv:2104.09864: pair `i` turns by `theta^(-2i/dim)` per position."""
    return np.array([theta ** (-2 * i / dim) for i in range(dim // 2)], np.float64)


def reference(x, positions, frequencies, amplitude=1.0, interleaved=False):
    """Each pair as a complex number, times `e^(i p f)`, in float64."""
    x, p = np.asarray(x, np.float64), np.asarray(positions, np.float64)
    dim = 2 * len(frequencies)
    out = x.copy()
    for i, f in enumerate(frequencies):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
        angle = np.mod(p * f, 2 * np.pi)[..., None]  # [.., t, 1]: one axis for heads
        z = (x[..., a] + 1j * x[..., b]) * np.exp(1j * angle) * amplitude
        out[..., a], out[..., b] = z.real, z.imag
    return out


def error(got, want):
    return np.abs(np.asarray(got, np.float64) - want).max()


@pytest.mark.parametrize("dim, interleaved", [(None, False), (8, True), (2, False), (0, True)])
def test_formula(dim, interleaved):
    x, positions = normal(0, 3, 5, 2, 12), jnp.array([3, 0, -2, 100, 17])
    got = nn.rotary(x, positions, 1e4, dim=dim, interleaved=interleaved)
    turned = 12 if dim is None else dim
    want = reference(x, positions, plain(max(turned, 1), 1e4)[: turned // 2], 1.0, interleaved)
    assert error(got, want) < 2e-6
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got[..., turned:], x[..., turned:])  # partial: bit for bit


def test_interleaved_is_half_of_permuted_features():
    x, positions = normal(1, 4, 1, 8), jnp.arange(4)
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    half = nn.rotary(x[..., order], positions)
    np.testing.assert_allclose(
        nn.rotary(x, positions, interleaved=True)[..., order], half, atol=1e-6
    )


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
def test_any_position(theta):
    """Within a few ulps of float32 at every int32 position. `cos(p * f)` in float32, the usual way,
    is off by 0.04 at a million."""
    x = normal(2, len(EXTREME), 2, 64)
    got = nn.rotary(x, jnp.array(EXTREME, jnp.int32), theta)
    want = reference(x, EXTREME, plain(64, theta))
    # 2e-7 from the phase, half an ulp each from cos, sin, products and sum of values up to 4.
    assert error(got, want) < 4 * (2e-7 + 4 * 6e-8)
    usual = nn.rotary(x, jnp.array(EXTREME, jnp.float32), theta)
    assert error(usual[EXTREME.index(10**6)], want[EXTREME.index(10**6)]) > 1e-3


def test_theta_is_not_forgotten():
    """Regression: `eqx.nn.RotaryPositionalEmbedding` of Equinox 0.13.8 caches its frequencies
    without `theta`, so the second of two in one process gets those of the first."""
    x, positions = normal(3, 9, 2, 16), jnp.arange(9)
    outs = {}
    for theta in (1e4, 5e5, 1e4):
        outs[theta] = nn.rotary(x, positions, theta)
        assert error(outs[theta], reference(x, positions, plain(16, theta))) < 2e-6
        assert error(nn.Rotary(theta)(x, positions), np.asarray(outs[theta])) == 0
    assert error(outs[1e4], np.asarray(outs[5e5])) > 0.1


def test_equals_equinox_where_that_is_right():
    x = normal(4, 11, 3, 8)
    theirs = jax.vmap(eqx.nn.RotaryPositionalEmbedding(8), 1, 1)(x)
    np.testing.assert_allclose(nn.rotary(x, jnp.arange(11)), theirs, atol=2e-6)


def test_only_distances_matter():
    query, key_ = normal(5, 1, 1, 32), normal(6, 1, 1, 32)
    products = [
        jnp.vdot(nn.rotary(query, jnp.array([p + 5])), nn.rotary(key_, jnp.array([p])))
        for p in (0, 12_345, 10**8, -(10**9))
    ]
    # Each of 32 products of values up to 3 with a relative error of about 1e-6.
    np.testing.assert_allclose(products, products[0], atol=32 * 9 * 1e-6)


def test_positions_per_batch_element_and_offset():
    x = normal(7, 2, 3, 4, 2, 8)
    positions = jnp.asarray(np.random.default_rng(8).integers(-50, 50, (2, 3, 4)))
    got = nn.rotary(x, positions)
    one_by_one = jnp.stack(
        [jnp.stack([nn.rotary(x[i, j], positions[i, j]) for j in range(3)]) for i in range(2)]
    )
    np.testing.assert_array_equal(got, one_by_one)
    np.testing.assert_array_equal(got, jax.vmap(jax.vmap(nn.rotary))(x, positions))
    whole = nn.rotary(x, jnp.arange(4))
    np.testing.assert_array_equal(
        nn.rotary(x[..., 2:, :, :], jnp.array([2, 3])), whole[..., 2:, :, :]
    )


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32"])
def test_integer_dtypes_of_positions(dtype):
    x = normal(9, 3, 1, 8)
    got = nn.rotary(x, jnp.array([0, 5, 99], dtype))
    np.testing.assert_array_equal(got, nn.rotary(x, jnp.array([0, 5, 99])))


def test_dtypes_of_features():
    x, positions = normal(10, 6, 2, 8), jnp.arange(6) * 10_000
    low = x.astype(jnp.bfloat16)
    got = nn.rotary(low, positions)
    assert got.dtype == jnp.bfloat16
    wide = nn.rotary(low.astype(jnp.float32), positions)
    np.testing.assert_array_equal(got, wide.astype(jnp.bfloat16))  # rounded once


def test_float64(x64):
    x, positions = normal(11, 4, 2, 16, dtype=jnp.float64), jnp.array([0, 3, 5000, -70_000])
    got = nn.rotary(x, positions, 1e4)
    assert got.dtype == jnp.float64
    assert error(got, reference(x, positions, plain(16, 1e4))) < 1e-10
    narrow = nn.rotary(x.astype(jnp.float32), positions.astype(jnp.int64), 1e4)
    assert narrow.dtype == jnp.float32
    assert error(narrow, np.asarray(got)) < 4e-6


# Scalings --------------------------------------------------------------------------------------


def yarn(dim, theta, factor, length, fast=32, slow=1, truncate=True):
    """The authors' reference code of arXiv:2309.00071 (github.com/jquesnelle/yarn,
    LlamaYaRNScaledRotaryEmbedding), as in Hugging Face's `_compute_yarn_parameters`."""

    def correction(rotations):
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction(fast), correction(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    out = []
    for i, f in enumerate(plain(dim, theta)):
        ramp = min(max((i - low) / (high - low), 0), 1)
        extrapolated = 1 - ramp
        out.append(f / factor * (1 - extrapolated) + f * extrapolated)
    return np.array(out)


def llama3(dim, theta, factor, low, high, length):
    """Meta's `apply_scaling` of Llama 3.1 (llama-models, models/llama3/reference_impl/model.py)."""
    out = []
    for f in plain(dim, theta):
        wavelength = 2 * math.pi / f
        if wavelength < length / high:
            out.append(f)
        elif wavelength > length / low:
            out.append(f / factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            out.append((1 - smooth) * f / factor + smooth * f)
    return np.array(out)


def ntk(dim, theta, factor):
    """The NTK-aware base change, eq. 16 of arXiv:2309.00071."""
    return plain(dim, theta * factor ** (dim / (dim - 2)))


SCALINGS = {
    "linear": (nn.LinearScaling(4.0), lambda d, t: plain(d, t) / 4, 1.0),
    "NTK": (nn.NTKScaling(4.0), lambda d, t: ntk(d, t, 4), 1.0),
    # Hugging Face's "dynamic" type at 10,000 tokens, of which 4096 were trained on.
    "dynamic NTK": (
        nn.NTKScaling(2 * 10_000 / 4096 - 1),
        lambda d, t: plain(d, t * ((2 * 10_000 / 4096) - (2 - 1)) ** (d / (d - 2))),
        1.0,
    ),
    "YaRN": (nn.YaRNScaling(16.0, 4096), lambda d, t: yarn(d, t, 16, 4096), 0.1 * math.log(16) + 1),
    # As in the configuration of gpt-oss.
    "YaRN not truncated": (
        nn.YaRNScaling(32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False),
        lambda d, t: yarn(d, t, 32, 4096, truncate=False),
        0.1 * math.log(32) + 1,
    ),
    "YaRN narrow": (
        nn.YaRNScaling(8.0, 64, beta_fast=4.0, beta_slow=4.0, attention_factor=0.75),
        lambda d, t: yarn(d, t, 8, 64, 4, 4),
        0.75,
    ),
    # Llama 3.1 and 3.2 1B.
    "Llama 3.1": (nn.Llama3Scaling(), lambda d, t: llama3(d, t, 8, 1, 4, 8192), 1.0),
    "Llama 3.2": (nn.Llama3Scaling(32.0), lambda d, t: llama3(d, t, 32, 1, 4, 8192), 1.0),
}  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int64])
def test_numbers_of_numpy_are_those_of_python(kind):
    """Else frequencies would have as few bits as the number, and turns of far tokens none."""
    x, positions = jnp.ones((1, 2, 1, 16)), np.array([[3, 10**6]])
    for scaling in (nn.LinearScaling, nn.NTKScaling, lambda f: nn.YaRNScaling(f, kind(64))):
        of = lambda f, dim, scaling=scaling: nn.rotary(x, positions, scaling=scaling(f), dim=dim)
        np.testing.assert_array_equal(of(kind(4), np.int64(16)), of(4.0, 16))
        assert scaling(kind(4)) == scaling(4)


@pytest.mark.parametrize("name, theta", [(x, (1e4, 5e5)[i % 2]) for i, x in enumerate(SCALINGS)])
def test_scaling(name, theta):
    scaling, formula, amplitude = SCALINGS[name]
    frequencies = formula(128, theta)
    np.testing.assert_allclose(scaling.frequencies(128, theta), frequencies, rtol=1e-12)
    assert not np.allclose(frequencies, plain(128, theta), rtol=1e-3)
    assert scaling.amplitude() == pytest.approx(amplitude, rel=1e-15)
    x, positions = normal(12, 5, 2, 128), jnp.array([0, 1, 5000, 131_071, -9])
    for layout in (False, True):
        got = nn.rotary(x, positions, theta, scaling=scaling, interleaved=layout)
        assert error(got, reference(x, positions, frequencies, amplitude, layout)) < 5e-6
        module = nn.Rotary(theta, scaling=scaling, interleaved=layout)
        np.testing.assert_array_equal(module(x, positions), got)


def test_frequencies_of_llama_by_hand():
    """The ends of Llama 3.1's spectrum: fast pairs are kept, slow ones divided by 8."""
    new, old = nn.Llama3Scaling().frequencies(128, 5e5), plain(128, 5e5)
    assert new[0] == old[0] == 1
    assert new[-1] == old[-1] / 8
    between = (new != old) & (new != old / 8)
    assert 0 < between.sum() < 20


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_yarn_does_not_shrink(factor):
    assert nn.YaRNScaling(factor, 64).amplitude() == 1


@pytest.mark.parametrize("name, dim", [("NTK", 8), ("YaRN", None), ("Llama 3.1", None)])
def test_traced_theta_and_positions(name, dim):
    scaling = SCALINGS[name][0]
    x, positions = normal(13, 5, 2, 16), jnp.arange(5)
    want = nn.rotary(x, positions, 5e5, scaling=scaling, dim=dim)

    @jax.jit
    def turn(x, positions, theta):
        return nn.rotary(x, positions, theta, scaling=scaling, dim=dim)

    np.testing.assert_allclose(turn(x, positions, jnp.array(5e5)), want, atol=2e-5)
    floats = positions.astype(jnp.float32)
    np.testing.assert_allclose(turn(x, floats, jnp.array(5e5)), want, atol=2e-5)
    traced = jax.jit(lambda p: nn.rotary(x, p, 5e5, scaling=scaling, dim=dim))(positions)
    np.testing.assert_allclose(traced, want, atol=1e-6)


@pytest.mark.parametrize(
    "dtype, scaling", [(jnp.float16, None), (jnp.bfloat16, "NTK"), (jnp.bfloat16, "YaRN")]
)
def test_a_narrow_theta_only_rounds_itself(dtype, scaling):
    """Frequencies are computed in float32, so that it turns as the same number in float32 does."""
    given = dict(scaling=None if scaling is None else SCALINGS[scaling][0])
    x, positions = normal(17, 2, 1, 16), jnp.array([10, 1000])
    got = nn.rotary(x, positions, jnp.array(512, dtype), **given)
    np.testing.assert_array_equal(got, nn.rotary(x, positions, jnp.array(512.0), **given))
    assert error(got, nn.rotary(x, positions, 512.0, **given)) < 2e-3
    slope = jax.grad(lambda theta: nn.rotary(x, positions, theta, **given).sum())
    assert slope(jnp.array(512, dtype)).dtype == dtype


def test_frequencies_of_a_narrower_theta_are_those_of_float64_features(x64):
    x, positions = normal(18, 2, 1, 16).astype(jnp.float64), jnp.array([10, 10**6])
    got = nn.rotary(x, positions, jnp.array(1e4, jnp.float32))
    assert error(got, reference(x, positions, plain(16, 1e4))) < 1e-8


def test_theta_varies_along_a_scan():
    x, positions, thetas = normal(14, 6, 1, 8), jnp.arange(6), jnp.array([1e4, 1e6])
    layers = jax.vmap(nn.Rotary)(thetas)
    _, outs = jax.lax.scan(lambda c, layer: (c, layer(x, positions)), 0, layers)
    for out, theta in zip(outs, (1e4, 1e6)):
        assert error(out, reference(x, positions, plain(8, theta))) < 5e-6


def test_gradients():
    x, positions = normal(15, 4, 2, 8), jnp.array([0, 3, -8, 1000])
    weights = normal(16, *x.shape)
    # The transpose of a rotation is the rotation back.
    gradient = jax.grad(lambda x: jnp.vdot(weights, nn.rotary(x, positions)))(x)
    np.testing.assert_allclose(gradient, nn.rotary(weights, -positions), atol=1e-5)

    def loss(theta, positions):
        return jnp.vdot(weights, nn.rotary(x, positions, theta))

    args = jnp.array(50.0), jnp.array([0.5, 1.0, 2.0, -3.0])
    slopes = jax.grad(loss, (0, 1))(*args)
    step = 1e-2
    for i, slope in enumerate(slopes):
        direction = jnp.ones_like(args[i])
        ahead, behind = (
            loss(*[a + sign * step * direction if j == i else a for j, a in enumerate(args)])
            for sign in (1, -1)
        )
        np.testing.assert_allclose(
            (slope * direction).sum(), (ahead - behind) / (2 * step), rtol=2e-2, atol=2e-3
        )


def test_leaves():
    assert jax.tree.leaves(nn.Rotary(5e5, scaling=nn.YaRNScaling(4.0, 64), dim=8)) == []
    assert len(jax.tree.leaves(nn.Rotary(jnp.array(1e4)))) == 1
    assert nn.Rotary(10_000).theta == 10_000.0
    assert nn.Rotary(500_000) == nn.Rotary(5e5) != nn.Rotary(1e4)
    assert jax.tree.structure(nn.Rotary(500_000)) == jax.tree.structure(nn.Rotary(5e5))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda x, p: nn.rotary(x[0], p), ValueError, r"\[\*batch, tokens, heads, dim\].*\(2, 6\)"),
        (lambda x, p: nn.rotary(x[..., :5], p), ValueError, "even number up to the head's 5, got 5"),
        (lambda x, p: nn.rotary(x, p, dim=8), ValueError, "up to the head's 6, got 8"),
        (lambda x, p: nn.rotary(x, p, dim=-2), ValueError, "got -2"),
        (lambda x, p: nn.rotary(x, p, dim=3), ValueError, "got 3"),
        (lambda x, p: nn.rotary(x, p[:3]), ValueError, r"\(4,\).*got shape \(3,\)"),
        (lambda x, p: nn.rotary(x, p[None]), ValueError, r"got shape \(1, 4\)"),
        (lambda x, p: nn.rotary(x, p == 0), TypeError, "integers or floats, got bool"),
        (lambda x, p: nn.rotary(x, p, 1.0), ValueError, "above 1, got 1.0"),
        (lambda x, p: nn.rotary(x, p, math.inf), ValueError, "above 1, got inf"),
        (lambda x, p: nn.rotary(x, p, math.nan), ValueError, "above 1, got nan"),
        (lambda x, p: nn.rotary(x, p, True), TypeError, "theta must be a number"),
        (lambda x, p: nn.rotary(x, p, jnp.ones(2)), TypeError, "theta must be a number"),
        (lambda x, p: nn.rotary(x, p, "1e4"), TypeError, "theta must be a number"),
        (lambda x, p: nn.Rotary(0), ValueError, "above 1, got 0"),
        (lambda x, p: nn.Rotary(scaling="yarn"), TypeError, "YaRNScaling"),
        (lambda x, p: nn.rotary(x, p, scaling=nn.NTKScaling(2.0), dim=2), ValueError, "more than one pair"),
        (lambda x, p: nn.LinearScaling(0.0), ValueError, "factor must be finite and above 0, got 0.0"),
        (lambda x, p: nn.LinearScaling("2"), TypeError, "factor is a Python number"),
        (lambda x, p: nn.NTKScaling(math.nan), ValueError, "factor must be finite"),
        (lambda x, p: nn.YaRNScaling(2.0, 0), ValueError, "original_length must be"),
        (lambda x, p: nn.YaRNScaling(2.0, 9, 1.0, 2.0), ValueError, "beta_fast must be at least"),
        (lambda x, p: nn.YaRNScaling(2.0, 9, attention_factor=-1.0), ValueError, "attention_factor"),
        (lambda x, p: nn.Llama3Scaling(8.0, 4.0, 4.0), ValueError, "high_freq_factor must be more"),
    ],
)  # fmt: skip
def test_errors(call, kind, message):
    with pytest.raises(kind, match=message):
        call(normal(17, 4, 2, 6), jnp.arange(4))


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("dim", [4, 8, 32])
@pytest.mark.parametrize(
    "length, fast, slow",
    [(4096, 32.0, 1.0), (16, 32.0, 1.0), (10**7, 1e5, 1e-6), (10**6, 9e4, 8e4), (10**6, 9e4, 9e4)],
)
def test_bounds_of_yarn(dim, length, fast, slow, truncate):
    """The mix begins at the first pair at the earliest, and ends at the last feature at the
    latest, as far as pairs are that turn so often.
    """
    scaling = nn.YaRNScaling(8.0, length, beta_fast=fast, beta_slow=slow, truncate=truncate)
    want = yarn(dim, 1e4, 8, length, fast, slow, truncate)
    np.testing.assert_allclose(scaling.frequencies(dim, 1e4), want, rtol=1e-12)
