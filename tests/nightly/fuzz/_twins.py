"""Masks and scores of eqattn, each with a twin in NumPy that is written from its documentation.

A twin is a function of `Pairs`. That of a mask returns bools, that of a score the new logits and
their derivative by the old ones.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from matrix import oracle_masks as om

from eqattn import (
    ALiBi,
    BlockCausal,
    Causal,
    ChunkedCausal,
    DenseMask,
    KeyPadding,
    MaskFn,
    Neighbourhood,
    PrefixLM,
    QueryPadding,
    ScoreFn,
    scores,
    Segments,
    Selected,
    SlidingWindow,
    T5Bias,
    Tree,
)


@dataclasses.dataclass
class Pairs:
    """Some queries `[t, 1]` and some keys `[1, n]` of one row and head.

    `q` and `k` are positions, `at_q` and `at_k` the places before a tree moved them, and `i` and `j`
    where queries and keys lie in the arrays of the call.
    """

    b: int
    h: int
    q: np.ndarray
    k: np.ndarray
    at_q: np.ndarray
    at_k: np.ndarray
    i: np.ndarray
    j: np.ndarray


@dataclasses.dataclass
class Sizes:
    """A call for which masks and scores are drawn.

    `at` is the place of the first query of each row, `s` the length of the arrays of keys, and
    `places` the place of each key `[b, s]`, -1 for none. `arrays` says whether masks and scores may
    hold arrays that vary over queries or keys.
    """

    b: int
    t: int
    s: int
    heads: int
    kv_heads: int
    at: np.ndarray
    places: np.ndarray
    dtype: Any
    arrays: bool = True


Twin = Callable[[Pairs], Any]


def ints(rng, low, high, shape=()):
    return np.asarray(rng.integers(low, high, shape), np.int32)


def either(rng, sizes: Sizes, low: int, high: int):
    """An int, a scalar or an array with one int per row; and its values per row."""
    kind = rng.integers(3)
    if kind == 0:
        x = int(rng.integers(low, high))
        return x, np.full(sizes.b, x)
    x = ints(rng, low, high, () if kind == 1 else (sizes.b,))
    return jnp.asarray(x), np.broadcast_to(x, (sizes.b,))


def causal(rng, sizes):
    offset, each = (0, np.zeros(sizes.b)) if rng.random() < 0.7 else either(rng, sizes, -2, 3)
    return Causal(offset), lambda p: p.k <= p.q + each[p.b]


def window(rng, sizes):
    left, right = (None if rng.random() < 0.2 else int(rng.integers(0, 9)) for _ in range(2))
    sinks = int(rng.integers(0, 4)) if rng.random() < 0.4 else 0

    def seen(p):
        ok = np.ones(np.broadcast_shapes(p.q.shape, p.k.shape), bool)
        ok &= True if left is None else p.q - p.k <= left
        ok &= True if right is None else p.k - p.q <= right
        return ok | (p.k < sinks)

    return SlidingWindow(left, right, sinks), seen


def padding(rng, sizes):
    lengths, each = either(rng, sizes, 0, sizes.s + 3)
    starts, first = (0, np.zeros(sizes.b)) if rng.random() < 0.5 else either(rng, sizes, 0, 5)
    return KeyPadding(lengths, starts), lambda p: (p.k >= first[p.b]) & (p.k < each[p.b])


def rows_end(rng, sizes):
    lengths, each = either(rng, sizes, 0, sizes.s + 3)
    return QueryPadding(lengths), lambda p: p.q < each[p.b]


def prefix(rng, sizes):
    length, each = either(rng, sizes, 0, sizes.s)
    return PrefixLM(length), lambda p: (p.k < each[p.b]) | (p.k <= p.q)


def chunks(rng, sizes):
    n = int(rng.integers(1, 9))
    if rng.random() < 0.5:
        return BlockCausal(n), lambda p: p.k // n <= p.q // n
    return ChunkedCausal(n), lambda p: (p.k // n == p.q // n) & (p.k <= p.q)


def segments(rng, sizes):
    rows = ints(rng, -1, 3, (sizes.b, sizes.t))
    columns = ints(rng, -1, 3, (sizes.b, sizes.s))

    def seen(p):
        mine, theirs = rows[p.b][p.i], columns[p.b][p.j]
        return (mine == theirs) & (mine >= 0)

    return Segments(jnp.asarray(rows), jnp.asarray(columns)), seen


def array(rng, sizes):
    shape = [n if rng.random() < 0.6 else 1 for n in (sizes.b, sizes.heads, sizes.t, sizes.s)]
    x = rng.random(shape) < 0.7
    whole = np.broadcast_to(x, (sizes.b, sizes.heads, sizes.t, sizes.s))
    return DenseMask(jnp.asarray(x)), lambda p: whole[p.b, p.h][p.i, p.j]


def grid(rng, sizes):
    shape = tuple(int(rng.integers(2, 6)) for _ in range(2))
    size = tuple(int(rng.integers(1, n + 1)) for n in shape)
    ends = tuple(bool(rng.random() < 0.3) for _ in shape)

    def seen(p):
        ok = np.ones(np.broadcast_shapes(p.at_q.shape, p.at_k.shape), bool)
        total = shape[0] * shape[1]
        at = [(x // shape[1], x % shape[1]) for x in (p.at_q, p.at_k)]
        for axis, (n, w, end) in enumerate(zip(shape, size, ends)):
            q, k = at[0][axis], at[1][axis]
            first = q - w + 1 if end else np.clip(q - w // 2, 0, n - w)
            ok &= (first <= k) & (k < first + w)
        return ok & (0 <= p.at_q) & (p.at_q < total) & (0 <= p.at_k) & (p.at_k < total)

    return Neighbourhood(shape, size, ends), seen


def skips(b, h, q, k):
    return (q - k) % 3 != 1


def by_head(b, h, q, k):
    return (h + q + k) % 2 == 0


def by_row(b, h, q, k):
    return (b + k) % 3 != 0


def parity(b, h, q, k):
    return ((q ^ k) & 2 == 0) | (q * q - k * k < 9)


class Reach(eqx.Module):
    """Arrays read by row, by head and by the distance of a pair."""

    table: Any

    def __call__(self, b, h, q, k):
        far = jnp.clip(q - k, 0, self.table.shape[1] - 1)
        return self.table[h, far] | (b == 1)


def function(rng, sizes):
    plain = [skips, by_head, by_row, parity]
    if rng.random() < 0.3:
        table = rng.random((sizes.heads, 6)) < 0.7
        seen = lambda p: table[p.h, np.clip(p.q - p.k, 0, 5)] | (p.b == 1)
        return MaskFn(Reach(jnp.asarray(table))), seen
    fn = plain[rng.integers(len(plain))]
    return MaskFn(fn), lambda p: fn(p.b, p.h, p.q, p.k)


def at_most(b, h, q, k, mine, theirs, more):
    return mine <= theirs + more


def aligned(b, h, q, k, x, y):
    return x @ y > 0.5


def operands(rng, sizes):
    if rng.random() < 0.5:
        rows, columns = ints(rng, 0, 6, (sizes.b, sizes.t)), ints(rng, 0, 9, (sizes.b, sizes.s))
        more = ints(rng, 0, 3, (sizes.heads,))
        given = (jnp.asarray(rows),), (jnp.asarray(columns),)
        mask = MaskFn(at_most, *given, arrays=(scores.Operand(jnp.asarray(more), "h"),))
        return mask, lambda p: rows[p.b][p.i] <= columns[p.b][p.j] + more[p.h]
    x = ints(rng, -1, 2, (sizes.b, sizes.t, 3)).astype(np.float32)
    y = ints(rng, 0, 2, (sizes.b, sizes.s, 3)).astype(np.float32)
    pair = scores.Operand(jnp.asarray(x), "btf"), scores.Operand(jnp.asarray(y), "bsf")
    return MaskFn(aligned, arrays=pair), lambda p: (x[p.b] @ y[p.b].T)[p.i, p.j] > 0.5


def tree(rng, sizes):
    """A tree of the queries: its mask, and the function that moves positions."""
    lead = (sizes.b,) if rng.random() < 0.5 else ()
    parents = np.stack(
        [ints(rng, -1, i, lead) if i else np.full(lead, -1, np.int32) for i in range(sizes.t)], -1
    ).astype(np.int32)
    each = np.broadcast_to(parents, (sizes.b, sizes.t))
    start = sizes.at

    def chain(b, place):
        """A token of the tree and its ancestors, as indices."""
        at, found = int(place - start[b]), []
        while at >= 0:
            found.append(at)
            at = int(each[b][at])
        return found

    def inside(b, place):
        return start[b] <= place < start[b] + sizes.t

    def moved(b, places):
        depth = [len(chain(b, x)) - 1 + start[b] if inside(b, x) else x for x in places.ravel()]
        return np.array(depth, np.int64).reshape(places.shape)

    def one(b, q, k):
        if not inside(b, q) or not inside(b, k):
            return k <= q
        return int(k - start[b]) in chain(b, q)

    def seen(p):
        q, k = np.broadcast_arrays(p.at_q, p.at_k)
        return np.array([one(p.b, *x) for x in zip(q.ravel(), k.ravel())], bool).reshape(q.shape)

    begin = jnp.asarray(start.astype(np.int32))
    return Tree(jnp.asarray(parents), begin), seen, moved


def selected(rng, sizes):
    lead = (sizes.b,) if rng.random() < 0.7 else ()
    h = int(rng.choice([1, sizes.kv_heads, sizes.heads]))
    block_q, block_k = (1, 1) if rng.random() < 0.6 else map(int, rng.integers(1, 5, 2))
    rows, n = -(-sizes.t // block_q), int(rng.integers(0, 7))
    most = max(int(sizes.places.max(initial=0)) // block_k + 2, 2)
    listed = ints(rng, -1, most, (*lead, h, rows, n))
    each = np.broadcast_to(listed, (sizes.b, h, rows, n))

    def seen(p):
        head = p.h * h // sizes.heads
        row = each[p.b, head][p.i[:, 0] // block_q]  # [t, n]
        found = (row[:, None] == (p.at_k[0] // block_k)[None, :, None]) & (row >= 0)[:, None]
        return found.any(-1)

    return lambda x: Selected(x, block_q, block_k), listed, seen


ANY = (causal, causal, window, window, padding, rows_end, prefix, chunks, grid, function)
WITH_ARRAYS = (*ANY, segments, array, operands)


def mask(rng, sizes, depth: int = 2):
    """A mask of up to some levels of `&`, `|` and `~`, and its twin."""
    if depth == 0 or rng.random() < 0.35:
        pool = WITH_ARRAYS if sizes.arrays else ANY
        return pool[rng.integers(len(pool))](rng, sizes)
    kind = rng.random()
    one, seen = mask(rng, sizes, depth - 1)
    if kind < 0.2:
        return ~one, lambda p: ~seen(p)
    other, also = mask(rng, sizes, depth - 1)
    if kind < 0.65:
        return one & other, lambda p: seen(p) & also(p)
    return one | other, lambda p: seen(p) | also(p)


def additive(x, logit):
    return logit + x, np.ones_like(logit)


def alibi(rng, sizes):
    slopes = rng.random(sizes.heads)
    build = ALiBi(jnp.asarray(slopes, jnp.float32))
    slopes = slopes.astype(np.float32).astype(float)
    return build, lambda p, x: additive(-slopes[p.h] * abs(p.q - p.k), x)


def t5(rng, sizes):
    both, far = bool(rng.random() < 0.5), int(rng.choice([8, 20]))
    columns = 1 if rng.random() < 0.3 else sizes.heads
    table = rng.normal(size=(8, columns)).astype(np.float32)

    bucket = lambda q, k: om.t5_bucket_of(k - q, 8, both, far)
    read = lambda p: table[bucket(p.q, p.k), min(p.h, columns - 1)].astype(float)
    score = T5Bias(jnp.asarray(table), bidirectional=both, max_distance=far)
    return score, lambda p, x: additive(read(p), x)


def capped(rng, sizes):
    c = float(rng.choice([2.0, 6.0]))
    twin = lambda p, x: (c * np.tanh(x / c), 1 - np.tanh(x / c) ** 2)
    return scores.SoftCap(c), twin


def nearer(logit, b, h, q, k):
    return logit * (1 + h.astype(logit.dtype) / 4) - abs(q - k).astype(logit.dtype) / 8


def of_function(rng, sizes):
    def twin(p, x):
        by = 1 + p.h / 4
        return x * by - abs(p.q - p.k) / 8, np.full_like(x, by)

    return ScoreFn(nearer), twin


def plus(logit, b, h, q, k, x, y):
    return logit + x.astype(logit.dtype) * y.astype(logit.dtype)


def plus_product(logit, b, h, q, k, x, y):
    return logit + (x @ y).astype(logit.dtype)


AXES = ("bt", "bs", "hs", "bht", "ts", "hts", "bhts", "h", "b", "bhs")


def of_operands(rng, sizes):
    count = dict(b=sizes.b, h=sizes.heads, t=sizes.t, s=sizes.s)
    if rng.random() < 0.4:
        x, y = (rng.normal(size=(sizes.b, n, 3)).astype(np.float32) for n in (sizes.t, sizes.s))
        given = scores.Operand(jnp.asarray(x), "btf"), scores.Operand(jnp.asarray(y), "bsf")
        read = lambda p: (x[p.b].astype(float) @ y[p.b].T)[p.i, p.j]
        return ScoreFn(plus_product, given), lambda p, z: additive(read(p), z)
    axes = [str(rng.choice(AXES)) for _ in range(2)]
    xs = [rng.normal(size=[count[a] for a in names]).astype(np.float32) for names in axes]

    def read(x, names, p):
        at = dict(b=p.b, h=p.h, t=p.i, s=p.j)
        return x[tuple(at[a] for a in names)].astype(float)

    twin = lambda p, z: additive(read(xs[0], axes[0], p) * read(xs[1], axes[1], p), z)
    given = [scores.Operand(jnp.asarray(x), names) for x, names in zip(xs, axes)]
    return ScoreFn(plus, given), twin


def added(rng, sizes):
    shape = [n if rng.random() < 0.6 else 1 for n in (sizes.b, sizes.heads, sizes.t, sizes.s)]
    x = rng.normal(size=shape).astype(np.float32)
    whole = np.broadcast_to(x, (sizes.b, sizes.heads, sizes.t, sizes.s)).astype(float)
    return scores.Bias(jnp.asarray(x)), lambda p, z: additive(whole[p.b, p.h][p.i, p.j], z)


def some_scores(rng, sizes):
    """Up to two scores, and the twin of all of them."""
    pool = (alibi, t5, capped, of_function, *((of_operands, added) if sizes.arrays else ()))
    drawn = [pool[rng.integers(len(pool))](rng, sizes) for _ in range(rng.integers(0, 3))]

    def twin(p, x):
        def one(state, made):
            x, slope = state
            new, by = made[1](p, x)
            return new, slope * by

        return functools.reduce(one, drawn, (x, np.ones_like(x)))

    return tuple(x for x, _ in drawn), twin
