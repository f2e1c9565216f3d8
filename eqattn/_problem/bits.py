"""Floats that are stored as the integers with the same bits."""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt

from .storage import AbstractStored, without_gradient


class Bits(AbstractStored):
    """Floats that are stored as the integers with the same bits.

    XLA:CPU can write a part of an array of integers. To write a part of an array of bfloat16, it
    converts the whole array to float32 and back. So appending to a cache that is kept as bits costs
    as much as is written, not as much as its capacity.

    It stands for an array of the floats: functions of `jax.numpy`, every strategy and an index
    `x[...]` read it as one.

    **Arguments:**

    - `bits`: unsigned integers `[..., s, k, d]`.
    - `dtype`: the dtype of the floats, which has as many bits.
    """

    bits: UInt[Array, "*b s k d"]
    _dtype: Any = eqx.field(static=True, converter=jnp.dtype)

    def __check_init__(self) -> None:
        if self.bits.dtype != _unsigned(self._dtype):
            raise ValueError(
                f"bits of {self._dtype} are {_unsigned(self._dtype)}, got {self.bits.dtype}; "
                "Bits.of(array) makes them."
            )

    def map_tokens(self, fn: Callable[[Array], Array]) -> AbstractStored:
        return Bits(fn(self.bits), self.dtype)

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: Any) -> "Bits":
        """Makes the bits of zeros of a shape."""
        return cls(jnp.zeros(shape, _unsigned(dtype)), dtype)

    @classmethod
    def of(cls, x: Float[Array, "*b s k d"]) -> "Bits":
        """Takes the bits of an array. It has no gradient through them: asking for one raises."""
        x = without_gradient(x, _NO_GRADIENT)
        return cls(lax.bitcast_convert_type(x, _unsigned(x.dtype)), x.dtype)

    @property
    def arrays(self) -> tuple[Shaped[Array, "..."], ...]:
        return (self.bits,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape

    @property
    def dtype(self) -> Any:
        return self._dtype

    def decode(self, *arrays: Shaped[Array, "..."]) -> Float[Array, "..."]:
        return lax.bitcast_convert_type(arrays[0], self._dtype)

    def encode(self, new: Float[Array, "b t k d"]) -> tuple[Shaped[Array, "..."], ...]:
        return (Bits.of(new.astype(self._dtype)).bits,)

    def __jax_array__(self) -> Array:
        return self.decode(self.bits)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.decode(self.bits), dtype, copy=copy)

    def __getitem__(self, index: Any) -> Array:
        return self.decode(self.bits[index])

    def __len__(self) -> int:
        return len(self.bits)

    def __iter__(self) -> Iterator[Array]:
        return iter(self[:])  # JAX clamps an index, so counting up would not end


def _unsigned(dtype: Any) -> Any:
    return jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")


_NO_GRADIENT = (
    "A cache that is kept as bits has no gradient of the keys and values that are appended to it. "
    "Caches of narrow floats are kept so on a CPU: make it with bits=False, or stop their gradient."
)
