"""What the plans of kernels have in common, for both compilers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from ..._sweep.grid import COL, GridLayout, PARTIAL
from .._program import in_powers_of_two, LOG2E
from ._diagonals import DiagonalOperand, sizes_of
from ._ending import Ending
from ._lists import lists
from ._operands import Operand, PairsOperand, ROWS, scale_of, Side
from ._operations import Native, PLAIN
from ._pair_program import PairProgram
from ._sum_program import SumProgram


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

    layout: GridLayout
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
    layout: GridLayout,
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
        layout: GridLayout,
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
        layout: GridLayout,
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
            turned = first.features[i] == 0
            matrices[i] = place(layout.in_axes[i], *of, first.size(i), turned)
        results = {}
        for o in (o for o in self.wanted if first.gradient(o).matrix is not None):
            gradient, kept = first.gradient(o), (*layout.batch, side.own)
            size = first.size(gradient.matrix)
            results[o] = place(kept, side.own, self.length, size, gradient.turned)
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
