"""A user's function as a score."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._misc import Fixed, value_of
from .._pairs import Operand, scalar_result
from ._base import AbstractScore


class ScoreFn(AbstractScore):
    """A score from a function `fn(logit, b, h, q, k, *operands) -> logit` of scalars.

    **Arguments:**

    - `fn`: `jax.numpy` operations on scalars. What it closes over is differentiated too. It is
        static: a rebuilt lambda is another score to `jax.jit`. A callable `eqx.Module` or
        `jax.tree_util.Partial` is a PyTree node instead.
    - `arrays`: `Operand`s whose scalars are passed after `k`.
    """

    _fn: Any
    arrays: tuple[Operand, ...]

    def __init__(
        self,
        fn: Callable[[Any, Any, Any, Any, Any], Any] | Callable[..., Any],
        arrays: Sequence[Operand] = (),
    ):
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {fn!r}.")
        tree = isinstance(fn, eqx.Module | jax.tree_util.Partial)
        self._fn = fn if tree else Fixed(fn)
        if not isinstance(arrays, tuple | list):
            raise TypeError(f"arrays must be a tuple of Operands, got {type(arrays).__name__}.")
        self.arrays = tuple(arrays)
        for x in self.arrays:
            if not isinstance(x, Operand):
                raise TypeError(
                    f"arrays must be Operands such as Operand(array, 'bh'), which say what the "
                    f"axes are, got {type(x).__name__}."
                )

    @property
    def fn(self) -> Callable:
        return value_of(self._fn)

    def operands(self) -> tuple[Operand, ...]:
        return self.arrays

    def transform(
        self, logit: Float[Array, ""], b: Any, h: Any, q: Any, k: Any, *operands: Any
    ) -> Float[Array, ""]:
        new = jnp.asarray(scalar_result(self.fn, logit, b, h, q, k, *operands))
        if new.shape != () or not jnp.issubdtype(new.dtype, jnp.floating):
            raise TypeError(
                f"A score must return one float per pair, got {new.dtype} of shape {new.shape}."
            )
        return new.astype(logit.dtype)
