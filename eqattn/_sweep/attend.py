r"""Attention that is finished where its blocks are visited: the output and the logsumexp of a row.

A Carry is float32, and not yet divided. Who wants the output pays for that: a kernel writes the
numerator, and a second pass reads it, divides it, and rounds it. Here the visit itself writes what
the caller wants, and derivatives read and write arrays in the caller's dtype.

With the logsumexp $L$ of a row as the origin of its exponents, `p_j = e^{s_j - L}` is the softmax.
With the sinks' logsumexp $\sigma$, which joins $L$ but has no value, and dropout's factors $w$,

    o = sum_j p_j w_j v_j                           L = log(e^sigma + sum_j e^{s_j})
    do = dnum - o dL                                dL = dden + e^{sigma - L} dsigma
    dnum = sum_j p_j w_j (ds_j v_j + dv_j)          dden = sum_j p_j ds_j.

The last two are the sums of a fold's tangent, with $L$ in place of the maximum. So tangents are
that sweep, and all else follows from sweeps. The transpose, with the cotangents `g` of `o` and `l`
of `L`, is the transpose of that sweep, with the cotangents `g` and

    c = l - <o, g>                                  ct sigma = sum over rows of e^{sigma - L} c.

In the gradient of a logit, `p_j (w_j <g, v_j> + c)`, the two terms nearly cancel. So an `o` that
was rounded to bfloat16 is not enough for `c`. With sharp softmaxes, gradients were off by up to 54
times their bound. Where derivatives are taken, a second array of the same dtype therefore holds
what rounding left out. Both together have 16 bits.

A Carry whose logsumexp is known before any block has been visited.

With the logsumexp $L$ of a row as the origin of its exponents, the denominator is 1. So nothing
must be visited for it. Its tangent is the sum that a fold's is,

    dden = sum_j p_j ds_j        with p_j = e^{s_j - L},

and one visit finds it or its transpose. Where the Carry was computed, that visit comes after
another. Statistics are such tangents and transposes, and a call of attention already knows `L`.

The numerator is not known, and is 0 here. Several Carries of the same `L` may be merged, as those
of parts of the keys are. The sum of their denominators is then their number, and each tangent
counts for so much less.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from .._carry import (
    change_of_origin,
    finite_origin,
    guarded_quotient,
    logsumexp,
    named_output,
    row_sums,
    safe_max,
)
from .._jax import (
    ad,
    batching,
    compile_eagerly,
    is_zero,
    mlir,
    Primitive,
    varies,
    vary,
    varying_axes,
)
from .centred_tangent import recentred
from .fold import execute as fold_execute, Finish, fold_arguments, operand_dtypes, tangent_arguments
from .grid import BlockGrid, replaced, ROW
from .sweep import primitive_rules, sweep_p, transpose
from .tokens import by_head, from_heads


def attend(
    *args: Any,
    sinks: Array | None = None,
    sink_axes: tuple[int, ...] = (),
    dtype: Any,
    **kw: Any,
) -> list:
    """Adds up values, weighted by a softmax, over the live blocks of a grid, and finishes rows.

    **Arguments:** those of `fold`, and

    - `sinks`: the logsumexp of the sinks of each row, `[rows|1]` with grid axes in front; or None.
    - `sink_axes`: these grid axes.
    - `dtype`: the dtype of the output.

    **Returns:** the output `[rows, v]`, 0 where nothing was seen, and the logsumexp `[rows]` in the
    accumulation dtype, `-inf` there. Both have the batch and row axes of the grid in front.
    """
    arrays, static = fold_arguments(*args, **kw)
    layout = static["layout"]
    if sinks is not None:
        arrays = [*arrays, vary(sinks, varying_axes(*arrays))]
        layout = dataclasses.replace(layout, in_axes=(*layout.in_axes, sink_axes))
    static |= dict(layout=layout, dtype=jnp.dtype(dtype), derived=False, sunk=sinks is not None)
    return attend_p.bind(*arrays, out_axes=((*layout.batch, ROW),) * 2, **static)


def _keeps(dtype, acc, derived):
    """Whether what rounding leaves out of the output is a result, too."""
    return derived and jnp.dtype(dtype).itemsize < jnp.dtype(acc).itemsize


def _finished(num, den, top, *sink, dtype, derived, along):
    """The results of a row from its Carry.

    **Arguments:**

    - `num`, `den`, `top`: the numerator, the denominator and the maximum.
    - `sink`: the logsumexp of the sinks, if there are any.
    - `dtype`, `derived`: parameters of `attend_p`.
    - `along`: a function that gives numbers of rows the axes of the numerator.
    """
    if sink:
        origin, share = change_of_origin(jnp.maximum(top, sink[0]), safe_max(top))
        num, den = num * along(share), den * share + jnp.exp(sink[0] - origin)
        top = origin
    # There is one reciprocal a row, as a division for each number would be slow in a kernel.
    inverse = guarded_quotient(jnp.ones_like(den), den)
    out = jnp.where(along(den != 0), num * along(inverse), 0)
    return [*_split(out, dtype, derived), logsumexp(den, top)]


def _split(x, dtype, derived):
    """A number rounded to a dtype and, if it is kept, what that left out, in the same dtype."""
    y = x.astype(dtype)
    if not _keeps(dtype, x.dtype, derived):
        return [y]
    return [y, (x - y.astype(x.dtype)).astype(dtype)]


def execute(*args, out_axes, dtype, derived, sunk, vectorise, traverse, finishes=False, **static):
    """Evaluates it by the visit that `select_lowering` chose."""
    layout: BlockGrid = static["layout"]
    fold = ft.partial(
        fold_execute, out_axes=out_axes[:1] * 3, vectorise=vectorise, traverse=traverse, **static
    )
    finish = ft.partial(_finished, dtype=dtype, derived=derived)
    _, operands = layout.split(args)
    if finishes and layout.ring is None:

        def of_block(num, den, top, *sink):
            *outs, logsumexp = finish(num, den, top, *sink, along=lambda x: x[None])
            return [*[jnp.swapaxes(x, -1, -2) for x in outs], logsumexp]

        reads = (len(operands) - 1,) if sunk else ()
        return fold(*args, finishes=True, results=Finish(of_block, reads))
    num, den, top = fold(*args)
    sink = [_of_sinks(operands[-1], layout)] if sunk else []
    return finish(num, den, top, *sink, along=lambda x: x[..., None])


def on_rows(x: Array, axes: tuple[int, ...], layout: BlockGrid) -> Array:
    """Numbers of rows `[rows|1]`, which have some grid axes in front, with all batch axes and that
    of rows, `[*batch, rows of blocks, n]`.
    """
    whole = (*layout.batch, ROW)
    x = jnp.expand_dims(x, [i for i, a in enumerate(whole) if a not in axes])
    return jnp.broadcast_to(x, (*layout.shape(whole), layout.block[1]))


def _of_sinks(x: Array, layout: BlockGrid) -> Array:
    """The last operand of `attend_p`, the sinks' logsumexp, or its tangent, on all rows."""
    return on_rows(x, layout.in_axes[-1], layout)


def _block_shapes(avals, *, layout, visits, values, dtype, derived, **kw):
    acc, rows = visits[0][1].out_avals[0].dtype, layout.block[1]
    width = values[0][1].out_avals[0].shape[-1]
    return [((rows, width), dtype)] * (1 + _keeps(dtype, acc, derived)) + [((rows,), acc)]


attend_p = Primitive("attention_attend")
# `derived` says whether derivatives are taken. Then there may be a result between the two, what
# rounding left out of the output. `sunk` says whether the last operand is the logsumexp of sinks.
_STATIC = ("visits", "values", "layout", "out_axes", "products", "dtype", "derived", "sunk")
primitive_rules(attend_p, execute, _STATIC, _block_shapes)


def _jvp(primals, tangents, *, out_axes, dtype, derived, **static):
    # The primal keeps what rounding leaves out: it is read by the tangents, and by their transpose.
    # The tangents are linear, and one primitive, so that their transpose gets the cotangent of the
    # output as it is, and not cast to float32.
    acc = static["visits"][0][1].out_avals[0].dtype
    count = 2 + _keeps(dtype, acc, True)
    static |= dict(dtype=dtype, derived=True)
    outs = named_output(*attend_p.bind(*primals, out_axes=out_axes[:1] * count, **static))
    active = tuple(i for i, t in enumerate(tangents) if not is_zero(t))
    axes = varying_axes(outs[0])
    moved = [vary(tangents[i], axes) for i in active]
    rates = tangent_p.bind(*primals, *outs, *moved, active=active, **static)
    if derived:
        return outs, rates
    return [outs[0], outs[-1]], [rates[0], rates[-1]]


ad.primitive_jvps[attend_p] = _jvp


@dataclasses.dataclass(frozen=True)
class _Point:
    """The point at which tangents are taken: the arguments of `tangent_p` without the tangents.

    **Arguments:**

    - `table`, `operands`: those of the visit.
    - `sink`: the last operand, on all rows, if it is the sinks' logsumexp; else an empty list.
    - `parts`, `lse`: the output and what rounding left out of it, and the logsumexp.
    """

    table: Any
    operands: Sequence[Any]
    sink: list[Array]
    parts: list[Array]
    lse: Array

    @classmethod
    def of(cls, args: Sequence, *, layout, dtype, sunk, **_) -> "_Point":
        *primals, lse = args
        n = len(primals) - 1 - _keeps(dtype, lse.dtype, True)
        primals, parts = primals[:n], list(primals[n:])
        table, operands = layout.split(primals)
        sink = [_of_sinks(operands[-1], layout)] if sunk else []
        return cls(table, operands[: len(operands) - sunk], sink, parts, lse)

    @property
    def output(self) -> Array:
        """The output, with what rounding left out."""
        return self.whole(lambda x: x)

    def whole(self, form: Callable[[Array], Array]) -> Array:
        """The output with its rows in another form."""
        first, *rest = (form(x).astype(self.lse.dtype) for x in self.parts)
        return sum(rest, first)

    def share(self) -> list[Array]:
        """The share of each row's softmax that its sinks have, as a list of one or none."""
        return [jnp.exp(x - finite_origin(self.lse)) for x in self.sink]

    def sums(self, moved: dict[int, Any], *sinks, visits, values, layout, products, **_):
        """The arguments and the parameters of the sweep of `dnum` and `dden`. See `centred_dot` for
        `sinks`.
        """
        n = len(self.operands)
        layout = dataclasses.replace(layout, in_axes=layout.in_axes[:n])
        static = dict(visits=visits, values=values, layout=layout, products=products)
        # Where nothing was seen, no probability may be more than 0. A kernel may have taken a logit
        # for masked that this visit does not, such as one of -1e10.
        origin = jnp.where(self.lse == -jnp.inf, jnp.finfo(self.lse.dtype).max, self.lse)
        return tangent_arguments(self.operands, moved, origin, self.table, sinks=sinks, **static)


def _taken_apart(args, active, layout):
    """The arguments of `tangent_p`: those of `_Point.of`, and tangents by index of the operand.

    Indices in `active` count a table, too.
    """
    point, moved = args[: len(args) - len(active)], args[len(args) - len(active) :]
    lead = layout.table_axes is not None
    return point, {i - lead: t for i, t in zip(active, moved)}


def _tangents(*args, active, **static):
    """The tangents of the results of `attend_p`. Each is rounded as its result is."""
    layout, dtype = static["layout"], static["dtype"]
    args, moved = _taken_apart(args, active, layout)
    at = _Point.of(args, **static)
    read = operand_dtypes(static["visits"], static["values"], layout)
    inner = {i: t.astype(read[i]) for i, t in moved.items() if i < len(at.operands)}
    dnum, dlse, again = jnp.zeros_like(at.output), jnp.zeros_like(at.lse), []
    sinks = at.share()
    if len(at.operands) in moved:
        sinks.append(sinks[0] * _of_sinks(moved[len(at.operands)], layout))
    if inner:
        sweep_args, sums = at.sums(inner, *sinks, **static)
        dnum, dlse, *again = sweep_p.bind(*sweep_args, **sums)
    dlse = sum(sinks[1:], dlse)
    if again:
        dnum = recentred(dnum, dlse, again[0], at.output, jnp.ones_like(dlse))
    out = dnum - at.output * dlse[..., None]
    return [*_split(out, dtype, True), dlse]


def _transposed(cts, *args, active, **static):
    layout = static["layout"]
    args, moved = _taken_apart(args, active, layout)
    at = _Point.of(args, **static)
    # In exact arithmetic, what rounding left out is 0. So its cotangent adds nothing here.
    g, ct_lse = cts[0], cts[-1]
    c = jnp.zeros_like(at.lse) if is_zero(ct_lse) else ct_lse
    if not is_zero(g):
        # With several heads in a row, XLA would copy what kernels and projections write.
        heads = ft.partial(by_head, heads=layout.group)
        output = at.whole(heads)
        sums = row_sums(output * heads(g).astype(output.dtype))
        c = c - from_heads(sums[..., None])[..., 0]
    # The sweep is traced for arrays like the tangents, of which there are none: they are what it is
    # transposed for.
    axes = varying_axes(at.lse)
    like = {i: vary(jnp.zeros(t.aval.shape, t.aval.dtype), axes) for i, t in moved.items()}
    inner, found = {i: t for i, t in moved.items() if i < len(at.operands)}, {}
    if inner:
        sweep_args, sums = at.sums({i: like[i] for i in inner}, **static)
        first = (at.table is not None) + len(at.operands) + 1  # the tangents follow the origin
        slots = range(first, first + len(inner))
        sweep_args = replaced(sweep_args, slots, [*inner.values()])
        zero = [ad.Zero(jax.typeof(at.output))] * (len(sums["out_axes"]) - 2)
        results = transpose([g, c, *zero], *sweep_args, **sums)
        found = {i: results[n] for i, n in zip(inner, slots)}
    if (last := len(at.operands)) in moved:
        back = jax.linear_transpose(lambda x: _of_sinks(x, layout), like[last])
        (found[last],) = back(at.share()[0] * c)
    return [None] * len(args) + [found[i] for i in moved]


def _abstract(*avals, active, **static):
    layout: BlockGrid = static["layout"]
    if any(varies(a) for a in avals):
        return jax.make_jaxpr(ft.partial(_tangents, active=active, **static))(*avals).out_avals
    shape = layout.shape((*layout.batch, ROW))
    blocks = _block_shapes(avals, **static)
    return [jax.core.ShapedArray(shape + block, dtype) for block, dtype in blocks]


def _tangents_jvp(primals, tangents, **static):
    # Derivatives of derivatives are those of the sweeps that make them up.
    active = [i for i, t in enumerate(tangents) if not is_zero(t)]
    f = lambda *xs: _tangents(*replaced(primals, active, xs), **static)
    values, directions = (tuple(x[i] for i in active) for x in (primals, tangents))
    return jax.jvp(f, values, directions)


def _batch(args, dims, **static):
    outs = jax.vmap(ft.partial(_tangents, **static), dims)(*args)
    return outs, [0] * len(outs)


tangent_p = Primitive("attention_attend_tangent")
tangent_p.multiple_results = True
compile_eagerly(
    tangent_p, ("visits", "values", "layout", "products", "dtype", "derived", "sunk", "active")
)
tangent_p.def_abstract_eval(_abstract)
ad.primitive_jvps[tangent_p] = _tangents_jvp
ad.primitive_transposes[tangent_p] = _transposed
batching.primitive_batchers[tangent_p] = _batch
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangents, multiple_results=True))


def recall(*args: Any, logsumexp: Array, axes: tuple[int, ...], **kw: Any) -> list:
    """The Carry of a grid from the logsumexp of its rows, with the derivatives of a fold.

    **Arguments:** those of `fold`, and

    - `logsumexp`: the logsumexp of each row, `[rows|1]` with grid axes in front.
    - `axes`: these grid axes.

    **Returns:** what `fold` returns. The numerator is 0, the denominator 1, or 0 where nothing is
    seen, and the maximum is the logsumexp.
    """
    arrays, static = fold_arguments(*args, **kw)
    layout, values = static["layout"], static["values"]
    read = operand_dtypes(static["visits"], values, layout)
    width = values[0][1].out_avals[0].shape[-1]
    mesh_axes = varying_axes(*arrays, logsumexp)
    # An origin has no derivative.
    rows = on_rows(vary(jax.lax.stop_gradient(logsumexp), mesh_axes), axes, layout)

    @jax.custom_jvp
    def carry(top, *arrays):
        del arrays
        shape = (*layout.shape((*layout.batch, ROW)), layout.block[1], width)
        den = (top != -jnp.inf).astype(top.dtype)
        return vary(jnp.zeros(shape, top.dtype), mesh_axes), den, top

    def jvp(primals, tangents):
        top, *arrays = primals
        table, operands = layout.split(arrays)
        _, tangents = layout.split(tangents[1:])
        moves = [(i, t) for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        outs = carry(*primals)
        rates = [jnp.zeros_like(x) for x in outs]
        if moves:
            moved = {i: t.astype(read[i]) for i, t in moves}
            sweep_args, sums = tangent_arguments(operands, moved, top, table, **static)
            rates[1] = sweep_p.bind(*sweep_args, **sums)[1]
        # The tangent of the origin is 0, as that of a maximum is.
        return (outs[0], outs[1], outs[2]), (rates[0], rates[1], rates[2])

    carry.defjvp(jvp, symbolic_zeros=True)
    return list(carry(rows, *arrays))
