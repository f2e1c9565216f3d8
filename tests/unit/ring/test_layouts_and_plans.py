"""Layouts, plans and meshes of the ring."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqattn import (
    attention,
    AttentionMetadata,
    AttentionRegistry,
    Causal,
    KeyPadding,
    QueryPadding,
    Segments,
    SlidingWindow,
    TileOrder,
)
from eqattn._problem.problem import Problem
from eqattn._ring.layout import Contiguous, ring_mesh, ring_order, Zigzag
from eqattn._ring.plan import reach, ring_plan, span
from eqattn.strategies.ring import Ring


def test_without_a_mesh_it_is_blockwise():
    q = jax.random.normal(jax.random.key(0), (1, 10, 2, 4))
    strategies = [AttentionRegistry.create(n, AttentionMetadata()) for n in ("ring", "blockwise")]
    many, one = (attention(q, q, q, s, mask=Causal()).attention_outputs for s in strategies)
    assert (many == one).all()


def test_weights_are_not_supported():
    assert "Dense(metadata)" in Ring(AttentionMetadata()).supports(return_weights=True).reason


def test_zigzag_positions():
    want = [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert Zigzag().positions(12, 3).tolist() == want
    assert Contiguous().positions(6, 3).tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag()], ids=["contiguous", "zigzag"])
@pytest.mark.parametrize("axis", [0, 1, -2])
def test_unpermute_undoes_permute(layout, axis):
    x = np.arange(24 * 24 * 2).reshape(24, 24, 2)
    moved = layout.permute(x, 4, axis)
    assert isinstance(moved, np.ndarray)
    assert (moved == x.take(layout.positions(24, 4).reshape(-1), axis)).all()
    assert (layout.unpermute(moved, 4, axis) == x).all()
    assert (np.asarray(layout.permute(jax.numpy.asarray(x), 4, axis)) == moved).all()


@pytest.mark.parametrize("order", ["zigzag", "tiles"])
def test_tokens_on_an_explicit_axis_stay_sharded(order):
    """As on the meshes that `jax.make_mesh` makes."""
    mesh = jax.make_mesh((4,), ("sp",), (AxisType.Explicit,), devices=jax.devices()[:4])
    x = np.arange(2 * 24 * 3, dtype=np.float32).reshape(2, 24, 3)
    move, back = (
        (lambda x: Zigzag().permute(x, 4), lambda x: Zigzag().unpermute(x, 4))
        if order == "zigzag"
        else (TileOrder((4, 6), (2, 3)).permute, TileOrder((4, 6), (2, 3)).unpermute)
    )
    held = jax.device_put(x, NamedSharding(mesh, P(None, "sp")))
    for run in (lambda f: f, jax.jit):
        moved = run(move)(held)
        assert jax.typeof(moved).sharding.spec == P(None, "sp", None)
        np.testing.assert_array_equal(moved, move(x))
        again = run(back)(moved)
        assert jax.typeof(again).sharding.spec == P(None, "sp", None)
        np.testing.assert_array_equal(again, x)
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(lambda y: (move(y) * move(x)).sum()))(held)
    np.testing.assert_array_equal(gradient, x)


def test_layouts_are_static():
    assert hash(Zigzag()) == hash(Zigzag()) and Zigzag() == Zigzag() != Contiguous()
    strategy = Ring(AttentionMetadata(), layout=Zigzag())
    assert jax.tree.leaves(strategy) == []


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag()], ids=["contiguous", "zigzag"])
def test_tokens_that_do_not_divide_raise(layout):
    with pytest.raises(ValueError, match="pad them to a multiple"):
        layout.positions(7, 4)
    with pytest.raises(ValueError, match="at least 1 device"):
        layout.positions(8, 0)


def test_a_device_has_whole_chunks():
    """Two of them in zigzag: tokens for one of each device are too few."""
    assert Contiguous().chunk_size(12, 4) == 3 and Zigzag().chunk_size(16, 4) == 2
    with pytest.raises(ValueError, match="pad them to a multiple of 8"):
        Zigzag().positions(12, 4)


def test_plan_pads_contiguous_tokens():
    plan = ring_plan(1001, 8, mask=Causal())
    assert plan.tokens == 1008 and plan.flops == ring_plan(1008, 8, mask=Causal()).flops
    with pytest.raises(ValueError, match="pad them to a multiple of 16"):
        ring_plan(1001, 8, layout=Zigzag())


def test_plan_of_causal_zigzag():
    plan = ring_plan(4096, 16, layout=Zigzag(), mask=Causal(), heads=32, kv_heads=8)
    assert plan.shifts == tuple(range(16))
    assert plan.balance == plan.lock_step == 1
    assert set(plan.hop_balance) == {1.0}
    assert plan.forward_bytes == 15 * 256 * 8 * 2 * 128 * 2
    assert plan.backward_bytes == 15 * 256 * 8 * 2 * 128 * (2 + 4)
    assert "15 forward" in repr(plan) and "1.000" in repr(plan)


def test_plan_of_causal_contiguous():
    plan = ring_plan(4096, 16, mask=Causal())
    assert 1.9 < plan.balance < 2 and plan.moves == 15


@pytest.mark.parametrize("left, right", [(0, 0), (1, 0), (256, 0), (257, 0), (256, 1), (900, 300)])
def test_plan_of_windows(left, right):
    plan = ring_plan(4096, 16, mask=SlidingWindow(left, right))
    assert plan.moves == -(-left // 256) + -(-right // 256)


def test_plan_of_a_window_in_zigzag_goes_both_ways():
    plan = ring_plan(4096, 16, layout=Zigzag(), mask=Causal() & SlidingWindow(100, 0))
    assert plan.shifts == (0, 1, -1)


def test_plan_counts_what_only_arrays_hide():
    ids = np.zeros((1, 4096), np.int32)
    mask = Causal() & SlidingWindow(100, 0) & Segments(ids)
    assert ring_plan(4096, 16, mask=mask) == ring_plan(
        4096, 16, mask=Causal() & SlidingWindow(100, 0)
    )


def test_plan_of_first_keys_visits_all():
    assert ring_plan(4096, 16, mask=SlidingWindow(100, 0, sinks=4)).moves == 15


def test_mesh_of_plain_devices(unchecked):
    mesh = ring_mesh("ring")
    assert mesh.axis_names == ("ring",) and list(mesh.devices) == jax.devices()
    with pytest.raises(TypeError, match=r"must be a string, got 8; .*devices=jax.devices\(\)"):
        ring_mesh(8)


SIDES = [
    (4,),
    (4, 4),
    (3, 4),
    (4, 3),
    (2, 5),
    (3, 3),
    (2, 2, 2),
    (4, 4, 4),
    (3, 4, 5),
    (2, 2, 4, 2),
]


@pytest.mark.parametrize("sides", SIDES)
def test_consecutive_devices_are_neighbours(sides):
    points = np.stack(np.meshgrid(*map(np.arange, sides), indexing="ij"), -1)
    points = points.reshape(-1, len(sides))
    points = points[np.random.default_rng(0).permutation(len(points))]
    path = points[ring_order(points)]
    assert len(np.unique(path, axis=0)) == len(points)
    assert (abs(np.diff(path, axis=0)).sum(1) == 1).all()
    if len(sides) > 1 and any(n % 2 == 0 for n in sides):
        assert abs(path[0] - path[-1]).sum() == 1


def test_plan_of_sizes():
    """Every size is in the work and in the bytes: values of another size than keys, too."""
    n, tokens, heads, kv_heads, d, v = 4, 64, 6, 2, 8, 20
    sizes = dict(heads=heads, kv_heads=kv_heads, head_dim=d, value_dim=v, batch=3)
    plan = ring_plan(tokens, n, dtype=np.float16, **sizes)
    own = tokens // n
    assert plan.flops == ((2 * 3 * heads * own * own * (d + v),) * n,) * n
    sent = 3 * own * kv_heads * (d + v)
    assert plan.forward_bytes == (n - 1) * sent * 2
    assert plan.backward_bytes == (n - 1) * sent * (2 + 4)
    assert plan.exchange_bytes == 0
    both = ring_plan(tokens, n, dtype=np.float16, group=2, **sizes)
    assert both.flops == ((3 * heads * own * own * (d + v),) * n,) * n
    assert both.forward_bytes == (n - 1) * sent
    inputs = 3 * own // 2 * (heads * d + kv_heads * (d + v)) * 2
    outputs = 3 * own // 2 * heads * (v + 1) * 4
    assert both.exchange_bytes == (inputs + outputs) // 2
    assert (
        ring_plan(tokens, n, head_dim=8).flops
        == ring_plan(tokens, n, head_dim=8, value_dim=8).flops
    )


def test_plan_counts_what_goes_both_ways():
    """Columns that travel down the ring are sent, too, and heads that a group must repeat."""
    mask = Causal() & SlidingWindow(100, 0)
    plan = ring_plan(4096, 16, layout=Zigzag(), mask=mask, head_dim=4, dtype=np.float16)
    assert plan.shifts == (0, 1, -1) and plan.forward_bytes == 2 * 256 * 8 * 2
    repeated = ring_plan(64, 4, heads=4, kv_heads=1, group=2, head_dim=4, dtype=np.float16)
    assert repeated.forward_bytes == 3 * 8 * 2 * 8 * 2


def test_plan_balance_is_over_the_mean():
    plan = ring_plan(12, 3, mask=QueryPadding(5), head_dim=1, block=1)
    assert [sum(x) // 4 for x in zip(*plan.flops)] == [48, 12, 0]
    assert plan.balance == pytest.approx(48 / 20)


def test_plan_balance_by_hand():
    plan = ring_plan(8, 2, mask=Causal(), head_dim=1, block=1)
    assert plan.flops == ((4 * 10, 4 * 10), (0, 4 * 16))
    assert plan.hop_balance == (1, 2) and plan.balance == (10 + 16) / 18
    assert plan.lock_step == (10 + 16) / 18


def test_span_is_the_shortest_way():
    def live(n, shifts):
        return np.array([[(i - j) % n in (0, *shifts) for j in range(n)] for i in range(n)])

    for n, shifts, want in (
        (8, (), (0, 0)),
        (8, (1, 2), (2, 0)),
        (8, (7,), (0, 1)),
        (8, (1, 7), (1, 1)),
        (8, (1, 2, 6, 7), (2, 2)),
        (8, tuple(range(1, 8)), (7, 0)),
        (5, (2, 4), (2, 1)),
    ):
        ahead, behind = span(live(n, shifts))
        assert (ahead, behind) == want, (n, shifts)
        assert all(s <= ahead or n - s <= behind for s in shifts)


def test_reach_of_a_call():
    """How far columns travel follows from known offsets; positions may be anything."""
    q = jax.numpy.zeros((1, 8, 1, 4))

    def far(mask=SlidingWindow(2, 0), **kwargs):
        made = Problem.from_call(q, q, q, AttentionMetadata(), mask=mask, **kwargs)
        return reach(made, Contiguous(), 4, 1)

    assert far() == (1, 0) and far(Causal()) == (3, 0) and far(SlidingWindow(0, 2)) == (0, 1)
    assert far(q_offset=4) == (0, 2)  # the first device's queries see the second and third's keys
    assert far(q_positions=np.arange(8)) == far(kv_positions=np.arange(8)) == (3, 0)
    assert far(q_offset=np.array([4])) == (3, 0)


def test_the_ratios_of_a_plan_without_work():
    """All three say how much longer than the mean the busiest device computes."""
    plan = ring_plan(256, 2, mask=KeyPadding(0), heads=2)
    assert plan.balance == plan.in_turn == plan.lock_step == 1
