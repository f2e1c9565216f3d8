"""Every transform of JAX, of every order, against dense attention differentiated by JAX (x64)."""

import functools as ft

import jax
import jax.export
import jax.numpy as jnp
import pytest

from eqattn import attention, AttentionMetadata, Blockwise, Causal
from eqattn.scores import ALiBi, ScoreFn


B, T, S, H, K, D, V = 2, 11, 9, 4, 2, 4, 3
ALL = tuple(range(8))


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def arguments():
    ks = jax.random.split(jax.random.key(0), 8)
    normal = lambda i, *shape: jax.random.normal(ks[i], shape, jnp.float64)
    return (
        normal(0, B, T, H, D),
        normal(1, B, S, K, D),
        normal(2, B, S, K, V),
        jnp.asarray(0.4, jnp.float64),
        jnp.asarray(2.0, jnp.float64),
        jnp.asarray([0.1, 0.2, 0.3, 0.4], jnp.float64),
        normal(3, H),
        normal(4, B, H, T, S),
    )


def ours(q, k, v, scale, cap, slopes, sinks, bias):
    metadata = AttentionMetadata(
        runtime_dtype=jnp.float64,
        softmax_scale=scale,
        logits_soft_cap=cap,
        softmax_aux=sinks,
        blocksize_q=4,
        blocksize_k=4,
    )
    out = attention(
        q, k, v, Blockwise(metadata), mask=Causal(), bias=bias, score=ALiBi(slopes),
        return_logsumexp=True,
    )  # fmt: skip
    return out.attention_outputs, out.logsumexp


def reference(q, k, v, scale, cap, slopes, sinks, bias):
    """The same as one dense expression of JAX, which composes with any transform; the oracle has
    first and second derivatives only.
    """
    k, v = (jnp.repeat(x, H // K, 2) for x in (k, v))
    logits = cap * jnp.tanh(jnp.einsum("bthd,bshd->bhts", q, k) * scale / cap) + bias
    distance = (jnp.arange(T)[:, None] - jnp.arange(S)[None]).astype(logits.dtype)
    logits = logits - slopes[None, :, None, None] * abs(distance)[None, None]
    logits = jnp.where((distance >= 0)[None, None], logits, -jnp.inf)
    sink = jnp.broadcast_to(sinks[None, :, None, None], (B, H, T, 1))
    logits = jnp.concatenate([logits, sink], -1)
    p = jax.nn.softmax(logits, -1)[..., :-1]
    lse = jnp.swapaxes(jax.nn.logsumexp(logits, -1), 1, 2)
    return jnp.einsum("bhts,bshd->bthd", p, v), lse


def loss_of(fn):
    def loss(*args):
        out, lse = fn(*args)
        w = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
        return jnp.sum(w * jnp.sin(out)) + jnp.sum(w[..., 0] * lse)

    return loss


def tangents(args):
    return tuple(jnp.cos(3 * x) for x in args)


def dot(xs, ys):
    return sum(jnp.sum(x * y) for x, y in zip(xs, ys))


def slopes_only(f, args):
    return lambda s: f(*args[:5], s, *args[6:])


def directional(f, t, args):
    return jax.jvp(f, args, t)[1]


TRANSFORMS = {
    "value": lambda f, a: f(*a),
    "grad": lambda f, a: jax.grad(f, ALL)(*a),
    "vjp": lambda f, a: jax.vjp(f, *a)[1](jnp.asarray(1.5, jnp.float64)),
    "jvp": lambda f, a: jax.jvp(f, a, tangents(a)),
    "linearize": lambda f, a: jax.linearize(f, *a)[1](*tangents(a)),
    "hvp forward over reverse": lambda f, a: jax.jvp(jax.grad(f, ALL), a, tangents(a))[1],
    "hvp reverse over reverse": lambda f, a: jax.grad(
        lambda *x: dot(jax.grad(f, ALL)(*x), tangents(a)), ALL
    )(*a),
    "hvp reverse over forward": lambda f, a: jax.grad(
        lambda *x: directional(f, tangents(a), x), ALL
    )(*a),
    "jacfwd": lambda f, a: jax.jacfwd(slopes_only(f, a))(a[5]),
    "hessian": lambda f, a: jax.hessian(slopes_only(f, a))(a[5]),
    "third order": lambda f, a: jax.grad(
        lambda s: directional(
            lambda r: directional(slopes_only(f, a), (s,), (r,)), (s,), (s,)
        )
    )(a[5]),
    "vmap of grad": lambda f, a: jax.vmap(lambda q: jax.grad(f, ALL)(q, *a[1:]))(
        jnp.stack([a[0], 2 * a[0]])
    ),
    "vmap over scale": lambda f, a: jax.vmap(
        lambda s: jax.grad(slopes_only(f, a))(s)
    )(jnp.stack([a[5], 2 * a[5]])),
    "vmap of vmap of jvp": lambda f, a: jax.vmap(
        jax.vmap(lambda q: jax.jvp(lambda q: f(q, *a[1:]), (q,), (q,))[1])
    )(jnp.stack([a[0], 2 * a[0]])[None]),
    "grad of vmap": lambda f, a: jax.grad(
        lambda q: jax.vmap(lambda c: f(q * c, *a[1:]))(jnp.asarray([1.0, 0.5])).sum()
    )(a[0]),
    "checkpoint": lambda f, a: jax.grad(jax.checkpoint(f), ALL)(*a),
    "checkpoint dots": lambda f, a: jax.grad(
        jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable), ALL
    )(*a),
    "scan": lambda f, a: jax.grad(
        lambda q: jax.lax.scan(lambda c, _: (c + 0.01 * f(c, *a[1:]), None), q, length=3)[0].sum()
    )(a[0]),
    "fori": lambda f, a: jax.grad(
        lambda q: jax.lax.fori_loop(0, 3, lambda _, c: c + 0.01 * f(c, *a[1:]), q).sum()
    )(a[0]),
    "while": lambda f, a: jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + 0.01 * f(c[1], *a[1:])), (0, a[0])
    )[1],
    "cond": lambda f, a: jax.grad(
        lambda q: jax.lax.cond(
            q.sum() > 0, lambda q: f(q, *a[1:]), lambda q: f(2 * q, *a[1:]), q
        )
    )(a[0]),
}  # fmt: skip


# tests/matrix has the usual ones, and tests/nightly/sweep all.
SOME = "hvp reverse over reverse", "third order", "scan"


@pytest.mark.parametrize("name", SOME)
def test_transform(name):
    args = arguments()
    transform = TRANSFORMS[name]
    got, want = (jax.jit(ft.partial(transform, loss_of(fn)))(args) for fn in (ours, reference))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert jnp.max(abs(x - y)) <= 1e-12 * (1e-3 + jnp.max(abs(y)))


def test_closed_over_tracers():
    """What a user's score closes over is differentiated, to second order."""
    q, k, v, scale, cap, slopes, sinks, bias = arguments()

    def ours_of(z):
        score = ScoreFn(lambda s, b, h, q, k: s - (z * slopes)[h] * abs(q - k).astype(s.dtype))
        metadata = AttentionMetadata(
            runtime_dtype=jnp.float64, softmax_scale=scale, logits_soft_cap=cap,
            softmax_aux=sinks, blocksize_q=4, blocksize_k=4,
        )  # fmt: skip
        strategy = Blockwise(metadata)
        out = attention(
            q, k, v, strategy, mask=Causal(), bias=bias, score=score, return_logsumexp=True
        )
        return out.attention_outputs, out.logsumexp

    def reference_of(z):
        return reference(q, k, v, scale, cap, z * slopes, sinks, bias)

    z = jnp.asarray(0.7, jnp.float64)
    for transform in (jax.grad, jax.hessian):
        got, want = (jax.jit(transform(loss_of(f)))(z) for f in (ours_of, reference_of))
        assert abs(got - want) <= 1e-12 * abs(want)


def test_eval_shape():
    got = jax.eval_shape(jax.grad(loss_of(ours), ALL), *arguments())
    assert [x.shape for x in got] == [x.shape for x in arguments()]


def test_export_on_every_platform():
    args = arguments()
    f = jax.jit(jax.grad(loss_of(ours), ALL))
    exported = jax.export.export(f)(*args)
    loaded = jax.export.deserialize(exported.serialize())
    for x, y in zip(loaded.call(*args), f(*args), strict=True):
        assert jnp.array_equal(x, y)
    everywhere = jax.export.export(f, platforms=("cpu", "cuda", "tpu"))(*args)
    assert everywhere.platforms == ("cpu", "cuda", "tpu")
