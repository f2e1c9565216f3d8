"""The primitive under every strategy, which is closed under differentiation.

A *grid* is a tuple of axis sizes `(*batch, rows, columns)`. An array on it has leading axes for
some of the grid's axes, named by negative indices, then the axes of one block. A sweep visits the
live (row, column) pairs of every batch element and applies a block function. It adds each output
over the grid axes that the output does not have:

    out[axes] = sum over the other axes of f(operands at this point of the grid)

The set of sweeps is closed. The tangent of sweep[f] is sweep[tangent of f]. Its transpose is
sweep[transpose of f], with inputs and outputs exchanged. vmap prepends a grid axis. So every order
and mode of differentiation follows from the three rules below.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .._jax import (
    abstract,
    ad,
    batching,
    compile_eagerly,
    inputs_read,
    is_zero,
    jaxpr_as_fun,
    mlir,
    Primitive,
    replay,
    varies,
    vary,
    varying_axes,
    with_inputs,
)
from .._misc import accumulation_dtype
from .grid import BlockGrid, COL, moves, replaced, ROW, unsigned_zeros
from .lowering import loops, select_lowering
from .ring import ColumnsOfDevices, ring_traverse
from .steps import steps_of, transposed_queries


def closure_convert(fns: dict[int, Callable], avals: Sequence) -> tuple[tuple, list]:
    """Traces the block functions. The arrays that they close over become further operands.

    Every function gets all operands. First come those of `avals`, then what the first function
    closes over, then what the second one does, and so on.

    **Returns:** pairs of a class of blocks and a closed jaxpr without constants; and the further
    operands.
    """
    closed = {c: jax.make_jaxpr(f)(*avals) for c, f in fns.items()}
    axes = frozenset().union(*[varying_axes(x) for x in avals])
    consts = [vary(jnp.asarray(x), axes) for j in closed.values() for x in j.consts]
    if consts:
        n, start = len(avals), len(avals)
        everything = [*avals, *[abstract(x, x.shape, x.dtype) for x in consts]]
        for c, j in closed.items():
            stop = start + len(j.consts)

            def with_consts(*xs, j=j, mine=slice(start, stop)):
                whole = j.replace(jaxpr=j.jaxpr, consts=xs[mine])
                again = ft.partial(replay, whole) if axes else jaxpr_as_fun(whole)
                return again(*xs[:n])

            closed[c], start = jax.make_jaxpr(with_consts)(*everything), stop
    return tuple(closed.items()), consts


def table_per_hop(
    ring: ColumnsOfDevices,
    classify: Callable,
    operands: Sequence,
    in_axes: Sequence[tuple[int, ...]],
    reads: Sequence[int],
    grid: tuple[int, ...],
) -> tuple[Any, list]:
    """Makes a ring whose table at each hop is what `classify` returns for the operands `reads`, as
    they are at that hop.

    **Returns:** the ring, and the arrays that `classify` closes over. These are to become the
    next operands, on none of the grid's axes.
    """
    at_hop = []
    for i in reads:
        x, axes = operands[i], in_axes[i]
        shape = tuple(grid[a] * (ring.together if a == COL else 1) for a in axes)
        shape += x.shape[len(axes) :]
        at_hop.append(abstract(x, shape, x.dtype))
    ((_, jaxpr),), consts = closure_convert({0: lambda *xs: [classify(*xs)]}, at_hop)
    table_axes = tuple(range(-len(grid), 0)) if jaxpr.out_avals[0].ndim > 2 else (ROW, COL)
    reads = (*reads, *range(len(operands), len(operands) + len(consts)))
    fields = dict(classify=jaxpr, reads=reads, table_axes=table_axes, rank=len(grid))
    return dataclasses.replace(ring, **fields), consts


def block_dtype(x: Any) -> Any:
    """The dtype in which block functions read an array. Floats are read in the accumulation dtype,
    so that their cotangents round once.
    """
    return accumulation_dtype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype


def block_aval(x: Any, axes: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """The abstract value of a block of an array with these grid axes."""
    return abstract(x, jnp.shape(x)[len(axes) :], block_dtype(x))


def sweep(
    fns: dict[int, Callable],
    operands: Sequence,
    in_axes: Sequence[tuple[int, ...]],
    out_axes: Sequence[tuple[int, ...]],
    *,
    layout: BlockGrid,
    table: Any = None,
    dtypes: Sequence = (),
) -> list:
    """Adds up what the block functions return; see the module's docstring.

    **Arguments:**

    - `fns`: per class of block, a function of the operands' blocks that returns a list of blocks.
    - `operands`, `in_axes`: arrays with leading grid axes, and these axes. Block functions read
        floats in the accumulation dtype, for arrays of all dtypes.
    - `out_axes`: the grid axes that each output keeps.
    - `layout`: the grid.
    - `table`: the class of each block, on the `table_axes` of the `layout`; or None.
    - `dtypes`: the dtypes to which complete sums are rounded, once; by default they are not.

    **Returns:** a list of arrays, each with its grid axes in front of the axes of a block.
    """
    args, static = sweep_arguments(
        fns, operands, in_axes, out_axes, layout=layout, table=table, dtypes=dtypes
    )
    return sweep_p.bind(*args, **static)


def sweep_arguments(
    fns: dict[int, Callable],
    operands: Sequence,
    in_axes: Sequence[tuple[int, ...]],
    out_axes: Sequence[tuple[int, ...]],
    *,
    layout: BlockGrid,
    table: Any = None,
    dtypes: Sequence = (),
) -> tuple[list, dict[str, Any]]:
    """The arguments and the parameters of the primitive by which `sweep` adds up."""
    axes = varying_axes(*operands, *([] if table is None else [table]))
    operands = [vary(x, axes) for x in operands]
    avals = [block_aval(x, a) for x, a in zip(operands, in_axes)]
    visits, consts = closure_convert(fns, avals)
    layout = dataclasses.replace(layout, in_axes=tuple(in_axes) + ((),) * len(consts))
    lead = [] if layout.table_axes is None else [vary(table, axes)]
    operands = [*operands, *[vary(x, axes) for x in consts]]
    if not layout.stage:  # A lowering knows the operands of other visits by their order.
        visits, layout, operands = _of_what_is_read(visits, layout, operands)
    sums = [a.dtype for a in visits[0][1].out_avals]
    dtypes = () if list(dtypes) == sums else tuple(jnp.dtype(d) for d in dtypes)
    static = dict(visits=visits, layout=layout, out_axes=tuple(out_axes), dtypes=dtypes)
    return [*lead, *operands], static


def _of_what_is_read(
    visits: tuple, layout: BlockGrid, operands: list
) -> tuple[tuple, BlockGrid, list]:
    """The same visit without the operands that nothing reads.

    The tangent of a function that is linear in some operands does not read them. If it had them
    nevertheless, the Jacobian of a linear map would seem to depend on where it is taken. JAX then
    could not transpose what is computed from this Jacobian, as `jax.lax.custom_root` does.
    """
    read = [any(r) for r in zip(*[inputs_read(j) for _, j in visits])]
    looked_up = {*layout.lookups, *(() if layout.ring is None else layout.ring.reads)}
    if layout.transposed:  # Loops transpose the first operand.
        looked_up.add(0)
    read = [r or i in looked_up for i, r in enumerate(read)]
    if all(read):
        return visits, layout, operands
    kept = [i for i, r in enumerate(read) if r]
    visits = tuple((c, with_inputs(j, read)) for c, j in visits)
    return visits, layout.only(kept), [operands[i] for i in kept]


def execute(*args, visits, layout, out_axes, dtypes, vectorise, traverse, finishes=False):
    """Evaluates a sweep by the visit that `select_lowering` chose."""
    query = len(args) - len(layout.in_axes)
    transposed = (
        layout.transposed and not vectorise and args[query].ndim == len(layout.in_axes[0]) + 2
    )
    if transposed:
        # The fold reads its queries in this form, too. So XLA copies them once, or not at all.
        rows = transposed_queries(args[query], layout.in_axes[0], layout)
        args = replaced(args, [query], [rows])
    steps = steps_of(visits, layout, out_axes, range(len(out_axes)), vectorise, transposed)
    zeros = [np.zeros(y.shape, y.dtype) for y in visits[0][1].out_avals]
    if finishes and dtypes and layout.ring is None:
        traverse = ft.partial(traverse, dtypes=dtypes)
    sums = ring_traverse(steps, layout, args, zeros, out_axes, traverse=traverse)
    sums = [unsigned_zeros(x) if layout.batch_invariant else x for x in sums]
    return [x.astype(d) for x, d in zip(sums, dtypes)] if dtypes else sums


def primitive_rules(primitive, run, params, block_shapes):
    """Gives a grid primitive its evaluation, abstract evaluation, lowering and batching.

    **Arguments:**

    - `primitive`: a `Primitive` with the parameters `layout`, `out_axes` and others.
    - `run`: its evaluation, `execute` of this module or of `fold.py`.
    - `params`: the names of its parameters.
    - `block_shapes`: a function `(avals, **params)` that lists the shape and the dtype of one block
        of each output.
    """

    def abstract_eval(*avals, layout, out_axes, **kw):
        # Inside of `jax.shard_map`, JAX works out which mesh axes each output varies over.
        if any(varies(a) for a in avals):
            how = loops(not layout.own_pages)
            f = ft.partial(run, layout=layout, out_axes=out_axes, **how, **kw)
            return jax.make_jaxpr(f)(*avals).out_avals
        blocks = block_shapes(avals, layout=layout, **kw)
        return [
            jax.core.ShapedArray(layout.shape(a) + shape, dtype)
            for a, (shape, dtype) in zip(out_axes, blocks)
        ]

    def lowering(ctx, *args, **kw):
        how = select_lowering(ctx, kw["layout"], kw["visits"])
        return mlir.lower_fun(ft.partial(run, **how), multiple_results=True)(ctx, *args, **kw)

    def batch(args, dims, *, layout, out_axes, **kw):
        # vmap(sweep[f]) is the sweep of f on a grid with one more batch axis in front. Operands
        # that are mapped have that axis, and others are read again for each index. If the grid's
        # first batch axis has size 1, the new axis replaces it, and `reused` is True. Beside an
        # axis of size 1, XLA would copy what is transposed. Outputs get that axis back.
        first = -len(layout.grid)
        reused = layout.ring is None and first in layout.batch and layout.grid[0] == 1
        new = first if reused else first - 1
        size = next(x.shape[d] for x, d in zip(args, dims) if d is not None)
        axes = layout.in_axes
        axes = axes if layout.table_axes is None else (layout.table_axes, *axes)
        operands, in_axes = [], []
        for x, d, a in zip(args, dims, axes):
            x = x if d is None else jnp.moveaxis(x, d, 0)
            if new in a:
                x = jnp.squeeze(x, a.index(new) + (d is not None))
                a = tuple(n for n in a if n != new)
            operands.append(x)
            in_axes.append(a if d is None else (new, *a))
        table_axes = None if layout.table_axes is None else in_axes.pop(0)
        tokens = layout.tokens
        if reused:
            tokens = tuple(dataclasses.replace(x, mapped=new) for x in tokens)
        layout = dataclasses.replace(
            layout,
            tokens=tokens,
            grid=(size, *layout.grid[reused:]),
            in_axes=tuple(in_axes),
            table_axes=table_axes,
            known=layout.known if table_axes == layout.table_axes else None,
        )
        of_one = [new in a for a in out_axes]
        out_axes = tuple(a if one else (new, *a) for a, one in zip(out_axes, of_one))
        outs = primitive.bind(*operands, layout=layout, out_axes=out_axes, **kw)
        outs = [jnp.expand_dims(x, 1) if one else x for x, one in zip(outs, of_one)]
        return outs, [0] * len(outs)

    primitive.multiple_results = True
    compile_eagerly(primitive, params)
    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, lowering)
    batching.primitive_batchers[primitive] = batch


def _block_shapes(avals, *, visits, dtypes, **kw):
    outs = visits[0][1].out_avals
    return [(a.shape, d) for a, d in zip(outs, dtypes or [a.dtype for a in outs])]


sweep_p = Primitive("attention_sweep")
primitive_rules(
    sweep_p,
    execute,
    ("visits", "layout", "out_axes", "dtypes"),
    _block_shapes,
)


def _jvp(primals, tangents, *, visits, layout, out_axes, dtypes):
    # `out[axes] = sum_{pairs} f(x_1, ..., x_n)` is linear in what f returns. So its tangent is the
    # sum, over the same pairs, of the tangent of f:
    #
    #     dout[axes] = sum_{pairs} sum_i (df / dx_i) dx_i.
    #
    # That is the sweep of a function g(x_1, ..., x_n, dx_i, ...), made by `jax.jvp` of f on blocks.
    # Its operands lie on the grid as those of f do; tangents of operands that do not move are left
    # out. So a tangent costs the memory of one more sweep, never that of all pairs.
    static = dict(visits=visits, layout=layout, out_axes=out_axes, dtypes=dtypes)
    out = sweep_p.bind(*primals, **static)
    table, primals = layout.split(primals)
    _, tangents = layout.split(tangents)
    active = [i for i, t in enumerate(tangents) if not is_zero(t)]
    n = len(primals)

    def tangent(f):
        def g(*blocks):
            full = blocks[:n]
            h = lambda *xs: f(*replaced(full, active, xs))  # noqa: E731
            return jax.jvp(h, tuple(full[i] for i in active), tuple(blocks[n:]))[1]

        return g

    fns = {c: tangent(jaxpr_as_fun(j)) for c, j in visits}
    read = visits[0][1].in_avals
    operands = [*primals, *[tangents[i].astype(read[i].dtype) for i in active]]
    in_axes = layout.in_axes + tuple(layout.in_axes[i] for i in active)
    layout = dataclasses.replace(layout, stage="")
    return out, sweep(fns, operands, in_axes, out_axes, layout=layout, table=table, dtypes=dtypes)


def transpose(cts, *args, visits, layout, out_axes, dtypes=()):
    # The sweep is linear in some operands y_i and depends on others x in any way,
    #
    #     out_k[axes_k] = sum_{pairs} sum_i A_ki(x) y_i.
    #
    # In <ct, out> each pair contributes sum_k <ct_k, A_ki(x) y_i>, where ct_k is constant over the
    # grid axes that out_k lacks. Collecting what multiplies y_i,
    #
    #     ct y_i[axes of y_i] = sum_{pairs} sum_k A_ki(x)^T ct_k,
    #
    # summed over the grid axes that y_i lacks. That is a sweep again. Its operands are x and the
    # cotangents, on the axes of the outputs. Its outputs are on the axes of the y_i. A_ki(x)^T is
    # `jax.linear_transpose` of the block function. What was read in many blocks is now summed, and
    # what was summed is read. Only the axes of inputs and outputs change places.
    #
    # Each result is rounded to the dtype of its y_i once its sum is complete. The cotangents may be
    # of any dtype, too.
    #
    # If not `fused`, one visit finds the results that move with columns, and another those of rows.
    # Each then has its accumulators in registers or caches, at the price of a second pass.
    del dtypes
    table, operands = layout.split(args)
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    known = [i for i in range(len(operands)) if i not in linear]
    active = [i for i, ct in enumerate(cts) if not is_zero(ct)]
    results = [None] * len(operands)
    groups = [linear]
    if not layout.fused:
        of_columns = [i for i in linear if moves(layout.in_axes[i])]
        groups = [of_columns, [i for i in linear if i not in of_columns]]
    for group in groups:
        if not (active and group):
            continue

        def transposed(jaxpr, mine=[linear.index(i) for i in group]):
            avals = [jaxpr.in_avals[i] for i in linear]

            def g(*blocks):
                full = replaced([None] * len(operands), known, blocks)

                def h(*xs):
                    ys = jaxpr_as_fun(jaxpr)(*replaced(full, linear, xs))
                    return [ys[i] for i in active]

                like = [abstract(a, a.shape, a.dtype) for a in avals]
                outs = jax.linear_transpose(h, *like)(list(blocks[len(known) :]))
                return [outs[i] for i in mine]

            return g

        fns = {c: transposed(j) for c, j in visits}
        in_axes = [*[layout.in_axes[i] for i in known], *[out_axes[i] for i in active]]
        stage = "backward" if layout.stage == "tangent" else ""
        outs = sweep(
            fns,
            [*[operands[i] for i in known], *[cts[i] for i in active]],
            in_axes,
            [layout.in_axes[i] for i in group],
            layout=dataclasses.replace(layout.only(known), stage=stage),
            table=table,
            dtypes=[operands[i].aval.dtype for i in group],
        )
        for i, y in zip(group, outs):
            results[i] = y
    return results if layout.table_axes is None else [None, *results]


ad.primitive_jvps[sweep_p] = _jvp
ad.primitive_transposes[sweep_p] = transpose
