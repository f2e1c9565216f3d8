"""The checks of a layer's arguments, and the small parts it is made of."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._masks import AbstractMask, Causal, Dense, SlidingWindow
from .._metadata import AttentionMetadata
from ..strategies import AttentionImpl, Blockwise


# What a strategy's metadata leaves to the layer, and the layer's argument for it.
_OF_THE_LAYER = {
    "softmax_scale": "softmax_scale",
    "logits_soft_cap": "logits_soft_cap",
    "softmax_aux": "softmax_aux",
    "dropout_prob": "dropout_p",
}


def check_name(name: str, value: Any, known: tuple[str, ...]) -> None:
    """Raises unless the value is None or one of the known names."""
    if value is not None and value not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(f"{name} must be one of {names}, or None; got {value!r}.")


def check_strategy(strategy: Any) -> None:
    """Raises unless a strategy, or None, leaves to the layer what is the layer's."""
    if strategy is None:
        return
    if not isinstance(strategy, AttentionImpl):
        raise TypeError(
            f"strategy must be an AttentionImpl such as Blockwise(metadata), got {strategy!r}; "
            "AttentionRegistry.create(name, metadata) makes one from a name."
        )
    for name, argument in _OF_THE_LAYER.items():
        value = getattr(strategy.metadata, name)
        if value is not None and not (name == "dropout_prob" and value == 0):
            raise ValueError(
                f"The strategy's metadata has {name}={value}, which changes what is computed, not "
                f"how: leave it out there, and give MultiheadAttention {argument}=."
            )


def configured(strategy: AttentionImpl | None, dtype: Any, **own: Any) -> AttentionImpl:
    """A layer's strategy, with what the layer says (not None) in its metadata."""
    check_strategy(strategy)
    if strategy is None:
        strategy = Blockwise(AttentionMetadata(runtime_dtype=dtype))
    own = {name: x for name, x in own.items() if x is not None}
    if not own:
        return strategy
    return eqx.tree_at(lambda s: s.metadata, strategy, strategy.metadata.replace(**own))


def check_sequences(query: Array, key_: Array, value: Array) -> None:
    """Raises unless the inputs are sequences that fit together."""
    for name, x in (("query", query), ("key_", key_), ("value", value)):
        if x.ndim != 2:
            raise ValueError(
                f"{name} must be one sequence [tokens, features], got shape {x.shape}; use "
                "jax.vmap(layer) for a batch."
            )
    if key_.shape[0] != value.shape[0]:
        raise ValueError(
            "key and value must both be sequences of equal length, got shapes "
            f"{key_.shape} and {value.shape}."
        )


def as_window(window: Any) -> tuple[int | None, int | None] | None:
    """`(left, right)`, checked, or None."""
    if window is None:
        return None
    sizes = tuple(window) if isinstance(window, tuple | list) else (window, window)
    if len(sizes) != 2:
        raise ValueError(f"window must be an int or (left, right), got {window!r}.")
    mask = SlidingWindow(*sizes)
    return mask.left, mask.right


def as_layer_mask(mask: Any, window: Any, heads: int, t: int, s: int) -> AbstractMask | None:
    """The mask of a call, in any of its forms, and the window of the layer."""
    if isinstance(mask, str):
        check_name("mask", mask, ("causal", "full"))
        mask = Causal() if mask == "causal" else None
    elif mask is not None and not isinstance(mask, AbstractMask):
        if not (hasattr(mask, "shape") and hasattr(mask, "dtype")):
            raise TypeError(
                f"mask must be an array, a mask module, 'causal', 'full' or None, got {mask!r}."
            )
        if mask.shape not in ((t, s), (heads, t, s)):
            raise ValueError(
                "mask must have shape (query_seq_length, kv_seq_length) or (num_heads, "
                f"query_seq_length, kv_seq_length), {(t, s)} or {(heads, t, s)}, got {mask.shape}; "
                "eqattn.DenseMask(mask) takes what broadcasts to them."
            )
        mask = Dense(mask if mask.dtype == bool else mask != jnp.zeros((), mask.dtype))
    if window is None:
        return mask
    return SlidingWindow(*window) if mask is None else mask & SlidingWindow(*window)


def head_norm(name: str | None, size: int, dtype: Any) -> Any:
    """A normalisation over the features of a head, or None."""
    if name is None:
        return None
    kind = eqx.nn.RMSNorm if name == "rms" else eqx.nn.LayerNorm
    return kind(size, use_bias=False, dtype=dtype)


def linear(layer: Any, x: Float[Array, "t features"]) -> Float[Array, "t outputs"]:
    """A layer of every row. For Equinox's own `Linear` it is one product with rows in front, which
    `jax.vmap(layer)(x)` would compute transposed, and transpose.
    """
    if type(layer) is not eqx.nn.Linear:
        return jax.vmap(layer)(x)
    out = x @ layer.weight.T
    return out if layer.bias is None else out + layer.bias[None]


def project(
    layer: Any, x: Float[Array, "t features"], heads: int, size: int
) -> Float[Array, "t heads size"]:
    """The heads of a sequence."""
    return linear(layer, x).reshape(x.shape[0], heads, size)
