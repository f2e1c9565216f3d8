"""Plain attention: in JAX, for checking transforms against JAX's own differentiation, and in NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np


def reference(q, k, v, scale, cap, slopes, sinks, bias):
    """Causal attention of `[b, t, h, d]` with every feature, as one dense expression."""
    b, t, h, _ = q.shape
    s, kv_heads = k.shape[1:3]
    k, v = (jnp.repeat(x, h // kv_heads, 2) for x in (k, v))
    logits = jnp.einsum("bthd,bshd->bhts", q, k) * scale
    logits = cap * jnp.tanh(logits / cap) + bias
    distance = (jnp.arange(t)[:, None] - jnp.arange(s)[None]).astype(logits.dtype)
    logits = logits - slopes[None, :, None, None] * abs(distance)[None, None]
    logits = jnp.where((distance >= 0)[None, None], logits, -jnp.inf)
    sink = jnp.broadcast_to(sinks[None, :, None, None], (b, h, t, 1))
    logits = jnp.concatenate([logits, sink], -1)
    p = jax.nn.softmax(logits, -1)[..., :-1]
    lse = jnp.swapaxes(jax.nn.logsumexp(logits, -1), 1, 2)
    return jnp.einsum("bhts,bshd->bthd", p, v), lse


def exact(q, k, v, transform=None, visible=True, sinks=None, keep=1.0):
    """Float64 NumPy, of `[*b, t, h, d]`: output, logsumexp `[*b, t, h]` and weights.

    `transform` changes the products of queries and keys `[*b, h, t, s]`; by default, it divides
    them by the root of d. `sinks` are `[h]` or `[h, n]`. The weights are multiplied by `keep`.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[-2] // k.shape[-2], -2) for x in (k, v))
    z = np.einsum("...thd,...shd->...hts", q, k)
    z = z / math.sqrt(q.shape[-1]) if transform is None else transform(z)
    z = np.where(visible, z, -np.inf)
    if sinks is not None:
        sinks = np.asarray(sinks, np.float64).reshape(z.shape[-3], 1, -1)
        sinks = np.broadcast_to(sinks, (*z.shape[:-1], sinks.shape[-1]))
        z = np.concatenate([z, sinks], -1)
    top = z.max(-1, keepdims=True)
    top = np.where(np.isinf(top), 0, top)
    p = np.exp(z - top)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    p = (p / np.where(total == 0, 1, total))[..., : k.shape[-3]] * np.asarray(keep, np.float64)
    return np.einsum("...hts,...shv->...thv", p, v), np.swapaxes(lse, -1, -2), p
