"""Converts Equinox's layers in a model to this library's, and gives layers another strategy."""

from collections.abc import Callable
from typing import Any, overload, TypeVar

import equinox as eqx
import jax

from ..strategies import AttentionImpl
from ._dropout import Dropout
from ._inputs import check_strategy
from ._latent import LatentAttention
from ._multihead import MultiheadAttention


_T = TypeVar("_T")


@overload
def from_equinox(
    model: eqx.nn.MultiheadAttention, *, strategy: AttentionImpl | None = None
) -> MultiheadAttention: ...


@overload
def from_equinox(model: _T, *, strategy: AttentionImpl | None = None) -> _T: ...


def from_equinox(model: Any, *, strategy: AttentionImpl | None = None) -> Any:
    """Converts every `eqx.nn.MultiheadAttention` of a model to an
    [`eqattn.nn.MultiheadAttention`][].

    The projections and the dropout settings are kept. So the outputs agree, and the model has the
    same leaves in the same order. Only a query that sees no key differs: it gives the projection
    of 0.

    **Arguments:**

    - `model`: a layer, or any PyTree that holds layers. It is unchanged.
    - `strategy`: the strategy of the new layers, or None for the default.

    **Returns:** the new layer or model.

    **Raises:** `ValueError` if there is no such layer.
    """
    check_strategy(strategy)
    # Subclasses are left alone, as what they change would be lost.
    is_layer = lambda x: type(x) is eqx.nn.MultiheadAttention
    convert = lambda layer: _swap(_convert(layer), strategy)
    return _replace(model, is_layer, convert, eqx.nn.MultiheadAttention)


def with_strategy(model: _T, strategy: AttentionImpl | None) -> _T:
    """Gives every [`eqattn.nn.MultiheadAttention`][] and [`eqattn.nn.LatentAttention`][] of a model
    another strategy.

    **Arguments:**

    - `model`: a layer, or any PyTree that holds layers. It is unchanged.
    - `strategy`: a strategy such as [`eqattn.Dense`][], or None for the default. It says how
        attention is computed, so outputs agree to rounding; dropout drops the same weights.

    **Returns:** the model with the same parameters.

    **Raises:** `ValueError` if there is no such layer, or if the strategy's metadata has a scale,
    soft cap, sinks or dropout, which are the layers'.
    """
    check_strategy(strategy)
    is_layer = lambda x: isinstance(x, MultiheadAttention | LatentAttention)
    return _replace(model, is_layer, lambda layer: _swap(layer, strategy), MultiheadAttention)


def _replace(
    model: Any, is_layer: Callable[[Any], bool], fn: Callable[[Any], Any], kind: type
) -> Any:
    """Returns the model with `fn(layer)` in the place of every layer."""
    if not any(map(is_layer, jax.tree.leaves(model, is_leaf=is_layer))):
        remedy = (
            "from_equinox(model) converts Equinox's"
            if kind is MultiheadAttention
            else "with_strategy(model, strategy) is for layers that are converted"
        )
        raise ValueError(
            f"There is no {kind.__module__.split('.')[0]}.nn.{kind.__name__} in this "
            f"{type(model).__name__}; {remedy}."
        )
    return jax.tree.map(lambda x: fn(x) if is_layer(x) else x, model, is_leaf=is_layer)


def _swap(layer: _T, strategy: AttentionImpl | None) -> _T:
    is_none = lambda x: x is None
    return eqx.tree_at(lambda x: x.strategy, layer, strategy, is_leaf=is_none)


def _convert(layer: eqx.nn.MultiheadAttention) -> MultiheadAttention:
    skeleton = eqx.filter_eval_shape(
        MultiheadAttention,
        layer.num_heads,
        layer.query_size,
        layer.key_size,
        layer.value_size,
        layer.output_size,
        layer.qk_size,
        layer.vo_size,
        layer.use_query_bias,
        layer.use_key_bias,
        layer.use_value_bias,
        layer.use_output_bias,
        key=jax.random.key(0),
    )
    dropout = Dropout(layer.dropout.p, layer.dropout.inference)
    return eqx.tree_at(
        lambda x: (x.query_proj, x.key_proj, x.value_proj, x.output_proj, x.dropout),
        skeleton,
        (layer.query_proj, layer.key_proj, layer.value_proj, layer.output_proj, dropout),
    )
