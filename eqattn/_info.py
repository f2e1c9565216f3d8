"""`python -m eqattn info` tells what a call of attention would run, and what it would cost."""

import argparse
import dataclasses
import platform
from collections.abc import Callable
from importlib import metadata as distributions
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import __version__
from ._calls.attention import attention
from ._config.metadata import AttentionMetadata
from ._config.platform import Backend, OTHER_KERNELS, Platform
from ._problem.block_classes import choose_live_tiling, table_of
from ._problem.problem import as_mask, Problem
from ._problem.tiling import Tiling
from ._ring.choice import sharding_plan, ShardingPlan
from ._ring.layout import Contiguous, Zigzag
from ._ring.plan import ring_plan, RingPlan
from ._sweep.grid import EMPTY, FULL
from .kernels import BACKENDS, lowering_for
from .masks._base import AbstractMask
from .masks._causal import BlockCausal, Causal, ChunkedCausal, PrefixLM, SlidingWindow
from .strategies import AttentionImpl
from .strategies._on_device import AbstractOnDevice
from .strategies._registry import AttentionRegistry
from .strategies._sharded import AbstractSharded


# The class of each mask by its name, and the least and the largest number of its sizes.
_MASKS: dict[str, tuple[Callable[..., AbstractMask], int, int]] = {
    "causal": (Causal, 0, 1),
    "window": (SlidingWindow, 2, 3),
    "prefix": (PrefixLM, 1, 1),
    "block-causal": (BlockCausal, 1, 1),
    "chunked": (ChunkedCausal, 1, 1),
}

_LAYOUTS = {"contiguous": Contiguous(), "zigzag": Zigzag()}


def parse_mask(text: str) -> AbstractMask | None:
    """Makes a mask of `name:size,size&name`, such as `causal&window:511,0`; None of `none`."""
    if text == "none":
        return None
    result = None
    for term in text.split("&"):
        name, _, sizes = term.strip().partition(":")
        numbers = [s for s in sizes.split(",") if s]
        build, least, most = _MASKS.get(name, (None, 0, 0))
        if build is None or not least <= len(numbers) <= most:
            raise argparse.ArgumentTypeError(
                f"{term!r} is not a mask; write none, causal[:OFFSET], window:LEFT,RIGHT[,SINKS], "
                "prefix:N, block-causal:N or chunked:N, combined by &"
            )
        try:
            mask = build(*map(int, numbers))
        except ValueError as e:
            raise argparse.ArgumentTypeError(f"{term!r}: {e}") from None
        result = mask if result is None else result & mask
    return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `info`."""
    add = parser.add_argument
    add("--batch", type=int, default=1, help="batch size")
    add("--queries", type=int, default=2048, metavar="T", help="number of queries")
    add("--keys", type=int, metavar="S", help="number of keys; None: as many as queries")
    add("--heads", type=int, default=8, help="query heads")
    add("--kv-heads", type=int, help="key and value heads; None: as many as query heads")
    add("--dim", type=int, default=64, help="size of a query and a key")
    add("--value-dim", type=int, help="size of a value; None: as --dim")
    add("--dtype", default="float32", help="dtype of query, key and value")
    add("--mask", type=parse_mask, default="causal", help="such as none, causal&window:511,0")
    add("--dropout", type=float, default=0.0, metavar="P", help="dropout probability")
    add("--weights", action="store_true", help="ask for the attention weights")
    add("--strategy", default="blockwise", help="registry name")
    add("--platform", default="auto", help="auto, xla, pallas or cudnn")
    add("--backend", default="any", help="any, cpu, gpu, cuda, rocm or tpu")
    add("--devices", type=int, default=1, metavar="N", help="also the plan of a ring of N devices")
    add("--group", type=int, default=1, metavar="N", help="devices of a place that exchange heads")
    add("--layout", choices=sorted(_LAYOUTS), default="contiguous", help="layout of the ring")
    add("--blocksize-q", type=int, help="None: automatic")
    add("--blocksize-k", type=int, help="None: automatic")
    add("--no-compile", action="store_true", help="leave out the memory, which needs a compilation")


def run(args: argparse.Namespace) -> int:
    """Prints the report."""
    spec = Spec(args)
    for title, lines in (("", versions()), ("call", spec.call()), ("runs", spec.runs())):
        show(title, lines)
    show("strategies", spec.strategies())
    show("code for " + spec.name, spec.lowerings())
    if max(args.devices, args.group) > 1:
        print(f"\n{spec.ring()}\n\n{spec.sharding()}")
    return 0


def show(title: str, lines: list[tuple[str, str]]) -> None:
    """Prints aligned names and values under a title."""
    if title:
        print(f"\n{title}")
    for name, value in lines:
        print(f"  {name:<15} {value}")


def versions() -> list[tuple[str, str]]:
    """The versions of packages, and the devices. To list these, JAX starts a backend."""
    names = ("jax", "jaxlib", "equinox", "jaxtyping")
    found = [("eqattn", __version__), *((n, distributions.version(n)) for n in names)]
    kinds = [d.device_kind for d in jax.devices()]
    devices = ", ".join(f"{kinds.count(k)} x {k}" for k in dict.fromkeys(kinds))
    found += [("python", platform.python_version())]
    return [*found, ("devices", f"{devices} (default backend {jax.default_backend()})")]


def shape_of(x: jax.ShapeDtypeStruct) -> str:
    return f"{x.dtype}[{', '.join(map(str, x.shape))}]"


def count(n: float) -> str:
    """A number as text with a decimal prefix, such as `1.5 G`."""
    for prefix in ("", "k", "M", "G", "T"):
        if n < 1000:
            return f"{n:.3g} {prefix}"
        n /= 1000
    return f"{n:.3g} P"


def mebibytes(n: int) -> str:
    return f"{n / 2**20:.1f} MiB"


def blocks_of(
    strategy: AbstractOnDevice, query: Any, key: Any, value: Any, mask: Any
) -> tuple[Tiling, Any]:
    """The blocking that `strategy` chooses for arrays of these shapes, and the class of every
    block, or None if all are full. Attention is traced and not computed.
    """
    found = []

    def look(query, key, value):
        spec = Problem.from_call(query, key, value, strategy.metadata, mask=as_mask(mask))
        sizes, lowering = strategy.block_sizes(), strategy.lowering(spec)
        tiling = choose_live_tiling(
            spec,
            *sizes,
            in_place=strategy.in_place(spec, lowering),
            lowering=lowering,
            fixed=strategy.fixed,
        )
        found.append((tiling, table_of(spec, tiling)))

    jax.eval_shape(look, query, key, value)
    return found[0]


@dataclasses.dataclass
class Cost:
    """The number of blocks of each class, and the floating-point operations of the products.

    A product of `m` x `k` by `k` x `n` takes `2 m k n` operations. For each visited pair of query
    and key, the forward pass has two products: q . k of size `dim`, and p v of size `value_dim`.
    The backward pass has three of size `dim` (q . k again, dq and dk) and two of size `value_dim`
    (dv, and dp = g . v).
    """

    empty: int
    partial: int
    full: int
    forward: float
    backward: float

    @classmethod
    def of(cls, tiling: Tiling, table: Any, dim: int, value_dim: int) -> "Cost":
        rows, columns = tiling.rows, tiling.columns
        if table is None:
            table = np.full((1, 1, rows, columns), FULL, np.int8)
        heads = tiling.batch * tiling.kv_heads
        shared = heads // (table.shape[0] * table.shape[1])
        empty, full = (int((table == c).sum()) * shared for c in (EMPTY, FULL))
        partial = table.size * shared - empty - full
        pairs = (partial + full) * tiling.block_q * tiling.block_k * tiling.group
        backward = 2.0 * pairs * (3 * dim + 2 * value_dim)
        return cls(empty, partial, full, 2.0 * pairs * (dim + value_dim), backward)


class Spec:
    """A call of attention that flags describe, and the sections of the report on it."""

    def __init__(self, args: argparse.Namespace):
        for name in ("batch", "queries", "heads", "dim", "value_dim", "devices", "group"):
            size = getattr(args, name)
            if size is not None and size < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {size}.")
        self.args = args
        self.name = args.strategy
        AttentionRegistry.get(self.name)
        keys = args.queries if args.keys is None else args.keys
        kv_heads = args.heads if args.kv_heads is None else args.kv_heads
        if keys < 0 or kv_heads < 1 or args.heads % kv_heads:
            raise ValueError(
                f"--heads {args.heads} must be a multiple of --kv-heads {kv_heads}, and --keys "
                f"{keys} at least 0."
            )
        dtype = jnp.dtype(args.dtype)
        if dtype == jnp.float64:
            jax.config.update("jax_enable_x64", True)
        self.dim, self.value_dim = args.dim, args.value_dim or args.dim
        self.query = jax.ShapeDtypeStruct((args.batch, args.queries, args.heads, self.dim), dtype)
        self.key = jax.ShapeDtypeStruct((args.batch, keys, kv_heads, self.dim), dtype)
        self.value = jax.ShapeDtypeStruct((args.batch, keys, kv_heads, self.value_dim), dtype)
        self.metadata = AttentionMetadata(
            runtime_dtype=dtype,
            platform=args.platform,
            backend=args.backend,
            dropout_prob=args.dropout,
            blocksize_q=args.blocksize_q,
            blocksize_k=args.blocksize_k,
        )
        self.features = dict(
            mask=args.mask,
            dropout=args.dropout > 0,
            return_weights=args.weights or None,
            dtype=self.query.dtype,
        )

    def create(self, name: str) -> tuple[AttentionImpl | None, str]:
        """Makes the strategy of a name that would run the call, or says why it would not."""
        try:
            strategy = AttentionRegistry.create(name, self.metadata)
            reason = strategy.supports(**self.features).reason
            if not reason:
                jax.eval_shape(self.function(strategy), self.query, self.key, self.value)
        except (ValueError, TypeError) as e:
            return None, str(e)
        return (None, reason) if reason else (strategy, "")

    def function(self, strategy: AttentionImpl) -> Callable[..., Any]:
        def forward(query, key, value):
            rng = jax.random.key(0) if self.args.dropout else None
            options = dict(mask=self.args.mask, key=rng, return_weights=self.args.weights)
            return attention(query, key, value, strategy, **options).attention_outputs

        return forward

    def call(self) -> list[tuple[str, str]]:
        args = self.args
        mask = "none" if args.mask is None else repr(args.mask)
        lines = [("query", shape_of(self.query)), ("key", shape_of(self.key))]
        lines += [("value", shape_of(self.value)), ("mask", mask)]
        if args.dropout:
            lines.append(("dropout", str(args.dropout)))
        return lines + ([("returns", "output and weights")] if args.weights else [])

    def runs(self) -> list[tuple[str, str]]:
        strategy, reason = self.create(self.name)
        if strategy is None:
            return [("nothing", reason)]
        forward = strategy.selected_forward()
        name = self.name + self.where(strategy)
        lines = [("strategy", name), ("method", forward), ("code", self.code(strategy))]
        if isinstance(strategy, AbstractOnDevice):
            lines += self.cost(strategy)
        return lines if self.args.no_compile else lines + self.memory(strategy)

    def code(self, strategy: AttentionImpl) -> str:
        if strategy.metadata.platform is Platform.XLA:
            return "XLA"
        if strategy.metadata.platform is Platform.CUDNN:
            return "cuDNN"
        kernel = strategy.supports(**self.features, platform=Platform.PALLAS)
        tried = getattr(strategy, "may_run_kernels", lambda dtype: True)(self.query.dtype)
        return "Pallas kernel" if kernel.ok and tried else "XLA"

    def cost(self, strategy: AbstractOnDevice) -> list[tuple[str, str]]:
        tiling, table = blocks_of(strategy, self.query, self.key, self.value, self.args.mask)
        cost = Cost.of(tiling, table, self.dim, self.value_dim)
        visited = cost.partial + cost.full
        total = visited + cost.empty
        share = visited / max(total, 1)
        each = "of all heads" if tiling.in_place else "per key head"
        return [
            ("blocks", f"{tiling.block_q} queries x {tiling.block_k} keys"),
            ("grid", f"{tiling.rows} x {tiling.columns} blocks {each}"),
            (
                "visited",
                f"{visited} of {total} blocks ({share:.1%}): {cost.partial} partial, "
                f"{cost.full} full; {cost.empty} empty ones are skipped",
            ),
            (
                "products",
                f"{count(cost.forward)}FLOP forward, {count(cost.backward)}FLOP backward",
            ),
        ]

    def memory(self, strategy: AttentionImpl) -> list[tuple[str, str]]:
        forward = self.function(strategy)

        def both(query, key, value):
            out, pull = jax.vjp(forward, query, key, value)
            return out, pull(out)

        found = []
        for name, function in (("forward", forward), ("with gradients", both)):
            try:
                compiled: Any = jax.jit(function).lower(self.query, self.key, self.value).compile()
                size = mebibytes(compiled.memory_analysis().temp_size_in_bytes)
            except Exception as e:  # of any backend's compiler, such as for lack of memory
                size = f"does not compile here ({str(e).splitlines()[0]})"
            found.append(f"{size} {name}")
        return [("temporary", ", ".join(found))]

    def strategies(self) -> list[tuple[str, str]]:
        lines = []
        for name in AttentionRegistry.list_implementations():
            strategy, reason = self.create(name)
            would = f"would run ({strategy.selected_forward()})" if strategy else reason
            lines.append((name, would + self.where(strategy)))
        return lines

    def where(self, strategy: AttentionImpl | None) -> str:
        """Says so where a strategy over sharded sequences runs without a mesh; else nothing."""
        if not isinstance(strategy, AbstractSharded) or strategy._place() is not None:
            return ""
        planned = self.args.devices * self.args.group
        plan = f" here, and below is the plan for one of {planned} devices" if planned > 1 else ""
        return f" on one device, as blockwise: there is no mesh{plan}"

    def sizes(self) -> dict[str, Any]:
        """The arguments of the plans that say what is sharded."""
        (batch, tokens, heads, dim), (_, keys, kv_heads, _) = self.query.shape, self.key.shape
        if keys != tokens:
            raise ValueError(f"--devices plans a ring for as many keys as queries, not {keys}.")
        return dict(
            tokens=tokens,
            layout=_LAYOUTS[self.args.layout],
            mask=self.args.mask,
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            value_dim=self.value_dim,
            dtype=self.key.dtype,
        )

    def ring(self) -> RingPlan:
        return ring_plan(devices=self.args.devices, group=self.args.group, **self.sizes())

    def sharding(self) -> ShardingPlan:
        """The comparison of strategies, for as many devices as the ring has in all its places."""
        return sharding_plan(devices=self.args.devices * self.args.group, **self.sizes())

    def lowerings(self) -> list[tuple[str, str]]:
        strategy = AttentionRegistry.create(self.name, AttentionMetadata())
        lines = []
        for backend in (x for x in Backend if x not in (Backend.ANY, Backend.GPU)):
            for code in (Platform.XLA, Platform.PALLAS):
                if backend in OTHER_KERNELS and code is Platform.XLA:
                    continue  # that of the same device
                able = strategy.supports(**self.features, platform=code, backend=backend)
                lowering = None
                if code is Platform.PALLAS and backend.value in BACKENDS:
                    lowering = lowering_for(backend.value, code.value)
                found = f"yes: {lowering.kernels}" if lowering and lowering.kernels else "yes"
                lines.append((f"{backend.value} {code.value}", able.reason or found))
        able = strategy.supports(**self.features, platform=Platform.CUDNN)
        lines.append(("cuda cudnn", able.reason or "yes"))
        if "cuda" in strategy.pallas_lowerings:
            from .kernels.nvidia._chip import capability, is_hopper

            here = f"capability {capability()}" if capability() else "no NVIDIA GPU"
            default = "as xla: kernels have been measured on Hopper only"
            if lowering_for("cuda", "auto") is not None:
                default = "as pallas where that can, else as xla"
            lines.append(("cuda auto", f"{default}, for what is here: {here}"))
            runs = "cuda" if is_hopper() else "triton"
            lines.append(("gpu pallas", f"as {runs} pallas, for what is here: {here}"))
        return lines
