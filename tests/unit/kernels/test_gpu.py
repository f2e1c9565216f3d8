"""The kernels for NVIDIA GPUs: chosen by static fields, found wherever they are called from, and
right when they are interpreted. More of their numbers: matrix/ with the target "gpu".
"""

import functools as ft
import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from _gpu_lowered import first_visits, kernels, text_of
from matrix import oracle, oracle_masks as om
from matrix.cases import covering, invalid
from matrix.test_conformance import check

from eqattn import (
    ALiBi,
    attention,
    AttentionMetadata,
    BlockCausal,
    Blockwise,
    Causal,
    Dense,
    KeyPadding,
    MaskFn,
    PrefixLM,
    Ragged,
    Ring,
    ScoreFn,
    Segments,
    SlidingWindow,
    T5Bias,
)
from eqattn.kernels import gpu
from eqattn.kernels.gpu import GPULowering


FAR = ScoreFn(lambda s, b, h, q, k: s + jnp.ones(64)[q * k % 64])  # no kernel looks that up
SHAPES = [(2, 40, 4, 16), (2, 48, 2, 16), (2, 48, 2, 8)]
newest = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the kernel is written for jax 0.12 and newer"
)


def metadata(**kw):
    return AttentionMetadata(**dict(runtime_dtype=jnp.bfloat16) | kw)


def arrays(dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, SHAPES)]


def call(q, k, v, strategy: Any = None, mask: Any = Causal(), **kw):
    strategy = strategy or Blockwise(metadata(platform="gpu"))
    return attention(q, k, v, strategy, mask=mask, **kw).attention_outputs


def summed(*args):
    return call(*args).astype(jnp.float32).sum()


@newest
@pytest.mark.parametrize(
    "count, f",
    [
        (1, call),
        (2, jax.grad(summed)),
        (3, jax.grad(summed, (0, 1, 2))),
        (3, jax.grad(jax.checkpoint(summed), (0, 1, 2))),
        (2, jax.vmap(jax.grad(summed))),
        (1, lambda q, k, v: jax.lax.scan(lambda c, _: (call(c, k, v), None), q, length=3)[0]),
        (1, lambda q, k, v: jax.jvp(lambda q: call(q, k, v), (q,), (q,))),
    ],
)
def test_kernels_are_found(count, f):
    """One of the fold, one for the gradients of queries and one for those of keys and values."""
    q, k, v = arrays()
    if f is not call and "vmap" in repr(f):
        q, k, v = (x[None] for x in (q, k, v))
    v = jnp.concatenate([v, v], -1)  # as wide as the query, for the scan
    assert kernels(f, q, k, v) == count


@newest
@pytest.mark.parametrize("shape", [(2, 4, 1, 48), (2, 4, 40, 1)])
def test_the_gradient_of_a_bias_of_one_side_runs_as_loops(shape):
    """And those of queries, keys and values as kernels beside it."""
    q, k, v = arrays()
    bias = jnp.ones(shape, jnp.bfloat16)
    f = jax.grad(lambda q, k, v, bias: call(q, k, v, bias=bias).astype(jnp.float32).sum(), (0, 3))
    assert kernels(f, q, k, v, bias) == 2


@newest
def test_results_have_the_dtype_of_the_caller():
    """No float32 numerators, and no float32 gradients, are written by kernels."""
    q, k, v = arrays()
    text = text_of(jax.grad(summed, (0, 1, 2)), q, k, v)
    outputs = [line.rpartition("->")[2] for line in first_visits(text)]
    assert len(outputs) == 3
    for line in outputs:
        wide = re.findall(r"tensor<([0-9x]+)xf32>", line)
        assert all(shape.count("x") == 1 for shape in wide), line  # logsumexps


@newest
@pytest.mark.parametrize("mask, second", [(Causal(), 1), (None, 0)])
def test_second_visits(mask, second):
    """They are of what some row does not see, so there is none where all pairs are visible."""
    text = text_of(ft.partial(call, mask=mask), *arrays())
    assert len(first_visits(text)) == 1
    assert text.count("@mosaic_gpu_v2") == 1 + second


@newest
def test_what_lies_behind_a_block_reaches_no_row():
    """A tile of a block that is no whole tiles holds keys of the next one. Here no row of the first
    block sees them, and no pair of a visited block is masked.
    """
    how = AttentionMetadata(
        platform="interpret",
        backend="cuda",
        runtime_dtype=jnp.bfloat16,
        blocksize_q=64,
        blocksize_k=192,
    )
    random = np.random.RandomState(0)
    q, k, v = (jnp.asarray(random.randn(1, n, 1, 64), jnp.bfloat16) for n in (64, 384, 384))
    hidden = (jnp.arange(384) >= 192)[:, None, None]

    @jax.jit
    def run(k, v):
        f = lambda *xs: attention(*xs, Blockwise(how), mask=BlockCausal(192)).attention_outputs
        out, pull = jax.vjp(f, q, k, v)
        return out, pull(out)

    clean = run(k, v)
    dirty = run(*(jnp.where(hidden, jnp.nan, x).astype(x.dtype) for x in (k, v)))
    for x, y in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean)):
        np.testing.assert_array_equal(x, y)


@newest
def test_exported_for_a_gpu():
    """Written where there is no GPU, and read again, the program still has its kernel."""
    unchecked = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    exported = jax.export.export(jax.jit(call), platforms=["cuda"], disabled_checks=unchecked)
    read = jax.export.deserialize(exported(*arrays()).serialize())
    assert read.platforms == ("cuda",)
    assert len(first_visits(read.mlir_module())) == 1


@newest
@pytest.mark.parametrize("platform, backend", [("gpu", "any"), ("gpu", "cuda"), ("pallas", "cuda")])
def test_static_fields_choose(platform, backend):
    chosen = Blockwise(metadata(platform=platform, backend=backend))
    assert kernels(ft.partial(call, strategy=chosen), *arrays()) == 1


@pytest.mark.parametrize("backend", ["gpu", "cuda", "rocm"])
@pytest.mark.parametrize("chip", ["", "8.0", "9.0", "10.0"])
def test_kernels_by_default_are_those_measured(backend, chip, monkeypatch):
    """On Hopper, and there for what the kernels can do. All else runs in loops with their blocks."""
    monkeypatch.setattr(gpu, "capability", lambda: chip)
    automatic = Blockwise(metadata(platform="auto", backend=backend, runtime_dtype=None))
    run = ft.partial(call, strategy=automatic)
    measured = chip == "9.0" and backend != "rocm"
    newest = jax.__version_info__ >= (0, 12)
    assert kernels(run, *arrays()) == (measured and newest)
    assert kernels(run, *arrays(jnp.float32)) == 0
    assert kernels(ft.partial(run, score=T5Bias(jnp.ones((8, 4)))), *arrays()) == 0
    assert kernels(ft.partial(run, score=FAR), *arrays()) == 0
    for sizes in ((264, 264), (64, 264), (64, 0)):
        q, v = (jnp.zeros((1, 8, 1, n), jnp.bfloat16) for n in sizes)
        assert kernels(run, q, q, v) == kernels(jax.grad(lambda *x: run(*x).sum()), q, q, v) == 0
    assert automatic.supports(mask=Causal())
    fixed = Blockwise(metadata(platform="auto", backend=backend), bitwise=True)
    assert kernels(ft.partial(call, strategy=fixed), *arrays()) == 0


def test_other_devices_have_none():
    rocm = Blockwise(metadata(platform="gpu", backend="rocm"))
    with pytest.raises(ValueError, match="no Pallas kernel for blockwise on rocm.*'xla' or 'auto'"):
        call(*arrays(), strategy=rocm)
    assert "on rocm" in rocm.supports(mask=Causal()).reason
    with pytest.raises(ValueError, match="no Pallas kernel for dense on gpu"):
        call(*arrays(), strategy=Dense(metadata(platform="gpu")))
    for strategy in (Blockwise, Ragged):
        with pytest.raises(ValueError, match="on an NVIDIA GPU cannot run on .*cpu"):
            call(*arrays(), strategy=strategy(metadata(platform="gpu")))


def test_what_there_is_no_kernel_for():
    q, k, v = arrays()
    for platform in ("interpret", "pallas"):
        strategy = Blockwise(metadata(platform=platform, backend="cuda"))
        with pytest.raises(
            ValueError, match="on an NVIDIA GPU .*bfloat16 and float16, not float32"
        ):
            call(*arrays(jnp.float32), strategy=strategy)
        if jax.__version_info__ >= (0, 12):
            wide = jnp.zeros((1, 8, 1, 264), jnp.bfloat16)
            with pytest.raises(ValueError, match="up to 256 numbers, not 264 and 264"):
                kernels(ft.partial(call, strategy=strategy), wide, wide, wide)
            with pytest.raises(ValueError, match="has a (gather|dynamic_slice), which the comp"):
                kernels(ft.partial(call, strategy=strategy, score=FAR), q, k, v)
        else:
            with pytest.raises(ValueError, match="written for jax 0.12"):
                kernels(ft.partial(call, strategy=strategy), q, k, v)
    assert not Blockwise(metadata(platform="gpu")).supports(score=FAR)


def test_blocks_are_what_a_program_has():
    from eqattn._sweep.block_sizes import BlockRequest, BlockSizes

    def chosen(group, head_dim):
        request = BlockRequest(4096, 4096, group, jnp.bfloat16, head_dim, in_place=False)
        return GPULowering("pallas").choose_blocks(request)

    assert chosen(1, 128) == BlockSizes(128, 128)
    assert chosen(4, 64) == BlockSizes(32, 128)
    assert chosen(3, 256) == BlockSizes(128, 64)
    assert chosen(32, 128) == BlockSizes(8, 128)


@newest
def test_the_compiler_does_not_split_the_kernel():
    q, k, v = arrays()
    mesh = jax.make_mesh((2,), ("dp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in (q, k, v)]
    with pytest.raises(ValueError, match="call under jax.set_mesh.*partition_axis.*shard_map"):
        kernels(call, *args)
    own = jax.shard_map(call, mesh=mesh, in_specs=place.spec, out_specs=place.spec, check_vma=False)
    assert kernels(own, *args) == 1


@newest
@pytest.mark.parametrize("check_vma", [False, True])
def test_in_every_hop_of_a_ring(check_vma):
    mesh = jax.make_mesh((4,), ("sp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    place = jax.sharding.PartitionSpec(None, "sp")
    ring = ft.partial(call, strategy=Ring(metadata(platform="gpu"), axis_name="sp"))
    own = jax.shard_map(ring, mesh=mesh, in_specs=place, out_specs=place, check_vma=check_vma)
    assert kernels(own, *arrays()) >= 2


@newest
def test_the_carry_of_earlier_hops_goes_on():
    q, k, v = arrays()
    mesh = jax.make_mesh((2,), ("sp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    place = jax.sharding.PartitionSpec(None, "sp")
    ring = Ring(metadata(platform="interpret", backend="cuda"), axis_name="sp")
    own = jax.shard_map(
        ft.partial(call, strategy=ring),
        mesh=mesh,
        in_specs=place,
        out_specs=place,
        check_vma=False,
    )
    got = jax.jit(own)(q, k, v).astype(jnp.float32)
    wide = [np.asarray(x).astype(np.float64) for x in (q, k, v)]
    problem = oracle.Problem(*wide, scale=16**-0.5, mask=om.causal(40, 48, 0, 0))
    np.testing.assert_allclose(got, oracle.forward(problem).out, rtol=0, atol=2e-2)


PLAIN = covering(2)[0] | dict.fromkeys(
    ("bias", "score", "sinks", "cap", "scale", "offset", "mask"), "none"
)
PLAIN["operands"] = "default"
PLAIN |= dict(lead=(), dtype="bfloat16", target=("gpu", 1), dropout=0.0, transform="vmap")
PLAIN |= dict(length=(37, 67), block=(16, 16), heads=(4, 2), dims=(8, 8))


@newest
@pytest.mark.parametrize(
    "case",
    [
        dict(mask="and", bias="heads", sinks="H", cap="float", dims=(4, 7), lead=(2,)),
        dict(mask="window", score="alibi", dropout=0.25, block=(5, 3), dtype="float16"),
        dict(
            mask="dense",
            bias="unbatched",
            score="alibi",
            transform="jit",
            lead=(2,),
            block=(37, 32),
        ),
    ],
    ids=str,
)
def test_values(case):
    case = PLAIN | case
    assert invalid(case) is None
    check(case)


def exact(q, k, v, visible, **kw):
    """The output where nothing is wrong, and which of its rows see what is not finite."""
    group = q.shape[2] // k.shape[2]
    wide = [np.asarray(x).astype(np.float64) for x in (q, k, v)]
    fine = [np.where(np.isfinite(x), x, 0.0) for x in wide]
    problem = oracle.Problem(*fine, scale=q.shape[-1] ** -0.5, mask=visible, **kw)
    bad = np.repeat(~np.isfinite(wide[2]).all(-1) | ~np.isfinite(wide[1]).all(-1), group, 2)
    seen = np.broadcast_to(visible, (len(q), q.shape[2], *visible.shape[-2:]))
    return oracle.forward(problem).out, np.einsum("bhts,bsh->bth", seen, bad) > 0


def interpreted(*args, **kw):
    strategy = Blockwise(metadata(platform="interpret", backend="cuda"))
    return jax.jit(ft.partial(call, strategy=strategy, **kw))(*args).astype(jnp.float32)


# The first has a warpgroup for copies. Of the other, a computing warpgroup copies.
DIMS = pytest.mark.parametrize("dim", [16, 144])


@newest
@DIMS
def test_what_is_not_finite_reaches_the_rows_that_see_it(dim):
    """Of several programs, tiles of keys and heads of a group, and where blocks are padded."""
    t, s = 140, 200
    q, k, v = (jax.random.normal(jax.random.key(i), (1, n, h, dim), jnp.bfloat16)
               for i, n, h in ((0, t, 4), (1, s, 2), (2, s, 2)))  # fmt: skip
    v = v.at[0, 60, 1, 3].set(jnp.nan).at[0, 130, 0, 1].set(jnp.inf)
    k, v = k.at[0, 150:].set(jnp.nan), v.at[0, 150:].set(jnp.nan)
    mask, visible = SlidingWindow(20, 5), om.window(t, s, 20, 5)
    got = interpreted(q, k, v, mask=mask & KeyPadding(150))
    want, bad = exact(q, k, v, visible & (np.arange(s) < 150))
    assert bad.any() and not bad.all()
    np.testing.assert_array_equal(np.isnan(got), np.repeat(bad[..., None], dim, -1))
    assert np.abs(np.where(bad[..., None], 0, got - want)).max() < 2e-2


@newest
@DIMS
@pytest.mark.parametrize("value", [1.0, np.nan])
def test_warpgroups_do_not_race(value, dim, monkeypatch):
    """For tiles in shared memory, also where keys come a second time."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    from eqattn.kernels.gpu import _mosaic

    mosaic: Any = _mosaic.plgpu
    params = ft.partial(mosaic.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(mosaic, "InterpretGPUParams", params)
    q, k, v = (
        jax.random.normal(jax.random.key(i), (1, 500, 1, dim), jnp.bfloat16) for i in range(3)
    )
    mask = Causal() & Segments(jnp.arange(500, dtype=jnp.int32) // 200)
    got = interpreted(q, k, v.at[0, 300].set(value), mask=mask)
    assert jnp.isnan(got).any() == np.isnan(value)
    assert not gpu_callbacks.get_races().races_found


@newest
@pytest.mark.slow
@pytest.mark.parametrize("value", [1.0, np.nan])
def test_warpgroups_do_not_race_in_gradients(value, monkeypatch):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    from eqattn.kernels.gpu import _mosaic

    mosaic: Any = _mosaic.plgpu
    params = ft.partial(mosaic.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(mosaic, "InterpretGPUParams", params)
    q, k, v = (
        jax.random.normal(jax.random.key(i), (1, 300, 1, 16), jnp.bfloat16) for i in range(3)
    )
    f = lambda *xs: interpreted(*xs, mask=Causal()).sum()
    found = jax.grad(f, (0, 1, 2))(q.at[0, 200].set(value), k.at[0, 250].set(value), v)
    assert all(jnp.isnan(x).any() == np.isnan(value) for x in found)
    assert not gpu_callbacks.get_races().races_found


@newest
def test_what_is_masked_reaches_no_gradient():
    """A key or a value that is not finite, and a query: gradients are bitwise those without it,
    but for the keys that this query sees.
    """
    t, s = 130, 140
    q, k, v, g = (jax.random.normal(jax.random.key(i), (1, n, 1, 16), jnp.bfloat16)
                  for i, n in enumerate((t, s, s, t)))  # fmt: skip
    mask, wrong = SlidingWindow(20, 5) & KeyPadding(120), jnp.nan

    @jax.jit
    def gradients(q, k, v):
        f = lambda *xs: interpreted(*xs, mask=mask)
        return jax.vjp(f, q, k, v)[1](g.astype(jnp.float32))

    want = gradients(q, k.at[0, 120:].set(0), v.at[0, 120:].set(0))
    got = gradients(q.at[0, 70].set(wrong), k.at[0, 120:].set(wrong), v.at[0, 120:].set(wrong))
    seen = [np.arange(t) == 70, *[abs(np.arange(s) - 62.5) < 13] * 2]  # the keys 50 to 75
    for x, y, nan in zip(want, got, seen):
        x, y = (np.asarray(z.astype(jnp.float32))[0, :, 0] for z in (x, y))
        np.testing.assert_array_equal(np.isnan(y).any(-1), nan)
        np.testing.assert_array_equal(x[~nan], y[~nan])
    assert not np.asarray(got[1].astype(jnp.float32))[0, 120:].any()


@newest
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_that_is_not_positive(scale):
    """The kernel multiplies maxima with it, so that it must have its sign elsewhere."""
    q, k, v = arrays()
    fields = dict(platform="interpret", backend="cuda", softmax_scale=jnp.float32(scale))
    got = jax.jit(ft.partial(call, strategy=Blockwise(metadata(**fields))))(q, k, v)
    wide = [np.asarray(x).astype(np.float64) for x in (q, k, v)]
    problem = oracle.Problem(*wide, scale=scale, mask=om.causal(40, 48, 0, 0))
    np.testing.assert_allclose(got.astype(jnp.float32), oracle.forward(problem).out, atol=2e-2)


IDS = np.repeat(np.arange(3, dtype=np.int32), 16)
MASKS = {
    "causal": Causal(),
    "segments": Segments(jnp.asarray(IDS[:40]), jnp.asarray(IDS)),
    "not": ~SlidingWindow(3, 5) | KeyPadding(jnp.array([7, 9])),
    "blocks": BlockCausal(7),
    "prefix": PrefixLM(jnp.array([7, 9])),
    "function": MaskFn(lambda b, h, q, k: ((q * 7 + k * 3) % 5 < 3) & (b + h != 2)),
}


@newest
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("score", [None, ALiBi(jnp.ones(4))], ids=["plain", "alibi"])
def test_masks_are_inlined(name, score):
    """Mosaic takes them: it verifies a program when it lowers it."""
    strategy = Blockwise(metadata(platform="gpu", logits_soft_cap=20.0))
    f = ft.partial(call, strategy=strategy, mask=MASKS[name], score=score)
    assert kernels(f, *arrays()) == 1


@newest
def test_instructions_that_the_compiler_would_not_choose():
    """A conjunction of predicates that only selects is one, not a selection for each; of one under
    a negation or of one range, the compiler knows better. And `1 / x` in the soft cap takes one.
    """
    capped = Blockwise(metadata(platform="gpu", logits_soft_cap=20.0))
    packed = Causal() & MASKS["segments"]
    assert "and.pred" in text_of(ft.partial(call, mask=packed), *arrays())
    for mask in (MASKS["not"], SlidingWindow(3, 5)):
        assert "and.pred" not in text_of(ft.partial(call, mask=mask), *arrays())
    assert "rcp.approx" not in text_of(ft.partial(call, mask=packed), *arrays())
    assert "rcp.approx" in text_of(ft.partial(call, strategy=capped), *arrays())
