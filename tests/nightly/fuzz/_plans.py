"""Random histories of caches, and how they are drawn."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from eqattn import AttentionMetadata, Ragged
from eqattn.cache import (
    KVCache,
    PagedKVCache,
    QuantizedKVCache,
    RingBufferCache,
    StackedKVCache,
    StackedPagedKVCache,
)
from fuzz import _twins as twins
from fuzz._history import History


KINDS = ("dense", "ring", "paged", "quantized", "paged int8", "stacked", "stacked paged")
PAGED = ("paged", "paged int8", "stacked paged")
STACKED = ("stacked", "stacked paged")
MODES = ("jit", "jit", "jit", "donate", "donate", "eager")
PLAIN = ("attention", "dense", "blockwise", "spread", "carry", "top", "layer")
SPREAD = (
    ("ring", 2),
    ("ring", 3),
    ("ring", 4),
    ("ulysses", 2),
    ("all_gather", 2),
    ("all_gather", 4),
)
EIGHT_BITS = (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)


@dataclasses.dataclass
class Config:
    """What stays the same in a history."""

    kind: str
    latent: bool
    dtype: Any
    bits: bool | None
    batch: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    capacity: int
    page: int
    devices: int
    stored: Any
    layers: int
    dirty: bool
    metadata: dict[str, Any]
    bitwise: bool
    gradients: bool

    @classmethod
    def draw(cls, rng: np.random.Generator, x64: bool) -> "Config":
        kind = str(rng.choice(KINDS))
        latent = bool(rng.random() < 0.2)
        kv = 1 if latent else int(rng.choice([1, 2, 3]))
        heads = kv * int(rng.choice([1, 2, 3]))
        dtypes = [jnp.float32] * 4 + [jnp.bfloat16, jnp.float16] + [jnp.float64] * 6 * x64
        dtype = dtypes[rng.integers(len(dtypes))]
        eight = kind in ("quantized", "paged int8")
        gradients = bool(rng.random() < 0.35) and not eight and dtype != jnp.float16
        devices = int(rng.choice([2, 4])) if rng.random() < 0.2 and kind != "stacked" else 1
        gradients &= dtype != jnp.bfloat16
        bits = (None, True, False)[rng.integers(3)] if dtype != jnp.float64 else None
        capacity = int(rng.integers(4, 30))
        capacity = -(-capacity // devices) * devices
        sinks = [None, (heads,), (heads, 2), (1, 3)][rng.integers(4)]
        metadata = dict(
            softmax_scale=None if rng.random() < 0.5 else 0.4,
            logits_soft_cap=None if rng.random() < 0.7 else 3.0,
            softmax_aux=None if sinks is None else rng.normal(size=sinks).astype(np.float32),
            blocksize_q=None if rng.random() < 0.6 else int(rng.integers(1, 5)),
            blocksize_k=None if rng.random() < 0.4 else int(rng.integers(1, 12)),
        )
        if kind in (*PAGED, "stacked"):  # A page is a block.
            metadata["blocksize_k"] = None
        return cls(
            kind, latent, dtype, False if gradients else bits, int(rng.integers(1, 4)), heads, kv,
            int(rng.choice([1, 2, 3, 8])), int(rng.choice([1, 3, 4, 8])), capacity,
            int(rng.choice([1, 2, 3, 4, 7, 16])), devices, EIGHT_BITS[rng.integers(3)],
            2 if kind in STACKED else 1, bool(rng.random() < 0.5), metadata,
            bool(rng.random() < 0.15) and devices == 1, gradients,
        )  # fmt: skip

    @property
    def query_dim(self) -> int:
        return self.dim + self.value_dim if self.latent else self.dim

    @property
    def places(self) -> int:
        """The length of the arrays of keys."""
        if self.kind in PAGED:
            return -(-self.capacity // (self.page * self.devices)) * self.devices * self.page
        return 64 if self.kind == "stacked" else self.capacity

    def make(self) -> Any:
        """An empty cache. What it has never been given is NaN if it is `dirty`."""
        sizes = (self.kv_heads, self.dim, self.value_dim)
        rest = dict(dtype=self.dtype, bits=self.bits)
        eight = dict(dtype=self.dtype, stored=self.stored)
        pages = self.batch * self.places // self.page
        paged = (self.batch, self.capacity, pages, self.page, *sizes)
        more = dict(devices=self.devices)
        make = {
            "dense": lambda: KVCache.empty(self.batch, self.capacity, *sizes, **rest),
            "ring": lambda: RingBufferCache.empty(self.batch, self.capacity, *sizes, **rest),
            "paged": lambda: PagedKVCache.empty(*paged, **rest, **more),
            "quantized": lambda: QuantizedKVCache.empty(self.batch, self.capacity, *sizes, **eight),
            "paged int8": lambda: PagedKVCache.empty(*paged, **eight, **more),
            "stacked": lambda: StackedKVCache.empty(self.layers, self.batch, 64, *sizes, **rest),
            "stacked paged": lambda: StackedPagedKVCache.empty(self.layers, *paged, **rest, **more),
        }
        held = make[self.kind]()

        def spoiled(x):
            if jnp.issubdtype(x.dtype, jnp.floating):
                return jnp.full_like(x, jnp.nan)
            return jnp.full_like(x, -1) if x.dtype == jnp.uint16 else x

        if self.devices > 1:
            mesh = mesh_of(self.devices)
            held = jax.device_put(held, held.key_shardings(mesh, "keys"))
        return jax.tree.map(spoiled, held) if self.dirty else held

    def strategy(self, **more: Any) -> Ragged:
        metadata = dict(self.metadata)
        aux = metadata["softmax_aux"]
        metadata["softmax_aux"] = None if aux is None else jnp.asarray(aux)
        if self.bitwise and self.kind in (*PAGED, "stacked"):  # Its blocks have one size, known.
            metadata["blocksize_k"] = 64 if self.kind == "stacked" else self.page
        if self.devices > 1:
            of = AttentionMetadata(mesh=mesh_of(self.devices), **metadata)
            return Ragged(of, axis_name="keys", **more)
        return Ragged(AttentionMetadata(**metadata), **more)


class Static(eqx.Module):
    """A value that is part of the program."""

    value: Any = eqx.field(static=True)


@functools.cache
def mesh_of(devices: int) -> Any:
    return jax.make_mesh((devices,), ("keys",), (AxisType.Auto,), devices=jax.devices()[:devices])


@dataclasses.dataclass
class Step:
    """One operation of a history, and what it needs."""

    op: str
    arguments: dict[str, Any]


def draw_counts(rng, history: History, config: Config, t: int) -> list[int]:
    room = [t if config.kind == "ring" else config.capacity - n for n in history.lengths]
    kind = rng.random()
    counts = [t if kind < 0.5 else int(rng.integers(0, t + 1)) for _ in room]
    return [min(n, r) for n, r in zip(counts, room)]


def draw_steps(rng: np.random.Generator, config: Config, n: int) -> list[Step]:
    """What happens to a cache. It follows a history of its own, to stay within the capacity."""
    history = History.of(config.batch, config.capacity if config.kind == "ring" else None)
    steps: list[Step] = []
    for step in range(n):
        rows = len(history.rows)
        chosen = rng.random()
        if chosen < 0.62 or not steps:
            t = int(rng.choice([1, 1, 2, 5, config.capacity]))
            t = min(t, config.capacity)
            counts = draw_counts(rng, history, config, t)
            steps.append(Step("append", draw_call(rng, config, history, t, counts)))
            history.append(step, counts)
        elif chosen < 0.74:
            lengths = [int(rng.integers(max(0, x - 4), x + 1)) for x in history.lengths]
            steps.append(Step("truncate", dict(lengths=lengths)))
            history.truncate(lengths)
        elif chosen < 0.84 and config.kind not in STACKED and config.devices == 1:
            more = rows if config.kind in PAGED else int(rng.integers(1, 4))
            order = [int(x) for x in rng.integers(0, rows, more)]
            steps.append(Step("reorder", dict(rows=order)))
            history.reorder(order)
        elif chosen < 0.92 and config.kind in PAGED:
            ended = sorted({int(x) for x in rng.integers(0, rows, rng.integers(1, 3))})
            steps.append(Step("release", dict(rows=ended)))
            history.release(ended)
            from_row = int(rng.integers(rows))
            if from_row not in ended and history.lengths[from_row]:
                tokens = int(rng.integers(1, history.lengths[from_row] + 1))
                shared = dict(rows=ended, from_row=from_row, tokens=tokens)
                steps.append(Step("share", shared))
                history.share(**shared)
        else:
            steps.append(Step("saved", {}))
    return steps


def draw_call(rng, config: Config, history: History, t: int, counts: list[int]) -> dict[str, Any]:  # noqa: C901 (a switch over kinds)
    """A call of attention after an append."""
    after = History([list(x) for x in history.rows], list(history.lengths), history.wraps)
    after.append(-1, counts)
    ways = (
        ["attention"] * 4
        + ["dense", "blockwise", "carry"]
        + ["top"] * (not config.bitwise and config.devices == 1)
    )
    if config.kind in ("dense", "ring", "quantized") and config.devices == 1:
        ways += ["vmap"]
    ways += ["packed"] * 2
    if config.devices == 1 and not config.bitwise:
        ways += ["spread"] * 2  # over devices that share the queries, too
    if config.kind in PAGED and config.devices == 1 and not config.bitwise:
        ways += ["cascade"] * 2
    if not config.latent and config.devices == 1 and not config.bitwise:
        ways += ["layer"] * 2
    way = str(rng.choice(ways))
    sizes = twins.Sizes(
        1 if way == "vmap" else len(history.rows), t, config.places, config.heads, config.kv_heads,
        np.array(history.lengths), after.places(config.places), config.dtype,
        arrays=way in PLAIN,
    )  # fmt: skip
    call = dict(t=t, counts=counts, way=way, layer=int(rng.integers(config.layers)))
    call |= dict(whole=all(n == t for n in counts), mode=MODES[rng.integers(6)])
    mask, seen = twins.causal(rng, sizes) if rng.random() < 0.3 else twins.mask(rng, sizes)
    scores, score = twins.some_scores(rng, sizes)
    moved = None
    if way == "cascade":
        old_seen = seen
        seen = lambda p: old_seen(p) & (p.k <= p.q)
    elif way == "packed":
        causal = bool(rng.random() < 0.7)
        first = twins.ints(rng, 0, 4, (sizes.b,))
        call |= dict(causal=causal, starts=first)
        old = seen
        seen = lambda p: old(p) & ((p.k <= p.q) | (not causal)) & (p.k >= first[p.b])
        if rng.random() < 0.2:
            mask, seen = None, lambda p: ((p.k <= p.q) | (not causal)) & (p.k >= first[p.b])
    elif way == "vmap":
        first, of_first = (lambda p: dataclasses.replace(p, b=0)), (seen, score)
        seen = lambda p: of_first[0](first(p))
        score = lambda p, x: of_first[1](first(p), x)
    elif rng.random() < 0.2 and all(n == t for n in counts):
        # A tree moves positions for the mask beside it. What its row has not is hidden by place.
        branch, sees, moved = twins.tree(rng, sizes)
        also = seen
        mask, seen = branch & mask, lambda p: sees(p) & also(p)
    elif rng.random() < 0.3 and not config.bitwise and way != "top":
        build, listed, named = twins.selected(rng, sizes)
        if call["mode"] == "eager":
            most = (config.places if config.kind != "ring" else 2**20) // build(listed).block_k
            listed = np.where(listed >= most, -1, listed)
            build, listed, named = again(build, listed, sizes)
        mask, seen = listed_with(rng, mask, seen, build(jnp.asarray(listed)), named)
    if way == "spread":
        spread = SPREAD[rng.integers(len(SPREAD))]
        call |= dict(spread=("ring", 2) if config.heads % spread[1] else spread)
    call |= dict(mask=mask, seen=seen, scores=scores, score=score, moved=moved)
    call |= dict(by_place=bool(rng.random() < 0.3) and way in PLAIN and way != "layer")
    if way == "layer":
        call |= draw_layer(rng, config, t)
        left, right = call["window"] or (None, None)
        old = call["seen"]

        def near(p):
            ok = old(p) if left is None else old(p) & (p.q - p.k <= left)
            return ok if right is None else ok & (p.k - p.q <= right)

        call["seen"] = near
    if call["by_place"] and moved is None and config.kind != "ring" and rng.random() < 0.6:
        # Positions of the caller's own: gaps and offsets, one order of places for all rows.
        gaps = np.cumsum(twins.ints(rng, 1, 4, (sizes.b, config.places)), 1) - 1
        if "Selected" not in repr(mask) and "Neighbourhood" not in repr(mask):
            call |= dict(positions=gaps.astype(np.int32))
    raw = not config.latent and way not in ("layer", "vmap") and config.dim % 2 == 0
    if raw and moved is None and "positions" not in call and rng.random() < 0.2:
        sections = ((1,),) if config.dim == 2 else ((4,), (1, 3), (2, 1, 1), (0, 2, 2))
        chosen = sections[rng.integers(len(sections))]
        call |= dict(turned=(None, bool(rng.random() < 0.5), chosen))
    return call


def draw_layer(rng, config: Config, t: int) -> dict[str, Any]:
    """What a layer adds to a call: rotary positions and a window, such as a ring buffer needs."""
    dim = None if rng.random() < 0.5 else 2 * int(rng.integers(0, config.dim // 2 + 1))
    dim = 0 if config.dim % 2 and dim is None else dim
    turned = (dim, bool(rng.random() < 0.5)) if rng.random() < 0.7 else None
    window = None
    if config.kind == "ring" or rng.random() < 0.4:
        most = config.capacity - t if config.kind == "ring" else 9
        window = int(rng.integers(0, most + 1)), (None, 0, 2)[rng.integers(3)]
    return dict(turned=turned, window=window)


def again(build, listed, sizes):
    """The list with other entries, and its twin."""
    made = build(listed)
    each = np.broadcast_to(listed, (sizes.b, *listed.shape[-3:]))

    def seen(p):
        row = each[p.b, p.h * each.shape[1] // sizes.heads][p.i[:, 0] // made.block_q]
        found = (row[:, None] == (p.at_k[0] // made.block_k)[None, :, None]) & (row >= 0)[:, None]
        return found.any(-1)

    return build, listed, seen


def listed_with(rng, mask, seen, lists, named):
    kind = rng.integers(3)
    if kind == 0:
        return lists, named
    if kind == 1:
        return lists & mask, lambda p: named(p) & seen(p)
    return lists | mask, lambda p: named(p) | seen(p)


def fresh(rng: np.random.Generator, config: Config, step: Step) -> Any:
    """The queries, keys and values of a step, `[b, t, ...]`; keys and values of each layer."""
    b, t = len(step.arguments["counts"]), step.arguments["t"]
    lead = (config.layers, b, t, config.kv_heads)
    shapes = (b, t, config.heads, config.query_dim), (*lead, config.dim), (*lead, config.value_dim)
    return [jnp.asarray(rng.normal(size=shape), config.dtype) for shape in shapes]
