"""Caches on meshes with explicit axes, where types say how arrays are sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _caches import step
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from matrix.oracle import exact

from eqattn import cascade_attention, Ragged, ragged_attention
from eqattn.cache import (
    KVCache,
    LatentKVCache,
    PagedKVCache,
    QuantizedKVCache,
    RingBufferCache,
    StackedKVCache,
    StackedPagedKVCache,
)


B, T, H, K, D = 2, 3, 4, 2, 8
ROWS = (KVCache, RingBufferCache, QuantizedKVCache)  # rows are the first axis of their arrays
SIZES = dict(batch=B, capacity=64, kv_heads=K, head_dim=D)
PAGES = dict(pages=16, page_size=8)
KINDS = {
    "contiguous": lambda: KVCache.empty(**SIZES),
    "bits": lambda: KVCache.empty(**SIZES, dtype=jnp.bfloat16, bits=True),
    "ring buffer": lambda: RingBufferCache.empty(**SIZES),
    "quantized": lambda: QuantizedKVCache.empty(**SIZES, head_shares=2),
    "pages": lambda: PagedKVCache.empty(**SIZES, **PAGES),
    "layer": lambda: StackedKVCache.empty(2, **SIZES).layer(1),
    "layer of pages": lambda: StackedPagedKVCache.empty(2, **SIZES, **PAGES).layer(1),
    "latents": lambda: LatentKVCache.empty(B, 64, rank=D, rotary_dim=D),
}


def mesh_of(kind=AxisType.Explicit):
    return jax.make_mesh((2, 2), ("dp", "tp"), (kind,) * 2, devices=jax.devices()[:4])


@pytest.mark.parametrize("name", ["contiguous", "bits", "pages", "layer", "latents"])
def test_caches_stay_sharded(name):
    """Rows, or those of the heads where rows share pages."""
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        cache = jax.eval_shape(KINDS[name])
        inner = getattr(cache, "cache", cache)
        heads, rows = (1 if name == "latents" else K), isinstance(inner, ROWS)
        stacked = name == "layer"  # its rows are the second axis of the arrays of all layers

        def place(x):
            """By rows, and by heads, which is the last axis but one of keys and values."""
            spec = ["dp" if rows and x.shape and x.shape[0] == B else None, *[None] * (x.ndim - 1)]
            if stacked and x.ndim > 1:
                spec[1] = "dp"
            if x.ndim >= 4 and heads > 1:
                spec[-2] = "tp"
            return jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, P(*spec[: x.ndim]))
            )

        cache = jax.tree.map(place, cache)
        new = NamedSharding(mesh, P("dp", None, "tp" if heads > 1 else None))
        dtype, width = jnp.bfloat16 if name == "bits" else jnp.float32, D * (2 if heads == 1 else 1)
        make = lambda h, d: jax.ShapeDtypeStruct((B, T, h, d), dtype, sharding=new)
        made, out = jax.eval_shape(step, cache, make(H, width), make(heads, D), make(heads, D))
        spec = lambda x: tuple(x.sharding.spec) + (None,) * (x.ndim - len(x.sharding.spec))
        assert jax.tree.map(spec, made) == jax.tree.map(spec, cache)
        assert out.sharding.spec == P("dp", None, new.spec[2], None)
        if isinstance(inner, ROWS):
            turned, fewer = (
                jax.eval_shape(lambda c, n=n: c.reorder(jnp.arange(n)), cache) for n in (B, 1)
            )
            assert jax.tree.map(spec, turned) == jax.tree.map(spec, cache)
            assert fewer.length.sharding.spec == P(None) and fewer.length.shape == (1,)


@pytest.mark.parametrize("placed", [True, False])
def test_values_of_a_sharded_cache(placed):
    """Or of one that was made before `jax.set_mesh`, whose tokens are sharded."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B, 2 * T, h, D)).astype(np.float32) for h in (H, K, K))
    want = exact(q, k, v, visible=np.tri(2 * T, dtype=bool))[0]
    mesh, made = mesh_of(), KVCache.empty(**SIZES)
    with jax.set_mesh(mesh):
        place = lambda x: jax.device_put(x, NamedSharding(mesh, P(*["dp", None, "tp"][: x.ndim])))
        cache = jax.tree.map(place, made) if placed else made
        run, outs = jax.jit(step), []
        for part in (slice(0, T), slice(T, None)):
            cache, out = run(cache, *(place(x[:, part]) for x in (q, k, v)))
            outs.append(np.asarray(out))
    np.testing.assert_allclose(np.concatenate(outs, 1), want, atol=1e-5)


@pytest.mark.parametrize("name, spec", [("cascade", P("dp")), ("packed", P("dp", None, "tp"))])
def test_calls_that_reorder_queries(name, spec):
    """A gather of sharded queries has no type, and raised."""
    rng, rows = np.random.default_rng(0), 4
    draw = lambda t, heads: rng.standard_normal((rows, t, heads, D)).astype(np.float32)
    old, new, q = [draw(5, K)] * 2, [draw(1, K) for _ in range(2)], draw(1, H)
    cache = PagedKVCache.empty(rows, 64, 40, 4, K, D).reserve([6, 0, 0, 0])
    given = [jnp.asarray(x) for x in (*old, *new)]
    cache = cache.append(*given[:2], jnp.array([5, 0, 0, 0])).share([1, 2, 3], 0, 5).reserve(1)
    at = cache.length
    cache = cache.append(*given[2:])

    @jax.jit
    def run(q, cache):
        if name == "cascade":
            out = cascade_attention(q, cache, q_offset=at, return_carry=True)
            return out.attention_outputs, out.carry.output()
        ends, packed = jnp.arange(rows + 1), q.reshape(rows, H, D)
        keys = cache.key, cache.value, ends, cache.length
        out = ragged_attention(packed, *keys, Ragged(), return_carry=True)
        return out.attention_outputs[:, None], out.carry.output()[:, None]

    mesh = mesh_of()
    with jax.set_mesh(mesh):
        got = run(jax.device_put(q, NamedSharding(mesh, spec)), cache)
    keys, values = (np.concatenate([np.repeat(x[:1], rows, 0), y], 1) for x, y in zip(old, new))
    want, *_ = exact(q, keys, values)
    for x in got:
        assert x.sharding.spec[:3] == (*spec, None, None)[:3]
        np.testing.assert_allclose(x, want, rtol=0, atol=2e-6)


def _written(empty, shardings=None):
    """A cache with tokens, on the devices that its shardings name."""
    cache = empty()
    cache = cache.reserve([6, 0]) if hasattr(cache, "reserve") else cache
    new = jax.random.normal(jax.random.key(0), (B, 6, K, D)), jnp.array([6, 0])
    append = lambda cache: cache.append(new[0], *new)
    if not hasattr(cache, "layer"):
        cache = append(cache)
    else:
        for i in range(2):
            cache = append(cache.layer(i)).stack
    return cache if shardings is None else jax.device_put(cache, shardings(cache))


OVER_KEYS = {
    "pages": lambda: PagedKVCache.empty(**SIZES, **PAGES, devices=2),
    "layers of pages": lambda: StackedPagedKVCache.empty(2, **SIZES, **PAGES, devices=2),
}


@pytest.mark.parametrize("name", OVER_KEYS)
@pytest.mark.parametrize("donate", [False, True])
def test_a_shared_page_is_copied_where_devices_share_the_pages(name, donate):
    """It raised a `ShardingTypeError`."""
    mesh = jax.make_mesh((2,), ("keys",), (AxisType.Explicit,), devices=jax.devices()[:2])
    of_keys = lambda cache: cache.key_shardings(mesh, "keys")
    found, wanted = (
        _written(OVER_KEYS[name], how).share([1], 0, 6).reserve([0, 1], donate)
        for how in (of_keys, None)
    )
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    pages = found.key_pages
    assert pages.sharding.is_equivalent_to(of_keys(found).key_pages, pages.ndim)


@pytest.mark.parametrize(
    "name, rows", [("pages", [1, 0]), ("layers of pages", [0, 0]), ("layer", [1, 0])]
)
def test_rows_are_reordered_and_pages_written_out_where_rows_are_sharded(name, rows):
    mesh = jax.make_mesh((2,), ("dp",), (AxisType.Explicit,), devices=jax.devices()[:2])

    def by_rows(cache):
        """Tables, lengths, and the keys of layers by rows; pools by pages."""
        stacked = lambda x: name == "layer" or (name != "pages" and x is cache.length)
        spec = lambda x: P(None, "dp") if stacked(x) else P("dp")
        return jax.tree.map(lambda x: NamedSharding(mesh, spec(x)), cache)

    stacks = dict(OVER_KEYS, layer=lambda: StackedKVCache.empty(2, **SIZES))
    found, wanted = (_written(stacks[name], how) for how in (by_rows, None))
    rows = jnp.asarray(rows)

    def turned(cache):
        part = cache.layer(1) if name != "pages" else cache
        new = (part if name == "layer" else cache).reorder(rows)
        return new, part.key.materialise()

    jax.tree.map(np.testing.assert_array_equal, turned(found), turned(wanted))
    jax.tree.map(np.testing.assert_array_equal, jax.jit(turned)(found), turned(wanted))
