"""Dropout whose mask is a function of (key, batch, head, query position, key position).

The bits are Threefry-2x32 with 20 rounds (Salmon et al., *Parallel random numbers: as easy as
1, 2, 3*, SC 2011), evaluated elementwise at each pair. So the mask is the same for any block size,
strategy, kernel and number of devices, and nothing of size queries x keys is ever stored. It needs
only additions, rotations and exclusive ors of 32 bits, which the vector unit of a TPU has. Philox
needs 64-bit products of 32-bit words, which it has not.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, PRNGKeyArray, UInt32

from .._misc import as_number, as_size, as_sizes


# Both are those of Random123, the authors' library: the rotations of the 2x32 variant, and the
# parity of the key schedule.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def _rotate(x: Array, n: int) -> Array:
    """Rotates 32 bits to the left by `n`."""
    return (x << np.uint32(n)) | (x >> np.uint32(32 - n))


def threefry(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Threefry-2x32-20 of uint32 words that broadcast against each other.

    Twenty rounds of "add, rotate, exclusive or" are five groups of four. After each group, two of
    three key words are added, shifted by one word from group to group, and the group's number.
    """
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
    """Two uint32 words from any single JAX key, typed or raw `uint32`.

    **Raises:** `TypeError` for what is no key, `ValueError` for an array of keys.
    """
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
    """Whether each pair survives dropout.

    A first Threefry of `(b, h)` under the seed gives the key of a second one, of `(q, k)`. Its bits
    are uniform over 0, ..., 2^32 - 1, and a pair is dropped where they are below `rate * 2^32`.

    **Arguments:**

    - `seed`: the two words of `seed_of`. Where `b` and `h` count from a device's first batch
        element and head, the indices of these two follow as a third and fourth word.
    - `pairs`: the integers `b`, `h`, `q`, `k`, which broadcast against each other.
    - `rate`: the probability that a pair is dropped.
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

    - `key`: the dropout key, as it is passed to `attention`.
    - `batch_shape`, `heads`, `t`, `s`: the sizes of `[*b, h, t, s]`.
    - `rate`: the probability that a pair is dropped.

    **Returns:** bool `[*b, h, t, s]`, True where a pair is kept.
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
