"""Keys and values that are not one array: in fewer bits, or in pages."""

import abc
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped


class AbstractStored(eqx.Module):
    """Keys or values `[b, s, k, d]` as they are stored.

    [`eqattn.Ragged`][] takes them for key or value and reads the blocks that it needs;
    `materialise()` makes an array for other strategies.
    """

    @property
    @abc.abstractmethod
    def arrays(self) -> tuple[Shaped[Array, "..."], ...]:
        """`[b, s, k, ...]`, or with a table the pages `[pages, page size, k, ...]`."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """`(b, s, k, d)`."""

    @property
    @abc.abstractmethod
    def dtype(self) -> Any:
        """What the stored numbers stand for."""

    @abc.abstractmethod
    def decode(self, *arrays: Shaped[Array, "..."]) -> Float[Array, "..."]:
        """Numbers from any part of the arrays."""

    @property
    def table(self) -> Int[Array, "b n"] | None:
        """The page `[b, s / page size]` that each part of a row lies in."""
        return None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def materialise(self) -> Float[Array, "b s k d"]:
        """As one array `[b, s, k, d]`."""
        arrays = self.arrays
        if self.table is not None:
            arrays = [x[self.table] for x in arrays]
            arrays = [x.reshape(len(x), -1, *x.shape[3:]) for x in arrays]
        return self.decode(*arrays).astype(self.dtype)


class Stored(AbstractStored):
    """One array."""

    array: Array

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


class Quantized(AbstractStored):
    """Numbers of few bits, each vector times a scale of its own.

    **Arguments:**

    - `values`: int8 or a float8 dtype, `[..., s, k, d]`.
    - `scales`: float32 `[..., s, k]`.
    - `dtype`: what `materialise` returns, and what a query must have.
    """

    values: Shaped[Array, "*b d"]
    scales: Float[Array, " *b"]
    _dtype: Any = eqx.field(static=True, converter=jnp.dtype)

    @classmethod
    def quantize(cls, x: Float[Array, "*b d"], dtype: Any = jnp.int8) -> "Quantized":
        """Rounds vectors `[..., d]` so that the largest entry of each is the largest number of
        `dtype`.
        """
        wide = x.astype(jnp.float32)
        most = float((jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).max)
        scales = jnp.abs(wide).max(-1) / most
        values = wide / jnp.where(scales == 0, 1, scales)[..., None]
        if jnp.issubdtype(dtype, jnp.integer):
            values = jnp.round(values)
        return cls(values.astype(dtype), scales, x.dtype)

    @property
    def arrays(self) -> tuple[Shaped[Array, "..."], ...]:
        return self.values, self.scales

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> Any:
        return self._dtype

    def decode(self, *arrays: Shaped[Array, "..."]) -> Float[Array, "..."]:
        values, scales = arrays
        return values.astype(scales.dtype) * scales[..., None]


class Pages(AbstractStored):
    """Keys or values in pages that any row may use.

    **Arguments:**

    - `content`: `[pages, page size, k, d]`, an array or [`eqattn.cache.Quantized`][].
    - `table`: int32 `[b, n]`: the page of each part of a row. Entries for parts that a mask hides
        may be any page; those below 0 are read as page 0.
    """

    content: Any
    _table: Int[Array, "b n"]

    @property
    def stored(self) -> AbstractStored:
        return as_stored(self.content)

    @property
    def page_size(self) -> int:
        return self.stored.shape[1]

    @property
    def arrays(self) -> tuple[Shaped[Array, "..."], ...]:
        return self.stored.arrays

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self._table), self._table.shape[1] * self.page_size, *self.stored.shape[2:])

    @property
    def dtype(self) -> Any:
        return self.stored.dtype

    @property
    def table(self) -> Int[Array, "b n"]:
        return jnp.clip(self._table, 0, self.stored.shape[0] - 1).astype(jnp.int32)

    def decode(self, *arrays: Shaped[Array, "..."]) -> Float[Array, "..."]:
        return self.stored.decode(*arrays)


def even_block(tokens: int, most: int = 256) -> int | None:
    """The largest size from `most` down to 64 that divides so many tokens, or None."""
    return next((n for n in range(most, 63, -1) if tokens % n == 0), None)


def as_stored(x: Any) -> AbstractStored:
    return x if isinstance(x, AbstractStored) else Stored(x)
