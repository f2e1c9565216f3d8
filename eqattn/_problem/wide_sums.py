"""Gradients of query, key and value that are sums over several visits, or over devices."""

import dataclasses
from typing import Any

from jaxtyping import Array, Float, Shaped

from .._misc import accumulation_dtype, widened
from .._sweep.lowering import Lowering
from .problem import Problem
from .storage import AbstractStored, Pages


class Widened(AbstractStored):
    """Stored numbers that are read in the dtype of sums. So a query in that dtype reads them, too.

    **Arguments:**

    - `stored`: the numbers, without a table.
    """

    stored: AbstractStored

    @property
    def arrays(self) -> tuple[Shaped[Array, "..."], ...]:
        return self.stored.arrays

    @property
    def flat(self) -> tuple[bool, ...]:
        return self.stored.flat

    def in_shares(self, n: int) -> AbstractStored:
        return Widened(self.stored.in_shares(n))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> Any:
        return accumulation_dtype(self.stored.dtype)

    @property
    def itemsize(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.stored.itemsize

    @property
    def first(self) -> Any:
        first = self.stored.first
        return None if first is None else Widened(first)

    def decode(self, *arrays: Shaped[Array, "..."]) -> Float[Array, "..."]:
        return self.stored.decode(*arrays).astype(self.dtype)


def wide_pages(pages: Pages) -> Pages:
    """Pages whose numbers are read in the dtype of sums."""
    return Pages(Widened(pages.stored), pages._table, pages.devices)


def with_wide_sums(problem: Problem, lowering: Lowering, *names: str) -> Problem:
    """A problem in which these of query, key and value are in the dtype of sums, where the lowering
    computes products in that dtype anyway: XLA does on a CPU. A gradient that is a sum over visits
    or devices then rounds once. Elsewhere, each visit rounds its part, as products of float32 would
    take several times as long.

    What is stored in another form stays as it is: of that, only visited blocks are needed.
    """
    if lowering.multiplies_narrow():
        return problem
    arrays = {name: getattr(problem, name) for name in names}
    arrays = {n: x for n, x in arrays.items() if not isinstance(x, AbstractStored)}
    acc = problem.accumulation_dtype
    return dataclasses.replace(problem, **{n: widened(x, acc) for n, x in arrays.items()})
