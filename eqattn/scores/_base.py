"""The base class of scores.

A score transforms one scalar logit, given the indices of its pair. The order is fixed:
`scale * (q . k)`, then the soft cap, the bias, the scores that the caller passes, and the mask.

Scores that are made of another one.

The soft cap, which keeps logits within bounds.

An array that is added to the logits.
"""

import abc
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._misc import (
    as_array,
    as_constant,
    check_cap,
    check_floating,
    with_constants,
    without_defaults,
)
from .._pairs import Operand


class AbstractScore(eqx.Module):
    """A function from one logit to another.

    Subclasses define `transform`, for scalars, with `jax.numpy` operations. Parameters that are
    the same for all pairs may be read from `self` (they are differentiable); arrays that vary with
    batch, head, query or key are listed by `operands` and arrive as scalars, those with features as
    vectors.

    A score may be singular at pairs that are masked, like `log(q - k)` under a mask `k < q`: its
    derivatives are then evaluated at visible pairs only. A score whose value and derivatives are
    finite wherever its logit is may set `finite_when_masked = True`, so that its gradients cost a
    little less.
    """

    __pdoc__ = without_defaults

    finite_when_masked: ClassVar[bool] = False
    tried_in_kernels: ClassVar[bool] = True
    """Whether the compilers of kernels were tried with `transform`. `ScoreFn` says no, as they do
    not know every operation that a user's function may hold. Of it, and of subclasses of yours,
    kernels take only operations that are known to work.
    """
    may_lack_kernels: ClassVar[bool] = False
    """Whether some kernels lack an operation of `transform`. That is looked up in each call then,
    and in those with a subclass of yours, where kernels are chosen by default.
    """
    weighs: ClassVar[bool] = False
    """Whether `transform` gives the factor on the probability of a pair in the numerator, instead
    of a logit. One of the scores of a call may do so, the last one.
    """
    recalls: ClassVar[bool] = False
    """Whether its only operand `"bth"` is the logsumexp of each row. A fold need not compute it
    then. `transform` returns the logit as it is.
    """

    def operands(self) -> tuple[Operand, ...]:
        """The arrays that vary with batch, head, query or key. By default there are none."""
        return ()

    @abc.abstractmethod
    def transform(
        self, logit: Float[Array, ""], b: Any, h: Any, q: Any, k: Any, *operands: Any, **_: Any
    ) -> Float[Array, ""]:
        """Computes the new logit of one pair, a float scalar.

        **Arguments:**

        - `logit`: the logit so far, a float scalar.
        - `b`, `h`: the flattened batch index and the query head, int32 scalars.
        - `q`, `k`: the positions of the query and the key, int32 scalars.
        - `operands`: one scalar of each array of the method `operands`, in its order, or one vector
            of an array with features.
        """


class AbstractWrapper(AbstractScore):
    """A score whose `transform` calls that of another, and does nothing else that may fail."""

    score: eqx.AbstractVar[AbstractScore]

    @property
    def finite_when_masked(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.score.finite_when_masked

    @property
    def tried_in_kernels(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.score.tried_in_kernels

    @property
    def may_lack_kernels(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.score.may_lack_kernels

    @property
    def weighs(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.score.weighs


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
