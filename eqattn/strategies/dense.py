"""`Dense`, the plain softmax: the reference, and the strategy that returns attention weights."""

from typing import Any

import equinox as eqx

from .._carry import Carry, named_output
from .._config.metadata import AttentionMetadata
from .._problem.problem import Problem
from ._fold_strategy import AbstractFoldStrategy
from ._registry import AttentionRegistry


@AttentionRegistry.register
class Dense(AbstractFoldStrategy):
    """Exact attention that forms all logits at once. Its memory grows as queries times keys.

    JAX differentiates it by its own rules; no derivative rule of this library takes part. It is the
    only strategy with `return_weights=True`. The weights are the probabilities `[*b, h, t, s]` as
    they multiply the values: dropout has been applied, and with sinks they sum to less than one.

    **Arguments:**

    - `metadata`: as for `Blockwise`. There is one block, of any size: the answer of every strategy
        is independent of the block sizes.
    - `precision`: as for `Blockwise`.
    """

    metadata: AttentionMetadata = eqx.field(default_factory=AttentionMetadata)
    precision: Any = eqx.field(static=True, default=None)

    forms_weights = True

    @classmethod
    def get_impl_name(cls) -> str:
        return "dense"

    def fold(self, problem: Problem) -> tuple[Carry, Any]:
        from ._fold import fold_dense

        carry, weights = fold_dense(problem)
        named = named_output(carry.numerator, carry.denominator, carry.max_so_far)
        return Carry(*named), weights
