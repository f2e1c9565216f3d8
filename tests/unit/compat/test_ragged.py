"""`ragged_mha`, `ragged_gqa`, `ragged_mqa`: one query per row, against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _programs import DEFAULT_CODE
from matrix import oracle, oracle_masks as om

import eqattn as e
from eqattn._problem.block_classes import table_of
from eqattn._problem.problem import Problem
from eqattn._problem.tiling import choose_tiling
from eqattn._sweep.grid import EMPTY
from eqattn.compat.easydel import bounds_of_rows


B, D, V = 5, 8, 6
ENDS = np.array([0, 1, 37, 50, 61], np.int32)
STARTS = np.array([0, 0, 5, 49, 61], np.int32)


def arrays(h, k, s=61, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((B, h, D), (B, s, k, D), (B, s, k, V))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def expected(q, k, v, ends, starts):
    s = k.shape[1]
    mask = om.lengths(1, s, ends, starts)
    found = oracle.forward(oracle.Problem(q=q[:, None], k=k, v=v, mask=mask, scale=1.0))
    return found.out[:, 0], found.lse[:, 0]


def close(oml, want, tolerance=1e-13):
    o, m, l = map(np.asarray, oml)
    out, lse = want
    np.testing.assert_allclose(o, out, rtol=0, atol=tolerance)
    dead = np.isinf(lse)
    assert (m[..., 0][dead] == -np.inf).all() and (l[..., 0][dead] == 0).all()
    with np.errstate(divide="ignore"):
        got = m[..., 0] + np.log(l[..., 0])
    np.testing.assert_allclose(got[~dead], lse[~dead], rtol=0, atol=tolerance * 10)


@pytest.mark.parametrize("h, k, block", [(4, 4, 16), (4, 2, 7), (4, 1, 256)])
def test_against_the_oracle(h, k, block, x64):
    q, key, v = arrays(h, k)
    want = expected(q, key, v, ENDS, STARTS)
    args = tuple(map(jnp.asarray, (q, key, v, ENDS, STARTS)))
    close(jax.jit(lambda *a: e.ragged_gqa(*a, block_size=block))(*args), want)
    close(e.reference_gqa(*args), want)
    if h == k:
        close(e.ragged_mha(*args, block_size=block), want)
        close(e.reference_mha(*args), want)


def test_multi_query(x64):
    q, key, v = arrays(3, 1)
    want = expected(q, key, v, ENDS, STARTS)
    args = tuple(map(jnp.asarray, (q, key[:, :, 0], v[:, :, 0], ENDS, STARTS)))
    for fn in (e.ragged_mqa, e.reference_mqa):
        close(fn(*args), want)
        o, m, l = fn(args[0][:, 1], *args[1:])
        assert (o.shape, m.shape, l.shape) == ((B, V), (B, 1), (B, 1))
        close([x[:, None] for x in (o, m, l)], [x[:, 1:2] for x in want])


def test_results_keep_the_rank_of_the_query(x64):
    q, key, v = map(jnp.asarray, arrays(4, 2))
    ends = jnp.asarray(ENDS)
    short, long = e.ragged_gqa(q, key, v, ends), e.ragged_gqa(q[:, None], key, v, ends)
    for x, y, width in zip(short, long, (V, 1, 1), strict=True):
        assert x.shape == (B, 4, width) and y.shape == (B, 1, 4, width)
        assert (x == y[:, 0]).all()
    for x, y in zip(long, e.reference_gqa(q[:, None], key, v, ends), strict=True):
        assert x.shape == y.shape


def test_what_is_not_visible_may_hold_anything(x64):
    q, key, v = arrays(4, 2)
    hidden = ~((np.arange(61) >= STARTS[:, None]) & (np.arange(61) < ENDS[:, None]))
    args = [jnp.asarray(x) for x in (q, key, v, ENDS, STARTS)]
    want = e.ragged_gqa(*args, block_size=16)
    for garbage in (np.nan, np.inf, 3e38):
        args[1:3] = [jnp.asarray(np.where(hidden[..., None, None], garbage, x)) for x in (key, v)]
        for x, y in zip(e.ragged_gqa(*args, block_size=16), want, strict=True):
            assert (x == y).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("length", [3, 16])
def test_a_visible_value_that_is_not_finite_spoils_its_head_and_row_only(bad, length):
    """Whether or not something else in its block is masked."""
    q, key, v = arrays(4, 2, s=16, dtype=np.float32)
    v[1, 2, 1, 0] = bad
    ends = jnp.full(B, length, jnp.int32)
    o, _, _ = e.ragged_gqa(*map(jnp.asarray, (q, key, v)), ends, block_size=8)
    spoiled = np.isnan(np.asarray(o)).any(-1)
    assert (spoiled == np.isnan(np.asarray(o)).all(-1)).all()
    assert spoiled.tolist() == [[b == 1 and h >= 2 for h in range(4)] for b in range(B)]


def test_gradients(x64):
    q, key, v = arrays(4, 2)
    rng = np.random.default_rng(1)
    ct = rng.standard_normal((B, 4, V))
    mask = om.lengths(1, 61, ENDS, STARTS)
    problem = oracle.Problem(q=q[:, None], k=key, v=v, mask=mask, scale=1.0)
    want = oracle.vjp(problem, ct[:, None], np.zeros((B, 1, 4)))

    def loss(*a):
        return jnp.vdot(e.ragged_gqa(*a, jnp.asarray(ENDS), jnp.asarray(STARTS))[0], ct)

    got = jax.grad(loss, (0, 1, 2))(*map(jnp.asarray, (q, key, v)))
    for x, name in zip(got, ("q", "k", "v"), strict=True):
        np.testing.assert_allclose(np.asarray(x).reshape(want[name].shape), want[name], atol=1e-13)


def test_parts_of_a_row_merge(x64):
    """Splitting the keys: `Carry` makes one result of both parts."""
    q, key, v = map(jnp.asarray, arrays(4, 2))
    ends, middle = jnp.asarray(ENDS), jnp.asarray(ENDS // 2)
    whole = e.ragged_gqa(q, key, v, ends)

    def part(*bounds):
        return e.Carry.from_oml(*e.ragged_gqa(q, key, v, *bounds))

    merged = part(middle).merge(part(ends, middle)).output()
    np.testing.assert_allclose(merged, whole[0], rtol=0, atol=1e-14)
    one = e.ragged_mqa(q[:, 0], key[:, :, 0], v[:, :, 0], ends)
    o, m, l = e.Carry.from_oml(*one).to_oml()
    assert (m == one[1][..., 0]).all() and (l == one[2][..., 0]).all()
    np.testing.assert_allclose(o, one[0], rtol=0, atol=1e-14)


def live(s, ends):
    x = jnp.zeros((len(ends), s, 2, 8), jnp.float32)
    spec = Problem.from_call(
        x[:, :1], x, x, e.AttentionMetadata(), mask=e.KeyPadding(jnp.asarray(ends))
    )
    tiling = choose_tiling(spec, None, None, in_place=True)
    assert tiling.block_k == 128
    return int((table_of(spec, tiling) != EMPTY).sum())


def test_as_many_visits_however_long_the_cache():
    for ends in ([256] * 4, [1, 0, 129, 1024]):
        expected = sum(-(-n // 128) for n in ends)
        assert live(1024, ends) == live(16384, ends) == expected


def test_temporary_memory_does_not_grow_with_the_cache():
    """But for the list of blocks."""
    sizes = []
    query = jax.ShapeDtypeStruct((2, 4, 8), jnp.float32)
    for s in (1024, 16384):
        key = jax.ShapeDtypeStruct((2, s, 2, 8), jnp.float32)
        ends = jax.ShapeDtypeStruct((2,), jnp.int32)
        compiled = jax.jit(e.ragged_gqa).lower(query, key, key, ends).compile(DEFAULT_CODE)
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert sizes[1] - sizes[0] <= 2 * 32 * (16384 - 1024) // 128


def test_default_arguments_at_64_tokens():
    """An ancestor's kernel gave NaN here."""
    q, key, v = arrays(4, 4, s=64, dtype=np.float32)
    ends = jnp.full(B, 64, jnp.int32)
    o, m, l = e.ragged_mha(*map(jnp.asarray, (q, key, v)), ends, jnp.zeros(B, jnp.int32))
    want, _ = expected(*arrays(4, 4, s=64), np.full(B, 64), np.zeros(B, int))
    np.testing.assert_allclose(o, want, atol=2e-6)
    assert (l > 0).all() and jnp.isfinite(m).all()


def test_cost_estimate():
    shapes = [(3, 1, 8, 16), (3, 100, 2, 16), (3, 100, 2, 16)]
    structs = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    structs.append(jax.ShapeDtypeStruct((3,), jnp.int32))
    cost = e.get_mha_cost_estimate(tuple(structs))
    assert cost.flops == 2 * 3 * 8 * 100 * (16 + 16)
    assert cost.transcendentals == 3 * 8 * 100
    read = 2 * (3 * 8 * 16 + 2 * 3 * 100 * 2 * 16) + 4 * 3
    assert cost.bytes_accessed == read + 4 * 3 * 8 * (16 + 2)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(mask_value=-1e4), "above -1e30"),
        (dict(cost_estimate=1), "cost_estimate"),
        (dict(query=jnp.zeros((B, 2, 4, D))), "several queries per row"),
        (dict(query=jnp.zeros((B, 3, D))), "not a multiple"),
    ],
)
def test_errors(change, message, unchecked):
    q, key, v = (jnp.asarray(x, jnp.float32) for x in arrays(4, 2))
    with pytest.raises(ValueError, match=message):
        e.ragged_gqa(**{**dict(query=q, key=key, value=v, lengths=jnp.asarray(ENDS)), **change})


def test_heads_must_match_in_mha(unchecked):
    q, key, v = (jnp.asarray(x, jnp.float32) for x in arrays(4, 2))
    for fn in (e.ragged_mha, e.reference_mha):
        with pytest.raises(ValueError, match="ragged_gqa"):
            fn(q, key, v, jnp.asarray(ENDS))


def test_bounds_have_a_number_for_each_row():
    query = jnp.ones((5, 4, 4))
    for end, start in ((1, None), (3, None), (5, 1), (5, 3)):
        given = jnp.full(end, 4), None if start is None else jnp.zeros(start, jnp.int32)
        with pytest.raises(ValueError, match=r"(starts|lengths) must be \[5\]"):
            bounds_of_rows(query, *given)
    for x, n in zip(bounds_of_rows(query, jnp.int32(4), None), (4, 0)):
        np.testing.assert_array_equal(x, np.full(5, n))
