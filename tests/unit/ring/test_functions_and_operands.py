"""What masks and scores read (closures, operands, parameters), on meshes with automatic and with
explicit axes, under every transformation, against the oracle.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from matrix import bound, oracle, oracle_masks as om

from eqattn import attention, AttentionMetadata, Blockwise, masks as m, scores as sc
from eqattn.scores import Operand
from eqattn.strategies import AllGather, Ring, Ulysses

from .common import B, D, H, K, mesh_of, SP, V


T = 8
ENDS = np.array([5, 8], np.int32)
IDS = np.array([[0, 0, 0, 1, 1, 1, 1, 1], [0] * 6 + [1] * 2], np.int32)
CAUSAL = om.causal(T, T)
LENGTHS = om.lengths(T, T, ENDS)
SAME = om.segments(IDS, IDS)


def normal(seed, *shape, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def closures(x):
    score = sc.ScoreFn(lambda z, b, h, q, k: z + x["bias"][0, h, q, k])
    ends, ids = jnp.asarray(ENDS), IDS
    mask = m.MaskFn(lambda b, h, q, k: (k < ends[b]) & (jnp.asarray(ids)[b, 0] == 0))
    return dict(mask=mask, score=score)


def operands(x):
    score = sc.ScoreFn(lambda z, b, h, q, k, y: z + y, [Operand(x["bias"], "bhts")])
    ids = jnp.asarray(IDS)
    return dict(mask=m.MaskFn(lambda b, h, q, k, i, j: i == j, (ids,), (ids,)), score=score)


def both(x):
    ends, ids = jnp.asarray(ENDS), jnp.asarray(IDS)
    score = sc.ScoreFn(
        lambda z, b, h, q, k, y: (
            z + x["bias"][0, h, q, k] - x["slopes"][h] * y * abs(q - k).astype(y.dtype)
        ),
        [Operand(jnp.ones(H, x["bias"].dtype), "h")],
    )
    seen = m.MaskFn(lambda b, h, q, k, i, j: (i == j) & (k < ends[b]), (ids,), (ids,))
    return dict(mask=m.Causal() & seen, score=score)


def parameters(x):
    mask = m.Causal() & m.KeyPadding(jnp.asarray(ENDS)) & m.Dense(jnp.asarray(SAME))
    return dict(mask=mask, bias=x["bias"], score=sc.ALiBi(x["slopes"]))


def positions(x):
    at = jnp.arange(T, dtype=jnp.int32)[None] + jnp.zeros((B, 1), jnp.int32)
    return dict(mask=m.Causal(), bias=x["bias"], q_positions=at, kv_positions=at)


KINDS = {  # what is visible, and the differentiable arguments beside q, k and v
    closures: (LENGTHS, ("bias",)),
    operands: (SAME, ("bias",)),
    both: (CAUSAL & SAME & LENGTHS, ("bias", "slopes")),
    parameters: (CAUSAL & SAME & LENGTHS, ("bias", "slopes", "sinks")),
    positions: (CAUSAL, ("bias",)),
}


def draw(kind, dtype, seed=0):
    xs = dict(
        q=normal(seed, B, T, H, D, dtype=dtype),
        k=normal(seed + 1, B, T, K, D, dtype=dtype),
        v=normal(seed + 2, B, T, K, V, dtype=dtype),
        bias=normal(seed + 3, 1, H, T, T),
        slopes=abs(normal(seed + 4, H)),
        sinks=normal(seed + 5, H),
    )
    wide = np.float64 if dtype == np.float64 else np.float32
    xs |= {n: xs[n].astype(wide) for n in ("bias", "slopes", "sinks")}
    return {n: xs[n] for n in (*"qkv", *KINDS[kind][1])}


def jit(f, xs, dxs, cts):
    return {"values": jax.jit(f)(xs)}


def eager(f, xs, dxs, cts):
    return {"values": f(xs)}


def grad(f, xs, dxs, cts):
    return {"grads": jax.jit(jax.grad(lambda a: dot(f(a), cts)))(xs)}


def eager_grad(f, xs, dxs, cts):
    return {"grads": jax.grad(lambda a: dot(f(a), cts))(xs)}


def jvp(f, xs, dxs, cts):
    return {"tangents": jax.jit(lambda a, t: jax.jvp(f, (a,), (t,))[1])(xs, dxs)}


def hvp(f, xs, dxs, cts):
    gradient = jax.grad(lambda a: dot(f(a), cts))
    return {"hvps": jax.jit(lambda a, t: jax.jvp(gradient, (a,), (t,))[1])(xs, dxs)}


def vmap(f, xs, dxs, cts):
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), xs)
    grads = jax.jit(jax.vmap(jax.grad(lambda a: dot(f(a), cts))))(twice)
    return {"grads": jax.tree.map(lambda x: x[1], grads)}


def scan(f, xs, dxs, cts):
    def run(a):
        return jax.lax.scan(lambda c, _: (c + dot(f(a), cts) / 2, None), jnp.zeros(()), length=2)[0]

    return {"grads": jax.jit(jax.grad(run))(xs)}


def checkpoint(f, xs, dxs, cts):
    return {"grads": jax.jit(jax.grad(lambda a: dot(jax.checkpoint(f)(a), cts)))(xs)}


def dot(outs, cts):
    return sum(jnp.sum(x.astype(jnp.float64) * c.astype(jnp.float64)) for x, c in zip(outs, cts))


TRANSFORMS = [jit, eager, grad, eager_grad, jvp, hvp, vmap, scan, checkpoint]


def check(kind, transform, mesh, cls, dtype=np.float64, placed=False, checked=None, **own):
    """`checked` is whether a `shard_map` of one's own checks types; None calls with whole arrays."""
    xs, dxs = draw(kind, dtype), draw(kind, dtype, 10)
    wide = np.float64 if dtype == np.float64 else np.float32  # of the logsumexp
    cts = normal(20, B, T, H, V, dtype=dtype), normal(21, B, T, H, dtype=wide)

    def call(a):
        metadata = AttentionMetadata(
            runtime_dtype=dtype, blocksize_q=4, blocksize_k=4, softmax_aux=a.get("sinks")
        )
        out = attention(
            *[a[n] for n in "qkv"], strategy=cls(metadata, **own), **kind(a), return_logsumexp=True
        )
        return out.attention_outputs, out.logsumexp

    if checked is not None:
        specs = {n: SP if n in "qkv" else P() for n in xs}
        call = jax.shard_map(
            call, mesh=mesh, in_specs=(specs,), out_specs=(SP, SP), check_vma=checked
        )
    with jax.set_mesh(mesh):
        if placed:
            put = lambda x: jax.device_put(x, NamedSharding(mesh, SP))
            xs, dxs = ({n: put(x) if n in "qkv" else x for n, x in y.items()} for y in (xs, dxs))
        result = jax.tree.map(np.asarray, transform(call, xs, dxs, cts))
    precision = bound.precision_of(dtype)
    exact: dict[str, Any]
    exact, moved = (
        {n: np.asarray(x).astype(precision.reference) for n, x in y.items()} for y in (xs, dxs)
    )
    visible, _ = KINDS[kind]
    distance = om.distance(T, T, 0) if "slopes" in exact else None
    problem = oracle.Problem(**exact, mask=visible, scale=D**-0.5, distance=distance)
    cts = [np.asarray(x).astype(precision.reference) for x in cts]
    references = {
        "values": lambda: bound.values(problem, precision),
        "grads": lambda: bound.grads(problem, *cts, precision=precision),
        "tangents": lambda: bound.tangents(problem, moved, precision),
        "hvps": lambda: bound.hvps(problem, *cts, directions=moved, precision=precision),
    }
    ((name, got),) = result.items()
    got = got if isinstance(got, dict) else dict(zip(("out", "lse"), got, strict=True))
    want = references[name]()
    ratios = {n: bound.excess(x, want[n]) for n, x in got.items()}
    assert ratios and max(ratios.values()) <= 1, (name, ratios)


SOME = [  # each kind and each strategy; placed or not
    (closures, grad, Ulysses, False), (both, hvp, AllGather, True), (parameters, jvp, Ring, False),
]  # fmt: skip


def names(case):
    return getattr(case, "__name__", getattr(case, "name", str(case)))


@pytest.mark.parametrize("kind, transform, cls, placed", SOME, ids=names)
def test_explicit_axes(kind, transform, cls, placed):
    check(kind, transform, mesh_of(2, AxisType.Explicit), cls, placed=placed)


@pytest.mark.parametrize("kind, transform", [(both, checkpoint)], ids=names)
def test_automatic_axes(kind, transform):
    check(kind, transform, mesh_of(2), Ring)


def test_one_device():
    """The kinds are what the oracle takes them for."""
    for kind in KINDS:
        check(kind, jit, mesh_of(1), Blockwise)
