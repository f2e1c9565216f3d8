"""A process of `test_full_caches.py`: what cannot be done with caches over four devices raises.
The arguments name the ways, of which there are four.
"""

import contextlib
import itertools
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqattn import Ragged, ragged_attention
from eqattn.cache import KVCache, PagedKVCache, StackedKVCache


SIZES = dict(batch=4, kv_heads=1, head_dim=8)
NEW = jnp.ones((4, 8, 1, 8))


def append(cache, counts):
    cache = cache.append(NEW, NEW, counts)
    # Devices add up what they hold after they could have raised.
    return cache, cache.length.sum()


def in_loop(cache, counts):
    def step(cache, _):
        cache, total = append(cache, counts // 4)
        return cache, total

    return jax.lax.scan(step, cache, length=4)


def mapped(cache, counts):
    return jax.vmap(append, (None, 0))(cache, jnp.stack([counts, 0 * counts]))


def truncate(cache, counts):
    cache = cache.truncate(counts)
    return cache, cache.length.sum()


def pick(cache, counts):
    cache = cache.reorder(counts - 5)
    return cache, cache.length.sum()


def packed(cache, counts):
    ends = jnp.array([0, 2, 4, 6, 8])
    query = NEW.reshape(-1, 1, 8)[:8]
    lengths = dict(cu_q_lens=ends, lengths=4 * counts)
    out = ragged_attention(query, cache.key, cache.value, strategy=Ragged(), **lengths)
    return cache, out.attention_outputs.sum()


def layer(stack, counts):
    def step(stack, i):
        return stack.layer(i).append(NEW[:, :1], NEW[:, :1]).stack, None

    stack = jax.lax.scan(step, stack, counts - 5)[0]
    return stack, stack.length.sum()


def spread(cache, mesh, axis):
    """The cache with its rows, or with the keys of each row, shared out."""
    if axis == "keys":
        return jax.device_put(cache, cache.key_shardings(mesh, axis))
    put = lambda x: jax.device_put(x, NamedSharding(mesh, P(axis) if x.ndim else P()))
    return jax.tree.map(put, cache)


def check(fn, cache, good, wrong, match):
    """What is wrong raises, and the program works before and after that, and again."""
    for counts, raises in ((good, False), (wrong, True), (good, False), (wrong, True)):
        try:
            jax.block_until_ready(fn(cache, jnp.asarray(counts, jnp.int32)))
            assert not raises, (fn, counts)
        except (RuntimeError, ValueError) as e:
            assert raises and match in str(e), (fn, counts, str(e))


def main() -> None:
    held = eqx.filter_jit(lambda cache: cache.append(NEW, NEW))
    plain = held(KVCache.empty(capacity=16, **SIZES))
    paged = held(PagedKVCache.empty(capacity=16, pages=16, page_size=4, **SIZES).reserve(8))
    stack = StackedKVCache.empty(4, capacity=64, **SIZES)
    full = ([8, 8, 8, 8], [8, 8, 4, 9], "between 0 and the number of new tokens")
    calls = {
        "counts": (append, plain, *full),
        "full": (lambda c, n: append(held(c), n), plain, [0] * 4, [0, 0, 1, 0], "cache is full"),
        "pages": (append, paged, [0] * 4, [0, 0, 0, 1], "no page for its new tokens"),
        "loop": (in_loop, plain, [8, 8, 8, 8], [8, 8, 8, 12], "cache is full"),
        "mapped": (mapped, plain, *full),
        "truncate": (truncate, plain, [1, 8, 8, 0], [1, 9, 8, 0], "more tokens than it has"),
        "rows": (pick, plain, [5, 5, 6, 7], [5, 9, 6, 7], "rows must be between 0 and 3"),
        "packed": (packed, plain, [4, 4, 4, 4], [4, 4, 5, 4], "at most the 16 keys"),
        "layer": (layer, stack, [5, 6, 7, 8], [5, 6, 7, 9], "one of the 4 layers"),
    }
    mesh = jax.make_mesh((4,), ("keys",), (AxisType.Auto,))
    explicit = jax.make_mesh((4,), ("rows",), (AxisType.Explicit,))
    ways = {
        "compiled over keys": (jax.jit, mesh, "keys", False),
        "over keys": (lambda fn: fn, mesh, "keys", False),
        "compiled over keys of a known mesh": (jax.jit, mesh, "keys", True),
        "compiled over explicit rows": (jax.jit, explicit, "rows", True),
    }
    chosen = sys.argv[1:] or ways
    for (name, (fn, cache, *rest)), way in itertools.product(calls.items(), chosen):
        wrap, mesh, axis, known = ways[way]
        if name in ("rows", "packed", "layer") and axis == "rows":
            continue  # They leave explicit axes, and raise where these are automatic.
        if name == "layer":
            cache = jax.device_put(cache, NamedSharding(mesh, P()))
        else:
            cache = spread(cache, mesh, axis)
        with jax.set_mesh(mesh) if known else contextlib.nullcontext():
            check(wrap(fn), cache, *rest)
        print(name, way, flush=True)


if __name__ == "__main__":
    main()
