"""`PagedKVCache`, whose rows take pages from a common pool."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._misc import as_array, as_flag, as_int32, as_size, concrete, int32_field
from .._problem.bits import Bits
from .._problem.storage import as_stored, Pages, Quantized
from ._base import (
    AbstractCache,
    check_lengths,
    check_new,
    check_rows,
    checked_dims,
    empty_store,
    new_positions,
    store,
    within_capacity,
)


class PagedKVCache(AbstractCache):
    """A cache whose rows take pages from a common pool, as many as their tokens need.

    `reserve` hands pages out and `release` takes them back. Rows that begin alike `share` the pages
    of their first tokens, until one of them writes there. `reserve` and `share` look at the table,
    so they run outside of `jax.jit`, between steps. Everything else is as in other caches.

    **Arguments:**

    - `key_pages`, `value_pages`: the pools of pages, `[pages, page size, k, d]` and
        `[pages, page size, k, v]`, as arrays, [`eqattn.cache.Quantized`][] or
        [`eqattn.cache.Bits`][]. `PagedKVCache.empty` makes them.
    - `table`: the page of each part of a row, int32 `[b, n]`. -1 means that it has none, and
        `-2 - page` that other rows may have the same page, so that it is not written to.
    - `length`: how many tokens each row has, int32 `[b]`.

    Token `p` of row `b` lies in page `table[b, p // page_size]`, at place `p % page_size`. A page
    is free if no row has it: how many have it is counted in the table, and stands nowhere else.
    """

    key_pages: Any
    value_pages: Any
    table: Int[Array, "b n"] = int32_field("table")
    length: Int[Array, " b"] = int32_field("length")

    shares_rows: ClassVar[bool] = True

    @property
    def positions(self) -> Int[Array, "b s"] | None:
        return None

    def __init__(
        self,
        key_pages: Float[Array | Quantized | Bits, "p n k d"],
        value_pages: Float[Array | Quantized | Bits, "p n k v"],
        table: Int[Array, "b parts"],
        length: Int[Array, " b"],
    ):
        self.key_pages, self.value_pages = key_pages, value_pages
        self.table, self.length = table, length

    @classmethod
    def empty(
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
    ) -> "PagedKVCache":
        """Makes a cache without tokens, whose pages are all free.

        **Arguments:**

        - `batch`: how many rows there are.
        - `capacity`: the largest number of tokens of a row.
        - `pages`: how many pages the pool has.
        - `page_size`: how many tokens a page has.
        - `kv_heads`, `head_dim`, `value_dim`: the number of key heads, and the sizes of a key and
            of a value. The default of `value_dim` is `head_dim`.
        - `dtype`: the dtype of keys and values when they are read.
        - `stored`: int8 or a float8 dtype to quantize to, or None.
        - `head_shares`: how many devices share the heads of quantized pages.
        - `bits`: whether pages that are not quantized are [`eqattn.cache.Bits`][]; None as for
            `KVCache.empty`.
        """
        sizes = dict(batch=batch, capacity=capacity, pages=pages, page_size=page_size)
        sizes |= dict(kv_heads=kv_heads, head_shares=head_shares)
        dims = checked_dims(dtype, head_dim, value_dim, **sizes)
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1 token, got {page_size}.")
        if bits and stored is not None:
            raise ValueError(
                f"bits=True keeps numbers of {jnp.dtype(dtype)} as they are and stored="
                f"{jnp.dtype(stored)} quantizes them: give one of the two."
            )

        def pool(dim):
            shape = (pages, page_size, kv_heads, dim)
            if stored is None:
                return empty_store(shape, dtype, bits)
            return Quantized.zeros(shape, stored, dtype, head_shares)

        table = jnp.full((batch, -(-capacity // page_size)), -1, jnp.int32)
        key_pages, value_pages = map(pool, dims)
        return PagedKVCache(key_pages, value_pages, table, jnp.zeros(batch, jnp.int32))

    @property
    def page_size(self) -> int:
        """How many tokens a page has."""
        return as_stored(self.key_pages).shape[1]

    @property
    def key(self) -> Pages:
        return Pages(self.key_pages, _pages_of(self.table))

    @property
    def value(self) -> Pages:
        return Pages(self.value_pages, _pages_of(self.table))

    def append(
        self,
        key: Float[Array, "b t k d"],
        value: Float[Array, "b t k v"],
        counts: Int[Array, " b"] | None = None,
    ) -> "PagedKVCache":
        counts = check_new(self, key, value, counts)
        (rows, parts), size = self.table.shape, self.page_size
        length = self.length + counts
        length = within_capacity(length, parts * size)
        position = new_positions(self, key.shape[1])
        kept = position < length[:, None]
        row = jnp.arange(rows, dtype=jnp.int32)[:, None]
        page = self.table[row, jnp.minimum(position // size, parts - 1)]
        missing = (
            "a row has no page for its new tokens, or not alone; call cache.reserve(counts) before "
            "the step"
        )
        page = eqx.error_if(page, kept & (page < 0), missing)
        held = as_stored(self.key_pages).shape[0]
        # Tokens that are not kept go to a page that is not in the pool, so nothing is written.
        # Several may go to the same place there, hence `unique=False`.
        page = jnp.where(kept, page, held)
        keys, values = (
            store(pool, new, page, position % size, unique=False)
            for pool, new in ((self.key_pages, key), (self.value_pages, value))
        )
        return PagedKVCache(keys, values, self.table, length)

    def truncate(self, lengths: Int[Array, " b"]) -> "PagedKVCache":
        """Returns the cache with only the first `lengths` tokens of each row. A row keeps the pages
        that it no longer needs; they stay reserved for it.
        """
        return eqx.tree_at(lambda c: c.length, self, check_lengths(lengths, self.length))

    def reorder(self, rows: Int[Array, " n"]) -> "PagedKVCache":
        """Returns the cache with the rows at these indices. Rows that occur twice share their
        pages. The pages of rows that are left out are free again.
        """
        rows = check_rows(self, rows)
        doubled = (jnp.bincount(rows, length=len(self.length)) > 1)[rows]
        table = self.table[rows]
        table = jnp.where(doubled[:, None] & (table >= 0), -2 - table, table)
        return PagedKVCache(self.key_pages, self.value_pages, table, self.length[rows])

    def reserve(self, counts: Any, donate: bool = False) -> "PagedKVCache":
        """Returns the cache with pages for `counts` more tokens of each row: an int, or integers
        `[b]`. A row that is going to write to a page that others have, too, gets a copy of it.

        `donate` says that pages are copied within the memory of this cache, which cannot be used
        afterwards. Otherwise the first copy is one of all pages. Where rows share whole pages only,
        there is nothing to copy.

        **Raises:** `ValueError` if the pool has too few free pages, or a row would outgrow its
        capacity; no page is taken then.
        """
        _check_outside(self, "reserve", counts)
        table, length = np.array(self.table), np.asarray(self.length)
        counts, size = np.asarray(as_int32(counts, "counts")), self.page_size
        if counts.shape not in ((), length.shape) or (counts < 0).any():
            raise ValueError(
                f"counts must be an int or integers {length.shape}, at least 0, got "
                f"{counts.tolist()}."
            )
        wanted, held = -(-(length + counts) // size), as_stored(self.key_pages).shape[0]
        if (wanted > table.shape[1]).any():
            raise ValueError(
                f"A row would have {int((length + counts).max())} tokens; this cache was made for "
                f"{table.shape[1] * size} a row."
            )
        part = np.arange(table.shape[1])
        empty = (part < wanted[:, None]) & (table == -1)
        written = (part >= (length // size)[:, None]) & (part < wanted[:, None])
        written &= np.broadcast_to(counts > 0, length.shape)[:, None]
        users = np.bincount(_pages_of(table)[table != -1], minlength=held)
        free, copied = np.flatnonzero(users == 0), np.zeros(table.shape, bool)
        for at in zip(*np.nonzero(written & (table < -1))):
            page = -2 - table[at]
            copied[at] = users[page] > 1  # The last row that has a page keeps it.
            users[page] -= copied[at]
            table[at] = page
        if (n := np.count_nonzero(empty | copied)) > len(free):
            raise ValueError(
                f"{n} pages of {size} tokens are needed and {len(free)} of {held} are free; "
                "release rows that have ended."
            )
        old = table.copy()
        table[empty | copied] = free[:n]
        # Of a page that is written from its first token on, nothing is kept.
        kept = copied & (part == length[:, None] // size) & (length[:, None] % size > 0)
        keys, values = self.key_pages, self.value_pages
        if kept.any():
            where = np.full((2, len(length)), held, np.int32)  # Those out of range are left out.
            row, column = np.nonzero(kept)
            where[:, : len(row)] = old[row, column], table[row, column]
            copy = _copy_donated if as_flag(donate, "donate") else _copy
            keys, values = copy((keys, values), *map(jnp.asarray, where))
        return PagedKVCache(keys, values, jnp.asarray(table), self.length)

    def share(self, rows: Any, from_row: int, tokens: int) -> "PagedKVCache":
        """Returns the cache in which `rows` begin with the first `tokens` of another row. They have
        the same pages: nothing is copied until `reserve` prepares one of them, or `from_row`, to
        write to a page that is not its own. Rows may be released in any order.

        **Arguments:**

        - `rows`: the row that begins so, or the rows, `[n]`. They must be empty.
        - `from_row`: the row that has the tokens.
        - `tokens`: how many, at least 1.

        **Raises:** `ValueError` if a row is absent, not empty or named twice, or if `from_row` has
        fewer tokens.
        """
        _check_outside(self, "share", rows)
        rows = np.atleast_1d(np.asarray(as_int32(rows, "rows")))
        table, length = np.array(self.table), np.array(self.length)
        from_row, tokens = as_size(from_row, "from_row"), as_size(tokens, "tokens", 1)
        named = [*rows.tolist(), from_row]
        if rows.ndim != 1 or min(named) < 0 or max(named) >= len(length):
            raise ValueError(
                f"rows and from_row must be among the {len(length)} rows, from 0 on, got "
                f"{rows.tolist()} and {from_row}."
            )
        if len(set(named)) < len(named):
            raise ValueError(f"A row is named twice: rows {rows.tolist()}, from_row {from_row}.")
        if (taken := rows[(length[rows] > 0) | (table[rows] != -1).any(1)]).size:
            raise ValueError(
                f"Rows {taken.tolist()} have tokens or pages of their own; release them first."
            )
        if tokens > length[from_row]:
            raise ValueError(f"Row {from_row} has {length[from_row]} tokens, not {tokens}.")
        parts = -(-tokens // self.page_size)
        table[from_row, :parts] = -2 - _pages_of(table[from_row, :parts])
        table[rows, :parts], length[rows] = table[from_row, :parts], tokens
        return PagedKVCache(
            self.key_pages, self.value_pages, jnp.asarray(table), jnp.asarray(length)
        )

    def release(self, rows: Any) -> "PagedKVCache":
        """Returns the cache without the tokens and pages of some rows. `rows` is an array of their
        indices, or a boolean mask `[b]`.
        """
        rows = as_array(rows, "rows")
        if rows.dtype != bool:
            rows = check_rows(self, rows)
        elif rows.shape != self.length.shape:
            raise ValueError(f"A mask of rows must be {self.length.shape}, got {rows.shape}.")
        table, length = self.table.at[rows].set(-1), self.length.at[rows].set(0)
        return eqx.tree_at(lambda c: (c.table, c.length), self, (table, length))


def _pages_of(table: Any) -> Any:
    """The pages of a table's entries, of those that rows share, too. -1 stays -1."""
    xp = np if isinstance(table, np.ndarray) else jnp
    return xp.where(table < -1, -2 - table, table)


def _check_outside(cache: PagedKVCache, name: str, given: Any) -> None:
    """**Raises:** `ValueError` if the table or what is given is traced."""
    traced = isinstance(given, jax.Array) and concrete(given) is None
    if traced or concrete(cache.table) is None or concrete(cache.length) is None:
        raise ValueError(f"{name} runs between steps, outside of jax.jit.")


def _copy_pages(pools: Any, old: Array, new: Array) -> Any:
    """The pools with the pages `old` copied to the pages `new`, but for those out of range."""
    return jax.tree.map(
        lambda x: x.at[new].set(jnp.take(x, old, axis=0, mode="clip"), mode="drop"), pools
    )


_copy = jax.jit(_copy_pages)
_copy_donated = jax.jit(_copy_pages, donate_argnums=0)
