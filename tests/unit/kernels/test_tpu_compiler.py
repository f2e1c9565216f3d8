"""What the kernels for TPUs make of a call: their programs and operands, the forms of their steps, their
blocks, and that nothing races. That they compile, too; more of that is in nightly/kernels.
"""

import functools as ft
import operator
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from _kernels import check, drawn, how, judge, kernels, normal, results
from _stored_rows import (
    arrays as rows_of,
    cache,
    call,
    check as check_caches,
    judge as judge_caches,
    kept_as,
    LENGTHS,
    seen,
)
from _tpu_compile import compile_all, expected
from _tpu_races import without_races
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from matrix import oracle, oracle_masks as om

from eqattn import (
    ALiBi,
    attention,
    AttentionMetadata,
    Blockwise,
    Carry,
    Causal,
    dropout_mask,
    KeyPadding,
    MaskFn,
    Ragged,
    ragged_flash_attention_kernel,
    ScoreFn,
    Segments,
    SlidingWindow,
    T5Bias,
)
from eqattn._carry import safe_max
from eqattn._problem import block_classes
from eqattn._problem.block_classes import choose_live_tiling
from eqattn._problem.problem import Problem
from eqattn._sweep.grid import BlockGrid, BlockRequest, BlockSizes
from eqattn._sweep.products import dot
from eqattn.kernels import tpu
from eqattn.kernels.tpu import (
    _backward,
    _backward as _step,
    _chip,
    _decode,
    _forward,
    _operands,
    _program as _sides,
    _windows,
    _work_list as _work,
    TPULowering,
)
from eqattn.kernels.tpu._decode import OwnColumns
from eqattn.kernels.tpu._grid import KernelGrid
from eqattn.kernels.tpu._program import Evaluation, in_range, LOG2E, Program
from eqattn.kernels.tpu._work_list import in_parts


def test_exponentials_of_a_row_that_sees_nothing():
    """A compiler that contracts `s * factor - origin * factor` would hide what this shows."""
    s, top = jnp.full((8, 16), -jnp.inf), jnp.full(16, -jnp.inf)
    program = Program(lambda s, top: [jnp.exp(s - safe_max(top)[None])], [s, top])
    (p,) = program([lambda: s, lambda: top], [False, False])
    np.testing.assert_array_equal(p, 0)


def test_a_number_times_a_factor_is_as_finite_as_it_was():
    least = np.finfo(np.float32).min
    for x in (least, -least):
        assert in_range(x, LOG2E) == x
    for x in (-np.inf, np.inf, 3.0, 0.0):
        assert in_range(x, LOG2E) == np.float32(x * LOG2E)


def test_bounds_of_a_difference():
    """A difference with the bound is taken for each row, and says what exact integers say."""
    ends = np.array([-(2**31), -(2**31) + 1, -5, -1, 0, 1, 7, 2**31 - 2, 2**31 - 1])
    q, k = ends.astype(np.int32)[None], ends.astype(np.int32)[:, None]
    for compare in (operator.le, operator.ge):
        for n in (0, 7, 2**31 - 1) if compare is operator.le else (0, -7, -(2**31)):
            program = Program(lambda q, k: [compare(q - k, n)], [q, k])

            def window(q, k):
                run = Evaluation(program, [lambda: q, lambda: k], [False, False])
                return run.at((slice(0, 9), slice(0, 9))).block(program.outs[0])

            want = compare(ends[None] - ends[:, None], n)
            np.testing.assert_array_equal(jax.jit(window)(q, k), want, str(n))
            eqns = jax.make_jaxpr(window)(q, k).jaxpr.eqns
            assert [e.outvars[0].aval.shape for e in eqns if e.primitive is lax.sub_p] == [(1, 9)]


def test_bounds_of_a_difference_that_stay_where_they_are():
    """A saturated number would count as within a bound of the other sign. So these differences are
    taken for each pair, and wrap around as those of XLA do.
    """
    ends = np.array([-(2**31), -(2**31) + 1, -5, -1, 0, 1, 7, 2**31 - 2, 2**31 - 1])
    q, k = ends.astype(np.int32)[None], ends.astype(np.int32)[:, None]
    wrapped = (ends[None] - ends[:, None] + 2**31) % 2**32 - 2**31
    for compare, numbers in ((operator.le, (-7, -(2**31))), (operator.ge, (7, 2**31 - 1))):
        for n in numbers:
            program = Program(lambda q, k: [compare(q - k, n)], [q, k])
            run = Evaluation(program, [lambda: q, lambda: k], [False, False])
            got = run.at((slice(0, 9), slice(0, 9))).block(program.outs[0])
            np.testing.assert_array_equal(got, compare(wrapped, n), str(n))


@pytest.mark.parametrize("width", [48, 128, 256])
def test_numbers_in_all_lanes(width):
    """A part of a row, as columns as wide as a window: whole registers are repeated."""
    row = jnp.arange(64, dtype=jnp.int32)[None]
    got = _sides.columns(_sides.in_lanes(row), slice(24, 40), width)
    np.testing.assert_array_equal(got, np.arange(24, 40)[:, None].repeat(width, 1))


T, D = 56, 16


@pytest.fixture
def plans(monkeypatch):
    """The plans of kernels, for registers of 8 lanes and windows of 16, so that small blocks fill
    some and are cut as large ones are.
    """
    found = []

    def noted(plan):
        def run(*args):
            made = plan(*args)
            found.append(made[0])
            return made

        return run

    monkeypatch.setattr(_operands, "LANES", 8)
    monkeypatch.setattr(_step, "WINDOW", (16, 16))
    for module in (_forward, _backward):
        monkeypatch.setattr(module, "_plan", noted(module._plan))
    return found


def run_of(mask: Any = Causal(), dtype: Any = jnp.float32, score: Any = None, **fields):
    fused = fields.pop("fused", True)
    sizes = dict(blocksize_q=16, blocksize_k=32) | fields
    strategy = Blockwise(how("tpu", runtime_dtype=dtype, **sizes).metadata, fused_backward=fused)
    return lambda q, k, v, **kw: (
        attention(q, k, v, strategy, mask=mask, score=score, **kw).attention_outputs
    )


def arrays(dtype: Any = jnp.float32, heads=4, kv_heads=2):
    given, ct = drawn("tpu", T, T, heads, kv_heads, D)
    return {n: x.astype(dtype) for n, x in given.items()}, ct.astype(dtype)


@pytest.mark.parametrize(
    "dtype, units", [(jnp.float32, True), (jnp.bfloat16, True), (jnp.bfloat16, False)]
)
def test_features_lie_innermost(dtype, units, plans, monkeypatch):
    """Kernels read and write them as projections do, and turn blocks themselves. `units`: whether the
    chip has wide matrix units.
    """
    monkeypatch.setattr(_step, "suits", lambda step: units)
    given, ct = arrays(dtype)
    judge(run_of(dtype=dtype), given, ct, mask=om.causal(T, T))
    (fold,) = [p for p in plans if isinstance(p, _forward._Fold)]
    assert (fold.ahead[0].flipped, fold.early, fold.ahead[0].heads, fold.heads) == (
        True,
        True,
        2,
        2,
    )
    (sums,) = [p for p in plans if isinstance(p, _backward._Sum)]
    assert (sums.transposed is not None) == units
    # Of float32, the sums for queries are what is written.
    transposed = [x.heads for x in sums.results.values() if x.transposed]
    assert transposed == [2] * (dtype == jnp.bfloat16)
    assert sum(x.flipped for x in sums.given.values()) == 1
    assert [x.heads for x in sums.given.values()].count(2) == 2  # queries and cotangents


def test_values_that_are_not_finite_are_found_as_they_are_transposed(plans):
    """A step before they are added, and still they reach only the rows that see them."""
    given, _ = arrays()
    bad = given | dict(v=given["v"].at[0, 35, 1].set(jnp.inf))
    out = results(run_of(), bad)["out"]
    (plan,) = plans
    assert plan.early and plan.form.poisons
    assert not np.isfinite(out[0, 35:, 2:]).any()
    clean = judge(run_of(), given, mask=om.causal(T, T))["out"]
    np.testing.assert_array_equal(out[0, :35], clean[0, :35])
    np.testing.assert_array_equal(out[0, :, :2], clean[0, :, :2])


def test_projections_keep_their_order():
    """Their results stay apart from the transposes after them, where kernels read these."""
    given, _ = arrays()

    def apart(platform):
        f = lambda *x: attention(*x, how("tpu", platform), mask=Causal()).attention_outputs
        return str(jax.make_jaxpr(f)(*given.values())).count("optimization_barrier")

    assert apart("interpret") == 3 and apart("xla") == 0


IDS = np.repeat(np.array([[0, 1, 2]]), [13, 26, 17], axis=1)
MASKS: dict[str, Any] = {
    "causal": (Causal(), om.causal(T, T)),
    "window": (Causal() & SlidingWindow(30, 0), om.window(T, T, 30, 0)),
    "segments": (Causal() & Segments(jnp.asarray(IDS)), om.causal(T, T) & om.segments(IDS, IDS)),
}


@pytest.fixture
def steps(monkeypatch):
    """The steps of gradients in the form for wide matrix units, whose windows of logits are `[rows,
    keys]`: here of 16 keys and 16 rows, or 8 if masked.
    """
    found = []
    monkeypatch.setattr(_step, "WINDOW", (16, 16))
    monkeypatch.setattr(_step, "suits", lambda step: found.append(step) or True)
    return found


@pytest.mark.parametrize(
    "mask, heads, fused", [("window", (2, 2), False), ("segments", (2, 1), True)]
)
def test_gradients_by_wide_units(mask, heads, fused, steps):
    given, ct = arrays(jnp.float32, *heads)
    ours, visible = MASKS[mask]
    found = run_of(ours, fused=fused, blocksize_q=32 * heads[1] // heads[0])
    judge(found, given, ct, mask=visible)
    assert len(steps) == 2 - fused
    assert {s.kept for step in steps for s in step.main.sums} == {-1, -2}
    assert all(step.corner for step in steps)


def test_a_table_and_a_number_of_each_head_by_wide_units(steps):
    """Windows of differences are cut as those of logits; a number of a head is a block `[1, 1]`, and
    is not.
    """
    given, ct = arrays()
    learned = dict(table=normal(7, 8, 4))
    run = lambda table, **x: run_of(score=T5Bias(table, max_distance=16), blocksize_q=16)(**x)
    more = dict(bucket=om.t5_bucket(T, T, 8, True, 16), mask=om.causal(T, T))
    judge(run, given | learned, ct, **more)
    most = jnp.array([0.2, -0.3, 0.1, 0.4])
    score = ScoreFn(lambda s, b, h, q, k: jnp.where(h >= 0, s + most[h], most[h]))
    bias = np.float64(most)[None, :, None, None]
    judge(run_of(None, score=score), given, ct, bias=bias)
    assert len(steps) == 2


def test_what_has_no_such_form(steps):
    """The gradient of a bias is no product with logits: its kernel, and only that, has another form."""
    given, _ = arrays(jnp.float32, 2, 2)
    q, k, v = given.values()
    loss = lambda b, s, q: (run_of(None, score=ALiBi(s))(q, k, v, bias=b) ** 2).sum()
    jax.jit(jax.grad(loss, (0, 1, 2))).lower(normal(3, 1, 2, T, T), jnp.ones(2), q)
    assert [[s.kept for s in step.main.sums] for step in steps] == [[-2]]


@pytest.fixture
def heads_per_step(plans, monkeypatch):
    """Two heads that have the same pairs of blocks are visited in a step of the forward."""
    monkeypatch.setattr(_forward, "most_heads_per_step", lambda pairs, width: 2)
    return plans


@pytest.mark.parametrize("lanes, kv_heads", [(128, 4), (8, 2)])
def test_two_heads_in_a_step(lanes, kv_heads, heads_per_step, monkeypatch):
    """Both share positions, and each has its own bias and sink. Blocks of values are turned if they
    fill registers.
    """
    monkeypatch.setattr(_operands, "LANES", lanes)
    given, ct = arrays(jnp.float32, 4, kv_heads)
    given |= dict(bias=normal(7, 1, 4, T, T), sinks=jnp.arange(4.0))
    run = lambda sinks, **x: run_of(blocksize_k=16, softmax_aux=sinks)(**x)
    judge(run, given, ct, only=tuple("qkv"), mask=om.causal(T, T))
    (fold,) = [p for p in heads_per_step if isinstance(p, _forward._Fold)]
    assert fold.grid.heads_per_step == 2 and fold.early == (lanes == 8)


@pytest.mark.parametrize("lanes", [128, 8])
def test_two_heads_with_rows_of_each_batch_element(lanes, heads_per_step, monkeypatch):
    """Lists that differ between batch elements, too long to be shared by all, and values that are
    not finite, of the first head of a step and of the second: each reaches the rows of its head that
    see it. They are found as values are turned, or a step later.
    """
    monkeypatch.setattr(_work, "SHORT", 4)
    for module in (_operands, _sides):
        monkeypatch.setattr(module, "LANES", lanes)
    ids = np.arange(2 * 40).reshape(2, 40) // 24
    given, _ = drawn("tpu", 40, 40, 4, 4, 8, batch=2)
    bad = given["v"].at[1, 20, 2].set(jnp.nan).at[0, 30, 1].set(jnp.nan)
    run = run_of(Causal() & Segments(jnp.asarray(ids)), blocksize_k=16)
    shown = om.causal(40, 40) & om.segments(ids, ids)
    clean = judge(run, given, mask=shown)["out"]
    dirty = results(run, given | dict(v=bad))["out"]
    assert {(p.grid.heads_per_step, p.grid.merged, len(p.flags)) for p in heads_per_step} == {
        (2, (), lanes == 8)
    }
    seen = np.zeros(clean.shape[:3], bool)
    seen[1, :, 2], seen[0, :, 1] = shown[1, 0, :, 20], shown[0, 0, :, 30]
    np.testing.assert_array_equal(np.isnan(dirty).any(-1), seen)
    np.testing.assert_array_equal(dirty[~seen], clean[~seen])


def test_heads_that_have_no_neighbour(heads_per_step):
    """Three heads, and two of one key head, are visited one by one."""
    for heads in ((3, 3), (2, 1), (2, 2)):
        given, _ = arrays(jnp.float32, *heads)
        jax.jit(lambda x: run_of(None)(**x)).lower(given)
    assert [p.grid.heads_per_step for p in heads_per_step] == [1, 1, 2]


RACES: dict[str, Any] = {
    "a window": (arrays(), run_of(Causal() & SlidingWindow(9, 2)), True),
    "lengths": (arrays(), run_of(KeyPadding(33)), True),
    "turned": (arrays(jnp.float32, 1, 1), run_of(), False),
}


@pytest.mark.parametrize("name", RACES)
def test_races_and_memory_that_nothing_wrote(name, plans, monkeypatch):
    """Interpreted with threads for the copies and NaN in fresh memory."""
    (given, ct), run, gradient = RACES[name]
    monkeypatch.setattr(_step, "suits", lambda step: name == "lengths")
    visible = {"a window": om.window(T, T, 9, 0), "turned": om.causal(T, T)}
    visible["lengths"] = om.lengths(T, T, np.array([33]))

    def f(given):
        out, pull = jax.vjp(lambda x: run(**x), given)
        return dict(out=out) | pull(ct)[0] if gradient else dict(out=out)

    got, count = without_races(f, given)
    assert count == 1 + gradient
    found = dict(zip(sorted(["out", *(given if gradient else ())]), got))
    check(found, given, ct if gradient else None, mask=visible[name])


@pytest.mark.parametrize("t, kept, cores", [(1, {}, 2), (3, dict(stored=jnp.int8, page=16), 1)])
def test_races_over_caches(t, kept, cores, monkeypatch):
    """Few rows by two cores, and three pages a block with the scales of each."""
    monkeypatch.setattr(_decode, "cores", lambda: cores)
    (q, k, v), plain = cache(t, 4, 2, 16, 8, dtype=jnp.float32, **kept)
    sizes = {} if kept else {"blocksize_k": 16}

    def f(*args):
        output = call(*args, **sizes)
        return output.attention_outputs, output.logsumexp

    got, count = without_races(f, q, k, v, cores=cores)
    assert count == 1
    check_caches(dict(zip(("out", "lse"), got)), q.dtype, plain)


@pytest.mark.parametrize("parts, size", [(2, 8), (3, 12), (4, 24)])
def test_rows_that_cores_share(parts, size, monkeypatch):
    """Stretches of the list, that begin and end within rows and may be empty, merged."""
    cut = []
    monkeypatch.setattr(_decode, "cores", lambda: parts)
    monkeypatch.setattr(_decode, "in_parts", lambda *x: cut.append(in_parts(*x)) or cut[-1])
    starts = np.array([0, 0, 20, 3])
    args, plain = cache(2, 4, 2, 16, 8, stored=jnp.int8, dtype=jnp.float32)
    given: Any = dict(starts=jnp.asarray(starts), blocksize_k=size)
    judge_caches(args, plain, seen(2, 48, starts), **given)
    assert len(cut) == 1 and len(cut[0][0]) == parts
    q, k, v = (x[:1] for x in rows_of(2))  # a row of which each core has a part
    run = how("tpu", strategy=Ragged, blocksize_k=size)
    mask = KeyPadding(jnp.full(1, 48))
    judge(lambda q, k, v: attention(q, k, v, run, mask=mask).attention_outputs, dict(q=q, k=k, v=v))
    assert len(cut) == 2


def plain_rows(q, k, v, seen):
    """Output and logsumexp of `[b, t, h, d]` in float64, for visible pairs `[b, t, s]`."""
    found = oracle.forward(oracle.Problem(q, k, v, scale=q.shape[-1] ** -0.5, mask=seen[:, None]))
    return found.out, found.lse


def test_live_blocks_are_all_that_is_visited():
    """The list is as long as the live blocks of all rows are many, one for a row without any."""
    table = jnp.asarray([[[1, 1, 2]], [[0, 0, 0]], [[2, 1, 0]]], jnp.int8)
    layout = BlockGrid((3, 1, 1, 3), (16, 4), (), (-4, -2, -1), ragged=True)
    grid, work = KernelGrid.of(table, layout, (-4, -3, -2), 2)
    assert int(grid.length) == 3 + 1 + 2
    rows, columns = np.asarray(work) >> 18, (np.asarray(work) >> 4) & (2**14 - 1)
    assert rows[:6].tolist() == [0, 0, 0, 1, 2, 2] and columns[:6].tolist() == [0, 1, 2, 0, 0, 1]


@pytest.mark.parametrize("starts", [np.array([0, 0, 0, 0]), np.array([5, 0, 17, 33])])
def test_the_kernel_body_of_ones_own_call(starts):
    b, h, d, s, size = len(LENGTHS), 4, 16, 48, 16
    random = np.random.RandomState(2)
    q, k, v = (random.standard_normal(x).astype(np.float32) for x in
               ((b, h, d), (b, s, d), (b, s, 8)))  # fmt: skip
    hidden = ~seen(1, s, starts)[:, 0]
    k[hidden], v[hidden] = np.nan, np.inf
    whole = lambda *shape: pl.BlockSpec((None, *shape), lambda i, j, *_: (i, 0, 0))
    part = lambda n: pl.BlockSpec((None, size, n), lambda i, j, *_: (i, j, 0))
    result = lambda n: jax.ShapeDtypeStruct((b, h, n), jnp.float32)
    o, m, l = pl.pallas_call(
        ft.partial(ragged_flash_attention_kernel, block_size=size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(b, s // size),
            in_specs=[whole(h, d), part(d), part(8)],
            out_specs=[whole(h, 8), whole(h, 128), whole(h, 128)],
        ),
        out_shape=[result(8), result(128), result(128)],
        interpret=True,
    )(jnp.asarray(LENGTHS), jnp.asarray(starts), q, k, v)
    carry = Carry(o, l[..., 0], m[..., 0])
    clean = [np.where(hidden[..., None], 0, x)[:, :, None] for x in (k, v)]
    out, logsumexp = plain_rows(q[:, None] * np.sqrt(d), *clean, seen(1, s, starts))
    np.testing.assert_allclose(carry.output(), out[:, 0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(carry.logsumexp(), logsumexp[:, 0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="mask_value=-10"):
        ragged_flash_attention_kernel(*[None] * 8, block_size=8, mask_value=-10.0)


@pytest.mark.parametrize(
    "given, queries, keys",
    [
        (dict(queries=1), 32, 512),
        (dict(), 256, 256),
        (dict(page_size=64), 128, 256),
        (dict(keys=8203), 256, 256),
        (dict(keys=8203, queries=1), 32, 1024),
        (dict(page_size=64, group=16, head_dim=256, token_nbytes=8192), 16, 512),
        (dict(page_size=64, group=16, queries=128, token_nbytes=512), 64, 512),
    ],
)
def test_blocks_of_few_rows_and_many(given, queries, keys):
    """Of several key heads, in order and in pages, those of many rows have more rows and fewer
    keys. Wide heads in pages are visited by the kernel for few rows, and one key head is not taken
    apart.
    """
    sizes = dict(queries=512, keys=8192, group=32, head_dim=128, in_place=True, itemsize=2)
    request = BlockRequest(dtype=jnp.dtype(jnp.bfloat16), **sizes | dict(token_nbytes=4096) | given)
    assert TPULowering("pallas").choose_blocks(request) == BlockSizes(queries, keys)


FOLDS = {
    # queries, heads, key heads: rows of a tile, columns of a period, columns of a part
    (1, 16, 4): (8, 128, 512),  # two groups in a tile
    (1, 32, 32): (8, 128, 1024),  # eight, and several parts
    (2, 32, 4): (16, 128, 512),  # a group in each tile
    (1, 24, 3): (8, 384, 384),  # a pattern of three registers
    (1, 12, 4): (12, 128, 512),  # groups across tiles: nothing is folded
    (3, 8, 1): (24, 128, 128),  # one group: all columns are everyone's
}


@pytest.mark.parametrize("case", FOLDS)
def test_how_rows_are_folded(case):
    t, heads, groups = case
    own = OwnColumns(128, groups, t * heads)
    assert (own.height, own.period, own.parts[0].stop) == FOLDS[case]
    assert [x for p in own.parts for x in range(p.start, p.stop)] == list(range(128 * groups))
    odd = OwnColumns(24, groups, t * heads)  # of which no register begins where another did
    assert odd.period == 24 * groups or odd.period % 128 == 0
    assert odd.columns % odd.period == 0


def apart(t, heads, groups):
    """Two rows, with heads whose logits are so large that exp of them, less another head's maximum,
    overflows.
    """
    given, _ = drawn("tpu", t, 256, heads, groups, 8, 8, batch=2)
    factor = np.where(np.arange(heads) % 3 == 1, 300.0, 1.0).reshape(1, 1, heads, 1)
    return given | dict(q=given["q"] * factor.astype(np.float32))


ENDS = np.array([250, 37])


def decoded(q, k, v, **fields):
    lengths = jnp.asarray(ENDS)
    strategy = how("tpu", strategy=Ragged, **dict(blocksize_k=128) | fields)
    mask = KeyPadding(lengths) & Causal()
    more: Any = dict(mask=mask, q_offset=lengths - q.shape[1], return_logsumexp=True)
    output = attention(q, k, v, strategy, **more)
    return dict(out=output.attention_outputs, lse=output.logsumexp)


def of_rows(t):
    at = ENDS[:, None] - t + np.arange(t)
    return (np.arange(256) <= at[..., None])[:, None]


@pytest.mark.parametrize("case", [(1, 16, 4), (2, 32, 4), (1, 24, 3)])
def test_rows_that_share_registers(case):
    """A maximum that only a row of another head in the same register exceeds, over 8 bits."""
    given = apart(*case)
    (k, plain_k), (v, plain_v) = (kept_as(given[n], jnp.int8) for n in "kv")
    found = jax.jit(decoded)(given["q"], k, v)
    exact = dict(q=given["q"], k=jnp.asarray(plain_k), v=jnp.asarray(plain_v))
    check(found, exact, mask=of_rows(case[0]), k=plain_k, v=plain_v)


@pytest.mark.parametrize("case", [(1, 16, 4), (2, 32, 4)])
def test_a_value_that_is_not_finite_reaches_the_heads_that_see_it(case):
    given, share = apart(*case), case[1] // case[2]
    run = jax.jit(lambda q, k, v: decoded(q, k, v)["out"])
    got, clean = run(**given | dict(v=given["v"].at[0, 5, 1, 3].set(jnp.inf))), run(**given)
    check(dict(out=clean), given, mask=of_rows(case[0]))
    # A weight that underflows to 0 still makes NaN of what is not finite.
    seen = np.zeros(got.shape, bool)
    seen[0, :, share : 2 * share] = True
    assert np.isnan(np.asarray(got)[seen]).all()
    np.testing.assert_array_equal(np.asarray(got)[~seen], np.asarray(clean)[~seen])


def sums(f, *shapes):
    avals = [jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes]
    return _step.TransposedSums(Program(f, avals), [0])


def test_sums_that_are_not_linear_in_their_products():
    """Each window adds to a sum, so what is added must be the sum of what windows add."""
    shapes = (32, 8), (32, 8), (8, 16), (16, 8)
    logits = lambda k, q: dot(k, q, (1, 0))
    weighted = lambda k, q, do: dot(jnp.exp(logits(k, q)), do, (1, 0))
    finite = lambda x, y: jnp.where(jnp.isfinite(x), y, 0.0)
    assert sums(lambda a, *x: [a + weighted(*x)], *shapes).possible
    assert sums(lambda a, k, *x: [a + 2 * finite(k, weighted(k, *x))], *shapes).possible
    for f in (
        lambda a, k, *x: [a + (weighted(k, *x) + k)],
        lambda a, k, *x: [a + weighted(k, *x) * weighted(k, *x)],
        lambda a, k, *x: [a + jnp.where(jnp.isfinite(k), weighted(k, *x), 1.0)],
        lambda a, k, *x: [a * weighted(k, *x)],
        lambda a, k, *x: [k + weighted(k, *x)],
        lambda a, k, q, do: [a + logits(k, q) @ do],
    ):
        assert not sums(f, *shapes).possible


@pytest.mark.parametrize(
    "generation, cores, itemsize, keys, heads, tokens",
    [
        (0, 1, 2, 8192, 8, 512),  # no chip is known
        (5, 1, 1, 8192, 8, 512),
        (5, 2, 2, 8192, 8, 512),
        (5, 2, 1, 8192, 8, 1024),
        (6, 1, 2, 8192, 8, 512),
        (6, 1, 1, 8192, 8, 1024),
        (7, 1, 2, 8192, 8, 1024),
        (7, 1, 2, 2048, 8, 512),
        (7, 1, 2, 8192, 64, 512),  # vector memory could not hold two blocks of 1024
    ],
)
def test_blocks_of_a_cache(generation, cores, itemsize, keys, heads, tokens, monkeypatch):
    """The faster the memory, the more tokens a step reads."""
    monkeypatch.setattr(_chip, "generation", lambda: generation)
    monkeypatch.setattr(_chip, "cores", lambda: cores)
    for page in (0, 64):
        request = BlockRequest(
            1, keys, 32, jnp.dtype(jnp.bfloat16), 128, True, page, itemsize, heads * 256 * itemsize
        )
        assert TPULowering("pallas").choose_blocks(request).keys == tokens


def blocks_of(t, s=None, *, heads=1, dim=128, dtype=jnp.bfloat16, sizes=(None, None), **kw):
    """The queries and keys of a block that a call has."""
    found, fields = [], kw.pop("fields", {})

    def look(query, keys):
        call = {"mask": Causal(), **kw}
        cut = Problem.from_call(query, keys, keys, AttentionMetadata(**fields), **call)
        found.append(choose_live_tiling(cut, *sizes, lowering=TPULowering("pallas")))

    like = lambda n, h: jax.ShapeDtypeStruct((1, n, h, dim), dtype)
    jax.eval_shape(look, like(t, heads), like(s or t, 1))
    return found[0].block_q, found[0].block_k


@pytest.fixture(params=[6, 7])
def wide_units(request, monkeypatch):
    monkeypatch.setattr(_chip, "generation", lambda: request.param)


LONG, USUAL = (2048, 2048), (1024, 1024)


@pytest.mark.parametrize("t", [16_384, 32_768, 32_668, 131_072])
def test_long_calls_have_larger_blocks(wide_units, t):
    assert blocks_of(t) == LONG
    assert blocks_of(t, mask=None) == (LONG if t % 2048 == 0 else USUAL)  # padded keys have a mask
    assert blocks_of(t, mask=MaskFn(lambda b, h, q, k: q >= k)) == LONG
    assert blocks_of(t, sizes=(1024, None)) == USUAL


def test_of_other_lengths(wide_units):
    """Short calls keep their blocks, as those with a rest that larger ones would pad. Few queries
    may have many keys.
    """
    assert blocks_of(8192) == blocks_of(4096) == blocks_of(16_000) == USUAL
    assert blocks_of(16_384 + 100) == blocks_of(17 * 1024) == USUAL
    assert blocks_of(2048, 131_072, mask=None) == LONG
    assert blocks_of(1024, 2**18, mask=None) == USUAL
    assert blocks_of(2**19) == USUAL  # parts of so many blocks are not looked for


@pytest.mark.parametrize(
    "kw",
    [
        dict(mask=Causal() & SlidingWindow(4095, 0)),
        dict(mask=SlidingWindow(20_000, 0)),
        dict(mask=MaskFn(lambda b, h, q, k: q // 1024 == k // 1024)),  # twice as many pairs
        dict(mask=KeyPadding(jnp.array([30_000]))),
        dict(mask=Causal() & Segments(jnp.zeros((1, 32_768), int))),
        dict(q_offset=512),
        dict(bias=jnp.zeros((1, 1, 1, 32_768))),
        dict(dropout_key=jax.random.key(0)),
        dict(fields=dict(logits_soft_cap=30.0)),
        dict(fields=dict(softmax_aux=jnp.zeros(1))),
        dict(fields=dict(softmax_scale=jnp.ones(()))),
        dict(fields=dict(runtime_softmax_dtype=jnp.bfloat16)),
        dict(heads=4),
        dict(dim=64),
        dict(dim=256),
    ],
)
def test_other_calls_keep_their_blocks(wide_units, kw):
    """Those with other masked blocks, with more work for each pair, and of other sizes."""
    queries, keys = blocks_of(32_768, **kw)
    assert (queries * kw.get("heads", 1), keys) == USUAL


def test_exact_products_keep_theirs(wide_units):
    assert blocks_of(32_768, dtype=jnp.float32) == (512, 512)


@pytest.mark.parametrize("generation", [0, 5])
def test_other_chips_keep_theirs(generation, monkeypatch):
    """Older ones, and one that is not known."""
    monkeypatch.setattr(_chip, "generation", lambda: generation)
    assert blocks_of(32_768) == USUAL


@pytest.mark.parametrize("mask, t", [(Causal(), 60), (None, 64)])
def test_results_in_larger_ones(mask, t, monkeypatch):
    """With a rest that is padded, too. All sizes are 1/64 or 1/32 of what they are."""
    monkeypatch.setattr(_chip, "generation", lambda: 6)
    monkeypatch.setattr(tpu, "LARGE", 32)
    monkeypatch.setattr(tpu, "LONG", t * t)
    monkeypatch.setattr(block_classes, "STEP", 8)
    monkeypatch.setattr(_windows, "WINDOW", 16)
    assert blocks_of(t, mask=mask) == (32, 32)
    given, ct = drawn("tpu", t, t, 1, 1, 128, 128)
    given, ct = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (given, ct))
    strategy = how("tpu", runtime_dtype=jnp.bfloat16)
    run = lambda q, k, v: attention(q, k, v, strategy, mask=mask).attention_outputs
    judge(run, given, ct, mask=None if mask is None else om.causal(t, t))


@pytest.mark.parametrize(
    "tokens, fused, count", [(4096, True, 2), (4096, False, 3), (65536, True, 3)]
)
def test_one_visit_gives_all_gradients_if_those_of_the_queries_fit(tokens, fused, count):
    metadata = AttentionMetadata(platform="tpu", runtime_dtype=jnp.bfloat16)
    strategy = Blockwise(metadata, fused_backward=fused)
    run = lambda *x: attention(*x, strategy, mask=Causal()).attention_outputs
    loss = lambda *x: run(*x).astype(jnp.float32).sum()
    args = [jax.ShapeDtypeStruct((1, tokens, 1, 128), jnp.bfloat16)] * 3
    assert kernels("tpu", jax.grad(loss, (0, 1, 2)), *args) == count


def test_dropout_beside_a_corner(monkeypatch):
    """Where logits are not computed, no factor of dropout is either."""
    monkeypatch.setattr(_windows, "WINDOW", 8)
    given, _ = drawn("tpu", 32, 32, 1, 1)
    key = jax.random.key(0)
    keep = np.asarray(dropout_mask(key, (1,), 1, 32, 32, 0.25))
    run = run_of(blocksize_q=8, blocksize_k=16, dropout_prob=0.25)
    judge(ft.partial(run, key=key), given, keep=keep, rate=0.25, mask=om.causal(32, 32))


def test_compiled():
    """By the compiler of TPUs, for one chip; for the others in nightly/kernels."""
    cases = ("causal", "drafts", "functions of predicates")
    for case, got in compile_all("v6e", cases).items():
        assert got.get("kernels", -1) >= expected(case), got
