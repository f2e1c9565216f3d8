"""Which row has which page of a pool: pages are handed out, shared and copied between steps.

A table `[b, n]` holds for each part of a row

- `page`, if no other row has that page,
- `-2 - page`, if other rows may have it, so that it is not written to,
- `-1`, if the part has no page.

A page is free if no row has it. The table alone says how many rows have it, so rows may leave in
any order.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._misc import as_int32, as_size, concrete
from ._base import rows_as_array, sharded_alike


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


def reserved(
    table: Any, length: Any, counts: Any, page_size: int, pages: int, devices: int
) -> tuple[np.ndarray, Any]:
    """A table with pages for `counts` more tokens of each row, none of which others will write to.

    **Arguments:**

    - `length`: how many tokens each row has, `[b]`, or it has in each layer, `[layers, b]`.
    - `pages`, `page_size`: how many pages the pool has, and how many tokens a page has.
    - `devices`: the number of equal runs of pages. Part `j` of a row gets a page of the run
        `j % devices`.

    **Returns:** the table, and the pages to copy: None, or the old and the new ones, int32
    `[2, n]`. Where these are `pages`, there is nothing to copy.

    **Raises:** `ValueError` as `PagedKVCache.reserve` does.
    """
    table, length = _known("reserve", counts, table, length)
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


def shared(
    table: Any, length: Any, rows: Any, from_row: int, tokens: int, page_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """A table in which `rows` begin with the first `tokens` of another row, and these rows.

    **Raises:** `ValueError` as `PagedKVCache.share` does.
    """
    table, length = _known("share", rows, table, length)
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
            f"A row is named twice, rows {rows.tolist()} and from_row {from_row}: name each once."
        )
    if (taken := rows[(length[rows] > 0) | (table[rows] != -1).any(1)]).size:
        raise ValueError(
            f"Rows {taken.tolist()} have tokens or pages of their own; release them first."
        )
    if tokens > length[from_row]:
        raise ValueError(
            f"Row {from_row} has {length[from_row]} tokens, not {tokens}: share fewer of them, or "
            "append the prefix to it first."
        )
    parts = -(-tokens // page_size)
    table[from_row, :parts] = -2 - pages_of(table[from_row, :parts])
    table[rows, :parts] = table[from_row, :parts]
    return table, rows


@jax.jit
def doubled(table: Array, rows: Array) -> Array:
    """The table of the rows at these indices. Rows that occur twice share their pages."""
    many = (jnp.bincount(rows, length=len(table)) > 1)[rows]
    table = table[rows]
    return jnp.where(many[:, None] & (table >= 0), -2 - table, table)


def with_doubled(table: Array, length: Array, rows: Array) -> tuple[Array, Array]:
    """The table and the lengths `[b]` of the rows at these indices, see `doubled`."""
    pick = lambda of, rows: (doubled(of[0], rows), of[1][rows])
    return sharded_alike(pick, (table, length), rows, rows_stay=len(rows) == len(length))


def _copy_pages(pools: Any, old: Array, new: Array) -> Any:
    """The pools with the pages `old` copied to the pages `new`. Pages that are out of range are not
    copied.
    """
    copied = lambda x, old, new: x.at[new].set(jnp.take(x, old, 0, mode="clip"), mode="drop")
    over = lambda pools, *pages: jax.tree.map(lambda x: copied(x, *pages), pools)
    return sharded_alike(over, pools, old, new)


copy_pages = jax.jit(_copy_pages)
copy_pages_donated = jax.jit(_copy_pages, donate_argnums=0)
