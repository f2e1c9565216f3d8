"""Scores as functions of blocks: all that they read is an argument, and what is masked is safe.

A cotangent at a masked pair is 0, but where the score is singular, like `log(q - k)` where
`k >= q`, its product with the derivative is `0 * inf = NaN`. The gradient of what is one number for
each pair, the logit and the operands, can be selected pair by pair. The gradient of what all pairs
share is a sum in which one NaN is enough. So

- masked pairs get the arguments of one visible pair, where derivatives are finite and `0 * J = 0`,
- and of a block without visible pairs, which has none to give, nothing of the gradient is kept.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from .._jax import abstract, evaluated, interpret, only_varies, primitives, vary, varying_axes
from .._misc import accumulation_dtype
from .._pairs import over_block
from ..scores._base import AbstractScore


class ClosedScore(eqx.Module):
    """A score that closes over nothing.

    **Arguments:**

    - `consts`: what its `transform` reads that is not a scalar of the pair. Floats are in the
        accumulation dtype of the logits or wider, so that their gradient, which is a sum over all
        pairs, rounds once.
    - `jaxpr`: its `transform`, with a variable for each of the `consts`.
    - `dtypes`: of the constants that it reads.
    - `finite_when_masked`: as for `AbstractScore`.
    """

    consts: tuple[Array, ...]
    jaxpr: Any = eqx.field(static=True)
    dtypes: tuple[Any, ...] = eqx.field(static=True)
    finite_when_masked: bool = eqx.field(static=True)

    @classmethod
    def of(
        cls,
        score: AbstractScore,
        logit: Any,
        operands: Sequence[Any],
        consts: Sequence[Array] | None = None,
        axes: frozenset = frozenset(),
    ) -> "ClosedScore":
        """A score of a scalar `logit`, scalar indices, and `operands` of these dtypes, all of which
        vary over the mesh `axes`.

        A trace holds where `jax.shard_map` runs only if it is made there. What it closes over must
        come in as arguments of that: then they are the given `consts`, found by a trace outside.
        """
        like = vary(jnp.zeros((), logit), axes)
        scalars = [abstract(like, (), x) for x in (logit, *[jnp.int32] * 4, *operands)]
        # Not the method itself: JAX compares what it traces, and a module's arrays have no truth.
        closed = jax.make_jaxpr(lambda *xs: score.transform(*xs))(*scalars)
        dtypes = tuple(x.dtype for x in closed.consts)
        if consts is None:
            consts = [
                x.astype(accumulation_dtype(x.dtype, logit)) if _is_float(x) else x
                for x in closed.consts
            ]
        return cls(tuple(consts), closed.jaxpr, dtypes, score.finite_when_masked)

    def __call__(self, mask: Array | None, s: Array, *others: Array) -> Array:
        """The new logits `[keys, rows]` of a block; 0 where the mask is False if they need not be
        finite there. The other scalars of its pairs are `[keys|1, rows|1]`.
        """
        axes = varying_axes(s, *others)
        xs = [vary(x, axes) for x in (s, *others)]
        fn = ft.partial(_evaluate, self.jaxpr, self.dtypes)
        consts = [vary(jnp.asarray(x), axes) for x in self.consts]
        if mask is None or self.finite_when_masked:
            return fn(consts, xs)
        return _where_visible(fn, mask, consts, xs)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


@dataclasses.dataclass(frozen=True)
class _Held:
    """A value of a dtype that is held in a wider one, which represents it exactly."""

    wide: Array
    dtype: Any

    def narrow(self) -> Array:
        return self.wide.astype(self.dtype)


_MOVES = {
    lax.broadcast_in_dim_p,
    lax.concatenate_p,
    lax.dynamic_slice_p,
    lax.gather_p,
    lax.neg_p,
    lax.reshape_p,
    lax.select_n_p,
    lax.slice_p,
    lax.squeeze_p,
    lax.transpose_p,
}
"""What does not round, so that it may be done to the wide values. Its transpose adds them up."""


def _step(eqn: Any, xs: Sequence) -> list:
    """An equation, of wide values as long as none of its results is rounded."""
    if only_varies(eqn):
        axes = frozenset(eqn.params["axes"])
        return [
            dataclasses.replace(x, wide=vary(x.wide, axes)) if isinstance(x, _Held)
            else vary(x, axes)
            for x in xs
        ]  # fmt: skip
    if eqn.primitive is primitives.jit_p:
        inner = eqn.params["jaxpr"]
        return interpret(inner.jaxpr, inner.consts, xs, _step)
    held = next((x for x in xs if isinstance(x, _Held)), None)
    if held is None:
        return evaluated(eqn, xs)
    if eqn.primitive is lax.convert_element_type_p:
        new = eqn.params["new_dtype"]
        if jnp.issubdtype(new, jnp.floating) and new.itemsize > held.dtype.itemsize:
            return [held.wide.astype(new)]
    if eqn.primitive in _MOVES:

        def widened(x):
            if isinstance(x, _Held):
                return x.wide
            return x.astype(held.wide.dtype) if jnp.result_type(x) == held.dtype else x

        ys = evaluated(eqn, [widened(x) for x in xs])
        return [_Held(y, held.dtype) for y in ys]
    return evaluated(eqn, [x.narrow() if isinstance(x, _Held) else x for x in xs])


def _evaluate(jaxpr: Any, dtypes: Sequence, consts: Sequence, xs: Sequence) -> Array:
    def transform(*scalars):
        own = [_Held(x, d) if x.dtype != d else x for x, d in zip(consts, dtypes)]
        (y,) = interpret(jaxpr, own, scalars, _step)
        return y.wide if isinstance(y, _Held) else y

    return over_block(transform, xs).astype(xs[0].dtype)


@ft.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _where_visible(fn: Callable, mask: Array, consts: list[Array], xs: list[Array]) -> Array:
    """`fn` of a block, 0 where the mask is False. Only derivatives need arguments that are safe."""
    return jnp.where(mask, fn(consts, xs), 0)


@ft.partial(_where_visible.defjvp, symbolic_zeros=True)
def _where_visible_jvp(fn, primals, tangents):
    mask, *trees = primals
    leaves, treedef = jax.tree.flatten(trees)
    moved = jax.tree.leaves(tangents[1:], is_leaf=lambda t: isinstance(t, SymbolicZero))
    active = [i for i, t in enumerate(moved) if not isinstance(t, SymbolicZero)]
    y = _where_visible(fn, *primals)
    if not active:
        return y, jnp.zeros_like(y)

    def safe(*of_active):
        new = dict(zip(active, of_active))
        consts, xs = jax.tree.unflatten(treedef, [new.get(i, x) for i, x in enumerate(leaves)])
        seen, picks = _one_visible(mask)
        xs = [jnp.where(mask, x, lax.stop_gradient(_picked(x, *picks))) for x in xs]
        consts = [jnp.where(seen, x, lax.stop_gradient(x)) for x in consts]
        return jnp.where(mask, fn(consts, xs), 0)

    values, directions = ([xs[i] for i in active] for xs in (leaves, moved))
    return y, jax.jvp(safe, tuple(values), tuple(directions))[1]


def _one_visible(mask: Array) -> tuple[Array, tuple[Array, Array]]:
    """Whether a block has a visible pair, and where the first is: its key `[keys, 1]` and its row
    `[1, rows]`. By sums and maxima of floats, which kernels know.
    """
    visible = jnp.where(mask, jnp.float32(1), jnp.float32(0))

    def first(visible, axis):
        index = lax.broadcasted_iota(jnp.int32, visible.shape, axis).astype(jnp.float32)
        found = jnp.where(visible > 0, index, jnp.inf).min(axis, keepdims=True)
        return index == found

    row = first(visible.max(0, keepdims=True), 1)
    key = first(jnp.where(row, visible, 0).max(1, keepdims=True), 0)
    return visible.max() > 0, (key, row)


def _picked(x: Array, key: Array, row: Array) -> Array:
    """The entry `[1, 1]` of `x` `[keys|1, rows|1]` at one pair."""
    for axis, at in enumerate((key, row)):
        if x.shape[axis] > 1:
            x = jnp.where(at, x, jnp.zeros((), x.dtype)).sum(axis, keepdims=True, dtype=x.dtype)
    return x
