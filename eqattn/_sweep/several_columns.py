"""Several columns in one step of a visit.

Where lists name small blocks of keys, a step over one of them has small products. A step over
several has larger ones, and rescales its rows once. So the loops over the live columns of a row
take some of them at a time, and then the rest one by one. Nothing is padded.

A block function knows nothing of this, and is mapped over the columns of a step. But where columns
share one side of a product, it stays one product. So does a sum over columns of a product.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array

from .._jax import CALLS, compiles_for_cpu, evaluated, interpret, Literal
from .grid import GridLayout, ROW
from .products import dot_p


_AXIS = "columns of a step"


# The most keys of a step, and its most logits. On one core of an AMD EPYC, a forward of 64 x 64
# blocks took 0.148 of the time of all pairs one by one. It took 0.134 with 3 blocks in a step of a
# prototype, and 0.124 with 6. More logits than those of a block of 256 x 256 leave the caches.
_MOST_KEYS, _MOST_LOGITS = 384, 2**16


def columns_together(ctx: Any, layout: GridLayout) -> int:
    """How many columns loops visit in one step, such that few or none are left of those listed. It
    is more than 1 for lists of blocks on a CPU.
    """
    if not compiles_for_cpu(ctx) or not layout.live_pairs or layout.stage == "top":
        return 1
    keys, rows = layout.block
    listed = layout.live_pairs // layout.grid[ROW]
    most = max(min(_MOST_KEYS, _MOST_LOGITS // rows) // keys, 1)
    return listed // -(-listed // most)


def merged(x: Array, axis: int) -> Array:
    """An array of several columns, its first axis, which are joined along another `axis`."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def at_columns(
    f: Callable[..., list],
    blocks: Sequence,
    moved: Sequence[bool],
    n: int,
    summed: Sequence[bool] = (),
) -> list:
    """The results of a block function at `n` columns, which are the first axis of each.

    **Arguments:**

    - `f`: the function.
    - `blocks`: its arguments. Those that are `moved` have the columns as their first axis.
    - `summed`: which results are sums over the columns instead. Without it, none is.
    """
    whole = lambda i: i < len(summed) and summed[i]

    def joint(*xs):
        closed = jax.make_jaxpr(f)(*xs)
        outs, eqns = list(enumerate(closed.jaxpr.outvars)), closed.jaxpr.eqns
        apart = {v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal)}
        apart |= {v for i, v in outs if not whole(i) and not isinstance(v, Literal)}
        sums = {eqn.outvars[0] for eqn in eqns if _is_product(eqn)} - apart
        found = _with_joint_products(closed, xs, n, sums)
        done = lambda v: not isinstance(v, Literal) and v in sums
        return [
            lax.psum(y, _AXIS) if whole(i) and not done(v) else y for y, (i, v) in zip(found, outs)
        ]

    count = len(jax.eval_shape(f, *(x[0] if m else x for x, m in zip(blocks, moved))))
    how: Any = dict(axis_size=n, axis_name=_AXIS)
    out = [None if whole(i) else 0 for i in range(count)]
    return jax.vmap(joint, [0 if x else None for x in moved], out, **how)(*blocks)


def _is_product(eqn: Any) -> bool:
    return eqn.primitive is dot_p and not eqn.params["lead"]


def _with_joint_products(closed: Any, args: Sequence, n: int, sums: set) -> list:
    """The results of a closed jaxpr. Those of products in `sums` are added up over `n` columns."""

    def evaluate(eqn, xs):
        if eqn.primitive in CALLS:
            return _with_joint_products(eqn.params[CALLS[eqn.primitive]], xs, n, set())
        if _is_product(eqn):
            return [_product(eqn.params, n, eqn.outvars[0] in sums)(*xs)]
        return evaluated(eqn, xs)

    return interpret(closed.jaxpr, closed.consts, args, evaluate)


def _product(params: dict[str, Any], n: int, summed: bool) -> Callable[[Array, Array], Array]:
    """The product `dot_p` of two matrices, or its sum over `n` columns. Mapped over columns, it is
    one product where that is possible.
    """
    product = custom_vmap(lambda a, b: dot_p.bind(a, b, **params) * (n if summed else 1))

    @product.def_vmap
    def _(size, mapped, a, b):
        contract = params["contract"]
        if all(mapped) and summed:
            a, b = (merged(x, axis) for x, axis in zip((a, b), contract))
            return dot_p.bind(a, b, **params), False
        if all(mapped):
            return dot_p.bind(a, b, **{**params, "lead": 1}), True
        side = int(mapped[1])  # the one with columns, of which the other is multiplied by all
        wide = merged((a, b)[side], 1 - contract[side])
        y = dot_p.bind(*((a, wide) if side else (wide, b)), **params)
        y = jnp.moveaxis(y.reshape(*y.shape[:side], size, -1, *y.shape[side + 1 :]), side, 0)
        return (y.sum(0), False) if summed else (y, True)

    return product
