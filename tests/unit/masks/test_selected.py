"""`Selected` is the dense mask that it stands for, and costs what it lists."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from _programs import DEFAULT_CODE
from jax.sharding import NamedSharding, PartitionSpec as P

from eqattn import (
    ALiBi,
    AllGather,
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    Dense,
    DenseMask,
    KeyPadding,
    masks,
    Ragged,
    Ring,
    Segments,
    Selected,
    SlidingWindow,
    top_keys,
    Tree,
    Ulysses,
    Zigzag,
)
from eqattn.cache import LatentKV, PagedKVCache, Pages


MESH = jax.make_mesh((2,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
B, T, S, H, K, D, V = 2, 9, 24, 4, 2, 8, 6
RNG = np.random.default_rng(0)
ARRAYS = [
    jnp.asarray(RNG.normal(size=(B, n, heads, d)), jnp.float32)
    for n, heads, d in ((T, H, D), (S, K, D), (S, K, V))
]


def listed(heads=1, block_q=1, block_k=1, n=5, batch=B):
    """A random list, in which some keys stand twice, and the bools that it stands for."""
    rows, blocks = -(-T // block_q), -(-S // block_k)
    indices = RNG.integers(-1, blocks, (batch, heads, rows, n))
    seen = np.zeros((batch, heads, T, S), bool)
    for at in np.ndindex(batch, heads, T):
        of_row = indices[(*at[:2], at[2] // block_q)]
        seen[at] = np.isin(np.arange(S) // block_k, of_row)
    whole = seen if heads in (1, H) else seen.repeat(H // heads, 1)
    return Selected(jnp.asarray(indices), block_q, block_k), DenseMask(jnp.asarray(whole))


def results(mask, strategy, arrays=ARRAYS, **options):
    """Values, all gradients and a tangent, of one program."""

    @jax.jit
    def run(arrays, options):
        def call(q, k, v, bias):
            out = attention(
                q, k, v, strategy, mask=mask, bias=bias, return_logsumexp=True, **options
            )
            seen = jnp.isfinite(out.logsumexp)
            return out.attention_outputs, jnp.where(seen, out.logsumexp, 0)

        primals = (*arrays, jnp.sin(jnp.arange(H * T * S, dtype=jnp.float32)).reshape(H, T, S))
        out, pull = jax.vjp(call, *primals)
        return out, pull(tuple(map(jnp.cos, out))), jax.jvp(call, primals, primals)

    return run(list(arrays), options)


def assert_close(got, want, atol=3e-5):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=atol)


POSITIONS = jnp.asarray(RNG.permutation(S))
CASES = {
    "per query and head": (dict(heads=H), lambda x: x & Causal(), {}),
    "per key head": (dict(heads=K, n=30), lambda x: x | SlidingWindow(2, 0), {}),
    "of blocks": (dict(block_q=4, block_k=5, n=3), lambda x: ~Causal(-9) & (x | SlidingWindow(1, 0)), {}),
    "of positions": (dict(), lambda x: x & Causal(10), dict(kv_positions=POSITIONS)),
    "in a tree": (dict(heads=K), lambda x: x & Tree([-1, 0, 0, 1, 2], 4) & SlidingWindow(3, 0), {}),
}  # fmt: skip


# tests/nightly/masks has all cases of what is so cut.
@pytest.mark.parametrize("name", ["of blocks", "in a tree"])
def test_it_is_the_dense_mask_that_it_stands_for(name):
    given, combined, options = CASES[name]
    mask, dense = listed(**given)
    if "kv_positions" in options:
        dense = DenseMask(dense.array[..., POSITIONS])
    else:
        whole = mask.as_array(T, S, batch_shape=(B,), heads=H)
        np.testing.assert_array_equal(whole, jnp.broadcast_to(dense.array, whole.shape))
    score = dict(score=ALiBi.geometric(H), **options)
    want = results(combined(dense), Dense(), **score)
    assert_close(results(combined(mask), Blockwise(), **score), want)


def test_arrays_of_lists_with_batch_axes():
    """An axis of size 1 needs no `batch_shape`, and for another the error says which. It said that
    an array does not broadcast, of a mask that nobody gave.
    """
    indices = np.array([[[[0, 2], [1, -1]]]])
    seen = np.array([[1, 0, 1], [0, 1, 0]], bool)
    np.testing.assert_array_equal(Selected(indices).as_array(2, 3), seen[None])
    both = Selected(indices.repeat(2, 0)) & Causal(9)
    assert both.as_array(2, 3, batch_shape=(2,)).shape == (2, 1, 2, 3)
    with pytest.raises(ValueError, match=r"Selected has an array .* give batch_shape=\(2,\)"):
        both.as_array(2, 3)
    with pytest.raises(ValueError, match=r"Selected has an array .* give heads=3"):
        Selected(indices.repeat(3, 1)).sparsity(2, 3, heads=2)


def test_one_list_for_all_queries():
    """A single row of several queries: its keys are gathered once. It raised inside of a pad."""
    mask, dense = listed(block_q=T, block_k=4, n=3)
    outs = [attention(*ARRAYS, mask=x).attention_outputs for x in (mask, dense)]
    np.testing.assert_allclose(*outs, atol=1e-5)


def test_a_step_of_one_query_fills_less_than_a_block():
    """As where a layer takes one token, and lists are of blocks of queries. It raised in a reshape."""
    arrays = ARRAYS[0][:, :1], *ARRAYS[1:]
    mask, _ = listed(block_q=T, block_k=4, n=3)
    dense = DenseMask(mask.as_array(1, S, batch_shape=(B,)))
    more = dict(score=ALiBi.geometric(H), q_offset=jnp.array([9, 5]))
    outs = [
        attention(*arrays, Ragged(), mask=(x & Causal(9)) | SlidingWindow(2, 0), **more)
        for x in (mask, dense)
    ]
    np.testing.assert_allclose(*[x.attention_outputs for x in outs], atol=1e-5)


def test_no_queries_no_keys_and_no_entries():
    """A list may be empty along any of its axes, as what it belongs to may be."""

    @jax.jit
    def run(arrays):
        found = {}
        for name, t, s, n, block_k, moved in EMPTY:
            q, k, v = arrays[0][:, :t], *(x[:, :s] for x in arrays[1:])
            lists = Selected(jnp.full((B, 1, t, n), -1, jnp.int32), 1, block_k)
            where = dict(kv_positions=jnp.arange(s)[::-1]) if moved else {}

            def loss(q, k, v):
                out = attention(q, k, v, mask=lists, return_logsumexp=True, **where)
                return out.attention_outputs.sum(), (out.attention_outputs, out.logsumexp)

            found[name] = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return found

    for name, (gradients, (out, logsumexp)) in run(ARRAYS).items():
        t = dict((x[0], x[1]) for x in EMPTY)[name]
        assert out.shape == (B, t, H, V) and (logsumexp == -jnp.inf).all(), name
        assert all((x == 0).all() for x in (out, *gradients)), name


# Queries, keys, entries, keys of a block, and whether keys have positions of their own.
EMPTY = [
    ("no queries", 0, S, 3, 1, False),
    ("no queries, blocks", 0, S, 3, 4, True),
    ("no keys", T, 0, 3, 1, False),
    ("no keys, moved", T, 0, 3, 1, True),
    ("no entries", T, S, 0, 1, False),
    ("no entries, blocks", T, S, 0, 4, True),
]


def test_dropout_kernels_maps_and_the_plain_softmax():
    """Of one list: the bits of its keys, the interpreted kernels of a TPU, `vmap`, `Dense`."""
    mask, dense = listed(heads=K)
    masked = lambda x: x & Causal(8)
    dropping = AttentionMetadata(dropout_prob=0.4)
    key = jax.random.key(0)
    run = jax.jit(lambda *xs: attention(*xs, Blockwise(dropping), mask=masked(mask), key=key))
    want = attention(*ARRAYS, Dense(dropping), mask=masked(dense), key=key)
    assert_close(run(*ARRAYS).attention_outputs, want.attention_outputs)
    plain = attention(*ARRAYS, Dense(), mask=masked(dense), return_weights=True)
    same = attention(*ARRAYS, Dense(), mask=masked(mask), return_weights=True)
    assert_close(same.attention_weights, plain.attention_weights)
    kernel = Blockwise(AttentionMetadata(platform="interpret"))
    got = jax.jit(lambda *xs: attention(*xs, kernel, mask=masked(mask)))(*ARRAYS)
    assert_close(got.attention_outputs, plain.attention_outputs)
    one = lambda i, *xs: attention(*xs, mask=masked(Selected(i))).attention_outputs
    assert_close(jax.jit(jax.vmap(one))(mask.indices, *ARRAYS), plain.attention_outputs)


PARTS = AttentionMetadata(blocksize_q=16, blocksize_k=32)
BLOCKS = {
    "of each head": (2, 32, lambda x: x & Causal(90), Blockwise()),
    "of all heads, in parts": (1, 32, lambda x: (x | SlidingWindow(20, 0)) & Causal(8), Blockwise(PARTS)),
    "of rows apart": (2, 32, lambda x: x, None),
    "of heads together": (2, 32, lambda x: x & SlidingWindow(99, 99), Blockwise()),
    "of each query": (2, 1, lambda x: x & Causal(90), Blockwise()),
    "of all heads, of few queries": (1, 3, lambda x: x | SlidingWindow(20, 0), Blockwise(PARTS.replace(blocksize_q=18))),
    "of each query's heads": (4, 1, lambda x: x, None),
    "of each head of a block": (4, 32, lambda x: x & Causal(90), Blockwise()),
}  # fmt: skip


@pytest.mark.parametrize("name", ["of each head of a block"])
def test_blocks_are_visited_where_they_lie(name):
    """Large blocks that are listed are those of a table. They are read and added to as a whole, and
    no key is gathered by itself. The last blocks are not full. Where the compiler splits the batch
    over devices, it visits what any head lists. Queries or heads of a block may list other blocks:
    it visits what any of them lists, and masks the rest.
    """
    lists, block_q, combined, strategy = BLOCKS[name]
    rng, t, s, size, h = np.random.default_rng(1), 70, 150, (block_q, 64), 4
    draw = lambda n, heads: jnp.asarray(rng.normal(size=(2, n, heads, 4)), jnp.float32)
    arrays = draw(t, h), draw(s, 2), draw(s, 2)
    if name == "of heads together":
        arrays = jax.device_put(arrays, NamedSharding(MESH, P("sp")))
    listed = rng.integers(-1, 3, (2, lists, -(-t // block_q), 2))
    listed[..., 1, :] = -1  # these queries see nothing
    seen = (listed[..., None] == np.arange(3)).any(-2).repeat(block_q, 2).repeat(64, 3)
    seen = seen[:, :, :t, :s]
    dense = DenseMask(jnp.asarray(seen.repeat(h // lists, 1)))

    def call(mask, strategy, *arrays):
        out = attention(*arrays, strategy, mask=combined(mask), return_logsumexp=True)
        sees = jnp.isfinite(out.logsumexp)
        return out.attention_outputs, jnp.where(sees, out.logsumexp, 0)

    def ours(indices, *arrays):
        mask = lambda i: Selected(i, *size)
        if strategy is not None:
            return call(mask(indices), strategy, *arrays)
        return jax.vmap(lambda i, *xs: call(mask(i), Blockwise(), *xs))(indices, *arrays)

    def both(fn):
        def run(indices, *arrays):
            loss = lambda *xs: sum(jnp.sin(3 * y).sum() for y in fn(indices, *xs))
            return fn(indices, *arrays), jax.jvp(jax.grad(loss, (0, 1, 2)), arrays, arrays)

        return jax.jit(run).lower(jnp.asarray(listed), *arrays)

    got, want = (both(fn) for fn in (ours, lambda _, *xs: call(dense, Dense(), *xs)))
    gathers = re.findall(r"slice_sizes = array<i64: ([0-9, ]*)>.*xf32>$", got.as_text(), re.M)
    assert all({"32", "64"} & {*sizes.split(", ")} for sizes in gathers), gathers
    got, want = (x.compile()(jnp.asarray(listed), *arrays) for x in (got, want))
    assert_close(got, want, 2e-4)


@pytest.mark.parametrize("platform", ["xla", "interpret"])
def test_padding_of_a_list_sees_no_more_than_its_queries(platform):
    """The last row of a list has seven queries of eight. What would be the eighth had the segment 0,
    whose keys no query sees, and saw them: their gradients were NaN.
    """
    t, s, hidden = 7, 32, slice(16, None)
    q, k, v, ct = (normal(i, 1, n, 1, 8) for i, n in enumerate((t, s, s, t)))
    k, v = (x.at[:, hidden].set(jnp.nan) for x in (k, v))
    ids = jnp.ones((1, t), jnp.int32), jnp.asarray([[1] * 16 + [0] * 16], jnp.int32)
    mask = Selected(jnp.asarray([[[[0, 1]]]]), 8, 16) & Segments(*ids)
    strategy = Blockwise(AttentionMetadata(platform=platform))
    call = lambda *xs: attention(*xs, strategy, mask=mask).attention_outputs
    for x in jax.jit(lambda *xs: jax.vjp(call, *xs)[1](ct))(q, k, v)[1:]:
        assert (x[:, hidden] == 0).all() and jnp.isfinite(x).all()


@pytest.mark.parametrize("stored, heads", [("int8", 1)])
def test_pages_are_read_where_they_lie(stored, heads):
    cache = PagedKVCache.empty(B, 32, 12, 4, K, D, V, jnp.float32, stored)
    cache = cache.reserve(jnp.full(B, S)).append(*ARRAYS[1:])
    mask, dense = listed(heads=heads, n=3)
    mask = Selected(jnp.concatenate([mask.indices, mask.indices[..., :1]], -1))
    run = jax.jit(lambda q, k, v, m: attention(q, k, v, Ragged(), mask=m & cache.mask()))
    whole = [x.materialise() for x in (cache.key, cache.value)]
    array = np.pad(np.asarray(dense.array), [(0, 0)] * 3 + [(0, whole[0].shape[1] - S)])
    want = attention(ARRAYS[0], *whole, mask=DenseMask(array)).attention_outputs
    got = run(ARRAYS[0], cache.key, cache.value, mask).attention_outputs
    assert_close(got, want)


def test_gradients_of_narrow_keys_are_summed_wide():
    """Of 600 queries that list one key of two, alone or in pages, each adds 1 to the gradient of its
    value. A sum of these in bfloat16 would end at 512, and it did where rows of a list are visited
    in parts. Latents are read once, and the gradients of what they are read for added.
    """
    t, dtype = 600, jnp.bfloat16
    query, mask = jnp.ones((1, t, 1, 2), dtype), Selected(jnp.zeros((1, 1, t, 1), int))
    pages = lambda x: Pages(x, jnp.zeros((1, 1), jnp.int32))
    total = lambda *xs: attention(query, *xs, Ragged(), mask=mask).attention_outputs.sum()

    def of_latents(x):
        held = LatentKV(x[..., :1], x[..., 1:])
        return total(held, held.c_kv)

    calls = (
        lambda x: attention(query, x, x, mask=mask).attention_outputs.sum(),
        lambda x: total(pages(x), pages(x)),
        of_latents,
    )
    found = jax.jit(lambda x: [jax.grad(call)(x) for call in calls])(jnp.ones((1, 2, 1, 2), dtype))
    for gradient, both in zip(found, (1, 1, 0)):
        np.testing.assert_array_equal(gradient[0, :, 0], [[t, t * both], [0, 0]])


@pytest.mark.parametrize("heads, block_q", [(1, 1), (8, 32)], ids=["queries", "heads"])
def test_lists_that_may_name_many_other_blocks_are_gathered(heads, block_q):
    """Together, the lists of a block may name all keys, and each lists one block of 128."""
    q, k = jnp.ones((1, 64, 8, 4)), jnp.ones((1, 4096, 1, 4))
    indices = jnp.zeros((1, heads, 64 // block_q, 1), jnp.int32)
    call = lambda i, q, k: attention(q, k, k, mask=Selected(i, block_q, 32)).attention_outputs
    assert "stablehlo.gather" in jax.jit(call).lower(indices, q, k).as_text()


Q = jnp.ones((6, 1, 2))
BAD = {
    "one axis": (lambda: Selected([0]), r"\[\*b, h, rows, n\], got shape \(1,\)"),
    "below none": (lambda: Selected([[[-2]]]), r"indices \(1, 1, 1\) must be at least 0, .* got -2; write -1"),
    "floats": (lambda: Selected([[[0.5]]]), r"indices must be integers, got float.* \(1, 1, 1\); cast"),
    "no block": (lambda: Selected([[[0]]], block_k=0), "block_k must be at least 1"),
    "rows": (lambda: attention(Q, Q, Q, mask=Selected(np.zeros((1, 5, 1), int))), r"\(1, 5, 1\) do not fit .* 6 rows of 1"),
    "heads": (lambda: attention(Q, Q, Q, mask=Selected(np.zeros((2, 6, 1), int))), "h one of 1, 1 and 1"),
    "batch": (lambda: attention(Q, Q, Q, mask=Selected(np.zeros((2, 1, 6, 1), int))), r"batch \(\)"),
    "beyond the keys": (lambda: attention(Q, Q, Q, mask=Selected(np.full((1, 6, 1), 6))), r"\(1, 6, 1\) must be below 6, .* got 6"),
    "an array beyond the keys": (lambda: Selected(np.full((1, 6, 1), 6)).as_array(6, 6), "below 6, .* got 6"),
    "beyond the blocks": (lambda: attention(Q, Q, Q, mask=Selected(np.full((1, 6, 1), 2), block_k=4)), "below 2, "),
    "negated": (lambda: attention(Q, Q, Q, mask=~Selected(np.zeros((1, 6, 1), int))), "cannot be negated"),
    "negated inside": (lambda: attention(Q, Q, Q, mask=Causal() & ~Selected(np.zeros((1, 6, 1), int))), "cannot be negated"),
    "two": (lambda: attention(Q, Q, Q, mask=Selected(np.zeros((1, 6, 1), int)) & Selected(np.zeros((1, 6, 1), int))), "holds 2 lists"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    call, message = BAD[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


SEGMENTS = np.sort(RNG.integers(0, 2, (B, S)), -1).astype(np.int32)


@pytest.mark.parametrize("layout", [Zigzag()], ids=str)
def test_keys_that_are_gathered_first(layout):
    """In a `jax.shard_map` of one's own, which has pieces of the queries, of their lists and of the
    keys. The lists are those that `top_keys` makes there, of places in the whole sequence.
    """
    x = jnp.asarray(RNG.normal(size=(B, S, H, D)), jnp.float32)
    ids, places, spec = jnp.asarray(SEGMENTS), jnp.arange(S), P(None, "sp")
    ring = Ring(axis_name="sp", layout=layout)

    def local(query, key, ids, places):
        whole = lambda x, axis=1: jax.lax.all_gather(x, "sp", axis=axis, tiled=True)
        top = top_keys(query[:, :, :1], key[:, :, :1], 4, ring, mask=Causal() & Segments(ids))
        mask = Causal() & Segments(ids, whole(ids)) & Selected(top.indices)
        at = dict(q_positions=places, kv_positions=whole(places, 0))
        keys = whole(key)
        return attention(query, keys, keys, Blockwise(), mask=mask, **at).attention_outputs

    def dense(query, key):
        logits = jnp.einsum("bthd,bshd->bhts", query[:, :, :1], key[:, :, :1]) * D**-0.5
        seen = jnp.tri(S, dtype=bool)[None] & (ids[:, :, None] == ids[:, None])
        values = jax.lax.top_k(jnp.where(seen[:, None], logits, -jnp.inf), 4)[0]
        seen = seen[:, None] & (logits >= values[..., -1:])
        z = jnp.einsum("bthd,bshd->bhts", query, key) * D**-0.5
        p = jax.nn.softmax(jnp.where(seen, z, -jnp.inf))
        return jnp.einsum("bhts,bshd->bthd", p, key)

    mapped = jax.shard_map(
        local, mesh=MESH, in_specs=(spec,) * 3 + (P("sp"),), out_specs=spec, check_vma=False
    )
    there = layout.permute(ids, 2, 1), layout.permute(places, 2, 0)
    ours = lambda *xs: layout.unpermute(mapped(*[layout.permute(x, 2) for x in xs], *there), 2)
    both = []
    for fn in (ours, dense):
        loss = lambda *xs, fn=fn: jnp.sin(3 * fn(*xs)).sum()
        both.append(
            jax.jit(lambda *xs, fn=fn, loss=loss: (fn(*xs), jax.grad(loss, (0, 1))(*xs)))(x, x)
        )
    assert_close(*both)


@pytest.mark.parametrize("kind", [Ring, Ulysses, AllGather])
def test_strategies_that_shard_tokens_say_to_gather_first(kind):
    for mask in (Selected(np.zeros((1, 6, 1), int)), Selected(np.zeros((1, 3, 1), int), 2, 2)):
        strategy = kind(mesh=MESH, axis_name="sp")
        message = r"Selected lists keys .* 2 devices of axes \('sp',\).*gather the keys first"
        with pytest.raises(ValueError, match=message):
            attention(Q, Q, Q, strategy, mask=Causal() & mask)
        assert "gather the keys first" in strategy.supports(mask=mask).reason
        # One device holds all keys.
        one = jax.make_mesh((1,), ("sp",), devices=jax.devices()[:1])
        assert kind(mesh=one, axis_name="sp").supports(mask=mask)


def test_what_cannot_visit_a_list_says_so():
    mask = Selected(np.zeros((1, 6, 1), int))
    assert Blockwise().supports(mask=mask & Causal()) and Dense().supports(mask=~mask)
    assert "negated" in Blockwise().supports(mask=~mask).reason
    kernel = Blockwise(AttentionMetadata(platform="pallas", backend="tpu"))
    assert kernel.supports(mask=mask & Causal())
    with pytest.raises(TypeError, match="lists keys and is no function of one pair"):
        mask.visible(0, 0, 0, 0)
    # Traced indices that name no key list nothing.
    out = jax.jit(lambda i: attention(Q, Q, Q, mask=masks.Selected(i)))(jnp.full((1, 6, 2), 99))
    np.testing.assert_array_equal(out.attention_outputs, 0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16])
def test_memory_is_that_of_what_is_listed_whatever_the_dtype(dtype):
    """Keys and values are not converted as a whole. Those of the longer call take 8 MiB or more."""

    def temporary(keys):
        shapes = (1, 128, 4, 64), (1, keys, 2, 64), (1, keys, 2, 64)
        arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        lists = jax.ShapeDtypeStruct((1, 1, 128, 256), jnp.int32)
        call = lambda q, k, v, lists: attention(q, k, v, mask=Selected(lists)).attention_outputs
        compiled = jax.jit(call).lower(*arrays, lists).compile(DEFAULT_CODE)
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(16384) < temporary(2048) + 2**20


@pytest.mark.parametrize("batch, heads, mapped", [(1, 1, False), (2, 2, True)])
def test_no_key_is_copied_whole_under_vmap(batch, heads, mapped):
    """Keys and values of 16,384 tokens take 8 MiB for each head of a batch element."""
    call = lambda q, k, v, lists: attention(q, k, v, mask=Selected(lists)).attention_outputs
    shapes = (batch, 256, 16, 64), *[(batch, 16384, heads, 64)] * 2
    arrays = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    lists = jax.ShapeDtypeStruct((batch, 1, 256, 128), jnp.int32)
    compiled = (
        jax.jit(jax.vmap(call) if mapped else call).lower(*arrays, lists).compile(DEFAULT_CODE)
    )
    assert compiled.memory_analysis().temp_size_in_bytes < 2**23


@pytest.mark.parametrize("listed, batched", [(True, False)])
def test_a_window_of_few_keys_copies_none(listed, batched):
    """The last queries of a text see a window of it, alone or beside a list. Keys and values of the
    longer text take 32 MiB. `batched` gives each batch element an array, and a mask with arrays may
    show any key.
    """

    def temporary(keys):
        near, ends = SlidingWindow(100, 0), jnp.full(1, keys, jnp.int32)
        near = near & KeyPadding(ends) if batched else near
        shapes = (1, 16, 16, 64), (1, keys, 2, 64), (1, keys, 2, 64)
        arrays = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
        lists = jax.ShapeDtypeStruct((1, 1, 16, 8), jnp.int32)

        def call(q, k, v, lists):
            mask = Selected(lists) | near if listed else near
            return attention(q, k, v, mask=mask, q_offset=keys - 16).attention_outputs

        compiled = jax.jit(call).lower(*arrays, lists).compile(DEFAULT_CODE)
        return compiled.memory_analysis().temp_size_in_bytes

    assert (temporary(32768) < temporary(4096) + 2**20) != batched
