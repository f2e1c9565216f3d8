"""`LatentAttention` against the published equations in plain NumPy, and its two forms against each
other.
"""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import AttentionMetadata, Blockwise, Dense, Ring, SlidingWindow, Zigzag
from eqattn.cache import KVCache, LatentKVCache, QuantizedKVCache
from eqattn.nn import LatentAttention, MultiheadAttention, Rotary, with_strategy


T, HEADS, HIDDEN, RANK, NOPE, ROPE, VALUE = 9, 3, 20, 8, 6, 4, 5
SIZES = dict(kv_lora_rank=RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=VALUE)
THETA = 100.0
FORMS = "expanded", "absorbed"


def made(q_lora_rank=None, dtype=jnp.float64, **kw):
    layer = LatentAttention(
        HEADS, HIDDEN, **SIZES, q_lora_rank=q_lora_rank, dtype=dtype,
        rotary=Rotary(THETA, interleaved=True), key=jax.random.key(0), **kw,
    )  # fmt: skip
    # Norms that change something, and that NumPy can see.
    norms = lambda m: [n.weight for n in (m.kv_a_norm, m.q_a_norm) if n is not None]
    rng = np.random.default_rng(1)
    return eqx.tree_at(norms, layer, [w + rng.uniform(0, 1, w.shape) for w in norms(layer)])


def inputs(dtype=jnp.float64, rows=()):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.standard_normal((*rows, T, HIDDEN)), dtype)


def published(xp, w, x, scale=(NOPE + ROPE) ** -0.5):
    """Equations (1) to (11) of DeepSeek-V3's report, token by token where that is plainest."""

    def norm(x, weight):
        return x / xp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight

    def turn(x):  # [t, h, p]: the pair (2i, 2i + 1) turns by theta^(-2i/p) for each position
        angles = np.arange(T)[:, None] * THETA ** (-np.arange(0, ROPE, 2) / ROPE)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = x[..., 0::2], x[..., 1::2]
        return xp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)

    if "q_proj" in w:
        q = x @ w["q_proj"].T
    else:
        q = norm(x @ w["q_a_proj"].T, w["q_a_norm"]) @ w["q_b_proj"].T
    q = q.reshape(T, HEADS, NOPE + ROPE)
    q = xp.concatenate([q[..., :NOPE], turn(q[..., NOPE:])], -1)
    compressed = x @ w["kv_a_proj"].T
    shared = turn(compressed[:, None, RANK:])
    latent = norm(compressed[:, :RANK], w["kv_a_norm"])
    inner, v = ((latent @ w[n].T).reshape(T, HEADS, -1) for n in ("k_b_proj", "v_b_proj"))
    k = xp.concatenate([inner, xp.repeat(shared, HEADS, 1)], -1)
    logits = xp.einsum("thd,shd->hts", q, k) * scale
    logits = xp.where(np.tril(np.ones((T, T), bool)), logits, -np.inf)
    p = xp.exp(logits - logits.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    out = xp.einsum("hts,shv->thv", p, v)
    return out.reshape(T, -1) @ w["o_proj"].T, logits.max(-1).T


def weights(layer):
    names = ("q_proj", "q_a_proj", "q_a_norm", "q_b_proj", "kv_a_proj", "kv_a_norm", "k_b_proj",
             "v_b_proj", "o_proj")  # fmt: skip
    found = {name: getattr(layer, name) for name in names}
    return {name: x.weight for name, x in found.items() if x is not None}


@pytest.mark.parametrize("q_lora_rank", [7])
def test_both_forms_are_what_is_published(q_lora_rank, x64):
    """Values and the gradients of the input and all weights."""
    layer, x = made(q_lora_rank), inputs()
    ct = jnp.asarray(np.random.default_rng(2).standard_normal((T, HIDDEN)))

    @jax.jit
    def run(layer, x):
        got = {}
        for form in FORMS:
            f = lambda layer, x, form=form: layer(x, "causal", form=form)
            out, vjp = jax.vjp(f, layer, x)
            of_layer, of_x = vjp(ct)
            got[form] = out, {"x": of_x, **weights(of_layer)}
        return got

    def loss(w, x):
        return (published(jnp, w, x)[0] * ct).sum()

    of = weights(layer)
    want, _ = published(np, {n: np.asarray(w) for n, w in of.items()}, np.asarray(x))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        of_weights, of_x = jax.jit(jax.grad(loss, (0, 1)))(of, x)
    for out, gradients in run(layer, x).values():
        np.testing.assert_allclose(out, want, rtol=0, atol=1e-13)
        for name, gradient in {"x": of_x, **of_weights}.items():
            np.testing.assert_allclose(gradients[name], gradient, rtol=0, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_the_largest_logit_of_each_query(form, x64):
    layer, x = made(7), inputs()
    arrays = {n: np.asarray(w) for n, w in weights(layer).items()}
    want = published(np, arrays, np.asarray(x))
    run = eqx.filter_jit(ft.partial(layer, mask="causal", form=form, return_max_logits=True))
    got = run(x)
    cache = LatentKVCache.empty(1, 16, RANK, ROPE, jnp.float64)
    parts = []
    for part in (x[:4], x[4:]):
        cache, more = run(part, cache=cache)
        parts.append(more)
    for found in (got, jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)):
        for a, b in zip(found, want):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


CACHES = {
    "dense": lambda: LatentKVCache.empty(2, 64, RANK, ROPE),
    "int8": lambda: LatentKVCache(QuantizedKVCache.empty(2, 64, 1, ROPE, RANK)),
}


@pytest.mark.parametrize("name", ["dense"])
def test_decoding_is_the_whole(name):
    """In float32, to 1e-5; and from int8 to what that rounds. Both forms."""
    layer = made(7, jnp.float32)
    x = inputs(jnp.float32, (2,))
    tolerance = 0.03 if name == "int8" else 1e-5

    @jax.jit
    def run(layer, cache, x):
        whole = jax.vmap(lambda x: layer(x, "causal"))(x)
        cache, first = layer(x[:, :5], "causal", cache=cache)
        _, expanded = layer(x[:, 5:], "causal", cache=cache, form="expanded")
        outs = []
        for i in range(5, T):
            cache, out = layer(x[:, i : i + 1], "causal", cache=cache, counts=jnp.array([1, 1]))
            outs.append(out)
        return whole, jnp.concatenate([first, *outs], 1), expanded, cache.length

    whole, stepped, expanded, length = run(layer, CACHES[name](), x)
    scale = np.abs(whole).max()
    np.testing.assert_allclose(stepped, whole, rtol=0, atol=tolerance * scale)
    np.testing.assert_allclose(expanded, whole[:, 5:], rtol=0, atol=tolerance * scale)
    assert length.tolist() == [T, T]


def test_one_sequence_and_other_strategies():
    layer, x = made(None, jnp.float32, softmax_scale=jnp.array(0.3)), inputs(jnp.float32)
    cache = LatentKVCache.empty(1, 64, RANK, ROPE)
    mask = SlidingWindow(3, 0)

    @jax.jit
    def run(layer, x, cache):
        dense = with_strategy({"layer": layer}, Dense(AttentionMetadata()))["layer"]
        one = jax.tree.map(lambda x: x[0], cache)
        outs = [dense(x, mask), dense(x, mask, form="absorbed"), layer(x, mask, cache=one)[1]]
        outs += [dense(x, mask, q_positions=jnp.arange(5, 5 + T))]
        return [*outs, with_strategy(layer, Blockwise())(x, mask, cache=cache)[1]]

    first, *others = run(layer, x, cache)
    for out in others:
        np.testing.assert_allclose(out, first, rtol=0, atol=2e-6)
    slope = jax.grad(lambda m: m(x, mask, form="absorbed").sum())(layer).softmax_scale
    assert slope.shape == () and slope != 0


def test_over_a_ring_of_devices():
    """Both forms, with the tokens of a zigzag on each of two devices."""
    layer, x = made(None, jnp.float32), inputs(jnp.float32)[:8]
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("sp",), auto, devices=jax.devices()[:2])
    ring = Ring(axis_name="sp", layout=Zigzag())

    @jax.jit
    def run(layer, x):
        order = ring.token_positions(8)
        over = with_strategy(layer, ring)
        return layer(x, "causal")[order], *[over(x[order], "causal", form=f) for f in FORMS]

    with jax.set_mesh(mesh):
        whole, *outs = run(layer, x)
    for out in outs:
        np.testing.assert_allclose(out, whole, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "call, error, match",
    [
        (lambda m, x: m(x[None]), ValueError, "use jax.vmap"),
        (lambda m, x: m(x, form="both"), ValueError, "form must be one of 'expanded', 'absorbed'"),
        (lambda m, x: m(x, counts=1), ValueError, "pass cache= too"),
        (lambda m, x: m(x, cache=KVCache.empty(1, 64, 1, ROPE, RANK)), TypeError,
         r"LatentKVCache.empty\(batch, capacity, 8, 4\)"),
        (lambda m, x: m(x, cache=LatentKVCache.empty(1, 64, RANK, ROPE, jnp.float16)), TypeError,
         "cache is of float16"),
        (lambda m, x: m(x[:, 1:]), ValueError, "19 features.* such as query_size or hidden_size"),
        (lambda m, x: LatentAttention(2, 8, **SIZES, rotary=Rotary(dim=6), key=jax.random.key(0)),
         ValueError, "up to the head's 4"),
        (lambda m, x: LatentAttention(2, 8, **SIZES, dtype=jnp.int32, key=jax.random.key(0)),
         TypeError, "dtype must be floating point"),
        (lambda m, x: MultiheadAttention(2, 8, key=jax.random.key(0))(
            x[:, :8], cache=LatentKVCache.empty(1, 64, 4, 4)), ValueError, "do not fit a cache"),
    ],
)  # fmt: skip
def test_what_does_not_fit_raises(call, error, match):
    with pytest.raises(error, match=match):
        call(made(None, jnp.float32), inputs(jnp.float32))
