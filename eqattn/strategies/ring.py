"""`Ring`: each of many devices keeps its queries; keys and values rotate around a mesh axis."""

from typing import Any

import equinox as eqx

from .._config.metadata import AttentionMetadata
from .._ring.layout import AbstractRingLayout, check_layout, Contiguous
from ._registry import AttentionRegistry
from ._sharded import AbstractSharded, Axes


@AttentionRegistry.register
class Ring(AbstractSharded):
    """Exact attention over sequences that are sharded over devices.

    Each device keeps its queries. Keys and values travel around the ring, in their own dtype and
    with their own number of heads, while the previous ones are attended to; in a gradient, so do
    the gradients of keys and values. Memory per device does not depend on the number of devices.

    There are two ways to call it:

    - Call it with whole arrays, in or out of `jax.jit`. The mesh is that of the context
        (`jax.set_mesh`) or of the metadata. Only the sequence axis is made manual: batch and heads
        stay sharded over the other axes as they are.
    - Call it with each device's piece, inside your own `jax.shard_map` that is manual over the
        axis. A bias or a `Dense` mask varies with query and key. It holds the device's rows and the
        columns of all devices, in the order of the layout. Dropout draws the bits of the whole
        arrays if batch and heads are sharded over the manual axes that `metadata.partition_axis`
        names. Indices of batch and head in your own masks and scores are the device's.

    Without a mesh and without an `axis_name` it is `Blockwise`, if its layout is `Contiguous`.

    **Arguments:**

    - `metadata`: as for `Blockwise`, and also `sequence_axis_name`, `mesh` and
        `scan_ring_attention`, of which False writes the hops out instead of looping over them.
    - `axis_name`: the mesh axis of the ring, by default `metadata.sequence_axis_name`.
    - `mesh`: the mesh, by default `metadata.mesh`. A mesh of the context takes precedence.
    - `layout`: which tokens each device holds: [`eqattn.Contiguous`][], [`eqattn.Zigzag`][] or
        [`eqattn.Balanced`][].
    - `precision`, `fused_backward`: as for `Blockwise`.
    - `head_axis`: a second mesh axis, inside of the ring's: tokens are sharded over
        `(axis_name, head_axis)`. The devices along it share one place of the ring. Each holds an
        equal, contiguous piece of the tokens that the layout gives to that place. They exchange
        tokens for heads as in [`eqattn.Ulysses`][], and the ring turns with fewer hops.

    **Raises:** `ValueError` when called, if the mesh has no such axis, or if an axis is named and
    there is no mesh. The layout must divide the tokens, and `head_axis` the query heads.

    ??? cite "Reference"

        Liu, Zaharia and Abbeel, *Ring Attention with Blockwise Transformers for Near-Infinite
        Context*, 2023 (arXiv:2310.01889). With `head_axis`: Fang and Zhao, *USP: A Unified Sequence
        Parallelism Approach for Long Context Generative AI*, 2024 (arXiv:2405.07719).
    """

    metadata: AttentionMetadata = eqx.field(default_factory=AttentionMetadata)
    axis_name: str | None = eqx.field(static=True, default=None)
    mesh: Any = eqx.field(static=True, default=None)
    layout: AbstractRingLayout = eqx.field(static=True, default=Contiguous())
    precision: Any = eqx.field(static=True, default=None)
    fused_backward: bool = eqx.field(static=True, default=True)
    head_axis: str | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        check_layout(self.layout)

    @classmethod
    def get_impl_name(cls) -> str:
        return "ring"

    def _axes(self) -> Axes:
        axis = self.axis_name or self.metadata.sequence_axis_name
        if axis == self.head_axis:
            raise ValueError(
                f"The axis of the ring and head_axis are both {axis!r}; name two axes of the mesh, "
                "or use Ulysses(metadata)."
            )
        needed = self.axis_name is not None or self.head_axis is not None
        return Axes(axis, self.head_axis, needed, self.layout)
