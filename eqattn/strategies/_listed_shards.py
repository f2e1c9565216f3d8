"""The fold of a problem whose tokens are sharded and whose mask lists keys, as a `Selected` does.

The keys that a query lists may lie on any device. So each device gathers all keys and values, in
their stored dtype and number of heads. Then it attends with its queries as one device does. It
holds the keys of the whole sequence then. The list, the queries and all that is made of them stay
sharded. What is gathered is linear in the sequence. A ring would visit the listed keys hop by hop,
with one copy of the list for each hop.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from .._carry import Carry
from .._jax import compiled, summed_wide, varying_axes
from .._misc import accumulation_dtype, iota, widened
from .._pairs import Operand
from .._problem.closed_score import bound_scores, consts_of, terms_beside_lists, with_bound_terms
from .._problem.mesh import shard_map_wide, with_kernel
from .._problem.problem import cached, Problem
from .._problem.shards import with_wide_sums
from .._sweep.lowering import XLA
from .._sweep.tokens import padded
from ..masks._base import AbstractMask, leaf_terms, map_terms
from ._fold import fold_on_device


def lists_of(mask: AbstractMask | None) -> list[Any]:
    """The terms of a mask that list keys."""
    return [term for term in leaf_terms(mask) if term.selects]


class _Apart(eqx.Module):
    """A problem in two parts: what is sharded with the queries, and what is not.

    **Arguments:**

    - `rest`: the problem without what follows.
    - `query`, `q_positions`: the queries `[B, T, H, D]`, and their positions `[B|1, T]`.
    - `key`, `value`, `kv_positions`, `kv_places`: keys and values, and the positions and the places
        of keys or None.
    - `lists`: the indices of each term of the mask that lists keys, `[B|1, h, rows, n]`.
    - `held`: the canonical operands that each other term of the mask, and then each score, reads.
    - `consts`: the arrays that each score closes over. They are in the dtype of sums, as their
        gradients are sums over devices.
    """

    rest: Problem
    query: Any
    q_positions: Any
    key: Any
    value: Any
    kv_positions: Any
    kv_places: Any
    lists: tuple[Any, ...]
    held: tuple[Any, ...]
    consts: tuple[Any, ...]

    @classmethod
    def of(cls, problem: Problem, q: Any, k: Any) -> "_Apart":
        """Splits a problem into these parts.

        **Arguments:**

        - `q`, `k`: the places of its tokens `[t]` and `[s]`, where it does not have them; `k` may
            be None.
        """
        lists = tuple(x.rows_of(problem.batch_shape) for x in lists_of(problem.mask))
        # Other masks look up what they know by place here, where the places of all tokens are
        # known.
        problem = problem.at_places(q, k, lists=False)
        q_positions, kv_positions = (
            given if given is not None or x is None else x[None]
            for given, x in ((problem.q_positions, q), (problem.kv_positions, k))
        )
        terms, acc = terms_beside_lists(problem.mask), problem.accumulation_dtype
        parts = *terms, *problem.scores
        held = tuple(tuple(_held(problem, o) for o in x.operands()) for x in parts)
        consts = consts_of(problem.scores, held[len(terms) :], acc)
        where = lambda p: (p.query, p.key, p.value, p.q_positions, p.kv_positions, p.kv_places)
        # Canonical operands have one batch axis.
        scale = jnp.asarray(problem.scale, acc)  # its gradient is a sum over devices, too
        rest = dataclasses.replace(
            problem, batch_shape=problem.query.shape[:1], shards=1, scale=scale
        )
        rest = eqx.tree_at(where, rest, (None,) * 6, is_leaf=lambda x: x is None)
        keys = problem.key, problem.value, kv_positions, problem.kv_places
        return cls(rest, problem.query, q_positions, *keys, lists, held, consts)

    def map_rows(self, fn: Any) -> "_Apart":
        """Applies `fn(array, axis of its queries, whether it is a list)` to what has queries."""
        t = self.query.shape[1]
        rows = lambda x: fn(x, 2, False) if x.shape[2] == t else x
        return _Apart(
            self.rest,
            fn(self.query, 1, False),
            fn(self.q_positions, 1, False),
            self.key,
            self.value,
            self.kv_positions,
            self.kv_places,
            tuple(fn(x, 2, True) for x in self.lists),
            jax.tree.map(rows, self.held),
            self.consts,
        )

    def map_keys(self, fn: Any) -> "_Apart":
        """Applies `fn(array, axis of its keys)` to what has keys and no queries."""
        s = self.key.shape[1]
        columns = lambda x: fn(x, 3) if x.shape[3] == s and x.shape[2] == 1 else x
        where = lambda p: (p.key, p.value, p.kv_positions, p.kv_places)
        new = jax.tree.map(lambda x: fn(x, 1), where(self))
        new = eqx.tree_at(where, self, new, is_leaf=lambda x: x is None)
        return dataclasses.replace(new, held=jax.tree.map(columns, self.held))

    def specs(self, names: Any) -> "_Apart":
        """How each array is spread over mesh axes: by its queries, if it has any."""
        rows = lambda axis: P(*[None] * axis, names)
        t = self.query.shape[1]
        return dataclasses.replace(
            jax.tree.map(lambda _: P(), self),
            query=rows(1),
            q_positions=rows(1),
            lists=tuple(rows(2) for _ in self.lists),
            held=jax.tree.map(lambda x: rows(2) if x.shape[2] == t else P(), self.held),
        )

    def problem(self) -> Problem:
        """The problem again, of the arrays that are here now."""
        lists, mask = iter(self.lists), self.rest.mask
        own = lambda x: eqx.tree_at(lambda x: x.indices, x, next(lists)) if x.selects else x
        mask = None if mask is None else map_terms(mask, own)
        n = len(terms_beside_lists(mask))
        mask, held = with_bound_terms(mask, self.held[:n]), self.held[n:]
        axes = varying_axes(self.query, *jax.tree.leaves(self.held))
        acc = accumulation_dtype(self.query.dtype)
        scores = bound_scores(self.rest.scores, held, self.consts, acc, axes)
        names = "query", "key", "value", "q_positions", "kv_positions", "kv_places"
        where = lambda p: (*(getattr(p, name) for name in names), p.mask, p.scores)
        new = (*(getattr(self, name) for name in names), mask, scores)
        return eqx.tree_at(where, self.rest, new, is_leaf=lambda x: x is None)


@compiled  # outside of `jax.jit`, JAX cannot look at known arrays inside of a `shard_map`
@cached
def fold_listed(problem: Problem, *, place, partition, **options) -> Carry:
    """Folds a problem whose mask lists keys, and whose tokens are sharded over devices.

    **Arguments:**

    - `place`: how they are sharded, a `SequenceSharding`.
    - `partition`: the mesh axes that may shard batch and heads, as for `with_kernel`.
    - `options`: keyword arguments of `fold_on_device`.
    """
    t, s, _, _ = problem.sizes
    inside = place.mesh is None
    q, k = place.array_tokens(t), None
    looked_up = any(x.by_place for x in terms_beside_lists(problem.mask))
    if not place.layout.in_order(place.size) or looked_up:
        k = place.array_tokens(s)
    problem = with_wide_sums(problem, XLA, "key", "value")  # whose gradients are sums over devices
    apart = _Apart.of(problem, jnp.asarray(iota(t) if q is None else q), k)

    def visit(apart: _Apart) -> Carry:
        own = apart.problem()
        sizes = own.query.shape[0], own.sizes[3]
        # Here the axes of the tokens are manual, and those of batch and heads may be automatic.
        manual = with_kernel(None, None, partition, sizes)
        return fold_on_device(own, manual=manual, **options)

    if inside:
        return visit(_gathered(apart, place.axes))
    size = place.devices * max(x.block_q for x in lists_of(problem.mask))
    missing = -t % size

    def with_rows(x: Array, axis: int, is_list: bool) -> Array:
        if not is_list:
            # A score may be singular at 0, as a soft cap is. With one query, that is padded, too.
            return padded(x, axis, t + missing, "last")
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, (t + missing) // (size // place.devices) - x.shape[axis])
        return jnp.pad(x, widths, constant_values=-1)

    apart = apart.map_rows(with_rows)
    arrays, static = eqx.partition(apart, eqx.is_array)
    carry = shard_map_wide(
        lambda arrays: visit(eqx.combine(arrays, static)),
        mesh=place.mesh,
        in_specs=(arrays.specs(place.axes),),
        out_specs=P(None, place.axes),
        names=set(place.axes),
    )(arrays)
    return jax.tree.map(lambda x: x[:, :t], carry)


def _held(problem: Problem, operand: Operand) -> Array:
    """An operand in canonical form. The gradient of floats that all queries share is a sum over
    devices, so these are in the dtype of sums.
    """
    x = jnp.asarray(problem.canonical(operand))
    return x if x.shape[2] > 1 else widened(x, problem.accumulation_dtype)


def _gathered(apart: _Apart, axes: tuple[str, ...]) -> _Apart:
    """The same with the keys of all devices, where the axes are manual."""

    def gather(x: Array, axis: int) -> Array:
        for name in reversed(axes):  # the inner one first
            x = summed_wide(lambda x, n=name: lax.all_gather(x, n, axis=axis, tiled=True), x)
        return x

    return apart.map_keys(gather)
