"""Checks a layer's arguments, and brings them into the form that it keeps or computes with.

The positions of the tokens of a layer's inputs in their sequence.

Makes the heads of a layer from its inputs.
"""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from .._calls import attention as calls
from .._jax import explicit_axes, sharding_of
from .._misc import as_dtype, as_flag, as_int, as_size, REACH
from .._problem.problem import as_mask
from .._problem.storage import check_computable
from ..cache import AbstractCache
from ..cache._base import new_positions
from ..masks._base import AbstractMask, Dense, moved_positions
from ..masks._causal import SlidingWindow
from ..strategies import AttentionImpl, Blockwise, Ragged
from ._rotary import Rotary


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


_Pair = tuple[Any, Any]


def input_positions(
    rotary: Rotary | None,
    strategy: AttentionImpl | None,
    cache: AbstractCache | None,
    mask: AbstractMask | None,
    lengths: tuple[int, int],
    given: _Pair,
    processed: bool,
) -> tuple[_Pair, _Pair]:
    """The positions of the queries and of the new keys, once for rotary embeddings, and once for
    masks and scores.

    Both are the same, unless the `rotary` of the layer has sections. Then the caller gives
    coordinates, which are for it alone. Masks and scores see the tokens in their order.

    **Arguments:**

    - `lengths`: how many queries and new keys there are.
    - `given`: their positions as the caller gives them, or None. With None they follow from the
        cache, or from the strategy: a ring in zigzag, for example, reads arrays in another order.
    - `processed`: whether a function of the caller's sees queries and keys.

    **Returns:** two pairs. Those for rotary embeddings have None if there is no `rotary`. Those for
    masks and scores have None where the call gives none.

    **Raises:** `ValueError` if strategy and cache disagree about the order, if the caller's
    function cannot know it, or if there are no coordinates.
    """
    lying = [None if strategy is None else strategy.token_positions(n) for n in lengths]
    in_order = all(x is None for x in lying)
    name = type(strategy).__name__
    if cache is not None and not in_order:
        raise ValueError(
            f"A cache keeps tokens in their order, and this {name} takes those of an array for "
            "others, by its layout or inside of your jax.shard_map (see its token_positions). For "
            "calls with a cache use another strategy: with_strategy(model, None)."
        )
    if processed and not in_order and any(x is None for x in given):
        raise ValueError(
            f"process_heads cannot see that this {name} takes the tokens of an array for others "
            "than the first, second, ...: by its layout, or inside of your jax.shard_map. Turn "
            "queries and keys by positions = strategy.token_positions(tokens), and pass them as "
            "q_positions= and kv_positions= too, which says that they are right; or give the layer "
            "rotary=Rotary(...), which knows them."
        )

    if rotary is not None and rotary.sections is not None:
        return _coordinates(rotary.sections, lengths, given), (None, None)
    if cache is not None and given[1] is not None:
        raise ValueError("kv_positions: the cache knows those of its keys; leave them out.")
    if rotary is None:
        return (None, None), given

    def positions(n: int, given: Any, lying: Any) -> Any:
        if given is None and cache is not None:
            given = new_positions(cache, n)
        elif given is None:
            given = jnp.arange(n) if lying is None else lying
        return moved_positions(mask, given)

    q, kv = map(positions, lengths, given, lying)
    return (q, kv), given


def _coordinates(sections: tuple[int, ...], lengths: tuple[int, int], given: _Pair) -> _Pair:
    """The coordinates of the queries and of the new keys, `[n, axes]` or `[*b, n, axes]`."""
    axes, found = len(sections), []
    for name, n, x in zip(("q_positions", "kv_positions"), lengths, given):
        if x is None and n:
            raise ValueError(
                f"The layer's Rotary has sections={sections}, so each token has {axes} "
                f"coordinates, which neither an order of tokens nor a cache tells: give {name}= "
                f"of shape {(n, axes)}."
            )
        # A call that only reads a cache brings no keys, and so no coordinates.
        found.append(jnp.zeros((n, axes), jnp.int32) if x is None else x)
    return found[0], found[1]


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
