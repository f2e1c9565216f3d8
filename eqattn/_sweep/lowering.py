"""Which code visits the blocks of a grid.

A `Lowering` is static and travels in the `Layout` of a sweep or fold, so the choice is made once,
by the strategy, and every rule of differentiation hands it on. `XLA` visits the blocks by loops of
ordinary JAX. A kernel for a device is another `Lowering`, in `eqattn/kernels/`: it says how large
its blocks are, which calls and visits it cannot do and why, and visits the others.
"""

import abc
import dataclasses
import functools as ft
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax

from .._jax import partitioned_automatically
from .._misc import at_most, even_block
from .grid import COL, GridLayout, ROW
from .loops import traverse


@dataclasses.dataclass(frozen=True)
class BlockRequest:
    """What the sizes of blocks depend on.

    **Arguments:**

    - `queries`, `keys`: how many tokens there are.
    - `group`: how many query heads a block has for each of its queries.
    - `dtype`, `head_dim`: of the queries.
    - `in_place`: whether keys stay as they lie in memory.
    - `page_size`: of keys in pages, else 0.
    """

    queries: int
    keys: int
    group: int
    dtype: Any
    head_dim: int
    in_place: bool
    page_size: int = 0


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """The sizes that a lowering likes best.

    **Arguments:**

    - `queries`, `keys`: of a block. The keys of pages are a multiple of the page size.
    """

    queries: int
    keys: int


@dataclasses.dataclass(frozen=True)
class Lowering(abc.ABC):
    """How the blocks of a grid are visited. Instances are equal by their fields, and hashable.

    **Arguments:**

    - `asked`: the platform that the caller named. With `"auto"` a lowering leaves to `XLA` what it
        cannot do; with any other name the call raises.
    """

    asked: str = "auto"

    device: ClassVar[str]
    """What it runs on, in words."""

    cleans_values: ClassVar[bool]
    """Whether the visit itself replaces values that are not finite. Else they are replaced before
    it, in a copy.
    """

    skips_corners: ClassVar[bool]
    """Whether a partial block whose later half of keys is hidden from its first queries is a class
    of its own.
    """

    splits_over_devices: ClassVar[bool]
    """Whether the compiler can split the visit over the devices of a mesh. Else the mesh axes must
    be manual around it.
    """

    drops_single_axes: ClassVar[bool]
    """Whether blocks of keys and values that stay in place go without axes of size 1, as XLA:CPU
    would lay these out anew in a copy of all blocks.
    """

    @property
    def required(self) -> bool:
        """Whether the caller asked for this lowering, so that nothing may take its place."""
        return self.asked != "auto"

    @abc.abstractmethod
    def multiplies_narrow(self) -> bool:
        """Whether products of numbers narrower than float32 read them as they are."""

    @abc.abstractmethod
    def choose_blocks(self, request: BlockRequest) -> BlockSizes:
        """The sizes of blocks where the caller gave none."""

    @abc.abstractmethod
    def unsupported_dtype(self, dtype: Any) -> str:
        """Why queries of this dtype cannot be visited; empty if they can."""

    @abc.abstractmethod
    def unsupported_primitive(self, jaxpr: Any) -> str:
        """The name of an operation in a block function that cannot be visited; empty without."""

    @abc.abstractmethod
    def lower(self, ctx: Any, layout: GridLayout, visits: Sequence) -> dict[str, Any] | None:
        """How a program runs a visit; None leaves it to `XLA`.

        **Arguments:**

        - `ctx`: the context of the lowering rule.
        - `visits`: pairs of a class of blocks and the jaxpr of its block function.

        **Returns:** `traverse`, a function with the arguments and the result of
        [`traverse`][eqattn._sweep.loops.traverse], and `vectorise`, whether block functions get the
        batch axes of the grid inside their blocks.

        **Raises:** `ValueError` if the lowering is required and cannot run the visit.
        """


def loops_over_batch(ctx: Any, layout: GridLayout) -> bool:
    """Whether to loop over the batch axes: on one CPU, unless the blocks are tiny."""
    if layout.pages:
        return True
    if layout.ragged:
        return not partitioned_automatically(ctx)
    cpu = tuple(ctx.module_context.platforms) == ("cpu",)
    logits = math.prod(layout.shape(layout.batch)) * math.prod(layout.block)
    small = at_most(logits, 2**20 if layout.grid[ROW] == layout.grid[COL] == 1 else 2**17)
    return cpu and not small and not partitioned_automatically(ctx)


def loops(vectorise: bool) -> dict[str, Any]:
    """To run a visit as loops of ordinary JAX."""
    return dict(vectorise=vectorise, traverse=ft.partial(traverse, vectorise=vectorise))


@dataclasses.dataclass(frozen=True)
class XLALowering(Lowering):
    """Loops of ordinary JAX: any block function, any dtype, any device."""

    device = "any device"
    cleans_values = False
    skips_corners = False
    splits_over_devices = True
    drops_single_axes = True

    def multiplies_narrow(self) -> bool:
        """Not on a CPU, where products of narrow numbers are slower than those of float32."""
        return jax.default_backend() != "cpu"

    def choose_blocks(self, request: BlockRequest) -> BlockSizes:
        group, keys = request.group, request.keys
        queries = max(1 if request.in_place else 8, 256 // group)
        if request.page_size:
            return BlockSizes(queries, request.page_size)
        # As many keys as queries: fewer steps, and no more of a diagonal's blocks is masked.
        columns = 256 if group == 1 and keys > 256 else 128
        if request.in_place:  # a size that divides the keys needs no padded copy of them
            single = request.queries == 1 and jax.default_backend() == "cpu"
            columns = (single and even_block(keys, 128)) or even_block(keys) or columns
        return BlockSizes(queries, columns)

    def unsupported_dtype(self, dtype: Any) -> str:
        del dtype
        return ""

    def unsupported_primitive(self, jaxpr: Any) -> str:
        del jaxpr
        return ""

    def lower(self, ctx: Any, layout: GridLayout, visits: Sequence) -> dict[str, Any]:
        del visits
        return loops(not loops_over_batch(ctx, layout))


XLA = XLALowering()


def select_lowering(ctx: Any, layout: GridLayout, visits: Sequence) -> dict[str, Any]:
    """How a program runs a visit: by the lowering of its layout, or by loops of ordinary JAX."""
    kernel = layout.lowering
    chosen = None if kernel is None else kernel.lower(ctx, layout, visits)
    return XLA.lower(ctx, layout, visits) if chosen is None else chosen
