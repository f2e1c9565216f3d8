"""One device, rows of unequal length: each costs what its own live keys cost."""

from typing import Any, ClassVar

import equinox as eqx

from .._carry import Carry
from .._config.metadata import AttentionMetadata
from .._problem.problem import Problem
from ._exact import AbstractFoldStrategy
from ._registry import AttentionRegistry


@AttentionRegistry.register
class Ragged(AbstractFoldStrategy):
    """Exact attention over rows of unequal length, such as the caches of a batch of requests.

    Where `Blockwise` brings whole keys and values into the order that is fastest to multiply,
    `Ragged` reads the live blocks only, as they lie in memory, one row after the other. So a
    decoding step costs what the tokens of its rows cost, however long the cache and however unequal
    the rows, and takes no temporary memory that grows with the cache.

    Lengths are masks ([`eqattn.KeyPadding`][]), and where the new tokens are is `q_offset`, both
    per row and known only when the program runs:

        mask = Causal() & KeyPadding(lengths)
        attention(query, key_, value, Ragged(metadata), mask=mask, q_offset=lengths - new)

    **Arguments:**

    - `metadata`: as for `Blockwise`. Keys are padded, which copies them, unless `blocksize_k`
        divides their number; None chooses a size that does, if one from 64 to 256 does.
    - `precision`, `fused_backward`: as for `Blockwise`.

    On a TPU the forward pass is a kernel, the gradients run as XLA.
    """

    metadata: AttentionMetadata = eqx.field(default_factory=AttentionMetadata)
    precision: Any = eqx.field(static=True, default=None)
    fused_backward: bool = eqx.field(static=True, default=True)

    reads_stored = True
    pallas_lowerings: ClassVar[tuple[str, ...]] = ("tpu",)

    @classmethod
    def get_impl_name(cls) -> str:
        return "ragged"

    def fold(self, problem: Problem) -> tuple[Carry, Any]:
        from ._fold import fold_on_device

        lowering = self.lowering(problem)
        carry = fold_on_device(
            problem,
            block_q=self.metadata.blocksize_q,
            block_k=self.metadata.blocksize_k,
            fused=self.fused_backward,
            lowering=lowering,
            manual=self.manual(problem, lowering),
            in_place=True,
        )
        return carry, None
