"""`top_keys()`: which keys each query scores highest."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from .._calls.attention import check_strategy
from .._config.partition import batch_and_heads
from .._jax import explicit_axes, sharding_of, without_explicit_axes
from .._misc import as_array, as_size
from .._problem.functions import opened
from .._problem.mesh import on_mesh_of
from .._problem.problem import as_mask, as_scores, check_shapes, MaskLike, Problem, ScoreLike
from .._problem.storage import AbstractStored
from .._sweep.top import greatest
from ..masks._base import AbstractMask, leaf_terms
from ..strategies import AttentionImpl, Blockwise
from ..strategies._fold_strategy import AbstractFoldStrategy, known_partition


class TopKeys(eqx.Module):
    """The keys that each query scores highest, the highest first.

    Lists of other keys for the same queries merge exactly, in any order, as Carries do.

    **Arguments:**

    - `values`: the logits, `[*b, h, t, n]`, with -inf where there is no key.
    - `indices`: the positions of the keys, int32 `[*b, h, t, n]`, with -1 where there is no key. A
        [`eqattn.Selected`][] takes them as they are.
    """

    values: Float[Array, "*b h t n"]
    indices: Int[Array, "*b h t n"]

    def merge(self, other: "TopKeys") -> "TopKeys":
        """The highest of both lists, as many as this one has.

        **Arguments:**

        - `other`: a list of other keys for the same queries.

        **Raises:** `ValueError` if the queries differ.
        """
        if not isinstance(other, TopKeys):
            raise TypeError(f"TopKeys merges with TopKeys, got {type(other).__name__}.")
        if self.values.shape[:-1] != other.values.shape[:-1]:
            raise ValueError(
                f"Lists {self.values.shape} and {other.values.shape} [*b, h, t, n] are of other "
                "queries; only lists of the same queries merge."
            )
        values = jnp.concatenate([self.values, other.values], -1)
        indices = jnp.concatenate([self.indices, other.indices], -1)
        return TopKeys(*greatest(values, indices, self.values.shape[-1]))


def top_keys(  # noqa: PLR0913 (the options of the call whose weights are meant)
    query: Float[Array, "*b t h d"],
    key_: Float[Array | AbstractStored, "*b s k d"],
    n: int,
    strategy: AttentionImpl | None = None,
    *,
    mask: MaskLike = None,
    bias: Any = None,
    score: ScoreLike = None,
    q_offset: Any = None,
    q_positions: Any = None,
    kv_positions: Any = None,
) -> TopKeys:
    """Lists the `n` keys with the greatest logits, for each query and head.

    Logits are those of [`eqattn.attention`][], all transforms and the mask included. They are
    visited block by block, so that memory grows as queries times `n` and not as queries times keys.
    A score may not look at its logit, as that of an indexer. Then the products of `query` and
    `key_` are not computed: pass one head of each.

    **Arguments:**

    - `query`, `key_`, `strategy`, `mask`, `bias`, `score`, `q_offset`, `q_positions`,
        `kv_positions`: as for [`eqattn.attention`][]. Dropout and sinks do not count. A mask may
        not hold a [`eqattn.Selected`][].
    - `n`: how many keys are listed, an int.

    **Returns:** a [`eqattn.stats.TopKeys`][]. Of equal logits, those of lower positions come first.
    Where a query sees fewer than `n` keys, the other indices are -1. Its `values` are
    differentiable in every order. `indices` are positions, as `kv_positions` says them, under a
    [`eqattn.Tree`][], too, where scores see depths.

    **Raises:** `ValueError` if `n` is larger than the number of keys, if the platform asks for a
    kernel, as none ranks keys, and for `Ragged(metadata, axis_name=...)`. There each device can
    rank its own keys in a `jax.shard_map`, and [`eqattn.stats.TopKeys`][]`.merge` merges the lists.
    Of keys in pages, they are `key_.share(jax.lax.axis_index(name))`, with their positions.
    """
    strategy = _ranking(strategy)
    query, shards = jnp.asarray(as_array(query, "query", 3)), strategy.key_shards()
    stored = isinstance(key_, AbstractStored)
    key: Any = key_ if stored else jnp.asarray(as_array(key_, "key_", 3))
    if stored and not strategy.reads_stored and hasattr(key_, "__jax_array__"):
        stored, key = False, jnp.asarray(key_)
    if stored and not strategy.reads_stored:
        raise ValueError(
            f"key_ is {type(key_).__name__} {key_.shape}, which {type(strategy).__name__} does not "
            "read; use Ragged(metadata), or pass its materialise()."
        )
    check_shapes(query, key, key)
    n = _checked_count(n, key.shape, shards)
    options = dict(
        mask=_ranked_under(mask, query.dtype),
        bias=bias,
        score=opened(as_scores(score), query.dtype),
        q_offset=q_offset,
        q_positions=q_positions,
        kv_positions=kv_positions,
    )

    def run(strategy, query, key, options):
        problem = Problem.from_call(
            query,
            key,
            key if stored else key[..., :1],
            strategy.metadata,
            precision=getattr(strategy, "precision", None),
            shards=shards,
            partition=partition,
            **options,
        )
        found = strategy.top(problem, n)
        t, _, heads, _ = problem.sizes
        shape = (*problem.batch_shape, heads, t, n)
        return tuple(jnp.swapaxes(x, 1, 2).reshape(shape) for x in found)

    spec = partition = None
    query = on_mesh_of(query, (strategy, key, options))
    if explicit_axes(query):
        declared = batch_and_heads(strategy.metadata.partition_axis, query.shape[-3])
        partition = known_partition(declared, query, key)
        *batch, t, heads, _ = sharding_of(query)
        spec = P(*batch, heads, t, None)
    args = strategy, query, key, options
    return TopKeys(*without_explicit_axes(run, args, query, (spec, spec)))


def _ranking(strategy: AttentionImpl | None) -> AbstractFoldStrategy:
    """The strategy of a call, if it can rank keys."""
    strategy = Blockwise() if strategy is None else strategy
    check_strategy(strategy)
    if not isinstance(strategy, AbstractFoldStrategy):
        raise TypeError(
            f"{type(strategy).__name__} does not fold a problem, so that it cannot rank keys; use "
            "Blockwise(metadata)."
        )
    strategy.selected_forward()
    strategy.check_without_kernel("top_keys")
    return strategy


def _checked_count(n: Any, shape: tuple[int, ...], shards: int) -> int:
    """How many keys are listed, of keys `[*b, s, k, d]` on each of some devices."""
    n = as_size(n, "n", 1)
    if n > shape[-3] * shards:
        raise ValueError(
            f"n={n} is larger than the {shape[-3] * shards} keys of key_ {shape} [*b, s, k, d]; "
            "list at most these."
        )
    return n


def _ranked_under(mask: MaskLike, dtype: Any) -> AbstractMask | None:
    """The mask of a call, if keys can be ranked under it."""
    seen = opened(as_mask(mask), dtype)
    for term in leaf_terms(seen):
        if term.selects:
            raise ValueError(
                f"top_keys does not rank keys under a {type(term).__name__}; take "
                "DenseMask(mask.as_array(t, s)) where an array of all pairs fits."
            )
    return seen
