"""Folds a problem: cuts it into blocks and visits them. The results are put together as a Carry, as
output and logsumexp, or as the greatest logits of each row.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._carry import Carry, joint_logit
from .._sweep.attend import attend, recall
from .._sweep.fold import fold
from .._sweep.grid import BATCH, COL, FULL, HEAD, KnownTable, ROW
from .._sweep.lowering import Lowering, XLA
from .._sweep.top import NONE, top
from ..masks._base import leaf_terms
from .block_classes import subtile_classes
from .lookups import looked_up, reads_differences, with_differences
from .mesh import distinct
from .operands import BlockOperands, WHOLE
from .problem import is_unsure, Problem
from .shards import HeadExchange
from .tiling import BlockOperand, Tiling


def fold_problem(
    problem: Problem,
    tiling: Tiling,
    spread: HeadExchange | None = None,
    *,
    fused: bool,
    lowering: Lowering = XLA,
    live: Any = None,
    live_pairs: int = 0,
) -> Carry:
    """Evaluates the softmax fold of a problem.

    **Arguments:**

    - `problem`: the problem. Its arrays are one device's own where the axes of the `spread` are
        manual. Otherwise they are those of all devices, and the axes are made manual for the fold.
    - `tiling`: the grid and the sizes of its blocks.
    - `spread`: the devices whose keys are visited; None is this device alone.
    - `fused`: whether gradients take one visit of the blocks instead of two.
    - `lowering`: the code that visits the blocks.
    - `live`: which blocks are visible at most, by `live_blocks`; None if all are.
    - `live_pairs`: as for `BlockGrid`.

    **Returns:** a Carry of `[B, T, H, V]`, `[B, T, H]` and `[B, T, H]`, without the sinks.
    """
    if 0 in (*tiling.grid, tiling.queries):
        return _empty(problem, tiling)
    problem, known = _with_known_logsumexp(problem, tiling)
    how = problem, tiling, spread, fused, lowering, live, live_pairs
    return Carry(*_visited(_folded, 3, known, *how))


def attend_problem(
    problem: Problem,
    tiling: Tiling,
    spread: HeadExchange | None = None,
    *,
    fused: bool,
    lowering: Lowering,
    dtype: Any,
    live: Any = None,
    live_pairs: int = 0,
) -> tuple[Array, Array]:
    """Evaluates a problem without a Carry.

    **Arguments:** those of `fold_problem`, and

    - `dtype`: the dtype of the output.

    **Returns:** the output `[B, T, H, V]` and the logsumexp `[B, T, H]`, with the sinks.
    """
    sinks = problem.sinks
    if 0 in (*tiling.grid, tiling.queries):
        carry = _empty(problem, tiling)
        carry = carry if sinks is None else carry.with_sinks(sinks[None, None])
        return carry.output().astype(dtype), carry.logsumexp()
    if lowering.holds_operands_apart:
        arrays = dict(query=problem.query, key=problem.key, value=problem.value)
        apart = {name: jax.lax.optimization_barrier(x) for name, x in arrays.items()}
        problem = dataclasses.replace(problem, **apart)
    joined = []
    if sinks is not None:
        wide = joint_logit(sinks.astype(problem.accumulation_dtype))
        joined = [_of_rows("sinks", wide.reshape(1, -1, 1, 1), tiling)]
    visit = ft.partial(_attended, dtype=dtype)
    how = problem, tiling, spread, fused, lowering, live, live_pairs
    out, lse = _visited(visit, 2, joined, *how)
    return out, lse


def top_of_problem(
    problem: Problem, tiling: Tiling, spread: HeadExchange | None = None, *, count: int
) -> tuple[Array, Array]:
    """The `count` greatest logits of each row of a problem and the positions of their keys, both
    `[B, T, H, count]`. The arguments are those of `fold_problem`.
    """
    if 0 in (*tiling.grid, tiling.queries):
        t, _, heads, _ = problem.sizes
        shape = (tiling.batch, t, heads, count)
        empty = jnp.full(shape, -jnp.inf, problem.accumulation_dtype)
        return empty, jnp.full(shape, NONE, jnp.int32)
    ordered = problem.kv_positions is None and (spread is None or spread.ring is None)
    visit = ft.partial(_ranked, count=count, ordered=ordered)
    given = visit, 2, [], problem, tiling, spread, True, XLA
    values, places = _visited(*given, places=True)
    return values, places


def _of_rows(role: str, x: Array, tiling: Tiling) -> BlockOperand:
    """Numbers of rows `[B|1, H|1, T|1, 1]`, cut into blocks that are joined to the rows."""
    blocks, axes = tiling.pairs_of(x)
    return BlockOperand(role, jnp.asarray(blocks).reshape(*blocks.shape[: len(axes)], -1), axes)


def _with_known_logsumexp(problem: Problem, tiling: Tiling) -> tuple[Problem, list[BlockOperand]]:
    """The problem without a score that `recalls`, and the logsumexp that this score knows, as a
    list of one or none.
    """
    scores = [x for x in problem.scores if not x.recalls]
    known = [problem.canonical(x.operands()[0]) for x in problem.scores if x.recalls]
    wide = [jnp.asarray(x, problem.accumulation_dtype) for x in known]
    problem = dataclasses.replace(problem, scores=tuple(scores))
    return problem, [_of_rows("logsumexp", x, tiling) for x in wide]


def _folded(joined: Sequence[BlockOperand], *args: Any, place: int, **kw: Any) -> list[Array]:
    if not joined:
        return fold(*args, **kw)
    (known,) = joined
    return recall(*args, logsumexp=known.array, axes=known.axes, **kw)


def _ranked(
    joined: Sequence[BlockOperand],
    logits: Any,
    operands: Any,
    values: Any,
    value_operands: Any,
    value_axes: Any,
    layout: Any,
    *,
    products: Any,
    **kw: Any,
) -> list[Array]:
    del joined, values, value_operands, value_axes, products
    return top(logits, operands, layout, **kw)


def _attended(joined: Sequence[BlockOperand], *args: Any, place: int, **kw: Any) -> list[Array]:
    sinks = {"sinks": x.array for x in joined} | {"sink_axes": x.axes for x in joined}
    return attend(*args, **sinks, **kw)


def _empty(problem: Problem, tiling: Tiling) -> Carry:
    t, _, heads, _ = problem.sizes
    shape = (tiling.batch, t, heads)
    return Carry.empty(shape, problem.value.shape[-1], problem.accumulation_dtype)


def _with_heads(x: BlockOperand, spread: HeadExchange) -> Array:
    """The array of an operand where a device folds some of the heads, with all of their tokens."""
    return x.array if x.role in WHOLE else spread.tokens_to_heads(x.array, x.axes)


def _with_lookups(
    problem: Problem, tiling: Tiling, spread: HeadExchange, lowering: Lowering
) -> tuple[Problem, Problem]:
    """The problem whose mask tells the classes of blocks, and the one that is visited. Only the
    latter has `Differences`.
    """
    # Positions of tokens that are exchanged for heads lie otherwise than the tokens.
    if spread.inside and spread.size > 1:
        return problem, problem
    if lowering is not XLA:
        problem = looked_up(problem)
    parts = (*leaf_terms(problem.mask), *problem.scores)
    if not any(map(is_unsure, parts)) or not reads_differences(problem, tiling, lowering):
        return problem, problem
    return problem, with_differences(problem)


def _visited(  # noqa: PLR0913 (what a call gives, each checked here)
    visit: Callable[..., list[Array]],
    count: int,
    joined: Sequence[BlockOperand],
    problem: Problem,
    tiling: Tiling,
    spread: HeadExchange | None,
    fused: bool,
    lowering: Lowering,
    live: Any = None,
    live_pairs: int = 0,
    places: bool = False,
) -> list[Array]:
    """The results of a visit of all blocks, as arrays of tokens.

    **Arguments:**

    - `visit`: a function that calls `fold`, `attend` or `top`. Its first argument is what is joined
        to the rows, and its `place` the index of the operand that holds the places of keys.
    - `count`: the number of its results.
    - `joined`: what is joined to the rows once their keys have been visited.
    - `places`: whether the visit reads the places of keys where a mask has moved their positions.
    - the others: the arguments of `fold_problem`.
    """
    spread, problem = spread or HeadExchange(), problem.at_places()
    shown, problem = _with_lookups(problem, tiling, spread, lowering)
    blocks = BlockOperands(problem, tiling, spread, lowering, live, places)
    table, table_axes, classes = blocks.plan(shown)
    visited = blocks.on(spread.local(tiling))
    # If a table has axes of batch or heads, each device of a mesh may have another part of it.
    alike = spread.manual is None or table_axes == (ROW, COL)
    known = KnownTable.of(table) if isinstance(table, np.ndarray) and alike else None
    parts = () if known is None else subtile_classes(shown, tiling, known.array, blocks.hides_rows)
    if parts and FULL not in classes:  # A part may be full where no block is.
        classes += (FULL,)
    table = None if table is None else jnp.asarray(table)
    value_axes = [x.axes for x in blocks.values]

    def run(blocks, own, operands, values, ends):
        own_axes, same = table_axes, known
        if spread.axes and spread.ring is None and classes != (FULL,):
            own = blocks.classify(*[operands[i] for i in blocks.reads])
            own_axes, same = (BATCH, HEAD, ROW, COL)[-own.ndim :], None
        settings = dict(fused=fused, live_pairs=live_pairs, parts=() if same is None else parts)
        return visit(
            [dataclasses.replace(x, array=a) for x, a in zip(joined, ends)],
            {c: blocks.logits(c) for c in classes},
            operands,
            {c: blocks.weigh(c) for c in classes},
            values,
            value_axes,
            dataclasses.replace(blocks.layout(tiling, own_axes), known=same, **settings),
            table=own,
            classify=None if classes == (FULL,) else blocks.classify,
            reads=blocks.reads,
            products=blocks.products,
            place=blocks.places,
        )

    rows = (BATCH, HEAD, ROW)
    if spread.manual is None:
        groups = blocks.operands, blocks.values, joined
        found = run(visited, table, *([_with_heads(x, spread) for x in xs] for xs in groups))
        found = [spread.heads_to_tokens(x, rows) for x in found]
    else:
        # Inside, scores are traced again, and may read no array of this context.
        read = dict(mask=problem.mask, scores=problem.scores)
        own, again = distinct(dict(read, consts=[x.consts for x in blocks.scores]), spread.manual)
        arrays = [blocks.operands, blocks.values, joined]
        found = spread.manual.shard_map(
            lambda own, *arrays: run(visited.reading(**again(own)), *arrays),
            [jax.tree.map(lambda _: (), own), table_axes, *[[x.axes for x in xs] for xs in arrays]],
            [rows] * count,
        )(own, table, *[[x.array for x in xs] for xs in arrays])
    return [tiling.from_rows(x) for x in found]
