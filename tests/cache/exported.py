"""Exports a step of decoding over each kind of cache, whose batch stays open, and runs it for other
numbers of rows. Arguments name the kinds. `test_exported.py` runs this with `EQX_ON_ERROR=nan`, which Equinox reads once.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from eqattn import attention, Causal, Ragged
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


def main() -> None:
    rng = np.random.default_rng(0)
    for name in sys.argv[1:]:
        make = KINDS[name]
        tree, latent = jax.tree.structure(make(2)), "latents" in name

        def step(leaves, q, k, tree=tree, latent=latent):
            cache = jax.tree.unflatten(tree, leaves)
            where = dict(q_offset=cache.length, kv_positions=cache.positions)
            cache = cache.append(k, k)
            value = cache.key.first if latent else cache.value
            mask = Causal() & cache.mask()
            out = attention(q, cache.key, value, Ragged(), mask=mask, **where)
            return jax.tree.leaves(cache), out.attention_outputs

        def args(b, make=make, latent=latent):
            cache = make(b)
            heads, width = (1, 2 * D) if latent else (K, D)
            q = jnp.asarray(rng.normal(size=(b, 1, H, width)), cache.key.dtype)
            return (
                jax.tree.leaves(cache),
                q,
                jnp.asarray(rng.normal(size=(b, 1, heads, D)), q.dtype),
            )

        (rows,) = jax.export.symbolic_shape("b")

        def abstract(x, y):
            """An array whose axes that vary with the number of rows stay open."""
            shape = (m if m == n else rows for m, n in zip(x.shape, y.shape))
            return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

        jitted = jax.jit(step)
        program = jax.export.export(jitted)(*jax.tree.map(abstract, args(2), args(3)))
        program = jax.export.deserialize(program.serialize())
        for b in (1, 3):  # neither has the number of rows of which the program was made
            leaves, *new = args(b)
            known = leaves
            for _ in range(3):
                known, want = jitted(known, *new)
                leaves, got = program.call(leaves, *new)
                np.testing.assert_array_equal(np.asarray(got), np.asarray(want), name)
            assert np.isfinite(np.asarray(got, np.float32)).all() and np.asarray(got).any(), name
        print(name, flush=True)


if __name__ == "__main__":
    main()
