"""Kernels in Pallas Triton, from one source for all of NVIDIA's chips since Ampere. Pallas is
imported where the first of them is lowered.
"""

import dataclasses
import importlib.util
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...._sweep.grid import BlockGrid, BlockRequest, BlockSizes
from .._lowering import block_queries, FEW_QUERIES, Kernels, NvidiaLowering
from .._operations import named, unsupported, unsupported_of_users


_KNOWN = named(
    "abs add and atan2 clamp convert_element_type cosh div eq exp exp2 expm1 ge gt is_finite le "
    "log lt max min mul ne neg not or pow rem rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sinh sqrt square sub tan xor"
)
"""The operations of one pair that the compiler has, in jax 0.10.2 and 0.12. Others are written in
`_operations.py`.
"""


def available() -> bool:
    """Whether this jax still has Pallas Triton."""
    try:
        return importlib.util.find_spec("jax.experimental.pallas.triton") is not None
    except ImportError:
        return False


@dataclasses.dataclass(frozen=True)
class TritonLowering(NvidiaLowering):
    """Kernels for the fold, and for the gradients of queries, keys, values and a bias. All other
    visits, and other gradients, run as XLA code. With `asked="interpret"` they run on any device,
    very slowly.
    """

    device = "an NVIDIA GPU by Pallas Triton"
    kernels = (
        "for NVIDIA's chips since Ampere: forward eqattn_fold, of Ragged eqattn_decode; gradients "
        "of query eqattn_sum_rows, of key and value eqattn_sum_columns, of a bias of queries and "
        "keys eqattn_sum_pairs; those of float32, other gradients, forward mode and higher orders "
        "run as XLA code"
    )

    def choose_blocks(self, request: BlockRequest) -> BlockSizes:
        """Chooses as many rows as a program has, with whole heads. A block has some tiles of keys,
        as with single tiles the list of live blocks would be longer. Where keys lie in pages, a
        block has some of these.
        """
        if request.in_place:
            page, most = request.page_size, 128 if request.head_dim <= 128 else 64
            together = min(max(most // page, 1), -(-request.keys // page)) if page else 0
            return BlockSizes(FEW_QUERIES, together * page or most)
        keys = 128 if request.head_dim <= 128 else 64
        return BlockSizes(block_queries(request), keys)

    def unsupported_dtype(self, dtype: Any) -> str:
        if dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
            return ""
        return f"it multiplies bfloat16, float16 and float32, not {dtype}"

    def unsupported_primitive(self, jaxpr: Any) -> str:
        return unsupported(jaxpr, _KNOWN)

    def unsupported_function(self, jaxpr: Any, is_mask: bool) -> str:
        return unsupported_of_users(jaxpr, is_mask, _KNOWN)

    def unavailable(self) -> str:
        gone = f"Pallas Triton is no longer in jax {jax.__version__}"
        return super().unavailable() if available() else gone

    def unsupported_storage(self, layout: BlockGrid, logits: Any, operands: Sequence[Any]) -> str:
        from ._decode import unsupported_storage

        return unsupported_storage(layout, logits, operands)

    def unsupported_fold(self, ctx: Any, layout: BlockGrid, visits: Sequence[Any]) -> str:
        if any(x.size >= 2**31 for x in layout.split(ctx.avals_in)[1]):
            return "it counts the numbers of an array in 31 bits"
        return super().unsupported_fold(ctx, layout, visits)

    def kernels_of_compiler(self) -> Kernels:
        from ._backward import traverse_sum
        from ._decode import visit_stored
        from ._forward import traverse

        return Kernels(traverse, traverse_sum, visit_stored)
