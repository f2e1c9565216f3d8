"""The base class of scores.

A score transforms one scalar logit, given the indices of its pair. The order is fixed:
`scale * (q . k)`, then the soft cap, the bias, the scores that the caller passes, and the mask.
"""

import abc
from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import Array, Float

from .._misc.text import without_defaults
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
