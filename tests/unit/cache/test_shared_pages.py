"""Rows of a `PagedKVCache` that share pages: a model of lists says what each row holds, and the oracle
what attention over them is.
"""

import importlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix import oracle

from eqattn import (
    ALiBi,
    AttentionMetadata,
    cascade_attention,
    Dense,
    DenseMask,
    MaskFn,
    Ragged,
    ScoreFn,
    Selected,
    SlidingWindow,
    Tree,
)
from eqattn.cache import KVCache, LatentKVCache, PagedKVCache, StackedPagedKVCache
from eqattn.scores import Operand


cascade = importlib.import_module("eqattn._calls.cascade")
ROWS, SIZE, PAGES, CAPACITY, NEW = 4, 4, 24, 24, 3
appended = jax.jit(lambda cache, x, counts: cache.append(x, x, counts), donate_argnums=0)


def held_by(cache):
    """The tokens of each row, each known by the number that its key and value are."""
    key, value = (np.asarray(x.materialise())[..., 0, 0] for x in (cache.key, cache.value))
    np.testing.assert_array_equal(key, value)
    return [key[b, :n].tolist() for b, n in enumerate(cache.length.tolist())]


def users_of(cache):
    table = np.asarray(cache.table)
    pages = np.where(table < -1, -2 - table, table)
    return np.bincount(pages[pages >= 0], minlength=PAGES)


def numbers(first):
    x = np.arange(first, first + ROWS * NEW, dtype=np.float32).reshape(ROWS, NEW, 1, 1)
    return jnp.asarray(x)


def put(cache, lists, counts, first, donate=False):
    """Appends to the cache and to the model, with pages for just that."""
    new = numbers(first)
    cache = cache.reserve(counts, donate=donate)
    cache = appended(cache, new, jnp.asarray(counts, jnp.int32))
    given = np.asarray(new)[..., 0, 0]
    return cache, [row + given[b, : counts[b]].tolist() for b, row in enumerate(lists)]


def test_a_page_is_copied_when_it_is_written():
    cache, lists = PagedKVCache.empty(ROWS, CAPACITY, PAGES, SIZE, 1, 1), [[]] * ROWS
    for first in (0, 100):
        cache, lists = put(cache, lists, [3, 0, 0, 0], first)
    cache = cache.share([1, 2], from_row=0, tokens=6)
    lists = [lists[0], lists[0], lists[0], []]
    assert held_by(cache) == lists and users_of(cache).tolist()[:3] == [3, 3, 0]
    with pytest.raises(Exception, match="or not alone; call cache.reserve"):
        jax.block_until_ready(cache.append(numbers(0), numbers(0), jnp.array([0, 1, 0, 0])))
    assert users_of(cache.reserve([1, 0, 0, 0])).tolist()[:4] == [3, 2, 1, 0]  # no more than that
    assert users_of(cache.reserve(1)).tolist()[:6] == [3, 1, 1, 1, 1, 0]  # row 3 gets one, too
    # Rows 1 and 0 get copies of the second page, and row 2, the last that has it, keeps it.
    cache, lists = put(cache, lists, [1, 1, 0, 0], 200)
    assert held_by(cache) == lists and users_of(cache).tolist()[:4] == [3, 1, 1, 1]
    before = users_of(cache)
    cache, lists = put(cache, lists, [0, 0, 2, 0], 300)
    assert held_by(cache) == lists and users_of(cache).tolist() == before.tolist()
    whole = cache.release([0, 1, 2]).reserve(0)
    assert users_of(whole).sum() == 0 and held_by(whole) == [[]] * ROWS
    # Whole pages are never copied.
    cache, lists = put(cache.release([1, 2, 3]), [lists[0], [], [], []], [1, 0, 0, 0], 400)
    cache, lists = cache.share(3, 0, 8), [lists[0], [], [], lists[0][:8]]
    before = users_of(cache).sum()
    cache, lists = put(cache, lists, [0, 0, 0, 1], 500)
    assert held_by(cache) == lists and users_of(cache).sum() == before + 1


@pytest.mark.parametrize("seed", [0])
def test_nothing_is_lost_whatever_the_order(seed):
    """Rows join, share, double, are cut short and leave at random."""
    rng = np.random.default_rng(seed)
    cache, lists = PagedKVCache.empty(ROWS, CAPACITY, PAGES, SIZE, 1, 1), [[]] * ROWS
    done = {"append": 0, "share": 0, "release": 0, "truncate": 0, "reorder": 0}
    for i in range(40):
        what = rng.choice(list(done), p=[0.4, 0.25, 0.15, 0.1, 0.1])
        full = [b for b in range(ROWS) if lists[b]]
        empty = [b for b in range(ROWS) if (np.asarray(cache.table)[b] == -1).all()]
        if what == "append":
            counts = np.minimum(rng.integers(0, NEW + 1, ROWS), [CAPACITY - len(x) for x in lists])
            donate = bool(rng.integers(2))
            cache, lists = put(cache, lists, counts.tolist(), 1000 * i, donate)
        elif what == "share" and full and empty:
            source, rows = rng.choice(full), rng.permutation(empty)[: rng.integers(1, 3)]
            tokens = int(rng.integers(1, len(lists[source]) + 1))
            cache = cache.share(rows.tolist(), int(source), tokens)
            lists = [lists[source][:tokens] if b in rows else x for b, x in enumerate(lists)]
        elif what == "release":
            row = int(rng.integers(ROWS))
            cache, lists = (
                cache.release([row]),
                [[] if b == row else x for b, x in enumerate(lists)],
            )
        elif what == "truncate":
            lengths = [int(rng.integers(0, len(x) + 1)) for x in lists]
            cache = cache.truncate(jnp.asarray(lengths, jnp.int32))
            lists = [x[:n] for x, n in zip(lists, lengths)]
        elif what == "reorder":
            rows = rng.integers(0, ROWS, ROWS)
            cache, lists = cache.reorder(jnp.asarray(rows, jnp.int32)), [lists[b] for b in rows]
        else:
            continue
        done[what] += 1
        assert held_by(cache) == lists, (i, what)
        table = np.asarray(cache.table)
        own = table[table >= 0]
        assert len(set(own)) == len(own) and (users_of(cache)[own] == 1).all()
    assert all(done.values())


@pytest.mark.parametrize(
    "rows, from_row, tokens, match",
    [
        (1, 7, 3, "among the 4 rows"),
        ([1, 4], 0, 3, "among the 4 rows"),
        (1, 2, 3, "Row 2 has 0 tokens, not 3"),
        (1, 0, 4, "Row 0 has 3 tokens, not 4"),
        (1, 0, 0, "tokens must be"),
        (3, 0, 1, r"Rows \[3\] have tokens or pages"),
        ([1, 1], 0, 1, "named twice"),
        (0, 0, 1, "named twice"),
    ],
)
def test_what_cannot_be_shared_raises(rows, from_row, tokens, match):
    cache = PagedKVCache.empty(ROWS, CAPACITY, PAGES, SIZE, 1, 1).reserve([3, 0, 0, 1])
    cache = cache.append(numbers(0), numbers(0), jnp.array([3, 0, 0, 0]))
    with pytest.raises(ValueError, match=match):
        cache.share(rows, from_row, tokens)


HEADS, DIM, VALUE = 4, 6, 5
COUNTS = np.array([1, 1, 1, 0, 1])
LIVE = COUNTS > 0


def filled(kind, tokens, dtype):
    """A cache in which rows 2 and 4 begin with 10 and 7 tokens of row 0, and row 1 is alone."""
    heads, dim, value = (1, 4, VALUE) if kind == "latent" else (2, DIM, VALUE)
    cache = PagedKVCache.empty(5, CAPACITY, PAGES, SIZE, heads, dim, value, dtype)
    rng = np.random.default_rng(0)
    draw = lambda n: [
        jnp.asarray(rng.standard_normal((5, n, heads, size)), dtype) for size in (dim, value)
    ]
    cache = cache.reserve([12, 0, 0, 5, 0]).append(*draw(12), jnp.array([12, 0, 0, 5, 0]))
    cache = cache.share(1, 0, 10).share(2, 0, 7).reorder(jnp.array([0, 3, 1, 4, 2]))
    cache = cache.reserve(COUNTS * tokens) if tokens else cache
    cache = LatentKVCache(cache) if kind == "latent" else cache
    return cache, draw(tokens)


@pytest.mark.parametrize("kind, tokens, block_q", [("plain", 3, 2), ("latent", 1, 64)])
def test_a_cascade_is_attention_row_by_row(kind, tokens, block_q, x64):
    """The group of rows 0, 2 and 4 shares 4 tokens in whole pages, and 3 of the page after."""
    cache, new = filled(kind, tokens, jnp.float64)
    counts = jnp.asarray(COUNTS * tokens, jnp.int32)
    size = cache.key.shape[-1]
    query = jnp.asarray(np.random.default_rng(1).standard_normal((5, tokens, HEADS, size)))
    sinks = jnp.linspace(-1.0, 1.0, HEADS)
    strategy = Ragged(AttentionMetadata(softmax_aux=sinks))

    @jax.jit
    def run(cache, query):
        offset = cache.length
        cache = cache.append(*new, counts)
        out = cascade_attention(
            query, cache, strategy, q_offset=offset, block_q=block_q, return_logsumexp=True
        )
        keys, values = cache.key.materialise(), cache.value.materialise()
        return out.attention_outputs, out.logsumexp, keys, values, offset

    out, logsumexp, keys, values, offset = map(np.asarray, run(cache, query))
    seen = np.arange(CAPACITY) <= offset[:, None, None] + np.arange(tokens)[:, None]
    of = oracle.Problem(
        np.asarray(query),
        keys,
        values,
        scale=size**-0.5,
        mask=seen[:, None],
        sinks=np.asarray(sinks),
    )
    want = oracle.forward(of)
    np.testing.assert_allclose(out[LIVE], want.out[LIVE], rtol=0, atol=1e-13)
    np.testing.assert_allclose(logsumexp[LIVE], want.lse[LIVE], rtol=0, atol=1e-13)


def shared_prefixes(rows, levels):
    """How many tokens a row shares on each level with its group, from what rows hold: a group are
    rows that share the token after all that the larger group does.
    """
    ends, groups = [[0] * len(rows)], [list(range(len(rows)))]
    for _ in range(levels):
        ends.append(list(ends[-1]))
        smaller = []
        for group in groups:
            start, parts = ends[-2][group[0]], {}
            for i in group:
                token = rows[i][start] if start < len(rows[i]) else ("end", i)
                parts.setdefault(token, []).append(i)
            for part in (x for x in parts.values() if len(x) > 1):
                end = min(len(rows[i]) for i in part)
                while len({tuple(rows[i][:end]) for i in part}) > 1:
                    end -= 1
                for i in part:
                    ends[-1][i] = end
            smaller += parts.values()
        groups = smaller
    return ends[1:]


@pytest.mark.parametrize("kept, ends", [(4, [[4, 4, 4], [12, 12, 4]]), (0, [[12, 12, 0]] * 2)])
def test_a_row_that_went_back_keeps_pages_that_are_not_its_prefix(kept, ends):
    cache = PagedKVCache.empty(3, CAPACITY, PAGES, SIZE, 2, DIM)
    x = jnp.ones((3, 12, 2, DIM))
    cache = cache.reserve([12, 0, 0]).append(x, x, jnp.array([12, 0, 0], jnp.int32))
    cache = cache.share([1, 2], 0, 12).truncate(jnp.array([12, 12, kept], jnp.int32))
    starts = jnp.zeros(3, jnp.int32)
    for want in ends:
        starts = cascade._groups_of(cache.table, cache.length, SIZE, starts).ends
        assert starts.tolist() == want


@pytest.mark.parametrize("seed, levels", [(0, 3), (1, 2)])
def test_a_cascade_of_groups_within_groups(seed, levels, monkeypatch, x64):
    """Rows share whole pages and parts of pages of each other, some after more tokens of their own.
    Each level reads what its groups share beyond the larger ones, once.
    """
    rng, batch, capacity = np.random.default_rng(seed), 7, 40
    cache = PagedKVCache.empty(batch, capacity, 60, SIZE, 2, DIM, dtype=jnp.float64)
    draw = lambda n: jnp.asarray(rng.standard_normal((batch, n, 2, DIM)))
    put = jax.jit(lambda cache, x, counts: cache.append(x, x, counts))
    rows, token = [[] for _ in range(batch)], 0
    for _ in range(3):
        counts = np.where(rng.random(batch) < 0.4, rng.integers(1, 9, batch), 0)
        cache = put(cache.reserve(counts), draw(8), jnp.asarray(counts, jnp.int32))
        for b, n in enumerate(counts):
            rows[b] += range(token, token + n)
            token += n
        for b in np.flatnonzero([not row for row in rows]):
            lender = int(rng.integers(batch))
            tokens = len(rows[lender]) - int(rng.integers(2)) * (len(rows[lender]) % SIZE)
            if tokens:
                cache = cache.share(int(b), lender, tokens)
                rows[b] = rows[lender][:tokens]
    # Some rows go back, and keep pages that they share with others.
    held = np.asarray(cache.length)
    held = np.where(rng.random(batch) < 0.3, rng.integers(0, held + 1), held).astype(np.int32)
    cache, rows = cache.truncate(jnp.asarray(held)), [x[:n] for x, n in zip(rows, held)]
    assert np.asarray(cache.length).tolist() == [len(row) for row in rows]
    live = rng.random(batch) < 0.6  # A row that does not go on keeps its pages.
    cache = put(cache.reserve(live * 1), draw(1), jnp.asarray(live, jnp.int32))
    query = jnp.asarray(rng.standard_normal((batch, 1, HEADS, DIM)))

    found, original = [], cascade._groups_of
    spy = lambda *args: found.append(original(*args)) or found[-1]
    monkeypatch.setattr(cascade, "_groups_of", spy)
    out = cascade_attention(query, cache, q_offset=jnp.asarray(held), levels=levels)
    seen = (np.arange(capacity) <= held[:, None])[:, None, None]
    keys, values = (np.asarray(x.materialise()) for x in (cache.key, cache.value))
    problem = oracle.Problem(np.asarray(query), keys, values, scale=DIM**-0.5, mask=seen)
    want = oracle.forward(problem).out
    np.testing.assert_allclose(out.attention_outputs[live], want[live], rtol=0, atol=1e-13)

    # A row that wrote to a shared page has a copy of it, so groups share whole pages alone.
    starts = lambda row: range(0, len(row) - SIZE + 1, SIZE)
    whole = [[tuple(row[i : i + SIZE]) for i in starts(row)] for row in rows]
    ends = shared_prefixes(whole, levels)
    assert [(x.ends // SIZE).tolist() for x in found] == ends
    starts = [[0] * batch, *(x.ends.tolist() for x in found[:-1])]
    assert [x.starts.tolist() for x in found] == starts


def near(b, h, q, k, key):
    return (q - k < 9 + b) & (k != key)


def product(s, b, h, q, k, x, y, z, w):
    wave = jnp.sin(0.3 * q.astype(s.dtype)) * b.astype(s.dtype)
    return s + w * k.astype(s.dtype) / CAPACITY + x @ y + z * wave


def in_matrices(given, keys, values, seen, offset):
    """The output, the logsumexp and the largest logit of live rows; numbers may be complex."""
    b, k = np.arange(5)[:, None, None], np.arange(CAPACITY)
    q = offset[:, None, None] + np.arange(given["query"].shape[1])[:, None]
    logits = np.einsum("bthd,bshd->bhts", given["query"], np.repeat(keys, HEADS // 2, 2))
    logits = given["cap"] * np.tanh(logits * DIM**-0.5 / given["cap"])
    logits = logits - given["slopes"][:, None, None] * np.abs(q - k)[:, None]
    logits = logits + np.einsum("bhtf,sf->bhts", given["per_query"], given["per_key"])
    logits = logits + given["per_head"][..., None, None] * np.sin(0.3 * q)[:, None] * b[:, None]
    logits = logits + given["per_token"][:, None] * k / CAPACITY
    logits = np.where(seen[:, None], logits, -np.inf)[LIVE]
    most = logits.real.max(-1, keepdims=True)
    e = np.exp(logits - most)
    out = np.einsum("bhts,bshv->bthv", e, np.repeat(values, HEADS // 2, 2)[LIVE])
    out = out / e.sum(-1).swapaxes(1, 2)[..., None]
    return out, (np.log(e.sum(-1)) + most[..., 0]).swapaxes(1, 2), most[..., 0].swapaxes(1, 2)


@pytest.mark.parametrize("causal, tokens", [(True, 3)])
def test_a_cascade_with_masks_and_scores(causal, tokens, x64):
    """A window, functions of the row, arrays per row, head and query, and per key. Derivatives along
    each input, of the pages too, are those that a complex step of the matrices finds.
    """
    cache, new = filled("plain", tokens, jnp.float64)
    counts = jnp.asarray(COUNTS * tokens, jnp.int32)
    rng = np.random.default_rng(2)
    draw = rng.standard_normal
    given = dict(
        query=draw((5, tokens, HEADS, DIM)),
        per_query=draw((5, HEADS, tokens, 3)),
        per_head=draw((5, HEADS)),
        per_key=draw((CAPACITY, 3)),
        per_token=draw(tokens),
        slopes=np.linspace(0.1, 0.4, HEADS),
        cap=np.float64(2.5),
        pages=(cache.key_pages, cache.value_pages),
    )
    hidden, offset = rng.integers(0, CAPACITY, 5, np.int32), np.asarray(cache.length)

    def appended(pages, new):
        held = eqx.tree_at(lambda c: (c.key_pages, c.value_pages), cache, pages)
        return held.append(*new, counts)

    def run(given):
        given = jax.tree.map(jnp.asarray, given)
        axes = dict(per_query="bhtf", per_key="sf", per_head="bh", per_token="t")  # x, y, z, w
        out = cascade_attention(
            given["query"],
            appended(given["pages"], new),
            Ragged(AttentionMetadata(logits_soft_cap=given["cap"])),
            q_offset=offset,
            mask=SlidingWindow(11, None) & MaskFn(near, arrays=(Operand(hidden, "b"),)),
            causal=causal,
            score=[
                ALiBi(given["slopes"]),
                ScoreFn(product, tuple(Operand(given[n], a) for n, a in axes.items())),
            ],
            block_q=4,
            return_logsumexp=True,
            return_max_logits=True,
        )
        return [x[LIVE] for x in (out.attention_outputs, out.logsumexp, out.max_logits)]

    @jax.jit
    def materialised(pages, new):
        held = appended(pages, new)
        return held.key.materialise(), held.value.materialise()

    keys, values = map(np.asarray, materialised(given["pages"], new))
    b, k = np.arange(5)[:, None, None], np.arange(CAPACITY)
    q = offset[:, None, None] + np.arange(tokens)[:, None]
    seen = (k <= q) if causal else (k < (offset + COUNTS * tokens)[:, None, None])
    seen = seen & (q - k <= 11) & (q - k < 9 + b) & (k != hidden[:, None, None])
    want = in_matrices(given, keys, values, seen, offset)
    cts = [draw(x.shape) for x in want[:2]]

    def loss(given):
        found = run(given)
        return sum((x * ct).sum() for x, ct in zip(found, cts)), found

    grads, found = jax.jit(jax.grad(loss, has_aux=True))(given)
    for x, y, atol in zip(found, want, (1e-13, 1e-13, 1e-6)):
        np.testing.assert_allclose(x, y, rtol=0, atol=atol)
    step = 1e-30
    for name, grad in grads.items():
        along = jax.tree.map(lambda x: draw(np.shape(x)), given[name])
        moved, pair = dict(given), (keys, values)
        if name == "pages":
            turned = materialised(jax.tree.map(jnp.asarray, along), [0 * x for x in new])
            pair = [x + 1j * step * np.asarray(d) for x, d in zip(pair, turned)]
        else:
            moved[name] = given[name] + 1j * step * along
        found = in_matrices(moved, *pair, seen, offset)
        slope = sum((x.imag / step * ct).sum() for x, ct in zip(found, cts))
        got = sum(
            jax.tree.leaves(jax.tree.map(lambda g, d: np.sum(np.asarray(g) * d), grad, along))
        )
        np.testing.assert_allclose(got, slope, rtol=1e-10, atol=1e-11, err_msg=name)


def paths_of(parents):
    """Whether each token of a tree is above each other or is it, and the depth of each."""
    above = np.zeros((len(parents), len(parents)), bool)
    for i in range(len(parents)):
        at = i
        while at >= 0:
            above[i, at], at = True, parents[at]
    return above, above.sum(1) - 1


TREES = {  # where the trees begin, whether the mask is causal, and whether the tree is negated
    "new tokens": (0, True, False),
    "from shared tokens on": (8, True, False),
    "no order": (0, False, False),
    "all others": (0, False, True),
}


@pytest.mark.parametrize("name", ["from shared tokens on"])
def test_a_cascade_of_trees(name, x64):
    """Drafts of each row's own tree see what is shared, at the distance of their depth. Where a row
    has a tree that begins among the tokens that it shares, these are read as tokens of the tree.
    """
    early, causal, negated = TREES[name]
    n, window = 6, SlidingWindow(9, None)
    cache, new = filled("plain", n, jnp.float64)
    offset, rng = np.asarray(cache.length), np.random.default_rng(3)
    start = offset - early * (np.arange(5) == 2)
    size = n + early
    parents = np.stack([[rng.integers(-1, i) if i else -1 for i in range(size)] for _ in range(5)])
    query = rng.standard_normal((5, n, HEADS, DIM))
    slopes = np.linspace(0.1, 0.4, HEADS)

    @jax.jit
    def run(cache, query, start):
        cache = cache.append(*new, jnp.asarray(COUNTS * n, jnp.int32))
        out = cascade_attention(
            query,
            cache,
            q_offset=jnp.asarray(offset),
            mask=(~Tree(parents, start) if negated else Tree(parents, start)) & window,
            causal=causal,
            score=ALiBi(slopes),
            block_q=4,
            return_logsumexp=True,
            return_max_logits=True,
        )
        found = out.attention_outputs, out.logsumexp, out.max_logits
        return found, cache.key.materialise(), cache.value.materialise()

    shapes = (5, n, HEADS, VALUE), (5, n, HEADS)
    cts = [rng.standard_normal(x) * LIVE.reshape(5, *[1] * (len(x) - 1)) for x in shapes]

    def loss(query):
        found, *held = run(cache, query, jnp.asarray(start))
        total = sum((jnp.where(ct != 0, x, 0) * ct).sum() for x, ct in zip(found, cts))
        return total, (found, *held)

    gradient, (found, keys, values) = jax.grad(loss, has_aux=True)(jnp.asarray(query))
    places = np.arange(CAPACITY)
    seen, bias = np.zeros((5, 1, n, CAPACITY), bool), np.zeros((5, HEADS, n, CAPACITY))
    for b in range(5):
        above, depth = paths_of(parents[b])
        inside = slice(start[b], start[b] + size)
        whole, at = np.tri(CAPACITY, dtype=bool), places.copy()
        whole[inside, inside] = above[: CAPACITY - start[b], : CAPACITY - start[b]]
        at[inside] = start[b] + depth[: CAPACITY - start[b]]
        rows = slice(offset[b], offset[b] + n)
        distance = at[rows, None] - at
        shown = places < offset[b] + n if negated else True
        seen[b, 0] = (whole[rows] ^ negated) & shown & (distance <= 9)
        bias[b] = -slopes[:, None, None] * abs(distance)
    problem = oracle.Problem(
        query, np.asarray(keys), np.asarray(values), scale=DIM**-0.5, mask=seen, bias=bias
    )
    want = oracle.forward(problem)
    np.testing.assert_allclose(gradient, oracle.vjp(problem, *cts)["q"], rtol=0, atol=1e-12)
    for x, y, atol in zip(found, (want.out, want.lse, want.max), (1e-13, 1e-13, 1e-6)):
        np.testing.assert_allclose(np.asarray(x)[LIVE], y[LIVE], rtol=0, atol=atol)


def test_a_page_that_rows_share_in_part(x64):
    """The last tokens of rows 0, 2 and 4 look back, before any of them writes: row 4 sees 3 tokens of
    a page of which row 0 holds 4.
    """
    cache, _ = filled("plain", 0, jnp.float64)
    query = jnp.asarray(np.random.default_rng(1).standard_normal((5, 1, HEADS, DIM)))
    at = jnp.maximum(cache.length - 1, 0)
    out = np.asarray(jax.jit(cascade_attention)(query, cache, q_offset=at).attention_outputs)
    keys, values = (np.asarray(x.materialise()) for x in (cache.key, cache.value))
    seen = np.arange(CAPACITY) <= np.asarray(at)[:, None, None, None]
    want = oracle.forward(
        oracle.Problem(np.asarray(query), keys, values, scale=DIM**-0.5, mask=seen)
    )
    np.testing.assert_allclose(out[LIVE], want.out[LIVE], rtol=0, atol=1e-13)


def test_a_cascade_needs_pages():
    query = jnp.zeros((1, 1, 2, 4))
    with pytest.raises(TypeError, match="KVCache has none of; use attention"):
        cascade_attention(query, KVCache.empty(1, 64, 2, 4), q_offset=jnp.zeros(1, jnp.int32))
    pages = PagedKVCache.empty(1, 64, 4, 16, 2, 4)
    with pytest.raises(ValueError, match=r"q_offset must be integers \[b\] = \(1,\)"):
        cascade_attention(query, pages, q_offset=jnp.zeros(2, jnp.int32))
    with pytest.raises(TypeError, match="needs the strategy Ragged"):
        cascade_attention(query, pages, Dense(), q_offset=jnp.zeros(1, jnp.int32))


class EachRow(DenseMask):
    """A mask that says itself what it is for other rows."""

    def of_rows(self, row):
        return self


@pytest.mark.parametrize(
    "mask, match",
    [
        (EachRow(np.ones((1, 1), bool)), "a EachRow has lists or places of its own"),
        (Selected(np.zeros((1, 1, 1, 2), np.int32)), "a Selected has lists or places of its own"),
        (DenseMask(np.ones((2, 1, 1, 64), bool)), "an array per key must be the same for all"),
        (DenseMask(np.ones((2, 1, 2, 1), bool)), r"does not broadcast to .* \(2, 2, 1, 64\)"),
    ],
    ids=["own", "list", "keys of rows", "queries"],
)
def test_masks_that_a_cascade_cannot_read(mask, match):
    query, pages = jnp.zeros((2, 1, 2, 4)), PagedKVCache.empty(2, 64, 4, 16, 2, 4)
    with pytest.raises(ValueError, match=match):
        cascade_attention(query, pages, q_offset=jnp.zeros(2, jnp.int32), mask=mask)


def test_layers_of_one_table_share_pages_in_the_shares_of_devices():
    """A page is shared in all layers, and its copy stays on the device that has its part."""
    layers, sizes = 2, dict(capacity=CAPACITY, pages=PAGES, page_size=SIZE, kv_heads=1, head_dim=1)
    cache = StackedPagedKVCache.empty(layers, batch=2, devices=2, **sizes).reserve([6, 0])
    new = jnp.arange(12.0).reshape(2, 6, 1, 1)

    def append(cache, x, counts):
        for i in range(layers):
            cache = cache.layer(i).append(x + 100 * i, x + 100 * i, counts).stack
        return cache

    cache = append(cache, new, jnp.array([6, 0])).share(1, 0, 6)
    with pytest.raises(Exception, match="or not alone"):
        jax.block_until_ready(append(cache, new[:, :1], jnp.array([0, 1])))
    cache = append(cache.reserve([0, 1]), new[:, :1], jnp.array([0, 1]))
    pages = np.asarray(cache.table)[:, :2]
    pages = np.where(pages < -1, -2 - pages, pages)
    assert pages[0, 0] == pages[1, 0] and pages[0, 1] != pages[1, 1]
    assert (pages // (PAGES // 2) == [0, 1]).all()
    for i in range(layers):
        first, second = held_by(cache.layer(i))
        assert first == [100 * i + x for x in range(6)]
        assert second == [*first, 100 * i + 6.0]


def of_layers(stack):
    return [held_by(stack.layer(i)) for i in range(len(stack.length))]


def numbered(*numbers):
    """One token for each row, of one head and one feature."""
    return jnp.asarray(numbers, jnp.float32)[:, None, None, None]


def test_rows_of_all_layers_are_reordered():
    stack = StackedPagedKVCache.empty(2, 2, 8, 8, 4, 1, 1).reserve(2)
    for i in range(2):
        x = numbered(1 + 10 * i, 2 + 10 * i)
        stack = stack.layer(i).append(x, x).stack
    with pytest.raises(ValueError, match="call reorder of the stack"):
        stack.layer(0).reorder(jnp.array([1, 1]))
    stack = stack.reorder(jnp.array([1, 1])).reserve(1)
    for i in range(2):
        x = numbered(5 + 10 * i, 6 + 10 * i)
        stack = stack.layer(i).append(x, x).stack
    assert of_layers(stack) == [[[2, 5], [2, 6]], [[12, 15], [12, 16]]]


def test_no_rows_share():
    """NumPy made floats of an empty list, and the error spoke of them."""
    cache = PagedKVCache.empty(2, 12, 8, 2, 1, 1).reserve(4)
    cache = cache.append(numbered(1, 0), numbered(1, 0))
    shared = cache.share([], 0, 1)
    assert (shared.length == cache.length).all() and (shared.table[1] == cache.table[1]).all()


def test_layers_of_unequal_lengths_that_share_pages():
    """A layer that has fewer tokens writes to an earlier page, and the other layer keeps its own.
    More pages are copied than there are rows.
    """
    stack = StackedPagedKVCache.empty(2, 2, 12, 8, 2, 1, 1).reserve([6, 0])
    for i in range(2):
        for n in range(6):
            x = numbered(n + 10 * i, 0)
            stack = stack.layer(i).append(x, x, jnp.array([1, 0])).stack
    stack = stack.release([1]).share([1], 0, 6)
    stack = stack.layer(1).truncate(jnp.array([1, 1])).stack.reserve(1)
    for i in range(2):
        x = numbered(5 + 10 * i, 6 + 10 * i)
        stack = stack.layer(i).append(x, x).stack
    first = [[*range(6), 5], [*range(6), 6]]
    assert of_layers(stack) == [first, [[10, 15], [10, 16]]]
