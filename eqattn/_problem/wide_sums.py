"""Gradients of query, key and value that are sums over several visits, or over devices."""

import dataclasses

from .._misc import widened
from .._sweep.lowering import Lowering
from .problem import Problem
from .storage import AbstractStored


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
