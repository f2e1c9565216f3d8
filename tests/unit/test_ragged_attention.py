"""`ragged_attention`: packed queries of rows with their own lengths, against each row by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix import oracle
from matrix.oracle import exact

from eqattn import (
    ALiBi,
    attention,
    AttentionMetadata,
    Blockwise,
    cascade_attention,
    Causal,
    Dense,
    DenseMask,
    KeyPadding,
    MaskFn,
    Ragged,
    ragged_attention,
    ScoreFn,
    scores,
    Segments,
    Selected,
    SlidingWindow,
)
from eqattn.cache import PagedKVCache, Quantized
from eqattn.scores import Operand


H, K, D, V, S = 4, 2, 8, 6, 40
LENGTHS = np.array([40, 7, 0, 23, 30], np.int32)
COUNTS = np.array([11, 1, 0, 5, 1], np.int32)
CU = np.concatenate([[0], np.cumsum(COUNTS)]).astype(np.int32)
N = int(CU[-1]) + 3  # three are padding


def arrays(dtype=np.float64):
    rng = np.random.default_rng(0)
    shapes = ((N, H, D), (len(LENGTHS), S, K, D), (len(LENGTHS), S, K, V))
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]


def metadata(**kwargs):
    return AttentionMetadata(**{**dict(runtime_dtype=jnp.float64), **kwargs})


def one_by_one(q, k, v, mask=None, starts=None, causal=True, **kwargs):
    """Each row through the plain softmax."""
    outs = []
    for row, (length, count) in enumerate(zip(LENGTHS.tolist(), COUNTS.tolist(), strict=True)):
        shown = KeyPadding(length, 0 if starts is None else int(starts[row]))
        for more in (Causal() if causal else None, mask):
            shown = shown if more is None else shown & more
        out = attention(
            q[CU[row] : CU[row] + count], k[row], v[row], Dense(metadata()), mask=shown,
            q_offset=length - count, return_logsumexp=True, **kwargs,
        )  # fmt: skip
        outs.append((out.attention_outputs, out.logsumexp))
    out, lse = (jnp.concatenate(x) for x in zip(*outs, strict=True))
    pad = N - len(out)
    return jnp.pad(out, ((0, pad), (0, 0), (0, 0))), jnp.pad(
        lse, ((0, pad), (0, 0)), constant_values=-np.inf
    )


def run(q, k, v, block_q=16, size=8, **kwargs):
    strategy = Ragged(metadata(blocksize_k=size))
    out = ragged_attention(
        q, k, v, jnp.asarray(CU), jnp.asarray(LENGTHS), strategy, block_q=block_q,
        return_logsumexp=True, **kwargs,
    )  # fmt: skip
    return out.attention_outputs, out.logsumexp


def close(xs, ys, tolerance=1e-13):
    for x, y in zip(xs, ys, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


@pytest.mark.parametrize("block_q, size", [(3, 7), (16, None)])
def test_rows_by_themselves(block_q, size, x64):
    q, k, v = arrays()
    close(jax.jit(lambda *a: run(*a, block_q=block_q, size=size))(q, k, v), one_by_one(q, k, v))


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(mask=SlidingWindow(4, 0)),
        dict(causal=False),
        dict(starts=np.array([3, 0, 0, 20, 30], np.int32)),
        dict(score=ALiBi(jnp.linspace(0.1, 0.4, H))),
    ],
    ids=["window", "not causal", "starts", "alibi"],
)
def test_masks_and_scores(kwargs, x64):
    q, k, v = arrays()
    if "score" in kwargs:
        kwargs = dict(score=ALiBi(jnp.linspace(0.1, 0.4, H, dtype=jnp.float64)))
    given = {n: jnp.asarray(x) if n == "starts" else x for n, x in kwargs.items()}
    close(run(q, k, v, **given), one_by_one(q, k, v, **kwargs))


def test_cap_sinks_and_bias_against_the_oracle(x64):
    q, k, v = arrays()
    slopes, sinks = np.linspace(0.1, 0.4, H), np.linspace(-1, 1, H)
    md = metadata(blocksize_k=8, logits_soft_cap=2.0, softmax_aux=jnp.asarray(sinks))
    got = ragged_attention(
        q, k, v, jnp.asarray(CU), jnp.asarray(LENGTHS), Ragged(md), block_q=4,
        score=ALiBi(jnp.asarray(slopes)), return_logsumexp=True,
    )  # fmt: skip
    for row, (end, count) in enumerate(zip(LENGTHS.tolist(), COUNTS.tolist(), strict=True)):
        mine, position = slice(CU[row], CU[row] + count), end - count + np.arange(count)
        distance = position[:, None] - np.arange(S)
        visible = (distance >= 0) & (np.arange(S) < end)
        of = oracle.Problem(
            *(np.asarray(x)[None] for x in (q[mine], k[row], v[row])), scale=D**-0.5,
            mask=visible, cap=2.0, slopes=slopes, distance=abs(distance), sinks=sinks,
        )  # fmt: skip
        found = oracle.forward(of)
        close([x[mine] for x in (got.attention_outputs, got.logsumexp)],
              [found.out[0], found.lse[0]])  # fmt: skip


def test_gradients(x64):
    """And second derivatives, of one program."""
    q, k, v = arrays()

    def results(fn):
        gradient = jax.grad(lambda *a: jnp.sum(jnp.sin(fn(*a)[0])), (0, 1, 2))
        first, second = jax.jit(lambda *a: jax.jvp(gradient, a, a))(q, k, v)
        return *first, *second

    close(results(lambda *a: run(*a, block_q=4)), results(one_by_one), 1e-12)


def test_a_paged_cache(x64):
    q, k, v = arrays()
    cache = PagedKVCache.empty(5, S, 30, 8, K, D, V, jnp.float64).reserve(LENGTHS)
    cache = cache.append(k, v, jnp.asarray(LENGTHS))
    close(run(q, cache.key, cache.value, size=None), one_by_one(q, k, v))


@pytest.mark.parametrize("heads", [K])
def test_each_packed_query_lists_its_keys(heads, x64):
    """As one by one under the arrays of bools that the lists stand for, with gradients, and in pages.
    Some list nothing that is there, and padding has rows that list keys.
    """
    q, k, v = arrays()
    rng, sizes = np.random.default_rng(1), (heads, N)
    listed = rng.integers(-1, S, (*sizes, 5)).astype(np.int32)
    seen = (listed[..., None] == np.arange(S)).any(-2).repeat(H // heads, 0)
    loss = lambda out: sum(jnp.sin(jnp.where(jnp.isfinite(x), x, 0)).sum() for x in out)

    def ours(q, k, v):
        return run(q, k, v, block_q=4, mask=SlidingWindow(30, 0) & Selected(jnp.asarray(listed)))

    def plain(q, k, v):
        outs = []
        for row, (end, count) in enumerate(zip(LENGTHS.tolist(), COUNTS.tolist(), strict=True)):
            mine = slice(CU[row], CU[row] + count)
            shown = DenseMask(jnp.asarray(seen[:, mine])) & KeyPadding(end) & SlidingWindow(30, 0)
            whole = attention(
                q[mine], k[row], v[row], Dense(metadata()), mask=shown, q_offset=end - count,
                return_logsumexp=True,
            )  # fmt: skip
            outs.append((whole.attention_outputs, whole.logsumexp))
        out, logsumexp = (jnp.concatenate(x) for x in zip(*outs, strict=True))
        pad = N - len(out)
        widths = ((0, pad), (0, 0))
        return jnp.pad(out, (*widths, (0, 0))), jnp.pad(logsumexp, widths, constant_values=-np.inf)

    def results(fn):
        both = lambda *xs: (loss(out := fn(*xs)), out)
        gradients, out = jax.jit(jax.grad(both, (0, 1, 2), has_aux=True))(q, k, v)
        return *out, *gradients

    close(results(ours), want := results(plain))
    cache = PagedKVCache.empty(5, S, 30, 8, K, D, V, jnp.float64).reserve(LENGTHS)
    cache = cache.append(k, v, jnp.asarray(LENGTHS))
    mask = SlidingWindow(30, 0) & Selected(jnp.asarray(listed))
    close(run(q, cache.key, cache.value, size=None, mask=mask), want[:2])


def test_eight_bits(x64):
    q, k, v = arrays()
    stored = [Quantized.quantize(x) for x in (k, v)]
    close(run(q, *stored), one_by_one(q, *(x.materialise() for x in stored)), 1e-6)


def test_unused_keys_and_padding_may_hold_anything(x64):
    q, k, v = arrays()
    hidden = np.arange(S) >= LENGTHS[:, None]
    dirty = [jnp.where(hidden[..., None, None], jnp.nan, x) for x in (k, v)]
    got = run(q.at[int(CU[-1]) :].set(jnp.nan), *dirty)
    for x, y in zip(got, run(q, k, v), strict=True):
        assert (x == y).all()


def of_rows(transform=None, shown=None, **kwargs):
    """Each row in float64 NumPy: its logits transformed, and what is shown of them."""
    q, k, v = arrays()
    outs = []
    for row, (end, count) in enumerate(zip(LENGTHS.tolist(), COUNTS.tolist(), strict=True)):
        at, s = end - count + np.arange(count)[:, None], np.arange(S)[None]
        visible = (s <= at) & (s < end) & (True if shown is None else shown(row, at, s))
        change = transform and (lambda z, row=row: transform(z / np.sqrt(D), row, at, s))  # noqa: B023
        out, lse, _ = exact(q[CU[row] : CU[row] + count], k[row], v[row], change, visible)
        outs.append((out, lse))
    out, lse = (np.concatenate(x) for x in zip(*outs, strict=True))
    got = [x[: int(CU[-1])] for x in run(q, k, v, **kwargs)]
    close(got, (out, lse))


SEEN, SCALES = np.array([9, 5, 3, 20, 30]), np.linspace(0.5, 1.5, 5)


@pytest.mark.parametrize("block_q", [2])
def test_a_mask_is_told_of_rows(block_q, x64):
    seen = jnp.asarray(SEEN, jnp.int32)
    shown = lambda row, q, k: k < SEEN[row]
    of_rows(shown=shown, mask=MaskFn(lambda b, h, q, k: k < seen[b]), block_q=block_q)
    of_rows(shown=shown, mask=SlidingWindow(50, 0) & KeyPadding(seen), block_q=block_q)


@pytest.mark.parametrize("block_q", [2])
def test_a_score_is_told_of_rows(block_q, x64):
    scales = jnp.asarray(SCALES)
    change = lambda z, row, q, k: z * SCALES[row]
    of_rows(change, score=ScoreFn(lambda z, b, h, q, k: z * scales[b]), block_q=block_q)
    held = ScoreFn(lambda z, b, h, q, k, x: z * x, [Operand(scales, "b")])
    of_rows(change, score=[held], block_q=block_q)


@pytest.mark.parametrize(
    "packed, padded", [([1, 1, 1, 1, 1], 5), ([0, 1, 0, 1, 1], 5), ([1, 1, 1, 1, 2], 30)]
)
def test_steps_alone_are_not_padded(packed, padded, monkeypatch):
    """Each was a block of up to 16 queries, as where there are more queries than rows."""
    seen = []
    called = lambda q, *rest, **kw: seen.append(q.shape) or attention(q, *rest, **kw)
    monkeypatch.setattr("eqattn._calls.ragged.attention", called)
    ends = np.concatenate([[0], np.cumsum(packed)]).astype(np.int32)
    (q, k, v), lengths = arrays(np.float32), np.maximum(LENGTHS, 2)
    q, given = q[: max(ends[-1], 5)], map(jnp.asarray, (ends, lengths))
    out = ragged_attention(q, k, v, *given, Ragged()).attention_outputs
    assert np.prod(seen[0][:2]) == padded
    for row, n in enumerate(packed):
        at, first = slice(ends[row], ends[row + 1]), lengths[row] - n
        shown = np.arange(S) <= first + np.arange(n)[:, None]
        want = exact(q[at], k[row], v[row], visible=shown)[0]
        np.testing.assert_allclose(out[at], want, rtol=1e-5, atol=1e-5)


def test_scalars_are_not_arrays_of_rows(x64):
    of_rows(lambda z, row, q, k: 5 * np.tanh(z / 5), score=scores.SoftCap(5.0))
    bias = scores.Bias(jnp.asarray(2.0))
    of_rows(lambda z, row, q, k: z + 2, score=bias, mask=Causal(jnp.array(0)))


def test_lists_are_arrays(unchecked):
    q, k, v = arrays(np.float32)
    strategy, starts = Ragged(AttentionMetadata()), [3, 0, 0, 20, 30]
    want = ragged_attention(
        q, k, v, jnp.asarray(CU), jnp.asarray(LENGTHS), strategy, starts=jnp.asarray(starts)
    )
    got = ragged_attention(q, k, v, CU.tolist(), LENGTHS.tolist(), strategy, starts=starts)
    assert (got.attention_outputs == want.attention_outputs).all()


def test_a_ring_buffer_by_the_positions_of_its_keys(x64):
    """Keys lie anywhere, in each row elsewhere, and 13 places hold none. Without positions, a row
    that has more tokens than the buffer has places saw the wrong keys in silence.
    """
    q, k, v = arrays()
    order = np.argsort(np.random.default_rng(1).random((len(LENGTHS), S + 13)), axis=1)
    place = np.where(order < S, order + 100, -1)
    there = jnp.asarray(np.minimum(order, S - 1))[..., None, None]
    keys, values = (
        jnp.where((order < S)[..., None, None], jnp.take_along_axis(x, there, 1), jnp.nan)
        for x in (k, v)
    )
    mask, lengths = SlidingWindow(4, 0), jnp.where(LENGTHS > 0, LENGTHS + 100, 0)
    pack = lambda at, lengths: ragged_attention(
        q, keys, values, jnp.asarray(CU), lengths, Ragged(metadata(blocksize_k=8)),
        mask=mask, kv_positions=at, block_q=4, return_logsumexp=True,
    )  # fmt: skip
    got = jax.jit(pack)(jnp.asarray(place), lengths)
    close((got.attention_outputs, got.logsumexp), one_by_one(q, k, v, mask=mask))
    with pytest.raises(ValueError, match=r"kv_positions=cache\.positions"):
        pack(None, lengths)


ERRORS = {
    "boundaries": (dict(cu_q_lens=CU[1:]), ValueError, "b \\+ 1 boundaries"),
    "boundaries that decrease": (dict(cu_q_lens=CU[::-1].copy()), ValueError, "cu_q_lens must not decrease"),
    "more queries": (dict(cu_q_lens=CU + np.arange(6, dtype=np.int32)), ValueError, "at most tokens=21"),
    "float boundaries": (dict(cu_q_lens=CU.astype(np.float32)), TypeError, "cu_q_lens must be integers"),
    "no boundaries": (dict(cu_q_lens=None), TypeError, "cu_q_lens must be an array, got NoneType"),
    "float lengths": (dict(lengths=LENGTHS + 0.9), TypeError, "lengths must be integers"),
    "one length": (dict(lengths=3), ValueError, "lengths must have at least 1 axis"),
    "long lengths": (dict(lengths=LENGTHS + 1), ValueError, "at most the 40 keys of key_"),
    "short lengths": (dict(lengths=LENGTHS // 4), ValueError, "count the new tokens too"),
    "starts": (dict(starts=np.array([3])), ValueError, "starts \\(1,\\)"),
    "rows of value": (dict(value=jnp.zeros((10, S, K, V))), ValueError, "value \\(10, 40"),
    "a batch of queries": (dict(query=jnp.zeros((1, N, H, D))), ValueError, "packed without a batch axis"),
    "block_q": (dict(block_q=0), ValueError, "block_q must be at least 1"),
    "negative block_q": (dict(block_q=-1), ValueError, "block_q must be at least 1"),
    "strategy": (dict(strategy=Blockwise(AttentionMetadata())), TypeError, "Ragged\\(metadata\\), got Blockwise"),
    "no strategy": (dict(strategy=None), TypeError, "Ragged\\(metadata\\), got NoneType"),
    "dropout": (dict(strategy=Ragged(AttentionMetadata(dropout_prob=0.1))), ValueError, "replace\\(dropout_prob"),
    "ids": (
        dict(mask=Segments(jnp.zeros((5, 1), jnp.int32), jnp.zeros((5, S), jnp.int32))),
        ValueError, "Segments holds an array",
    ),
    "a list of other queries": (
        dict(mask=Selected(np.zeros((1, 5, 2), int))), ValueError, "1, 5, 2\\) do not fit .* 21 rows",
    ),
    "a list of blocks of queries": (
        dict(mask=Selected(np.zeros((1, 7, 2), int), block_q=3)), ValueError, "block_q=3 queries",
    ),
    "a list of other keys": (
        dict(mask=Selected(np.full((1, N, 2), S))), ValueError, "must be below 40",
    ),
    "a bias": (dict(score=scores.Bias(jnp.zeros((N, S)))), ValueError, "bias holds an array \\(21, 40\\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, unchecked):
    changed, error, message = ERRORS[name]
    q, k, v = arrays(np.float32)
    good = dict(
        query=q, key_=k, value=v, cu_q_lens=CU, lengths=LENGTHS,
        strategy=Ragged(AttentionMetadata()),
    )  # fmt: skip
    with pytest.raises(error, match=message):
        ragged_attention(**{**good, **changed})


@pytest.mark.parametrize("sizes", [{}])
def test_a_row_of_a_pack_has_the_bits_that_it_has_alone(sizes):
    """Also where a block has more keys than there are, as by default."""
    strategy = Ragged(AttentionMetadata(**sizes), bitwise=True)
    q, k, v = arrays(np.float32)
    offset = LENGTHS - COUNTS

    @jax.jit
    def packed(q, k, v):
        ends, lengths = jnp.asarray(CU), jnp.asarray(LENGTHS)
        return ragged_attention(q, k, v, ends, lengths, strategy).attention_outputs

    @jax.jit
    def padded(q, k, v):
        mask = Causal() & KeyPadding(LENGTHS)
        return attention(q, k, v, strategy, mask=mask, q_offset=offset).attention_outputs

    token = CU[:-1, None] + np.arange(max(COUNTS))
    alone = np.asarray(padded(q[np.minimum(token, N - 1)], k, v))
    alone = np.concatenate([x[:n] for x, n in zip(alone, COUNTS.tolist(), strict=True)])
    assert np.asarray(packed(q, k, v))[: CU[-1]].tobytes() == alone.tobytes()


def test_no_queries_and_no_keys():
    for n, s in ((0, S), (4, 0), (0, 0)):
        q, k = (jax.ShapeDtypeStruct(x, jnp.float32) for x in ((n, H, D), (2, s, K, D)))
        at, lengths = jnp.zeros(3, jnp.int32), jnp.zeros(2, jnp.int32)
        call = lambda q, k: ragged_attention(q, k, k, at, lengths, Ragged())
        assert jax.eval_shape(call, q, k).attention_outputs.shape == (n, H, D)


def test_what_cascades_cannot_keep_raises():
    cache = PagedKVCache.empty(1, 16, pages=4, page_size=4, kv_heads=K, head_dim=D)
    query, offset = jnp.zeros((1, 1, H, D)), jnp.zeros(1, jnp.int32)
    for strategy, message in (
        (Ragged(bitwise=True), "bitwise=True: cascade_attention merges"),
        (Ragged(AttentionMetadata(dropout_prob=0.1)), "cascade_attention is for inference"),
    ):
        with pytest.raises(ValueError, match=message):
            cascade_attention(query, cache, strategy, q_offset=offset)
    with pytest.raises(ValueError, match=r"\[4\] and 128; give the metadata blocksize_k=4"):
        attention(query, cache.key, cache.value, Ragged(bitwise=True))
