"""Caches of 8 bits and of latents, in order and in pages, and their attention by kernels for NVIDIA
GPUs within the error bound of the oracle.
"""

import jax
import jax.numpy as jnp
import numpy as np
from _tpu_rows import arrays, call, kept_as, LENGTHS, paged, seen
from matrix import bound, oracle

from eqattn.cache import AbstractStored, Joined, Pages, Quantized


def quantised(t, heads, kv_heads, dim, width, keys, stored, in_pages, page=32):
    """A query, keys and values of 8 bits, and the numbers that these hold, in float64."""
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in arrays(t, heads, kv_heads, dim, width, keys))
    (k, _), (v, _) = (kept_as(x, stored, in_pages, page=page) for x in (k, v))
    return (q, k, v), [np.float64(q), *(exactly(x) for x in (k, v))]


def exactly(x):
    """What a cache of 8 bits holds, as products of float64."""
    stored, table = (x.content, x.table) if isinstance(x, Pages) else (x, None)
    shape = *stored.values.shape[:-1], 1
    numbers = np.float64(stored.values.astype(jnp.float32))
    numbers = numbers * np.float64(stored.scales).reshape(shape)
    if table is not None:
        numbers = numbers[np.asarray(table)].reshape(
            len(table), -1, *shape[2:-1], numbers.shape[-1]
        )
    return numbers


def latents(t, heads, width, rest, keys, in_pages, stored=None):
    """A query, keys whose first part are the values, these, and the numbers."""
    random = np.random.RandomState(0)
    sizes = (t, heads, width + rest), (keys, 1, width), (keys, 1, rest)
    draw = lambda shape: jnp.asarray(random.standard_normal((len(LENGTHS), *shape)), jnp.bfloat16)
    q, *parts = map(draw, sizes)
    plain = [np.float64(x) for x in parts]
    if in_pages:
        order = random.permutation(len(LENGTHS) * keys // 16)
        (first, table), (other, _) = (paged(x, 16, order) for x in parts)
        k = Pages(Joined(first, other), table)
    else:
        if stored is not None:
            parts = [Quantized.quantize(x, stored) for x in parts]
            plain = [exactly(x) for x in parts]
        k = Joined(*parts)
    return (q, k, None), [np.float64(q), np.concatenate(plain, -1), plain[0]]


def judge(args, plain, backend="cuda", **kw):
    """Output and logsumexp of the interpreted kernel within the bound."""

    @jax.jit
    def run(q, k, v):
        output = call(q, k, k.first if v is None else v, backend=backend, **kw)
        return output.attention_outputs, output.logsumexp

    q, k, v = plain
    dtype = args[0].dtype
    t, keys = q.shape[1], k.shape[1]
    exact = oracle.Problem(q, k, v, scale=q.shape[-1] ** -0.5, mask=seen(t, keys)[:, None])
    want = bound.values(exact, bound.precision_of(dtype))
    got = dict(zip(("out", "lse"), map(np.asarray, run(*args))))
    worst = {name: bound.excess(x, want[name]) for name, x in got.items()}
    assert max(worst.values()) <= 1, worst


class Doubled(AbstractStored):
    """Values of a user's own."""

    array: jax.Array

    @property
    def arrays(self):
        return (self.array,)

    @property
    def shape(self):
        return self.array.shape

    @property
    def dtype(self):
        return self.array.dtype

    def decode(self, *arrays):
        return arrays[0] * jnp.asarray(2, arrays[0].dtype)
