"""The base of all caches, and the checks of their arguments."""

import abc
import functools as ft
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, Int

from .._jax import explicit_axes, sharding_of, without_explicit_axes
from .._misc import as_array, as_dtype, as_flag, as_int32, as_size, check_floating
from .._pairs import Operand
from .._problem.mesh import on_mesh_of
from .._problem.problem import cached
from .._problem.shards import stored_specs
from .._problem.storage import AbstractStored, Bitcast, check_computable, Quantized
from .._run_time import raise_if
from ..masks._base import AbstractMask
from ..masks._segments import KeyPadding


_Cache = TypeVar("_Cache", bound="AbstractCache")
_Method = TypeVar("_Method", bound=Callable[..., Any])


class ByPosition(AbstractMask):
    """Shows the keys that have a position, in a call that says which they have."""

    needs_positions: ClassVar[bool] = True

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def visible(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return k >= 0


class StoredTokens(KeyPadding):
    """Shows the first `lengths` keys, which a cache stores, in a call that says where its queries
    stand if there are more of them than queries.
    """

    needs_offset: ClassVar[bool] = True

    def __init__(self, lengths: Any):
        super().__init__(lengths)


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

    - `key`, `value`: the keys `[b, s, k, d]` and the values `[b, s, k, v]`, as arrays or
        [`eqattn.cache.AbstractStored`][].
    - `length`: how many tokens each row has, int32 `[b]`.

    All errors that depend on lengths are raised when the program runs (as by `equinox.error_if`).
    """

    key: eqx.AbstractVar[Any]
    value: eqx.AbstractVar[Any]
    length: eqx.AbstractVar[Any]

    shares_rows: ClassVar[bool] = False
    """Whether rows share arrays, which `jax.vmap` over the rows would copy for each of them."""

    overwrites: ClassVar[bool] = False
    """Whether new tokens take the places of the oldest ones, so that a mask must not show these."""

    @property
    def keeps_first(self) -> int:
        """How many first tokens of each row are never overwritten. It is a hook of caches that
        overwrite tokens.
        """
        return 0

    @property
    def positions(self) -> Int[Array, "b s"] | None:
        """The position of each stored key; None means `0, 1, ..., s - 1`."""
        return None

    @abc.abstractmethod
    def append(
        self: _Cache,
        key: Float[Array, "b t k d"],
        value: Float[Array, "b t k v"],
        counts: Int[Array, " b"] | None = None,
    ) -> _Cache:
        """Returns the cache with new tokens after those of each row.

        **Arguments:**

        - `key`, `value`: the new keys `[b, t, k, d]` and values `[b, t, k, v]`.
        - `counts`: how many of the `t` tokens each row takes. It takes the first ones; None means
            all of them.
        """

    def truncate(self: _Cache, lengths: Int[Array, " b"]) -> _Cache:
        """Returns the cache with only the first `lengths` tokens of each row, such as after drafts
        were rejected. Pages that a row no longer needs stay reserved for it.
        """
        return eqx.tree_at(lambda c: c.length, self, check_lengths(lengths, self.length))

    def reorder(self: _Cache, rows: Int[Array, " n"]) -> _Cache:
        """Returns the cache with the rows at these indices, such as the beams that survive. By
        default rows are the first axis of each of its arrays.
        """
        rows = check_rows(rows, self.key.shape[0])
        return sharded_alike(_of_rows, self, rows, rows_stay=rows.shape == self.length.shape)

    def mask(self) -> AbstractMask:
        """A mask that shows the stored tokens and hides the rest of the arrays.

        It raises in a call that would see the wrong keys: without `kv_positions` if the cache has
        `positions`, and without `q_offset` or `q_positions` if a row holds more tokens than there
        are queries, and another mask or a score depends on where these stand. The first tokens of
        an empty cache need neither. `q_offset=0` says that queries do stand at the beginning.
        """
        shown = StoredTokens(self.length)
        return shown if self.positions is None else shown & ByPosition()

    def key_shardings(self: _Cache, mesh: Any, axis_name: str) -> _Cache:
        """The shardings of a cache whose tokens are spread over the devices along a mesh axis, as
        `Ragged(metadata, axis_name=...)` reads them:

            cache = jax.device_put(cache, cache.key_shardings(mesh, "keys"))

        **Arguments:**

        - `mesh`: a `jax.sharding.Mesh`.
        - `axis_name`: the name of the axis.

        **Returns:** a tree like this cache, with a `NamedSharding` in place of each array.

        **Raises:** `ValueError` if the devices cannot share its tokens or its pages equally.
        """
        return shardings_of(self, self._key_specs(axis_name), mesh, axis_name)

    def _key_specs(self, axis_name: str) -> dict[int, P]:
        """A hook for `key_shardings`: how arrays of the cache are spread over the devices along a
        mesh axis, by their ids. Each device has all of the other arrays.
        """
        specs = stored_specs(self.key, axis_name) | stored_specs(self.value, axis_name)
        if self.positions is not None:
            specs[id(self.positions)] = P(None, axis_name)
        return specs


def shardings_of(cache: Any, specs: dict[int, P], mesh: Any, axis_name: str) -> Any:
    """A tree like a cache, with a `NamedSharding` in place of each array.

    **Arguments:**

    - `specs`: those of `_key_specs`.
    - `mesh`, `axis_name`: as for `key_shardings`.

    **Raises:** `ValueError` if the devices cannot share an array equally.
    """
    devices = mesh.shape.get(axis_name, 1)  # JAX says below if there is no such axis
    for x in (x for x in jax.tree.leaves(cache) if id(x) in specs):
        if x.shape[axis := len(specs[id(x)]) - 1] % devices:
            raise ValueError(
                f"The {devices} devices of axis_name={axis_name!r} cannot share axis {axis} of "
                f"{x.shape}, an array of this {type(cache).__name__}, equally; make the cache "
                f"with a capacity, or with pages, of which there is a multiple of {devices}."
            )
    return jax.tree.map(lambda x: NamedSharding(mesh, specs.get(id(x), P())), cache)


def _at_once(fn: Callable) -> Callable:
    """A decorator of `fn(cache, *arrays)`, which runs as one program outside of `jax.jit`.

    A cache does so if it lies on a single device, and stores arrays or one of eqattn's forms. A
    form of a user's may hold what is no array, or read what changes from call to call. Over several
    devices, XLA would shard the results of one program otherwise than those of each operation.
    """
    program = cached(fn)

    @ft.wraps(fn)
    def run(cache: Any, *arrays: Any) -> Any:
        return (program if _is_simple(cache, arrays) else fn)(cache, *arrays)

    return run


def _is_simple(cache: Any, arrays: Any) -> bool:
    """Whether a cache and some arrays may be the arguments of one program, see `_at_once`."""
    held = jax.tree.leaves((cache, arrays), is_leaf=lambda x: isinstance(x, AbstractStored))
    own = all(type(x) in (Bitcast, Quantized) for x in held if isinstance(x, AbstractStored))
    if not own or type(cache).__module__.split(".")[0] != __name__.split(".")[0]:
        return False
    leaves = jax.tree.leaves((cache, arrays))
    if any(isinstance(x, Tracer) or not isinstance(x, jax.Array | np.ndarray) for x in leaves):
        return False
    devices = (x.devices() for x in leaves if isinstance(x, jax.Array))
    return len(frozenset().union(*devices)) <= 1


def appends(append: _Method) -> _Method:
    """A decorator of `append`, which then gets arrays that fit the cache, and counts that are int32
    `[b]`. It runs `_at_once`.

    On a mesh with explicit axes, JAX does not write one sharded array into another. So there the
    compiler propagates shardings, and the arrays of the new cache are sharded as those of the old
    one.
    """

    @_at_once
    def run(self: Any, key: Array, value: Array, counts: Array | None) -> Any:
        return append(self, key, value, _taken(self, key, value, counts))

    @ft.wraps(append)
    def wrapped(self: Any, key: Any, value: Any, counts: Any = None) -> Any:
        new = as_array(key, "key"), as_array(value, "value")
        counts = None if counts is None else as_int32(counts, "counts")
        return sharded_alike(run, self, *new, counts)

    return wrapped  # pyright: ignore[reportReturnType]


@_at_once
def _of_rows(cache: Any, rows: Array) -> Any:
    return jax.tree.map(lambda x: x[rows] if eqx.is_array(x) else x, cache)


def sharded_alike(run: Callable, cache: Any, *args: Any, rows_stay: bool = True) -> Any:
    """The cache `run(cache, *args)`. On a mesh with explicit axes it is sharded as `cache` is, but
    not over rows if there are more or fewer of them. A cache that was made before `jax.set_mesh` is
    on each device as a whole.
    """
    place = lambda x: on_mesh_of(x, args) if eqx.is_array(x) else x
    cache = jax.tree.map(place, cache)
    typed = [x for x in jax.tree.leaves(cache) if eqx.is_array(x) and explicit_axes(x)]
    if not typed:
        return run(cache, *args)
    whole = () if rows_stay else (None,)
    specs = jax.tree.map(lambda x: P(*whole, *sharding_of(x)[len(whole) :]), cache)
    return without_explicit_axes(run, (cache, *args), typed[0], specs)


def check_row_shapes(cache: Any) -> None:
    """**Raises:** `ValueError` unless key, value and length agree in rows, tokens and heads."""
    parts = cache.key, cache.value, cache.length
    # JAX and Equinox also build caches whose leaves are axes of `vmap` or booleans of a filter.
    if not all(hasattr(x, "shape") for x in parts):
        return
    key, value, length = (x.shape for x in parts)
    if len(key) != 4 or key[:3] != value[:3] or length != key[:1]:
        raise ValueError(
            f"A cache has a key [b, s, k, d], a value [b, s, k, v] and a length [b], got {key}, "
            f"{value} and {length}; empty(...) makes one."
        )


def checked_dims(dtype: Any, head_dim: Any, value_dim: Any, **sizes: Any) -> tuple[int, int]:
    """Checks the arguments of `empty`, and returns the sizes of a key and of a value. The latter is
    that of a key if `value_dim` is None.

    **Raises:** `TypeError` or `ValueError` unless the named sizes are ints, and the dtype of keys
    and values is one that queries may have.
    """
    sizes |= {"head_dim": head_dim} | ({} if value_dim is None else {"value_dim": value_dim})
    for name, size in sizes.items():
        as_size(size, name)
    check_computable(dtype=as_dtype(dtype, "dtype"))
    return head_dim, head_dim if value_dim is None else value_dim


def _taken(cache: AbstractCache, key: Array, value: Array, counts: Array | None) -> Array:
    """How many of the new tokens each row takes, int32 `[b]`, checked when the program runs.

    **Raises:** `ValueError` with both shapes if keys, values or counts do not fit the cache.
    """
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
    if counts.shape not in ((), (b,)):
        raise ValueError(
            f"counts must be an int or integers [{b}], got {counts.dtype} {counts.shape}."
        )
    counts = jnp.broadcast_to(jnp.asarray(counts), (b,))
    wrong = (counts < 0) | (counts > key.shape[1])
    message = f"counts must be between 0 and the number of new tokens, {key.shape[1]}"
    return raise_if(counts, wrong, message)


def check_lengths(lengths: Any, now: Array) -> Array:
    """Returns the `lengths` of `truncate` as int32 `[b]`, checked against the lengths `now`."""
    lengths = as_int32(lengths, "lengths")
    if lengths.shape != now.shape:
        raise ValueError(
            f"lengths must be integers {now.shape}, got {lengths.dtype} {lengths.shape}."
        )
    lengths = jnp.asarray(lengths)
    wrong = (lengths < 0) | (lengths > now)
    return raise_if(lengths, wrong, "a cache cannot be truncated to more tokens than it has")


def rows_as_array(rows: Any) -> Any:
    """Indices of rows, or which of them are meant, as an array. NumPy would make floats of `[]`."""
    none = isinstance(rows, list | tuple) and not rows
    return np.zeros(0, np.int32) if none else as_array(rows, "rows")


def check_rows(rows: Any, n: int) -> Array:
    """Returns indices of `n` rows as int32, checked. JAX would clamp one that is out of range."""
    rows = rows_as_array(rows)
    if rows.ndim != 1 or not jnp.issubdtype(rows.dtype, jnp.integer):
        raise ValueError(
            f"rows must be integers [n], such as [1] for the second, got {rows.dtype} {rows.shape}."
        )
    rows = jnp.asarray(as_int32(rows, "rows"))
    return raise_if(rows, (rows < 0) | (rows >= n), f"rows must be between 0 and {n - 1}")


def new_positions(cache: AbstractCache, t: int) -> Array:
    """The positions of `t` new tokens after those of each row, int32 `[b, t]`."""
    return cache.length[:, None] + jnp.arange(t, dtype=jnp.int32)[None]


def empty_pair(
    lead: tuple[int, ...],
    dims: tuple[int, int],
    dtype: Any,
    bits: bool | None = None,
    stored: Any = None,
    head_shares: int = 1,
) -> list[Any]:
    """Zeros for keys `[*lead, dims[0]]` and for values `[*lead, dims[1]]`: as
    [`eqattn.cache.Quantized`][] if `stored` is a dtype, or else as arrays or
    [`eqattn.cache.Bitcast`][]. With `bits` None they are bits where XLA could not write a part of
    an array in place: on a CPU, bfloat16.
    """
    if bits and stored is not None:
        raise ValueError(
            f"bits=True keeps numbers of {jnp.dtype(dtype)} as they are and stored="
            f"{jnp.dtype(stored)} quantizes them: give one of the two."
        )
    if bits is None:
        bits = jnp.dtype(dtype) == jnp.bfloat16 and jax.default_backend() == "cpu"

    def zeros(dim: int) -> Any:
        if stored is not None:
            return Quantized.zeros((*lead, dim), stored, dtype, head_shares)
        return (Bitcast.zeros if as_flag(bits, "bits") else jnp.zeros)((*lead, dim), dtype)

    return [zeros(dim) for dim in dims]


def within_capacity(length: Array, capacity: int) -> Array:
    """Returns the new lengths, checked against the capacity when the program runs."""
    message = (
        f"the cache is full: a row would have more than {capacity} tokens. Compare cache.length "
        "with the capacity before the call, or make the cache larger. If the call donated the "
        "cache (donate_argnums), its arrays are deleted though the call failed: only a copy from "
        "before the call can go on."
    )
    return raise_if(length, length > capacity, message)


def write_slots(cache: AbstractCache, t: int, counts: Any, capacity: int) -> tuple[Array, Array]:
    """The places `[b, t]` of `t` new tokens in a cache that keeps all of them, and the new lengths.

    Tokens that a row does not take get places after the capacity, where nothing is written. These
    places are distinct, as the scatter promises unique indices.
    """
    length = within_capacity(cache.length + counts, capacity)
    position = new_positions(cache, t)
    return jnp.where(position < length[:, None], position, capacity + position), length
