"""Pallas kernels for TPUs. Pallas is imported where the first of them is lowered."""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..._jax import partitioned_automatically
from ..._misc import even_block
from ..._sweep.grid import GridLayout
from ..._sweep.lowering import BlockRequest, BlockSizes, Lowering
from .._program import equations


_UNSUPPORTED = set(
    "acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt cond cosh cumlogsumexp cummax "
    "cummin cumprod cumsum digamma dynamic_slice dynamic_update_slice erfc expm1 gather igamma "
    "igammac lgamma polygamma reduce reduce_precision reduce_prod reduce_xor "
    "regularized_incomplete_beta rev scan scatter scatter-add scatter-max scatter-min scatter-mul "
    "scatter-sub sinh sort top_k while zeta".split()
)
"""The operations on scalars and blocks that Mosaic, the compiler of TPU kernels, has no lowering of
in jax 0.10.2, found by compiling each.
"""


@dataclasses.dataclass(frozen=True)
class TPULowering(Lowering):
    """Kernels for the fold and its first-order backward (of `Ragged`, for the fold). All other
    visits run as XLA code. With `asked="interpret"` they run on any device, slowly.
    """

    device = "a TPU"
    cleans_values = True
    skips_corners = True
    splits_over_devices = False
    drops_single_axes = False

    @property
    def interpreted(self) -> bool:
        return self.asked == "interpret"

    def multiplies_narrow(self) -> bool:
        return True

    def choose_blocks(self, request: BlockRequest) -> BlockSizes:
        """The largest blocks of logits whose kernels fit into vector memory."""
        side = 1024 if request.dtype == jnp.bfloat16 and request.head_dim <= 256 else 512
        queries = max(1 if request.in_place else 8, side // request.group)
        if page := request.page_size:
            together = min(max(512 // page, 1), -(-request.keys // page))
            return BlockSizes(queries, together * page)
        return BlockSizes(queries, request.in_place and even_block(request.keys, 512) or side)

    def unsupported_dtype(self, dtype: Any) -> str:
        if dtype in (jnp.bfloat16, jnp.float32):
            return ""
        return f"its units multiply bfloat16 and float32, not {dtype}"

    def unsupported_primitive(self, jaxpr: Any) -> str:
        names = (eqn.primitive.name for eqn in equations(jaxpr))
        return next((name for name in names if name in _UNSUPPORTED), "")

    def _why_not(self, ctx: Any, layout: GridLayout, visits: Sequence) -> str:
        """Why no kernel can run a visit of the grid; empty if one can."""
        if partitioned_automatically(ctx):
            return (
                "the compiler cannot split it over the devices of a mesh; call under jax.set_mesh "
                "with a mesh all of whose axes shard batch or heads, as metadata.partition_axis "
                "says and as divides them, or a ring; or call in jax.shard_map"
            )
        if layout.listed > 2**17 or max(layout.sides) >= 2**14:
            return (
                f"its list of {layout.listed} pairs of blocks is too long; give larger block sizes"
            )
        if jnp.result_type(float) == jnp.float64:
            return "it computes in 32 bits and jax_enable_x64 is set"
        names = (self.unsupported_primitive(jaxpr.jaxpr) for _, jaxpr in visits)
        name = next(filter(None, names), "")
        return name and (
            f"its mask or score has a {name}, which the compiler of kernels does not know"
        )

    def lower(self, ctx: Any, layout: GridLayout, visits: Sequence) -> dict[str, Any] | None:
        if layout.stage not in (("fold",) if layout.ragged else ("fold", "backward")):
            return None
        platforms = tuple(ctx.module_context.platforms)
        if self.asked == "pallas" and platforms != ("tpu",):
            raise ValueError(
                f"platform='pallas' on a TPU cannot run on {platforms}: use platform='interpret' "
                "there, or 'auto'."
            )
        if self.interpreted and jnp.result_type(float) == jnp.float64:
            raise ValueError(
                "platform='interpret': kernels compute in 32 bits; unset jax_enable_x64."
            )
        if not self.interpreted:
            if platforms != ("tpu",):
                return None
            if reason := self._why_not(ctx, layout, visits):
                if self.required:
                    raise ValueError(
                        f"platform='pallas': there is no kernel for this call ({reason}); "
                        "platform='auto' or 'xla' runs it as XLA code."
                    )
                return None
        from ._traverse import traverse

        return dict(vectorise=False, traverse=ft.partial(traverse, interpret=self.interpreted))
