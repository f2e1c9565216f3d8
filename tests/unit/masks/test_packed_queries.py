"""Packed documents with other numbers of queries than of keys, causal at the end of each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import attention, Blockwise, Causal, packed_segments, Ragged, Segments, SlidingWindow


LQ, LK = [3, 5, 1, 0, 4], [7, 5, 4, 2, 2]  # the last document has more queries than keys
CQ, CK = (np.cumsum([0, *n]).astype(np.int32) for n in (LQ, LK))
PADDING = 2


def visible(left):
    """Which packed query sees which packed key, written out document by document."""
    seen = np.zeros((CQ[-1] + PADDING, CK[-1] + PADDING), bool)
    for i, (lq, lk) in enumerate(zip(LQ, LK)):
        for t in range(lq):
            last = lk - lq + t  # the query's own place in its document
            for s in range(max(0, last - left), last + 1):
                seen[CQ[i] + t, CK[i] + s] = True
    return seen


def plain(q, k, v, seen, ct):
    """Output and gradients in float64, of `[t, h, d]`."""
    q, k, v, ct = (np.asarray(x, np.float64) for x in (q, k, v, ct))
    z = np.where(seen, np.einsum("thd,shd->hts", q, k) / np.sqrt(q.shape[-1]), -np.inf)
    top = z.max(-1, keepdims=True)
    p = np.exp(z - np.where(np.isinf(top), 0, top))
    p = p / np.maximum(p.sum(-1, keepdims=True), 1e-300)
    dp = np.einsum("thv,shv->hts", ct, v)
    dz = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
    out = np.einsum("hts,shv->thv", p, v)
    dq, dk = np.einsum("hts,shd->thd", dz, k), np.einsum("hts,thd->shd", dz, q)
    return out, (dq, dk, np.einsum("hts,thv->shv", p, ct))


@pytest.mark.parametrize(
    "strategy, left, traced",
    [(Blockwise(), 1, False), (Blockwise(), 99, True), (Ragged(), 1, True), (Ragged(), 99, False)],
)
def test_the_line_of_the_porting_page(strategy, left, traced):
    rng = np.random.default_rng(0)
    t, s = CQ[-1] + PADDING, CK[-1] + PADDING
    arrays = [rng.normal(size=(n, 2, 8)).astype(np.float32) for n in (t, s, s)]
    ct = rng.normal(size=(t, 2, 8)).astype(np.float32)

    def call(cu_q, cu_k, query, key_, value):
        q = packed_segments(cu_q, len(query), cu_k)
        kv = packed_segments(cu_k, len(key_))
        mask = Causal() & SlidingWindow(left, 0) & Segments(q.ids, kv.ids)
        return attention(
            query, key_, value, strategy, mask=mask,
            q_positions=q.positions, kv_positions=kv.positions,
        ).attention_outputs  # fmt: skip

    def run(cu_q, cu_k):
        out, pull = jax.vjp(lambda *x: call(cu_q, cu_k, *x), *map(jnp.asarray, arrays))
        return out, pull(jnp.asarray(ct))

    out, gradients = (jax.jit(run) if traced else run)(CQ, CK)
    want, wanted = plain(*arrays, visible(left), ct)
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-6)
    for got, expected in zip(gradients, wanted):
        np.testing.assert_allclose(got, expected, rtol=0, atol=5e-6)


def test_positions_are_those_of_the_last_keys():
    found = packed_segments(CQ, 15, CK)
    assert found.ids.tolist() == [0] * 3 + [1] * 5 + [2] + [4] * 4 + [-1] * PADDING
    assert found.positions.tolist() == [4, 5, 6, *range(5), 3, -2, -1, 0, 1, 0, 0]
    mixed = packed_segments(CQ, 15, jnp.asarray(CK))
    assert isinstance(mixed.positions, jax.Array)
    assert packed_segments([0], 2, [0]).ids.tolist() == [-1, -1]


def test_boundaries_of_other_sequences_raise():
    with pytest.raises(ValueError, match=r"cu_seqlens \(3,\) and cu_seqlens_k \(2,\).*same"):
        packed_segments([0, 1, 2], 2, [0, 4])
    with pytest.raises(ValueError, match="cu_seqlens_k must not decrease"):
        packed_segments([0, 1, 2], 2, [0, 4, 3])
