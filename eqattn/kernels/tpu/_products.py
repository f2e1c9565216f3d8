"""Products of blocks that hold all key/value heads, as a cache lies in memory: `[keys, groups, n]`.
Each group has its own share of the rows.

Where that is a multiple of the lanes, a group is a product of its own; else one product has all
groups side by side, with zeros or unused results where group and row do not belong together.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..._sweep.nonfinite import zero_nonfinite


LANES = 128


def _apart(groups: int, rows: int) -> bool:
    return groups == 1 or rows // groups % LANES == 0


def _share(x: Array, h: int, groups: int, axis: int) -> Array:
    n = x.shape[axis] // groups
    return lax.slice_in_dim(x, h * n, (h + 1) * n, axis=axis)


def _group_of(shape: tuple[int, ...], axis: int, groups: int) -> Array:
    return lax.div(lax.broadcasted_iota(jnp.int32, shape, axis), jnp.int32(shape[axis] // groups))


def grouped_product(wide: Array, other: Array, precision: Any) -> Array:
    """`[keys, groups, n]` and `[n, rows]` to `[keys, rows]`."""
    groups, rows = wide.shape[1], other.shape[1]
    each = [wide[:, h] for h in range(groups)]
    if _apart(groups, rows):
        parts = [
            product_of(x, _share(other, h, groups, 1), (1, 0), precision)
            for h, x in enumerate(each)
        ]
        return parts[0] if groups == 1 else jnp.concatenate(parts, 1)
    group = _group_of(other.shape, 1, groups)
    zero = jnp.zeros((), jnp.float32)
    own = [
        jnp.where(group == h, other.astype(jnp.float32), zero).astype(other.dtype)
        for h in range(groups)
    ]
    # What is not finite must not meet the zeros: it makes the logits of its own group NaN.
    # This keeps the contract of `_sweep/nonfinite.py`.
    clean = [zero_nonfinite(x.astype(jnp.float32)).astype(x.dtype) for x in each]
    bad = [(x.astype(jnp.float32) * 0).sum(1, keepdims=True) for x in each]
    logits = product_of(jnp.concatenate(clean, 1), jnp.concatenate(own, 0), (1, 0), precision)
    return logits + spread_groups(jnp.concatenate(bad, 1), rows)


def weighted_groups(wide: Array, weights: Array, precision: Any) -> Array:
    """`[keys, groups, n]` and `[keys, rows]` to `[n, rows]`."""
    groups, rows = wide.shape[1], weights.shape[1]
    each = [wide[:, h] for h in range(groups)]
    if _apart(groups, rows):
        parts = [
            product_of(_share(weights, h, groups, 1), x, (0, 0), precision)
            for h, x in enumerate(each)
        ]
        return (parts[0] if groups == 1 else jnp.concatenate(parts, 0)).T
    every = product_of(weights, jnp.concatenate(each, 1), (0, 0), precision)
    own = [_share(every, h, groups, 1) for h in range(groups)]
    group = _group_of(own[0].shape, 0, groups)
    total = jnp.zeros_like(own[0])
    for h, x in enumerate(own):
        total = jnp.where(group == h, x, total)
    return total.T


def spread_groups(bad: Array, rows: int) -> Array:
    """`[keys, groups]`, 0 or NaN, to `[keys, rows]`."""
    groups = bad.shape[1]
    belongs = _group_of((groups, rows), 1, groups) == lax.broadcasted_iota(
        jnp.int32, (groups, rows), 0
    )
    count = product_of(
        jnp.isnan(bad).astype(jnp.float32), belongs.astype(jnp.float32), (1, 0), None
    )
    return jnp.where(count > 0, jnp.nan, 0.0)


def product_of(a: Array, b: Array, contract: tuple[int, int], precision: Any) -> Array:
    """In float32, summed over the named axes."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
