"""Dropout whose mask is a function of (key, batch, head, query position, key position).

The bits are Threefry-2x32 with 20 rounds (Salmon et al., *Parallel random numbers: as easy as
1, 2, 3*, SC 2011), evaluated elementwise at each pair, so the mask is the same for any block size,
strategy, kernel and number of devices, and nothing of size queries x keys is ever stored.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, PRNGKeyArray, UInt32

from .._misc import as_number, as_size, as_sizes


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def _rotate(x: Array, n: int) -> Array:
    return (x << np.uint32(n)) | (x >> np.uint32(32 - n))


def threefry(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Threefry-2x32-20 of uint32 words that broadcast against each other."""
    words = (*key, key[0] ^ key[1] ^ _PARITY)
    x, y = counter[0] + key[0], counter[1] + key[1]
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x = x + y
            y = _rotate(y, r) ^ x
        x = x + words[(i + 1) % 3]
        y = y + words[(i + 2) % 3] + np.uint32(i + 1)
    return x, y


def seed_of(key: PRNGKeyArray) -> UInt32[Array, " 2"]:
    """Two words from any JAX key (typed or raw `uint32`)."""
    if not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(f"The dropout key must be one key from jax.random.key, got {key!r}.")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.dtype != jnp.uint32 or key.ndim != 1:
            raise TypeError(
                f"The dropout key must be one key from jax.random.key, got {key.dtype} of shape "
                f"{key.shape}."
            )
        key = jax.random.wrap_key_data(key)
    if key.ndim != 0:
        raise ValueError(f"The dropout key must be a single key, got keys of shape {key.shape}.")
    return jax.random.bits(key, (2,), jnp.uint32)


def keep_mask(seed: Array, pairs: Sequence[Array], rate: float) -> Array:
    """Whether each pair `(b, h, q, k)` survives; the integers broadcast against each other.

    The seed is that of `seed_of`, and may go on with the indices of the first batch element and
    head, where the pairs are some device's own.
    """
    b, h, q, k = (lax.convert_element_type(x, jnp.uint32) for x in pairs)
    if seed.shape[0] > 2:
        b, h = b + seed[2], h + seed[3]
    stream = threefry((seed[0], seed[1]), (b, h))
    bits, _ = threefry(stream, (q, k))
    return bits >= np.uint32(min(round(rate * 2**32), 2**32 - 1))


def dropout_mask(
    key: PRNGKeyArray, batch_shape: Sequence[int], heads: int, t: int, s: int, rate: float
) -> Bool[Array, "*b h t s"]:
    """The pairs that attention with this key keeps, for positions `0..t-1` and `0..s-1`.

    **Arguments:**

    - `key`: as passed to `attention`.
    - `batch_shape`, `heads`, `t`, `s`: the sizes of `[*b, h, t, s]`.
    - `rate`: the probability that a pair is dropped.
    """
    rate = as_number(rate, "rate")
    batch_shape, heads = as_sizes(batch_shape, "batch_shape"), as_size(heads, "heads")
    t, s = as_size(t, "t"), as_size(s, "s")
    if not 0 <= rate < 1:
        raise ValueError(f"rate must be in [0, 1), got {rate}.")
    full = (*batch_shape, heads, t, s)
    index = [np.arange(math.prod(batch_shape)).reshape(*batch_shape, 1, 1, 1)]
    for n, axis in ((heads, -3), (t, -2), (s, -1)):
        shape = [1] * len(full)
        shape[axis] = n
        index.append(np.arange(n).reshape(shape))
    return jnp.broadcast_to(keep_mask(seed_of(key), [jnp.asarray(x) for x in index], rate), full)
