"""The kernel in Pallas Triton: chosen by static fields, found wherever it is called from, and right
when it is interpreted. More of its numbers: matrix/ with the target "triton".
"""

import functools as ft
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _triton_lowered import first_visits, kernels, text_of
from matrix import bound, oracle, oracle_masks as om

from eqattn import (
    ALiBi,
    attention,
    AttentionMetadata,
    BlockCausal,
    Blockwise,
    Causal,
    KeyPadding,
    MaskFn,
    PrefixLM,
    Ring,
    ScoreFn,
    Segments,
    SlidingWindow,
)
from eqattn.kernels import gpu, lowering_for
from eqattn.kernels.gpu import GPULowering, triton
from eqattn.kernels.gpu.triton import TritonLowering


SHAPES = [(2, 40, 4, 16), (2, 48, 2, 16), (2, 48, 2, 8)]


def metadata(**kw: Any):
    fields: dict[str, Any] = dict(platform="triton", runtime_dtype=jnp.bfloat16)
    return AttentionMetadata(**fields | kw)


def arrays(dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, SHAPES)]


def call(q, k, v, strategy: Any = None, mask: Any = Causal(), **kw):
    strategy = strategy or Blockwise(metadata())
    return attention(q, k, v, strategy, mask=mask, **kw).attention_outputs


def summed(*args):
    return call(*args).astype(jnp.float32).sum()


@pytest.mark.parametrize(
    "count, f",
    [
        (1, call),
        (3, jax.grad(summed, (0, 1, 2))),
        (2, jax.vmap(jax.grad(summed))),
        (1, lambda q, k, v: jax.lax.scan(lambda c, _: (call(c, k, v), None), q, length=3)[0]),
        (1, lambda q, k, v: jax.jvp(lambda q: call(q, k, v), (q,), (q,))),
    ],
    ids=["call", "grad", "vmap", "scan", "jvp"],
)
def test_kernels_are_found(count, f):
    """One of the fold, one for the gradients of queries and one for those of keys and values."""
    q, k, v = arrays()
    q, k, v = (x[None] for x in (q, k, v)) if "vmap" in repr(f) else (q, k, v)
    v = jnp.concatenate([v, v], -1)  # as wide as the query, for the scan
    assert kernels(f, q, k, v) == count


def test_gradients_without_a_kernel_run_as_loops():
    """That of a bias of keys, beside those of queries, keys and values; and those of float32."""
    q, k, v = arrays()
    bias = jnp.ones((2, 4, 1, 48), jnp.bfloat16)
    f = lambda q, k, v, bias: call(q, k, v, bias=bias).astype(jnp.float32).sum()
    assert kernels(jax.grad(f, (0, 3)), q, k, v, bias) == 2
    exact = lambda q, k, v: call(q, k, v, Blockwise(metadata(runtime_dtype=None))).sum()
    assert kernels(jax.grad(exact), *arrays(jnp.float32)) == 1


@pytest.mark.parametrize(
    "platform, backend", [("triton", "any"), ("gpu", "triton"), ("triton", "cuda")]
)
def test_static_fields_choose(platform, backend):
    chosen = metadata(platform=platform, backend=backend)
    assert (chosen.platform, chosen.backend) == ("pallas", "triton")
    strategy = Blockwise(chosen)
    assert strategy.selected_forward() == "forward_cuda"
    assert kernels(ft.partial(call, strategy=strategy), *arrays()) == 1


@pytest.mark.parametrize("capability, kind", [("8.0", TritonLowering), ("9.0", GPULowering), ("10.0", TritonLowering), (None, GPULowering)])  # fmt: skip
def test_the_chip_of_the_process_chooses(capability, kind, monkeypatch):
    """Between the kernels of `platform="gpu"`; who interprets has no chip."""

    class Device:
        compute_capability = capability

    def local(backend):
        assert backend == "cuda"
        if capability is None:
            raise RuntimeError("Unknown backend cuda")
        return [Device()]

    monkeypatch.setattr(gpu.jax, "local_devices", local)
    for backend in ("gpu", "cuda"):
        assert type(lowering_for(backend, "pallas")) is kind
        assert type(lowering_for(backend, "interpret")) is GPULowering
    assert type(lowering_for("triton", "interpret")) is TritonLowering
    assert lowering_for("triton", "auto") is None


def test_only_who_asks_has_the_kernel():
    automatic = Blockwise(metadata(platform="auto", backend="triton"))
    assert kernels(ft.partial(call, strategy=automatic), *arrays()) == 0
    assert automatic.supports(mask=Causal())


def test_what_there_is_no_kernel_for(monkeypatch):
    q, k, v = arrays()
    strategy = Blockwise(metadata(runtime_dtype=None))
    with pytest.raises(ValueError, match="cannot run on .*cpu"):
        call(q, k, v)
    assert Blockwise(metadata()).supports(mask=Causal())
    far = ScoreFn(lambda s, b, h, q, k: s + jnp.ones(64)[q * k % 64])
    with pytest.raises(ValueError, match="has a (gather|dynamic_slice), which the compiler"):
        kernels(ft.partial(call, score=far), q, k, v)
    sort = ScoreFn(lambda s, b, h, q, k: s + jax.lax.erf(s))
    with pytest.raises(ValueError, match="ScoreFn has a erf, which the compiler"):
        call(q, k, v, score=sort)
    assert not strategy.supports(score=sort)
    wide = jnp.zeros((1, 8, 1, 264), jnp.bfloat16)
    with pytest.raises(ValueError, match="up to 256 numbers, not 264 and 264"):
        kernels(call, wide, wide, wide)
    monkeypatch.setattr(triton, "available", lambda: False)
    with pytest.raises(ValueError, match="Pallas Triton is no longer in jax"):
        kernels(call, q, k, v)


def test_only_one_module_knows_pallas_triton():
    assert triton.available()
    files = pathlib.Path(gpu.__file__).parents[2].rglob("*.py")
    found = [x.name for x in files if "from jax.experimental.pallas import triton" in x.read_text()]
    assert found == ["_triton.py"]


@pytest.mark.parametrize("tokens, dim", [(264, 64), (261, 72)])
def test_tokens_are_read_and_written_where_they_lie(tokens, dim):
    """Whatever their number and size: nothing is padded or copied."""
    q, k, v = (jax.ShapeDtypeStruct((2, tokens, h, dim), jnp.bfloat16) for h in (4, 2, 2))
    (line,) = first_visits(text_of(call, q, k, v))
    given, _, out = line.rpartition(" : ")[2].partition("->")
    of_rows, of_keys = (f"2x{tokens}x{h}x{dim}xbf16" for h in (4, 2))
    types = [re.findall(r"tensor<([^>]*)>", x) for x in (given, out)]
    assert types[0][:3] == [of_rows, of_keys, of_keys] and types[1][0] == of_rows


IDS = np.repeat(np.arange(3, dtype=np.int32), 16)
MASKS = {
    "causal": Causal(),
    "segments": Segments(jnp.asarray(IDS[:40]), jnp.asarray(IDS)),
    "not": ~SlidingWindow(3, 5) | KeyPadding(jnp.array([7, 9])),
    "blocks": BlockCausal(7),
    "prefix": PrefixLM(jnp.array([7, 9])),
    "function": MaskFn(lambda b, h, q, k: ((q * 7 + k * 3) % 5 < 3) & (b + h != 2)),
}


def _wave(s, b, h, q, k):
    d = (q - k).astype(s.dtype)
    return s + jnp.cos(d) - jnp.log1p(abs(d)) + jnp.where(h % 2 == 0, jnp.tanh(d), jnp.sign(s))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("score", [None, ALiBi(jnp.ones(4)), ScoreFn(_wave)], ids=["plain", "alibi", "fn"])  # fmt: skip
def test_masks_and_scores_are_inlined(name, score):
    """Triton takes them: it verifies a program when it lowers it."""
    strategy = Blockwise(metadata(logits_soft_cap=20.0, dropout_prob=0.1 if score else 0.0))
    key = jax.random.key(0) if score else None
    f = ft.partial(call, strategy=strategy, mask=MASKS[name], score=score, key=key)
    assert kernels(f, *arrays()) == 1


def interpreted(*args, **kw):
    fields = {x: kw.pop(x) for x in ("softmax_scale",) if x in kw}
    strategy = Blockwise(metadata(platform="interpret", backend="triton", **fields))
    return jax.jit(ft.partial(call, strategy=strategy, **kw))(*args).astype(jnp.float32)


def test_what_is_masked_reaches_no_gradient():
    """A key or a value that is not finite, and a query: gradients are bitwise those without it,
    but for the keys that this query sees.
    """
    t, s = 70, 140
    q, k, v, g = (jax.random.normal(jax.random.key(i), (1, n, 1, 16), jnp.bfloat16)
                  for i, n in enumerate((t, s, s, t)))  # fmt: skip
    mask, wrong = SlidingWindow(20, 5) & KeyPadding(120), jnp.nan

    @jax.jit
    def gradients(q, k, v):
        f = lambda *xs: interpreted(*xs, mask=mask)
        return jax.vjp(f, q, k, v)[1](g.astype(jnp.float32))

    want = gradients(q, k.at[0, 120:].set(0), v.at[0, 120:].set(0))
    got = gradients(q.at[0, 50].set(wrong), k.at[0, 120:].set(wrong), v.at[0, 120:].set(wrong))
    seen = [np.arange(t) == 50, *[abs(np.arange(s) - 42.5) < 13] * 2]  # the keys 30 to 55
    for x, y, nan in zip(want, got, seen):
        x, y = (np.asarray(z.astype(jnp.float32))[0, :, 0] for z in (x, y))
        np.testing.assert_array_equal(np.isnan(y).any(-1), nan)
        np.testing.assert_array_equal(x[~nan], y[~nan])
    assert not np.asarray(got[1].astype(jnp.float32))[0, 120:].any()


def test_what_is_not_finite_reaches_the_rows_that_see_it():
    """Of several programs, tiles of keys and heads of a group, and where blocks are padded."""
    t, s, d = 140, 200, 16
    q, k, v = (jax.random.normal(jax.random.key(i), (1, n, h, d), jnp.bfloat16)
               for i, n, h in ((0, t, 4), (1, s, 2), (2, s, 2)))  # fmt: skip
    v = v.at[0, 60, 1, 3].set(jnp.nan).at[0, 130, 0, 1].set(jnp.inf)
    k, v = k.at[0, 150:].set(jnp.nan), v.at[0, 150:].set(jnp.nan)
    visible = om.window(t, s, 20, 5) & (np.arange(s) < 150)
    got = interpreted(q, k, v, mask=SlidingWindow(20, 5) & KeyPadding(150))
    wide = [np.asarray(x).astype(np.float64) for x in (q, k, v)]
    fine = [np.where(np.isfinite(x), x, 0.0) for x in wide]
    exact = oracle.Problem(*fine, scale=d**-0.5, mask=visible)
    bad = np.repeat(~np.isfinite(wide[2]).all(-1), 2, 2)  # [1, s, heads]
    bad = np.einsum("ts,bsh->bth", visible.reshape(t, s), bad) > 0
    assert bad.any() and not bad.all()
    np.testing.assert_array_equal(np.isnan(got), np.repeat(bad[..., None], d, -1))
    want = oracle.forward(exact).out
    assert np.abs(np.where(bad[..., None], 0, got - want)).max() < 2e-2


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_that_is_not_positive(scale):
    """The kernel multiplies maxima with it, so that it must have its sign elsewhere."""
    q, k, v = arrays()
    got = interpreted(q, k, v, softmax_scale=jnp.float32(scale))
    wide: Any = [np.asarray(x).astype(np.float64) for x in (q, k, v)]
    problem = oracle.Problem(*wide, scale=scale, mask=om.causal(40, 48, 0, 0))
    want = bound.values(problem, bound.precision_of(jnp.bfloat16, normalised=True))["out"]
    assert bound.excess(np.asarray(got.astype(jnp.bfloat16)), want) <= 1


def test_the_carry_of_earlier_hops_goes_on():
    q, k, v = arrays()
    mesh = jax.make_mesh((2,), ("sp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    place = jax.sharding.PartitionSpec(None, "sp")
    ring = Ring(metadata(platform="interpret", backend="triton"), axis_name="sp")
    run = ft.partial(call, strategy=ring)
    own = jax.shard_map(run, mesh=mesh, in_specs=place, out_specs=place, check_vma=False)
    got = jax.jit(own)(q, k, v)
    wide: Any = [np.asarray(x).astype(np.float64) for x in (q, k, v)]
    problem = oracle.Problem(*wide, scale=16**-0.5, mask=om.causal(40, 48, 0, 0))
    want = bound.values(problem, bound.precision_of(jnp.bfloat16, normalised=True))["out"]
    assert bound.excess(np.asarray(got), want) <= 1


def test_in_every_hop_of_a_ring():
    place = jax.sharding.PartitionSpec(None, "sp")
    ring = ft.partial(call, strategy=Ring(metadata(), axis_name="sp"))
    own = jax.shard_map(ring, in_specs=place, out_specs=place, check_vma=True)
    assert kernels(own, *arrays(), axis="sp", size=4) >= 2


def test_small_logits_of_float32_under_a_soft_cap():
    """By the tanh that is faster, maxima near 0 were off by 23 times the bound."""
    q, k, v = (x / 16 for x in arrays(jnp.float32))
    strategy = Blockwise(metadata(platform="interpret", backend="triton", logits_soft_cap=2.5,
                                  runtime_dtype=jnp.float32))  # fmt: skip
    run = ft.partial(attention, strategy=strategy, mask=Causal(), return_max_logits=True)
    found = jax.jit(lambda *xs: run(*xs).max_logits)(q, k, v)
    exact = [np.repeat(np.float64(x), 2, 2) if x is not q else np.float64(x) for x in (q, k, v)]
    seen = np.tril(np.ones((40, 48), bool))[None, None]
    problem = oracle.Problem(*exact, scale=0.25, cap=2.5, mask=seen)
    want = bound.values(problem, bound.precision_of(jnp.float32))
    assert bound.excess(np.asarray(found), want["top"]) <= 1
