"""`sharding_plan`: what strategies over sharded sequences send and compute, and which is the best."""

import pytest

from eqattn import Balanced, Causal, ring_plan, sharding_plan, SlidingWindow, Zigzag


SIZES = dict(heads=8, kv_heads=2, head_dim=64)
UNHINDERED = dict(bandwidth=1e30, latency=1e-30)


def plan(tokens, devices, **kwargs):
    found = sharding_plan(tokens, devices, **SIZES | kwargs)
    return found, {
        x.strategy.split("(metadata")[0] + x.strategy.partition(" of ")[2]: x
        for x in found.shardings
    }


def test_numbers_of_each_strategy():
    """By hand: 2,048 causal tokens on 8 devices, in bfloat16."""
    whole, each = plan(
        2048, 8, mask=Causal(), layout=Zigzag(), flops=1e12, bandwidth=1e9, latency=1e-3
    )
    own = 256 * 2 * 128 * 2  # bytes of keys and values of a device
    ring, gathered, ulysses, mixed = (
        each[x] for x in ("Ring", "AllGather", "Ulysses", "Ring2 x 4")
    )
    for x in (ring, gathered):  # The same bytes, in other steps; gradients have four bytes.
        assert (x.forward_bytes, x.backward_bytes) == (7 * own, 7 * 3 * own)
    assert ring.steps == (7, 7) and gathered.steps == (1, 2) and ulysses.steps == (2, 2)
    assert mixed.steps == (3, 3)
    assert (ring.held, gathered.held, mixed.held) == (2 * own, 8 * own, 2 * 2 * own)
    assert ulysses.held == 4 * own  # two heads are repeated for eight devices
    assert ulysses.forward_bytes == ring_plan(2048, 1, group=8, **SIZES).exchange_bytes
    # Each is expressed by the plan that `ring_plan` makes.
    kw = dict(mask=Causal(), **SIZES)
    assert ring.plan == gathered.plan == ring_plan(2048, 8, layout=Zigzag(), **kw)
    assert mixed.plan == ring_plan(2048, 2, group=4, layout=Zigzag(), **kw)
    assert ulysses.plan == ring_plan(2048, 1, group=8, **kw)
    # Keys and values over two links, and a step; then these again, and their gradients.
    waits = 7 * own / 2e9 + 1e-3 + 7 * 3 * own / 2e9 + 2e-3
    assert gathered.exposed == pytest.approx(waits)
    assert gathered.seconds == pytest.approx(waits + 3.5 * gathered.flops / 1e12)
    hop = max(ring_plan(2048, 8, layout=Zigzag(), mask=Causal(), **SIZES).flops[1]) / 1e12
    there, back = own / 1e9 + 1e-3, 3 * own / 1e9 + 1e-3
    assert 2.5 * hop < there  # so each move waits for what the hop before it does not hide
    first = max(ring_plan(2048, 8, layout=Zigzag(), mask=Causal(), **SIZES).flops[0]) / 1e12
    assert ring.exposed == pytest.approx(7 * (there + back) - (first + 6 * hop) * 3.5)
    assert ring.seconds == pytest.approx(7 * (there + back) + 3.5 * hop)
    assert whole.best.seconds == min(x.seconds for x in whole.shardings)


def test_what_is_best():
    """Long shards hide the hops of a ring, short ones do not, and windows need few of them."""
    long, _ = plan(2**20, 8, mask=Causal(), layout=Zigzag())
    assert long.best.strategy == "Ring(metadata)" and long.best.exposed == 0
    short, each = plan(1024, 8, mask=Causal(), layout=Zigzag(), kv_heads=1)
    assert short.best.strategy == "AllGather(metadata)" and each["Ring"].exposed > 0
    near, _ = plan(8192, 8, mask=Causal() & SlidingWindow(127, 0))
    assert near.best.strategy == "Ring(metadata)" and near.best.steps == (1, 1)
    # With nothing to wait for, only the balance counts, which Ulysses does not depend on.
    free, each = plan(1024, 4, mask=Causal(), **UNHINDERED)
    assert free.best.strategy == "Ulysses(metadata)"
    assert each["Ring"].seconds == pytest.approx(each["AllGather"].seconds, rel=0.3)


def test_what_cannot_be():
    whole, each = plan(1020, 6, mask=Causal(), heads=6, layout=Balanced(Causal(), 1020, 6))
    assert "made for 6 devices" in each["Ring3 x 2"].unable and "made for 6" in repr(whole)
    assert not whole.best.unable and not each["Ulysses"].unable
    _, each = plan(1024, 4, heads=3, kv_heads=3)
    assert "does not divide 3 heads" in each["Ulysses"].unable
    one, each = plan(64, 1)
    assert {x.forward_bytes for x in one.shardings} == {0}
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        sharding_plan(0, 2)
    with pytest.raises(ValueError, match="bandwidth must be a positive number, got 0.0"):
        sharding_plan(64, 2, bandwidth=0.0)


def test_what_is_printed():
    text = repr(plan(2048, 8, mask=Causal(), layout=Zigzag())[0])
    first, head, *rows, last = text.splitlines()
    assert first == "2,048 tokens on 8 devices, Zigzag(); forward + backward"
    assert head.split()[:2] == ["strategy", "steps"] and len(rows) == 5
    assert last.startswith("  least time: ") and last[14:] == rows[0][2:].split("  ")[0].strip()
