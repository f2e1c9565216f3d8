"""Rows of unequal length in caches of any kind, their attention by kernels, and what they hold in
plain float64.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matrix import bound, oracle

from eqattn import attention, AttentionMetadata, Causal, KeyPadding, Ragged
from eqattn._problem.storage import as_stored
from eqattn.cache import AbstractStored, LatentKV, Pages, Quantized


LENGTHS = np.array([48, 0, 21, 33])


def normal(shapes: list[tuple[int, ...]], dtype: Any = jnp.float32) -> list[jax.Array]:
    """Arrays with a row for each length."""
    random = np.random.RandomState(0)
    draw = lambda shape: random.standard_normal((len(LENGTHS), *shape)).astype(np.float32)
    return [jnp.asarray(draw(shape)).astype(dtype) for shape in shapes]


def arrays(t=1, heads=4, kv_heads=2, dim=16, width=8, keys=48, dtype: Any = jnp.float32):
    return normal([(t, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, width)], dtype)


def cache(t, heads, kv_heads, dim, width, keys=48, dtype: Any = jnp.bfloat16, **kept: Any):
    """A query, keys and values as a cache keeps them, and the numbers of all three."""
    q, *kv = arrays(t, heads, kv_heads, dim, width, keys, dtype)
    (k, all_k), (v, all_v) = (kept_as(x, **kept) for x in kv)
    return (q, k, v), [np.float64(q), all_k, all_v]


def latents(t, heads, width, rest, keys=48, stored: Any = None, page=0, dtype: Any = jnp.bfloat16):
    """A query, keys whose first part are the values, and the numbers."""
    q, *parts = normal([(t, heads, width + rest), (keys, 1, width), (keys, 1, rest)], dtype)
    (first, values), (other, more) = (kept_as(x, stored, page) for x in parts)
    if page:
        key: Any = Pages(LatentKV(first.content, other.content), first.table)
    else:
        key = LatentKV(first, other)
    return (q, key, None), [np.float64(q), np.concatenate([values, more], -1), values]


def kept(x: jax.Array, stored: Any = None, page: int = 0, shares: int = 1) -> Any:
    """`[b, s, k, d]` as a cache keeps it, in fewer bits or in pages of some tokens that lie in some
    order.
    """
    content: Any = x
    if page:
        order = np.random.RandomState(1).permutation(x.shape[0] * x.shape[1] // page)
        content = x.reshape(-1, page, *x.shape[2:])[np.argsort(order)]
    if stored is not None:
        content = Quantized.quantize(content, stored, shares)
    return Pages(content, jnp.asarray(order.reshape(len(x), -1), jnp.int32)) if page else content


def kept_as(x: jax.Array, *how: Any, **more: Any) -> tuple:
    """`[b, s, k, d]` as a cache keeps it, and the numbers that it then holds."""
    found = kept(x, *how, **more)
    return found, held(found)


def held(x: Any) -> np.ndarray:
    """The numbers that a cache holds; those of 8 bits are products of float64."""
    content, table = (x.content, x.table) if isinstance(x, Pages) else (x, None)
    if isinstance(content, Quantized):
        shares, (b, s, heads, _) = content.scales.shape[1], content.values.shape
        scales = np.float64(content.scales).reshape(b, shares, s, heads // shares)
        scales = scales.swapaxes(1, 2).reshape(b, s, heads, 1)
        numbers = np.float64(content.values.astype(jnp.float32)) * scales
    else:
        numbers = np.float64(content)
    if table is None:
        return numbers
    return numbers[np.asarray(table)].reshape(len(table), -1, *numbers.shape[2:])


def seen(t: int, keys: int, starts: Any = 0, window: int | None = None) -> np.ndarray:
    q = (LENGTHS[:, None] - t + np.arange(t))[:, :, None]
    k = np.arange(keys)[None, None]
    shown = (k <= q) & (k < LENGTHS[:, None, None]) & (k >= np.reshape(starts, (-1, 1, 1)))
    return shown if window is None else shown & (q - k <= window)


def call(q, k, v, platform="interpret", mask: Any = None, starts: Any = 0, **fields: Any):
    """The last queries of each row, which see the keys before them."""
    lengths = jnp.asarray(LENGTHS)
    shown = Causal() & KeyPadding(lengths, starts)
    metadata = AttentionMetadata(runtime_dtype=q.dtype, platform=platform, **fields)
    v = k.c_kv if v is None else v
    return attention(
        q,
        as_stored(k),  # Arrays of keys would be copied for many queries.
        as_stored(v),
        Ragged(metadata),
        mask=shown if mask is None else shown & mask,
        q_offset=lengths - q.shape[1],
        return_logsumexp=True,
    )


def judge(args, plain, visible: Any = None, **fields: Any):
    """The output and the logsumexp of interpreted kernels, within the bound of the oracle."""

    @jax.jit
    def run(*args):
        output = call(*args, **fields)
        return dict(out=output.attention_outputs, lse=output.logsumexp)

    found = run(*args)
    check(found, args[0].dtype, plain, visible)
    return found


def check(found: dict[str, Any], dtype: Any, plain: list, visible: Any = None) -> None:
    q, k, v = plain
    visible = seen(q.shape[1], k.shape[1]) if visible is None else visible
    exact = oracle.Problem(q, k, v, scale=q.shape[-1] ** -0.5, mask=visible[:, None])
    want = bound.values(exact, bound.precision_of(dtype))
    worst = {name: bound.excess(np.asarray(x), want[name]) for name, x in found.items()}
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
