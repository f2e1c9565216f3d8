"""Every mask against its definition, and the algebra."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqattn import attention, Blockwise, Ragged
from eqattn.masks._base import And, Dense, live_blocks, Not, Or
from eqattn.masks._causal import BlockCausal, Causal, ChunkedCausal, PrefixLM, SlidingWindow
from eqattn.masks._function import MaskFn
from eqattn.masks._segments import KeyPadding, QueryPadding, Segments
from eqattn.masks._tree import Tree


T, S = 9, 11
Q, K = np.arange(T)[:, None], np.arange(S)[None, :]
IDS = np.array([[0, 0, 1, 1, 1, 2, -1, -1, 7, 7, 7], [-5, 3, 3, 3, 4, 4, 4, 4, 4, 4, -1]])
LENGTHS = np.array([4, 11])
DENSE = np.random.default_rng(0).random((2, 1, T, S)) > 0.5


def same_segment(q, k):
    return (q[..., :, None] == k[..., None, :]) & (q >= 0)[..., :, None]


def batch(x):
    return x[:, None, None, None]


DEFINITIONS = {
    "causal": (Causal(), K <= Q),
    "causal offset": (Causal(3), K <= Q + 3),
    "causal negative offset": (Causal(-2), K <= Q - 2),
    "causal array offset": (Causal(np.array(3)), K <= Q + 3),
    "causal offset per element": (Causal(np.array([1, -4])), K <= Q + batch(np.array([1, -4]))),
    "window": (SlidingWindow(3, 2), (Q - K <= 3) & (Q - K >= -2)),
    "window left": (SlidingWindow(3, None), Q - K <= 3),
    "window right": (SlidingWindow(None, 0), Q - K >= 0),
    "window unbounded": (SlidingWindow(None, None), np.ones((T, S), bool)),
    "window sinks": (SlidingWindow(1, 1, sinks=2), (abs(Q - K) <= 1) | (K < 2)),
    "window sinks causal": (
        SlidingWindow(1, 1, sinks=4) & Causal(),
        ((abs(Q - K) <= 1) | (K < 4)) & (K <= Q),
    ),
    "segments": (Segments(IDS[:, :T], IDS), same_segment(IDS[:, :T], IDS)[:, None]),
    "segments shared": (Segments(IDS[0, :T], IDS[1]), same_segment(IDS[0, :T], IDS[1])),
    "segments int8": (
        Segments(IDS[0, :T].astype(np.int8), IDS[1]),
        same_segment(IDS[0, :T], IDS[1]),
    ),
    "segments unsigned": (
        Segments(abs(IDS[0, :T]).astype(np.uint8), abs(IDS[1]).astype(np.uint8)),
        same_segment(abs(IDS[0, :T]), abs(IDS[1])),
    ),
    "segments of the largest id": (
        Segments(np.array([2**31 - 1] * 4 + [-1] * 5), np.array([2**31 - 1] * 5 + [-(2**31)] * 6)),
        (Q < 4) & (K < 5),
    ),
    "key lengths": (KeyPadding(LENGTHS), batch(LENGTHS) > K),
    "key length": (KeyPadding(5, 2), (K >= 2) & (K < 5) & (Q == Q)),
    "key starts": (KeyPadding(9, np.array([0, 3])), (batch(np.array([0, 3])) <= K) & (K < 9)),
    "key lengths and starts": (
        KeyPadding(LENGTHS, np.array([1, 7])),
        (batch(np.array([1, 7])) <= K) & (K < batch(LENGTHS)),
    ),
    "query lengths": (QueryPadding(LENGTHS), batch(LENGTHS) > Q),
    "query length": (QueryPadding(3), (Q < 3) & (K == K)),
    "prefix": (PrefixLM(4), (K < 4) | (K <= Q)),
    "prefix per element": (PrefixLM(LENGTHS), (batch(LENGTHS) > K) | (K <= Q)),
    "block causal": (BlockCausal(4), K // 4 <= Q // 4),
    "block causal odd": (BlockCausal(3), K // 3 <= Q // 3),
    "chunked": (ChunkedCausal(4), (K // 4 == Q // 4) & (K <= Q)),
    "chunked odd": (ChunkedCausal(3), (K // 3 == Q // 3) & (K <= Q)),
    "dense": (Dense(DENSE), DENSE),
    "dense keys": (Dense(DENSE[0, 0, 0]), DENSE[0, 0, 0] & (Q == Q)),
    "dense scalar": (Dense(np.bool_(True)), np.ones((T, S), bool)),
    "function": (
        MaskFn(
            lambda b, h, q, k, x, y, z: (x < z) & y & (h + b > 0), (IDS[:, :T], Q[:, 0] > 3), (IDS,)
        ),
        (IDS[:, None, :T, None] < IDS[:, None, None, :])
        & (Q > 3)
        & (np.arange(2)[None, :, None, None] + batch(np.arange(2)) > 0),
    ),
    "closure": (MaskFn(lambda b, h, q, k: k < jnp.asarray(LENGTHS)[b]), batch(LENGTHS) > K),
    "not": (~Causal(), K > Q),
    "not segments": (~Segments(IDS[0, :T], IDS[1]), ~same_segment(IDS[0, :T], IDS[1])),
    "all of it": (
        (Causal() | Segments(IDS[:, :T], IDS)) & ~KeyPadding(LENGTHS) | DENSE,
        ((K <= Q) | same_segment(IDS[:, :T], IDS)[:, None]) & ~(batch(LENGTHS) > K) | DENSE,
    ),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_definition(name):
    mask, want = DEFINITIONS[name]
    got = mask.as_array(T, S, batch_shape=(2,), heads=2)
    assert got.shape == (2, 2, T, S) and got.dtype == bool
    np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))


def tree_by_definition(parents, start, q, k):
    n = len(parents)
    if not (start <= q < start + n and start <= k < start + n):
        return k <= q
    i = q - start
    while i >= 0:
        if i == k - start:
            return True
        i = parents[i]
    return False


FORESTS = [[-1, 0, 0, 1, 1, 2], [-1], [-1, -1, 0, 1], [0, 1, -1, 2, 2][::1], [3, 3, 0, -1, 2]]
FORESTS[3] = [2, 0, -1, 2, 1]


@pytest.mark.parametrize("parents", FORESTS)
@pytest.mark.parametrize("start", [0, 3])
def test_tree(parents, start):
    t, s = 10, 12
    want = [[tree_by_definition(parents, start, q, k) for k in range(s)] for q in range(t)]
    for p in (parents, jnp.array(parents)):
        np.testing.assert_array_equal(Tree(p, start).as_array(t, s)[0], want)
    traced = jax.jit(lambda p, n: Tree(p, n).as_array(t, s))(jnp.array(parents), start)
    np.testing.assert_array_equal(traced[0], want)


def test_tree_per_element():
    parents, start = np.array([[-1, 0, 1], [-1, 0, 0]]), np.array([4, 2])
    got = Tree(parents, start).as_array(8, 8, batch_shape=(2,))
    for i in range(2):
        np.testing.assert_array_equal(got[i], Tree(parents[i], int(start[i])).as_array(8, 8))


def test_batch_axes():
    lengths = np.arange(6).reshape(2, 3)
    got = KeyPadding(lengths).as_array(4, 5, batch_shape=(2, 3))
    np.testing.assert_array_equal(got[..., 0, 0, :], np.arange(5) < lengths[..., None])
    got = KeyPadding(np.array([1, 2, 3])).as_array(4, 5, batch_shape=(2, 3))
    np.testing.assert_array_equal(got[:, :, 0, 0].sum(-1), [[1, 2, 3]] * 2)
    assert Causal().as_array(0, 3, batch_shape=(2,)).shape == (2, 1, 0, 3)


def test_positions():
    q, k = np.array([[5, 6], [0, 9]]), np.array([4, 5, 6])
    got = Causal().as_array(2, 3, batch_shape=(2,), q_positions=q, kv_positions=k)
    np.testing.assert_array_equal(got[:, 0], k <= q[..., None])
    negative = KeyPadding(4).as_array(1, 3, kv_positions=np.array([-1, 0, 3]))
    np.testing.assert_array_equal(negative[0, 0], [False, True, True])
    floors = BlockCausal(4).as_array(
        1, 3, q_positions=np.array([-1]), kv_positions=np.array([-5, -1, 0])
    )
    np.testing.assert_array_equal(floors[0, 0], [True, True, False])


def test_algebra():
    a, b, c = Causal(1), SlidingWindow(2, 1), Segments(IDS[0, :T], IDS[0])

    def equal(x, y):
        np.testing.assert_array_equal(x.as_array(T, S), y.as_array(T, S))

    equal(a & b, b & a)
    equal((a & b) | c, (a | c) & (b | c))
    equal(~(a & c), ~a | ~c)
    equal(~(a | c), ~a & ~c)
    equal(~~c, c)
    equal(a & a, a)
    assert (a & b) & c == a & (b & c) and isinstance(a & b & c, And)
    assert len((a & b & c).terms) == 3 and len((a | b | c).terms) == 3
    assert isinstance(a | b, Or) and isinstance(~a, Not) and ~~a is a


def test_arrays_join_the_algebra():
    dense = np.random.default_rng(0).random((T, S)) > 0.5
    for x in (dense, jnp.asarray(dense)):
        masks: list[Any] = [Causal() & x, x & Causal()]
        for mask in masks:
            assert isinstance(mask, And)
            np.testing.assert_array_equal(mask.as_array(T, S)[0], dense & (K <= Q))
        masks = [Causal() | x, x | Causal()]
        for mask in masks:
            np.testing.assert_array_equal(mask.as_array(T, S)[0], dense | (K <= Q))


def test_sparsity():
    got = Causal().sparsity(64, 64, block_q=16, block_k=16)
    assert got == (6 / 16, 4 / 16, 6 / 16, pytest.approx(65 / 128))
    assert all(isinstance(x, float) for x in got)
    assert SlidingWindow(None, None).sparsity(2**20, 2**20, block_q=2**18).visible == 1.0
    assert Causal().sparsity(2**17, 2**17).visible is None
    got = KeyPadding(np.array([0, 8])).sparsity(8, 8, block_k=4, batch_shape=(2,))
    assert got == (0.5, 0.0, 0.5, 0.5)
    traced = jax.jit(lambda n: KeyPadding(n).sparsity(8, 8, block_k=4, batch_shape=(2,)))
    np.testing.assert_allclose(traced(jnp.array([0, 8])), (0.5, 0.0, 0.5, 0.5))
    assert Causal().sparsity(0, 5) == (0, 0, 0, 0)


def test_static_sizes_and_array_leaves():
    assert jax.tree.leaves(Causal(3) & SlidingWindow(1, 2) | BlockCausal(4) | PrefixLM(2)) == []
    assert len(jax.tree.leaves(Causal(np.array(3)))) == 1
    assert len(jax.tree.leaves(KeyPadding(LENGTHS, 2))) == 1
    for make in (
        lambda: Causal(3) & ~SlidingWindow(1, np.int64(2)),
        lambda: Segments(IDS) | KeyPadding(LENGTHS),
        lambda: Tree([-1, 0]) & Dense(DENSE),
        lambda: MaskFn(same_segment, (IDS,)),
    ):
        one, two = jax.tree.structure(make()), jax.tree.structure(make())
        assert one == two and hash(one) == hash(two)
    assert jax.tree.structure(Causal(3)) != jax.tree.structure(Causal(4))


def test_transformations_over_masks():
    traces = []

    def run(mask):
        traces.append(isinstance(getattr(mask, "offset", 0), int))
        return mask.as_array(T, S, batch_shape=(2,))

    for f in (jax.jit(run), eqx.filter_jit(run)):
        traces.clear()
        for offset in (2, 2, np.int32(2)):
            np.testing.assert_array_equal(f(Causal(offset))[0, 0], K <= Q + 2)
        assert traces == [True]
        for offset in (2, 3):
            f(Causal(jnp.asarray(offset)))
        assert traces == [True, False]
        for shift in (0, 1):
            f(Segments(IDS[:, :T] + shift, IDS))
        assert len(traces) == 3

    mask = Causal() & Segments(IDS[:, :T], IDS) & Tree(np.array([[-1, 0], [-1, -1]]))
    mapped = jax.vmap(lambda m: m.as_array(T, S))(mask)
    np.testing.assert_array_equal(mapped, mask.as_array(T, S, batch_shape=(2,)))
    _, scanned = lax.scan(lambda c, m: (c, m.as_array(T, S)), 0, jax.tree.map(jnp.asarray, mask))
    np.testing.assert_array_equal(scanned, mapped)


def test_a_module_as_function_is_a_node():
    class Below(eqx.Module):
        limit: jax.Array

        def __call__(self, b, h, q, k):
            return k < self.limit

    mask = MaskFn(Below(jnp.asarray(3)))
    assert len(jax.tree.leaves(mask)) == 1
    got = jax.jit(lambda m: m.as_array(2, 5))(mask)
    np.testing.assert_array_equal(got[0, 0], np.arange(5) < 3)
    partial = MaskFn(jax.tree_util.Partial(lambda n, b, h, q, k: k < n, jnp.asarray(3)))
    np.testing.assert_array_equal(jax.jit(lambda m: m.as_array(2, 5))(partial), got)
    q = jnp.ones((1, 5, 2, 4)) * jnp.arange(5.0)[None, :, None, None]
    for strategy in (Blockwise(), Ragged()):
        outs = [attention(q, q, q, strategy, mask=m).attention_outputs for m in (mask, partial)]
        np.testing.assert_array_equal(*outs)


def test_repr():
    lines = str(Causal()).splitlines()
    assert lines[0] == "Causal()" and len(lines) == 18
    assert lines[1] == "|\u2591\u2591" + " " * 30 + "|"
    assert lines[16] == "|" + "\u2588" * 30 + "\u2591\u2591|"
    first = {
        "Causal(offset=3) & ~SlidingWindow(left=4, right=None)": Causal(3)
        & ~SlidingWindow(4, None),
        "(Causal() & BlockCausal(size=4)) | KeyPadding(lengths=[4, 11], starts=2)": Causal()
        & BlockCausal(4)
        | KeyPadding(LENGTHS, 2),
        "~(Causal() | Causal(offset=1))": ~(Causal() | Causal(1)),
        "Segments(q_ids=int32[2,11])": Segments(IDS.astype(np.int32)),
        "Tree(parents=[-1, 0], start=3)": Tree([-1, 0], 3),
        "MaskFn(fn=same_segment, row_operands=(int32[2,11],))": MaskFn(
            same_segment, (IDS.astype(np.int32),)
        ),
    }
    for text, mask in first.items():
        assert repr(mask) == str(mask).splitlines()[0] == text
    # drawn at the arrays' own size
    assert len(str(Dense(DENSE[0, 0])).splitlines()) == 1 + T + 1
    assert len(str(Segments(IDS[0])).splitlines()) == 1 + S + 1
    assert "first batch element" in str(KeyPadding(LENGTHS))


def test_repr_never_raises():
    shown = []

    def f(ids, n):
        both = Segments(ids) & Causal(n) & MaskFn(lambda b, h, q, k: k < n) & Causal()
        shown.append(repr(both) + str(both))
        shown.append(repr(MaskFn(lambda b, h, q, k: k < n)))
        return ids

    jax.jit(f)(jnp.asarray(IDS), 3)
    jax.vmap(f)(jnp.asarray(IDS), jnp.array([1, 2]))
    jax.eval_shape(f, jnp.asarray(IDS), 3)
    assert all("\n" not in x and "Causal" in x or "MaskFn" in x for x in shown)
    clash = Segments(IDS[:, :3]) & Segments(IDS)
    strange = jax.tree.map(lambda x: object(), Segments(IDS) & Tree([-1]))
    for mask in (clash, strange, jax.tree.map(lambda x: None, strange)):
        assert repr(mask) and str(mask)
    for fn in (lambda: None, lambda b, h, q, k: q):
        assert repr(MaskFn(fn)) and str(MaskFn(fn))
    assert repr(jax.eval_shape(lambda: clash))


@pytest.mark.parametrize(
    "make, error, match",
    [
        (lambda: SlidingWindow(-1, 0), ValueError, "left must be at least 0, got -1"),
        (lambda: SlidingWindow(1, -2), ValueError, "right must be at least 0"),
        (lambda: SlidingWindow(1, 2, sinks=-1), ValueError, "sinks must be at least 0"),
        (
            lambda: SlidingWindow(jnp.asarray(1), 2),
            TypeError,
            "left of a SlidingWindow is a static int",
        ),
        (lambda: SlidingWindow(1.0, 2), TypeError, "left must be a Python int"),
        (lambda: BlockCausal(0), ValueError, "size must be at least 1"),
        (lambda: ChunkedCausal(0), ValueError, "size must be at least 1"),
        (lambda: Causal(1.5), TypeError, "offset must be an int"),
        (lambda: Causal(True), TypeError, "offset must be an int"),
        (lambda: Causal(2**31), ValueError, "offset must be within"),
        (lambda: Causal(np.array([1.0])), TypeError, "offset must be integers, got float"),
        (lambda: KeyPadding("3"), TypeError, "lengths must be an array"),
        (lambda: Segments(3), ValueError, "q_ids must have at least 1 axis"),
        (lambda: Segments(np.ones(3)), TypeError, "q_ids must be integers"),
        (lambda: Segments(IDS, IDS.astype(np.uint8)), TypeError, "both be signed or unsigned"),
        (lambda: Dense(np.ones((3, 3))), TypeError, "a mask array must be bool, got float"),
        (lambda: Causal() & np.ones((3, 3)), TypeError, "a mask array must be bool"),
        (lambda: Causal() & True, TypeError, "unsupported operand"),
        (lambda: Causal() | None, TypeError, "unsupported operand"),
        (lambda: Tree([1, 0]), ValueError, "no cycle"),
        (lambda: Tree([0]), ValueError, "no cycle"),
        (lambda: Tree([-1, 2]), ValueError, "index below 2"),
        (lambda: Tree(np.zeros(0, np.int32)), ValueError, "at least one token"),
        (lambda: MaskFn(3), TypeError, "fn must be callable"),
        (lambda: MaskFn(min, IDS), TypeError, "row_operands must be a tuple"),
        (lambda: Segments(IDS).as_array(3, 11), ValueError, r"\(2, 11\)"),
        (
            lambda: Segments(IDS).as_array(11, 11, batch_shape=(3,)),
            ValueError,
            r"give batch_shape=\(2,\)",
        ),
        (lambda: Causal().as_array(3, 4, q_positions=np.arange(5)), ValueError, "positions"),
    ],
)
def test_errors(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_x64():
    with jax.enable_x64(True):
        ids = np.array([2**40, 2**40, 2**40 + 2**32, -1])
        want = same_segment(ids, ids)
        for x in (ids, jnp.asarray(ids)):
            np.testing.assert_array_equal(Segments(x).as_array(4, 4)[0], want)
        mask = (
            Causal(np.array([1, 2]))
            & KeyPadding(jnp.array([3, 4]))
            & Tree([-1, 0])
            & ChunkedCausal(3)
        )
        assert mask.as_array(5, 5, batch_shape=(2,)).shape == (2, 1, 5, 5)
        assert mask.sparsity(5, 5, batch_shape=(2,), block_q=2, block_k=2).full >= 0


@pytest.mark.parametrize("shape", ["chain", "random", "star of chains"])
@pytest.mark.parametrize("n", [1, 9, 40])
def test_every_ancestor_of_a_tree_is_seen(n, shape):
    """However deep the tree is, known while tracing or not."""
    rng = np.random.default_rng(n)
    parents = np.arange(n) - 1
    if shape == "random":
        order = rng.permutation(n)  # a parent may come after its child
        parents = np.full(n, -1)
        parents[order[1:]] = [order[rng.integers(0, i)] for i in range(1, n)]
    elif shape == "star of chains":
        parents = np.where(np.arange(n) % 7 == 0, -1, parents)
    want = np.eye(n, dtype=bool)
    for i in range(n):
        at = parents[i]
        while at >= 0:
            want[i, at], at = True, parents[at]
    got = Tree(parents).as_array(n, n)[0]
    np.testing.assert_array_equal(got, want)
    traced = jax.jit(lambda p: Tree(p).as_array(n, n)[0])(jnp.asarray(parents))
    np.testing.assert_array_equal(traced, want)


LIVE = {
    "causal": Causal(),
    "window": SlidingWindow(3, 1),
    "and": Causal() & SlidingWindow(3, None),
    "or": SlidingWindow(2, 0) | SlidingWindow(None, -0) & KeyPadding(4),
    "or of apart": SlidingWindow(0, 0) | MaskFn(lambda b, h, q, k: k >= q + 8),
    "or in and": Causal() & (SlidingWindow(1, 0) | MaskFn(lambda b, h, q, k: k < 2)),
    "not": ~Causal(),
    "per head": MaskFn(lambda b, h, q, k: (h == 1) & (k == q)),
}


@pytest.mark.parametrize("name", LIVE)
def test_live_blocks(name):
    """What a ring may leave out: blocks of positions none of whose pairs is visible."""
    n, size = 6, 2
    ends = np.stack([np.arange(n) * size, np.arange(n) * size + size - 1], 1)
    got = live_blocks(LIVE[name], ends, ends, (2,), 2, 2)
    whole = np.asarray(LIVE[name].as_array(n * size, n * size, batch_shape=(2,), heads=2))
    want = whole.any((0, 1)).reshape(n, size, n, size).any((1, 3))
    np.testing.assert_array_equal(got, want)


def test_live_blocks_of_arrays_may_be_anything():
    ids = Segments(np.arange(12, dtype=np.int32)[None])
    ends = np.stack([np.arange(6) * 2, np.arange(6) * 2 + 1], 1)
    causal = live_blocks(Causal(), ends, ends, (1,), 1, 1)
    for mask, want in ((None, True), (ids, True), (ids & Causal(), causal), (ids | Causal(), True)):
        got = live_blocks(mask, ends, ends, (1,), 1, 1)
        np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))
