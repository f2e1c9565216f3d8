"""The derivative-closed primitive under every strategy.

A *grid* is a tuple of axis sizes `(*batch, rows, columns)`. An array on it has leading axes for
some of the grid's axes, named by negative indices, then the axes of one block. A sweep visits the
live (row, column) pairs of every batch element, applies a block function, and adds each output
over the grid axes that the output does not have:

    out[axes] = sum over the other axes of f(operands at this point of the grid)

The set of sweeps is closed: the tangent of sweep[f] is sweep[tangent of f], its transpose is
sweep[transpose of f] with inputs and outputs exchanged, and vmap prepends a grid axis. So every
order and mode of differentiation follows from the three rules below.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ._carry import accumulation
from ._compat import (
    abstract,
    ad,
    batching,
    ClosedJaxpr,
    is_zero,
    jaxpr_as_fun,
    mlir,
    partitioned_automatically,
    Primitive,
    varies,
    vary,
    varying_axes,
)


ROW, COL = -2, -1
EMPTY, PARTIAL, FULL = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Tag:
    """What a kernel needs to recognise a hot visit: the stage (`"fold"`, `"tangent"` or
    `"backward"`), a static description of score and mask, and the role of each operand/result.
    """

    stage: str
    spec: Hashable
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The grid, the `(columns, rows)` of one block of logits, and the grid axes of each operand
    and of the table of live blocks.

    The table holds `EMPTY`, `PARTIAL` or `FULL` per block; without one every pair is visited.
    """

    grid: tuple[int, ...]
    block: tuple[int, int]
    in_axes: tuple[tuple[int, ...], ...]
    table_axes: tuple[int, ...] | None = None

    def shape(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.grid[a] for a in axes)

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(range(-len(self.grid), ROW))

    def split(self, args: Sequence) -> tuple:
        """The table (or None) and the operands."""
        return (None, args) if self.table_axes is None else (args[0], args[1:])


# The traversal, shared by sweeps and the softmax fold.


def _window(x: Any, axes: tuple[int, ...], at: dict) -> tuple[list, list]:
    """Start and size of the slice of `x` at the given grid indices."""
    start = [jnp.int32(at.get(a, 0)) for a in axes] + [jnp.int32(0)] * (x.ndim - len(axes))
    size = [1 if a in at else n for a, n in zip(axes, x.shape)] + list(x.shape[len(axes) :])
    return start, size


def pick(x: Any, axes: tuple[int, ...], at: dict) -> Any:
    """The block of `x` at the given grid indices; grid axes not in `at` are kept whole."""
    if not any(a in at for a in axes):
        return x
    start, size = _window(x, axes, at)
    kept = [n for a, n in zip(axes, size) if a not in at] + size[len(axes) :]
    return lax.dynamic_slice(x, start, size, allow_negative_indices=False).reshape(kept)


def put(x: Array, axes: tuple[int, ...], at: dict, block: Array) -> Array:
    """`x` with the block that `pick` gives exchanged."""
    if not any(a in at for a in axes):
        return block
    start, size = _window(x, axes, at)
    return lax.dynamic_update_slice(x, block.reshape(size), start, allow_negative_indices=False)


def _loop(lo, hi, body, state):
    if isinstance(lo, int) and isinstance(hi, int) and hi - lo == 1:
        return body(lo, state)
    return lax.fori_loop(jnp.int32(lo), jnp.int32(hi), body, state)


def _divide(n: Array, size: int) -> tuple[Array, Array]:
    return lax.div(n, jnp.int32(size)), lax.rem(n, jnp.int32(size))


def _itinerary(table: Any, classes: Sequence[int]) -> tuple[Array, Array]:
    """Per row: its columns sorted by class, and where each class begins and ends."""
    columns = table.shape[-1]
    rank = jnp.full(table.shape, len(classes), jnp.int32)
    for n, c in enumerate(classes):
        rank = jnp.where(table == c, n, rank)
    here = jnp.arange(columns, dtype=jnp.int32).reshape((1,) * (table.ndim - 1) + (columns,))
    order = jnp.sort(rank * columns + here, axis=-1) % columns
    ends = [jnp.sum(rank <= n, -1, dtype=jnp.int32) for n in range(len(classes))]
    return order, jnp.stack([jnp.zeros_like(ends[0]), *ends], -1)


def traverse(
    steps: dict[int, Callable],
    layout: Layout,
    args: Sequence,
    accumulators: Sequence,
    axes: Sequence[tuple[int, ...]],
    *,
    vectorise: bool,
) -> list:
    """Visits the live pairs: rows outside, their live columns inside, full blocks first.

    **Arguments:**

    - `steps`: per class of block, a function `(accumulator blocks, operand blocks) -> blocks`.
    - `accumulators`, `axes`: arrays on the grid, updated in place at each visit.
    - `vectorise`: whether the batch axes stay whole in the blocks instead of being looped over.
        What the compiler partitions over devices must not be looped over.

    Nothing here is ever differentiated, so loop bounds may depend on data.
    """
    table, operands = layout.split(args)
    classes = sorted(steps, reverse=True)
    batch = () if vectorise else layout.batch
    sizes = layout.shape(batch)
    rows, columns = layout.grid[ROW], layout.grid[COL]
    order = bounds = None
    table_axes = layout.table_axes or ()
    if table is not None:
        if vectorise:
            lead = tuple(range(table.ndim - 2))
            least, most = table.min(lead), table.max(lead)
            table = jnp.where(least == FULL, FULL, jnp.where(most == EMPTY, EMPTY, PARTIAL))
            table_axes = (ROW, COL)
        order, bounds = _itinerary(table, classes)
        mixed = varying_axes(*accumulators)
        order, bounds = vary(order, mixed), vary(bounds, mixed)

    def row(n, accs):
        at = {}
        for a, size in zip((ROW, *reversed(batch)), (rows, *reversed(sizes))):
            n, at[a] = (n // size, n % size) if isinstance(n, int) else _divide(n, size)
        near = [x if COL in a else pick(x, a, at) for x, a in zip(operands, layout.in_axes)]
        local = [x if COL in a else pick(x, a, at) for x, a in zip(accs, axes)]
        mine = None if table is None else pick(order, table_axes, at)
        ends = None if table is None else pick(bounds, table_axes[:-1], at)

        def visit(step, t, local):
            here = {**at, COL: t if mine is None else pick(mine, (COL,), {COL: t})}
            blocks = [pick(x, a, here) if COL in a else x for x, a in zip(near, layout.in_axes)]
            old = [pick(x, a, here) if COL in a else x for x, a in zip(local, axes)]
            new = step(old, blocks)
            return [put(x, a, here, y) if COL in a else y for x, a, y in zip(local, axes, new)]

        for n, c in enumerate(classes):
            span = (0, columns) if ends is None else (ends[n], ends[n + 1])
            local = _loop(*span, ft.partial(visit, steps[c]), local)
        return [x if COL in a else put(old, a, at, x) for old, x, a in zip(accs, local, axes)]

    return _loop(0, rows * math.prod(sizes), row, list(accumulators))


def loops_over_batch(ctx, layout: Layout) -> bool:
    """Whether to loop over the batch axes: on one CPU, unless the blocks are tiny."""
    cpu = tuple(ctx.module_context.platforms) == ("cpu",)
    logits = math.prod(layout.shape(layout.batch)) * math.prod(layout.block)
    small = logits <= (2**20 if layout.grid[ROW] == layout.grid[COL] == 1 else 2**17)
    return cpu and not small and not partitioned_automatically(ctx)


# The primitive.


def hoist(fns: dict[int, Callable], avals: Sequence) -> tuple[tuple, list]:
    """Traces the block functions; what they close over becomes further operands."""
    closed = {c: jax.make_jaxpr(f)(*avals) for c, f in fns.items()}
    consts = [jnp.asarray(x) for j in closed.values() for x in j.consts]
    if consts:
        n, start = len(avals), len(avals)
        everything = [*avals, *[abstract(x, x.shape, x.dtype) for x in consts]]
        for c, j in closed.items():
            stop = start + len(j.consts)

            def with_consts(*xs, jaxpr=j.jaxpr, mine=slice(start, stop)):
                return jaxpr_as_fun(ClosedJaxpr(jaxpr, xs[mine]))(*xs[:n])

            closed[c], start = jax.make_jaxpr(with_consts)(*everything), stop
    return tuple(closed.items()), consts


def block_aval(x: Any, axes: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Block functions read floats in the accumulation dtype, so cotangents round once."""
    dtype = x.dtype
    if jnp.issubdtype(dtype, jnp.floating):
        dtype = accumulation(dtype)
    return abstract(x, jnp.shape(x)[len(axes) :], dtype)


def sweep(
    fns: dict[int, Callable],
    operands: Sequence,
    in_axes: Sequence[tuple[int, ...]],
    out_axes: Sequence[tuple[int, ...]],
    *,
    layout: Layout,
    table: Any = None,
    tag: Tag | None = None,
) -> list:
    """Adds up what the block functions return; see the module's docstring.

    **Arguments:**

    - `fns`: per class of block, a function of the operands' blocks returning a list of blocks.
    - `operands`, `in_axes`: arrays with leading grid axes. Tangents are float32 or wider.
    - `out_axes`: the grid axes that each output keeps.
    - `layout`, `table`: the grid and, optionally, the class of each block.
    """
    axes = varying_axes(*operands, *([] if table is None else [table]))
    operands = [vary(x, axes) for x in operands]
    avals = [block_aval(x, a) for x, a in zip(operands, in_axes)]
    visits, consts = hoist(fns, avals)
    layout = dataclasses.replace(layout, in_axes=tuple(in_axes) + ((),) * len(consts))
    if tag is not None:
        tag = dataclasses.replace(tag, inputs=tag.inputs + ("closure",) * len(consts))
    lead = [] if layout.table_axes is None else [vary(table, axes)]
    consts = [vary(x, axes) for x in consts]
    return sweep_p.bind(
        *lead, *operands, *consts, visits=visits, layout=layout, out_axes=tuple(out_axes), tag=tag
    )


def _vectorised(f, layout, out_axes):
    """`f` with the grid's batch axes inside the blocks, its outputs summed where they lack one."""
    for axis in reversed(layout.batch):
        mapped = [0 if axis in a else None for a in layout.in_axes]

        def g(*xs, f=f, axis=axis, mapped=mapped):
            size = layout.grid[axis]
            ys = jax.vmap(f, mapped, axis_size=size)(*xs)
            return [y if axis in a else y.sum(0) for y, a in zip(ys, out_axes)]

        f = g
    return f


def execute(*args, visits, layout, out_axes, tag, vectorise):
    """A sweep as loops of ordinary JAX."""
    del tag
    steps = {}
    for c, jaxpr in visits:
        f = jaxpr_as_fun(jaxpr)
        f = _vectorised(f, layout, out_axes) if vectorise else f
        dtypes = [a.dtype for a in jaxpr.in_avals]

        def step(accs, blocks, f=f, dtypes=dtypes):
            ys = f(*[x.astype(d) for x, d in zip(blocks, dtypes)])
            return [a + y for a, y in zip(accs, ys)]

        steps[c] = step
    axes = varying_axes(*args)
    outs = visits[0][1].out_avals
    zeros = [
        vary(jnp.zeros(layout.shape(a) + y.shape, y.dtype), axes) for a, y in zip(out_axes, outs)
    ]
    return traverse(steps, layout, args, zeros, out_axes, vectorise=vectorise)


def primitive_rules(primitive, run, params, block_shapes):
    """Gives a grid primitive its evaluation, abstract evaluation, lowering and batching.

    `block_shapes(avals, **params)` lists shape and dtype of one block of each output.
    """

    def abstract_eval(*avals, layout, out_axes, **kw):
        if any(varies(a) for a in avals):  # let JAX work out what each output varies over
            f = ft.partial(run, layout=layout, out_axes=out_axes, vectorise=True, **kw)
            return jax.make_jaxpr(f)(*avals).out_avals
        blocks = block_shapes(avals, layout=layout, **kw)
        return [
            jax.core.ShapedArray(layout.shape(a) + shape, dtype)
            for a, (shape, dtype) in zip(out_axes, blocks)
        ]

    def lowering(ctx, *args, **kw):
        vectorise = not loops_over_batch(ctx, kw["layout"])
        rule = mlir.lower_fun(ft.partial(run, vectorise=vectorise), multiple_results=True)
        return rule(ctx, *args, **kw)

    def batch(args, dims, *, layout, out_axes, **kw):
        new = -len(layout.grid) - 1
        size = next(x.shape[d] for x, d in zip(args, dims) if d is not None)
        args = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims)]
        table_axes = layout.table_axes
        if table_axes is not None:
            table_axes = table_axes if dims[0] is None else (new, *table_axes)
            dims = dims[1:]
        in_axes = tuple(a if d is None else (new, *a) for a, d in zip(layout.in_axes, dims))
        layout = Layout((size, *layout.grid), layout.block, in_axes, table_axes)
        out_axes = tuple((new, *a) for a in out_axes)
        outs = primitive.bind(*args, layout=layout, out_axes=out_axes, **kw)
        return outs, [0] * len(outs)

    jitted = jax.jit(primitive.bind, static_argnames=params)
    primitive.multiple_results = True
    primitive.def_impl(lambda *args, **kw: jitted(*args, **kw))
    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, lowering)
    batching.primitive_batchers[primitive] = batch


sweep_p = Primitive("attention_sweep")
primitive_rules(
    sweep_p,
    execute,
    ("visits", "layout", "out_axes", "tag"),
    lambda avals, *, visits, **kw: [(a.shape, a.dtype) for a in visits[0][1].out_avals],
)


def replaced(xs: Sequence, where: Sequence[int], by: Sequence) -> list:
    """`xs` with the entries at `where` exchanged."""
    new = dict(zip(where, by))
    return [new.get(i, x) for i, x in enumerate(xs)]


def _jvp(primals, tangents, *, visits, layout, out_axes, tag):
    out = sweep_p.bind(*primals, visits=visits, layout=layout, out_axes=out_axes, tag=tag)
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
    dtypes = visits[0][1].in_avals
    operands = [*primals, *[tangents[i].astype(dtypes[i].dtype) for i in active]]
    in_axes = layout.in_axes + tuple(layout.in_axes[i] for i in active)
    return out, sweep(fns, operands, in_axes, out_axes, layout=layout, table=table)


def _transpose(cts, *args, visits, layout, out_axes, tag):
    table, operands = layout.split(args)
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    known = [i for i in range(len(operands)) if i not in linear]
    active = [i for i, ct in enumerate(cts) if not is_zero(ct)]
    results = [None] * len(operands)
    if active:

        def transposed(jaxpr):
            avals = [jaxpr.in_avals[i] for i in linear]

            def g(*blocks):
                full = replaced([None] * len(operands), known, blocks)

                def h(*xs):
                    ys = jaxpr_as_fun(jaxpr)(*replaced(full, linear, xs))
                    return [ys[i] for i in active]

                like = [abstract(a, a.shape, a.dtype) for a in avals]
                return jax.linear_transpose(h, *like)(list(blocks[len(known) :]))

            return g

        fns = {c: transposed(j) for c, j in visits}
        in_axes = [*[layout.in_axes[i] for i in known], *[out_axes[i] for i in active]]
        if tag is not None:
            assert tag.stage == "tangent"
            roles = [tag.inputs[i] for i in known] + [f"ct {tag.outputs[i]}" for i in active]
            tag = Tag("backward", tag.spec, tuple(roles), tuple(tag.inputs[i] for i in linear))
        outs = sweep(
            fns,
            [*[operands[i] for i in known], *[cts[i] for i in active]],
            in_axes,
            [layout.in_axes[i] for i in linear],
            layout=layout,
            table=table,
            tag=tag,
        )
        for i, y in zip(linear, outs):
            results[i] = y
    return results if layout.table_axes is None else [None, *results]


ad.primitive_jvps[sweep_p] = _jvp
ad.primitive_transposes[sweep_p] = _transpose
