"""Dropout whose mask is a function of (key, batch, head, query position, key position).

So the mask is the same for any block size, strategy, kernel and number of devices. Nothing of size
queries x keys is ever stored. A backward pass visits each pair again and draws its bits again, so
they must be cheap. They come in two steps:

1. *Each query of each head draws two words*, once a call. They come from Threefry-2x32 with 20
    rounds (Salmon et al., *Parallel random numbers: as easy as 1, 2, 3*, SC 2011).
2. *The bits of a pair are a hash of the key's position under these words*. It has eight operations
    of 32 bits, and two of them are products. The shifts and factors are those of `lowbias32`
    (Wellons, *Prospecting for hash functions*, 2018). Its input is the position times the golden
    ratio plus the first word. The second word is added between the products.

Threefry at each pair, which is about 110 operations, made a step of a TPU's forward kernel 19 times
as long as without dropout (v6e). Now it is 2.5 times as long, and a pair has all 32 bits of a word,
so that rates are exact to 2^-32. Four draws of 16 bits from one Threefry would cost three times as
much as the hash. A pair would also need its three neighbours, which may lie in other blocks and
pages.

One word per row is not enough. If the first words of two rows differ by few times the golden ratio,
the rows go through the same numbers, shifted by some keys. Among the 2^20 rows of 4096 keys of a
training step, this happens to 2^20 pairs of rows. Their second words are also equal once in 2^12
such steps.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, PRNGKeyArray, UInt32

from .._jax import vary, varying_axes
from .._misc import as_number, as_size, as_sizes


# Both are those of Random123, the authors' library: the rotations of the 2x32 variant, and the
# parity of the key schedule.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)

# 2^32 divided by the golden ratio, and the two factors of `lowbias32`, as int32.
_GOLDEN = np.int32(0x9E3779B9 - 2**32)
_FIRST, _SECOND = np.int32(0x7FEB352D), np.int32(0x846CA68B - 2**32)


def _group(x: Array, y: Array, rotations: Any, first: Array, second: Array) -> tuple[Array, Array]:
    """Four rounds of "add, rotate, exclusive or", and the key words that follow them."""
    for n in rotations:
        x = x + y
        y = ((y << n) | (y >> (np.uint32(32) - n))) ^ x
    return x + first, y + second


def _unrolled(x: Array, y: Array, groups: list) -> tuple[Array, Array]:
    for group in groups:
        x, y = _group(x, y, *group)
    return x, y


def _rolled(x: Array, y: Array, groups: list) -> tuple[Array, Array]:
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *groups)
    return lax.scan(lambda state, group: (_group(*state, *group), None), (x, y), stacked)[0]


def threefry(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Threefry-2x32-20 of uint32 words that broadcast against each other.

    Twenty rounds are five groups of four. After each group, two of three key words are added,
    shifted by one word from group to group, and the group's number.

    On a CPU the groups are a loop, as they are in `jax.random`. XLA:CPU fuses what is not a loop
    into whatever reads it, so each pair of tokens would draw the words of its row again. And LLVM's
    vectoriser takes a time that doubles with every round where rows are of several heads.
    """
    axes = varying_axes(*key, *counter)
    words = [vary(x, axes) for x in (*key, key[0] ^ key[1] ^ _PARITY)]
    x, y = jnp.broadcast_arrays(*[vary(n, axes) + word for n, word in zip(counter, words)])
    groups = [
        (
            jnp.asarray(_ROTATIONS[i % 2], jnp.uint32),
            words[(i + 1) % 3],
            words[(i + 2) % 3] + np.uint32(i + 1),
        )
        for i in range(5)
    ]
    return lax.platform_dependent(x, y, groups, cpu=_rolled, default=_unrolled)


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


def row_words(seed: Array, b: Array, h: Array, q: Array) -> tuple[Array, Array]:
    """The two words of each query, int32.

    A first Threefry of `(b, h)` under the seed gives the key of a second one, of `(q, 0)`.

    **Arguments:**

    - `seed`: the two words of `seed_of`. Where `b` and `h` count from a device's first batch
        element and head, the indices of these two follow as a third and fourth word.
    - `b`, `h`, `q`: integers that broadcast against each other.
    """
    b, h, q = (lax.convert_element_type(x, jnp.uint32) for x in (b, h, q))
    if seed.shape[0] > 2:
        b, h = b + seed[2], h + seed[3]
    stream = threefry((seed[0], seed[1]), (b, h))
    first, second = threefry(stream, (q, jnp.zeros_like(q)))
    return lax.convert_element_type(first, jnp.int32), lax.convert_element_type(second, jnp.int32)


def is_kept(words: tuple[Array, Array], k: Array, rate: float) -> Array:
    """Whether each pair survives dropout.

    The 2^32 words of a row, one for each position, all differ. A pair is dropped where its word is
    among the least `dropped(rate)` of all. So the high bits decide, and these depend on all bits,
    as the hash ends with a product. All is in int32, as TPUs and processors without AVX-512 compare
    signed numbers only.

    **Arguments:**

    - `words`: those of the row, by `row_words`.
    - `k`: the positions of keys, int32, which broadcast against the words.
    - `rate`: the probability that a pair is dropped.
    """
    shifted = lambda x, n: x ^ lax.shift_right_logical(x, jnp.full_like(x, n))
    x = k * _GOLDEN + words[0]
    x = shifted(x, 16) * _FIRST + words[1]
    x = shifted(x, 15) * _SECOND
    return x >= np.int32(dropped(rate) - 2**31)


def dropped(rate: float) -> int:
    """How many of the 2^32 words that a pair may draw drop it. At least one word keeps it."""
    return min(round(rate * 2**32), 2**32 - 1)


def kept_factor(rate: float) -> float:
    """The factor on probabilities that are kept. It is one over the share of words that keep a
    pair, which is `1 - rate` to 32 bits.
    """
    return 2**32 / (2**32 - dropped(rate))


def keep_mask(seed: Array, pairs: Sequence[Array], rate: float) -> Array:
    """Whether each pair survives dropout.

    **Arguments:**

    - `seed`: as for `row_words`.
    - `pairs`: the integers `b`, `h`, `q`, `k`, which broadcast against each other.
    - `rate`: the probability that a pair is dropped.
    """
    b, h, q, k = pairs
    return is_kept(row_words(seed, b, h, q), lax.convert_element_type(k, jnp.int32), rate)


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
