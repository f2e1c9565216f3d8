"""What masks and scores look up by `q - k` is repeated along the diagonals of blocks, of kernels and of
XLA code for a CPU.
"""

import functools as ft
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from _rolls import rolled
from _tpu_lowered import kernels
from matrix import bound, oracle, oracle_masks as om
from matrix.cases import covering, invalid
from matrix.test_conformance import check

from eqattn import attention, AttentionMetadata, Blockwise, Causal, MaskFn, ScoreFn, T5Bias
from eqattn._problem.lookups import lookups_of
from eqattn._sweep.differences import along_diagonals, padded, window_size
from eqattn.kernels.tpu import _backward_step as _step
from eqattn.scores import AbstractScore, Operand


TABLE = jnp.asarray(np.random.default_rng(0).normal(size=64), jnp.float32)


def how(**kw):
    given = dict(platform="interpret", backend="tpu", blocksize_q=16, blocksize_k=16)
    return Blockwise(AttentionMetadata(**given | kw))


def found(fn):
    """The axes of what a function of `(b, h, q, k)` looks up by the difference."""
    axes, like = ("b", "bh", "bt", "bs"), jax.ShapeDtypeStruct((), jnp.int32)
    lookups = lookups_of(fn, [like] * 4, axes, (2, 3))
    return None if lookups is None else sorted(lookups.axes)


@pytest.mark.parametrize(
    "fn, axes",
    [
        (lambda b, h, q, k: TABLE[q - k], ["bd"]),
        (lambda b, h, q, k: TABLE[abs(k - q) // 2 + h], ["bhd"]),
        (lambda b, h, q, k: TABLE[(q + 3) - (k - 1)] + TABLE[q - k] * 2, ["bd", "bd"]),
        (lambda b, h, q, k: TABLE[q - k] > TABLE[k - q], ["bd"]),
        # A logarithm may be singular where a mask hides the pair, so that kernels compute it.
        (lambda b, h, q, k: TABLE[q - k] * jnp.log((q - k).astype(jnp.float32)), ["bd"]),
        (lambda b, h, q, k: TABLE[q - k] + TABLE[q], ["bd"]),
        (lambda b, h, q, k: TABLE[q - k + q], None),
        (lambda b, h, q, k: TABLE[3 - q - k], None),
        (lambda b, h, q, k: TABLE[q * k], None),
        (lambda b, h, q, k: TABLE[q], None),
        (lambda b, h, q, k: abs(q - k), None),
    ],
)
def test_what_is_found(fn, axes):
    assert found(fn) == axes


@pytest.mark.parametrize("keys, queries, windows, heads", [(20, 13, 3, 3), (128, 256, 1, 2)])
def test_along_diagonals(keys, queries, windows, heads):
    x = normal(0, windows, window_size(keys, queries))
    at = padded(keys) - 1 + np.arange(queries) - np.arange(keys)[:, None]
    want = np.asarray(x)[np.arange(heads) % windows][:, at].transpose(1, 0, 2)
    fn = lambda x: along_diagonals(x, keys, queries, heads)
    np.testing.assert_array_equal(fn(x), want.reshape(keys, -1))
    ct = normal(1, keys, heads * queries)
    sums = np.zeros((heads, x.shape[1]))
    np.add.at(sums, (slice(None), at), np.asarray(ct).reshape(keys, heads, queries).swapaxes(0, 1))
    sums = sums if windows > 1 else sums.sum(0, keepdims=True)
    np.testing.assert_allclose(jax.vjp(fn, x)[1](ct)[0], sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis, shape", [(1, (4, 16)), (0, (16, 4)), (2, (2, 4, 16))])
@pytest.mark.parametrize("shift, stride", [(0, 1), (3, 2), (15, 1)])
def test_rolls_at_once_are_those_of_jax(axis, shape, shift, stride):
    """They take the place of JAX's in this suite."""
    x, rows = normal(0, *shape), axis - 1 if axis else 1
    got = rolled(x, shift, axis=axis, stride=stride, stride_axis=rows)
    each = np.split(np.asarray(x), shape[rows], rows)
    want = [np.roll(row, shift + i * stride, axis) for i, row in enumerate(each)]
    np.testing.assert_array_equal(got, np.concatenate(want, rows))


@pytest.mark.parametrize("target", ["tpu", "blockwise"])
@pytest.mark.parametrize(
    "change",
    [
        dict(score="t5", length=(61, 67), block=(16, 7), transform="grad", offset="int"),
        dict(score="t5_causal", length=(37, 37), block=(16, 16), transform="vmap_grad"),
        dict(score="differences", length=(61, 67), transform="vmap", block=(128, 128)),
        dict(score="differences", length=(32, 48), transform="grad", offset="array", heads=(4, 1)),
        dict(score="both", length=(37, 37), transform="jvp", dtype="bfloat16", dropout=0.25),
        dict(score="differences", length=(37, 37), transform="grad", dtype="bfloat16", cap="array"),
    ],
)
def test_cases_of_the_matrix(change, target):
    plain = dict.fromkeys(("bias", "sinks", "cap", "scale", "offset"), "none")
    plain |= dict(lead=(2,), heads=(4, 2), dims=(8, 8), dtype="float32", operands="default")
    plain |= dict(mask="causal", block=(16, 16), dropout=0.0, target=(target, 1))
    case = covering(2)[0] | plain | change
    assert invalid(case) is None
    check(case)


def arrays(t=200, s=150, heads=4, kv_heads=2):
    shapes = (1, t, heads, 8), (1, s, kv_heads, 8), (1, s, kv_heads, 8)
    return [normal(i, *shape) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("sides", [(64, 128), (140, 136)])
@pytest.mark.parametrize("turned", [False, True])
def test_gradients_over_several_registers(sides, turned, monkeypatch):
    """`turned` is the form for wide matrix units, in windows of 64 keys and 32 rows."""
    steps = []
    monkeypatch.setattr(_step, "WINDOW", (64, 32))
    monkeypatch.setattr(_step, "suits", lambda step: steps.append(step) or turned)
    (q, k, v), table, ct = arrays(140, 136), normal(3, 8, 4), normal(4, 1, 140, 4, 8)

    @jax.jit
    def run(q, k, v, table):
        strategy = how(blocksize_q=sides[0], blocksize_k=sides[1])

        def f(q, k, v, table):
            score = T5Bias(table, max_distance=64)
            return attention(q, k, v, strategy, mask=Causal(), score=score).attention_outputs

        return jax.vjp(f, q, k, v, table)[1](ct)

    got = run(q, k, v, table)
    assert len(steps) == 1
    bucket = om.t5_bucket(140, 136, 8, True, 64)
    exact_arrays = [np.float64(x) for x in (q, k, v)]
    given = dict(table=np.float64(table), bucket=bucket, mask=om.causal(140, 136))
    problem = oracle.Problem(*exact_arrays, scale=8**-0.5, **given)
    want = oracle.vjp(problem, np.float64(ct), np.zeros((1, 140, 4)))
    for x, name in zip(got, ("q", "k", "v", "table"), strict=True):
        np.testing.assert_allclose(x, want[name], rtol=0, atol=3e-5)


def test_a_mask_of_differences():
    """Blocks that it empties are not on the list, as its table is known."""
    (q, k, v), shown = arrays(), np.arange(400) % 3 != 1
    shown[:40] = False
    mask = MaskFn(lambda b, h, q, k: jnp.asarray(shown)[q - k + 170])
    got = jax.jit(lambda *x: attention(*x, how(), mask=mask, q_offset=20).attention_outputs)(
        q, k, v
    )
    at, to = np.arange(200)[:, None] + 20, np.arange(150)
    bound.check(oracle.plain_problem(q, k, v, visible=shown[at - to + 170]), got)


class OfHeadAndDifference(AbstractScore):
    """A score of one's own, with tables by head and by difference."""

    table: jax.Array

    def operands(self):
        return (Operand(jnp.arange(4.0), "h"),)

    def transform(self, logit, b, h, q, k, number):
        return logit + self.table[h] * self.table[q - k] + number


def test_a_score_of_ones_own():
    (q, k, v), score = arrays(40, 40), OfHeadAndDifference(TABLE)
    call = lambda q, **kw: attention(q, k, v, how(**kw), mask=Causal(), score=score)
    assert kernels(lambda q: call(q, platform="pallas").attention_outputs, q) == 1
    at = np.arange(40)[:, None] - np.arange(40)
    table, heads = np.float64(TABLE), np.arange(4)[:, None, None]
    bias = table[heads] * table[np.maximum(at, 0)] + heads
    want = oracle.plain_problem(q, k, v, lambda z: z / np.sqrt(8) + bias, at >= 0)
    bound.check(want, jax.jit(lambda q: call(q, platform="xla").attention_outputs)(q))


@pytest.mark.parametrize("name", ["row", "column", "valid", "scale"])
def test_a_score_with_the_name_of_an_operand(name):
    members = dict(operands=lambda self: (Operand(jnp.arange(4.0), "h"),), __module__="own")
    members["transform"] = lambda self, s, b, h, q, k, number: s + number * (q - k).astype(s.dtype)
    (q, k, v), score = arrays(40, 37), type(name, (AbstractScore,), members)()
    call = lambda *x: attention(*x, how(platform="xla"), score=score).attention_outputs
    bias = np.arange(4)[:, None, None] * (np.arange(40)[:, None] - np.arange(37))
    want = oracle.plain_problem(q, k, v, lambda z: z / np.sqrt(8) + bias)
    bound.check(want, jax.jit(call)(q, k, v))


def test_programs_have_kernels():
    (q, k, v), table = arrays(), jnp.ones((8, 4))
    shown = jnp.arange(400) % 3 != 1

    def loss(q, table, platform="pallas"):
        mask = Causal() & MaskFn(lambda b, h, q, k: shown[abs(q - k)])
        score = [T5Bias(table), ScoreFn(lambda s, b, h, q, k: s + TABLE[(k - q) % 64])]
        out = attention(q, k, v, how(platform=platform), mask=mask, score=score)
        return out.attention_outputs.sum()

    assert kernels(loss, q, table) == 1
    assert kernels(jax.grad(loss, (0, 1)), q, table) == 3  # output, query, and the table
    assert kernels(jax.vmap(jax.grad(loss), (0, None)), q[None], table) == 2
    assert kernels(lambda *x: jax.jvp(loss, x, x), q, table) == 2


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("lengths", [(200, 150), (1024, 1024)])
def test_a_program_for_a_cpu_takes_few_logarithms(lengths, mapped):
    """One for each head and difference. It took one for each pair."""
    t, s = lengths
    (q, k, v), table = arrays(t, s), normal(3, 8, 4)

    def loss(q, table):
        return attention(q, k, v, score=T5Bias(table)).attention_outputs.sum()

    grad = jax.grad(loss, (0, 1))
    lowered = jax.jit(jax.vmap(grad, (0, None)) if mapped else grad)
    text = lowered.lower(q[None] if mapped else q, table).as_text()
    sizes = re.findall(r"stablehlo.log .*tensor<(\d+(?:x\d+)*)xf32>", text)
    assert sizes and max(math.prod(map(int, x.split("x"))) for x in sizes) == 4 * (t + s - 1)


def test_positions_that_need_not_count_up():
    """Each pair looks up its own number then, which no kernel does, compiled or interpreted."""
    (q, k, v), table = arrays(), normal(3, 8, 4)
    at = jnp.asarray(np.random.default_rng(1).permutation(200), jnp.int32)
    for given in (dict(q_positions=at), dict(kv_positions=at[:150])):
        call = lambda *x, given=given, **kw: attention(
            *x, how(**kw), score=T5Bias(table, max_distance=64), **given
        )
        got = jax.jit(ft.partial(call, platform="xla"))(q, k, v).attention_outputs
        q_at = np.asarray(given.get("q_positions", np.arange(200)))[:, None]
        k_at = np.asarray(given.get("kv_positions", np.arange(150)))[None]
        bucket = om.t5_bucket(200, 150, 8, True, 64, at=(q_at, k_at))
        bias = np.moveaxis(np.float64(table)[bucket], -1, 0)
        want = oracle.plain_problem(q, k, v, lambda z, bias=bias: z / np.sqrt(8) + bias)
        bound.check(want, got)
        with pytest.raises(ValueError, match="has a gather"):
            kernels(lambda *x: call(*x, platform="pallas"), q, k, v)
        with pytest.raises(ValueError, match="has a gather"):
            jax.jit(call).lower(q, k, v)


@pytest.mark.parametrize("platform", ["interpret", "xla"])
@pytest.mark.parametrize("mask", [None, Causal()])
def test_queries_of_the_padding_read_numbers_of_others(mask, platform):
    """They read 0 of a table without zeros, and made gradients NaN."""
    (q, k, v), table = arrays(37, 48), 1.5 + 0.1 * jnp.arange(100, dtype=jnp.float32)
    ct = normal(4, 1, 37, 4, 8)

    def loss(q, k, v, table):
        score = ScoreFn(lambda s, b, h, q, k: s / table[q - k + 50])
        out = attention(q, k, v, how(platform=platform), mask=mask, score=score)
        return (out.attention_outputs * ct).sum()

    def plain(q, k, v, table):
        at = np.arange(37)[:, None] - np.arange(48)
        z = jnp.einsum("bthd,bshd->bhts", q, jnp.repeat(k, 2, 2)) / 8**0.5
        z = z / table[at + 50][None, None]
        z = z if mask is None else jnp.where((at >= 0)[None, None], z, -jnp.inf)
        out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(z, -1), jnp.repeat(v, 2, 2))
        return (out * ct).sum()

    got = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, table)
    for x, want in zip(got, jax.grad(plain, (0, 1, 2, 3))(q, k, v, table), strict=True):
        np.testing.assert_allclose(x, want, rtol=1e-4, atol=1e-5)


def test_queries_of_the_padding_read_nothing_that_is_hidden():
    """In a block whose pairs are all visible, later queries would be too far from its first keys."""
    q, k, v = arrays(61, 61)
    table = jnp.asarray(abs(np.arange(-60, 64)) <= 28, jnp.float32)
    mask = MaskFn(lambda b, h, q, k: abs(q - k) <= 28)

    def loss(table):
        score = ScoreFn(lambda s, b, h, q, k: s / table[q - k + 60])
        out = attention(q, k, v, how(platform="xla"), mask=mask, score=score)
        return (out.attention_outputs**2).sum()

    def plain(table):
        at = np.arange(61)[:, None] - np.arange(61)
        shown = (abs(at) <= 28)[None, None]
        z = jnp.einsum("bthd,bshd->bhts", q, jnp.repeat(k, 2, 2)) / 8**0.5
        z = z / jnp.where(shown, table[at + 60][None, None], 1)
        p = jax.nn.softmax(jnp.where(shown, z, -jnp.inf), -1)
        return (jnp.einsum("bhts,bshd->bthd", p, jnp.repeat(v, 2, 2)) ** 2).sum()

    got, want = (jax.jit(jax.grad(x))(table) for x in (loss, plain))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("platform, t", [("interpret", 64), ("xla", 64), ("xla", 61)])
def test_gradients_of_what_is_singular_at_hidden_pairs(platform, t):
    q, k, v = arrays(t, t)
    mask = MaskFn(lambda b, h, q, k: k < q)

    def loss(table, platform):
        score = ScoreFn(
            lambda s, b, h, q, k: s + table[q - k] * jnp.log((q - k).astype(jnp.float32))
        )
        out = attention(q, k, v, how(platform=platform), mask=mask, score=score)
        return (out.attention_outputs**2).sum()

    got = jax.jit(jax.grad(loss), static_argnums=1)(TABLE, platform)
    at = np.arange(t)[:, None] - np.arange(t)
    logs = np.log(np.maximum(at, 1))

    def whole(table):
        bias = np.asarray(table)[np.clip(at, 0, 63)] * logs
        return (oracle.exact(q, k, v, lambda z: z / np.sqrt(8) + bias, at > 0)[0] ** 2).sum()

    for i in (1, 2, 17, 40):
        step = np.eye(64)[i] * 1e-4
        want = (whole(TABLE + step) - whole(TABLE - step)) / 2e-4
        np.testing.assert_allclose(got[i], want, rtol=1e-3, atol=1e-4)
    assert np.isfinite(got).all()


@pytest.mark.parametrize("platform", ["interpret", "xla"])
@pytest.mark.parametrize("by", ["difference", "query"])
def test_the_gradient_of_a_narrow_table_rounds_once(by, platform):
    """Many places read an entry. Their cotangents were rounded as they were added, in bfloat16."""
    q, k, v = arrays(256, 256)
    ct, table = normal(4, 1, 256, 4, 8), normal(3, 8).astype(jnp.bfloat16)
    index = (lambda q, k: abs(q - k) // 32) if by == "difference" else (lambda q, k: q // 32)
    near = lambda distance: 1.0 / (1.0 + abs(distance))  # so that a number of a query matters

    def loss(table):
        score = ScoreFn(
            lambda s, b, h, q, k: (
                s + near((q - k).astype(s.dtype)) * table[index(q, k)].astype(s.dtype)
            )
        )
        strategy = how(platform=platform, blocksize_q=64, blocksize_k=128)
        return (attention(q, k, v, strategy, score=score).attention_outputs * ct).sum()

    got = jax.jit(jax.grad(loss))(table)
    at = np.arange(256)[:, None], np.arange(256)[None]

    def whole(table):
        bias = near(at[0] - at[1]) * table[index(*at) + 0 * at[1]]
        out = oracle.exact(q, k, v, lambda z: z / np.sqrt(8) + bias)[0]
        return (out * np.float64(ct)).sum()

    steps = np.eye(8) * 1e-4
    start = np.float64(table)
    want = np.array([(whole(start + x) - whole(start - x)) / 2e-4 for x in steps])
    unit = 2.0 ** (np.floor(np.log2(abs(want))) - 7)
    assert (abs(np.float64(got) - want) <= 0.51 * unit).all(), (got, want)


@pytest.mark.parametrize("platform", ["interpret", "xla"])
@pytest.mark.parametrize("table", [(8, 4), (8, 1)])
def test_over_a_mesh(table, platform):
    """The axes of batch and heads are manual around kernels, and windows are cut by heads."""
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), kinds, devices=jax.devices()[:4])
    q, k, v = (jnp.concatenate([x, 2 * x]) for x in arrays(40, 40))
    table = normal(3, *table)
    score, strategy = T5Bias(table, max_distance=16), how(platform=platform)
    call = lambda *x: attention(*x, strategy, score=score).attention_outputs
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp", None, "tp"))
    with jax.set_mesh(mesh):
        got = jax.jit(call)(*[jax.device_put(x, place) for x in (q, k, v)])
    bias = np.moveaxis(np.float64(table)[om.t5_bucket(40, 40, 8, True, 16)], -1, 0)
    bound.check(oracle.plain_problem(q, k, v, lambda z: z / np.sqrt(8) + bias), got)
