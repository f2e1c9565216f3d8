"""What a ring does, worked out before it runs: hops, bytes, operations and their balance.

How many blocks of a mask are live, as far as its arrays are known on the host.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._misc import accumulation_dtype, as_dtype, as_size, concrete, REACH
from .._pairs import canonical
from .._problem.closed_score import BoundMask
from .._problem.problem import as_mask, Problem
from ..masks._base import AbstractMask, And, live_blocks, Or
from .layout import AbstractRingLayout, check_layout, Contiguous


def counted_blocks(
    mask: AbstractMask | None,
    tokens: int,
    block: int,
    batch: int,
    heads: int,
    padding: int = 0,
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Which blocks of queries and keys hold a visible pair, with the ids of tokens that are known.

    **Arguments:**

    - `mask`: the mask, of which all terms whose arrays are not traced are counted.
    - `tokens`: how many queries there are, and as many keys: a multiple of `block`.
    - `block`: the tokens of a block.
    - `batch`, `heads`: the sizes that arrays of the mask may have.
    - `padding`: how many of the tokens the arrays of the mask lack. They are as the last one.

    **Returns:** bool `[batch|1, heads|1, blocks, blocks]`, and the names of the terms that were not
    counted, as if they showed every pair.
    """
    if isinstance(mask, And | Or):
        each = [counted_blocks(term, tokens, block, batch, heads, padding) for term in mask.terms]
        live = each[0][0]
        for more, _ in each[1:]:
            live = live & more if isinstance(mask, And) else live | more
        return live, tuple(dict.fromkeys(name for _, names in each for name in names))
    blocks = tokens // block
    anything = np.ones((1, 1, blocks, blocks), bool)
    if mask is None:
        return anything, ()
    # Imported on first use, as it takes half of the time that importing eqattn takes.
    from ..masks._intervals.classify import classify

    name, operands, length = type(mask).__name__, mask.operands(), tokens - padding
    # A list of keys is no function of a pair.
    if mask.selects or any(concrete(o.array) is None for o in operands):
        return anything, (name,)
    arrays = [np.asarray(canonical(o, (batch,), heads, length, length, name)) for o in operands]
    widths = [
        [(0, 0), (0, 0), *[(0, padding * (n > 1)) for n in x.shape[2:4]], *[(0, 0)] * (x.ndim - 4)]
        for x in arrays
    ]
    bound = BoundMask(mask, tuple(np.pad(x, w, mode="edge") for x, w in zip(arrays, widths)))
    positions = np.arange(tokens, dtype=np.int32)
    if not any(set(o.axes) & set("ts") for o in operands):
        # The first and the last position of a block say all about it.
        positions = positions.reshape(blocks, block)[:, [0, -1]].reshape(-1)
        block = 2
    table = classify(
        bound,
        batch_shape=(batch,),
        heads=heads,
        kv_heads=heads,
        q_positions=positions[None],
        kv_positions=positions[None],
        block_q=block,
        block_k=block,
    )
    return np.asarray(table) > 0, ()


_MOST_BLOCKS = 2048
"""The most blocks that `ring_plan` cuts queries, and keys, into. It bounds the table of live blocks
to 2048^2 entries, 4 MiB of booleans, so that a plan takes no noticeable memory. The number is a
choice, not a measurement, and affects only plans and not what a ring does.
"""


def block_ends(length: int, blocks: int, start: int = 0, pieces: int = 1) -> np.ndarray:
    """Cuts a sequence into equal blocks, and returns the first and the last position of each,
    `[blocks, 2]`.

    **Arguments:**

    - `length`: the number of tokens.
    - `blocks`: the number of blocks.
    - `start`: the position of the first token.
    - `pieces`: the number of equal pieces that each block must have, whose tokens are padded.
    """
    size = -(-length // (blocks * pieces)) * pieces
    first = np.arange(blocks) * size
    return start + np.minimum(np.stack([first, first + size - 1], 1), max(length - 1, 0))


def span(live: np.ndarray) -> tuple[int, int]:
    """How far columns must travel up and down the ring for all live shifts.

    **Arguments:**

    - `live`: whether a device (row) sees anything of another's (column), bool `[n, n]`.

    **Returns:** `ahead` and `behind`: the shifts `1 ... ahead` and `-1 ... -behind` hold all live
    ones, in as few hops as possible. A shift `s` is the same as `s - n`.
    """
    n = len(live)
    shifts = [s for s in range(1, n) if live[np.arange(n), (np.arange(n) - s) % n].any()]

    def behind(ahead):
        return max((n - s for s in shifts if s > ahead), default=0)

    ahead = min(range(n), key=lambda a: (a + behind(a), behind(a)))
    return ahead, behind(ahead)


def by_device(live: np.ndarray, layout: AbstractRingLayout, n: int) -> np.ndarray:
    """Counts the live blocks between any two of `n` devices, `[n, n]`.

    **Arguments:**

    - `live`: whether each block is live, in the order of positions, bool `[rows, columns]`.
    """
    rows, columns = (size // (n * layout.parts) for size in live.shape)
    blocks = live.reshape(n * layout.parts, rows, n * layout.parts, columns).sum((1, 3))
    chunks = layout.chunks(n)
    return blocks[chunks[:, :, None, None], chunks[None, None]].sum((1, 3))


def reach(problem: Problem, layout: AbstractRingLayout, n: int, group: int) -> tuple[int, int]:
    """How far the columns of a problem must travel, `ahead` and `behind`, between `n` places of
    `group` devices each. With explicit or traced positions they travel all the way.
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
    """What each device of a ring does; see [`eqattn.strategies.ring_plan`][].

    **Arguments:**

    - `tokens`: the number of tokens on all devices together.
    - `devices`: the size of the ring: the number of its devices, or of its places if heads are
        exchanged.
    - `layout`: the tokens that each of them holds.
    - `shifts`: for each hop, how many places before itself a device's columns come from.
    - `flops`: the floating-point operations of the products of the forward, `[hops][devices]`. A
        backward has 2.5 times as many: five products where the forward has two.
    - `forward_bytes`: the bytes of keys and values that each device sends in the forward.
    - `backward_bytes`: the bytes of these and of their gradients, which it sends in the backward.
    - `group`: the number of devices of a place, which exchange tokens for heads. The `flops` are
        those of each of them.
    - `exchange_bytes`: the bytes that each sends by all-to-alls: queries, keys and values, and the
        numerator and the denominator of each row. The backward sends their gradients, as many.
    - `uncounted`: the names of the masks whose arrays were not known, or which list keys. They may
        hide more than the `flops` say.
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
    uncounted: tuple[str, ...] = ()

    @property
    def moves(self) -> int:
        """The number of times that keys and values are sent, in the forward and in the backward."""
        return len(self.shifts) - 1

    @property
    def hop_balance(self) -> tuple[float, ...]:
        """For each hop, the work of the busiest device divided by the mean."""
        return tuple(_balance(np.asarray(hop, float)) for hop in self.flops)

    @property
    def balance(self) -> float:
        """The work of the busiest device divided by the mean. A perfect balance is 1.0."""
        return _balance(np.asarray(self.flops, float).sum(0))

    @property
    def in_turn(self) -> float:
        """The same ratio if devices wait for their neighbours only. A device begins a hop when it
        has ended the hop before, which both neighbours must have begun. One neighbour then holds
        the columns to be received, and the other takes those to be sent.
        """
        flops = np.asarray(self.flops, float)
        begins = ends = np.zeros(flops.shape[1])
        for hop in flops:
            begins = np.maximum(ends, np.maximum(np.roll(begins, 1), np.roll(begins, -1)))
            ends = begins + hop
        return float(ends.max() / flops.sum(0).mean()) if flops.any() else 1.0

    @property
    def lock_step(self) -> float:
        """The same ratio if every hop waits for its busiest device."""
        flops = np.asarray(self.flops, float)
        return float(flops.max(1).sum() / flops.sum(0).mean()) if flops.any() else 1.0

    def __repr__(self) -> str:
        of = "devices" if self.group == 1 else f"places, each of {self.group} devices"
        exchange = f"  exchange  {self.exchange_bytes:,} bytes forward, as many backward"
        lines = [
            f"ring of {self.devices} {of}, {self.tokens:,} tokens, {self.layout}",
            f"  moves     {self.moves} forward, {self.moves} + {self.moves} of gradients backward",
            f"  bytes     {self.forward_bytes:,} forward, {self.backward_bytes:,} backward",
            *[exchange] * (self.group > 1),
            f"  balance   {self.balance:.3f} (in turn {self.in_turn:.3f}, "
            f"in lock step {self.lock_step:.3f})",
            *[f"  unknown   what {', '.join(self.uncounted)} hides"] * bool(self.uncounted),
            "  hop  shift  flops per device      max/mean",
        ]
        for i, (shift, flops, ratio) in enumerate(zip(self.shifts, self.flops, self.hop_balance)):
            mean = sum(flops) / len(flops)
            lines.append(f"  {i:>3}  {shift:>+5}  {mean:<20.4g}  {ratio:.3f}")
        return "\n".join(lines)


def _balance(work: np.ndarray) -> float:
    return float(work.max() / work.mean()) if work.any() else 1.0


def ring_plan(  # noqa: PLR0913 (one argument for each figure of the plan)
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
    """Computes what a ring will do, without running it: its hops, and how balanced they are.

    Whether a ring is the best choice is the question of [`eqattn.strategies.sharding_plan`][],
    which compares plans of all strategies.

    **Arguments:**

    - `tokens`: the number of queries, and of keys, on all devices together. With `Contiguous` they
        are padded to equal pieces, as `Ring` does, and the padding counts.
    - `devices`: the size of the ring. A size of 1 with a `group` is [`eqattn.Ulysses`][].
    - `layout`: [`eqattn.Contiguous`][], [`eqattn.Zigzag`][] or [`eqattn.Balanced`][].
    - `mask`: as for [`eqattn.attention`][]. Hops that it is known to hide before the program runs
        are left out. Of what arrays hide (segment ids), the blocks are skipped when it runs, and
        the hops are made. They are counted if the arrays are known here, else the plan names them.
        A block with any visible pair counts whole.
    - `batch`, `heads`, `head_dim`: the sizes of the queries.
    - `kv_heads`: the number of key/value heads, by default `heads`.
    - `value_dim`: the size of a value, by default `head_dim`.
    - `dtype`: the dtype of keys and values.
    - `block`: the tokens of the blocks that are counted. The default is the least size that makes
        2048 blocks or fewer.
    - `group`: how many devices are at each place of the ring, which is the size of `head_axis`.

    **Returns:** a [`eqattn.strategies.RingPlan`][].

    **Raises:** `ValueError` unless the layout divides the tokens, `block` a chunk and `group` the
    heads and the tokens of a place.
    """
    tokens, devices = as_size(tokens, "tokens", 1), as_size(devices, "devices", 1)
    heads, head_dim = as_size(heads, "heads"), as_size(head_dim, "head_dim")
    batch, group = as_size(batch, "batch"), as_size(group, "group", -REACH)
    check_layout(layout)
    kv_heads = heads if kv_heads is None else as_size(kv_heads, "kv_heads", -REACH)
    block = None if block is None else as_size(block, "block", -REACH)
    dtype = as_dtype(dtype, "dtype")
    value_dim = head_dim if value_dim is None else as_size(value_dim, "value_dim")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"heads={heads} must be a positive multiple of kv_heads={kv_heads}.")
    given = tokens
    if layout.parts == 1 and devices > 0 and group > 0:
        tokens = -(-tokens // (devices * group)) * devices * group
    chunk = layout.chunk_size(tokens, devices)
    if group < 1 or heads % group or tokens % (devices * group):
        raise ValueError(
            f"group={group} does not divide {heads} heads and the {tokens // devices} tokens of "
            "each place; choose a smaller group and a larger ring."
        )
    block = _block_of(chunk, tokens) if block is None else block
    if block < 1 or chunk % block:
        raise ValueError(f"block={block} does not divide a chunk of {chunk} tokens.")

    mask = as_mask(mask)
    ends = block_ends(tokens, tokens // block)
    seen = by_device(live_blocks(mask, ends, ends, (batch,), heads, kv_heads), layout, devices)
    ahead, behind = span(seen > 0)
    shifts = (*range(ahead + 1), *range(-1, -behind - 1, -1))
    live, uncounted = counted_blocks(mask, tokens, block, batch, heads, tokens - given)
    each = 2 * batch * heads * block**2 * (head_dim + value_dim)
    own = batch * (tokens // (devices * group))
    # Key heads are repeated until each device has some.
    all_heads = heads, math.lcm(kv_heads, group)
    keys, gradients, exchange = _bytes(own, all_heads, (head_dim, value_dim), dtype, group)
    return RingPlan(
        tokens,
        devices,
        layout,
        shifts,
        _flops(live, layout, shifts, devices, each, group),
        (ahead + behind) * keys,
        (ahead + behind) * (keys + gradients),
        group,
        exchange,
        uncounted,
    )


def _block_of(chunk: int, tokens: int) -> int:
    """The least size of blocks that divides a chunk and makes at most `_MOST_BLOCKS` blocks."""
    sizes = (b for b in range(1, chunk) if chunk % b == 0 and tokens // b <= _MOST_BLOCKS)
    return next(sizes, chunk)


def _flops(
    live: np.ndarray,
    layout: AbstractRingLayout,
    shifts: tuple[int, ...],
    devices: int,
    each: int,
    group: int,
) -> tuple[tuple[int, ...], ...]:
    """The operations of each hop on each device, `[hops][devices]`.

    **Arguments:**

    - `live`: which blocks are live, `[batch|1, heads|1, blocks, blocks]`.
    - `each`: the operations of one block, of all batch elements and heads.
    """
    varied = math.prod(live.shape[:2])  # 1, or the batch elements and heads that it is counted for
    blocks, here = by_device(live.sum((0, 1)), layout, devices), np.arange(devices)
    return tuple(
        tuple(int(x) * each // (varied * group) for x in blocks[here, (here - s) % devices])
        for s in shifts
    )


def _bytes(
    tokens: int, all_heads: tuple[int, int], dims: tuple[int, int], dtype: Any, group: int
) -> tuple[int, int, int]:
    """Counts the bytes of one device: of its keys and values, of their gradients, and of what
    all-to-alls send.

    **Arguments:**

    - `tokens`: how many tokens of all batch elements a device has.
    - `all_heads`, `dims`: the numbers of query and key heads, and the sizes of a key and a value.
    - `group`: the number of devices that exchange tokens for heads.
    """
    heads, kv_heads = all_heads
    head_dim, value_dim = dims
    columns = tokens * kv_heads * (head_dim + value_dim)
    narrow, wide = jnp.dtype(dtype).itemsize, accumulation_dtype(jnp.dtype(dtype)).itemsize
    inputs = (tokens * heads * head_dim + columns) * narrow
    outputs = tokens * heads * (value_dim + 1) * wide
    return columns * narrow, columns * wide, (inputs + outputs) * (group - 1) // group
