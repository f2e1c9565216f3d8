"""The soft cap, which keeps logits within bounds."""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._misc import as_array, as_constant, check_cap, check_floating, with_constants
from .._pairs import Operand
from ._base import AbstractScore


@with_constants("cap")
class SoftCap(AbstractScore):
    """`cap * tanh(logit / cap)`, as in Gemma 2 (arXiv:2408.00118).

    **Arguments:**

    - `cap`: a positive number, which is a constant, or a scalar array, which is learned. The sign
        of an array does not matter, but it must not be 0.
    """

    cap: Any = eqx.field(converter=as_constant)

    finite_when_masked: ClassVar[bool] = True

    def __check_init__(self) -> None:
        if isinstance(self.cap, bool) or not isinstance(self.cap, int | float):
            check_floating(cap=as_array(self.cap, "cap"))
        check_cap(self.cap, "cap")

    def operands(self) -> tuple[Operand, ...]:
        return (Operand(jnp.asarray(self.cap), ""),)

    def transform(
        self, logit: Float[Array, ""], b: Any, h: Any, q: Any, k: Any, cap: Any
    ) -> Float[Array, ""]:
        cap = cap.astype(logit.dtype)
        return cap * jnp.tanh(logit / cap)
