"""Keys whose first features are the values, as in multi-head latent attention."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from .._misc import accumulation_dtype
from .storage import AbstractStored, as_stored


class Joined(AbstractStored):
    """Vectors whose features lie in two places, one part after the other.

    Where a call has such keys and, for values, their `first` part, `Ragged` reads that part once:

        attention(query, keys, keys.first, Ragged())

    **Arguments:**

    - `first`: the first features, `[..., s, k, v]`.
    - `rest`: the other features, `[..., s, k, d - v]`. Both are arrays,
        [`eqattn.cache.Quantized`][] or [`eqattn.cache.Bits`][]. Inside of
        [`eqattn.cache.Pages`][] they are those of the pages.
    """

    _first: AbstractStored
    rest: AbstractStored

    def __init__(self, first: Any, rest: Any):
        self._first, self.rest = as_stored(first), as_stored(rest)

    def __check_init__(self) -> None:
        # JAX and Equinox also build modules whose leaves are no arrays.
        if not all(hasattr(x, "shape") for x in jax.tree.leaves((self._first, self.rest))):
            return
        first, rest = self._first, self.rest
        if first.shape[:-1] != rest.shape[:-1] or first.dtype != rest.dtype:
            raise ValueError(
                f"The first features {first.shape} of {first.dtype} and the rest {rest.shape} of "
                f"{rest.dtype} must be of the same tokens, heads and dtype."
            )
        if first.table is not None or rest.table is not None:
            raise ValueError(
                "Pages are joined inside: Pages(Joined(first.content, rest.content), table)."
            )

    @property
    def first(self) -> AbstractStored:
        return self._first

    @property
    def parts(self) -> tuple[AbstractStored, AbstractStored]:
        """Both parts, in their order."""
        return self._first, self.rest

    @property
    def arrays(self) -> tuple[Shaped[Array, "..."], ...]:
        return *self._first.arrays, *self.rest.arrays

    @property
    def flat(self) -> tuple[bool, ...]:
        return *self._first.flat, *self.rest.flat

    def in_shares(self, n: int) -> AbstractStored:
        return Joined(*[x.in_shares(n) for x in self.parts])

    def map_tokens(self, fn: Callable[[Array], Array]) -> AbstractStored:
        return Joined(*[x.map_tokens(fn) for x in self.parts])

    @property
    def shape(self) -> tuple[int, ...]:
        return *self._first.shape[:-1], self._first.shape[-1] + self.rest.shape[-1]

    @property
    def dtype(self) -> Any:
        return self._first.dtype

    def decode(self, *arrays: Shaped[Array, "..."]) -> Float[Array, "..."]:
        n = len(self._first.arrays)
        made = self._first.decode(*arrays[:n]), self.rest.decode(*arrays[n:])
        if (
            made[0].dtype != made[1].dtype
        ):  # One of them may be quantized, and is then decoded wide.
            made = [x.astype(accumulation_dtype(self.dtype)) for x in made]
        return jnp.concatenate(made, -1)


class Leading(AbstractStored):
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


def read_once(key: Any, value: Any) -> Any:
    """The values, or `Leading` if they are the first part of the keys: the same arrays, not merely
    equal ones.
    """
    first = key.first if isinstance(key, AbstractStored) else None
    if first is None:
        return value
    mine, theirs = (jax.tree.leaves(x) for x in (first, as_stored(value)))
    same = len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs))
    return Leading(first.shape, first.dtype) if same else value
