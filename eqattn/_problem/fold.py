"""The fold of a problem."""

import equinox as eqx
import jax

from .._carry import Carry
from .._sweep.fold import fold
from .._sweep.grid import BATCH, COL, FULL, HEAD, ROW
from ..kernels import _select as _select  # registers the kernels
from .blocking import Blocking
from .exchange import Spread
from .operands import Parts, WHOLE
from .problem import Problem


def fold_problem(
    problem: Problem,
    blocking: Blocking,
    spread: Spread | None = None,
    *,
    fused: bool,
    kernel: str = "",
) -> Carry:
    """The softmax fold of a problem: a Carry of `[B, T, H, V]`, `[B, T, H]`, `[B, T, H]`, whose
    gradients take one visit of the blocks if `fused`, else two.

    With a `spread`, over the keys of all its devices. The arrays are a device's own if its axes are
    manual; else those of all devices, and these axes are made manual for the fold.
    """
    if 0 in (*blocking.grid, blocking.queries):
        t, _, heads, _ = problem.sizes
        shape = (blocking.batch, t, heads)
        return Carry.empty(shape, problem.value.shape[-1], problem.accumulation)
    spread = spread or Spread()
    parts = Parts(problem, blocking, spread, kernel)
    table, table_axes, classes = parts.plan()
    visited = parts.on(spread.local(blocking))

    def run(parts, own, operands, values):
        own_axes = table_axes
        if spread.axes and spread.ring is None and classes != (FULL,):
            own = parts.classify(*[operands[i] for i in parts.reads])
            own_axes = (BATCH, HEAD, ROW, COL)[-own.ndim :]
        return fold(
            {c: parts.logits(c) for c in classes},
            operands,
            parts.axes,
            {c: parts.weigh(c) for c in classes},
            values,
            parts.value_axes,
            grid=parts.blocking.grid,
            block=blocking.block,
            table=own,
            table_axes=own_axes,
            ring=spread.ring,
            classify=None if classes == (FULL,) else parts.classify,
            reads=parts.reads,
            fused=fused,
            ragged=blocking.in_place,
            kernel=kernel,
            pages=parts.pages,
            lookups=parts.lookups,
            corner=blocking.corner,
            products=parts.products,
            spec=parts.spec,
            roles=parts.roles,
        )

    rows = (BATCH, HEAD, ROW)
    if spread.manual is None:
        operands = [
            x if name in WHOLE else spread.arrived(x, a)
            for name, x, a in zip(parts.roles, parts.operands, parts.axes)
        ]
        values = [spread.arrived(x, a) for x, a in zip(parts.values, parts.value_axes)]
        carry = [spread.returned(x, rows) for x in run(visited, table, operands, values)]
    else:
        consts = [score.consts for score in parts.scores]
        own, static = eqx.partition((problem.mask, consts), eqx.is_array)
        carry = spread.manual.over(
            lambda own, *arrays: run(visited.reading(*eqx.combine(own, static)), *arrays),
            [jax.tree.map(lambda _: (), own), table_axes, parts.axes, parts.value_axes],
            [rows] * 3,
        )(own, table, parts.operands, parts.values)
    return Carry(*map(blocking.from_rows, carry))
