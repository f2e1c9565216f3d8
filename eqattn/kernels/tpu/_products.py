"""Products of blocks that hold all key/value heads, as a cache lies in memory: `[keys, groups, n]`.

A group is a key/value head, and each group has its own share of the rows. Where that share is a
multiple of the lanes, each group is a separate product. Else there is one product with all groups
side by side, which has zeros or unused results where group and row do not belong together.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..._sweep.differences import LANES as LANES
from ..._sweep.nonfinite import zero_nonfinite


SUBLANES = 8
"""The rows of a vector register of float32: arrays can be cut between rows at multiples of them."""


def _apart(groups: int, rows: int) -> bool:
    """Whether each group is a separate product."""
    return groups == 1 or rows // groups % LANES == 0


def _share(x: Array, h: int, groups: int, axis: int) -> Array:
    """The slice of group `h` of an axis that holds one group after the other."""
    n = x.shape[axis] // groups
    return lax.slice_in_dim(x, h * n, (h + 1) * n, axis=axis)


def _group_of(shape: tuple[int, ...], axis: int, groups: int) -> Array:
    """The index of the group that each place along an axis belongs to."""
    return lax.div(lax.broadcasted_iota(jnp.int32, shape, axis), jnp.int32(shape[axis] // groups))


def grouped_product(wide: Array, other: Array, precision: Any) -> Array:
    """The logits `[keys, rows]` of keys `[keys, groups, n]` and queries `[n, rows]`.

    In the joint product, keys are `[keys, groups * n]`, and queries `[groups * n, rows]` with zeros
    in the places of all groups but their own.
    """
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
    # A number that is not finite would make 0 * inf = NaN of a zero, in the rows of other groups.
    # So it is left out here, and added as NaN to the logits of its group only. This keeps the
    # contract of `_sweep/nonfinite.py`.
    clean = [zero_nonfinite(x.astype(jnp.float32)).astype(x.dtype) for x in each]
    bad = [(x.astype(jnp.float32) * 0).sum(1, keepdims=True) for x in each]
    logits = product_of(jnp.concatenate(clean, 1), jnp.concatenate(own, 0), (1, 0), precision)
    return logits + spread_groups(jnp.concatenate(bad, 1), rows)


def weighted_groups(wide: Array, weights: Array, precision: Any) -> Array:
    """The sums `[n, rows]` of values `[keys, groups, n]` with weights `[keys, rows]`.

    The joint product has the sums of all groups for each row, of which its own group's are kept.
    """
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
    """What is 0 or NaN for each group, `[keys, groups]`, for each row of the group, `[keys, rows]`.

    A product with a matrix of zeros and ones spreads it. NaN is 1 in that product, as NaN times 0
    would be NaN in the rows of other groups, too.
    """
    groups = bad.shape[1]
    belongs = _group_of((groups, rows), 1, groups) == lax.broadcasted_iota(
        jnp.int32, (groups, rows), 0
    )
    count = product_of(
        jnp.isnan(bad).astype(jnp.float32), belongs.astype(jnp.float32), (1, 0), None
    )
    return jnp.where(count > 0, jnp.nan, 0.0)


def product_of(a: Array, b: Array, contract: tuple[int, int], precision: Any) -> Array:
    """The product of two matrices in float32, summed over the axis of each in `contract`.

    The compiler computes a product with a vector in the vector units, and fails if it is narrow.
    """
    if a.shape[1 - contract[0]] == 1 or b.shape[1 - contract[1]] == 1:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
