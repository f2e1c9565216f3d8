"""Exports a step of decoding over a kind of cache, whose batch stays open, and runs it for other
numbers of rows. The argument names the kind. `test_exported.py` runs this with `EQX_ON_ERROR=nan`,
which Equinox reads once.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from _caches import step

from eqattn.cache import (
    KVCache,
    LatentKVCache,
    PagedKVCache,
    QuantizedKVCache,
    RingBufferCache,
    StackedKVCache,
    StackedPagedKVCache,
)


H, K, D = 4, 2, 8
SIZES = dict(capacity=64, kv_heads=K, head_dim=D)
PAGES = dict(pages=16, page_size=8)
LATENTS = dict(capacity=64, kv_heads=1, head_dim=D)
KINDS = {
    "contiguous": lambda b: KVCache.empty(b, **SIZES),
    "bits": lambda b: KVCache.empty(b, **SIZES, dtype=jnp.bfloat16, bits=True),
    "ring buffer": lambda b: RingBufferCache.empty(b, **SIZES),
    "quantized": lambda b: QuantizedKVCache.empty(b, **SIZES, head_shares=2),
    "pages": lambda b: PagedKVCache.empty(b, **SIZES, **PAGES).reserve(3),
    "pages of 8 bits": lambda b: PagedKVCache.empty(b, **SIZES, **PAGES, stored=jnp.int8).reserve(
        3
    ),
    "layer": lambda b: StackedKVCache.empty(2, b, **SIZES).layer(1),
    "layer of pages": lambda b: (
        StackedPagedKVCache.empty(2, b, **SIZES, **PAGES).reserve(3).layer(1)
    ),
    "latents": lambda b: LatentKVCache.empty(b, 64, D, D),
    "pages of latents": lambda b: LatentKVCache(
        PagedKVCache.empty(b, **LATENTS, **PAGES).reserve(3)
    ),
}


def check(name: str) -> None:
    rng, make = np.random.default_rng(0), KINDS[name]
    tree, heads, width = jax.tree.structure(make(2)), K, D
    if "latents" in name:
        heads, width = 1, 2 * D

    @jax.jit
    def on_leaves(leaves, q, k):
        cache, out = step(jax.tree.unflatten(tree, leaves), q, k, k)
        return jax.tree.leaves(cache), out

    def args(b):
        cache = make(b)
        q = jnp.asarray(rng.normal(size=(b, 1, H, width)), cache.key.dtype)
        return jax.tree.leaves(cache), q, jnp.asarray(rng.normal(size=(b, 1, heads, D)), q.dtype)

    (rows,) = jax.export.symbolic_shape("b")

    def abstract(x, y):
        """An array whose axes that vary with the number of rows stay open."""
        shape = (m if m == n else rows for m, n in zip(x.shape, y.shape))
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    program = jax.export.export(on_leaves)(*jax.tree.map(abstract, args(2), args(3)))
    program = jax.export.deserialize(program.serialize())
    for b in (1, 3):  # neither has the number of rows of which the program was made
        leaves, *new = args(b)
        known = leaves
        for _ in range(3):
            known, want = on_leaves(known, *new)
            leaves, got = program.call(leaves, *new)
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want), name)
        assert np.isfinite(np.asarray(got, np.float32)).all() and np.asarray(got).any(), name
    print(name, flush=True)


if __name__ == "__main__":
    check(sys.argv[1])
