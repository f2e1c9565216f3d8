"""Which code visits the blocks of a grid.

A `Lowering` is static and travels in the `BlockGrid` of a sweep or fold. So the choice is made
once, by the strategy, and every rule of differentiation hands it on. `XLA` visits the blocks by
loops of ordinary JAX. A kernel for a device is another `Lowering`, in `eqattn/kernels/`. It says
how large blocks should be, and which calls and visits it cannot do, with the reason. It visits the
others.
"""

import abc
import dataclasses
import functools as ft
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._jax import compiles_for_cpu, partitioned_automatically
from .._misc import at_most
from .grid import BlockGrid, BlockRequest, BlockSizes, even_size, ROW, whole_size


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

    kernels: ClassVar[str] = ""
    """Which passes have a kernel and which have not, in words."""

    cleans_values: ClassVar[bool]
    """Whether the visit itself replaces values that are not finite. Otherwise they are replaced
    before it, in a copy; see `nonfinite.py`.
    """

    skips_corners: ClassVar[bool]
    """Whether partial blocks whose later half of keys is hidden from the first queries are a
    separate class.
    """

    finishes_rows: ClassVar[bool]
    """Whether the visit of a fold writes outputs and logsumexps at less cost than a Carry. Then
    `attend` is used where no Carry is asked for. Such a visit reads queries, keys and values, and
    writes outputs, with their features innermost, as projections write and read them.
    """

    splits_over_devices: ClassVar[bool]
    """Whether the compiler splits a visit over the devices of a mesh. Else axes must be manual."""

    reads_layers: ClassVar[bool] = False
    """Whether it reads one layer in the arrays of all layers. Otherwise it is given pages."""

    shares_blocks: ClassVar[bool] = False
    """Whether the logits and the values of a fold may read the same blocks. Otherwise what both
    read is an operand of each.
    """

    drops_single_axes: ClassVar[bool]
    """Whether blocks in place lose their axes of size 1, with which XLA:CPU would copy them all."""

    holds_operands_apart: ClassVar[bool] = False
    """Whether XLA must not fuse the transpose of heads and tokens into the projection before it.
    Fused, the result could not be written in the order in which a visit reads it.
    """

    repeats_diagonals: ClassVar[bool] = False
    """Whether blocks may hold numbers that their diagonals share, see `differences.py`."""

    joins_pairs: ClassVar[bool] = False
    """Whether it puts blocks of pairs together again, even if they are padded."""

    needs_windows: ClassVar[bool] = False
    """Whether an array has a window of these for each block, which a block could not cut itself."""

    least_listed: ClassVar[tuple[int, int]]
    """The least rows of logits and the least keys of a block that is visited where a list names it.
    Keys in smaller blocks are gathered.
    """

    copy_pairs: ClassVar[int]
    """How many pairs are visited in the time in which a key and its value are copied."""

    most_pairs: ClassVar[int | None] = None
    """The most pairs of blocks on the list of a batch element and a head; None without a limit."""

    @property
    def required(self) -> bool:
        """Whether the caller asked for this lowering, so that nothing may take its place."""
        return self.asked != "auto"

    @property
    def interpreted(self) -> bool:
        """Whether kernels are interpreted, on any device, instead of compiled."""
        return self.asked == "interpret"

    @abc.abstractmethod
    def multiplies_narrow(self) -> bool:
        """Whether products read numbers narrower than float32 without widening them."""

    @abc.abstractmethod
    def choose_blocks(self, request: BlockRequest) -> BlockSizes:
        """Chooses the sizes of blocks where the caller gave none."""

    def larger_blocks(self, problem: Any) -> BlockSizes | None:
        """A hook for larger blocks than the chosen ones; None keeps these. They are faster if they
        visit hardly any more, and if each that is masked is a `DIAGONAL` with known parts.
        """
        return None

    def unsupported_features(self, features: Mapping[str, Any], metadata: Any) -> str:
        """A hook that says why no call with these features can run, for all shapes; empty if some
        call can. What only a visit tells is left to `lower`.

        **Arguments:**

        - `features`: keywords of `attention` that are in use, and the `precision` of products. A
            value is True where any is meant.
        - `metadata`: that of the strategy.
        """
        return ""

    def attend(self, problem: Any) -> Array | None:
        """A hook for code that computes whole calls and visits no blocks. It is asked where a call
        needs nothing but the output.

        **Arguments:**

        - `problem`: the call, a `Problem`, whose features `unsupported_features` has passed.

        **Returns:** the output `[B, T, H, V]`, or None where blocks are to be visited.

        **Raises:** `ValueError` if it cannot compute the call, with the reason.
        """
        return None

    def unavailable(self) -> str:
        """A hook: why no call at all can be compiled with this version and configuration of JAX;
        empty if some can.
        """
        return ""

    def instead(self) -> "tuple[str, Lowering] | None":
        """A hook: other kernels for the same device, behind the platform that names them."""

    @abc.abstractmethod
    def unsupported_dtype(self, dtype: Any) -> str:
        """The reason why queries of this dtype cannot be visited; empty if they can."""

    def unsupported_vectors(self, query: Any, value: Any) -> str:
        """A hook: why queries and values with such vectors cannot be visited; empty if they can. It
        is not asked where keys and values stay where they are stored.
        """
        return ""

    @abc.abstractmethod
    def unsupported_primitive(self, jaxpr: Any) -> str:
        """The name of an operation in a block function that this lowering lacks, or empty."""

    @abc.abstractmethod
    def unsupported_function(self, jaxpr: Any, is_mask: bool) -> str:
        """Why a user's function over a block, a mask or a score, cannot be visited; empty if it
        can. Unlike `unsupported_primitive` it lets pass only what is known to work.
        """

    @abc.abstractmethod
    def lower(self, ctx: Any, layout: BlockGrid, visits: Sequence[Any]) -> dict[str, Any] | None:
        """Chooses how a program runs a visit; None leaves it to `XLA`.

        **Arguments:**

        - `ctx`: the context of the lowering rule.
        - `layout`: the grid.
        - `visits`: pairs of a class of blocks and the jaxpr of its block function.

        **Returns:** a dictionary. `traverse` is a function with the arguments and the result of
        [`traverse`][eqattn._sweep.loops.traverse]. `vectorise` says whether block functions get the
        batch axes of the grid inside their blocks. `finishes`, where it is there and True, says two
        things. `traverse` of a fold then applies a `finish` that reads operands and returns results
        of any number and dtype. `traverse` of a sweep then takes `dtypes`, to which it rounds sums.

        **Raises:** `ValueError` if the lowering is required and cannot run the visit.
        """


def in_32_bits() -> str:
    """Why code that computes in 32 bits cannot be compiled; empty if it can."""
    x64 = jnp.result_type(float) == jnp.float64
    return "it computes in 32 bits and jax_enable_x64 is set" if x64 else ""


def loops_over_batch(ctx: Any, layout: BlockGrid) -> bool:
    """Whether to loop over the batch axes: on one CPU, unless blocks are tiny.

    Without the loop, all batch elements are in each block. A CPU then computes what is masked for
    some of them, and blocks outgrow its caches. With it, each turn costs the start of some kernels,
    and the program takes longer to compile. Partitioned axes are not looped over, as each turn
    would be on one device.

    The bounds are numbers of logits. On one core of an AMD EPYC, with jax 0.10.2, blocks of
    128 x 128 took 0.54 to 0.9 of their time with the loop. Those of 64 x 64 took 0.85 to 1.2, and
    those of 32 x 32 took 1.1 to 1.5. Smaller ones took up to twice as long. That was so for 8
    blocks and for 8192 of them, forwards and gradients. Only with the loop, a grid of several pairs
    skips what is hidden from one batch element. So the blocks of all its elements have at most 2^17
    logits, chosen by trial. To measure again, vary them in `bench --only cpu-f32-full-many`.
    """
    if layout.own_pages or layout.batch_invariant or (layout.live_pairs and not layout.ragged):
        return True
    if layout.ragged:
        return not partitioned_automatically(ctx)
    logits = math.prod(layout.block)
    small = at_most(logits, 2**12)
    if not layout.grid[ROW] == layout.columns == 1:
        small = small and at_most(math.prod(layout.shape(layout.batch)) * logits, 2**17)
    return compiles_for_cpu(ctx) and not small and not partitioned_automatically(ctx)


def loops(vectorise: bool) -> dict[str, Any]:
    """The arguments by which a visit runs as loops of ordinary JAX."""
    from .loops import traverse  # A program that makes none need not load it.

    return dict(vectorise=vectorise, traverse=ft.partial(traverse, vectorise=vectorise))


def _on_gpu() -> bool:
    return jax.default_backend() in ("gpu", "cuda", "rocm")


_ENTRIES_PER_ROW = 4
"""How many entries the table of blocks may have for each row. An entry takes some 16 bytes while it
is sorted, so the table takes at most as much memory as an array of 16 float32 for each row.
"""


def _within_table(request: BlockRequest, queries: int, columns: int) -> tuple[int, int]:
    """Doubles the sides of blocks until their table is linear in the tokens, as all else is. With
    heads of their own keys, blocks of 256 are so up to 2**18 tokens, and blocks of 512 up to 2**20.
    """
    if not (isinstance(request.queries, int) and isinstance(request.keys, int)):
        return queries, columns
    most = _ENTRIES_PER_ROW * max(request.queries * request.group, request.keys)
    while -(-request.queries // queries) * -(-request.keys // columns) > most:
        if queries * request.group <= columns:
            queries *= 2
        else:
            columns *= 2
    return queries, columns


@dataclasses.dataclass(frozen=True)
class XLALowering(Lowering):
    """Loops of ordinary JAX: any block function, any dtype, any device."""

    device = "any device"
    cleans_values = False
    skips_corners = False
    finishes_rows = False
    splits_over_devices = True
    reads_layers = True
    shares_blocks = True
    drops_single_axes = True
    # On a CPU, a visit takes some microseconds more than its products, and products of 32 x 32 take
    # as long as that.
    least_listed: ClassVar[tuple[int, int]] = (32, 32)
    # On one core of an AMD EPYC, 64 features of float32 took about 60 ns to copy, and 3.4 ns a pair
    # to visit.
    copy_pairs: ClassVar[int] = 18

    @property
    def repeats_diagonals(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True on a CPU. A `T5Bias` else takes a logarithm and a lookup for each pair, and adds up
        the gradient of its table pair by pair. On one core of an AMD EPYC, 512 and 2048 tokens took
        0.32 to 0.36 of that time, and gradients 0.49 to 0.52. The benchmarks `cpu-f32-t5-512-*`
        measure the effect. Nobody has timed it on a GPU.
        """
        return jax.default_backend() == "cpu"

    def multiplies_narrow(self) -> bool:
        """False on a CPU, where products of float32 are faster. In a prototype, the forward of
        bfloat16 inputs was 1.6 times as fast when they were widened, and forward and backward
        together 1.4 times. The benchmarks `cpu-bf16-*` measure the effect.
        """
        return jax.default_backend() != "cpu"

    def choose_blocks(self, request: BlockRequest) -> BlockSizes:
        # A block has 256 rows of logits, shared among the heads of a group. With 256 keys these are
        # 256 KiB of float32, which stay in the second-level cache of a core. In a prototype, blocks
        # of 256 x 512 and 512 x 512 took within 10% to 20% of the time of 512 x 256.
        group, keys = request.group, request.keys
        queries = max(1 if request.in_place else 8, 256 // group)
        gpu = _on_gpu()
        if gpu and request.in_place and not request.fixed:
            return BlockSizes(queries, self._many_in_place(request))
        if request.page_size:
            return BlockSizes(queries, request.page_size)
        # Keys in place are those of a cache. Their blocks have one size for all capacities, so that
        # the bits of a row do not vary with the capacity. For a single query on a CPU, blocks of
        # 128 keys were the fastest; docs/pages/decoding.md has the comparison. With 4 and 64
        # queries in a cache of 1024 tokens, they took 0.90 and 0.97 times as long as blocks of 256.
        # But 128 latents of 576 numbers are 288 KiB of float32. On one core of an EPYC, a step of 8
        # long rows took 0.58 times as long in blocks of 64. In bfloat16, it took 0.73 times.
        if request.in_place:
            return BlockSizes(queries, 128 if request.head_dim <= 512 else 64)
        # Where each head has its own keys, a block has as many keys as queries. That halves the
        # steps, and 2048 causal tokens were 4% faster (`cpu-f32-causal-2048-fwd`).
        columns = 256 if group == 1 and keys > 256 else 128
        if gpu:
            # Each step of a loop starts some kernels of a GPU, which takes longer than their work.
            # For 8192 causal tokens of 16 heads in bfloat16, an H200 took 25.1, 10.1 and 5.6 ms in
            # blocks of 256, 512 and 1024. Logits of all heads stay within 64 MiB of float32.
            fits = lambda n: at_most(request.together * n * n, 2**24)
            if size := next(filter(fits, (1024, 512)), None):
                queries, columns = max(size // group, 8), size
        # Pairs are read where they lie if blocks divide both lengths. See `cpu-f32-bias-1900-fwd`.
        size = whole_size if request.reads_pairs else even_size
        if not request.fixed:
            queries, columns = _within_table(request, queries, columns)
        return BlockSizes(size(request.queries, queries), size(keys, columns))

    def _many_in_place(self, request: BlockRequest) -> int:
        """How many keys a block has that a GPU reads in place.

        Some 10 kernels are started for each block of each row, and a GPU takes 2 to 3 microseconds
        for each. With 64 rows of 8192 tokens, a step of decoding starts 45,000 of them in blocks of
        128 keys. In pages of 16 and of 64 keys they are 295,000 and 74,000. In the blocks chosen
        here they are 3,300, 12,000 and 3,300. The programs that XLA compiled for an H200 were
        counted, and not timed. Up to 32 pages are joined, as XLA reads each by a separate slice.
        """
        fits = (n for n in (2048, 1024, 512, 256) if n * request.token_nbytes <= 2**23)
        keys, page = next(fits, 128), request.page_size
        if not page:
            return keys
        return max(min(keys // page, 32, -(-request.keys // page)), 1) * page

    def unsupported_dtype(self, dtype: Any) -> str:
        del dtype
        return ""

    def unsupported_primitive(self, jaxpr: Any) -> str:
        del jaxpr
        return ""

    def unsupported_function(self, jaxpr: Any, is_mask: bool) -> str:
        del jaxpr, is_mask
        return ""

    def lower(self, ctx: Any, layout: BlockGrid, visits: Sequence[Any]) -> dict[str, Any]:
        del visits
        return loops(not loops_over_batch(ctx, layout))


XLA = XLALowering()


def select_lowering(ctx: Any, layout: BlockGrid, visits: Sequence[Any]) -> dict[str, Any]:
    """Chooses how a program runs a visit. The lowering of its layout runs it, if it can, and
    otherwise loops of ordinary JAX do.
    """
    kernel = layout.lowering
    chosen = None if kernel is None else kernel.lower(ctx, layout, visits)
    return XLA.lower(ctx, layout, visits) if chosen is None else chosen
