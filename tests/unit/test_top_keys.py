"""`top_keys` lists what sorting all logits lists, and its values have every derivative."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _programs import DEFAULT_CODE
from jax.sharding import PartitionSpec as P

from eqattn import (
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    Contiguous,
    Dense,
    KeyPadding,
    Ragged,
    Ring,
    ScoreFn,
    Selected,
    SlidingWindow,
    top_keys,
    TopKeys,
    Tree,
    Ulysses,
    Zigzag,
)
from eqattn.cache import KVCache, PagedKVCache
from eqattn.scores import Operand


B, T, H, K, D, F, N = 2, 16, 4, 2, 4, 6, 5
RNG = np.random.default_rng(0)
QUERY, KEY, BIAS, ROWS, COLUMNS = (
    RNG.normal(size=shape) for shape in ((B, T, H, D), (B, T, K, D), (H, T, T), (B, T, F), (B, T, F))
)  # fmt: skip
MESH = jax.make_mesh((2,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
BLOCKS = AttentionMetadata(runtime_dtype=jnp.float64, blocksize_q=4, blocksize_k=3)
MASK = Causal(1) & SlidingWindow(8, None)


def ours(strategy, query, key, bias, rows, columns, n=N, **options):
    score = ScoreFn(
        lambda logit, b, h, q, k, x, y: logit + jax.nn.relu(x @ y),
        (Operand(rows, "btf"), Operand(columns, "bsf")),
    )
    given = dict(bias=bias, score=score, mask=MASK, **options)
    return top_keys(query, key, n, strategy, **given)


def plain(query, key, bias, rows, columns, n=N):
    """By all logits at once. `jax.lax.top_k` puts the lower of equal entries first."""
    logits = jnp.einsum("bthd,bshd->bhts", query, key.repeat(H // K, 2)) * D**-0.5
    logits = logits + bias[None] + jax.nn.relu(rows @ columns.swapaxes(1, 2))[:, None]
    distance = np.arange(T)[:, None] - np.arange(T)
    seen = (distance >= -1) & (distance <= 8)
    values, indices = jax.lax.top_k(jnp.where(seen[None, None], logits, -jnp.inf), n)
    return TopKeys(values, jnp.where(values == -jnp.inf, -1, indices))


def results(fn, more=True):
    """The lists, the gradients of their values and, if `more`, a tangent and second derivatives."""

    @jax.jit
    def run(*xs):
        def values(*xs):
            found = fn(*xs)
            return jnp.where(found.indices >= 0, found.values, 0)

        gradient = jax.grad(lambda *xs: jnp.sin(values(*xs)).sum(), range(5))
        directions = tuple(map(jnp.cos, xs))
        if not more:
            return fn(*xs), gradient(*xs)
        return fn(*xs), jax.jvp(values, xs, directions)[1], jax.jvp(gradient, xs, directions)

    return run(QUERY, KEY, BIAS, ROWS, COLUMNS)


def assert_equal(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-12)


def zigzag(*xs):
    """A ring whose devices hold two chunks each, the lists brought back in order."""
    order, restored = (f(np.arange(T), 2, 0) for f in (Zigzag().permute, Zigzag().unpermute))
    axes = 1, 1, (1, 2), 1, 1
    moved = [
        ft.reduce(lambda x, axis: jnp.take(x, order, axis), np.atleast_1d(axis), x)
        for x, axis in zip(xs, axes)
    ]
    found = ours(Ring(BLOCKS, axis_name="sp", mesh=MESH, layout=Zigzag()), *moved)
    return jax.tree.map(lambda x: x[:, :, restored], found)


def at_positions(query, key, bias, rows, columns):
    """Of keys that lie in any order."""
    order = np.random.default_rng(1).permutation(T).astype(np.int32)
    moved = query, key[:, order], bias[:, :, order], rows, columns[:, order]
    return ours(Blockwise(BLOCKS), *moved, kv_positions=order)


STRATEGIES = {
    "blockwise, in any order": at_positions,
    "blockwise": ft.partial(ours, Blockwise(BLOCKS)),
    "ragged": ft.partial(ours, Ragged(BLOCKS)),
    "ring": zigzag,
    "ulysses": ft.partial(ours, Ulysses(BLOCKS, axis_name="sp", mesh=MESH)),
    "dense": ft.partial(ours, Dense(BLOCKS)),
    "vmap": lambda *xs: jax.vmap(
        lambda q, k, bias, rows, columns: ours(Blockwise(BLOCKS), q, k, bias, rows, columns),
        (0, 0, None, 0, 0),
    )(*xs),
}


@pytest.mark.parametrize("name", ["blockwise, in any order"])
def test_it_lists_what_sorting_lists(name, x64):
    more = name == "blockwise, in any order"
    assert_equal(results(STRATEGIES[name], more), results(plain, more))


def ties(query, key, n, strategy=None, **options):
    return top_keys(query[:, :, None], key[:, :, None], n, strategy, **options)


def sorted_ties(query, key, n, positions=None, seen=True):
    logits = np.einsum("btd,bsd->bts", query, key) * key.shape[-1] ** -0.5
    logits = np.where(seen, logits, -np.inf)
    positions = np.arange(key.shape[1]) if positions is None else positions
    order = np.lexsort(np.broadcast_arrays(positions, -logits), axis=-1)[..., :n]
    return np.take_along_axis(logits, order, -1)[:, None], positions[order][:, None]


def test_of_equal_logits_the_lower_position_comes_first():
    """In any order of the blocks and of the keys, in a ring by hand, and from lists that merge."""
    query, key = (RNG.integers(-1, 2, (B, T, 4)).astype(np.float32) for _ in "qk")
    metadata = AttentionMetadata(blocksize_q=4, blocksize_k=4)
    want = sorted_ties(query, key, 7)
    positions = RNG.permutation(T).astype(np.int32) + 3
    ring = Ring(metadata, axis_name="sp", layout=Contiguous())
    spec = P(None, "sp")

    @jax.jit
    def run(query, key):
        halves = [
            ties(query, key[:, at], 7, kv_positions=np.arange(T, dtype=np.int32)[at])
            for at in (slice(9, T), slice(0, 9))
        ]
        by_hand = jax.shard_map(
            lambda q, k: ties(q, k, 7, ring),
            mesh=MESH,
            in_specs=(spec, spec),
            out_specs=P(None, None, "sp"),
        )
        moved = ties(query, key, 7, Blockwise(metadata), kv_positions=positions)
        causal = ties(query, key, 7, Blockwise(metadata), mask=Causal(4))
        given = jnp.asarray(one), jnp.asarray(two_equal)
        few = ties(*given, 3, Blockwise(metadata), kv_positions=backwards)
        return by_hand(query, key), halves[0].merge(halves[1]), moved, causal, few

    # Two equal ones in a list, and none like its last one outside of it.
    one, backwards = np.ones((B, T, 1), np.float32), np.arange(T, dtype=np.int32)[::-1].copy()
    two_equal = np.arange(T, dtype=np.float32)
    two_equal[[3, 10]] = T
    two_equal = np.broadcast_to(two_equal[:, None], (B, T, 1))
    by_hand, merged, moved, causal, few = run(query, key)
    np.testing.assert_array_equal(few.indices, sorted_ties(one, two_equal, 3, backwards)[1])
    for found in (by_hand, merged):
        np.testing.assert_array_equal(found.indices, want[1])
        np.testing.assert_array_equal(found.values, want[0])
    np.testing.assert_array_equal(moved.indices, sorted_ties(query, key, 7, positions)[1])
    # Blocks that the mask leaves whole, and others, in any order of visits.
    values, indices = sorted_ties(query, key, 7, seen=np.tri(T, T, 4, bool))
    np.testing.assert_array_equal(causal.values, values)
    np.testing.assert_array_equal(causal.indices, np.where(values == -np.inf, -1, indices))


FOREST = Tree([-1, 0, 0, 1, 2, 3, -1, 6, 6, 7], 6)  # of the last ten of 16 tokens


@pytest.mark.parametrize("kind", [Blockwise])
def test_keys_of_a_tree_are_listed_by_their_places(kind):
    """Where the tokens of several branches have one depth, which is what windows and scores see.
    Some values are equal, and some of those at the end of a list.
    """
    mask = FOREST & SlidingWindow(3, 0)
    query, key = (RNG.integers(-1, 2, (B, T, 1, D)).astype(np.float32) for _ in "qk")
    more = dict(mesh=MESH, axis_name="sp") if kind is Ring else {}
    strategy = kind(AttentionMetadata(blocksize_q=4, blocksize_k=4), **more)
    seen = np.asarray(mask.as_array(T, T))
    run = jax.jit(lambda q, k: top_keys(q, k, N, strategy, mask=mask))
    values, indices = sorted_ties(query[:, :, 0], key[:, :, 0], N, seen=seen)
    found = run(query, key)
    np.testing.assert_array_equal(found.values, values)
    np.testing.assert_array_equal(found.indices, np.where(values == -np.inf, -1, indices))


def test_it_chooses_keys_of_pages_for_attention():
    """A step of decoding: keys in pages are ranked, and attention reads those."""
    cache = PagedKVCache.empty(B, 16, 8, 4, 1, 4, 4, jnp.float32)
    query, key, value = (jnp.asarray(RNG.normal(size=(B, 13, 1, 4)), jnp.float32) for _ in "qkv")
    cache = cache.reserve(jnp.full(B, 13)).append(key, value)

    @jax.jit
    def run(query, cache):
        found = top_keys(query, cache.key, 6, Ragged(), mask=cache.mask(), q_offset=12)
        listed = Selected(found.indices) & cache.mask()
        out = attention(query, cache.key, cache.value, Ragged(), mask=listed, q_offset=12)
        return found, out.attention_outputs

    found, out = run(query[:, :1], cache)
    want = sorted_ties(*(np.asarray(x)[:, :, 0] for x in (query[:, :1], key)), 6)[1]
    np.testing.assert_array_equal(found.indices, want)
    logits = np.einsum("bthd,bshd->bhts", query[:, :1], key) / 2
    seen = (np.arange(13) == want[..., None]).any(-2)
    weights = jax.nn.softmax(np.where(seen, logits, -np.inf), -1)
    np.testing.assert_allclose(out, np.einsum("bhts,bshv->bthv", weights, value), rtol=0, atol=1e-6)


def test_nothing_to_list_and_memory():
    """A query that sees no key lists none. Memory does not grow as queries times keys."""
    lengths = jnp.array([0, 2])
    x = jnp.ones((2, 6, 1, 4))
    found = top_keys(x, x, 3, mask=KeyPadding(lengths))
    np.testing.assert_array_equal(found.indices[0], -1)
    np.testing.assert_array_equal(found.indices[1], [[[0, 1, -1]] * 6])
    t, n = 8192, 16
    x = jax.ShapeDtypeStruct((1, t, 1, 16), jnp.float32)
    program = (
        jax.jit(lambda q, k: top_keys(q, k, n, mask=Causal())).lower(x, x).compile(DEFAULT_CODE)
    )
    assert program.memory_analysis().temp_size_in_bytes < 4 * 8 * t * n + 2**22


Q = jnp.ones((6, 1, 2))


@pytest.mark.parametrize("strategy", [Ragged()], ids=["ragged"])
def test_keys_that_are_stored_as_bits(strategy):
    q, k = Q[None].astype(jnp.bfloat16), Q[None].astype(jnp.bfloat16)
    cache = KVCache.empty(1, 8, 1, 2, dtype="bfloat16", bits=True).append(k, k)
    found = top_keys(q, cache.key, 3, strategy, mask=cache.mask())
    np.testing.assert_array_equal(found.indices, top_keys(q, k, 3).indices)


BAD = {
    "too many": (lambda: top_keys(Q, Q, 7), r"n=7 is larger than the 6 keys of key_ \(6, 1, 2\)"),
    "none": (lambda: top_keys(Q, Q, 0), "n must be at least 1"),
    "a list": (lambda: top_keys(Q, Q, 2, mask=Causal() & Selected(np.zeros((1, 6, 1), int))), "under a Selected; take DenseMask"),
    "pages": (lambda: top_keys(Q[None], PagedKVCache.empty(1, 4, 2, 2, 1, 2, 2, jnp.float32).key, 1), "does not read; use Ragged"),
    "sharded": (lambda: top_keys(Q, Q, 2, Ragged(AttentionMetadata(mesh=MESH), axis_name="sp")), "axis_name='sp' of Ragged"),
    "a kernel": (lambda: top_keys(Q, Q, 2, Blockwise(AttentionMetadata(platform="interpret"))), r"no kernel of Blockwise for this call .*\(top_keys\)"),
    "kernels of this device": (lambda: top_keys(Q, Q, 2, Blockwise(AttentionMetadata(platform="pallas", backend="cpu"))), "no Pallas kernel for blockwise on cpu"),
    "a kernel of Dense": (lambda: top_keys(Q, Q, 2, Dense(AttentionMetadata(platform="tpu"))), "no Pallas kernel for dense on tpu"),
    "no list": (lambda: top_keys(Q, Q, 2).merge(3), "TopKeys merges with TopKeys, got int"),
    "other queries": (lambda: top_keys(Q, Q, 2).merge(top_keys(Q[:3], Q, 2)), r"\(1, 6, 2\) and \(1, 3, 2\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    call, message = BAD[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()
