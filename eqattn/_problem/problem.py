"""One call of attention, checked and in canonical form.

A `Problem` is what every strategy solves. It has arrays with one flattened batch axis, the mask and
the scores in their fixed order, and the numbers that the metadata holds.
"""

import dataclasses
import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._misc import accumulation_dtype, as_array, check_64_bits, iota
from .._pairs import canonical, Operand
from ..masks._base import AbstractMask, named_operands
from ..masks._terms import check_call, leaf_terms, placed
from ..scores._base import AbstractScore
from ..scores._bias import as_bias
from ..scores._dropout import seed_of
from ..scores._soft_cap import SoftCap
from ..scores._wrapper import AbstractWrapper
from .arguments import (
    as_keys_and_values,
    as_mask,
    as_offset,
    as_positions,
    as_scores,
    as_sinks,
    check_one_offset,
    check_shapes,
    of_first_tokens,
)
from .storage import AbstractStored


def is_unsure(part: AbstractMask | AbstractScore) -> bool:
    """Whether a mask or a score may lack an operation in some kernels, or may read a table by
    `q - k`. Those of this library say so of themselves. Those of users are asked in each call.
    """
    return _unwrapped(part).may_lack_kernels or _is_foreign(part)


def of_a_user(part: AbstractMask | AbstractScore) -> bool:
    """Whether a user wrote what a mask or a score computes, so that it may do anything."""
    return not _unwrapped(part).tried_in_kernels or _is_foreign(part)


def _unwrapped(part: Any) -> Any:
    while isinstance(part, AbstractWrapper):
        part = part.score
    return part


def _is_foreign(part: Any) -> bool:
    """Whether the class of a mask or a score is none of this library."""
    return not type(_unwrapped(part)).__module__.startswith("eqattn.")


class Problem(eqx.Module):
    """Attention of `query` `[B, T, H, D]` over `key` `[B, S, K, D]` and `value` `[B, S, K, V]`.

    **Arguments:**

    - `query`: an array.
    - `key`, `value`: arrays or `AbstractStored`.
    - `mask`: an `AbstractMask`, or None if all pairs are visible.
    - `scores`: transforms of a logit, in the order in which they are applied.
    - `scale`: the factor on the products of query and key, a float or scalar array.
    - `sinks`: further logits of each row, which have no value, `[H|1, n]`; or None.
    - `seed`: the seed of `keep_mask`, or None without dropout.
    - `q_positions`, `kv_positions`: int32 `[B|1, T]` and `[B|1, S]`; None means `0, 1, ...`.
    - `q_start`, `q_shift`: numbers that are added to the positions of queries: a static int, and
        int32 `[B|1, 1]` or None.
    - `batch_shape`: the batch axes that `B` flattens.
    - `rate`: the dropout probability, which is used if there is a seed.
    - `logits_dtype`: a dtype that logits are rounded to, or None.
    - `precision`: that of products. None means exact ones for float32, and else JAX's default.
    - `shards`: the number of devices whose keys an array holds that varies with query and key.
    - `partition`: the names of the mesh axes that shard the batch and the heads, and of those known
        to shard nothing; or None.
    - `kv_places`: the places of keys whose positions a mask has moved, int32 `[B|1, S]`, or None.
    - `b_indices`, `h_indices`: what masks, scores and dropout get as `b` and `h`, int32 `[B]` and
        `[B|1, H]`; None means `0, 1, ...`
    """

    query: Array
    key: Any
    value: Any
    mask: AbstractMask | None
    scores: tuple[AbstractScore, ...]
    scale: Any
    sinks: Array | None
    seed: Array | None
    q_positions: Any
    kv_positions: Any
    q_shift: Any
    q_start: int = eqx.field(static=True)
    batch_shape: tuple[int, ...] = eqx.field(static=True)
    rate: float = eqx.field(static=True)
    logits_dtype: Any = eqx.field(static=True)
    precision: Any = eqx.field(static=True)
    shards: int = eqx.field(static=True, default=1)
    partition: tuple[Any, ...] | None = eqx.field(static=True, default=None)
    kv_places: Any = None
    b_indices: Any = None
    h_indices: Any = None

    @classmethod
    def from_call(
        cls,
        query: Any,
        key: Any,
        value: Any,
        metadata: Any,
        *,
        mask: Any = None,
        bias: Any = None,
        score: Any = None,
        dropout_key: Any = None,
        q_offset: Any = None,
        q_positions: Any = None,
        kv_positions: Any = None,
        precision: Any = None,
        shards: int = 1,
        partition: tuple[Any, ...] | None = None,
    ) -> "Problem":
        """Checks the arguments of `attention` and brings them to canonical form."""
        for name in ("runtime_dtype", "runtime_softmax_dtype"):
            check_64_bits(name, getattr(metadata, name))
        query = jnp.asarray(as_array(query, "query"))
        key, value = as_keys_and_values(key, value)
        check_shapes(query, key, value)
        *batch_shape, t, heads, _ = query.shape
        batch_shape, s = tuple(batch_shape), key.shape[-3]
        scores = _all_scores(metadata.logits_soft_cap, bias, score)
        mask = as_mask(mask)
        kv_positions = as_positions(kv_positions, s, batch_shape, "kv_positions")
        check_call(mask, batch_shape, heads, key.shape[-2], t, s * shards, kv_positions)
        check_one_offset(q_offset, q_positions)
        if q_offset is None and q_positions is None:
            mask = of_first_tokens(mask, scores, query)
        q_start, q_shift = as_offset(q_offset, batch_shape, t)
        out = cls(
            query=_flatten(query, batch_shape),
            key=_flatten(key, batch_shape),
            value=_flatten(value, batch_shape),
            mask=mask,
            scores=scores,
            scale=_scale_of(metadata, query.shape),
            sinks=as_sinks(metadata.softmax_aux, heads),
            seed=None if dropout_key is None else seed_of(dropout_key),
            q_positions=as_positions(q_positions, t, batch_shape, "q_positions"),
            kv_positions=kv_positions,
            q_shift=q_shift,
            q_start=q_start,
            batch_shape=batch_shape,
            rate=metadata.dropout_prob,
            logits_dtype=metadata.runtime_softmax_dtype,
            precision=precision,
            shards=shards,
            partition=partition,
        )
        for part in (*scores, *([] if mask is None else [mask])):
            for name, operand in named_operands(part):
                out.canonical(operand, name)
        return out

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The numbers of queries, keys, query heads and key/value heads, `(T, S, H, K)`."""
        _, t, h, _ = self.query.shape
        _, s, k, _ = self.key.shape
        return t, s, h, k

    @property
    def reads_pairs(self) -> bool:
        """Whether a mask or a score reads an array with a number for each pair of tokens."""
        return any(x.of_pairs for part in self.parts for _, x in named_operands(part))

    @property
    def parts(self) -> tuple[Any, ...]:
        """The scores, and then the mask if there is one."""
        return (*self.scores, *([] if self.mask is None else [self.mask]))

    @property
    def accumulation_dtype(self) -> jnp.dtype:
        """The dtype of logits and sums: float32, or float64 for float64 inputs."""
        return accumulation_dtype(self.query.dtype)

    def canonical(self, operand: Operand, name: str = "operand") -> Array | np.ndarray:
        """Brings an operand to the form `[B|1, H|1, T|1, S|1]`, perhaps with a last axis of
        features.
        """
        (t, s, heads, _), lead = self.sizes, operand.array.shape[: -1 - len(operand.feature_shape)]
        if operand.axes.removesuffix("f").endswith("ts") and lead[-1] != 1:
            s *= self.shards
        return canonical(operand, self.batch_shape, heads, t, s, name)

    def positions(self) -> tuple[Any, Any]:
        """The positions of queries `[B|1, T]` and keys `[B|1, S]`, NumPy arrays where static."""
        t, s, _, _ = self.sizes
        q, k = self.q_positions, self.kv_positions
        q = (iota(t)[None] if q is None else q) + np.int32(self.q_start)
        q = q if self.q_shift is None else q + self.q_shift
        return q, iota(s)[None] if k is None else k

    def at_places(self, q: Any = None, k: Any = None, lists: bool = True) -> "Problem":
        """Returns the problem with the mask of the tokens at its places, and with the positions
        that this mask gives them. Without a term that goes by places, it is the problem itself.

        **Arguments:**

        - `q`, `k`: the places of queries `[t]` and keys `[s]` where the problem does not say them.
            None means `0, 1, ...`
        - `lists`: whether a list of keys becomes an array of bools. Otherwise it stays.
        """
        if not any(x.by_place and (lists or not x.selects) for x in leaf_terms(self.mask)):
            return self
        given = (self.q_positions, q), (self.kv_positions, k)
        q, k = (x[None] if old is None and x is not None else old for old, x in given)
        whole = dataclasses.replace(self, q_positions=q, kv_positions=k)
        places = whole.positions()
        mask, q, k = placed(self.mask, self.batch_shape, self.sizes[2], *places, lists)
        moved = {}
        if any(term.moves_positions for term in leaf_terms(self.mask)):
            moved = dict(q_positions=q, kv_positions=k, kv_places=places[1])
            moved |= dict(q_start=0, q_shift=None)
        return dataclasses.replace(self, mask=mask, **moved)

    def indices(self) -> list[Any]:
        """Returns the indices `b`, `h`, `q`, `k` of every pair, each `[B|1, H|1, T|1, S|1]`."""
        batch, heads = math.prod(self.batch_shape), self.sizes[2]
        b = (iota(batch) if self.b_indices is None else self.b_indices).reshape(-1, 1, 1, 1)
        h = iota(heads)[None] if self.h_indices is None else self.h_indices
        h = h[:, :, None, None]
        q, k = self.positions()
        return [b, h, q[:, None, :, None], k[:, None, None, :]]


def _all_scores(soft_cap: Any, bias: Any, score: Any) -> tuple[AbstractScore, ...]:
    """The scores of a call in their order: soft cap, bias, and then those that it names."""
    scores = as_scores(score)
    if bias is not None:
        scores = (as_bias(bias), *scores)
    return scores if soft_cap is None else (SoftCap(soft_cap), *scores)


def _scale_of(metadata: Any, query: tuple[int, ...]) -> Any:
    scale = metadata.softmax_scale
    if scale is not None and jnp.ndim(scale) > 0:
        raise ValueError(
            f"softmax_scale must be one number, got shape {jnp.shape(scale)}; multiply the "
            f"query {query} by a scale per head or dim."
        )
    return query[-1] ** -0.5 if scale is None else scale


def _flatten(x: Any, batch_shape: tuple[int, ...]) -> Any:
    """Flattens the batch axes of an array into one."""
    if len(batch_shape) == 1:
        return x
    if isinstance(x, AbstractStored):
        axes = f"{type(x).__name__} {x.shape} has {len(batch_shape)} batch axes and needs one"
        raise ValueError(f"{axes}: reshape what it holds, or pass x.materialise().")
    return x.reshape(math.prod(batch_shape), *x.shape[-3:])
