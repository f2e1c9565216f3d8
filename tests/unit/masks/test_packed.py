"""Packed training batches by their boundaries: against the oracle, in as many visits as needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix import oracle, oracle_masks as om

from eqattn import (
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    packed_segments,
    Ragged,
    Segments,
)
from eqattn._problem.block_classes import table_of
from eqattn._problem.problem import Problem
from eqattn._problem.tiling import choose_tiling
from eqattn._sweep.grid import EMPTY


CU = np.array([0, 5, 5, 12, 40, 41, 57], np.int32)
N, H, K, D, V = 64, 4, 2, 8, 6
# Written out by hand: the third sequence is the second that is not empty.
IDS = [0] * 5 + [2] * 7 + [3] * 28 + [4] + [5] * 16 + [-1] * 7
PLACES = [*range(5), *range(7), *range(28), 0, *range(16), *[0] * 7]


def arrays():
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, N, *s)) for s in ((H, D), (K, D), (K, V), (H, V))]


@pytest.mark.parametrize("cu", [CU, jnp.asarray(CU)], ids=["NumPy", "jax"])
def test_ids_and_places(cu):
    ids, positions = packed_segments(cu, N)
    assert ids.tolist() == IDS and positions.tolist() == PLACES
    assert isinstance(ids, type(cu)) or isinstance(cu, jax.Array)
    traced = jax.jit(lambda cu: packed_segments(cu, N))(cu)
    assert traced.ids.tolist() == IDS and traced.positions.tolist() == PLACES
    two = jax.vmap(lambda cu: packed_segments(cu, 6).ids)(jnp.array([[0, 2, 6], [0, 3, 4]]))
    assert two.tolist() == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, -1, -1]]


@pytest.mark.parametrize("strategy", [Ragged, Blockwise])
def test_forward_and_gradients(strategy, x64):
    q, k, v, ct = arrays()
    scale = D**-0.5
    mask = om.segments([IDS], [IDS]) & om.causal(N, N)
    of = oracle.Problem(q=q, k=k, v=v, mask=mask, scale=scale)
    metadata = AttentionMetadata(runtime_dtype=jnp.float64, blocksize_q=8, blocksize_k=8)

    def call(cu, q, k, v):
        ids, positions = packed_segments(cu, N)
        out = attention(
            q[0], k[0], v[0], strategy(metadata), mask=Causal() & Segments(ids),
            q_positions=positions, kv_positions=positions,
        )  # fmt: skip
        return out.attention_outputs[None]

    args = [jnp.asarray(x) for x in (CU, q, k, v)]
    out, pull = jax.vjp(jax.jit(call), *args)
    np.testing.assert_allclose(out, oracle.forward(of).out, rtol=0, atol=1e-13)
    want = oracle.vjp(of, ct, np.zeros((1, N, H)))
    for got, name in zip(pull(jnp.asarray(ct))[1:], "qkv", strict=True):
        np.testing.assert_allclose(got, want[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("in_place", [True, False], ids=["Ragged", "Blockwise"])
@pytest.mark.parametrize("causal", [False, True])
def test_only_blocks_inside_of_sequences_are_visited(in_place, causal):
    ids = np.array(IDS)
    seen = (ids[:, None] == ids) & (ids >= 0) & (ids[:, None] >= 0)
    seen &= np.tri(N, dtype=bool) | (not causal)
    needed = seen.reshape(8, 8, 8, 8).any((1, 3)).sum()

    def visited(cu):
        x = jnp.zeros((1, N, K, D), jnp.float32)
        mask = Segments(packed_segments(cu, N).ids)
        mask = Causal() & mask if causal else mask
        spec = Problem.from_call(x, x, x, AttentionMetadata(), mask=mask)
        return (table_of(spec, choose_tiling(spec, 8, 8, in_place=in_place)) != EMPTY).sum()

    assert visited(CU) == needed < 64
    assert jax.jit(visited)(jnp.asarray(CU)) == needed


@pytest.mark.parametrize(
    "cu", [[1, 4], [0, 4, 3], [0, 9], [[0, 4]], []], ids=["start", "order", "end", "rank", "none"]
)
def test_errors(cu, unchecked):
    with pytest.raises(ValueError, match="cu_seqlens must"):
        packed_segments(np.array(cu, np.int32), 8)
