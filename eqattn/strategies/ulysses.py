"""`Ulysses`: an all-to-all gives each of many devices the whole sequence for some of the heads."""

from typing import Any

import equinox as eqx

from .._config.metadata import AttentionMetadata
from .._ring.layout import Contiguous
from ._registry import AttentionRegistry
from ._sharded import AbstractSharded, Axes


@AttentionRegistry.register
class Ulysses(AbstractSharded):
    """Exact attention over sequences sharded over devices, which exchange tokens for heads.

    Queries, keys and values each go through an all-to-all, in their own dtype. It gives each of the
    `n` devices the whole sequence for `1 / n` of the heads. A device attends as `Blockwise` does,
    and all-to-alls bring the rows back, in the accumulation dtype. So `n` must divide the query
    heads. Key and value heads that `n` does not divide are repeated, up to the least common
    multiple. They are repeated further if the mesh also shards heads over the automatic axes that
    `metadata.partition_axis.head_axis` names, so that they stay sharded there.

    It is called as [`eqattn.Ring`][] is, with whole arrays or inside your own `jax.shard_map`. The
    same holds for biases, dropout and the indices of heads. Arrays of tokens without heads (segment
    ids, a bias for all heads) are gathered. Without a mesh and without an `axis_name` it is
    `Blockwise`.

    **Arguments:**

    - `metadata`: as for `Blockwise`, and also `sequence_axis_name` and `mesh`.
    - `axis_name`: the mesh axis, by default `metadata.sequence_axis_name`.
    - `mesh`: the mesh, by default `metadata.mesh`. A mesh of the context takes precedence.
    - `precision`, `fused_backward`: as for `Blockwise`.

    **Raises:** `ValueError` when called, if the mesh has no such axis, or if an axis is named and
    there is no mesh. The size of the axis must divide the query heads.

    ??? cite "Reference"

        Jacobs et al., *DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme
        Long Sequence Transformer Models*, 2023 (arXiv:2309.14509).
    """

    metadata: AttentionMetadata = eqx.field(default_factory=AttentionMetadata)
    axis_name: str | None = eqx.field(static=True, default=None)
    mesh: Any = eqx.field(static=True, default=None)
    precision: Any = eqx.field(static=True, default=None)
    fused_backward: bool = eqx.field(static=True, default=True)

    @classmethod
    def get_impl_name(cls) -> str:
        return "ulysses"

    def _axes(self) -> Axes:
        axis = self.axis_name or self.metadata.sequence_axis_name
        return Axes(None, axis, self.axis_name is not None, Contiguous())
