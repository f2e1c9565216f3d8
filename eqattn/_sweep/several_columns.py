"""Several columns in one step of a visit.

Where lists name small blocks of keys, a step over one of them has small products. A step over
several has one product in place of these, and rescales its rows once. So loops over the live
columns of a row take some at a time, and then the rest one by one. Nothing is padded.

A block function knows nothing of this. It is mapped over the columns of a step. Only its products
with what these share are not mapped, but joined.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array

from .._jax import CALLS, evaluated, interpret
from .grid import GridLayout, ROW
from .products import dot_p


_MOST_KEYS, _MOST_LOGITS = 384, 2**16


def columns_together(ctx: Any, layout: GridLayout) -> int:
    """How many columns are visited in one step, where rows are visited one by one."""
    cpu = tuple(ctx.module_context.platforms) == ("cpu",)
    if not cpu or not layout.live_pairs or layout.stage == "top":
        return 1
    keys, rows = layout.block
    listed = layout.live_pairs // layout.grid[ROW]
    most = max(min(_MOST_KEYS, _MOST_LOGITS // rows) // keys, 1)
    return max(listed // -(-listed // most), 1)


_AXIS = "columns"


def at_columns(
    f: Callable[..., list],
    blocks: Sequence,
    moved: Sequence[bool],
    size: int,
    summed: Sequence[bool] | None = None,
) -> list:
    """The results of a block function at several columns, which are the first axis of each.

    **Arguments:**

    - `f`: the function.
    - `blocks`: its arguments. Those that are `moved` have the columns as their first axis.
    - `size`: the number of columns.
    - `summed`: which results are sums over the columns instead; None is none of them.
    """

    def joint(*xs):
        closed = jax.make_jaxpr(f)(*xs)
        outs = closed.jaxpr.outvars
        sums = summed or [False] * len(outs)
        own = {x for x, whole in zip(outs, sums) if whole and outs.count(x) == 1}
        found, done = _with_joint_products(closed, xs, own)
        return [lax.psum(y, _AXIS) if whole and x not in done else y for x, y, whole in zip(outs, found, sums)]

    out = [None if x else 0 for x in summed] if summed else 0
    return jax.vmap(joint, [0 if x else None for x in moved], out, axis_size=size, axis_name=_AXIS)(*blocks)


@dataclasses.dataclass(frozen=True)
class SumStep:
    """The step of a sweep: `(accumulators, blocks) -> accumulators`.

    **Arguments:**

    - `f`: the block function.
    """

    f: Callable[..., list]

    def __call__(self, accs: Sequence | None, blocks: Sequence) -> list:
        ys = self.f(*blocks)
        return ys if accs is None else [a + y for a, y in zip(accs, ys)]

    def several(
        self, accs: Sequence, blocks: Sequence, moved: Sequence[bool], kept: Sequence[bool], size: int
    ) -> list:
        """The same in a step over several columns. These are the first axis of the blocks that are
        `moved`, and of the accumulators that `kept` says.
        """
        ys = at_columns(self.f, blocks, moved, size, [not x for x in kept])
        return [y if own else a + y for a, y, own in zip(accs, ys, kept)]


def merged(x: Array, axis: int) -> Array:
    """An array of several columns, joined along an `axis` of that of one column."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _with_joint_products(closed: Any, args: Sequence, own: set) -> tuple[list, set]:
    done = set()
    def evaluate(eqn, xs):
        if eqn.primitive in CALLS:
            return _with_joint_products(eqn.params[CALLS[eqn.primitive]], xs, set())[0]
        if eqn.primitive is dot_p and not eqn.params["lead"]:
            whole = eqn.outvars[0] in own
            if whole: done.add(eqn.outvars[0])
            return [_joint_product(eqn.params, whole)(*xs)]
        return evaluated(eqn, xs)

    return interpret(closed.jaxpr, closed.consts, args, evaluate), done


def _joint_product(params: dict[str, Any], whole: bool) -> Callable[[Array, Array], Array]:
    """The product `dot_p` of two matrices. Mapped over one of them, it is one product."""
    product = custom_vmap(lambda a, b: dot_p.bind(a, b, **params))

    @product.def_vmap
    def _(size, mapped, a, b):
        if all(mapped):
            if whole:
                a, b = (merged(x, n) for x, n in zip((a, b), params["contract"]))
                return dot_p.bind(a, b, **params), False
            return dot_p.bind(a, b, **{**params, "lead": 1}), True
        which = int(mapped[1])
        wide, free = (a, b)[which], 1 - params["contract"][which]
        wide = merged(wide, free)
        y = dot_p.bind(*((a, wide) if which else (wide, b)), **params)
        y = y.reshape(*y.shape[:which], size, -1, *y.shape[which + 1 :])
        y = jnp.moveaxis(y, which, 0)
        return (y.sum(0), False) if whole else (y, True)

    return product
