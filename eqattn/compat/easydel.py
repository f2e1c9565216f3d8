"""`ragged_mha`, `ragged_gqa` and `ragged_mqa`: one query per row over a cache; and references of
them.

`ragged_flash_attention_kernel()`, a kernel body for those who write their own `pallas_call`.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .._calls.attention import attention
from .._carry import Carry, online_softmax
from .._config.metadata import AttentionMetadata
from .._misc import accumulation_dtype, as_array, as_int32, as_number, as_size, check_floating
from ..masks._segments import KeyPadding
from ..strategies import Ragged, Ring


RingAttn = Ring
"""EasyDeL's name of [`eqattn.Ring`][]."""

# JAX's own kernels for TPUs have this default. Here the value is only checked.
DEFAULT_MASK_VALUE = -0.7 * float(jnp.finfo(jnp.float32).max)


def ragged_gqa(
    query: Float[Array, "b *one h d"],
    key: Float[Array, "b s k d"],
    value: Float[Array, "b s k v"],
    lengths: Int[Array, " b"],
    starts: Int[Array, " b"] | None = None,
    *,
    block_size: int = 256,
    mask_value: float = DEFAULT_MASK_VALUE,
    cost_estimate: Any = None,
) -> tuple[Float[Array, "b *one h v"], Float[Array, "b *one h 1"], Float[Array, "b *one h 1"]]:
    """Computes attention of one query per row over the keys `starts <= s < lengths` of that row.

    The logits are not scaled. Only the blocks that hold visible keys are read.

    **Arguments:**

    - `query`: the queries, `[b, h, d]` or `[b, 1, h, d]`.
    - `key`, `value`: keys `[b, s, k, d]` and values `[b, s, k, v]`, where `k` divides `h`.
    - `lengths`: the position after the last visible key of each row, int `[b]`. It is an end and
        not a count.
    - `starts`: the position of the first visible key of each row, int `[b]`, by default 0. A start
        at or after the end shows no key.
    - `block_size`: how many keys are read at a time.
    - `mask_value`: a number that is checked and not used. Masked keys are left out exactly, also if
        they hold NaN.
    - `cost_estimate`: an argument that must be None, as the cost depends on the lengths.

    **Returns:**

    `o`, `m` and `l`. `o` is the normalised output `[b, h, v]`, `m` the maximum of the logits
    `[b, h, 1]`, and `l` the denominator relative to it `[b, h, 1]`. They have a second axis of size
    1 if the query has one, and the accumulation dtype (float32). [`eqattn.Carry.from_oml`][] makes
    them mergeable. A row that sees no key has 0, `-inf` and 0.

    **Raises:** `ValueError` for shapes that do not fit, a `mask_value` above -1e30 or a
    `cost_estimate`.
    """
    _check(mask_value, cost_estimate)
    query, key = as_array(query, "query"), as_array(key, "key", 3)
    check_floating(query=query)
    block_size = as_size(block_size, "block_size", 1)
    if query.ndim not in (3, 4) or (query.ndim == 4 and query.shape[1] != 1):
        raise ValueError(
            f"query must be [b, h, d] or [b, 1, h, d], got {query.shape}; several queries per row "
            "are attention(query, key, value, Ragged(metadata), ...)."
        )
    end, first = bounds_of_rows(query, lengths, starts)
    metadata = AttentionMetadata(softmax_scale=1.0, blocksize_k=min(block_size, key.shape[1] or 1))
    carry = attention(
        query if query.ndim == 4 else query[:, None],
        key,
        value,
        Ragged(metadata),
        mask=KeyPadding(end, first),
        return_carry=True,
    ).carry
    return _like(query, *carry.to_oml())


def ragged_mha(
    query: Float[Array, "b *one h d"],
    key: Float[Array, "b s h d"],
    value: Float[Array, "b s h v"],
    lengths: Int[Array, " b"],
    starts: Int[Array, " b"] | None = None,
    *,
    block_size: int = 256,
    mask_value: float = DEFAULT_MASK_VALUE,
    cost_estimate: Any = None,
) -> tuple[Float[Array, "b *one h v"], Float[Array, "b *one h 1"], Float[Array, "b *one h 1"]]:
    """Does what [`eqattn.compat.ragged_gqa`][] does, where each query head has its own key head."""
    _same_heads(query, key)
    options: Any = dict(block_size=block_size, mask_value=mask_value, cost_estimate=cost_estimate)
    return ragged_gqa(query, key, value, lengths, starts, **options)


def ragged_mqa(
    q: Float[Array, "b *h d"],
    k: Float[Array, "b s d"],
    v: Float[Array, "b s v"],
    lengths: Int[Array, " b"],
    starts: Int[Array, " b"] | None = None,
    *,
    block_size: int = 256,
    mask_value: float = DEFAULT_MASK_VALUE,
    cost_estimate: Any = None,
) -> tuple[Float[Array, "b *h v"], Float[Array, "b *h 1"], Float[Array, "b *h 1"]]:
    """[`eqattn.compat.ragged_gqa`][] where all query heads share one key head.

    **Arguments:**

    - `q`: the queries, `[b, h, d]`, or `[b, d]` for one head.
    - `k`, `v`: keys `[b, s, d]` and values `[b, s, v]`.

    **Returns:** `o`, `m` and `l` as `[b, h, v]`, `[b, h, 1]`, `[b, h, 1]`, without `h` if `q` has
    none.
    """
    options: Any = dict(block_size=block_size, mask_value=mask_value, cost_estimate=cost_estimate)
    return _one_key_head(ragged_gqa, q, k, v, lengths, starts, options)


def reference_gqa(
    q: Float[Array, "b *one h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k v"],
    lengths: Int[Array, " b"],
    starts: Int[Array, " b"] | None = None,
    mask_value: float = DEFAULT_MASK_VALUE,
) -> tuple[Float[Array, "b *one h v"], Float[Array, "b *one h 1"], Float[Array, "b *one h 1"]]:
    """Computes what [`eqattn.compat.ragged_gqa`][] does, plainly, with all logits at once."""
    _check(mask_value, None)
    q, k, v = (jnp.asarray(as_array(x, name)) for name, x in zip("qkv", (q, k, v)))
    check_floating(q=q, k=k, v=v)
    if (
        q.ndim not in (3, 4)
        or (k.ndim, v.shape[:-1]) != (4, k.shape[:-1])
        or ((len(q), q.shape[-1], q.shape[-2] % max(k.shape[2], 1)) != (len(k), k.shape[-1], 0))
    ):
        raise ValueError(
            f"q {q.shape}, k {k.shape} and v {v.shape} must be [b, h, d], [b, s, k, d] and "
            "[b, s, k, v], where k divides h."
        )
    dtype, (*_, heads, _) = accumulation_dtype(q.dtype), q.shape
    s, kv_heads = k.shape[1:3]
    end, first = bounds_of_rows(q, lengths, starts)
    position = jnp.arange(s, dtype=jnp.int32)[None]
    seen = (position >= first[:, None]) & (position < end[:, None])
    grouped = q.reshape(len(q), kv_heads, heads // kv_heads, q.shape[-1]).astype(dtype)
    logits = jnp.einsum("bkgd,bskd->bkgs", grouped, k.astype(dtype), precision="highest")
    logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
    v = jnp.where(seen[:, :, None, None], v.astype(dtype), 0).repeat(heads // kv_heads, 2)
    carry = Carry.from_logits(logits.reshape(len(q), 1, heads, s), v)
    o, m, l = carry.to_oml()
    of_row = lambda x, n: x.reshape(*q.shape[:-1], n)
    return of_row(o, v.shape[-1]), of_row(m, 1), of_row(l, 1)


def reference_mha(
    q: Float[Array, "b *one h d"],
    k: Float[Array, "b s h d"],
    v: Float[Array, "b s h v"],
    lengths: Int[Array, " b"],
    starts: Int[Array, " b"] | None = None,
    *,
    mask_value: float = DEFAULT_MASK_VALUE,
) -> tuple[Float[Array, "b *one h v"], Float[Array, "b *one h 1"], Float[Array, "b *one h 1"]]:
    """Computes what [`eqattn.compat.ragged_mha`][] does, written out plainly."""
    _same_heads(q, k)
    return reference_gqa(q, k, v, lengths, starts, mask_value)


def reference_mqa(
    q: Float[Array, "b *h d"],
    k: Float[Array, "b s d"],
    v: Float[Array, "b s v"],
    lengths: Int[Array, " b"],
    starts: Int[Array, " b"] | None = None,
    *,
    mask_value: float = DEFAULT_MASK_VALUE,
) -> tuple[Float[Array, "b *h v"], Float[Array, "b *h 1"], Float[Array, "b *h 1"]]:
    """Computes what [`eqattn.compat.ragged_mqa`][] does, written out plainly."""
    return _one_key_head(reference_gqa, q, k, v, lengths, starts, dict(mask_value=mask_value))


def get_mha_cost_estimate(shape_dtype: tuple[Any, ...]) -> Any:
    """Counts the operations and bytes of `ragged_mha` or `ragged_gqa` over full rows.

    These are two products, an exponential per logit, and each input and output (`o`, `m` and `l`
    in float32) moved once.

    **Arguments:**

    - `shape_dtype`: `jax.ShapeDtypeStruct`s of query, key, value and lengths, and optionally
        starts.

    **Returns:** a `jax.experimental.pallas.CostEstimate`.
    """
    from jax.experimental import pallas as pl

    query, _, value, *_ = shape_dtype
    (b, *_, h, d), (_, s, _, width) = query.shape, value.shape
    given = sum(x.size * x.dtype.itemsize for x in shape_dtype)
    made = b * h * (width + 2) * accumulation_dtype(query.dtype).itemsize
    return pl.CostEstimate(
        flops=2 * b * h * s * (d + width), transcendentals=b * h * s, bytes_accessed=given + made
    )


def check_mask_value(mask_value: float) -> None:
    if not as_number(mask_value, "mask_value") <= -1e30:
        raise ValueError(
            f"mask_value={mask_value}: masking is exact here, and a value above -1e30 would ask "
            "for another result; leave it out."
        )


def _check(mask_value: float, cost_estimate: Any) -> None:
    check_mask_value(mask_value)
    if cost_estimate is not None:
        raise ValueError(
            "cost_estimate: what is read depends on the lengths, which are known only when the "
            "program runs; leave it out."
        )


def bounds_of_rows(query: Array, lengths: Any, starts: Any) -> list[Array]:
    """The end and the start of the visible keys of each row, int32 `[b]`. Each is given for each
    row or once for all, and a start of None is 0.
    """
    found = []
    for name, x in dict(lengths=lengths, starts=0 if starts is None else starts).items():
        x = jnp.asarray(as_int32(x, name))
        if x.shape not in ((), query.shape[:1]):
            raise ValueError(
                f"{name} must be [{len(query)}], one for each row of query {query.shape}, got "
                f"{x.shape}."
            )
        found.append(jnp.broadcast_to(x, query.shape[:1]))
    return found


def _same_heads(query: Array, key: Array) -> None:
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"query {query.shape} and key {key.shape} differ in heads; ragged_gqa shares key heads."
        )


def _one_key_head(fn, q, k, v, lengths, starts, options):
    q, k, v = (jnp.asarray(as_array(x, name)) for name, x in zip("qkv", (q, k, v)))
    if k.ndim != 3 or v.ndim != 3:
        raise ValueError(f"k and v must be [b, s, d] and [b, s, v], got {k.shape} and {v.shape}.")
    if q.ndim not in (2, 3):
        raise ValueError(f"q must be [b, h, d] or [b, d], got {q.shape}.")
    heads = q if q.ndim == 3 else q[:, None]
    oml = fn(heads, k[:, :, None], v[:, :, None], lengths, starts, **options)
    return oml if q.ndim == 3 else tuple(x[:, 0] for x in oml)


def _like(query: Array, o: Array, m: Array, l: Array) -> tuple[Array, Array, Array]:
    m, l = m[..., None], l[..., None]
    return (o, m, l) if query.ndim == 4 else (o[:, 0], m[:, 0], l[:, 0])


def ragged_flash_attention_kernel(  # noqa: PLR0913 (the other library's signature)
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
    stay in place for a whole row. [`eqattn.compat.ragged_gqa`][] and [`eqattn.Ragged`][] have other
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
