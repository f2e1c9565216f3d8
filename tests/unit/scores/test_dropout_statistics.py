"""The bits of dropout are as good as random ones, by tests that bad generators fail.

Each statistic is divided by a threshold that a random generator exceeds less than once in 10^5
runs, all of its entries taken together.
"""

import functools as ft
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn.scores._dropout import is_kept, keep_mask, row_words, seed_of, threefry


N = 512
RATES = [0.1, 0.5, 0.9]
STREAMS = {
    "head": ({}, dict(h=1)),
    "far head": ({}, dict(h=2**16)),
    "batch": ({}, dict(b=1)),
    "far batch": ({}, dict(b=2**20)),
    "batch and head": (dict(b=1, h=2), dict(b=2, h=1)),
    "seed": ({}, dict(word=(0, 1))),
    "other seed": ({}, dict(word=(1, 0))),
}


@ft.cache
def program(generator):
    """The kept pairs of `N x N`, at all rates."""
    i = jnp.arange(N, dtype=jnp.int32)
    draw = lambda words, b, h, rate: generator(words, (b, h, i[:, None], i[None]), rate)
    return jax.jit(lambda *stream: [draw(*stream, rate) for rate in RATES])


@ft.cache
def drawn(generator, b=0, h=0, word=(0, 0)):
    kept = program(generator)(jnp.asarray(word, jnp.uint32), jnp.int32(b), jnp.int32(h))
    return [np.asarray(x) for x in kept]


@ft.cache
def standardised(generator, rate, **stream):
    """Dropped pairs as numbers of mean 0 and variance 1, and their Fourier transform."""
    z = (~drawn(generator, **stream)[RATES.index(rate)] - rate) / math.sqrt(rate * (1 - rate))
    return z, np.fft.rfft2(z)


def chi2_z(sums):
    """Of sums of variance 1: Wilson and Hilferty's normal approximation of their chi squared."""
    n = len(sums)
    return (((sums**2).sum() / n) ** (1 / 3) - (1 - 2 / (9 * n))) / math.sqrt(2 / (9 * n))


def diagonals(z):
    """The rows are moved, so that diagonals become columns; the block is taken as a torus."""
    i = np.arange(N)
    return z[i[:, None], (i[:, None] + i[None]) % N]


def correlations(z):
    """Of all pairs of rows: the largest, and whether their squares are 1 on average."""
    g = (z @ z.T / math.sqrt(N))[np.triu_indices(N, 1)]
    return abs(g).max() / 8, ((g**2).mean() - 1) * math.sqrt(len(g) / 2) / 6


def lags(x, y):
    """Of two Fourier transforms, the correlations at all `N^2` lags, each about a normal."""
    return np.fft.irfft2(x * y.conj(), (N, N)) / N


def statistics(generator, rate):
    """Statistics by name, each divided by its threshold."""
    z, wave = standardised(generator, rate)
    found = {"mean": z.sum() / N / 5}
    for name, x in (
        ("rows", z),
        ("columns", z.T),
        ("diagonals", diagonals(z).T),
        ("other diagonals", diagonals(z[::-1]).T),
    ):
        found[f"sums of {name}"] = chi2_z(x.sum(1) / math.sqrt(N)) / 5
    eighths = z.reshape(N // 8, 8, N // 8, 8).sum((1, 3)).ravel() / 8
    found["sums of blocks"] = chi2_z(eighths) / 5
    y = (z - z.mean()) / z.std()
    for name, x in (("rows", y), ("columns", y.T), ("diagonals", diagonals(y).T)):
        largest, variance = correlations(x)
        found |= {f"pairs of {name}": largest, f"variance of pairs of {name}": variance}
    found["transposed"] = (z * z.T)[np.triu_indices(N, 1)].sum() / (N / math.sqrt(2)) / 5
    # Four corners of rectangles, and three pairs of a row, which no correlation of two sees.
    for q, k in ((1, 1), (1, 7), (64, 64)):
        corner = z * np.roll(z, q, 0) * np.roll(z, k, 1) * np.roll(z, (q, k), (0, 1))
        found[f"rectangles {q}x{k}"] = corner.sum() / N / 6
    found["threes"] = (z * np.roll(z, 1, 1) * np.roll(z, 3, 1)).sum() / N / 6
    power = np.abs(wave) ** 2 / N**2  # exponential, of white noise
    found["spectrum"] = power.ravel()[1:].max() / (math.log(N**2 / 2) + 14)
    own = lags(wave, wave)
    own[0, 0] = 0
    found["lags"] = abs(own).max() / 7.5
    for name, (one, other) in STREAMS.items():
        x, y = (standardised(generator, rate, **stream)[1] for stream in (one, other))
        found[f"across: {name}"] = abs(lags(x, y)).max() / 7.5
    return found


@pytest.mark.parametrize("rate", RATES)
def test_statistics(rate):
    bad = {n: x for n, x in statistics(keep_mask, rate).items() if not abs(x) < 1}
    assert not bad, bad


# Generators that are bad, each in its own way, and what notices it.


def of_words(fn):
    @ft.wraps(fn)
    def generator(words, pairs, rate):
        b, h, q, k = (jnp.asarray(x, jnp.uint32) for x in pairs)
        bits = fn(words, b, h, q, k)
        shape = jnp.broadcast_shapes(*(x.shape for x in pairs))
        return jnp.broadcast_to(bits, shape) >= np.uint32(round(rate * 2**32))

    return generator


def rows_words(words, b, h, q):
    """Those of the library, unsigned."""
    return [x.astype(jnp.uint32) for x in row_words(words, b, h, q)]


@of_words
def lattice(words, b, h, q, k):
    """Multiples of two numbers that add up: a plane wave."""
    return q * np.uint32(0x9E3779B9) + k * np.uint32(0x85EBCA6B) + words[0] + b + h


@of_words
def one_product(words, b, h, q, k):
    """The hash of the library without its second product: rows that are nearly alike."""
    first, second = rows_words(words, b, h, q)
    x = k * np.uint32(0x9E3779B9) + first
    return (x ^ x >> 16) * np.uint32(0x7FEB352D) ^ second


@of_words
def headless(words, b, h, q, k):
    return threefry((words[0], words[1]), (q, k + 0 * (b + h)))[0]


@of_words
def symmetric(words, b, h, q, k):
    return threefry(threefry((words[0], words[1]), (b, h)), (q ^ k, q & k))[0]


@of_words
def sharing(words, b, h, q, k):
    """Every second pair of a row decides about two."""
    return threefry(threefry((words[0], words[1]), (b, h)), (q, k // 2))[0]


@of_words
def parity(words, b, h, q, k):
    """Every fourth corner of a rectangle follows from the other three."""
    return rows_words(words, b, h, q)[0] ^ rows_words(words, b, h + 1, k)[0]


def off(words, pairs, rate):
    """A threshold that is 2% off."""
    return keep_mask(words, pairs, rate * 0.98)


BAD = {
    lattice: {"lags", "spectrum", "pairs of rows", "pairs of columns", "across: head"},
    one_product: {"pairs of rows", "variance of pairs of rows"},
    headless: {"across: head", "across: batch", "across: batch and head"},
    symmetric: {"transposed"},
    sharing: {"pairs of columns", "lags", "sums of rows"},
    parity: {"rectangles 1x1", "rectangles 1x7", "rectangles 64x64"},
    off: {"mean"},
}


@pytest.mark.parametrize("generator", BAD, ids=lambda g: g.__name__)
def test_bad_generators_fail(generator):
    failed = {n for n, x in statistics(generator, 0.5).items() if not abs(x) < 1}
    assert BAD[generator] <= failed, BAD[generator] - failed


def test_a_long_row_has_as_many_of_each_length():
    """Of 2^22 keys of a row, how often each number is dropped of 16 in turn: binomial."""
    rate, words = 0.1, (jnp.int32(123456789), jnp.int32(-987654321))
    kept = jax.jit(lambda k: is_kept(words, k, rate))(jnp.arange(2**22, dtype=jnp.int32))
    counts = np.bincount((~np.asarray(kept)).reshape(-1, 16).sum(1), minlength=17)
    n, total = np.arange(17), 2**18
    expected = np.array([math.comb(16, i) for i in n]) * rate**n * (1 - rate) ** (16 - n) * total
    many = expected > 50
    chi2 = ((counts - expected) ** 2 / expected)[many].sum()
    assert chi2 < many.sum() + 5 * math.sqrt(2 * many.sum()), (counts, expected)


def test_rows_have_words_of_their_own():
    """And of no other head or batch element: 2^18 of them. Each bit is 1 in half of them."""
    index = (np.arange(2**16, dtype=np.int32), np.arange(2, dtype=np.int32)[:, None])
    seed = seed_of(jax.random.key(0))
    words = jax.jit(row_words)(seed, index[1][..., None], index[1][None], index[0][None, None])
    rows = np.stack(words, -1).reshape(-1, 2).view(np.uint32).astype(np.int64)
    assert len(np.unique(rows[:, 0] << 32 | rows[:, 1])) == len(rows) == 2**18
    ones = (rows[..., None] >> np.arange(32) & 1).sum(0)
    assert (abs(ones - 2**17) / 2**8 < 5).all()
