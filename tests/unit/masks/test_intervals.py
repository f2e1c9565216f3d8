"""Block classes follow from the mask function: always sound, exact for the masks in use."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _mask_fuzz import block_classes, check_sound, masks
from hypothesis import given, HealthCheck, settings, strategies as st
from jax import lax

from eqattn.masks._base import AbstractMask, Dense
from eqattn.masks._causal import BlockCausal, Causal, ChunkedCausal, PrefixLM, SlidingWindow
from eqattn.masks._function import MaskFn
from eqattn.masks._intervals.classify import _same, classify
from eqattn.masks._segments import KeyPadding, QueryPadding, Segments
from eqattn.masks._tree import Tree


T, S, B, H, K = 37, 41, 2, 4, 2
IDS = np.stack([np.repeat([0, 1, 2, 5, -1], [3, 17, 1, 12, 8]), np.repeat([3, 4, 9], [20, 1, 20])])
LENGTHS = np.array([13, 40], np.int32)
WINDOWS = np.array([1, 30, 4, 9], np.int32)
DENSE = np.random.default_rng(0).integers(0, 9, (B, 1, T, S)) > 0
DOCUMENTS = np.sort(np.random.default_rng(1).integers(0, 5, (B, 64)), -1).astype(np.int32)
SEGMENTS = Segments(IDS[:, :T], IDS)

EXACT = {
    "causal": Causal(),
    "causal offset": Causal(4),
    "causal negative offset": Causal(-6),
    "causal offset per element": Causal(np.array([3, -2])),
    "window": SlidingWindow(7, 7),
    "window left": SlidingWindow(9, 0),
    "window asymmetric": SlidingWindow(2, 11),
    "window unbounded": SlidingWindow(None, 3),
    "window causal": SlidingWindow(5, None) & Causal(),
    "sinks": SlidingWindow(6, 2, sinks=5),
    "sinks causal": SlidingWindow(6, 2, sinks=5) & Causal(),
    "sinks wide": SlidingWindow(30, 30, sinks=3),
    "segments": SEGMENTS,
    "segments causal": SEGMENTS & Causal(),
    "not segments": ~SEGMENTS,
    "key lengths": KeyPadding(LENGTHS, np.array([2, 0])),
    "key lengths causal": KeyPadding(LENGTHS) & Causal(),
    "query lengths": QueryPadding(LENGTHS),
    "prefix": PrefixLM(9),
    "prefix per element": PrefixLM(LENGTHS),
    "block causal": BlockCausal(8),
    "block causal odd": BlockCausal(6),
    "chunked causal": ChunkedCausal(8),
    "chunked causal odd": ChunkedCausal(7),
    "dilated": MaskFn(lambda b, h, q, k: (q - k) % 4 == 0) & Causal(),
    "dilated by bits": MaskFn(lambda b, h, q, k: (q - k) & 3 == 0) & Causal(),
    "not causal": ~Causal(),
    "where": MaskFn(lambda b, h, q, k: jnp.where(q < 10, k <= q, q - k < 5)),
    "abs": MaskFn(lambda b, h, q, k: jnp.abs(q - k) < 6),
    "closed-over lengths": MaskFn(lambda b, h, q, k: k < jnp.asarray(LENGTHS)[b]),
    "taken lengths": MaskFn(lambda b, h, q, k: k < jnp.take(jnp.asarray(LENGTHS), b)),
    "window per head": MaskFn(lambda b, h, q, k: (q - k < 2**h) & (k <= q)),
    "window per head looked up": MaskFn(
        lambda b, h, q, k: jnp.abs(q - k) < jnp.asarray(WINDOWS)[h]
    ),
    "only some heads": MaskFn(lambda b, h, q, k: (h % 2 == 0) | (q >= k)),
    "documents looked up": MaskFn(
        lambda b, h, q, k: jnp.asarray(DOCUMENTS)[b, q] == jnp.asarray(DOCUMENTS)[b, k]
    ),
    "dense": Dense(DENSE),
    "dense looked up": MaskFn(lambda b, h, q, k: jnp.asarray(DENSE)[b, 0, q, k]),
    "floats": MaskFn(lambda b, h, q, k: q.astype(jnp.float32) >= k.astype(jnp.float32)),
    "float ids": MaskFn(
        lambda b, h, q, k, x, y: x > y,
        (np.linspace(0, 3, T, dtype=np.float32),),
        (np.linspace(-1, 9, S, dtype=np.float32),),
    ),
    "isin": MaskFn(lambda b, h, q, k: jnp.isin(k, jnp.array([3, 4, 22]))),
    "casts": MaskFn(lambda b, h, q, k: (k <= q).astype(jnp.uint8) > 0),
    "compared with itself": MaskFn(lambda b, h, q, k: (q <= q) & ~(k != k) & (k <= q)),
    "nothing": MaskFn(lambda b, h, q, k: q < 0),
    "everything": SlidingWindow(None, None),
    "tree": Tree([-1, 0, 0], start=30),
}


def brute(mask, t=T, s=S, **where):
    # Positions are traced: those that are known must be within 2**30.
    whole = jax.jit(lambda where: mask.as_array(t, s, batch_shape=(B,), heads=H, **where))
    return np.asarray(whole(where))


def table_of(mask, block_q, block_k, t=T, s=S, q=None, k=None):
    return classify(
        mask,
        batch_shape=(B,),
        heads=H,
        kv_heads=K,
        q_positions=np.arange(t, dtype=np.int32)[None] if q is None else q,
        kv_positions=np.arange(s, dtype=np.int32)[None] if k is None else k,
        block_q=block_q,
        block_k=block_k,
    )


@pytest.mark.parametrize("name", EXACT)
def test_exact(name):
    mask = EXACT[name]
    array = brute(mask)
    for blocks in ((8, 8), (5, 16), (16, 7), (1, 1), (64, 64)):
        got = table_of(mask, *blocks)
        assert isinstance(got, np.ndarray) and got.dtype == np.int8
        want = block_classes(array, H, K, *blocks)
        np.testing.assert_array_equal(np.broadcast_to(got, want.shape), want, str(blocks))


def test_exact_when_traced():
    """Operands and positions of one program that are traced give the table of known ones."""
    names = ["segments causal", "key lengths", "causal offset per element", "tree", "dense"]
    trees = {n: EXACT[n] for n in names}
    arrays, static = {}, {}
    for n, mask in trees.items():
        leaves, static[n] = jax.tree.flatten(mask)
        arrays[n] = leaves

    @jax.jit
    def tables(arrays, lengths, windows, documents):
        out = {n: table_of(jax.tree.unflatten(static[n], arrays[n]), 8, 16) for n in names}
        closures = {
            "closed-over lengths": lambda b, h, q, k: k < lengths[b],
            "window per head looked up": lambda b, h, q, k: jnp.abs(q - k) < windows[h],
            "documents looked up": lambda b, h, q, k: documents[b, q] == documents[b, k],
        }
        q, k = jnp.arange(T)[None], jnp.arange(S)[None]
        out |= {n: table_of(MaskFn(fn), 8, 16) for n, fn in closures.items()}
        plain = ("sinks causal", "chunked causal odd", "dilated", "where", "window per head")
        return out | {n: table_of(EXACT[n], 8, 16, q=q, k=k) for n in plain}

    for name, got in tables(arrays, LENGTHS, WINDOWS, DOCUMENTS).items():
        want = block_classes(brute(EXACT[name]), H, K, 8, 16)
        np.testing.assert_array_equal(np.broadcast_to(got, want.shape), want, name)


def test_shifted_positions():
    q = np.arange(T, dtype=np.int32)[None] + np.array([[3], [11]], np.int32)
    for name in ("causal", "window asymmetric", "sinks causal", "chunked causal", "dilated"):
        want = block_classes(brute(EXACT[name], q_positions=q), H, K, 8, 8)
        np.testing.assert_array_equal(
            np.broadcast_to(table_of(EXACT[name], 8, 8, q=q), want.shape), want, name
        )


def test_axes_of_size_one_when_independent():
    assert table_of(Causal(), 8, 8).shape == (1, 1, 5, 6)
    assert table_of(EXACT["key lengths"], 8, 8).shape == (B, 1, 5, 6)
    assert table_of(EXACT["window per head"], 8, 8).shape == (1, K, 5, 6)
    assert table_of(EXACT["dense"], 8, 8).shape == (B, 1, 5, 6)
    assert table_of(Causal(), 8, 8, s=0).shape == (1, 1, 5, 0)
    assert table_of(Causal(), 8, 8, t=0).shape == (1, 1, 0, 6)


def test_known_arrays_are_classified_at_trace_time():
    """Under jit too, as long as nothing involved is a tracer."""
    mask = Segments(jnp.asarray(IDS[:, :T]), jnp.asarray(IDS)) & Causal(jnp.asarray([1, 2]))
    kinds = []
    jax.jit(lambda: kinds.append(table_of(mask, 8, 8)))()
    jax.jit(lambda q: kinds.append(table_of(mask, 8, 8, q=q)))(jnp.arange(T)[None])
    jax.jit(lambda q: kinds.append(table_of(SlidingWindow(None, None), 8, 8, q=q)))(
        jnp.arange(T)[None]
    )
    assert isinstance(kinds[0], np.ndarray)
    assert all(isinstance(x, jax.Array) for x in kinds[1:])


def test_vmap():
    lengths = np.array([[3, 30], [20, 41]], np.int32)
    ids = jnp.asarray(IDS)

    def table(n, ids):
        return table_of(KeyPadding(n) & Segments(ids[:T], ids), 8, 8)

    want = np.stack([table(*x) for x in zip(lengths, ids)])
    np.testing.assert_array_equal(jax.vmap(table)(lengths, ids), want)


def test_inside_shard_map():
    """Values that vary over a mesh axis have bounds like any other."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    across = jax.sharding.PartitionSpec("x")
    ids = np.repeat([0, 1, 2, -1], [5, 9, 16, 7]).astype(np.int32)

    def table(ids, q):
        chunks = MaskFn(lambda b, h, q, k: (q + ids[0]) // 4 == k // 4)
        documents = MaskFn(lambda b, h, q, k: ids[q] == ids[k])
        mask = (Segments(ids) & Causal()) | chunks & documents
        return table_of(mask, 8, 8, s=T, q=q[None])

    q = np.arange(T, dtype=np.int32)
    mapped = jax.shard_map(table, mesh=mesh, in_specs=(across, across), out_specs=across)
    got = jax.jit(mapped)(ids, q)
    np.testing.assert_array_equal(got, table(jnp.asarray(ids), q))


def test_extreme_positions_are_unknown_not_wrong():
    """`q + 1` wraps: no bound of it may be used."""
    top = np.iinfo(np.int32).max
    q = np.array([[top - 2, top - 1, top, top]], np.int32)
    mask = MaskFn(lambda b, h, q, k: k < q + 1)
    got = table_of(mask, 2, 4, t=4, s=4, q=q)
    want = block_classes(brute(mask, 4, 4, q_positions=q), H, K, 2, 4)
    np.testing.assert_array_equal(got[..., 0], [[[2, 1]]])
    assert (want == np.array([2, 0], np.int8)[:, None]).all()


@pytest.mark.parametrize(
    "fn",
    [
        lambda b, h, q, k: jnp.sin(q.astype(jnp.float32)) > 0,
        lambda b, h, q, k: lax.fori_loop(0, 3, lambda i, x: x + i, q) > k,
        lambda b, h, q, k: jnp.sort(jnp.array([q, k]))[0] > 4,
        lambda b, h, q, k: jax.random.bits(jax.random.fold_in(jax.random.key(0), q)) > 9,
        lambda b, h, q, k: (q + 1j).real > 2,
        lambda b, h, q, k: q.astype(jnp.int4) > 2,
        lambda b, h, q, k: jnp.linalg.norm(jnp.array([1.0, 2.0]) * q.astype(jnp.float32)) > 2,
        lambda b, h, q, k: jnp.zeros((0,)).sum() == 0,
        lambda b, h, q, k: jnp.searchsorted(jnp.array([3, 9]), q) == 0,
        # A jitted function that closes over an array.
        lambda b, h, q, k: jax.jit(lambda h: jnp.asarray(WINDOWS)[h])(h) > q - k,
    ],
)
def test_functions_without_rules_are_partial_or_right(fn):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        mask = MaskFn(fn)
        want = block_classes(brute(mask), H, K, 8, 8)
        got = np.broadcast_to(table_of(mask, 8, 8), want.shape)
    assert ((got == 1) | (got == want)).all()


@pytest.mark.parametrize("n", [0, -1, -3, np.iinfo(np.int32).min])
def test_divisors_without_a_rule_are_unknown(n):
    for divide in (lax.div, lax.rem, jnp.floor_divide, jnp.remainder):
        mask = MaskFn(lambda b, h, q, k: divide(k, jnp.int32(n)) == 1)
        assert (table_of(mask, 8, 8) == 1).all()


def test_a_namesake_of_floor_divide_is_not_taken_for_it():
    def floor_divide(x, n):
        return x - n

    fn = jax.jit(floor_divide)
    mask = MaskFn(lambda b, h, q, k: fn(q, jnp.int32(4)) >= fn(k, jnp.int32(4)))
    want = block_classes(brute(Causal()), H, K, 8, 8)
    np.testing.assert_array_equal(np.broadcast_to(table_of(mask, 8, 8), want.shape), want)


def test_numbers_that_may_not_be_finite():
    """A number that is none compares with nothing, and says nothing about the rest of its block."""
    x = np.linspace(0, 3, T, dtype=np.float32)
    x[[3, 20]], y = np.nan, np.linspace(-1, 3, S, dtype=np.float32)
    for fn in (lambda b, h, q, k, x, y: x > y, lambda b, h, q, k, x, y: ~(x <= y)):
        mask = MaskFn(fn, (x,), (y,))
        want = block_classes(brute(mask), H, K, 8, 8)
        traced = jax.jit(lambda x, y, fn=fn: table_of(MaskFn(fn, (x,), (y,)), 8, 8))(x, y)
        for table in (table_of(mask, 8, 8), traced):
            got = np.broadcast_to(table, want.shape)
            assert ((got == 1) | (got == want)).all() and (got != 1).any()


def _of(fn):
    return jax.make_jaxpr(fn)(*[jax.ShapeDtypeStruct((), jnp.int32)] * 2)


SAME = {
    "names": lambda a, b: lax.sub(lax.add(a, b), np.int32(3)),
    "a call": lambda a, b: jax.jit(lambda c: lax.sub(c, np.int32(3)))(lax.add(a, b)),
}
OTHER = {
    "a number": lambda a, b: lax.sub(lax.add(a, b), np.int32(4)),
    "a variable in place of a number": lambda a, b: lax.sub(lax.add(a, b), b),
    "the order of arguments": lambda a, b: lax.sub(lax.add(b, a), np.int32(3)),
    "an operation": lambda a, b: lax.sub(lax.max(a, b), np.int32(3)),
    "the result": lambda a, b: (lax.sub(c := lax.add(a, b), np.int32(3)), c)[1],
    "more": lambda a, b: lax.neg(lax.sub(lax.add(a, b), np.int32(3))),
    "less": lambda a, b: lax.add(a, b),
}


def test_which_functions_are_the_same():
    """Up to the names of variables, in all that there is to be told apart."""
    for name, fn in SAME.items():
        assert _same(_of(fn), _of(lambda *xs, fn=fn: fn(*xs))), name
    plain = _of(SAME["names"])
    for name, fn in OTHER.items():
        assert not _same(plain, _of(fn)) and not _same(_of(fn), plain), name
    inner = lambda n: lambda a, b: jax.jit(lambda c: lax.sub(c, np.int32(n)))(lax.add(a, b))
    assert not _same(_of(inner(3)), _of(inner(4)))
    # Of one operation, what it is told beside its operands.
    sums = [
        jax.make_jaxpr(lambda x, axis=axis: lax.reduce_sum(x, [axis]))(jnp.zeros((2, 2)))
        for axis in (0, 0, 1)
    ]
    assert _same(*sums[:2]) and not _same(*sums[1:])


def test_errors():
    with pytest.raises(TypeError, match="one bool scalar per pair"):
        table_of(MaskFn(lambda b, h, q, k: q - k), 8, 8)
    with pytest.raises(TypeError, match="one bool scalar per pair"):
        table_of(MaskFn(lambda b, h, q, k: jnp.array([q > k])), 8, 8)
    with pytest.raises(ValueError, match=r"\(3, 37\).*\(2, 4, 37, 41\)"):
        table_of(Segments(np.zeros((3, T), np.int32), np.zeros(S, np.int32)), 8, 8)
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        classify(
            Causal(),
            batch_shape=(),
            heads=3,
            kv_heads=2,
            q_positions=np.zeros((1, 1), np.int32),
            kv_positions=np.zeros((1, 1), np.int32),
            block_q=1,
            block_k=1,
        )
    with pytest.raises(ValueError, match="block sizes must be positive"):
        table_of(Causal(), 0, 8)


N = 131_072
LONG: dict[str, AbstractMask] = {
    "causal": Causal(),
    "sinks": SlidingWindow(4096, 0, sinks=4) & Causal(),
    "segments": Segments(np.zeros(N, np.int32)) & Causal(),
    "lengths": KeyPadding(np.array(N)) & Causal(),
    "chunked": ChunkedCausal(1000),
    "dilated": MaskFn(lambda b, h, q, k: (q - k) % 4 == 0),
}


@pytest.mark.parametrize("name", [*LONG, "documents"])
def test_memory_at_131072_positions(name):
    """The table and all that it takes stay below 1 MiB, with everything traced. What a mask computes
    for the visit of pairs comes on top, where the compiler does not compute it twice: ids without
    their padding.
    """

    def table(mask, q, k, documents):
        if name == "documents":
            mask = MaskFn(lambda b, h, q, k: documents[q] == documents[k])
        sizes: dict[str, Any] = dict(batch_shape=(), heads=1, kv_heads=1, block_q=512, block_k=512)
        return classify(mask, q_positions=q, kv_positions=k, **sizes)

    mask = LONG.get(name, Causal())
    at = jax.ShapeDtypeStruct((1, N), jnp.int32)
    documents = jax.ShapeDtypeStruct((N,), jnp.int32)
    compiled = jax.jit(table).lower(mask, at, at, documents).compile()
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes == (N // 512) ** 2
    ids = 4 * 4 * N if name == "segments" else 0
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes <= 2**20 + ids


def fuzz(examples, wide=False):
    return lambda test: settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )(given(masks(wide), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))(test))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@fuzz(10)
def test_sound_for_random_functions(case, block_q, block_k, traced):
    check_sound(case, block_q, block_k, traced == 0)


def test_indices_of_a_devices_own_batch_elements_and_heads():
    """`b` and `h` are what `indices` says, not `0, 1, ...`"""
    mask = MaskFn(lambda b, h, q, k: (k < 8 * b) & (q < 8 * h))
    sizes: dict[str, Any] = dict(block_q=8, block_k=8, batch_shape=(2,), heads=2, kv_heads=2)
    at = np.arange(24, dtype=np.int32)[None]
    b, h = np.array([3, 1], np.int32), np.array([2, 0], np.int32)
    got = classify(mask, q_positions=at, kv_positions=at, indices=(b, h), **sizes)
    want = (at[0, ::8] < 8 * b[:, None])[:, None, None] & (at[0, ::8] < 8 * h[:, None])[
        None, :, :, None
    ]
    np.testing.assert_array_equal(got, 2 * want)
    traced = jax.jit(
        lambda b, h: classify(mask, q_positions=at, kv_positions=at, indices=(b, h), **sizes)
    )
    np.testing.assert_array_equal(traced(b, h), 2 * want)
    one = classify(mask, q_positions=at, kv_positions=at, indices=(b, None), **sizes)
    np.testing.assert_array_equal(one[:, 0], 0 * want[:, 0])
    np.testing.assert_array_equal(one[:, 1, 0], 2 * (at[0, ::8] < 8 * b[:, None]))


def test_blocks_of_grouped_heads_are_full_only_where_all_are():
    mask = MaskFn(lambda b, h, q, k: (h % 2 == 0) | (q >= k))
    at = np.arange(16, dtype=np.int32)[None]
    sizes: dict[str, Any] = dict(block_q=8, block_k=8, batch_shape=(), heads=2)
    together = classify(mask, q_positions=at, kv_positions=at, kv_heads=1, **sizes)
    np.testing.assert_array_equal(together[0, 0], [[1, 1], [2, 1]])
    apart = classify(mask, q_positions=at, kv_positions=at, kv_heads=2, **sizes)
    np.testing.assert_array_equal(apart[0], [[[2, 2], [2, 2]], [[1, 0], [2, 1]]])
