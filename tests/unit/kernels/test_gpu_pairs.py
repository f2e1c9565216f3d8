"""Numbers of all pairs, which kernels for NVIDIA GPUs read where they lie."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from jax.experimental import pallas as pl
from matrix import bound, oracle, oracle_masks as om

from eqattn import attention, AttentionMetadata, Blockwise, Causal, DenseMask, T5Bias
from eqattn._problem.blocking import choose_blocking
from eqattn._problem.problem import Problem
from eqattn._sweep.grid import BATCH, COL, GridLayout, HEAD, ROW
from eqattn._sweep.tokens import Tokens
from eqattn.kernels.gpu import _operands, GPULowering
from eqattn.kernels.gpu._operands import COLUMNS, PairsOperand, Places, ROWS
from eqattn.kernels.gpu.triton import TritonLowering


newest = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the kernel is written for jax 0.12 and newer"
)
GROUP, QUERIES, KEYS = 2, 128, 64
TOKENS = Tokens(ROW, 3 * QUERIES, QUERIES, group=GROUP), Tokens(COL, 4 * KEYS, KEYS)
LAYOUT = GridLayout((2, 2, 3, 4), (KEYS, GROUP * QUERIES), (), tokens=TOKENS)
LENGTHS = dict(r=GROUP * QUERIES, k=KEYS)
AXES = [(BATCH, HEAD, ROW, COL), (HEAD, ROW, COL), (BATCH, ROW, COL), (ROW, COL)]


def part(index: Any) -> tuple:
    """An index of a kernel as NumPy takes it."""
    find = lambda i: slice(int(i.start), int(i.start) + i.size) if isinstance(i, pl.Slice) else i
    return tuple(map(find, index))


@pytest.mark.parametrize("block", [(KEYS, GROUP * QUERIES), (KEYS, 1, QUERIES)])
@pytest.mark.parametrize("side", [ROWS, COLUMNS], ids=["rows", "columns"])
@pytest.mark.parametrize("axes", AXES)
def test_a_block_is_a_window(axes, side, block):
    x = normal(0, *LAYOUT.shape(axes), *block)
    found = PairsOperand.of(x, axes, LAYOUT, side, LENGTHS)
    assert found is not None and found.kind == side.kinds and found.both and not found.staged
    assert found.turned == (side is COLUMNS)
    assert found.array.shape[-2:] == (3 * QUERIES, 4 * KEYS)
    at = {BATCH: 1, HEAD: 1, ROW: 2, COL: 3}
    place = found.place(Places(LAYOUT, side, {**at, side.other: None}), jnp.int32(at[side.other]))
    whole = x[tuple(at[a] for a in axes)].reshape(KEYS, -1)
    for head in range(GROUP):  # some queries of a head, and some keys
        start = head * QUERIES + 64
        parts = dict(r=pl.ds(jnp.int32(start), 32), k=pl.ds(jnp.int32(16), 32))
        start %= whole.shape[1]
        want = whole[16:48, start : start + 32]
        assert np.array_equal(found.array[part(found.at(place, parts))].T, want)


def test_what_stays_blocks():
    """Those of rows or of keys, those that tiles do not divide, and those of whose heads a tile has
    several.
    """
    axes = AXES[0]

    def of(*block, lengths=LENGTHS, tokens=TOKENS, rows=GROUP * QUERIES):
        layout = GridLayout((2, 2, 3, 4), (KEYS, rows), (), tokens=tokens)
        return PairsOperand.of(jnp.zeros((2, 2, 3, 4, *block)), axes, layout, ROWS, lengths)

    assert of(KEYS, GROUP * QUERIES) is not None
    assert of(KEYS, 1) is None and of(1, GROUP * QUERIES) is None
    assert of(KEYS, GROUP * QUERIES, lengths=dict(r=GROUP * QUERIES, k=128)) is None
    assert of(KEYS, GROUP * QUERIES, lengths=dict(r=384, k=KEYS)) is None
    padded = Tokens(ROW, 3 * QUERIES - 1, QUERIES, group=GROUP), TOKENS[1]
    assert of(KEYS, GROUP * QUERIES, tokens=padded) is not None
    small = Tokens(ROW, 192, 64, group=GROUP), TOKENS[1]
    assert of(KEYS, 128, tokens=small, rows=128, lengths=dict(r=128, k=KEYS)) is None
    single = Tokens(ROW, 192, 64), TOKENS[1]
    assert of(KEYS, 64, tokens=single, rows=64, lengths=dict(r=64, k=KEYS)) is not None


@pytest.mark.parametrize("kernels", [GPULowering, TritonLowering])
def test_blocks_have_whole_programs_of_a_head_where_pairs_are_read(kernels):
    lowering, metadata = kernels("interpret"), AttentionMetadata(logits_soft_cap=5.0)

    def queries(t=256, **given):
        q, kv = jnp.zeros((1, t, 4, 8), jnp.bfloat16), jnp.zeros((1, 256, 1, 8), jnp.bfloat16)
        problem = Problem.from_call(q, kv, kv, metadata, **given)
        return choose_blocking(problem, None, None, lowering=lowering).block_q

    assert queries(bias=jnp.zeros((4, 256, 256))) == 128
    assert queries(mask=Causal() & ~DenseMask(jnp.ones((1, 256, 256), bool))) == 128
    for bias in (jnp.zeros((4, 1, 256)), jnp.zeros((256, 1)), None):
        assert queries(bias=bias, mask=Causal(), score=T5Bias(jnp.ones((32, 4)))) == 32
    assert queries(t=200, bias=jnp.zeros((200, 256))) == 128


D = 32
# Tokens, the batch and the heads of the numbers, their dtype, and the key heads.
CASES = {
    "a bias of each head": ((256, 128), (2, 2), jnp.bfloat16, 2),
    "a bias of all heads": ((128, 256), (2, 1), jnp.float32, 2),
    "a mask of each head": ((128, 256), (2, 2), jnp.bool_, 2),
    "a bias of all heads, which share a key": ((256, 128), (1, 1), jnp.bfloat16, 1),
    "a mask of each head, which share a key": ((128, 128), (2, 2), jnp.bool_, 1),
    "a bias of lengths that are padded": ((200, 180), (2, 2), jnp.float32, 1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", [pytest.param("cuda", marks=newest), "triton"])
def test_numbers_and_gradients(backend, name, monkeypatch):
    """Blocks have 128 queries and 128 keys."""
    (t, s), shape, dtype, kv_heads = CASES[name]
    found = []
    put_together = lambda *xs, f=_operands.joined: found.append(xs[2]) or f(*xs)
    monkeypatch.setattr(_operands, "joined", put_together)
    sizes = (t, 2), (s, kv_heads), (s, kv_heads), (t, 2)
    given = [normal(i, 2, *n, D, dtype=jnp.bfloat16) for i, n in enumerate(sizes)]
    pairs = normal(4, *shape, t, s)
    pairs = pairs > -0.5 if dtype == jnp.bool_ else pairs.astype(dtype)
    fields: Any = dict(platform="interpret", backend=backend, runtime_dtype=jnp.bfloat16)
    strategy = Blockwise(AttentionMetadata(**fields))

    @jax.jit
    def run(*xs):
        *xs, g = xs

        def call(q, k, v, bias=None):
            mask = Causal() if dtype != jnp.bool_ else DenseMask(pairs)
            return attention(q, k, v, strategy, mask=mask, bias=bias).attention_outputs

        out, pull = jax.vjp(call, *xs)
        return out, *pull(g)

    learned = [] if dtype == jnp.bool_ else [pairs]
    got = run(*given[:3], *learned, given[3])
    seen = om.causal(t, s) if learned else np.asarray(pairs)
    more = dict(bias=np.float64(pairs)) if learned else {}
    wide = [np.float64(x) for x in given]
    problem = oracle.Problem(*wide[:3], scale=D**-0.5, mask=seen, **more)
    precision = bound.precision_of(jnp.bfloat16)
    want = bound.grads(problem, wide[3], np.zeros((2, t, 2)), precision)
    want |= bound.values(problem, precision)
    for label, x in zip(("out", "q", "k", "v", "bias"), got):
        assert bound.excess(np.asarray(x), want[label]) <= 1, label
    heads = shape[1] // kv_heads or 1
    assert len(found) >= 3 and {*found} == {(heads, 128, 128)}
