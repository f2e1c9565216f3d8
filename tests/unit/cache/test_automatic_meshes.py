"""Caches whose rows and heads are shared out by the compiler: each device writes its own part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _caches import step
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqattn import Ragged
from eqattn.cache import (
    KVCache,
    LatentKVCache,
    PagedKVCache,
    QuantizedKVCache,
    RingBufferCache,
    StackedKVCache,
    StackedPagedKVCache,
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


READ = [(x, "auto") for x in KINDS] + [(x, "interpret") for x in ("contiguous", "layer")]


# Every kind, for one token of it. tests/nightly/cache has all pairs.
FEW = [(1, name, "auto") for name in KINDS] + [(T, "layer", "interpret")]


@pytest.mark.parametrize("tokens, name, platform", FEW)
def test_reading_moves_nothing_between_devices(name, platform, tokens):
    """Pages of a stack were gathered from all rows, for all layers, in the step of each layer."""

    def read(cache, k, v, q):
        strategy = lambda metadata: Ragged(metadata.replace(platform=platform))
        return step(cache, q.astype(cache.key.dtype), k, v, strategy=strategy)

    text = program_of(read, name, tokens, 2 * K).as_text()
    assert not [move for move in MOVES if f" {move}" in text]


@pytest.mark.parametrize("layers", [False])
def test_pages_of_eight_bits_stay_sharded_over_heads(layers):
    """Their scales were gathered from all devices, and copied, in each step."""
    mesh = jax.make_mesh((2,), ("heads",), (AxisType.Auto,), devices=jax.devices()[:2])
    rng = np.random.default_rng(0)
    old, new = (jnp.asarray(rng.normal(size=(B, n, K, D)), jnp.float32) for n in (21, 1))
    query = jnp.asarray(rng.normal(size=(B, 1, 2 * K, D)), jnp.float32)

    def filled(shares):
        more = dict(SIZES, pages=16, page_size=8, stored=jnp.int8, head_shares=shares)
        if layers:
            return StackedPagedKVCache.empty(2, **more).reserve(22).layer(1).append(old, old)
        return PagedKVCache.empty(**more).reserve(22).append(old, old)

    def put(x):
        """Values and scales `[pages, ...]`, whose heads or shares are their last axis but one."""
        shared = x.ndim > 2
        spec = P(*[None] * (x.ndim - 2), "heads") if shared else P()
        return jax.device_put(x, NamedSharding(mesh, spec))

    cache, args = jax.tree.map(put, filled(2)), [put(x) for x in (query, new)]
    program = jax.jit(step).lower(cache, *args, args[1]).compile()
    assert not [move for move in MOVES if f" {move}" in program.as_text()]
    want = step(filled(1), query, new, new)[1]
    np.testing.assert_allclose(program(cache, *args, args[1])[1], want, rtol=0, atol=1e-6)
    # On one device, too, the shares are read as they are.
    got = step(filled(2), query, new, new)[1]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["contiguous", "ring buffer", "latents"])
def test_the_length_stays_where_it_is(name):
    """Outside of jit, a cache that each device has is sharded no further by its new tokens."""
    mesh = jax.make_mesh((4,), ("dp",), (AxisType.Auto,), devices=jax.devices()[:4])
    put = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
    cache = jax.tree.map(put, KINDS[name]())
    heads = 1 if name == "latents" else K
    new = put(jnp.ones((B, T, heads, D)), "dp")
    cache = cache.append(new, new)
    assert cache.length.tolist() == [T] * B
    assert cache.length.is_fully_replicated
