"""Where a drawn call runs: a strategy, a mesh and how arrays are placed on it."""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqattn as eq

from ._calls import Call, draw_sizes, Values
from ._features import Sizes, TERMS


@dataclass(frozen=True)
class Target:
    """A strategy of metadata, the options of these, and the mesh.

    `tokens` are the mesh axes that shard tokens, the outer one first, and `explicit` are those with
    explicit types. `by_context` says whether the mesh is that of the context or the metadata's.
    """

    name: str
    strategy: Callable[[Any], Any]
    options: dict[str, Any]
    shape: dict[str, int]
    tokens: tuple[str, ...] = ()
    explicit: tuple[str, ...] = ()
    by_context: bool = True
    placed: bool = False
    layout: Any = None
    by_hand: bool = False  # in a `shard_map` that is manual over the axes of the tokens
    checked: bool = False  # which checks over which axes arrays vary

    @property
    def mesh(self) -> Any:
        if not self.shape:
            return None
        n = math.prod(self.shape.values())
        kinds = [AxisType.Explicit if a in self.explicit else AxisType.Auto for a in self.shape]
        devices = np.asarray(jax.devices()[:n]).reshape(*self.shape.values())
        return jax.sharding.Mesh(devices, tuple(self.shape), axis_types=tuple(kinds))

    def context(self) -> Any:
        mesh = self.mesh
        return jax.set_mesh(mesh) if mesh and self.by_context else contextlib.nullcontext()

    def run(self, call: Call) -> Callable[[Values], Any]:
        """The function of values that is transformed."""
        options = dict(self.options)
        if self.by_hand:
            return lambda values: self._in_shard_map(call, values)
        if self.shape and not self.by_context:
            options["mesh"] = self.mesh

        def run(values: Values) -> Any:
            floats, others = values
            if self.placed:
                own = {n: self.place(floats[n]) for n in ("query", "key_", "value")}
                floats = {**floats, **own}
            found = call.run((floats, others), self.strategy, **options)
            # Cotangents and what a loop carries must have the same types.
            whole = self.placed and self.explicit
            return jax.sharding.reshard(found, P()) if whole else found

        return run

    def _in_shard_map(self, call: Call, values: Values) -> Any:
        """A call whose arrays are a device's own: `jax.shard_map` around it is the user's."""
        tokens, z = P(self.tokens), call.sizes
        floats, others = values
        lead = "." * len(z.lead)
        named = {"query": "t..", "key_": "s..", "value": "s..", "bias": "hts"}
        named |= {"q_positions": "t", "kv_positions": "s"}
        spec = lambda axes, x: _spec(axes, x, z, tokens[0])
        of = {n: spec(named.get(n, ""), x) for n, x in (floats | others).items() if _one(x)}
        of["scores"] = [spec(f.axes, x) for f, x in zip(call.scores, floats["scores"])]
        of["mask"] = spec(() if call.mask is None else call.mask.axes, others["mask"])
        specs = ({n: of[n] for n in floats}, {n: of[n] for n in others})
        out = P(*[None] * len(lead), tokens[0])
        mapped = jax.shard_map(
            lambda values: call.run(values, self.strategy, **self.options),
            mesh=self.mesh,
            in_specs=(specs,),
            out_specs=(out, out),
            check_vma=self.checked,
        )
        return mapped(values)

    def place(self, x: Any) -> Any:
        """Queries, keys or values `[*b, t, h, d]`, spread over the mesh."""
        batch, lead = tuple(a for a in ("fsdp", "dp") if a in self.shape), x.ndim - 3
        entries = [batch, *[()] * (lead - 1)] if lead else []
        entries += [self.tokens, ("tp",) if "tp" in self.shape else ()]
        kept: list[tuple[str, ...]] = []
        for names, n in zip(entries, x.shape, strict=False):
            kept.append(())
            for name in names:
                if n and n % math.prod(self.shape[a] for a in (*kept[-1], name)) == 0:
                    kept[-1] += (name,)
        explicit = P(*[tuple(a for a in e if a in self.explicit) or None for e in kept])
        rest = P(*[tuple(a for a in e if a not in self.explicit) or None for e in kept])
        if self.explicit:
            x = jax.sharding.reshard(x, explicit)
        if set(self.shape) > set(self.explicit):
            sharding = rest if self.by_context else NamedSharding(self.mesh, rest)
            x = jax.lax.with_sharding_constraint(x, sharding)
        return x

    def __repr__(self) -> str:
        mesh = f" mesh={self.shape} explicit={self.explicit} by_context={self.by_context}"
        more = f" placed={self.placed}" + (f" {self.layout!r}" if self.layout else "")
        more += f" by_hand, check_vma={self.checked}" if self.by_hand else ""
        return f"{self.name} {self.options}" + (mesh + more if self.shape else "")


def _one(x: Any) -> bool:
    return hasattr(x, "shape")


def _spec(axes: Any, x: Any, z: Sizes, tokens: Any) -> Any:
    """How a PyTree of arrays is sharded: by their queries, or by their keys if they have none."""
    if not _one(x):
        known = axes if isinstance(axes, tuple) and len(axes) == len(x) else [""] * len(x)
        return type(x)(_spec(a, y, z, tokens) for a, y in zip(known, x))
    letters = axes if isinstance(axes, str) else ""
    letters = letters[-x.ndim :].rjust(x.ndim, ".") if x.ndim else ""
    sizes = {"t": z.t, "s": z.s}
    own = [i for i, a in enumerate(letters) if a in sizes and x.shape[i] == sizes[a]]
    first = min(own, key=lambda i: "ts".index(letters[i]), default=None)
    return P(*[tokens if i == first else None for i in range(x.ndim)])


ONE = ("blockwise", "blockwise", "ragged", "dense", "unfused", "bitwise")
MANY = ("ring", "ring", "ring", "ulysses", "all_gather", "hybrid", "blockwise", "blockwise_auto")
MESHES = (
    *({"sp": 2}, {"sp": 3}, {"sp": 4}, {"sp": 8}, {"dp": 2, "sp": 2}, {"dp": 2, "sp": 3}),
    *({"sp": 2, "tp": 2}, {"dp": 2, "sp": 2, "tp": 2}, {"fsdp": 2, "dp": 2, "sp": 2}),
    *({"fsdp": 1, "dp": 2, "tp": 2, "sp": 2}, {"sp": 1}, {"dp": 2, "sp": 1}),
)


def draw_target(rng: np.random.Generator, only: str | None = None) -> Target:
    """A strategy, on one device or many."""
    pick = lambda xs: xs[int(rng.integers(len(xs)))]
    many = bool(rng.integers(2)) if only is None else only in (*MANY, "many", "manual")
    kinds = MANY[:6] if only == "manual" else MANY if many else ONE
    name = pick(kinds) if only in (None, "one", "many", "manual") else only
    options: dict[str, Any] = {}
    if name != "dense" and rng.integers(3):
        options |= {n: int(rng.integers(1, 20)) for n in ("blocksize_q", "blocksize_k")}
    strategies = {
        "blockwise": eq.Blockwise,
        "blockwise_auto": eq.Blockwise,
        "ragged": eq.Ragged,
        "dense": eq.Dense,
        "unfused": lambda m: eq.Blockwise(m, fused_backward=False),
        "bitwise": lambda m: eq.Blockwise(m, bitwise=True),
        "ulysses": eq.Ulysses,
    }
    if not many:
        return Target(name, strategies[name], options, {})
    shape = dict(pick(MESHES))
    if name == "hybrid":
        shape = pick(({"sp": 2, "hp": 2}, {"sp": 2, "hp": 2, "tp": 2}, {"dp": 2, "sp": 2, "hp": 2}))
        shape = dict(shape)
    places = shape.get("sp", 1)
    layout = None
    if name in ("ring", "all_gather", "hybrid") and not rng.integers(3) and places > 1:
        layout = eq.Zigzag()
    own = {} if layout is None else {"layout": layout}
    strategies["ring"] = lambda m: eq.Ring(m, **own)
    strategies["all_gather"] = lambda m: eq.AllGather(m, **own)
    strategies["hybrid"] = lambda m: eq.Ring(m, head_axis="hp", **own)
    if name in ("ring", "hybrid") and not rng.integers(4):
        options["scan_ring_attention"] = False
    tokens = ("sp", "hp") if name == "hybrid" else ("sp",)
    if name.startswith("blockwise"):
        tokens = ()
    if only == "manual" or (name not in ("blockwise", "blockwise_auto") and not rng.integers(4)):
        shape = {a: n for a, n in shape.items() if a in tokens}
        return Target(
            name, strategies[name], options, shape, tokens, layout=layout,
            by_hand=True, checked=bool(rng.integers(2)),
        )  # fmt: skip
    kind = int(rng.integers(4))
    explicit = {0: tuple(shape), 1: tuple(a for a in shape if rng.integers(2))}.get(kind, ())
    by_context = bool(explicit) or bool(rng.integers(3))
    placed = bool(rng.integers(3))
    return Target(
        name, strategies[name], options, shape, tokens, explicit, by_context, placed, layout
    )


def draw_call(rng: np.random.Generator, target: Target) -> Call:
    """A call that the target can do."""
    while True:
        z = draw_sizes(rng)
        if target.name == "hybrid" and z.heads % target.shape["hp"]:
            continue
        if target.name == "ulysses" and z.heads % target.shape["sp"]:
            continue
        break
    places = None
    n, group = target.shape.get("sp", 1), target.shape.get("hp", 1)
    if target.by_hand:
        t, s = (n * group * int(rng.integers(2, 4)) for _ in range(2))
        z = dataclasses.replace(z, t=t, s=t if rng.integers(2) else s)
    if target.layout is not None:
        parts = n * math.lcm(2, group) * (1 + target.by_hand)  # two tokens on each device
        t, s = (parts * int(rng.integers(1, 1 + max(1, 24 // parts))) for _ in range(2))
        s = t if rng.integers(2) else s
        z = dataclasses.replace(z, t=t, s=s)
        places = tuple(target.layout.positions(x, n).reshape(-1) for x in (t, s))
    return Call(rng, z, terms=TERMS, places=places)
