"""What the kernels for Hopper make of a call: their operands, instructions, copies, sizes, and the order
of their programs. That nothing races is in nightly/kernels, as are their numbers.
"""

import functools as ft
import re
import types
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from _kernels import how, newest, of
from _stored_rows import cache, call

from eqattn import attention, Causal, KeyPadding, ScoreFn, Segments, SlidingWindow
from eqattn._sweep.grid import BATCH, BlockGrid, BlockRequest, BlockSizes, FULL, HEAD, PARTIAL
from eqattn.kernels.nvidia import _operations as operations
from eqattn.kernels.nvidia._operands import COLUMNS, ROWS
from eqattn.kernels.nvidia._plans import _together, CACHED, listed, listed_in_order, Visit
from eqattn.kernels.nvidia.hopper import _mosaic, GPULowering
from eqattn.kernels.nvidia.hopper._decode import Sizes


kernels, text_of, first_visits = of("cuda")


def attend(q, k, v, mask: Any = Causal(), platform="pallas", **fields: Any):
    return attention(q, k, v, how("cuda", platform, **fields), mask=mask).attention_outputs


def gradients(q, k, v, g, **how):
    return jax.vjp(ft.partial(attend, **how), q, k, v)[1](g)


def calls(text: str) -> list[tuple[list[str], list[str]]]:
    """The types of the operands and of the results of each kernel that visits first."""
    found = []
    for line in first_visits(text):
        given, _, out = line.rpartition(" : ")[2].partition("->")
        found.append(tuple(re.findall(r"tensor<([^>]*)>", x) for x in (given, out)))
    return found


def like(tokens, dim, kv_heads=2, dtype: Any = jnp.bfloat16, batch=2):
    """A query, keys, values and a cotangent, of which only types are known."""
    heads = 4, kv_heads, kv_heads, 4
    return [jax.ShapeDtypeStruct((batch, tokens, h, dim), dtype) for h in heads]


@newest
@pytest.mark.parametrize("tokens, dim, kept", [(264, 64, (264, 64)), (261, 72, (264, 128))])
def test_tokens_are_read_and_written_where_they_lie(tokens, dim, kept):
    """Or padded there, where the compiler cannot read lengths and sizes as they are."""
    fold, *sums = calls(text_of(gradients, *like(tokens, dim)))
    of_rows, of_keys = (f"2x{kept[0]}x{h}x{kept[1]}xbf16" for h in (4, 2))
    assert fold[0][:3] == [of_rows, of_keys, of_keys] and fold[1][:2] == [of_rows] * 2
    written = sorted(found for _, out in sums for found in out if "bf16" in found)
    assert written == [of_keys] * 2 + [of_rows]
    for given, _ in sums:
        assert given[:4].count(of_rows) == given[:4].count(of_keys) == 2


@newest
def test_a_single_block_has_any_length():
    """The compiler wants to know that copies begin at multiples of 8 tokens."""
    q, k, v = (jax.ShapeDtypeStruct((2, n, 2, 16), jnp.bfloat16) for n in (70, 90, 90))
    assert len(calls(text_of(gradients, q, k, v, q))) == 3


@newest
def test_results_have_the_dtype_of_the_caller():
    """No float32 numerators, and no float32 gradients, are written by kernels."""
    written = [x for _, out in calls(text_of(gradients, *like(40, 16))) for x in out]
    wide = [x for x in written if x.endswith("xf32")]
    assert wide and all(x.count("x") == 2 for x in wide)  # logsumexps


@newest
@pytest.mark.parametrize("mask, second", [(Causal(), 1), (None, 0)])
def test_second_visits(mask, second):
    """They are of what some row does not see, so there is none where all pairs are visible."""
    text = text_of(ft.partial(attend, mask=mask), *like(40, 16)[:3])
    assert len(first_visits(text)) == 1
    assert text.count("@mosaic_gpu_v2") == 1 + second


@newest
@pytest.mark.parametrize("tokens, kv_heads", [(512, 2), (264, 4)])
def test_the_compiler_copies_nothing_for_them(tokens, kv_heads, monkeypatch):
    """What kernels read is an argument of the program or the result of another, and what the caller
    gets is theirs. The compiler is that of CPUs, and what stands in for a kernel has its operands
    and its results.
    """
    from eqattn.kernels.nvidia.hopper import _mosaic

    def kernel(body, out, *more, **options):
        like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out]
        return lambda *xs: jax.pure_callback(lambda *ys: like, like, *xs)

    monkeypatch.setattr(_mosaic, "kernel", kernel)
    monkeypatch.setattr(_mosaic, "alone", lambda fn: fn)
    monkeypatch.setattr(_mosaic, "in_place", lambda run, xs: xs)
    args, fields = like(tokens, 64, kv_heads, jnp.float16, 1), dict(runtime_dtype=jnp.float16)
    for f, args, count in ((attend, args[:3], 1), (gradients, args, 3)):
        f = ft.partial(f, platform="interpret", **fields)
        text = jax.jit(f).lower(*args).compile().as_text()
        entry = text[text.index("ENTRY") :].splitlines()
        kernels = [x for x in entry if " custom-call(" in x]
        assert len(kernels) == count
        reads = [x for x in entry if x in kernels or "ROOT" in x]
        found = re.compile(r"(%[\w.]+) = f16\[\d+,[^ ]* (?:fusion|copy|transpose|pad)\(")
        copies = [match[1] for line in entry if (match := found.search(line))]
        read = [re.search(re.escape(x) + r"[,) ]", " ".join(reads)) for x in copies]
        assert not any(read), reads


@newest
def test_instructions_that_the_compiler_would_not_choose():
    """A conjunction of predicates that only selects is one, not a selection for each; of one under
    a negation or of one range, the compiler knows better. And `1 / x` in the soft cap takes one. Of
    tanh, sine and cosine, the chip's own have 11 bits, or are wrong for large angles.
    """
    args, ids = like(48, 16)[:3], jnp.asarray(np.repeat(np.arange(3), 16))
    text = lambda mask, **fields: text_of(ft.partial(attend, mask=mask, **fields), *args)
    packed = Causal() & Segments(ids)
    assert "and.pred" in text(packed) and "rcp.approx" not in text(packed)
    for mask in (~SlidingWindow(3, 5) | KeyPadding(jnp.array([7, 9])), SlidingWindow(3, 5)):
        assert "and.pred" not in text(mask)
    assert "rcp.approx" in text(packed, logits_soft_cap=20.0)
    score = ScoreFn(lambda s, b, h, q, k: jnp.tanh(s) + jnp.sin(s) + jnp.cos(s))
    run = lambda *x: attention(*x, how("cuda", "pallas"), score=score).attention_outputs
    rough = text_of(jax.grad(lambda *x: run(*x).astype(jnp.float32).sum()), *args)
    assert "ex2.approx" in rough
    assert not any(f"{name}.approx" in rough for name in ("tanh", "sin", "cos"))


RANGES = {"sin": 3e5, "cos": 3e5, "tanh": 20, "floor": 1e4, "ceil": 1e4, "logistic": 80, "log1p": 9}


@pytest.mark.parametrize("name", RANGES)
def test_what_kernels_write_themselves(name):
    """Within four units of the last place of 1, or of the number if that is greater."""
    random = np.random.RandomState(0)
    x = random.uniform(-RANGES[name], RANGES[name], 100_000) * random.uniform(0, 1, 100_000) ** 4
    x = np.concatenate([x, np.arange(-9, 9), np.pi / 2 * np.arange(-99, 99)]).astype(np.float32)
    x = np.abs(x) if name == "log1p" else x
    exact = {"logistic": lambda x: 1 / (1 + np.exp(-x))}.get(name) or getattr(np, name)
    got, want = np.asarray(operations._WRITTEN[name](x)), exact(x.astype(np.float64))
    assert (np.abs(got - want) <= 4 * 2.0**-24 * np.maximum(1, np.abs(want))).all()
    if name in ("floor", "ceil"):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("power", [-3, -1, 0, 1, 2, 7, 12])
def test_whole_powers(power):
    x = np.linspace(-2, 2, 30, dtype=np.float32)
    got = operations._WRITTEN["integer_pow"](x, y=power)
    np.testing.assert_allclose(got, x.astype(np.float64) ** power, rtol=1e-6)


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


@newest
@pytest.mark.parametrize("columns", [32, 128])
@pytest.mark.parametrize("diagonal", [False, True])
def test_each_thread_loads_the_numbers_of_its_pairs(diagonal, columns, monkeypatch):
    """No interpreter runs these loads. So their addresses are computed for each thread, and compared
    with the places of its registers that Mosaic GPU itself says.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir.dialects import arith, llvm

    from eqattn.kernels.nvidia._operands import WARPGROUP
    from eqattn.kernels.nvidia.hopper import _matrices as gathering, _mosaic

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


@newest
@pytest.mark.parametrize("keys", [16, 48])
@pytest.mark.parametrize("stored", [None, jnp.int8])
def test_copies_begin_at_lines(keys, stored, monkeypatch):
    """An H200 found an address of 64 bytes misaligned, where the second vector of 16 numbers began.
    The interpreter does not know that. So each copy is looked at while it is traced.
    """
    seen = []

    def begins(ref):
        """How many bytes lie before the copy, for each index that may be any number."""
        shape, size = ref.ref.shape, jnp.dtype(ref.ref.dtype).itemsize
        for indexer in (x for x in ref.transforms if hasattr(x, "indices")):
            for axis, i in enumerate(indexer.indices):
                start = getattr(i, "start", i)
                step = int(np.prod(shape[axis + 1 :])) * size
                yield start * step if isinstance(start, int) else step
            shape = indexer.get_indexer_shape()

    def copy_in(from_, into, arrived, copy=_mosaic.copy_in):
        if hasattr(into, "transforms"):
            seen.extend(begins(into))
        return copy(from_, into, arrived)

    monkeypatch.setattr(_mosaic, "copy_in", copy_in)
    (q, k, v), _ = cache(1, 4, 2, 64, 64, keys, stored=stored)
    ids = (jnp.zeros((len(q), n), jnp.int32) for n in (1, keys))
    run = lambda *x: call(*x, platform="gpu", backend="cuda", mask=Segments(*ids), blocksize_k=16)
    assert kernels(lambda *x: run(*x).attention_outputs, q, k, v) == 1
    assert seen and not [n for n in seen if n % 128]


def test_blocks_are_what_a_program_has():
    def chosen(group, head_dim):
        request = BlockRequest(4096, 4096, group, jnp.bfloat16, head_dim, in_place=False)
        return GPULowering("pallas").choose_blocks(request)

    assert chosen(1, 128) == BlockSizes(128, 128)
    assert chosen(4, 64) == BlockSizes(32, 128)
    assert chosen(3, 256) == BlockSizes(128, 64)
    assert chosen(32, 128) == BlockSizes(8, 128)


def test_sizes_of_caches():
    """Blocks divide a cache, or are whole tiles of pages; tiles and heads are whole."""

    def chosen(keys, page=0, queries=1):
        request = BlockRequest(queries, keys, 32, jnp.bfloat16, 128, in_place=True, page_size=page)
        return GPULowering("pallas").choose_blocks(request)

    assert chosen(8192) == BlockSizes(16, 128)
    assert chosen(80).keys == 80 and chosen(112).keys == 112 and chosen(100).keys == 128
    assert chosen(8192, 16).keys == 64 and chosen(32, 16).keys == 32
    assert chosen(8192, 128).keys == 128 and chosen(8192, 48).keys == 48
    whole = Sizes(rows=32, keys=128, heads=8, dims=(128,), width=128, pages=0)
    assert (whole.tile_k, whole.tiles, whole.written, whole.stages) == (64, 8, 8, 2)
    paged = Sizes(rows=4 * 70, keys=64, heads=4, dims=(64,), width=64, pages=4)
    assert (paged.piece, paged.tile_k, paged.tiles, paged.written) == (16, 64, 8, 64)
    uneven = Sizes(rows=8, keys=20, heads=1, dims=(16,), width=16, pages=0)
    assert (uneven.tile_k, uneven.padded_keys) == (32, 32)
    eight = Sizes(rows=32, keys=128, heads=8, dims=(128,), width=128, pages=0, eight=True)
    assert (eight.widened, eight.stages) == ([(128, 0), (128, 64)], 4)
    assert (eight.wide, eight.widening) == (2, 2)  # one of each is multiplied meanwhile
    large = Sizes(rows=32, keys=128, heads=8, dims=(256,), width=256, pages=0, eight=True)
    assert (large.stages, large.wide) == (3, 1)  # shared memory has room for one
    few = Sizes(rows=8, keys=48, heads=1, dims=(32,), width=32, pages=0, eight=True)
    assert (few.tile_k, few.tile_rows) == (48, 64)
    latents = Sizes(
        rows=128, keys=128, heads=1, dims=(512, 64), width=512, pages=0, shared=True
    )  # fmt: skip
    assert (latents.widths, latents.tile_k, latents.staged) == ([256, 256], 32, 32)
    assert (latents.stages, latents.tiles, latents.widened) == (3, 2, [])


@newest
def test_shares_of_the_chip():
    """A long row alone is shared out; many rows are not, nor is a short one."""
    from eqattn.kernels.nvidia._stored import PROGRAMS, shares_of

    sizes = Sizes(rows=32, keys=128, heads=8, dims=(128,), width=128, pages=0)

    def shares(batch, keys):
        layout = BlockGrid((batch, 1, 1, keys // 128), (128, 32), ())
        return shares_of(layout, sizes, PROGRAMS)

    assert shares(1, 131072) == 132 and shares(64, 8192) == 3
    assert shares(256, 8192) == 1 and shares(1, 512) == 1


@pytest.mark.parametrize("page, pages", [(16, 1), (32, 2), (48, 1), (64, 1)])
def test_pages_of_eight_bits_are_joined_where_scales_allow_it(page, pages):
    """Their scales are copied to multiples of 128 bytes."""
    request = BlockRequest(1, 4096, 4, jnp.bfloat16, 128, in_place=True, page_size=page, itemsize=1)
    assert GPULowering("auto").choose_blocks(request).keys == page * pages


BATCHES, HEADS, TILES = 2, 6, 2


def plan_of(rows: int, columns: int, streamed: int, lists: bool):
    """As much of a plan as an order depends on, of 12 batch elements."""
    layout = BlockGrid((BATCHES, HEADS, rows, columns), (1, 1), ())
    return types.SimpleNamespace(
        layout=layout,
        programs={FULL: None, PARTIAL: None},
        table_axes=() if lists else None,
        streamed_bytes=streamed,
    )


@pytest.mark.parametrize("side", [ROWS, COLUMNS])
@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("together", [2, 12])
def test_each_block_is_visited_once_by_each_program(together, lists, side):
    rows, columns = 3, 4
    plan = plan_of(rows, columns, CACHED // together, lists)
    table = np.random.default_rng(0).choice([0, PARTIAL, FULL], (rows, columns)).astype(np.int8)
    mine = table if side is ROWS else table.T
    arrays = [jnp.asarray(x) for x in listed(mine if lists else None, (FULL, PARTIAL))]
    own, seen = mine.shape[0], []
    for program in range(BATCHES * HEADS * own * TILES):
        visit = Visit.of(plan, side, TILES, arrays, jnp.int32(program))
        element = tuple(int(visit.places.at[a]) for a in (BATCH, HEAD))
        at = int(visit.places.at[side.own])
        seen.append((*element, at, int(visit.tile)))
        if lists:
            live = int(visit.live)
            others = [int(visit.column(i)) for i in range(live)]
            assert sorted(others) == np.flatnonzero(mine[at]).tolist()
            full = mine[at, others[: int(visit.full)]]
            assert (full == FULL).all() and visit.full == (mine[at] == FULL).sum()
        else:
            assert visit.live == visit.full == mine.shape[1] and visit.column(3) == 3
    assert len(set(seen)) == len(seen)
    # Programs beside each other have the same few elements, and each of these all of its blocks.
    group = together * own * TILES
    parts = [seen[i : i + group] for i in range(0, len(seen), group)]
    assert all(len({x[:2] for x in part}) == together for part in parts)
    if lists:  # and the longest lists come first
        lengths = [(mine[x[2]] > 0).sum() for x in parts[0]]
        assert lengths == sorted(lengths, reverse=True)


def test_how_many_are_visited_together():
    assert _together(12, CACHED // 12) == 12 and _together(12, CACHED // 11) == 6
    assert _together(12, 10 * CACHED) == 1  # a single one does not fit
    assert _together(7, CACHED // 3) == 1  # a prime number of elements
    assert _together(1, 0) == 1


def test_decoding_reads_lists_of_rows_as_they_lie():
    table = np.asarray([[PARTIAL, 0, 0], [FULL, FULL, PARTIAL]], np.int8)
    ranks, _, counts = listed(table, (FULL, PARTIAL))
    assert ranks.tolist() == [1, 0] and counts.reshape(-1, 2).tolist() == [[2, 3], [0, 1]]
    _, counts = listed_in_order(table, (FULL, PARTIAL))
    assert counts.reshape(-1, 2).tolist() == [[0, 1], [2, 3]]
    assert listed(None, (FULL,)) == listed_in_order(None, (FULL,)) == []
