"""`Ragged`: one device, and rows of unequal length, each of which costs what its live keys cost."""

from typing import Any, ClassVar

import equinox as eqx

from .._config.metadata import AttentionMetadata
from ._on_device import AbstractOnDevice
from ._registry import AttentionRegistry


@AttentionRegistry.register
class Ragged(AbstractOnDevice):
    """Exact attention over rows of unequal length, such as the caches of a batch of requests.

    Where `Blockwise` brings whole keys and values into the order that is fastest to multiply,
    `Ragged` reads the live blocks only, as they lie in memory, one row after the other. So a
    decoding step costs what the tokens of its rows cost, however long the cache and however unequal
    the rows, and takes no temporary memory that grows with the cache.

    Lengths are given as a mask ([`eqattn.KeyPadding`][]), and the position of the new tokens as
    `q_offset`. Both are per row, and need not be known before the program runs:

        mask = Causal() & KeyPadding(lengths)
        attention(query, key_, value, Ragged(metadata), mask=mask, q_offset=lengths - new)

    **Arguments:**

    - `metadata`: as for `Blockwise`. Keys are padded, which copies them, unless `blocksize_k`
        divides their number; None chooses a size that does, if one from 64 to 256 does.
    - `precision`, `fused_backward`: as for `Blockwise`.

    On a TPU the forward pass is a kernel, and the gradients run as XLA.
    """

    metadata: AttentionMetadata = eqx.field(default_factory=AttentionMetadata)
    precision: Any = eqx.field(static=True, default=None)
    fused_backward: bool = eqx.field(static=True, default=True)

    reads_stored = True
    pallas_lowerings: ClassVar[tuple[str, ...]] = ("tpu",)

    @classmethod
    def get_impl_name(cls) -> str:
        return "ragged"
