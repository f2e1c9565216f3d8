"""Every operand in every dtype, beside queries in every dtype: all gradients and tangents are within
the bound of the oracle, and have the dtypes of what they belong to.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqattn
from eqattn import attention, Blockwise, masks as m, scores as sc, Selected

from . import bound, oracle, oracle_masks as om, transforms
from .cases import covering
from .test_conformance import check, mesh_of


T, H, B = 11, 4, 2
DTYPES = ("bfloat16", "float32", "float64")
STRATEGIES = (("blockwise", 1), ("dense", 1), ("ragged", 1), ("ring", 2), ("ulysses", 2))
TRANSFORMS = ("grad", "jvp", "hvp", "vmap_grad")


class Slopes(sc.AbstractScore):
    """ALiBi whose slopes are no operand, but read from `self`."""

    slopes: jax.Array

    def transform(self, logit, b, h, q, k):
        return logit - self.slopes[h].astype(logit.dtype) * abs(q - k).astype(logit.dtype)


def arguments(dtype, operand):
    rng = np.random.default_rng(0)
    shapes = dict(q=(B, T, H, 8), k=(B, T, 2, 8), v=(B, T, 2, 8))
    draw = {n: jnp.asarray(rng.standard_normal(x), dtype) for n, x in shapes.items()}
    shapes = dict(bias=(1, H, 1, T), sinks=(H,), table=(8, H))
    draw |= {n: jnp.asarray(rng.standard_normal(x), operand) for n, x in shapes.items()}
    draw["slopes"] = jnp.asarray(rng.uniform(0.05, 0.3, H), operand)
    return draw | dict(scale=jnp.asarray(0.3, operand), cap=jnp.asarray(2.5, operand))


def attend(strategy, slopes, xs):
    metadata = eqattn.AttentionMetadata(
        runtime_dtype=xs["q"].dtype,
        softmax_scale=xs["scale"],
        logits_soft_cap=xs["cap"],
        softmax_aux=xs["sinks"],
        blocksize_q=4,
        blocksize_k=4,
    )
    strategy = eqattn.AttentionRegistry.create(strategy, metadata)
    score = [slopes(xs["slopes"]), sc.T5Bias(xs["table"], max_distance=16)]
    options = dict(mask=m.Causal(), bias=xs["bias"], score=score, return_logsumexp=True)
    out = eqattn.attention(xs["q"], xs["k"], xs["v"], strategy, **options)
    return out.attention_outputs, out.logsumexp


def closure(slopes):
    def fn(logit, b, h, q, k):
        return logit - slopes[h].astype(logit.dtype) * abs(q - k).astype(logit.dtype)

    return sc.ScoreFn(fn)


SLOPES = {"operand": sc.ALiBi, "closure": closure, "field": Slopes}
CASES = [
    (strategy, TRANSFORMS[i % 4], list(SLOPES)[(i + i // 3) % 3], dtype, operand)
    for i, (strategy, dtype, operand) in enumerate(
        (s, d, o) for s in STRATEGIES for d in DTYPES for o in DTYPES
    )
]


# A program over devices takes five times as long to compile. By default two or three of each strategy run:
# every transformation, every kind of slopes and every dtype in either place. Of those on one device,
# each pair of dtypes runs in one strategy or two. All run at night.
OVER_DEVICES = (28, 33, 38, 39, 41)
FEW = [
    case
    for i, case in enumerate(CASES)
    if (case[0][1] == 1 and i % 9 % 2 == i // 9 % 2) or i in OVER_DEVICES
]


@pytest.mark.parametrize("strategy, transform, slopes, dtype, operand", FEW)
def test_operands_of_any_dtype(strategy, transform, slopes, dtype, operand, x64):
    name, devices = strategy
    first, second = (arguments(dtype, operand) for _ in range(2))
    second |= {n: second[n][::-1] for n in "qkv"}
    rng = np.random.default_rng(1)
    wide = "float64" if dtype == "float64" else "float32"
    shapes = ((B, T, H, 8), dtype), ((B, T, H), wide)
    cts = tuple(jnp.asarray(rng.standard_normal(x), d) for x, d in shapes)
    moved = {n: jnp.asarray(rng.standard_normal(x.shape), x.dtype) for n, x in first.items()}

    def call(xs):
        return attend(name, SLOPES[slopes], xs)

    def run(xs, moved, cts):
        return transforms.TRANSFORMS[transform](call, xs, moved, cts)

    with mesh_of(dict(target=strategy)):
        result = jax.jit(run)((first, second), moved, cts)

    precision = bound.precision_of(dtype)
    exact = lambda xs: {n: np.asarray(x).astype(precision.reference) for n, x in xs.items()}
    constants = dict(
        mask=om.causal(T, T), distance=om.distance(T, T), bucket=om.t5_bucket(T, T, 8, True, 16)
    )
    worst = {}
    with np.errstate(all="ignore"):
        for i, xs in enumerate((first, second)[: len(result.get("grads", [0]))]):
            problem = oracle.Problem(**exact(xs), **constants)
            ct = [np.asarray(x).astype(precision.reference) for x in cts]
            references = dict(
                values=lambda: bound.values(problem, precision),
                grads=lambda: bound.grads(problem, *ct, precision),
                tangents=lambda: bound.tangents(problem, exact(moved), precision),
                hvps=lambda: bound.hvps(problem, *ct, exact(moved), precision),
            )
            for kind, found in result.items():
                reference = references[kind]()
                for n, x in found[i].items():
                    like = cts[n == "lse"] if n in ("out", "lse") else xs[n]
                    assert (x.shape, x.dtype) == (like.shape, like.dtype), (kind, n, x.dtype)
                    worst[kind, n] = bound.excess(x, reference[n])
    assert max(worst.values()) <= 1, {n: r for n, r in worst.items() if not r <= 1}


@pytest.mark.parametrize("operands", ["bfloat16", "float32"])
def test_a_table_of_differences_beside_wider_logits(operands):
    """Its gradient was summed in float32, where logits are float64."""
    case = covering(2)[0] | {"mask": "causal", "length": (70, 70), "transform": "grad"}
    case |= {"block": (16, 7), "score": "differences", "heads": (2, 2), "dims": (8, 8)}
    case |= {"dtype": "float64", "operands": operands, "lead": (2,), "target": ("blockwise", 1)}
    check(case | {"bias": "none", "offset": "none", "dropout": 0.0, "scale": "none"})


def test_a_bias_beside_a_list_is_summed_over_the_batch_in_the_dtype_of_sums(x64):
    """In float32 beside float64 queries, each element of the batch rounded its part."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 21, 1, 4))) for _ in range(3))
    bias = jnp.asarray(rng.normal(size=(1, 21, 21)), jnp.float32)
    mask = Selected(jnp.asarray(rng.integers(0, 3, (1, 4, 2))), 6, 8)
    seen = np.asarray(mask.as_array(21, 21))

    def ours(bias):
        out = attention(q, k, v, Blockwise(), mask=mask, bias=bias)
        return jnp.sin(3 * out.attention_outputs).sum()

    def dense(bias):
        z = jnp.einsum("bthd,bshd->bhts", q, k) / 2 + bias[None]
        p = jax.nn.softmax(jnp.where(seen, z, -jnp.inf))
        return jnp.sin(3 * jnp.einsum("bhts,bshd->bthd", p, v)).sum()

    got = jax.jit(jax.grad(ours))(bias)
    want = np.asarray(jax.grad(dense)(bias.astype(jnp.float64)))
    assert got.dtype == jnp.float32
    unit = np.spacing(np.abs(want).astype(np.float32))
    assert (np.abs(np.float64(got) - want) <= 0.51 * unit + 1e-14).all()
