"""What a fold does in one block, and with a row whose blocks have all been visited."""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from .._carry import change_of_origin, safe_max
from .nonfinite import complete, poisoned
from .products import dot
from .sweep import evaluate


def softmax_terms(
    s: Array, origin: Array, weight: Sequence[Array], poison: Sequence[Array]
) -> tuple[Array, Array]:
    """The terms that a block of logits adds to a softmax.

    **Arguments:**

    - `s`: the logits `[keys, rows]`.
    - `origin`: what is subtracted from the logits of each row, `[rows]`.
    - `weight`: a list of one or none: the factors of dropout `[keys, rows]`.
    - `poison`: a list of one or none, as for `poisoned`.

    **Returns:** the factors `[keys, rows]` of the values in the numerator, and the sums of the
    exponentials `[rows]`, to which dropout does not apply.
    """
    p = poisoned(s, origin, *poison)
    return p * weight[0] if weight else p, p.sum(0)


# XLA:CPU turns a transposed left side into a slow product for each matrix of a batch. Where a
# single block has fewer keys and rows than this, `dot` copies what is transposed, which is faster.
# Many calls with 4 to 15 tokens then took 0.43 to 0.87 of the time, 0.62 to 0.96 with gradients.
# From 16 on, some took 1.5 times as long. The cases of `python -m eqattn bench --only
# cpu-f32-full-many` have 8 and 16.
_TINY = 16


@dataclasses.dataclass(frozen=True)
class FoldStep:
    """The step of the fold in a block of one class: `(accumulators, blocks) -> accumulators`.

    The accumulators are the numerator `[v, rows]`, or `[rows, v]` if `grouped`, the denominator and
    the maximum. They are None if this is the only block, and the numerator returned is then
    `[rows, v]`.

    **Arguments:**

    - `logits`, `values`: the block functions of the logits and of the values, as closed jaxprs.
    - `products`: keyword arguments of `dot`, as sorted pairs.
    - `shared`: which of the blocks that the logits read the values read, too.
    """

    logits: Any
    values: Any
    products: tuple
    shared: tuple[int, ...] = ()

    @property
    def grouped(self) -> bool:
        """Whether each group of rows has different values."""
        return self.values.out_avals[0].ndim == 3

    @property
    def width(self) -> int:
        """The size `v` of a value."""
        return self.values.out_avals[0].shape[-1]

    def evaluate_logits(self, *blocks: Array) -> list:
        return evaluate(self.logits, blocks)

    def evaluate_values(self, *blocks: Array) -> list:
        return evaluate(self.values, blocks)

    def spread(self, row: Array) -> Array:
        """Gives numbers `[rows]` the axes of a numerator."""
        return row[:, None] if self.grouped else row[None]

    def weighted(self, v: Array, kept: Array, alone: bool) -> Array:
        """The sums of the values with the factors `kept`, as a part of the numerator. In a block
        that is `alone` they are `[rows, v]`.
        """
        product = ft.partial(dot, **dict(self.products))
        if self.width == 1 and not self.grouped:  # This sum is exact, and fuses with the other.
            return (v * kept).sum(0)[:, None] if alone else (v * kept).sum(0)[None]
        if alone and max(kept.shape) >= _TINY:
            return product(kept.T, v, (1, 0))
        return product(kept, v, (0, 0)) if alone or self.grouped else product(v, kept, (0, 0))

    def __call__(self, accs: Sequence | None, blocks: Sequence) -> list:
        n = len(self.logits.in_avals)
        s, *weight = self.evaluate_logits(*blocks[:n])
        v, *poison = self.evaluate_values(*[blocks[i] for i in self.shared], *blocks[n:])
        top = s.max(0)
        if accs is None:
            kept, den = softmax_terms(s, safe_max(top), weight, poison)
            num = self.weighted(v, kept, alone=True)
            return [num, den, top] if poison else complete(num, den, top, -1)
        new = jnp.maximum(accs[2], top)
        # The old maximum is made finite, too. The result does not need that, as the sums of a row
        # that saw nothing are 0. But the loop that XLA:CPU fuses would be shorter without it, and
        # all of its intermediate results would be written to memory.
        origin, scale = change_of_origin(new, safe_max(accs[2]))
        kept, den = softmax_terms(s, origin, weight, poison)
        num = self.weighted(v, kept, alone=False)
        return [accs[0] * self.spread(scale) + num, accs[1] * scale + den, new]


@dataclasses.dataclass(frozen=True)
class Finish:
    """What a visit returns of a row, once it is complete.

    **Arguments:**

    - `fn`: a function of the row's numerator, denominator and maximum, and of the blocks that it
        reads. It returns a list: matrices, then vectors of float32.
    - `reads`: the operands whose blocks it reads, by index. These have no axis of columns.
    """

    fn: Callable[..., list]
    reads: tuple[int, ...] = ()

    def __call__(self, accs: Sequence, *blocks: Any) -> list:
        return self.fn(*accs, *blocks)
