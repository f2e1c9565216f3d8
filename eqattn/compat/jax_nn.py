"""`dot_product_attention()`, a drop-in for `jax.nn.dot_product_attention`."""

import functools
import operator
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from .._calls.attention import attention
from .._config.metadata import AttentionMetadata
from .._config.platform import Platform
from .._misc import accumulation_dtype, as_array, as_flag, as_int, as_size, check_floating
from ..masks._base import AbstractMask, Dense
from ..masks._causal import Causal, SlidingWindow
from ..masks._segments import KeyPadding, QueryPadding
from ..strategies import Blockwise


_Reach = int | Int[Array, ""]
_Window = _Reach | tuple[_Reach, _Reach] | Int[Array | np.ndarray, "2"]
_PLATFORMS = {None: Platform.AUTO, "xla": Platform.XLA}


@overload
def dot_product_attention(
    query: Float[ArrayLike, "*q t n h"],
    key: Float[ArrayLike, "*b s k h"],
    value: Float[ArrayLike, "*b s k h"],
    bias: Float[ArrayLike, "..."] | None = None,
    mask: Bool[ArrayLike, "..."] | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[ArrayLike, " b"] | None = None,
    key_value_seq_lengths: Int[ArrayLike, " b"] | None = None,
    local_window_size: _Window | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: Literal[False] = ...,
) -> Float[Array, "*q t n h"]: ...


@overload
def dot_product_attention(
    query: Float[ArrayLike, "*q t n h"],
    key: Float[ArrayLike, "*b s k h"],
    value: Float[ArrayLike, "*b s k h"],
    bias: Float[ArrayLike, "..."] | None = None,
    mask: Bool[ArrayLike, "..."] | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[ArrayLike, " b"] | None = None,
    key_value_seq_lengths: Int[ArrayLike, " b"] | None = None,
    local_window_size: _Window | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: Literal[True],
) -> tuple[Float[Array, "*q t n h"], Float[Array, "*q t n"]]: ...


def dot_product_attention(  # noqa: PLR0913 (the other library's signature)
    query: Float[ArrayLike, "*q t n h"],
    key: Float[ArrayLike, "*b s k h"],
    value: Float[ArrayLike, "*b s k h"],
    bias: Float[ArrayLike, "..."] | None = None,
    mask: Bool[ArrayLike, "..."] | None = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Int[ArrayLike, " b"] | None = None,
    key_value_seq_lengths: Int[ArrayLike, " b"] | None = None,
    local_window_size: Any = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Float[Array, "*q t n h"] | tuple[Float[Array, "*q t n h"], Float[Array, "*q t n"]]:
    r"""Computes exact attention as `jax.nn.dot_product_attention` does, with its signature and
    shapes.

    Time and memory are those of [`eqattn.Blockwise`][]. Only a query that sees no key gets another
    result: output 0, residual `-inf` and zero gradients, where `jax.nn` averages all the values.
    [`eqattn.attention`][] also has dropout, sinks, soft caps and other masks.

    **Arguments:**

    - `query`: the queries, `[b, t, n, h]` or `[t, n, h]`.
    - `key`: the keys, `[b, s, k, h]` or `[s, k, h]`, where `n` is a multiple of `k`.
    - `value`: the values, with the shape and dtype of `key`.
    - `bias`: an array that is added to the logits. It is broadcastable to `[b, n, t, s]`, and
        missing leading axes are taken as 1.
    - `mask`: booleans, shaped like `bias`, that are True where a query sees a key.
    - `scale`: the factor of the logits, `1 / sqrt(h)` by default. A scalar array may be traced and
        has a gradient.
    - `is_causal`: whether a query sees only the keys up to its own position (top-left aligned).
    - `query_seq_lengths`, `key_value_seq_lengths`: how many queries and keys there are, int32
        `[b]`. Those from there on are padding, and the output of a padding query is 0.
    - `local_window_size`: `(left, right)`, how far a query sees to either side, both inclusive, as
        two ints or an int array `[2]`; or an int for both. They may be traced.
    - `implementation`: `"xla"` for plain XLA code, or None for the best code that there is for the
        device. `"cudnn"` is the platform of [`eqattn.attention`][]; here it is not offered.
    - `return_residual`: whether to return the logsumexp of the logits too.

    **Returns:**

    The output, with the query's shape and dtype. With `return_residual`, it is a pair of that and
    the logsumexp `[b, t, n]` or `[t, n]`, rounded to the key's dtype. The gradient of the logsumexp
    flows; `jax.nn` drops it.

    **Raises:**

    `ValueError` or `TypeError` at trace time; the message names the shapes and the remedy.
    """
    is_causal = as_flag(is_causal, "is_causal")
    return_residual = as_flag(return_residual, "return_residual")
    query, key, value = (
        jnp.asarray(as_array(x, name))
        for x, name in ((query, "query"), (key, "key"), (value, "value"))
    )
    shape = query.shape
    q, k, v = _rank_4(query, "query"), _rank_4(key, "key"), _rank_4(value, "value")
    _check(q, k, v, [x.shape for x in (query, key, value)])
    batch = k.shape[0]
    terms: list[AbstractMask] = [Causal()] if is_causal else []
    if local_window_size is not None:
        terms.append(_window(local_window_size))
    if query_seq_lengths is not None:
        terms.append(QueryPadding(_lengths(query_seq_lengths, batch, "query_seq_lengths")))
    if key_value_seq_lengths is not None:
        terms.append(KeyPadding(_lengths(key_value_seq_lengths, batch, "key_value_seq_lengths")))
    if mask is not None:
        visible = _rank_4(mask, "mask")
        if visible.dtype != jnp.bool_:
            raise ValueError(
                f"mask must be boolean, got {visible.dtype}; pass an additive mask as `bias`."
            )
        terms.append(Dense(visible))
    for name, x in (("mask", mask), ("bias", bias)):
        if x is not None:
            full = batch, q.shape[2], q.shape[1], k.shape[1]
            _check_pairs(name, as_array(x, name).shape, full)
    added = None if bias is None else _rank_4(bias, "bias").astype(accumulation_dtype(q.dtype))
    metadata = AttentionMetadata(platform=_platform(implementation), softmax_scale=_scale(scale))
    out = attention(
        q,
        k,
        v,
        Blockwise(metadata),
        mask=functools.reduce(operator.and_, terms) if terms else None,
        bias=added,
        return_logsumexp=return_residual,
    )
    output = jnp.reshape(out.attention_outputs, shape)
    if not return_residual:
        return output
    return output, jnp.reshape(out.logsumexp.astype(k.dtype), shape[:-1])


def _rank_4(x: ArrayLike, name: str) -> Array:
    """Returns an array of 4 axes, with axes of size 1 added in front."""
    x = jnp.asarray(as_array(x, name))
    if x.ndim > 4:
        raise ValueError(f"{name} must have at most 4 axes, got shape {x.shape}.")
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _check_pairs(name: str, shape: tuple[int, ...], full: tuple[int, ...]) -> None:
    """**Raises:** `ValueError`, with the shape that was given, unless it broadcasts to `full`."""
    padded = (1,) * (len(full) - len(shape)) + tuple(shape)
    if any(n not in (1, m) for n, m in zip(padded, full)):
        raise ValueError(
            f"{name} of shape {tuple(shape)} does not broadcast to [batch, heads, queries, keys] = "
            f"{full}; each axis must be 1 or the full size, and leading ones may be missing."
        )


def _check(q: Array, k: Array, v: Array, given: list[tuple[int, ...]]) -> None:
    """Checks what `jax.nn` asks for and `attention` does not. Errors name the shapes `given`."""
    check_floating(query=q)
    shapes = ", ".join(
        f"{name} {shape} {x.dtype}"
        for name, shape, x in zip(("query", "key", "value"), given, (q, k, v))
    )
    if v.shape != k.shape or v.dtype != k.dtype:
        raise ValueError(
            f"value must have the shape and dtype of key, got {shapes}; eqattn.attention takes "
            "values of another head dim."
        )
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]) or q.dtype != k.dtype:
        raise ValueError(
            f"query must have the batch size, head dim and dtype of key, got {shapes}; "
            "broadcast or cast them first."
        )


def _lengths(lengths: ArrayLike, batch: int, name: str) -> Array:
    lengths = jnp.asarray(as_array(lengths, name))
    if lengths.shape != (batch,) or lengths.dtype != jnp.int32:
        raise ValueError(
            f"{name} must be int32 of shape ({batch},), one per batch element, got "
            f"{lengths.dtype} of shape {lengths.shape}."
        )
    return lengths


def _window(size: Any) -> AbstractMask:
    single = isinstance(size, int) or getattr(size, "shape", None) == ()
    pair = isinstance(size, tuple | list) and len(size) == 2 or getattr(size, "shape", None) == (2,)
    if not single and not pair:
        raise ValueError(f"local_window_size must be an int or (left, right), got {size!r}.")
    sizes: Any = (size, size) if single else size
    # As int32, the size of a traced window cannot wrap around when it is negated.
    checked = lambda x: (as_int if isinstance(x, jax.Array) else as_size)(x, "local_window_size")
    left, right = map(checked, sizes)
    # The sizes of a `SlidingWindow` are static. The offset of `Causal` may be traced: a window is
    # k <= q + right, and not k <= q - left - 1.
    if isinstance(left, jax.Array) or isinstance(right, jax.Array):
        return Causal(right) & ~Causal(-1 - left)
    return SlidingWindow(left, right)


def _scale(scale: Any) -> Any:
    if scale is None or isinstance(scale, int | float):
        return scale
    scale = jnp.asarray(as_array(scale, "scale"))
    if scale.size != 1:
        raise ValueError(f"scale must be a scalar, got shape {scale.shape}; multiply the query.")
    scale = scale.reshape(())
    return scale if jnp.issubdtype(scale.dtype, jnp.floating) else scale.astype(jnp.float32)


def _platform(implementation: str | None) -> Platform:
    if not isinstance(implementation, str | None) or implementation not in _PLATFORMS:
        reason = ""
        if repr(implementation) == "'cudnn'":
            reason = " eqattn.attention runs cuDNN with AttentionMetadata(platform='cudnn');"
        raise ValueError(
            f"implementation must be None or 'xla', got {implementation!r}:{reason} use None for "
            "the best code there is for the device."
        )
    return _PLATFORMS[implementation]
