"""How caches write new tokens into their arrays."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._problem.storage import AbstractStored, with_arrays


def write(held: Any, new: Array, slots: Array, *first: Any) -> Any:
    """Writes `held[*first, b, slots[b, t]] = new[b, t]` for all `b` and `t`. Slots that are out of
    range are left out. `held` is an array, or what `store` takes.
    """
    return store(held, new, (*first, OWN_ROW), slots)


OWN_ROW = 0
"""Says to `put` that a row is written to the row of the same number."""


def scatter(held: Array, new: Array, at: tuple, slots: Array, unique: bool = True) -> Array:
    """Writes `held[*at, slots] = new` for `slots` `[b, t]`, as `put` does.

    A scatter of a single token needs care on a CPU. XLA:CPU turns it into an update of a slice,
    which it fuses into each reader of the array. Each reader then copies the whole array. So a
    second token is added, which is out of range: it writes nothing, but the operation stays a
    scatter. The array itself is not reshaped. For a new axis of size 1, XLA:CPU may choose a layout
    that forces a copy of the whole. `python tests/measure bench --only 'cpu-decode-cache-*'` shows
    such copies: a step then takes longer in a cache of 8 times the capacity.
    """
    if slots.size == 1:
        out = jnp.full_like(slots, np.iinfo(np.int32).max)
        new, slots = jnp.concatenate([new, new], 1), jnp.concatenate([slots, out], 1)
    return put(held, new, (*at, slots), unique)


def put(held: Array, new: Array, at: tuple, unique: bool = True) -> Array:
    """Writes `held[at] = new`. Indices that are out of range are left out.

    **Arguments:**

    - `held`: the array.
    - `new`: what is written, whose axes are those of the indices and then the other axes of `held`.
    - `at`: for each of the first axes of `held`, the indices, which broadcast to the first axes of
        `new`; or an `int`, the axis of `new` that has the same indices. Where devices share such an
        axis each writes its own part. With a list of all indices XLA would gather `new` from all of
        them first.
    - `unique`: a promise to XLA that no two indices are equal, those that are left out included.
    """
    count = new.ndim - (held.ndim - len(at))
    shared = tuple(i for i, x in enumerate(at) if isinstance(x, int))
    listed = tuple(i for i, x in enumerate(at) if not isinstance(x, int))
    indices = [jnp.broadcast_to(jnp.asarray(at[i]), new.shape[:count]) for i in listed]
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(count, new.ndim)),
        inserted_window_dims=listed,
        scatter_dims_to_operand_dims=listed,
        operand_batching_dims=shared,
        scatter_indices_batching_dims=tuple(at[i] for i in shared),
    )
    return lax.scatter(
        held,
        jnp.stack(indices, -1),
        new.astype(held.dtype),
        numbers,
        unique_indices=unique,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )


def write_flat(array: Array, new: Array, owner: tuple, slots: Array, unique: bool = True) -> Array:
    """Writes scales `new` `[b, t, k]` into the scales of a `Quantized`. Indices that are out of
    range are left out.

    **Arguments:**

    - `array`: `[*owners, n, s * (k / n)]`, where an owner is a row, a page, or a layer's part of a
        page. The `k` heads are cut into `n` shares, one per device; within a share the heads of a
        token lie side by side:

            array[owner, share] = | token 0: heads of the share | token 1: ... | ... | token s - 1 |

    - `owner`: an index of each axis of owners: the page that each token belongs to, `[b, t]`, the
        layer, or `OWN_ROW`.
    - `slots`: the place of each token within its owner, `[b, t]`.
    - `unique`: a promise to XLA that no two indices are equal, those that are left out included.
    """
    n = array.shape[-2]
    per, t = new.shape[2] // n, new.shape[1]
    new = jnp.moveaxis(new.reshape(new.shape[0], t, n, per), 2, 1)
    at = (slots * per)[:, None, :, None] + jnp.arange(per, dtype=jnp.int32).reshape(1, 1, 1, per)
    pages = (x[:, None, :, None] if jnp.ndim(x) else x for x in owner)
    return put(array, new, (*pages, 1, at), unique)


def store(held: Any, new: Array, owner: tuple, slots: Array, unique: bool = True) -> Any:
    """Writes keys or values `new` `[b, t, k, d]` at `slots` of their `owner`, in the form of
    `held`: an array, or an [`eqattn.cache.AbstractStored`][] with `encode`. The other arguments are
    those of `write_flat`.
    """
    if not isinstance(held, AbstractStored):
        return scatter(held, new, owner, slots, unique)
    kinds = (write_flat if flat else scatter for flat in held.flat)
    parts = zip(kinds, held.arrays, held.encode(new), strict=True)
    return with_arrays(
        held, [write_in(x, part, owner, slots, unique) for write_in, x, part in parts]
    )
