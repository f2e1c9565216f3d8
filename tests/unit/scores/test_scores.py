"""What a pair is worth: values against the papers' formulas, gradients against differences."""

import functools as ft
import gc
import math
import weakref

import _draw as draw
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from matrix import bound, oracle

from eqattn import attention, AttentionMetadata, Blockwise, Causal, Dense, MaskFn, scores
from eqattn._pairs import canonical
from eqattn.scores import ALiBi, Bias, Operand, ScoreFn, SoftCap, T5Bias


B, T, S, H, K, D, V = (2, 3), 5, 7, 4, 2, 4, 3
FULL = (*B, H, T, S)
METADATA = AttentionMetadata(blocksize_q=2, blocksize_k=3)
STRATEGIES = {"blockwise": Blockwise(METADATA), "dense": Dense(AttentionMetadata())}
wide = {n: eqx.tree_at(lambda s: s.metadata, x, x.metadata.replace(runtime_dtype=jnp.float64))
        for n, x in STRATEGIES.items()}  # fmt: skip


normal = ft.partial(draw.normal, dtype=None)


def qkv(dtype=None):
    shapes = [(*B, T, H, D), (*B, S, K, D), (*B, S, K, V)]
    return [normal(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]


plain = oracle.plain_problem


def transformed(score, logits, q=None, k=None):
    """A score at every pair of `[*b, h, t, s]`, by its definition for scalars."""
    *batch, heads, t, s = logits.shape
    size = math.prod(batch)
    index = [jnp.arange(n, dtype=jnp.int32) for n in (size, heads)]
    index += [jnp.arange(n, dtype=jnp.int32) if x is None else x for x, n in ((q, t), (k, s))]
    args = [x.reshape([-1 if i == j else 1 for j in range(4)]) for i, x in enumerate(index)]
    args += [jnp.asarray(canonical(o, batch, heads, t, s)) for o in score.operands()]
    full = (size, heads, t, s)
    args = [jnp.broadcast_to(x, full).reshape(-1) for x in (logits.reshape(full), *args)]
    return jax.jit(jax.vmap(score.transform))(*args).reshape(logits.shape)


def value_and_gradients(attend, *args):
    """Compiles `((scalar, output), gradients)` of a scalar that sees every entry of the output and
    the logsumexp.
    """

    def probe(*args):
        out = attend(*args)
        o, lse = out.attention_outputs, out.logsumexp
        weights = normal(99, *o.shape, dtype=o.dtype), normal(98, *lse.shape, dtype=lse.dtype)
        seen = jnp.where(lse == -jnp.inf, 0, lse)
        return (weights[0] * o).sum() + (weights[1] * seen).sum(), out

    return jax.jit(jax.value_and_grad(probe, tuple(range(len(args))), has_aux=True))


def check_gradient(attend, *args, rtol=2e-7):
    """Every argument's gradient along a random direction is the central difference, in float64.

    Returns the output.
    """
    f = value_and_gradients(attend, *args)
    (_, out), gradient = f(*args)
    for i, x in enumerate(args):
        direction = np.asarray(normal(10 + i, *x.shape))
        step = 1e-5
        high, low = (f(*args[:i], x + e * direction, *args[i + 1 :])[0][0] for e in (step, -step))
        got = (np.asarray(gradient[i]) * direction).sum()
        assert gradient[i].shape == x.shape
        want = (high - low) / (2 * step)
        np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol, err_msg=f"argument {i}")
    return out


# ALiBi


@pytest.mark.parametrize(
    "heads, want",
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (8, [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]),
        (3, [2**-4, 2**-8, 2**-2]),
        (12, [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625,
              0.7071067811865476, 0.35355339059327384, 0.17677669529663687, 0.08838834764831849]),
    ],
)  # fmt: skip
def test_alibi_slopes_are_the_published_ones(heads, want):
    np.testing.assert_allclose(ALiBi.geometric(heads).slopes, want, rtol=1e-7)


def published_slopes(n):
    """`get_slopes` of the ALiBi repository."""

    def power_of_2(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return power_of_2(n)
    closest = 2 ** math.floor(math.log2(n))
    return power_of_2(closest) + published_slopes(2 * closest)[0::2][: n - closest]


def test_alibi_slopes_for_any_number_of_heads():
    for heads in (*range(1, 34), 40, 48, 64, 71, 112, 128):
        got = ALiBi.geometric(heads).slopes
        np.testing.assert_allclose(got, published_slopes(heads), rtol=1e-5)
        assert got.shape == (heads,) and got.dtype == jnp.float32


@pytest.mark.parametrize("heads", [0, -1])
def test_alibi_needs_a_head(heads):
    with pytest.raises(ValueError, match=f"heads.*{heads}"):
        ALiBi.geometric(heads)


def test_alibi_subtracts_slope_times_distance_between_positions():
    z = normal(0, H, T, S, dtype=np.float32)
    q, k = jnp.asarray([9, 3, 0, 5, -4]), jnp.asarray([0, 7, 3, -2, 9, 1, 5])
    distance = abs(np.asarray(q)[:, None] - np.asarray(k))
    slopes = np.float32([0.5, -1.0, 0.0, 2.0])
    got = transformed(ALiBi(jnp.asarray(slopes)), z, q, k)
    np.testing.assert_allclose(got, z - slopes[:, None, None] * distance, rtol=1e-6, atol=1e-6)


# T5


def published_bucket(relative, bidirectional, buckets, max_distance):
    """`_relative_position_bucket` of T5 for `relative = key - query`, in NumPy float32."""
    result = np.zeros_like(relative)
    n = -relative
    if bidirectional:
        buckets //= 2
        result = result + (n < 0) * buckets
        n = abs(n)
    else:
        n = np.maximum(n, 0)
    exact = buckets // 2
    ratio = np.log(np.maximum(n, 1).astype(np.float32) / exact) / math.log(max_distance / exact)
    far = exact + (ratio * (buckets - exact)).astype(int)
    return result + np.where(n < exact, n, np.minimum(far, buckets - 1))


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    "buckets, distance", [(32, 128), (32, 1000), (8, 20), (10, 50), (4, 3), (33, 128)]
)
def test_t5_buckets_are_the_published_ones(bidirectional, buckets, distance):
    relative = np.arange(-2 * distance, 2 * distance + 1)
    score = T5Bias(jnp.zeros((buckets, 1)), bidirectional, distance)
    got = jax.jit(jax.vmap(score.bucket))(jnp.zeros_like(relative), jnp.asarray(relative))
    want = published_bucket(relative, bidirectional, buckets, distance)
    np.testing.assert_array_equal(got, want)
    assert want.max() <= buckets - 1 and want.min() == 0


def test_t5_buckets_of_far_positions_do_not_overflow():
    score = T5Bias(jnp.zeros((32, 1)))
    far = jnp.int32(2**30)
    assert score.bucket(far, -far + 1) == 15 and score.bucket(-far + 1, far) == 31


def test_t5_bucket_of_a_pair_of_python_ints():
    assert T5Bias(jnp.zeros((32, 1))).bucket(9, 2) == published_bucket(np.array(-7), True, 32, 128)


@pytest.mark.parametrize("heads", [1, H])
def test_t5_adds_its_table(heads):
    z, table = normal(0, H, T, S), normal(1, 8, heads)
    bucket = published_bucket(np.arange(S) - np.arange(T)[:, None], True, 8, 128)
    want = z + np.broadcast_to(np.moveaxis(np.asarray(table)[bucket], -1, 0), (H, T, S))
    np.testing.assert_allclose(transformed(T5Bias(table), z), want, rtol=1e-6)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(table=jnp.zeros(32)), r"\[buckets, h\].*\(32,\)"),
        (dict(table=jnp.zeros((3, 2))), r"at least 4 buckets.*\(3, 2\)"),
        (dict(table=jnp.zeros((1, 2)), bidirectional=False), r"at least 2 buckets.*\(1, 2\)"),
        (dict(table=jnp.zeros((32, 2)), max_distance=8), "max_distance.*more than 8"),
        (
            dict(table=jnp.zeros((32, 2)), bidirectional=False, max_distance=-1),
            "max_distance.*at least 1",
        ),
    ],
)
def test_t5_tables_that_have_no_buckets_raise(kwargs, message, unchecked):
    with pytest.raises(ValueError, match=message):
        T5Bias(**kwargs)


# Soft cap


@pytest.mark.parametrize("cap", [30.0, 3, np.float32(0.5), jnp.float32(2.0), jnp.float32(-2.0)])
def test_soft_cap(cap):
    z = 20 * normal(0, H, T, S, dtype=np.float32)
    c = float(cap)
    np.testing.assert_allclose(transformed(SoftCap(cap), z), c * np.tanh(z / c), rtol=2e-6)


@pytest.mark.parametrize("backend", ["any"])
def test_a_learned_cap_may_change_its_sign(backend):
    """An optimiser may take it there: eager calls and the JSON of the strategy raised then."""
    q, k, v = (normal(i, 1, 24, 2, 16) for i in range(3))
    platform = "auto" if backend == "any" else "interpret"

    def loss(cap):
        metadata = AttentionMetadata(logits_soft_cap=cap, platform=platform, backend=backend)
        metadata = AttentionMetadata.from_json(metadata.to_json()) if eager else metadata
        return (attention(q, k, v, Blockwise(metadata)).attention_outputs ** 2).sum()

    eager = False
    (value, slope), (other, turned) = (
        jax.jit(jax.value_and_grad(loss))(jnp.float32(c)) for c in (0.5, -0.5)
    )
    np.testing.assert_allclose([other, -turned], [value, slope], rtol=1e-6)
    eager = True
    np.testing.assert_allclose(loss(jnp.float32(-0.5)), value, rtol=1e-5)


@pytest.mark.parametrize("cap", [0.0, -1.0, np.nan, np.inf, jnp.zeros(()), jnp.array(np.nan)])
def test_a_number_that_is_no_soft_cap(cap):
    learned = isinstance(cap, jax.Array)
    with pytest.raises(ValueError, match="finite and not 0" if learned else "positive and finite"):
        SoftCap(cap)
    jax.eval_shape(lambda c: transformed(SoftCap(c), jnp.zeros((1, 1, 1))), jnp.zeros(()))


# Bias


BIAS = [
    (), (1,), (S,), (T, 1), (1, S), (T, S), (H, 1, 1), (1, T, S), (H, 1, S), (H, T, S),
    (3, 1, 1, 1), (3, H, T, S), (1, 1, 1, T, 1), (2, 1, 1, 1, S), (1, 3, H, 1, 1), FULL,
]  # fmt: skip


@pytest.mark.parametrize("shape", BIAS, ids=str)
def test_bias_broadcasts(shape):
    z, bias = normal(0, *FULL), normal(1, *shape)
    want = np.asarray(z) + np.asarray(bias)
    np.testing.assert_array_equal(transformed(Bias(bias), z), want)


@pytest.mark.parametrize("shape", [(3, 1, T, 1)], ids=str)
def test_bias_of_any_shape_has_its_gradient(shape, x64):
    q, k, v = qkv()

    def attend(q, bias):
        return attention(q, k, v, wide["blockwise"], bias=bias, return_logsumexp=True)

    check_gradient(attend, q, normal(3, *shape))


@pytest.mark.parametrize(
    "shape",
    [(S + 1,), (S, T), (2,), (2, 1, 1), (T, S, H), (2, 1, 1, 1), (3, 2, H, T, S), (1, *FULL)],
)
@pytest.mark.parametrize("how", ["bias", "score"])
def test_bias_of_other_shapes_raises_with_both(how, shape):
    q, k, v = qkv(np.float32)
    bias = jnp.zeros(shape)
    bias = dict(bias=bias) if how == "bias" else dict(score=Bias(bias))
    with pytest.raises(ValueError) as error:
        jax.eval_shape(lambda: attention(q, k, v, **bias))
    assert str(shape) in str(error.value) and str(FULL) in str(error.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bias_of_minus_infinity_is_a_mask(strategy):
    """As many models write it; a row may see nothing, and then has zero gradients."""
    q, k, v = (x[0, 0] for x in qkv(np.float32))
    seen = np.random.default_rng(4).random((T, S)) < 0.4
    seen[2] = False
    bias = jnp.where(seen, normal(5, T, S, dtype=np.float32), -jnp.inf)

    def attend(q, k, v, bias):
        return attention(q, k, v, STRATEGIES[strategy], bias=bias, return_logsumexp=True)

    args = (q, k, v, bias)
    (_, out), gradients = value_and_gradients(attend, *args)(*args)
    finite = np.where(seen, bias, 0)
    bound.check(
        plain(q, k, v, lambda z: z / 2 + finite, seen), out.attention_outputs, out.logsumexp
    )
    assert all(jnp.isfinite(g).all() for g in gradients)
    assert (gradients[0][2] == 0).all() and (gradients[3][~seen] == 0).all()


# Functions


class Learned(eqx.Module):
    weight: jax.Array
    power: int = eqx.field(static=True)

    def __call__(self, logit, b, h, q, k):
        return logit + self.weight[h] * (q - k).astype(logit.dtype) ** self.power


def scaled(w, logit, b, h, q, k):
    return logit * w[h] + b.astype(logit.dtype)


FUNCTIONS = {
    "closure": lambda w: ScoreFn(lambda z, b, h, q, k: scaled(w, z, b, h, q, k)),
    "partial": lambda w: ScoreFn(jax.tree_util.Partial(scaled, w)),
    "module": lambda w: ScoreFn(Learned(w, 2)),
    "operand": lambda w: ScoreFn(lambda z, b, h, q, k, x: z * x, [Operand(w, "h")]),
}


@pytest.mark.parametrize(
    "name, strategy", [("closure", "blockwise"), ("module", "dense"), ("operand", "blockwise")]
)
def test_gradient_of_what_a_function_holds(name, strategy, x64):
    q, k, v = (x[0] for x in qkv())

    def attend(q, w):
        score = FUNCTIONS[name](w)
        return attention(q, k, v, wide[strategy], score=score, return_logsumexp=True)

    check_gradient(attend, q, normal(3, H))


def test_a_closure_over_each_kind_of_tracer():
    """Nothing leaks from one trace to the next."""
    q, k, v = (x[0, 0] for x in qkv(np.float32))
    traces = []

    def attend(w):
        def fn(z, b, h, q, k):
            traces.append(None)
            return z * w

        return attention(q, k, v, STRATEGIES["blockwise"], score=ScoreFn(fn)).attention_outputs

    ws = jnp.asarray([0.5, 2.0])
    for f in (jax.jit(jax.vmap(attend)), jax.jit(lambda ws: lax.map(attend, ws))):
        for w, out in zip((0.5, 2.0), f(ws)):
            bound.check(plain(q, k, v, lambda z, w=w: z / 2 * w), out)
    assert traces


def test_one_function_over_another_value_is_not_mistaken_for_the_old_one():
    q, k, v = (x[0, 0] for x in qkv(np.float32))
    for w in (1.0, 2.0, 3.0):
        out = attention(q, k, v, score=ScoreFn(lambda z, b, h, i, j: z * w)).attention_outputs
        bound.check(plain(q, k, v, lambda z, w=w: z / 2 * w), out)


def test_equal_leaves_of_other_types_are_not_mistaken_for_each_other():
    """`1 == True == 1.0`, but a module may tell them apart."""

    class Doubled(eqx.Module):
        twice: object

        def __call__(self, z, b, h, q, k):
            return 2 * z if self.twice is True else z

    q, k, v = (x[0, 0] for x in qkv(np.float32))
    f = lambda x: attention(q, k, v, score=ScoreFn(Doubled(x))).attention_outputs
    for twice in (1, True, 1.0):
        by = 1.0 if twice is True else 0.5
        bound.check(plain(q, k, v, lambda z, by=by: z * by), f(twice))


def test_a_function_may_return_another_float_dtype():
    z = normal(0, H, T, S, dtype=np.float32)
    got = transformed(ScoreFn(lambda z, b, h, q, k: z.astype(jnp.bfloat16)), z)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, z.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda z, b, h, q, k: q, r"one float per pair.*int32.*\(\)"),
        (lambda z, b, h, q, k: z > 0, r"one float per pair.*bool.*\(\)"),
        (lambda z, b, h, q, k: jnp.stack([z, z]), r"one float per pair.*float32.*\(2,\)"),
    ],
)
def test_what_is_no_score_raises(fn, message):
    q, k, v = (x[0, 0] for x in qkv(np.float32))
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(lambda: attention(q, k, v, score=ScoreFn(fn)))


def test_a_score_function_is_callable(unchecked):
    with pytest.raises(TypeError, match="callable.*3"):
        ScoreFn(3)  # pyright: ignore


def test_what_a_function_captured_is_freed_with_it():
    """The traces of an eager call do not outlive the function that they were made for."""
    q, k, v = (x[0, 0] for x in qkv(np.float32))
    shift = MaskFn(lambda b, h, i, j: i + j < 9)  # lives on

    def run():
        w = jnp.ones(1000)
        score = ScoreFn(lambda z, b, h, i, j: z * w[0])
        f = lambda q: attention(q, k, v, score=score, mask=shift).attention_outputs.sum()
        jax.grad(f)(q)
        return weakref.ref(w)

    w = run()
    gc.collect()
    assert w() is None


def test_a_users_score_module():
    """With only `transform`, and with a parameter."""

    class Distance(scores.AbstractScore):
        rate: jax.Array

        def transform(self, logit, b, h, q, k):
            return logit - self.rate * (q - k).astype(logit.dtype) ** 2

    q, k, v = (x[0, 0] for x in qkv(np.float32))
    distance = (np.arange(T)[:, None] - np.arange(S)) ** 2
    f = lambda score: attention(q, k, v, score=score).attention_outputs
    score, rate = Distance(jnp.float32(0.1)), np.float64(np.float32(0.1))
    bound.check(plain(q, k, v, lambda z: z / 2 - rate * distance), f(score))
    gradient = jax.grad(lambda s: (f(s) ** 2).sum())(score)
    assert isinstance(gradient, Distance) and gradient.rate != 0


# All together


def everything(strategy, q, scale, cap, bias, slopes, table, w, sinks):
    _, k, v = (x[0] for x in qkv())
    strategy = eqx.tree_at(
        lambda s: (s.metadata.softmax_scale, s.metadata.logits_soft_cap, s.metadata.softmax_aux),
        strategy,
        (scale, cap, sinks),
        is_leaf=lambda x: x is None,
    )
    score = [
        ALiBi(slopes),
        ScoreFn(lambda z, b, h, i, j: z * w),
        T5Bias(table, max_distance=4),
    ]
    return attention(
        q, k, v, strategy, mask=Causal(1), bias=bias, score=score, return_logsumexp=True
    )


@pytest.mark.parametrize("strategy", ["blockwise"])
def test_order_of_operations_and_every_gradient(strategy, x64):
    """scale, soft cap, bias, the scores in their order, then the mask."""
    q, k, v = (x[0] for x in qkv())
    args = (q, 0.7, 1.5, normal(3, H, 1, S), normal(4, H), normal(5, 8, H), 1.3, normal(6, H))
    args = tuple(map(jnp.asarray, args))
    out = check_gradient(ft.partial(everything, wide[strategy]), *args)

    def transform(z):
        _, scale, cap, bias, slopes, table, w, _ = map(np.asarray, args)
        i, j = np.arange(T)[:, None], np.arange(S)
        z = cap * np.tanh(scale * z / cap) + bias
        z = (z - slopes[:, None, None] * abs(i - j)) * w
        return z + np.moveaxis(table[published_bucket(j - i, True, 8, 4)], -1, 0)

    problem = plain(q, k, v, transform, np.tri(T, S, 1, bool), np.asarray(args[-1]))
    bound.check(problem, out.attention_outputs, out.logsumexp)


def test_scores_are_applied_in_the_order_given():
    q, k, v = (x[0, 0] for x in qkv(np.float32))
    double = ScoreFn(lambda z, b, h, i, j: 2 * z)
    shift = ScoreFn(lambda z, b, h, i, j: z + j.astype(z.dtype))
    j = np.arange(S)
    for score, transform in (
        ([double, shift], lambda z: z + j),
        ((shift, double), lambda z: z + 2 * j),
        (shift, lambda z: z / 2 + j),
        ((), lambda z: z / 2),
    ):
        out = attention(q, k, v, score=score).attention_outputs
        bound.check(plain(q, k, v, transform), out)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_score_cannot_reveal_what_is_masked(strategy):
    q, k, v = (x[0, 0] for x in qkv(np.float32))
    mask = MaskFn(lambda b, h, i, j: (i + j) % 3 == 0)
    reveal = ScoreFn(lambda z, b, h, i, j: jnp.where((i + j) % 3 == 0, z, 1e9))
    f = lambda **kwargs: attention(q, k, v, STRATEGIES[strategy], mask=mask, **kwargs)
    want = f().attention_outputs
    np.testing.assert_array_equal(f(score=reveal).attention_outputs, want)


@pytest.mark.parametrize("strategy", ["blockwise"])
def test_a_score_may_be_singular_where_it_is_masked(strategy, x64):
    """Its value and its derivative there, `0 * nan`, reach no gradient."""
    mask = MaskFn(lambda b, h, i, j: j < i)
    q, k, v = (x[0] for x in qkv())

    def f(q, w, power):
        def fn(z, b, h, i, j):
            distance = (i - j).astype(z.dtype)
            return z - w * jnp.log(distance) + jnp.sqrt(distance) ** power

        score = ScoreFn(fn)
        return attention(q, k, v, wide[strategy], mask=mask, score=score, return_logsumexp=True)

    out = check_gradient(f, q, jnp.asarray(0.7), jnp.asarray(-1.5))
    i, j = np.arange(T)[:, None], np.arange(S)
    distance = np.maximum(i - j, 1)
    z = lambda z: z / 2 - 0.7 * np.log(distance) + distance**-0.75
    bound.check(plain(q, k, v, z, j < i), out.attention_outputs, out.logsumexp)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_score_reads_positions(strategy):
    q, k, v = (x[0, 0] for x in qkv(np.float32))
    slopes = np.float32([0.1, 0.2, 0.3, 0.4])
    i, j = np.arange(T)[:, None] + 11, np.arange(S) * 2
    out = attention(
        q,
        k,
        v,
        STRATEGIES[strategy],
        score=ALiBi(jnp.asarray(slopes)),
        q_offset=11,
        kv_positions=jnp.asarray(j),
    ).attention_outputs
    bound.check(plain(q, k, v, lambda z: z / 2 - slopes[:, None, None] * abs(i - j)), out)


@pytest.mark.parametrize(
    "score, shape",
    [
        (lambda: ALiBi.geometric(H + 1), (H + 1,)),
        (lambda: ALiBi(jnp.ones((H, 1))), (H, 1)),
        (lambda: T5Bias(jnp.zeros((32, H + 1))), (H + 1,)),
        (lambda: T5Bias(jnp.zeros((32, 2))), (2,)),
        (lambda: SoftCap(jnp.ones(H)), (H,)),
    ],
)
def test_scores_of_other_heads_raise_with_both(score, shape, unchecked):
    q, k, v = qkv(np.float32)
    with pytest.raises(ValueError) as error:
        jax.eval_shape(lambda: attention(q, k, v, score=score()))
    for text in (type(score()).__name__, str(shape), str(FULL)):
        assert text in str(error.value)


@pytest.mark.parametrize("score", [lambda z, b, h, q, k: z, 3, [3], jnp.zeros((T, S))])
def test_scores_are_modules(score, unchecked):
    q, k, v = qkv(np.float32)
    with pytest.raises(TypeError, match="score modules.*ScoreFn"):
        attention(q, k, v, score=score)


@pytest.mark.parametrize("axes", ["th", "hb", "q", "hh"])
def test_axes_of_an_operand_are_in_order(axes):
    with pytest.raises(ValueError, match=r"some of 'bhtsf'.*in this order.*transpose"):
        Operand(jnp.zeros((3, 4)), axes)


def test_operands_of_numbers_and_lists(unchecked):
    assert Operand(2.0, "").array.shape == () and Operand([1.0, 2.0], "h").array.shape == (2,)
    with pytest.raises(TypeError, match=r"arrays must be Operands such as Operand\(array, 'bh'\)"):
        ScoreFn(lambda z, b, h, q, k, x: z, [jnp.zeros(4)])


@pytest.mark.parametrize(
    "number", [float, int, math.sqrt, lambda x: x.item()], ids=["float", "int", "sqrt", "item"]
)
def test_functions_of_pairs_make_no_python_numbers(number):
    """JAX named a lambda of eqattn, and not the function of the user."""
    score, mask = (lambda s, b, h, q, k: s + number(q)), (lambda b, h, q, k: number(q) > k)
    for more in (dict(score=ScoreFn(score)), dict(mask=MaskFn(mask))):
        with pytest.raises(TypeError, match="<lambda> makes a Python number of a traced scalar"):
            attention(*qkv(jnp.float32), Blockwise(METADATA), **more)


def test_an_integer_mask_is_no_bias(unchecked):
    """As a bias, ones and zeros would count as what is added."""
    q, k, v = qkv(jnp.float32)
    given = jnp.ones((T, S), jnp.int32)
    with pytest.raises(
        TypeError, match="compare it \\(`x > 0`\\), or pass additive values as `bias`"
    ):
        attention(q, k, v, mask=given)
    with pytest.raises(TypeError, match="give a mask of ones and zeros as mask=\\(x > 0\\)"):
        attention(q, k, v, bias=given)
