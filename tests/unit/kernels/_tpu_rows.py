"""Rows of unequal length in caches of any kind, and their attention in plain float64."""

import jax.numpy as jnp
import numpy as np
from matrix.oracle import exact

from eqattn import attention, AttentionMetadata, Causal, KeyPadding, Ragged
from eqattn._problem.storage import as_stored, Pages, Quantized


LENGTHS = np.array([48, 0, 21, 33])


def arrays(t=1, heads=4, kv_heads=2, dim=16, width=8, keys=48, dtype=np.float32):
    random = np.random.RandomState(0)
    normal = lambda *shape: random.standard_normal((len(LENGTHS), *shape)).astype(dtype)
    return normal(t, heads, dim), normal(keys, kv_heads, dim), normal(keys, kv_heads, width)


def dense(q, k, v, seen):
    """Output and logsumexp of `[b, t, h, d]`, for visible pairs `[b, t, s]`."""
    return exact(q, k, v, visible=seen[:, None])[:2]


def seen(t, keys, starts=0, window=None):
    q = (LENGTHS[:, None] - t + np.arange(t))[:, :, None]
    k = np.arange(keys)[None, None]
    shown = (k <= q) & (k < LENGTHS[:, None, None]) & (k >= np.reshape(starts, (-1, 1, 1)))
    return shown if window is None else shown & (q - k <= window)


def call(q, k, v, platform="interpret", mask=None, starts=0, **kw):
    lengths = jnp.asarray(LENGTHS)
    shown = Causal() & KeyPadding(lengths, starts)
    metadata = AttentionMetadata(runtime_dtype=q.dtype, platform=platform, **kw)
    # Arrays of keys would be copied for many queries.
    q, k, v = (jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in (q, k, v))
    k, v = as_stored(k), as_stored(v)
    return attention(
        q, k, v, Ragged(metadata), mask=shown if mask is None else shown & mask,
        q_offset=lengths - q.shape[1], return_logsumexp=True,
    )  # fmt: skip


def paged(x, size, order):
    """`[b, s, k, d]` in pages that lie in some order."""
    pages = x.reshape(-1, size, *x.shape[2:])
    content = jnp.asarray(pages[np.argsort(order)])
    return content, jnp.asarray(order.reshape(len(x), -1), jnp.int32)


def kept_as(x, stored, in_pages, shares=1, page=16):
    """`[b, s, k, d]` as a cache keeps it, in fewer bits or in pages of some tokens that lie in some
    order, and the numbers that it then holds.
    """
    if stored is None and not in_pages:
        return x, x
    kept, order = (
        jnp.asarray(x),
        np.random.RandomState(1).permutation(x.shape[0] * x.shape[1] // page),
    )
    if in_pages:
        kept, table = paged(x, page, order)
    if stored is not None:
        kept = Quantized.quantize(kept, stored, shares)
    kept = Pages(kept, table) if in_pages else kept
    return kept, kept.materialise()


def close(output, want, tolerance=1e-5):
    got = output.attention_outputs, output.logsumexp
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
