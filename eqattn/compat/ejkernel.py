"""`ring_attention()`: ring attention with the parameters of ejkernel's function.

`blockwise_attn()`: blockwise attention with the parameters of EasyDeL's function.
"""

import functools as ft
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from .._config.metadata import AttentionMetadata
from .._misc import as_array, as_flag, as_size
from .._problem.problem import as_mask
from ..masks._causal import BlockCausal, Causal, ChunkedCausal, SlidingWindow
from ..masks._function import MaskFn
from ..masks._segments import Segments
from ..strategies import AttentionImpl, Blockwise, Ring


def blockwise_attn(  # noqa: PLR0913 (the other library's signature)
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


class FwdParams(eqx.Module):
    """The block sizes of the forward visit.

    **Arguments:**

    - `q_blocksize`, `kv_blocksize`: how many queries and keys a block has. None chooses a size.
    """

    q_blocksize: int | None = eqx.field(static=True, default=None)
    kv_blocksize: int | None = eqx.field(static=True, default=None)


class BwdParams(FwdParams):
    """The block sizes of the backward visit. It visits the blocks of the forward visit, so a size
    that differs from that of `FwdParams` raises.
    """


def ring_attention(  # noqa: PLR0913 (the other library's signature)
    query: Float[Array, "*b t h d"],
    key: Float[Array, "*b s k d"],
    value: Float[Array, "*b s k v"],
    q_segment_ids: Int[Array, "*b t"] | None = None,
    kv_segment_ids: Int[Array, "*b s"] | None = None,
    softmax_aux: Float[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    mask_builder: Callable[[int, int, int, int, int], Any] | None = None,
    sliding_window: int | Sequence[int | None] | None = None,
    chunk_size: int | None = None,
    causal: bool = False,
    logits_soft_cap: float | Float[Array, ""] | None = None,
    softmax_scale: float | Float[Array, ""] | None = None,
    axis_name: str | None = None,
    fwd_params: FwdParams | None = None,
    bwd_params: BwdParams | None = None,
    fused_backward: bool = False,
    *,
    query_chunk_size: int | None = None,
    key_chunk_size: int | None = None,
    causal_block_size: int | None = None,
    deterministic: bool = True,
    dropout_rng: PRNGKeyArray | None = None,
    pdrop: float = 0.0,
    policy: Callable[..., Any] | bool | None = None,
    precision: lax.PrecisionLike = None,
    prevent_cse: bool = True,
    float32_logits: bool = True,
    attention_sink_size: int = 0,
    dtype: Any = None,
) -> Float[Array, "*b t h v"]:
    """Exact attention over a sequence that is sharded over the mesh axis `axis_name`.

    All masks combine: a query sees a key if each of them shows it.

    **Arguments:**

    - `query`, `key`, `value`: queries `[*b, t, h, d]`, keys `[*b, s, k, d]` and values
        `[*b, s, k, v]`. They are whole arrays or, inside `jax.shard_map`, the pieces of this
        device.
    - `q_segment_ids`, `kv_segment_ids`: the segments of queries, int `[*b, t]`, and of keys, int
        `[*b, s]`. A query sees the keys of its own segment. If only one is given, it serves both
        sides. Negative ids are padding.
    - `softmax_aux`: sinks, which are logits without a value. `[h]` is one per head, `[h, n]` is `n`
        per head, and `[n]` or `[1, n]` are shared by all heads.
    - `bias`: an array that is added to the logits, broadcastable to `[*b, h, t, s]`. Inside
        `shard_map` it holds the rows of this device and the columns of all devices.
    - `mask_builder`: a function `(queries, keys, heads, head, heads per key/value head) -> mask`
        to a mask of `eqattn.masks`. It is called for each query head, with the lengths of the whole
        sequence.
    - `sliding_window`: how far a query sees to either side, inclusive: one int, or (left, right)
        with None for no limit.
    - `chunk_size`: the size of chunks of tokens. A query sees those of its own chunk, up to itself.
    - `causal`: whether a query sees only the keys up to its own position.
    - `logits_soft_cap`: `c` in `c tanh(logit / c)`, before the bias. An array may be learned.
    - `softmax_scale`: the factor of the logits, by default `1 / sqrt(d)`. An array may be learned.
    - `axis_name`: the mesh axis of the ring. With None, one device holds the whole sequence.
    - `fwd_params`, `bwd_params`: block sizes, which are used if those below are None.
    - `fused_backward`: whether one visit of the blocks computes all gradients. Otherwise one visit
        computes those of the queries, and another those of keys and values. The gradients are
        equal, and a single visit is faster.
    - `query_chunk_size`, `key_chunk_size`: the block sizes. Any size is right for any length.
    - `causal_block_size`: the size of blocks of tokens. A query sees all of its own block and of
        those before it. This takes the place of `causal`.
    - `deterministic`: whether dropout is off.
    - `dropout_rng`: a random key, which is required if dropout is on.
    - `pdrop`: the probability that an attention weight is dropped.
    - `policy`: a callable rematerialisation policy, with which the call is wrapped in
        `jax.checkpoint`.
    - `precision`: the precision of the products. None is exact float32 for float32 inputs.
    - `prevent_cse`: an argument of `jax.checkpoint`, which has no role without a policy.
    - `float32_logits`: whether logits stay float32. Otherwise they are rounded to the query's
        dtype.
    - `attention_sink_size`: how many of the first keys are seen in spite of `sliding_window`.
    - `dtype`: the dtype of the result, by default that of the query.

    **Returns:** `[*b, t, h, v]`.

    **Raises:** `ValueError` or `TypeError` with the shapes and the remedy.
    """
    block_q, block_k = _block_sizes((query_chunk_size, key_chunk_size), fwd_params, bwd_params)
    causal = as_flag(causal, "causal")
    float32_logits = as_flag(float32_logits, "float32_logits")
    query, key = as_array(query, "query", 3), as_array(key, "key", 3)
    attention_sink_size = as_size(attention_sink_size, "attention_sink_size")
    if not isinstance(axis_name, str | None):
        raise TypeError(f"axis_name must be the name of a mesh axis or None, got {axis_name!r}.")
    metadata = AttentionMetadata(
        runtime_dtype=dtype,
        runtime_softmax_dtype=None if float32_logits else query.dtype,
        softmax_scale=softmax_scale,
        logits_soft_cap=logits_soft_cap,
        softmax_aux=_sinks(softmax_aux, query.shape[-2]),
        dropout_prob=pdrop,
        blocksize_q=block_q,
        blocksize_k=block_k,
    )
    options: dict[str, Any] = dict(precision=precision, fused_backward=fused_backward)
    strategy = (
        Blockwise(metadata, **options)
        if axis_name is None
        else Ring(metadata, axis_name=axis_name, **options)
    )
    masks = [
        *_spans(causal, causal_block_size, chunk_size),
        *_windows(sliding_window, attention_sink_size),
        *_segments(q_segment_ids, kv_segment_ids, query.shape[-3], key.shape[-3]),
        *_built(mask_builder, query.shape, key.shape, strategy.key_shards()),
    ]
    mask = ft.reduce(operator.and_, masks) if masks else None
    return outputs_of(
        strategy,
        query,
        key,
        value,
        dict(mask=mask, bias=bias, dropout_rng=dropout_rng),
        policy=policy,
        prevent_cse=prevent_cse,
        deterministic=deterministic,
        causal=False,
    )


def _spans(causal: bool, causal_block_size: int | None, chunk_size: int | None) -> Iterator[Any]:
    """The masks that hide what comes later, and what is in other chunks."""
    if causal_block_size is not None:
        yield BlockCausal(causal_block_size)
    elif causal:
        yield Causal()
    if chunk_size is not None:
        yield ChunkedCausal(chunk_size)


def _windows(sizes: int | Sequence[int | None] | None, sinks: int) -> Iterator[SlidingWindow]:
    if sizes is None:
        if sinks:
            raise ValueError(
                f"attention_sink_size={sinks} exempts keys from sliding_window, which is None; "
                "give a window or leave it 0."
            )
        return
    pair = tuple(sizes) if isinstance(sizes, Sequence) else (sizes, sizes)
    if len(pair) != 2:
        raise ValueError(f"sliding_window must be an int or (left, right), got {sizes}.")
    left, right = (None if x is None else as_size(x, "sliding_window") for x in pair)
    yield SlidingWindow(left, right, sinks)


def _segments(q_ids: Any, kv_ids: Any, queries: int, keys: int) -> Iterator[Segments]:
    """The mask of segment ids. If one side has none, it has those of the other."""
    for name, ids, tokens in (("q_segment_ids", q_ids, queries), ("kv_segment_ids", kv_ids, keys)):
        shape = () if ids is None else as_array(ids, name).shape
        if shape and shape[-1] not in (1, tokens):
            raise ValueError(f"{name} must be [*b, {tokens}], one for each token, got {shape}.")
    if q_ids is not None or kv_ids is not None:
        yield Segments(kv_ids if q_ids is None else q_ids, q_ids if kv_ids is None else kv_ids)


def _block_sizes(sizes: tuple[Any, Any], forward: Any, backward: Any) -> tuple[Any, Any]:
    """The block sizes of queries and keys. What is not given comes from `fwd_params` and
    `bwd_params`.
    """
    for name, params in (("fwd_params", forward), ("bwd_params", backward)):
        if params is not None and not isinstance(params, FwdParams):
            raise TypeError(
                f"{name} must be FwdParams or BwdParams, got {params!r}; query_chunk_size= and "
                "key_chunk_size= are plain sizes."
            )
    queries = _block_size("q_blocksize", "query_chunk_size", sizes[0], forward, backward)
    return queries, _block_size("kv_blocksize", "key_chunk_size", sizes[1], forward, backward)


def _block_size(field: str, name: str, given: int | None, *params: Any) -> int | None:
    sizes = {getattr(p, field) for p in params if p is not None} - {None}
    if given is not None:
        return given
    if len(sizes) > 1:
        raise ValueError(
            f"{field} is {params[0]} for the forward and {params[1]} for the backward visit, which "
            f"go over the same blocks; give one of them, or {name}."
        )
    return sizes.pop() if sizes else None


def _sinks(sinks: Any, heads: int) -> Array | None:
    """Sinks in the form of metadata. Here `[n]` means `[1, n]`, unless there is one per head."""
    if sinks is None:
        return None
    sinks = as_array(sinks, "softmax_aux", 1)
    return sinks[None] if sinks.ndim == 1 and sinks.shape[0] != heads else sinks


def _built(
    builder: Callable | None, query: tuple[int, ...], key: tuple[int, ...], shards: int
) -> Iterator[Any]:
    """Combines the masks of the heads, if there is a builder, into one. Heads with equal masks
    share it.

    **Arguments:**

    - `query`, `key`: the shapes of the arrays.
    - `shards`: into how many pieces the sequence is cut; the arrays are one of them. The builder is
        called with the lengths of the whole.
    """
    if builder is None:
        return
    if not callable(builder):
        raise TypeError(f"mask_builder must be a function or None, got {builder!r}.")
    queries, keys = (shape[-3] * shards for shape in (query, key))
    heads, kv_heads = query[-2], key[-2]
    groups: list[tuple[Any, list[int]]] = []
    for head in range(heads):
        mask = as_mask(builder(queries, keys, heads, head, heads // kv_heads))
        if mask is None:
            raise TypeError(
                f"mask_builder returned None for head {head}: return a mask, such as "
                "~KeyPadding(0) where every key is visible."
            )
        same = [owners for other, owners in groups if eqx.tree_equal(other, mask) is True]
        if same:
            same[0].append(head)
        else:
            groups.append((mask, [head]))
    if len(groups) == 1:
        yield groups[0][0]
    else:
        yield ft.reduce(operator.or_, [MaskFn(_Owned(tuple(n))) & mask for mask, n in groups])


class _Owned(eqx.Module):
    """A function of a pair that tells whether the pair belongs to one of these heads."""

    owners: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, b, h, q, k):
        del b, q, k
        return ft.reduce(operator.or_, [h == n for n in self.owners])
