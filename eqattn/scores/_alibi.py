"""ALiBi, a bias that falls linearly with the distance between two positions."""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._misc import as_array, as_size
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
