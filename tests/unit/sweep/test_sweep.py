"""The sweep primitive on its own: visits, kinds of operands, tracing, what a kernel sees."""

import functools as ft
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _compiled import programs
from matrix import bound, oracle

from eqattn import attention, AttentionMetadata, Blockwise, Causal, KeyPadding, MaskFn, ScoreFn
from eqattn._jax import jaxpr_as_fun
from eqattn._sweep.grid import BlockGrid, COL, EMPTY, FULL, PARTIAL, ROW
from eqattn._sweep.ring import Rotation
from eqattn._sweep.sweep import sweep


LARGE = (2**10, 2**10)  # blocks beyond what is vectorised over the batch


def visits(table, axes, grid):
    """How many blocks are visited, by summing one per visit."""
    layout = BlockGrid(grid, LARGE, (), axes)
    one = {PARTIAL: lambda: [jnp.ones(())], FULL: lambda: [jnp.ones(())]}
    return sweep(one, [], [], [()], layout=layout, table=table)[0]


def test_visits_live_blocks_only():
    table = jnp.array([[FULL, EMPTY, PARTIAL], [EMPTY, EMPTY, EMPTY]], jnp.int8)
    assert visits(table, (-2, -1), (1, 1, 2, 3)) == 2
    batched = jnp.stack([table, jnp.full_like(table, FULL)])
    assert visits(batched, (-4, -2, -1), (2, 1, 2, 3)) == 2 + 6


@pytest.mark.parametrize("nested", [False, True])
def test_vmap_visits_as_many_blocks_as_one_by_one(nested):
    lengths = jnp.array([8, 1, 1, 1, 1, 1, 1, 2])
    tables = (jnp.arange(8)[None, None] < lengths[:, None, None]).astype(jnp.int8) * FULL
    tables = jnp.broadcast_to(tables, (8, 3, 8))
    count = ft.partial(visits, axes=(-2, -1), grid=(1, 1, 3, 8))
    one_by_one = sum(int(count(t)) for t in tables)
    if nested:
        together = jax.vmap(jax.vmap(count))(tables.reshape(2, 4, 3, 8))
    else:
        together = jax.vmap(count)(tables)
    assert int(together.sum()) == one_by_one == 3 * int(lengths.sum())


AXES = [(-4, -3, -2), (-3, -1), (-2, -1), (-4,), (), (-4, -3, -2, -1)]
GRID = (2, 3, 4, 5)


@pytest.mark.parametrize("block", [(1, 1), LARGE], ids=["vectorised", "looped"])
def test_is_a_block_sparse_einsum(block):
    """Any subset of the grid's axes in, any out: the sum over the axes that an output lacks."""
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=tuple(GRID[a] for a in axes)).astype(np.float32) for axes in AXES]
    table = rng.integers(0, 3, (GRID[0], *GRID[2:])).astype(np.int8)
    f = lambda *blocks: [jnp.prod(jnp.stack(blocks))] * len(AXES)
    outs = sweep(
        {PARTIAL: f, FULL: lambda *b: [2 * y for y in f(*b)]},
        [jnp.asarray(x) for x in xs], AXES, AXES,
        layout=BlockGrid(GRID, block, (), (-4, -2, -1)), table=jnp.asarray(table),
    )  # fmt: skip
    if block == (1, 1):  # one table for the whole batch: empty only where all are, full likewise
        least, most = table.min(0, keepdims=True), table.max(0, keepdims=True)
        table = np.where(least == FULL, FULL, np.where(most == EMPTY, EMPTY, PARTIAL))
    product = np.asarray(table, np.float64)[:, None]
    for x, axes in zip(xs, AXES):
        product = product * x.reshape([GRID[a] if a in axes else 1 for a in (-4, -3, -2, -1)])
    product = np.broadcast_to(product, GRID)
    for y, axes in zip(outs, AXES):
        want = product.sum(tuple(4 + a for a in (-4, -3, -2, -1) if a not in axes))
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)


def attend(q, mask=None, score=None, **metadata):
    strategy = Blockwise(AttentionMetadata(blocksize_q=4, blocksize_k=4, **metadata))
    return attention(q, q, q, strategy, mask=mask, score=score).attention_outputs


def test_rows_that_see_nothing_of_the_block_that_is_visited_last():
    """Their maximum is that of the blocks before."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 16, 2, 4)), jnp.float32) for _ in range(3))
    how = Blockwise(AttentionMetadata(blocksize_q=8, blocksize_k=2))
    run = jax.jit(lambda *x: attention(*x, how, mask=Causal(), return_logsumexp=True))
    out, seen = run(q, k, v), np.arange(16) <= np.arange(16)[:, None]
    problem = oracle.plain_problem(q, k, v, visible=seen)
    bound.check(problem, out.attention_outputs, out.logsumexp)


Q = jnp.cos(jnp.arange(2 * 9 * 2 * 4, dtype=jnp.float32)).reshape(2, 9, 2, 4)


def nearer(s, b, h, q, k):
    return s + (q - k).astype(s.dtype)


def test_an_eager_loop_compiles_once():
    def call():
        return attend(Q, Causal(), ScoreFn(nearer))

    def gradient():
        return jax.grad(lambda q: attend(q, Causal(), ScoreFn(nearer)).sum())(Q)

    for run in (call, gradient):
        assert programs(run) > 0 and programs(run) == programs(run) == 0


def test_equal_rebuilt_masks_share_a_program_and_other_masks_do_not():
    run = lambda mask: lambda: attend(Q, mask, ScoreFn(nearer))
    masks = [Causal() & KeyPadding(jnp.array(n)) for n in ([3, 9], [1, 2])]
    other = Causal(1) & KeyPadding(jnp.array([1, 2]))
    assert programs(run(masks[0])) > 0 and programs(run(masks[1])) == 0
    assert programs(run(other)) > 0


def test_a_fresh_function_is_not_retained():
    captured = jnp.ones(3)
    fn = lambda b, h, q, k: k <= q + captured.shape[0]
    attend(Q, MaskFn(fn))
    jax.grad(lambda q: attend(q, MaskFn(fn)).sum())(Q)
    alive = weakref.ref(fn)
    del fn
    gc.collect()
    assert alive() is None


def primitives(jaxpr, name):
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            found.append(eqn)
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += primitives(inner, name)
    return found


WRAPPED = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: lambda q: jax.vmap(lambda x: f(x[None])[0])(q),
    "scan": lambda f: lambda q: jax.lax.scan(lambda c, _: (f(c), None), q, length=2)[0],
}


@pytest.mark.parametrize("name", WRAPPED)
def test_hot_visits_are_marked(name):
    """A kernel recognises the fold and its first-order backward by their stage."""
    f = WRAPPED[name](ft.partial(attend, mask=Causal()))
    jaxpr = jax.make_jaxpr(jax.grad(lambda q: jnp.sum(f(q) ** 2)))(Q).jaxpr
    (fold, *_) = primitives(jaxpr, "attention_fold")
    assert fold.params["layout"].stage == "fold"
    stages = [e.params["layout"].stage for e in primitives(jaxpr, "attention_sweep")]
    assert "backward" in stages and "fold" not in stages


def test_higher_orders_are_not_marked():
    hvp = lambda q: jax.jvp(jax.grad(lambda q: jnp.sum(attend(q, Causal()) ** 2)), (q,), (q,))[1]
    sweeps = primitives(jax.make_jaxpr(hvp)(Q).jaxpr, "attention_sweep")
    assert any(e.params["layout"].stage == "" for e in sweeps)


def test_cotangents_round_once():
    """bf16 inputs: block functions read and return float32, whatever the block sizes."""
    q = Q.astype(jnp.bfloat16)
    grad = jax.grad(lambda q: jnp.sum(attend(q, Causal(), runtime_dtype=jnp.float32)))
    for e in primitives(jax.make_jaxpr(grad)(q).jaxpr, "attention_sweep"):
        for _, jaxpr in e.params["visits"]:
            floats = [a for a in jaxpr.out_avals if jnp.issubdtype(a.dtype, jnp.floating)]
            assert floats and all(a.dtype == jnp.float32 for a in floats)
            jaxpr_as_fun(jaxpr)


def test_cotangents_of_narrow_operands_are_summed_wide():
    """A sum of ones in bfloat16 would end at 256."""
    layout = BlockGrid((1, 1, 1, 300), (1, 1), ())
    wide = {FULL: lambda x: [x.astype(jnp.float32)]}
    total = lambda x: sweep(wide, [x], [(ROW,)], [(ROW,)], layout=layout)[0].sum()
    assert jax.grad(total)(jnp.ones(1, jnp.bfloat16)) == 300


def test_cotangents_of_all_outputs_are_summed():
    r, c = np.array([0.5, -1.0, 2.0], np.float32), np.array([1.5, 0.25], np.float32)
    layout = BlockGrid((1, 1, 3, 2), (1, 1), ())

    def loss(r, c):
        f = {FULL: lambda r, c: [jnp.sin(r * c), r * r * c]}
        outs = sweep(f, [r, c], [(ROW,), (COL,)], [(ROW,), (COL,)], layout=layout)
        return sum(x.sum() for x in outs)

    of_rows, of_columns = jax.grad(loss, (0, 1))(r, c)
    r, c = r[:, None], c[None]
    np.testing.assert_allclose(of_rows, (c * np.cos(r * c) + 2 * r * c).sum(1), rtol=1e-5)
    np.testing.assert_allclose(of_columns, (r * np.cos(r * c) + r * r).sum(0), rtol=1e-5)


def test_vmap_takes_the_place_of_a_batch_axis_of_one():
    rng = np.random.default_rng(0)
    r, c = (rng.normal(size=shape).astype(np.float32) for shape in ((5, 1, 3), (5, 2)))
    layout = BlockGrid((1, 1, 3, 2), (1, 1), ())
    axes = [(-4, ROW), (COL,)]
    f = {FULL: lambda r, c: [r * c]}
    one = lambda r, c: sweep(f, [r, c], axes, [(-4, ROW)], layout=layout)[0]
    got = jax.vmap(one)(r, c)
    np.testing.assert_allclose(got, r * c.sum(1)[:, None, None], rtol=1e-5)


def test_a_layout_of_some_operands():
    ring = Rotation("sp", 4, 3, 0, reads=(0, 2))
    layout = BlockGrid((1, 1, 2, 3), (1, 1), ((ROW,), (COL,), ()), ring=ring).only([0, 2])
    assert layout.in_axes == ((ROW,), ()) and layout.ring.reads == (0, 1)
