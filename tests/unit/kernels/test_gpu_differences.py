"""What masks and scores read by `q - k` in the kernels for NVIDIA GPUs: `T5Bias`, and functions of a
user's own. More of their numbers: matrix/ with the targets "gpu" and "triton".
"""

import functools as ft
import types
from typing import Any

import _gpu_lowered
import _triton_lowered
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix import bound, oracle, oracle_masks as om

from eqattn import attention, AttentionMetadata, Blockwise, Causal, MaskFn, Ragged, ScoreFn, T5Bias


NEWEST = jax.__version_info__ >= (0, 12)
mosaic = pytest.mark.skipif(not NEWEST, reason="the kernel is written for jax 0.12 and newer")
BACKENDS = pytest.mark.parametrize("backend", [pytest.param("cuda", marks=mosaic), "triton"])
T, S, H, D = 70, 90, 4, 16


def how(backend, **kw):
    given = dict(platform="interpret", backend=backend, runtime_dtype=jnp.bfloat16)
    return Blockwise(AttentionMetadata(**given | kw))


def arrays(t=T, s=S, kv_heads=2):
    shapes = (1, t, H, D), (1, s, kv_heads, D), (1, s, kv_heads, D)
    return [jax.random.normal(jax.random.key(i), x, jnp.bfloat16) for i, x in enumerate(shapes)]


def judged(strategy, given, parts, seen, xs=None, offset=0, **problem):
    """Output and gradients within the bound of the oracle, those of what is `given`, too.

    **Arguments:**

    - `given`: learned arrays, by what the oracle calls them.
    - `parts`: a function of these that returns keyword arguments of `attention`.
    - `seen`: which pairs are visible.
    """
    q, k, v = xs or arrays()
    g = jax.random.normal(jax.random.key(3), q.shape, jnp.bfloat16)

    @jax.jit
    def run(given, q, k, v, g):
        def f(given, q, k, v):
            more = dict(q_offset=offset) | parts(**given)
            return attention(q, k, v, strategy, **more).attention_outputs

        out, pull = jax.vjp(f, given, q, k, v)
        of_given, *rest = pull(g)
        return dict(out=out, **dict(zip("qkv", rest)), **of_given)

    wide = [np.float64(x) for x in (q, k, v)]
    learned = {name: np.float64(x) for name, x in given.items()}
    exact: Any = oracle.Problem(*wide, scale=D**-0.5, mask=seen, **learned, **problem)
    precision = bound.precision_of(jnp.bfloat16)
    want = bound.grads(exact, np.float64(g), np.zeros(q.shape[:3]), precision)
    want["out"] = bound.values(exact, precision)["out"]
    found = run(given, q, k, v, g)
    worst = {n: bound.excess(np.asarray(x), want[n]) for n, x in found.items()}
    assert max(worst.values()) <= 1, worst


@BACKENDS
@pytest.mark.parametrize(
    "kv_heads, shared, block_q, t",
    [
        (4, False, 64, 128),
        (2, True, 32, 96),
        (1, False, 32, 64),
        (2, False, 8, 72),
        (4, True, 64, 70),
    ],
)
def test_a_bias_of_t5(backend, kv_heads, shared, block_q, t):
    """With heads that share keys, heads that share a table, and blocks of queries that are padded."""
    table = 3 * jax.random.normal(jax.random.key(7), (16, 1 if shared else H))
    score = lambda table: T5Bias(table, max_distance=64)
    bucket, seen = om.t5_bucket(t, S, 16, True, 64), om.causal(t, S)
    strategy, xs = how(backend, blocksize_q=block_q, blocksize_k=64), arrays(t, S, kv_heads)
    if not shared:
        parts = lambda table: dict(score=score(table), mask=Causal())
        return judged(strategy, dict(table=table), parts, seen, xs, bucket=bucket)
    same, parts = np.repeat(np.float64(table), H, 1), dict(score=score(table), mask=Causal())
    judged(strategy, {}, lambda: parts, seen, xs, table=same, bucket=bucket)


@BACKENDS
def test_without_rounding_of_the_table(backend):
    """A bias that bfloat16 does not have turns which of two keys a row sees."""
    q, k, v = (jnp.zeros((1, n, 1, D), jnp.bfloat16) for n in (64, 64, 64))
    v = v.at[0, ::2].set(1)
    table = jnp.where(np.arange(128) % 2 == 0, 256.0, 256.5)  # neighbours in bfloat16 differ by 2
    score = ScoreFn(lambda s, b, h, q, k: s + 64 * (table[q - k + 64] - 256))
    out = jax.jit(lambda *x: attention(*x, how(backend), score=score).attention_outputs)(q, k, v)
    np.testing.assert_allclose(out[0, :, 0, 0], np.arange(64) % 2, atol=1e-6)


@BACKENDS
@pytest.mark.parametrize("offset", [0, 20])
def test_a_mask_and_a_score_of_a_user(backend, offset):
    """The mask is read by the difference, too, and empties some blocks."""
    table = jax.random.normal(jax.random.key(7), (9, H))
    shown = np.arange(400) % 3 != 1
    shown[:160] = False
    mask = MaskFn(lambda b, h, q, k: jnp.asarray(shown)[q - k + 170])

    def parts(table):
        near = lambda s, b, h, q, k: s + table[jnp.clip(q - k + 4, 0, 8), h]
        return dict(mask=mask, score=ScoreFn(near))

    at = np.arange(T)[:, None] + offset - np.arange(S)
    strategy = how(backend, blocksize_q=32, blocksize_k=64)
    more = dict(bucket=np.clip(at + 4, 0, 8), offset=offset)
    judged(strategy, dict(table=table), parts, shown[at + 170], **more)


@BACKENDS
@pytest.mark.parametrize("mask", [None, Causal()])
def test_queries_of_the_padding_read_nothing_singular(mask, backend):
    q, k, v = arrays(37, 48)
    table = 1.5 + 0.1 * jnp.arange(100, dtype=jnp.float32)
    table = jnp.where(jnp.arange(100) < 50 + 37, table, 0)  # what only queries of the padding read
    ct = jax.random.normal(jax.random.key(4), q.shape)

    def loss(platform, q, k, v, table):
        score = ScoreFn(lambda s, b, h, q, k: s / table[q - k + 50])
        strategy = how(backend, platform=platform, blocksize_q=16, blocksize_k=16)
        out = attention(q, k, v, strategy, mask=mask, score=score).attention_outputs
        return (out.astype(jnp.float32) * ct).sum()

    got = jax.jit(jax.grad(ft.partial(loss, "interpret"), (0, 1, 2, 3)))(q, k, v, table)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in got)


def lowered(backend):
    return _triton_lowered.kernels if backend == "triton" else _gpu_lowered.kernels


@BACKENDS
def test_programs_have_kernels(backend):
    """The gradient of a table runs as loops, beside kernels for the others."""
    (q, k, v), shown = arrays(), jnp.arange(400) % 3 != 1

    def loss(q, k, v, table):
        mask = Causal() & MaskFn(lambda b, h, q, k: shown[abs(q - k)])
        score = [T5Bias(table), ScoreFn(lambda s, b, h, q, k: s * table[(k - q) % 8, 0])]
        out = attention(q, k, v, how(backend, platform="pallas"), mask=mask, score=score)
        return out.attention_outputs.astype(jnp.float32).sum()

    count, given = lowered(backend), (q, k, v, jnp.ones((8, H)))
    assert count(loss, *given) == 1
    assert count(jax.grad(loss, (0, 1, 2)), *given) == 3
    assert count(jax.grad(loss, (0, 1, 2, 3)), *given) == 3
    assert count(jax.vmap(jax.grad(loss), (0, None, None, None)), q[None], *given[1:]) == 2


@BACKENDS
def test_a_program_has_no_number_of_each_pair(backend):
    """It has a few for each difference."""
    q, k, v = arrays(1024, 1024)
    f = lambda *x: attention(*x, how(backend, platform="pallas"), score=T5Bias(jnp.ones((8, H))))
    text = _triton_lowered.text_of if backend == "triton" else _gpu_lowered.text_of
    assert "1024x1024" not in text(lambda *x: f(*x).attention_outputs, q, k, v)


@BACKENDS
def test_what_is_refused(backend):
    """Positions that need not count up, and keys in place: each pair looks up its own number."""
    (q, k, v), score = arrays(), T5Bias(jnp.ones((8, H)))
    strategy = how(backend, platform="pallas")
    call = lambda *x, **kw: attention(*x, strategy, score=score, **kw).attention_outputs
    assert strategy.supports(score=score)
    for given in (dict(q_positions=jnp.arange(T)), dict(kv_positions=jnp.arange(S))):
        assert "T5Bias has a" in strategy.supports(score=score, **given).reason
        with pytest.raises(ValueError, match="has a (gather|concatenate)"):
            lowered(backend)(ft.partial(call, **given), q, k, v)
    stored = Ragged(strategy.metadata)
    assert not stored.supports(score=score)
    far = ScoreFn(lambda s, b, h, q, k: s + jnp.ones(64)[q * k % 64])
    assert "gather" in strategy.supports(score=far).reason


def computed(build):
    """The integers that a function writes in MLIR, of constants."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir, passmanager
    from jaxlib.mlir.dialects import arith, func

    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            whole, i32 = func.FuncOp("f", ([], [])), ir.IntegerType.get_signless(32)
            with ir.InsertionPoint(whole.add_entry_block()):
                xs = [x if x.type == i32 else arith.index_cast(i32, x) for x in build()]
                func.return_(xs)
            types_of = ir.FunctionType.get([], [x.type for x in xs])
            whole.attributes["function_type"] = ir.TypeAttr.get(types_of)
        passmanager.PassManager.parse("builtin.module(canonicalize)").run(module.operation)
        done = list(whole.entry_block)[-1]
        return [x.owner.attributes["value"].value for x in done.operands]


@mosaic
@pytest.mark.parametrize("columns", [32, 128])
@pytest.mark.parametrize("diagonal", [False, True])
def test_each_thread_loads_the_numbers_of_its_pairs(diagonal, columns, monkeypatch):
    """No interpreter runs these loads. So their addresses are computed for each thread, and compared
    with the places of its registers that Mosaic GPU itself says.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir.dialects import arith, llvm

    from eqattn.kernels.gpu import _gathering as gathering, _mosaic
    from eqattn.kernels.gpu._operands import WARPGROUP

    pairs, own = (_mosaic.layout_of(x).to_mgpu() for x in ("pairs", "own"))
    shape, of_own = (WARPGROUP, columns), list(np.ndindex(own.registers_shape((WARPGROUP,))))
    first = lambda row: 10_000 - row if diagonal else 1000 * row  # the place of its first number
    number = gathering._number
    monkeypatch.setattr(llvm, "extractelement", lambda x, i: x)
    monkeypatch.setattr(gathering, "_load", lambda ref, x, far: arith.addi(x, number(far)))
    seen = []
    for thread in range(128):
        monkeypatch.setattr(mgpu.utils, "thread_idx", lambda: number(thread))
        rows = computed(lambda: [row for (row,) in own.thread_idxs((WARPGROUP,))])

        def addresses():
            held = {at: number(first(row)) for at, row in zip(of_own, rows)}
            places = types.SimpleNamespace(layout=own, shape=(WARPGROUP,), registers=held)
            load = gathering._of_rows(None, pairs, shape, places, diagonal)
            for at, offset in gathering._offsets(pairs, shape):
                for i in range(pairs.vector_length):
                    yield load(at, i, *divmod(offset + i, columns))

        at = computed(lambda: [n for place in pairs.thread_idxs(shape) for n in place])
        at = np.repeat(np.reshape(at, (-1, 2)), pairs.vector_length, 0)
        at[:, 1] += np.arange(len(at)) % pairs.vector_length
        np.testing.assert_array_equal(
            computed(lambda: list(addresses())), first(at[:, 0]) + at[:, 1]
        )
        seen += map(tuple, at.tolist())
    assert len({*seen}) == WARPGROUP * columns
