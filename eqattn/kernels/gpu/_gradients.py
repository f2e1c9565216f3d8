"""A backward pass by kernels: which results they compute, and of which arrays these are made."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from ..._sweep import loops
from ..._sweep.grid import GridLayout
from ..._sweep.sweep import steps_of
from .._program import LOG2E
from ._operands import Operand, ROWS, Side
from ._sum_program import SumProgram


_LEAST = float(jnp.finfo(jnp.float32).min)


def by_kernels(
    kernels: Callable[[dict, list[int]], list[tuple[Side, list[int]]]],
    run: Callable[[dict, Side, list[int], dict[int, Any]], list[Any]],
    native: frozenset[str],
    layout: GridLayout,
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
    """`eqattn._sweep.loops.traverse` of a backward pass: gradients of queries, keys and values by
    kernels, and others, such as that of a bias, by the loops.

    **Arguments:** those of `eqattn._sweep.loops.traverse`, and

    - `kernels`: which results each kernel computes, of the programs of the classes and of the
        results that are for kernels.
    - `run`: the results of one kernel, of the programs, the side, the results, and their dtypes.
    - `native`: as for `BlockProgram`.
    - `visits`: pairs of a class of blocks and the jaxpr of its block function.
    - `vectorise`: whether loops have the batch axes inside of their blocks.
    - `dtypes`: the dtypes to which the sums are rounded, if not those of `start`.
    """
    wide = [x.dtype for x in start]
    programs = {c: SumProgram(jaxpr, layout, native) for c, jaxpr in visits}
    why_not = [next(filter(None, (p.why_not([i]) for p in programs.values())), "")
               for i in range(len(axes))]  # fmt: skip
    results: list[Any] = [None] * len(axes)
    for side, wanted in kernels(programs, [i for i, x in enumerate(why_not) if not x]):
        natural = (*layout.batch, side.own)
        whole = {i: into is None and axes[i] == natural for i in wanted}
        rounded = {i: (dtypes or wide)[i] if whole[i] else wide[i] for i in wanted}
        for i, x in zip(wanted, run(programs, side, wanted, rounded)):
            missing = [n for n, a in enumerate(natural) if a not in axes[i]]
            x = x.sum(missing) if missing else x
            results[i] = x if into is None or into[i] is None else into[i] + x
    if rest := [i for i, x in enumerate(why_not) if x]:
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


@dataclasses.dataclass(frozen=True)
class SumArrays:
    """What a kernel reads for some results of one side.

    **Arguments:**

    - `table`, `operands`: those of the visit. The `origin` among them is finite, and in units of
        `log 2`.
    - `wanted`: the results, by index, those that need fewer products first.
    - `own`, `streamed`: the matrices of the side and of the other one, as arguments.
    - `origin`: the argument that is the origin of exponents; None without one.
    - `given`: what is read pair by pair, by argument.
    - `cleaned`: the matrices that may hold what is not finite, which products want replaced, and
        `dirty` whether they do.
    - `dtype`: of matrices.
    """

    table: Any
    operands: list[Any]
    wanted: list[int]
    own: list[int]
    streamed: list[int]
    origin: int | None
    given: dict[int, Operand]
    cleaned: list[int]
    dirty: list[Any]
    dtype: Any

    @classmethod
    def of(
        cls,
        programs: dict[int, SumProgram],
        side: Side,
        wanted: list[int],
        layout: GridLayout,
        args: Sequence,
        lengths: dict[str, int],
    ) -> "SumArrays":
        """**Arguments:** as for a kernel, and `lengths` as for `Operand`."""
        table, operands = layout.known_without_corners(args)
        operands, first = list(operands), programs[max(programs)]
        needs = lambda o: len(first.dots([first.gradient(o).pairs]))
        wanted = sorted(wanted, key=needs)
        gradients = {c: [p.gradient(o) for o in wanted] for c, p in programs.items()}
        pairs = {c: [g.pairs for g in gs] for c, gs in gradients.items()}
        inner = [p.factors(eqn) for c, p in programs.items() for eqn in p.dots(pairs[c])]
        summed = [g.matrix for gs in gradients.values() for g in gs]
        mine = side is not ROWS
        own = list(dict.fromkeys(f[mine] for f in inner))
        streamed = list(dict.fromkeys([*(f[not mine] for f in inner), *summed]))
        origins = {p.origin(pairs[c]) for c, p in programs.items()}
        origin = origins.pop() if len(origins) == 1 else None
        reads = [p.needed(pairs[c])[1] for c, p in programs.items()]
        if origin is not None:
            x = jnp.maximum(operands[origin], _LEAST) * LOG2E
            operands[origin] = jnp.maximum(x, _LEAST)
        given = {
            i: Operand(x, layout.in_axes[i], layout, side, lengths)
            for i, x in enumerate(operands)
            if any(r[i] for r in reads)
        }
        cleans = [p.cleaned | p.cleaned_first for p in programs.values()]
        cleaned = [i for i in (*own, *streamed) if any(i in some for some in cleans)]
        dirty = []
        for i in cleaned:
            axes, x = layout.in_axes[i], operands[i]
            along = [n for n, a in enumerate(axes) if a == side.other]
            bad = ~jnp.isfinite(x).all((*along, x.ndim - 2, x.ndim - 1))
            dirty.append(bad.astype(jnp.int32).reshape(-1))
        (dtype,) = first.dtypes
        return cls(table, operands, wanted, own, streamed, origin, given, cleaned, dirty, dtype)
