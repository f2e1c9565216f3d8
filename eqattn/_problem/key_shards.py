"""Attention whose keys are sharded over devices, which all have the queries: decoding over a cache
that is longer than the memory of one device.

Attention over the keys of one device is a Carry, and Carries merge exactly. So nothing but a Carry
of the few queries travels, whatever the mask, the scores and the form in which keys are stored.

Where keys lie decides which positions a device has. With `n` devices, of which this is number `i`,

| stored | this device has |
|---|---|
| in one piece of `s` keys, or quantized | the `i`-th of `n` equal pieces |
| in pages | the pages `i`, `i + n`, `i + 2 n`, ... of each row, in its share of the pool |
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from .._carry import Carry, safe_max
from .._jax import is_narrow
from .._misc import iota
from .bound import BoundMask, BoundScore
from .joined import Leading
from .problem import Problem
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
    """How the arrays of keys or values are spread over the devices along a mesh axis, by their ids:
    pages, or the tokens of `[b, s, k, d]` and of scales `[b, n, s * k / n]`.
    """
    held = as_stored(x)
    lead = [0 if held.table is not None else 2 if flat else 1 for flat in held.flat]
    return {id(a): P(*[None] * n, axis) for a, n in zip(held.arrays, lead)}


class ShardedKeys(eqx.Module):
    """What a problem has of its keys, apart from the rest of it.

    **Arguments:**

    - `rest`: the problem without keys, values and arrays that vary with keys.
    - `key`, `value`: keys and values, as arrays or as they are stored.
    - `positions`: the positions of the keys, or None.
    - `mask`, `scores`: the canonical operands of the mask and of each score.
    """

    rest: Problem
    key: Any
    value: Any
    positions: Any
    mask: Any
    scores: Any

    @classmethod
    def of(cls, problem: Problem) -> "ShardedKeys":
        def operands(part: Any) -> tuple[Array, ...]:
            return tuple(jnp.asarray(problem.canonical(o)) for o in part.operands())

        mask = () if problem.mask is None else operands(problem.mask)
        scores = tuple(map(operands, problem.scores))
        where = lambda p: (p.key, p.value, p.kv_positions)
        rest = eqx.tree_at(where, problem, (None,) * 3, is_leaf=lambda x: x is None)
        return cls(rest, problem.key, problem.value, problem.kv_positions, mask, scores)

    @property
    def paged(self) -> bool:
        return isinstance(self.key, Pages)

    def check(self, n: int, axis: str, inside: bool) -> None:
        """**Raises:** `ValueError`, with the remedy, for keys that `n` devices cannot share."""
        for name, x in (("key_", self.key), ("value", self.value)):
            if isinstance(x, Leading):  # a part of the keys
                continue
            shares = x.shares if isinstance(x, Pages) else n
            if isinstance(x, Pages) != self.paged or shares != n:
                raise ValueError(
                    f"{name} {x.shape} lies in pages, and the {n} devices of axis {axis!r} need a "
                    f"pool in {n} shares: make the cache by PagedKVCache.empty(..., shares={n})."
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

        def operand(x: Array) -> P:
            token = min(x.ndim - 1, 3)  # canonical operands may have features behind it
            return P() if self.paged or x.shape[token] == 1 else P(*[None] * token, axis)

        whole = jax.tree.map(lambda _: P(), self.rest)
        groups = (self.positions, self.mask, self.scores)
        return ShardedKeys(
            whole, stored(self.key), stored(self.value), *jax.tree.map(operand, groups)
        )

    def widened(self) -> "ShardedKeys":
        """The same, with what every device has in float32 or wider: its gradient is a sum over
        devices, and is summed in this dtype.
        """
        wide = lambda x: x.astype(jnp.float32) if is_narrow(x) else x
        return eqx.tree_at(lambda s: s.rest, self, jax.tree.map(wide, self.rest))

    def problem(self, axis: str, n: int) -> Problem:
        """The problem of this device, where the mesh axis is manual."""
        index = lax.axis_index(axis)
        key, value, positions, mask = self.key, self.value, self.positions, self.mask
        scores = self.scores
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
            mask, scores = jax.tree.map(own, (mask, scores))
        elif positions is None:
            size = key.shape[1]
            positions = (index * size + iota(size))[None]
        if isinstance(value, Leading):  # of this device's keys
            first = as_stored(key).first
            value = value if first is None else Leading(first.shape, first.dtype)
        problem = self.rest
        bound = tuple(BoundScore(s, x) for s, x in zip(problem.scores, scores))
        new = [key, value, positions, bound]
        where = lambda p: [p.key, p.value, p.kv_positions, p.scores]
        problem = eqx.tree_at(where, problem, new, is_leaf=lambda x: x is None)
        if problem.mask is not None:
            problem = eqx.tree_at(lambda p: p.mask, problem, BoundMask(problem.mask, mask))
        return problem
