"""`AllGather`: each of many devices keeps its queries, and gathers the keys and values of all."""

from typing import Any, ClassVar

import equinox as eqx

from .._config.metadata import AttentionMetadata
from .._ring.layout import AbstractRingLayout, check_layout, Contiguous
from ._registry import AttentionRegistry
from ._sharded import AbstractSharded, Axes


@AttentionRegistry.register
class AllGather(AbstractSharded):
    """Exact attention over sequences that are sharded over devices, for short shards.

    Each device keeps its queries, and gathers the keys and values of all devices, in their own
    dtype and with their own number of heads. Then it attends as `Blockwise` does, with its queries.
    In a gradient, keys and values are gathered again. Each device then has a gradient of all keys
    and values. A reduce-scatter sums these in float32, and rounds the sums once. So the backward
    needs nothing from the forward that grows with the sequence. But while a device attends, it
    holds all keys and values, and in the backward also their float32 gradients.

    A [`eqattn.Ring`][] sends as many bytes, but step by step, one for each device. Each move hides
    behind the work of a step. With few tokens for each device, that work is too short to hide a
    step, and small blocks are inefficient. Gathering is a single exchange, which nothing hides.
    [`eqattn.strategies.sharding_plan`][] compares the two, and [`eqattn.Ulysses`][], by their bytes
    and work.

    It is called as a `Ring` is, with whole arrays or inside your own `jax.shard_map`. The same
    holds for layouts, biases, dropout and the indices of heads. Batch and heads stay sharded over
    the axes that `metadata.partition_axis` names, if these divide them. Over other automatic axes
    XLA gathers them, too. Without a mesh and without an `axis_name` it is `Blockwise`; so a
    layout other than `Contiguous` raises.

    **Arguments:**

    - `metadata`: as for `Blockwise`, and also `sequence_axis_name` and `mesh`.
    - `axis_name`: the mesh axis, by default `metadata.sequence_axis_name`.
    - `mesh`: the mesh, by default `metadata.mesh`. A mesh of the context takes precedence.
    - `layout`: which tokens each device holds: [`eqattn.Contiguous`][], [`eqattn.Zigzag`][] or
        [`eqattn.Balanced`][]. It shares out the work of the queries, as in a ring.
    - `precision`, `fused_backward`: as for `Blockwise`.
    - `bitwise`: whether the bits of a row's output, logsumexp and query gradient are the same on
        any number of devices. They are then those of `Blockwise(metadata, bitwise=True)` on one
        device. Each device's keys must be whole blocks, and the layout `Contiguous`.

    **Raises:** `ValueError` when called, if the mesh has no such axis, or if an axis is named and
    there is no mesh. The layout must divide the tokens.

    ??? cite "Reference"

        Llama Team, *The Llama 3 Herd of Models*, 2024 (arXiv:2407.21783), section 3.3.2: context
        parallelism by an all-gather of keys and values.
    """

    metadata: AttentionMetadata = eqx.field(default_factory=AttentionMetadata)
    axis_name: str | None = eqx.field(static=True, default=None)
    mesh: Any = eqx.field(static=True, default=None)
    layout: AbstractRingLayout = eqx.field(static=True, default=Contiguous())
    precision: Any = eqx.field(static=True, default=None)
    fused_backward: bool = eqx.field(static=True, default=True)
    bitwise: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        check_layout(self.layout)
        if self.fixed and self.layout != Contiguous():
            raise ValueError(
                f"bitwise=True with layout={self.layout!r}: keys are visited as they are gathered, "
                "in an order that depends on the devices; use Contiguous()."
            )

    promises: ClassVar[frozenset[str]] = frozenset({"devices"})

    @classmethod
    def get_impl_name(cls) -> str:
        return "all_gather"

    def _axes(self) -> Axes:
        axis = self.axis_name or self.metadata.sequence_axis_name
        return Axes(axis, None, self.axis_name is not None, self.layout, gathers=True)
