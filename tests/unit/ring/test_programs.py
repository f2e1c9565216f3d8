"""What the compiled programs of a ring send, and how much work and memory they take."""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from eqattn import attention, AttentionMetadata, masks as m
from eqattn._problem.mesh import ManualAxes
from eqattn._problem.operands import BlockOperands
from eqattn._problem.problem import Problem
from eqattn._problem.shards import HeadExchange
from eqattn._problem.tiling import choose_tiling
from eqattn._ring.layout import Contiguous, Zigzag
from eqattn._ring.plan import ring_plan
from eqattn._sweep.grid import BlockGrid
from eqattn._sweep.ring import Rotation
from eqattn._sweep.sweep import sweep, table_per_hop
from eqattn.strategies.ring import Ring

from .common import (
    B,
    D,
    gradient,
    K,
    k,
    mesh_of,
    q,
    SP,
    strategy,
    T,
    V,
    v,
)


def sent(compiled):
    """`(dtype, bytes) -> times` of the collective permutes that one device runs."""
    text = compiled.as_text()
    for collective in ("all-gather", "all-to-all"):
        assert collective not in text, collective
    bodies = {}
    for block in re.split(r"\n(?=[%E])", text):
        head = block.split("(", 1)[0].split()[-1].lstrip("%")
        bodies[head] = block
    counts = collections.Counter()

    def visit(name, times):
        for line in bodies[name].splitlines()[1:]:
            found = re.search(r"= \(?(\w+)\[([\d,]*)\].* collective-permute(-start)?\(", line)
            if found:
                dtype, shape = found[1], found[2]
                size = np.prod([int(x) for x in shape.split(",")], dtype=int)
                counts[dtype, int(size) * int(re.sub(r"\D", "", dtype)) // 8] += times
            loop = re.search(r"body=%?([\w.\-]+)", line)
            if loop:
                trips = re.search(r'known_trip_count":{"n":"(\d+)"', line)
                inside = "collective-permute" in bodies[loop[1]]
                assert trips or not inside, line
                visit(loop[1], times * int(trips[1]) if trips else times)
            for called in re.findall(
                r"(?:to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)", line
            ):
                visit(called, times)

    visit(next(n for n, b in bodies.items() if b.startswith("ENTRY")), 1)
    return counts


NARROW = [x.astype(jnp.float16) for x in (q, k, v)]  # XLA:CPU sends bfloat16 as float32


def program(
    n, transform=lambda fn: fn, args=NARROW, mask=m.Causal(), layout=Contiguous(), **kwargs
):
    kwargs = dict(runtime_dtype=jnp.float32, **kwargs)

    def fn(q, k, v):
        s = strategy(Ring, layout=layout, **kwargs)
        return attention(q, k, v, s, mask=mask).attention_outputs.astype(jnp.float32)

    with jax.set_mesh(mesh_of(n)):
        placed = [jax.device_put(x, NamedSharding(mesh_of(n), SP)) for x in args]
        return jax.jit(transform(fn)).lower(*placed).compile()


def expected_bytes(n, itemsize):
    return [B * T // n * K * size * itemsize for size in (D, V)]


def test_moves_of_the_forward():
    """`n - 1` of keys and of values, as they came: float16, with key heads only. With them goes
    which value vectors are not finite.
    """
    for n, kwargs in ((2, {}), (8, {}), (4, dict(scan_ring_attention=False))):
        counts = sent(program(n, **kwargs))
        for size in (*expected_bytes(n, 2), B * T // n * K * 2):
            assert counts.pop(("f16", size)) == n - 1, counts
        assert not any(dtype == "f16" for dtype, _ in counts), counts


def test_hops_are_a_loop_unless_asked_to_be_written_out():
    """`scan_ring_attention`: whether a program holds the moves of one hop or those of all."""
    n = 8

    def moves(scan):
        s = strategy(Ring, runtime_dtype=jnp.float32, scan_ring_attention=scan)
        fn = lambda q, k, v: attention(q, k, v, s, mask=m.Causal()).attention_outputs
        with jax.set_mesh(mesh_of(n)):
            return jax.jit(fn).lower(*NARROW).as_text().count("collective_permute")

    assert moves(False) % (n - 1) == 0 and moves(True) % 2 == 0
    assert moves(False) // (n - 1) == moves(True) // 2 > 0


def test_moves_of_the_gradient():
    """As many again in the backward, and as many of their float32 gradients."""
    counts = sent(program(4, gradient))
    for size in expected_bytes(4, 2):
        assert counts.pop(("f16", size)) <= 2 * 3, counts  # XLA may find one in the forward
    for size in expected_bytes(4, 4):
        assert counts.pop(("f32", size)) == 3, counts


def test_moves_of_a_window():
    """Only the hops that a window reaches."""
    for left, right, hops in ((0, 0, 0), (3, 4, 4)):
        mask = m.SlidingWindow(left, right)
        counts = sent(program(8, mask=mask))
        for size in expected_bytes(8, 2):
            assert counts[("f16", size)] == hops, (left, right, counts)
        assert ring_plan(T, 8, mask=mask).moves == hops


def test_memory_does_not_depend_on_the_number_of_devices():
    temporary = []
    for n in (5, 8):
        args = [jnp.ones((1, 64 * n, h, 16), jnp.float32) for h in (2, 1, 1)]
        compiled = program(n, gradient, args)
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
    assert temporary[1] <= 1.02 * temporary[0], temporary


def visits(n, layout, mask):
    """Blocks that each device visits at each hop, `[hops, n]`, counted as they are visited."""
    tokens, mesh = 32, mesh_of(n)

    def total(ahead):
        x = jnp.zeros((1, tokens, 1, 1), jnp.float32)
        spec = Problem.from_call(x, x, x, AttentionMetadata(), mask=mask)
        where = layout.tokens(tokens, n)
        spec = dataclasses.replace(spec, q_positions=where, kv_positions=where)
        size = tokens // (n * layout.parts) // 2
        tiling = choose_tiling(spec, size, size, n * layout.parts)
        ring = Rotation("sp", n, ahead, 0)
        manual = ManualAxes(mesh, tokens=("sp",))
        spread = HeadExchange(ring, manual=manual)
        blocks = BlockOperands(spec, tiling, spread)
        in_axes = [x.axes for x in blocks.operands]
        local = spread.local(tiling)
        grid, visited = local.grid, blocks.on(local)

        def count(operands):
            own, consts = table_per_hop(
                ring, visited.classify, operands, in_axes, blocks.reads, grid
            )
            axes = [*in_axes, *[()] * len(consts)]
            table = BlockGrid(grid, (2**10, 2**10), (), ring=own)
            one = {c: lambda *_: [jnp.ones(())] for c in (1, 2)}
            return sweep(one, [*operands, *consts], axes, [()], layout=table)[0][None]

        specs = [manual.partition(a) for a in in_axes]
        fn = jax.shard_map(count, mesh=mesh, in_specs=(specs,), out_specs=P("sp"), check_vma=False)
        return np.asarray(jax.jit(fn)([x.array for x in blocks.operands]))

    totals = np.stack([total(ahead) for ahead in range(n)])
    return np.diff(totals, axis=0, prepend=0)


def test_zigzag_is_balanced():
    """The same work on every device at every hop; contiguous pieces are nearly twice as slow."""
    for layout in (Zigzag(), Contiguous()):
        counts = visits(4, layout, m.Causal())
        plan = ring_plan(32, 4, layout=layout, mask=m.Causal(), block=32 // (8 * layout.parts))
        assert (np.asarray(plan.flops) == counts * plan.flops[0][0] // counts[0, 0]).all()
        if layout == Zigzag():
            assert (counts == counts[:, :1]).all(), counts
            assert plan.balance == plan.lock_step == 1 and set(plan.hop_balance) == {1.0}
        else:
            assert (counts[:, 0] == [3, 0, 0, 0]).all() and plan.balance > 1.6, (counts, plan)
