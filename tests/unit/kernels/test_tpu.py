"""The kernels for TPUs: chosen by static fields, found wherever they are called from, free of races,
and compiled by the compiler of TPUs. Their numbers: matrix/ with the target "tpu".
"""

import functools as ft

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from _tpu_compile import CASES, compile_all, expected
from _tpu_lowered import kernels
from _tpu_races import without_races
from _turns import recorded
from matrix import oracle, oracle_masks as om
from matrix.cases import covering, invalid
from matrix.oracle import exact
from matrix.test_conformance import check
from measure.tpu_report.chips import CHIPS

from eqattn import (
    attention,
    AttentionMetadata,
    BlockCausal,
    Blockwise,
    Causal,
    Dense,
    KeyPadding,
    Ragged,
    Ring,
    ScoreFn,
    SlidingWindow,
    T5Bias,
)
from eqattn._sweep.block_sizes import BlockRequest
from eqattn._sweep.grid import ROW
from eqattn.kernels.tpu import _backward_step, _chip, TPULowering


SHAPES = [(2, 40, 4, 16), (2, 48, 2, 16), (2, 48, 2, 8)]


def metadata(**kw):
    given = dict(runtime_dtype=jnp.float32, blocksize_q=8, blocksize_k=16)
    return AttentionMetadata(**given | kw)


def arrays(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, SHAPES)]


def call(q, k, v, strategy=None, mask=Causal(), score=None):
    strategy = strategy or Blockwise(metadata(platform="tpu"))
    return attention(q, k, v, strategy, mask=mask, score=score).attention_outputs


def summed(q, k, v, slopes=None):
    score = (
        None if slopes is None else ScoreFn(lambda s, b, h, q, k: s + slopes[h] * jnp.cos(q - k))
    )
    return call(q, k, v, score=score).sum()


SLOPES = jnp.ones(4)


@pytest.mark.parametrize(
    "f, count",
    [
        (call, 1),
        (jax.grad(summed), 2),
        (jax.grad(summed, (1, 2)), 2),
        (jax.grad(summed, (0, 1, 2)), 2),
        (jax.grad(jax.checkpoint(summed), (0, 1, 2)), 2),
        (jax.vmap(jax.grad(summed)), 2),
        (lambda q, k, v: jax.lax.scan(lambda c, _: (call(c, k, v), None), q, length=3)[0], 1),
        (lambda q, k, v: jax.jvp(lambda q: call(q, k, v), (q,), (q,)), 2),
        (lambda q, k, v: jax.linearize(call, q, k, v)[1](q, k, v), 2),
        (lambda *x: call(*x, score=ScoreFn(lambda s, b, h, q, k: s + jnp.cos(q - k))), 1),
        (jax.grad(lambda *x: summed(*x, SLOPES)), 2),
    ],
)
def test_the_kernel_is_found(f, count):
    q, k, v = arrays()
    if f is not call and "vmap" in repr(f):
        q, k, v = (x[None] for x in (q, k, v))
    v = jnp.concatenate([v, v], -1)  # as wide as the query, for the scan
    assert kernels(f, q, k, v) == count


@pytest.mark.parametrize(
    "tokens, fused, count", [(4096, True, 2), (4096, False, 3), (65536, True, 3)]
)
def test_one_visit_gives_all_gradients_if_those_of_the_queries_fit(tokens, fused, count):
    metadata = AttentionMetadata(platform="tpu", runtime_dtype=jnp.bfloat16)
    strategy = Blockwise(metadata, fused_backward=fused)
    loss = lambda *x: call(*x, strategy=strategy).astype(jnp.float32).sum()
    args = [jax.ShapeDtypeStruct((1, tokens, 1, 128), jnp.bfloat16)] * 3
    assert kernels(jax.grad(loss, (0, 1, 2)), *args) == count


def test_a_list_that_is_known_holds_visible_blocks_only(monkeypatch):
    """Of 2^20 pairs of blocks, 2^11 are visible. Made on the device, the list would hold all."""
    turned = recorded(monkeypatch)
    args = [jax.ShapeDtypeStruct((1, 2**20, 1, 128), jnp.bfloat16)] * 3
    how = Blockwise(AttentionMetadata(platform="auto", backend="tpu", runtime_dtype=jnp.bfloat16))
    near = lambda *x: call(*x[:3], how, Causal() & SlidingWindow(1000, 0))
    assert kernels(near, *args) == 1 and turned == []
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    assert kernels(lambda *x: call(*x[:3], how, KeyPadding(x[3])), *args, lengths) == 1
    assert turned == [ROW]


@pytest.mark.parametrize("f, count", [(call, 1), (jax.grad(summed, (0, 1, 2)), 2)])
def test_exported_for_a_tpu(f, count):
    """Written where there is no TPU, and read again, the program still has its kernels."""
    exported = jax.export.export(jax.jit(f), platforms=["tpu"])(*arrays())
    read = jax.export.deserialize(exported.serialize())
    assert read.platforms == ("tpu",)
    assert read.mlir_module().count("@tpu_custom_call") == count


@pytest.mark.slow
def test_dropout_is_not_in_the_denominator():
    """In the form of chips that add up probabilities by a product, see matrix/."""
    plain = dict.fromkeys(("bias", "score", "sinks", "cap", "scale", "offset"), "none")
    case = covering(2)[0] | plain | dict(mask="causal", length=(37, 37), block=(16, 16), lead=())
    case |= dict(heads=(2, 1), dims=(8, 8), dtype="bfloat16", target=("tpu", 1))
    case |= dict(transform="jit", dropout=0.25, operands="default")
    assert invalid(case) is None
    check(case)


def test_static_fields_choose():
    q, k, v = arrays()
    chosen = lambda **kw: kernels(ft.partial(call, strategy=Blockwise(metadata(**kw))), q, k, v)
    assert chosen(platform="auto", backend="tpu") == chosen(platform="pallas", backend="tpu") == 1
    assert chosen(platform="xla", backend="tpu") == chosen(platform="auto", backend="cpu") == 0
    assert Blockwise(metadata(platform="tpu")).selected_forward() == "forward_tpu"


def test_one_trace_for_equal_fields():
    traces = []

    @jax.jit
    def f(strategy, q, k, v):
        traces.append(strategy.metadata.platform)
        return call(q, k, v, strategy)

    q, k, v = arrays()
    for platform in ("interpret", "xla", "interpret", "xla"):
        f(Blockwise(metadata(platform=platform, softmax_scale=jnp.array(0.3))), q, k, v)
        f(Blockwise(metadata(platform=platform, softmax_scale=jnp.array(0.4))), q, k, v)
    assert [str(p) for p in traces] == ["interpret", "xla"]


def test_what_there_is_no_kernel_for():
    q, k, v = arrays()
    with pytest.raises(ValueError, match="platform='pallas' on a TPU cannot run on .*cpu"):
        call(q, k, v)
    with pytest.raises(ValueError, match="bfloat16 and float32, not float16.*platform='auto'"):
        call(*arrays(jnp.float16))
    bias = jnp.ones(100)
    score = ScoreFn(lambda s, b, h, q, k: s + bias[q * k])
    for fn, reason in (
        (score.fn, "has a (gather|dynamic_slice)"),
        (lambda s, b, h, q, k: jnp.sinh(s), "has a sinh"),
        (lambda s, b, h, q, k: s.astype(jnp.bfloat16), "has numbers of bfloat16"),
    ):
        for platform in ("interpret", "tpu"):
            name = "interpret" if platform == "interpret" else "pallas"
            with pytest.raises(ValueError, match=f"{name}.*a ScoreFn {reason}"):
                attention(q, k, v, Blockwise(metadata(platform=platform)), score=ScoreFn(fn))
    automatic = Blockwise(metadata(platform="auto", backend="tpu"))
    assert kernels(lambda *x: attention(*x, automatic, score=score).attention_outputs, q, k, v) == 0
    assert kernels(ft.partial(call, strategy=automatic), *arrays(jnp.float16)) == 0
    t5, at = T5Bias(jnp.ones((8, 4))), jnp.arange(q.shape[1])  # positions that need not count up

    def placed(*x, platform):
        strategy = Blockwise(metadata(platform=platform, backend="tpu"))
        return attention(*x, strategy, score=t5, q_positions=at).attention_outputs

    assert kernels(ft.partial(placed, platform="auto"), q, k, v) == 0
    with pytest.raises(ValueError, match="has a gather.*platform='auto'"):
        kernels(ft.partial(placed, platform="pallas"), q, k, v)
    assert not Dense(metadata()).supports(platform="tpu")
    with pytest.raises(ValueError, match="no Pallas kernel for dense"):
        call(q, k, v, Dense(metadata(platform="interpret")))


def test_the_compiler_does_not_split_kernels():
    q, k, v = arrays()
    mesh = jax.make_mesh((2,), ("dp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in (q, k, v)]
    automatic = Blockwise(metadata(platform="auto", backend="tpu"))
    assert kernels(ft.partial(call, strategy=automatic), *args) == 0
    with pytest.raises(ValueError, match="call under jax.set_mesh.*partition_axis.*shard_map"):
        kernels(call, *args)
    own = jax.shard_map(call, mesh=mesh, in_specs=place.spec, out_specs=place.spec, check_vma=False)
    assert kernels(own, *args) == 1


def ring_of(platform, check_vma):
    """Attention around a ring of four in the user's own shard_map."""
    mesh = jax.make_mesh((4,), ("sp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    place = jax.sharding.PartitionSpec(None, "sp")
    ring = ft.partial(call, strategy=Ring(metadata(platform=platform), axis_name="sp"))
    specs = dict(mesh=mesh, in_specs=place, out_specs=place)
    return jax.shard_map(ring, **specs, check_vma=check_vma)


@pytest.mark.parametrize("turned", [pytest.param(False, marks=pytest.mark.slow), True])
def test_inside_a_ring(turned, monkeypatch):
    """The kernels go on with the Carry, and with the sums, of the hops before."""
    monkeypatch.setattr(_backward_step, "suits", lambda step: turned)
    q, k, v = arrays()

    @jax.jit
    def run(*args):
        out, transpose = jax.vjp(ring_of("interpret", check_vma=False), *args)
        return out, transpose(2 * out)

    out, got = run(q, k, v)
    wide = [np.float64(x) for x in (q, k, v)]
    problem = oracle.Problem(*wide, scale=16**-0.5, mask=om.causal(40, 48, 0, 0))
    want = oracle.forward(problem)
    grads = oracle.vjp(problem, 2 * want.out, np.zeros_like(want.lse))
    np.testing.assert_allclose(out, want.out, rtol=0, atol=2e-6)
    for x, name in zip(got, "qkv", strict=True):
        np.testing.assert_allclose(x, grads[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("check_vma", [False, True])
def test_found_inside_a_ring(check_vma):
    q, k, v = arrays()
    f = ring_of("tpu", check_vma)
    assert kernels(f, q, k, v) >= 2  # at home and at the hops
    assert kernels(jax.grad(lambda *x: f(*x).sum(), (0, 1, 2)), q, k, v) >= 4
    if check_vma:
        with pytest.raises(ValueError, match="check_vma=False"):
            ring_of("interpret", check_vma)(q, k, v)


@pytest.mark.parametrize("mask", [Causal() & SlidingWindow(9, 2), KeyPadding(jnp.array([7, 33]))])
def test_races_and_memory_that_nothing_wrote(mask):
    """Interpreted with threads for the copies and NaN in fresh memory."""
    q, k, v = (x[:, :24] for x in arrays())

    def f(platform):
        loss = lambda *x: (call(*x, Blockwise(metadata(platform=platform)), mask) ** 2).sum()
        return jax.value_and_grad(loss, (0, 1, 2))

    got, count = without_races(f("interpret"), q, k, v)
    assert count == 2
    want = jax.tree.leaves(f("xla")(q, k, v))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


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


def test_lists_that_scalar_memory_cannot_hold():
    """Those of a hop of a ring, and of a step over caches. Others are visited in turns."""
    q, k, v = (jnp.zeros((1, 1024, 1, 8)) for _ in range(3))
    small = dict(blocksize_q=1, blocksize_k=1)
    given = lambda kind, mask=Causal(), **kw: ft.partial(
        call, strategy=kind(metadata(**kw, **small)), mask=mask
    )
    assert kernels(given(Blockwise, platform="tpu"), q, k, v) == 1
    mesh = jax.make_mesh((2,), ("sp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match="list of 262144 pairs.*larger block sizes"):
            kernels(given(Ring, platform="tpu"), q, k, v)
        assert kernels(given(Ring, platform="auto", backend="tpu"), q, k, v) == 0
    cached = [jax.ShapeDtypeStruct((512, n, 1, 8), jnp.float32) for n in (1, 2**13, 2**13)]
    with pytest.raises(ValueError, match="pairs of blocks is too long"):
        kernels(given(Ragged, platform="tpu", mask=KeyPadding(jnp.arange(512))), *cached)


def test_the_list_of_a_ring_is_that_of_one_hop():
    q, k, v = (jnp.zeros((1, 1024, 1, 8)) for _ in range(3))
    mesh = jax.make_mesh((4,), ("sp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    ring = Ring(metadata(platform="tpu", blocksize_q=1, blocksize_k=1))
    with jax.set_mesh(mesh):
        assert kernels(ft.partial(call, strategy=ring), q, k, v) >= 2


def test_rows_that_see_nothing_beside_full_blocks():
    """Then no block is partial, and the kernel has no masks."""
    q, k, v = arrays()
    impl = Blockwise(metadata(platform="interpret"))
    later = ~BlockCausal(16)  # queries from 32 on see nothing
    output = attention(q, k, v, impl, mask=later, return_logsumexp=True)
    visible = np.arange(48) // 16 > np.arange(40)[:, None] // 16
    out, lse, _ = exact(q, k, v, visible=visible)
    np.testing.assert_allclose(output.attention_outputs, out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(output.logsumexp, lse, rtol=1e-5, atol=1e-5)
    assert np.isneginf(lse[:, 32:]).all()


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_garbage_stays_where_it_is_masked(garbage):
    q, k, v = arrays()
    lengths = jnp.array([7, 33])
    hidden = jnp.arange(48)[None, :, None, None] >= lengths[:, None, None, None]
    bad = lambda x: jnp.where(hidden, garbage, x)
    strategy = Blockwise(metadata(platform="interpret"))
    f = lambda q, k, v: (call(q, k, v, strategy, KeyPadding(lengths)) ** 2).sum()
    clean = jax.value_and_grad(f, (0, 1, 2))(q, k, v)
    dirty = jax.value_and_grad(f, (0, 1, 2))(q, bad(k), bad(v))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    # One that is seen makes the rows that see it NaN, and no others.
    seen = v.at[0, 5, 0, 3].set(garbage)
    out = call(q, k, seen, strategy, Causal())
    nan = np.isnan(np.asarray(out)).any(-1)
    assert nan[0, 5:, :2].all() and not nan[0, :5].any() and not nan[0, :, 2:].any()
    assert not nan[1].any()


@pytest.mark.parametrize(
    "chip, cases",
    [
        pytest.param(
            "v5e",
            ("causal", "segments", "bias", "grouped", "tail", "t5, grouped", "decode", "int8 pages")
            + ("prompts, pages, wide",),
            marks=pytest.mark.slow,
        ),
        (
            "v6e",
            ("causal", "drafts", "t5", "functions of predicates", "keys under a score", "tables")
            + ("narrow numbers", "bias, long"),
        ),
        pytest.param(
            "v6e",
            ("lengths", "cap", "float32", "long", "booleans, grouped", "one query", "rows")
            + ("latent prompts, pages",),
            marks=pytest.mark.slow,
        ),
        pytest.param("v5p", ("window", "sinks", "decode"), marks=pytest.mark.slow),
        pytest.param("v7x", ("causal", "wide"), marks=pytest.mark.slow),
    ],
)
def test_compiled_for_a_tpu(chip, cases):
    for case, got in compile_all(chip, cases).items():
        assert got.get("kernels", -1) >= expected(case), got
        if case == "bias, long":  # Nothing around the kernels has a number for each pair.
            assert got["copied"] < 4096**2, got


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_every_feature_compiled_for_a_tpu(chip):
    reports = compile_all(chip, ())
    assert set(reports) == set(CASES)
    for case, got in reports.items():
        assert got.get("kernels", -1) >= expected(case), got
