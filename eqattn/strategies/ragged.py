"""`Ragged`: one device, and rows of unequal length, each of which costs what its live keys cost."""

from typing import Any, ClassVar

import equinox as eqx

from .._config.metadata import AttentionMetadata
from .._config.partition import check_axis_name
from ..kernels import IN_PLACE
from ._on_device import AbstractOnDevice
from ._registry import AttentionRegistry


@AttentionRegistry.register
class Ragged(AbstractOnDevice):
    """Exact attention over rows of unequal length, such as the caches of a batch of requests.

    `Blockwise` brings whole keys and values into the order that is fastest to multiply. `Ragged`
    reads the live blocks only, as they lie in memory, one row after the other. So a decoding step
    costs what the tokens of its rows cost, however long the cache and however unequal the rows. It
    takes no temporary memory that grows with the cache.

    Lengths are given as a mask ([`eqattn.KeyPadding`][]), and the position of the new tokens as
    `q_offset`. Both are per row, and need not be known before the program runs:

        mask = Causal() & KeyPadding(lengths)
        attention(query, key_, value, Ragged(metadata), mask=mask, q_offset=lengths - new)

    **Arguments:**

    - `metadata`: as for `Blockwise`. With `blocksize_k` None, a block of XLA code has 128 keys,
        or 64 if they have more than 512 numbers, for caches of all capacities. On a GPU, without
        `bitwise`, it has up to 2048 keys or 32 pages. Fewer keys are one block. The last block of a
        row is padded when it is read, and no cache is copied. Kernels have their own sizes. On a
        TPU or a Hopper these divide the number of keys, where they can.
    - `precision`, `fused_backward`: as for `Blockwise`.
    - `axis_name`: a mesh axis that shards the keys of each row, for caches that are longer than the
        memory of a device; None if one device has them all. Each device attends to its own keys,
        and one merge of Carries joins the results, which are equal on all. See below.
    - `bitwise`: as for `Blockwise`. Nor do the bits depend on the pages of the cache. A single
        query then takes as much time as `blocksize_q` of them.

    With `axis_name`, keys and values, and what varies with keys, are sharded by tokens. Device `i`
    of `n` has the `i`-th of `n` equal pieces of an array. Of a cache in pages, which is made with
    `devices=n`, it has the pages `i`, `i + n`, ... of each row. Queries are whole. Call it with
    whole arrays, where the mesh is that of the context or of the metadata. Or call it with each
    device's piece, inside your own `jax.shard_map` that is manual over the axis. There
    `kv_positions` are those of the piece; by default the pieces follow each other. A table of pages
    is whole, and so is what varies with keys next to it.

    Prompts and training have many queries. Where a key head has as many rows, queries times query
    heads, as keys, `Ragged` copies arrays of keys, and does what `Blockwise` does. The copies take
    no more memory than queries and outputs. On a CPU, such a call took 0.5 to 0.7 of its time in
    place.

    Of such calls, the forward pass and the gradients are kernels where they are those of
    `Blockwise`. Of others, the forward pass is a kernel on a TPU, an H100 and an H200, and with
    `platform="gpu"` on other NVIDIA GPUs since Ampere. Their gradients run as XLA. `supports` tells
    of these others, as it does not know how many queries a call has.
    """

    metadata: AttentionMetadata = eqx.field(default_factory=AttentionMetadata)
    precision: Any = eqx.field(static=True, default=None)
    fused_backward: bool = eqx.field(static=True, default=True)
    axis_name: str | None = eqx.field(static=True, default=None)
    bitwise: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        check_axis_name("axis_name", self.axis_name)
        if self.fixed and self.axis_name is not None:
            raise ValueError(
                f"bitwise=True with axis_name={self.axis_name!r}: a merge over devices has bits "
                "that depend on their number; keep the keys on one device."
            )

    reads_stored = True
    pallas_lowerings: ClassVar[tuple[str, ...]] = IN_PLACE
    promises: ClassVar[frozenset[str]] = frozenset(
        {"batch", "capacity", "chunks", "decode", "layout"}
    )

    @classmethod
    def get_impl_name(cls) -> str:
        return "ragged"

    def keys_axis(self) -> str | None:
        return self.axis_name

    def key_shards(self) -> int:
        if self.axis_name is not None:
            from ._key_shards import keys_place

            keys_place(self.axis_name, self.metadata.mesh)  # raises without a mesh that has it
        return 1
