"""Kernels visit listed blocks of keys where they lie, each head its own, and skip the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from _turns import excesses, recorded
from matrix import bound, oracle, oracle_masks as om

from eqattn import (
    ALiBi,
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    KeyPadding,
    Segments,
    Selected,
    SlidingWindow,
)
from eqattn._problem import listed_blocks
from eqattn._sweep.grid import BATCH, HEAD
from eqattn._sweep.lowering import XLALowering
from eqattn.kernels._program import equations
from eqattn.kernels.gpu._lowering import NvidiaLowering
from eqattn.kernels.tpu import _lists, TPULowering


T, S, SIZE, D = 40, 56, 8, 16
LENGTHS = np.array([S, 30])
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625])
BACKENDS = ["tpu", "cuda", "triton"] if jax.__version_info__ >= (0, 12) else ["tpu", "triton"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Blocks as small as these are visited where they lie."""
    for lowering in (XLALowering, TPULowering, NvidiaLowering):
        monkeypatch.setattr(lowering, "least_listed", (SIZE, SIZE))


def listed(lead: int, lists: int) -> np.ndarray:
    """Lists of blocks. One row lists none, and another one the same block twice."""
    rng = np.random.default_rng(0)
    indices = rng.integers(0, S // SIZE, (lead, lists, T // SIZE, 3), np.int32)
    indices[0, 0, 2] = -1
    indices[-1, -1, 3, 1] = indices[-1, -1, 3, 0]
    return indices


def visible(indices: np.ndarray, heads: int) -> np.ndarray:
    seen = om.selected(T, S, indices, SIZE, SIZE)
    return np.repeat(seen, heads // seen.shape[1], 1)


def beside(mask, name):
    """What else hides pairs, or shows more of them, for eqattn."""
    return {
        "alone": mask,
        "causal": mask & Causal(),
        "lengths": mask & KeyPadding(jnp.asarray(LENGTHS)),
        "window": mask | SlidingWindow(2, 0),
    }[name]


def seen_beside(seen, name):
    """The same for the oracle."""
    return {
        "alone": seen,
        "causal": seen & om.causal(T, S),
        "lengths": seen & om.lengths(T, S, LENGTHS),
        "window": seen | om.window(T, S, 2, 0),
    }[name]


def drawn(heads, kv_heads):
    shapes = [(heads, D), (kv_heads, D), (kv_heads, 8), (heads, 8)]
    return [
        normal(i, 2, n, h, d)
        for i, (n, (h, d)) in enumerate(zip((T, S, S, T), shapes, strict=True))
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "lead, lists, kv_heads, name",
    [
        (2, 4, 4, "alone"),
        (2, 4, 4, "causal"),
        (1, 1, 4, "lengths"),
        (2, 2, 2, "causal"),
        (1, 2, 2, "window"),
    ],
)
def test_numbers(backend, lead, lists, kv_heads, name):
    """Outputs and all gradients, also where keys and values of other blocks are not finite."""
    dtype = jnp.float32 if backend == "tpu" else jnp.bfloat16
    q, k, v, ct = (x.astype(dtype) for x in drawn(4, kv_heads))
    indices = listed(lead, lists)
    seen = np.broadcast_to(seen_beside(visible(indices, 4), name), (2, 4, T, S))
    unseen = ~seen.reshape(2, kv_heads, -1, S).any(2).swapaxes(1, 2)[..., None]
    metadata = AttentionMetadata(runtime_dtype=dtype, platform="interpret", backend=backend)

    @jax.jit
    def run(indices, q, k, v):
        mask = beside(Selected(indices, SIZE, SIZE), name)
        score = ALiBi(jnp.asarray(SLOPES, jnp.float32))
        call = lambda *x: attention(*x, Blockwise(metadata), mask=mask, score=score)
        out, transpose = jax.vjp(lambda *x: call(*x).attention_outputs, q, k, v)
        return out, transpose(ct)

    dirty = [jnp.where(unseen, jnp.asarray(jnp.nan, dtype), x) for x in (k, v)]
    out, got = run(jnp.asarray(indices), q, *dirty)
    distance = np.abs(np.arange(T)[:, None] - np.arange(S))
    more = dict(slopes=SLOPES, distance=distance, mask=seen)
    given: list = [np.asarray(x).astype(np.float64) for x in (q, k, v)]
    problem = oracle.Problem(*given, scale=D**-0.5, **more)
    precision = bound.precision_of(dtype)
    wide = np.asarray(ct).astype(np.float64), np.zeros((2, T, 4))
    want = bound.values(problem, precision) | bound.grads(problem, *wide, precision)
    results = dict(zip(("out", *"qkv"), (out, *got), strict=True))
    worst = {name: bound.excess(np.asarray(x), want[name]) for name, x in results.items()}
    assert max(worst.values()) <= 1, worst


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_gathered(backend, monkeypatch):
    """Keys are gathered only where a list of pairs is too long for scalar memory, where a query has
    too few words for all blocks, or where blocks are small.
    """

    def gathers(heads, kv_heads, lists, block_q=SIZE):
        jax.clear_caches()  # what was traced with other limits is not traced again
        q, k, v, _ = (x.astype(jnp.bfloat16) for x in drawn(heads, kv_heads))
        metadata = AttentionMetadata(backend=backend, platform="interpret")
        indices = jnp.zeros((1, lists, T // block_q, 2), jnp.int32)

        def call(i, q, k, v):
            mask = Selected(i, block_q, SIZE)
            return attention(q, k, v, Blockwise(metadata), mask=mask).attention_outputs

        program = jax.make_jaxpr(call)(indices, q, k, v)
        return any(
            eqn.primitive.name == "gather" and eqn.outvars[0].aval.dtype == jnp.bfloat16
            for eqn in equations(program.jaxpr)
        )

    assert not gathers(4, 4, 4) and not gathers(4, 2, 2) and not gathers(4, 2, 1)
    assert not gathers(4, 2, 4) and not gathers(4, 4, 4, block_q=1)
    monkeypatch.setattr(listed_blocks, "_MOST_WORDS", 6.9 / 32)
    assert not gathers(4, 4, 4) and gathers(4, 2, 4) and gathers(4, 4, 4, block_q=1)
    # Two blocks for each of 5 rows, and one more for each of 7 columns.
    for lowering in (TPULowering, NvidiaLowering):
        monkeypatch.setattr(lowering, "most_pairs", 5 * 2 + 7)
    assert not gathers(4, 4, 4)
    for lowering in (TPULowering, NvidiaLowering):
        monkeypatch.setattr(lowering, "most_pairs", 5 * 2 + 6)
    assert gathers(4, 4, 4)
    monkeypatch.undo()
    assert gathers(4, 4, 4)  # blocks of 8 are small


def test_every_transform():
    """Forward mode has a kernel, and second order and others do not: they run as XLA, which knows
    the lists by their table alone.
    """
    q, k, v, ct = drawn(4, 4)
    directions = jnp.sin(q), jnp.cos(k), jnp.sin(v)
    indices = jnp.asarray(listed(2, 4))
    metadata = AttentionMetadata(runtime_dtype=jnp.float32, platform="interpret")

    def ours(q, k, v):
        mask = Selected(indices, SIZE, SIZE) & Causal()
        return attention(q, k, v, Blockwise(metadata), mask=mask).attention_outputs

    def gradient(q, k, v):
        return jax.vjp(ours, q, k, v)[1](ct)

    @jax.jit
    def everything(q, k, v, *moved):
        tangents = jax.jvp(ours, (q, k, v), moved)[1], *jax.jvp(gradient, (q, k, v), moved)[1]
        return *tangents, jax.vmap(ours, (0, None, None))(jnp.stack([q, 2 * q]), k, v)

    *tangents, both = everything(q, k, v, *directions)
    seen = visible(np.asarray(indices), 4) & om.causal(T, S)
    given: list = [np.float64(x) for x in (q, k, v)]
    problem = oracle.Problem(*given, scale=D**-0.5, mask=seen)
    precision = bound.precision_of(np.float32)
    moved = dict(zip("qkv", map(np.float64, directions), strict=True))
    want = bound.hvps(problem, np.float64(ct), np.zeros((2, T, 4)), moved, precision)
    want["out"] = bound.tangents(problem, moved, precision)["out"]
    worst = {
        name: bound.excess(np.asarray(x), want[name])
        for name, x in zip(("out", *"qkv"), tangents, strict=True)
    }
    for n, x in enumerate(both):
        twice = problem.replace(q=(n + 1) * problem.q)
        worst[f"{n} of vmap"] = bound.excess(np.asarray(x), bound.values(twice, precision)["out"])
    assert max(worst.values()) <= 1, worst


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "block_q, lists, kv_heads, name",
    [(1, 4, 4, "causal"), (1, 4, 2, "alone"), (1, 1, 2, "window"), (SIZE, 4, 2, "lengths")],
)
def test_lists_of_a_block_that_differ(backend, block_q, lists, kv_heads, name, monkeypatch):
    """Each query, or each of the heads that share keys, lists other blocks, as in MoBA."""
    monkeypatch.setattr(listed_blocks, "_WORD", 4)  # some blocks are in the second word
    dtype = jnp.float32 if backend == "tpu" else jnp.bfloat16
    q, k, v, ct = (x.astype(dtype) for x in drawn(4, kv_heads))
    rng = np.random.default_rng(3)
    indices = rng.integers(-1, S // SIZE, (2, lists, T // block_q, 2), np.int32)
    if block_q == SIZE:  # The heads that share keys list no block twice.
        indices[:] = np.arange(8).reshape(1, 4, 1, 2) % (S // SIZE)
    seen = om.selected(T, S, indices, block_q, SIZE)
    seen = seen_beside(np.repeat(seen, 4 // lists, 1), name)
    metadata = AttentionMetadata(
        runtime_dtype=dtype, platform="interpret", backend=backend, blocksize_q=2 * SIZE
    )

    @jax.jit
    def run(indices, q, k, v):
        mask = beside(Selected(indices, block_q, SIZE), name)
        call = lambda *x: attention(*x, Blockwise(metadata), mask=mask).attention_outputs
        out, transpose = jax.vjp(call, q, k, v)
        return out, *transpose(ct)

    got = run(jnp.asarray(indices), q, k, v)
    given: list = [np.asarray(x).astype(np.float64) for x in (q, k, v)]
    problem = oracle.Problem(*given, scale=D**-0.5, mask=seen)
    precision = bound.precision_of(dtype)
    wide = np.asarray(ct).astype(np.float64), np.zeros((2, T, 4))
    want = bound.values(problem, precision) | bound.grads(problem, *wide, precision)
    worst = {n: bound.excess(np.asarray(x), want[n]) for n, x in zip(("out", *"qkv"), got)}
    assert max(worst.values()) <= 1, worst


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(1, 1, 1, S), (1, 4, 1, S), (2, 1, T, 1), (1, 1, T, S)])
def test_gradients_that_are_sums_over_lists(backend, shape):
    """Of a bias that batch elements or heads with other lists share."""
    dtype = jnp.float32 if backend == "tpu" else jnp.bfloat16
    q, k, v, ct = (x.astype(dtype) for x in drawn(4, 4))
    bias, indices = normal(4, *shape), listed(2, 4)
    metadata = AttentionMetadata(runtime_dtype=dtype, platform="interpret", backend=backend)

    @jax.jit
    def run(bias):
        mask = Selected(jnp.asarray(indices), SIZE, SIZE) & Causal()
        call = lambda bias: attention(q, k, v, Blockwise(metadata), mask=mask, bias=bias)
        return jax.vjp(lambda bias: call(bias).attention_outputs, bias)[1](ct)[0]

    given: list = [np.asarray(x).astype(np.float64) for x in (q, k, v)]
    seen = visible(indices, 4) & om.causal(T, S)
    problem = oracle.Problem(*given, scale=D**-0.5, bias=np.float64(bias), mask=seen)
    wide = np.asarray(ct).astype(np.float64), np.zeros((2, T, 4))
    want = bound.grads(problem, *wide, bound.precision_of(dtype))["bias"]
    assert bound.excess(np.asarray(run(bias)), want) <= 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_lists_that_share_their_keys(backend):
    """Under `jax.vmap` the lists are mapped, and queries, keys and values are not."""
    dtype = jnp.float32 if backend == "tpu" else jnp.bfloat16
    q, k, v, ct = (x.astype(dtype) for x in drawn(4, 2))
    indices = np.stack([listed(2, 2), listed(2, 2)[:, ::-1]])
    metadata = AttentionMetadata(runtime_dtype=jnp.float32, platform="interpret", backend=backend)

    @jax.jit
    def run(indices, *xs):
        def call(*xs):
            mask = lambda i: Selected(i, SIZE, SIZE) & Causal()
            one = lambda i: attention(*xs, Blockwise(metadata), mask=mask(i)).attention_outputs
            return jax.vmap(one)(indices)

        out, transpose = jax.vjp(call, *xs)
        return transpose(jnp.broadcast_to(ct.astype(out.dtype), out.shape))

    got = run(jnp.asarray(indices), q, k, v)
    given: list = [np.asarray(x).astype(np.float64) for x in (q, k, v)]
    wide, precision = np.asarray(ct).astype(np.float64), bound.precision_of(dtype)
    causal = om.causal(T, S)
    each = [
        bound.grads(
            oracle.Problem(*given, scale=D**-0.5, mask=visible(i, 4) & causal),
            wide,
            np.zeros((2, T, 4)),
            precision,
        )
        for i in indices
    ]
    worst = {n: bound.excess(np.asarray(x), each[0][n] + each[1][n]) for n, x in zip("qkv", got)}
    assert max(worst.values()) <= 1, worst


def test_gradients_of_pairs_do_not_take_an_array_for_each_list(turns, monkeypatch):
    """They are added up in turns, however short the lists."""
    monkeypatch.setattr(_lists, "MOST_PAIRS", 2**17)
    q, k, v, ct = drawn(4, 4)
    metadata = AttentionMetadata(runtime_dtype=jnp.float32, platform="interpret")

    def gradient(bias):
        mask = Selected(jnp.asarray(listed(2, 4)), SIZE, SIZE)
        call = lambda bias: attention(q, k, v, Blockwise(metadata), mask=mask, bias=bias)
        return jax.vjp(lambda bias: call(bias).attention_outputs, bias)[1](ct)[0]

    jax.jit(gradient).lower(jnp.zeros((1, 4, T, S)))
    assert turns == [BATCH]
    turns.clear()
    jax.jit(gradient).lower(jnp.zeros((1, 1, 1, S)))
    assert turns == []


def test_gradients_of_pairs_round_once():
    """The gradient of a narrow bias, a sum over lists in turns, is the wide one, rounded."""
    q, k, v, ct = drawn(4, 4)
    metadata = AttentionMetadata(runtime_dtype=jnp.float32, platform="interpret")

    @jax.jit
    def gradient(bias):
        mask = Selected(jnp.asarray(listed(2, 4)), SIZE, SIZE)
        call = lambda bias: attention(q, k, v, Blockwise(metadata), mask=mask, bias=bias)
        return jax.vjp(lambda bias: call(bias).attention_outputs, bias)[1](ct)[0]

    bias = normal(4, 1, 1, T, S).astype(jnp.bfloat16)
    wide = gradient(bias.astype(jnp.float32))
    assert (gradient(bias) == wide.astype(jnp.bfloat16)).all() and (wide != 0).any()


def test_a_block_of_all_tokens(monkeypatch):
    """Lists of blocks that have more tokens than there are."""
    found = []
    seen = lambda *xs, f=listed_blocks.live_blocks: found.append(xs[2].block) or f(*xs)
    monkeypatch.setattr("eqattn.strategies._fold.live_blocks", seen)
    q, k, v, ct = (x[:, :30] for x in drawn(4, 4))
    indices = np.array([[0, -1], [-1, 0]], np.int32).repeat(2, 1).reshape(2, 4, 1, 1)
    metadata = AttentionMetadata(runtime_dtype=jnp.float32, platform="interpret")

    @jax.jit
    def run(*xs):
        mask = Selected(jnp.asarray(indices), 32, 64) & Causal()
        call = lambda *xs: attention(*xs, Blockwise(metadata), mask=mask).attention_outputs
        out, transpose = jax.vjp(call, *xs)
        return out, *transpose(ct)

    got = run(q, k, v)
    assert found == [(30, 30)]
    given: list = [np.float64(x) for x in (q, k, v)]
    mask = (indices == 0) & om.causal(30, 30)
    problem = oracle.Problem(*given, scale=D**-0.5, mask=mask)
    precision = bound.precision_of(np.float32)
    want = bound.grads(problem, np.float64(ct), np.zeros((2, 30, 4)), precision)
    want |= bound.values(problem, precision)
    worst = {n: bound.excess(np.asarray(x), want[n]) for n, x in zip(("out", *"qkv"), got)}
    assert max(worst.values()) <= 1, worst


def test_keys_that_nobody_lists():
    """Their gradients are 0, though no row visits them."""
    q, k, v, ct = drawn(4, 4)
    indices = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (1, 1, T // SIZE, 3))
    metadata = AttentionMetadata(runtime_dtype=jnp.float32, platform="interpret")

    @jax.jit
    def gradients(q, k, v):
        mask = Selected(indices, SIZE, SIZE)
        call = lambda *x: attention(*x, Blockwise(metadata), mask=mask).attention_outputs
        return jax.vjp(call, q, k, v)[1](ct)

    for x in gradients(q, k, v)[1:]:
        assert (x[:, 3 * SIZE :] == 0).all() and (x[:, : 3 * SIZE] != 0).any()


@pytest.fixture
def turns(monkeypatch):
    """Scalar memory for a list or two. Returns the axes whose elements were visited in turns."""
    return recorded(monkeypatch, most=40)


@pytest.mark.parametrize("kv_heads, shape", [(4, (1, 4, 1, S)), (2, (2, 1, T, 1))])
def test_in_turns(turns, kv_heads, shape):
    """Lists of batch elements and heads, and tables of segments, that are too long together. Of
    segments, all heads have one table.
    """
    q, k, v, ct = drawn(4, kv_heads)
    bias, indices = normal(4, *shape), listed(2, kv_heads)
    ids = np.sort(np.random.default_rng(1).integers(0, 4, (2, S)))
    metadata = AttentionMetadata(
        runtime_dtype=jnp.float32, platform="interpret", blocksize_q=SIZE, blocksize_k=SIZE
    )

    @jax.jit
    def run(mask, *xs):
        def call(q, k, v, bias):
            out = attention(q, k, v, Blockwise(metadata), mask=mask & Causal(), bias=bias)
            return out.attention_outputs

        out, transpose = jax.vjp(call, *xs)
        return out, *transpose(ct)

    masks = {
        "lists": (Selected(jnp.asarray(indices), SIZE, SIZE), visible(indices, 4)),
        "segments": (
            Segments(jnp.asarray(ids[:, :T]), jnp.asarray(ids)),
            om.segments(ids[:, :T], ids),
        ),
    }
    for name, (mask, seen) in masks.items():
        turns.clear()
        got = run(mask, q, k, v, bias)
        assert {*turns} == ({BATCH, HEAD} if name == "lists" else {BATCH}), turns
        worst = excesses(got, (q, k, v, bias), ct, seen & om.causal(T, S))
        assert max(worst.values()) <= 1, worst


def test_a_list_is_a_table(monkeypatch):
    """Where each block of queries has one list, the table of live blocks has one entry for each
    batch element, key head and pair of blocks.
    """
    found = []

    def seen(*xs):
        found.append(of(*xs))
        return found[-1]

    of = listed_blocks.live_blocks
    monkeypatch.setattr("eqattn.strategies._fold.live_blocks", seen)
    q, k, v, _ = drawn(4, 2)
    metadata = AttentionMetadata(platform="interpret")
    mask = Selected(jnp.asarray(listed(2, 2)), SIZE, SIZE)
    jax.eval_shape(lambda q, k, v: attention(q, k, v, Blockwise(metadata), mask=mask), q, k, v)
    assert [x.shape for x in found] == [(2, 2, T // SIZE, S // SIZE, 1, 1)]
