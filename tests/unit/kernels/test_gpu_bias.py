"""The gradient of a bias by the kernels for NVIDIA GPUs, interpreted, and that no loop is left."""

from typing import Any

import _gpu_lowered
import _triton_lowered
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix import bound, oracle, oracle_masks as om
from matrix.cases import covering, invalid
from matrix.test_conformance import check

from eqattn import (
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    KeyPadding,
    Ring,
    Segments,
    T5Bias,
)
from eqattn.kernels import gpu


newest = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the kernel is written for jax 0.12 and newer"
)
B, T, S, H, K, D, V = 2, 72, 100, 4, 2, 16, 24
LOWERED = dict(cuda=_gpu_lowered, triton=_triton_lowered)
EITHER = pytest.mark.parametrize("backend", [pytest.param("cuda", marks=newest), "triton"])


def arrays(dtype=jnp.bfloat16, heads=H, kv_heads=K, seed=0):
    shapes = (B, T, heads, D), (B, S, kv_heads, D), (B, S, kv_heads, V), (B, T, heads, V)
    keys = jax.random.split(jax.random.key(seed), 4)
    return [jax.random.normal(key, x, dtype) for key, x in zip(keys, shapes)]


def strategy(backend, platform="interpret", **fields):
    """One that visits several blocks of queries. By default a block has 128, see test_gpu_pairs."""
    fields = dict(runtime_dtype=jnp.bfloat16, blocksize_q=32) | fields
    return Blockwise(AttentionMetadata(platform=platform, backend=backend, **fields))


def judged(backend, shape, mask: Any = None, seen: Any = None, bias_dtype: Any = None, **kw):
    """All gradients of a call within the bound of the oracle.

    **Arguments:**

    - `shape`: that of the bias.
    - `mask`, `seen`: the mask, and what the oracle calls it.
    - `kw`: fields of the metadata, and `heads`.
    """
    heads, kv_heads = kw.pop("heads", (H, K))
    q, k, v, g = arrays(heads=heads, kv_heads=kv_heads)
    bias = jax.random.normal(jax.random.key(9), shape).astype(bias_dtype or jnp.bfloat16)
    how = strategy(backend, **kw)

    @jax.jit
    def run(q, k, v, bias, g):
        f = lambda *xs: attention(*xs[:3], how, mask=mask, bias=xs[3]).attention_outputs
        out, pull = jax.vjp(f, q, k, v, bias)
        return out, pull(g)

    wide = [np.float64(x) for x in (q, k, v)]
    whole = np.float64(bias).reshape((1,) * (4 - bias.ndim) + shape)
    given: Any = dict(scale=D**-0.5, mask=seen, bias=whole)
    given |= dict(cap=kw["logits_soft_cap"]) if "logits_soft_cap" in kw else {}
    exact = oracle.Problem(*wide, **given)
    precision = bound.precision_of(jnp.bfloat16)
    want = bound.grads(exact, np.float64(g), np.zeros((B, T, heads)), precision)
    _, found = run(q, k, v, bias, g)
    assert found[3].dtype == bias.dtype
    for name, x in zip(("q", "k", "v", "bias"), found):
        x = np.asarray(x).reshape(whole.shape if name == "bias" else x.shape)
        assert bound.excess(x, want[name]) <= 1, name


def lowered(backend, q, k, v, bias, mask: Any = Causal(), **fields):
    """How many kernels the gradients of a call have, and how many loops of XLA."""
    how = strategy(backend, **{"platform": "pallas"} | fields)
    f = lambda *xs: attention(*xs[:3], how, mask=mask, bias=xs[3]).attention_outputs.sum()
    text = LOWERED[backend].text_of(jax.grad(f, (0, 1, 2, 3)), q, k, v, bias)
    return len(LOWERED[backend].first_visits(text)), text.count("stablehlo.while")


SHAPES = {
    "own": (B, H, T, S),
    "batch": (1, H, T, S),
    "heads": (B, 1, T, S),
    "both": (1, 1, T, S),
    "unbatched": (H, T, S),
}


@EITHER
@pytest.mark.parametrize("name", SHAPES)
def test_biases_of_all_shapes(name, backend):
    """Summed over what a bias does not have, the heads of a group included."""
    judged(backend, SHAPES[name], Causal(), om.causal(T, S, 0, 0))


@EITHER
@pytest.mark.parametrize(
    "name, sizes",
    [
        ("own", (None, None)),
        ("batch", (37, 70)),
        ("heads", (40, 100)),
        ("both", (72, 64)),
        ("unbatched", (72, 100)),
    ],
)
def test_all_gradients_are_kernels(name, sizes, backend):
    """The fold, and one each for queries, for keys and values, and for the bias."""
    q, k, v, _ = arrays()
    bias = jnp.zeros(SHAPES[name], jnp.bfloat16)
    fields = dict(blocksize_q=sizes[0], blocksize_k=sizes[1])
    assert lowered(backend, q, k, v, bias, **fields) == (4, 0)


IDS = np.repeat(np.arange(5, dtype=np.int32), 20)


@EITHER
def test_elements_that_see_different_blocks(backend):
    """A tile is visited for the batch elements that see it, and has zeros where none does."""
    ids = np.stack([IDS, IDS // 2])
    mask = Segments(jnp.asarray(ids[:, :T]), jnp.asarray(ids))
    judged(
        backend, (1, H, T, S), mask, om.segments(ids[:, :T], ids), blocksize_q=32, blocksize_k=64
    )


@EITHER
@pytest.mark.parametrize("sizes", [(128, 128), (37, 70), (32, 64)])
def test_blocks_of_all_sizes(sizes, backend):
    judged(backend, (1, 1, T, S), blocksize_q=sizes[0], blocksize_k=sizes[1])


@EITHER
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (4, 1)])
def test_groups_of_all_sizes(heads, backend):
    judged(backend, (1, 1, T, S), Causal(), om.causal(T, S, 0, 0), heads=heads)


@EITHER
def test_a_bias_of_another_dtype_and_a_soft_cap(backend):
    judged(backend, (1, H, T, S), bias_dtype=jnp.float32, logits_soft_cap=2.0)


@EITHER
@pytest.mark.parametrize("shape", [(B, H, T, S), (1, 1, T, S)])
def test_what_is_masked_reaches_no_gradient(shape, backend):
    """Keys and values that are not finite, of which no row sees any."""
    q, k, v, g = arrays()
    bias, hidden = jnp.ones(shape, jnp.bfloat16), (jnp.arange(S) >= 70)[:, None, None]
    how = strategy(backend)

    @jax.jit
    def run(k, v):
        f = lambda bias: attention(q, k, v, how, mask=KeyPadding(70), bias=bias).attention_outputs
        return jax.vjp(f, bias)[1](g)[0]

    dirty = run(*(jnp.where(hidden, jnp.nan, x).astype(x.dtype) for x in (k, v)))
    np.testing.assert_array_equal(dirty, run(k, v))
    assert not dirty[..., 70:].any()


@EITHER
def test_what_is_not_finite_reaches_its_row(backend):
    """A cotangent that is not finite, in the rows of its head alone."""
    q, k, v, g = arrays()
    bias, how = jnp.ones((B, H, T, S), jnp.bfloat16), strategy(backend)

    @jax.jit
    def run(g):
        f = lambda bias: attention(q, k, v, how, mask=Causal(), bias=bias).attention_outputs
        return jax.vjp(f, bias)[1](g)[0]

    dirty, clean = (np.array(run(x)) for x in (g.at[1, 40, 2, 3].set(jnp.nan), g))
    assert np.isnan(dirty[1, 2, 40, :41].astype(np.float32)).all()
    dirty[1, 2, 40] = clean[1, 2, 40]
    np.testing.assert_array_equal(dirty, clean)


CASE = covering(2)[0] | dict.fromkeys(
    ("bias", "score", "sinks", "cap", "scale", "offset", "mask"), "none"
)
CASE |= dict(operands="default", lead=(2,), dtype="bfloat16", dropout=0.0, transform="grad")
CASE |= dict(length=(37, 67), block=(16, 32), heads=(4, 2), dims=(4, 7))


@EITHER
@pytest.mark.parametrize(
    "case",
    [
        dict(bias="heads", mask="and", dropout=0.25, sinks="H", cap="float"),
        dict(bias="batch", mask="window", score="alibi", offset="int", dtype="float16"),
        dict(bias="full", mask="or", transform="vmap_grad", heads=(2, 2), block=(5, 3)),
    ],
    ids=str,
)
def test_beside_other_scores(case, backend):
    """Dropout, sinks, a soft cap and ALiBi, by the conformance matrix."""
    target = {"cuda": "gpu", "triton": "triton"}[backend]
    case = CASE | dict(target=(target, 1)) | case
    assert invalid(case) is None
    check(case)


def test_in_a_ring():
    """Each hop writes the gradient of its own columns."""
    q, k, v, g = (x[:, :64] for x in arrays())
    bias = jax.random.normal(jax.random.key(9), (1, H, 64, 64), jnp.bfloat16)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("sp",), auto, devices=jax.devices()[:2])
    place, rows = (jax.sharding.PartitionSpec(*x) for x in ((None, "sp"), (None, None, "sp")))
    fields: Any = dict(platform="interpret", backend="triton", runtime_dtype=jnp.bfloat16)
    ring = Ring(AttentionMetadata(**fields), axis_name="sp")

    def run(q, k, v, g, bias):
        f = lambda bias: attention(q, k, v, ring, mask=Causal(), bias=bias).attention_outputs
        return jax.vjp(f, bias)[1](g)[0]

    own = jax.shard_map(
        run, mesh=mesh, in_specs=(*[place] * 4, rows), out_specs=rows, check_vma=False
    )
    got = jax.jit(own)(q, k, v, g, bias)
    wide: Any = dict(scale=D**-0.5, mask=om.causal(64, 64, 0, 0), bias=np.float64(bias))
    exact = oracle.Problem(*[np.float64(x) for x in (q, k, v)], **wide)
    want = bound.grads(exact, np.float64(g), np.zeros((B, 64, H)), bound.precision_of(jnp.bfloat16))
    assert bound.excess(np.asarray(got), want["bias"]) <= 1


@newest
@pytest.mark.parametrize("platform, kernels", [("auto", 3), ("gpu", 4)])
def test_by_default_loops_give_the_gradient(platform, kernels, monkeypatch):
    """No GPU has run the kernel yet."""
    monkeypatch.setattr(gpu, "capability", lambda: "9.0")
    q, k, v, _ = arrays()
    found, loops = lowered("cuda", q, k, v, jnp.zeros(SHAPES["own"], q.dtype), platform=platform)
    assert found == kernels and (loops == 0) == (platform == "gpu")


@EITHER
def test_beside_a_table_of_differences(backend):
    """Loops give the gradient of the bias there, and kernels all others."""
    q, k, v, _ = arrays()
    how, score = strategy(backend, platform="pallas"), T5Bias(jnp.ones((16, H)))

    def loss(q, k, v, bias):
        out = attention(q, k, v, how, mask=Causal(), bias=bias, score=score)
        return out.attention_outputs.sum()

    bias = jnp.zeros(SHAPES["own"], q.dtype)
    text = LOWERED[backend].text_of(jax.grad(loss, (0, 1, 2, 3)), q, k, v, bias)
    assert len(LOWERED[backend].first_visits(text)) == 3 and "stablehlo.while" in text
