"""What the plans of kernels have in common, for both compilers.

Which columns each row of a grid visits, in which order, and in which order rows are visited.

The end of a row in the fold: what the caller gets is made of a Carry that is in registers.

The step of the online softmax on registers, which all folds of this device take.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._sweep.grid import BlockGrid, COL, FULL, PARTIAL
from ..._sweep.loops import kv_order
from ..._sweep.steps import Finish
from .._program import in_powers_of_two, LOG2E
from ._diagonals import DiagonalOperand, sizes_of
from ._operands import divided, Operand, PairsOperand, Places, ROWS, scale_of, Side
from ._operations import Native, PLAIN, Value
from ._program import BlockProgram, PairProgram, Run
from ._sum_program import SumProgram


CACHED = 32 * 2**20
"""How many bytes programs read of the other side before others begin with the next batch elements.
Programs that run at the same time then read the same bytes, and most of these come from the cache.
An H100 and an H200 have an L2 cache of 50 MB. A script ran limits of 8, 16 and 32 MiB on an H200.
With these, 1024 causal tokens of 256 heads took 229, 224 and 222 microseconds, and 241 without a
limit. Grouped queries of 4096 tokens took 2.32, 2.18 and 2.17 milliseconds, and 2.33 without.
"""


def lists(table: Any, classes: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """The live columns of each row.

    **Arguments:**

    - `table`: the class of each pair of blocks, `[*, rows, columns]`. Where it is a NumPy array, so
        are the lists.
    - `classes`: the classes for which there is a block function.

    **Returns:** the rows, with the longest first; the columns of each row, `[*, rows, columns]`,
    with full blocks first; and how many columns are full and how many live, `[*, rows, 2]`.
    """
    if isinstance(table, np.ndarray):
        order = np.argsort(-table.astype(np.int32), axis=-1, kind="stable")
        full, live = ((table >= c).sum(-1) for c in (FULL, PARTIAL))
    else:
        # XLA would sort a table that is known while it compiles, in seconds.
        table = lax.optimization_barrier(table)
        order, ends = kv_order(table, (FULL, PARTIAL))
        full, live = (x[..., 0] for x in ends)
    xp = np if isinstance(table, np.ndarray) else jnp
    if FULL not in classes:
        full = xp.zeros_like(full)
    elif PARTIAL not in classes:
        live = full
    longest = live.reshape(-1, live.shape[-1]).max(0)
    rows = np.argsort(-longest, kind="stable") if xp is np else jnp.argsort(-longest, stable=True)
    counts = xp.stack([full, live], -1)
    return rows.astype(np.int32), order.astype(np.int32), counts.astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Visit:
    """What a program visits.

    **Arguments:**

    - `places`: where its block is on the grid.
    - `tile`: which part of the block it has.
    - `full`, `live`: how many full blocks it visits, and how many blocks at all.
    - `column`: the function from a place in the list of visits to a block of the other side.
    """

    places: Places
    tile: Any
    full: Any
    live: Any
    column: Callable[[Any], Any]

    @classmethod
    def of(cls, plan: Any, side: Side, tiles: int, listed: Sequence, program: Any) -> "Visit":
        """Finds what a program visits.

        **Arguments:**

        - `plan`: a `FoldPlan` or a `SumPlan`.
        - `tiles`: how many programs a block has.
        - `listed`: the references to the lists of live blocks, or nothing.
        - `program`: the index of the program.
        """
        order, *rest = listed or [None]
        places, rank, tile = place_of(plan, side, tiles, order, program)
        return cls(places, tile, *visited(plan, places, rank, rest))


def visited(
    plan: Any, places: Places, rank: Any, listed: Sequence
) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Finds the blocks that a program visits.

    **Arguments:**

    - `plan`: a `VisitPlan`.
    - `places`: where the block of the program is on the grid.
    - `rank`: which of the lists is that of the block.
    - `listed`: the references to the lists and to their lengths, or nothing.

    **Returns:** the fields `full`, `live` and `column` of a `Visit`.
    """
    if not listed:
        count = jnp.int32(plan.layout.grid[places.side.other])
        full = count if max(plan.programs) == FULL else jnp.int32(0)
        return full, count, lambda at: at
    (others, counts), table = listed, places.place(plan.table_axes or ())
    return *(counts[table, rank, i] for i in (0, 1)), lambda at: others[table, rank, at]


def place_of(
    plan: Any, side: Side, tiles: int, order: Any, program: Any
) -> tuple[Places, Any, Any]:
    """Finds where a program is.

    **Arguments:** those of `Visit.of`, and

    - `order`: the reference to the blocks of the side, with the longest first. None means the order
        in memory.

    **Returns:** its place, the rank of its block in the order, and its part of the block.
    """
    layout = plan.layout
    elements = math.prod(layout.shape(layout.batch))
    together = _together(elements, plan.streamed_bytes)
    group, rest = divided(program, together * tiles * layout.grid[side.own])
    rest, element = divided(rest, together)
    rank, tile = divided(rest, tiles)
    if together < elements:
        element = element + group * jnp.int32(together)
    own = rank if order is None else order[rank]
    return Places.of(layout, side, element, own), rank, tile


def _together(elements: int, size: int) -> int:
    """How many batch elements are visited at the same time, if the other side of each has `size`
    bytes.
    """
    most = max(min(CACHED // max(size, 1), elements), 1)
    return next(n for n in range(most, 0, -1) if elements % n == 0)


_ROWS, _WIDTH = 2, 3  # It is traced for these two sizes, which only need to differ.


def kept(*accs: Any) -> list[Any]:
    """The ending of a row that is not complete: its numerator, denominator and maximum."""
    return list(accs)


class Ending(BlockProgram):
    """A function of a row's numerator, denominator and maximum, evaluated row by row.

    **Arguments:**

    - `finish`: the function, of blocks.
    - `operands`, `layout`: those of the visit.
    - `lengths`: as for `Operand`.

    `given` are the operands that it reads. `results` says of each result its dtype, whether it has
    the axis of values, and whether that axis is the last one.
    """

    def __init__(
        self,
        finish: Any,
        operands: Sequence,
        layout: BlockGrid,
        lengths: dict[str, int],
        native: Native = PLAIN,
    ):
        reads = finish.reads if isinstance(finish, Finish) else ()
        axes = [layout.in_axes[i] for i in reads]
        blocks = [operands[i][..., None, :] for i in reads]
        self.given = [Operand(x, a, layout, ROWS, lengths) for x, a in zip(blocks, axes)]
        row = jax.ShapeDtypeStruct((_ROWS,), jnp.float32)
        accs = (jax.ShapeDtypeStruct((_WIDTH, _ROWS), jnp.float32), row, row)
        sizes = [_ROWS if x.kind == "r" else 1 for x in self.given]
        more = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in sizes]
        trace = jax.make_jaxpr(lambda *xs: finish(xs[:3], *xs[3:]), return_shape=True)
        closed, results = trace(*accs, *more)
        super().__init__(closed, native)
        self.results = [
            (x.dtype, x.ndim == 2, x.shape == (_ROWS, _WIDTH)) for x in jax.tree.leaves(results)
        ]

    def __call__(
        self, accs: Sequence[Any], read: Callable[[int], Value], sizes: dict[str, int]
    ) -> list[Any]:
        """The results, `[rows, values]` or `[rows]`.

        **Arguments:**

        - `accs`: the numerator `[rows, values]`, the denominator and the maximum `[rows]`.
        - `read`: one of `given`.
        - `sizes`: the numbers of rows (`"r"`) and of values (`"v"`).
        """
        held = [Value(kind, x) for kind, x in zip(("rv", "r", "r"), accs)]
        argument = lambda i: held[i] if i < len(held) else read(i - len(held))
        run = Run(self, lambda _: None, argument, sizes)
        kinds = ["rv" if wide else "r" for _, wide, _ in self.results]
        return [run.value(v).spread(k, sizes) for v, k in zip(self.jaxpr.outvars, kinds)]


_LEAST = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True)
class VisitPlan:
    """What a kernel computes, and from which arrays.

    **Arguments:**

    - `layout`: the grid.
    - `programs`: the block function of each class of blocks.
    - `operands`: the arguments that some block function reads pair by pair.
    - `table_axes`: the grid axes that the lists of live blocks have, without the last two. It is
        None where every pair is visited.
    - `dtype`: the dtype of the matrices that are multiplied.
    """

    layout: BlockGrid
    programs: dict[int, Any]
    operands: dict[int, Operand]
    table_axes: tuple[int, ...] | None
    dtype: Any
    interpreted: bool

    @property
    def staged(self) -> list[int]:
        """The operands that travel with the blocks of the other side."""
        return [i for i, x in self.operands.items() if x.staged]


@dataclasses.dataclass(frozen=True)
class FoldPlan(VisitPlan):
    """The plan of a fold.

    **Arguments:** those of `VisitPlan`, and

    - `sizes`: how blocks are cut and padded.
    - `query`, `key`, `value`: where these matrices lie.
    - `results`: where the results lie that are written as matrices, and None for other results.
    - `scale`: the argument by which logits are multiplied last; None unless it is one number for
        all logits.
    - `continued`: whether the kernel continues an earlier Carry.
    - `ending`: the function from Carries to what the kernel writes.
    """

    programs: dict[int, PairProgram]
    sizes: Any
    query: Any
    key: Any
    value: Any
    results: list[Any]
    scale: int | None
    continued: bool
    ending: Ending

    @property
    def streamed_bytes(self) -> int:
        """How many bytes keys and values have, for one batch element."""
        keys = self.layout.grid[COL] * self.layout.block[0]
        return keys * (self.sizes.dim + self.sizes.width) * jnp.dtype(self.dtype).itemsize

    @property
    def added(self) -> bool:
        """Whether a score adds something to the scaled logits, see `PairProgram`."""
        return any(program.added is not None for program in self.programs.values())

    @property
    def spreads(self) -> bool:
        """Whether values that are not finite must be kept from rows that do not see them. Where all
        pairs are visible they may reach all rows, and the `ending` makes these NaN as a whole.
        """
        return PARTIAL in self.programs


@dataclasses.dataclass(frozen=True)
class SumPlan(VisitPlan):
    """The plan of sums of gradients.

    **Arguments:** those of `VisitPlan`, and

    - `side`: the side that the gradients belong to.
    - `wanted`: the indices of the results. Those that need fewer products come first.
    - `own`, `streamed`: the matrices of this side and of the other, as arguments.
    - `matrices`: where they lie.
    - `results`: where the results lie that are written as matrices, and None for other results.
    - `origin`: the argument that is the origin of exponents, which comes in units of `log 2`.
    - `cleaned`: the matrices in which what is not finite is replaced by 0 for some product.
    - `dtypes`: the dtypes of the results.
    """

    programs: dict[int, SumProgram]
    side: Side
    wanted: list[int]
    own: list[int]
    streamed: list[int]
    matrices: dict[int, Any]
    results: dict[int, Any]
    origin: int | None
    cleaned: list[int]
    dtypes: dict[int, Any]

    @property
    def streamed_bytes(self) -> int:
        """How many bytes the streamed matrices have, for one batch element."""
        tokens = self.layout.grid[self.side.other] * self.layout.block[self.side is not ROWS]
        width = sum(self.matrices[i].width for i in self.streamed)
        return tokens * width * jnp.dtype(self.dtype).itemsize


def listed(table: Any, classes: Sequence[int]) -> list[Any]:
    """The lists of live blocks as a kernel reads them; none where every pair is visited. Arguments
    are those of `lists`. First come the rows in the order in which programs have them, and then
    their lists in this order. So a program finds its list without waiting for its row.
    """
    if table is None:
        return []
    ranks, *found = lists(table, tuple(classes))
    return [ranks, *(x[..., ranks, :].reshape(-1, *x.shape[-2:]) for x in found)]


def listed_in_order(table: Any, classes: Sequence[int]) -> list[Any]:
    """The same without the first list, and for rows in the order in which they lie."""
    if table is None:
        return []
    return [x.reshape(-1, *x.shape[-2:]) for x in lists(table, tuple(classes))[1:]]


def operand_of(
    programs: dict[int, Any],
    i: int,
    x: Any,
    layout: BlockGrid,
    side: Side,
    lengths: dict[str, int],
) -> Operand:
    """What kernels of some programs read of the array `x`, their argument `i`. The others are those
    of `Operand`.
    """
    of = x, layout.in_axes[i], layout, side, lengths
    sizes = next(filter(None, (sizes_of(p, i) for p in programs.values())), None)
    if sizes is not None:
        return DiagonalOperand(*of, *sizes)
    return PairsOperand.of(*of) or Operand(*of)


class FoldArrays:
    """What a kernel of the fold is given.

    **Arguments:**

    - `steps`: what is done in each class of blocks.
    - `layout`, `args`: the grid, and the table, if there is one, and the operands on it.
    - `finish`: the function from Carries to results.
    - `native`: as for `BlockProgram`.

    `query`, `key` and `value` are the matrices, and `axes` their grid axes. The sizes of their
    blocks are `keys`, `rows`, `dim` and `width`.
    """

    def __init__(
        self,
        steps: dict[int, Any],
        layout: BlockGrid,
        args: Sequence[Any],
        finish: Any,
        native: Native = PLAIN,
    ):
        self.table, self.operands = layout.known_without_corners(args)
        self.layout, self.finish, self.native, first = layout, finish, native, steps[max(steps)]
        self.count = len(first.logits.in_avals)
        self.query, self.key, self.value = (self.operands[i] for i in (0, 1, self.count))
        self.axes = [layout.in_axes[i] for i in (0, 1, self.count)]
        self.keys, self.rows = layout.block
        self.dim, self.width = self.query.shape[-2], first.width
        self.dtype = jnp.dtype(dict(first.products)["operand_dtype"] or self.query.dtype)
        self.programs = {c: PairProgram(step.logits, native) for c, step in steps.items()}

    def planned(self, lengths: dict[str, int]) -> dict[str, Any]:
        """The fields of `FoldPlan` that do not depend on how blocks are cut.

        **Arguments:**

        - `lengths`: as for `Operand`.
        """
        layout, programs = self.layout, self.programs
        wanted = [i for i in range(self.count) if any(p.reads[i] for p in programs.values())]
        of = lambda i: operand_of(programs, i, self.operands[i], layout, ROWS, lengths)
        return dict(
            layout=layout,
            programs=programs,
            dtype=self.dtype,
            operands={i: of(i) for i in wanted},
            scale=scale_of(programs, layout),
            table_axes=None if self.table is None else (layout.table_axes or ())[:-2],
            ending=Ending(self.finish, self.operands, layout, lengths, self.native),
        )

    def inputs(self, plan: FoldPlan, old: Sequence[Any]) -> list[Any]:
        """All arrays that the kernel reads.

        **Arguments:**

        - `old`: the arrays of an earlier Carry.
        """
        matrices = (plan.query, self.query), (plan.key, self.key), (plan.value, self.value)
        return [
            *(place.given(x, plan.dtype) for place, x in matrices),
            *listed(self.table, list(self.programs)),
            *(x.array for x in plan.operands.values()),
            *old,
            *(x.array for x in plan.ending.given),
        ]


class SumArrays:
    """What a kernel is given for some results of one side.

    **Arguments:**

    - `programs`: the block function of each class.
    - `side`, `wanted`: the results, all of one side.
    - `layout`, `args`: the grid, and the table, if there is one, and the operands on it. The
        origin of exponents among `operands` is finite, and in units of `log 2`.

    `length` and `other` are the lengths of a block on the side and on the other. Further attributes
    are those of `SumPlan`.
    """

    def __init__(
        self,
        programs: dict[int, SumProgram],
        side: Side,
        wanted: list[int],
        layout: BlockGrid,
        args: Sequence[Any],
    ):
        self.programs, self.side, self.layout = programs, side, layout
        self.first = first = programs[max(programs)]
        self.table, operands = layout.known_without_corners(args)
        self.operands = list(operands)
        self.length, self.other = layout.block[:: -1 if side is ROWS else 1]
        needs = lambda o: len(first.dots([first.gradient(o).pairs]))
        self.wanted = sorted(wanted, key=needs)
        gradients = {c: [p.gradient(o) for o in self.wanted] for c, p in programs.items()}
        pairs = {c: [g.pairs for g in gs] for c, gs in gradients.items()}
        inner = [p.factors(eqn) for c, p in programs.items() for eqn in p.dots(pairs[c])]
        # The gradient of what is read for each pair is a block itself, and no product.
        summed = [g.matrix for gs in gradients.values() for g in gs if g.matrix is not None]
        mine = side is not ROWS
        self.own = list(dict.fromkeys(f[mine] for f in inner))
        self.streamed = list(dict.fromkeys([*(f[not mine] for f in inner), *summed]))
        origins = {p.origin(pairs[c]) for c, p in programs.items()}
        self.origin = origins.pop() if len(origins) == 1 else None
        if self.origin is not None:
            x = jnp.maximum(self.operands[self.origin], _LEAST)
            self.operands[self.origin] = in_powers_of_two(x, x * LOG2E)
        self.reads = [p.needed(pairs[c])[1] for c, p in programs.items()]
        cleans = [p.cleaned | p.cleaned_first for p in programs.values()]
        both = (*self.own, *self.streamed)
        self.cleaned = [i for i in both if any(i in some for some in cleans)]
        (self.dtype,) = first.dtypes

    @property
    def widths(self) -> list[int]:
        """The sizes of the vectors of all matrices."""
        return [self.first.size(i) for i in (*self.own, *self.streamed)]

    def planned(self, lengths: dict[str, int], place: Callable[..., Any]) -> dict[str, Any]:
        """The fields of `SumPlan` without the dtypes.

        **Arguments:**

        - `lengths`: as for `Operand`.
        - `place`: a function that says where a matrix lies. It gets the grid axes of the matrix,
            the axis along which its tokens lie, and how many of these a block has. It also gets the
            size of a vector, and whether blocks are turned.
        """
        layout, side, first, matrices = self.layout, self.side, self.first, {}
        for i in (*self.own, *self.streamed):
            of_other = side.other in layout.in_axes[i]
            of = (side.other, self.other) if of_other else (side.own, self.length)
            transposed = first.features[i] == 0
            matrices[i] = place(layout.in_axes[i], *of, first.size(i), transposed)
        results = {}
        for o in (o for o in self.wanted if first.gradient(o).matrix is not None):
            gradient, kept = first.gradient(o), (*layout.batch, side.own)
            size = first.size(gradient.matrix)
            results[o] = place(kept, side.own, self.length, size, gradient.transposed)
        given = {
            i: operand_of(self.programs, i, x, layout, side, lengths)
            for i, x in enumerate(self.operands)
            if any(r[i] for r in self.reads)
        }
        return dict(
            layout=layout,
            programs=self.programs,
            operands=given,
            table_axes=None if self.table is None else (layout.table_axes or ())[:-2],
            dtype=self.dtype,
            side=side,
            wanted=self.wanted,
            own=self.own,
            streamed=self.streamed,
            matrices=matrices,
            results=results,
            origin=self.origin,
            cleaned=self.cleaned,
        )

    def inputs(self, plan: SumPlan, more: Sequence[Any] = ()) -> list[Any]:
        """All arrays that the kernel reads, with some `more` behind the matrices."""
        return [
            *(place.given(self.operands[i], plan.dtype) for i, place in plan.matrices.items()),
            *more,
            *self.lists(),
            *(x.array for x in plan.operands.values()),
        ]

    def lists(self) -> list[Any]:
        """The lists of live blocks; none where every pair is visited."""
        table = self.table
        if table is not None and self.side is not ROWS:
            table = table.swapaxes(-1, -2)
        return listed(table, list(self.programs))


_ORIGIN = -(2.0**30)
"""The least origin of exponents, such as that of a row that has seen nothing.

The product of a logit and `factor` is not rounded in an exponent, while it is in its origin. Where
both are below -2^31, their difference may be 128, and a power of two infinite. With this origin,
such logits are as masked. They are those of rows that a bias hides, as one of -1e10 for padding.
"""


def across(x: Any, like: Any) -> Any:
    """Numbers of rows, spread over the columns of a matrix."""
    return lax.broadcast_in_dim(x, like.shape, [0])


def powers_of_two(x: Any, factor: Any, origin: Any) -> Any:
    """Computes `2^(x factor - origin)`. The numbers `x` belong to rows, or to pairs of a row and a
    key. None stands for a factor of 1.
    """
    x = x if factor is None else x * factor
    return jnp.exp2(x - (origin if x.ndim == 1 else across(origin, x)))


def online_step(
    state: tuple,
    s: Any,
    weights: Sequence[Any],
    factor: Any,
    dtype: Any,
    in_order: Callable[..., tuple] | None = None,
    powers: Callable[[Any, Any, Any], Any] = powers_of_two,
) -> tuple[Any, Any, Any, Any]:
    """Updates a Carry by a tile of logits, except for the product with the values of the tile.

    **Arguments:**

    - `state`: numerator, denominator and maximum of each row. The maximum is in units of `log 2`.
    - `s`: the logits `[rows, keys]`.
    - `weights`: the factor on the probabilities in the numerator, if there is one.
    - `factor`: the positive number by which logits are multiplied to be in units of `log 2`. In an
        exponent, this product costs nothing.
    - `dtype`: the dtype in which the probabilities multiply the values.
    - `in_order`: a function that returns its arguments. The compiler then computes these before
        what follows.
    - `powers`: `powers_of_two`, or a faster function of the device.

    **Returns:** numerator and denominator relative to the new maximum, that maximum, and the
    factors `[rows, keys]` of the values.
    """
    acc, den, top = state
    most = s.max(1)
    now = jnp.maximum(top, most * factor)
    origin = jnp.maximum(now, _ORIGIN)
    scale = powers(top, None, origin)
    p = powers(s, factor, origin)
    den = den * scale + p.sum(1)
    weighted = (p * weights[0] if weights else p).astype(dtype)
    acc = acc * across(scale, acc)
    return (acc, den, now, weighted) if in_order is None else in_order(acc, den, now, weighted)
