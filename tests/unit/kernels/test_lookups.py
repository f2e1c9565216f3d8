"""What masks and scores look up by query, by key, or by `q - k` becomes an operand of kernels; the last is
repeated along the diagonals of blocks. matrix/ has the scores "lookup", "t5" and "differences".
"""

import functools as ft
import math
import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from _kernels import (
    ALL,
    drawn,
    dtype_of,
    EACH,
    HOPPER,
    how,
    judge,
    kernels,
    mesh_of,
    normal,
    NVIDIA,
    over,
    text_of,
)
from _rolls import rolled
from matrix import oracle_masks as om
from matrix.oracle import exact

from eqattn import (
    attention,
    Causal,
    KeyPadding,
    MaskFn,
    QueryPadding,
    Ragged,
    Ring,
    ScoreFn,
    Selected,
    T5Bias,
)
from eqattn._problem.lookups import lookups_of, without_lookups
from eqattn._sweep.differences import along_diagonals, padded, window_size
from eqattn.scores import AbstractScore, Operand


TABLE = jnp.asarray(np.random.default_rng(0).normal(size=64), jnp.float32)
SQUARE = TABLE.reshape(8, 8)
IDS = np.repeat(np.arange(8), 8).astype(np.int32)
D = 8


def found(fn, pair=None):
    """The axes of what a function of `(b, h, q, k)` looks up; None if that is nothing. `pair`: which
    arguments are positions that count up.
    """
    like, axes = jax.ShapeDtypeStruct((), jnp.int32), ("b", "bh", "bt", "bs")
    lookups = lookups_of(fn, [like] * 4, axes, *([] if pair is None else [pair]))
    return None if lookups is None else sorted(lookups.axes)


@pytest.mark.parametrize(
    "fn, axes",
    [
        (lambda b, h, q, k: TABLE[h], ["bh"]),
        (lambda b, h, q, k: TABLE[q] + TABLE[k], ["bs", "bt"]),
        # Products are left, as they may be singular where a mask hides.
        (lambda b, h, q, k: TABLE[q // 4] * h.astype(jnp.float32) + k, ["bt"]),
        (lambda b, h, q, k: TABLE[(TABLE[q] * 2).astype(jnp.int32)] + k, ["bt"]),
        (lambda b, h, q, k: TABLE[q] * TABLE[h] > k, ["bht"]),
        (lambda b, h, q, k: TABLE[b] + TABLE[3] + (q - k).astype(jnp.float32), ["b"]),
        (lambda b, h, q, k: SQUARE[h, k // 8] + q.astype(jnp.float32), ["bhs"]),
        (lambda b, h, q, k: jnp.where(TABLE[q] > 3, TABLE[q], 0.0) - k, ["bt"]),
        # Places that depend on both, functions without lookups, and rows of tables stay.
        (lambda b, h, q, k: TABLE[q - k], None),
        (lambda b, h, q, k: SQUARE[q // 8, k // 8], None),
        (lambda b, h, q, k: SQUARE[q][k], None),
        (lambda b, h, q, k: (q - k).astype(jnp.float32), None),
    ],
)
def test_what_is_found_by_query_or_key(fn, axes):
    with jax.numpy_dtype_promotion("standard"):
        assert found(fn) == axes


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
def test_what_is_found_by_difference(fn, axes):
    assert found(fn, pair=(2, 3)) == axes


def test_what_depends_on_the_logit_is_not_found():
    """A logit is that of a pair, so that a place which depends on it is, too."""
    of_logit = lambda s, b, h, q, k: TABLE[s.astype(jnp.int32)] + TABLE[h]
    scalars = [jax.ShapeDtypeStruct((), jnp.float32), *[jax.ShapeDtypeStruct((), jnp.int32)] * 4]
    lookups = lookups_of(of_logit, scalars, (None, "b", "bh", "bt", "bs"))
    assert lookups.axes == ("bh",) and lookups.reads == ((2,),)


def test_a_function_without_lookups_is_left_as_it_is():
    mask, score = MaskFn(lambda b, h, q, k: q >= k), ScoreFn(lambda s, b, h, q, k: s * 2)
    assert without_lookups(mask, True) is mask and without_lookups(score, True) is score


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


SLOPES, LENGTHS = jnp.linspace(0.1, 0.4, 4), np.array([40, 17])


def call(q, k, v, slopes=SLOPES, lengths=LENGTHS, **fields):
    """Keys of the same document or a later one, up to a length for each batch element, and ALiBi."""
    ends, ids = jnp.asarray(lengths), jnp.asarray(IDS)
    mask = MaskFn(lambda b, h, q, k: (k < ends[b]) & (ids[q] <= ids[k]))
    score = ScoreFn(lambda s, b, h, q, k: s - slopes[h] * abs(q - k).astype(s.dtype))
    strategy = how(**dict(backend="tpu", blocksize_q=16, blocksize_k=32) | fields)
    return attention(q, k, v, strategy, mask=mask, score=score, q_offset=5).attention_outputs


def test_values_and_gradients_of_lookups(interpreted):
    given, ct = drawn(interpreted, 20, 36, batch=2)
    at, to = np.arange(20)[:, None] + 5, np.arange(36)[None]
    seen = (to < LENGTHS.reshape(2, 1, 1, 1)) & (IDS[at] <= IDS[to])
    run = ft.partial(call, backend=interpreted)
    judge(run, given | dict(slopes=SLOPES), ct, distance=abs(at - to), mask=seen)


def test_lookups_run_in_the_kernels():
    """Also where `shard_map` tracks what varies, and beside a list of keys, of which each row is a
    batch element with heads of its own.
    """
    given, _ = drawn("tpu", 24, 40, batch=2)
    xs, run = list(given.values()), ft.partial(call, platform="pallas")
    assert kernels("tpu", jax.grad(lambda *x: run(*x).sum(), (0, 1, 2, 3)), *xs, SLOPES) >= 2
    dp = jax.P("dp")
    specs = dict(in_specs=(dp, dp, dp, jax.P()), out_specs=dp)
    assert kernels("tpu", jax.shard_map(run, mesh=mesh_of(2, "dp"), **specs), *xs, SLOPES) == 1
    score = ScoreFn(lambda s, b, h, q, k: s - SLOPES[h] * abs(q - k).astype(s.dtype))
    listed = Selected(jnp.tile(jnp.arange(8, dtype=jnp.int32), (1, 1, 24, 1)))
    fn = lambda *x: attention(*x, how("tpu", "pallas"), mask=listed, score=score).attention_outputs
    assert kernels("tpu", fn, *xs) == 1


@pytest.mark.parametrize("backend", ["tpu", HOPPER])
def test_a_function_may_be_nothing_but_a_lookup(backend):
    """What it returns is found then, and is not looked up again for each pair."""
    given, _ = drawn(backend)
    mask, score = MaskFn(lambda b, h, q, k: (TABLE > 0)[k]), ScoreFn(lambda s, b, h, q, k: TABLE[h])
    run = lambda *x: attention(*x, how(backend, "pallas"), mask=mask, score=score)
    program = jax.make_jaxpr(run)(*given.values())
    assert "gather" not in str(program).partition("visits=")[2]


def test_a_narrow_bias_beside_a_list_or_a_mask(dtype=jnp.bfloat16):
    """Scores read it wide, also where they are split."""
    given, _ = drawn("tpu", 24, 40, batch=2)
    bias = normal(5, 1, 4, 24, 40, dtype=dtype)
    mask = Selected(jnp.tile(jnp.arange(8, dtype=jnp.int32), (1, 1, 24, 1))) | Causal()
    at, to = np.arange(24)[:, None], np.arange(40)[None]
    run = lambda q, k, v: attention(q, k, v, how("tpu"), mask=mask, bias=bias).attention_outputs
    judge(run, given, mask=(to < 8) | (to <= at), bias=np.float64(bias))


def test_lookups_of_a_ring():
    """Rows stay and keys rotate, with what was found for them."""
    given, _ = drawn("tpu", 24, 24, batch=2)
    ids = jnp.asarray(IDS)
    mask, ring = MaskFn(lambda b, h, q, k: ids[q] == ids[k]), ft.partial(Ring, axis_name="sp")
    with jax.set_mesh(mesh_of(2)):
        strategy = how("tpu", strategy=ring)
        run = lambda q, k, v: attention(q, k, v, strategy, mask=mask).attention_outputs
        judge(run, given, mask=IDS[:24, None] == IDS[None, :24])


T5 = [(2, True, 32, 40), (1, False, 16, 32)]


@pytest.mark.parametrize("kv_heads, shared, block_q, t", T5)
def test_a_bias_of_t5(kv_heads, shared, block_q, t, interpreted):
    """With heads that share keys, heads that share a table, and blocks that are padded."""
    given, ct = drawn(interpreted, t, 50, 4, kv_heads)
    table = 3 * normal(7, 16, 1 if shared else 4)
    strategy = how(interpreted, blocksize_q=block_q, blocksize_k=32)
    more: Any = dict(bucket=om.t5_bucket(t, 50, 16, True, 64), mask=om.causal(t, 50))

    def run(q, k, v, table=table):
        score = T5Bias(table, max_distance=64)
        return attention(q, k, v, strategy, mask=Causal(), score=score).attention_outputs

    if shared:
        judge(run, given, ct, table=np.repeat(np.float64(table), 4, 1), **more)
    else:
        judge(run, given | dict(table=table), ct, **more)


def test_without_rounding_of_the_table(interpreted):
    """A bias that bfloat16 does not have turns which of two keys a row sees."""
    q, k, v = (jnp.zeros((1, 64, 1, 16), dtype_of(interpreted)) for _ in range(3))
    v = v.at[0, ::2].set(1)
    table = jnp.where(np.arange(128) % 2 == 0, 256.0, 256.5)  # neighbours in bfloat16 differ by 2
    score = ScoreFn(lambda s, b, h, q, k: s + 64 * (table[q - k + 64] - 256))
    run = jax.jit(lambda *x: attention(*x, how(interpreted), score=score).attention_outputs)
    # The weight of a key that is not chosen, exp(-32), is below the last place of the others.
    np.testing.assert_allclose(run(q, k, v)[0, :, 0, 0], np.arange(64) % 2, atol=1e-6)


def test_a_mask_and_a_score_of_a_user(interpreted, offset=20):
    """The mask is read by the difference, too, and empties some blocks, which are not visited."""
    given, ct = drawn(interpreted, 70, 90)
    table, shown = normal(7, 9, 4), np.arange(400) % 3 != 1
    shown[:160] = False
    mask = MaskFn(lambda b, h, q, k: jnp.asarray(shown)[q - k + 170])
    strategy = how(interpreted, blocksize_q=32, blocksize_k=64)

    def run(q, k, v, table):
        score = ScoreFn(lambda s, b, h, q, k: s + table[jnp.clip(q - k + 4, 0, 8), h])
        given: Any = dict(mask=mask, score=score, q_offset=offset)
        return attention(q, k, v, strategy, **given).attention_outputs

    at = np.arange(70)[:, None] + offset - np.arange(90)
    more = dict(bucket=np.clip(at + 4, 0, 8), mask=shown[at + 170])
    judge(run, given | dict(table=table), ct, **more)


class OfHeadAndDifference(AbstractScore):
    """A score of one's own, with tables by head and by difference."""

    table: jax.Array

    def operands(self):
        return (Operand(jnp.arange(4.0), "h"),)

    def transform(self, logit, b, h, q, k, number):
        return logit + self.table[h] * self.table[q - k] + number


def test_a_score_of_ones_own():
    given, _ = drawn("tpu", 40, 40)
    score = OfHeadAndDifference(TABLE)

    def run(platform, q, k, v):
        strategy = how("tpu", platform, blocksize_q=16, blocksize_k=16)
        return attention(q, k, v, strategy, mask=Causal(), score=score).attention_outputs

    assert kernels("tpu", ft.partial(run, "pallas"), *given.values()) == 1
    at = np.arange(40)[:, None] - np.arange(40)
    table, heads = np.float64(TABLE), np.arange(4)[:, None, None]
    bias = (table[heads] * table[np.maximum(at, 0)] + heads)[None]
    judge(ft.partial(run, "xla"), given, bias=bias, mask=at >= 0)


@pytest.mark.parametrize("name", ["row", "column", "valid", "scale"])
def test_a_score_with_the_name_of_an_operand(name):
    members = dict(operands=lambda self: (Operand(jnp.arange(4.0), "h"),), __module__="own")
    members["transform"] = lambda self, s, b, h, q, k, number: s + number * (q - k).astype(s.dtype)
    (given, _), score = drawn("tpu", 40, 37), type(name, (AbstractScore,), members)()
    run = lambda q, k, v: attention(q, k, v, how("tpu", "xla"), score=score).attention_outputs
    bias = np.arange(4)[:, None, None] * (np.arange(40)[:, None] - np.arange(37))
    judge(run, given, bias=bias[None].astype(np.float64))


@EACH
def test_programs_have_kernels(backend):
    """The gradient of each look-up in a table is a kernel for TPUs, and runs as loops on GPUs."""
    (given, _), shown = drawn(backend, 70, 90), jnp.arange(400) % 3 != 1

    def loss(q, k, v, table):
        mask = Causal() & MaskFn(lambda b, h, q, k: shown[abs(q - k)])
        score = [T5Bias(table), ScoreFn(lambda s, b, h, q, k: s * table[(k - q) % 8, 0])]
        out = attention(q, k, v, how(backend, "pallas"), mask=mask, score=score)
        return out.attention_outputs.astype(jnp.float32).sum()

    count, xs = ft.partial(kernels, backend), (*given.values(), jnp.ones((8, 4)))
    tpu = backend == "tpu"
    assert count(loss, *xs) == 1
    assert count(jax.grad(loss, (0, 1, 2, 3)), *xs) == (4 if tpu else 3)
    assert count(jax.vmap(jax.grad(loss), (0, None, None, None)), xs[0][None], *xs[1:]) == 2
    assert not tpu or count(lambda *x: jax.jvp(loss, x, x), *xs) == 2


@NVIDIA
def test_a_program_has_no_number_of_each_pair(backend):
    """It has a few for each difference."""
    given, _ = drawn(backend, 1024, 1024)
    f = lambda *x: attention(*x, how(backend, "pallas"), score=T5Bias(jnp.ones((8, 4))))
    text = text_of(backend, lambda *x: f(*x).attention_outputs, *given.values())
    assert "1024x1024" not in text


@pytest.mark.parametrize("mapped, lengths", [(False, (200, 150)), (True, (1024, 1024))])
def test_a_program_for_a_cpu_takes_few_logarithms(lengths, mapped):
    """One for each head and difference."""
    (given, _), table = drawn("tpu", *lengths), normal(3, 8, 4)
    q, k, v = given.values()

    def loss(q, table):
        return attention(q, k, v, score=T5Bias(table)).attention_outputs.sum()

    grad = jax.grad(loss, (0, 1))
    lowered = jax.jit(jax.vmap(grad, (0, None)) if mapped else grad)
    text = lowered.lower(q[None] if mapped else q, table).as_text()
    sizes = re.findall(r"stablehlo.log .*tensor<(\d+(?:x\d+)*)xf32>", text)
    assert sizes and max(math.prod(map(int, x.split("x"))) for x in sizes) == 4 * (sum(lengths) - 1)


@EACH
def test_positions_that_need_not_count_up(backend):
    """Each pair looks up its own number then, which no kernel does. Nor do those of caches."""
    given, _ = drawn(backend, 70, 90)
    strategy, score = how(backend, "pallas"), T5Bias(jnp.ones((8, 4)))
    call = lambda *x, **kw: attention(*x, strategy, score=score, **kw).attention_outputs
    assert strategy.supports(score=score)
    for at in (dict(q_positions=jnp.arange(70)), dict(kv_positions=jnp.arange(90))):
        assert "T5Bias has a" in strategy.supports(score=score, **at).reason
        with pytest.raises(ValueError, match="has a (gather|concatenate)"):
            kernels(backend, ft.partial(call, **at), *given.values())
    assert not Ragged(strategy.metadata).supports(score=score)
    far = ScoreFn(lambda s, b, h, q, k: s + jnp.ones(64)[q * k % 64])
    assert "gather" in strategy.supports(score=far).reason


def test_positions_in_any_order_run_as_xla_code():
    given, _ = drawn("tpu", 70, 90)
    table, at = normal(3, 8, 4), np.random.default_rng(1).permutation(90)
    for name, q_at, k_at in (("q", at[:70], np.arange(90)), ("kv", np.arange(70), at)):
        places = {f"{name}_positions": jnp.asarray(q_at if name == "q" else k_at, jnp.int32)}

        def run(q, k, v, places=places):
            score = T5Bias(table, max_distance=64)
            return attention(q, k, v, how("tpu", "xla"), score=score, **places).attention_outputs

        bucket = om.t5_bucket(70, 90, 8, True, 64, at=(q_at[:, None], k_at[None]))
        judge(run, given, table=np.float64(table), bucket=bucket)


def of_xla(backend: str, **fields):
    """A strategy of XLA code, or one of interpreted kernels."""
    return how("tpu", "xla", **fields) if backend == "xla" else how(backend, **fields)


def queries_of_the_padding(backend, mask):
    """They read 0 of a table without zeros, and made gradients NaN."""
    (given, ct), table = drawn("tpu", 37, 48), 1.5 + 0.1 * jnp.arange(100, dtype=jnp.float32)
    given = {n: x.astype(dtype_of(backend)).astype(jnp.float32) for n, x in given.items()}
    ct = ct.astype(dtype_of(backend)).astype(jnp.float32)
    # What only queries of the padding would read.
    table = jnp.where(jnp.arange(100) < 50 + 37, table, 0)

    def loss(q, k, v, table):
        score = ScoreFn(lambda s, b, h, q, k: s / table[q - k + 50])
        sizes = dict(blocksize_q=16, blocksize_k=16)
        xs = (x.astype(dtype_of(backend)) for x in (q, k, v))
        out = attention(*xs, of_xla(backend, **sizes), mask=mask, score=score).attention_outputs
        return (out.astype(jnp.float32) * ct).sum()

    def plain(q, k, v, table):
        at = np.arange(37)[:, None] - np.arange(48)
        z = jnp.einsum("bthd,bshd->bhts", q, jnp.repeat(k, 2, 2)) / 4
        z = z / table[at + 50][None, None]
        z = z if mask is None else jnp.where((at >= 0)[None, None], z, -jnp.inf)
        out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(z, -1), jnp.repeat(v, 2, 2))
        return (out * ct).sum()

    got = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*given.values(), table)
    # Some roundings of float32 or, of the largest number, of bfloat16.
    narrow = dtype_of(backend) == jnp.bfloat16
    for x, y in zip(got, jax.grad(plain, (0, 1, 2, 3))(*given.values(), table), strict=True):
        atol = 2e-2 * float(jnp.abs(y).max()) if narrow else 1e-5
        np.testing.assert_allclose(x, y, rtol=0 if narrow else 1e-4, atol=atol)


def test_queries_of_the_padding_read_numbers_of_others(interpreted):
    queries_of_the_padding(interpreted, Causal())


def test_queries_of_the_padding_of_xla_code():
    queries_of_the_padding("xla", None)


def test_queries_of_the_padding_read_nothing_that_is_hidden():
    """In a block whose pairs are all visible, later queries would be too far from its first keys."""
    q, k, v = drawn("tpu", 61, 61, dim=8)[0].values()
    table = jnp.asarray(abs(np.arange(-60, 64)) <= 28, jnp.float32)
    mask = MaskFn(lambda b, h, q, k: abs(q - k) <= 28)

    def loss(table):
        score = ScoreFn(lambda s, b, h, q, k: s / table[q - k + 60])
        out = attention(
            q, k, v, how("tpu", "xla", blocksize_q=16, blocksize_k=16), mask=mask, score=score
        )
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


@pytest.mark.parametrize("platform, t", [("interpret", 64), ("xla", 61)])
def test_gradients_of_what_is_singular_at_hidden_pairs(platform, t):
    q, k, v = drawn("tpu", t, t, dim=8)[0].values()
    mask = MaskFn(lambda b, h, q, k: k < q)

    def loss(table, platform):
        score = ScoreFn(
            lambda s, b, h, q, k: s + table[q - k] * jnp.log((q - k).astype(jnp.float32))
        )
        out = attention(
            q, k, v, how("tpu", platform, blocksize_q=16, blocksize_k=16), mask=mask, score=score
        )
        return (out.attention_outputs**2).sum()

    got = jax.jit(jax.grad(loss), static_argnums=1)(TABLE, platform)
    at = np.arange(t)[:, None] - np.arange(t)
    logs = np.log(np.maximum(at, 1))

    def whole(table):
        bias = np.asarray(table)[np.clip(at, 0, 63)] * logs
        return (exact(q, k, v, lambda z: z / np.sqrt(8) + bias, at > 0)[0] ** 2).sum()

    for i in (1, 2, 17, 40):
        step = np.eye(64)[i] * 1e-4
        want = (whole(TABLE + step) - whole(TABLE - step)) / 2e-4
        np.testing.assert_allclose(got[i], want, rtol=1e-3, atol=1e-4)
    assert np.isfinite(got).all()


@pytest.mark.parametrize(
    "platform, by", [("interpret", "difference"), ("interpret", "query"), ("xla", "difference")]
)
def test_the_gradient_of_a_narrow_table_rounds_once(by, platform):
    """Many places read an entry. Their cotangents are added in float32."""
    q, k, v = drawn("tpu", 256, 256, dim=8)[0].values()
    ct, table = normal(4, 1, 256, 4, 8), normal(3, 8).astype(jnp.bfloat16)
    index = (lambda q, k: abs(q - k) // 32) if by == "difference" else (lambda q, k: q // 32)
    near = lambda distance: 1.0 / (1.0 + abs(distance))  # so that a number of a query matters

    def loss(table):
        score = ScoreFn(
            lambda s, b, h, q, k: (
                s + near((q - k).astype(s.dtype)) * table[index(q, k)].astype(s.dtype)
            )
        )
        strategy = how("tpu", platform, blocksize_q=64, blocksize_k=128)
        return (attention(q, k, v, strategy, score=score).attention_outputs * ct).sum()

    got = jax.jit(jax.grad(loss))(table)
    at = np.arange(256)[:, None], np.arange(256)[None]

    def whole(table):
        bias = near(at[0] - at[1]) * table[index(*at) + 0 * at[1]]
        out = exact(q, k, v, lambda z: z / np.sqrt(8) + bias)[0]
        return (out * np.float64(ct)).sum()

    steps = np.eye(8) * 1e-4
    start = np.float64(table)
    want = np.array([(whole(start + x) - whole(start - x)) / 2e-4 for x in steps])
    unit = 2.0 ** (np.floor(np.log2(abs(want))) - 7)
    assert (abs(np.float64(got) - want) <= 0.51 * unit).all(), (got, want)


@pytest.mark.parametrize("platform, table", [("interpret", (8, 4)), ("xla", (8, 1))])
def test_over_a_mesh(table, platform):
    """The axes of batch and heads are manual around kernels, and windows are cut by heads."""
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), kinds, devices=jax.devices()[:4])
    q, k, v = (jnp.concatenate([x, 2 * x]) for x in drawn("tpu", 40, 40, dim=8)[0].values())
    table = normal(3, *table)
    score, strategy = (
        T5Bias(table, max_distance=16),
        how("tpu", platform, blocksize_q=16, blocksize_k=16),
    )
    call = lambda *x: attention(*x, strategy, score=score).attention_outputs
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp", None, "tp"))
    with jax.set_mesh(mesh):
        got = jax.jit(call)(*[jax.device_put(x, place) for x in (q, k, v)])
    bias = np.moveaxis(np.float64(table)[om.t5_bucket(40, 40, 8, True, 16)], -1, 0)
    want = exact(q, k, v, lambda z: z / np.sqrt(8) + bias)[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


COUNTS = np.array([1, 2, 3, 0.5, 1, 0, 0, 0], np.float32)  # 0 where nobody sees a key


BLANK = np.array([1, 2, 3, 0.5, 1, np.nan, np.nan, np.nan], np.float32)


SINGULAR = {
    "log of a key's": (lambda s, a, x, b, h, q, k: s + a * jnp.log(x[k]), ALL),
    "root of a query's": (lambda s, a, x, b, h, q, k: s * a * jnp.sqrt(x[q]), ALL),
    "log of a row's": (lambda s, a, x, b, h, q, k: s * (1 + a * jnp.log(x[b + 4])), ALL),
    "NaN": (lambda s, a, x, b, h, q, k: s + a * x[k], ALL),
}


@over(SINGULAR, later=("log of a row's", "log of a key's"))
def test_what_is_singular_where_a_mask_hides(interpreted, name):
    """The same in plain formulas, whose tables end before what is hidden."""
    x, fn = (BLANK if name == "NaN" else COUNTS), SINGULAR[name][0]
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 8, 1, 4)) for key in keys)
    strategy = how(interpreted, runtime_dtype=None)
    mask = (QueryPadding if "query" in name else KeyPadding)(jnp.array([5, 0]))

    def total(a, x):
        score = ScoreFn(lambda s, b, h, q, k: fn(s, a, x, b, h, q, k))
        return jnp.sum(
            jnp.sin(attention(q, k, v, strategy, mask=mask, score=score).attention_outputs)
        )

    def plain(a, x):
        s = jnp.einsum("td,sd->ts", q[0, :, 0], k[0, :, 0], precision="highest") / 2
        places = jnp.arange(8)
        rows, columns = (places[:5], places) if "query" in name else (places, places[:5])
        s = fn(s[: len(rows), : len(columns)], a, x, 0, 0, rows[:, None], columns[None])
        seen = v[0, : len(columns), 0]
        y = jnp.einsum("ts,sd->td", jax.nn.softmax(s, -1), seen, precision="highest")
        return jnp.sum(jnp.sin(y))

    args = jnp.float32(0.5), jnp.asarray(x)
    found, wanted = (jax.jit(jax.grad(f, (0, 1)))(*args) for f in (total, plain))
    for y, z in zip(found, wanted):
        np.testing.assert_allclose(y, z, atol=1e-5)
