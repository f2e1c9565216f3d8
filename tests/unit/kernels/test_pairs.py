"""Numbers of all pairs: biases, their gradients, and masks. Kernels read and write them where they lie."""

import functools as ft
import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from _kernels import (
    ALL,
    check,
    drawn,
    first_visits,
    how,
    judge,
    mesh_of,
    newest,
    normal,
    NVIDIA,
    OF_GPUS,
    over,
    results,
    text_of,
)
from jax.experimental import pallas as pl
from matrix import oracle_masks as om

from eqattn import (
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    DenseMask,
    KeyPadding,
    Ragged,
    Ring,
    Segments,
    T5Bias,
)
from eqattn._problem.problem import Problem
from eqattn._problem.tiling import choose_tiling
from eqattn._sweep.grid import BATCH, BlockGrid, COL, HEAD, ROW
from eqattn._sweep.tokens import Tokens
from eqattn.kernels.nvidia import _operands as of_gpu, hopper as gpu
from eqattn.kernels.nvidia.hopper import GPULowering
from eqattn.kernels.nvidia.triton import TritonLowering
from eqattn.kernels.tpu import _operands as of_tpu
from eqattn.kernels.tpu._grid import KernelGrid


B, T, S, H, K, D = 2, 72, 100, 4, 2, 16
SHAPES = {
    "own": (B, H, T, S),
    "batch": (1, H, T, S),
    "heads": (B, 1, T, S),
    "both": (1, 1, T, S),
    "unbatched": (H, T, S),
}
IDS = np.repeat(np.arange(5, dtype=np.int32), 20)
IDS = np.stack([IDS, IDS // 2])
OF_IDS = Segments(jnp.asarray(IDS[:, :T]), jnp.asarray(IDS)), om.segments(IDS[:, :T], IDS)
CAUSAL, NONE = (Causal(), om.causal(T, S)), (None, None)
# The shape of a bias, the heads, the mask, and fields. Of elements that see different blocks, a tile is
# visited for those that see it, and has zeros where none does.
BIASES: dict[str, Any] = {
    **{name: (shape, (H, K), CAUSAL, {}, OF_GPUS) for name, shape in SHAPES.items()},
    "different blocks": ((1, H, T, S), (H, K), OF_IDS, dict(blocksize_k=64), ALL),
    "one block": ((1, 1, T, S), (H, K), NONE, dict(blocksize_q=128, blocksize_k=128), OF_GPUS),
    "odd blocks": ((1, 1, T, S), (H, K), NONE, dict(blocksize_q=37, blocksize_k=70), OF_GPUS),
    "three heads of one key": ((1, 1, T, S), (3, 1), CAUSAL, {}, OF_GPUS),
    "heads of their own": ((1, 1, T, S), (2, 2), CAUSAL, {}, OF_GPUS),
    "float32 and a soft cap": ((1, H, T, S), (H, K), NONE, dict(logits_soft_cap=2.0), OF_GPUS),
}


@over(BIASES, later=("own", "batch", "both", "one block", "heads of their own"))
def test_the_gradient_of_a_bias(name, interpreted):
    """Summed over what a bias does not have, the heads of a group included."""
    shape, heads, (mask, seen), fields, _ = BIASES[name]
    given, ct = drawn(interpreted, T, S, *heads, D, 24, batch=B)
    strategy = how(interpreted, **dict(blocksize_q=32) | fields)
    dtype = jnp.float32 if name.startswith("float32") else ct.dtype
    bias = normal(9, *shape, dtype=dtype)
    run = lambda q, k, v, bias: attention(q, k, v, strategy, mask=mask, bias=bias).attention_outputs
    whole = (1,) * (4 - bias.ndim) + shape
    more = dict(mask=seen) | ({"cap": 2.0} if fields.get("logits_soft_cap") else {})
    found = results(run, given | dict(bias=bias), ct)
    assert found["bias"].dtype == dtype and found["bias"].shape == shape
    found["bias"] = found["bias"].reshape(whole)
    check(found, given | dict(bias=bias.reshape(whole)), ct, **more)


LOWERED = [
    ("own", (None, None)),
    ("batch", (37, 70)),
    ("heads", (40, 100)),
    ("both", (72, 64)),
    ("unbatched", (72, 100)),
]


def lowered(backend, name="own", score: Any = None, **fields):
    """How many kernels the gradients of a call have, and how many loops of XLA."""
    given, _ = drawn(backend, T, S, H, K, D, 24, batch=B)
    strategy = how(backend, **dict(platform="pallas", blocksize_q=32) | fields)
    more = dict(mask=Causal(), score=score)
    f = lambda *xs: attention(*xs[:3], strategy, bias=xs[3], **more).attention_outputs.sum()
    bias = jnp.zeros(SHAPES[name], jnp.bfloat16)
    text = text_of(backend, jax.grad(f, (0, 1, 2, 3)), *given.values(), bias)
    return len(first_visits(backend, text)), text.count("stablehlo.while")


@NVIDIA
@pytest.mark.parametrize("name, sizes", LOWERED)
def test_all_gradients_are_kernels(name, sizes, backend):
    """The fold, and one each for queries, for keys and values, and for the bias."""
    assert lowered(backend, name, blocksize_q=sizes[0], blocksize_k=sizes[1]) == (4, 0)


@NVIDIA
def test_beside_a_table_of_differences(backend):
    """Loops give the gradient of the bias there, and kernels all others."""
    count, loops = lowered(backend, score=T5Bias(jnp.ones((16, H))))
    assert count == 3 and loops


@newest
@pytest.mark.parametrize("platform, kernels", [("auto", 3), ("gpu", 4)])
def test_by_default_loops_give_the_gradient(platform, kernels, monkeypatch):
    """No GPU has run the kernel yet."""
    monkeypatch.setattr(gpu, "capability", lambda: "9.0")
    found, loops = lowered("cuda", platform=platform)
    assert found == kernels and (loops == 0) == (platform == "gpu")


ENDS: dict[str, Any] = {"own": (ALL,), "both": (OF_GPUS,)}


@over(ENDS, later=("both",))
def test_what_is_masked_reaches_no_gradient_of_a_bias(interpreted, name):
    """Keys and values that are not finite, of which no row sees any; and a cotangent that is not,
    which reaches its row alone.
    """
    given, ct = drawn(interpreted, T, S, H, K, D, 24, batch=B)
    hidden, strategy = (jnp.arange(S) >= 70)[:, None, None], how(interpreted, blocksize_q=32)
    shape = SHAPES[name]
    bias = jnp.ones(shape, ct.dtype)

    @jax.jit
    def run(k, v, ct):
        f = lambda bias: attention(given["q"], k, v, strategy, mask=KeyPadding(70), bias=bias)
        return jax.vjp(lambda bias: f(bias).attention_outputs, bias)[1](ct)[0]

    kv = given["k"], given["v"]
    clean = np.array(run(*kv, ct))
    dirty = run(*(jnp.where(hidden, jnp.nan, x).astype(x.dtype) for x in kv), ct)
    np.testing.assert_array_equal(dirty, clean)
    assert not clean[..., 70:].any()
    wrong = np.array(run(*kv, ct.at[1, 40, 2, 3].set(jnp.nan)))
    at = (1, 2, 40) if shape[0] == B else (0, 0, 40)
    assert np.isnan(wrong[at][:70].astype(np.float32)).all()
    wrong[at] = clean[at]
    np.testing.assert_array_equal(wrong, clean)


def test_the_gradient_of_a_bias_in_a_ring():
    """Each hop writes the gradient of its own columns."""
    given, ct = drawn("triton", 64, 64, batch=B)
    bias = normal(9, 1, 4, 64, 64, dtype=jnp.bfloat16)
    ring = how("triton", strategy=ft.partial(Ring, axis_name="sp"))
    place, rows = jax.P(None, "sp"), jax.P(None, None, "sp")

    def run(q, k, v, ct, bias):
        f = lambda bias: attention(q, k, v, ring, mask=Causal(), bias=bias).attention_outputs
        return jax.vjp(f, bias)[1](ct)[0]

    specs: Any = dict(in_specs=(*[place] * 4, rows), out_specs=rows, check_vma=False)
    got = jax.jit(jax.shard_map(run, mesh=mesh_of(2), **specs))(*given.values(), ct, bias)
    check(dict(bias=got), given | dict(bias=bias), ct, mask=om.causal(64, 64))


# Tokens, the batch and the heads of the numbers, their dtype, and the heads of queries and keys.
IN_PLACE: dict[str, Any] = {
    "a bias of each head": ((256, 128), (2, 2), jnp.bfloat16, (2, 2), ALL),
    "a bias of all heads": ((128, 256), (2, 1), jnp.float32, (2, 1), ALL),
    "a mask of each head": ((128, 256), (2, 2), jnp.bool_, (2, 2), ALL),
    "a mask that heads share": ((128, 128), (2, 1), jnp.bool_, (2, 1), ALL),
    "a bias of padded lengths": ((200, 180), (2, 2), jnp.float32, (2, 1), ALL),
}


@over(IN_PLACE, later=("a bias of all heads", "a mask that heads share"))
def test_numbers_of_pairs(name, interpreted):
    """In blocks of the size that kernels read where they lie. Masks of a row that sees nothing, too."""
    (t, s), shape, dtype, heads, _ = IN_PLACE[name]
    given, ct = drawn(interpreted, t, s, *heads, 32, 32, batch=2)
    pairs = normal(4, *shape, t, s)
    strategy = how(interpreted, blocksize_q=128, blocksize_k=128)
    if dtype == jnp.bool_:
        seen = np.array(pairs > -0.5)
        seen[0, 0, 5] = False
        mask = DenseMask(jnp.asarray(seen))
        run = lambda q, k, v: attention(q, k, v, strategy, mask=mask).attention_outputs
        judge(run, given, ct, mask=seen)
        return

    def run(q, k, v, bias):
        return attention(q, k, v, strategy, mask=Causal(), bias=bias).attention_outputs

    judge(run, given | dict(bias=pairs.astype(dtype)), ct, mask=om.causal(t, s))


@pytest.mark.parametrize("backend, read", [("tpu", "tpu"), ("triton", "gpu")])
def test_they_are_read_where_they_lie(backend, read, monkeypatch):
    """By the output's kernel and by each of the gradients."""
    found, of = [], {"tpu": of_tpu, "gpu": of_gpu}[read]
    put_together = lambda *xs, f=of.joined: found.append(xs[2]) or f(*xs)
    monkeypatch.setattr(of, "joined", put_together)
    for t, s in ((256, 256), (200, 180)):
        given, ct = drawn(backend, t, s, 4, 2, 32, 32)
        strategy = how(backend, blocksize_q=128, blocksize_k=128)
        run = lambda xs: attention(*xs[:3], strategy, bias=xs[3]).attention_outputs
        xs = [*given.values(), jnp.zeros((1, 4, t, s))]
        jax.jit(lambda xs, ct: jax.vjp(run, xs)[1](ct)).lower(xs, ct)
    assert len(found) >= 6 and {*found} == {(2, 128, 128)}


@pytest.mark.parametrize("strategy", [Blockwise, Ragged])
def test_masks_of_pairs_take_eight_bits_on_tpus(strategy):
    """And their numbers are right under `Ragged`, too."""
    given, _ = drawn("tpu", 256, 200, 4, 2, 64, 64)
    seen = np.random.default_rng(3).random((1, 4, 256, 200)) < 0.4
    metadata = AttentionMetadata(platform="interpret", blocksize_q=128, blocksize_k=128)
    more = dict(mask=DenseMask(jnp.asarray(seen)))
    run = lambda q, k, v: attention(q, k, v, strategy(metadata), **more).attention_outputs
    text = jax.jit(run).lower(**given).as_text()
    assert re.search(r"tensor<(\d+x)*128x(128|256)xi8>", text)
    judge(run, given, mask=seen)


GROUP, QUERIES, KEYS = 2, 32, 128
TOKENS = Tokens(ROW, 4 * QUERIES, QUERIES, group=GROUP), Tokens(COL, 3 * KEYS, KEYS)
LAYOUT = BlockGrid((2, 4, 4, 3), (KEYS, GROUP * QUERIES), (), tokens=TOKENS)
GRID = KernelGrid(LAYOUT, (BATCH, HEAD, None), (), 12)
AXES = [(BATCH, HEAD, ROW, COL), (HEAD, ROW, COL), (BATCH, ROW, COL), (ROW, COL)]


def window(spec, x, at: dict) -> jax.Array:
    """What a kernel finds in a reference, given where its pair is: the list, of one word, says so."""
    ids = at[BATCH], at[HEAD], 0
    word = jnp.asarray([at[ROW] << 18 | at[COL] << 4], jnp.int32)
    sizes = [1 if n is None else n for n in spec.block_shape]
    starts = [int(i) * n for i, n in zip(spec.index_map(*ids, word), sizes, strict=True)]
    found = x[tuple(slice(i, i + n) for i, n in zip(starts, sizes))]
    return found.reshape([n for n in spec.block_shape if n is not None])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.bool_])
@pytest.mark.parametrize("axes", AXES)
def test_a_block_is_a_window_of_a_tpu(axes, dtype):
    x = normal(0, *LAYOUT.shape(axes), KEYS, GROUP * QUERIES)
    x = x > 0 if dtype == jnp.bool_ else x.astype(dtype)
    found = of_tpu.PairsOperand.of(x, axes, LAYOUT)
    assert found is not None and not found.resident
    (whole,) = GRID.arrays([found])
    assert whole.shape[-3:] == (GROUP, 4 * QUERIES, 3 * KEYS)
    assert whole.dtype == (jnp.int8 if dtype == jnp.bool_ else dtype)
    for at in ({BATCH: 1, HEAD: 2, ROW: 3, COL: 1}, {BATCH: 0, HEAD: 3, ROW: 1, COL: 2}):
        block = found.read(window(GRID.block_spec(found), whole, at))
        assert block.dtype == dtype
        assert np.array_equal(block.T, x[tuple(at[a] for a in axes)])


def test_heads_that_a_step_visits_are_windows_of_one_array():
    axes = AXES[0]
    single = Tokens(ROW, 4 * QUERIES, QUERIES), TOKENS[1]
    layout = BlockGrid((2, 4, 4, 3), (KEYS, QUERIES), (), tokens=single)
    x = normal(0, *layout.shape(axes), KEYS, QUERIES)
    found = of_tpu.PairsOperand.of(x, axes, layout)
    assert found is not None
    halved = BlockGrid((2, 2, 4, 3), (KEYS, QUERIES), (), tokens=single)
    grid = KernelGrid(halved, (BATCH, HEAD, None), (), 12, heads_per_step=2)
    (whole,) = grid.arrays([found])
    part = window(grid.block_spec(found), whole, {BATCH: 1, HEAD: 1, ROW: 3, COL: 2})
    for head in range(2):
        assert np.array_equal(found.read(part, (head,)).T, x[1, 2 + head, 3, 2])


def test_what_stays_blocks_of_a_tpu():
    """Those of rows, keys or features, those that fill no registers, and those in which all heads
    of a group have the same numbers.
    """
    axes, block = AXES[0], (KEYS, GROUP * QUERIES)
    of = lambda *block, tokens=TOKENS: of_tpu.PairsOperand.of(
        jnp.zeros((2, 4, 4, 3, *block)),
        axes,
        BlockGrid((2, 4, 4, 3), (KEYS, GROUP * QUERIES), (), tokens=tokens),
    )
    assert of(*block) is not None
    for other in ((KEYS, 1), (1, GROUP * QUERIES), (KEYS, 1, QUERIES), (*block, 5), (KEYS, KEYS)):
        assert of(*other) is None
    padded = Tokens(ROW, 4 * QUERIES - 1, QUERIES, group=GROUP), TOKENS[1]
    assert of(*block, tokens=padded) is not None and of(*block, tokens=()) is None
    for queries, keys in ((16, 128), (32, 64)):
        tokens = Tokens(ROW, 4 * queries, queries), Tokens(COL, 3 * keys, keys)
        layout = BlockGrid((2, 4, 4, 3), (keys, queries), (), tokens=tokens)
        assert of_tpu.PairsOperand.of(jnp.zeros((2, 4, 4, 3, keys, queries)), axes, layout) is None


@pytest.mark.parametrize("batch, near", [(of_tpu.MOST_READS, True), (of_tpu.MOST_READS + 1, False)])
def test_narrow_numbers_that_many_share_are_copied(batch, near):
    """Unless a step need not transpose them."""
    layout = BlockGrid((batch, 4, 4, 3), LAYOUT.block, (), tokens=TOKENS)
    axes = (HEAD, ROW, COL)
    x = jnp.zeros((4, 4, 3, *LAYOUT.block))
    for dtype in (jnp.bfloat16, jnp.bool_):
        assert (of_tpu.PairsOperand.of(x.astype(dtype), axes, layout) is not None) == near
        assert of_tpu.PairsOperand.of(x.astype(dtype), axes, layout, transposed=True) is not None
    assert of_tpu.PairsOperand.of(x, axes, layout) is not None


def test_its_gradient_is_written_where_it_belongs():
    """In float32, too, where other steps have logits as `[keys, queries]`."""
    q, bias = jnp.zeros((1, 512, 2, 64)), jnp.zeros((1, 2, 512, 512))
    strategy = Blockwise(AttentionMetadata(platform="tpu", blocksize_q=128, blocksize_k=128))

    def loss(bias):
        return attention(q, q, q, strategy, bias=bias).attention_outputs.sum()

    lines = text_of("tpu", jax.grad(loss), bias).splitlines()
    (call,) = [x for x in lines if "tpu_custom_call" in x and "eqattn_sum_pairs" in x]
    assert call.endswith("-> tensor<2x1x512x512xf32>")


@pytest.mark.parametrize(
    "block, dtype",
    [((128, 128), jnp.int8), ((32, 256), jnp.int8), ((1, 128), jnp.int32), ((128, 1), jnp.int32)]
    + [((16, 128), jnp.int32), ((32, 64), jnp.int32)],
)
def test_flags_that_fill_registers_take_8_bits(block, dtype):
    flags = np.random.default_rng(4).random((2, *block)) < 0.5
    x = of_tpu.KernelOperand(jnp.asarray(flags), (-1,))
    assert x.array.dtype == dtype
    for at in range(2):
        ref = x.array[at] if not x.resident else x.array
        found = x.read(ref, (at,) if x.resident else ())
        assert found.dtype == bool and np.array_equal(found, flags[at])


GPU_QUERIES, GPU_KEYS = 128, 64
GPU_TOKENS = Tokens(ROW, 384, GPU_QUERIES, group=2), Tokens(COL, 256, GPU_KEYS)
GPU_LAYOUT = BlockGrid((2, 2, 3, 4), (GPU_KEYS, 2 * GPU_QUERIES), (), tokens=GPU_TOKENS)
GPU_GROUP, GPU_LENGTHS = 2, dict(r=2 * GPU_QUERIES, k=GPU_KEYS)


def part(index: Any) -> tuple:
    """An index of a kernel as NumPy takes it."""
    find = lambda i: slice(int(i.start), int(i.start) + i.size) if isinstance(i, pl.Slice) else i
    return tuple(map(find, index))


@pytest.mark.parametrize("block", [(GPU_KEYS, GPU_GROUP * GPU_QUERIES), (GPU_KEYS, 1, GPU_QUERIES)])
@pytest.mark.parametrize("side", [of_gpu.ROWS, of_gpu.COLUMNS], ids=["rows", "columns"])
@pytest.mark.parametrize("axes", AXES)
def test_a_block_is_a_window_of_a_gpu(axes, side, block):
    x = normal(0, *GPU_LAYOUT.shape(axes), *block)
    found = of_gpu.PairsOperand.of(x, axes, GPU_LAYOUT, side, GPU_LENGTHS)
    assert found is not None and found.kind == side.kinds and found.both and not found.staged
    assert found.transposed == (side is of_gpu.COLUMNS)
    assert found.array.shape[-2:] == (3 * GPU_QUERIES, 4 * GPU_KEYS)
    at = {BATCH: 1, HEAD: 1, ROW: 2, COL: 3}
    place = found.place(
        of_gpu.Places(GPU_LAYOUT, side, {**at, side.other: None}), jnp.int32(at[side.other])
    )
    whole = x[tuple(at[a] for a in axes)].reshape(GPU_KEYS, -1)
    for head in range(GPU_GROUP):  # some queries of a head, and some keys
        start = head * GPU_QUERIES + 64
        parts = dict(r=pl.ds(jnp.int32(start), 32), k=pl.ds(jnp.int32(16), 32))
        start %= whole.shape[1]
        want = whole[16:48, start : start + 32]
        assert np.array_equal(found.array[part(found.at(place, parts))].T, want)


def test_what_stays_blocks_of_a_gpu():
    """Those of rows or of keys, those that tiles do not divide, and those of whose heads a tile has
    several.
    """
    axes = AXES[0]

    def of(*block, lengths=GPU_LENGTHS, tokens=GPU_TOKENS, rows=GPU_GROUP * GPU_QUERIES):
        layout = BlockGrid((2, 2, 3, 4), (GPU_KEYS, rows), (), tokens=tokens)
        return of_gpu.PairsOperand.of(
            jnp.zeros((2, 2, 3, 4, *block)), axes, layout, of_gpu.ROWS, lengths
        )

    assert of(GPU_KEYS, GPU_GROUP * GPU_QUERIES) is not None
    assert of(GPU_KEYS, 1) is None and of(1, GPU_GROUP * GPU_QUERIES) is None
    assert (
        of(GPU_KEYS, GPU_GROUP * GPU_QUERIES, lengths=dict(r=GPU_GROUP * GPU_QUERIES, k=128))
        is None
    )
    assert of(GPU_KEYS, GPU_GROUP * GPU_QUERIES, lengths=dict(r=384, k=GPU_KEYS)) is None
    padded = Tokens(ROW, 3 * GPU_QUERIES - 1, GPU_QUERIES, group=GPU_GROUP), GPU_TOKENS[1]
    assert of(GPU_KEYS, GPU_GROUP * GPU_QUERIES, tokens=padded) is not None
    small = Tokens(ROW, 192, 64, group=GPU_GROUP), GPU_TOKENS[1]
    assert of(GPU_KEYS, 128, tokens=small, rows=128, lengths=dict(r=128, k=GPU_KEYS)) is None
    single = Tokens(ROW, 192, 64), GPU_TOKENS[1]
    assert of(GPU_KEYS, 64, tokens=single, rows=64, lengths=dict(r=64, k=GPU_KEYS)) is not None


@pytest.mark.parametrize("kernels", [GPULowering, TritonLowering])
def test_blocks_have_whole_programs_of_a_head_where_pairs_are_read(kernels):
    lowering, metadata = kernels("interpret"), AttentionMetadata(logits_soft_cap=5.0)

    def queries(t=256, **given):
        q, kv = jnp.zeros((1, t, 4, 8), jnp.bfloat16), jnp.zeros((1, 256, 1, 8), jnp.bfloat16)
        problem = Problem.from_call(q, kv, kv, metadata, **given)
        return choose_tiling(problem, None, None, lowering=lowering).block_q

    assert queries(bias=jnp.zeros((4, 256, 256))) == 128
    assert queries(mask=Causal() & ~DenseMask(jnp.ones((1, 256, 256), bool))) == 128
    for bias in (jnp.zeros((4, 1, 256)), jnp.zeros((256, 1)), None):
        assert queries(bias=bias, mask=Causal(), score=T5Bias(jnp.ones((32, 4)))) == 32
    assert queries(t=200, bias=jnp.zeros((200, 256))) == 128
