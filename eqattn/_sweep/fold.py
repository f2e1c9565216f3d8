"""The online softmax as one more visit of the grid, with a sweep for its tangent.

Per block: `p = exp(s - max)`, numerator `+= v^T p`, denominator `+= sum p`. The maximum is a gauge:
the Carry's value does not depend on it, so its tangent is zero, and with it held fixed the
numerator and the denominator are sums over pairs. Their tangent is therefore a sweep, whose
transpose is the usual five-product flash backward. Blocks of logits are `[keys, rows]`, values and
numerators `[keys, v]` and `[rows, v]`: the orientation in which no product of the fold and of its
backward needs a large transpose.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from .._carry import gauge
from .._jax import ad, is_zero, jaxpr_as_fun, Primitive, vary, varying_axes
from .centred_tangent import centred_dot, recentred
from .grid import Layout, replaced, ROW
from .lowering import Tag
from .products import dot
from .rotation import Rotation, travel
from .sweep import block_aval, evaluate, hoist, primitive_rules, sweep, table_per_hop


def fold(
    logits: dict[int, Callable],
    operands: Sequence,
    in_axes: Sequence[tuple[int, ...]],
    values: dict[int, Callable],
    value_operands: Sequence,
    value_axes: Sequence[tuple[int, ...]],
    *,
    grid: tuple[int, ...],
    block: tuple[int, int],
    table: Any = None,
    table_axes: tuple[int, ...] | None = None,
    ring: Rotation | None = None,
    classify: Callable | None = None,
    reads: Sequence[int] = (),
    fused: bool = True,
    ragged: bool = False,
    kernel: str = "",
    pages: tuple[int, ...] = (),
    lookups: tuple[int, ...] = (),
    corner: int = 0,
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
    - `values`: per class, a function of the blocks of `value_operands` (on `value_axes`) that
        returns a block `[keys, v]`, finite, and `[keys]`: 0, or NaN for a key that makes every row
        NaN that sees it. Only so can a value that is not finite reach these rows and no others, as
        `0 * inf` is not 0. With `[keys, groups, v]`, `[keys, groups]` each group of rows has its
        own. Where no pair is masked, `values` may return the block alone, whatever it holds.
    - `ring`: the hops, if columns rotate around a mesh axis. `classify` is then a function of the
        operands `reads`, as they are at a hop, that returns the table of the hop.
    - `fused`, `ragged`, `kernel`, `pages`, `lookups`, `corner`: as for `Layout`.
    - `products`: keyword arguments of `dot`, as sorted pairs.

    **Returns:**

    Numerator, denominator and maximum of a Carry, with the grid's batch and row axes in front of
    blocks `[rows, v]`, `[rows]`, `[rows]`.
    """
    axes = varying_axes(*operands, *value_operands, *([] if table is None else [table]))
    operands = [vary(x, axes) for x in operands]
    if ring is not None and classify is not None:
        ring, consts = table_per_hop(ring, classify, operands, in_axes, reads, grid)
        operands = [*operands, *[vary(x, axes) for x in consts]]
        in_axes, roles = (*in_axes, *[()] * len(consts)), (*roles, *["closure"] * len(consts))
    avals = [block_aval(x, a) for x, a in zip(operands, in_axes)]
    visits, consts = hoist(logits, avals)
    given = list(zip(value_operands, value_axes))
    weigh, more = hoist(values, [block_aval(x, a) for x, a in given])
    in_axes = (*in_axes, *[()] * len(consts), *value_axes, *[()] * len(more))
    roles = (*roles, *["closure"] * len(consts), *["value"] * len(given), *["closure"] * len(more))
    layout = Layout(
        grid=tuple(grid),
        block=block,
        in_axes=in_axes,
        table_axes=table_axes,
        ring=ring,
        fused=fused,
        ragged=ragged,
        kernel=kernel,
        pages=pages,
        lookups=lookups,
        corner=corner,
    )
    rows = (*layout.batch, ROW)
    lead = [] if table_axes is None else [vary(table, axes)]
    args = [*lead, *operands, *[vary(x, axes) for x in (*consts, *value_operands, *more)]]
    return fold_p.bind(
        *args,
        visits=visits,
        values=weigh,
        layout=layout,
        out_axes=(rows,) * 3,
        products=products,
        tag=Tag("fold", spec, roles, ("numerator", "denominator", "max")),
    )


def finite(x: Array) -> Array:
    """Numbers that can be multiplied by the zero probability of a masked pair."""
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


@jax.custom_jvp
def scaled(x: Array, scale: Array) -> Array:
    """`x * scale` where some of `x` will be masked: what is not finite there must not meet a zero
    cotangent.
    """
    return x * scale


@ft.partial(scaled.defjvp, symbolic_zeros=True)
def _scaled_jvp(primals, tangents):
    (x, scale), (dx, dscale) = primals, tangents
    y = scaled(x, scale)
    parts = [] if isinstance(dx, SymbolicZero) else [dx * scale]
    if not isinstance(dscale, SymbolicZero):
        parts.append(finite(x) * dscale)
    return y, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(y)


def poisoned(s: Array, origin: Array, poison: Array | None = None) -> Array:
    """`exp(s - origin)`, NaN at the visible pairs of a key that is NaN in `poison`, `[keys]` or
    `[keys, groups of rows]`.
    """
    if poison is None:
        return jnp.exp(s - origin[None])
    poison = poison.reshape(poison.shape[0], -1, 1)
    poison = jnp.broadcast_to(poison, (*poison.shape[:2], s.shape[1] // poison.shape[1]))
    poison = poison.reshape(s.shape)
    # Selected before the exponential: XLA:CPU would repeat a select after it for each of its uses.
    return jnp.exp(jnp.where(s == -jnp.inf, s, s - origin[None] + poison))


@dataclasses.dataclass(frozen=True)
class FoldStep:
    """What the fold does in a block of one class: `(accumulators, blocks) -> accumulators`.

    The accumulators are the numerator `[v, rows]` (`[rows, v]` if `grouped`), the denominator and
    the maximum; None where there are none before, and the numerator is then `[rows, v]`.
    """

    logits: Any
    values: Any
    products: tuple

    @property
    def grouped(self) -> bool:
        return self.values.out_avals[0].ndim == 3

    @property
    def width(self) -> int:
        return self.values.out_avals[0].shape[-1]

    def evaluate_logits(self, *blocks: Array) -> list:
        return evaluate(self.logits, blocks)

    def evaluate_values(self, *blocks: Array) -> list:
        return evaluate(self.values, blocks)

    def spread(self, row: Array) -> Array:
        return row[:, None] if self.grouped else row[None]

    def complete(self, num: Array, den: Array, top: Array, axis: int = -1) -> list:
        """A numerator that is not finite, met where no pair is masked, makes its row NaN."""
        return [num, den + (num * 0).sum(axis), top]

    def __call__(self, accs: Sequence | None, blocks: Sequence) -> list:
        n, product = len(self.logits.in_avals), ft.partial(dot, **dict(self.products))
        s, *weight = self.evaluate_logits(*blocks[:n])
        v, *poison = self.evaluate_values(*blocks[n:])
        top = s.max(0)
        new = top if accs is None else jnp.maximum(accs[2], top)
        origin = gauge(new)
        p = poisoned(s, origin, *poison)
        kept, den = p * weight[0] if weight else p, p.sum(0)
        if accs is None:
            num = product(kept.T, v, (1, 0))
            return [num, den, new] if poison else self.complete(num, den, new)
        num = product(kept, v, (0, 0)) if self.grouped else product(v, kept, (0, 0))
        # Of two numbers that are finite: XLA:CPU would write out all of a shorter loop.
        scale = jnp.exp(gauge(accs[2]) - origin)
        return [accs[0] * self.spread(scale) + num, accs[1] * scale + den, new]


def execute(*args, visits, values, layout, out_axes, products, tag, vectorise, traverse):
    """The fold as loops of ordinary JAX."""
    del tag
    acc = visits[0][1].out_avals[0].dtype
    first, steps = FoldStep(visits[0][1], values[0][1], products), {}
    for (c, logits), (_, weigh) in zip(visits, values):
        step: Callable = FoldStep(logits, weigh, products)
        if vectorise:
            for axis in reversed(layout.batch):
                mapped = [0 if axis in a else None for a in layout.in_axes]
                step = jax.vmap(step, (0, mapped), axis_size=layout.grid[axis])
        steps[c] = step
    rows, unclean = layout.block[1], any(len(weigh.out_avals) == 1 for _, weigh in values)
    shape = (rows, first.width) if first.grouped else (first.width, rows)
    start = [np.zeros(shape, acc), np.zeros(rows, acc), np.full(rows, -np.inf, acc)]

    def finish(accs):
        num, den, top = accs
        if unclean:
            num, den, top = first.complete(num, den, top, -1 if first.grouped else -2)
        return [num if first.grouped else jnp.swapaxes(num, -1, -2), den, top]

    return travel(steps, layout, args, start, out_axes, finish=finish, traverse=traverse)


def _block_shapes(avals, *, layout, visits, values, **kw):
    acc, rows = visits[0][1].out_avals[0].dtype, layout.block[1]
    width = values[0][1].out_avals[0].shape[-1]
    return [((rows, width), acc), ((rows,), acc), ((rows,), acc)]


fold_p = Primitive("attention_fold")
_STATIC = ("visits", "values", "layout", "out_axes", "products", "tag")
primitive_rules(fold_p, execute, _STATIC, _block_shapes)


def _jvp(primals, tangents, *, visits, values, layout, out_axes, products, tag):
    static = dict(visits=visits, values=values, layout=layout, products=products, tag=tag)
    num, den, top = fold_p.bind(*primals, out_axes=out_axes, **static)
    table, primals = layout.split(primals)
    _, tangents = layout.split(tangents)
    count, n = len(primals), len(primals) - len(values[0][1].in_avals)
    active = [i for i, t in enumerate(tangents) if not is_zero(t)]
    inner, outer = [i for i in active if i < n], [i - n for i in active if i >= n]
    acc = visits[0][1].out_avals[0].dtype
    kw = dict(products)
    narrow = kw.get("operand_dtype") is not None

    def directional(f, xs, where, tangents):
        """What `f` returns at `xs`, and its tangent (None if nothing moves)."""
        if not where:
            return f(*xs), None
        return jax.jvp(
            lambda *ys: f(*replaced(xs, where, ys)), tuple(xs[i] for i in where), tangents
        )

    def tangent(logits, weigh):
        def g(*blocks):
            full, m, moved = blocks[:count], blocks[count], blocks[count + 1 :]
            (s, *weight), ds = directional(
                jaxpr_as_fun(logits), full[:n], inner, moved[: len(inner)]
            )
            (v, *_), dv = directional(jaxpr_as_fun(weigh), full[n:], outer, moved[len(inner) :])
            p = jnp.exp(s - gauge(m)[None])
            kept = p * lax.stop_gradient(weight[0]) if weight else p
            dnum, dden = jnp.zeros((p.shape[1], v.shape[-1]), p.dtype), jnp.zeros_like(m)
            again = []
            if ds is not None:
                if narrow:
                    dnum, *again = centred_dot(ds[0], p, kept, v, products)
                else:
                    dnum = dot(kept * ds[0], v, (0, 0), **kw)
                dden = (p * ds[0]).sum(0)
            if dv is not None:
                dnum = dnum + dot(kept, dv[0], (0, 0), **kw)
            return [dnum, dden, *again]

        return g

    operands = [*primals, top, *[tangents[i].astype(acc) for i in active]]
    in_axes = [*layout.in_axes, out_axes[2], *[layout.in_axes[i] for i in active]]
    roles = (*tag.inputs, "max", *[f"tangent {tag.inputs[i]}" for i in active])
    names = ("numerator", "denominator", *["numerator again"] * (narrow and bool(inner)))
    dnum, dden, *again = sweep(
        {c: tangent(logits, weigh) for (c, logits), (_, weigh) in zip(visits, values)},
        operands,
        in_axes,
        out_axes[:1] * len(names),
        layout=layout,
        table=table,
        tag=Tag("tangent", tag.spec, roles, names),
    )
    if again:
        dnum = recentred(dnum, dden, again[0], num, den)
    return (num, den, top), (dnum, dden, ad.Zero(jax.typeof(top)))


ad.primitive_jvps[fold_p] = _jvp
