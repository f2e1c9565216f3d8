"""The steps of a history by eqattn."""

import io
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqattn import (
    AllGather,
    attention,
    Blockwise,
    cascade_attention,
    Dense,
    DenseMask,
    nn,
    ragged_attention,
    Ring,
    top_keys,
    Ulysses,
)
from eqattn.cache import AbstractStored, LatentKVCache, StackedKVCache, StackedPagedKVCache
from fuzz._history import axes_of
from fuzz._plans import mesh_of


STATIC = ("way", "latent", "causal", "layer")


def on_layers(held: Any, latent: bool, fn: Any) -> tuple[Any, list[Any]]:
    """Calls `fn(layer, cache) -> (cache, result)` for each layer of a cache."""
    results = []
    stacked = isinstance(held, StackedKVCache | StackedPagedKVCache)
    for i in range(held.length.shape[0] if stacked else 1):
        one = held.layer(jnp.int32(i)) if stacked else held
        one, result = fn(i, LatentKVCache(one) if latent else one)
        one = one.cache if latent else one
        held = one.stack if stacked else one
        results.append(result)
    return held, results


def stepped(held, given, way, latent, causal, layer) -> Any:
    """Appends to each layer of a cache, and attends to one of them."""
    q, keys, values, counts, mask, scores, strategy, more = given
    if way == "vmap":
        return mapped(held, given, latent)

    def one(i, cache):
        if way == "layer" and i == layer:
            return by_layer(cache, q, keys[i], values[i], counts, mask, scores, strategy, more)
        offset, key, query = cache.length, keys[i], q
        if i == layer and (turning := more.get("turned")) is not None:
            _, interleaved, sections = turning.value
            at = offset[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)[None]
            axes = axes_of(at, jnp)[..., : len(sections)]
            query, key = (
                nn.rotary(x, axes, interleaved=interleaved, sections=sections) for x in (q, key)
            )
        cache = cache.append(key, values[i], counts)
        if i != layer:
            return cache, None
        return cache, asked(cache, query, offset, counts, mask, scores, strategy, more, way, causal)

    held, results = on_layers(held, latent, one)
    return held, next(x for x in results if x is not None)


jitted = jax.jit(stepped, static_argnames=STATIC)
donated = jax.jit(stepped, static_argnames=STATIC, donate_argnums=0)


def asked(cache, q, offset, counts, mask, scores, strategy, more, way, causal) -> Any:
    """The output and the logsumexp of one call."""
    key, value = cache.key, cache.value
    b, t = q.shape[:2]
    if way == "packed":
        counts = jnp.full(b, t, jnp.int32) if counts is None else counts
        ends = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
        taken = jnp.arange(t, dtype=jnp.int32)[None] < counts[:, None]
        order = jnp.argsort(~taken.reshape(-1), stable=True)
        packed = q.reshape(b * t, *q.shape[2:])[order]
        out = ragged_attention(
            packed, key, value, ends, cache.length, strategy, starts=more["starts"], mask=mask,
            kv_positions=cache.positions,
            causal=causal, score=scores, return_logsumexp=True, block_q=more["block_q"].shape[0],
        )  # fmt: skip
        back = jnp.argsort(order)
        shape = lambda x: x[back].reshape(b, t, *x.shape[1:])
        return shape(out.attention_outputs), shape(out.logsumexp)
    if way == "cascade":
        out = cascade_attention(
            q, cache, strategy, q_offset=offset, mask=mask, score=scores, return_logsumexp=True
        )
        return out.attention_outputs, out.logsumexp
    at, places = dict(q_offset=offset), cache.positions
    if more.get("by_place") is not None:
        s = key.shape[1]
        if places is None:
            there = jnp.arange(s, dtype=jnp.int32)[None] < cache.length[:, None]
        else:
            there = places >= 0
        shown = DenseMask(there[:, None, None])
        if (given := more.get("positions")) is not None:
            places = given
            row = jnp.arange(t, dtype=jnp.int32)[None] + offset[:, None]
            # Past the capacity, where outputs mean nothing, a position is any.
            row = jnp.minimum(row, s - 1)
            at = dict(q_positions=jnp.take_along_axis(given, row, 1))
    else:
        shown = cache.mask()
    if way in ("dense", "blockwise"):
        key, value = (x.materialise() if isinstance(x, AbstractStored) else x for x in (key, value))
        strategy = (Dense if way == "dense" else Blockwise)(strategy.metadata)
    if way == "spread":
        key, value = (x.materialise() if isinstance(x, AbstractStored) else x for x in (key, value))
        name, n = more["spread"].value
        kind = dict(ring=Ring, ulysses=Ulysses, all_gather=AllGather)[name]
        strategy = kind(strategy.metadata.replace(mesh=mesh_of(n)), axis_name="keys")
    mask = shown if mask is None else mask & shown
    rest = dict(score=scores or None, kv_positions=places, **at)
    if way == "top":
        n = min(3, key.shape[1])
        out = top_keys(q, key, n, strategy, mask=mask, **rest)
        return out.values, out.indices
    if way == "carry":
        half = jnp.arange(key.shape[1]) < key.shape[1] // 2
        plain = eqx.tree_at(
            lambda s: s.metadata, strategy, strategy.metadata.replace(softmax_aux=None)
        )
        parts = (strategy, half), (plain, ~half)
        one, two = (
            attention(q, key, value, x, mask=mask & DenseMask(y), return_carry=True, **rest).carry
            for x, y in parts
        )
        carry = one.merge(two)
        return carry.output().astype(q.dtype), carry.logsumexp()
    out = attention(q, key, value, strategy, mask=mask, return_logsumexp=True, **rest)
    return out.attention_outputs, out.logsumexp


def by_layer(cache, q, k, v, counts, mask, scores, strategy, more) -> Any:
    """The same by a `MultiheadAttention` whose projections pick queries, keys and values out of its
    input, where they lie side by side.
    """
    b, t, heads, dim = q.shape
    kv_heads, value_dim = v.shape[2:]
    inputs = [x.reshape(b, t, -1) for x in (q, k, v)]
    widths = [x.shape[-1] for x in inputs]
    (turning, interleaved, window), metadata = more["layer"].value, strategy.metadata
    layer = nn.MultiheadAttention(
        heads, sum(widths), qk_size=dim, vo_size=value_dim, num_kv_heads=kv_heads, dtype=q.dtype,
        output_size=heads * value_dim, window=window, softmax_scale=metadata.softmax_scale,
        logits_soft_cap=metadata.logits_soft_cap, softmax_aux=metadata.softmax_aux,
        rotary=None if turning == -1 else nn.Rotary(dim=turning, interleaved=interleaved),
        key=jax.random.key(0),
    )  # fmt: skip
    whole, ends = np.eye(sum(widths)), np.cumsum([0, *widths])
    picks = [whole[i:j] for i, j in zip(ends, ends[1:])] + [np.eye(heads * value_dim)]
    where = lambda m: [x.weight for x in (m.query_proj, m.key_proj, m.value_proj, m.output_proj)]
    layer = eqx.tree_at(where, layer, [jnp.asarray(x, q.dtype) for x in picks])
    x = jnp.concatenate(inputs, -1)
    cache, out = layer(x, mask=mask, cache=cache, counts=counts, score=scores or None)
    return cache, (out.reshape(b, t, heads, value_dim), None)


def mapped(held, given, latent) -> Any:
    """The step of `stepped` for caches of one row each."""
    q, keys, values, counts, *rest = given
    counts = jnp.full(len(q), q.shape[1], jnp.int32) if counts is None else counts
    given = q[:, None], keys[0][:, None, None], values[0][:, None, None], counts[:, None]
    held = jax.tree.map(lambda x: x[:, None], held)
    one = lambda held, *own: stepped(held, (*own, *rest), "attention", latent, True, 0)
    return jax.tree.map(lambda x: x[:, 0], jax.vmap(one)(held, *given))


def saved(held: Any) -> Any:
    """A cache that was written to a file and read. NumPy's files have no float8."""
    if any("float8" in str(x.dtype) for x in jax.tree.leaves(held)):
        return held
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, held)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, jax.eval_shape(lambda: held))
