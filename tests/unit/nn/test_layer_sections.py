"""Layers whose tokens have coordinates, as those of images and video, against float64 NumPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from _sections import turned_by_axes
from test_multihead import reference

from eqattn import (
    AttentionMetadata,
    Causal,
    Dense,
    KeyPadding,
    nn,
    Ring,
    SlidingWindow,
    Tree,
    Zigzag,
)
from eqattn.cache import KVCache, LatentKVCache, QuantizedKVCache, RingBufferCache


T, SIZE, HEADS, KV_HEADS, DIM = 8, 24, 4, 2, 8
SECTIONS = (1, 2, 1)
AT = np.random.default_rng(0).integers(-20, 50, (T, 3))
KINDS = {
    "M-RoPE": dict(sections=SECTIONS),
    "axial": dict(sections=SECTIONS, axial=True, interleaved=True),
}


def make(given, dtype=None, **kwargs):
    return nn.MultiheadAttention(
        HEADS, SIZE, qk_size=DIM, num_kv_heads=KV_HEADS, rotary=nn.Rotary(**given), dtype=dtype,
        key=jax.random.key(1), **kwargs,
    )  # fmt: skip


def inputs(*rows):
    return normal(2, *rows, T, SIZE, dtype=None)


def expected(layer, given, x, at, visible, key_=None, key_at=None):
    """The oracle, for tokens that see others where `visible` `[t, s]` says so."""
    key_, key_at = (x, at) if key_ is None else (key_, key_at)
    turn = lambda heads, at: turned_by_axes(heads, at, **given)
    return reference(
        layer, x, key_, key_,
        lambda z: np.where(visible, z, -np.inf),
        lambda q, k, v: (turn(q, at), turn(k, key_at), v),
    )  # fmt: skip


CAUSAL = np.tri(T, dtype=bool)


@pytest.mark.parametrize(
    "kind, strategy", [("M-RoPE", None), ("axial", Dense(AttentionMetadata()))]
)
def test_values(kind, strategy, x64):
    """Coordinates are for rotary embeddings alone: masks see the tokens in their order."""
    given, x = KINDS[kind], inputs()
    layer = make(given, strategy=strategy)
    run = jax.jit(lambda x, at: layer(x, mask="causal", q_positions=at, kv_positions=at))
    np.testing.assert_allclose(
        run(x, AT), expected(layer, given, x, AT, CAUSAL), rtol=0, atol=1e-13
    )
    rows, ats = inputs(2), np.stack([AT, AT[::-1]])
    want = [expected(layer, given, *pair, CAUSAL) for pair in zip(rows, ats)]
    np.testing.assert_allclose(jax.vmap(run)(rows, ats), want, rtol=0, atol=1e-13)
    floats = jnp.asarray(AT / 7)
    want = expected(layer, given, x, AT / 7, CAUSAL)
    np.testing.assert_allclose(run(x, floats), want, rtol=0, atol=1e-13)
    memory, there = x[:5] + 1, AT[:5] * 2
    got = layer(x, memory, q_positions=AT, kv_positions=there)
    want = expected(layer, given, x, AT, np.ones((T, 5), bool), memory, there)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["M-RoPE"])
def test_gradients(kind, x64):
    """Of the input and of all weights, along directions."""
    given, x, ct = KINDS[kind], inputs(), np.asarray(normal(3, T, SIZE, dtype=None))
    layer = make(given)

    def loss(layer, x):
        return jnp.vdot(ct, layer(x, mask="causal", q_positions=AT, kv_positions=AT))

    gradients = jax.jit(jax.grad(loss, (0, 1)))(layer, x)
    rng = np.random.default_rng(4)
    along = jax.tree.map(lambda w: jnp.asarray(rng.normal(size=np.shape(w))), (layer, x))

    def ahead(step):
        moved = jax.tree.map(lambda w, d: w + step * d, (layer, x), along)
        return np.vdot(ct, expected(moved[0], given, moved[1], AT, CAUSAL))

    got = sum(map(jnp.vdot, *map(jax.tree.leaves, (gradients, along))))
    np.testing.assert_allclose(got, (ahead(1e-5) - ahead(-1e-5)) / 2e-5, rtol=1e-6)


def test_bfloat16():
    given, x = KINDS["axial"], inputs().astype(jnp.bfloat16)
    layer = make(given, dtype=jnp.bfloat16)
    got = layer(x, mask="causal", q_positions=AT, kv_positions=AT)
    assert got.dtype == jnp.bfloat16
    want = expected(layer, given, x, AT, CAUSAL)
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=0, atol=0.03)


def test_text_has_one_position_on_all_axes(x64):
    """With M-RoPE it is then what it is without sections."""
    layer, x, place = make(KINDS["M-RoPE"]), inputs(), np.arange(T)
    at = np.repeat(place[:, None], 3, 1)
    got = layer(x, mask="causal", q_positions=at, kv_positions=at)
    np.testing.assert_allclose(got, make({})(x, mask="causal"), rtol=0, atol=1e-14)


# The ring buffer writes over the oldest token.
CACHES = {
    "dense": (KVCache, 16),
    "ring buffer": (RingBufferCache, 7),
    "int8": (QuantizedKVCache, 16),
}
OF_HEADS = KV_HEADS, DIM, SIZE // HEADS


@pytest.mark.parametrize("name", ["ring buffer"])
def test_a_cache_counts_tokens_and_the_caller_gives_coordinates(name, x64):
    """A prompt and then single tokens, of one sequence and of two. The window counts tokens."""
    kind, capacity = CACHES[name]
    given, x, ats = KINDS["axial"], inputs(2), np.stack([AT, AT[::-1]])
    layer = make(given, window=(3, 0))
    step = eqx.filter_jit(lambda *xs, **kwargs: layer(*xs, mask="causal", **kwargs))
    visible = CAUSAL & ~np.tri(T, k=-4, dtype=bool)
    want = np.stack([expected(layer, given, *pair, visible) for pair in zip(x, ats)])
    for rows, count in ((0, 1), (slice(None), 2)):
        cache, outs = kind.empty(count, capacity, *OF_HEADS, jnp.float64), []
        for i, j in ((0, 4), *((i, i + 1) for i in range(4, T))):
            at = ats[rows, i:j]
            cache, out = step(x[rows, i:j], cache=cache, q_positions=at, kv_positions=at)
            outs.append(out)
        tolerance = 0.05 if name == "int8" else 1e-13
        np.testing.assert_allclose(np.concatenate(outs, -2), want[rows], rtol=0, atol=tolerance)


def test_a_call_that_only_reads_a_cache_has_coordinates_of_queries(x64):
    given, x = KINDS["axial"], inputs()
    layer, cache = make(given), KVCache.empty(1, 16, *OF_HEADS, jnp.float64)
    cache, _ = layer(x, cache=cache, q_positions=AT, kv_positions=AT)
    _, got = layer(x[:2], cache=cache, append=False, q_positions=AT[:2] + 1)
    want = expected(layer, given, x[:2], AT[:2] + 1, np.ones((2, T), bool), x, AT)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)


def test_a_tree_moves_positions_of_masks_and_not_coordinates(x64):
    given, x, layer = KINDS["M-RoPE"], inputs(), make(KINDS["M-RoPE"])
    parents = np.array([-1, 0, 1, 1, 0, 4, 2, 3])
    seen = np.eye(T, dtype=bool)
    for i in range(T):
        j = parents[i]
        while j >= 0:
            seen[i, j], j = True, parents[j]
    depth = seen.sum(1) - 1
    near = seen & (depth[:, None] - depth <= 1)
    tree = Tree(parents) & SlidingWindow(1, 0)
    got = layer(x, mask=tree, q_positions=AT, kv_positions=AT)
    np.testing.assert_allclose(got, expected(layer, given, x, AT, near), rtol=0, atol=1e-13)


@pytest.mark.parametrize("processes", [True])
def test_over_devices_coordinates_lie_as_the_tokens_do(processes, x64):
    """In a ring in zigzag, masks see the tokens in their order."""
    mesh = jax.make_mesh((2,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    layout = Zigzag()
    strategy = Ring(AttentionMetadata(mesh=mesh), axis_name="sp", layout=layout)
    order = np.asarray(layout.tokens(T, 2))[0]
    given, x = KINDS["axial"], inputs()
    layer = make(given, strategy=strategy)
    call = dict(process_heads=lambda *heads: heads) if processes else {}
    run = jax.jit(lambda x, at: layer(x, mask="causal", q_positions=at, kv_positions=at, **call))
    want = expected(layer, given, x, AT, CAUSAL)[order]
    np.testing.assert_allclose(run(x[order], AT[order]), want, rtol=0, atol=1e-13)


RANK, NOPE = 5, 6


def latent(given):
    return nn.LatentAttention(
        HEADS, SIZE, kv_lora_rank=RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=DIM, v_head_dim=3,
        rotary=nn.Rotary(**given), key=jax.random.key(1),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["axial"])
def test_latents(kind, x64):
    """All tokens at once in both forms, and by a cache."""
    given, x, layer = KINDS[kind], inputs(), latent(KINDS[kind])
    run = eqx.filter_jit(layer)
    w = lambda name: np.asarray(getattr(layer, name).weight)
    turn = lambda heads: turned_by_axes(heads, AT, **given)
    q = (x @ w("q_proj").T).reshape(T, HEADS, -1)
    c, r = np.split(x @ w("kv_a_proj").T, [RANK], -1)
    c = c / np.sqrt((c * c).mean(-1, keepdims=True) + 1e-6)
    k, v = ((c @ w(n).T).reshape(T, HEADS, -1) for n in ("k_b_proj", "v_b_proj"))
    z = np.einsum("thd,shd->hts", q[..., :NOPE], k)
    z = z + np.einsum("thd,sd->hts", turn(q[..., NOPE:]), turn(r[:, None])[:, 0])
    p = np.exp(np.where(CAUSAL, z * (NOPE + DIM) ** -0.5, -np.inf))
    out = np.einsum("hts,shd->thd", p / p.sum(-1, keepdims=True), v)
    want = out.reshape(T, -1) @ w("o_proj").T
    for form in ("expanded", "absorbed"):
        got = run(x, "causal", form=form, q_positions=AT)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)
    cache, outs = LatentKVCache.empty(1, 16, RANK, DIM, jnp.float64), []
    for part in (slice(0, 5), slice(5, 6), slice(6, T)):
        cache, out = run(x[part], "causal", cache=cache, q_positions=AT[part])
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs), want, rtol=0, atol=1e-13)


def call(**kwargs):
    return lambda: make(KINDS["axial"])(normal(5, T, SIZE), **kwargs)


def cached(**kwargs):
    return call(cache=KVCache.empty(1, 16, *OF_HEADS), **kwargs)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "call, message",
    [
        (call(), r"sections=\(1, 2, 1\).* 3 coordinates.*give q_positions= of shape \(8, 3\)"),
        (call(q_positions=AT), r"give kv_positions= of shape \(8, 3\)"),
        (call(q_positions=np.arange(T), kv_positions=AT), r"\[t, axes\] = \(8, 3\).*got shape \(8,\)"),
        (call(q_positions=AT, kv_positions=AT[:, :2]), r"got shape \(8, 2\)"),
        (cached(), r"nor a cache tells: give q_positions= of shape \(8, 3\)"),
        (cached(q_positions=AT), r"give kv_positions= of shape \(8, 3\)"),
        (cached(q_positions=AT, append=False, kv_positions=AT), r"\(0, 3\).*got shape \(1, 8, 3\)"),
        (lambda: latent(KINDS["axial"])(normal(5, T, SIZE)), r"give q_positions= of shape \(8, 3\)"),
        (lambda: make(dict(sections=(1, 2))), r"4 pairs of 8 features that turn, got \(1, 2\), 3 pairs"),
        (lambda: latent(dict(sections=(8,))), r"4 pairs of 8 features that turn, got \(8,\)"),
    ],
)  # fmt: skip
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_padding_counts_tokens(x64):
    """A mask module of a call sees the order of tokens, too."""
    given, x, layer = KINDS["axial"], inputs(), make(KINDS["axial"])
    got = layer(x, mask=Causal() & KeyPadding(jnp.array(5)), q_positions=AT, kv_positions=AT)
    want = expected(layer, given, x, AT, CAUSAL & (np.arange(T) < 5))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)
