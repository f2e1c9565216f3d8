"""Checks that every `forward_*` and every entry make before a strategy runs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._config.metadata import AttentionMetadata
from .._misc import as_flag
from ..masks._base import AbstractMask
from ._base import AttentionImpl


def check_strategy(strategy: Any) -> None:
    """**Raises:** `TypeError`, with the remedy, unless it is a strategy."""
    if isinstance(strategy, AttentionImpl):
        return
    if isinstance(strategy, AbstractMask | jax.Array | np.ndarray | list):
        raise TypeError(
            f"strategy must be an AttentionImpl such as Blockwise(metadata), got "
            f"{type(strategy).__name__}; pass masks by name, mask=, and biases bias=."
        )
    if isinstance(strategy, AttentionMetadata):
        raise TypeError(
            "strategy must be an AttentionImpl, got AttentionMetadata(...); make one of it: "
            "Blockwise(metadata)."
        )
    raise TypeError(
        f"strategy must be an AttentionImpl such as Blockwise(metadata), got {strategy!r}; "
        "AttentionRegistry.create(name, metadata) makes one from a name."
    )


def choose_bias(mask: Any, bias: Any, init_bias: Callable[[], Array] | None) -> Any:
    """The bias of a `forward_*`. `init_bias` is called only if both mask and bias are None."""
    if mask is None and bias is None and init_bias is not None:
        return init_bias()
    return bias


def choose_dropout_key(metadata: AttentionMetadata, deterministic: bool, dropout_rng: Any) -> Any:
    """The random key of a `forward_*`'s dropout; None if dropout is off.

    **Raises:** `ValueError` if dropout is on and there is no key.
    """
    deterministic = as_flag(deterministic, "inference (deterministic of forward_*)")
    if dropout_rng is not None and not hasattr(dropout_rng, "dtype"):
        raise TypeError(f"key must be one key from jax.random.key, got {dropout_rng!r}.")
    if deterministic or metadata.dropout_prob == 0:
        return None
    if dropout_rng is None:
        raise ValueError(
            f"dropout_prob={metadata.dropout_prob} needs a key: pass key= (dropout_rng= of "
            "forward_*), or switch dropout off by inference=True (deterministic=True)."
        )
    return dropout_rng


def check_precision(precision: Any) -> None:
    """**Raises:** `ValueError` unless it is a precision of JAX, or None."""
    if precision is None:
        return
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    try:
        jax.eval_shape(lambda x: jax.lax.dot(x, x, precision=precision), one)
    except (TypeError, ValueError) as e:
        raise ValueError(
            f"precision must be one of jax.lax.Precision, its name or None, got {precision!r}."
        ) from e
