"""Measures the work of a ring of virtual devices, with gradients, against one device."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from eqattn import (
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    Contiguous,
    Ring,
    ring_mesh,
    Zigzag,
)
from eqattn.strategies import AttentionImpl

from .cases import Case, Row
from .peers import draw
from .timing import ratios, rounds_of


def _gradients(strategy: AttentionImpl, args: list[jax.Array]) -> Callable[[], object]:
    """Returns a call that computes the output and the gradients of queries, keys and values."""

    @jax.jit
    def both(q, k, v, g):
        call = lambda q, k, v: attention(q, k, v, strategy, mask=Causal()).attention_outputs
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(g)

    run = lambda: jax.block_until_ready(both(*args))
    run()
    return run


def work(case: Case, rounds: int) -> Iterator[Row]:
    """Measures the CPU time of both layouts over that of `Blockwise`."""
    mesh, metadata = ring_mesh("sp"), AttentionMetadata(runtime_dtype=case.dtype)
    arrays = [jnp.asarray(x, case.dtype) for x in draw(case)]
    spread = [jax.device_put(x, NamedSharding(mesh, P(None, "sp"))) for x in arrays]
    calls = {"blockwise": _gradients(Blockwise(metadata), arrays)}
    for name, layout in (("zigzag", Zigzag()), ("contiguous", Contiguous())):
        calls[name] = _gradients(Ring(metadata, mesh=mesh, layout=layout), spread)
    medians, quartiles = ratios(rounds_of(calls, max(rounds // 3, 3)), "blockwise")
    for name in ("zigzag", "contiguous"):
        around = {"eqattn": quartiles[name]}
        yield case.row(f"{name} / blockwise", {"eqattn": medians[name]}, quartiles=around)


EXPERIMENTS = {"ring": work}
