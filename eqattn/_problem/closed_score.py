"""Scores as functions of blocks: all that they read is an argument, and what is masked is safe.

A cotangent at a masked pair is 0. But a score may be singular there, like `log(q - k)` where
`k >= q`, and then the product of that cotangent with the derivative is `0 * inf = NaN`.

The gradient of an argument that is one number per pair, like the logit, can be selected pair by
pair. The gradient of an argument that all pairs share is a sum over pairs, and one NaN is enough to
spoil it. So the derivatives are evaluated with other arguments:

- A masked pair gets the arguments of one visible pair of its block. There derivatives `J` are
  finite, and `0 * J = 0`.
- A block without a visible pair has no such arguments. Its whole gradient is dropped.

An operand with features is shared by all pairs of a row or of a key. Selecting it pair by pair
would turn one product of matrices into a product for each pair. So values of a row and values of a
key are not selected. Instead, what the function computes from both is selected, after the product;
see `_Guarded`.

This is the same trouble as with numbers that are not finite; see `_sweep/nonfinite.py`.

Masks and scores whose operands are other arrays than their own, such as a part of these.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, ArrayLike

from .._jax import abstract, evaluated, interpret, only_varies, primitives, vary, varying_axes
from .._misc import accumulation_dtype, widened
from .._pairs import Operand, over_block
from .._sweep.nonfinite import zero_nonfinite
from ..masks._base import AbstractMask, leaf_terms, map_terms
from ..scores._base import AbstractScore, AbstractWrapper


class ClosedScore(eqx.Module):
    """A score that closes over nothing.

    **Arguments:**

    - `consts`: the arrays that its `transform` reads besides the scalars of a pair. Floats are in
        the accumulation dtype of the logits or wider. So their gradient, which is a sum over all
        pairs, rounds once.
    - `jaxpr`: its `transform`, with a variable for each of the `consts`.
    - `dtypes`: the dtypes in which the `transform` reads the `consts`.
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
        operands: Sequence[tuple[tuple[int, ...], Any]],
        consts: Sequence[Array] | None = None,
        axes: frozenset = frozenset(),
    ) -> "ClosedScore":
        """Traces the `transform` of a score.

        A trace is valid inside of `jax.shard_map` only if it was made there. But the arrays that it
        closes over must be arguments of `jax.shard_map`. So a first trace outside finds them, and a
        second one inside is given them as `consts`.

        **Arguments:**

        - `score`: the score.
        - `logit`: the dtype of the logit.
        - `operands`: the shape and the dtype of what the score reads of each operand at a pair.
        - `consts`: the arrays to close over; None takes those that the trace finds.
        - `axes`: the mesh axes over which all arguments vary.
        """
        like = vary(jnp.zeros((), logit), axes)
        read = [((), x) for x in (logit, *[jnp.int32] * 4)] + list(operands)
        # Not the method itself: JAX compares what it traces, and a module's arrays have no truth.
        transform = jax.make_jaxpr(lambda *xs: score.transform(*xs))
        closed = transform(*[abstract(like, *x) for x in read])
        dtypes = tuple(x.dtype for x in closed.consts)
        if consts is None:
            consts = [widened(x, logit) for x in closed.consts]
        return cls(tuple(consts), closed.jaxpr, dtypes, score.finite_when_masked)

    def __call__(self, mask: Array | None, s: Array, *others: Array) -> Array:
        """Transforms the logits of a block.

        **Arguments:**

        - `mask`: which pairs are visible, `[keys, rows]`; None if all are.
        - `s`: the logits `[keys, rows]`.
        - `others`: the indices and operands of its pairs, `[keys|1, rows|1]`, some with features.

        **Returns:** the new logits. They are 0 where the mask is False, unless the score is
        `finite_when_masked`.
        """
        axes = varying_axes(s, *others)
        xs = [vary(x, axes) for x in (s, *others)]
        fn = ft.partial(_evaluate, self.jaxpr, self.dtypes)
        consts = [vary(jnp.asarray(x), axes) for x in self.consts]
        if mask is None or self.finite_when_masked:
            return fn(consts, xs)
        return _where_visible(fn, mask, consts, xs)


class HeldScore(AbstractWrapper):
    """A score whose arrays are held in the dtype of sums, or a wider one.

    Where the arrays cross the boundary of a `jax.shard_map`, their gradient is a sum over devices.
    Like the sums inside, this one is then wide, and rounds once.

    **Arguments:**

    - `score`: the score.
    - `closed`: what it computes.
    - `mesh`: the mesh for which that was traced, with the types of its axes.
    """

    score: AbstractScore
    closed: ClosedScore
    mesh: Any = eqx.field(static=True)

    @classmethod
    def of(cls, score: AbstractScore, *args: Any, **kw: Any) -> "HeldScore":
        """Holds the arrays of a score. The arguments are those of `ClosedScore.of`."""
        return cls(score, ClosedScore.of(score, *args, **kw), jax.sharding.get_abstract_mesh())

    def transform(self, logit: Any, b: Any, h: Any, q: Any, k: Any, *operands: Any) -> Any:
        closed, scalars = self.closed, (logit, b, h, q, k, *operands)
        axes = varying_axes(*scalars, *closed.consts)
        if self.mesh != jax.sharding.get_abstract_mesh():
            # Equations have the mesh of their trace. It had fewer manual axes outside of a map.
            read = [(x.shape, x.dtype) for x in operands]
            closed = ClosedScore.of(self.score, logit.dtype, read, closed.consts, axes)
        consts, scalars = (
            [vary(jnp.asarray(x), axes) for x in xs] for xs in (closed.consts, scalars)
        )
        return _of_pair(closed.jaxpr, closed.dtypes, consts, scalars)


def read_of(operand: Any, logit: Any, features: int = 4) -> tuple[tuple[int, ...], Any]:
    """The shape and the dtype of what a score reads of an operand at a pair.

    **Arguments:**

    - `operand`: the operand, canonical, of which floats are read in the dtype of sums.
    - `logit`: the dtype of the logit.
    - `features`: which axis is that of features, if there are any.
    """
    return operand.shape[features:], dtype_read(operand, logit)


def dtype_read(operand: Any, logit: Any) -> Any:
    """The dtype in which a score reads an operand. Floats are read in the dtype of sums."""
    return accumulation_dtype(operand.dtype, logit) if _is_float(operand) else operand.dtype


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


@dataclasses.dataclass(frozen=True)
class Held:
    """A value of a narrow dtype that is held in a wider one, which represents it exactly.

    **Arguments:**

    - `wide`: the value.
    - `dtype`: the narrow dtype.
    """

    wide: Array
    dtype: Any

    def narrow(self) -> Array:
        return self.wide.astype(self.dtype)


MOVES = {
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
"""Operations that do not round, so they may be applied to wide values. Their transposes add up
cotangents, which then are wide.
"""


def wide_step(eqn: Any, xs: Sequence) -> list:
    """Evaluates an equation. `Held` values stay wide through operations that do not round."""
    if only_varies(eqn):
        axes = frozenset(eqn.params["axes"])
        return [
            dataclasses.replace(x, wide=vary(x.wide, axes)) if isinstance(x, Held)
            else vary(x, axes)
            for x in xs
        ]  # fmt: skip
    if eqn.primitive is primitives.jit_p:
        inner = eqn.params["jaxpr"]
        return interpret(inner.jaxpr, inner.consts, xs, wide_step)
    held = next((x for x in xs if isinstance(x, Held)), None)
    if held is None:
        return evaluated(eqn, xs)
    if eqn.primitive is lax.convert_element_type_p:
        new = eqn.params["new_dtype"]
        if jnp.issubdtype(new, jnp.floating) and new.itemsize > held.dtype.itemsize:
            return [held.wide.astype(new)]
    if eqn.primitive in MOVES:

        def widened(x):
            if isinstance(x, Held):
                return x.wide
            return x.astype(held.wide.dtype) if jnp.result_type(x) == held.dtype else x

        ys = evaluated(eqn, [widened(x) for x in xs])
        return [Held(y, held.dtype) for y in ys]
    return evaluated(eqn, [x.narrow() if isinstance(x, Held) else x for x in xs])


def _of_pair(
    jaxpr: Any, dtypes: Sequence, consts: Sequence, scalars: Sequence, step: Callable = wide_step
) -> ArrayLike:
    """Evaluates a transform, whose `consts` it reads in these dtypes, on the scalars of a pair."""
    own = [Held(x, d) if x.dtype != d else x for x, d in zip(consts, dtypes)]
    (y,) = interpret(jaxpr, own, scalars, step)
    y = y.here if isinstance(y, _Guarded) else y
    return y.wide if isinstance(y, Held) else y


def _evaluate(
    jaxpr: Any,
    dtypes: Sequence,
    consts: Sequence,
    xs: Sequence,
    there: Sequence = (),
    mask: Array | None = None,
) -> Array:
    """Evaluates a transform of scalars on the arrays `xs` of a block.

    **Arguments:**

    - `jaxpr`, `dtypes`, `consts`: those of a `ClosedScore`.
    - `there`, `mask`: the arguments at one visible pair, and which pairs are visible. If they are
        given, a masked pair gets the values of that visible pair.
    """

    transform = lambda *scalars: _of_pair(jaxpr, dtypes, consts, scalars)

    def guarded(seen, *scalars):
        here, elsewhere = scalars[: len(xs)], scalars[len(xs) :]
        args = [_Guarded(x, y, _axes(z)) for x, y, z in zip(here, elsewhere, xs)]
        return _of_pair(jaxpr, dtypes, consts, args, ft.partial(_guarded_step, seen, _axes(mask)))

    if mask is None:
        return over_block(transform, xs).astype(xs[0].dtype)
    return over_block(guarded, [mask, *xs, *there]).astype(xs[0].dtype)


@dataclasses.dataclass(frozen=True)
class _Guarded:
    """A value at a pair, and at one visible pair of the same block.

    Once a value depends on both the row and the key, its number at a masked pair is replaced by
    that at the visible pair. So all that is computed from it is finite there, and its own
    derivative gets the cotangent 0, by the transpose of a selection.

    **Arguments:**

    - `here`, `there`: the value at the pair, and at the visible one.
    - `axes`: the axes of the block on which it depends, of 0 for keys and 1 for rows.
    """

    here: Any
    there: Any
    axes: frozenset


def _axes(x: Any) -> frozenset:
    """The axes of a block on which an array `[keys|1, rows|1, ...]` varies."""
    return frozenset(i for i in (0, 1) if x.shape[i] > 1)


def _guarded_step(seen: Any, masked: frozenset, eqn: Any, xs: Sequence) -> list:
    """Evaluates an equation of guarded values.

    **Arguments:**

    - `seen`: whether the pair is visible.
    - `masked`: the axes of the block on which `seen` depends.
    """
    if eqn.primitive is primitives.jit_p:
        inner = eqn.params["jaxpr"]
        step = ft.partial(_guarded_step, seen, masked)
        return interpret(inner.jaxpr, inner.consts, xs, step)
    xs = [x if isinstance(x, _Guarded) else _Guarded(x, x, frozenset()) for x in xs]
    axes = frozenset().union(*(x.axes for x in xs))

    def chosen(here, there):
        if not masked <= axes:
            return here
        if isinstance(here, Held):
            return dataclasses.replace(here, wide=chosen(here.wide, there.wide))
        return jnp.where(seen, here, lax.stop_gradient(there))

    both = zip(wide_step(eqn, [x.here for x in xs]), wide_step(eqn, [x.there for x in xs]))
    return [_Guarded(chosen(here, there), there, axes) for here, there in both]


@ft.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _where_visible(fn: Callable, mask: Array, consts: list[Array], xs: list[Array]) -> Array:
    """Applies `fn` to a block, with 0 where the mask is False. Selection keeps what is masked out
    of the result, so only derivatives need safe arguments.
    """
    return jnp.where(mask, fn(consts, xs), 0)


@ft.partial(_where_visible.defjvp, symbolic_zeros=True)
def _where_visible_jvp(fn, primals, tangents):
    # Let f be the function, M the mask and x' the arguments at one visible pair. This
    # differentiates
    #
    #     y = where(M, f(where(any(M), c, stop(c)), where(M, x, stop(x'))), 0).
    #
    # For visible pairs, that is f(c, x). For masked pairs, the outer selection has the tangent 0,
    # and its transpose hands 0 to the derivative of f at x', which is finite. The constants `c` are
    # shared by all pairs, so their selection is by whether the block has any visible pair. That of
    # features is by whether their row or key has any, and `_Guarded` selects what f makes of them.
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
        there = [lax.stop_gradient(_picked(x, *picks)) for x in xs]
        consts = [jnp.where(seen, x, lax.stop_gradient(x)) for x in consts]
        guards = (there, mask) if any(x.ndim > 2 for x in xs) else ()
        xs = [_where_seen(mask, x, y) for x, y in zip(xs, there)]
        return jnp.where(mask, fn(consts, xs, *guards), 0)

    values, directions = ([xs[i] for i in active] for xs in (leaves, moved))
    return y, jax.jvp(safe, tuple(values), tuple(directions))[1]


def _one_visible(mask: Array) -> tuple[Array, tuple[Array, Array]]:
    """Finds a visible pair of a block, by minima and maxima of floats, which kernels know.

    **Returns:** whether there is one, and a mask of its key, `[keys, 1]`, and of its row,
    `[1, rows]`.
    """
    visible = jnp.where(mask, jnp.float32(1), jnp.float32(0))

    def first(visible, axis):
        index = lax.broadcasted_iota(jnp.int32, visible.shape, axis).astype(jnp.float32)
        found = jnp.where(visible > 0, index, jnp.inf).min(axis, keepdims=True)
        return index == found

    row = first(visible.max(0, keepdims=True), 1)
    key = first(jnp.where(row, visible, 0).max(1, keepdims=True), 0)
    return visible.max() > 0, (key, row)


def _where_seen(mask: Array, x: Array, y: Array) -> Array:
    """An argument `x` where a pair is visible, else `y`. Features of a row or a key stay if it has
    a visible pair. In them 0 replaces what is not finite, as a masked pair may multiply it by 0.
    """
    if x.ndim == 2:
        return jnp.where(mask, x, y)
    shared = [i for i in (0, 1) if x.shape[i] == 1]
    x = jnp.where(mask.any(shared, keepdims=True)[..., None], x, y)
    return zero_nonfinite(x) if _is_float(x) else x


def _picked(x: Array, key: Array, row: Array) -> Array:
    """The entry `[1, 1, ...]` of `x` `[keys|1, rows|1, ...]` at one pair."""
    for axis, at in enumerate((key, row)):
        if x.shape[axis] > 1:
            at = at.reshape(*at.shape, *[1] * (x.ndim - 2))
            x = jnp.where(at, x, jnp.zeros((), x.dtype)).sum(axis, keepdims=True, dtype=x.dtype)
    return x


class BoundMask(AbstractMask):
    """A mask whose operands are replaced by canonical arrays `[B|1, H|1, T|1, S|1]`, some perhaps
    with features.
    """

    mask: AbstractMask
    arrays: tuple[Array | np.ndarray, ...]

    def operands(self):
        return tuple(map(Operand.of_canonical, self.arrays))

    def visible(self, b, h, q, k, *ids):
        return self.mask.visible(b, h, q, k, *ids)


def terms_beside_lists(mask: AbstractMask | None) -> list[AbstractMask]:
    """The terms of a mask without those that list keys, which have no operands."""
    return [term for term in leaf_terms(mask) if not term.selects]


def with_flat_lists(mask: AbstractMask | None, batch_shape: tuple[int, ...]) -> AbstractMask | None:
    """The mask with lists of keys that have one batch axis in place of `batch_shape`."""

    def flat(term: Any) -> Any:
        if not term.selects:
            return term
        return eqx.tree_at(lambda x: x.indices, term, term.rows_of(batch_shape))

    return None if mask is None else map_terms(mask, flat)


def with_bound_terms(mask: AbstractMask | None, arrays: Any) -> AbstractMask | None:
    """The mask with canonical arrays as operands, a tuple for each of its `terms_beside_lists`."""
    left = iter(arrays)
    bound = lambda term: term if term.selects else BoundMask(term, next(left))
    return None if mask is None else map_terms(mask, bound)


class BoundScore(AbstractWrapper):
    """A score whose operands are replaced by others, such as a part of these, or wider ones."""

    score: AbstractScore
    given: tuple[Operand, ...]

    @classmethod
    def of_canonical(cls, score: AbstractScore, arrays: Iterable[Array]) -> "BoundScore":
        """The score with canonical arrays as operands, as those of a `BoundMask`."""
        return cls(score, tuple(map(Operand.of_canonical, arrays)))

    def operands(self) -> tuple[Operand, ...]:
        return self.given

    def transform(self, logit: Any, b: Any, h: Any, q: Any, k: Any, *operands: Any) -> Any:
        return self.score.transform(logit, b, h, q, k, *operands)


def consts_of(
    scores: Sequence[AbstractScore], arrays: Sequence[Sequence[Array]], acc: Any
) -> tuple[tuple[Array, ...], ...]:
    """The arrays that each score closes over, in the dtype of sums `acc`. Where they cross the
    boundary of a `jax.shard_map`, their gradients are sums over devices.

    **Arguments:**

    - `arrays`: the canonical operands of each score.
    """
    return tuple(
        ClosedScore.of(score, acc, [read_of(x, acc) for x in xs]).consts
        for score, xs in zip(scores, arrays)
    )


def bound_scores(
    scores: Sequence[AbstractScore],
    arrays: Sequence[Sequence[Array]],
    consts: Sequence[Sequence[Array]],
    acc: Any,
    axes: Any,
) -> tuple[BoundScore, ...]:
    """The scores with what is here of their operands, and of what `consts_of` returned. The mesh
    axes over which any of it varies are `axes`.
    """
    return tuple(
        BoundScore.of_canonical(
            HeldScore.of(score, acc, [read_of(x, acc) for x in xs], own, axes), xs
        )
        for score, xs, own in zip(scores, arrays, consts)
    )
