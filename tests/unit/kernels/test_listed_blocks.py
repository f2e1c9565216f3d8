"""Kernels visit listed blocks of keys where they lie, each head its own, and skip the others."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _kernels import check, drawn, EACH, how, judge, normal, results, wide
from matrix import bound, oracle, oracle_masks as om

from eqattn import ALiBi, attention, Causal, KeyPadding, Selected, SlidingWindow
from eqattn._problem import lists as listed_blocks
from eqattn.kernels import lowering_for
from eqattn.kernels._program import equations


# The smallest blocks that are visited where they lie: two rows of blocks, of which the last is padded,
# and three columns.
ROWS, COLUMNS, SIDE, T = 2, 3, 64, 100
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625])


def side_of(backend: str) -> int:
    """The keys of a block."""
    return 128 if backend == "tpu" else 64


def tokens(backend: str, kv_heads: int):
    """Arrays of two batch elements whose last block of keys is padded."""
    return drawn(backend, T, COLUMNS * side_of(backend) - 20, 4, kv_heads, 16, 8, batch=2)


def listed(lead: int, lists: int) -> np.ndarray:
    """Lists of blocks. One row lists none, and another one the same block twice."""
    indices = np.random.default_rng(0).integers(0, COLUMNS, (lead, lists, ROWS, 2), np.int32)
    indices[0, 0, 1] = -1
    indices[-1, -1, 0, 1] = indices[-1, -1, 0, 0]
    return indices


def visible(indices: np.ndarray, s: int, block_q: int = SIDE, block_k: int = 128) -> np.ndarray:
    """Of four heads."""
    seen = om.selected(T, s, indices, block_q, block_k)
    return np.repeat(seen, 4 // seen.shape[1], 1)


def beside(mask, seen, name: str):
    """What else hides pairs or shows more of them, for eqattn and for the oracle."""
    s = seen.shape[-1]
    ends = np.array([s, s // 2])
    return {
        "alone": lambda: (mask, seen),
        "causal": lambda: (mask & Causal(), seen & om.causal(T, s)),
        "lengths": lambda: (mask & KeyPadding(jnp.asarray(ends)), seen & om.lengths(T, s, ends)),
        "window": lambda: (mask | SlidingWindow(2, 0), seen | om.window(T, s, 2, 0)),
    }[name]()


def gathers(f, *args) -> bool:
    """Whether keys are copied for each list."""
    program = jax.make_jaxpr(f)(*args)
    return any(
        eqn.primitive.name == "gather" and eqn.outvars[0].aval.shape[-1:] in ((16,), (8,))
        for eqn in equations(program.jaxpr)
    )


@pytest.mark.parametrize(
    "lead, lists, kv_heads, name",
    [(2, 4, 4, "causal"), (1, 1, 4, "lengths"), (2, 2, 2, "alone"), (1, 2, 2, "window")],
)
def test_numbers_of_lists(interpreted, lead, lists, kv_heads, name):
    """Outputs and all gradients, also where keys and values of other blocks are not finite."""
    (given, ct), size = tokens(interpreted, kv_heads), side_of(interpreted)
    s, indices = given["k"].shape[1], listed(lead, lists)
    mask = Selected(jnp.asarray(indices), SIDE, size)
    mask, seen = beside(mask, visible(indices, s, block_k=size), name)
    seen = np.broadcast_to(seen, (2, 4, T, s))
    unseen = ~seen.reshape(2, kv_heads, -1, s).any(2).swapaxes(1, 2)[..., None]
    score = ALiBi(jnp.asarray(SLOPES, jnp.float32))

    def call(q, k, v):
        return attention(q, k, v, how(interpreted), mask=mask, score=score).attention_outputs

    dirty = {n: jnp.where(unseen, jnp.nan, given[n]).astype(given[n].dtype) for n in "kv"}
    assert not gathers(call, *given.values())
    found = results(call, given | dirty, ct)
    distance = np.abs(np.arange(T)[:, None] - np.arange(s))
    check(found, given, ct, mask=seen, slopes=SLOPES, distance=distance)


@pytest.mark.parametrize(
    "block_q, lists, kv_heads, name",
    [(1, 4, 4, "causal"), (1, 1, 2, "window"), (SIDE, 4, 2, "lengths")],
)
def test_lists_of_a_block_that_differ(interpreted, block_q, lists, kv_heads, name, monkeypatch):
    """Each query, or each of the heads that share keys, lists other blocks, as in MoBA. A word has
    the bits of few blocks here, so that one block is in the second.
    """
    monkeypatch.setattr(listed_blocks, "_WORD", 2)
    (given, ct), size = tokens(interpreted, kv_heads), side_of(interpreted)
    s, rows = given["k"].shape[1], -(-T // block_q)
    indices = np.random.default_rng(3).integers(-1, COLUMNS, (2, lists, rows, 2), np.int32)
    if block_q == SIDE:  # The heads that share keys list no block twice.
        indices[:] = np.arange(8).reshape(1, 4, 1, 2) % COLUMNS
    mask = Selected(jnp.asarray(indices), block_q, size)
    mask, seen = beside(mask, visible(indices, s, block_q, size), name)
    call = lambda q, k, v: attention(q, k, v, how(interpreted), mask=mask).attention_outputs
    assert not gathers(call, *given.values())
    judge(call, given, ct, mask=seen)


@pytest.mark.parametrize("shared", ["by batch elements and queries", "by all lists"])
def test_gradients_that_are_sums_over_lists(interpreted, shared):
    """Of a bias that batch elements or heads with other lists share."""
    (given, ct), size = tokens(interpreted, 4), side_of(interpreted)
    s, indices = given["k"].shape[1], listed(2, 4)
    bias = normal(4, 1, *((4, 1, s) if shared.startswith("by batch") else (1, T, s)))
    mask = Selected(jnp.asarray(indices), SIDE, size) & Causal()
    call = lambda q, k, v, bias: attention(q, k, v, how(interpreted), mask=mask, bias=bias)
    seen = visible(indices, s, block_k=size) & om.causal(T, s)
    run = lambda **given: call(**given).attention_outputs
    judge(run, given | dict(bias=bias), ct, only=("bias",), mask=seen)


def test_lists_that_share_their_keys(interpreted):
    """Under `jax.vmap` the lists are mapped, and queries, keys and values are not."""
    (given, ct), size = tokens(interpreted, 2), side_of(interpreted)
    s, indices = given["k"].shape[1], np.stack([listed(2, 2), listed(2, 2)[:, ::-1]])

    def call(q, k, v):
        mask = lambda i: Selected(i, SIDE, size) & Causal()
        one = lambda i: attention(q, k, v, how(interpreted), mask=mask(i)).attention_outputs
        return jax.vmap(one)(jnp.asarray(indices))

    found = results(call, given, jnp.stack([ct, ct]))
    precision, zeros = bound.precision_of(ct.dtype), np.zeros((2, T, 4))
    seen = [visible(i, s, block_k=size) & om.causal(T, s) for i in indices]
    problems = [oracle.Problem(**wide(given), scale=1 / 4, mask=x) for x in seen]
    first, second = (bound.grads(x, np.float64(ct), zeros, precision) for x in problems)
    worst = {n: bound.excess(np.asarray(found[n]), first[n] + second[n]) for n in "qkv"}
    assert max(worst.values()) <= 1, worst


@EACH
def test_nothing_is_gathered(backend, monkeypatch):
    """Keys are gathered only where a list of pairs is too long for scalar memory, where a query has
    too few words for all blocks, or where blocks are small.
    """
    size = side_of(backend)

    def gathered(kv_heads, lists, block_q=SIDE, block_k=size):
        jax.clear_caches()  # what was traced with other limits is not traced again
        given, _ = tokens(backend, kv_heads)
        indices = jnp.zeros((1, lists, -(-T // block_q), 2), jnp.int32)
        mask = Selected(indices, block_q, block_k)
        return gathers(lambda *x: attention(*x, how(backend), mask=mask), *given.values())

    assert not gathered(4, 4) and not gathered(2, 2) and not gathered(2, 1)
    assert not gathered(2, 4) and not gathered(4, 4, block_q=1)
    assert gathered(4, 4, block_k=size // 2)  # they are small
    monkeypatch.setattr(listed_blocks, "_MOST_WORDS", (COLUMNS - 0.1) / 32)
    assert not gathered(4, 4) and gathered(2, 4) and gathered(4, 4, block_q=1)
    # Two blocks for each row, and one more for each column.
    kind = type(lowering_for(backend, "interpret"))
    monkeypatch.setattr(kind, "most_pairs", ROWS * 2 + COLUMNS)
    assert not gathered(4, 4)
    monkeypatch.setattr(kind, "most_pairs", ROWS * 2 + COLUMNS - 1)
    assert gathered(4, 4)


def test_every_transform():
    """Forward mode has a kernel, and second order and others do not: they run as XLA, which knows
    the lists by their table alone.
    """
    given, ct = tokens("tpu", 4)
    s, indices = given["k"].shape[1], listed(2, 4)
    directions = {n: jnp.sin(x) for n, x in given.items()}
    mask = Selected(jnp.asarray(indices), SIDE, 128) & Causal()
    ours = lambda given: attention(**renamed(given), strategy=how("tpu"), mask=mask)
    renamed = lambda x: dict(query=x["q"], key_=x["k"], value=x["v"])
    call = lambda given: ours(given).attention_outputs

    @jax.jit
    def everything(given, moved):
        gradient = lambda given: jax.vjp(call, given)[1](ct)[0]
        tangent = jax.jvp(call, (given,), (moved,))[1]
        both = jax.vmap(lambda q: call(given | dict(q=q)))(jnp.stack([given["q"], 2 * given["q"]]))
        return dict(out=tangent) | jax.jvp(gradient, (given,), (moved,))[1], both

    tangents, both = everything(given, directions)
    seen = visible(indices, s) & om.causal(T, s)
    problem = oracle.Problem(**wide(given), scale=1 / 4, mask=seen)
    precision, moved = bound.precision_of(np.float32), wide(directions)
    want = bound.hvps(problem, np.float64(ct), np.zeros((2, T, 4)), moved, precision)
    want["out"] = bound.tangents(problem, moved, precision)["out"]
    worst = {n: bound.excess(np.asarray(x), want[n]) for n, x in tangents.items()}
    for n, x in enumerate(both):
        twice = problem.replace(q=(n + 1) * problem.q)
        worst[f"{n} of vmap"] = bound.excess(np.asarray(x), bound.values(twice, precision)["out"])
    assert max(worst.values()) <= 1, worst


def tables_of(monkeypatch) -> list:
    """The tables of live blocks that are made from now on, with their blocks."""
    found: list[Any] = []
    of = listed_blocks.live_blocks
    seen = lambda *xs: found.append((of(*xs), xs[2].block)) or found[-1][0]
    monkeypatch.setattr("eqattn.strategies._fold.live_blocks", seen)
    return found


def test_a_list_is_a_table(monkeypatch):
    """Where each block of queries has one list, the table of live blocks has one entry for each
    batch element, key head and pair of blocks. A block may have more tokens than there are.
    """
    tables = tables_of(monkeypatch)
    given, _ = tokens("tpu", 2)
    mask = Selected(jnp.asarray(listed(2, 2)), SIDE, 128)
    jax.eval_shape(ft.partial(attention, strategy=how("tpu"), mask=mask), *given.values())
    ((table, _),) = tables
    assert table.shape == (2, 2, ROWS, COLUMNS, 1, 1)
    tables.clear()
    given, ct = drawn("tpu", 100, 150, 4, 4, batch=2)
    indices = np.array([[0, -1], [-1, 0]], np.int32).repeat(2, 1).reshape(2, 4, 1, 1)
    mask = Selected(jnp.asarray(indices), 128, 256) & Causal()
    call = lambda q, k, v: attention(q, k, v, how("tpu"), mask=mask).attention_outputs
    judge(call, given, ct, mask=(indices == 0) & om.causal(100, 150))
    assert [block for _, block in tables] == [(150, 100)]


def test_keys_that_nobody_lists():
    """Their gradients are 0, though no row visits them."""
    given, ct = tokens("tpu", 4)
    indices = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), (1, 1, ROWS, 2))
    mask = Selected(indices, SIDE, 128)
    call = lambda q, k, v: attention(q, k, v, how("tpu"), mask=mask).attention_outputs
    found = results(call, given, ct)
    for x in (found["k"], found["v"]):
        assert (x[:, 256:] == 0).all() and (x[:, :256] != 0).any()
