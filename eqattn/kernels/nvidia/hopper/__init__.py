"""Pallas kernels for NVIDIA GPUs. Pallas is imported where the first of them is lowered."""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...._sweep.grid import BlockGrid, BlockRequest, BlockSizes
from ...._sweep.lowering import Lowering
from .._chip import capability, LARGEST_DIM
from .._lowering import block_queries, FEW_QUERIES, Kernels, NvidiaLowering
from .._operations import unsupported, unsupported_of_users


OLDEST_JAX = (0, 12)
"""The oldest jax whose Mosaic GPU these kernels are written for. Mosaic GPU changes from version to
version.
"""

NEWEST_JAX = (0, 12)
"""The newest jax with which these kernels run by default: those after it have not been tried."""


@dataclasses.dataclass(frozen=True)
class GPULowering(NvidiaLowering):
    """Kernels for the fold, and for the gradients of queries, keys, values and a bias, written for
    Hopper (H100, H200). All other visits, and other gradients, run as XLA code. With
    `asked="interpret"` they run on any device, very slowly.
    """

    device = "an NVIDIA GPU"
    kernels = (
        "forward eqattn_fold, of Ragged eqattn_decode; gradients of query eqattn_sum_rows, of key "
        "and value eqattn_sum_columns, of a bias of queries and keys eqattn_sum_pairs; other "
        "gradients, forward mode and higher orders run as XLA code"
    )

    @property
    def measured(self) -> bool:
        """Whether the kernels have been measured on the GPU of this process and with this jax."""
        tried = jax.__version_info__[:2] <= NEWEST_JAX and not self.unavailable()
        return tried and capability().startswith("9.")

    @property
    def repeats_diagonals(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True on request. By default it is False, as no GPU has run these loads yet."""
        return self.asked != "auto"

    def choose_blocks(self, request: BlockRequest) -> BlockSizes:
        """Chooses as many keys as a program multiplies at once. The rows fill whole programs, and
        consist of whole heads and of tokens that are copied at once. Where keys stay in place, a
        block has whole tiles of pages, or a number of keys that divides theirs.
        """
        if request.in_place:
            page, most = request.page_size, 64 if request.head_dim <= LARGEST_DIM else 32
            # The copies of scales begin at multiples of 32 tokens.
            together = min(max(most // page, 1), -(-request.keys // page)) if page else 0
            together = 1 if request.itemsize == 1 and page % 32 else together
            whole = (n for n in range(128, 15, -16) if request.keys % n == 0)
            keys = together * page or next(whole, 128)
            return BlockSizes(FEW_QUERIES, keys)
        keys = 128 if request.head_dim <= 128 else 64
        return BlockSizes(block_queries(request), keys)

    def unsupported_dtype(self, dtype: Any) -> str:
        if dtype in (jnp.bfloat16, jnp.float16):
            return ""
        return f"its tensor cores multiply bfloat16 and float16, not {dtype}"

    def unsupported_primitive(self, jaxpr: Any) -> str:
        return unsupported(jaxpr)

    def unsupported_function(self, jaxpr: Any, is_mask: bool) -> str:
        return unsupported_of_users(jaxpr, is_mask)

    def unavailable(self) -> str:
        if jax.__version_info__ >= OLDEST_JAX:
            return super().unavailable()
        oldest = ".".join(map(str, OLDEST_JAX))
        return f"it is written for jax {oldest} and newer, and this is {jax.__version__}"

    def instead(self) -> tuple[str, Lowering] | None:
        if self.asked != "pallas":
            return None
        from ..triton import TritonLowering

        return "triton", TritonLowering(self.asked)

    def unsupported_storage(self, layout: BlockGrid, logits: Any, operands: Sequence[Any]) -> str:
        from ._decode import unsupported_storage

        return unsupported_storage(layout, logits, operands)

    def kernels_of_compiler(self) -> Kernels:
        from ._decode import visit_stored
        from ._traverse import traverse, traverse_sum

        # No GPU has run the kernel for gradients of pairs yet, so it is only used on request.
        of_pairs = self.asked != "auto"
        return Kernels(traverse, ft.partial(traverse_sum, of_pairs=of_pairs), visit_stored)
