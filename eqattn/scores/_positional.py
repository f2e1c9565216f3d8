"""ALiBi, a bias that falls linearly with the distance between two positions.

The relative position bias of T5.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._misc import as_array, as_flag, as_int, as_size, check_floating
from .._pairs import Operand
from ._base import AbstractScore


class ALiBi(AbstractScore):
    """Subtracts `slope * |q - k|` (Press et al., arXiv:2108.12409).

    **Arguments:**

    - `slopes`: `[h]`, one slope per query head. `ALiBi.geometric(heads)` gives the paper's.
    """

    slopes: Float[Array, " h"] = eqx.field(converter=lambda x: as_array(x, "slopes", 1))

    finite_when_masked: ClassVar[bool] = True

    @classmethod
    def geometric(cls, heads: int) -> "ALiBi":
        """Computes the slopes of the paper's code, for any number of heads.

        Of `n` heads, a power of two, head `i = 1, ..., n` has the slope `2^(-8 i / n)`. For another
        number of heads, `n` is the power of two below it. The further heads have every other slope
        of the series for `2 n` heads, `2^(-8 i / (2 n))` for `i = 1, 3, 5, ...`
        """
        heads = as_size(heads, "heads", least=1)
        power = 2 ** int(np.floor(np.log2(heads)))
        slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
        extra = [2.0 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
        return cls(jnp.asarray(slopes + extra, jnp.float32))

    def __check_init__(self) -> None:
        kinds = jnp.floating, jnp.integer
        if not any(jnp.issubdtype(self.slopes.dtype, kind) for kind in kinds):
            raise TypeError(f"slopes must be real numbers, got {self.slopes.dtype}.")

    def operands(self) -> tuple[Operand, ...]:
        return (Operand(self.slopes, "h"),)

    def transform(
        self, logit: Float[Array, ""], b: Any, h: Any, q: Any, k: Any, slope: Any
    ) -> Float[Array, ""]:
        return logit - slope.astype(logit.dtype) * abs(q - k).astype(logit.dtype)


class T5Bias(AbstractScore):
    """Adds a learned bias per head and bucket of relative position (T5, arXiv:1910.10683).

    **Arguments:**

    - `table`: a float array `[buckets, h]`, or `[buckets, 1]` for one bias that all heads share.
    - `bidirectional`: whether keys after the query have separate buckets. The default is True.
    - `max_distance`: the distance from which on all keys share the last bucket, 128 by default.
    """

    table: Float[Array, "buckets h"] = eqx.field(converter=lambda x: as_array(x, "table"))
    bidirectional: bool = eqx.field(static=True, default=True)
    max_distance: int = eqx.field(static=True, default=128)

    finite_when_masked: ClassVar[bool] = True
    may_lack_kernels: ClassVar[bool] = True

    def __check_init__(self) -> None:
        as_flag(self.bidirectional, "bidirectional")
        shape, least = self.table.shape, 4 if self.bidirectional else 2
        check_floating(table=self.table)
        as_int(self.max_distance, "max_distance", least=1, static=True)
        if len(shape) != 2:
            raise ValueError(f"table must be [buckets, h], got shape {shape}.")
        if shape[0] < least:
            raise ValueError(
                f"table must have at least {least} buckets if bidirectional is "
                f"{self.bidirectional}, got shape {shape}."
            )
        exact = shape[0] // least
        if self.max_distance <= exact:
            raise ValueError(
                f"max_distance must be more than {exact}, the distances that have a bucket of "
                f"their own in a table of shape {shape}; got {self.max_distance}."
            )

    def operands(self) -> tuple[Operand, ...]:
        return (Operand(np.arange(self.table.shape[1], dtype=np.int32), "h"),)

    @property
    def operand_name(self) -> str:
        return f"T5Bias with a table of shape {self.table.shape}: its heads,"

    def bucket(self, q: int | Int[Array, "..."], k: int | Int[Array, "..."]) -> Int[Array, "..."]:
        """Computes the bucket of each pair of positions.

        Of `n` buckets (half of the table's on each side, if it is bidirectional), the first
        `n // 2` each hold one distance. The others share the distances up to `max_distance` on a
        logarithmic scale. With `e = n // 2`, a distance `d >= e` is in the bucket
        `e + floor(log(d / e) / log(max_distance / e) * (n - e))`. Distances beyond are in the last
        bucket.
        """
        buckets = self.table.shape[0]
        distance = jnp.asarray(q - k)
        offset = jnp.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            offset = jnp.where(distance < 0, buckets, 0).astype(distance.dtype)
            distance = abs(distance)
        else:
            distance = jnp.maximum(distance, 0)
        exact = buckets // 2
        ratio = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact)
        ratio = ratio / float(np.log(self.max_distance / exact))
        far = exact + (ratio * (buckets - exact)).astype(distance.dtype)
        near = jnp.where(distance < exact, distance, jnp.minimum(far, buckets - 1))
        return offset + near

    def transform(
        self, logit: Float[Array, ""], b: Any, h: Any, q: Any, k: Any, column: Any
    ) -> Float[Array, ""]:
        return logit + self.table.astype(logit.dtype)[self.bucket(q, k), column]
