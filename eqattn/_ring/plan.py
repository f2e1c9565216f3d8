"""What a ring does, worked out before it runs: hops, bytes, operations and their balance."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._misc import accumulation_dtype, as_dtype, as_size, REACH
from .._problem.problem import as_mask, Problem
from ..masks._base import live_blocks
from .layout import AbstractRingLayout, Contiguous


_MOST_BLOCKS = 2048


def block_ends(length: int, blocks: int, start: int = 0, pieces: int = 1) -> np.ndarray:
    """The first and the last position of equal blocks of equal pieces, `[blocks, 2]`."""
    size = -(-length // (blocks * pieces)) * pieces
    first = np.arange(blocks) * size
    return start + np.minimum(np.stack([first, first + size - 1], 1), max(length - 1, 0))


def span(live: np.ndarray) -> tuple[int, int]:
    """How far columns must travel up and down the ring for all live shifts.

    **Arguments:**

    - `live`: bool `[n, n]`, whether a device (row) sees anything of another's (column).
    """
    n = len(live)
    shifts = [s for s in range(1, n) if live[np.arange(n), (np.arange(n) - s) % n].any()]

    def behind(ahead):
        return max((n - s for s in shifts if s > ahead), default=0)

    ahead = min(range(n), key=lambda a: (a + behind(a), behind(a)))
    return ahead, behind(ahead)


def by_device(live: np.ndarray, layout: AbstractRingLayout, n: int) -> np.ndarray:
    """How many blocks are live between any two devices `[n, n]`, from those of all positions."""
    rows, columns = (size // (n * layout.parts) for size in live.shape)
    blocks = live.reshape(n * layout.parts, rows, n * layout.parts, columns).sum((1, 3))
    chunks = layout.chunks(n)
    return blocks[chunks[:, :, None, None], chunks[None, None]].sum((1, 3))


def reach(problem: Problem, layout: AbstractRingLayout, n: int, group: int) -> tuple[int, int]:
    """How far the columns of a problem must travel, `ahead` and `behind`, between `n` places of
    `group` devices each.
    """
    explicit = (problem.q_positions, problem.kv_positions, problem.q_shift)
    if any(x is not None for x in explicit):
        return n - 1, 0
    t, s, heads, kv_heads = problem.sizes
    t, s = t * problem.shards, s * problem.shards
    chunks = n * layout.parts
    pieces = math.lcm(layout.parts, group) // layout.parts
    ends = block_ends(t, chunks, problem.q_start, pieces), block_ends(s, chunks, pieces=pieces)
    live = live_blocks(problem.mask, *ends, problem.batch_shape, heads, kv_heads)
    return span(by_device(live, layout, n) > 0)


@dataclasses.dataclass(frozen=True)
class RingPlan:
    """What each device of a ring does; see [`eqattn.ring_plan`][].

    **Arguments:**

    - `tokens`, `devices`, `layout`: of the ring. With an exchange of heads, `devices` are its
        places.
    - `shifts`: per hop, how many places before itself a device's columns come from.
    - `flops`: floating-point operations of the products of the forward, `[hops][devices]`. A
        backward has 2.5 times as many.
    - `forward_bytes`: what each device sends, keys and values.
    - `backward_bytes`: the same and their gradients.
    - `group`: how many devices of a place exchange tokens for heads. The `flops` are those of each.
    - `exchange_bytes`: what each sends by all-to-alls: queries, keys and values, and the numerator
        and the denominator of each row. The backward sends as much, their gradients.
    """

    tokens: int
    devices: int
    layout: AbstractRingLayout
    shifts: tuple[int, ...]
    flops: tuple[tuple[int, ...], ...]
    forward_bytes: int
    backward_bytes: int
    group: int = 1
    exchange_bytes: int = 0

    @property
    def moves(self) -> int:
        """How often keys and values are sent, in the forward and again in the backward."""
        return len(self.shifts) - 1

    @property
    def hop_balance(self) -> tuple[float, ...]:
        """Per hop, the work of the busiest device over the mean."""
        return tuple(_balance(np.asarray(hop, float)) for hop in self.flops)

    @property
    def balance(self) -> float:
        """The work of the busiest device over the mean: 1.0 is perfect."""
        return _balance(np.asarray(self.flops, float).sum(0))

    @property
    def lock_step(self) -> float:
        """The same if every hop waits for its busiest device."""
        flops = np.asarray(self.flops, float)
        return float(flops.max(1).sum() / max(flops.sum(0).mean(), 1))

    def __repr__(self) -> str:
        of = "devices" if self.group == 1 else f"places, each of {self.group} devices"
        exchange = f"  exchange  {self.exchange_bytes:,} bytes forward, as many backward"
        lines = [
            f"ring of {self.devices} {of}, {self.tokens:,} tokens, {self.layout}",
            f"  moves     {self.moves} forward, {self.moves} + {self.moves} of gradients backward",
            f"  bytes     {self.forward_bytes:,} forward, {self.backward_bytes:,} backward",
            *[exchange] * (self.group > 1),
            f"  balance   {self.balance:.3f} (in lock step {self.lock_step:.3f})",
            "  hop  shift  flops per device      max/mean",
        ]
        for i, (shift, flops, ratio) in enumerate(zip(self.shifts, self.flops, self.hop_balance)):
            mean = sum(flops) / len(flops)
            lines.append(f"  {i:>3}  {shift:>+5}  {mean:<20.4g}  {ratio:.3f}")
        return "\n".join(lines)


def _balance(work: np.ndarray) -> float:
    return float(work.max() / work.mean()) if work.any() else 1.0


def ring_plan(
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
    group: int = 1,
) -> RingPlan:
    """What a ring will do, without running it.

    **Arguments:**

    - `tokens`: of queries and keys, on all devices together. With `Contiguous` they are padded to
        equal pieces, as `Ring` does, and the padding counts.
    - `devices`: the size of the ring; 1 with a `group` is [`eqattn.Ulysses`][].
    - `layout`: [`eqattn.Contiguous`][] or [`eqattn.Zigzag`][].
    - `mask`: as for [`eqattn.attention`][]. Hops that it is known to hide before the program runs
        are left out. What only arrays (segment ids) hide is skipped when it runs, and counts here.
    - `batch`, `heads`, `kv_heads`, `head_dim`, `value_dim`: sizes; default `kv_heads` is `heads`,
        default `value_dim` is `head_dim`.
    - `dtype`: of keys and values.
    - `block`: the size of the blocks that are counted, default the least that makes 2048 or fewer.
    - `group`: the size of `head_axis`: each place of the ring is so many devices.

    **Returns:** a [`eqattn.RingPlan`][].

    **Raises:** `ValueError` unless the layout divides the tokens, `block` a chunk and `group` the
    heads and the tokens of a place.
    """
    tokens, devices = as_size(tokens, "tokens"), as_size(devices, "devices", -REACH)
    heads, head_dim = as_size(heads, "heads"), as_size(head_dim, "head_dim")
    batch, group = as_size(batch, "batch"), as_size(group, "group", -REACH)
    if not isinstance(layout, AbstractRingLayout):
        raise TypeError(f"layout must be Contiguous() or Zigzag(), got {layout!r}.")
    kv_heads = heads if kv_heads is None else as_size(kv_heads, "kv_heads", -REACH)
    block = None if block is None else as_size(block, "block", -REACH)
    dtype, value_dim = (
        as_dtype(dtype, "dtype"),
        (None if value_dim is None else as_size(value_dim, "value_dim")),
    )
    value_dim = head_dim if value_dim is None else value_dim
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"heads={heads} must be a positive multiple of kv_heads={kv_heads}.")
    if layout.parts == 1 and devices > 0 and group > 0:
        tokens = -(-tokens // (devices * group)) * devices * group
    chunk = layout.chunk_size(tokens, devices)
    if group < 1 or heads % group or tokens % (devices * group):
        raise ValueError(
            f"group={group} does not divide {heads} heads and the {tokens // devices} tokens of "
            "each place; choose a smaller group and a larger ring."
        )
    if block is None:
        sizes = (b for b in range(1, chunk) if chunk % b == 0 and tokens // b <= _MOST_BLOCKS)
        block = next(sizes, chunk)
    if block < 1 or chunk % block:
        raise ValueError(f"block={block} does not divide a chunk of {chunk} tokens.")
    mask = as_mask(mask)
    ends = block_ends(tokens, tokens // block)
    blocks = by_device(live_blocks(mask, ends, ends, (batch,), heads, kv_heads), layout, devices)
    ahead, behind = span(blocks > 0)
    shifts = (*range(ahead + 1), *range(-1, -behind - 1, -1))
    here = np.arange(devices)
    each = 2 * batch * heads // group * block**2 * (head_dim + value_dim)
    flops = [tuple(int(x) * each for x in blocks[here, (here - s) % devices]) for s in shifts]
    kv_heads = math.lcm(kv_heads, group)  # as many as are sent
    own = batch * (tokens // (devices * group))
    columns = own * kv_heads * (head_dim + value_dim)
    narrow, wide = jnp.dtype(dtype).itemsize, accumulation_dtype(jnp.dtype(dtype)).itemsize
    forward, gradients = ((ahead + behind) * columns * size for size in (narrow, wide))
    inputs = (own * heads * head_dim + columns) * narrow
    exchange = (inputs + own * heads * (value_dim + 1) * wide) * (group - 1) // group
    return RingPlan(
        tokens,
        devices,
        layout,
        shifts,
        tuple(flops),
        forward,
        forward + gradients,
        group,
        exchange,
    )
