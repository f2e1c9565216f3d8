"""Each path of a tree gets what it would get alone, next to every mask, score and strategy."""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix import oracle, oracle_masks as om

from eqattn import (
    ALiBi,
    attention,
    AttentionMetadata,
    BlockCausal,
    Blockwise,
    Causal,
    ChunkedCausal,
    Dense,
    KeyPadding,
    MaskFn,
    nn,
    PrefixLM,
    Ragged,
    ScoreFn,
    Segments,
    SlidingWindow,
    T5Bias,
    Tree,
)
from eqattn.cache import KVCache, RingBufferCache
from eqattn.masks._base import block_table, live_blocks


# Two roots, in an order in which some parents come after their children.
PARENTS = np.array([2, -1, 1, 0, 1, 0, 4, -1, 7, 6, 8], np.int32)
START, N = 5, len(PARENTS)
T = START + N
SLOPES, TABLE = np.array([0.25, 0.5]), np.linspace(-1, 1, 16).reshape(8, 2)


def path(token: int) -> list[int]:
    """The places of all that a token of the tree sees, itself the last."""
    found, at = [], token - START
    while at >= 0:
        found.insert(0, START + at)
        at = PARENTS[at]
    return [*range(min(token + 1, START)), *found]


DEPTHS = np.array([len(path(token)) - 1 for token in range(T)])
MASKS = {
    "none": (None, lambda n: True),
    "causal": (Causal(), lambda n: True),
    "window": (SlidingWindow(3, 0), lambda n: om.window(n, n, 3, n)[0, 0]),
    "sinks": (SlidingWindow(2, 0, sinks=1), lambda n: om.window(n, n, 2, n, 1)[0, 0]),
    "not a window": (~SlidingWindow(1, 0), lambda n: ~om.window(n, n, 1, 0)[0, 0]),
    "chunks": (ChunkedCausal(4), lambda n: om.chunked_causal(n, n, 4)[0, 0]),
    "blocks": (BlockCausal(3), lambda n: om.block_causal(n, n, 3)[0, 0]),
    "function": (MaskFn(lambda b, h, q, k: (q + k) % 3 > 0), lambda n: np.add.outer(np.arange(n), np.arange(n)) % 3 > 0),
    "prefix": (PrefixLM(2) & Segments(np.zeros(T, np.int32)) & KeyPadding(T), lambda n: True),
}  # fmt: skip


def alone(mask) -> np.ndarray:
    """What each token sees if its path is a sequence of its own, by place, `[T, T]`."""
    seen = np.zeros((T, T), bool)
    for token in range(T):
        row = path(token)
        here = om.causal(len(row), len(row), 0, 0)[0, 0] & mask(len(row))
        seen[token, np.array(row)[here[-1]]] = True
    return seen


@pytest.mark.parametrize("name", [x for x in MASKS if x != "none"])
def test_no_block_that_a_token_sees_is_dead(name):
    """A ring sends keys only where blocks are live. Where tokens stand elsewhere than they lie, what
    a window shows of places tells nothing.
    """
    mask, shown = MASKS[name]
    tree = Tree(PARENTS, start=START)
    ends = np.arange(T).repeat(2).reshape(T, 2)
    live = live_blocks(tree & mask, ends, ends, (), 2, 2)
    assert live[alone(shown)].all()
    assert not live[np.triu_indices(T, N)].any()  # the tree itself hides some


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_sees_depths(name):
    other, rule = MASKS[name]
    mask = Tree(PARENTS, START) if other is None else Tree(PARENTS, START) & other
    want = alone(rule)
    np.testing.assert_array_equal(mask.as_array(T, T)[0], want)
    table = block_table(mask, T, T, 2, 3)
    hidden = np.repeat(np.repeat(table[0, 0] == 0, 2, 0), 3, 1)[:T, :T]
    assert not (want & hidden).any()


def given(dtype=np.float32):
    arrays = np.random.default_rng(0).normal(size=(3, 1, T, 2, 4)).astype(dtype)
    return arrays if dtype == np.float64 else jnp.asarray(arrays)


def reference(score: str, ct=None):
    """Values, or the gradients of q, k, v and of the parameters of the score for a cotangent, each
    path by the oracle as a sequence of its own.
    """
    q, k, v = given(np.float64)
    total: dict = {n: np.zeros((1, T, 2, 4)) for n in ("out", *"qkv")}
    for token in range(T):
        row = path(token)
        n = len(row)
        own = dict(slopes=SLOPES, distance=om.distance(n, n)) if score == "alibi" else {}
        own = own or dict(table=TABLE, bucket=om.t5_bucket(n, n, 8, True, 16))
        mask = om.causal(n, n) & om.window(n, n, 3, n)
        line = oracle.Problem(q[:, row], k[:, row], v[:, row], scale=0.5, mask=mask, **own)
        if ct is None:
            total["out"][:, token] = oracle.forward(line).out[:, -1]
            continue
        last = np.zeros((1, n, 2, 4))
        last[:, -1] = ct[:, token]
        found = oracle.vjp(line, last, np.zeros((1, n, 2)))
        for name in "qkv":
            np.add.at(total[name], (slice(None), row), found[name])
        for name in set(found) & {"slopes", "table"}:
            total[name] = total.get(name, 0) + found[name]
    return total


def score_of(score, parameter):
    return ALiBi(parameter) if score == "alibi" else T5Bias(parameter, max_distance=16)


METADATA = AttentionMetadata(blocksize_q=4, blocksize_k=4)
KERNEL = AttentionMetadata(platform="interpret", blocksize_q=8, blocksize_k=8)
STRATEGIES = {
    "blockwise": (Blockwise(METADATA), "t5"),
    "dense": (Dense(METADATA), "alibi"),
    "ragged": (Ragged(METADATA), "t5"),
    "kernels of a TPU": (Blockwise(KERNEL), "alibi"),
}


@pytest.mark.parametrize("name", ["blockwise"])
def test_values_and_gradients_of_each_path(name):
    """Blocks, the interpreted kernels and all others, with a window of depths, by the oracle."""
    strategy, score = STRATEGIES[name]
    parameter, ct = SLOPES if score == "alibi" else TABLE, given(np.float64)[0] + 0.5
    arrays = [*given(), jnp.asarray(parameter, jnp.float32)]

    def call(tree, q, k, v, parameter):
        mask = tree & SlidingWindow(3, 0)
        return attention(q, k, v, strategy, mask=mask, score=score_of(score, parameter))

    @jax.jit
    def run(parents, *arrays):
        tree = Tree(parents, START)
        out, back = jax.vjp(lambda *xs: call(tree, *xs).attention_outputs, *arrays)
        return out, back(jnp.asarray(ct, jnp.float32))

    out, grads = run(PARENTS, *arrays)
    np.testing.assert_allclose(out, reference(score)["out"], rtol=0, atol=2e-6)
    want = reference(score, ct)
    last = "slopes" if score == "alibi" else "table"
    for got, key in zip(grads, ("q", "k", "v", last)):
        np.testing.assert_allclose(got, want[key], rtol=0, atol=1e-5, err_msg=key)


def test_layers_turn_heads_by_depths():
    """A layer with rotary positions and a window: without a cache, and after tokens of a cache."""
    x = jax.random.normal(jax.random.key(0), (T, 8))
    layer = nn.MultiheadAttention(2, 8, rotary=nn.Rotary(), window=3, key=jax.random.key(1))
    run = eqx.filter_jit(layer)
    got = run(x, mask=Tree(PARENTS, START))
    want = run(x[np.array(path(T - 1))], mask="causal")
    np.testing.assert_allclose(got[-1], want[-1], rtol=0, atol=2e-6)
    for cache in (KVCache.empty(1, 24, 2, 4), RingBufferCache.empty(1, 16, 2, 4)):
        cache, _ = run(x[:START], cache=cache, mask=Causal())
        _, out = run(x[START:], cache=cache, mask=Tree(PARENTS, cache.length))
        np.testing.assert_allclose(out, got[START:], rtol=0, atol=2e-6)
    tree = Tree(PARENTS, START)
    np.testing.assert_array_equal(tree.positions_of(np.arange(T)), DEPTHS)
    np.testing.assert_array_equal(tree.depths, DEPTHS[START:] - START)


def test_functions_of_positions_see_depths():
    """A score of one's own, and what `as_array` is asked for at other places."""
    fade = ScoreFn(lambda logit, b, h, q, k: logit - 0.25 * abs(q - k).astype(logit.dtype))
    arrays = given()
    got = attention(*arrays, mask=Tree(PARENTS, START), score=fade).attention_outputs
    row = np.array(path(T - 1))
    want = attention(*arrays[:, :, row], mask=Causal(), score=fade).attention_outputs
    np.testing.assert_allclose(got[0, -1], want[0, -1], rtol=0, atol=2e-6)
    mask, order = Tree(PARENTS, START) & SlidingWindow(2, 0), np.random.permutation(T)
    there = mask.as_array(N, T, q_positions=np.arange(START, T), kv_positions=order)
    np.testing.assert_array_equal(there[0], mask.as_array(T, T)[0, START:][:, order])


def forest(tokens: int, prompt: int, completion: int, each: int) -> np.ndarray:
    """Packed prompts, each of which is followed by `each` completions."""
    parents = np.arange(-1, tokens - 1, dtype=np.int32)
    size = prompt + completion * each
    parents[::size] = -1
    for begin in range(0, tokens, size):
        parents[begin + prompt : begin + size : completion] = begin + prompt - 1
    return parents


def test_a_packed_forest_is_built_fast_and_skips_what_it_can():
    """16,384 tokens: each takes 8 ms on one core of a desktop, and would take hours as n^3."""
    n, block = 16384, 128
    parents, took = forest(n, 256, 128, 8), []
    tree, table = Tree(parents), np.zeros(0)
    for _ in range(3):
        begin = time.process_time()
        tree = Tree(parents)
        built = time.process_time()
        table = block_table(tree, n, n, block, block)
        took.append((built - begin, time.process_time() - built))
    assert np.min(took, 0)[0] < 0.5 and np.min(took, 0)[1] < 0.5
    enter, leave = np.asarray(tree._enter), np.asarray(tree._leave)
    np.testing.assert_array_equal(enter, np.arange(n))  # it is stored in preorder
    rows = enter.reshape(-1, 1, block)
    live = [
        ((enter[:, None] <= x) & (x < leave[:, None])).reshape(-1, block * block).any(1)
        for x in rows
    ]
    np.testing.assert_array_equal(table[0, 0] > 0, live)  # so exactly what is empty is skipped
    deep = np.asarray(Tree(np.arange(-1, 99_999)).depths)
    np.testing.assert_array_equal(deep, np.arange(100_000))


@pytest.mark.parametrize(
    "parents, message",
    [
        ([-1, 0, 3, 2], r"no cycle: from the token at \[2\] of \(4,\)"),
        ([[-1, 0], [1, 1]], r"no cycle: from the token at \[1, 0\] of \(2, 2\)"),
        ([-1, 5, 0], r"below 3, got 5 at \[1\] of \(3,\)"),
        (np.r_[-2, np.zeros(99_999, int)], r"got -2 at \[0\] of \(100000,\)"),
    ],
)
def test_what_is_no_forest_raises(parents, message):
    with pytest.raises(ValueError, match=message):
        Tree(parents)


def test_depths_of_a_list_of_places():
    assert Tree([-1, 0, 0, 1], start=2).positions_of([0, 2, 5, 4]).tolist() == [0, 2, 4, 3]


def test_a_tree_begins_at_a_place():
    with pytest.raises(ValueError, match="start must be at least 0, got -1"):
        Tree([-1, 0], start=-1)


def test_two_trees_of_one_call_raise():
    q = jnp.ones((3, 1, 2))
    with pytest.raises(ValueError, match="two that say where tokens stand.*make one of both"):
        attention(q, q, q, mask=Tree([-1, 0, 0]) | Tree([-1, 0, 1]))
    with pytest.raises(ValueError, match="where tokens stand"):
        jax.jit(lambda a, b: attention(q, q, q, mask=Tree(a) & Tree(b)))(
            np.zeros(3, int), np.zeros(3, int)
        )
    both = Tree([-1, 0, 0]) & SlidingWindow(1, 0) | Tree([-1, 0, 0]) & KeyPadding(1)
    assert attention(q, q, q, mask=both).attention_outputs.shape == q.shape
