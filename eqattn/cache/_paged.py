"""`PagedKVCache`, whose rows take pages from a common pool.

`StackedPagedKVCache`, the paged caches of many equal layers, with one table of pages.

Which row has which page of a pool: pages are handed out, shared and copied between steps.

A table `[b, n]` holds for each part of a row

- `page`, if no other row has that page,
- `-2 - page`, if other rows may have it, so that it is not written to,
- `-1`, if the part has no page.

A page is free if no row has it. The table alone says how many rows have it, so rows may leave in
any order.
"""

from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from .._misc import as_flag, as_int32, as_size, concrete, int32_field
from .._problem.storage import AbstractStored, as_stored, Pages
from .._run_time import raise_if
from ._base import (
    AbstractCache,
    appends,
    check_rows,
    checked_dims,
    empty_pair,
    new_positions,
    rows_as_array,
    sharded_alike,
    within_capacity,
)
from ._stacked import AbstractStack, LayerCache
from ._writes import store


_Pool = TypeVar("_Pool", bound="AbstractPagePool")


def pages_of(table: Any) -> Any:
    """The pages of a table's entries, of those that rows share, too. -1 stays -1."""
    if isinstance(table, jax.Array):
        return _pages_of(table)
    return np.where(table < -1, -2 - table, table)


@jax.jit
def _pages_of(table: Array) -> Array:
    return jnp.where(table < -1, -2 - table, table)


def like(old: Array, new: np.ndarray) -> Array:
    """The new values as an array that lies where the old one does, on several hosts too."""
    if old.is_fully_addressable:
        return jnp.asarray(new)
    return jax.make_array_from_callback(new.shape, old.sharding, lambda index: new[index])


def _known(name: str, given: Any, *arrays: Any) -> list[np.ndarray]:
    """Copies of the table and the lengths, which may be changed.

    **Raises:** `ValueError` if these, or what is given to the method of that name, are traced.
    """
    traced = isinstance(given, jax.Array) and concrete(given) is None
    if traced or any(concrete(x) is None for x in arrays):
        raise ValueError(
            f"{name} runs between steps, outside of jax.jit. On several processes, each of them "
            "needs the whole table and all lengths, as the shardings of key_shardings leave them: "
            "give these to jax.jit as out_shardings."
        )
    return [np.array(x) for x in arrays]


def _reserved(pool: "AbstractPagePool", counts: Any) -> tuple[np.ndarray, Any]:
    """A table with pages for `counts` more tokens of each row, none of which others will write to,
    and the pages to copy: None, or the old and the new ones, int32 `[2, n]`. Where these are the
    number of all pages, there is nothing to copy. Part `j` of a row gets a page of the share
    `j % devices` of the pages.

    **Raises:** `ValueError` as `PagedKVCache.reserve` does.
    """
    table, length = _known("reserve", counts, pool.table, pool.length)
    pages, page_size, devices = as_stored(pool.key_pages).shape[0], pool.page_size, pool.devices
    first, length = (length, length) if length.ndim == 1 else (length.min(0), length.max(0))
    counts = np.asarray(as_int32(counts, "counts"))
    if counts.shape not in ((), length.shape) or (counts < 0).any():
        raise ValueError(
            f"counts must be an int or integers {length.shape}, at least 0, got {counts.tolist()}."
        )
    wanted = -(-(length + counts) // page_size)
    if (wanted > table.shape[1]).any():
        raise ValueError(
            f"A row would have {int((length + counts).max())} tokens; this cache was made for "
            f"{table.shape[1] * page_size} a row."
        )
    part = np.arange(table.shape[1])
    empty = (part < wanted[:, None]) & (table == -1)
    written = (part >= (first // page_size)[:, None]) & (part < wanted[:, None])
    written &= np.broadcast_to(counts > 0, length.shape)[:, None]
    users = np.bincount(pages_of(table)[table != -1], minlength=pages)
    free, copied = np.flatnonzero(users == 0), np.zeros(table.shape, bool)
    for at in zip(*np.nonzero(written & (table < -1))):
        page = -2 - table[at]
        copied[at] = users[page] > 1  # The last row that has a page keeps it.
        users[page] -= copied[at]
        table[at] = page
    old = table.copy()
    for share in range(devices):
        own = free[free // (pages // devices) == share] if devices > 1 else free
        mine = np.zeros_like(empty)
        mine[:, share::devices] = (empty | copied)[:, share::devices]
        if mine.sum() > len(own):
            of = f" of device {share}" if devices > 1 else ""
            raise ValueError(
                f"{mine.sum()} pages{of} of {page_size} tokens are needed and {len(own)} of "
                f"{pages // devices} are free; release rows that have ended."
            )
        table[mine] = own[: mine.sum()]
    # A page that is written from its first token on need not be copied.
    kept = copied & (part * page_size < length[:, None])
    if not kept.any():
        return table, None
    # If all layers have the same length, each row has at most one such page.
    copies = np.full((2, max(len(length), kept.sum())), pages, np.int32)
    copies[:, : kept.sum()] = old[kept], table[kept]
    return table, copies


@jax.jit
def doubled(table: Array, rows: Array) -> Array:
    """The table of the rows at these indices. Rows that occur twice share their pages."""
    many = (jnp.bincount(rows, length=len(table)) > 1)[rows]
    table = table[rows]
    return jnp.where(many[:, None] & (table >= 0), -2 - table, table)


def _copy_pages(pools: Any, old: Array, new: Array) -> Any:
    """The pools with the pages `old` copied to the pages `new`. Pages that are out of range are not
    copied.
    """
    copied = lambda x, old, new: x.at[new].set(jnp.take(x, old, 0, mode="clip"), mode="drop")
    over = lambda pools, *pages: jax.tree.map(lambda x: copied(x, *pages), pools)
    return sharded_alike(over, pools, old, new)


copy_pages = jax.jit(_copy_pages)
copy_pages_donated = jax.jit(_copy_pages, donate_argnums=0)


@jax.jit
def _released(table: Array, length: Array, rows: Array) -> tuple[Array, Array]:
    if rows.dtype != bool:
        rows = jnp.zeros(len(table), bool).at[rows].set(True)
    # A mask may be traced, and then JAX indexes nothing with it.
    return jnp.where(rows[:, None], -1, table), jnp.where(rows, 0, length)


class AbstractPagePool(eqx.Module):
    """What `PagedKVCache` and `StackedPagedKVCache` have in common. Where pages have several
    layers, these are the second axis of the pools, and the first one of the lengths.
    """

    key_pages: Any
    value_pages: Any
    table: Int[Array, "b parts"] = int32_field("table")
    length: Int[Array, "*layers b"] = int32_field("length")
    devices: int = eqx.field(static=True, default=1)

    def __init__(
        self,
        key_pages: Float[Array | AbstractStored, "p *layers n k d"],
        value_pages: Float[Array | AbstractStored, "p *layers n k v"],
        table: Int[Array, "b parts"],
        length: Int[Array, "*layers b"],
        devices: int = 1,
    ):
        self.key_pages, self.value_pages = key_pages, value_pages
        self.table, self.length, self.devices = table, length, as_size(devices, "devices", 1)

    @property
    def page_size(self) -> int:
        """How many tokens a page has."""
        return as_stored(self.key_pages).shape[-3]

    def reserve(self: _Pool, counts: Any, donate: bool = False) -> _Pool:
        """Returns the cache with pages for `counts` more tokens of each row: an int, or integers
        `[b]`. A row that is going to write to a page that others have, too, gets a copy of it.

        `donate` says that pages are copied within the memory of this cache, which cannot be used
        afterwards. Otherwise the first copy is one of all pages. Where rows share whole pages only,
        there is nothing to copy.

        **Raises:** `ValueError` if the pool has too few free pages, or a row would outgrow its
        capacity; no page is taken then.
        """
        donate, pools = as_flag(donate, "donate"), self._pools()
        table, copies = _reserved(self, counts)
        if copies is not None:
            copy = copy_pages_donated if donate else copy_pages
            pools = copy(pools, *map(jnp.asarray, copies))
        where: Any = lambda c: (c.key_pages, c.value_pages, c.table)
        return eqx.tree_at(where, self, (*pools, like(self.table, table)))

    def reorder(self: _Pool, rows: Int[Array, " n"]) -> _Pool:
        """Returns the cache with the rows at these indices. Rows that occur twice share their
        pages. The pages of rows that are left out are free again.
        """
        rows = check_rows(rows, len(self.table))
        pick = lambda of, rows: (doubled(of[0], rows), of[1][rows])
        of, stay = (self.table, self.length.T), len(rows) == len(self.table)
        table, length = sharded_alike(pick, of, rows, rows_stay=stay)
        return self._with(table, length.T)

    def share(self: _Pool, rows: Any, from_row: int, tokens: int) -> _Pool:
        """Returns the cache in which `rows` begin with the first `tokens` of another row. They have
        the same pages, and nothing is copied yet. `reserve` copies a shared page when it prepares a
        row to write there. Rows may be released in any order.

        **Arguments:**

        - `rows`: the row that begins so, or the rows, `[n]`. They must be empty.
        - `from_row`: the row that has the tokens.
        - `tokens`: how many, at least 1.

        **Raises:** `ValueError` if a row is absent, not empty or named twice, or if `from_row` has
        fewer tokens.
        """
        table, lengths = _known("share", rows, self.table, self.length)
        length = lengths if lengths.ndim == 1 else lengths.min(0)
        rows = np.atleast_1d(np.asarray(as_int32(rows_as_array(rows), "rows")))
        from_row, tokens = as_size(from_row, "from_row"), as_size(tokens, "tokens", 1)
        named = [*rows.tolist(), from_row]
        if rows.ndim != 1 or min(named) < 0 or max(named) >= len(length):
            raise ValueError(
                f"rows and from_row must be among the {len(length)} rows, from 0 on, got "
                f"{rows.tolist()} and {from_row}."
            )
        if len(set(named)) < len(named):
            raise ValueError(
                f"A row is named twice, rows {rows.tolist()} and from_row {from_row}: name each "
                "once."
            )
        if (taken := rows[(length[rows] > 0) | (table[rows] != -1).any(1)]).size:
            raise ValueError(
                f"Rows {taken.tolist()} have tokens or pages of their own; release them first."
            )
        if tokens > length[from_row]:
            raise ValueError(
                f"Row {from_row} has {length[from_row]} tokens, not {tokens}: share fewer of them, "
                "or append the prefix to it first."
            )
        parts = -(-tokens // self.page_size)
        table[from_row, :parts] = -2 - pages_of(table[from_row, :parts])
        table[rows, :parts] = table[from_row, :parts]
        lengths[..., rows] = tokens
        return self._with(like(self.table, table), like(self.length, lengths))

    def release(self: _Pool, rows: Any) -> _Pool:
        """Returns the cache without the tokens and pages of some rows. `rows` is an array of their
        indices, or a boolean mask `[b]`.
        """
        rows, shape = rows_as_array(rows), self.table.shape[:1]
        if rows.dtype != bool:
            rows = check_rows(rows, *shape)
        elif rows.shape != shape:
            raise ValueError(f"A mask of rows must be {shape}, got {rows.shape}.")
        return self._with(*_released(self.table, self.length, rows))

    def _pools(self) -> tuple[Any, Any]:
        return self.key_pages, self.value_pages

    def _write(self, layer: Any, key: Array, value: Array, counts: Any) -> tuple[Any, Any, Array]:
        """The pages of keys and of values with new tokens, and the new lengths.

        **Arguments:**

        - `layer`: the cache that they are appended to: that of one of the layers, or this one if
            pages have no layers. Its index is one of the scatter, as the axes of the pages stay
            what they are: see `scatter`.
        - `key`, `value`, `counts`: those that `appends` gives to `append`.
        """
        held, size, table = as_stored(self.key_pages).shape[0], self.page_size, self.table
        rows, parts = table.shape
        index = () if layer is self else (layer.index,)
        length = within_capacity(layer.length + counts, parts * size)
        position = new_positions(layer, key.shape[1])
        kept = position < length[:, None]
        row = jnp.arange(rows, dtype=jnp.int32)[:, None]
        part = jnp.minimum(position // size, parts - 1)
        page = table[row, part] if parts else jnp.full_like(position, -1)
        missing = (
            "a row has no page for its new tokens, or not alone; call cache.reserve(counts) before "
            "the step"
        )
        page = raise_if(page, kept & (page < 0), missing)
        # Tokens that are not kept go to a page that is not in the pool, so nothing is written.
        # Several may go to the same place there, hence `unique=False`.
        page = jnp.where(kept, page, held)
        keys, values = (
            store(old, new, (page, *index), position % size, unique=False)
            for old, new in zip(self._pools(), (key, value))
        )
        return keys, values, length

    def _with(self: _Pool, table: Any, length: Any) -> _Pool:
        return eqx.tree_at(lambda c: (c.table, c.length), self, (table, length))

    def _key_specs(self, axis_name: str) -> dict[int, P]:
        return {id(x): P(axis_name) for x in jax.tree.leaves(self._pools())}


class PagedKVCache(AbstractPagePool, AbstractCache):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A cache whose rows take pages from a common pool, as many as their tokens need.

    `reserve` hands pages out and `release` takes them back. Rows that begin alike `share` the pages
    of their first tokens, until one of them writes there. `reserve` and `share` look at the table,
    so they run outside of `jax.jit`, between steps. Everything else is as in other caches.

    **Arguments:**

    - `key_pages`, `value_pages`: the pools of pages, `[pages, page size, k, d]` and
        `[pages, page size, k, v]`, as arrays or an [`eqattn.cache.AbstractStored`][] with `encode`.
        `PagedKVCache.empty` makes them.
    - `table`: the page of each part of a row, int32 `[b, n]`. The number -1 means that it has none.
        The number `-2 - page` means that other rows may have the same page, which is then not
        written to.
    - `length`: how many tokens each row has, int32 `[b]`.
    - `devices`: the number of devices that share the pool, each an equal run of its pages, for
        `Ragged(metadata, axis_name=...)`. The parts of a row lie on them in turn.

    Token `p` of row `b` lies in page `table[b, p // page_size]`, at place `p % page_size`. A page
    is free if no row has it. The table alone says how many rows do.
    """

    # Type checkers would put `length` first, which is the first of the fields of the other base.
    def __init__(
        self,
        key_pages: Float[Array | AbstractStored, "p n k d"],
        value_pages: Float[Array | AbstractStored, "p n k v"],
        table: Int[Array, "b parts"],
        length: Int[Array, "b"],
        devices: int = 1,
    ):
        super().__init__(key_pages, value_pages, table, length, devices)

    shares_rows: ClassVar[bool] = True

    @classmethod
    def empty(  # noqa: PLR0913 (one argument for each size of the cache)
        cls,
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
    ) -> "PagedKVCache":
        """Makes a cache without tokens, whose pages are all free.

        **Arguments:**

        - `batch`: how many rows there are.
        - `capacity`: the largest number of tokens of a row, rounded up to whole pages.
        - `pages`: how many pages the pool has.
        - `page_size`: how many tokens a page has.
        - `kv_heads`, `head_dim`, `value_dim`: the number of key heads, and the sizes of a key and
            of a value. The default of `value_dim` is `head_dim`.
        - `dtype`: the dtype of keys and values when they are read.
        - `stored`: int8 or a float8 dtype to quantize to, or None.
        - `head_shares`: how many devices share the heads of quantized pages.
        - `bits`: whether pages that are not quantized are [`eqattn.cache.Bitcast`][]; None as for
            `KVCache.empty`.
        - `devices`: how many devices share the pages. The capacity is rounded up, so that each has
            as many parts of a row as the others.

        **Raises:** `ValueError` for sizes that do not fit, as pages that `devices` does not divide.
        """
        sizes = dict(batch=batch, capacity=capacity, pages=pages, page_size=page_size)
        sizes |= dict(kv_heads=kv_heads, head_shares=head_shares)
        dims = checked_dims(dtype, head_dim, value_dim, **sizes)
        if min(page_size, pages) < 1:
            raise ValueError(
                f"page_size={page_size} tokens and pages={pages} must be at least 1 each."
            )
        if as_size(devices, "devices", 1) > 1 and pages % devices:
            raise ValueError(
                f"devices={devices} cannot share {pages} pages; use a multiple of {devices}."
            )
        lead = pages, page_size, kv_heads
        keys, values = empty_pair(lead, dims, dtype, bits, stored, head_shares)
        parts = -(-capacity // (page_size * devices)) * devices
        table = jnp.full((batch, parts), -1, jnp.int32)
        return cls(keys, values, table, jnp.zeros(batch, jnp.int32), devices)

    @property
    def key(self) -> Pages:
        return Pages(self.key_pages, pages_of(self.table), self.devices)

    @property
    def value(self) -> Pages:
        return Pages(self.value_pages, pages_of(self.table), self.devices)

    @appends
    def append(
        self,
        key: Float[Array, "b t k d"],
        value: Float[Array, "b t k v"],
        counts: Int[Array, " b"] | None = None,
    ) -> "PagedKVCache":
        new = self._write(self, key, value, counts)
        return eqx.tree_at(lambda c: (c.key_pages, c.value_pages, c.length), self, new)


class StackedPagedKVCache(AbstractPagePool, AbstractStack):
    """A `PagedKVCache` for each layer, in arrays that a scan over layers carries and writes in
    place, as [`eqattn.cache.StackedKVCache`][] is. A page is the same part of a row in every layer,
    so that one table serves all layers. `reserve` costs the host the same for any number of them,
    and it, `reorder`, `share` and `release` are of all layers.

    **Arguments:**

    - `key_pages`, `value_pages`: the pools of pages, `[pages, layers, page size, k, d]` and
        `[pages, layers, page size, k, v]`, as arrays, [`eqattn.cache.Quantized`][] or
        [`eqattn.cache.Bitcast`][]. `StackedPagedKVCache.empty` makes them.
    - `table`, `devices`: as for [`eqattn.cache.PagedKVCache`][].
    - `length`: how many tokens each row has in each layer, int32 `[layers, b]`.
    """

    def __init__(
        self,
        key_pages: Float[Array | AbstractStored, "p layers n k d"],
        value_pages: Float[Array | AbstractStored, "p layers n k v"],
        table: Int[Array, "b parts"],
        length: Int[Array, "layers b"],
        devices: int = 1,
    ):
        super().__init__(key_pages, value_pages, table, length, devices)

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
        as_size(layers, "layers")
        sizes = batch, capacity, pages, page_size, kv_heads, head_dim, value_dim
        kind = dtype, stored, head_shares, bits, devices
        one = jax.eval_shape(lambda: PagedKVCache.empty(*sizes, *kind))
        zeros = lambda x: jnp.zeros((x.shape[0], layers, *x.shape[1:]), x.dtype)
        table = jnp.full(one.table.shape, -1, jnp.int32)
        length = jnp.zeros((layers, batch), jnp.int32)
        key_pages, value_pages = jax.tree.map(zeros, one._pools())
        return cls(key_pages, value_pages, table, length, devices)

    def _read(self, pool: Any, index: Array) -> Pages:
        # The pages of all layers lie one after the other.
        merged = lambda x: x.reshape(int(np.prod(x.shape[:2])), *x.shape[2:])
        table = pages_of(self.table)
        table = jnp.where(table < 0, -1, table * self.length.shape[0] + index)
        return Pages(jax.tree.map(merged, pool), table, self.devices)

    def _reorder(self, layer: LayerCache, rows: Any) -> tuple[Any, Any, Array]:
        raise ValueError(
            "The layers of a StackedPagedKVCache share one table of pages, so that one of them "
            "cannot be reordered alone; call reorder of the stack."
        )
