"""Kernels in Pallas Triton, from one source for all of NVIDIA's chips since Ampere. Pallas is
imported where the first of them is lowered.
"""

import dataclasses
import functools as ft
import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...._jax import partitioned_automatically
from ...._sweep.grid import GridLayout
from ...._sweep.lowering import BlockRequest, BlockSizes, loops_over_batch, Lowering
from .._operations import named, unsupported, unsupported_of_users


ROWS = 128
"""Of a block."""

LARGEST_DIM = 256
"""Of a query, key or value: more would not fit into registers."""

NATIVE = frozenset(("ceil", "cos", "floor", "log1p", "sin"))
"""What its compiler takes from NVIDIA's library, which is exact."""

_KNOWN = named(
    "abs add and atan2 clamp convert_element_type cosh div eq exp exp2 expm1 ge gt is_finite le "
    "log lt max min mul ne neg not or pow rem rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sinh sqrt square sub tan xor"
)
"""Operations of one pair that it has, in jax 0.10.2 and 0.12, beside those that are written."""


def available() -> bool:
    """Whether this jax still has Pallas Triton."""
    try:
        return importlib.util.find_spec("jax.experimental.pallas.triton") is not None
    except ImportError:
        return False


@dataclasses.dataclass(frozen=True)
class TritonLowering(Lowering):
    """Kernels for the fold, and for the gradients of queries, keys and values. All other visits,
    and other gradients, run as XLA code. With `asked="interpret"` they run on any device, very
    slowly.
    """

    device = "an NVIDIA GPU by Pallas Triton"
    kernels = (
        "for NVIDIA's chips since Ampere: forward eqattn_fold; gradients of query eqattn_sum_rows, "
        "of key and value eqattn_sum_columns; those of float32, other gradients, forward mode and "
        "higher orders run as XLA code"
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
        """As many rows as a program has, of whole heads, and some tiles of keys: a list of live
        blocks of single tiles would be longer.
        """
        keys = 128 if request.head_dim <= 128 else 64
        return BlockSizes(max(ROWS // math.gcd(ROWS, request.group), 8), keys)

    def unsupported_dtype(self, dtype: Any) -> str:
        if dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
            return ""
        return f"it multiplies bfloat16, float16 and float32, not {dtype}"

    def unsupported_primitive(self, jaxpr: Any) -> str:
        return unsupported(jaxpr, _KNOWN)

    def unsupported_function(self, jaxpr: Any) -> str:
        return unsupported_of_users(jaxpr, _KNOWN)

    def _why_not(self, ctx: Any, layout: GridLayout, visits: Sequence[Any]) -> str:
        """Why no kernel can run a fold of the grid; empty if one can."""
        if not available():
            return f"Pallas Triton is no longer in jax {jax.__version__}"
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
            return "it does not read keys where caches hold them"
        read = visits[0][1].in_avals
        operands = layout.split(ctx.avals_in)[1]
        query, value = read[0], operands[len(read)]
        if max(query.shape[0], value.shape[-1]) > LARGEST_DIM:
            return (
                f"its queries and values have up to {LARGEST_DIM} numbers, not {query.shape[0]} "
                f"and {value.shape[-1]}"
            )
        if any(x.size >= 2**31 for x in operands):
            return "it counts the numbers of an array in 31 bits"
        names = (self.unsupported_primitive(jaxpr.jaxpr) for _, jaxpr in visits)
        name = next(filter(None, names), "")
        return name and (
            f"its mask or score has a {name}, which the compiler of kernels does not know"
        )

    def lower(self, ctx: Any, layout: GridLayout, visits: Sequence[Any]) -> dict[str, Any] | None:
        if layout.stage not in ("fold", "backward"):
            return None
        platforms = tuple(ctx.module_context.platforms)
        reason = "" if self.interpreted or platforms == ("cuda",) else f"cannot run on {platforms}"
        if reason and self.required:
            raise ValueError(
                f"platform={self.asked!r} on an NVIDIA GPU {reason}: use platform='interpret' "
                "there, or 'auto'."
            )
        reason = reason or self._why_not(ctx, layout, visits)
        if reason and self.required:
            raise ValueError(
                f"platform={self.asked!r}: there is no kernel for this call ({reason}); "
                "platform='auto' or 'xla' runs it as XLA code."
            )
        if reason:
            return None
        from ._fold import traverse
        from ._sums import traverse_sum

        if layout.stage == "fold":
            run: Any = ft.partial(traverse, interpreted=self.interpreted)
            return dict(vectorise=False, traverse=run, finishes=True)
        run = ft.partial(traverse_sum, interpreted=self.interpreted, visits=visits)
        run = ft.partial(run, vectorise=not loops_over_batch(ctx, layout))
        return dict(vectorise=False, traverse=run, finishes=True)
