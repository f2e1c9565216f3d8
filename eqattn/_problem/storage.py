"""Keys and values that are not stored as one array of floats: in fewer bits, or in pages.

Keys whose first features are the values, as in multi-head latent attention.

The keys or values of one layer, where a cache has arrays of all layers.

Floats that are stored as the integers with the same bits.
"""

import abc
import dataclasses
import functools as ft
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int, Shaped, UInt

from .._jax import entries_at
from .._misc import (
    accumulation_dtype,
    as_array,
    as_dtype,
    as_size,
    as_sizes,
    check_floating,
    even_block,
    int32_field,
    REACH,
)


class AbstractStored(eqx.Module):
    """Keys or values `[b, s, k, d]` in the form in which they are stored.

    [`eqattn.Ragged`][] takes them for key or value, and reads the blocks that it needs. For other
    strategies, `materialise()` makes an array.
    """

    @property
    @abc.abstractmethod
    def arrays(self) -> tuple[Shaped[Array, "..."], ...]:
        """The arrays `[b, s, k, ...]`, or with a table their pages `[pages, page size, k, ...]`.
        Those that are `flat` have the form of the scales of [`eqattn.cache.Quantized`][].
        """

    @property
    def flat(self) -> tuple[bool, ...]:
        """Whether each of the arrays has its tokens and heads in one axis."""
        return (False,) * len(self.arrays)

    def in_shares(self, n: int) -> "AbstractStored":
        """Returns the same numbers, with flat arrays in `n` shares of heads."""
        if any(self.flat):
            raise NotImplementedError(f"{type(self).__name__} cannot share flat arrays over {n}.")
        return self

    def map_tokens(self, fn: Callable[[Array], Array]) -> "AbstractStored":
        """A hook: what is stored, with its axes `[b, s]` as `fn` makes them of `[b, s, k, ...]`. By
        default it is stored as one array.
        """
        return Stored(fn(self.materialise()))

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """`(b, s, k, d)`."""

    @property
    @abc.abstractmethod
    def dtype(self) -> Any:
        """The dtype of the numbers that are stored, not of the arrays that store them."""

    @abc.abstractmethod
    def decode(self, *arrays: Shaped[Array, "..."]) -> Float[Array, "..."]:
        """Converts the same part of each of the arrays to numbers."""

    def encode(self, new: Float[Array, "b t k d"]) -> tuple[Shaped[Array, "..."], ...]:
        """A hook that undoes `decode`, for caches that write new tokens: what each of the arrays
        holds of these. It is `[b, t, k]` for an array that is `flat`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no encode(), so that no cache can write {new.shape} to it."
        )

    @property
    def table(self) -> Int[Array, "b n"] | None:
        """The page that each part of a row lies in, `[b, s / page size]`; None without pages."""
        return None

    @property
    def c_kv(self) -> Any:
        """The first features of each vector as an `AbstractStored`, if they lie in separate arrays;
        else None.
        """
        return None

    @property
    def ndim(self) -> int:
        """The number of axes of `shape`."""
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """The bytes of a number as it is stored."""
        return self.dtype.itemsize

    def materialise(self) -> Float[Array, "b s k d"]:
        """Makes one array `[b, s, k, d]` of the numbers."""
        if self.table is None:
            return self.decode(*self.arrays).astype(self.dtype)
        x = self.decode(*[entries_at(x, self.table) for x in self.arrays])
        return x.reshape(x.shape[0], -1, *x.shape[3:]).astype(self.dtype)


class Stored(AbstractStored):
    """Keys or values that are one array."""

    array: Array

    def map_tokens(self, fn: Callable[[Array], Array]) -> AbstractStored:
        return Stored(fn(self.array))

    @property
    def arrays(self) -> tuple[Shaped[Array, "..."], ...]:
        return (self.array,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def decode(self, *arrays: Shaped[Array, "..."]) -> Float[Array, "..."]:
        return arrays[0]

    def encode(self, new: Float[Array, "b t k d"]) -> tuple[Shaped[Array, "..."], ...]:
        return (new.astype(self.dtype),)


class Quantized(AbstractStored):
    """Numbers of 8 bits, with one scale for each vector.

    The scales of all tokens and heads lie on one axis, or on one per device if `n` devices share
    the heads. If an axis of few heads were the last one, a TPU would store them transposed, and no
    kernel could read a page of them. With 2 shares of 4 heads, the scales of tokens `t` and heads
    `h` are

        share 0   t0h0 t0h1  t1h0 t1h1  t2h0 t2h1 ...
        share 1   t0h2 t0h3  t1h2 t1h3  t2h2 t2h3 ...

    **Arguments:**

    - `values`: int8 or a float8 dtype, `[..., s, k, d]`.
    - `scales`: float32 `[..., n, s * k / n]`. A share has its heads of the first token, then those
        of the next.
    - `dtype`: the dtype that `materialise` returns, and that a query must have.
    """

    values: Shaped[Array, "*b s k d"]
    scales: Float[Array, "*b n m"]
    _dtype: Any = eqx.field(static=True, converter=lambda x: as_dtype(x, "dtype"))

    def __check_init__(self) -> None:
        *lead, s, k, _ = self.values.shape
        *same, n, m = self.scales.shape
        if same != lead or n * m != s * k or k % n:
            raise ValueError(
                f"scales {self.scales.shape} do not fit values {self.values.shape}: they must be "
                f"[..., n, s * k / n] = {(*lead, 1, s * k)}, or of n shares of the {k} heads."
            )

    @classmethod
    def zeros(cls, shape: tuple[int, ...], stored: Any, dtype: Any, shares: int = 1) -> "Quantized":
        """Makes zeros.

        **Arguments:**

        - `shape`: the shape of the values, `(..., s, k, d)`.
        - `stored`: the dtype of the values, int8 or a float8 dtype.
        - `dtype`: as for the class.
        - `shares`: the number of shares that the heads are cut into, which must divide them.

        **Raises:** `ValueError` for another `stored`, or if `shares` does not divide the heads.
        """
        shape, shares = as_sizes(shape, "shape"), as_size(shares, "shares", -REACH)
        if len(shape) < 3:
            raise ValueError(f"shape must be (..., tokens, heads, dim), got {shape}.")
        *lead, s, k, _ = shape
        _check_eight_bits(stored, "stored")
        if shares < 1 or k % shares:
            raise ValueError(
                f"shares (head_shares of a cache) must divide {k} heads, got {shares} devices."
            )
        scales = jnp.zeros((*lead, shares, s * k // shares), jnp.float32)
        return cls(jnp.zeros(shape, stored), scales, dtype)

    @classmethod
    def quantize(
        cls, x: Float[Array, "*b s k d"], dtype: Any = jnp.int8, shares: int = 1
    ) -> "Quantized":
        """Rounds vectors `[..., d]`, each scaled so that its largest entry becomes the largest
        number of `dtype`. They have no gradient: asking for one raises.

        **Arguments:**

        - `x`: floats `[..., s, k, d]`.
        - `dtype`: the dtype of the values, int8 or a float8 dtype.
        - `shares`: the number of shares of the heads in which the scales lie, which must divide
            them.

        **Raises:** `ValueError` for another `dtype`, or if `shares` does not divide the heads.
        """
        _check_eight_bits(dtype, "dtype")
        x, shares = as_array(x, "x"), as_size(shares, "shares", 1)
        check_floating(x=x)
        if x.ndim < 3 or x.shape[-2] % shares:
            raise ValueError(
                f"x must be [..., tokens, heads, dim] with heads that shares={shares} divides, got "
                f"{x.shape}."
            )
        wide = without_gradient(x, _NO_GRADIENT).astype(jnp.float32)
        most = float((jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).max)
        scales = jnp.abs(wide).max(-1, initial=0) / most
        values = wide / jnp.where(scales == 0, 1, scales)[..., None]
        if jnp.issubdtype(dtype, jnp.integer):
            values = jnp.round(values)
        return cls(values.astype(dtype), join_heads(scales, shares), x.dtype)

    @property
    def arrays(self) -> tuple[Shaped[Array, "..."], ...]:
        return self.values, self.scales

    @property
    def flat(self) -> tuple[bool, ...]:
        return False, True

    def map_tokens(self, fn: Callable[[Array], Array]) -> AbstractStored:
        scales = fn(split_heads(self.scales, self.values.shape[-2]))
        return Quantized(fn(self.values), join_heads(scales, 1), self.dtype)

    def in_shares(self, n: int) -> AbstractStored:
        if self.scales.shape[-2] == n:
            return self
        scales = split_heads(self.scales, self.values.shape[-2])
        return Quantized(self.values, join_heads(scales, n), self.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> Any:
        return self._dtype

    @property
    def itemsize(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.values.dtype.itemsize

    def decode(self, *arrays: Shaped[Array, "..."]) -> Float[Array, "..."]:
        values, scales = arrays
        return values.astype(scales.dtype) * split_heads(scales, values.shape[-2])[..., None]

    def encode(self, new: Float[Array, "b t k d"]) -> tuple[Shaped[Array, "..."], ...]:
        made = Quantized.quantize(new, self.values.dtype)
        return made.values, split_heads(made.scales, new.shape[-2])


# Integers have no cotangents, and those of float8 numbers would be rounded to float8. Without this
# error, what is left of a gradient would be that of the scales.
_NO_GRADIENT = (
    "Quantized numbers have no gradient of the keys and values that they are made of, such as what "
    "is appended to a cache of 8 bits: make a KVCache or a PagedKVCache without stored=, or stop "
    "their gradient."
)


@ft.partial(jax.custom_jvp, nondiff_argnums=(1,))
def without_gradient(x: Array, message: str) -> Array:
    """Returns `x`. To ask for a derivative of it raises `NotImplementedError` with this message."""
    return x


@ft.partial(without_gradient.defjvp, symbolic_zeros=True)
def _without_gradient_jvp(message: str, primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    if not isinstance(dx, SymbolicZero):
        raise NotImplementedError(message)
    return x, jnp.zeros_like(x)


def _check_eight_bits(dtype: Any, name: str) -> None:
    dtype = as_dtype(dtype, name)
    if not dtype.name.startswith(("int8", "float8_e3", "float8_e4", "float8_e5")):  # all signed
        raise ValueError(
            f"{name} must be int8 or a float8 dtype, as which Quantized numbers are stored, got "
            f"{dtype.name}; a cache that is made without stored= keeps numbers as they are."
        )


def split_heads(scales: Array, heads: int) -> Array:
    """Turns scales `[..., n, s * k / n]` into `[..., s, k]`."""
    *lead, n, m = scales.shape
    s = n * m // heads
    if n > 1:
        scales = jnp.moveaxis(scales.reshape(*lead, n, s, heads // n), -3, -2)
    return scales.reshape(*lead, s, heads)


def join_heads(scales: Array, n: int) -> Array:
    """Turns scales `[..., s, k]` into `[..., n, s * k / n]`, which undoes `split_heads`."""
    *lead, s, heads = scales.shape
    if n > 1:
        scales = jnp.moveaxis(scales.reshape(*lead, s, n, heads // n), -2, -3)
    return scales.reshape(*lead, n, s * heads // n)


class Pages(AbstractStored):
    """Keys or values in pages, which any row may use.

    **Arguments:**

    - `content`: the pages `[pages, page size, k, d]`: an array, [`eqattn.cache.Quantized`][] or
        [`eqattn.cache.Bitcast`][].
    - `table`: the page of each part of a row, int32 `[b, n]`. Entries of parts that a mask hides
        may be any page. Those below 0 are read as page 0, those that are too large as the last.
    - `devices`: the number of devices that share the pages, each an equal run of them. Then the
        pages of the parts `i`, `i + devices`, ... of each row must be those of device `i`.
    - `in_sums`: whether the numbers are read in the dtype of sums, as a query in that dtype needs.
    """

    content: Any
    _table: Int[Array, "b n"] = int32_field("table")
    devices: int = eqx.field(static=True, default=1)
    in_sums: bool = eqx.field(static=True, default=False)

    def rows(self, rows: Int[Array, " n"]) -> "Pages":
        """Returns the same pages with the rows at these indices."""
        return dataclasses.replace(self, _table=self._table[rows])

    def share(self, index: Int[Array, ""]) -> "Pages":
        """The parts of the rows that lie in the pages of a device, where `content` is these."""
        table = self._table.reshape(self._table.shape[0], -1, self.devices)
        table = lax.dynamic_index_in_dim(table, index, 2, keepdims=False)
        return Pages(self.content, table - index * self.stored.shape[0], in_sums=self.in_sums)

    @property
    def stored(self) -> AbstractStored:
        """The content in the form in which it is stored."""
        return as_stored(self.content)

    @property
    def page_size(self) -> int:
        """The number of tokens of a page."""
        return self.stored.shape[1]

    @property
    def arrays(self) -> tuple[Shaped[Array, "..."], ...]:
        return self.stored.arrays

    @property
    def flat(self) -> tuple[bool, ...]:
        return self.stored.flat

    def in_shares(self, n: int) -> AbstractStored:
        stored = self.stored.in_shares(n)
        return self if isinstance(stored, Stored) else dataclasses.replace(self, content=stored)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._table.shape[0], self._table.shape[1] * self.page_size, *self.stored.shape[2:])

    @property
    def dtype(self) -> Any:
        dtype = self.stored.dtype
        return accumulation_dtype(dtype) if self.in_sums else dtype

    @property
    def numbers(self) -> Int[Array, "b n"]:
        """The table with the page numbers of the whole pool, of which a device may have a share."""
        return self._table

    @property
    def table(self) -> Int[Array, "b n"]:
        return jnp.clip(self._table, 0, self.stored.shape[0] - 1)

    @property
    def c_kv(self) -> Any:
        c_kv = self.stored.c_kv
        return None if c_kv is None else dataclasses.replace(self, content=c_kv)

    def decode(self, *arrays: Shaped[Array, "..."]) -> Float[Array, "..."]:
        made = self.stored.decode(*arrays)
        return made.astype(self.dtype) if self.in_sums else made


def as_stored(x: Any) -> AbstractStored:
    """Wraps an array as `Stored`; other forms stay as they are."""
    return x if isinstance(x, AbstractStored) else Stored(x)


def check_computable(**dtypes: Any) -> None:
    """**Raises:** `TypeError` for a dtype that is not real, floating-point, and wide enough for
    products.
    """
    for name, dtype in dtypes.items():
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"{name} must be floating point, got {dtype}; cast it first.")
        if jnp.dtype(dtype).itemsize < 2:
            raise TypeError(
                f"{name} must be bfloat16 or wider, got {jnp.dtype(dtype)}: cast it. A cache such "
                "as KVCache.empty(..., stored=jnp.float8_e4m3fn) keeps narrower numbers."
            )


class LatentKV(AbstractStored):
    """Vectors whose features lie in two places, one part after the other.

    Where a call has such keys and, for values, their part `c_kv`, `Ragged` reads that part once:

        attention(query, keys, keys.c_kv, Ragged())

    **Arguments:**

    - `c_kv`: the first features, `[..., s, k, v]`: in multi-head latent attention, the latents.
    - `k_rope`: the other features, `[..., s, k, d - v]`: there, those with rotary positions.

    Both are arrays, [`eqattn.cache.Quantized`][] or [`eqattn.cache.Bitcast`][]. Inside of
    [`eqattn.cache.Pages`][] they are those of the pages.
    """

    _c_kv: AbstractStored
    k_rope: AbstractStored

    def __init__(self, c_kv: Any, k_rope: Any):
        self._c_kv, self.k_rope = as_stored(c_kv), as_stored(k_rope)

    def __check_init__(self) -> None:
        # JAX and Equinox also build modules whose leaves are no arrays.
        if not all(hasattr(x, "shape") for x in jax.tree.leaves((self._c_kv, self.k_rope))):
            return
        c_kv, k_rope = self._c_kv, self.k_rope
        if c_kv.shape[:-1] != k_rope.shape[:-1] or c_kv.dtype != k_rope.dtype:
            raise ValueError(
                f"c_kv {c_kv.shape} of {c_kv.dtype} and k_rope {k_rope.shape} of {k_rope.dtype} "
                "must be of the same tokens, heads and dtype."
            )
        if c_kv.table is not None or k_rope.table is not None:
            raise ValueError(
                "Pages are joined inside: Pages(LatentKV(c_kv.content, k_rope.content), table)."
            )

    @property
    def c_kv(self) -> AbstractStored:
        return self._c_kv

    @property
    def parts(self) -> tuple[AbstractStored, AbstractStored]:
        """Both parts, in their order."""
        return self._c_kv, self.k_rope

    @property
    def arrays(self) -> tuple[Shaped[Array, "..."], ...]:
        return *self._c_kv.arrays, *self.k_rope.arrays

    @property
    def flat(self) -> tuple[bool, ...]:
        return *self._c_kv.flat, *self.k_rope.flat

    def in_shares(self, n: int) -> AbstractStored:
        return LatentKV(*[x.in_shares(n) for x in self.parts])

    def map_tokens(self, fn: Callable[[Array], Array]) -> AbstractStored:
        return LatentKV(*[x.map_tokens(fn) for x in self.parts])

    @property
    def shape(self) -> tuple[int, ...]:
        return *self._c_kv.shape[:-1], self._c_kv.shape[-1] + self.k_rope.shape[-1]

    @property
    def dtype(self) -> Any:
        return self._c_kv.dtype

    def decode(self, *arrays: Shaped[Array, "..."]) -> Float[Array, "..."]:
        n = len(self._c_kv.arrays)
        made = self._c_kv.decode(*arrays[:n]), self.k_rope.decode(*arrays[n:])
        if (
            made[0].dtype != made[1].dtype
        ):  # One of them may be quantized, and is then decoded wide.
            made = [x.astype(accumulation_dtype(self.dtype)) for x in made]
        return jnp.concatenate(made, -1)


class ValuesFromKeys(AbstractStored):
    """Values that are the first features of the keys of the same call. They have no arrays: a block
    of values is a part of the block of keys.

    **Arguments:**

    - `shape`, `dtype`: those of the values.
    """

    _shape: tuple[int, ...] = eqx.field(static=True)
    _dtype: Any = eqx.field(static=True)

    @property
    def arrays(self) -> tuple[Shaped[Array, "..."], ...]:
        return ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> Any:
        return self._dtype

    def decode(self, *arrays: Shaped[Array, "..."]) -> Float[Array, "..."]:
        (key,) = arrays
        return key[..., : self._shape[-1]]


def values_from_keys(key: Any, value: Any) -> Any:
    """The values, or `ValuesFromKeys` if they are the first part of the keys: the same arrays, not
    merely equal ones.
    """
    c_kv = key.c_kv if isinstance(key, AbstractStored) else None
    if c_kv is None:
        return value
    mine, theirs = (jax.tree.leaves(x) for x in (c_kv, as_stored(value)))
    same = len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs))
    return ValuesFromKeys(c_kv.shape, c_kv.dtype) if same else value


class StackLayer(AbstractStored):
    """Keys or values of one layer, in the arrays of all layers.

    A visit looks up the layer, and finds rows and tokens where they lie. So arrays that are sharded
    over rows or heads stay sharded.

    **Arguments:**

    - `stack`: keys or values of all layers, `[layers, b, s, k, d]`: an array or an
        [`eqattn.cache.AbstractStored`][] that is not `flat`.
    - `index`: which layer it is, int32.
    """

    stack: Any
    index: Int[Array, ""]

    @property
    def stored(self) -> AbstractStored:
        """The stack in the form in which it is stored."""
        return as_stored(self.stack)

    @property
    def arrays(self) -> tuple[Shaped[Array, "..."], ...]:
        """The arrays `[layers, b, s, k, ...]` of all layers."""
        return self.stored.arrays

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[1:]

    @property
    def dtype(self) -> Any:
        return self.stored.dtype

    @property
    def itemsize(self) -> int:
        return self.stored.itemsize

    @property
    def c_kv(self) -> Any:
        c_kv = self.stored.c_kv
        return None if c_kv is None else StackLayer(c_kv, self.index)

    def decode(self, *arrays: Shaped[Array, "..."]) -> Float[Array, "..."]:
        return self.stored.decode(*arrays)

    def materialise(self) -> Float[Array, "b s k d"]:
        return self.decode(*[x[self.index] for x in self.arrays]).astype(self.dtype)

    def alone(self) -> AbstractStored:
        """A copy of the layer, in the form in which the stack is stored."""
        return with_arrays(self.stored, [x[self.index] for x in self.arrays])

    def pages(self) -> Pages:
        """The layer as pages, for code that reads no stacks. All layers are one pool. Row `b` of
        layer `l` has the pages from `(l * rows + b) * (s // size)` on.
        """
        layers, rows, s = self.stored.shape[:3]
        # The blocks of `Ragged(metadata, bitwise=True)` have 128 keys, whatever the capacity is.
        size = even_block(s, 128 if s % 128 == 0 else 256) or s
        each = jnp.arange(rows * (s // size), dtype=jnp.int32).reshape(rows, s // size)
        cut = lambda x: x.reshape(layers * each.size, size, *x.shape[3:])
        return Pages(with_arrays(self.stored, map(cut, self.arrays)), self.index * each.size + each)


def in_pages(x: Any) -> Any:
    """Keys or values, as pages if they are those of a layer of a stack."""
    return x.pages() if isinstance(x, StackLayer) else x


def with_arrays(held: AbstractStored, arrays: Iterable[Array]) -> Any:
    """The same form of the numbers that other arrays hold.

    **Raises:** `NotImplementedError` if its `arrays` are not leaves of this PyTree: what replaces
    them would be lost.
    """
    new = {id(x): y for x, y in zip(held.arrays, arrays, strict=True)}
    leaves, tree = jax.tree.flatten(held)
    if not new.keys() <= set(map(id, leaves)):
        raise NotImplementedError(
            f"The arrays of {type(held).__name__} are no fields of it, so that none can be written."
        )
    return jax.tree.unflatten(tree, [new.get(id(x), x) for x in leaves])


class Bitcast(AbstractStored):
    """Floats that are stored as the integers with the same bits.

    XLA:CPU can write a part of an array of integers. To write a part of an array of bfloat16, it
    converts the whole array to float32 and back. So appending to a cache that is kept as bits costs
    as much as is written, not as much as its capacity.

    It stands for an array of the floats: functions of `jax.numpy`, every strategy and an index
    `x[...]` read it as one.

    **Arguments:**

    - `bits`: unsigned integers `[..., s, k, d]`.
    - `dtype`: the dtype of the floats, which has as many bits.
    """

    bits: UInt[Array, "*b s k d"]
    _dtype: Any = eqx.field(static=True, converter=jnp.dtype)

    def __check_init__(self) -> None:
        if self.bits.dtype != _unsigned(self._dtype):
            raise ValueError(
                f"bits of {self._dtype} are {_unsigned(self._dtype)}, got {self.bits.dtype}; "
                "Bitcast.of(array) makes them."
            )

    def map_tokens(self, fn: Callable[[Array], Array]) -> AbstractStored:
        return Bitcast(fn(self.bits), self.dtype)

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: Any) -> "Bitcast":
        """Makes the bits of zeros of a shape."""
        return cls(jnp.zeros(shape, _unsigned(dtype)), dtype)

    @classmethod
    def of(cls, x: Float[Array, "*b s k d"]) -> "Bitcast":
        """Takes the bits of an array. It has no gradient through them: asking for one raises."""
        x = without_gradient(x, _NO_GRADIENT_OF_BITS)
        return cls(lax.bitcast_convert_type(x, _unsigned(x.dtype)), x.dtype)

    @property
    def arrays(self) -> tuple[Shaped[Array, "..."], ...]:
        return (self.bits,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape

    @property
    def dtype(self) -> Any:
        return self._dtype

    def decode(self, *arrays: Shaped[Array, "..."]) -> Float[Array, "..."]:
        return lax.bitcast_convert_type(arrays[0], self._dtype)

    def encode(self, new: Float[Array, "b t k d"]) -> tuple[Shaped[Array, "..."], ...]:
        return (Bitcast.of(new.astype(self._dtype)).bits,)

    def __jax_array__(self) -> Array:
        return self.decode(self.bits)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.decode(self.bits), dtype, copy=copy)

    def __getitem__(self, index: Any) -> Array:
        return self.decode(self.bits[index])

    def __len__(self) -> int:
        return len(self.bits)

    def __iter__(self) -> Iterator[Array]:
        return iter(self[:])  # JAX clamps an index, so counting up would not end


def _unsigned(dtype: Any) -> Any:
    return jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")


_NO_GRADIENT_OF_BITS = (
    "A cache that is kept as bits has no gradient of the keys and values that are appended to it. "
    "Caches of narrow floats are kept so on a CPU: make it with bits=False, or stop their gradient."
)
