"""One process of `test_key_shard_processes.py`: steps over a cache on all processes' devices."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqattn import attention, AttentionMetadata, Causal, Ragged
from eqattn.cache import PagedKVCache


ROWS, HEADS, KV_HEADS, DIM = 2, 4, 2, 8
STEPS = ((12, (12, 7)), (1, (1, 1)), (3, (3, 2)))


def tokens(t):
    rng = np.random.default_rng(t)
    return [rng.standard_normal((ROWS, t, h, DIM)) for h in (HEADS, KV_HEADS, KV_HEADS)]


def serve(strategy, place, **kwargs):
    """The outputs of all steps."""

    @jax.jit
    def step(cache, query, key, value, counts):
        offset = cache.length
        cache = cache.append(key, value, counts)
        out = attention(
            query, cache.key, cache.value, strategy, mask=Causal() & cache.mask(), q_offset=offset
        )
        return cache, out.attention_outputs

    cache = PagedKVCache.empty(ROWS, 24, 16, 2, KV_HEADS, DIM, dtype=jnp.float64, **kwargs)
    cache, outs = place(cache), []
    for t, counts in STEPS:
        cache, out = step(cache.reserve(counts), *tokens(t), jnp.array(counts))
        outs.append(out)
    return outs


def one_device():
    metadata = AttentionMetadata(runtime_dtype=jnp.float64)
    return [np.asarray(x) for x in serve(Ragged(metadata), lambda cache: cache)]


def main(rank: int, processes: int, port: int, out: str) -> None:
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank, initialization_timeout=60)
    n = jax.device_count()
    assert (jax.process_count(), n) == (processes, 4)
    mesh = jax.make_mesh((n,), ("keys",), (AxisType.Auto,))

    def place(cache):
        put = lambda x, s: jax.make_array_from_callback(x.shape, s, lambda i: np.asarray(x)[i])
        return jax.tree.map(put, cache, cache.key_shardings(mesh, "keys"))

    with jax.set_mesh(mesh):
        metadata = AttentionMetadata(runtime_dtype=jnp.float64)
        outs = serve(Ragged(metadata, axis_name="keys"), place, devices=n)
        whole = jax.jit(lambda xs: xs, out_shardings=NamedSharding(mesh, P()))(outs)
    if rank == 0:
        np.savez(out, *[np.asarray(x.addressable_data(0)) for x in whole])


if __name__ == "__main__":
    rank, processes, port, out = sys.argv[1:]
    main(int(rank), int(processes), int(port), out)
