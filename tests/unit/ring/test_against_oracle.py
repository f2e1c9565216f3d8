"""Features of the ring against the oracle: value, logsumexp and every gradient in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix import oracle, oracle_dropout as od, oracle_masks as om

from eqattn import attention, AttentionMetadata, Balanced, masks as m, scores as sc
from eqattn._ring.layout import Contiguous, Zigzag
from eqattn.strategies import AllGather, Ring, Ulysses

from .common import B, D, grid_of, H, K, mesh_of, V


T5 = dict(bidirectional=True, max_distance=16)


def features(name, t, rng, tokens):
    """The library's mask and keywords, the oracle's constants, and further arguments.

    `tokens(x, axis)` brings an array of the oracle into the order of the layout.
    """
    ids = np.sort(rng.integers(-1, 3, (B, t)), -1).astype(np.int32)
    ends = rng.integers(1, t + 1, B).astype(np.int32)
    dense = rng.random((B, H, t, t)) < 0.6
    normal = rng.standard_normal
    mine = jnp.asarray(tokens(ids, 1))
    causal = om.causal(t, t, 0, 0)
    table = {
        "full": (None, None, {}),
        "causal": (m.Causal(), causal, {}),
        "window": (m.SlidingWindow(5, 2), om.window(t, t, 5, 2, 0, 0), {}),
        "first_keys": (
            m.SlidingWindow(3, 0, sinks=2) & m.Causal(),
            om.window(t, t, 3, 0, 2, 0) & causal,
            {},
        ),
        "segments": (m.Causal() & m.Segments(mine), causal & om.segments(ids, ids), {}),
        "lengths": (m.KeyPadding(jnp.asarray(ends)), om.lengths(t, t, ends), {}),
        "prefix": (m.PrefixLM(jnp.asarray(ends)), om.prefix_lm(t, t, ends, 0), {}),
        "dense": (m.Dense(jnp.asarray(tokens(tokens(dense, 2), 3))), dense, {}),
        "function": (
            m.MaskFn(lambda b, h, q, k, i, j: (k + h <= q) & (i != j + 1), (mine,), (mine,)),
            (np.arange(t)[:, None] >= np.arange(t) + np.arange(H)[:, None, None])
            & (ids[:, None, :, None] != ids[:, None, None, :] + 1),
            {},
        ),
        "bias": (m.Causal(), causal, {"bias": normal((1, H, t, t))}),
        "key_bias": (m.Causal(), causal, {"bias": normal((B, 1, 1, t))}),
        "row_bias": (None, None, {"bias": normal((1, H, t, 1))}),
        "sinks": (m.Causal(), causal, {"sinks": normal((H,)), "cap": np.array(2.5)}),
        "many_sinks": (m.SlidingWindow(4, 0), om.window(t, t, 4, 0, 0, 0), {"sinks": normal((1, 2))}),
        "scores": (m.Causal(), causal, {"slopes": rng.uniform(0.1, 0.3, H), "table": normal((8, H))}),
        "dropout": (m.Causal(), causal, {"scale": np.array(0.3)}),
    }  # fmt: skip
    return table[name]


def compare(name, n, layout=Contiguous(), t=24, block=4, *, group=1, gathers=False, **options):
    """On a ring of `n` places of `group` devices each; Ulysses where there is one place. If it
    `gathers`, keys and values are gathered over the places.
    """
    ulysses = n == 1 < group
    rng = np.random.default_rng(len(name))

    def tokens(x, axis):
        return layout.permute(x, n, axis)

    mask, visible, extra = features(name, t, rng, tokens)
    rate = 0.25 if name == "dropout" else 0.0
    arguments = {
        "q": rng.standard_normal((B, t, H, D)),
        "k": rng.standard_normal((B, t, K, D)),
        "v": rng.standard_normal((B, t, K, V)),
        **extra,
    }
    constants = {"mask": visible, "scale": D**-0.5}
    if "slopes" in extra:
        constants |= {
            "distance": om.distance(t, t, 0),
            "bucket": om.t5_bucket(t, t, 8, True, 16, 0),
        }
    if rate:
        keep = od.kept(jax.random.key(7), B, H, *om.grid(t, t), rate)
        constants |= {"keep": keep, "rate": rate}
    want = oracle.Problem(**{**constants, **arguments})
    cts = rng.standard_normal((B, t, H, V)), rng.standard_normal((B, t, H))

    def call(a):
        score = [sc.ALiBi(a["slopes"]), sc.T5Bias(a["table"], **T5)] if "slopes" in a else None
        metadata = AttentionMetadata(
            runtime_dtype=jnp.float64, softmax_scale=a.get("scale"), dropout_prob=rate,
            logits_soft_cap=a.get("cap"), softmax_aux=a.get("sinks"),
            blocksize_q=block, blocksize_k=block, **options,
        )  # fmt: skip
        head_axis = "hp" if group > 1 else None
        strategy = Ring(metadata, layout=layout, head_axis=head_axis)
        strategy = Ulysses(metadata) if ulysses else strategy
        strategy = AllGather(metadata, layout=layout) if gathers else strategy
        bias = a.get("bias")
        for axis in (2, 3):
            bias = bias if bias is None or bias.shape[axis] == 1 else tokens(bias, axis)
        out = attention(
            *[tokens(a[x], 1) for x in "qkv"], strategy, mask=mask, bias=bias, score=score,
            key=jax.random.key(7) if rate else None, return_logsumexp=True,
        )  # fmt: skip
        return [layout.unpermute(x, n) for x in (out.attention_outputs, out.logsumexp)]

    @jax.jit
    def both(a, cts):
        outs, pull = jax.vjp(call, a)
        return outs, pull(cts)[0]

    mesh = mesh_of(max(n, group)) if ulysses or group == 1 else grid_of(n, group)
    with jax.set_mesh(mesh):
        (out, lse), grads = both(jax.tree.map(jnp.asarray, arguments), list(map(jnp.asarray, cts)))
    reference = oracle.forward(want)
    got = {"out": out, "lse": np.where(np.isfinite(lse), lse, 0), **grads}
    dead = np.isinf(reference.lse)
    assert (np.isinf(lse) == dead).all()
    expected = {"out": reference.out, "lse": np.where(dead, 0, reference.lse)}
    expected |= oracle.vjp(want, cts[0], np.where(dead, 0, cts[1]))
    for x in got:
        error = np.abs(np.asarray(got[x]) - expected[x]).max() / max(1, np.abs(expected[x]).max())
        assert error <= 1e-13, (x, error)


ORACLE = [
    ("full", 3), ("causal", 1), ("causal", 8), ("window", 4), ("first_keys", 2), ("segments", 4),
    ("lengths", 2), ("prefix", 2), ("dense", 2), ("function", 2), ("bias", 2), ("key_bias", 3),
    ("row_bias", 2), ("sinks", 2), ("many_sinks", 3), ("scores", 2), ("dropout", 2),
]  # fmt: skip
ZIGZAG = [
    ("causal", 3), ("causal", 8), ("window", 4), ("segments", 2), ("bias", 2), ("key_bias", 2), ("scores", 2),
]  # fmt: skip
CASES = [(*case, Contiguous()) for case in ORACLE] + [(*case, Zigzag()) for case in ZIGZAG]
# Of masks with ids and with a function, of sinks and of scores.
SOME = [
    ("segments", 2, Zigzag()), ("function", 2, Contiguous()), ("many_sinks", 3, Contiguous()),
    ("scores", 2, Contiguous()),
]  # fmt: skip


def balanced(n, t, chunk=3):
    """A layout with no order among its chunks: those of a causal window, dealt out in turns."""
    layout = Balanced(["causal", m.SlidingWindow(9, 2)], t, n, chunk=chunk)
    assert not layout.in_order(n)
    return layout


def names(cases):
    return [f"{name}-{n}-{type(layout).__name__.lower()}" for name, n, layout in cases]


@pytest.mark.parametrize("name, n, layout", SOME, ids=names(SOME))
def test_feature(name, n, layout):
    compare(name, n, layout, t=32 if n == 8 else 24)


@pytest.mark.parametrize("name, chunk", [("dropout", 12)])
def test_feature_in_a_balanced_layout(name, chunk):
    """Also where each device has a single chunk, which is not the one of its place."""
    compare(name, 2, balanced(2, 24, chunk))


GATHERED = [("bias", 2, Zigzag())]


@pytest.mark.parametrize("name, n, layout", GATHERED, ids=names(GATHERED))
def test_feature_with_gathered_keys(name, n, layout):
    compare(name, n, layout, gathers=True)


# (feature, places of the ring, devices that exchange heads, layout): one place is Ulysses.
HEADS = [
    ("key_bias", 2, 2, Zigzag()),
]  # fmt: skip


def head_names(cases):
    return [f"{name}-{n}x{g}-{type(layout).__name__.lower()}" for name, n, g, layout in cases]


@pytest.mark.parametrize("name, n, group, layout", HEADS, ids=head_names(HEADS))
def test_feature_with_exchanged_heads(name, n, group, layout):
    compare(name, n, layout, t=16, group=group)
