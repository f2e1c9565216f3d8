"""`Neighbourhood` against its definition, token by token, in every order and layout."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import (
    attention,
    AttentionMetadata,
    Blockwise,
    Dense,
    DenseMask,
    MaskFn,
    Neighbourhood,
    nn,
    Ring,
    TileOrder,
    Zigzag,
)


def places_of(shape, tile):
    """The index of each token in the order of tiles, by walking through them."""
    tiles = itertools.product(*(range(0, n, m) for n, m in zip(shape, tile)))
    order = []
    for corner in tiles:
        inside = (range(a, min(a + m, n)) for a, m, n in zip(corner, tile, shape))
        order += list(itertools.product(*inside))
    return np.array(order)


def seen(coordinates, shape, window, causal):
    """Which pairs of tokens at these coordinates see each other, pair by pair."""
    out = np.ones((len(coordinates),) * 2, bool)
    for i, j in np.ndindex(out.shape):
        for axis, (n, w, ends) in enumerate(zip(shape, window, causal)):
            x, y = coordinates[i, axis], coordinates[j, axis]
            first = x - w + 1 if ends else min(max(x - w // 2, 0), n - w)
            out[i, j] &= first <= y < first + w
    return out


CASES = [
    ((5, 7), (5, 7), (3, 4), (False, False)),
    ((6, 8), (2, 4), (3, 3), (False, True)),
    ((5, 7), (2, 3), (5, 1), (False, False)),
    ((3, 4, 5), (2, 3, 2), (2, 3, 3), (True, False, False)),
    ((9,), (4,), (3,), (False,)),
]


@pytest.mark.parametrize("shape, tile, window, causal", CASES[1:3])
def test_it_is_what_its_definition_says(shape, tile, window, causal):
    order = TileOrder(shape, tile)
    coordinates = places_of(shape, tile)
    np.testing.assert_array_equal(order.coordinates, coordinates)
    n = order.tokens
    mask = Neighbourhood(order, window, causal)
    want = seen(coordinates, shape, window, causal)
    np.testing.assert_array_equal(mask.as_array(n, n)[0], want)
    # At other places, by arithmetic on traced ones, and pair by pair.
    rows = np.array([-2, n - 1, 0, n, n + 3], np.int32)
    some = jax.jit(lambda q: mask.as_array(5, n + 2, q_positions=q))(rows)[0]
    inside = np.zeros((5, n + 2), bool)
    inside[1:3, :n] = want[[n - 1, 0]]
    np.testing.assert_array_equal(some, inside)
    pairs = jax.vmap(jax.vmap(lambda q, k: mask.visible(0, 0, q, k), (None, 0)), (0, None))
    np.testing.assert_array_equal(pairs(rows, jnp.arange(n + 2)), inside)
    x = np.arange(n)
    moved = order.permute(x, 0)
    np.testing.assert_array_equal(moved, np.ravel_multi_index(tuple(coordinates.T), shape))
    np.testing.assert_array_equal(order.unpermute(jnp.asarray(moved), 0), x)


def test_exactly_the_empty_blocks_are_skipped_and_tiles_leave_fewer():
    share = []
    for tile in ((64, 64), (8, 8)):
        mask = Neighbourhood(TileOrder((16, 16), tile), 9)
        visible = np.asarray(mask.as_array(256, 256)[0]).reshape(4, 64, 4, 64)
        sparsity = mask.sparsity(256, 256, block_q=64, block_k=64)
        assert sparsity.empty == (~visible.any((1, 3))).mean()
        assert sparsity.full == visible.all((1, 3)).mean()
        large = Neighbourhood(TileOrder((64, 64), tile), 17)
        share.append(1 - large.sparsity(4096, 4096, block_q=64, block_k=64).empty)
    # Of 64 blocks, about 17 rows of tokens or 3 x 3 tiles.
    assert share[1] < 0.15 and share[0] > 0.26
    video = Neighbourhood(TileOrder((8, 16, 16), (2, 8, 8)), (3, 5, 5), (True, False, False))
    assert video.sparsity(2048, 2048, block_q=128, block_k=128).empty > 0.55


H, D = 2, 4
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("place", ["interpret"])
def test_in_kernels_and_rings_with_tokens_of_text(place):
    """An image of 6 x 8 tokens, tile by tile, and 16 tokens of text behind it that see all."""
    order, text = TileOrder((6, 8), (2, 4)), 16
    n = order.tokens + text
    mask = Neighbourhood(order, 3) | MaskFn(lambda b, h, q, k: (q >= 48) | (k >= 60))
    whole = np.zeros((n, n), bool)
    whole[:48, :48] = seen(places_of((6, 8), (2, 4)), (6, 8), (3, 3), (False, False))
    whole[48:], whole[:, 60:] = True, True
    x = jnp.asarray(RNG.normal(size=(1, n, H, D)), jnp.float32)
    blocks = dict(blocksize_q=16, blocksize_k=16)
    if place == "interpret":
        strategy, move, back = (
            Blockwise(AttentionMetadata(platform="interpret", **blocks)),
            *[lambda x: x] * 2,
        )
    else:
        mesh = jax.make_mesh((2,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
        layout = Zigzag()
        strategy = Ring(AttentionMetadata(**blocks), axis_name="sp", mesh=mesh, layout=layout)
        move, back = (lambda x, f=f: f(x, 2) for f in (layout.permute, layout.unpermute))
    both = []
    for fn in (
        lambda x: back(attention(*[move(x)] * 3, strategy, mask=mask).attention_outputs),
        lambda x: attention(x, x, x, Dense(), mask=DenseMask(whole)).attention_outputs,
    ):
        both.append(jax.jit(fn)(x))
    np.testing.assert_allclose(*both, rtol=0, atol=1e-5)


def test_positions_of_two_axes_turn_tiles_as_rows():
    """Rotary positions of a token follow it into its tile."""
    order = TileOrder((4, 6), (2, 3))
    plain = TileOrder((4, 6)).coordinates
    x = jnp.asarray(RNG.normal(size=(1, 24, H, 8)), jnp.float32)
    turned = nn.rotary(x, plain, sections=(2, 2))
    again = nn.rotary(order.permute(x), order.coordinates, sections=(2, 2))
    np.testing.assert_allclose(order.unpermute(again), turned, rtol=0, atol=1e-6)


BAD = {
    "axes": (lambda: TileOrder((4, 4), (2,)), r"for each axis of shape \(4, 4\), got \(2,\)"),
    "no tokens": (lambda: TileOrder((4, 0)), "positive size"),
    "too wide": (lambda: Neighbourhood((4, 4), 5), r"window \(5, 5\).*grid \(4, 4\)"),
    "windows": (lambda: Neighbourhood((4, 4), (3,)), "one for each axis"),
    "tokens": (lambda: TileOrder((4, 4)).permute(np.zeros((2, 15))), r"\(2, 15\) must have the 16 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_text():
    mask = Neighbourhood(TileOrder((4, 6), (2, 3)), 3)
    again = eval(repr(mask), {"Neighbourhood": Neighbourhood, "TileOrder": TileOrder})
    assert again == mask or jax.tree.structure(again) == jax.tree.structure(mask)
    assert "queries (down)" in str(mask)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.float16])
def test_an_order_keeps_numbers_of_numpy(dtype):
    order = TileOrder((4, 6), (2, 2))
    x = (np.arange(24) * 1.1 + (0 if dtype == np.float16 else 2**33)).astype(dtype)[:, None]
    moved = order.permute(x, 0)
    assert moved.dtype == dtype and not np.array_equal(moved, x)
    np.testing.assert_array_equal(order.unpermute(moved, 0), x)
