"""What caches have in common."""

import abc
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._misc import as_array, as_dtype, as_int32, as_size, check_floating
from .._problem.storage import Bits
from ..masks._base import AbstractMask
from ..masks._padding import KeyPadding


_Cache = TypeVar("_Cache")


class AbstractCache(eqx.Module):
    """The keys and values of a batch of rows, each with its own number of tokens.

    A cache is a PyTree of arrays: `append` and the others return a new one, and under `jax.jit`
    with the cache donated they write in place. `length` before an `append` is the position of the
    first new token:

        offset = cache.length
        cache = cache.append(key, value)
        mask = Causal() & cache.mask()
        attention(query, cache.key, cache.value, Ragged(metadata), mask=mask, q_offset=offset,
                  kv_positions=cache.positions)

    **Arguments:**

    - `key`, `value`: `[b, s, k, d]` and `[b, s, k, v]`, arrays or
        [`eqattn.cache.AbstractStored`][].
    - `length`: int32 `[b]`.

    All errors that depend on lengths are raised when the program runs (`equinox.error_if`).
    """

    key: eqx.AbstractVar[Any]
    value: eqx.AbstractVar[Any]
    length: eqx.AbstractVar[Any]

    shares_rows: ClassVar[bool] = False
    """Whether rows share arrays, which `jax.vmap` over the rows would copy for each of them."""

    overwrites: ClassVar[bool] = False
    """Whether new tokens take the places of the oldest ones, so that a mask must not show these."""

    @property
    @abc.abstractmethod
    def positions(self) -> Int[Array, "b s"] | None:
        """Of each stored key; None where they lie in order."""

    @abc.abstractmethod
    def append(
        self: _Cache,
        key: Float[Array, "b t k d"],
        value: Float[Array, "b t k v"],
        counts: Int[Array, " b"] | None = None,
    ) -> _Cache:
        """With new tokens after those of each row.

        **Arguments:**

        - `counts`: how many of the `t` tokens each row takes, the first ones; None for all.
        """

    @abc.abstractmethod
    def truncate(self: _Cache, lengths: Int[Array, " b"]) -> _Cache:
        """With the first `lengths` tokens of each row, such as after rejected drafts."""

    @abc.abstractmethod
    def reorder(self: _Cache, rows: Int[Array, " n"]) -> _Cache:
        """With the rows at these indices, such as the beams that survive."""

    def mask(self) -> AbstractMask:
        """Shows the stored tokens."""
        return KeyPadding(self.length)


def check_row_shapes(cache: Any) -> None:
    """Raises unless key, value and length are of as many rows, tokens and heads."""
    parts = cache.key, cache.value, cache.length
    if not all(hasattr(x, "shape") for x in parts):  # a tree of axes or filters
        return
    key, value, length = (x.shape for x in parts)
    if len(key) != 4 or key[:3] != value[:3] or length != key[:1]:
        raise ValueError(
            f"A cache has a key [b, s, k, d], a value [b, s, k, v] and a length [b], got {key}, "
            f"{value} and {length}; empty(...) makes one."
        )


def check_dtype(dtype: Any) -> None:
    """**Raises:** `TypeError` or `ValueError` unless keys and values may have this dtype."""
    if not jnp.issubdtype(as_dtype(dtype, "dtype"), jnp.floating):
        raise TypeError(f"dtype must be floating point, got {dtype!r}.")


def check_sizes(**sizes: Any) -> None:
    """**Raises:** `TypeError` or `ValueError` unless sizes, given by their names, are ints."""
    for name, size in sizes.items():
        if size is not None or name != "value_dim":
            as_size(size, name)


def check_new(cache: AbstractCache, key: Array, value: Array, counts: Any) -> Array:
    """How many tokens each row takes, int32 `[b]`.

    **Raises:** `ValueError` with both shapes if keys, values or counts do not fit the cache.
    """
    key, value = as_array(key, "key"), as_array(value, "value")
    (b, _, *heads), (_, _, *value_heads) = cache.key.shape, cache.value.shape
    fits = key.ndim == value.ndim == 4 and (key.shape[0], *key.shape[2:]) == (b, *heads)
    fits = fits and (*value.shape[:2], *value.shape[2:]) == (b, key.shape[1], *value_heads)
    if not fits:
        raise ValueError(
            f"key {key.shape} and value {value.shape} do not fit a cache of {cache.key.shape} and "
            f"{cache.value.shape}; they must be [b, t, k, d] and [b, t, k, v]."
        )
    check_floating(key=key, value=value)
    if counts is None:
        return jnp.full(b, key.shape[1], jnp.int32)
    counts = as_int32(counts, "counts")
    if counts.shape not in ((), (b,)):
        raise ValueError(
            f"counts must be an int or integers [{b}], got {counts.dtype} {counts.shape}."
        )
    counts = jnp.broadcast_to(jnp.asarray(counts), (b,))
    wrong = (counts < 0) | (counts > key.shape[1])
    message = f"counts must be between 0 and the number of new tokens, {key.shape[1]}"
    return eqx.error_if(counts, wrong, message)


def check_lengths(lengths: Any, now: Array) -> Array:
    """`lengths` as int32 `[b]`, checked for `truncate`."""
    lengths = as_int32(lengths, "lengths")
    if lengths.shape != now.shape:
        raise ValueError(
            f"lengths must be integers {now.shape}, got {lengths.dtype} {lengths.shape}."
        )
    lengths = jnp.asarray(lengths)
    wrong = (lengths < 0) | (lengths > now)
    return eqx.error_if(lengths, wrong, "a cache cannot be truncated to more tokens than it has")


def check_rows(cache: AbstractCache, rows: Array) -> Array:
    """Indices of rows as int32, checked: for one that is not there JAX would take the nearest."""
    rows, n = as_array(rows, "rows"), cache.key.shape[0]
    if rows.ndim != 1 or not jnp.issubdtype(rows.dtype, jnp.integer):
        raise ValueError(
            f"rows must be integers [n], such as [1] for the second, got {rows.dtype} {rows.shape}."
        )
    rows = jnp.asarray(as_int32(rows, "rows"))
    return eqx.error_if(rows, (rows < 0) | (rows >= n), f"rows must be between 0 and {n - 1}")


def new_positions(cache: AbstractCache, t: int) -> Array:
    """Of `t` tokens after those of each row, int32 `[b, t]`."""
    return cache.length[:, None] + jnp.arange(t, dtype=jnp.int32)[None]


def empty_store(shape: tuple[int, ...], dtype: Any, bits: bool) -> Any:
    """Zeros, as an array or as bits."""
    return Bits.zeros(shape, dtype) if bits else jnp.zeros(shape, dtype)


def rows_of(held: Any, rows: Array) -> Any:
    """The rows at these indices, of an array or of bits."""
    return Bits(held.bits[rows], held.dtype) if isinstance(held, Bits) else held[rows]


def write(held: Any, new: Array, slots: Array, *first: Any) -> Any:
    """`held[*first, b, slots[b, t]] = new[b, t]` of an array or bits, leaving out slots that are
    not in the array.
    """
    rows = jnp.arange(len(slots), dtype=jnp.int32)[:, None]
    return scatter(held, new, (*first, rows), slots)


def scatter(held: Any, new: Array, at: tuple, slots: Array, unique: bool = True) -> Any:
    """`held[*at, slots] = new` for `slots` `[b, t]`, leaving out slots that are not in the array.
    `unique`: nothing that is left out has the place of another.

    XLA:CPU makes of a scatter of one token an update of a slice, which it then fuses into each
    reader of the array, with a copy of the whole for each. A second token, which is in no array,
    keeps it a scatter. The array keeps its shape: XLA:CPU would lay out a new axis of size 1 so
    that the whole has to be copied.
    """
    if isinstance(held, Bits):
        bits = Bits.of(new.astype(held.dtype)).bits
        return Bits(scatter(held.bits, bits, at, slots, unique), held.dtype)
    new = new.astype(held.dtype)
    if slots.size == 1:
        out = jnp.full_like(slots, np.iinfo(np.int32).max)
        new, slots = jnp.concatenate([new, new], 1), jnp.concatenate([slots, out], 1)
    options: Any = dict(mode="drop", unique_indices=unique)
    return held.at[(*at, slots)].set(new, **options)


def write_flat(array: Array, new: Array, owner: Array, slots: Array, unique: bool = True) -> Array:
    """Scales `[b, t, k]` in those of `Quantized`: of the tokens `slots` `[b, t]` of the rows or
    pages `owner` `[b, t | 1]`, leaving out what is not in the array. `unique`: nothing that is
    left out has the place of another.
    """
    n = array.shape[1]
    per, t = new.shape[2] // n, new.shape[1]
    new = jnp.moveaxis(new.reshape(len(new), t, n, per), 2, 1)
    share = jnp.arange(n, dtype=jnp.int32).reshape(1, n, 1, 1)
    at = (slots * per)[:, None, :, None] + jnp.arange(per, dtype=jnp.int32).reshape(1, 1, 1, per)
    options: Any = dict(mode="drop", unique_indices=unique)
    return array.at[owner[:, None, :, None], share, at].set(new.astype(array.dtype), **options)


def within_capacity(length: Array, capacity: int) -> Array:
    """The new lengths, checked when the program runs."""
    message = (
        f"the cache is full: a row would have more than {capacity} tokens. Compare cache.length "
        "with the capacity before the call, or make the cache larger. If the call donated the "
        "cache (donate_argnums), its arrays are deleted though the call failed: only a copy from "
        "before the call can go on."
    )
    return eqx.error_if(length, length > capacity, message)


def write_slots(
    cache: AbstractCache, key: Array, value: Array, counts: Array | None, capacity: int
) -> tuple[Array, Array]:
    """Where new tokens go in a cache that keeps all of them, `[b, t]`, and the new lengths.

    Tokens that a row does not take get distinct places after the capacity, where nothing is
    written.
    """
    counts = check_new(cache, key, value, counts)
    length = cache.length + counts
    length = within_capacity(length, capacity)
    position = new_positions(cache, key.shape[1])
    return jnp.where(position < length[:, None], position, capacity + position), length
