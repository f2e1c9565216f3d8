"""The scores by which a call of attention finds its statistics."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._pairs import Operand
from ..scores._base import AbstractScore
from ..scores._wrapper import AbstractWrapper


class Logit(AbstractScore):
    """The logit itself."""

    finite_when_masked: ClassVar[bool] = True

    def transform(self, logit: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return logit


class Distance(AbstractScore):
    """How far apart the query and the key of a pair are."""

    finite_when_masked: ClassVar[bool] = True

    def transform(self, logit: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return abs(q - k).astype(logit.dtype)


def _of_visible(score: AbstractScore, logit: Any, *rest: Any) -> Any:
    """What a user's function returns for a pair. It is 0 for a pair that weighs nothing, as the
    function need not be finite there.
    """
    hidden = logit == -jnp.inf
    found = score.transform(jnp.where(hidden, 0, logit), *rest)
    return jnp.where(hidden, jnp.zeros_like(found), found)


class Factor(AbstractScore):
    """A function of the pair, which is a score, as the factor on the probability."""

    score: AbstractScore

    weighs: ClassVar[bool] = True

    def operands(self) -> tuple[Operand, ...]:
        return self.score.operands()

    def transform(self, logit: Any, b: Any, h: Any, q: Any, k: Any, *operands: Any) -> Any:
        return _of_visible(self.score, logit, b, h, q, k, *operands)


@jax.custom_jvp
def _at_zero(logit: Any, x: Any) -> Any:
    """`logit + x` where `x` is 0, which is not read, and has its derivatives."""
    del x
    return logit


@_at_zero.defjvp
def _at_zero_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return _at_zero(*primals), tangents[0] + tangents[1]


class KeyBias(AbstractScore):
    """A bias of each key `[*b, h, 1, s]`, which is 0."""

    bias: Float[Array, "..."]

    finite_when_masked: ClassVar[bool] = True

    def operands(self) -> tuple[Operand, ...]:
        return (Operand(self.bias, "bhts"),)

    def transform(self, logit: Any, b: Any, h: Any, q: Any, k: Any, *operands: Any) -> Any:
        return _at_zero(logit, operands[0].astype(logit.dtype))


class Surprise(AbstractScore):
    """How much the key of a pair surprises, `-log p` for a known logsumexp of each row."""

    known: Float[Array, "..."]

    finite_when_masked: ClassVar[bool] = True

    def operands(self) -> tuple[Operand, ...]:
        return (Operand(jnp.swapaxes(self.known, -1, -2), "bht"),)

    def transform(self, logit: Any, b: Any, h: Any, q: Any, k: Any, *operands: Any) -> Any:
        return operands[0] - logit


class Known(AbstractScore):
    """The logit itself, of rows whose logsumexp is known."""

    known: Float[Array, "..."]

    finite_when_masked: ClassVar[bool] = True
    recalls: ClassVar[bool] = True

    def operands(self) -> tuple[Operand, ...]:
        return (Operand(jnp.swapaxes(self.known, -1, -2), "bht"),)

    def transform(self, logit: Any, b: Any, h: Any, q: Any, k: Any, *operands: Any) -> Any:
        return logit


class Moved(AbstractWrapper):
    """The logit, moved by `amount` times a function of the pair, which is a score."""

    score: AbstractScore
    amount: Float[Array, ""]

    def operands(self) -> tuple[Operand, ...]:
        return (*self.score.operands(), Operand(self.amount, ""))

    def transform(self, logit: Any, b: Any, h: Any, q: Any, k: Any, *operands: Any) -> Any:
        *own, amount = operands
        return logit + amount.astype(logit.dtype) * _of_visible(self.score, logit, b, h, q, k, *own)
