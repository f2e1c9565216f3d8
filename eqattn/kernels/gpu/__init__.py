"""Pallas kernels for NVIDIA GPUs. Pallas is imported where the first of them is lowered."""

import dataclasses
import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._jax import partitioned_automatically
from ..._sweep.grid import GridLayout
from ..._sweep.lowering import BlockRequest, BlockSizes, loops_over_batch, Lowering
from ._operations import unsupported, unsupported_of_users


ROWS = 128
"""Of a block: what two warpgroups multiply at once."""

FEW_QUERIES = 16
"""Of a block whose keys stay in place. Each brings a row for every head that shares a key head."""

OLDEST_JAX = (0, 12)
"""Whose Mosaic GPU the kernels are written for: it changes from version to version."""

LARGEST_DIM = 256
"""Of a query, key or value: more would not fit into registers."""


def capability() -> str:
    """The compute capability of the NVIDIA GPU of this process; empty if it has none."""
    try:
        device, *_ = jax.local_devices(backend="cuda")
    except RuntimeError:
        return ""
    return str(device.compute_capability)


def is_hopper() -> bool:
    """Whether `platform="gpu"` means the kernels for Hopper: also where there is no NVIDIA GPU."""
    return capability()[:2] in ("", "9.")


@dataclasses.dataclass(frozen=True)
class GPULowering(Lowering):
    """Kernels for the fold, and for the gradients of queries, keys and values, written for Hopper
    (H100, H200). All other visits, and other gradients, run as XLA code. With `asked="interpret"`
    they run on any device, very slowly.
    """

    device = "an NVIDIA GPU"
    kernels = (
        "forward eqattn_fold, of Ragged eqattn_decode; gradients of query eqattn_sum_rows, of key "
        "and value eqattn_sum_columns; other gradients, forward mode and higher orders run as XLA "
        "code"
    )
    cleans_values = True
    skips_corners = False
    finishes_rows = True
    shares_blocks = True
    splits_over_devices = False
    drops_single_axes = False

    def multiplies_narrow(self) -> bool:
        return True

    def features_innermost(self) -> bool:
        return True

    def choose_blocks(self, request: BlockRequest) -> BlockSizes:
        """As many rows as some programs have, of whole heads and of tokens that are copied at once,
        and as many keys as a program multiplies at once. Of keys that stay in place, whole tiles of
        pages, or what divides their number.
        """
        if request.in_place:
            page, most = request.page_size, 64 if request.head_dim <= LARGEST_DIM else 32
            together = min(max(most // page, 1), -(-request.keys // page)) if page else 0
            whole = (n for n in range(128, 15, -16) if request.keys % n == 0)
            keys = together * page or next(whole, 128)
            return BlockSizes(FEW_QUERIES, keys)
        keys = 128 if request.head_dim <= 128 else 64
        return BlockSizes(max(ROWS // math.gcd(ROWS, request.group), 8), keys)

    def unsupported_dtype(self, dtype: Any) -> str:
        if dtype in (jnp.bfloat16, jnp.float16):
            return ""
        return f"its tensor cores multiply bfloat16 and float16, not {dtype}"

    def unsupported_primitive(self, jaxpr: Any) -> str:
        return unsupported(jaxpr)

    def unsupported_function(self, jaxpr: Any) -> str:
        return unsupported_of_users(jaxpr)

    def _why_not(self, ctx: Any, layout: GridLayout, visits: Sequence[Any]) -> str:
        """Why no kernel can run a visit of the grid; empty if one can."""
        if jax.__version_info__ < OLDEST_JAX:
            oldest = ".".join(map(str, OLDEST_JAX))
            return f"it is written for jax {oldest} and newer, and this is {jax.__version__}"
        if partitioned_automatically(ctx):
            return (
                "the compiler cannot split it over the devices of a mesh; call under jax.set_mesh "
                "with a mesh all of whose axes shard batch or heads, as metadata.partition_axis "
                "says and as divides them, or a ring; or call in jax.shard_map"
            )
        if jnp.result_type(float) == jnp.float64:
            return "it computes in 32 bits and jax_enable_x64 is set"
        if layout.stage == "backward":
            return ""
        if layout.ragged:
            from ._stored import of_one_head, unsupported_storage

            operands = layout.split(ctx.avals_in)[1]
            if reason := unsupported_storage(layout, visits[-1][1], operands):
                return reason
            visits = [(c, of_one_head(jaxpr)) for c, jaxpr in visits]
        else:
            read = visits[0][1].in_avals
            query, value = read[0], layout.split(ctx.avals_in)[1][len(read)]
            if max(query.shape[0], value.shape[-1]) > LARGEST_DIM:
                return (
                    f"its queries and values have up to {LARGEST_DIM} numbers, not "
                    f"{query.shape[0]} and {value.shape[-1]}"
                )
        names = (self.unsupported_primitive(jaxpr.jaxpr) for _, jaxpr in visits)
        name = next(filter(None, names), "")
        return name and (
            f"its mask or score has a {name}, which the compiler of kernels does not know"
        )

    def lower(self, ctx: Any, layout: GridLayout, visits: Sequence[Any]) -> dict[str, Any] | None:
        if layout.stage not in (("fold",) if layout.ragged else ("fold", "backward")):
            return None
        platforms = tuple(ctx.module_context.platforms)
        if not self.interpreted and platforms != ("cuda",):
            if self.required:
                raise ValueError(
                    f"platform={self.asked!r} on an NVIDIA GPU cannot run on {platforms}: use "
                    "platform='interpret' there, or 'auto'."
                )
            return None
        if reason := self._why_not(ctx, layout, visits):
            if self.required:
                raise ValueError(
                    f"platform={self.asked!r}: there is no kernel for this call ({reason}); "
                    "platform='auto' or 'xla' runs it as XLA code."
                )
            return None
        if layout.ragged:
            from ._decode_visit import traverse_stored

            run: Any = ft.partial(traverse_stored, interpreted=self.interpreted)
            return dict(vectorise=False, traverse=run)
        from ._traverse import traverse, traverse_sum

        run = ft.partial(traverse, interpreted=self.interpreted)
        if layout.stage == "fold":
            return dict(vectorise=False, traverse=run, finishes=True)
        run = ft.partial(traverse_sum, interpreted=self.interpreted, visits=visits)
        run = ft.partial(run, vectorise=not loops_over_batch(ctx, layout))
        return dict(vectorise=False, traverse=run, finishes=True)
