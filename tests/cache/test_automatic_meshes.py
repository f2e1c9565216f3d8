"""Caches whose rows and heads are shared out by the compiler: each device writes its own part."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqattn import attention, Causal, Ragged
from eqattn.cache import (
    KVCache,
    LatentKVCache,
    QuantizedKVCache,
    RingBufferCache,
    StackedKVCache,
)


B, T, K, D = 4, 3, 2, 8
SIZES = dict(batch=B, capacity=64, kv_heads=K, head_dim=D)
KINDS = {
    "contiguous": lambda: KVCache.empty(**SIZES),
    "bits": lambda: KVCache.empty(**SIZES, dtype=jnp.bfloat16, bits=True),
    "ring buffer": lambda: RingBufferCache.empty(**SIZES),
    "quantized": lambda: QuantizedKVCache.empty(**SIZES, head_shares=2),
    "layer": lambda: StackedKVCache.empty(2, **SIZES).layer(1),
    "latents": lambda: LatentKVCache.empty(B, 64, rank=D, rotary_dim=D),
}
MOVES = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def program_of(fn, name, tokens, *more):
    """The compiled program of `fn(cache, key, value, ...)`, with rows and heads sharded. `more` are
    the numbers of heads of further arrays.
    """
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    cache = jax.eval_shape(KINDS[name])
    heads, stacked = 1 if name == "latents" else K, name == "layer"

    def spread(x):
        if stacked:
            axes = (None, "dp", None, "tp")[: x.ndim]
        elif x.ndim == 3:  # scales, [rows, shares of the heads, ...]
            axes = "dp", "tp"
        else:
            axes = ("dp", None, "tp" if heads > 1 else None)[: x.ndim]
        spec = P() if not x.ndim else P(*axes)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    def new(heads, width=D):
        sharding = NamedSharding(mesh, P("dp", None, "tp" if heads > 1 else None))
        return jax.ShapeDtypeStruct((B, tokens, heads, width), jnp.float32, sharding=sharding)

    cache = jax.tree.map(spread, cache)
    width = 2 * D if name == "latents" else D
    args = cache, new(heads), new(heads), *(new(n, width) for n in more)
    with jax.set_mesh(mesh):
        return jax.jit(fn, donate_argnums=0).lower(*args).compile()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tokens", [1, T])
def test_writing_moves_nothing_between_devices(name, tokens):
    """With all indices in a list, XLA gathered the new tokens of all devices before each step."""
    text = program_of(lambda cache, k, v: cache.append(k, v), name, tokens).as_text()
    assert not [move for move in MOVES if f" {move}" in text]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tokens", [1, T])
def test_reading_moves_nothing_between_devices(name, tokens):
    """Pages of a stack were gathered from all rows, for all layers, in the step of each layer."""

    def step(cache, k, v, q):
        where = dict(q_offset=cache.length, kv_positions=cache.positions)
        cache = cache.append(k, v)
        value = cache.key.first if name == "latents" else cache.value
        mask = Causal() & cache.mask()
        q = q.astype(cache.key.dtype)
        return cache, attention(q, cache.key, value, Ragged(), mask=mask, **where).attention_outputs

    text = program_of(step, name, tokens, 2 * K).as_text()
    assert not [move for move in MOVES if f" {move}" in text]
