"""The online softmax as one more visit of the grid, with a sweep for its tangent.

In each block, let `p` be `exp(s - max)`. The numerator gains `v^T p`, and the denominator gains
`sum p`. The maximum is a gauge: the value of a Carry does not depend on it, so its tangent is zero.
With the maximum held fixed, numerator and denominator are sums over pairs. Their tangent is
therefore a sweep, and its transpose is the usual flash backward of five products.

Blocks of logits are `[keys, rows]`, values `[keys, v]` and numerators `[rows, v]`. In this
orientation no product of the fold or of its backward needs a large transpose. On a CPU, the fold
alone is faster in the other one, see `fold_step.py`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._carry import finite_origin, named_output
from .._jax import ad, is_zero, jaxpr_as_fun, Primitive, vary, varying_axes
from .._pairs import read_by
from .centred_tangent import centred_dot, recentred
from .grid import BlockGrid, replaced, ROW, unsigned_zeros
from .nonfinite import complete
from .products import dot
from .ring import ring_traverse
from .steps import Finish, FoldStep, transposed_queries
from .sweep import (
    block_aval,
    closure_convert,
    primitive_rules,
    sweep_arguments,
    sweep_p,
    table_per_hop,
)


def fold(  # noqa: PLR0913 (the parts of a visit, which rules bind one by one)
    logits: dict[int, Callable],
    operands: Sequence,
    values: dict[int, Callable],
    value_operands: Sequence,
    value_axes: Sequence[tuple[int, ...]],
    layout: BlockGrid,
    *,
    table: Any = None,
    classify: Callable | None = None,
    reads: Sequence[int] = (),
    products: tuple = (),
) -> list:
    """Adds up values, weighted by a softmax, over the live blocks of a grid
    `(*batch, rows, columns)`.

    **Arguments:**

    - `logits`: per class of block, a function of the operands' blocks. It returns `[s]` or
        `[s, w]`. The logits `s` are `[keys, rows]`, `-inf` where masked. With dropout, or a
        function whose mean is asked for, `w` `[keys, rows]` are the factors on the probabilities in
        the numerator.
    - `operands`: arrays that `logits` reads, whose grid axes are the `in_axes` of the `layout`.
    - `values`: per class, a function of the blocks of the operands that the `layout` has as
        `shared`, then of those of `value_operands`. It returns a finite block `[keys, v]` and its
        poison `[keys]`. The poison is NaN for a key that makes the rows that see it NaN, else 0;
        see `nonfinite.py`. With `[keys, groups, v]` and `[keys, groups]`, each group of rows has
        different values. Where no pair is masked, `values` may return the block alone, which need
        not be finite.
    - `value_operands`, `value_axes`: arrays that `values` reads, and their grid axes.
    - `layout`: the grid. With a `ring`, columns rotate around a mesh axis.
    - `table`: the class of each block, on the `table_axes` of the `layout`; or None.
    - `classify`: with a ring, a function that returns the table of a hop, or None.
    - `reads`: the indices of the operands that `classify` reads, as they are at the hop.
    - `products`: keyword arguments of `dot`, as sorted pairs.

    **Returns:**

    The numerator, the denominator and the maximum of a Carry. Each has the batch and row axes of
    the grid in front of its blocks, `[rows, v]`, `[rows]` and `[rows]`.
    """
    args, static = fold_arguments(
        logits,
        operands,
        values,
        value_operands,
        value_axes,
        layout,
        table=table,
        classify=classify,
        reads=reads,
        products=products,
    )
    return fold_p.bind(*args, out_axes=((*layout.batch, ROW),) * 3, **static)


def with_tables_of_hops(
    operands: Sequence, layout: BlockGrid, classify: Callable | None, reads: Sequence[int], axes
) -> tuple[list, tuple[tuple[int, ...], ...], Any]:
    """The operands of a visit, which vary over the mesh `axes`, their grid axes, and its ring. If
    the visit goes around a ring and there is a `classify`, each hop makes its table by that. What
    it closes over are further operands.
    """
    operands, in_axes, ring = [vary(x, axes) for x in operands], layout.in_axes, layout.ring
    if ring is None or classify is None:
        return operands, in_axes, ring
    ring, consts = table_per_hop(ring, classify, operands, in_axes, reads, layout.grid)
    operands = [*operands, *[vary(x, axes) for x in consts]]
    return operands, (*in_axes, *[()] * len(consts)), ring


def fold_arguments(  # noqa: PLR0913 (the parts of a visit, which rules bind one by one)
    logits: dict[int, Callable],
    operands: Sequence,
    values: dict[int, Callable],
    value_operands: Sequence,
    value_axes: Sequence[tuple[int, ...]],
    layout: BlockGrid,
    *,
    table: Any = None,
    classify: Callable | None = None,
    reads: Sequence[int] = (),
    products: tuple = (),
) -> tuple[list, dict[str, Any]]:
    """The arguments and the parameters of the primitive by which `fold` adds up, except its
    `out_axes`.
    """
    axes = varying_axes(*operands, *value_operands, *([] if table is None else [table]))
    operands, in_axes, ring = with_tables_of_hops(operands, layout, classify, reads, axes)
    avals = [block_aval(x, a) for x, a in zip(operands, in_axes)]
    visits, consts = closure_convert(logits, avals)
    given = [(operands[i], in_axes[i]) for i in layout.shared]
    given += zip(value_operands, value_axes)
    weigh, more = closure_convert(values, [block_aval(x, a) for x, a in given])
    in_axes = (*in_axes, *[()] * len(consts), *value_axes, *[()] * len(more))
    layout = dataclasses.replace(layout, in_axes=in_axes, ring=ring, stage="fold")
    lead = [] if layout.table_axes is None else [vary(table, axes)]
    args = [*lead, *operands, *[vary(x, axes) for x in (*consts, *value_operands, *more)]]
    return args, dict(visits=visits, values=weigh, layout=layout, products=products)


def execute(  # noqa: PLR0913 (the parts of a visit, which rules bind one by one)
    *args,
    visits,
    values,
    layout,
    out_axes,
    products,
    vectorise,
    traverse,
    finishes=False,
    results: Finish | None = None,
):
    """Evaluates the fold by the visit that `select_lowering` chose.

    With `vectorise`, the batch axes are inside of the blocks, so the steps are mapped over them.

    **Arguments:**

    - `results`: what to return in place of the Carry, if the visit `finishes` rows. Its function
        gets the numerator as `[v, rows]`.
    """
    acc = visits[0][1].out_avals[0].dtype
    # Where each array has all blocks, XLA:CPU merges logits with the equal ones of a derivative.
    own = layout.shared, layout.transposed and not (vectorise and layout.differentiated)
    first, steps = FoldStep(visits[0][1], values[0][1], products, *own), {}
    for (c, logits), (_, weigh) in zip(visits, values):
        step: Callable = FoldStep(logits, weigh, products, *own)
        if vectorise:
            for axis in reversed(layout.batch):
                mapped = [0 if axis in a else None for a in layout.in_axes]
                step = jax.vmap(step, (0, mapped), axis_size=layout.grid[axis])
        steps[c] = step
    rows, unclean = layout.block[1], any(len(weigh.out_avals) == 1 for _, weigh in values)
    shape = (rows, first.width) if first.by_rows else (first.width, rows)
    start = [np.zeros(shape, acc), np.zeros(rows, acc), np.full(rows, -np.inf, acc)]

    def finish(num, den, top, *blocks):
        if unclean:
            num, den, top = complete(num, den, top, -1 if first.by_rows else -2)
        if layout.batch_invariant:
            num = unsigned_zeros(num)
        if results is not None:
            return results([num, den, top], *blocks)
        return [num if first.by_rows else jnp.swapaxes(num, -1, -2), den, top]

    if first.transposed:
        at = len(args) - len(layout.in_axes)
        query = args[at]
        rows = transposed_queries(query, layout.in_axes[0], layout, lie=not vectorise)
        args = replaced(args, [at], [rows])
    done = Finish(finish) if results is None else dataclasses.replace(results, fn=finish)
    return ring_traverse(steps, layout, args, start, out_axes, finish=done, traverse=traverse)


def _block_shapes(avals, *, layout, visits, values, **kw):
    acc, rows = visits[0][1].out_avals[0].dtype, layout.block[1]
    width = values[0][1].out_avals[0].shape[-1]
    return [((rows, width), acc), ((rows,), acc), ((rows,), acc)]


fold_p = Primitive("attention_fold")
_STATIC = ("visits", "values", "layout", "out_axes", "products")
primitive_rules(fold_p, execute, _STATIC, _block_shapes)


def _jvp(primals, tangents, *, visits, values, layout, out_axes, products):
    # With the final maximum m of a row, the fold returns
    #
    #     num = sum_j e^{s_j - m} w_j v_j        den = sum_j e^{s_j - m}        top = m
    #
    # over the row's visible keys j, w_j being the factor on the probability. The value that a Carry
    # stands for, num e^m and den e^m, does not depend on m. So m may be held fixed while s, w and v
    # move: its tangent is zero (`ad.Zero` below), and the other two have the tangents
    #
    #     dnum = sum_j p_j (w_j ds_j v_j + w_j dv_j + dw_j v_j)     dden = sum_j p_j ds_j
    #
    # with p_j = e^{s_j - m}. The factor of dropout does not move.
    #
    # Both are sums, over pairs, of a function of one block. That is a sweep on the same grid, whose
    # operands are those of the fold, the maximum m, and the tangents. It is linear in the tangents,
    # so JAX transposes it into the backward pass (`transpose` in sweep.py). If a and c are the
    # cotangents of num and den, that of a logit is
    #
    #     ct s_j = p_j (w_j <a, v_j> + c),
    #
    # the usual p (dp - delta), as c = -<a, num / den> comes from the division in `Carry.output`. A
    # kernel for the backward recognises that sweep by its stage.
    #
    # Narrow products round `p_j ds_j`. Where all logits of a row move alike, these errors exceed
    # what is left of dnum - (num / den) dden. So there `centred_dot` and `recentred` find the same
    # sum relative to the mean of ds; see centred_tangent.py.
    static = dict(visits=visits, values=values, layout=layout, products=products)
    whole = dataclasses.replace(layout, differentiated=True)
    outs = fold_p.bind(*primals, out_axes=out_axes, **static | dict(layout=whole))
    num, den, top = named_output(*outs)
    table, primals = layout.split(primals)
    _, tangents = layout.split(tangents)
    read = operand_dtypes(visits, values, layout)
    moved = {i: t.astype(read[i]) for i, t in enumerate(tangents) if not is_zero(t)}
    args, sums = tangent_arguments(primals, moved, top, table, **static)
    dnum, dden, *again = sweep_p.bind(*args, **sums)
    if again:
        dnum = recentred(dnum, dden, again[0], num, den)
    return (num, den, top), (dnum, dden, ad.Zero(jax.typeof(top)))


def operand_dtypes(visits: tuple, values: tuple, layout: BlockGrid) -> list:
    """The dtypes in which block functions read the operands of a fold."""
    own = values[0][1].in_avals[len(layout.shared) :]
    return [a.dtype for a in (*visits[0][1].in_avals, *own)]


def tangent_arguments(  # noqa: PLR0913 (the parts of a visit, which rules bind one by one)
    primals: Sequence,
    moved: dict[int, Any],
    origin: Array,
    table: Any,
    *,
    visits: tuple,
    values: tuple,
    layout: BlockGrid,
    products: tuple,
    sinks: Sequence[Array] = (),
) -> tuple[list, dict[str, Any]]:
    """Builds the sweep that computes the tangents of a fold's numerator and denominator.

    **Arguments:**

    - `primals`: the operands of the fold.
    - `moved`: the tangents of those that move, by index.
    - `origin`: the origin of the exponents of each row, such as their maximum.
    - `table`, `visits`, `values`, `layout`, `products`: those of the fold.
    - `sinks`: what `centred_dot` reads of the sinks of each row, with the axes of `origin`. The
        sweep reads it if products are narrow and logits move.

    **Returns:** the arguments and the parameters of the sweep. Its results are the tangents of
    numerator and denominator. If products are narrow, the former is relative to a numerator that is
    rounded as it is in this visit, which is the third result; see `recentred`.
    """
    count, n = len(primals), len(visits[0][1].in_avals)
    active, rows = list(moved), (*layout.batch, ROW)
    # What the logits read is `primals[:n]`, and what the values read is `primals[i]` for i in
    # `read`. `inner` and `outer` say which of the former and of the latter move.
    read = [*layout.shared, *range(n, count)]
    inner, outer = [i for i in active if i < n], [j for j, i in enumerate(read) if i in active]
    kw = dict(products)
    narrow = kw.get("operand_dtype") is not None
    sinks = sinks if narrow and inner else ()

    def directional(f, xs, where, tangents):
        """The result of `f` at `xs` and its tangent, which is None if no operand moves."""
        if not where:
            return f(*xs), None
        return jax.jvp(
            lambda *ys: f(*replaced(xs, where, ys)), tuple(xs[i] for i in where), tangents
        )

    def tangent(logits, weigh):
        weighs = len(logits.out_avals) > 1 and bool(read_by(logits.jaxpr, 1) & {*inner})

        def g(*blocks):
            full, m, moved = blocks[:count], blocks[count], blocks[count + 1 + len(sinks) :]
            (s, *weight), ds = directional(
                jaxpr_as_fun(logits), full[:n], inner, moved[: len(inner)]
            )
            of_values = tuple(moved[active.index(read[j])] for j in outer)
            (v, *_), dv = directional(
                jaxpr_as_fun(weigh), [full[i] for i in read], outer, of_values
            )
            # A maximum is a gauge and has no tangent, but another origin may have one.
            p = jnp.exp(s - finite_origin(m)[None])
            kept = p * weight[0] if weight else p
            dnum, dden = jnp.zeros((p.shape[1], v.shape[-1]), p.dtype), jnp.zeros_like(m)
            again = []
            if ds is not None:
                if narrow:
                    of_sinks = blocks[count + 1 :][: len(sinks)]
                    dnum, *again = centred_dot(ds[0], p, kept, v, *of_sinks, products=products)
                else:
                    dnum = dot(kept * ds[0], v, (0, 0), **kw)
                dden = (p * ds[0]).sum(0)
            if weighs and ds is not None:
                dnum = dnum + dot(p * ds[1], v, (0, 0), **kw)
            if dv is not None:
                dnum = dnum + dot(kept, dv[0], (0, 0), **kw)
            return [dnum, dden, *again]

        return g

    # The sums are those of the numerator, of the denominator and, for `recentred`, of the numerator
    # again.
    return sweep_arguments(
        {c: tangent(logits, weigh) for (c, logits), (_, weigh) in zip(visits, values)},
        [*primals, origin, *sinks, *moved.values()],
        [*layout.in_axes[:count], *[rows] * (1 + len(sinks)), *[layout.in_axes[i] for i in active]],
        (rows,) * (3 if narrow and inner else 2),
        layout=dataclasses.replace(layout, stage="tangent"),
        table=table,
    )


ad.primitive_jvps[fold_p] = _jvp
