"""`Blockwise`: one device visits blocks of queries, and for each the live blocks of keys."""

from typing import Any, ClassVar

import equinox as eqx

from .._config.metadata import AttentionMetadata
from ._on_device import AbstractOnDevice
from ._registry import AttentionRegistry


@AttentionRegistry.register
class Blockwise(AbstractOnDevice):
    """Exact attention in memory linear in the sequence, block by block.

    Blocks that the mask empties are never visited, full ones are not masked, and the answer does
    not depend on the block sizes. Keys and values are never repeated for grouped queries. They are
    brought into the order that is fastest to multiply. On a CPU, a few queries read many keys as
    they lie, which costs less than a copy.

    **Arguments:**

    - `metadata`: scale, soft cap, sinks, dropout, dtypes, and the block sizes `blocksize_q` and
        `blocksize_k`, which are chosen automatically if they are None.
    - `precision`: the precision of the products. None means exact float32 products for float32
        inputs, and the platform's default for narrower ones.
    - `fused_backward`: whether one visit of the blocks computes all gradients. Otherwise one visit
        computes those of the queries, and another those of keys and values. The gradients are
        equal, and a single visit is faster.
    - `bitwise`: whether the bits of a row depend on nothing but the row. The batch, keys that a
        mask hides, and the chunks in which queries come then do not matter. Blocks then have the
        sizes of the metadata, by default 16 and 128, however few tokens there are, and are visited
        in order. Kernels run only if `platform` asks for them. See
        [Numerics](numerics.md#the-same-bits).

    ??? cite "Reference"

        Rabe and Staats, *Self-attention does not need O(n^2) memory*, 2021 (arXiv:2112.05682);
        Dao et al., *FlashAttention*, 2022 (arXiv:2205.14135).
    """

    metadata: AttentionMetadata = eqx.field(default_factory=AttentionMetadata)
    precision: Any = eqx.field(static=True, default=None)
    fused_backward: bool = eqx.field(static=True, default=True)
    bitwise: bool = eqx.field(static=True, default=False)

    promises: ClassVar[frozenset[str]] = frozenset({"batch", "capacity", "chunks", "decode"})
    libraries: ClassVar[tuple[str, ...]] = ("cudnn",)

    @classmethod
    def get_impl_name(cls) -> str:
        return "blockwise"
