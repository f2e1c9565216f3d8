"""Pallas kernels for TPUs. Pallas is imported only once the first of them is lowered."""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..._jax import partitioned_automatically
from ..._misc import even_block
from ..._pairs import POINTWISE
from ..._sweep.grid import BlockGrid, BlockRequest, BlockSizes, even_size, FEW_ROWS
from ..._sweep.lowering import in_32_bits, Lowering
from .._program import calls, equations
from ._lists import has_turns, listed, MOST_PAIRS


_UNSUPPORTED = set(
    "acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt cond cosh cumlogsumexp cummax "
    "cummin cumprod cumsum digamma dynamic_slice dynamic_update_slice erfc expm1 gather igamma "
    "igammac lgamma polygamma reduce reduce_precision reduce_prod reduce_xor "
    "regularized_incomplete_beta rev scan scatter scatter-add scatter-max scatter-min scatter-mul "
    "scatter-sub sinh sort top_k while zeta".split()
)
"""The operations on scalars and blocks that Mosaic, the compiler of TPU kernels, cannot lower.

They were found by compiling each of them with jax 0.10.2. Another version of jax may know more of
them: compile a kernel with a `MaskFn` that applies the operation to see.
"""


_OF_FUNCTIONS = {p.name for p in POINTWISE} - _UNSUPPORTED
_OF_FUNCTIONS |= {"add_any", "broadcast_in_dim", "copy", "reshape", "squeeze", "transpose"}
_OF_FUNCTIONS |= {"stop_gradient"}
"""The operations that a user's function may have. The tests compile each of them, with its
derivatives, for each chip (`functions` in `tests/unit/kernels/_tpu_compile.py`).
"""

_DTYPES = {jnp.dtype(x) for x in (jnp.float32, jnp.int32, jnp.bool_)}
_OF_NARROW = set("and broadcast_in_dim convert_element_type copy eq ge gt le lt ne not or".split())
_OF_NARROW |= {"reshape", "squeeze", "transpose", "xor"}
"""The operations of masks that were compiled for numbers of 8 and 16 bits. Of others, the compiler
knows some for some of these numbers.
"""


def _known_dtypes(eqn: Any, is_mask: bool) -> set:
    """The dtypes that an operation of a user's function may have."""
    if not is_mask:
        return _DTYPES
    narrow = "int8", "uint8", "int16", "uint16", "bfloat16"
    narrow = narrow if eqn.primitive.name in _OF_NARROW else ()
    return _DTYPES | {jnp.dtype(x) for x in ("uint32", *narrow)}


LARGE, LONG = 2048, 2**28
"""The sides of larger blocks, and for how many pairs of queries and keys calls have them: those of
16,384 tokens, hidden pairs included.
"""


def _cached_tokens(request: BlockRequest) -> int:
    """How many tokens of a cache are read in one step.

    Where memory is slow, 512 tokens take longer to copy than to visit: on v6e 2243 cycles, with 8
    heads of 128 in bfloat16. Elsewhere 1024 tokens take fewer cycles than twice 512 do: 3266
    instead of 3842 of int8 on v5p. Blocks of 1024 tokens are used for long caches only, as short
    rows would wait for memory that they do not need. Two such blocks must also leave room in vector
    memory. On v7x, 16 pages of 64 tokens of one key head took 65 MB to be put together for many
    rows.
    """
    from ._chip import VMEM, waits_for_cache

    if _takes_heads_apart(request):
        return 256
    if waits_for_cache(request.itemsize) or request.keys < 4096:
        return 512
    if request.page_size and _has_many_rows(request):
        return 512
    return 512 if 2 * 1024 * request.token_nbytes > VMEM // 4 else 1024


def _keeps_few_rows(request: BlockRequest) -> bool:
    """Whether even many queries are visited by the kernel for few rows, which copies pages side by
    side.

    Other kernels put them together in registers. With wide heads, such as latents, that took 128 MB
    of further memory. With 8 heads of 256 numbers, it took more than the 60 MiB that a kernel may
    have.
    """
    return request.page_size > 0 and request.head_dim >= 256


def _has_many_rows(request: BlockRequest) -> bool:
    """Whether blocks have too many rows for the kernel for few."""
    return not _keeps_few_rows(request) and request.queries * request.group > FEW_ROWS


def _takes_heads_apart(request: BlockRequest) -> bool:
    """Whether each step of the kernel for many rows takes apart several key heads, which lie side
    by side in a cache.

    That costs as much for few queries as for many, so a step should have many. With 32 heads and 8
    key heads on v6e, one of 32 queries and 512 keys took 5,481 cycles. One of 256 queries and 256
    keys takes 7,407, which is a third for each pair. One of 256 queries and 512 keys would load its
    instructions again in each step, see `tpu-report --tune --kernel prompt`.
    """
    several = request.token_nbytes > 2 * request.head_dim * request.itemsize
    return several and _has_many_rows(request)


def _many_rows(request: BlockRequest, side: int) -> int:
    """How many rows a step has that takes heads apart, where one of copies has `side`.

    They are as many as fit into vector memory. On older chips, a step with pages has half of them.
    Else its instructions would be loaded again in each step.
    """
    from ._chip import wide_units

    most = 8 if wide_units() or not request.page_size else 4
    return min(most * side, 2**20 // request.head_dim)


@dataclasses.dataclass(frozen=True)
class TPULowering(Lowering):
    """Kernels for the fold and for its first-order backward; of keys in place, for the fold only.

    All other visits run as XLA code. With `asked="interpret"` the kernels are interpreted, which
    any device can do, slowly.
    """

    device = "a TPU"
    cleans_values = True
    reads_layers = True
    skips_corners = True
    finishes_rows = True
    holds_operands_apart = True
    splits_over_devices = False
    drops_single_axes = False
    repeats_diagonals = True
    joins_pairs = True
    needs_windows = True
    # On v6e, a step took 429 cycles with blocks of 128 x 128, 451 with 256 keys and 761 with blocks
    # of 512. These are schedules of listed blocks, see `_LISTED` in
    # `tests/measure/tpu_report/kernels.py`.
    # To copy 128 keys and values of 128 numbers, and to read the copies, takes 210 cycles at the
    # speed of memory. But gradients of copies are scattered, in float32.
    least_listed: ClassVar[tuple[int, int]] = (64, 128)
    # On v6e, 128 features in bfloat16 take 1.64 cycles at the speed of memory, and a block of 2^20
    # pairs 2038.
    copy_pairs: ClassVar[int] = 840
    most_pairs: ClassVar[int | None] = MOST_PAIRS

    def multiplies_narrow(self) -> bool:
        """Always: the matrix units read bfloat16."""
        return True

    def choose_blocks(self, request: BlockRequest) -> BlockSizes:
        """The largest blocks of logits whose kernels fit into vector memory."""
        # Each step of a kernel costs some 400 cycles in addition to its work, so blocks should be
        # large. One of 1024 x 1024 logits takes 4 MiB; the backward of bfloat16 and D = 128 then
        # takes 14 MiB. Blocks of float32, or of wider heads, take more, so they have sides of 512,
        # which was chosen by trial. See `python tests/measure tpu-report` for the cycles and the
        # vector memory of each kernel, and `tpu-report --tune` for those of other blocks.
        side = 1024 if request.dtype == jnp.bfloat16 and request.head_dim <= 256 else 512
        queries = max(1 if request.in_place else 8, side // request.group)
        if not request.in_place:
            return BlockSizes(queries, side)
        tokens, uneven = _cached_tokens(request), side
        if _keeps_few_rows(request):
            queries = max(1, FEW_ROWS // request.group)
        elif _takes_heads_apart(request):
            most = _many_rows(request, side)
            queries, uneven = even_size(request.queries, max(1, most // request.group)), tokens
        if page := request.page_size:
            if request.itemsize == 1 and page < 32:
                # A register holds 32 tokens of 8 bits, so that pages of fewer are padded to them.
                tokens //= 2
            together = min(max(tokens // page, 1), -(-request.keys // page))
            return BlockSizes(queries, together * page)
        return BlockSizes(queries, even_block(request.keys, tokens) or uneven)

    def larger_blocks(self, problem: Any) -> BlockSizes | None:
        """Blocks of 2048 x 2048 for long sequences, where matrix units are wide."""
        # They have a quarter of the steps, but only one head fits into a step. For T = 32768, the
        # whole forward has 53.5% of the peak on v6e instead of 50.5%, and the backward 60.0%
        # instead of 55.4%. `tpu-report --tune --kernel 'forward, T=32768'` compares them with
        # others. Programs take longer to compile, which only long sequences are worth. Calls with
        # more work for each pair, and several query heads for a key head, keep theirs: their steps
        # have not been compared.
        from ._chip import wide_units

        t, s, heads, kv_heads = problem.sizes
        long = isinstance(t, int) and isinstance(s, int) and min(t, s) >= LARGE and t * s >= LONG
        arrays = problem.query, problem.key, problem.value
        plain = heads == kv_heads and problem.logits_dtype in (None, jnp.float32)
        plain &= not problem.scores and problem.seed is problem.sinks is None
        plain &= isinstance(problem.scale, float)  # its gradient would be a further kernel
        if not (long and plain and wide_units()):
            return None
        narrow = (isinstance(x, jax.Array) and x.dtype == jnp.bfloat16 for x in arrays)
        fits = all(narrow) and all(x.shape[-1] == 128 for x in arrays)
        return BlockSizes(LARGE, LARGE) if fits else None

    def unavailable(self) -> str:
        return in_32_bits()

    def unsupported_dtype(self, dtype: Any) -> str:
        if dtype in (jnp.bfloat16, jnp.float32):
            return ""
        return f"its units multiply bfloat16 and float32, not {dtype}"

    def unsupported_primitive(self, jaxpr: Any) -> str:
        names = (eqn.primitive.name for eqn in equations(jaxpr))
        return next((name for name in names if name in _UNSUPPORTED), "")

    def unsupported_function(self, jaxpr: Any, is_mask: bool) -> str:
        for eqn in equations(jaxpr):
            if calls(eqn) is not None:
                continue
            if eqn.primitive.name not in _OF_FUNCTIONS:
                return f"has a {eqn.primitive.name}, which the compiler of kernels does not know"
            known = _known_dtypes(eqn, is_mask)
            for aval in (v.aval for v in (*eqn.invars, *eqn.outvars)):
                if aval.dtype not in known:
                    return f"has numbers of {aval.dtype}: kernels compute in float32 and int32"
        return ""

    def _why_not(self, ctx: Any, layout: BlockGrid, visits: Sequence[Any]) -> str:
        """Why no kernel can run a visit of the grid; the empty string if one can."""
        if not self.interpreted and partitioned_automatically(ctx):
            return (
                "the compiler cannot split it over the devices of a mesh; call under jax.set_mesh "
                "with a mesh all of whose axes shard batch or heads, as metadata.partition_axis "
                "says and as divides them, or a ring; or call in jax.shard_map"
            )
        # Rows and columns are numbers of 14 bits on the list, see `_work_list.py`.
        pairs = listed(layout)
        too_long = not has_turns(layout) and pairs > MOST_PAIRS
        if too_long or max(layout.sides) >= 2**14:
            return f"its list of {pairs} pairs of blocks is too long; give larger block sizes"
        if reason := self.unavailable():
            return reason
        names = (self.unsupported_primitive(jaxpr.jaxpr) for _, jaxpr in visits)
        name = next(filter(None, names), "")
        return name and (
            f"its mask or score has a {name}, which the compiler of kernels does not know"
        )

    def lower(self, ctx: Any, layout: BlockGrid, visits: Sequence[Any]) -> dict[str, Any] | None:
        known = ("fold",) if layout.ragged else ("fold", "tangent", "backward")
        if layout.stage not in known:
            return None
        platforms = tuple(ctx.module_context.platforms)
        if self.asked == "pallas" and platforms != ("tpu",):
            raise ValueError(
                f"platform='pallas' on a TPU cannot run on {platforms}: use platform='interpret' "
                "there, or 'auto'."
            )
        if self.interpreted and self.unavailable():
            raise ValueError(
                "platform='interpret': kernels compute in 32 bits; unset jax_enable_x64."
            )
        if not self.interpreted and platforms != ("tpu",):
            return None
        if reason := self._why_not(ctx, layout, visits):
            if self.required:
                raise ValueError(
                    f"platform={self.asked!r}: there is no kernel for this call ({reason}); "
                    "platform='auto' or 'xla' runs it as XLA code."
                )
            return None
        from ._traverse import traverse

        run = ft.partial(traverse, interpret=self.interpreted)
        return dict(vectorise=False, traverse=run, finishes=True)
