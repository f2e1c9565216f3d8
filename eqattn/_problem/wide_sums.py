"""Gradients of query, key and value that are sums over several visits, or over devices."""

import dataclasses

from .._misc import widened
from .._sweep.lowering import XLA
from .problem import Problem
from .storage import AbstractStored


def with_wide_sums(problem: Problem, *names: str) -> Problem:
    """A problem in which these of query, key and value are in the dtype of sums, where products are
    computed in that dtype anyway. A gradient that is a sum over visits or devices then rounds once.
    What is stored in another form stays as it is: of that, only visited blocks are needed.

    That is on a CPU. Elsewhere, products of float32 would take several times as long, so that each
    visit rounds its part.
    """
    if XLA.multiplies_narrow():
        return problem
    arrays = {name: getattr(problem, name) for name in names}
    arrays = {n: x for n, x in arrays.items() if not isinstance(x, AbstractStored)}
    acc = problem.accumulation_dtype
    return dataclasses.replace(problem, **{n: widened(x, acc) for n, x in arrays.items()})
