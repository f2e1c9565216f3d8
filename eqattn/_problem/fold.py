"""The fold of a problem: its blocks are made, visited, and put together again as a Carry."""

import dataclasses

import equinox as eqx
import jax

from .._carry import Carry
from .._sweep.fold import fold
from .._sweep.grid import BATCH, COL, FULL, HEAD, ROW
from .._sweep.lowering import Lowering, XLA
from .blocking import Blocking
from .exchange import HeadExchange
from .operands import BlockOperands, WHOLE
from .problem import Problem


def fold_problem(
    problem: Problem,
    blocking: Blocking,
    spread: HeadExchange | None = None,
    *,
    fused: bool,
    lowering: Lowering = XLA,
) -> Carry:
    """Evaluates the softmax fold of a problem.

    **Arguments:**

    - `problem`: the problem. Its arrays are one device's own where the axes of the `spread` are
        manual. Otherwise they are those of all devices, and the axes are made manual for the fold.
    - `blocking`: the grid and the sizes of its blocks.
    - `spread`: the devices whose keys are visited; None is this device alone.
    - `fused`: whether gradients take one visit of the blocks instead of two.
    - `lowering`: the code that visits the blocks.

    **Returns:** a Carry of `[B, T, H, V]`, `[B, T, H]` and `[B, T, H]`.
    """
    if 0 in (*blocking.grid, blocking.queries):
        t, _, heads, _ = problem.sizes
        shape = (blocking.batch, t, heads)
        return Carry.empty(shape, problem.value.shape[-1], problem.accumulation_dtype)
    spread, problem = spread or HeadExchange(), problem.at_places()
    blocks = BlockOperands(problem, blocking, spread, lowering)
    table, table_axes, classes = blocks.plan()
    visited = blocks.on(spread.local(blocking))
    value_axes = [x.axes for x in blocks.values]

    def run(blocks, own, operands, values):
        own_axes = table_axes
        if spread.axes and spread.ring is None and classes != (FULL,):
            own = blocks.classify(*[operands[i] for i in blocks.reads])
            own_axes = (BATCH, HEAD, ROW, COL)[-own.ndim :]
        return fold(
            {c: blocks.logits(c) for c in classes},
            operands,
            {c: blocks.weigh(c) for c in classes},
            values,
            value_axes,
            dataclasses.replace(blocks.layout(blocking, own_axes), fused=fused),
            table=own,
            classify=None if classes == (FULL,) else blocks.classify,
            reads=blocks.reads,
            products=blocks.products,
        )

    rows = (BATCH, HEAD, ROW)
    if spread.manual is None:
        operands = [
            x.array if x.role in WHOLE else spread.tokens_to_heads(x.array, x.axes)
            for x in blocks.operands
        ]
        values = [spread.tokens_to_heads(x.array, x.axes) for x in blocks.values]
        carry = [spread.heads_to_tokens(x, rows) for x in run(visited, table, operands, values)]
    else:
        consts = [score.consts for score in blocks.scores]
        own, static = eqx.partition((problem.mask, consts), eqx.is_array)
        in_axes = [x.axes for x in blocks.operands]
        carry = spread.manual.shard_map(
            lambda own, *arrays: run(visited.reading(*eqx.combine(own, static)), *arrays),
            [jax.tree.map(lambda _: (), own), table_axes, in_axes, value_axes],
            [rows] * 3,
        )(own, table, [x.array for x in blocks.operands], [x.array for x in blocks.values])
    return Carry(*map(blocking.from_rows, carry))
