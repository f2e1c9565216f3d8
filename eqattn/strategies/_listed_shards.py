"""The fold of a problem whose tokens are sharded and whose mask lists keys, as a `Selected` does.

The keys that a query lists may lie on any device. So each device gathers all keys and values, in
their own dtype and with their own heads, and attends with its own queries as one device does. It
holds the keys of the whole sequence then; the list, the queries and all that is made of them stay
shared out. What is gathered is linear in the sequence, while a ring that visits each key of every
device's list once at each hop would take as many copies of it as there are hops.
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
from .._jax import compiled, is_narrow, summed_wide, varying_axes
from .._misc import accumulation_dtype, iota
from .._pairs import Operand
from .._problem.bound import BoundMask, BoundScore
from .._problem.jit_cache import cached
from .._problem.problem import Problem
from ..masks._base import AbstractMask
from ..masks._selected import Selected
from ..masks._terms import leaf_terms, map_terms
from ._fold import fold_on_device


def lists_of(mask: AbstractMask | None) -> list[Selected]:
    """The terms of a mask that list keys."""
    return [term for term in leaf_terms(mask) if isinstance(term, Selected)]


class _Apart(eqx.Module):
    """A problem, taken apart by what is sharded with the queries and what is not.

    **Arguments:**

    - `rest`: the problem without what follows.
    - `query`, `q_positions`: the queries `[B, T, H, D]`, and their positions `[B|1, T]`.
    - `key`, `value`, `kv_positions`: keys and values, and the positions of keys or None.
    - `lists`: the indices of each term of the mask that lists keys, `[B|1, h, rows, n]`.
    - `held`: the canonical operands of each other term of the mask, then of each score. It is None
        for a term that goes by places, which has none of tokens.
    """

    rest: Problem
    query: Any
    q_positions: Any
    key: Any
    value: Any
    kv_positions: Any
    lists: tuple[Any, ...]
    held: tuple[Any, ...]

    @classmethod
    def of(cls, problem: Problem, q: Any, k: Any) -> "_Apart":
        """Takes a problem apart.

        **Arguments:**

        - `q`, `k`: the positions of its tokens, where it does not have them; `k` may be None.
        """
        held: list[Any] = []
        for part in (*leaf_terms(problem.mask), *problem.scores):
            if isinstance(part, Selected):
                continue
            if isinstance(part, AbstractMask) and part.by_place:
                if len(problem.batch_shape) > 1:
                    raise ValueError(
                        f"A {type(part).__name__} next to a list of keys over devices needs one "
                        f"batch axis, got {problem.batch_shape}; flatten these."
                    )
                held.append(None)
                continue
            held.append(tuple(_held(problem, o) for o in part.operands()))
        lists = (x.rows_of(problem.batch_shape) for x in lists_of(problem.mask))
        q = problem.q_positions if problem.q_positions is not None else q
        k = problem.kv_positions if problem.kv_positions is not None else k
        where = lambda p: (p.query, p.key, p.value, p.q_positions, p.kv_positions)
        rest = dataclasses.replace(problem, batch_shape=problem.query.shape[:1], shards=1)
        rest = eqx.tree_at(where, rest, (None,) * 5, is_leaf=lambda x: x is None)
        arrays = problem.query, q, problem.key, problem.value, k
        return cls(rest, *arrays, tuple(lists), tuple(held))

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
            tuple(fn(x, 2, True) for x in self.lists),
            jax.tree.map(rows, self.held),
        )

    def map_keys(self, fn: Any) -> "_Apart":
        """Applies `fn(array, axis of its keys)` to what has keys and no queries."""
        s, given = self.key.shape[1], self.kv_positions
        columns = lambda x: fn(x, 3) if x.shape[3] == s and x.shape[2] == 1 else x
        where = lambda p: (p.key, p.value, p.kv_positions, p.held)
        positions = None if given is None else fn(given, 1)
        new = fn(self.key, 1), fn(self.value, 1), positions, jax.tree.map(columns, self.held)
        return eqx.tree_at(where, self, new, is_leaf=lambda x: x is None)

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

    def widened(self) -> "_Apart":
        """The same, with what every device has in float32 or wider: its gradient is a sum over
        devices, and is summed in this dtype.
        """
        wide = lambda x: x.astype(jnp.float32) if is_narrow(x) else x
        where = lambda p: (p.rest, p.key, p.value, p.held)
        return eqx.tree_at(where, self, jax.tree.map(wide, where(self)))

    def problem(self) -> Problem:
        """The problem again, of the arrays that are here now."""
        lists, held = iter(self.lists), iter(self.held)

        def term(x: AbstractMask) -> AbstractMask:
            if isinstance(x, Selected):
                return Selected(next(lists), x.block_q, x.block_k)
            arrays = next(held)
            return x if arrays is None else BoundMask(x, arrays)

        mask = self.rest.mask
        mask = None if mask is None else map_terms(mask, term)
        scores = [BoundScore(score, arrays) for score, arrays in zip(self.rest.scores, held)]
        where = lambda p: (p.query, p.key, p.value, p.q_positions, p.kv_positions, p.mask, p.scores)
        new = (self.query, self.key, self.value, self.q_positions, self.kv_positions)
        new = (*new, mask, tuple(scores))
        return eqx.tree_at(where, self.rest, new, is_leaf=lambda x: x is None)


@compiled  # outside of `jax.jit`, JAX cannot look at known arrays inside of a `shard_map`
@cached
def fold_listed(problem: Problem, *, place, **options) -> Carry:
    """Folds a problem whose mask lists keys, and whose tokens are sharded over devices.

    **Arguments:**

    - `place`: how they are sharded, a `SequenceSharding`.
    - `options`: keyword arguments of `fold_on_device`.
    """
    t, s, _, _ = problem.sizes
    inside = place.mesh is None
    q, k = place.array_tokens(t), None
    if not place.layout.in_order(place.size):
        k = place.array_tokens(s)
    q, k = (x if x is None else x[None] for x in (iota(t) if q is None else q, k))
    apart = _Apart.of(problem, jnp.asarray(q), k)

    def visit(apart: _Apart) -> Carry:
        return fold_on_device(apart.problem(), **options)

    if inside:
        return visit(_gathered(apart, place.axes))
    size = place.devices * max(x.block_q for x in lists_of(problem.mask))
    missing = -t % size

    def padded(x: Array, axis: int, is_list: bool) -> Array:
        widths = [(0, 0)] * x.ndim
        rows = (t + missing) // (size // place.devices) if is_list else t + missing
        widths[axis] = (0, rows - x.shape[axis])
        return jnp.pad(x, widths, constant_values=-1) if is_list else jnp.pad(x, widths)

    apart = apart.map_rows(padded)
    arrays, static = eqx.partition(apart, eqx.is_array)
    dtypes = jax.tree.map(lambda x: x.dtype, arrays)

    def on_device(arrays):
        narrow = jax.tree.map(lambda x, d: x.astype(d), arrays, dtypes)
        return visit(eqx.combine(narrow, static))

    carry = jax.shard_map(
        on_device,
        mesh=place.mesh,
        in_specs=(arrays.specs(place.axes),),
        out_specs=P(None, place.axes),
        axis_names=set(place.axes),
        # Checked if it is checked around this call.
        check_vma=bool(varying_axes(*jax.tree.leaves(arrays))),
    )(arrays.widened())
    return jax.tree.map(lambda x: x[:, :t], carry)


def _held(problem: Problem, operand: Operand) -> Array:
    """An operand in canonical form. The gradient of floats that all queries share is a sum over
    devices, so these are in the dtype of sums.
    """
    x = jnp.asarray(problem.canonical(operand))
    if x.shape[2] > 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x.astype(accumulation_dtype(x.dtype, problem.accumulation_dtype))


def _gathered(apart: _Apart, axes: tuple[str, ...]) -> _Apart:
    """The same with the keys of all devices, where the axes are manual."""

    def gather(x: Array, axis: int) -> Array:
        for name in reversed(axes):  # the inner one first
            x = summed_wide(lambda x, n=name: lax.all_gather(x, n, axis=axis, tiled=True), x)
        return x

    return apart.map_keys(gather)
