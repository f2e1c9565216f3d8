"""`StackedKVCache`, the caches of many equal layers, for a scan over the layers.

`LayerCache`, the cache of one of the layers of a stack.
"""

import abc
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from .._misc import as_int32, concrete, int32_field
from .._problem.storage import AbstractStored, StackLayer
from .._run_time import raise_if
from ._base import (
    AbstractCache,
    appends,
    check_lengths,
    check_rows,
    checked_dims,
    empty_pair,
    sharded_alike,
    shardings_of,
    write_slots,
)
from ._writes import write


_Stack = TypeVar("_Stack", bound="AbstractStack")


class AbstractStack(eqx.Module):
    """The caches of equal layers, in arrays that a scan over layers carries and writes in place.

    **Arguments:**

    - `length`: how many tokens each row has in each layer, int32 `[layers, b]`.
    """

    length: eqx.AbstractVar[Any]

    def layer(self, index: Any) -> "LayerCache":
        """Returns the cache of one layer. The index may be traced.

        **Raises:** `ValueError` for a known index that is out of range. For a traced one,
        an error is raised when the program runs.
        """
        index, layers = as_int32(index, "index"), self.length.shape[0]
        known, message = concrete(index), f"index must be one of the {layers} layers, from 0 on"
        if index.shape != () or (known is not None and not 0 <= known < layers):
            got = f"shape {index.shape}" if known is None or index.shape else str(int(known))
            raise ValueError(f"{message}, got {got}.")
        index = jnp.asarray(index)
        if known is None:
            index = raise_if(index, (index < 0) | (index >= layers), message)
        return LayerCache(self, index)  # pyright: ignore[reportCallIssue]

    def key_shardings(self: _Stack, mesh: Any, axis_name: str) -> _Stack:
        """The shardings of a cache whose tokens or pages are spread over the devices along a mesh
        axis, as those of [`eqattn.cache.AbstractCache`][].
        """
        return shardings_of(self, self._key_specs(axis_name), mesh, axis_name)

    @abc.abstractmethod
    def _pools(self) -> tuple[Any, Any]:
        """A hook: the keys and the values of all layers."""

    @abc.abstractmethod
    def _read(self, pool: Any, index: Array) -> AbstractStored:
        """A hook: the keys or values of a layer, as attention reads them in those of all layers."""

    @abc.abstractmethod
    def _write(
        self, layer: "LayerCache", key: Array, value: Array, counts: Any
    ) -> tuple[Any, Any, Array]:
        """A hook: the keys and values of all layers with new tokens of one, and its new lengths."""

    @abc.abstractmethod
    def _reorder(self, layer: "LayerCache", rows: Any) -> tuple[Any, Any, Array]:
        """A hook: the keys and values of all layers with the rows of one at these indices, and its
        new lengths.
        """

    @abc.abstractmethod
    def _key_specs(self, axis_name: str) -> dict[int, P]:
        """A hook for `key_shardings`, as that of `AbstractCache`."""


class StackedKVCache(AbstractStack):
    """A `KVCache` for each layer, in arrays that a scan over layers carries and writes in place:

        def layer(carry, i):
            caches, x = carry
            cache = caches.layer(i)
            ...  # cache.append, attention over cache.key and cache.value
            return (cache.stack, x), None

    Nothing of a layer is copied: its keys and values are read where they lie in the stack.

    **Arguments:**

    - `key`, `value`: the keys `[layers, b, capacity, k, d]` and the values
        `[layers, b, capacity, k, v]`, as arrays or an [`eqattn.cache.AbstractStored`][] with
        `encode`, which is not flat. `StackedKVCache.empty` makes them.
    - `length`: how many tokens each row has in each layer, int32 `[layers, b]`.
    """

    key: Float[Array | AbstractStored, "l b s k d"]
    value: Float[Array | AbstractStored, "l b s k v"]
    length: Int[Array, "l b"] = int32_field("length")

    @classmethod
    def empty(  # noqa: PLR0913 (one argument for each size of the cache)
        cls,
        layers: int,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: Any = jnp.float32,
        bits: bool | None = None,
    ) -> "StackedKVCache":
        """Makes a cache without tokens. `bits` is as for `KVCache.empty`.

        What reads no stack, such as a kernel for GPUs or a list of keys, reads a layer as pages of
        a size from 64 to 256 that divides the capacity. Where none does, a page is a whole row. So
        a long capacity is best a multiple of 64, or of 128 as for `KVCache.empty`.
        """
        sizes = dict(layers=layers, batch=batch, capacity=capacity, kv_heads=kv_heads)
        dims = checked_dims(dtype, head_dim, value_dim, **sizes)
        key, value = empty_pair((layers, batch, capacity, kv_heads), dims, dtype, bits)
        return cls(key, value, jnp.zeros((layers, batch), jnp.int32))

    def _pools(self) -> tuple[Any, Any]:
        return self.key, self.value

    def _read(self, pool: Any, index: Array) -> AbstractStored:
        if isinstance(pool, AbstractStored) and any(pool.flat):
            raise ValueError(
                f"{type(pool).__name__} has its tokens and heads in one axis, and cannot be read "
                "by layer; use StackedPagedKVCache."
            )
        return StackLayer(pool, index)

    def _write(
        self, layer: "LayerCache", key: Array, value: Array, counts: Any
    ) -> tuple[Any, Any, Array]:
        slots, length = write_slots(layer, key.shape[1], counts, self.key.shape[2])
        key = write(self.key, key, slots, layer.index)
        return key, write(self.value, value, slots, layer.index), length

    def _reorder(self, layer: "LayerCache", rows: Any) -> tuple[Any, Any, Array]:
        rows = check_rows(rows, self.key.shape[1])
        if rows.shape != layer.length.shape:
            raise ValueError(
                f"rows {rows.shape} must be as many as the layers have, {layer.length.shape}; "
                "other numbers need a new StackedKVCache."
            )

        def in_order(pools: Any, index: Any, rows: Array) -> Any:
            return jax.tree.map(lambda x: x.at[index].set(x[index][rows]), pools)

        key, value = sharded_alike(in_order, (self.key, self.value), layer.index, rows)
        return key, value, sharded_alike(lambda x, rows: x[rows], layer.length, rows)

    def _key_specs(self, axis_name: str) -> dict[int, P]:
        return {id(x): P(None, None, axis_name) for x in jax.tree.leaves((self.key, self.value))}


class LayerCache(AbstractCache):
    """The cache of one layer of a [`eqattn.cache.StackedKVCache`][] or a
    [`eqattn.cache.StackedPagedKVCache`][], which is its `stack`. `reorder` needs as many rows as
    before, and copies the layer; layers with a common table of pages are reordered by their stack.
    """

    stack: Any
    index: Int[Array, ""]

    shares_rows: ClassVar[bool] = True

    def __init__(self, stack: AbstractStack, index: Int[Array, ""]):
        self.stack, self.index = stack, index

    @property
    def length(self) -> Int[Array, " b"]:
        return self.stack.length[self.index]

    @property
    def key(self) -> AbstractStored:
        return self.stack._read(self.stack._pools()[0], self.index)

    @property
    def value(self) -> AbstractStored:
        return self.stack._read(self.stack._pools()[1], self.index)

    def _with(self, key: Any, value: Any, length: Array) -> "LayerCache":
        new = key, value, self.stack.length.at[self.index].set(length)
        where = lambda stack: (*stack._pools(), stack.length)
        return LayerCache(eqx.tree_at(where, self.stack, new), self.index)  # pyright: ignore[reportCallIssue]

    @appends
    def append(
        self,
        key: Float[Array, "b t k d"],
        value: Float[Array, "b t k v"],
        counts: Int[Array, " b"] | None = None,
    ) -> "LayerCache":
        return self._with(*self.stack._write(self, key, value, counts))

    def truncate(self, lengths: Int[Array, " b"]) -> "LayerCache":
        key, value = self.stack._pools()
        return self._with(key, value, check_lengths(lengths, self.length))

    def reorder(self, rows: Int[Array, " n"]) -> "LayerCache":
        return self._with(*self.stack._reorder(self, rows))

    def _key_specs(self, axis_name: str) -> dict[int, P]:
        return self.stack._key_specs(axis_name)
