"""`ragged_flash_attention_kernel()`, a kernel body for those who write their own `pallas_call`."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._carry import online_softmax
from .ragged import check_mask_value, DEFAULT_MASK_VALUE


def ragged_flash_attention_kernel(
    lengths_ref: Any,
    starts_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    o_ref: Any,
    m_ref: Any,
    l_ref: Any,
    *,
    block_size: int,
    mask_value: float = DEFAULT_MASK_VALUE,
) -> None:
    """Computes attention in the body of a Pallas kernel, over the keys `starts <= s < lengths` of a
    row.

    It is for a grid `(rows, blocks of keys)` that visits the blocks of a row one after the other.
    Both arrays of bounds must be prefetched as scalars
    (`pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=2, ...)`), and the references of results must
    stay in place for a whole row. [`eqattn.ragged_gqa`][] and [`eqattn.Ragged`][] have other
    kernels, which do not visit blocks without visible keys.

    **Arguments:**

    - `lengths_ref`, `starts_ref`: the end and the start of the visible keys, int32 `[rows]`.
    - `q_ref`: the heads `[h, d]` of a query, which share one key head. Logits are not scaled.
    - `k_ref`, `v_ref`: a block of keys `[block_size, d]` and of values `[block_size, v]`. What lies
        beyond the last key may be anything.
    - `o_ref`: at the end of a row, the sum of the weighted values, not normalised, float32
        `[h, v]`.
    - `m_ref`, `l_ref`: at the end of a row, the maximum of the logits and the denominator relative
        to it, float32 `[h, n]` with any `n`; all columns are equal. A row without keys has 0,
        `-inf` and 0. [`eqattn.Carry`][]`(o, l[:, 0], m[:, 0])` continues from the three.
    - `block_size`: how many keys a block has.
    - `mask_value`: a number that is checked and not used. Masked keys are left out exactly.

    **Raises:** `ValueError` for a `mask_value` above -1e30 or a `k_ref` of another size.
    """
    from jax.experimental import pallas as pl

    from ..kernels.tpu._products import product_of

    check_mask_value(mask_value)
    if k_ref.shape[0] != block_size:
        raise ValueError(f"k_ref {k_ref.shape} does not hold block_size={block_size} keys.")
    row, block = pl.program_id(0), pl.program_id(1)
    start, end, here = starts_ref[row], lengths_ref[row], block * block_size

    @pl.when(block == 0)
    def _():
        o_ref[...], l_ref[...] = jnp.zeros_like(o_ref), jnp.zeros_like(l_ref)
        m_ref[...] = jnp.full_like(m_ref, -jnp.inf)

    @pl.when((here < end) & (here + block_size > start))
    def _():
        def seen(shape: tuple[int, ...], axis: int) -> Array:
            position = here + lax.broadcasted_iota(jnp.int32, shape, axis)
            return (position >= start) & (position < end)

        q, k = q_ref[...], k_ref[...]
        precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

        s = product_of(q, k, (1, 1), precision)
        s = jnp.where(seen(s.shape, 1), s, -jnp.inf)
        now, p, scale = online_softmax(s, m_ref[...][:, :1])
        v = v_ref[...].astype(jnp.float32)
        v = jnp.where(seen(v.shape, 0), v, 0).astype(v_ref.dtype)
        o_ref[...] = o_ref[...] * scale + product_of(p.astype(v.dtype), v, (1, 0), precision)
        l_ref[...] = l_ref[...] * scale + p.sum(1, keepdims=True)
        m_ref[...] = jnp.broadcast_to(now, m_ref.shape)
