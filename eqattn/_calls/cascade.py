"""`cascade_attention()`: pages that rows share are read once for all of these rows."""

import dataclasses
import functools as ft
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._carry import Carry
from .._jax import varying_axes
from .._misc import accumulation_dtype, as_array, as_flag, as_int, as_int32, widened
from .._output import AttentionOutput
from .._problem.problem import as_mask, as_scores, check_shapes
from .._problem.shards import scores_in_sums
from .._problem.storage import in_pages, Pages
from ..cache import AbstractCache
from ..masks._base import AbstractMask, check_positions, given, leaf_terms, moved_positions
from ..masks._causal import Causal
from ..masks._segments import KeyPadding
from ..strategies import AttentionImpl
from ..strategies._on_device import AbstractOnDevice
from ..strategies.ragged import Ragged
from .attention import attention
from .packing import (
    check_strategy,
    mask_of_rows,
    on_auto_axes,
    PackedRows,
    places_of,
    queries_of,
    scores_of_rows,
)


class _Groups(NamedTuple):
    """Which rows have the same pages, see `_groups_of`. All are int32 `[b]`.

    **Arguments:**

    - `leader`: the first row of a row's group.
    - `starts`, `ends`: all rows of the group share the tokens from `starts` to `ends`. Those before
        are shared by the larger group around it.
    """

    leader: Array
    starts: Array
    ends: Array


@on_auto_axes
def cascade_attention(  # noqa: PLR0913 (one argument for each option of a call)
    query: Float[Array, "b t h d"],
    cache: AbstractCache,
    strategy: AttentionImpl = Ragged(),
    *,
    q_offset: Any,
    mask: Any = None,
    causal: bool = True,
    score: Any = None,
    block_q: int = 64,
    levels: int = 2,
    return_logsumexp: bool = False,
    return_carry: bool = False,
    return_max_logits: bool = False,
) -> AttentionOutput:
    r"""Computes attention over a cache in pages, and reads pages that rows share once for all of
    these rows, instead of once for each.

    Rows that begin with the same page are a group. The pages with which all rows of a group begin
    are read once, for all queries of the group. Rows of a group whose next pages are the same are
    a group of the next level. Completions of one prompt are such a group after a system prompt. The
    other pages are read row by row. These are attention over parts of the keys, so their Carries
    are merged, which is exact.

        cache = cache.share([1, 2, 3], from_row=0, tokens=prefix)
        ...
        offset = cache.length
        cache = cache.append(key, value)
        cascade_attention(query, cache, Ragged(metadata), q_offset=offset)

    Rows that share nothing cost what they cost in `attention`, and each level does some idle work
    for them.

    **Arguments:**

    - `query`: the queries of the tokens that were appended last, `[b, t, h, d]`.
    - `cache`: a [`PagedKVCache`][eqattn.cache.PagedKVCache], or another with its pages.
    - `strategy`: a [`Ragged`][eqattn.Ragged]. Its metadata give the scale, soft cap and sinks.
    - `q_offset`: the positions of the first queries, integers `[b]`: `cache.length` before the
        tokens were appended.
    - `mask`, `score`: a further mask and further scores, as those of [`eqattn.attention`][]. They
        may hold arrays per row, head and query, and arrays per key that all rows and queries share.
        They hold no lists of keys. Of a [`Tree`][eqattn.Tree] of new tokens, what lies before
        it is shared.
    - `causal`: whether a query sees only the keys up to its own position. Otherwise it sees the new
        tokens after it, too.
    - `block_q`: for how many queries of a group shared pages are read at once.
    - `levels`: how many levels of groups there are. Pages that only groups of a further level share
        are read row by row.
    - `return_logsumexp`, `return_carry`, `return_max_logits`: whether the output also has that
        field.

    **Returns:** an [`eqattn.AttentionOutput`][], as that of `attention` with the mask
    `Causal() & cache.mask() & mask`, to rounding.

    **Raises:** `ValueError` or `TypeError` at trace time; the message names the shapes and the
    remedy.

    ??? cite "Reference"

        Juravsky et al., *Hydragen: High-Throughput LLM Inference with Shared Prefixes*, 2024
        (arXiv:2402.05099).
    """
    mask, scores = as_mask(mask), as_scores(score)
    key = _checked(cache, strategy, mask)
    query = jnp.asarray(as_array(query, "query"))
    value = key.c_kv or in_pages(cache.value)
    check_shapes(query, key, value)
    b, t = query.shape[:2]
    offset = jnp.asarray(as_int32(q_offset, "q_offset"))
    if offset.shape != (b,):
        raise ValueError(f"q_offset must be integers [b] = {(b,)}, got shape {offset.shape}.")
    block_q = min(as_int(block_q, "block_q", least=1, static=True).value, max(b * t, 1))
    levels = as_int(levels, "levels", least=1, static=True).value
    wants_largest = as_flag(return_max_logits, "return_max_logits")
    if 0 in (b, t):
        flags: Any = dict(return_carry=return_carry, return_max_logits=return_max_logits)
        flags |= dict(return_logsumexp=return_logsumexp, q_offset=offset)
        return attention(query, key, value, strategy, mask=cache.mask(), **flags)
    trunks = [term.trunk() for term in leaf_terms(mask) if term.moves_positions]
    lengths = ft.reduce(jnp.minimum, trunks, offset)
    found = _levels_of(key.numbers, lengths, key.page_size, levels)
    shown = KeyPadding(cache.length, found[-1].ends)
    for more in (Causal() if as_flag(causal, "causal") else None, mask):
        shown = shown if more is None else shown & more
    dtype = strategy.output_dtype(query)
    read, scores = _in_sums(query, key, value, strategy, scores, varies=(mask, offset))
    own = attention(
        *read,
        mask=shown,
        score=scores or None,
        q_offset=offset,
        return_carry=True,
        return_max_logits=wants_largest,
    )
    places = offset[:, None] + jnp.arange(t, dtype=jnp.int32)[None]
    check_positions(mask)
    positions = jnp.broadcast_to(moved_positions(mask, places), (b, t))
    # The trunk of a tree is visible to all that are asked.
    pairs = given(mask, lambda term: True if term.moves_positions else None), scores, wants_largest
    visit = ft.partial(_over_prefixes, *read, block_q, positions, pairs)
    carry, largest = _merged(own, [visit(groups) for groups in found])
    return AttentionOutput(
        attention_outputs=carry.output().astype(dtype),
        logsumexp=carry.logsumexp() if as_flag(return_logsumexp, "return_logsumexp") else None,
        carry=carry if as_flag(return_carry, "return_carry") else None,
        max_logits=largest,
    )


def _checked(cache: AbstractCache, strategy: AttentionImpl, mask: AbstractMask | None) -> Pages:
    """Returns the keys of the cache. **Raises:** `TypeError` or `ValueError` for what a cascade
    cannot do with inputs of any shape.
    """
    check_strategy(strategy, "cascade_attention")
    if getattr(strategy, "fixed", False):
        raise ValueError(
            "bitwise=True: cascade_attention merges what rows share with the rest, so that the "
            "bits of a row depend on the other rows; use attention with Causal() & cache.mask()."
        )
    if not isinstance(key := in_pages(cache.key), Pages):
        raise TypeError(
            f"cascade_attention reads pages that rows share, which a {type(cache).__name__} has "
            "none of; use attention, or a PagedKVCache."
        )
    for term in leaf_terms(mask):
        by_row = type(term).of_rows is not AbstractMask.of_rows
        if term.selects or (by_row or term.moves_positions) and term.trunk() is None:
            raise ValueError(
                f"mask: cascade_attention reads pages for the queries of several rows at once, but "
                f"a {type(term).__name__} has lists or places of its own for each; use attention "
                "with this mask and Causal() & cache.mask()."
            )
    return key


def _in_sums(
    query: Array, key: Pages, value: Any, strategy: AttentionImpl, scores: Any, varies: Any
) -> tuple[tuple[Array, Pages, Any, AttentionImpl], Any]:
    """What all levels read, and the scores. Each gradient is then a sum over the levels in the
    dtype of sums, and rounds once. Where products read narrow numbers, queries stay as they are,
    and each level rounds its part of their gradient. Scores see what `varies`, too.
    """
    metadata, acc = strategy.metadata, accumulation_dtype(query.dtype)
    wide = {name: getattr(metadata, name) for name in ("softmax_scale", "logits_soft_cap")}
    wide = {name: widened(x, acc) for name, x in wide.items() if eqx.is_array(x)}
    if wide:
        strategy = eqx.tree_at(lambda s: s.metadata, strategy, metadata.replace(**wide))
    seen = jax.tree.leaves((query, key, strategy, scores, varies))
    scores = scores_in_sums(scores, acc, varying_axes(*filter(eqx.is_array, seen)))
    if not (isinstance(strategy, AbstractOnDevice) and strategy.multiplies_narrow()):
        query = query.astype(acc)
        key, value = (dataclasses.replace(x, in_sums=True) for x in (key, value))
    return (query, key, value, strategy), scores


def _over_prefixes(
    query: Array,
    key: Pages,
    value: Any,
    strategy: AttentionImpl,
    block_q: int,
    positions: Array,
    pairs: tuple[Any, Any, bool],
    groups: _Groups,
) -> AttentionOutput:
    """Attention over the keys that `groups` of rows share, without sinks, for queries
    `[b, t, h, d]` in blocks of `block_q`.

    **Arguments:**

    - `positions`: those of the queries, `[b, t]`. All keys that are shared come before, so all of
        them are visible where the order of positions decides.
    - `pairs`: the mask of these pairs, or a bool; the scores of the call; and whether largest
        logits are asked for.
    """
    mask, scores, wants_largest = pairs
    whole = strategy.metadata.replace(softmax_aux=None, blocksize_q=block_q)
    b, t, *heads = query.shape
    # Queries are packed in the order of their leaders; those of leader i are one row of the pack.
    order = jnp.argsort(groups.leader, stable=True)
    members = jnp.bincount(groups.leader, length=b).astype(jnp.int32)
    ends = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(members * t, dtype=jnp.int32)])
    place = places_of(ends, b * t, block_q)
    packed = query[order].reshape(b * t, *heads)
    tokens = jnp.minimum(place.tokens, max(b * t - 1, 0))  # Of padding, any will do.
    row, token = order[tokens // max(t, 1)].astype(jnp.int32), tokens % max(t, 1)
    rows = PackedRows(row, b, heads[0], place.tokens, token, (t, key.shape[1]))
    ends = jnp.where(place.live & (mask is not False), groups.ends[place.row], 0)
    shown = KeyPadding(ends, groups.starts[place.row])
    mask = None if isinstance(mask, bool) else mask
    keys = key.rows(place.row)
    output = attention(
        queries_of(packed, place),
        keys,
        keys.c_kv or value.rows(place.row),
        eqx.tree_at(lambda s: s.metadata, strategy, whole),
        mask=shown if mask is None else shown & mask_of_rows(mask, rows),
        score=scores_of_rows(scores, rows, query.dtype) or None,
        q_positions=positions[row, token],
        return_carry=True,
        return_max_logits=wants_largest,
    )
    at, back = (place.token_block, place.token_offset), jnp.argsort(order)
    unpack = lambda x: x[at].reshape(b, t, *x.shape[2:])[back]
    return jax.tree.map(unpack, output)


def _merged(own: AttentionOutput, others: list[AttentionOutput]) -> tuple[Carry, Array | None]:
    """The Carry of all outputs, and the largest logits if there are any."""
    carry, largest = own.carry, own.max_logits
    for shared in others:
        assert carry is not None and shared.carry is not None
        carry = carry.merge(shared.carry)
        if largest is not None:
            largest = jnp.maximum(largest, shared.max_logits)
    assert carry is not None
    return carry, largest


def _levels_of(table: Array, lengths: Array, size: int, levels: int) -> list[_Groups]:
    """The groups of each level, see `_groups_of`. All rows share no token before the first."""
    found, starts = [], jnp.zeros(len(lengths), jnp.int32)
    for _ in range(levels):
        found.append(_groups_of(table, lengths, size, starts))
        starts = found[-1].ends
    return found


@ft.partial(jax.jit, static_argnums=2)
def _groups_of(table: Array, lengths: Array, size: int, starts: Array) -> _Groups:
    """Which rows share tokens beyond those that all rows of a larger group share, and how many.

    Rows with the same page have it in the same column, and the same pages before it.

    **Arguments:**

    - `table`: the pages of each row, `[b, n]`.
    - `lengths`: how many tokens of each row may be shared, `[b]`.
    - `size`: how many tokens a page has.
    - `starts`: how many tokens of a row all rows of the larger group share, `[b]`.
    """
    rows = jnp.arange(len(lengths), dtype=jnp.int32)
    column = jnp.minimum(starts // size, table.shape[1] - 1)
    page = jnp.take_along_axis(table, column[:, None], 1)[:, 0]
    there = lengths > starts  # A row keeps pages that it no longer needs.
    same = (page[:, None] == page[None]) & there[:, None] & there[None]
    leader = jnp.argmax(same | (rows[:, None] == rows[None]), 1).astype(jnp.int32)
    equal = jnp.cumprod((table == table[leader]).astype(jnp.int32), 1).sum(1, dtype=jnp.int32)
    mine = leader[None] == rows[:, None]  # [leader, row]
    reach = jnp.minimum(equal * size, lengths)[None]
    shared = jnp.where(mine, reach, jnp.iinfo(jnp.int32).max).min(1)
    ends = jnp.where(mine.sum(1) > 1, shared, 0)[leader]
    return _Groups(leader, starts, jnp.maximum(ends, starts))
