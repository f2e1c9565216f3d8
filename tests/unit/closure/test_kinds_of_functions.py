"""A score and a mask of every kind of function: what it reads is as it is at each call, and has its
gradient. The same object with another array in it is where a remembered trace would be wrong.
"""

import dataclasses
import functools as ft
import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import attention, AttentionMetadata, MaskFn, nn, Ring, ScoreFn


T, H, D = 16, 2, 4
rng = np.random.default_rng(0)
QUERY, KEY, VALUE, WEIGHTS = rng.standard_normal((4, 1, T, H, D))
AHEAD = np.arange(T) - np.arange(T)[:, None]  # of the key, as seen by the query
SLOPES = [np.array([0.3, 0.1]), np.array([0.5, -0.2])]
REACH = [np.array([0, 3], np.int32), np.array([5, -1], np.int32)]


@pytest.fixture(autouse=True)
def wide(x64):
    """In float64."""


def plain(slopes, reach, query=QUERY, key=KEY, value=VALUE, weights=WEIGHTS):
    """`sum(weights * outputs)` and its derivatives by the slopes and the values, in NumPy."""
    logits = np.einsum("bthd,bshd->bhts", query, key) / D**0.5
    logits = logits - slopes[:, None, None] * np.abs(AHEAD)
    seen = AHEAD <= reach[:, None, None]
    p = np.where(seen, np.exp(logits - logits.max()), 0)
    p = p / np.maximum(p.sum(-1, keepdims=True), np.finfo(float).tiny)
    of_p = np.einsum("bthd,bshd->bhts", weights, value)
    of_logits = p * (of_p - (p * of_p).sum(-1, keepdims=True))
    return (
        np.sum(weights * np.einsum("bhts,bshd->bthd", p, value)),
        -(of_logits * np.abs(AHEAD)).sum((0, 2, 3)),
        np.einsum("bhts,bthd->bshd", p, weights),
    )


def lower_far(slopes, logit, b, h, q, k):
    return logit - slopes[h] * abs(q - k).astype(logit.dtype)


def show_near(reach, b, h, q, k):
    return k - q <= reach[h]


class Holder:
    def __init__(self, body):
        self.body, self.array = body, None

    def method(self, *args):
        return self.body(self.array, *args)


class Called(Holder):
    __call__ = Holder.method


class Slots:
    __slots__ = ("array", "body")
    __init__ = Holder.__init__
    __call__ = Holder.method


@dataclasses.dataclass
class Data:
    body: typing.Any
    array: typing.Any = None
    __call__ = Holder.method


@dataclasses.dataclass(frozen=True)
class Frozen:
    body: typing.Any
    held: dict

    def __call__(self, *args):
        return self.body(self.held["array"], *args)


class Named(typing.NamedTuple):
    body: typing.Any
    held: dict
    __call__ = Frozen.__call__


class Module(eqx.Module):
    body: typing.Any
    held: dict

    def __call__(self, *args):
        return self.body(self.held["array"], *args)

    def method(self, *args):
        return self(*args)


# Of each kind: `kind(body)` returns a function that puts an array into the same place again, and
# hands the score or mask function to `attend`.


def by_global(body):
    space = {"body": body}
    exec("def fn(*args):\n    return body(array, *args)", space)

    def use(array, attend):
        space["array"] = array
        return attend(space["fn"])

    return use


def by_closure(body):
    array = None

    def fn(*args):
        return body(array, *args)

    def use(new, attend):
        nonlocal array
        array = new
        return attend(fn)

    return use


def by_partial(body):
    fn = ft.partial(lambda *args, array: body(array, *args), array=None)

    def use(array, attend):
        fn.keywords["array"] = array
        return attend(fn)

    return use


def by_attribute(make, of=lambda x: x):
    def kind(body):
        x = make(body)

        def use(array, attend):
            x.array = array
            return attend(of(x))

        return use

    return kind


def by_dict(make, of=lambda x: x):
    def kind(body):
        held = {}
        x = make(body, held)

        def use(array, attend):
            held["array"] = array
            return attend(of(x))

        return use

    return kind


def by_inner_object(body):
    """A method of an ordinary object that another function calls."""
    holder = Holder(body)

    def use(array, attend):
        holder.array = array
        return attend(ft.partial(lambda held, *args: held.method(*args), holder))

    return use


def by_nnx(body):
    nnx = pytest.importorskip("flax.nnx", reason="the kind is a module of flax")
    errors = pytest.importorskip("flax.errors")

    class Layer(nnx.Module):
        def __init__(self):
            self.array = nnx.Variable(jnp.zeros(H))

        def method(self, *args):
            return body(self.array[...], *args)

    layer = Layer()

    def use(array, attend):
        here = layer
        try:
            layer.array.set_value(array)
        except errors.TraceContextError:
            # Inside a transformation, nnx lets nothing change that was made outside of it.
            here = nnx.merge(nnx.split(layer)[0], nnx.State({"array": nnx.Variable(array)}))
        return attend(here.method)

    return use


def by_linen(body):
    linen = pytest.importorskip("flax.linen", reason="the kind is a module of flax")

    class Layer(linen.Module):
        attend: typing.Any

        def setup(self):
            self.array = self.param("array", lambda _: jnp.zeros(H))

        def method(self, *args):
            return body(self.array, *args)

        def __call__(self):
            return self.attend(self.method)

    # With no parent, since a call of one such layer may be inside of that of another.
    return lambda array, attend: Layer(attend, parent=None).apply({"params": {"array": array}})


KINDS = {
    "global": by_global,
    "closure": by_closure,
    "partial": by_partial,
    "bound method": by_attribute(Holder, lambda x: x.method),
    "callable object": by_attribute(Called),
    "slots": by_attribute(Slots),
    "dataclass": by_attribute(Data),
    "frozen dataclass": by_dict(Frozen),
    "NamedTuple": by_dict(Named),
    "eqx.Module": by_dict(Module),
    "method of eqx.Module": by_dict(Module, lambda x: x.method),
    "object inside": by_inner_object,
    "nnx": by_nnx,
    "linen": by_linen,
}


def users(kind, body, kept):
    """Functions for two calls: of the same object with another array in it, or of two objects."""
    return [KINDS[kind](body)] * 2 if kept else [KINDS[kind](body) for _ in range(2)]


def attend(value, strategy=None, **parts):
    out = attention(jnp.asarray(QUERY), jnp.asarray(KEY), value, strategy, **parts)
    return jnp.sum(out.attention_outputs * WEIGHTS)


WAYS = {
    "eager": lambda f, argnum: (f, 0),
    "jit": lambda f, argnum: (jax.jit(f), 0),
    "grad": lambda f, argnum: (jax.grad(f, argnum), 1 + argnum),
    "jit(grad)": lambda f, argnum: (jax.jit(jax.grad(f, argnum)), 1 + argnum),
}


def check(losses, arrays, wants, argnum, ways=WAYS):
    """Judges the value and the gradient. In each way there are two arrays, since what is remembered
    of the first is wrong for the second.
    """
    for way in ways:
        for loss, array, want in zip(losses, arrays, wants):
            fn, which = WAYS[way](loss, argnum)
            got = fn(jnp.asarray(array), jnp.asarray(VALUE))
            np.testing.assert_allclose(got, want[which], rtol=1e-10, atol=1e-12, err_msg=way)


EVERYWHERE = np.full(H, T)


# tests/nightly/closure has all kinds, and tests/unit/test_closure.py has more of what is remembered.
@pytest.mark.parametrize(
    "kind, kept", [("closure", True), ("bound method", True), ("eqx.Module", False)]
)
def test_a_score_reads_the_array_that_is_there_now(kind, kept):
    losses = [
        lambda array, value, use=use: use(array, lambda fn: attend(value, score=ScoreFn(fn)))
        for use in users(kind, lower_far, kept)
    ]
    check(losses, SLOPES, [plain(x, EVERYWHERE) for x in SLOPES], 0)


@pytest.mark.parametrize("kind, kept", [("slots", True), ("NamedTuple", False)])
def test_a_mask_reads_the_array_that_is_there_now(kind, kept):
    losses = [
        lambda array, value, use=use: use(array, lambda fn: attend(value, mask=MaskFn(fn)))
        for use in users(kind, show_near, kept)
    ]
    check(losses, REACH, [plain(np.zeros(H), x) for x in REACH], 1)


FEW = ["eager", "jit(grad)"]


def both(kind, kept, run):
    """Losses of the slopes and the values, whose mask and scores are of one kind of function."""
    uses = zip(users(kind, lower_far, kept), users(kind, show_near, kept), REACH)

    def loss(slopes, value, far, near, reach):
        inner = lambda score: near(jnp.asarray(reach), lambda mask: run(value, ScoreFn(score), MaskFn(mask)))  # fmt: skip
        return far(slopes, inner)

    return [
        lambda slopes, value, far=far, near=near, reach=reach: loss(slopes, value, far, near, reach)
        for far, near, reach in uses
    ]


@pytest.mark.parametrize("kind, kept", [("partial", True)])
def test_on_a_ring_of_eight_devices(kind, kept):
    mesh = jax.make_mesh((8,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    ring = Ring(AttentionMetadata(mesh=mesh, runtime_dtype=jnp.float64))
    losses = both(
        kind, kept, lambda value, score, mask: attend(value, ring, score=score, mask=mask)
    )
    check(losses, SLOPES, [plain(*x) for x in zip(SLOPES, REACH)], 0, FEW)


@pytest.mark.parametrize("kind, kept", [("nnx", True), ("linen", True)])
def test_in_a_layer(kind, kept):
    layer = nn.MultiheadAttention(H, H * D, key=jax.random.key(0))
    x = jnp.asarray(QUERY[0].reshape(T, H * D))
    weights = WEIGHTS[0].reshape(T, H * D)

    def run(value, score, mask):
        whole = eqx.tree_at(lambda x: x.score, layer, score, is_leaf=lambda x: x is None)
        out = whole(x, x, value.reshape(T, H * D), mask=mask)
        return jnp.sum(out * weights)

    def project(linear, x):
        return (np.asarray(x, np.float64) @ np.asarray(linear.weight).T).reshape(1, T, H, D)

    arrays = [
        *(project(p, x) for p in (layer.query_proj, layer.key_proj)),
        project(layer.value_proj, VALUE[0].reshape(T, H * D)),
        (weights @ np.asarray(layer.output_proj.weight)).reshape(1, T, H, D),
    ]
    losses = both(kind, kept, run)
    check(losses, SLOPES, [plain(*x, *arrays) for x in zip(SLOPES, REACH)], 0, FEW)
