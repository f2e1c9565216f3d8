"""One process of `test_processes.py`: the gradients of a ring over all processes' devices."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from eqattn import (
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    Ring,
    ring_mesh,
    Segments,
    Zigzag,
)


TOKENS = 32
NAMES = ("loss", "query", "key", "value", "sinks")


def inputs():
    rng = np.random.default_rng(0)
    shapes = ((2, TOKENS, 4, 8), (2, TOKENS, 2, 8), (2, TOKENS, 2, 8), (4,))
    ids = np.sort(rng.integers(0, 3, (2, TOKENS)), -1).astype(np.int32)
    return [rng.standard_normal(shape) for shape in shapes], ids


def loss(q, k, v, sinks, ids, strategy, **kwargs):
    metadata = AttentionMetadata(
        softmax_aux=sinks, runtime_dtype=jnp.float64, blocksize_q=4, blocksize_k=4
    )
    mask = Causal() & Segments(ids)
    out = attention(q, k, v, strategy(metadata, **kwargs), mask=mask).attention_outputs
    return jnp.sum(jnp.sin(out))


def gradients(strategy, **kwargs):
    return jax.jit(
        jax.value_and_grad(lambda *a: loss(*a, strategy, **kwargs), (0, 1, 2, 3)),
    )


def one_device():
    arrays, ids = inputs()
    value, grads = gradients(Blockwise)(*map(jnp.asarray, arrays), jnp.asarray(ids))
    return dict(zip(NAMES, map(np.asarray, (value, *grads)), strict=True))


def main(rank: int, processes: int, port: int, out: str) -> None:
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank, initialization_timeout=60)
    mesh, n, layout = ring_mesh("sp"), jax.device_count(), Zigzag()
    assert (jax.process_count(), n) == (processes, 4)

    def spread(x):
        spec = P(None, "sp") if x.ndim > 1 else P()
        x = layout.permute(x, n) if x.ndim > 1 else x
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])

    arrays, ids = inputs()
    with jax.set_mesh(mesh):
        value, grads = gradients(Ring, layout=layout)(*map(spread, arrays), spread(ids))
        whole = jax.jit(lambda xs: xs, out_shardings=NamedSharding(mesh, P()))([value, *grads])
    whole = [np.asarray(x.addressable_data(0)) for x in whole]
    whole = [layout.unpermute(x, n) if x.ndim > 1 else x for x in whole]
    if rank == 0:
        np.savez(out, **dict(zip(NAMES, whole, strict=True)))


if __name__ == "__main__":
    rank, processes, port, out = sys.argv[1:]
    main(int(rank), int(processes), int(port), out)
