"""An array that is added to the logits."""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._misc import as_array
from .._pairs import Operand
from ._base import AbstractScore


class Bias(AbstractScore):
    """Adds an array to the logits.

    **Arguments:**

    - `bias`: a float array that broadcasts to `[*b, h, t, s]`.
    """

    bias: Float[Array, "..."] = eqx.field(converter=lambda x: as_array(x, "bias"))

    finite_when_masked: ClassVar[bool] = True
    operand_name: ClassVar[str] = "bias"

    def __check_init__(self) -> None:
        if not jnp.issubdtype(self.bias.dtype, jnp.floating):
            raise TypeError(
                f"bias must be floating point, got {self.bias.dtype}; cast it, or give a mask of "
                "ones and zeros as mask=(x > 0)."
            )

    def operands(self) -> tuple[Operand, ...]:
        axes = "bhts"[4 - min(self.bias.ndim, 4) :]
        return (Operand(self.bias, axes),)

    def transform(
        self, logit: Float[Array, ""], b: Any, h: Any, q: Any, k: Any, bias: Any
    ) -> Float[Array, ""]:
        return logit + bias.astype(logit.dtype)


def as_bias(bias: Any) -> Bias:
    """The score that adds the argument `bias` of a call."""
    if isinstance(bias, AbstractScore):
        raise TypeError("bias must be an array; pass score modules as `score`.")
    return Bias(jnp.asarray(as_array(bias, "bias")))
