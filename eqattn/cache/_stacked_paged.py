"""`StackedPagedKVCache`, the paged caches of many equal layers, with one table of pages."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from .._misc import as_size, int32_field
from .._problem.storage import as_stored, Pages
from ._base import (
    appends,
    check_lengths,
    check_rows,
    checked_dims,
    pool_specs,
    shardings_of,
)
from ._page_table import pages_of, with_doubled
from ._paged import empty_pools, with_released, with_reserved, with_shared, write_pages
from ._stacked import AbstractLayerCache, layer_index


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
    def empty(
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
