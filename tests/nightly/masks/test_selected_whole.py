"""`Selected` in all cases of `test_selected.py`, and where tokens are sharded."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_selected as unit
from jax.sharding import PartitionSpec as P
from test_selected import (
    assert_close,
    B,
    D,
    DEFAULT_CODE,
    H,
    K,
    listed,
    MESH,
    POSITIONS,
    results,
    RNG,
    S,
)

from eqattn import (
    ALiBi,
    attention,
    Causal,
    Contiguous,
    Dense,
    DenseMask,
    KeyPadding,
    Ring,
    Segments,
    Selected,
    SlidingWindow,
    top_keys,
    Tree,
    Ulysses,
    Zigzag,
)


SEGMENTS = np.sort(RNG.integers(0, 2, (B, S)), -1).astype(np.int32)


@pytest.mark.parametrize("name", unit.CASES)
def test_it_is_the_dense_mask(name):
    unit.test_it_is_the_dense_mask_that_it_stands_for(name)


@pytest.mark.parametrize("name", unit.BLOCKS)
def test_all_blocks_are_visited_where_they_lie(name):
    unit.test_blocks_are_visited_where_they_lie(name)


def test_pages_of_eight_bits_are_read_where_they_lie():
    unit.test_pages_are_read_where_they_lie("int8", K)
    unit.test_pages_are_read_where_they_lie(None, K)


@pytest.mark.parametrize("dtype", [jnp.float16, np.float32])
def test_memory_of_other_dtypes(dtype):
    unit.test_memory_is_that_of_what_is_listed_whatever_the_dtype(dtype)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("batch, heads", [(1, 1), (2, 1), (2, 2)])
def test_no_key_is_copied_whole(batch, heads, mapped):
    unit.test_no_key_is_copied_whole_under_vmap(batch, heads, mapped)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_every_window_of_few_keys(listed, batched):
    unit.test_a_window_of_few_keys_copies_none(listed, batched)


# A mask next to the list, and further arguments, of queries and keys that are sharded.
SHARDED = {
    "of queries": (dict(heads=K), lambda x: x & Causal(10), Ring, {}),
    "of blocks and a bias": (dict(block_q=4, block_k=5), lambda x: x | SlidingWindow(2, 0), Ulysses, {}),
    "in a tree": (dict(heads=H), lambda x: x & Tree([-1, 0, 0, 1, 2], 4), Ring, {}),
    "at positions": (dict(), lambda x: x & Causal(8), Ring, dict(kv_positions=POSITIONS)),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARDED)
def test_lists_of_tokens_that_are_sharded(name):
    """With whole arrays. Nine queries are not equal pieces for two devices."""
    given, combined, kind, options = SHARDED[name]
    mask, dense = listed(**given)
    if options:
        dense = DenseMask(dense.array[..., POSITIONS])
    score = dict(score=ALiBi.geometric(H), **options)
    combined, both = (lambda x, f=combined: f(x) & KeyPadding(jnp.array([20, 24]))), []
    for one, strategy in ((dense, Dense()), (mask, kind(axis_name="sp", mesh=MESH))):
        both.append(results(combined(one), strategy, **score))
    assert_close(both[1], both[0])


def test_lists_next_to_trees_of_two_batch_axes_over_devices():
    """With whole arrays, and with pieces in a `jax.shard_map` of one's own."""
    rng, lead, n = np.random.default_rng(0), (2, 3), 12
    draw = lambda heads: jnp.asarray(rng.normal(size=(*lead, n, heads, D)), jnp.float32)
    arrays, listed = (draw(H), draw(K), draw(K)), rng.integers(-1, n, (*lead, K, n, 5))
    parents = np.array(
        [[np.r_[-1, rng.integers(-1, np.arange(1, 8))] for _ in "abc"] for _ in "ab"]
    )
    beside = lambda parents: Tree(parents, n - 8) & SlidingWindow(3, 0)
    seen = (listed[..., None] == np.arange(n)).any(-2).repeat(H // K, 2)
    dense = jnp.asarray(seen) & beside(parents).as_array(n, n, batch_shape=lead)
    given = *arrays, jnp.asarray(listed), jnp.asarray(parents, jnp.int32)

    def call(strategy):
        def run(q, k, v, listed, parents):
            mask = Selected(listed) & beside(parents)
            return attention(q, k, v, strategy, mask=mask).attention_outputs

        return run

    rows, lists = P(None, None, "sp"), P(None, None, None, "sp")
    pieces = jax.shard_map(
        call(Ring(axis_name="sp")),
        mesh=MESH,
        in_specs=(rows, rows, rows, lists, P()),
        out_specs=rows,
    )
    want = attention(*arrays, Dense(), mask=DenseMask(dense)).attention_outputs
    assert float(abs(want).sum()) > 0
    for fn in (call(Ring(mesh=MESH, axis_name="sp")), pieces):
        assert_close(jax.jit(fn)(*given), want)


def test_blocks_of_each_query_cost_no_more_than_all_keys():
    """A quarter of the blocks for each query and head, as in MoBA. Copies of the listed keys took ten
    times as long as all keys, and much memory.
    """
    t, h, size = 1024, 2, 128
    arrays = [jnp.ones((1, t, h, 64))] * 3
    indices = jnp.asarray(RNG.integers(0, t // size, (1, h, t, 2)))

    def call(q, k, v, indices):
        mask = Causal() if indices is None else Causal() & Selected(indices, 1, size)
        return attention(q, k, v, mask=mask).attention_outputs

    took, memory = [], []
    for given in (indices, None):
        program = jax.jit(call).lower(*arrays, given).compile()
        took.append([])
        for _ in range(5):
            begin = time.perf_counter()
            jax.block_until_ready(program(*arrays, given))
            took[-1].append(time.perf_counter() - begin)
        memory.append(program.memory_analysis().temp_size_in_bytes)
    assert min(took[0]) < 3 * min(took[1]) and memory[0] < 1.5 * memory[1]


def test_work_and_memory_do_not_grow_with_the_keys_that_are_not_listed():
    """Of 16,384 keys, 64 are listed for each of 64 queries, 1/256 of the pairs: a backward pass then
    takes less than 1/8 of the time, and memory as for some copies of keys and values.
    """
    t, s, n, h, d = 64, 16384, 64, 16, 32
    q, k = jnp.ones((1, t, h, d)), jnp.ones((1, s, 1, d))
    indices = jnp.asarray(RNG.integers(0, s, (1, 1, t, n)))

    def loss(q, k, v, indices):
        mask = None if indices is None else Selected(indices)
        return attention(q, k, v, mask=mask).attention_outputs.sum()

    took = []
    for given in (indices, None):
        program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, given).compile()
        took.append([])
        for _ in range(3):
            begin = time.perf_counter()
            jax.block_until_ready(program(q, k, k, given))
            took[-1].append(time.perf_counter() - begin)
        if given is not None:
            assert program.memory_analysis().temp_size_in_bytes < 8 * k.nbytes
    assert min(took[0]) < min(took[1]) / 8


def test_the_gradient_of_a_gradient_keeps_no_copies():
    """All copies of keys and values together take 64 MiB."""
    q = jnp.ones((1, 1024, 2, 64))
    mask = Selected(jnp.asarray(RNG.integers(0, 1024, (1, 1, 1024, 64))))

    def gradient(q, k, v):
        loss = lambda *xs: jnp.sin(attention(*xs, mask=mask).attention_outputs).sum()
        return jax.grad(loss, (0, 1, 2))(q, k, v)

    second = jax.grad(lambda *xs: sum(jnp.cos(x).sum() for x in gradient(*xs)), (0, 1, 2))
    temporary = [
        jax.jit(f).lower(q, q, q).compile(DEFAULT_CODE).memory_analysis().temp_size_in_bytes
        for f in (gradient, second)
    ]
    assert temporary[1] < 5 * temporary[0]


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag()], ids=str)
def test_lists_in_a_shard_map_of_ones_own(layout):
    """Of pieces of the queries, of their lists and of the keys, which list places in the whole
    sequence. The lists are those that `top_keys` makes there.
    """
    x = jnp.asarray(RNG.normal(size=(B, S, H, D)), jnp.float32)
    ids = jnp.asarray(SEGMENTS)
    strategy, spec = Ring(axis_name="sp", layout=layout), P(None, "sp")

    def local(query, key, ids):
        mask = Causal() & Segments(ids)
        top = top_keys(query[:, :, :1], key[:, :, :1], 4, strategy, mask=mask)
        listed = mask & Selected(top.indices)
        return attention(query, key, key, strategy, mask=listed).attention_outputs

    def whole(query, key, ids):
        logits = jnp.einsum("bthd,bshd->bhts", query[:, :, :1], key[:, :, :1]) * D**-0.5
        seen = jnp.tri(S, dtype=bool)[None] & (ids[:, :, None] == ids[:, None])
        values = jax.lax.top_k(jnp.where(seen[:, None], logits, -jnp.inf), 4)[0]
        seen = seen[:, None] & (logits >= values[..., -1:])
        return attention(query, key, key, Dense(), mask=DenseMask(seen)).attention_outputs

    ring = jax.shard_map(local, mesh=MESH, in_specs=(spec,) * 3, out_specs=spec)
    move = lambda x, f: f(x, 2)
    both = []
    for fn in (lambda *xs: move(ring(*[move(x, layout.permute) for x in xs], permuted), layout.unpermute),
               lambda *xs: whole(*xs, ids)):  # fmt: skip
        permuted = move(ids, layout.permute)

        @jax.jit
        def run(*xs, fn=fn):
            out, pull = jax.vjp(fn, *xs)
            return out, pull(jnp.cos(out))

        both.append(run(x, x))
    assert_close(*both)
