"""What a (query, key) pair is worth, before the mask.

A score transforms one scalar logit, given the indices of its pair. Order is fixed:
`scale * (q . k)`, soft cap, bias, then the scores that the caller passes, then the mask.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ._mask_data import as_array, Fixed, scalar_result, value_of
from ._metadata import concrete
from ._pairs import Operand


class AbstractScore(eqx.Module):
    """A function from one logit to another.

    Subclasses define `transform`, for scalars, with `jax.numpy` operations. Parameters that are
    the same for all pairs may be read from `self` (they are differentiable); arrays that vary with
    batch, head, query or key are listed by `operands` and arrive as scalars.
    """

    def operands(self) -> tuple[Operand, ...]:
        """Arrays that vary with batch, head, query or key."""
        return ()

    @abc.abstractmethod
    def transform(
        self, logit: Float[Array, ""], b: Any, h: Any, q: Any, k: Any, *operands: Any, **_: Any
    ) -> Float[Array, ""]:
        """The new logit.

        **Arguments:**

        - `logit`: a float scalar.
        - `b`, `h`: flattened batch index and query head index, int32 scalars.
        - `q`, `k`: positions of the query and the key, int32 scalars.
        - `operands`: one scalar of each operand.
        """


class SoftCap(AbstractScore):
    """`cap * tanh(logit / cap)`, as in Gemma 2 (arXiv:2408.00118).

    **Arguments:**

    - `cap`: a positive number or scalar array.
    """

    cap: Any

    def __check_init__(self) -> None:
        cap = concrete(self.cap)
        if cap is not None and not (np.isfinite(cap).all() and (cap > 0).all()):
            raise ValueError(f"cap must be positive and finite, got {cap}.")

    def operands(self) -> tuple[Operand, ...]:
        return (Operand(jnp.asarray(self.cap), ""),)

    def transform(
        self, logit: Float[Array, ""], b: Any, h: Any, q: Any, k: Any, cap: Any
    ) -> Float[Array, ""]:
        cap = cap.astype(logit.dtype)
        return cap * jnp.tanh(logit / cap)


class Bias(AbstractScore):
    """Adds an array broadcastable to `[*b, h, t, s]`."""

    bias: Float[Array, "..."] = eqx.field(converter=lambda x: as_array(x, "bias"))

    operand_name: ClassVar[str] = "bias"

    def operands(self) -> tuple[Operand, ...]:
        axes = "bhts"[4 - min(self.bias.ndim, 4) :]
        return (Operand(self.bias, axes),)

    def transform(
        self, logit: Float[Array, ""], b: Any, h: Any, q: Any, k: Any, bias: Any
    ) -> Float[Array, ""]:
        return logit + bias.astype(logit.dtype)


class ALiBi(AbstractScore):
    """Subtracts `slope * |q - k|` (Press et al., arXiv:2108.12409).

    **Arguments:**

    - `slopes`: `[h]`, one per query head; `ALiBi.geometric(heads)` gives the paper's.
    """

    slopes: Float[Array, " h"] = eqx.field(converter=lambda x: as_array(x, "slopes", 1))

    @classmethod
    def geometric(cls, heads: int) -> "ALiBi":
        """The paper's slopes: `2^(-8 i / n)` for a power of two `n`, interleaved beyond it."""
        if heads < 1:
            raise ValueError(f"heads must be at least 1, got {heads}.")
        power = 2 ** int(np.floor(np.log2(heads)))
        slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
        extra = [2.0 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
        return cls(jnp.asarray(slopes + extra, jnp.float32))

    def operands(self) -> tuple[Operand, ...]:
        return (Operand(self.slopes, "h"),)

    def transform(
        self, logit: Float[Array, ""], b: Any, h: Any, q: Any, k: Any, slope: Any
    ) -> Float[Array, ""]:
        return logit - slope.astype(logit.dtype) * abs(q - k).astype(logit.dtype)


class T5Bias(AbstractScore):
    """Adds a learned bias per head and bucket of relative position (T5, arXiv:1910.10683).

    **Arguments:**

    - `table`: `[buckets, h]`, or `[buckets, 1]` for all heads.
    - `bidirectional`: whether keys after the query have buckets of their own.
    - `max_distance`: distances from here on share the last bucket.
    """

    table: Float[Array, "buckets h"] = eqx.field(converter=lambda x: as_array(x, "table"))
    bidirectional: bool = eqx.field(static=True, default=True)
    max_distance: int = eqx.field(static=True, default=128)

    def __check_init__(self) -> None:
        shape, least = self.table.shape, 4 if self.bidirectional else 2
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

    def bucket(self, q: Int[Array, "..."], k: Int[Array, "..."]) -> Int[Array, "..."]:
        """The bucket of a pair of positions."""
        buckets = self.table.shape[0]
        distance = q - k
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
        return logit + self.table[self.bucket(q, k), column].astype(logit.dtype)


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
