"""The monoid laws of `Carry`, judged by a bound in ulps against an extended-precision reference."""

import functools as ft
import math

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from _compiled import programs
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqattn import attention, AttentionMetadata, AttentionRegistry, Carry, Causal


T, H, V = 2, 2, 3
DTYPES = ["float32", "bfloat16", "float64"]  # of the inputs; bfloat16 accumulates in float32
KINDS = ["ordinary", "masked", "wide", "huge", "equal"]
SIZES = [0, 1, 3]  # few, so that few programs are compiled
laws = settings(deadline=None, max_examples=15)


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield jnp.dtype(request.param)


def inputs(seed, kind, n, dtype):
    """Logits `[t, h, n]` and values `[n, h, v]` as NumPy arrays, rounded to a dtype."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(T, H, n))
    z = {
        "ordinary": z,
        "masked": np.where(z > 0, z, -np.inf),
        "wide": 100 * z,
        "huge": z * 10.0 ** rng.integers(4, 31, size=z.shape),
        "equal": np.full_like(z, 7.0),
    }[kind]
    if kind == "masked" and n:
        z[0] = -np.inf  # a row that sees nothing
    values = rng.normal(size=(n, H, V)) * 10.0 ** rng.integers(-3, 4)
    return z.astype(dtype), values.astype(dtype)


parts = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.sampled_from(KINDS), st.sampled_from(SIZES)),
    min_size=1,
    max_size=5,
)
from_logits = jax.jit(Carry.from_logits)
update = jax.jit(Carry.update)
merge = jax.jit(Carry.merge)
finalise = jax.jit(Carry.finalise)


def reference(logits, values, merges):
    """`(output, logsumexp)` of all keys in extended precision, with the bound of each.

    A term `e^(s - m) v` is off by `u` for each rounding, and by `u |s - m|` for that of an exponent,
    in each of the merges that rescale it.
    """
    u = np.finfo(np.float64 if values.dtype == np.float64 else np.float32).eps / 2
    tiny = np.finfo(np.float64 if values.dtype == np.float64 else np.float32).tiny
    z, v = logits.astype(np.longdouble), values.astype(np.longdouble)
    n = z.shape[-1]
    top = z.max(-1, initial=-np.inf)
    x = z - np.where(np.isinf(top), 0, top)[..., None]
    p = np.exp(x)
    steps = merges + 1
    error = p * u * (n + 5 * steps + steps * np.abs(np.where(p > 0, x, 0))) + steps * tiny
    sum_v = lambda a, b: np.einsum("ths,shv->thv", a, b)
    den, e_den = p.sum(-1), error.sum(-1)
    seen = den > 0
    safe = np.where(seen, den, 1)
    out = sum_v(p, v) / safe[..., None]
    e_out = (sum_v(error, abs(v)) + abs(out) * e_den[..., None]) / safe[..., None]
    e_out = e_out + 3 * u * abs(out) + 2 * tiny
    lse = np.where(seen, np.where(seen, top, 0) + np.log(safe), -np.inf)
    e_lse = np.where(seen, e_den / safe + 4 * u * abs(np.where(seen, lse, 0)) + 4 * u, 0)
    return (out, e_out), (lse, e_lse)


def assert_near(carry, bounds):
    for got, (want, error) in zip(finalise(carry), bounds):
        got = np.asarray(got).astype(np.longdouble)
        with np.errstate(invalid="ignore"):
            near = (got == want) | (np.abs(got - want) <= error)
        assert near.all(), (got, want, error)


def concatenated(ps):
    return np.concatenate([z for z, _ in ps], -1), np.concatenate([v for _, v in ps], 0)


def identical(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


# Laws


@laws
@given(ps=parts, data=st.data())
@pytest.mark.parametrize("name", DTYPES)
def test_any_order_and_any_brackets_equal_the_whole(name, ps, data):
    with jax.enable_x64(name == "float64"):
        ps = [inputs(*p, name) for p in ps]
        bounds = reference(*concatenated(ps), merges=len(ps))
        carries = data.draw(st.permutations([from_logits(*p) for p in ps]))
        while len(carries) > 1:  # a random binary tree over a random permutation
            i = data.draw(st.integers(0, len(carries) - 2))
            carries[i : i + 2] = [merge(carries[i], carries[i + 1])]
        assert_near(carries[0], bounds)
        assert carries[0].numerator.dtype == ("float64" if name == "float64" else "float32")


@laws
@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(KINDS), cuts=st.sets(st.integers(0, 4)))
@pytest.mark.parametrize("name", DTYPES)
def test_splitting_keys_at_any_points_equals_the_whole(name, seed, kind, cuts):
    with jax.enable_x64(name == "float64"):
        z, v = inputs(seed, kind, 4, name)
        edges = sorted({0, 4, *cuts})
        carry = Carry.empty((T, H), V, "float64" if name == "float64" else "float32")
        for i, j in zip(edges, edges[1:]):
            carry = update(carry, z[..., i:j], v[i:j])
        assert_near(carry, reference(z, v, merges=len(edges)))


@laws
@given(ps=st.tuples(*[parts.map(lambda p: p[0])] * 2))
@pytest.mark.parametrize("name", DTYPES)
def test_merge_commutes_bitwise(name, ps):
    """Also where a compiler contracts products and sums."""
    with jax.enable_x64(name == "float64"):
        a, b = (from_logits(*inputs(*p, name)) for p in ps)
        identical(merge(a, b), merge(b, a))


def test_merge_commutes_bitwise_on_many_carries(dtype):
    """The size at which XLA vectorises and contracts."""
    rng = np.random.default_rng(0)
    a, b = (
        from_logits(
            jnp.asarray(9 * rng.normal(size=(64, 3, 5)).astype(dtype)),
            jnp.asarray(rng.normal(size=(5, 3, 7)).astype(dtype)),
        )
        for _ in range(2)
    )
    identical(merge(a, b), merge(b, a))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("f", [merge, Carry.merge], ids=["jit", "eager"])
def test_empty_is_the_bitwise_identity(f, kind, dtype):
    carry = from_logits(*inputs(0, kind, 3, dtype))
    empty = Carry.empty((T, H), V, carry.numerator.dtype)
    identical(f(carry, empty), carry)
    identical(f(empty, carry), carry)
    identical(f(empty, empty), empty)
    identical(from_logits(*inputs(0, kind, 0, dtype)), empty)


def test_nothing_seen(dtype):
    out, lse = Carry.empty((T, H), V).finalise()
    assert (out == 0).all() and (lse == -jnp.inf).all()
    out, lse = from_logits(*inputs(0, "masked", 3, dtype)).finalise()
    assert (out[0] == 0).all() and (lse[0] == -jnp.inf).all() and jnp.isfinite(out).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("power", [4, 30, 38])
def test_huge_logits_are_exact(power, sign):
    """A part that is far below the other adds nothing, and nothing overflows on the way."""
    far = jnp.full((T, H, 2), sign * 3.0 * 10.0**power, jnp.float32)
    v = jnp.arange(2 * H * V, dtype=jnp.float32).reshape(2, H, V)
    a, b = Carry.from_logits(far, v), Carry.from_logits(-far, 2 * v)
    out, lse = a.merge(b).finalise()
    np.testing.assert_array_equal(
        out, np.broadcast_to((1 if sign > 0 else 2) * v.mean(0), (T, H, V))
    )
    np.testing.assert_array_equal(lse, np.abs(far[..., 0]) + np.log(np.float32(2)))


def test_prefix_sums_by_associative_scan(dtype):
    ps = [inputs(i, "ordinary", 3, dtype) for i in range(4)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *[from_logits(*p) for p in ps])
    prefixes = jax.jit(ft.partial(lax.associative_scan, Carry.merge))(stacked)
    for i in range(4):
        prefix = jax.tree.map(lambda x: x[i], prefixes)
        assert_near(prefix, reference(*concatenated(ps[: i + 1]), merges=4))


# Conversions


@laws
@given(part=parts.map(lambda p: p[0]))
@pytest.mark.parametrize("name", DTYPES)
def test_round_trips(name, part):
    with jax.enable_x64(name == "float64"):
        carry = from_logits(*inputs(*part, name))
        out, lse = carry.finalise()
        identical(Carry.from_output(out, lse).finalise(), (out, lse))
        o, m, l = carry.to_oml()
        identical((o, m, l), (out, carry.max_so_far, carry.denominator))
        again, same = Carry.from_oml(o, m, l).finalise()
        identical(same, lse)
        assert (abs(again - out) <= 2 * jnp.finfo(out.dtype).eps * abs(out)).all()


CONVERSIONS = {
    "none": lambda c: c,
    "output": lambda c: Carry.from_output(*c.finalise()),
    "oml": lambda c: Carry.from_oml(*c.to_oml()),
    "shifted": lambda c: Carry(2 * c.numerator, 2 * c.denominator, c.max_so_far - np.log(2)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [n for n in CONVERSIONS if n != "none"])
def test_converted_parts_merge_to_the_whole(name, kind, dtype):
    """`shifted` is the same Carry in another gauge."""
    ps = [inputs(i, kind, 3, dtype) for i in range(3)]
    merged = ft.reduce(Carry.merge, [CONVERSIONS[name](from_logits(*p)) for p in ps])
    assert_near(merged, reference(*concatenated(ps), merges=5))


def test_half_precision_results_are_accumulated_in_float32():
    out, lse = jnp.ones((T, H, V), jnp.bfloat16), jnp.zeros((T, H), jnp.bfloat16)
    for carry in (Carry.from_output(out, lse), Carry.from_oml(out, lse, lse + 1)):
        assert {x.dtype for x in jax.tree.leaves(carry)} == {jnp.dtype("float32")}


def test_float64_anywhere_is_kept(x64):
    out, row = jnp.ones((T, H, V), jnp.float32), jnp.ones((T, H), jnp.float32)
    wide = jnp.float64
    for carry in (
        Carry.from_output(out, row.astype(wide)),
        Carry.from_oml(out, row, row.astype(wide)),
        Carry.from_oml(out, row.astype(wide), row),
        Carry.from_logits(out, jnp.ones((V, H, 1), wide)),
    ):
        assert {x.dtype for x in jax.tree.leaves(carry)} == {jnp.dtype(wide)}


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_output_of_an_unseen_row_may_hold_anything(garbage):
    """Other libraries return NaN for rows that see nothing."""
    row = jnp.full((T, H), -jnp.inf)
    out = jnp.full((T, H, V), garbage)

    def loss(out, l):
        a, b = Carry.from_output(out, row), Carry.from_oml(out, row, l)
        return sum(c.output().sum() + jnp.exp(c.logsumexp()).sum() for c in (a, b, a.merge(b)))

    for l in (row * 0, jnp.zeros((T, H)), row):
        value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(out, l)
        assert value == 0
        for g in gradients:
            np.testing.assert_array_equal(g, 0)


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_a_denominator_of_zero_alone_says_that_no_key_was_seen(garbage):
    """The numerator must be 0, as it is added to that of other keys."""
    nothing, finite = jnp.zeros((T, H)), jnp.ones((T, H))
    carry = Carry.from_oml(jnp.full((T, H, V), garbage), finite, nothing)
    identical((carry.numerator, carry.denominator), (jnp.zeros((T, H, V)), nothing))


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_values_that_no_row_sees_may_hold_anything(garbage):
    logits, values = jnp.full((T, H, 2), -jnp.inf), jnp.full((2, H, V), garbage)
    np.testing.assert_array_equal(from_logits(logits, values).output(), 0)


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it(garbage):
    logits = jnp.zeros((3, 1, 4)).at[0, :, 1].set(-jnp.inf)
    values = jnp.ones((4, 1, 2)).at[1, 0, 1].set(garbage)
    carry = Carry.from_logits(logits, values)
    np.testing.assert_array_equal(np.isnan(carry.output())[:, 0], [[0, 0], [1, 1], [1, 1]])
    np.testing.assert_array_equal(carry.output()[0, 0], [1, 1])
    gradient = jax.grad(lambda v: Carry.from_logits(logits, v).output()[0].sum())(values)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool"])
def test_sums_are_floats(dtype, unchecked):
    with pytest.raises(TypeError, match="must be a float"):
        Carry.empty((2, 3), 4, dtype)


def test_gradient_of_a_maximum_that_is_given():
    """The logsumexp is `m + log(l)`, so the maximum that a caller gives moves it."""
    one = jnp.ones((T, H))
    loss = lambda m: Carry.from_oml(jnp.ones((T, H, V)), m, one).logsumexp().sum()
    np.testing.assert_array_equal(jax.grad(loss)(one), 1)


# Sinks


def test_sinks_join_the_denominator_only(dtype):
    z, v = inputs(0, "masked", 3, dtype)
    sinks = np.asarray([[0.5, -1.0], [2.0, -np.inf]], dtype)  # [h, n]
    extended = np.concatenate([z, np.broadcast_to(sinks, (T, H, 2))], -1)
    want = reference(extended, np.concatenate([v, np.zeros((2, H, V), dtype)]), merges=2)
    assert_near(from_logits(z, v).with_sinks(jnp.asarray(sinks)), want)


@pytest.mark.parametrize("name", ["blockwise", "dense", "ragged"])
def test_the_gauge_of_a_strategy_is_the_largest_logit_or_sink(name):
    """With sinks it says nothing of the keys alone; logsumexp and output do not depend on it."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(5, 2, 3)), jnp.float32) for _ in range(3))
    logits = np.einsum("thd,shd->ths", q, k) * 3**-0.5
    logits = np.where((np.arange(5) <= np.arange(5)[:, None] - 1)[:, None], logits, -np.inf)
    carry = {}
    for sinks in (None, jnp.array([[-9.0, -8.0], [30.0, 1.0]])):
        strategy = AttentionRegistry.create(name, AttentionMetadata(softmax_aux=sinks))
        call = dict(mask=Causal(-1), return_carry=True)
        carry[sinks is None] = attention(q, k, v, strategy, **call).carry
    before, after = carry[True], carry[False]
    np.testing.assert_allclose(before.max_so_far, logits.max(-1), rtol=1e-6)
    want = np.maximum(logits.max(-1), [-8.0, 30.0])
    np.testing.assert_allclose(after.max_so_far, want, rtol=1e-6)
    assert (after.max_so_far[:, 1] > logits.max(-1)[:, 1]).all()
    again = before.with_sinks(jnp.array([[-9.0, -8.0], [30.0, 1.0]])[None])
    for x, y in zip(again.finalise(), after.finalise()):
        np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.parametrize("shape", [(3,), (1, 3), (H, 3), (T, 1, 3), (1, H, 3), (T, H, 3), (H, 0)])
def test_sinks_broadcast(shape):
    z, v = inputs(0, "ordinary", 3, jnp.float32)
    carry = from_logits(z, v)
    sinks = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    full = np.broadcast_to(sinks, (T, H, shape[-1]))
    identical(carry.with_sinks(jnp.asarray(sinks)), carry.with_sinks(jnp.asarray(full)))


# Derivatives


def gradients_by_hand(z, v, sinks, g, c):
    """Of `sum(g * output) + sum(c * logsumexp)`, in float64."""
    everything = np.concatenate([z, np.broadcast_to(sinks, (*z.shape[:2], sinks.shape[-1]))], -1)
    top = everything.max(-1, keepdims=True)
    p = np.exp(everything - np.where(np.isinf(top), 0, top))
    p = p / np.where(p.sum(-1, keepdims=True) == 0, 1, p.sum(-1, keepdims=True))
    p, p_sinks = p[..., : z.shape[-1]], p[..., z.shape[-1] :]
    out = np.einsum("ths,shv->thv", p, v)
    delta = (g * out).sum(-1) - c
    dz = p * (np.einsum("thv,shv->ths", g, v) - delta[..., None])
    dv = np.einsum("ths,thv->shv", p, g)
    return dz, dv, (-p_sinks * delta[..., None]).sum(0)


def by_scan(ps, convert):
    z, v = (jnp.stack(x) for x in zip(*ps))
    step = lambda carry, p: (carry.merge(convert(Carry.from_logits(*p))), None)
    return lax.scan(step, Carry.empty((T, H), V, z.dtype), (z, v))[0]


def by_reduce(ps, convert):
    return ft.reduce(Carry.merge, [convert(Carry.from_logits(*p)) for p in ps])


def by_update(ps, convert):
    return convert(ft.reduce(lambda c, p: c.update(*p), ps, Carry.empty((T, H), V, ps[0][0].dtype)))


def loss_of(route, convert, g, c, z, v, sinks):
    ps = [(z[..., i : i + 3], v[i : i + 3]) for i in range(0, z.shape[-1], 3)]
    out, lse = convert(route(ps, convert)).with_sinks(sinks).finalise()
    return (g * out).sum() + jnp.where(lse == -jnp.inf, 0, c * lse).sum()


def test_sinks_join_rows_on_explicit_axes():
    """Sinks without the mesh in their types, as those of a call are that shards its sequence."""
    carry, sinks = from_logits(np.ones((T, H, 3)), np.ones((3, H, V))), jnp.ones((H, 1))
    want = carry.with_sinks(sinks)
    mesh = jax.make_mesh((2,), ("sp",), (AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        placed = jax.device_put(carry, NamedSharding(mesh, P("sp")))
        got = placed.with_sinks(sinks)
    assert got.numerator.sharding.spec == P("sp", None, None)
    identical(got, want)


@pytest.mark.parametrize(
    "specs",
    [
        (P("sp"), None),
        (None, P("sp")),
        (P("sp"), P(None, "tp")),
        (P(("sp", "tp")), P(None, "sp")),
        (P(), None),
    ],
)
def test_rows_on_different_explicit_axes_merge(specs):
    """Rows that are sharded otherwise, or were made before `jax.set_mesh`."""
    z, v = inputs(0, "ordinary", 3, jnp.float32)
    carries = from_logits(z, v), from_logits(2 * z, v)
    want = carries[0].merge(carries[1])
    kinds, sizes = (AxisType.Explicit,) * 2, (2, 1 if P(None, "sp") in specs else 2)
    mesh = jax.make_mesh(sizes, ("sp", "tp"), kinds, devices=jax.devices()[: math.prod(sizes)])
    with jax.set_mesh(mesh):
        place = lambda x, spec: x if spec is None else jax.device_put(x, NamedSharding(mesh, spec))
        a, b = map(place, carries, specs)
        got = a.merge(b)
        slopes = jax.jit(jax.grad(lambda a, b: a.merge(b).output().sum(), (0, 1)))(a, b)
    first = P("sp") if specs[0] is None else specs[0] or P(None)
    assert got.denominator.sharding.spec == P(*first, "tp" if P(None, "tp") in specs else None)
    identical(got, want)
    pull = jax.grad(lambda a, b: a.merge(b).output().sum(), (0, 1))
    for x, y in zip(jax.tree.leaves(slopes), jax.tree.leaves(pull(*carries)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


ROUTES = [(by_reduce, name) for name in CONVERSIONS] + [(by_scan, "output"), (by_update, "oml")]


@pytest.mark.parametrize("route, convert", ROUTES[-2:])
def test_gradient(route, convert, x64):
    check_gradient(jnp.dtype("float64"), route, CONVERSIONS[convert])


def test_gradient_in_float32():
    check_gradient(jnp.dtype("float32"), by_reduce, CONVERSIONS["output"])


def check_gradient(acc, route, convert):
    """Of rows that see some keys and none, with finite sinks and none."""
    rng = np.random.default_rng(5)
    g, c = rng.normal(size=(T, H, V)), rng.normal(size=(T, H))
    z, v = inputs(1, "masked", 6, acc)
    sinks = np.asarray([[0.3, 1.0], [-np.inf, -np.inf]], acc)
    f = ft.partial(loss_of, route, convert, jnp.asarray(g, acc), jnp.asarray(c, acc))
    got = jax.jit(jax.grad(f, (0, 1, 2)))(z, v, sinks)
    unseen = np.isinf(z).all(-1) & np.isinf(sinks).all(-1)
    want = gradients_by_hand(*(x.astype(np.float64) for x in (z, v, sinks)), g, c * ~unseen)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=0, atol=200 * jnp.finfo(acc).eps * (1 + abs(b).max()))


def test_second_order(x64):
    """Merged parts have the Hessian-vector product of the plain softmax."""
    rng = np.random.default_rng(6)
    z, v = map(jnp.asarray, inputs(2, "masked", 6, np.float64))
    sinks = jnp.asarray([[0.3], [-1.0]])
    g, c = (jnp.asarray(rng.normal(size=s)) for s in ((T, H, V), (T, H)))

    def plain(z, v, sinks):
        full = jnp.concatenate([z, jnp.broadcast_to(sinks, (T, H, 1))], -1)
        p = jax.nn.softmax(full, -1)[..., :-1]
        lse = jax.nn.logsumexp(full, -1)
        return (g * jnp.einsum("ths,shv->thv", p, v)).sum() + (c * lse).sum()

    def merged(z, v, sinks):
        a = Carry.from_output(*Carry.from_logits(z[..., :3], v[:3]).finalise())
        b = Carry.from_oml(*Carry.from_logits(z[..., 3:], v[3:]).to_oml())
        out, lse = a.merge(b).with_sinks(sinks).finalise()
        return (g * out).sum() + (c * lse).sum()

    args = (z, v, sinks)
    tangents = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), args)
    hvp = lambda f: jax.jit(lambda x, t: jax.jvp(jax.grad(f, (0, 1, 2)), x, t)[1])(args, tangents)
    for got, want in zip(hvp(merged), hvp(plain)):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_maximum_is_a_gauge():
    """No gradient flows through it, and moving it along with the sums changes nothing."""
    a, b = (from_logits(*inputs(i, "ordinary", 3, jnp.float32)) for i in range(2))
    shape, acc = a.denominator.shape, a.denominator.dtype

    @jax.jit
    def shifted(shift):
        moved = Carry(
            a.numerator * jnp.exp(shift)[..., None],
            a.denominator * jnp.exp(shift),
            a.max_so_far - lax.stop_gradient(shift),
        )
        return moved.merge(b).with_sinks(jnp.ones((1,), acc)).finalise()

    def through_maximum(m):
        moved = Carry(a.numerator, a.denominator, m)
        out, lse = moved.merge(b).with_sinks(jnp.ones((1,), acc)).finalise()
        return out.sum() + lse.sum() + moved.logsumexp().sum()

    eps = float(jnp.finfo(acc).eps)
    for shift in (1.0, -3.0, 30.0, -30.0):
        for x, y in zip(shifted(jnp.full(shape, shift, acc)), shifted(jnp.zeros(shape, acc))):
            np.testing.assert_allclose(x, y, rtol=100 * eps, atol=100 * eps)
    np.testing.assert_array_equal(jax.grad(through_maximum)(a.max_so_far), np.zeros(shape))
    # What the shift would do if it were not compensated: d lse / d log(denominator) is the share.
    share = jnp.exp(a.logsumexp() - a.merge(b).with_sinks(jnp.ones((1,), acc)).logsumexp())
    gradient = jax.grad(lambda s: shifted(s)[1].sum())(jnp.zeros(shape, acc))
    np.testing.assert_allclose(gradient, share, rtol=100 * eps)


# What does not fit


ones = lambda *shape: jnp.ones(shape, jnp.float32)
MISFITS = {
    "logits of other keys": lambda: Carry.from_logits(ones(T, H, 4), ones(5, H, V)),
    "logits of other heads": lambda: Carry.from_logits(ones(T, H, 4), ones(4, 1, V)),
    "logits without a batch": lambda: Carry.from_logits(ones(T, H, 4), ones(2, 4, H, V)),
    "merge of other values": lambda: Carry.empty((T, H), V).merge(Carry.empty((T, H), 1)),
    "merge of other rows": lambda: Carry.empty((T, H), V).merge(Carry.empty((1, H), V)),
    "merge of other rank": lambda: Carry.empty((T, H), V).merge(Carry.empty((1, T, H), V)),
    "update of other rows": lambda: Carry.empty((1, H), V).update(ones(T, H, 4), ones(4, H, V)),
    "logsumexp of other rows": lambda: Carry.from_output(ones(T, H, V), ones(T, 1)),
    "logsumexp of rank": lambda: Carry.from_output(ones(T, H, V), ones(T, H, 1)),
    "maximum of other rows": lambda: Carry.from_oml(ones(T, H, V), ones(T, 1), ones(T, H)),
    "denominator of other rows": lambda: Carry.from_oml(ones(T, H, V), ones(T, H), ones(T, 1)),
    "sinks of other heads": lambda: Carry.empty((T, H), V).with_sinks(ones(H + 1, 2)),
    "sinks of rank": lambda: Carry.empty((T, H), V).with_sinks(ones(1, T, H, 2)),
    "sinks without an axis": lambda: Carry.empty((T, H), V).with_sinks(ones()),
}


@pytest.mark.parametrize("how", ["eager", "jit"])
@pytest.mark.parametrize("name", MISFITS)
def test_shapes_that_do_not_fit_raise_with_both(name, how, unchecked):
    f = MISFITS[name] if how == "eager" else lambda: jax.eval_shape(MISFITS[name])
    with pytest.raises(ValueError, match=r"\(.*\).*\(\d.*\).*; .*\."):
        f()


def test_as_many_sinks_as_heads_are_ambiguous(unchecked):
    carry = Carry.empty((T, H), V)
    with pytest.raises(ValueError, match="may be one for each head or shared by all"):
        carry.with_sinks(ones(H))
    assert carry.with_sinks(ones(H + 1)).denominator.shape == (T, H)


def test_merging_dtypes_raises_under_strict_promotion(x64):
    with pytest.raises(ValueError, match="float32.*float64|float64.*float32"):
        Carry.empty((T, H), V, jnp.float32).merge(Carry.empty((T, H), V, jnp.float64))


def test_few_programs_outside_of_jit():
    """An eager gradient took 70 programs. The second call needs none."""
    carry = Carry(*(jnp.ones((1, 13, 2, *v)) for v in ((5,), (), ())))
    sinks = jnp.ones((2, 1))

    def loss(carry):
        out, logsumexp = carry.with_sinks(sinks).finalise()
        return out.sum() + logsumexp.sum()

    assert 1 <= programs(lambda: jax.grad(loss)(carry)) <= 20
    assert programs(lambda: jax.grad(loss)(carry)) == 0
