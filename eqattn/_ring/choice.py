"""Which strategy a sharded sequence should have, by arithmetic: of bytes, steps and live blocks."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._misc import accumulation_dtype, as_size
from .layout import AbstractRingLayout, Contiguous
from .plan import ring_plan, RingPlan


_BACKWARD = 2.5  # times the operations of the forward: five products where that has two


@dataclasses.dataclass(frozen=True)
class Sharding:
    """What one strategy would do with a sharded sequence; see
    [`eqattn.strategies.sharding_plan`][].

    **Arguments:**

    - `strategy`: how the strategy is made, such as `"Ring(metadata)"`.
    - `unable`: why it cannot run the call; empty if it can. The numbers are then 0.
    - `steps`: how many exchanges follow each other, in the forward and in the backward.
    - `forward_bytes`, `backward_bytes`: what each device sends.
    - `flops`: the operations of the forward on the busiest device.
    - `held`: the bytes of keys and values that a device holds while it attends.
    - `seconds`: the time of forward and backward in the model of `sharding_plan`.
    - `exposed`: the part of it in which a device waits for what is sent.
    - `plan`: the [`eqattn.strategies.RingPlan`][] that the numbers follow from, with the work of
        each hop. For a strategy without hops, only the sums of its work count.
    """

    strategy: str
    unable: str = ""
    steps: tuple[int, int] = (0, 0)
    forward_bytes: int = 0
    backward_bytes: int = 0
    flops: int = 0
    held: int = 0
    seconds: float = 0.0
    exposed: float = 0.0
    plan: RingPlan | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """A comparison of the strategies over sharded sequences; see
    [`eqattn.strategies.sharding_plan`][].

    **Arguments:**

    - `tokens`, `devices`, `layout`: those of the sequence.
    - `shardings`: the strategies, the fastest first, and those that cannot run the call last.
    """

    tokens: int
    devices: int
    layout: AbstractRingLayout
    shardings: tuple[Sharding, ...]

    @property
    def best(self) -> Sharding:
        """The one that takes the least time in the model."""
        return self.shardings[0]

    def __repr__(self) -> str:
        rows = [("strategy", "steps", "bytes sent", "flops", "held", "ms", "exposed")]
        able = [x for x in self.shardings if not x.unable]
        for x in able:
            sent = f"{x.forward_bytes:,} + {x.backward_bytes:,}"
            times = _milliseconds(x.seconds), _milliseconds(x.exposed)
            steps = f"{x.steps[0]} + {x.steps[1]}"
            rows.append((x.strategy, steps, sent, f"{x.flops:.3g}", f"{x.held:,}", *times))
        widths = [max(map(len, column)) for column in zip(*rows)]
        where = f"{self.tokens:,} tokens on {self.devices} devices, {self.layout}"
        lines = [f"{where}; forward + backward"]
        for row in rows:
            cells = [row[0].ljust(widths[0]), *[x.rjust(n) for x, n in zip(row[1:], widths[1:])]]
            lines.append("  " + "  ".join(cells))
        lines += [f"  {x.strategy}: {x.unable}" for x in self.shardings if x.unable]
        return "\n".join([*lines, f"  least time: {self.best.strategy}"])


def _milliseconds(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.3g}" if ms < 100 else f"{ms:,.0f}"


@dataclasses.dataclass(frozen=True)
class _Machine:
    flops: float
    bandwidth: float
    links: int
    latency: float

    def rotating(self, flops: Any, moved: float, factor: float = 1) -> tuple[float, float]:
        """The time of the hops of a ring and the part of it that waits. The busiest device of each
        hop sets the pace, and the move for the next hop is under way meanwhile.
        """
        work = np.asarray(flops, float).max(1) * factor / self.flops
        move = np.full(len(work), moved / self.bandwidth + self.latency)
        move[-1] = 0
        return float(np.maximum(work, move).sum()), float(np.maximum(move - work, 0).sum())

    def exchange(self, sent: int | float, steps: int) -> float:
        """The time of exchanges over all links at once, during which nothing is computed."""
        return sent / (self.bandwidth * self.links) + self.latency * steps


def sharding_plan(  # noqa: PLR0913 (one argument for each figure of the plan)
    tokens: int,
    devices: int,
    *,
    layout: AbstractRingLayout = Contiguous(),
    mask: Any = None,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    head_dim: int = 128,
    value_dim: int | None = None,
    dtype: Any = jnp.bfloat16,
    block: int | None = None,
    flops: float = 1.97e14,
    bandwidth: float = 4.5e10,
    links: int = 2,
    latency: float = 1e-5,
) -> ShardingPlan:
    """Compares [`eqattn.Ring`][], [`eqattn.Ulysses`][], both combined and [`eqattn.AllGather`][].

    It says what each sends, computes and holds, for a sequence that is sharded over devices. Call
    it to choose a strategy. The numbers of each follow from a plan of
    [`eqattn.strategies.ring_plan`][], which is the `plan` of its [`eqattn.strategies.Sharding`][].
    Call that one where a ring is chosen already, for its hops and their balance.

    Bytes, steps and operations follow from the sizes and the mask. Times are those of a model. A
    device computes `flops` operations a second, and sends `bandwidth` bytes a second to a
    neighbour, of which it has `links`. A ring sends to one of them, and each move hides behind the
    visit that is going on. An all-gather and an all-to-all send to all of them at once, and nothing
    is computed meanwhile. Each step takes at least the `latency`. The model leaves out two costs.
    Blocks of few tokens take more time per token. An all-to-all between devices that share links
    takes longer than its bytes say.

    **Arguments:**

    - `tokens` ... `block`: as for [`eqattn.strategies.ring_plan`][], but that `devices` is the
        number of all.
    - `flops`: the operations that a device computes in a second. The default is the peak that is
        published for a TPU v5e in bfloat16.
    - `bandwidth`: the bytes that it sends to one neighbour in a second. The default is the size of
        a link of a TPU v5e.
    - `links`: the number of neighbours, 2 in a ring of links. It is 1 where a single link to a
        switch has all the bandwidth.
    - `latency`: the least time of a step in seconds. The default is a choice, not a measurement.

    **Returns:** a [`eqattn.strategies.ShardingPlan`][].

    **Raises:** `ValueError` for sizes that no strategy can have, and numbers that are not positive.
    """
    machine = _Machine(flops, bandwidth, links, latency)
    for name, number in dataclasses.asdict(machine).items():
        if not (isinstance(number, int | float) and number > 0):
            raise ValueError(f"{name} must be a positive number, got {number!r}.")
    devices = as_size(devices, "devices", 1)
    sizes: dict[str, Any] = dict(
        layout=layout,
        mask=mask,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        block=block,
    )
    ring = ring_plan(tokens, devices, **sizes)
    kv_heads = heads if kv_heads is None else kv_heads
    value_dim = head_dim if value_dim is None else value_dim
    dtype = jnp.dtype(dtype)
    # Keys and values of one device's tokens, with the heads that they came with.
    own = batch * (ring.tokens // devices) * kv_heads * (head_dim + value_dim) * dtype.itemsize
    found = [_ring(machine, "Ring(metadata)", ring, own), _gathered(machine, ring, own, dtype)]
    for group in (g for g in range(2, devices + 1) if devices % g == 0):
        name = f"Ring(metadata, head_axis=) of {devices // group} x {group}"
        name = "Ulysses(metadata)" if group == devices else name
        sizes["layout"] = Contiguous() if group == devices else layout
        try:
            plan = ring_plan(tokens, devices // group, group=group, **sizes)
        except ValueError as error:
            found.append(Sharding(name, str(error)))
            continue
        repeated = math.lcm(kv_heads, group) // kv_heads
        found.append(_ring(machine, name, plan, own * repeated))
    found.sort(key=lambda x: (bool(x.unable), x.seconds))
    return ShardingPlan(ring.tokens, devices, layout, tuple(found))


def _ring(machine: _Machine, name: str, plan: RingPlan, own: int) -> Sharding:
    """Hops over the places of a ring, with all-to-alls between the devices of each."""
    moves, exchanges = plan.moves, int(plan.group > 1)
    there, back = plan.forward_bytes, plan.backward_bytes
    forward, waits = machine.rotating(plan.flops, there / max(moves, 1))
    backward, more = machine.rotating(plan.flops, back / max(moves, 1), _BACKWARD)
    # Queries, keys and values go there at once, and rows come back: two steps.
    exchange = 2 * exchanges * machine.exchange(plan.exchange_bytes, 2)
    return Sharding(
        name,
        steps=(moves + 2 * exchanges, moves + 2 * exchanges),
        forward_bytes=there + plan.exchange_bytes,
        backward_bytes=back + plan.exchange_bytes,
        flops=int(np.sum(plan.flops, 0).max()),
        held=own * (2 if moves else 1),  # what it visits, and what arrives meanwhile
        seconds=forward + backward + exchange,
        exposed=waits + more + exchange,
        plan=plan,
    )


def _gathered(machine: _Machine, plan: RingPlan, own: int, dtype: Any) -> Sharding:
    """Keys and values of all devices at once, also those that a ring would not need."""
    n, work = plan.devices, int(np.sum(plan.flops, 0).max())
    there = (n - 1) * own
    # They are gathered again, and their gradients are scattered, in the dtype of sums.
    wide = there // dtype.itemsize * accumulation_dtype(dtype).itemsize
    exchange = machine.exchange(there, 1) + machine.exchange(there + wide, 2)
    return Sharding(
        "AllGather(metadata)",
        steps=(1, 2),
        forward_bytes=there,
        backward_bytes=there + wide,
        flops=work,
        held=n * own,
        seconds=work * (1 + _BACKWARD) / machine.flops + exchange,
        exposed=exchange,
        plan=plan,
    )
