"""`StackedKVCache`, the caches of many equal layers, for a scan over the layers.

`StackedPagedKVCache`, the paged caches of many equal layers, with one table of pages.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from .._misc import as_int32, as_size, concrete, int32_field
from .._problem.storage import AbstractStored, as_stored, Pages, StackLayer
from .._run_time import raise_if
from ._base import (
    AbstractCache,
    appends,
    check_lengths,
    check_rows,
    checked_dims,
    empty_pair,
    pool_specs,
    sharded_alike,
    shardings_of,
    write_slots,
)
from ._paged import (
    empty_pools,
    pages_of,
    with_doubled,
    with_released,
    with_reserved,
    with_shared,
    write_pages,
)
from ._writes import write


class StackedKVCache(eqx.Module):
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
    def empty(
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

    def layer(self, index: Any) -> "LayerCache":
        """Returns the cache of one layer. The index may be traced.

        **Raises:** `ValueError` for a known index that is out of range. For a traced one,
        an error is raised when the program runs.
        """
        return LayerCache(self, layer_index(index, self.length.shape[0]))  # pyright: ignore[reportCallIssue]

    def key_shardings(self, mesh: Any, axis_name: str) -> "StackedKVCache":
        """The shardings of a cache whose tokens are spread over the devices along a mesh axis, as
        those of [`eqattn.cache.AbstractCache`][].
        """
        return shardings_of(self, self.layer(0)._key_specs(axis_name), mesh, axis_name)


def layer_index(index: Any, layers: int) -> Array:
    """The index of one of some layers as int32, checked."""
    index = as_int32(index, "index")
    known, message = concrete(index), f"index must be one of the {layers} layers, from 0 on"
    if index.shape != () or (known is not None and not 0 <= known < layers):
        got = f"shape {index.shape}" if known is None or index.shape else str(int(known))
        raise ValueError(f"{message}, got {got}.")
    index = jnp.asarray(index)
    return index if known is not None else raise_if(index, (index < 0) | (index >= layers), message)


class AbstractLayerCache(AbstractCache):
    """The cache of one layer of a `stack`, an `index` of which holds what belongs to the layer."""

    stack: eqx.AbstractVar[Any]
    index: eqx.AbstractVar[Int[Array, ""]]

    shares_rows: ClassVar[bool] = True

    def __init__(self, stack: Any, index: Int[Array, ""]):
        self.stack, self.index = stack, index

    @property
    def length(self) -> Int[Array, " b"]:
        return self.stack.length[self.index]

    @property
    def positions(self) -> Int[Array, "b s"] | None:
        return None


class LayerCache(AbstractLayerCache):
    """The cache of one layer of a [`eqattn.cache.StackedKVCache`][], which is its `stack`."""

    stack: StackedKVCache
    index: Int[Array, ""]

    @property
    def key(self) -> AbstractStored:
        return self._own(self.stack.key)

    @property
    def value(self) -> AbstractStored:
        return self._own(self.stack.value)

    def _own(self, x: Any) -> StackLayer:
        if isinstance(x, AbstractStored) and any(x.flat):
            raise ValueError(
                f"{type(x).__name__} has its tokens and heads in one axis, and cannot be read by "
                "layer; use StackedPagedKVCache."
            )
        return StackLayer(x, self.index)

    def _with(self, key: Any, value: Any, length: Array) -> "LayerCache":
        lengths = self.stack.length.at[self.index].set(length)
        return LayerCache(StackedKVCache(key, value, lengths), self.index)  # pyright: ignore[reportCallIssue]

    @appends
    def append(
        self,
        key: Float[Array, "b t k d"],
        value: Float[Array, "b t k v"],
        counts: Int[Array, " b"] | None = None,
    ) -> "LayerCache":
        slots, length = write_slots(self, key.shape[1], counts, self.stack.key.shape[2])
        key = write(self.stack.key, key, slots, self.index)
        return self._with(key, write(self.stack.value, value, slots, self.index), length)

    def truncate(self, lengths: Int[Array, " b"]) -> "LayerCache":
        return self._with(self.stack.key, self.stack.value, check_lengths(lengths, self.length))

    def reorder(self, rows: Int[Array, " n"]) -> "LayerCache":
        """Returns the cache with the rows at these indices, of which there must be as many as
        before. It copies this layer.
        """
        rows = check_rows(self, rows)
        if rows.shape != self.length.shape:
            raise ValueError(
                f"rows {rows.shape} must be as many as the layers have, {self.length.shape}; other "
                "numbers need a new StackedKVCache."
            )

        def turned(stored: Any, index: Any, rows: Array) -> Any:
            return jax.tree.map(lambda x: x.at[index].set(x[index][rows]), stored)

        both = self.stack.key, self.stack.value
        key, value = sharded_alike(turned, both, self.index, rows)
        length = sharded_alike(lambda x, rows: x[rows], self.length, rows)
        return self._with(key, value, length)


class StackedPagedKVCache(eqx.Module):
    """A `PagedKVCache` for each layer, in arrays that a scan over layers carries and writes in
    place, as [`eqattn.cache.StackedKVCache`][] is. A page is the same part of a row in every layer,
    so that one table serves all layers. `reserve` costs the host the same for any number of them.

    **Arguments:**

    - `key_pages`, `value_pages`: the pools of pages, `[pages, layers, page size, k, d]` and
        `[pages, layers, page size, k, v]`, as arrays, [`eqattn.cache.Quantized`][] or
        [`eqattn.cache.Bits`][]. `StackedPagedKVCache.empty` makes them.
    - `table`: the page of each part of a row, int32 `[b, n]`. -1 means that it has none.
        `-2 - page` means that other rows may have the page, too.
    - `length`: how many tokens each row has in each layer, int32 `[layers, b]`.
    - `devices`: as for [`eqattn.cache.PagedKVCache`][].
    """

    key_pages: Any
    value_pages: Any
    table: Int[Array, "b n"] = int32_field("table")
    length: Int[Array, "l b"] = int32_field("length")
    devices: int = eqx.field(static=True, default=1)

    @classmethod
    def empty(  # noqa: PLR0913 (one argument for each size of the cache)
        cls,
        layers: int,
        batch: int,
        capacity: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: Any = jnp.float32,
        stored: Any = None,
        head_shares: int = 1,
        bits: bool | None = None,
        devices: int = 1,
    ) -> "StackedPagedKVCache":
        """Makes a cache without tokens. The arguments are those of
        [`eqattn.cache.PagedKVCache`][]`.empty`, and `layers`; each page has all layers.
        """
        sizes = dict(layers=layers, batch=batch, capacity=capacity, pages=pages)
        sizes |= dict(page_size=page_size, kv_heads=kv_heads, head_shares=head_shares)
        dims = checked_dims(dtype, head_dim, value_dim, **sizes)
        shape = (pages, layers, page_size, kv_heads)
        keys, values = empty_pools(
            shape, dims, dtype, stored, head_shares, bits, as_size(devices, "devices")
        )
        parts = -(-capacity // (page_size * devices)) * devices
        table, length = (
            jnp.full((batch, parts), -1, jnp.int32),
            jnp.zeros((layers, batch), jnp.int32),
        )
        return cls(keys, values, table, length, devices)

    def layer(self, index: Any) -> "PagedLayerCache":
        """Returns the cache of one layer. The index may be traced.

        **Raises:** `ValueError` for a known index that is out of range. For a traced one,
        an error is raised when the program runs.
        """
        return PagedLayerCache(self, layer_index(index, self.length.shape[0]))  # pyright: ignore[reportCallIssue]

    def reserve(self, counts: Any, donate: bool = False) -> "StackedPagedKVCache":
        """Returns the cache with pages for `counts` more tokens of each row, in all layers; as that
        of [`eqattn.cache.PagedKVCache`][].
        """
        size = as_stored(self.key_pages).shape[2]
        return with_reserved(self, self.length, counts, size, donate)

    def reorder(self, rows: Int[Array, " n"]) -> "StackedPagedKVCache":
        """Returns the cache with the rows at these indices, in all layers; as that of
        [`eqattn.cache.PagedKVCache`][].
        """
        rows = check_rows(self.layer(0), rows)
        table, length = with_doubled(self.table, self.length.T, rows)
        return eqx.tree_at(lambda c: (c.table, c.length), self, (table, length.T))

    def share(self, rows: Any, from_row: int, tokens: int) -> "StackedPagedKVCache":
        """Returns the cache in which `rows` begin with the first `tokens` of another row, in all
        layers; as that of [`eqattn.cache.PagedKVCache`][].
        """
        size = as_stored(self.key_pages).shape[2]
        return with_shared(self, self.length.min(0), rows, from_row, tokens, size)

    def release(self, rows: Any) -> "StackedPagedKVCache":
        """Returns the cache without the tokens and pages of some rows, in all layers. `rows` is an
        array of their indices, or a boolean mask `[b]`.
        """
        return with_released(self, self.layer(0), rows)

    def key_shardings(self, mesh: Any, axis_name: str) -> "StackedPagedKVCache":
        """The shardings of a cache whose pages are spread over the devices along a mesh axis, as
        those of [`eqattn.cache.AbstractCache`][].
        """
        return shardings_of(self, pool_specs(self, axis_name), mesh, axis_name)


class PagedLayerCache(AbstractLayerCache):
    """The cache of one layer of a [`eqattn.cache.StackedPagedKVCache`][], which is its `stack`."""

    stack: StackedPagedKVCache
    index: Int[Array, ""]

    @property
    def key(self) -> Pages:
        return self._pages(self.stack.key_pages)

    @property
    def value(self) -> Pages:
        return self._pages(self.stack.value_pages)

    def _pages(self, pool: Any) -> Pages:
        return Pages(_merged(pool), self._own(pages_of(self.stack.table)), self.stack.devices)

    def _own(self, table: Array) -> Array:
        """The table for pools in which the pages of all layers lie one after the other."""
        return jnp.where(table < 0, -1, table * self.stack.length.shape[0] + self.index)

    @appends
    def append(
        self,
        key: Float[Array, "b t k d"],
        value: Float[Array, "b t k v"],
        counts: Int[Array, " b"] | None = None,
    ) -> "PagedLayerCache":
        stack, layer = self.stack, (self.index,)
        pools = stack.key_pages, stack.value_pages
        return self._with(*write_pages(self, pools, stack.table, key, value, counts, layer))

    def _key_specs(self, axis_name: str) -> dict[int, P]:
        return pool_specs(self.stack, axis_name)

    def _with(self, keys: Any, values: Any, length: Array) -> "PagedLayerCache":
        lengths = self.stack.length.at[self.index].set(length)
        stack = StackedPagedKVCache(keys, values, self.stack.table, lengths, self.stack.devices)
        return PagedLayerCache(stack, self.index)  # pyright: ignore[reportCallIssue]

    def truncate(self, lengths: Int[Array, " b"]) -> "PagedLayerCache":
        """Returns the cache with only the first `lengths` tokens of each row of this layer. A row
        keeps the pages that it no longer needs.
        """
        lengths = check_lengths(lengths, self.length)
        return self._with(self.stack.key_pages, self.stack.value_pages, lengths)

    def reorder(self, rows: Int[Array, " n"]) -> "PagedLayerCache":
        """**Raises:** `ValueError`, as the layers share the table of pages."""
        raise ValueError(
            "The layers of a StackedPagedKVCache share one table of pages, so that one of them "
            "cannot be reordered alone; call reorder of the stack."
        )


def _merged(pool: Any) -> Any:
    """A pool `[pages, layers, page size, ...]` as `[pages * layers, page size, ...]`."""
    return jax.tree.map(lambda x: x.reshape(int(np.prod(x.shape[:2])), *x.shape[2:]), pool)
