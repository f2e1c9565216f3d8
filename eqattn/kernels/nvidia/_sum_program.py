"""The block function of a backward pass, cut at its products.

Its arguments are matrices of rows (queries, cotangents), matrices of columns (keys, values), and
what masks and scores read. Its results are gradients. Gradients of matrices are computed in three
stages:

    products in     logits and cotangents of probabilities: a matrix of columns times one of rows
    pair by pair    probabilities and cotangents of logits, as masks and scores make them
    products out    such a block times a matrix of the side that is summed over

A kernel computes the first and the second stage in registers, and adds up the third. It cannot
compute a gradient of another form.

A backward pass by kernels, and by loops for the results that these do not compute.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from jax import lax

from ..._jax import Literal
from ..._sweep import loops
from ..._sweep.grid import BlockGrid, COL, ROW
from ..._sweep.products import dot_p
from ..._sweep.steps import steps_of
from ._chip import LARGEST_DIM
from ._operands import COLUMNS, ROWS, Side
from ._operations import is_identity, is_known, Native, PLAIN
from ._program import BlockProgram, origin_of


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(v.aval.shape)


def keeps_matrix(eqn: Any) -> bool:
    """Whether an operation changes at most the dtype or the sharding of a matrix."""
    if eqn.primitive in (lax.convert_element_type_p, lax.copy_p) or is_identity(eqn):
        return True
    same = eqn.primitive is lax.reshape_p and eqn.params["dimensions"] is None
    return same and _shape(eqn.invars[0]) == _shape(eqn.outvars[0])


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A result that is a product of a block of pairs and a matrix.

    **Arguments:**

    - `side`: the side that it belongs to. The other is summed over.
    - `pairs`: the variable of the block.
    - `matrix`: the argument that is the matrix; None if the result is the block itself.
    - `transposed`: whether the result is `[features, own]`.
    """

    side: Side
    pairs: Any
    matrix: Any
    transposed: bool


class SumProgram(BlockProgram):
    """The block function of one class of blocks.

    **Arguments:**

    - `closed`, `native`: as for `BlockProgram`.
    - `layout`: the grid.

    `features` says which axis of each matrix holds the features, and `dtypes` in which dtypes
    matrices are multiplied. Some products read a copy of a matrix in which what is not finite is 0.
    `cleaned` are the matrices for which products out do so, and `cleaned_first` those for products
    in.
    """

    by_side: ClassVar[bool] = True
    """Whether kernels compute results with all batch axes and that of a side. Otherwise they have
    the axes that are wanted.
    """

    def __init__(self, closed: Any, layout: BlockGrid, native: Native = PLAIN):
        super().__init__(closed, native)
        self.arguments = {v: i for i, v in enumerate(self.jaxpr.invars)}
        self.layout = layout
        self.features: dict[int, int] = {}
        self.dtypes: set = set()
        self.cleaned: set[int] = set()
        self.cleaned_first: set[int] = set()
        self.gradients = [self._gradient(v) for v in self.jaxpr.outvars]
        self.prune_selects([gradient.pairs for gradient in self.gradients if gradient is not None])

    def _matrix(self, v: Any) -> tuple[int | None, bool]:
        """The argument, a matrix, that a variable equals, and whether it was cleaned. It is None
        for other variables.
        """
        eqn = None if isinstance(v, Literal) else self.made_by.get(v)
        if eqn is not None and keeps_matrix(eqn):
            return self._matrix(eqn.invars[0])
        if eqn is not None and self._finite(eqn):
            return self._matrix(eqn.invars[2])[0], True
        i = None if isinstance(v, Literal) else self.arguments.get(v)
        if i is None or len(_shape(v)) != 2 or self.side_of(i) is None:
            return None, False
        return i, False

    def _finite(self, eqn: Any) -> bool:
        """Whether an operation replaces numbers where some numbers are not finite."""
        test = self.made_by.get(eqn.invars[0]) if eqn.primitive is lax.select_n_p else None
        return test is not None and test.primitive is lax.is_finite_p

    def side_of(self, i: int) -> Side | None:
        """The side that an argument belongs to; None if it has both or neither."""
        axes = self.layout.in_axes[i]
        return {(True, False): ROWS, (False, True): COLUMNS}.get((ROW in axes, COL in axes))

    def _gradient(self, v: Any) -> Gradient | None:
        eqn = None if isinstance(v, Literal) else self.made_by.get(v)
        if eqn is not None and self._finite(eqn):
            # The gradient of a cleaned value is 0 where the value is not finite, but this selection
            # can be left out. If such a value is masked, its gradient is 0 anyway. If it is
            # visible, the gradient may be anything.
            eqn = self.made_by.get(eqn.invars[2])
        if eqn is None or eqn.primitive is not dot_p:
            return None
        contract = eqn.params["contract"]
        found = [self._matrix(x) for x in eqn.invars]
        where = [n for n, (i, _) in enumerate(found) if i is not None]
        if len(where) != 1:
            return None
        (at,) = where
        (i, cleaned), pairs = found[at], eqn.invars[1 - at]
        if isinstance(pairs, Literal) or _shape(pairs) != self.layout.block:
            return None
        summed = ROWS if contract[1 - at] == 1 else COLUMNS
        if i is None or self.side_of(i) is not summed:
            return None
        self._multiplies(i, 1 - contract[at], eqn)
        if cleaned:
            self.cleaned.add(i)
        return Gradient(COLUMNS if summed is ROWS else ROWS, pairs, i, transposed=at == 0)

    def _multiplies(self, i: int, features: int, eqn: Any) -> None:
        self.features[i] = features
        self.dtypes.add(eqn.params["operand_dtype"])

    def fits(self, axes: Sequence[int]) -> bool:
        """Whether a result with these grid axes can be of this form."""
        return not {ROW, COL} <= {*axes}

    def gradient(self, i: int) -> Gradient:
        """The gradient with an index, which `why_not` must allow."""
        found = self.gradients[i]
        assert found is not None, i
        return found

    def size(self, i: int) -> int:
        """The number of features of a matrix."""
        return _shape(self.jaxpr.invars[i])[self.features[i]]

    def dots(self, pairs: Sequence[Any]) -> list[Any]:
        """The products that some blocks of pairs depend on."""
        return [eqn for eqn in self.needed(pairs)[0] if eqn.primitive is dot_p]

    def factors(self, eqn: Any) -> tuple[int, int]:
        """The matrices of rows and of columns that a product of the first stage multiplies.

        **Raises:** `ValueError` if it is not one.
        """
        found = [self._matrix(v) for v in eqn.invars]
        (column, _), (row, _) = found
        if row is None or column is None:
            raise ValueError("a product of something else than two matrices")
        if (self.side_of(row), self.side_of(column)) != (ROWS, COLUMNS):
            raise ValueError("a product that is no block of pairs")
        for i, features in zip((column, row), eqn.params["contract"]):
            self._multiplies(i, features, eqn)
        self.cleaned_first |= {i for i, cleaned in found if cleaned and i is not None}
        return row, column

    def why_not(self, wanted: Sequence[int]) -> str:
        """Why a kernel cannot compute some results; empty if it can."""
        if any(self.gradients[i] is None for i in wanted):
            return "a gradient that is not that of queries, keys or values"
        eqns, _ = self.needed([self.gradient(i).pairs for i in wanted])
        if not any(eqn.primitive is dot_p for eqn in eqns):
            return "a score that ignores its logit"  # a kernel waits for the matrices of a product
        for eqn in eqns:
            if eqn.primitive is dot_p:
                try:
                    self.factors(eqn)
                except ValueError as e:
                    return str(e)
            elif not is_known(eqn):
                return eqn.primitive.name
        if (longest := max(map(self.size, self.features))) > LARGEST_DIM:
            return f"vectors of {longest} numbers"
        if len(self.dtypes) > 1 or None in self.dtypes:
            return "products of wide numbers"
        return ""

    def origin(self, results: Sequence[Any]) -> int | None:
        """The argument that only makes the finite origin of exponents; None without one."""
        eqns, reads = self.needed(results)
        made = [(eqn, origin_of(eqn, self.root, self.arguments)) for eqn in eqns]
        found = {i for _, i in made if i is not None}
        if len(found) != 1:
            return None
        (i,) = found
        uses = [eqn for eqn in eqns if self.jaxpr.invars[i] in eqn.invars]
        direct = all(origin_of(eqn, self.root, self.arguments) == i for eqn in uses)
        return i if direct and reads[i] else None


def by_kernels(  # noqa: PLR0913 (the arguments that every visit of a lowering has)
    forms: dict[type[SumProgram], tuple[Callable[..., Any], Callable[..., Any]]],
    native: Native,
    layout: BlockGrid,
    args: Sequence[Any],
    start: Sequence[Any],
    axes: Sequence[tuple[int, ...]],
    *,
    visits: Sequence[tuple[int, Any]],
    vectorise: bool,
    finish: Callable[..., Any] = list,
    into: Sequence[Any] | None = None,
    dtypes: Sequence[Any] = (),
) -> list[Any]:
    """Does what `eqattn._sweep.loops.traverse` does for a backward pass. Gradients of queries, keys
    and values, and of a bias of queries and keys, are computed by kernels, and others by the loops.

    **Arguments:** those of `eqattn._sweep.loops.traverse`, and

    - `forms`: how block functions are read, each with two functions. The first one says which
        results each kernel computes, and their side. It gets the programs of all classes, and the
        results that have this form. The second one runs a kernel. It gets the programs, the side,
        the results with the grid axes that they are to have, and their dtypes.
    - `native`: as for `BlockProgram`.
    - `visits`: pairs of a class of blocks and the jaxpr of its block function.
    - `vectorise`: whether loops have the batch axes inside of their blocks.
    - `dtypes`: the dtypes to which the sums are rounded, if not those of `start`.
    """
    wide = [x.dtype for x in start]
    results: list[Any] = [None] * len(axes)
    rest = list(range(len(axes)))
    for form, (kernels, run) in forms.items():
        programs = {c: form(jaxpr, layout, native) for c, jaxpr in visits}
        why_not = lambda i: any(not p.fits(axes[i]) or p.why_not([i]) for p in programs.values())
        able = [i for i in rest if not why_not(i)]
        rest = [i for i in rest if i not in able]
        for side, wanted in kernels(programs, able):
            natural = (*layout.batch, side.own)
            kept = {i: natural if form.by_side else axes[i] for i in wanted}
            whole = {i: into is None and axes[i] == kept[i] for i in wanted}
            rounded = {i: (dtypes or wide)[i] if whole[i] else wide[i] for i in wanted}
            for i, x in zip(wanted, run(programs, side, kept, rounded)):
                missing = [n for n, a in enumerate(kept[i]) if a not in axes[i]]
                x = x.sum(missing) if missing else x
                results[i] = x if into is None or into[i] is None else into[i] + x
    if rest:
        some = lambda xs: [xs[i] for i in rest]
        sums = loops.traverse(
            steps_of(visits, layout, axes, rest, vectorise),
            layout,
            args,
            some(start),
            some(axes),
            vectorise=vectorise,
            into=None if into is None else some(into),
        )
        for i, x in zip(rest, sums):
            results[i] = x
    return finish(results) if into is None else results
