"""Statistics of attention against the whole matrix of probabilities, and the largest logits."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _programs import DEFAULT_CODE
from jax.sharding import AxisType, PartitionSpec as P

import eqattn
from eqattn import (
    ALiBi,
    AllGather,
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    Dense,
    KeyPadding,
    Ragged,
    Ring,
    Selected,
    SlidingWindow,
    stats,
    Tree,
    Ulysses,
)
from eqattn.cache import PagedKVCache, QuantizedKVCache
from eqattn.scores import Operand


B, T, H, K, D = 2, 16, 4, 2, 8
RNG = np.random.default_rng(0)
ARRAYS = {
    "q": RNG.normal(size=(B, T, H, D)),
    "k": RNG.normal(size=(B, T, K, D)),
    "sinks": RNG.normal(size=(H, 2)),
    "bias": RNG.normal(size=(H, T, T)),
    "slopes": RNG.uniform(size=H),
    "cap": np.array(3.0),
    "cost": RNG.normal(size=(B, T)),
}
WEIGHTS = RNG.uniform(size=(T, 1))
SEEN = np.tri(T, dtype=bool) & (np.arange(T) < np.array([13, 0]).reshape(2, 1, 1, 1))
STARTS = np.array([3, 0]).reshape(2, 1, 1, 1)  # row 1 has no keys, and row 0 none before key 3
SEEN &= np.arange(T) >= STARTS
MASK = Causal() & KeyPadding(jnp.array([13, 0]), jnp.array([3, 0]))


def by_hand(a):
    """The statistics from all probabilities, in plain `jax.numpy`."""
    logits = jnp.einsum("bthd,bshd->bhts", a["q"], a["k"].repeat(H // K, 2)) * D**-0.5
    logits = a["cap"] * jnp.tanh(logits / a["cap"]) + a["bias"][None]
    distance = abs(np.arange(T)[:, None] - np.arange(T)).astype(float)
    logits = logits - a["slopes"].reshape(1, H, 1, 1) * distance[None, None]
    top = jnp.where(SEEN, logits, -jnp.inf).max(-1)
    e = jnp.where(SEEN, jnp.exp(jnp.where(SEEN, logits, 0)), 0)
    p = e / (e.sum(-1) + jnp.exp(a["sinks"]).sum(-1)[None, :, None])[..., None]
    log = jnp.log(jnp.where(SEEN, p, 1))
    total = p.sum(-1)
    mean = (p * distance[None, None]).sum(-1) / jnp.where(total > 0, total, 1)
    rows = {
        "entropy": -(p * log).sum(-1),
        "window": jnp.where(total > 0, 1 + 2 * mean, 0),
        "cost": (p * a["cost"][:, None, None] * jnp.sin(logits)).sum(-1),
        "top": top,
    }
    rows = {name: x.transpose(0, 2, 1) for name, x in rows.items()}
    received = jnp.einsum("bhts,t->bsh", p, WEIGHTS[:, 0])
    return {**rows, "mass": received}


NAMES = ("entropy", "window", "cost", "mass")


def statistics(a, cls, order=lambda x: x, names=NAMES, of_a_call=False, **own):
    sinks, cap = a["sinks"], a["cap"]
    metadata = AttentionMetadata(
        softmax_aux=sinks, logits_soft_cap=cap, blocksize_q=4, blocksize_k=4, dropout_prob=0.5
    )
    args = order(a["q"]), order(a["k"]), cls(metadata, **own)
    call = dict(mask=MASK, bias=a["bias"], score=ALiBi(a["slopes"]))
    arrays = [Operand(order(a["cost"]), "bs")]
    cost = lambda z, b, h, q, k, x: x * jnp.sin(z)
    weights = order(jnp.broadcast_to(WEIGHTS, (B, T, 1)))
    wanted = dict(return_max_logits=True, return_logsumexp=True, inference=True)
    out = attention(*args[:2], args[1], args[2], **call, **wanted)
    more = {"logsumexp": out.logsumexp} if of_a_call else {}
    found = {
        "entropy": lambda: stats.entropy(*args, **call, **more),
        "window": lambda: stats.effective_window(*args, **call),
        "cost": lambda: stats.expectation(cost, *args, arrays=arrays, **call, **more),
        "mass": lambda: stats.mass(*args, weights=weights, **call, **more),
    }
    return {"top": out.max_logits} | {name: found[name]() for name in names}


def with_gradients(fn):
    def loss(a):
        found = fn(a)
        judged = [jnp.sin(x).sum() for name, x in found.items() if name != "top"]
        return sum(judged), found

    return jax.jit(jax.grad(loss, has_aux=True))


def expected(names):
    """The gradients of the statistics with these names, and all values."""
    fn = with_gradients(lambda a: {name: by_hand(a)[name] for name in names})
    return jax.tree.map(np.asarray, fn({name: jnp.asarray(x) for name, x in ARRAYS.items()}))


def close(found, want):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(x), y, rtol=1e-11, atol=1e-12)


STRATEGIES = [
    (Blockwise, 1, {"names": ("entropy", "cost", "mass")}),
    (Ragged, 1, {}),
    (Ring, 4, {"axis_name": "sp"}),
    (Ulysses, 2, {"axis_name": "sp"}),
    (AllGather, 2, {"axis_name": "sp"}),
]


@pytest.mark.parametrize("cls, n, own", STRATEGIES[:1])
def test_all_probabilities_give_the_same(cls, n, own, x64):
    """Values, and the gradients of all arrays that they depend on."""
    mesh = jax.make_mesh((n,), ("sp",), (AxisType.Auto,), devices=jax.devices()[:n])
    with jax.set_mesh(mesh):
        arrays = {name: jnp.asarray(x) for name, x in ARRAYS.items()}
        found = with_gradients(ft.partial(statistics, cls=cls, **own))(arrays)
    gradients, want = expected(found[1].keys())
    close(found, (gradients, {name: want[name] for name in found[1]}))


KNOWN = {
    "merged": (
        Blockwise(),
        Selected(jnp.broadcast_to(jnp.array([0, 5]), (B, 1, T, 2))) | SlidingWindow(2, 0),
    ),
    "gathered": (Blockwise(), Causal() & Selected(jnp.broadcast_to(jnp.arange(12), (B, 1, T, 12)))),
    "devices": (Ragged(AttentionMetadata(), axis_name="sp"), MASK),
    "kernel": (Blockwise(AttentionMetadata(platform="interpret")), Causal()),
}


@pytest.mark.parametrize("kind", ["merged", "devices"])
def test_parts_that_know_the_logsumexp_add_up(kind):
    """Whether a visit is in parts, each of which is told the logsumexp of all, or a kernel's. Each
    sum is of a logsumexp that is given, be it another one: it is a factor.
    """
    strategy, mask = KNOWN[kind]
    q, k = (jnp.asarray(ARRAYS[n], jnp.float32) for n in "qk")
    mesh = jax.make_mesh((2,), ("sp",), (AxisType.Auto,), devices=jax.devices()[:2])

    @jax.jit
    def found(q, k, more):
        dense = attention(q, k, k, Dense(), mask=mask, return_weights=True, return_logsumexp=True)
        known, p = dense.logsumexp + more, dense.attention_weights
        args = dict(mask=mask, logsumexp=known)
        log = jnp.log(jnp.where(p > 0, p, 1)) - more
        want = p.sum(2).swapaxes(1, 2), -(p * log).sum(-1).swapaxes(1, 2)
        return [f(q, k, strategy, **args) for f in (stats.mass, stats.entropy)], want

    with jax.set_mesh(mesh):
        for more in (0.0, 0.5):
            given, want = found(q, k, jnp.float32(more))
            for x, y in zip(given, want):
                np.testing.assert_allclose(x, y * np.exp(-more), atol=2e-5)


@pytest.mark.parametrize("cls", [Ragged])
def test_gradients_of_a_logsumexp_that_is_given(cls):
    """Each probability falls with it. There are none of a query that sees no key, and arrays may
    be narrow, as `Ragged` reads them.
    """
    q, k = (jnp.asarray(ARRAYS[n], jnp.bfloat16) for n in "qk")
    known = attention(q, k, k, mask=MASK, return_logsumexp=True).logsumexp

    @jax.jit
    def gradients(q, k, known):
        loss = lambda *x: stats.mass(*x[:2], cls(), mask=MASK, logsumexp=x[2]).sum()
        return jax.grad(loss, (0, 1, 2))(q, k, known)

    *narrow, found = gradients(q, k, known)
    seen = jnp.broadcast_to(SEEN.any(-1).swapaxes(1, 2), known.shape)
    np.testing.assert_allclose(found, -seen.astype(jnp.float32), atol=0.01)
    wide = gradients(q.astype(jnp.float32), k.astype(jnp.float32), known)
    for x, y in zip(narrow, wide):
        assert x.dtype == jnp.bfloat16
        np.testing.assert_allclose(x, y, atol=0.02)


@pytest.mark.parametrize("name", ["mass", "entropy", "expectation"])
def test_a_known_logsumexp_saves_a_visit(name):
    """In a block, keys and queries are multiplied once, and nothing else is."""
    fn = getattr(stats, name)
    fn = ft.partial(fn, lambda z, b, h, q, k: jnp.sin(z)) if name == "expectation" else fn
    q, known = jnp.ones((64, 2, 8)), jnp.ones((64, 2))
    blocks = Blockwise(AttentionMetadata(blocksize_q=16, blocksize_k=16))
    call = jax.jit(lambda q, known: fn(q, q, blocks, mask=Causal(), logsumexp=known))
    lines = call.lower(q, known).as_text().splitlines()
    products = [x for x in lines if "dot_general" in x and "x0xf32" not in x]
    assert len(products) == 2, products  # of blocks with and without a mask


def test_uniform_attention_has_the_entropy_and_the_window_of_its_keys():
    """With no logits at all, of `w` keys: log w and w."""
    q, k = jnp.zeros((32, 2, 4)), jnp.zeros((32, 1, 4))
    mask = Causal() & SlidingWindow(7, 0)
    found = [stats.entropy, stats.effective_window, stats.mass]
    entropy, window, received = jax.jit(lambda *x: [f(*x, mask=mask) for f in found])(q, k)
    assert jnp.allclose(entropy[7:], np.log(8), atol=1e-6)
    assert jnp.allclose(window[7:], 8, atol=1e-5)
    assert received.shape == (32, 2) and jnp.allclose(received.sum(0), 32, atol=1e-4)
    assert jnp.allclose(received[8:25], 1, atol=1e-5)


@pytest.mark.parametrize("kind", ["pages"])
def test_stored_keys(kind):
    """A cache is read where it lies, and pages are not copied. As values, it has no ones."""
    q = jnp.asarray(RNG.normal(size=(B, 2, H, D)), jnp.float32)
    k = jnp.asarray(RNG.normal(size=(B, T, K, D)), jnp.float32)
    empty = dict(batch=B, capacity=T, kv_heads=K, head_dim=D)
    if kind == "pages":
        cache = PagedKVCache.empty(pages=12, page_size=4, **empty).reserve([T, 5])
    else:
        cache = QuantizedKVCache.empty(**empty)
    cache = cache.append(k, k, jnp.array([T, 5]))
    held = jnp.asarray(cache.key.materialise())
    mask = Causal() & cache.mask()
    offset = jnp.array([T - 2, 3])

    @jax.jit
    def both(key, dense):
        found = []
        for x, strategy in ((key, Ragged()), (dense, Dense())):
            args = dict(mask=mask, q_offset=offset)
            found.append([f(q, x, strategy, **args) for f in (stats.mass, stats.entropy)])
        return found

    for one, other in zip(*both(cache.key, held)):
        np.testing.assert_allclose(one, other, atol=1e-5)


def largest(q, k, v, axis=None, **own):
    out = attention(
        q, k, v, Ring(AttentionMetadata(), **own), mask=Causal(), return_max_logits=True
    )
    top = out.max_logits.max((0, 1))
    return out.attention_outputs, top if axis is None else jax.lax.pmax(top, axis)


@pytest.mark.parametrize("manual", [True], ids=["manual"])
def test_the_largest_logit_of_a_head_takes_one_collective(manual):
    """Of as many numbers as there are heads, over the ring and the batch."""
    mesh = jax.make_mesh((2, 4), ("dp", "sp"), (AxisType.Auto,) * 2)
    q, k = (jnp.asarray(ARRAYS[n], jnp.float32) for n in "qk")
    spread = P("dp", "sp")
    fn = ft.partial(largest, axis_name="sp")
    if manual:
        fn = ft.partial(fn, axis=("dp", "sp"))
        fn = jax.shard_map(fn, mesh=mesh, in_specs=(spread,) * 3, out_specs=(spread, P()))
    with jax.set_mesh(mesh):
        args = [jax.device_put(x, jax.NamedSharding(mesh, spread)) for x in (q, k, k)]
        compiled = jax.jit(fn).lower(*args).compile(DEFAULT_CODE)
        _, top = compiled(*args)
    logits = np.einsum("bthd,bshd->bhts", q, k.repeat(H // K, 2)) * D**-0.5
    want = np.where(np.tri(T, dtype=bool), logits, -np.inf).max((0, 2, 3))
    np.testing.assert_allclose(top, want, rtol=1e-6)
    text = compiled.as_text()
    reduced = [line for line in text.splitlines() if " all-reduce(" in line]
    assert reduced and all(f"f32[{H}]" in line.split(" all-reduce(")[0] for line in reduced)
    assert "all-gather" not in text


def test_no_gradient_of_a_largest_logit():
    q = jnp.asarray(ARRAYS["q"][0], jnp.float32)
    top = lambda q: attention(q, q, q, return_max_logits=True).max_logits.sum()
    assert (jax.grad(top)(q) == 0).all()


def test_what_the_maximum_of_a_carry_is():
    """The largest logit of the keys, or of sinks; of an output and its logsumexp, the latter."""
    logits, values = jnp.array([[[[1.0, 3.0, -jnp.inf]]]]), jnp.ones((1, 3, 1, 2))
    carry = eqattn.Carry.from_logits(logits, values)
    assert carry.max_so_far.item() == 3 and carry.merge(carry).max_so_far.item() == 3
    assert carry.with_sinks(jnp.full((1, 1), 2.0)).max_so_far.item() == 3
    assert carry.with_sinks(jnp.full((1, 1), 5.0)).max_so_far.item() == 5
    again = eqattn.Carry.from_output(*carry.finalise())
    assert again.max_so_far.item() == carry.logsumexp().item() > 3
    assert eqattn.Carry.empty((1,), 2).max_so_far.item() == -jnp.inf


def test_distance_in_a_tree_is_that_of_depths():
    q = jnp.zeros((2, 4, 2, 8))  # so each token attends alike to its path, itself included
    found = stats.effective_window(q, q, mask=Tree([-1, 0, 0, 1], start=0))
    np.testing.assert_allclose(found[0, :, 0], [1, 2, 2, 3], rtol=1e-6)


def test_bad_input():
    q = jnp.zeros((2, 4, 2, 8))
    with pytest.raises(ValueError, match=r"weights \(3, 1\).*\(2, 4, 2\).*full size or 1"):
        stats.mass(q, q, weights=jnp.ones((3, 1)))
    with pytest.raises(TypeError, match="bias must be an array"):
        stats.entropy(q, q, Blockwise(), bias=Causal())  # pyright: ignore
    with pytest.raises(ValueError, match="has its own"):
        stats.expectation(ALiBi(jnp.ones(2)), q, q, arrays=[Operand(jnp.ones(4), "s")])
    with pytest.raises(TypeError, match="AttentionImpl"):
        stats.entropy(q, q, Causal())  # pyright: ignore
    assert eqattn.stats is stats


def test_a_logsumexp_of_other_rows(unchecked):
    q = jnp.zeros((2, 4, 2, 8))
    for known in (jnp.ones((2, 2, 4)), jnp.ones((2, 4, 2), jnp.int32)):
        with pytest.raises(ValueError, match=r"logsumexp .*\[2, 4, 2\] \[\*b, t, h\].*return_"):
            stats.mass(q, q, logsumexp=known)
