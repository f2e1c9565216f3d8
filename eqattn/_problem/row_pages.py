"""Keys and values of rows as pages, for blocks of packed queries. Blocks of one row share its
pages, so nothing is copied for them.

Where `n` devices share the keys, each of them has one piece of a row. Pages are dealt out in turn:
the page `j` of device `i` is the part `j n + i` of the row. So the positions of keys are passed
along with them.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._misc import even_block, iota, REACH
from .stack_layer import in_pages
from .storage import as_stored, Pages


class Sharers(NamedTuple):
    """The devices that share the keys of each row.

    **Arguments:**

    - `axis`: the mesh axis that shards them; None if one device has all keys.
    - `devices`: how many devices it has.
    - `inside`: whether it is manual already, so that arrays hold the keys of this device.
    """

    axis: str | None = None
    devices: int = 1
    inside: bool = False

    def keys(self, s: int) -> int:
        """How many keys a row has in all, if the array at hand has `s`."""
        return s * self.devices if self.inside else s

    def pieces(self, a: Array, fill: Any = 0, multiple: int = 1) -> Array:
        """Cuts `[b, s, ...]` into one piece for each device whose keys it holds,
        `[b, pieces, s / pieces, ...]`. Each piece is padded at its end to a `multiple`.
        """
        n = 1 if self.inside else self.devices
        b, s = a.shape[:2]
        a = a.reshape(b, n, s // n, *a.shape[2:])
        widths = [(0, 0)] * a.ndim
        widths[2] = (0, -(s // n) % multiple)
        return jnp.pad(a, widths, constant_values=fill) if widths[2][1] else a


def pages_of_rows(x: Any, row: Array, size: int | None, sharers: Sharers) -> Pages:
    """Keys or values `[b, s, k, d]` as pages of the row of each block.

    **Arguments:**

    - `x`: an array, or the form in which keys are stored.
    - `row`: the row of each block, int32 `[blocks]`.
    - `size`: how many tokens a page has, also where there are fewer; None chooses.
    - `sharers`: the devices that share the keys.

    **Raises:** `ValueError` if the keys are not equal pieces for the devices.
    """
    x = in_pages(x)
    if isinstance(x, Pages):
        return x.rows(row)
    b, s = x.shape[:2]
    if sharers.keys(s) % sharers.devices:
        raise ValueError(
            f"key_ and value {x.shape} [b, s, heads, dim] have {s} keys, which are not equal "
            f"pieces for the {sharers.devices} devices of axis {sharers.axis!r}: pad them, or make "
            f"the capacity of the cache a multiple of {sharers.devices}."
        )
    own = sharers.keys(s) // sharers.devices
    if size is None:
        # A size from 64 to 256 that divides the row needs no padding, hence no copy. If there is
        # none, the row is padded to blocks of 128, which was chosen by trial within that range. No
        # benchmark covers padded rows; `bench --only 'cpu-decode-*'` shows those without padding.
        size = max(min(even_block(own) or 128, own), 1)
    parts = -(-own // size)

    def paged(a: Array) -> Array:
        pieces = sharers.pieces(a, multiple=size)
        # A device's share of the pool is the pages of all rows that it has.
        pool = pieces.swapaxes(0, 1) if pieces.shape[1] > 1 else pieces
        return pool.reshape(b * pieces.shape[1] * parts, size, *a.shape[2:])

    part, device = np.divmod(np.arange(parts * sharers.devices, dtype=np.int32), sharers.devices)
    table = row[:, None] * parts + (device * (b * parts) + part)[None]
    return Pages(as_stored(x).map_tokens(paged), table, sharers.devices)


def positions_of_pages(at: Any, x: Any, pages: Pages, row: Array, sharers: Sharers) -> Any:
    """The positions of the tokens of pages, `[blocks, tokens]`; None means `0, 1, ...`

    **Arguments:**

    - `at`: the positions of the keys `x` `[b, s, k, d]`, int32 `[1|b, s]`, or None.
    - `pages`: what `pages_of_rows` made of the keys.
    - `row`, `sharers`: as for `pages_of_rows`.
    """
    if at is None and (sharers.devices == 1 or isinstance(x, Pages)):
        return None
    if at is None:
        at = iota(sharers.keys(x.shape[1]))[None]
    elif sharers.inside and not isinstance(x, Pages):
        at = lax.all_gather(at, sharers.axis, axis=1, tiled=True)
    at = jnp.asarray(at)
    if not isinstance(x, Pages):
        # Devices have their pages in turn, and padding is at positions that no mask shows.
        whole = sharers._replace(inside=False)
        at = whole.pieces(at, -REACH, pages.page_size)
        rows, devices, tokens = at.shape
        at = at.reshape(rows, devices, tokens // pages.page_size, pages.page_size)
        at = at.swapaxes(1, 2).reshape(rows, devices * tokens)
    return at if len(at) == 1 else at[row]
