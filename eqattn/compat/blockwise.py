"""`blockwise_attn()`: blockwise attention with the parameters of EasyDeL's function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from .._config.metadata import AttentionMetadata
from .._misc import as_flag
from ..strategies import AttentionImpl, Blockwise


def blockwise_attn(
    query: Float[Array, "*b t h d"],
    key: Float[Array, "*b s k d"],
    value: Float[Array, "*b s k v"],
    bias: Float[Array, "..."] | None = None,
    deterministic: bool = True,
    dropout_rng: PRNGKeyArray | None = None,
    attn_pdrop: float = 0.0,
    causal: bool = True,
    query_chunk_size: int = 2048,
    key_chunk_size: int = 2048,
    dtype: Any = jnp.float32,
    policy: Callable[..., Any] | bool | None = False,
    precision: lax.PrecisionLike = None,
    float32_logits: bool = True,
    prevent_cse: bool = True,
) -> Float[Array, "*b t h v"]:
    """Blockwise attention with scale `1 / sqrt(d)`.

    **Arguments:**

    - `query`, `key`, `value`: queries `[*b, t, h, d]`, keys `[*b, s, k, d]` and values
        `[*b, s, k, v]`.
    - `bias`: an array that is added to the logits, broadcastable to `[*b, h, t, s]`.
    - `deterministic`: whether dropout is off.
    - `dropout_rng`: a random key, which is required if dropout is on.
    - `attn_pdrop`: the probability that an attention weight is dropped (inverted dropout).
    - `causal`: whether a query sees only the keys up to its own position (top-left aligned).
    - `query_chunk_size`, `key_chunk_size`: the block sizes. Any size is right for any length.
    - `dtype`: the dtype of the result.
    - `policy`: a callable rematerialisation policy, with which the call is wrapped in
        `jax.checkpoint`. With False or None it is not wrapped; gradients take memory linear in the
        sequence anyway.
    - `precision`: the precision of the products. None is exact float32 for float32 inputs.
    - `float32_logits`: whether logits stay float32. Otherwise they are rounded to the query's
        dtype.
    - `prevent_cse`: an argument of `jax.checkpoint`, which has no role without a policy.

    **Returns:** `[*b, t, h, v]` in `dtype`.
    """
    float32_logits = as_flag(float32_logits, "float32_logits")
    strategy = Blockwise(
        AttentionMetadata(
            runtime_dtype=dtype,
            runtime_softmax_dtype=None if float32_logits else query.dtype,
            dropout_prob=attn_pdrop,
            blocksize_q=query_chunk_size,
            blocksize_k=key_chunk_size,
        ),
        precision=precision,
    )

    return outputs_of(
        strategy,
        query,
        key,
        value,
        dict(bias=bias, dropout_rng=dropout_rng),
        policy=policy,
        prevent_cse=prevent_cse,
        deterministic=deterministic,
        causal=causal,
    )


def outputs_of(
    strategy: AttentionImpl,
    query: Array,
    key: Array,
    value: Array,
    operands: dict[str, Any],
    *,
    policy: Callable[..., Any] | bool | None,
    prevent_cse: bool,
    **options: Any,
) -> Array:
    """Computes a strategy's outputs, within `jax.checkpoint` if there is a policy.

    **Arguments:**

    - `operands`: the keywords of `forward_native` that are PyTrees of arrays.
    - `options`: its static keywords.
    """
    if not (policy is None or policy is False or callable(policy)):
        raise TypeError(f"policy must be a checkpoint policy, False or None, got {policy!r}.")

    prevent_cse = as_flag(prevent_cse, "prevent_cse")

    def attend(strategy, query, key, value, operands) -> Any:
        out = strategy.forward_native(query, key, value, **operands, **options)
        return out.attention_outputs

    if callable(policy):
        attend = jax.checkpoint(attend, policy=policy, prevent_cse=prevent_cse)
    return attend(strategy, query, key, value, operands)
