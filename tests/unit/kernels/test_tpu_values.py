"""Kernels for TPUs and numbers that must not count: of masked pairs, of other heads, of nobody."""

import operator
from collections.abc import Callable

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from jax import lax
from matrix import oracle, oracle_masks as om

from eqattn import (
    attention,
    AttentionMetadata,
    BlockCausal,
    Blockwise,
    Causal,
    DenseMask,
    dropout_mask,
    Ragged,
    SlidingWindow,
)
from eqattn._carry import safe_max
from eqattn.kernels.tpu import _sides, _windows
from eqattn.kernels.tpu._program import Evaluation, LOG2E, Program
from eqattn.kernels.tpu._range import in_range
from eqattn.scores import AbstractScore


T = 32


def metadata(platform="interpret", **fields):
    fields = dict(blocksize_q=8, blocksize_k=8) | fields
    return AttentionMetadata(runtime_dtype=jnp.float32, platform=platform, **fields)


def draw(heads=1, kv_heads=1, t=T, s=T):
    return normal(0, 1, t, heads, 8), normal(1, 1, s, kv_heads, 8), normal(2, 1, s, kv_heads, 8)


def exact(q, k, v, visible, **kw):
    """The output where nothing is wrong, and NaN in rows that see what is not finite."""
    fine = [np.float64(np.nan_to_num(x, nan=0.0, posinf=0.0)) for x in (q, k, v)]
    out = oracle.forward(oracle.Problem(*fine, scale=8**-0.5, mask=visible, **kw)).out
    bad = np.repeat(~np.isfinite(v).all(-1) | ~np.isfinite(k).all(-1), q.shape[2] // k.shape[2], 2)
    sees = np.einsum(
        "bhts,bsh->bth", np.broadcast_to(visible, (1, q.shape[2], *visible.shape[-2:])), bad
    )
    return np.where(sees[..., None] > 0, np.nan, out)


def close(got, want, atol=2e-6):
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


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


@pytest.mark.parametrize("sinks", [None, jnp.array([0.5])])
def test_gradients_with_rows_that_see_nothing(sinks):
    """Their maximum is the least of all numbers, which a factor takes to minus infinity."""
    t = 48
    (q, k, v), ct = draw(t=t, s=t), normal(3, 1, t, 1, 8)
    how = Blockwise(metadata(softmax_aux=sinks, blocksize_q=16, blocksize_k=16))
    loss = lambda *x: (attention(*x, how, mask=Causal(-5)).attention_outputs * ct).sum()
    got = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    problem = oracle.Problem(
        *[np.float64(x) for x in (q, k, v)],
        scale=8**-0.5,
        mask=om.causal(t, t, -5),
        sinks=None if sinks is None else np.float64(sinks),
    )
    want = oracle.vjp(problem, np.float64(ct), np.zeros((1, t, 1)))
    for x, name in zip(got, "qkv", strict=True):
        close(x, want[name], 1e-5)


@pytest.mark.parametrize(
    "mask, visible, size, offset",
    [
        (BlockCausal(8), om.causal(T // 8, T // 8, -1).repeat(8, -1).repeat(8, -2), 8, -8),
        (Causal(), om.causal(T, T), T, 0),
        (SlidingWindow(7, 0), om.causal(T, T) & om.window(T, T, 7, 0), 8, 0),
        (Causal(), om.causal(T, T), 8, 0),
    ],
    ids=["full and empty", "one partial", "partial and empty", "all kinds"],
)
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
@pytest.mark.parametrize("strategy", [Blockwise, Ragged])
def test_values_that_are_not_finite(mask, visible, size, offset, garbage, strategy):
    """They reach the rows that see them, and no others."""
    q, k, v = draw()
    v = v.at[0, 3].set(garbage)
    how = strategy(metadata(blocksize_q=size, blocksize_k=size))
    got = attention(q, k, v, how, mask=mask, q_offset=offset).attention_outputs
    close(got, exact(q, k, v, visible))


@pytest.mark.parametrize("hidden", [True, False])
def test_keys_of_another_head(hidden):
    """Of heads that one product has side by side."""
    q, k, v = draw(4, 2, 8)
    visible = np.ones((1, 4, 8, T), bool)
    visible[:, :2, :, 3] = not hidden
    k = k.at[0, 3, 0].set(jnp.nan)
    bias = normal(4, 1, 4, 8, T)
    how = Ragged(metadata(blocksize_k=16))
    got = attention(q, k, v, how, mask=DenseMask(visible), bias=bias).attention_outputs
    close(got, exact(q, k, v, visible, bias=np.float64(bias)))


def test_dropout_beside_a_corner(monkeypatch):
    """Where logits are not computed, no factor of dropout is either."""
    monkeypatch.setattr(_windows, "WINDOW", 8)
    (q, k, v), key = draw(), jax.random.key(0)
    keep = np.asarray(dropout_mask(key, (1,), 1, T, T, 0.25))
    how = Blockwise(metadata(blocksize_q=8, blocksize_k=16, dropout_prob=0.25))
    got = attention(q, k, v, how, mask=Causal(), key=key).attention_outputs
    close(got, exact(q, k, v, om.causal(T, T), keep=keep, rate=0.25))


class Applied(AbstractScore):
    f: Callable = eqx.field(static=True)

    def transform(self, logit, b, h, q, k):
        return self.f(logit)


def test_a_product_with_itself():
    q, k, v = draw()
    got = attention(
        q, k, v, Blockwise(metadata()), score=Applied(lambda x: x * x)
    ).attention_outputs
    x = np.einsum("bthd,bshd->bhts", *np.float64([q, k])) * 8**-0.5
    p = np.exp(x * x - (x * x).max(-1, keepdims=True))
    close(got, np.einsum("bhts,bshd->bthd", p / p.sum(-1, keepdims=True), np.float64(v)))


def exported(strategy, platforms, **kw):
    q, k, v = draw()
    call = lambda q, k, v: attention(q, k, v, strategy, **kw).attention_outputs
    return (
        "tpu_custom_call"
        in jax.export.export(jax.jit(call), platforms=platforms)(q, k, v).mlir_module()
    )


@pytest.mark.parametrize("f", [jax.lax.lgamma, jnp.arcsinh, jnp.expm1, jnp.cbrt])
def test_what_the_compiler_of_kernels_does_not_know(f):
    how = Blockwise(metadata("auto", backend="tpu"))
    assert not exported(how, ["tpu"], score=Applied(f))
    assert exported(how, ["tpu"], score=Applied(jnp.tanh))


def test_no_kernel_for_two_platforms_or_64_bits():
    with pytest.raises(ValueError, match="cannot run on .'cpu', 'tpu'."):
        exported(Blockwise(metadata("pallas", backend="tpu")), ["cpu", "tpu"])
    with jax.enable_x64(True):
        with pytest.raises(ValueError, match="32 bits"):
            attention(*draw(), Blockwise(metadata()))
        assert not exported(Blockwise(metadata("auto", backend="tpu")), ["tpu"], mask=Causal())


def test_a_row_of_the_least_numbers_sees_nothing():
    """As the page of limitations says: of powers of two, they would be beyond float32."""
    q, k, v = draw()
    least = float(jnp.finfo(jnp.float32).min)
    bias = jnp.zeros((1, 1, T, T)).at[0, 0, 3].set(least).at[0, 0, 5, 8:].set(least)
    out = attention(q, k, v, Blockwise(metadata()), bias=bias).attention_outputs
    visible = np.asarray(bias) == 0
    close(out, exact(q, k, v, visible))
    assert not out[0, 3].any()
    mean = attention(q, k, v, Blockwise(metadata("xla")), bias=bias).attention_outputs
    close(mean[0, 3], np.asarray(v).mean(1)[0])
