"""Caches whose tokens are spread over devices: `Ragged(metadata, axis_name=...)`."""

import functools as ft
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _programs import DEFAULT_CODE
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from matrix.oracle import exact

from eqattn import (
    ALiBi,
    attention,
    AttentionMetadata,
    cascade_attention,
    Causal,
    KeyPadding,
    Ragged,
    Segments,
    Selected,
)
from eqattn.cache import (
    KVCache,
    PagedKVCache,
    QuantizedKVCache,
    RingBufferCache,
    StackedPagedKVCache,
)


N, B, H, K, D, V, CAPACITY = 4, 2, 4, 2, 8, 6, 24
SIZES = dict(batch=B, capacity=CAPACITY, kv_heads=K, head_dim=D, value_dim=V)
PAGED = ft.partial(PagedKVCache.empty, pages=16, page_size=3, devices=N, **SIZES)
MAKE = {
    "one piece": lambda: KVCache.empty(**SIZES),
    "int8": lambda: QuantizedKVCache.empty(**SIZES),
    "bits": lambda: KVCache.empty(**SIZES, bits=True),
    "ring buffer": lambda: RingBufferCache.empty(**SIZES),
    "ring buffer with sinks": lambda: RingBufferCache.empty(**SIZES, sinks=2),
    "pages": PAGED,
    "int8 pages": lambda: PAGED(stored=jnp.int8),
    "pages of bits": lambda: PAGED(bits=True),
}


def mesh_of(n=N, name="keys"):
    return jax.make_mesh((n,), (name,), (AxisType.Auto,), devices=jax.devices()[:n])


def tokens(t, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((B, t, H, D), (B, t, K, D), (B, t, K, V))
    return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]


def by_hand(q, k, v, lengths, counts):
    """Attention of the last `counts` tokens of each row over its keys, in NumPy. Rows of `q` after
    these are zero.
    """
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, (length, count) in enumerate(zip(lengths, counts)):
        for i in range(count):
            seen = slice(0, length - count + i + 1)
            keys, values = (x[b, seen].repeat(H // K, 1).astype(float) for x in (k, v))
            logits = np.einsum("hd,shd->hs", q[b, i], keys) * D**-0.5
            p = np.exp(logits - logits.max(-1, keepdims=True))
            out[b, i] = np.einsum("hs,shv->hv", p / p.sum(-1, keepdims=True), values)
    return out


def step(cache, q, k, v, counts, **own):
    offset = cache.length
    cache = cache.append(k, v, counts)
    out = attention(
        q, cache.key, cache.value, Ragged(AttentionMetadata(), **own),
        mask=Causal() & cache.mask(), q_offset=offset, kv_positions=cache.positions,
    )  # fmt: skip
    return cache, out.attention_outputs


@pytest.mark.parametrize("name", ["int8 pages"])
def test_a_prompt_and_drafts(name):
    """Rows of unequal length, and one without tokens at first; then drafts of both. Each device has
    its share of the arrays, which are never gathered.
    """
    mesh, lengths = mesh_of(), np.zeros(B, int)
    with jax.set_mesh(mesh):
        cache = MAKE[name]()
        cache = jax.device_put(cache, cache.key_shardings(mesh, "keys"))
        program = jax.jit(ft.partial(step, axis_name="keys"), donate_argnums=0)
        for t, counts in ((9, [9, 0]), (2, [2, 1])):
            if isinstance(cache, PagedKVCache):
                cache = cache.reserve(counts)
            new = tokens(t, seed=t)
            text = program.lower(cache, *new, jnp.array(counts)).compile().as_text()
            cache, out = program(cache, *new, jnp.array(counts))
            lengths = lengths + counts
            held = [np.asarray(jnp.asarray(_materialised(x))) for x in (cache.key, cache.value)]
            want = by_hand(np.asarray(new[0]), *held, lengths, counts)
            for row, count in enumerate(counts):
                np.testing.assert_allclose(out[row, :count], want[row, :count], atol=1e-5)
    assert "all-gather" not in text and "all-to-all" not in text
    for x in jax.tree.leaves((cache.key, cache.value)):
        if x.ndim > 2:
            assert x.sharding.shard_shape(x.shape) != x.shape


def _materialised(x):
    return x.materialise() if hasattr(x, "materialise") else x


RNG = np.random.default_rng(1)
S, T = 16, 3
ARRAYS = {
    "q": RNG.normal(size=(B, T, H, D)),
    "k": RNG.normal(size=(B, S, K, D)),
    "v": RNG.normal(size=(B, S, K, V)),
    "sinks": RNG.normal(size=H),
    "bias": RNG.normal(size=(H, T, S)),
    "slopes": RNG.uniform(size=H),
}
IDS = RNG.integers(0, 2, (B, S)).astype(np.int32)
LENGTHS, OFFSET = np.array([14, 0]), np.array([10, 2])


def dense(a):
    """Output and logsumexp from all logits, in plain `jax.numpy`."""
    logits = jnp.einsum("bthd,bshd->bhts", a["q"], a["k"].repeat(H // K, 2)) * D**-0.5
    position = OFFSET[:, None] + np.arange(T)
    distance = abs(position[:, :, None] - np.arange(S))[:, None].astype(float)
    logits = logits + a["bias"][None] - a["slopes"].reshape(1, H, 1, 1) * distance
    seen = (np.arange(S) <= position[:, :, None]) & (np.arange(S) < LENGTHS[:, None, None])
    seen = (seen & (IDS == 0)[:, None])[:, None]
    e = jnp.where(seen, jnp.exp(logits), 0)
    total = e.sum(-1) + jnp.exp(a["sinks"])[None, :, None]
    out = jnp.einsum("bhts,bshv->bthv", e / total[..., None], a["v"].repeat(H // K, 2))
    return out, jnp.log(total).swapaxes(1, 2)


def sharded(a, ids, axis="keys"):
    metadata = AttentionMetadata(softmax_aux=a["sinks"], blocksize_k=3)
    zeros = jnp.zeros((B, T), jnp.int32)
    mask = Causal() & KeyPadding(jnp.asarray(LENGTHS)) & Segments(zeros, ids)
    out = attention(
        a["q"], a["k"], a["v"], Ragged(metadata, axis_name=axis), mask=mask, bias=a["bias"],
        score=ALiBi(a["slopes"]), q_offset=jnp.asarray(OFFSET), return_logsumexp=True,
    )  # fmt: skip
    return out.attention_outputs, out.logsumexp


def with_gradients(fn):
    def loss(a, *rest):
        found = fn(a, *rest)
        return sum(jnp.sin(x).sum() for x in found), found

    return jax.jit(jax.grad(loss, has_aux=True))


@pytest.mark.parametrize("manual", [False], ids=["automatic"])
def test_gradients_of_everything(manual, x64):
    """Any mask and score, sinks, and gradients, of whole arrays and in a `shard_map` of one's own,
    where what varies with keys is the device's own.
    """
    mesh, fn = mesh_of(), sharded
    if manual:
        on = {"k": P(None, "keys"), "v": P(None, "keys"), "bias": P(None, None, "keys")}
        specs = {name: on.get(name, P()) for name in ARRAYS}, P(None, "keys")
        fn = jax.shard_map(sharded, mesh=mesh, in_specs=specs, out_specs=P())
    with jax.set_mesh(mesh):
        arrays = {name: jnp.asarray(x) for name, x in ARRAYS.items()}
        found = with_gradients(fn)(arrays, jnp.asarray(IDS))
    want = with_gradients(dense)(arrays)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_one_merge_is_all_that_travels(dtype):
    """Of a maximum, a numerator and a denominator for each row: `t * h * (v + 2)` numbers. Each
    device holds its part of the keys, and no copy of the others'.
    """
    mesh, t, s = mesh_of(), 2, 4096
    q, k, v = (jax.ShapeDtypeStruct((B, *x), jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))
               for x, spec in (((t, H, D), P()), ((s, K, D), P(None, "keys")), ((s, K, V), P(None, "keys"))))  # fmt: skip

    def call(q, k, v, lengths):
        mask, strategy = Causal() & KeyPadding(lengths), Ragged(axis_name="keys")
        offset = lengths - t
        return attention(q, k, v, strategy, mask=mask, q_offset=offset).attention_outputs

    with jax.set_mesh(mesh):
        compiled = jax.jit(call).lower(q, k, v, jnp.full(B, s)).compile(DEFAULT_CODE)
    lines = [x for x in compiled.as_text().splitlines() if re.search(r" all-|collective", x)]
    sent = "".join(line.split(" all-reduce(")[0] for line in lines)
    sizes = [np.prod([int(n) for n in x.split(",")]) for x in re.findall(r"f32\[([\d,]+)\]", sent)]
    assert sum(sizes) == B * t * H * (V + 2) and len(lines) <= 3
    memory = compiled.memory_analysis()
    whole = B * s * K * (D + V) * jnp.dtype(dtype).itemsize
    assert memory.argument_size_in_bytes < 1.1 * whole / N
    assert memory.temp_size_in_bytes < whole / N


def test_pages_in_a_shard_map_of_ones_own():
    """Each device has its pages of the pool, and the whole table."""
    mesh = mesh_of()
    cache = PAGED().reserve([20, 7])
    _, k, v = tokens(20)
    cache = cache.append(k, v, jnp.array([20, 7]))
    q = tokens(1, seed=5)[0]

    def local(q, cache):
        mask, strategy = cache.mask(), Ragged(axis_name="keys")
        return attention(q, cache.key, cache.value, strategy, mask=mask).attention_outputs

    specs = P(), jax.tree.map(lambda x: x.spec, cache.key_shardings(mesh, "keys"))
    out = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()))(q, cache)
    held = [np.asarray(x.materialise()) for x in (cache.key, cache.value)]
    np.testing.assert_allclose(out, by_hand(np.asarray(q), *held, [20, 7], [1, 1]), atol=1e-5)


@pytest.mark.parametrize("levels", [2])
def test_shared_pages_in_a_shard_map_of_ones_own(levels):
    """Rows are grouped by the pages of the whole pool, most of which other devices have."""
    mesh, strategy = mesh_of(), Ragged(axis_name="keys")
    q, k, v = tokens(10, seed=7)
    cache = PAGED().reserve([6, 0]).append(k, v, jnp.array([6, 0])).share([1], 0, 6)
    cache = cache.reserve(10).append(k, v)
    offset = cache.length - 1

    def local(q, cache):
        return cascade_attention(q, cache, strategy, q_offset=offset, levels=levels)

    specs = P(), jax.tree.map(lambda x: x.spec, cache.key_shardings(mesh, "keys"))
    out = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()))(q[:, -1:], cache)
    held = [np.asarray(x.materialise()) for x in (cache.key, cache.value)]
    want = by_hand(np.asarray(q[:, -1:]), *held, [16, 16], [1, 1])
    np.testing.assert_allclose(out.attention_outputs, want, atol=1e-5)


def test_what_varies_with_keys_that_lie_in_pages():
    """Ids and a bias of all keys of a call, of which each device takes those of its own pages."""
    mesh, rng = mesh_of(), np.random.default_rng(3)
    ids, bias = rng.integers(0, 2, (B, CAPACITY)), rng.normal(size=(H, 1, CAPACITY))
    with jax.set_mesh(mesh):
        cache = PAGED().reserve([20, 7])
        cache = jax.device_put(cache, cache.key_shardings(mesh, "keys"))
        q, k, v = tokens(20, seed=6)
        cache = cache.append(k, v, jnp.array([20, 7]))
        mask = cache.mask() & Segments(jnp.zeros((B, 1), jnp.int32), jnp.asarray(ids, jnp.int32))
        run = lambda q, cache: attention(
            q, cache.key, cache.value, Ragged(axis_name="keys"), mask=mask,
            bias=jnp.asarray(bias, jnp.float32),
        )  # fmt: skip
        out = jax.jit(run)(q[:, :1], cache).attention_outputs
    held = [np.asarray(x.materialise()) for x in (cache.key, cache.value)]
    seen = (np.arange(CAPACITY) < np.array([[20], [7]])) & (ids == 0)
    want = exact(q[:, :1], *held, lambda z: z * D**-0.5 + bias, seen[:, None, None])[0]
    np.testing.assert_allclose(out, want, atol=1e-5)


def test_pages_are_taken_from_the_device_of_their_part():
    cache = PAGED().reserve([24, 5])
    table = np.asarray(cache.table)
    assert table.shape == (B, 8) and (table[0] // 4 == np.arange(8) % N).all()
    assert (table[1, :2] // 4 == [0, 1]).all() and (table[1, 2:] == -1).all()
    assert (
        len(np.unique(table[table >= 0])) == 10
        and cache.release(jnp.array([0])).reserve(5).devices == N
    )
    with pytest.raises(ValueError, match="5 pages of device 0 of 3 tokens are needed and 4 of 4"):
        PagedKVCache.empty(**{**SIZES, "capacity": 60}, pages=16, page_size=3, devices=N).reserve(
            [51, 0]
        )
    assert PagedKVCache.empty(**SIZES, pages=16, page_size=5, devices=N).table.shape == (B, 8)


def test_bad_input():
    q, k, v = tokens(10)
    strategy = Ragged(AttentionMetadata(), axis_name="keys")
    run = lambda *xs: attention(*xs, strategy)
    with pytest.raises(ValueError, match="'keys' of Ragged names.*there is no mesh.*jax.set_mesh"):
        run(q, k, v)
    assert "there is no mesh" in strategy.supports().reason
    with jax.set_mesh(mesh_of(name="sp")):
        with pytest.raises(ValueError, match=r"the mesh has \('sp',\)"):
            run(q, k, v)
    with jax.set_mesh(mesh_of()):
        assert strategy.supports().ok
        with pytest.raises(ValueError, match=r"key_ \(2, 10, 2, 8\).*10 keys.*4 devices.*multiple"):
            run(q, k, v)
        cache = PagedKVCache.empty(pages=16, page_size=3, **SIZES)
        with pytest.raises(ValueError, match=r"PagedKVCache.empty\(..., devices=4\)"):
            run(q, cache.key, cache.value)
    with jax.set_mesh(
        jax.make_mesh((4,), ("keys",), (AxisType.Explicit,), devices=jax.devices()[:4])
    ):
        with pytest.raises(ValueError, match="explicit axis.*automatic"):
            run(q, k, v)
    with pytest.raises(ValueError, match="devices=3 cannot share 16 pages"):
        PagedKVCache.empty(pages=16, page_size=3, devices=3, **SIZES)


LAYERS = 3


def through_layers(caches, q, k, v, counts, **own):
    """A scan over layers, which attend to the same tokens, scaled by the number of the layer."""

    def layer(carry, i):
        caches, outs = carry
        scaled = [x * (1 + i).astype(x.dtype) for x in (k, v)]
        cache, out = step(caches.layer(i), q, *scaled, counts, **own)
        return (cache.stack, outs.at[i].set(out)), None

    outs = jnp.zeros((LAYERS, *q.shape[:3], V))
    (caches, outs), _ = jax.lax.scan(layer, (caches, outs), jnp.arange(LAYERS))
    return caches, outs


@pytest.mark.parametrize("devices, stored", [(N, None)])
def test_pages_of_many_layers(devices, stored):
    """One table serves all layers, on one device and spread over several."""
    mesh, own = mesh_of(), {} if devices == 1 else {"axis_name": "keys"}
    sizes = dict(pages=12, page_size=3, stored=stored, devices=devices, **SIZES)
    with jax.set_mesh(mesh):
        caches = StackedPagedKVCache.empty(LAYERS, **sizes)
        if devices > 1:
            caches = jax.device_put(caches, caches.key_shardings(mesh, "keys"))
        program = jax.jit(ft.partial(through_layers, **own), donate_argnums=0)
        lengths = np.zeros(B, int)
        for t, counts in ((7, [7, 4]), (1, [1, 1])):
            caches, new = caches.reserve(counts), tokens(t, seed=t)
            text = program.lower(caches, *new, jnp.array(counts)).compile().as_text()
            caches, outs = program(caches, *new, jnp.array(counts))
            lengths = lengths + counts
        assert (np.asarray(caches.length) == lengths).all() and "all-gather" not in text
        for i in range(LAYERS):
            cache = caches.layer(i)
            held = [np.asarray(x.materialise()) for x in (cache.key, cache.value)]
            want = by_hand(np.asarray(new[0]), *held, lengths, counts)
            np.testing.assert_allclose(outs[i], want, atol=1e-5)
        rows = caches.layer(2).truncate(jnp.array([2, 5])).stack.length
        assert rows[2].tolist() == [2, 5] and rows[1].tolist() == [8, 5]
        # The layers share their pages, of which the one with most tokens needs most: 10 and 5.
        more = caches.layer(2).truncate(jnp.array([2, 5])).stack.reserve([2, 0])
        assert (np.asarray(more.table) >= 0).sum(1).tolist() == [4, 2]
        freed = caches.release(jnp.array([0]))
        assert (freed.table[0] == -1).all() and freed.length[:, 0].max() == 0
        assert freed.length[:, 1].min() == 5 and (freed.table[1] == caches.table[1]).all()
        with pytest.raises(ValueError, match="A row would have 40 tokens"):
            freed.reserve([40, 0])
        with pytest.raises(ValueError, match="share one table"):
            caches.layer(0).reorder(jnp.array([1, 0]))


def test_lists_of_keys_in_a_shard_map():
    """They name keys of all devices, traced or known, with the positions of the device's keys or
    without.
    """
    mesh, t, s = mesh_of(), 3, 16
    q, k, v = tokens(t)[0], *tokens(s)[1:]
    indices = np.random.default_rng(0).integers(-1, s, (B, 1, t, 5), dtype=np.int32)
    strategy = Ragged(AttentionMetadata(), axis_name="keys")
    own = P(None, "keys")

    @jax.jit
    @ft.partial(jax.shard_map, mesh=mesh, in_specs=(P(), own, own, P()), out_specs=P())
    def run(q, k, v, indices):
        at = jax.lax.axis_index("keys") * (s // N) + jnp.arange(s // N, dtype=jnp.int32)
        attend = ft.partial(attention, q, k, v, strategy)
        outs = [attend(mask=Selected(x)) for x in (indices, known)]
        outs += [attend(mask=Selected(known), kv_positions=at)]
        return [out.attention_outputs for out in outs]

    known = indices
    logits = np.einsum("bthd,bshd->bhts", q, np.repeat(k, H // K, 2)) * D**-0.5
    seen = (indices[..., None] == np.arange(s)).any(-2)
    weights = np.where(seen, np.exp(logits), 0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    want = np.einsum("bhts,bshv->bthv", weights, np.repeat(v, H // K, 2))
    for out in run(q, k, v, jnp.asarray(indices)):
        np.testing.assert_allclose(out, want, atol=1e-5)
