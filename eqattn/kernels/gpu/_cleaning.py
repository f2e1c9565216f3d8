"""The contract of `_sweep/nonfinite.py` in shared memory: tiles in which what is not finite is 0.

By a product, it would reach all rows of a tile, and not only those that see its key.
"""

from typing import Any

import jax.numpy as jnp

from . import _mosaic as mosaic


def clean_together(tile: Any, warpgroup: Any, both: Any) -> None:
    """Replaces what is not finite by 0 in a tile of shared memory that two warpgroups have read.

    **Arguments:**

    - `warpgroup`: which of the two this is.
    - `both`: a barrier for both of them.
    """
    meet(both)
    for i, part in enumerate(mosaic.parts_of(tile)):

        @mosaic.when(warpgroup == i % 2)
        def _(part=part):
            clean(part)

    mosaic.commit_smem()
    meet(both)


def meet(both: Any) -> None:
    """Has two warpgroups wait for each other, at a barrier for both of them."""
    mosaic.barrier_arrive(both)
    mosaic.barrier_wait(both)


def clean(part: Any) -> None:
    """Replaces what is not finite by 0 in a part of a tile."""
    x = mosaic.load(part, "pairs")
    part[...] = jnp.where(jnp.abs(x) < jnp.inf, x, jnp.zeros_like(x))


def clean_values(tile: Any, width: int, poison: Any) -> None:
    """Replaces what is not finite by 0 in values that a single warpgroup reads.

    **Arguments:**

    - `tile`: some columns of values `[keys, width]` in shared memory. 16 divides the number of
        keys, which may be fewer than those of the layout of products.
    - `width`: how many columns there are in all.
    - `poison`: shared memory `[keys]`. It gets NaN for a key whose value is not finite, else 0.
    """
    keys, columns = tile.shape
    n = mosaic.line(2 * width, 2 * keys) // 2
    for k in range(0, keys, 16):
        rows, found = mosaic.ds(k, 16), jnp.float32(0)
        for i in range(0, columns, n):
            part = tile.at[rows, mosaic.ds(i, n)]
            x = mosaic.load(part, mosaic.by_rows(n))
            fine = jnp.abs(x) < jnp.inf
            found = found + jnp.where(fine, jnp.float32(0), jnp.float32(jnp.nan)).sum(1)
            mosaic.commit_smem()  # two more warps have the same rows, and have read them now
            part[...] = jnp.where(fine, x, jnp.zeros_like(x))
        mosaic.store(found, poison.at[rows])
    mosaic.commit_smem()
