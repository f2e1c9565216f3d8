"""A layer whose tokens are spread over devices, in any order, against the float64 oracle: values
and all gradients, with rotary positions and with everything else that asks where a token is.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from matrix import oracle, oracle_masks as om

from eqattn import (
    ALiBi,
    AllGather,
    AttentionMetadata,
    Blockwise,
    Causal,
    Contiguous,
    nn,
    Ring,
    Segments,
    Ulysses,
    Zigzag,
)
from eqattn.cache import KVCache


B, T, H, K, D, SIZE = 2, 16, 4, 2, 6, 5
METADATA = AttentionMetadata(blocksize_q=4, blocksize_k=4)
IDS = np.sort(np.random.default_rng(2).integers(0, 3, (B, T)), -1).astype(np.int32)
STRIDE = 3 * np.arange(T, dtype=np.int32) + 40  # positions that the caller gives
ZIGZAG = Zigzag()


@pytest.fixture(autouse=True)
def _wide(x64):
    pass


def mesh_of(*sizes):
    names = ("sp", "hp")[: len(sizes)]
    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, devices=devices, axis_types=kinds)


# The mesh, the strategy, and over how many places of a ring its layout permutes.
PLACES = {
    "zigzag": ((4,), Ring(METADATA, layout=ZIGZAG), 4),
    "zigzag of two": ((2,), Ring(METADATA, layout=ZIGZAG), 2),
    "zigzag with heads": ((2, 2), Ring(METADATA, layout=ZIGZAG, head_axis="hp"), 2),
    "contiguous": ((4,), Ring(METADATA, layout=Contiguous()), 1),
    "ulysses": ((2,), Ulysses(METADATA), 1),
    "gathered zigzag": ((2,), AllGather(METADATA, layout=ZIGZAG), 2),
}


def rotation(positions):
    """Rotary positions as matrices `[t, d, d]`, from their definition."""
    turn = np.zeros((len(positions), D, D))
    for i in range(D // 2):
        angle = positions * 10_000.0 ** (-2 * i / D)
        j = i + D // 2
        turn[:, i, i] = turn[:, j, j] = np.cos(angle)
        turn[:, i, j], turn[:, j, i] = -np.sin(angle), np.sin(angle)
    return turn


def make(feature):
    with_key = functools.partial(
        nn.MultiheadAttention, H, SIZE, qk_size=D, vo_size=D, num_kv_heads=K, rotary=nn.Rotary(),
        dtype=jnp.float64, key=jax.random.key(0),
    )  # fmt: skip
    if feature == "window":
        return with_key(window=(3, 0))
    return with_key(score=ALiBi(jnp.linspace(0.1, 0.3, H))) if feature == "alibi" else with_key()


def reference(layer, x, ct, feature):
    """Output, and gradients of the input, the weights and the slopes, in NumPy."""
    wq, wk, wv, wo = (
        np.asarray(getattr(layer, f"{name}_proj").weight)
        for name in ("query", "key", "value", "output")
    )
    at = STRIDE if feature == "given" else np.arange(T)
    turn = rotation(at.astype(float))
    heads = lambda w, n: np.einsum("btc,nc->btn", x, w).reshape(B, T, n, D)
    distance = at[:, None] - at[None]
    visible = distance >= 0
    if feature == "window":
        visible = visible & (distance <= 3)
    visible = np.broadcast_to(visible, (B, 1, T, T))
    if feature == "segments":
        visible = visible & om.segments(IDS, IDS)
    problem = oracle.Problem(
        q=np.einsum("tde,bthe->bthd", turn, heads(wq, H)),
        k=np.einsum("tde,bthe->bthd", turn, heads(wk, K)),
        v=heads(wv, K),
        scale=D**-0.5,
        mask=visible,
        **(
            {"slopes": np.linspace(0.1, 0.3, H), "distance": om.distance(T, T, 0)}
            if feature == "alibi"
            else {}
        ),
    )
    joined = oracle.forward(problem).out.reshape(B, T, H * D)
    grads = oracle.vjp(problem, (ct @ wo).reshape(B, T, H, D), np.zeros((B, T, H)))
    back = {name: np.einsum("tde,bthd->bthe", turn, grads[name]) for name in "qk"}
    flat = [y.reshape(B, T, -1) for y in (back["q"], back["k"], grads["v"])]
    slopes = [np.einsum("btn,btc->nc", y, x) for y in flat]
    dx = sum(y @ w for y, w in zip(flat, (wq, wk, wv)))
    wanted = [joined @ wo.T, dx, *slopes, np.einsum("btn,btc->nc", ct, joined)]
    return [*wanted, grads["slopes"]] if feature == "alibi" else wanted


def run(layer, x, ct, ids, at, feature):
    """Output and gradients of the layer, for the tokens as they lie here."""

    def output(layer, x):
        def one(x, ids):
            mask = Causal() & Segments(ids) if feature == "segments" else "causal"
            given = {"q_positions": at, "kv_positions": at} if feature == "given" else {}
            return layer(x, mask=mask, **given)

        return jax.vmap(one)(x, ids)

    out, pull = jax.vjp(output, layer, x)
    slopes, dx = pull(ct)
    return out, dx, [x for x in jax.tree.leaves(slopes) if eqx.is_array(x) and x.ndim]


def agree(got, want):
    out, dx, slopes = got
    assert 2 + len(slopes) == len(want)
    for a, b in zip((out, dx, *slopes), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(1, np.abs(b).max()))


def inputs():
    rng = np.random.default_rng(1)
    return rng.normal(size=(B, T, SIZE)), rng.normal(size=(B, T, SIZE))


FEATURES = ["causal", "window", "alibi", "segments", "given"]
FEW = [("zigzag", "given"), ("zigzag with heads", "window")]


@pytest.mark.parametrize("place, feature", FEW)
def test_whole_arrays(place, feature):
    sizes, strategy, n = PLACES[place]
    x, ct = inputs()
    layer = make(feature)
    want = reference(layer, x, ct, feature)
    agree(run(layer, x, ct, IDS, STRIDE, feature), want)  # `Blockwise`, in order
    move = (lambda x, axis=1: ZIGZAG.permute(x, n, axis)) if n > 1 else lambda x, axis=1: x
    back = (lambda x: ZIGZAG.unpermute(x, n)) if n > 1 else lambda x: x
    with jax.set_mesh(mesh_of(*sizes)):
        moved = map(jnp.asarray, (move(x), move(ct), move(IDS), move(STRIDE, 0)))
        fn = jax.jit(functools.partial(run, feature=feature))
        out, dx, slopes = fn(nn.with_strategy(layer, strategy), *moved)
    agree((back(out), back(dx), slopes), want)


@pytest.mark.parametrize("place", ["zigzag"])
def test_in_a_shard_map(place):
    """Where a device sees its own tokens only, which are not the first ones."""
    sizes, strategy, n = PLACES[place]
    x, ct = inputs()
    layer = make("causal")
    want = reference(layer, x, ct, "causal")
    mesh = mesh_of(*sizes)
    move = (lambda x: ZIGZAG.permute(x, n)) if n > 1 else lambda x: x
    back = (lambda x: ZIGZAG.unpermute(x, n)) if n > 1 else lambda x: x
    tokens = P(None, mesh.axis_names)
    swapped = nn.with_strategy(layer, strategy)

    @jax.jit
    def both(layer, x, ct):
        def output(layer, x):
            return jax.shard_map(
                lambda layer, x: jax.vmap(lambda x: layer(x, mask="causal"))(x),
                mesh=mesh,
                in_specs=(P(), tokens),
                out_specs=tokens,
            )(layer, x)

        out, pull = jax.vjp(output, layer, x)
        return out, *pull(ct)

    out, slopes, dx = both(swapped, jnp.asarray(move(x)), jnp.asarray(move(ct)))
    weights = [x for x in jax.tree.leaves(slopes) if x.ndim]
    agree((back(out), back(dx), weights), want)


def test_what_the_strategy_says():
    for place, (sizes, strategy, n) in PLACES.items():
        if getattr(strategy, "layout", None) in (
            None,
            Contiguous(),
        ):  # is `Blockwise` without a mesh
            assert strategy.token_positions(T) is None
        with jax.set_mesh(mesh_of(*sizes)):
            positions = strategy.token_positions(T)
        if n == 1:
            assert positions is None, place
        else:
            np.testing.assert_array_equal(positions, ZIGZAG.permute(np.arange(T), n, 0))
    assert Blockwise().token_positions(T) is None


def test_a_function_of_heads_must_know_the_positions():
    """It may embed positions, such as Equinox's rotary embedding does."""
    x, ct = inputs()
    layer = eqx.tree_at(lambda m: m.rotary, make("causal"), None)
    want = reference(layer, x, ct, "causal")[0]
    sizes, strategy, n = PLACES["zigzag"]
    swapped = nn.with_strategy(layer, strategy)
    moved = jnp.asarray(ZIGZAG.permute(x, n))
    with jax.set_mesh(mesh_of(*sizes)):
        at = strategy.token_positions(T)

        def process(q, k, v):
            return nn.rotary(q, at), nn.rotary(k, at), v

        def one(x, **given):
            return swapped(x, mask="causal", process_heads=process, **given)

        with pytest.raises(ValueError, match=r"process_heads .* Ring .*token_positions\(tokens\)"):
            jax.vmap(one)(moved)
        out = jax.vmap(lambda x: one(x, q_positions=at, kv_positions=at))(moved)
    np.testing.assert_allclose(ZIGZAG.unpermute(out, n), want, rtol=0, atol=1e-12)


def test_a_cache_keeps_tokens_in_order():
    sizes, strategy, _ = PLACES["zigzag"]
    layer = nn.with_strategy(make("causal"), strategy)
    cache = KVCache.empty(1, T, K, D, dtype=jnp.float64)
    with jax.set_mesh(mesh_of(*sizes)), pytest.raises(ValueError, match="A cache keeps tokens in"):
        layer(jnp.zeros((T, SIZE)), mask="causal", cache=cache)


def test_tokens_that_do_not_divide_are_refused():
    sizes, strategy, _ = PLACES["zigzag"]
    layer = nn.with_strategy(make("causal"), strategy)
    with jax.set_mesh(mesh_of(*sizes)), pytest.raises(ValueError, match="15 tokens are not .* pad"):
        layer(jnp.zeros((15, SIZE)), mask="causal")
