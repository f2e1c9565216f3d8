"""Plain JAX attention, for checking transforms against JAX's own differentiation."""

import jax
import jax.numpy as jnp


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
