"""The pairs that kernels for TPUs visit: lists that heads share, visits in turns where one list is too
long, and blocks whose corner is empty.
"""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from _kernels import check, drawn, how, judge, kernels, mesh_of, normal
from matrix import oracle_masks as om

from eqattn import (
    attention,
    AttentionMetadata,
    BlockCausal,
    Blockwise,
    Causal,
    ChunkedCausal,
    DenseMask,
    KeyPadding,
    Ragged,
    Ring,
    Segments,
    Selected,
    SlidingWindow,
)
from eqattn._problem import block_classes
from eqattn._problem.block_classes import classes_of
from eqattn._problem.tiling import Tiling
from eqattn._sweep.grid import BATCH, BlockGrid, COL, DIAGONAL, EMPTY, FULL, HEAD, PARTIAL, ROW
from eqattn.kernels.tpu import (
    _forward as _step,
    _lists,
    _traverse,
    _windows,
    _work_list as _work,
    TPULowering,
)
from eqattn.masks._base import AbstractMask


T, SIZE = 80, 32
BLOCKS = dict(blocksize_q=SIZE, blocksize_k=SIZE)
IDS = np.repeat(np.array([[0, 1, 2], [3, 3, 1]]), [13, 50, 17], axis=1)
MASKS = {
    "causal": (Causal(), om.causal(T, T)),
    "window": (Causal() & SlidingWindow(40, 0), om.window(T, T, 40, 0)),
    "segments": (Causal() & Segments(jnp.asarray(IDS)), om.causal(T, T) & om.segments(IDS, IDS)),
}


def run_of(mask: Any, **fields):
    strategy = how("tpu", **BLOCKS | fields)
    return lambda q, k, v, **kw: attention(q, k, v, strategy, mask=mask, **kw).attention_outputs


def layouts_seen(monkeypatch, step, window=SIZE // 2):
    """The layouts that kernels of the forward were made for. Blocks are small here."""
    monkeypatch.setattr(_windows, "WINDOW", window)
    monkeypatch.setattr(block_classes, "STEP", step)
    found, parts = [], _step.with_known_parts

    def seen(layout, *args, **how):
        found.append(layout)
        return parts(layout, *args, **how)

    monkeypatch.setattr(_step, "with_known_parts", seen)
    return found


def parts_by_hand(visible, side, step, group):
    """The parts of all masked blocks of each class, from all pairs `[t, s]`."""
    (t, s), found = visible.shape, {}
    for i in range(0, t, side):
        if not visible[i : i + side].any():
            return {}
        for j in range(0, s, SIZE):
            block = np.zeros((side, SIZE), bool)
            real = visible[i : i + side, j : j + SIZE]
            block[: len(real), : real.shape[1]] = real
            block[len(real) :] = block[len(real) - 1 : len(real)]  # padding may see anything
            if block.all() or not block.any():
                continue
            rows = side // 2 if group == 1 else side
            whole = real.all() or block[:rows, SIZE // 2 :].any()
            kind = PARTIAL if whole else DIAGONAL
            cut = block.reshape(side // step, step, SIZE // step, step)
            full, some = cut.all((1, 3)), cut.any((1, 3))
            found.setdefault(kind, []).append(np.where(full, FULL, np.where(some, PARTIAL, EMPTY)))
    same = lambda xs: np.where((xs == xs[0]).all(0), xs[0], PARTIAL)
    known = {kind: same(np.array(blocks)) for kind, blocks in found.items()}
    if all((x == PARTIAL).all() for x in known.values()):
        return {}
    return {kind: np.tile(x, (group, 1)).tolist() for kind, x in known.items()}


WIDE = 96  # tokens of whole blocks


CUT = SIZE // 2, SIZE, 3 * SIZE // 4  # windows that cut a block, and that do not


@pytest.mark.parametrize(
    "name, cut", [("aligned", CUT[0]), ("window", CUT[1]), ("chunks", CUT[2]), ("chunks", CUT[0])]
)
def test_forms_of_the_step(name, cut, monkeypatch):
    """Each class of masked blocks has its own parts, whether or not windows cut blocks. Chunks see
    no earlier part of their block, whose sums are then relative to an older maximum.
    """
    t, step = 2 * WIDE, SIZE // 4
    found = layouts_seen(monkeypatch, step, cut)
    q, k, v = (4 * normal(n, 1, t, 1, 16) for n in range(3))
    place = np.arange(t)
    distance = place[:, None] - place
    if name == "chunks":
        mask = ChunkedCausal(step) | KeyPadding(SIZE)
        visible = (distance >= 0) & (place[:, None] // step == place // step) | (place < SIZE)
    else:
        left = {"aligned": SIZE - 1, "window": 40}[name]
        mask, visible = Causal() & SlidingWindow(left, 0), (distance >= 0) & (distance <= left)
    judge(run_of(mask), dict(q=q, k=k, v=v), mask=visible[None, None])
    assert found and all(layout.parts for layout in found)


@pytest.mark.parametrize(
    "mask, heads, block_q",
    [("window", (2, 2), SIZE), ("segments", (2, 2), SIZE), ("causal", (4, 2), SIZE // 2)],
)
def test_without_their_corner(mask, heads, block_q, monkeypatch):
    """Blocks in four parts, of which the corner is never looked at."""
    found = layouts_seen(monkeypatch, 256)
    given, ct = drawn("tpu", T, T, *heads, batch=2)
    ours, visible = MASKS[mask]

    @jax.jit  # so that segments are classified at run time
    def run(given, ours):
        out, pull = jax.vjp(lambda x: run_of(ours, blocksize_q=block_q)(**x), given)
        return dict(out=out) | pull(ct)[0]

    check(run(given, ours), given, ct, mask=visible)
    for layout in found:
        corner = _windows.with_known_parts(layout, DIAGONAL, half=True)
        assert layout.parts == () and EMPTY in {x.kind for x in corner}
    assert found


PARTS = [
    *[("causal", 0, 4, 2), ("aligned", 0, 2, 2), ("causal", 3, 2, 2), ("short", 0, 4, 2), ("ended", 0, 2, 0)],
    *[("causal", 0, 2, 1), ("window", 0, 2, 2), ("aligned", 0, 4, 2), ("narrow", 0, 2, 2)],
    *[("causal", 32, 2, 1), ("steps", 0, 2, 1), ("short", 0, 2, 1), ("odd", 0, 2, 1), ("later", 0, 2, 2)],
]  # fmt: skip


@pytest.mark.parametrize("name, offset, heads, classes", PARTS[:5])  # all of them nightly
def test_known_parts(name, offset, heads, classes, monkeypatch):
    """Blocks in parts, of which only those have a mask that need it in some block. On diagonals,
    these are four of sixteen. A window has another edge, and one of as many tokens as a block has
    no full block at all. Of fewer keys, the last block is padded, by keys that no query may see.
    Where a block has queries of two heads, it has fewer of each. Without causal order, each query
    sees later keys as well. If some see none, their blocks are visited as masked ones.
    """
    windows = {"window": (40, 0), "aligned": (31, 0), "narrow": (20, 0), "later": (31, 64)}
    windows["ended"] = windows["aligned"]
    left, right = windows.get(name, (WIDE + offset, 0))
    s = {"short": 72, "odd": 68, "ended": 32}.get(name, WIDE)
    group, step = heads // 2, SIZE // 4
    found = layouts_seen(monkeypatch, step)
    q = normal(0, 1, WIDE, heads, 16)
    k, v = (normal(n, 1, s, 2, 16) for n in (1, 2))
    metadata = AttentionMetadata(
        platform="interpret", blocksize_q=SIZE // group, blocksize_k=SIZE, runtime_dtype=q.dtype
    )
    mask = SlidingWindow(left, right) if name in windows else Causal()
    mask = BlockCausal(16) if name == "steps" else mask
    run = jax.jit(
        lambda v: (
            attention(q, k, v, Blockwise(metadata), mask=mask, q_offset=offset).attention_outputs
        )
    )
    got = np.asarray(run(v))
    end = np.arange(WIDE) // 16 * 16 + 15 if name == "steps" else np.arange(WIDE)
    distance = offset + end[:, None] - np.arange(s)
    visible = (distance >= -right) & (distance <= left)
    want = parts_by_hand(visible, SIZE // group, step, group)
    assert found and len(want) == classes
    for layout in found:
        assert {kind: [*map(list, x)] for kind, x in layout.parts} == want
    check(dict(out=got), dict(q=q, k=k, v=v), mask=visible[None, None])
    # A value that is not finite reaches the rows that see it, of its own head.
    last = min(41, s - 5)
    bad = np.asarray(run(v.at[0, last, 1, 3].set(jnp.nan)))
    sees = np.zeros((1, WIDE, heads, 16), bool)
    sees[0, :, group:, 3] = visible[:, last, None]
    assert np.isnan(bad[sees]).all() and (np.isnan(bad).any(-1) == sees.any(-1)).all()
    np.testing.assert_array_equal(np.where(sees.any(-1, keepdims=True), 0, bad - got), 0)


def test_the_bits_of_a_row_depend_on_no_other_block(monkeypatch):
    """So with `bitwise=True`, nothing is known of parts: it would be of all blocks of a class."""
    found = layouts_seen(monkeypatch, SIZE // 4)
    for strict in (False, True):
        strategy = Blockwise(AttentionMetadata(platform="interpret", **BLOCKS), bitwise=strict)
        q = jnp.zeros((1, WIDE, 2, 16))
        jax.jit(lambda q, s=strategy: attention(q, q, q, s, mask=Causal())).lower(q)
        assert found and all((layout.parts == ()) == strict for layout in found)
        found.clear()


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("s", [48, 41, 36])
@pytest.mark.parametrize("mask", [Causal(), Causal() & SlidingWindow(9, 0), SlidingWindow(5, 3)])
def test_corners_are_empty(mask: AbstractMask, s, group):
    t, block_q, block_k = 37, 8, 12
    at = lambda n: np.arange(n, dtype=np.int32)[None]
    sizes = (1, 2, group, t, s, block_q, block_k)
    plain = np.asarray(classes_of(mask, Tiling(*sizes), (1,), at(t), at(s)))
    halved = Tiling(*sizes, halves=True)
    table = np.asarray(classes_of(mask, halved, (1,), at(t), at(s)))
    assert halved.corner == (block_q // 2 if group == 1 else group * block_q)
    np.testing.assert_array_equal(np.where(table == DIAGONAL, PARTIAL, table), plain)
    visible = np.asarray(mask.as_array(t, s)).reshape(t, s)
    rows = block_q // 2 if group == 1 else block_q
    for (_, _, i, j), kind in np.ndenumerate(table):
        block = visible[i * block_q :, j * block_k :][:block_q, :block_k]
        assert (kind == DIAGONAL) == (
            plain[0, 0, i, j] == PARTIAL and not block[:rows, block_k // 2 :].any()
        )
    assert (table == DIAGONAL).any()


@pytest.mark.parametrize("axes", [(ROW, COL), (HEAD, ROW, COL), (BATCH, ROW, COL), None])
@pytest.mark.parametrize("merged", [(HEAD,), (BATCH, HEAD)])
def test_one_list_for_several_heads(axes, merged):
    """It has the pairs that lists of their own would have, one head's after the other's."""
    grid = (2, 3, 4, 5)
    layout = BlockGrid(grid, (8, 8), (), axes)
    kept, table = (BATCH, HEAD, ROW), None
    if axes is not None:
        table = np.random.default_rng(0).integers(EMPTY, DIAGONAL + 1, layout.shape(axes), np.int8)
    work, length = _work.work_list(table, layout, kept, FULL, merged)
    whole = np.full(grid, FULL, np.int8)
    if table is not None:
        table = table.reshape([n if a in axes else 1 for a, n in zip((BATCH, HEAD), grid)] + [4, 5])
        whole = np.broadcast_to(table, grid)
    lead = (2,) if axes is not None and BATCH in axes and merged == (HEAD,) else ()
    lists = np.asarray(work).reshape(*(lead or (1,)), -1)
    for n, words in enumerate(lists):
        heads = whole[n] if lead else whole[0] if merged == (HEAD,) else whole.reshape(-1, 4, 5)
        want = [
            (h * 4 + i, h * 5 + j, int(head[i, j]))
            for h, head in enumerate(heads)
            for i in range(4)
            for j in (np.flatnonzero(head[i]) if head[i].any() else [0])
        ]
        got = [(int(w) >> 18, (int(w) >> 4) & 2**14 - 1, (int(w) >> 2) & 3) for w in words]
        assert got[: len(want)] == want
        rows = [r for r, _, _ in want]
        first = [i == 0 or rows[i] != rows[i - 1] for i in range(len(rows))]
        assert [bool(w & _work.FIRST) for w in words[: len(want)].tolist()] == first
        last = [*first[1:], True]
        assert [bool(w & _work.LAST) for w in words[: len(want)].tolist()] == last
        assert not any(w & 3 for w in words[len(want) :].tolist())
    assert length == max(len(x) for x in lists) - 1 or axes is not None


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_a_list_in_parts(parts):
    """The pairs of all parts, one part after the other, are those of the list. A part has a `FIRST`
    pair at its begin and a `LAST` one at its end, and past that words without class and flags.
    """
    layout = BlockGrid((1, 1, 3, 4), (8, 8), (), (ROW, COL))
    table = np.array([[2, 2, 1, 0], [0, 0, 0, 0], [1, 2, 2, 3]], np.int8)
    work, length = _work.work_list(table, layout, (BATCH, HEAD, ROW), FULL)
    words, traced = np.asarray(work)[:length], jax.jit(_work.in_parts, static_argnums=(2, 3))
    for cut, size, seen in (_work.in_parts(work, length, parts, 3), traced(work, length, parts, 3)):
        cut, left = np.asarray(cut), words
        assert len(cut) == parts and size == -(-length // parts)
        for own, rows in zip(cut, np.asarray(seen), strict=True):
            mine, left = left[:size], left[size:]
            ends = [_work.FIRST * (i == 0) | _work.LAST * (i == len(mine) - 1)
                    for i in range(len(mine))]  # fmt: skip
            np.testing.assert_array_equal(own[: len(mine)], mine | np.array(ends, int))
            assert not (own[len(mine) :] & 15).any()
            np.testing.assert_array_equal(np.flatnonzero(rows), np.unique(mine >> 18))
        assert not len(left)


def test_cores_do_not_share_a_list(monkeypatch):
    layout = BlockGrid((2, 3, 4, 5), (8, 8), ())
    assert _work.merged_axes(layout) == (BATCH, HEAD)
    assert _work.merged_axes(BlockGrid((2, 3, 16, 32), (8, 8), ())) == (HEAD,)
    assert _work.merged_axes(BlockGrid((2, 3, 64, 32), (8, 8), ())) == ()
    monkeypatch.setattr(_work, "cores", lambda: 2)
    assert _work.merged_axes(layout) == ()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "keys, rows, corner",
    [(1024, 1024, 512), (1024, 512, 512), (512, 512, 256), (1024, 768, 384), (1024, 1280, 640),
     (768, 512, 256), (2048, 1024, 512), (1536, 1024, 512), (1024, 1024, 0), (1024, 1024, 1024)],
)  # fmt: skip
def test_windows_of_a_corner_are_all_of_it_or_none(keys, rows, corner, masked):
    """A window that straddles the edge of a corner holds pairs that are visible."""
    layout = BlockGrid((1, 1, 1, 1), (keys, rows), (), corner=corner)
    inside = np.zeros((keys, rows), int)
    for x in _windows.with_corner(layout, DIAGONAL, half=masked):
        inside[x.at, x.to] += x.kind == EMPTY
    of_corner = np.zeros((keys, rows), int)
    of_corner[keys // 2 :, :corner] = 1
    assert (inside == 0).all() or (inside == of_corner).all()
    covered = np.zeros((keys, rows), int)
    size = _windows.WINDOW // 2 if masked else _windows.WINDOW
    for x in _windows.windows(layout, PARTIAL, half=masked):
        covered[x.at, x.to] += 1
        # A side that the size of a window does not divide is whole.
        for part, side, whole in ((x.at, _windows.WINDOW, keys), (x.to, size, rows)):
            assert _windows.size_of(part) == (whole if whole % side else side)
    assert (covered == 1).all()
    if keys == 1024 and rows % size == corner % size == 0:
        assert inside.sum() == keys // 2 * corner


def diagonal(count, sign):
    """The parts of a block on a diagonal: below it they are full, or above it."""
    kinds = np.sign(np.arange(count)[:, None] - np.arange(count)) * sign
    return tuple(map(tuple, np.array([PARTIAL, FULL, EMPTY])[kinds].tolist()))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "side, known",
    [(1024, {DIAGONAL: diagonal(4, 1)}), (2048, {DIAGONAL: diagonal(8, 1)}),
     (512, {DIAGONAL: diagonal(2, 1)}), (1024, {PARTIAL: diagonal(4, -1), DIAGONAL: diagonal(4, 1)}),
     (1024, {PARTIAL: ((FULL, PARTIAL, PARTIAL, EMPTY),) * 2})],
)  # fmt: skip
def test_windows_of_known_parts(side, known, half):
    """Each pair is in one window, of the kind that its place has; and beside the windows of a pair
    all of the pair before are added, each before its logits are replaced.
    """
    layout = BlockGrid((1, 1, 1, 1), (side, side), (), corner=side // 2, parts=tuple(known.items()))
    plain = _windows.windows(layout, FULL)
    for kind, wanted in known.items():
        kinds = np.full((side, side), -1)
        parts = _windows.with_known_parts(layout, kind, half=half)
        for x in parts:
            assert (kinds[x.at, x.to] == -1).all()
            kinds[x.at, x.to] = x.kind
        whole = np.array(wanted).T
        for axis in (0, 1):
            whole = whole.repeat(side // whole.shape[axis], axis)
        np.testing.assert_array_equal(kinds, whole)
        for ahead, behind in ((parts, _windows.beside(layout, parts)), (plain, parts)):
            read = np.zeros((side, side), int)
            stored = np.zeros((side, side), bool)
            for x, now in _windows.in_turn(ahead, behind):
                for y in now:
                    assert not stored[y.at, y.to].any()
                    read[y.at, y.to] += 1
                stored[x.at, x.to] = True
            hidden = np.isin(kinds, EMPTY) & (behind is parts)
            np.testing.assert_array_equal(read, ~hidden)
            assert stored.all()


def recorded(monkeypatch: Any, most: int | None = None) -> list[int]:
    """The axes whose elements are visited in turns from now on. If `most` is given, scalar memory
    holds so many pairs.
    """
    found: list[int] = []
    of = _traverse.in_turns

    def in_turns(visit, layout, args, axes, axis, default_class):
        found.append(axis)
        return of(visit, layout, args, axes, axis, default_class)

    monkeypatch.setattr(_traverse, "in_turns", in_turns)
    if most is not None:
        monkeypatch.setattr(_lists, "MOST_PAIRS", most)
    return found


ROWS, KEYS, SIDE = 104, 120, 8  # 13 rows of 15 blocks, which are no equal turns
OF_IDS = np.sort(np.random.default_rng(1).integers(0, 4, (2, KEYS)))
HIDDEN = np.random.default_rng(2).random((4, ROWS, KEYS)) < 0.7
HIDDEN[1, 16:24] = True  # a row of blocks without a live one
LISTED = np.random.default_rng(0).integers(-1, KEYS // SIDE, (2, 4, ROWS // SIDE, 3), np.int32)
TURNS: dict[str, Any] = {
    "full": (None, np.ones((1, 1, ROWS, KEYS), bool), {ROW}),
    "window": (SlidingWindow(20, 0), om.window(ROWS, KEYS, 20, 0), {ROW}),
    "segments": (
        Segments(jnp.asarray(OF_IDS[:, :ROWS]), jnp.asarray(OF_IDS)),
        om.segments(OF_IDS[:, :ROWS], OF_IDS),
        {BATCH, ROW},
    ),
    "array": (DenseMask(jnp.asarray(~HIDDEN)), ~HIDDEN[None], {HEAD, ROW}),
    "lists": (
        Selected(jnp.asarray(LISTED), SIDE, SIDE),
        om.selected(ROWS, KEYS, LISTED, SIDE, SIDE),
        {BATCH, HEAD, ROW},
    ),
}


@pytest.mark.parametrize("name", TURNS)
def test_rows_in_turns(name, monkeypatch):
    """Outputs and all gradients, where scalar memory holds two rows of pairs."""
    mask, seen, wanted = TURNS[name]
    monkeypatch.setattr(TPULowering, "least_listed", (SIDE, SIDE))
    transposed = recorded(monkeypatch, most=47)
    given, ct = drawn("tpu", ROWS, KEYS, 4, 4, batch=2)
    bias = normal(4, *((1, 4, ROWS, KEYS) if name != "window" else (2, 1, ROWS, 1)))
    run = run_of(mask, blocksize_q=SIDE, blocksize_k=SIDE)
    judge(run, given | dict(bias=bias), ct, mask=seen)
    assert {*transposed} == wanted


def of_a_bias(shape, monkeypatch):
    """The gradient of a bias beside lists of each head."""
    monkeypatch.setattr(TPULowering, "least_listed", (SIDE, SIDE))
    given, ct = drawn("tpu", ROWS, KEYS, 4, 4, batch=2)
    run = run_of(TURNS["lists"][0], blocksize_q=SIDE, blocksize_k=SIDE)
    gradient = jax.jit(lambda bias: jax.vjp(lambda x: run(**given, bias=x), bias)[1](ct)[0])
    return gradient, normal(4, *shape)


def test_gradients_of_pairs_do_not_take_an_array_for_each_list(monkeypatch):
    """They are added up in turns, however short the lists."""
    transposed = recorded(monkeypatch)
    for shape, axes in (((1, 4, ROWS, KEYS), [BATCH]), ((1, 1, 1, KEYS), [])):
        gradient, bias = of_a_bias(shape, monkeypatch)
        gradient.lower(bias)
        assert transposed == axes
        transposed.clear()


def test_gradients_of_pairs_round_once(monkeypatch):
    """The gradient of a narrow bias, a sum over lists in turns, is the wide one, rounded."""
    gradient, bias = of_a_bias((1, 1, ROWS, KEYS), monkeypatch)
    narrow = bias.astype(jnp.bfloat16)
    wide = gradient(narrow.astype(jnp.float32))
    assert (gradient(narrow) == wide.astype(jnp.bfloat16)).all() and (wide != 0).any()


def lowered(*args, mask: Any = Causal(), strategy: Any = Blockwise, **fields: Any):
    how = strategy(AttentionMetadata(**dict(platform="tpu") | fields))
    return kernels("tpu", lambda *x: attention(*x, how, mask=mask).attention_outputs, *args)


def test_a_list_that_is_known_holds_visible_blocks_only(monkeypatch):
    """Of 2^20 pairs of blocks, 2^11 are visible. Made on the device, the list would hold all."""
    transposed = recorded(monkeypatch)
    args = [jax.ShapeDtypeStruct((1, 2**20, 1, 128), jnp.bfloat16)] * 3
    fields = dict(runtime_dtype=jnp.bfloat16)
    assert (
        lowered(*args, mask=Causal() & SlidingWindow(1000, 0), **fields) == 1 and transposed == []
    )
    assert lowered(*args, mask=KeyPadding(jnp.ones(1, int)), **fields) == 1 and transposed == [ROW]


def test_half_a_million_tokens_have_a_kernel():
    """Their list has 131,840 pairs, and 131,072 fit."""
    q = jax.ShapeDtypeStruct((1, 2**19, 2, 128), jnp.bfloat16)
    assert lowered(q, q, q, runtime_dtype=jnp.bfloat16) >= 1


def test_lists_that_scalar_memory_cannot_hold():
    """Those of a hop of a ring, and of a step over caches. Others are visited in turns."""
    args = [jnp.zeros((1, 1024, 1, 8)) for _ in range(3)]
    small: Any = dict(blocksize_q=1, blocksize_k=1)
    assert lowered(*args, **small) == 1
    with jax.set_mesh(mesh_of(2)):
        with pytest.raises(ValueError, match="list of 262144 pairs.*larger block sizes"):
            lowered(*args, strategy=Ring, **small)
        assert lowered(*args, strategy=Ring, platform="auto", backend="tpu", **small) == 0
    with jax.set_mesh(mesh_of(4)):  # The list is that of one hop.
        assert lowered(*args, strategy=Ring, **small) >= 2
    cached = [jax.ShapeDtypeStruct((512, n, 1, 8), jnp.float32) for n in (1, 2**13, 2**13)]
    with pytest.raises(ValueError, match="pairs of blocks is too long"):
        lowered(*cached, mask=KeyPadding(jnp.arange(512)), strategy=Ragged, **small)
