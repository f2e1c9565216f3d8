"""What masks and scores look up by query or by key alone becomes an operand of kernels. The target
"tpu" of matrix/ has the score "lookup", with gradients.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tpu_lowered import kernels
from matrix import bound, oracle

from eqattn import (
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    KeyPadding,
    MaskFn,
    QueryPadding,
    Ring,
    ScoreFn,
    Selected,
)
from eqattn._problem.lookups import lookups_of, without_lookups


B, T, S, H, K, D = (2, 2), 24, 40, 4, 2, 8
TABLE = np.arange(64, dtype=np.float32) % 7
IDS = np.repeat(np.arange(8), 8).astype(np.int32)


def found(fn, axes=("b", "bh", "bt", "bs")):
    """The axes of what a function of `(b, h, q, k)` looks up; None if that is nothing."""
    lookups = lookups_of(fn, [jax.ShapeDtypeStruct((), jnp.int32)] * 4, axes)
    return None if lookups is None else sorted(lookups.axes)


TABLES = jnp.asarray(TABLE), jnp.asarray(TABLE).reshape(8, 8)


@pytest.mark.parametrize(
    "fn, axes",
    [
        (lambda b, h, q, k: TABLES[0][h], ["bh"]),
        (lambda b, h, q, k: TABLES[0][q] + TABLES[0][k], ["bs", "bt"]),
        # Products are left, as they may be singular where a mask hides.
        (lambda b, h, q, k: TABLES[0][q // 4] * h.astype(jnp.float32) + k, ["bt"]),
        (lambda b, h, q, k: TABLES[0][(TABLES[0][q] * 2).astype(jnp.int32)] + k, ["bt"]),
        (lambda b, h, q, k: TABLES[0][q] * TABLES[0][h] > k, ["bht"]),
        (lambda b, h, q, k: TABLES[0][b] + TABLES[0][3] + (q - k).astype(jnp.float32), ["b"]),
        (lambda b, h, q, k: TABLES[1][h, k // 8] + q.astype(jnp.float32), ["bhs"]),
        (lambda b, h, q, k: jnp.where(TABLES[0][q] > 3, TABLES[0][q], 0.0) - k, ["bt"]),
        # Places that depend on both, functions without lookups, and rows of tables stay.
        (lambda b, h, q, k: TABLES[0][q - k], None),
        (lambda b, h, q, k: TABLES[1][q // 8, k // 8], None),
        (lambda b, h, q, k: TABLES[1][q][k], None),
        (lambda b, h, q, k: (q - k).astype(jnp.float32), None),
    ],
)
def test_what_is_found(fn, axes):
    with jax.numpy_dtype_promotion("standard"):
        assert found(fn) == axes


def test_what_depends_on_the_logit_is_not_found():
    """A logit is that of a pair, so that a place which depends on it is, too."""
    of_logit = lambda s, b, h, q, k: TABLES[0][s.astype(jnp.int32)] + TABLES[0][h]
    scalars = [jax.ShapeDtypeStruct((), jnp.float32), *[jax.ShapeDtypeStruct((), jnp.int32)] * 4]
    lookups = lookups_of(of_logit, scalars, (None, "b", "bh", "bt", "bs"))
    assert lookups.axes == ("bh",) and lookups.reads == ((2,),)


def test_a_function_without_lookups_is_left_as_it_is():
    mask, score = MaskFn(lambda b, h, q, k: q >= k), ScoreFn(lambda s, b, h, q, k: s * 2)
    assert without_lookups(mask, True) is mask and without_lookups(score, True) is score


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (*B, T, H, D), (*B, S, K, D), (*B, S, K, D)
    return [jax.random.normal(key, x) for key, x in zip(keys, shapes)]


def call(q, k, v, slopes, lengths, platform):
    """Keys of the same document, up to a length for each batch element, and ALiBi."""
    mask = MaskFn(
        lambda b, h, q, k: (k < lengths[b]) & (jnp.asarray(IDS)[q] <= jnp.asarray(IDS)[k])
    )
    score = ScoreFn(lambda s, b, h, q, k: s - slopes[h] * abs(q - k).astype(s.dtype))
    how = Blockwise(
        AttentionMetadata(platform=platform, backend="tpu", blocksize_q=8, blocksize_k=16)
    )
    return attention(q, k, v, how, mask=mask, score=score, q_offset=5).attention_outputs


def test_values_and_gradients_of_lookups():
    q, k, v = arrays()
    slopes, lengths = jnp.linspace(0.1, 0.4, H), jnp.array([40, 17, 0, 33])

    @jax.jit
    def run(q, k, v, slopes, lengths):
        fn = lambda q, slopes: call(q, k, v, slopes, lengths, "interpret")
        out, pull = jax.vjp(fn, q, slopes)
        return out, pull(2 * out)

    out, (_, of_slopes) = run(q, k, v, slopes, lengths)
    at, to = np.arange(T)[:, None] + 5, np.arange(S)[None]
    seen = (to < np.asarray(lengths).reshape(*B, 1, 1, 1)) & (IDS[at] <= IDS[to])

    def want(slopes):
        bias = np.where(seen, -np.asarray(slopes)[:, None, None] * abs(at - to), -np.inf)
        return oracle.exact(q, k, v, lambda z: z / np.sqrt(D) + bias)[0]

    whole = want(slopes)
    np.testing.assert_allclose(out, whole, rtol=1e-5, atol=1e-5)
    for i in range(H):
        step = np.eye(H)[i] * 1e-4
        moved = (want(slopes + step) - want(slopes - step)) / 2e-4
        np.testing.assert_allclose(of_slopes[i], (2 * whole * moved).sum(), rtol=1e-3, atol=1e-3)


def test_lookups_run_in_the_kernels():
    slopes, lengths = jnp.ones(H), jnp.array([40, 17, 0, 33])
    loss = lambda *x: call(*x, lengths, "pallas").sum()
    assert kernels(jax.grad(loss, (0, 1, 2, 3)), *arrays(), slopes) >= 2


@pytest.mark.parametrize("backend", ["tpu", "cuda"] if jax.__version_info__ >= (0, 12) else ["tpu"])
def test_a_function_may_be_nothing_but_a_lookup(backend):
    """What it returns is found then, and was looked up again for each pair, so had no kernel."""
    dtype, keep, bias = jnp.bfloat16, jnp.asarray(TABLE[:S] > 2), jnp.asarray(TABLE)
    q, k, v = (x[0].astype(dtype) for x in arrays())
    mask, score = MaskFn(lambda b, h, q, k: keep[k]), ScoreFn(lambda s, b, h, q, k: bias[h])
    how = Blockwise(AttentionMetadata(platform="pallas", backend=backend, runtime_dtype=dtype))
    problem = jax.make_jaxpr(lambda *x: attention(*x, how, mask=mask, score=score))(q, k, v)
    assert "gather" not in str(problem).partition("visits=")[2]


def test_lookups_where_shard_map_tracks_what_varies():
    mesh = jax.make_mesh((2,), ("dp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    dp, rows = jax.sharding.PartitionSpec("dp"), jnp.array([40, 17])
    fn = lambda *x: call(*x, rows, "pallas")
    specs = dict(in_specs=(dp, dp, dp, jax.sharding.PartitionSpec()), out_specs=dp)
    q, k, v = (x[0] for x in arrays())
    assert kernels(jax.shard_map(fn, mesh=mesh, **specs), q, k, v, jnp.ones(H)) == 1


def test_lookups_beside_a_list_of_keys():
    """Each row of a list is a batch element there, with heads of its own."""
    q, k, v = (x[0] for x in arrays())
    slopes, how = jnp.ones(H), Blockwise(AttentionMetadata(platform="pallas", backend="tpu"))
    score = ScoreFn(lambda s, b, h, q, k: s - slopes[h] * abs(q - k).astype(s.dtype))
    listed = Selected(jnp.tile(jnp.arange(8, dtype=jnp.int32), (1, 1, T, 1)))
    fn = lambda *x: attention(*x, how, mask=listed, score=score).attention_outputs
    assert kernels(fn, q, k, v) == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_narrow_bias_beside_a_list_or_a_mask(dtype):
    """Scores read it wide, also where they are split."""
    q, k, v = (x[0] for x in arrays())
    bias = jax.random.normal(jax.random.key(5), (1, H, T, S)).astype(dtype)
    listed = Selected(jnp.tile(jnp.arange(8, dtype=jnp.int32), (1, 1, T, 1)))
    how = Blockwise(AttentionMetadata(platform="interpret", backend="tpu"))
    run = jax.jit(lambda *x: attention(*x, how, mask=listed | Causal(), bias=bias))
    at, to = np.arange(T)[:, None], np.arange(S)[None]
    add = lambda z: z / np.sqrt(D) + np.asarray(bias, np.float64)
    want = oracle.plain_problem(q, k, v, add, (to < 8) | (to <= at))
    bound.check(want, run(q, k, v).attention_outputs)


def test_lookups_of_a_ring():
    """Rows stay and keys rotate, with what was found for them."""
    q, k, v = (x[0] for x in arrays())
    k, v = k[:, :T], v[:, :T]
    mesh = jax.make_mesh((2,), ("sp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    mask = MaskFn(lambda b, h, q, k: jnp.asarray(IDS)[q] == jnp.asarray(IDS)[k])
    how = Ring(AttentionMetadata(platform="interpret", backend="tpu"), axis_name="sp", mesh=mesh)
    with jax.set_mesh(mesh):
        got = jax.jit(lambda *x: attention(*x, how, mask=mask).attention_outputs)(q, k, v)
    seen = IDS[:T, None] == IDS[None, :T]
    bound.check(oracle.plain_problem(q, k, v, visible=seen), got)


COUNTS = np.array([1, 2, 3, 0.5, 1, 0, 0, 0], np.float32)  # 0 where nobody sees a key
BLANK = np.array([1, 2, 3, 0.5, 1, np.nan, np.nan, np.nan], np.float32)
SINGULAR = {
    "log of a key's": lambda s, a, x, b, h, q, k: s + a * jnp.log(x[k]),
    "root of a query's": lambda s, a, x, b, h, q, k: s * a * jnp.sqrt(x[q]),
    "log of a row's": lambda s, a, x, b, h, q, k: s * (1 + a * jnp.log(x[b + 4])),
    "NaN": lambda s, a, x, b, h, q, k: s + a * x[k],
}


@pytest.mark.parametrize("backend", ["tpu", "triton"])
@pytest.mark.parametrize("name", SINGULAR)
def test_what_is_singular_where_a_mask_hides(backend, name):
    """The same in plain formulas, whose tables end before what is hidden."""
    x, fn = (BLANK if name == "NaN" else COUNTS), SINGULAR[name]
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 8, 1, 4)) for key in keys)
    how = Blockwise(AttentionMetadata(platform="interpret", backend=backend))
    mask = (QueryPadding if "query" in name else KeyPadding)(jnp.array([5, 0]))

    def total(a, x):
        score = ScoreFn(lambda s, b, h, q, k: fn(s, a, x, b, h, q, k))
        return jnp.sum(jnp.sin(attention(q, k, v, how, mask=mask, score=score).attention_outputs))

    def plain(a, x):
        s = jnp.einsum("td,sd->ts", q[0, :, 0], k[0, :, 0], precision="highest") / 2
        places = jnp.arange(8)
        rows, columns = (places[:5], places) if "query" in name else (places, places[:5])
        s = fn(s[: len(rows), : len(columns)], a, x, 0, 0, rows[:, None], columns[None])
        seen = v[0, : len(columns), 0]
        y = jnp.einsum("ts,sd->td", jax.nn.softmax(s, -1), seen, precision="highest")
        return jnp.sum(jnp.sin(y))

    args = jnp.float32(0.5), jnp.asarray(x)
    found, wanted = jax.grad(total, (0, 1))(*args), jax.grad(plain, (0, 1))(*args)
    for y, z in zip(found, wanted):
        np.testing.assert_allclose(y, z, atol=1e-5)
