"""The oracle's own dropout: NumPy, from the description of the bits.

The words of a key are those that `jax.random.bits` gives it. All arithmetic is of unsigned numbers
below 2^32, in 64 bits.
"""

from __future__ import annotations

import jax
import numpy as np


FULL = 1 << 32


def _u(x) -> np.ndarray:
    return np.asarray(x).astype(np.int64).astype(np.uint64) % np.uint64(FULL)


def _times(x, factor: int) -> np.ndarray:
    return x * np.uint64(factor) % np.uint64(FULL)


def _transposed(x, n: int) -> np.ndarray:
    return (x << np.uint64(n) | x >> np.uint64(32 - n)) % np.uint64(FULL)


def threefry2x32(key, counter):
    """Salmon et al. (2011), table 2 and section 4.2: 20 rounds, a key injection after each four."""
    full, rotations = np.uint64(FULL), [13, 15, 26, 6, 17, 29, 16, 24]
    words = [_u(key[0]), _u(key[1])]
    words.append(words[0] ^ words[1] ^ np.uint64(0x1BD11BDA))
    x, y = (_u(counter[0]) + words[0]) % full, (_u(counter[1]) + words[1]) % full
    for r in range(20):
        x = (x + y) % full
        y = _transposed(y, rotations[r % 8]) ^ x
        if r % 4 == 3:
            n = r // 4 + 1
            x = (x + words[n % 3]) % full
            y = (y + words[(n + 1) % 3] + np.uint64(n)) % full
    return x, y


def dropped_share(rate: float) -> float:
    """The probability with which a pair is dropped: a multiple of 2^-32 below 1."""
    return min(round(rate * FULL), FULL - 1) / FULL


def kept_of_words(words, b, h, q, k, rate: float) -> np.ndarray:
    """`words`: the two of a key; the others are integers that broadcast against each other."""
    stream = threefry2x32(words, (b, h))
    first, second = threefry2x32(stream, (q, np.zeros_like(q)))
    x = (_times(_u(k), 0x9E3779B9) + first) % np.uint64(FULL)
    x = _times(x ^ x >> np.uint64(16), 0x7FEB352D)
    x = (x + second) % np.uint64(FULL)
    x = _times(x ^ x >> np.uint64(15), 0x846CA68B)
    order = (x + np.uint64(FULL // 2)) % np.uint64(FULL)  # as signed numbers are ordered
    return order.astype(np.float64) >= dropped_share(rate) * FULL


def kept(key, batch: int, heads: int, q, k, rate: float) -> np.ndarray:
    """The pairs `[B, H, T, S]` that are kept of queries at `q` `[T, 1]` and keys at `k` `[1, S]`."""
    words = np.asarray(jax.random.bits(key, (2,), "uint32"))
    b, h = np.arange(batch)[:, None, None, None], np.arange(heads)[:, None, None]
    return kept_of_words(words, b, h, np.asarray(q), np.asarray(k), rate)
