"""Checks a layer's arguments, and brings them into the form that it keeps or computes with."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._calls import attention as calls
from .._misc import as_dtype, as_flag, as_int, as_size, REACH
from .._problem.arguments import as_mask
from .._problem.storage import check_computable
from ..masks._base import AbstractMask, Dense
from ..masks._window import SlidingWindow
from ..strategies import AttentionImpl, Blockwise, Ragged


# Fields of a strategy's metadata that the layer decides, and the layer's argument for each.
_OF_THE_LAYER = {
    "softmax_scale": "softmax_scale",
    "logits_soft_cap": "logits_soft_cap",
    "softmax_aux": "softmax_aux",
    "dropout_prob": "dropout_p",
}


def checked_sizes(**sizes: Any) -> list[Any]:
    """Returns sizes, which are given by their names, as Python ints. Those that are None stay so,
    except for `num_heads` and `query_size`.
    """
    must = ("num_heads", "query_size")
    return [
        None
        if x is None and name not in must
        else as_size(x, name, -REACH if name == "num_heads" else 0)
        for name, x in sizes.items()
    ]


def check_dtype(dtype: Any) -> None:
    """**Raises:** `TypeError` unless parameters may have this dtype, for which None is Equinox's
    default.
    """
    if dtype is not None and not jnp.issubdtype(as_dtype(dtype, "dtype"), jnp.inexact):
        raise TypeError(f"dtype must be floating point, got {dtype!r}.")


def check_parameters(dtype: Any, query: Any, key_: Any, value: Any, output: Any) -> None:
    """**Raises:** `TypeError` unless parameters may have this dtype, and the other arguments are
    booleans, which say whether a projection has a bias.
    """
    check_dtype(dtype)
    for name, flag in dict(query=query, key=key_, value=value, output=output).items():
        as_flag(flag, f"use_{name}_bias")


def split_key(key: Any, n: int) -> Array:
    """Splits a key in `n`. **Raises:** `TypeError`, naming the argument, unless it is one key."""
    try:
        return jax.random.split(key, n)
    except (TypeError, ValueError) as e:
        raise TypeError(f"key must be one key from jax.random.key, got {key!r}.") from e


def check_name(name: str, value: Any, known: tuple[str, ...]) -> None:
    """**Raises:** `ValueError` unless the value is None or one of the known names."""
    if value is not None and not (isinstance(value, str) and value in known):
        names = ", ".join(map(repr, known))
        raise ValueError(f"{name} must be one of {names}, or None; got {value!r}.")


def check_heads(heads: int, size: int, shared: bool) -> None:
    """**Raises:** `ValueError` unless there are heads and, if the `size` channels are `shared` out
    among them, at least one channel for each.
    """
    if heads < 1 or (shared and size < heads):
        raise ValueError(
            f"num_heads must be at least 1 and at most query_size={size}, of which each head gets "
            f"an equal part, got {heads}; or give qk_size= and vo_size=."
        )


def as_kv_heads(num_kv_heads: Any, num_heads: int) -> int:
    """How many heads key and value have. It must divide `num_heads`, which is the default."""
    (given,) = checked_sizes(num_kv_heads=num_kv_heads)
    num_kv_heads = num_heads if given is None else given
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads must divide num_heads={num_heads}, got {num_kv_heads}: each head of "
            "key and value serves as many query heads."
        )
    return num_kv_heads


def check_dropout(p: Any) -> None:
    """**Raises:** `TypeError` or `ValueError` unless `p` is a probability below 1, or an array."""
    if not (isinstance(p, int | float) or hasattr(p, "dtype")):
        raise TypeError(f"dropout_p must be a number in [0, 1), got {p!r}.")
    if isinstance(p, int | float) and not 0 <= p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {p}.")


def check_strategy(strategy: Any) -> None:
    """**Raises:** `ValueError` if a strategy's metadata decide what the layer decides."""
    if strategy is None:
        return
    calls.check_strategy(strategy)
    for name, argument in _OF_THE_LAYER.items():
        value = getattr(strategy.metadata, name)
        if value is not None and not (name == "dropout_prob" and value == 0):
            raise ValueError(
                f"The strategy's metadata has {name}={value}, which changes what is computed, not "
                f"how: leave it out there, and give MultiheadAttention {argument}=."
            )


def configured(strategy: AttentionImpl | None, cached: bool, **own: Any) -> AttentionImpl:
    """Returns a layer's strategy, with the layer's own settings in its metadata. A setting that is
    None is left out.
    """
    check_strategy(strategy)
    if strategy is None:
        strategy = Ragged() if cached else Blockwise()
    own = {name: x for name, x in own.items() if x is not None}
    if not own:
        return strategy
    return eqx.tree_at(lambda s: s.metadata, strategy, strategy.metadata.replace(**own))


def check_sequences(query: Array, key_: Array, value: Array, batch: tuple[int, ...] = ()) -> None:
    """**Raises:** `TypeError` or `ValueError` unless the inputs are sequences that fit together."""
    for name, x in (("query", query), ("key_", key_), ("value", value)):
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise TypeError(f"{name} must be real, got {x.dtype}; take its parts apart.")
        if jnp.issubdtype(x.dtype, jnp.floating):
            check_computable(**{name: x.dtype})
        if x.shape[:-2] != batch or x.ndim < 2:
            raise ValueError(
                f"{name} must be one sequence [tokens, features], got shape {x.shape}; use "
                "jax.vmap(layer) for a batch."
                if not batch
                else f"{name} must be [{batch[0]}, tokens, features], got shape {x.shape}."
            )
    if key_.shape[-2] != value.shape[-2]:
        raise ValueError(
            "key and value must both be sequences of equal length, got shapes "
            f"{key_.shape} and {value.shape}."
        )


def as_window(window: Any) -> tuple[int | None, int | None] | None:
    """Returns a window as a checked pair `(left, right)`, or None."""
    if window is None:
        return None
    sizes = tuple(window) if isinstance(window, tuple | list) else (window, window)
    if len(sizes) != 2:
        raise ValueError(f"window must be an int or (left, right), got {window!r}.")
    left, right = (
        None if x is None else as_int(x, "window", least=0, static=True).value for x in sizes
    )
    return left, right


def as_layer_mask(mask: Any, window: Any, heads: int, t: int, s: int) -> AbstractMask | None:
    """Combines the mask of a call, in any of its forms, with the window of the layer."""
    if not (hasattr(mask, "shape") and hasattr(mask, "dtype")):
        mask = as_mask(mask)
    else:
        if mask.shape not in ((t, s), (heads, t, s)):
            raise ValueError(
                "mask must have shape (query_seq_length, kv_seq_length) or (num_heads, "
                f"query_seq_length, kv_seq_length), {(t, s)} or {(heads, t, s)}, got {mask.shape}; "
                "eqattn.DenseMask(mask) takes what broadcasts to them."
            )
        xp = np if isinstance(mask, np.ndarray) else jnp  # JAX has no zero of NumPy's 64 bits.
        mask = Dense(mask if mask.dtype == bool else mask != xp.zeros((), mask.dtype))
    if window is None:
        return mask
    return SlidingWindow(*window) if mask is None else mask & SlidingWindow(*window)
