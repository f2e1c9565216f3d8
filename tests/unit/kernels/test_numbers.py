"""Numbers that must not count, and numbers at the edges, in all kernels: masked pairs, padding, rows that
see nothing, scales that are not positive, and the hops of a ring. matrix/ judges the rest.
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _kernels import ALL, check, drawn, how, judge, mesh_of, normal, over, results, wide
from matrix import bound, oracle, oracle_masks as om

from eqattn import (
    attention,
    BlockCausal,
    Blockwise,
    Causal,
    DenseMask,
    KeyPadding,
    Ragged,
    Ring,
    SlidingWindow,
)


def run_of(strategy, mask: Any = None, **more: Any):
    return lambda q, k, v: attention(q, k, v, strategy, mask=mask, **more).attention_outputs


def check_rows(got, given, visible, bad, **problem: Any):
    """Rows that see what is not finite are NaN as a whole, and the others are within the bound.
    `bad`: which keys or values are not finite, `[b, s, key heads]`.
    """
    group = given["q"].shape[2] // given["k"].shape[2]
    seen = np.broadcast_to(
        visible, (*given["q"].shape[:1], given["q"].shape[2], *visible.shape[-2:])
    )
    sees = np.einsum("bhts,bsh->bth", seen, np.repeat(bad, group, 2)) > 0
    assert sees.any() and not sees.all()
    np.testing.assert_array_equal(np.isnan(got), np.repeat(sees[..., None], got.shape[-1], -1))
    fine = {n: jnp.where(jnp.isfinite(x), x, 0).astype(x.dtype) for n, x in given.items()}
    exact = oracle.Problem(**dict(scale=given["q"].shape[-1] ** -0.5) | wide(fine), mask=visible)
    want = bound.values(exact.replace(**problem), bound.precision_of(got.dtype))["out"]
    clean = jnp.where(sees[..., None], want.primal.astype(got.dtype), got)
    assert bound.excess(np.asarray(clean), want) <= 1


DIMS: dict[str, Any] = {"16 numbers": (16, ALL), "144 numbers": (144, ("cuda", "triton"))}


@over(DIMS)
def test_what_is_not_finite_reaches_the_rows_that_see_it(interpreted, name):
    """Of several programs, tiles of keys and heads of a group, and where blocks are padded. On Hopper
    the copies of large vectors are made by who computes.
    """
    t, s, (dim, _) = 140, 200, DIMS[name]
    given, _ = drawn(interpreted, t, s, 4, 2, dim, dim)
    v = given["v"].at[0, 60, 1, 3].set(jnp.nan).at[0, 130, 0, 1].set(jnp.inf)
    given |= dict(k=given["k"].at[0, 150:].set(jnp.nan), v=v.at[0, 150:].set(jnp.nan))
    visible = om.window(t, s, 20, 5) & (np.arange(s) < 150)
    run = run_of(how(interpreted), SlidingWindow(20, 5) & KeyPadding(150))
    bad = ~np.isfinite(np.float32(given["v"])).all(-1)
    check_rows(results(run, given)["out"], given, visible, bad)


KINDS = {
    "full and empty": (BlockCausal(8), om.causal(4, 4, -1).repeat(8, -1).repeat(8, -2), 8, -8),
    "one partial": (Causal(), om.causal(32, 32), 32, 0),
    "partial and empty": (SlidingWindow(7, 0), om.window(32, 32, 7, 0), 8, 0),
    "all kinds": (Causal(), om.causal(32, 32), 8, 0),
}


@pytest.mark.parametrize("name", KINDS)
def test_blocks_of_all_kinds(name):
    """Kernels for TPUs look for what is not finite in each class of blocks by other means."""
    mask, visible, size, offset = KINDS[name]
    given, _ = drawn("tpu", 32, 32, 1, 1, 8)
    given["v"] = given["v"].at[0, 3].set(jnp.inf)
    bad = ~np.isfinite(given["v"]).all(-1)
    strategies = (Blockwise, Ragged) if name == "all kinds" else (Blockwise,)
    for kind in strategies:
        strategy = how("tpu", strategy=kind, blocksize_q=size, blocksize_k=size)
        got = results(run_of(strategy, mask, q_offset=offset), given)["out"]
        check_rows(got, given, visible, bad)


@pytest.mark.parametrize("hidden", [True, False])
def test_keys_of_another_head(hidden):
    """Of heads that one product has side by side."""
    given, _ = drawn("tpu", 8, 32, 4, 2, 8)
    visible = np.ones((1, 4, 8, 32), bool)
    visible[:, :2, :, 3] = not hidden
    visible[:, 2:, 0, 3] = False  # so that not all rows are judged as NaN
    given["k"] = given["k"].at[0, 3, 0].set(jnp.nan)
    bias = normal(4, 1, 4, 8, 32)
    run = run_of(how("tpu", strategy=Ragged, blocksize_k=16), DenseMask(visible), bias=bias)
    got, bad = results(run, given)["out"], np.isnan(given["k"]).any(-1)
    if hidden:
        clean = given | dict(k=given["k"].at[0, 3, 0].set(0))
        check(dict(out=got), clean, bias=np.float64(bias), mask=visible)
    else:
        check_rows(got, given, visible, bad, bias=np.float64(bias))


def test_what_is_masked_reaches_no_gradient(interpreted):
    """A key or a value that is not finite, and, on GPUs, a query: gradients are bitwise those without
    it, but for the keys that this query sees. On TPUs, it reaches all keys of its blocks.
    """
    t, s = 70, 140
    given, ct = drawn(interpreted, t, s, 1, 1, 16, 16)
    run = run_of(how(interpreted), SlidingWindow(20, 5) & KeyPadding(120))
    behind = lambda x: {n: given[n].at[0, 120:].set(x) for n in "kv"}
    want = results(run, given | behind(0), ct)
    of_gpu = interpreted != "tpu"
    query = dict(q=given["q"].at[0, 50].set(jnp.nan if of_gpu else given["q"][0, 50]))
    got = results(run, given | behind(jnp.nan) | query, ct)
    seen = dict.fromkeys("kv", abs(np.arange(s) - 42.5) < 13)  # the keys 30 to 55
    for name, nan in (seen | dict(q=np.arange(t) == 50)).items():
        x, y = (np.float32(each[name])[0, :, 0] for each in (want, got))
        np.testing.assert_array_equal(np.isnan(y).any(-1), nan & of_gpu)
        np.testing.assert_array_equal(x[~np.isnan(y)], y[~np.isnan(y)])
    assert not np.float32(got["k"])[0, 120:].any()


def test_garbage_stays_where_it_is_masked(interpreted):
    """Values and gradients do not change by a bit, with lengths that differ."""
    given, ct = drawn(interpreted, batch=2)
    lengths = jnp.array([7, 33])
    hidden = jnp.arange(48)[None, :, None, None] >= lengths[:, None, None, None]
    run = run_of(how(interpreted, blocksize_q=8, blocksize_k=16), KeyPadding(lengths))
    dirty = {n: jnp.where(hidden, jnp.inf, given[n]).astype(given[n].dtype) for n in "kv"}
    both = results(run, given, ct), results(run, given | dirty, ct)
    jax.tree.map(np.testing.assert_array_equal, *both)


def test_what_lies_behind_a_block_reaches_no_row(interpreted):
    """A tile of a block that is no whole tiles holds keys of the next one. Here no row of the first
    block sees them, and no pair of a visited block is masked.
    """
    given, ct = drawn(interpreted, 64, 384, 1, 1, 64, 64)
    strategy = how(interpreted, blocksize_q=64, blocksize_k=192)
    run, hidden = run_of(strategy, BlockCausal(192)), (jnp.arange(384) >= 192)[:, None, None]
    dirty = {n: jnp.where(hidden, jnp.nan, given[n]).astype(given[n].dtype) for n in "kv"}
    both = results(run, given, ct), results(run, given | dirty, ct)
    jax.tree.map(np.testing.assert_array_equal, *both)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_that_is_not_positive(scale, interpreted):
    """The kernels of GPUs multiply maxima with it, so that it must have its sign elsewhere."""
    given, _ = drawn(interpreted)
    run = run_of(how(interpreted, softmax_scale=jnp.float32(scale)), Causal())
    judge(run, given, mask=om.causal(40, 48), scale=float(np.float32(scale)))


TOKENS: dict[str, Any] = {
    "few": (5, None, (2, 2), ALL),
    "many": (200, None, (2, 2), ALL[1:]),
    "one block of two heads": (192, 192, (2, 1), ALL[1:]),
}


@over(TOKENS)
def test_few_and_many_tokens(interpreted, name):
    """Of one block, and of several, the last of which is not whole. In a block of 192 tokens for two
    heads, the second tile of 128 would begin with one head and end with the other.
    """
    t, block, heads, _ = TOKENS[name]
    given, ct = drawn(interpreted, t, t, *heads)
    strategy = how(interpreted, blocksize_q=block, blocksize_k=block)
    run = run_of(strategy, Causal() & SlidingWindow(90, 0))
    judge(run, given, ct, mask=om.window(t, t, 90, 0))


SEEN, T = 40, 64


def test_rows_that_a_bias_hides(interpreted):
    """A bias of -1e10 for padding: rows without cotangents add nothing to the gradients of keys and
    values, whose powers of two would overflow, and those of all others are finite.
    """
    given, ct = drawn(interpreted, T, T, 2, 2, 16, 16)
    bias = np.zeros((1, 1, T, T), np.float32)
    bias[..., SEEN:], bias[..., SEEN:, :] = -1e10, -1e10
    inside = np.arange(T) < SEEN
    for kind in (Blockwise, Ragged) if interpreted == "tpu" else (Blockwise,):
        strategy = how(interpreted, strategy=kind, blocksize_q=32, blocksize_k=32)
        run = run_of(strategy, bias=jnp.asarray(bias))
        found = results(run, given, ct.at[:, SEEN:].set(0))
        found["out"] = jnp.where(inside[:, None, None], found["out"], 0)
        check(found, given, ct.at[:, SEEN:].set(0), mask=inside[:, None] & inside)
        assert all(np.isfinite(np.float32(x)).all() for x in results(run, given, ct).values())
        if interpreted == "tpu":  # it has forward mode
            moved = dict(zip("qkv", (given[n] for n in "kvq")))
            tangent = jax.jit(lambda g, run=run: jax.jvp(lambda g: run(**g), (g,), (moved,))[1])
            assert np.isfinite(tangent(given)).all()


@pytest.mark.parametrize("size", [-1e8, -1e30])
def test_rows_that_a_bias_of_other_size_hides(interpreted, size):
    given, ct = drawn(interpreted, 16, 16, 1, 1)
    bias = np.zeros((1, 1, 16, 16), np.float32)
    bias[..., 10:], bias[..., 10:, :] = size, size
    found = results(run_of(how(interpreted), bias=jnp.asarray(bias)), given, ct)
    assert all(np.isfinite(np.float32(x)).all() for x in found.values())


def test_rows_that_see_nothing_beside_full_blocks(interpreted):
    """Then no block is partial, and the kernel has no masks."""
    given, _ = drawn(interpreted)
    strategy = how(interpreted, blocksize_q=8, blocksize_k=16)
    later = ~BlockCausal(16)  # queries from 32 on see nothing
    visible = (np.arange(48) // 16 > np.arange(40)[:, None] // 16)[None, None]
    run = lambda q, k, v: attention(q, k, v, strategy, mask=later, return_logsumexp=True)
    output = jax.jit(run)(**given)
    assert (
        np.isneginf(output.logsumexp[:, 32:]).all() and not output.attention_outputs[:, 32:].any()
    )
    check(dict(out=output.attention_outputs, lse=output.logsumexp), given, mask=visible)


@pytest.mark.parametrize("sinks", [False, True])
def test_gradients_with_rows_that_see_nothing(sinks, interpreted):
    """Their maximum is the least of all numbers, which a factor takes to minus infinity."""
    given, ct = drawn(interpreted, 48, 48, 1, 1)
    more = dict(sinks=jnp.array([0.5])) if sinks else {}

    def run(q, k, v, sinks=None):
        fields: Any = dict(softmax_aux=sinks, blocksize_q=16, blocksize_k=16)
        return run_of(how(interpreted, **fields), Causal(-5))(q, k, v)

    judge(run, given | more, ct, mask=om.causal(48, 48, -5))


def test_a_row_of_the_least_numbers_sees_nothing():
    """As the page of limitations says: of powers of two, they would be beyond float32."""
    given, _ = drawn("tpu", 32, 32, 1, 1)
    least = float(jnp.finfo(jnp.float32).min)
    bias = jnp.zeros((1, 1, 32, 32)).at[0, 0, 3].set(least).at[0, 0, 5, 8:].set(least)
    found = judge(run_of(how("tpu"), bias=bias), given, mask=np.asarray(bias) == 0)
    assert not found["out"][0, 3].any()
    mean = run_of(how("tpu", "xla"), bias=bias)(**given)[0, 3]
    np.testing.assert_allclose(mean, np.float64(given["v"]).mean(1)[0], rtol=0, atol=1e-6)


def test_the_hops_of_a_ring(interpreted):
    """Kernels go on with the Carry of the hops before, and with the sums for keys and values."""
    given, ct = drawn(interpreted, 48, 48)
    ring, place = how(interpreted, strategy=ft.partial(Ring, axis_name="sp")), jax.P(None, "sp")
    specs: Any = dict(mesh=mesh_of(2), in_specs=place, out_specs=place, check_vma=False)
    own = jax.shard_map(lambda q, k, v: run_of(ring, Causal())(q, k, v), **specs)
    judge(lambda q, k, v: own(q, k, v), given, ct, mask=om.causal(48, 48))


def test_small_logits_of_float32_under_a_soft_cap():
    """By the tanh of a chip, maxima near 0 would be off by 23 times the bound."""
    given, _ = drawn("tpu")
    given = {n: x / 16 for n, x in given.items()}
    strategy = how("triton", runtime_dtype=jnp.float32, logits_soft_cap=2.5)
    run = ft.partial(attention, strategy=strategy, mask=Causal(), return_max_logits=True)
    found = jax.jit(lambda q, k, v: run(q, k, v).max_logits)(**given)
    problem = oracle.Problem(**wide(given), scale=0.25, cap=2.5, mask=om.causal(40, 48))
    want = bound.values(problem, bound.precision_of(jnp.float32))
    assert bound.excess(np.asarray(found), want["top"]) <= 1
