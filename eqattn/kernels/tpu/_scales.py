"""Scales of quantised keys and values, laid out for the kernel that reads them as a matrix.

A cache keeps the scales of a block as a row `[1, keys * groups]`, which the decoding kernel reads
as it is. The forward kernel needs a matrix `[keys, groups]`. No kernel can turn a row into a
matrix, so XLA does it before the kernel.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax import lax

from ..._jax import evaluated, Literal
from ..._sweep.grid import GridLayout
from .._program import flat_jaxpr, replaced_jaxpr


def with_matrices(
    steps: dict[int, Any], layout: GridLayout, args: Sequence
) -> tuple[dict, Sequence]:
    """The steps and the arguments of a fold, with rows given as the matrices that they become.

    An argument is changed if all its uses, in the block functions of all classes, reshape the row
    to the same matrix.
    """
    n = len(next(iter(steps.values())).logits.in_avals)
    programs = {c: [flat_jaxpr(s.logits), flat_jaxpr(s.values)] for c, s in steps.items()}
    shapes: dict[int, set] = {}
    for pair in programs.values():
        for start, closed in zip((0, n), pair):
            for v in closed.jaxpr.outvars:
                if v in closed.jaxpr.invars:
                    shapes.setdefault(start + closed.jaxpr.invars.index(v), set()).add(None)
            for eqn in closed.jaxpr.eqns:
                for v in eqn.invars:
                    if not isinstance(v, Literal) and v in closed.jaxpr.invars:
                        i = start + closed.jaxpr.invars.index(v)
                        moved = eqn.primitive is lax.reshape_p and v.aval.shape[:-1] == (1,)
                        shapes.setdefault(i, set()).add(
                            eqn.outvars[0].aval.shape if moved else None
                        )
    found = {i: next(iter(s)) for i, s in shapes.items() if len(s) == 1 and None not in s}
    found = {i: s for i, s in found.items() if len(s) == 2 and s[0] > 1}
    if not found:
        return steps, args
    new = {}
    for c, (logits, values) in programs.items():
        own, others = ({i - k: s for i, s in found.items() if 0 <= i - k} for k in (0, n))
        own = {i: s for i, s in own.items() if i < n}
        fields = dict(logits=_reading(logits, own), values=_reading(values, others))
        new[c] = dataclasses.replace(steps[c], **fields)
    table, operands = layout.split(args)
    operands = [
        x.reshape(*x.shape[: len(a)], *found[i]) if i in found else x
        for i, (x, a) in enumerate(zip(operands, layout.in_axes))
    ]
    return new, operands if layout.table_axes is None else [table, *operands]


def _reading(closed: Any, matrices: dict[int, tuple[int, ...]]) -> Any:
    """A program whose arguments `matrices` have these shapes already, without the reshapes."""
    given = {closed.jaxpr.invars[i] for i in matrices}

    def evaluate(eqn, xs):
        there = eqn.primitive is lax.reshape_p and eqn.invars[0] in given
        return xs if there else evaluated(eqn, xs)

    shapes = [matrices.get(i, v.aval.shape) for i, v in enumerate(closed.jaxpr.invars)]
    return replaced_jaxpr(closed, shapes, evaluate)
