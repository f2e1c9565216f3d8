"""The online softmax as one more visit of the grid, with a sweep for its tangent.

Per block: `p = exp(s - max)`, numerator `+= v^T p`, denominator `+= sum p`. The maximum is a gauge:
the Carry's value does not depend on it, so its tangent is zero, and with it held fixed the
numerator and the denominator are sums over pairs. Their tangent is therefore a sweep, whose
transpose is the usual five-product flash backward. Blocks of logits are `[keys, rows]`, values and
numerators `[keys, v]` and `[v, rows]`: the orientation in which no product needs a large transpose.
"""

import functools as ft
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ._carry import gauge
from ._compat import ad, is_zero, jaxpr_as_fun, Primitive, vary, varying_axes
from ._dot import dot
from ._sweep import block_aval, hoist, primitive_rules, replaced, sweep, Tag
from ._traverse import Layout, PARTIAL, ROW, traverse


def fold(
    logits: dict[int, Callable],
    operands: Sequence,
    in_axes: Sequence[tuple[int, ...]],
    value: Any,
    value_axes: tuple[int, ...],
    *,
    grid: tuple[int, ...],
    block: tuple[int, int],
    table: Any = None,
    table_axes: tuple[int, ...] | None = None,
    products: tuple = (),
    spec: Hashable = None,
    roles: tuple[str, ...] = (),
) -> list:
    """Softmax-weighted sums of values over the live blocks of a grid `(*batch, rows, columns)`.

    **Arguments:**

    - `logits`: per class of block, a function of the operands' blocks. It returns `[s]` or
        `[s, w]`: logits `[keys, rows]` (`-inf` where masked) and, with dropout, the factor
        `[keys, rows]` on each probability in the numerator.
    - `operands`, `in_axes`: as for `sweep`.
    - `value`: blocks `[keys, v]`.
    - `products`: keyword arguments of `dot`, as sorted pairs.

    **Returns:**

    Numerator, denominator and maximum of a Carry, with the grid's batch and row axes in front of
    blocks `[v, rows]`, `[rows]`, `[rows]`.
    """
    axes = varying_axes(*operands, value, *([] if table is None else [table]))
    operands = [vary(x, axes) for x in operands]
    avals = [block_aval(x, a) for x, a in zip(operands, in_axes)]
    visits, consts = hoist(logits, avals)
    in_axes = (*in_axes, *[()] * len(consts), value_axes)
    roles = (*roles, *["closure"] * len(consts), "value")
    layout = Layout(tuple(grid), block, in_axes, table_axes)
    rows = (*layout.batch, ROW)
    lead = [] if table_axes is None else [vary(table, axes)]
    args = [*lead, *operands, *[vary(x, axes) for x in consts], vary(value, axes)]
    return fold_p.bind(
        *args,
        visits=visits,
        layout=layout,
        out_axes=(rows,) * 3,
        products=products,
        tag=Tag("fold", spec, roles, ("numerator", "denominator", "max")),
    )


def finite(x: Array) -> Array:
    """Values that can be multiplied by the zero probability of a masked pair."""
    return jnp.where(jnp.isfinite(x), x, 0)


@ft.partial(jax.custom_jvp, nondiff_argnums=(2,))
def masked_dot(k: Array, q: Array, products: tuple) -> Array:
    """`k q` where some of the results will be masked: what is not finite there must not meet a
    zero cotangent.
    """
    return dot(k, q, (1, 0), **dict(products))


@masked_dot.defjvp
def _masked_dot_jvp(products, primals, tangents):
    (k, q), (dk, dq) = primals, tangents
    both = dot(dk, finite(q), (1, 0), **dict(products)) + dot(
        finite(k), dq, (1, 0), **dict(products)
    )
    return masked_dot(k, q, products), both


def weighted_sum(v: Array, p: Array, products: tuple) -> Array:
    """`v^T p` in a block with masked pairs: what is not finite reaches only rows with `p > 0`."""
    ok = jnp.isfinite(v)
    total = dot(jnp.where(ok, v, 0), p, (0, 0), **dict(products))
    bad = (v * 0).sum(1) != 0  # NaN where anything is not finite: one reduction
    seen = jnp.where(bad[:, None], p, 0).sum(0) > 0
    rest = jnp.where(ok, 0, v).sum(0)
    return jnp.where(seen[None] & (rest != 0)[:, None], total + rest[:, None], total)


def execute(*args, visits, layout, out_axes, products, tag, vectorise):
    """The fold as loops of ordinary JAX."""
    del tag
    value = args[-1]
    acc = visits[0][1].out_avals[0].dtype
    axes = varying_axes(*args)
    steps = {}
    for c, jaxpr in visits:
        dtypes = [a.dtype for a in jaxpr.in_avals]

        def step(accs, blocks, c=c, f=jaxpr_as_fun(jaxpr), dtypes=dtypes):
            *blocks, v = blocks
            s, *weight = f(*[x.astype(d) for x, d in zip(blocks, dtypes)])
            num, den, old = accs
            new = jnp.maximum(old, s.max(0))
            origin = gauge(new)
            p = jnp.exp(s - origin[None])
            kept = p * weight[0] if weight else p
            v = v.astype(acc)
            if c == PARTIAL:
                added = weighted_sum(v, kept, products)
            else:
                added = dot(v, kept, (0, 0), **dict(products))
            scale = jnp.exp(old - origin)
            return [num * scale[None] + added, den * scale + p.sum(0), new]

        if vectorise:
            for axis in reversed(layout.batch):
                mapped = [0 if axis in a else None for a in layout.in_axes]
                step = jax.vmap(step, (0, mapped), axis_size=layout.grid[axis])
        steps[c] = step
    shape = (*layout.shape(out_axes[0]), layout.block[1])
    num = jnp.zeros((*shape[:-1], value.shape[-1], shape[-1]), acc)
    accs = [num, jnp.zeros(shape, acc), jnp.full(shape, -jnp.inf, acc)]
    accs = [vary(x, axes) for x in accs]
    return traverse(steps, layout, args, accs, out_axes, vectorise=vectorise)


def _block_shapes(avals, *, layout, visits, **kw):
    acc, rows, width = visits[0][1].out_avals[0].dtype, layout.block[1], avals[-1].shape[-1]
    return [((width, rows), acc), ((rows,), acc), ((rows,), acc)]


fold_p = Primitive("attention_fold")
primitive_rules(fold_p, execute, ("visits", "layout", "out_axes", "products", "tag"), _block_shapes)


def _jvp(primals, tangents, *, visits, layout, out_axes, products, tag):
    num, den, top = fold_p.bind(
        *primals, visits=visits, layout=layout, out_axes=out_axes, products=products, tag=tag
    )
    table, primals = layout.split(primals)
    _, tangents = layout.split(tangents)
    active = [i for i, t in enumerate(tangents) if not is_zero(t)]
    n, last = len(primals), len(primals) - 1
    inner = [i for i in active if i != last]
    kw = dict(products)

    def tangent(c, f):
        def g(*blocks):
            *full, v = blocks[:n]
            m, given = blocks[n], dict(zip(active, blocks[n + 1 :]))

            def h(*xs):
                return f(*replaced(full, inner, xs))

            if inner:
                (s, *weight), (ds, *_) = jax.jvp(
                    h, [full[i] for i in inner], [given[i] for i in inner]
                )
            else:
                s, *weight = h()
                ds = None
            p = jnp.exp(s - gauge(m)[None])
            kept = p * lax.stop_gradient(weight[0]) if weight else p
            dnum, dden = jnp.zeros((v.shape[-1], p.shape[1]), p.dtype), jnp.zeros_like(m)
            if ds is not None:
                seen = finite(v) if c == PARTIAL else v
                dnum, dden = dot(seen, kept * ds, (0, 0), **kw), (p * ds).sum(0)
            if last in given:
                dnum = dnum + dot(given[last], kept, (0, 0), **kw)
            return [dnum, dden]

        return g

    fns = {c: tangent(c, jaxpr_as_fun(j)) for c, j in visits}
    acc = visits[0][1].out_avals[0].dtype
    operands = [*primals, top, *[tangents[i].astype(acc) for i in active]]
    in_axes = [*layout.in_axes, out_axes[2], *[layout.in_axes[i] for i in active]]
    roles = (*tag.inputs, "max", *[f"tangent {tag.inputs[i]}" for i in active])
    dnum, dden = sweep(
        fns,
        operands,
        in_axes,
        out_axes[:2],
        layout=layout,
        table=table,
        tag=Tag("tangent", tag.spec, roles, ("numerator", "denominator")),
    )
    return (num, den, top), (dnum, dden, ad.Zero(jax.typeof(top)))


ad.primitive_jvps[fold_p] = _jvp
