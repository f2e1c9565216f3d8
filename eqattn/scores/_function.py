"""The score that a user's function of one pair defines."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._closure import function_of, held
from .._pairs import as_operands, Operand, scalar_result
from ._base import AbstractScore


class ScoreFn(AbstractScore):
    """A score from a function `fn(logit, b, h, q, k, *operands) -> logit` of scalars.

    **Arguments:**

    - `fn`: a function of scalars, made of `jax.numpy` operations. See below for what it may read.
    - `arrays`: a tuple of `Operand`s. One scalar of each is passed after `k`, or one vector if it
        has features.

    What `fn` reads from outside is treated by its kind.

    - JAX arrays become arguments of each call of attention. They may be in its closure, its
        defaults, global variables, the arguments of a `functools.partial`, or the `eqx.Module`
        whose method it is. They are differentiated, and may change between calls, also where `fn`
        is defined again each time.
    - NumPy arrays, Python numbers and strings are constants. Other constants make JAX trace and
        compile again.
    - All else may change unseen, such as attributes of an ordinary object, a dataclass, a module
        of Flax or an imported module. A function that reads such runs once in each eager call, and
        the arrays that it reads become arguments, too. Nothing is compiled again for new arrays,
        unless the function has branches, loops or derivatives of its own, as `jax.nn.relu` has.

    So `fn` may be a function, a `functools.partial`, a bound method, or any callable object, also
    one that is kept while its arrays change.

    To your own `jax.jit`, `fn` is static, and a rebuilt lambda is another score. A callable that is
    a PyTree, such as an `eqx.Module`, a NamedTuple or a `jax.tree_util.Partial`, stays one instead.
    """

    _fn: Any
    arrays: tuple[Operand, ...]

    tried_in_kernels: ClassVar[bool] = False
    may_lack_kernels: ClassVar[bool] = True

    def __init__(
        self,
        fn: Callable[[Any, Any, Any, Any, Any], Any] | Callable[..., Any],
        arrays: Sequence[Operand] = (),
    ):
        self._fn = held(fn)
        self.arrays = as_operands(arrays)

    @property
    def fn(self) -> Callable:
        return function_of(self._fn)

    def operands(self) -> tuple[Operand, ...]:
        return self.arrays

    def transform(
        self, logit: Float[Array, ""], b: Any, h: Any, q: Any, k: Any, *operands: Any
    ) -> Float[Array, ""]:
        names = "logit, b, h, q, k, *operands"
        new = scalar_result(self.fn, names, logit, b, h, q, k, *operands)
        if new is None or isinstance(new, tuple | list):
            raise TypeError(f"A score must return one float per pair, got {type(new).__name__}.")
        new = jnp.asarray(new)
        if new.shape != () or not jnp.issubdtype(new.dtype, jnp.floating):
            raise TypeError(
                f"A score must return one float per pair, got {new.dtype} of shape {new.shape}."
            )
        return new.astype(logit.dtype)
