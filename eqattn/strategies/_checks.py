"""Checks that every `forward_*` and every entry make before a strategy runs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._config.metadata import AttentionMetadata
from .._misc import as_flag
from .._pairs import over_block
from .._sweep.lowering import Lowering
from ..masks._base import AbstractMask, visible
from ..masks._terms import leaf_terms, placed, split_list
from ..scores._base import AbstractScore
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


def untried_in_kernels(mask: AbstractMask | None, scores: Sequence[AbstractScore]) -> str:
    """Why kernels are not tried with a mask and scores; empty if they are."""
    for score in scores:
        if not score.tried_in_kernels:
            return f"a {type(score).__name__} may hold what its compiler does not know"
    for part in (*leaf_terms(mask), *scores):
        axes: list[str] = []
        # This only looks at the operands, and computes none.
        jax.eval_shape(lambda: [axes.append(o.axes) or o.array for o in part.operands()])
        if any(x.endswith("f") for x in axes):
            return f"an operand of {type(part).__name__} has features, which kernels do not read"
    return ""


def operation_without_kernel(
    kernels: Lowering, mask: AbstractMask | None, scores: Sequence[AbstractScore]
) -> str:
    """Why the compiler of kernels cannot translate a mask or a score; empty if it can.

    Each is traced over a small block, of 2 keys and 2 queries, and its operations are looked up.
    """

    def block(axes, dtype):
        return jax.ShapeDtypeStruct((1 + ("s" in axes), 1 + ("t" in axes)), dtype)

    if any(term.selects for term in leaf_terms(mask)):
        _, *masks = split_list(mask)  # What is listed is gathered outside of kernels.
    else:
        masks = [mask]
    at = np.arange(2, dtype=np.int32)[None]
    masks = [placed(x, (), 1, at, at)[0] for x in masks if isinstance(x, AbstractMask)]
    for part in (*masks, *scores):
        is_score = isinstance(part, AbstractScore)
        args = [block("ts", jnp.float32)] * is_score
        args += [block(axes, jnp.int32) for axes in ("", "", "t", "s")]
        args += [block(operand.axes, operand.array.dtype) for operand in part.operands()]
        fn = part.transform if is_score else visible(part)
        jaxpr = jax.make_jaxpr(lambda *xs, fn=fn: over_block(fn, xs))(*args).jaxpr
        if name := kernels.unsupported_primitive(jaxpr):
            kind = type(part).__name__
            return f"{kind} has a {name}, which the compiler of kernels does not know"
    return ""
