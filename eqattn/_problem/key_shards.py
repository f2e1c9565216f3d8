"""Attention whose keys are sharded over devices, which all have the queries: decoding over a cache
that is longer than the memory of one device.

Attention over the keys of one device is a Carry, and Carries merge exactly. So only a Carry of the
few queries is sent, for all masks, scores and forms in which keys are stored.

Where keys lie decides which positions a device has. With `n` devices, of which this is number `i`,

| stored | this device has |
|---|---|
| in one piece of `s` keys, or quantized | the `i`-th of `n` equal pieces |
| in pages | the pages `i`, `i + n`, `i + 2 n`, ... of each row, in its share of the pool |
"""

import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from .._carry import Carry, safe_max
from .._jax import varying_axes
from .._misc import iota, widened
from .bound import bound_scores, consts_of, terms_beside_lists, with_bound_terms, with_flat_lists
from .joined import Leading
from .problem import Problem
from .stack_layer import StackLayer
from .storage import as_stored, Pages


def merged_over(carry: Carry, axis: str) -> Carry:
    r"""Attention over the keys of all devices along a manual mesh axis, for the same queries.

    Relative to the largest $M$ of the devices' maxima, the sums of a device with the maximum $m$
    are multiplied by $e^{m - M}$, and then added. A row of values of size `v` takes `v + 2` numbers
    of each device: its maximum, its numerator and its denominator.
    """
    top = lax.pmax(lax.stop_gradient(carry.max_so_far), axis)
    share = jnp.exp(lax.stop_gradient(carry.max_so_far) - safe_max(top))
    sums = carry.numerator * share[..., None], carry.denominator * share
    numerator, denominator = lax.psum(sums, axis)
    return Carry(numerator, denominator, top)


def stored_specs(x: Any, axis: str) -> dict[int, P]:
    """Specifies how the arrays of keys or values are spread over the devices along a mesh axis, by
    the ids of the arrays. Pages are spread, or else the tokens of `[b, s, k, d]`, of all layers if
    they are a stack, and of scales `[b, n, s * k / n]`.
    """
    held, layers = as_stored(x), isinstance(x, StackLayer)
    lead = [0 if held.table is not None else 2 if flat else 1 + layers for flat in held.flat]
    return {id(a): P(*[None] * n, axis) for a, n in zip(held.arrays, lead)}


def key_axis(operand: Array | np.ndarray) -> int:
    """The axis of keys of an array, the last one. A canonical operand may have an axis of features
    after it.
    """
    return min(operand.ndim - 1, 3)


def on_every_device(operand: Array | np.ndarray, paged: bool) -> bool:
    """Whether each device has all of an operand: of pages, and where it does not vary with keys."""
    return paged or operand.shape[key_axis(operand)] == 1


class ShardedKeys(eqx.Module):
    """A problem in two parts: what it has for its keys, and the rest.

    **Arguments:**

    - `rest`: the problem without keys, values and arrays that vary with keys.
    - `key`, `value`: keys and values, as arrays or as they are stored.
    - `positions`, `places`: the positions of the keys, and their places, or None.
    - `mask`, `scores`: the canonical operands that each term of the mask, and each score, reads.
    - `consts`: the arrays that each score closes over, in the dtype of sums.
    """

    rest: Problem
    key: Any
    value: Any
    positions: Any
    places: Any
    mask: Any
    scores: Any
    consts: Any

    @classmethod
    def of(cls, problem: Problem, axis: str, inside: bool) -> "ShardedKeys":
        """Splits a problem into these parts.

        **Arguments:**

        - `problem`: the problem.
        - `axis`: the mesh axis over which its keys are sharded.
        - `inside`: whether the axis is manual already. Then keys in one piece are this device's.
        """
        acc, size = problem.accumulation_dtype, problem.sizes[1]
        paged = isinstance(problem.key, Pages)
        if inside and not paged and problem.kv_positions is None:
            start = lax.axis_index(axis) * size
            problem = dataclasses.replace(problem, kv_positions=(start + iota(size))[None])
        # Masks look up what they know by place here, where the places of all keys are known. A list
        # of keys stays: each device finds those that it has.
        problem = problem.at_places(lists=False)

        def operands(part: Any) -> tuple[Array, ...]:
            return tuple(jnp.asarray(problem.canonical(o)) for o in part.operands())

        def wide(x: Array) -> Array:
            """An operand of a score in the dtype of sums, if its gradient is a sum over devices."""
            return widened(x, acc) if on_every_device(x, paged) else x

        mask = tuple(map(operands, terms_beside_lists(problem.mask)))
        scores = tuple(tuple(map(wide, operands(score))) for score in problem.scores)
        where = lambda p: (p.key, p.value, p.kv_positions, p.kv_places)
        rest = eqx.tree_at(where, problem, (None,) * 4, is_leaf=lambda x: x is None)
        # Canonical operands have one batch axis, and the gradient of the scale is such a sum, too.
        one = (math.prod(problem.batch_shape),)
        rest = dataclasses.replace(rest, scale=jnp.asarray(rest.scale, acc), batch_shape=one)
        rest = dataclasses.replace(rest, mask=with_flat_lists(rest.mask, problem.batch_shape))
        consts = consts_of(problem.scores, scores, acc)
        at = problem.kv_positions, problem.kv_places
        return cls(rest, problem.key, problem.value, *at, mask, scores, consts)

    @property
    def paged(self) -> bool:
        return isinstance(self.key, Pages)

    def check(self, n: int, axis: str, inside: bool) -> None:
        """**Raises:** `ValueError`, with the remedy, for keys that `n` devices cannot share."""
        for name, x in (("key_", self.key), ("value", self.value)):
            if isinstance(x, Leading):  # it is a part of the keys
                continue
            devices = x.devices if isinstance(x, Pages) else n
            if isinstance(x, Pages) != self.paged or devices != n:
                raise ValueError(
                    f"{name} {x.shape} lies in pages, and the {n} devices of axis {axis!r} need a "
                    f"pool in {n} shares: make the cache by PagedKVCache.empty(..., devices={n}), "
                    f"or that of all layers by StackedPagedKVCache.empty(..., devices={n})."
                )
            if not self.paged and not inside and x.shape[1] % n:
                raise ValueError(
                    f"{name} {x.shape} [b, s, heads, dim] has {x.shape[1]} keys, which are not "
                    f"equal pieces for the {n} devices of axis {axis!r}: pad them, or make the "
                    f"capacity of the cache a multiple of {n}."
                )

    def specs(self, axis: str) -> "ShardedKeys":
        """How each array is spread over the devices along a mesh axis."""

        def stored(x: Any) -> Any:
            held = stored_specs(x, axis)
            return jax.tree.map(lambda leaf: held.get(id(leaf), P()), x)

        def operand(x: Array | np.ndarray) -> P:
            if on_every_device(x, self.paged):
                return P()
            return P(*[None] * key_axis(x), axis)

        whole, consts = jax.tree.map(lambda _: P(), (self.rest, self.consts))
        at = lambda part: jax.tree.map(operand, part)
        return ShardedKeys(
            whole,
            stored(self.key),
            stored(self.value),
            at(self.positions),
            at(self.places),
            at(self.mask),
            at(self.scores),
            consts,
        )

    def problem(self, axis: str, n: int) -> Problem:
        """The problem of this device, where the mesh axis is manual."""
        index = lax.axis_index(axis)
        key, value, positions, places = self.key, self.value, self.positions, self.places
        mask, scores = self.mask, self.scores
        if self.paged:
            tokens, page = key.shape[1], key.page_size

            def own(x: Any) -> Any:
                """The tokens that lie in pages of this device. They are on the last axis, or before
                one of features.
                """
                x = jnp.asarray(x)
                at = min(x.ndim - 1, 3)
                if x.shape[at] == 1 < tokens:
                    return x
                lead, last = x.shape[:at], x.shape[at + 1 :]
                x = x.reshape(*lead, -1, n, page, *last)
                x = lax.dynamic_index_in_dim(x, index, at + 1, keepdims=False)
                return x.reshape(*lead, -1, *last)

            key = key.share(index)
            value = value.share(index) if isinstance(value, Pages) else value
            positions = own(iota(tokens)[None] if positions is None else positions)
            places, mask, scores = jax.tree.map(own, (places, mask, scores))
        elif positions is None:
            size = key.shape[1]
            positions = (index * size + iota(size))[None]
        if isinstance(value, Leading):  # it is a part of this device's keys
            first = as_stored(key).first
            value = value if first is None else Leading(first.shape, first.dtype)
        problem = self.rest
        axes, acc = varying_axes(*jax.tree.leaves((key, scores))), problem.accumulation_dtype
        bound = bound_scores(problem.scores, scores, self.consts, acc, axes)
        new = [key, value, positions, places, bound, with_bound_terms(problem.mask, mask)]
        where = lambda p: [p.key, p.value, p.kv_positions, p.kv_places, p.scores, p.mask]
        return eqx.tree_at(where, problem, new, is_leaf=lambda x: x is None)
