"""`ragged_attention()`: one call serves rows with different numbers of new queries, such as
prompts, single tokens and drafts. `cascade_attention()`: pages that rows share are read once.

Their method: the packed queries are copied into blocks of `block_q`, each of which belongs to one
row (`_places`). Each block becomes a batch element of an ordinary call of `attention`, whose keys
are pages of its row (`pages_of_rows`), so no keys are copied. Then the outputs are packed again.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ._attention import attention
from ._carry import Carry
from ._misc import as_array, as_flag, as_int, as_int32, concrete
from ._output import AttentionOutput
from ._problem.joined import read_once
from ._problem.packed_rows import mask_of_rows, scores_of_rows
from ._problem.problem import as_mask, as_positions, as_scores, check_shapes
from ._problem.row_pages import pages_of_rows, positions_of_pages, Sharers
from ._problem.storage import AbstractStored, Pages
from .cache import AbstractCache
from .masks._causal import Causal
from .masks._packed import check_boundaries, packed_segments
from .masks._padding import KeyPadding
from .masks._terms import check_call
from .strategies import AttentionImpl
from .strategies._on_device import AbstractOnDevice
from .strategies.ragged import Ragged


def ragged_attention(
    query: Float[Array, "n h d"],
    key_: Float[Array | AbstractStored, "b s k d"],
    value: Float[Array | AbstractStored, "b s k v"],
    cu_q_lens: Int[Array, " b1"],
    lengths: Int[Array, " b"],
    strategy: Ragged,
    *,
    starts: Int[Array, " b"] | None = None,
    kv_positions: Int[Array, "#b s"] | None = None,
    mask: Any = None,
    causal: bool = True,
    score: Any = None,
    block_q: int = 16,
    return_logsumexp: bool = False,
    return_carry: bool = False,
    return_max_logits: bool = False,
) -> AttentionOutput:
    """Attention of queries that are packed one row after the other. Each row attends to its own
    keys.

    The queries of a row are its last tokens: the last one is at position `lengths - 1`. So one call
    serves rows that enter a prompt, rows that take one token and rows that check drafts.

    **Arguments:**

    - `query`: the packed queries, `[n, h, d]`. Row `i` has those from `cu_q_lens[i]` up to, but
        not including, `cu_q_lens[i + 1]`. Queries after those of the last row are padding.
    - `key_`, `value`: keys `[b, s, k, d]` and values `[b, s, k, v]`, such as those of a cache.
    - `cu_q_lens`: the boundaries of the rows in `query`, int `[b + 1]`. They start at 0 and do not
        decrease.
    - `lengths`, `starts`: int `[b]`. The keys `starts <= position < lengths` of each row are
        visible, and `lengths` includes the keys of the new queries. The default start is 0.
    - `kv_positions`: the positions of the keys, int `[b, s]`, such as `cache.positions`: a ring
        buffer needs them. By default they are `0, 1, ...` Then lengths beyond `s` raise when the
        program runs, and `jax.export` cannot write that check: give the positions for it.
    - `strategy`: a [`eqattn.Ragged`][]. With its `axis_name`, devices share the keys of each row.
    - `mask`, `score`: a further mask and further scores. They receive the index of the row as `b`.
        They may hold arrays per row and head, but none per query or key. Only a
        [`eqattn.Selected`][] has those of packed queries, `[h, n, keys]`.
    - `causal`: whether a query sees only the keys up to its own position.
    - `block_q`: how many queries are visited together. Each row pads its last block, so a small
        block wastes less, and a large one reads the keys of a long prompt less often. The default
        of 16 was chosen by trial.
    - `return_logsumexp`, `return_carry`, `return_max_logits`: whether the output also has that
        field.

    **Returns:** an [`eqattn.AttentionOutput`][]. It has `attention_outputs` `[n, h, v]` and, if
    asked for, `logsumexp` `[n, h]`, `carry` and `max_logits` `[n, h]`. Padding has output 0,
    logsumexp and largest logit `-inf`, and zero gradients.

    **Raises:** `ValueError` or `TypeError` at trace time; the message names the shapes and the
    remedy. This includes `cu_q_lens` and `lengths` that do not fit, if their values are known.
    """
    mask, scores = as_mask(mask), as_scores(score)
    query = jnp.asarray(as_array(query, "query"))
    key_, value = (
        x if isinstance(x, AbstractStored) else jnp.asarray(as_array(x, name))
        for name, x in (("key_", key_), ("value", value))
    )
    _check_strategy(strategy, "ragged_attention")
    sharers = _sharers(strategy)
    given, in_order = (cu_q_lens, lengths, starts), sharers if kv_positions is None else None
    cu_q_lens, lengths, starts = _checked((query, key_, value), given, in_order)
    causal = as_flag(causal, "causal")
    block_q = as_int(block_q, "block_q", least=1, static=True).value
    at = as_positions(kv_positions, key_.shape[1], key_.shape[:1], "kv_positions")

    place = _places(cu_q_lens, len(query), min(block_q, max(len(query), 1)))
    row, rows, heads = place.row, len(lengths), query.shape[1]
    count = cu_q_lens[1:] - cu_q_lens[:-1]
    check_call(mask, (), heads, key_.shape[2], len(query), key_.shape[1], kv_positions)
    mask = mask_of_rows(mask, row, rows, heads, place.tokens)
    shown = KeyPadding(jnp.where(place.live, lengths[row], 0), starts[row])
    for more in (Causal() if causal else None, mask):
        shown = shown if more is None else shown & more
    size = strategy.block_sizes()[1]
    keys = pages_of_rows(key_, row, size, sharers)
    latents = keys.first if read_once(key_, value) is not value else None
    output = attention(
        _queries_of(query, place),
        keys,
        pages_of_rows(value, row, size, sharers) if latents is None else latents,
        strategy,
        mask=shown,
        score=scores_of_rows(scores, row, rows, heads, query.dtype) or None,
        q_offset=lengths[row] - count[row] + place.first,
        kv_positions=positions_of_pages(at, key_, keys, row, sharers),
        return_logsumexp=return_logsumexp,
        return_carry=return_carry,
        return_max_logits=return_max_logits,
    )
    return _packed(output, place)


def cascade_attention(
    query: Float[Array, "b t h d"],
    cache: AbstractCache,
    strategy: AttentionImpl = Ragged(),
    *,
    q_offset: Any,
    block_q: int = 64,
    return_logsumexp: bool = False,
    return_carry: bool = False,
) -> AttentionOutput:
    r"""Causal attention over a cache in pages, in which pages that rows share are read once for all
    of them, instead of once for each.

    Rows that begin with the same page are a group. The pages that all of a group begin with are
    read for the queries of the whole group at once, and the other pages row by row. These are
    attention over two parts of the keys, so their Carries are merged, which is exact.

        cache = cache.share([1, 2, 3], from_row=0, tokens=prefix)
        ...
        offset = cache.length
        cache = cache.append(key, value)
        cascade_attention(query, cache, Ragged(metadata), q_offset=offset)

    Rows that share nothing cost what they cost without it, and the first part some idle work.

    **Arguments:**

    - `query`: the queries of the tokens that were appended last, `[b, t, h, d]`.
    - `cache`: a [`PagedKVCache`][eqattn.cache.PagedKVCache], or another with its pages.
    - `strategy`: a [`Ragged`][eqattn.Ragged]. Its metadata give the scale, soft cap and sinks.
    - `q_offset`: the positions of the first queries, integers `[b]`: `cache.length` before the
        tokens were appended.
    - `block_q`: for how many queries of a group shared pages are read at once.
    - `return_logsumexp`, `return_carry`: whether the output also has that field.

    **Returns:** an [`eqattn.AttentionOutput`][], as that of `attention` with the mask
    `Causal() & cache.mask()`, to rounding.

    **Raises:** `ValueError` or `TypeError` at trace time; the message names the shapes and the
    remedy.

    ??? cite "Reference"

        Juravsky et al., *Hydragen: High-Throughput LLM Inference with Shared Prefixes*, 2024
        (arXiv:2402.05099).
    """
    _check_strategy(strategy, "cascade_attention")
    if getattr(strategy, "fixed", False):
        raise ValueError(
            "bitwise=True: cascade_attention merges what rows share with the rest, so that the "
            "bits of a row depend on the other rows; use attention with Causal() & cache.mask()."
        )
    key = cache.key
    if not isinstance(key, Pages):
        raise TypeError(
            f"cascade_attention reads pages that rows share, which a {type(cache).__name__} has "
            "none of; use attention, or a PagedKVCache."
        )
    query = jnp.asarray(as_array(query, "query"))
    value = key.first or cache.value
    check_shapes(query, key, value)
    b, t = query.shape[:2]
    offset = jnp.asarray(as_int32(q_offset, "q_offset"))
    if offset.shape != (b,):
        raise ValueError(f"q_offset must be integers [b] = {(b,)}, got shape {offset.shape}.")
    block_q = min(as_int(block_q, "block_q", least=1, static=True).value, max(b * t, 1))
    leader, prefix = groups = _groups(key.table, offset, key.page_size)
    shared = _over_prefixes(query, key, value, strategy, block_q, groups)
    own = attention(
        query,
        key,
        value,
        strategy,
        mask=Causal() & KeyPadding(cache.length, prefix[leader]),
        q_offset=offset,
        return_carry=True,
    ).carry
    assert own is not None
    carry = own.merge(shared)
    return AttentionOutput(
        attention_outputs=carry.output().astype(strategy.output_dtype(query)),
        logsumexp=carry.logsumexp() if as_flag(return_logsumexp, "return_logsumexp") else None,
        carry=carry if as_flag(return_carry, "return_carry") else None,
    )


def _over_prefixes(
    query: Array, key: Pages, value: Any, strategy: AttentionImpl, block_q: int, groups: Any
) -> Carry:
    """Attention over the keys that `groups` of rows share, without sinks, for queries
    `[b, t, h, d]` in blocks of `block_q`.
    """
    leader, prefix = groups
    whole = strategy.metadata.replace(softmax_aux=None, blocksize_q=block_q)
    b, t, *heads = query.shape
    # Queries are packed in the order of their leaders; those of leader i are one row of the pack.
    order = jnp.argsort(leader, stable=True)
    members = jnp.bincount(leader, length=b).astype(jnp.int32)
    ends = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(members * t, dtype=jnp.int32)])
    place = _places(ends, b * t, block_q)
    packed = query[order].reshape(b * t, *heads)
    keys = key.rows(place.row)
    carry = attention(
        _queries_of(packed, place),
        keys,
        keys.first or value.rows(place.row),
        eqx.tree_at(lambda s: s.metadata, strategy, whole),
        mask=KeyPadding(jnp.where(place.live, prefix[place.row], 0)),
        return_carry=True,
    ).carry
    at, back = (place.token_block, place.token_offset), jnp.argsort(order)
    unpack = lambda x: x[at].reshape(b, t, *x.shape[2:])[back]
    return jax.tree.map(unpack, carry)


def _groups(table: Array, lengths: Array, size: int) -> tuple[Array, Array]:
    """The first row of each row's group, `[b]`, and how many tokens the group of which a row is the
    first shares, `[b]`; 0 for a group of one.

    **Arguments:**

    - `table`: the pages of each row, `[b, n]`.
    - `lengths`: how many tokens of each row may be shared, `[b]`.
    - `size`: how many tokens a page has.
    """
    rows = jnp.arange(len(lengths), dtype=jnp.int32)
    there = lengths > 0  # An empty row has no pages, whatever its table says.
    same = (table[:, None, 0] == table[None, :, 0]) & there[:, None] & there[None]
    leader = jnp.argmax(same | (rows[:, None] == rows[None]), 1).astype(jnp.int32)
    equal = jnp.cumprod((table == table[leader]).astype(jnp.int32), 1).sum(1, dtype=jnp.int32)
    mine = leader[None] == rows[:, None]  # [leader, row]
    reach = jnp.minimum(equal * size, lengths)[None]
    shared = jnp.where(mine, reach, jnp.iinfo(jnp.int32).max).min(1)
    return leader, jnp.where(mine.sum(1) > 1, shared, 0)


def _checked(
    arrays: tuple[Any, Any, Any], given: tuple[Any, Any, Any], in_order: Sharers | None
) -> tuple[Array, Array, Array]:
    """Returns `cu_q_lens`, `lengths` and `starts` as int32 arrays, and raises unless they fit.
    Lengths are at most the number of keys of a row on all devices, those `in_order`, which is None
    if the positions of keys are given. Traced lengths are checked as the program runs.
    """
    (query, key_, value), (cu, lengths, starts) = arrays, given
    cu = as_int32(cu, "cu_q_lens", 1)
    lengths = as_int32(lengths, "lengths", 1)
    starts = np.zeros(lengths.shape, np.int32) if starts is None else starts
    starts = as_int32(starts, "starts", 1)
    shapes = f"query {query.shape}, key_ {key_.shape}, value {value.shape}"
    if query.ndim != 3 or key_.ndim != 4 or value.ndim != 4:
        raise ValueError(
            f"query must be [n, h, d], packed without a batch axis, key_ [b, s, k, d] and value "
            f"[b, s, k, v], got {shapes}."
        )
    rows, s = key_.shape[:2]
    most = None if in_order is None else in_order.keys(s)
    if (value.shape[0], *cu.shape, *lengths.shape, *starts.shape) != (rows, rows + 1, rows, rows):
        raise ValueError(
            f"cu_q_lens {cu.shape}, lengths {lengths.shape}, starts {starts.shape}, key_ "
            f"{key_.shape} and value {value.shape} do not fit together; b rows have b lengths and "
            "starts, and b + 1 boundaries."
        )
    check_boundaries(cu, len(query), "cu_q_lens")
    known, ends = concrete(cu), concrete(lengths)
    counts = np.zeros(rows, np.int32) if known is None else np.diff(known)
    ring = "but for a ring buffer, which needs kv_positions=cache.positions"
    if ends is not None and ((ends < counts) | (most is not None and ends > most)).any():
        raise ValueError(
            f"lengths must be at least the rows' numbers of queries, {counts.tolist()}, and at "
            f"most the {most} keys of key_ {key_.shape}, {ring}: they count the new tokens too. "
            f"Got {ends.tolist()}."
        )
    lengths = jnp.asarray(lengths)
    if ends is None and most is not None:
        message = f"lengths must be at most the {most} keys of key_ {key_.shape}, {ring}"
        lengths = eqx.error_if(lengths, lengths > most, message)
    return jnp.asarray(cu), lengths, jnp.asarray(starts)


def _sharers(strategy: AttentionImpl) -> Sharers:
    """The devices that share the keys of each row."""
    axis = strategy.keys_axis() if isinstance(strategy, AbstractOnDevice) else None
    if axis is None:
        return Sharers()
    from .strategies._key_shards import keys_place

    devices, mesh = keys_place(axis, strategy.metadata.mesh)
    return Sharers(axis, devices, inside=mesh is None)


def _check_strategy(strategy: Any, function: str) -> None:
    if not getattr(strategy, "reads_stored", False):
        raise TypeError(
            f"{function} reads the blocks of rows as pages, which needs the strategy "
            f"Ragged(metadata), got {type(strategy).__name__}."
        )
    if strategy.metadata.dropout_prob:
        raise ValueError(
            f"dropout_prob={strategy.metadata.dropout_prob}: {function} is for inference and "
            "has no dropout; use metadata.replace(dropout_prob=0.0)."
        )


class _Places(NamedTuple):
    """The two-way map between packed queries and blocks that belong to one row each.

    For rows of 3 and 1 queries and blocks of 2, the live blocks are, with `x` for padding:

        tokens   [0, 1] [2, x] [3, x]
        row         0      0      1
        first       0      2      0
    """

    row: Array  # [blocks]: the row that a block belongs to
    live: Array  # [blocks]: whether the block has any queries
    first: Array  # [blocks]: the place of its first query among the queries of its row
    tokens: Array  # [blocks, block_q]: the packed queries of a block; padding is out of range
    token_block: Array  # [n]: the block that holds a query; out of range for padding
    token_offset: Array  # [n]: the place of a query within that block


def _places(boundaries: Array, n: int, size: int) -> _Places:
    rows = len(boundaries) - 1
    # Each row has at most one block that is not full, so there are at most n // size full blocks
    # and `rows` others. This bound is static, as shapes must be; the blocks beyond are not live.
    most = n // size + rows
    counts = boundaries[1:] - boundaries[:-1]
    ends = jnp.cumsum(-(-counts // size))
    block = jnp.arange(most, dtype=jnp.int32)
    row = jnp.searchsorted(ends, block, side="right").astype(jnp.int32)
    live, row = row < rows, jnp.minimum(row, rows - 1)
    begins = ends - -(-counts // size)
    first = (block - begins[row]) * size
    inside = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    tokens = jnp.where(
        live[:, None] & (inside < counts[row][:, None]), boundaries[row][:, None] + inside, n
    )
    owner, within = map(jnp.asarray, packed_segments(boundaries, n))
    token_block = jnp.where(owner >= 0, begins[jnp.maximum(owner, 0)] + within // size, most)
    return _Places(row, live, first, tokens, token_block, within % size)


def _packed(output: AttentionOutput, place: _Places) -> AttentionOutput:
    """The output of blocks as that of packed queries, with that of no keys for padding."""
    blocks, low = len(place.row), -jnp.inf
    seen = place.token_block < blocks
    own = jnp.minimum(place.token_block, blocks - 1), place.token_offset

    def packed(x: Array | None, padding: float = 0.0) -> Any:
        if x is None:
            return None
        x = x[own]
        return jnp.where(seen.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.asarray(padding, x.dtype))

    c = output.carry
    return AttentionOutput(
        attention_outputs=packed(output.attention_outputs),
        logsumexp=packed(output.logsumexp, low),
        carry=c and Carry(packed(c.numerator), packed(c.denominator), packed(c.max_so_far, low)),
        max_logits=packed(output.max_logits, low),
    )


def _queries_of(packed: Array, place: _Places) -> Array:
    """The queries of each block, and zeros for padding."""
    if not len(packed):
        return jnp.zeros((*place.tokens.shape, *packed.shape[1:]), packed.dtype)
    return jnp.take(packed, place.tokens, axis=0, mode="fill", fill_value=0)
