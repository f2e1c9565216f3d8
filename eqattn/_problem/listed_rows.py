"""A problem whose mask lists keys, where automatic axes of a mesh shard its batch or its heads.

XLA does not split a gather whose indices are sharded as its operand is. It gathers the indices of
all devices, and in a backward pass also the gradients of their listed keys. But a list names only
keys of the batch element and head that it belongs to. So these axes of the mesh are made manual,
and each device folds a problem with its batch elements and heads.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from .._carry import Carry
from .._jax import compiled, varying_axes
from .._misc import accumulation_dtype, iota, widened
from ..masks._terms import leaf_terms, map_terms
from .bound import bound_scores, consts_of, terms_beside_lists, with_bound_terms
from .mesh import ManualAxes, shard_map_wide
from .problem import Problem


HEADS = {"query": 2, "key": 2, "value": 2, "h_indices": 1}
"""The axis of heads, for each array of a problem that has such an axis."""

TOKENS = (*HEADS, "q_positions", "kv_positions", "q_shift", "kv_places", "b_indices")
"""The arrays of a problem whose first axis is that of the batch, of size 1 where all share them."""


class _Split(eqx.Module):
    """A problem in two parts: what has an axis of the batch or of heads, and the rest.

    **Arguments:**

    - `rest`: the problem without what follows.
    - `tokens`: its arrays with the names `TOKENS`, or None.
    - `lists`: the indices of each term of the mask that lists keys, `[B|1, h, rows, n]`.
    - `mask`, `scores`: the canonical operands that each other term of the mask, and each score,
        reads.
    - `consts`: the arrays that each score closes over, in the dtype of sums.
    """

    rest: Problem
    tokens: dict[str, Any]
    lists: tuple[Any, ...]
    mask: tuple[tuple[Any, ...], ...]
    scores: tuple[tuple[Any, ...], ...]
    consts: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, problem: Problem, manual: ManualAxes) -> "_Split":
        """Splits a problem into these parts. Masks, scores and dropout go on to read the indices of
        batch elements and heads in the whole arrays.
        """
        (batch, _, heads, _), acc = problem.query.shape, problem.accumulation_dtype
        listing: list[Any] = [x for x in leaf_terms(problem.mask) if x.selects]
        lists = tuple(x.rows_of(problem.batch_shape) for x in listing)
        problem = problem.at_places(lists=False)

        def operands(part: Any) -> tuple[Array, ...]:
            return tuple(jnp.asarray(problem.canonical(o)) for o in part.operands())

        def wide(x: Array) -> Array:
            """An operand of a score in the dtype of sums, if its gradient is a sum over devices."""
            shared = manual.batch and x.shape[0] == 1 or manual.heads and x.shape[1] == 1
            return widened(x, acc) if shared else x

        mask = tuple(map(operands, terms_beside_lists(problem.mask)))
        scores = tuple(tuple(map(wide, operands(score))) for score in problem.scores)
        consts = consts_of(problem.scores, scores, acc)
        tokens = {name: getattr(problem, name) for name in TOKENS}
        if manual.batch and problem.b_indices is None:
            tokens["b_indices"] = iota(batch)
        if manual.heads and problem.h_indices is None:
            tokens["h_indices"] = iota(heads)[None]
        where = lambda p: [getattr(p, name) for name in TOKENS]
        rest = dataclasses.replace(problem, scale=jnp.asarray(problem.scale, acc), shards=1)
        rest = eqx.tree_at(where, rest, [None] * len(TOKENS), is_leaf=lambda x: x is None)
        return cls(rest, tokens, lists, mask, scores, consts)

    def specs(self, manual: ManualAxes) -> "_Split":
        """How each array is spread over the manual axes of the mesh."""

        def spec(x: Any, heads: int | None = 1) -> P:
            sharded = {0: manual.batch, heads: manual.heads}
            return P(*[sharded.get(i) or None if n > 1 else None for i, n in enumerate(x.shape)])

        each = lambda tree: jax.tree.map(spec, tree)
        whole = lambda tree: jax.tree.map(lambda _: P(), tree)
        tokens = {n: x if x is None else spec(x, HEADS.get(n)) for n, x in self.tokens.items()}
        return _Split(
            whole(self.rest),
            tokens,
            each(self.lists),
            each(self.mask),
            each(self.scores),
            whole(self.consts),
        )

    def problem(self) -> Problem:
        """The problem again, of the arrays that are here now."""
        acc, lists = accumulation_dtype(self.tokens["query"].dtype), iter(self.lists)
        own = lambda x: eqx.tree_at(lambda x: x.indices, x, next(lists)) if x.selects else x
        mask = map_terms(self.rest.mask, own) if self.rest.mask is not None else None
        axes = varying_axes(self.tokens["query"], *jax.tree.leaves(self.scores))
        scores = bound_scores(self.rest.scores, self.scores, self.consts, acc, axes)
        new = [*self.tokens.values(), with_bound_terms(mask, self.mask), scores]
        where = lambda p: [getattr(p, name) for name in (*self.tokens, "mask", "scores")]
        whole = eqx.tree_at(where, self.rest, new, is_leaf=lambda x: x is None)
        return dataclasses.replace(whole, batch_shape=self.tokens["query"].shape[:1])


def fold_own_rows(problem: Problem, manual: ManualAxes, fold: Callable[[Problem], Carry]) -> Carry:
    """Folds a problem on devices that each have some of its batch elements and heads.

    **Arguments:**

    - `problem`: the problem, for which `lists_own_keys` of `mesh.py` is True.
    - `manual`: the axes that shard its batch and its key/value heads.
    - `fold`: a function that folds the problem of a device.
    """
    arrays, static = eqx.partition(_Split.of(problem, manual), eqx.is_array)
    mapped = shard_map_wide(
        lambda arrays: fold(eqx.combine(arrays, static).problem()),
        mesh=manual.mesh,
        in_specs=(arrays.specs(manual),),
        out_specs=P(manual.batch or None, None, manual.heads or None),
        names=manual.names,
    )
    # Outside of `jax.jit`, JAX cannot look at known arrays inside of a `shard_map`.
    return compiled(jax.jit(mapped))(arrays)
