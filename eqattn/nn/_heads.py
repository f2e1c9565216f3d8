"""Makes the heads of a layer from its inputs."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from .._jax import explicit_axes, sharding_of


ProcessHeads = Callable[[Array, Array, Array], tuple[Array, Array, Array]]


def head_norm(name: str | None, size: int, dtype: Any) -> Any:
    """Makes a normalisation over the features of a head; None for no name."""
    if name is None:
        return None
    kind = eqx.nn.RMSNorm if name == "rms" else eqx.nn.LayerNorm
    return kind(size, use_bias=False, dtype=dtype)


def normed(layer: Any, x: Float[Array, "*b size"]) -> Float[Array, "*b size"]:
    """Normalises each head, or returns the heads as they are if there is no normalisation."""
    if layer is None:
        return x
    # Mapped, not reshaped to rows: an axis of heads that devices share cannot be merged into one.
    for _ in x.shape[:-1]:
        layer = jax.vmap(layer)
    return layer(x)


def linear(layer: Any, x: Float[Array, "*b features"]) -> Float[Array, "*b outputs"]:
    """Applies a layer to every row. For Equinox's own `Linear` this is one product with the rows in
    front. `jax.vmap(layer)(x)` would compute the transposed product, and then transpose that.
    """
    features = getattr(layer, "in_features", x.shape[-1])
    if features != x.shape[-1]:
        raise ValueError(
            f"An input {x.shape} has {x.shape[-1]} features in its last axis where the layer was "
            f"made for {features}: its fields, such as query_size or hidden_size, say so."
        )
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if type(layer) is not eqx.nn.Linear:
        out = jax.vmap(layer)(rows)
    else:
        out = jnp.matmul(rows, layer.weight.T, out_sharding=_product_sharding(rows, layer.weight))
        out = out if layer.bias is None else out + layer.bias[None]
    return out.reshape(*x.shape[:-1], out.shape[-1])


def weight_and_bias(layer: Any, features: int, dtype: Any) -> tuple[Array, Array | None]:
    """The weight `[outputs, features]` and the bias `[outputs]` of an affine layer, or None for no
    bias. Those of Equinox's own `Linear` are its fields. Of another layer, such as an adapter, they
    are its derivative and its value at 0, so they cost what `features` rows of it cost.

    **Raises:** `ValueError` if the layer is not affine, so that no weight and bias say what it
    computes.
    """
    if type(layer) is eqx.nn.Linear:
        return layer.weight, layer.bias
    zero = jnp.zeros(features, dtype)
    try:
        # JAX transposes affine functions only.
        jax.eval_shape(jax.linear_transpose(layer, zero), jax.eval_shape(layer, zero))
    except Exception as e:
        raise ValueError(
            f"{type(layer).__name__} of {features} features is not affine in its input, as far as "
            "JAX can tell, so it cannot be moved to the other side of a product: call the layer "
            'with form="expanded".'
        ) from e
    bias, derivative = jax.linearize(layer, zero)
    return jax.vmap(derivative, out_axes=1)(jnp.eye(features, dtype=dtype)), bias


def _product_sharding(rows: Array, weight: Array) -> P | None:
    """How the product of rows and a weight `[outputs, features]` is sharded; None for JAX's choice.

    JAX makes none where explicit axes shard the features of both, as where devices share the heads.
    The sum over these axes then is on each of their devices.
    """
    if not (explicit_axes(rows) and sharding_of(rows)[-1] and sharding_of(weight)[-1]):
        return None
    return P(sharding_of(rows)[0], sharding_of(weight)[0])


def project(
    layer: Any, x: Float[Array, "*b features"], heads: int, size: int
) -> Float[Array, "*b heads size"]:
    """Projects sequences, and splits the result into heads."""
    return linear(layer, x).reshape(*x.shape[:-1], heads, size)


def of_one_dtype(*heads: Array) -> list[Array]:
    """Promotes heads of several dtypes to one, as Equinox does where it multiplies them."""
    dtype = jnp.result_type(*heads)
    return [x.astype(dtype) for x in heads]


def processed(fn: ProcessHeads | None, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Applies a user's function of the heads of one sequence, and checks what it returns."""
    if fn is None:
        return q, k, v
    if not callable(fn):
        raise TypeError(f"process_heads must be a function or None, got {fn!r}.")
    shapes = q.shape, k.shape, v.shape
    made = (jax.vmap(fn) if q.ndim == 4 else fn)(q, k, v)
    if not isinstance(made, tuple | list) or len(made) != 3:
        got = len(made) if isinstance(made, tuple | list) else type(made).__name__
        raise ValueError(
            f"process_heads must return the three arrays of query, key and value, got {got}."
        )
    q, k, v = made
    if (q.shape, k.shape, v.shape) != shapes:
        raise ValueError(
            "process_heads must not change the shape of the heads, query, key and value: "
            f"it made {q.shape}, {k.shape}, {v.shape} of {shapes}."
        )
    return q, k, v
