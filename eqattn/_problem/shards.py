"""Attention whose keys are sharded over devices, which all have the queries: decoding over a cache
that is longer than the memory of one device.

Attention over the keys of one device is a Carry, and Carries merge exactly. So only a Carry of the
few queries is sent, for all masks, scores and forms in which keys are stored.

Where keys lie decides which positions a device has. With `n` devices, of which this is number `i`,

| stored | this device has |
|---|---|
| in one piece of `s` keys, or quantized | the `i`-th of `n` equal pieces |
| in pages | the pages `i`, `i + n`, `i + 2 n`, ... of each row, in its share of the pool |

How a problem is spread over devices. Tokens are spread around a ring, whose places may each be a
group of devices that exchange tokens for heads.

Attention of one head needs no other head. So an all-to-all gives each device of a place all tokens
of the place, for some of the heads. The device folds these as if it were alone, and a second
all-to-all brings the rows back. JAX transposes these moves, so there is no derivative code here.

A problem whose mask lists keys, where automatic axes of a mesh shard its batch or its heads.

XLA does not split a gather whose indices are sharded as its operand is. It gathers the indices of
all devices, and in a backward pass also the gradients of their listed keys. But a list names only
keys of the batch element and head that it belongs to. So these axes of the mesh are made manual,
and each device folds a problem with its batch elements and heads.

Gradients that are sums over several visits, or over devices, and round once.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from .._carry import Carry, safe_max
from .._jax import compiled, summed_wide, vary, varying_axes
from .._misc import accumulation_dtype, iota, widened
from .._pairs import Operand
from .._sweep.grid import BATCH, COL, HEAD, ROW
from .._sweep.lowering import Lowering
from .._sweep.ring import ColumnsOfDevices
from ..masks._base import leaf_terms, map_terms
from ..scores._base import AbstractScore
from .closed_score import (
    bound_scores,
    BoundScore,
    consts_of,
    HeldScore,
    read_of,
    terms_beside_lists,
    with_bound_terms,
    with_flat_lists,
)
from .mesh import ManualAxes, merged_axes, shard_map_wide, split_axis, token_axis
from .problem import Problem
from .storage import AbstractStored, as_stored, Pages, StackLayer, ValuesFromKeys
from .tiling import Tiling


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
            if isinstance(x, ValuesFromKeys):  # it is a part of the keys
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
        if isinstance(value, ValuesFromKeys):  # it is a part of this device's keys
            c_kv = as_stored(key).c_kv
            value = value if c_kv is None else ValuesFromKeys(c_kv.shape, c_kv.dtype)
        problem = self.rest
        axes, acc = varying_axes(*jax.tree.leaves((key, scores))), problem.accumulation_dtype
        bound = bound_scores(problem.scores, scores, self.consts, acc, axes)
        new = [key, value, positions, places, bound, with_bound_terms(problem.mask, mask)]
        where = lambda p: [p.key, p.value, p.kv_positions, p.kv_places, p.scores, p.mask]
        return eqx.tree_at(where, problem, new, is_leaf=lambda x: x is None)


@dataclasses.dataclass(frozen=True)
class HeadExchange:
    """Two mesh axes over which tokens are sharded. The outer one is that of the ring.

    **Arguments:**

    - `ring`: how columns are reached over the outer axis, by hops or by gathering them; None means
        that there is a single place.
    - `axis`: the inner axis, over which heads are exchanged; None means that a place is one device.
    - `size`: the number of devices that exchange.
    - `manual`: how arrays of all devices are spread; None means that the axes are manual already.
    """

    ring: ColumnsOfDevices | None = None
    axis: str | None = None
    size: int = 1
    manual: ManualAxes | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes, the outer one first."""
        inner = () if self.axis is None else (self.axis,)
        return inner if self.ring is None else (self.ring.axis, *inner)

    @property
    def inside(self) -> bool:
        """Whether the arrays are one device's own."""
        return self.manual is None

    def local(self, tiling: Tiling) -> Tiling:
        """The blocking of what one device visits, from the blocking of the arrays outside."""
        batch, kv_heads = 1, self.size
        parts = tiling.parts * self.size
        if self.manual is not None:
            batch, kv_heads, places = map(self.manual.parts, (BATCH, HEAD, ROW))
            parts = tiling.parts // places
        lengths = tiling.queries, tiling.keys
        queries, keys = (-(-n // tiling.parts) * parts for n in lengths)
        return dataclasses.replace(
            tiling,
            batch=tiling.batch // batch,
            kv_heads=tiling.kv_heads // kv_heads,
            queries=queries,
            keys=keys,
            parts=parts,
            shards=max(tiling.shards // self.size, 1),
        )

    def tokens_to_heads(self, x: Array, axes: tuple[int, ...]) -> Array:
        """Brings what a device needs to fold its heads, from an array that is sharded by tokens.

        Arrays with heads and tokens are exchanged, and those with heads alone are cut. Those with
        tokens alone are gathered, and others are whole. This and `heads_to_tokens` are for axes
        that are manual already; `ManualAxes.shard_map` does the same for automatic ones.
        """
        if self.size == 1 or not {HEAD, ROW, COL} & set(axes):
            return x
        index = lax.axis_index(self.axis)
        x = vary(x, varying_axes(index))
        if HEAD not in axes:
            at = axes.index(token_axis(axes))
            return summed_wide(lambda x: lax.all_gather(x, self.axis, axis=at, tiled=True), x)
        at = axes.index(HEAD)
        x = split_axis(x, at, self.size)
        if ROW not in axes and COL not in axes:
            return lax.dynamic_index_in_dim(x, index, at + 1, keepdims=False)
        return merged_axes(lax.all_to_all(x, self.axis, at + 1, at + 1), at + 1)

    def heads_to_tokens(self, x: Array, axes: tuple[int, ...]) -> Array:
        """Undoes `tokens_to_heads` for an array with heads and tokens."""
        if self.size == 1:
            return x
        at = axes.index(HEAD)
        x = split_axis(x, at + 1, self.size, outside=True)
        return merged_axes(lax.all_to_all(x, self.axis, at + 1, at + 1), at)


def with_enough_heads(problem: Problem, shares: int) -> Problem:
    """Repeats each key/value head as often as is needed to cut the heads into equal `shares`."""
    kv_heads = problem.sizes[3]
    times = math.lcm(kv_heads, shares) // kv_heads
    if times == 1:
        return problem
    repeat = lambda x: jnp.repeat(x, times, 2)
    key, value = (summed_wide(repeat, x) for x in (problem.key, problem.value))
    return dataclasses.replace(problem, key=key, value=value)


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


def with_wide_sums(problem: Problem, lowering: Lowering, *names: str) -> Problem:
    """A problem in which these of query, key and value are in the dtype of sums, where the lowering
    computes products in that dtype anyway: XLA does on a CPU. A gradient that is a sum over visits
    or devices then rounds once. Elsewhere, each visit rounds its part, as products of float32 would
    take several times as long.

    What is stored in another form stays as it is: of that, only visited blocks are needed.
    """
    if lowering.multiplies_narrow():
        return problem
    arrays = {name: getattr(problem, name) for name in names}
    arrays = {n: x for n, x in arrays.items() if not isinstance(x, AbstractStored)}
    acc = problem.accumulation_dtype
    return dataclasses.replace(problem, **{n: widened(x, acc) for n, x in arrays.items()})


def accumulate_in_fp32(problem: Problem, lowering: Lowering, in_place: bool = False) -> Problem:
    """A problem that is visited in two parts. What scores read, and the scale, are in the dtype of
    sums, so that their gradients, each a sum over both visits, round once. What varies over pairs
    stays as it is: each pair is in one of the visits.

    Where `with_wide_sums` says so, the query is in that dtype, too. So are keys and values that are
    not read `in_place`.
    """
    acc = problem.accumulation_dtype
    problem = with_wide_sums(problem, lowering, "query", *(() if in_place else ("key", "value")))
    axes = varying_axes(*[x for x in jax.tree.leaves(problem) if eqx.is_array(x)])
    of_pairs = lambda o: 1 not in problem.canonical(o).shape[2:4]
    scores = scores_in_sums(problem.scores, acc, axes, of_pairs)
    scale = widened(problem.scale, acc) if eqx.is_array(problem.scale) else problem.scale
    return dataclasses.replace(problem, scores=scores, scale=scale)


def scores_in_sums(
    scores: Sequence[AbstractScore],
    acc: Any,
    axes: Any,
    of_pairs: Callable[[Operand], bool] = lambda o: False,
) -> tuple[AbstractScore, ...]:
    """Scores that hold their arrays in the dtype of sums `acc`.

    **Arguments:**

    - `axes`: the mesh axes over which anything that the scores see varies.
    - `of_pairs`: which operands with axes of queries and of keys vary over both. They stay.
    """
    arrays = [x for x in jax.tree.leaves(scores) if eqx.is_array(x)]
    if not any(jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != acc for x in arrays):
        return tuple(scores)

    def of_sums(score: AbstractScore) -> BoundScore:
        def read(o: Operand) -> Operand:
            whole = set("ts") <= set(o.axes) and of_pairs(o)
            return o if whole else Operand(widened(o.array, acc), o.axes)

        given = tuple(map(read, score.operands()))
        dtypes = [(o.feature_shape, read_of(o.array, acc)[1]) for o in given]
        return BoundScore(HeldScore.of(score, acc, dtypes, axes=axes), given)

    return tuple(map(of_sums, scores))
