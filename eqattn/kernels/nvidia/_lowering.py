"""What the lowerings for NVIDIA GPUs share, with kernels for either compiler."""

import abc
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from ..._jax import partitioned_automatically
from ..._sweep.grid import BlockGrid, BlockRequest
from ..._sweep.lowering import in_32_bits, loops_over_batch, Lowering
from ._chip import LARGEST_DIM, TILE


FEW_QUERIES = 16
"""The queries of a block whose keys stay in place. Each query brings one row for every head that
shares a key head.
"""


class Kernels(NamedTuple):
    """The kernels of a compiler.

    **Arguments:**

    - `fold`, `sums`: functions with the arguments of `eqattn._sweep.loops.traverse`, for a fold and
        for its gradients.
    - `stored`: a function of steps, the layout and all arguments, for a fold whose keys and values
        stay in place.
    """

    fold: Callable[..., list]
    sums: Callable[..., list]
    stored: Callable[..., list]


def block_queries(request: BlockRequest) -> int:
    """The queries of a block that fills whole programs with rows, of all heads of a group. So the
    mask hides more blocks than with as many queries of each head. A number of each pair of tokens
    is read where it lies by programs that have one head.
    """
    if request.reads_pairs:
        return TILE
    return max(TILE // math.gcd(TILE, request.group), 8)


def _unsupported_sizes(query: int, value: int) -> str:
    """Why vectors of queries and values have no kernel; empty if they have."""
    if not value:
        return "its values have no numbers"
    if max(query, value) <= LARGEST_DIM:
        return ""
    return f"its queries and values have up to {LARGEST_DIM} numbers, not {query} and {value}"


class NvidiaLowering(Lowering):
    """Kernels for the fold, and for the gradients of queries, keys and values. With
    `asked="interpret"` they run on any device, very slowly.
    """

    cleans_values = True
    skips_corners = False
    finishes_rows = True
    shares_blocks = True
    repeats_diagonals = True
    joins_pairs = True
    splits_over_devices = False
    drops_single_axes = False
    least_listed: ClassVar[tuple[int, int]] = (64, 64)
    # An H200 copies 4.8 TB/s. It would visit a pair of 128 features in 0.85 ps at 600 TFLOP/s.
    copy_pairs: ClassVar[int] = 370

    def multiplies_narrow(self) -> bool:
        return True

    def unavailable(self) -> str:
        return in_32_bits()

    @abc.abstractmethod
    def kernels_of_compiler(self) -> Kernels:
        """The kernels, for which Pallas is imported."""

    @abc.abstractmethod
    def unsupported_storage(self, layout: BlockGrid, logits: Any, operands: Sequence[Any]) -> str:
        """Why no kernel can read a cache where it lies; empty if one can. Arguments are those of
        `unsupported_pieces`.
        """

    def unsupported_fold(self, ctx: Any, layout: BlockGrid, visits: Sequence[Any]) -> str:
        """Why no kernel can run this fold on one device in 32 bits; empty if one can."""
        if layout.ragged:
            from ._stored import of_one_head

            operands = layout.split(ctx.avals_in)[1]
            reason = self.unsupported_storage(layout, visits[-1][1], operands)
            visits = [(c, of_one_head(jaxpr)) for c, jaxpr in visits] if not reason else visits
        else:
            reason = self.unsupported_dims(ctx, layout, visits)
        return reason or self.unsupported_operation(visits)

    def lower(self, ctx: Any, layout: BlockGrid, visits: Sequence[Any]) -> dict[str, Any] | None:
        if layout.stage not in (("fold",) if layout.ragged else ("fold", "backward")):
            return None
        if not self.runs(ctx, layout, visits):
            return None
        fold, sums, stored = (
            ft.partial(f, interpreted=self.interpreted) for f in self.kernels_of_compiler()
        )
        if layout.ragged:
            from ._stored import traverse_stored

            run = ft.partial(traverse_stored, visit=stored, required=self.required)
            return dict(vectorise=False, traverse=run)
        if layout.stage == "backward":
            fold = ft.partial(sums, visits=visits, vectorise=not loops_over_batch(ctx, layout))
        return dict(vectorise=False, traverse=fold, finishes=True)

    def _why_not(self, ctx: Any, layout: BlockGrid, visits: Sequence[Any]) -> str:
        """Why no kernel can run a visit of the grid; empty if one can."""
        if reason := self.unavailable():
            return reason
        if not all(isinstance(n, int) for n in (*layout.grid, *layout.block)):
            return "it has sizes that jax.export leaves open"
        if partitioned_automatically(ctx):
            return (
                "the compiler cannot split it over the devices of a mesh; call under jax.set_mesh "
                "with a mesh all of whose axes shard batch or heads, as metadata.partition_axis "
                "says and as divides them, or a ring; or call in jax.shard_map"
            )
        return "" if layout.stage == "backward" else self.unsupported_fold(ctx, layout, visits)

    def unsupported_vectors(self, query: Any, value: Any) -> str:
        return _unsupported_sizes(query.shape[-1], value.shape[-1])

    def unsupported_dims(self, ctx: Any, layout: BlockGrid, visits: Sequence[Any]) -> str:
        """Why queries or values of a visit are too long for a kernel; empty if they are not."""
        read = visits[0][1].in_avals
        query, value = read[0], layout.split(ctx.avals_in)[1][len(read)]
        return _unsupported_sizes(query.shape[0], value.shape[-1])

    def unsupported_operation(self, visits: Sequence[Any]) -> str:
        """Which operation of a mask or score a kernel cannot hold; empty if it can hold all."""
        names = (self.unsupported_primitive(jaxpr.jaxpr) for _, jaxpr in visits)
        name = next(filter(None, names), "")
        return name and (
            f"its mask or score has a {name}, which the compiler of kernels does not know"
        )

    def runs(self, ctx: Any, layout: BlockGrid, visits: Sequence[Any]) -> bool:
        """Whether a kernel runs a visit. **Raises:** `ValueError` if one must and cannot."""
        platforms = tuple(ctx.module_context.platforms)
        if not self.interpreted and platforms != ("cuda",):
            if self.required:
                raise ValueError(
                    f"platform={self.asked!r} on an NVIDIA GPU cannot run on {platforms}: use "
                    "platform='interpret' there, or 'auto'."
                )
            return False
        reason = self._why_not(ctx, layout, visits)
        if reason and self.required:
            raise ValueError(
                f"platform={self.asked!r}: there is no kernel for this call ({reason}); "
                f"{self._others(ctx, layout, visits)}platform='auto' or 'xla' runs it as XLA code."
            )
        return not reason

    def _others(self, ctx: Any, layout: BlockGrid, visits: Sequence[Any]) -> str:
        """Which other kernels can run a visit, in words; empty if none can."""
        name, other = self.instead() or ("", None)
        if not isinstance(other, NvidiaLowering) or other._why_not(ctx, layout, visits):
            return ""
        return f"platform={name!r} has one, and "
