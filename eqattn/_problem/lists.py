"""A problem whose keys are listed for each query, as problems whose keys are gathered.

A row of the list belongs to one query, or to a block of queries. It becomes a batch element, and
its keys are copied in the order of the list. The result is an ordinary problem, with a batch axis
`(batch, heads of the list, rows)` and `n` keys. So every visit, score and mask applies to it, in
every order of differentiation. The transpose of the gather brings its gradients back, and adds them
up in float32.

The copies of all rows would take `t * n` vectors. So some rows at a time are visited, as many as
`_together` says. Their gradients are added in place to a sum over all rows, which is wide.

Turns lists of blocks of keys into tables that say which blocks are visited.

Where a list names blocks of keys, it says which blocks of the grid are live. These are visited
where they lie. Nothing is gathered, and no gradient is scattered.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool

from .._carry import Carry
from .._jax import is_narrow, shadow_of, summed_wide, varying_axes
from .._misc import iota, widened
from .._pairs import Operand
from .._sweep.fold import fold_p
from .._sweep.grid import ROW
from .._sweep.lowering import Lowering, XLA
from ..masks._base import AbstractMask, Dense, named_operands
from ..masks._selected import distinct
from .closed_score import BoundMask, BoundScore, HeldScore, read_of
from .problem import Problem
from .storage import AbstractStored, as_stored, join_heads
from .tiling import choose_tiling, Tiling


class _Rows(eqx.Module):
    """Some rows of a list, and what belongs to them.

    **Arguments:**

    - `query`: `[B, rows * block_q, H, D]`.
    - `slots`, `seen`: where the listed keys lie in the arrays, and whether they count; int32 and
        bool `[B|1, h, rows, n]`.
    - `q_positions`: int32 `[B|1, rows * block_q]`.
    - `of_mask`, `of_scores`: the operands, canonical, with the queries of these rows.

    A batch element of the gathered problem is one row, of one head of the list and one batch
    element here. Its heads are those that share the list.
    """

    query: Array
    slots: Array
    seen: Array
    q_positions: Array
    of_mask: tuple[Array, ...]
    of_scores: tuple[tuple[Array, ...], ...]

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """The numbers of batch elements, heads of the list, rows, queries of a row, and query heads
        that share a list.
        """
        batch, queries, heads, _ = self.query.shape
        lists, rows = self.slots.shape[1:3]
        return batch, lists, rows, queries // rows, heads // lists

    def merged(self, x: Any) -> Array:
        """`[B|1, h|1, rows|1, ...]` with the first three axes in full, as one."""
        lead = self.sizes[:3]
        x = jnp.broadcast_to(x, (*lead, *x.shape[3:]))
        return x.reshape(math.prod(lead), *x.shape[3:])  # -1 fails where values are empty

    def merged_queries(self) -> Array:
        batch, lists, rows, size, heads = self.sizes
        query = self.query.reshape(batch, rows, size, lists, heads, -1)
        return self.merged(query.transpose(0, 3, 1, 2, 4, 5))

    def gathered(self, x: Array) -> Array:
        """Turns a canonical array `[B|1, H|1, T|1, S|1]` into that of the gathered problem. Rows
        become batch elements, and keys are gathered. There may be a last axis of features.
        """
        _, lists, rows, size, heads = self.sizes
        b, all_heads, t, *last = x.shape
        of_heads = (lists, heads) if all_heads > 1 else (1, 1)
        of_rows = (rows, size) if t > 1 else (1, 1)
        x = x.reshape(b, *of_heads, *of_rows, *last)
        x = jnp.moveaxis(x, 3, 2)  # [B, h, rows, heads, queries, keys]
        if x.shape[5] > 1:
            own = [iota(m).reshape(-1, *[1] * (5 - i))
                   for i, m in enumerate(x.shape[:5])]  # fmt: skip
            at = tuple(map(jnp.asarray, (*own, self.slots[:, :, :, None, None])))
            x = x.at[at].get(mode="promise_in_bounds")
        return self.merged(x)

    def tokens_of(self, x: Array) -> Array:
        """A result of the gathered problem as that of the queries, `[B, queries, H, ...]`."""
        batch, lists, rows, size, heads = self.sizes
        x = x.reshape(batch, lists, rows, size, heads, *x.shape[3:])
        x = jnp.moveaxis(x, 1, 3)
        return x.reshape(batch, rows * size, lists * heads, *x.shape[5:])


def key_slots(problem: Problem, selection: Any) -> tuple[Array, Array]:
    """Where the keys that a `Selected` lists lie, int32 `[B|1, h, rows, n]`, each once, and which
    of these entries list a key.
    """
    s = problem.sizes[1]
    rows, seen = distinct(selection.rows_of(problem.batch_shape))
    size = selection.block_k
    if size > 1:
        limit = np.int32((2**31 - 1) // size - 1)
        rows = (jnp.minimum(rows, limit) * np.int32(size))[..., None]
        rows = rows + np.arange(size, dtype=np.int32).reshape((1,) * (rows.ndim - 1) + (-1,))
        rows = rows.reshape(*rows.shape[:-2], rows.shape[-2] * size)
        seen = jnp.repeat(seen, size, -1)
    places = problem.kv_positions if problem.kv_places is None else problem.kv_places
    if places is None or s == 0:
        seen = seen & (rows < s)
        return jnp.where(seen, rows, 0), seen

    def lookup(positions, rows):
        order = jnp.argsort(positions).astype(jnp.int32)
        at = jnp.searchsorted(positions[order], rows)
        slot = order[jnp.minimum(at, s - 1)]
        return slot, positions[slot] == rows

    both = jnp.asarray(places), rows
    batch = jnp.broadcast_shapes(*(x.shape[:1] for x in both))
    given = (jnp.broadcast_to(x, (*batch, *x.shape[1:])) for x in both)
    slots, found = jax.vmap(lookup)(*given)
    return slots, seen & found


def fold_selected(
    problem: Problem, selection: Any, slots: Array, seen: Array, fold: Callable, wide: bool
) -> Carry:
    """Folds the pairs of a problem that a `Selected` lists and its mask shows.

    **Arguments:**

    - `problem`: the problem. Its mask is what else hides pairs, at their places.
    - `selection`: the list.
    - `slots`, `seen`: by `key_slots`.
    - `fold`: a function that folds a problem.
    - `wide`: whether it computes products in the dtype of sums. Then copies have that dtype, so
        that none of their gradients is rounded.
    """
    t, s, heads, _ = problem.sizes
    batch, size = problem.query.shape[0], selection.block_q
    listed, n = slots.shape[2:]
    if 0 in (t, s, n, batch):
        shape = (batch, t, heads)
        return Carry.empty(shape, problem.value.shape[-1], problem.accumulation_dtype)
    together = min(listed, _together(problem, *slots.shape[1::2]))
    parts = -(-listed // together)

    def cut(x: Any, axis: int, tokens: int, whole: bool = False) -> Any:
        """Cuts an axis into `parts`, which come first. An axis of size 1 is repeated, unless all of
        the tokens are there, as `whole` says: then they are one.
        """
        x = jnp.asarray(x)
        if x.shape[axis] == 1 and tokens != 1 and not whole:
            return jnp.broadcast_to(x[None], (parts, *x.shape))
        if x.shape[axis] == 1 and parts > 1:
            x = jnp.broadcast_to(x, (*x.shape[:axis], t if axis else 1, *x.shape[axis + 1 :]))
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, parts * tokens - x.shape[axis])
        # The padding is as the last query and its list. So it sees no key that this query does not.
        x = jnp.pad(x, widths, mode="edge")
        x = x.reshape(*x.shape[:axis], parts, tokens, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    def canonical(part: Any, *dtypes: Any) -> tuple[Array, ...]:
        return tuple(
            cut(widened(problem.canonical(o, name), *dtypes), 2, together * size)
            for name, o in named_operands(part)
        )

    acc = problem.accumulation_dtype
    rows = _Rows(
        query=cut(problem.query, 1, together * size, whole=True),
        slots=cut(slots, 2, together),
        seen=cut(seen, 2, together),
        q_positions=cut(problem.positions()[0], 1, together * size, whole=True),
        of_mask=() if problem.mask is None else canonical(problem.mask),
        # What batch elements share is gathered for each. Its gradient is a sum over them.
        of_scores=tuple(canonical(score, acc) for score in problem.scores),
    )
    # All parts read the arrays of a score, whose gradient is a sum over them.
    reads = [[read_of(x, acc, features=5) for x in xs] for xs in rows.of_scores]
    axes = varying_axes(problem.query, slots, *jax.tree.leaves((problem.key, problem.value, rows)))
    held = tuple(HeldScore.of(s, acc, x, axes=axes) for s, x in zip(problem.scores, reads))
    problem = dataclasses.replace(problem, scores=held)
    key = _Source.of(problem.key, wide)
    # Values without arrays are part of the keys.
    value = None if as_stored(problem.value).arrays == () else _Source.of(problem.value, wide)
    visit = ft.partial(_fold_rows, problem, key, value, fold=fold)
    if parts == 1:
        carry = visit(jax.tree.map(lambda x: x[0], rows))
        return jax.tree.map(lambda x: x[:, :t], carry)
    # What is gathered is gathered again in a backward pass, and only the results are kept. The
    # gradient of a gradient needs a checkpoint within: JAX takes what the inner gradient computes
    # forwards out of the outer one, and would keep all copies for the second backward pass.
    keep = ft.partial(jax.checkpoint, policy=lambda p, *_, **__: p is fold_p, prevent_cse=False)
    visit = keep(keep(visit))
    _, carry = lax.scan(lambda _, x: (None, visit(x)), None, rows)
    rows_made = parts * together * size
    whole = lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, rows_made, *x.shape[3:])[:, :t]
    return jax.tree.map(whole, carry)


def _together(problem: Problem, lists: int, n: int) -> int:
    """How many rows are visited together, where each has so many lists of `n` keys.

    At most, their copies take as much memory as the keys. On a CPU, copies should still be in the
    cache of a core when they are read. Memory that is written for the first time also costs some
    microseconds a page. So there the copies take about 2 MiB. This was measured with 1, 2, 4, 8 and
    32 MiB, on a busy processor. `cpu-selected-fwd` took 62, 65, 64, 66 and 82 ms, and
    `cpu-selected-grad` 188, 185, 194, 213 and 235 ms.
    """
    _, s, _, kv_heads = problem.sizes
    copied = n * (kv_heads if lists == 1 else lists)
    most = s * kv_heads // copied
    if jax.default_backend() == "cpu":
        width = problem.key.shape[-1] + problem.value.shape[-1]
        batch = problem.query.shape[0]
        batch = batch if isinstance(batch, int) else 1  # `jax.export` may leave it open.
        row = batch * copied * width * problem.accumulation_dtype.itemsize
        most = min(most, 2**21 // max(row, 1))
    return max(most, 1)


def _fold_rows(problem: Problem, keys: Any, values: Any, rows: _Rows, *, fold: Callable) -> Carry:
    """Folds some rows of a list, whose keys are gathered."""
    batch, lists, count, size, mine = rows.sizes
    heads, merged = lists * mine, rows.merged
    queries = rows.merged_queries()
    kv_heads = problem.sizes[3]
    head = None
    if lists > 1:
        head = np.arange(lists, dtype=np.int32) // np.int32(lists // kv_heads)
    key = merged(keys.at(rows.slots, head, batch))
    of_keys = lambda: problem.value.decode(key)
    value = of_keys() if values is None else merged(values.at(rows.slots, head, batch))
    shown: AbstractMask = Dense(merged(rows.seen[:, :, :, None, None]))
    if problem.mask is not None:
        shown = shown & BoundMask(problem.mask, tuple(map(rows.gathered, rows.of_mask)))
    b_indices = iota(batch) if problem.b_indices is None else problem.b_indices
    h_indices = iota(heads) if problem.h_indices is None else problem.h_indices
    kv_positions, given = rows.slots, problem.kv_positions
    if given is not None:
        kv_positions = jnp.asarray(given)[_owner(given.shape[0]), rows.slots]
    inner = dataclasses.replace(
        problem,
        query=queries,
        key=key,
        value=value,
        mask=shown,
        scores=tuple(
            BoundScore.of_canonical(score, map(rows.gathered, xs))
            for score, xs in zip(problem.scores, rows.of_scores)
        ),
        q_positions=merged(rows.q_positions.reshape(-1, 1, count, size)),
        kv_positions=merged(kv_positions),
        q_start=0,
        q_shift=None,
        batch_shape=(batch * lists * count,),
        b_indices=merged(b_indices.reshape(-1, 1, 1)),
        h_indices=merged(h_indices.reshape(-1, lists, 1, mine)),
        partition=None,
    )
    return jax.tree.map(rows.tokens_of, fold(inner))


def _owner(batch: int) -> Any:
    return iota(batch).reshape(-1, 1, 1, 1)


class _Source(eqx.Module):
    """Keys or values, of which each part of a loop takes some.

    **Arguments:**

    - `stored`: the keys or values.
    - `arrays`: its arrays without the axes of a single batch element and of a single head. With
        such axes, XLA:CPU copies all of an array ahead of the loop, under `jax.vmap` or without it.
    - `shadows`: the shadows of its arrays, see `summed_wide`. The parts add their gradients to
        these. They have all axes, as XLA:CPU would copy a gradient to give it an axis of size 1.
    - `wide`: as for `fold_selected`.
    """

    stored: AbstractStored
    arrays: tuple[Array, ...]
    shadows: tuple[Array, ...]
    wide: bool = eqx.field(static=True)

    @classmethod
    def of(cls, x: Any, wide: bool) -> "_Source":
        stored = as_stored(x)
        arrays = tuple(
            lax.squeeze(array, [i for i in _indexed(stored, flat) if array.shape[i] == 1])
            for array, flat in zip(stored.arrays, stored.flat)
        )
        shadows = tuple(x if (wider := shadow_of(x)) is None else wider for x in stored.arrays)
        return cls(stored, arrays, shadows, wide)

    def at(self, slots: Array, head: np.ndarray | None, batch: int) -> Array:
        """The vectors `[B, h, rows, n, K, D]` at `slots`, or `[B, h, rows, n, 1, D]` of one head
        for each `h`.
        """
        x, owner, at = self.stored, _owner(batch), slots
        if x.table is not None:
            page = x.page_size  # pyright: ignore[reportAttributeAccessIssue]
            owner, at = x.table[owner, slots // page], slots % page
        owner, at = (y[..., None] for y in jnp.broadcast_arrays(jnp.asarray(owner), at))
        heads = np.arange(x.shape[2], dtype=np.int32).reshape(1, 1, 1, 1, -1)
        heads = jnp.asarray(heads if head is None else head.reshape(1, -1, 1, 1, 1))
        parts, dtype = [], x.dtype
        for array, whole, shadow, flat in zip(self.arrays, x.arrays, self.shadows, x.flat):
            where = owner, at, heads  # [B, h, rows, n, K] or [B, h, rows, n, 1]
            if flat:  # [B, shares, m]: a share has its heads of the first token, then the next.
                share = np.int32(x.shape[2] // whole.shape[1])
                where = owner, heads // share, at * share + heads % share
            kept = [i for i in range(3) if whole.shape[i] != 1 or i not in _indexed(x, flat)]
            wide = self.wide and is_narrow(array)
            entries = _wide_entries if wide else _entries
            read = lambda x, *where: entries(x, *(where[i] for i in kept))
            found = summed_wide(read, array, *where, shadow=shadow, moved=entries)
            parts.append(join_heads(found, 1) if flat else found)
            dtype = found.dtype if wide else dtype
        return _by_vectors(x.decode(*parts).astype(dtype), slots)


def _indexed(x: AbstractStored, flat: bool) -> tuple[int, ...]:
    """The axes of an array of `x` that an index of the batch element or of the head picks from."""
    of_batch = () if x.table is not None else (0,)
    return of_batch if flat else (*of_batch, 2)


def _by_vectors(found: Array, slots: Array) -> Array:
    """What was gathered, `[B, h, rows, n, K, D]`, multiplied by 1, so that XLA:CPU gathers it fast.

    Without the product, XLA:CPU copies rows of up to 64 features number by number. That takes so
    many instructions that a core waits for only one or two rows at a time. With a product that it
    cannot leave out, it copies vectors. Scattered rows with 64 features in float32 then took 30 ns
    each instead of 149.
    """
    if jax.default_backend() != "cpu":
        return found
    return found * (slots >= 0).astype(found.dtype)[..., None, None]


def _wide_entries(array: Array, *where: Array) -> Array:
    """The entries of an array of narrow floats in the dtype of sums."""
    return _entries(array, *where).astype(jnp.float32)


def _entries(x: Array, *at: Array) -> Array:
    """The entries of an array at indices within bounds.

    XLA:CPU reads narrow floats as float32, and converts all that a loop reads ahead of its first
    turn. Behind a barrier the array depends on the turn, so that XLA converts what is gathered.
    """
    if is_narrow(x) and jax.default_backend() == "cpu":
        x, at = lax.optimization_barrier((x, at))
    return x.at[at].get(mode="promise_in_bounds")


_WORD = 32
"""The bits of a word, one for each block."""

_MOST_WORDS = 8
"""The most words that a kernel looks through for each pair of query and key."""


def tiling_of(
    problem: Problem, selection: Any, block_q: int | None, block_k: int | None, lowering: Lowering
) -> Tiling | None:
    """The blocking in which a list names whole blocks of keys; None where its keys are gathered
    instead.

    A block of queries has one list, if blocks of the list are large enough. Otherwise, its queries
    or heads have several lists. It visits what any of them names, and masks the rest.

    XLA visits the batch elements and heads of a block one after the other on a CPU only. Elsewhere,
    it would visit what any of them lists. Kernels always do, and skip blocks that are not listed.

    **Arguments:**

    - `problem`: the problem.
    - `selection`: the list, a `Selected`.
    - `block_q`, `block_k`, `lowering`: as for `choose_tiling`.
    """
    t, s, heads, kv_heads = problem.sizes
    *lead, lists, _, n = selection.indices.shape
    alike = set(lead) <= {1} and lists == 1
    gathered = (
        not (alike or lowering is not XLA or jax.default_backend() == "cpu")
        or problem.kv_positions is not None
        or isinstance(problem.key, AbstractStored)
        or isinstance(problem.value, AbstractStored)
    )
    if gathered or not (isinstance(t, int) and isinstance(s, int)):
        return None
    group, size = heads // kv_heads, selection.block_q
    best = choose_tiling(problem, block_q, block_k, lowering=lowering)
    queries, keys = _part(size, best.block_q, t), _part(selection.block_k, best.block_k, s)
    least_rows, least_keys = lowering.least_listed
    if queries * group < least_rows:
        queries = best.block_q // size * size
    if queries * group < least_rows or keys < least_keys:
        return None
    apart = max(queries // size, 1) * (group if lists > kv_heads else 1)
    listed, rows = n * selection.block_k, queries * group
    if apart > 1:
        # Products of few rows, as those of copies, take about twice as long.
        visited, copied = min(s, apart * listed) * rows, apart * lowering.copy_pairs + 2 * rows
        if visited > listed * copied:
            return None
    tiling = choose_tiling(problem, queries, keys, lowering=lowering)
    if lowering is XLA:
        return tiling
    # A list of pairs may have one more for each row or column without a live one.
    pairs = live_pairs(selection, tiling) + max(tiling.grid[ROW:])
    fits = lowering.most_pairs is None or pairs <= lowering.most_pairs
    words = 0 if apart == 1 else -(-s // selection.block_k) / _WORD
    return tiling if fits and words <= _MOST_WORDS else None


def _part(size: int, most: int, tokens: int) -> int:
    """The largest equal part of a block that is at most so large; all tokens if both have them."""
    if tokens <= min(size, most):
        return most
    return max(n for n in range(1, most + 1) if size % n == 0)


def live_pairs(selection: Any, tiling: Tiling) -> int:
    """The most pairs of blocks that lists make live, for each batch element and key head."""
    *_, lists, _, n = selection.indices.shape
    apart = max(tiling.block_q // selection.block_q, 1)
    apart *= tiling.group if lists > tiling.kv_heads else 1
    listed = apart * n * (selection.block_k // tiling.block_k)
    return tiling.rows * max(min(listed, tiling.columns), 1)


class _OnList(AbstractMask):
    """Whether the block of a key is on the list of the query. `row_lists` gives it its operands."""

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        *words, block = ids
        word = words[0]
        for i, x in enumerate(words[1:], 1):
            word = jnp.where(block >= np.int32(_WORD * i), x, word)
        return (word >> (block % np.int32(_WORD))) & np.int32(1) != 0


def row_lists(problem: Problem, selection: Any, lowering: Lowering) -> AbstractMask:
    """A mask of a list of blocks, for kernels whose blocks have queries with other lists. Each
    query has a bit for each block. So no array has an entry for each pair.
    """
    t, s, heads, _ = problem.sizes
    rows = selection.for_heads(heads).rows_of(problem.batch_shape)
    blocks = -(-s // selection.block_k)
    on = named(rows, -(-blocks // _WORD) * _WORD, lowering)
    on = jnp.repeat(on, selection.block_q, 2)[:, :, :t].reshape(*rows.shape[:2], t, -1, _WORD)
    bit = (np.uint32(1) << np.arange(_WORD, dtype=np.uint32)).reshape(1, 1, 1, 1, -1)
    bits = jnp.where(on, bit, np.uint32(0)).sum(-1, dtype=jnp.uint32)
    words = lax.bitcast_convert_type(bits, jnp.int32)
    of_key = (np.arange(s, dtype=np.int32) // np.int32(selection.block_k)).reshape(1, 1, 1, s)
    each = tuple(words[..., i, None] for i in range(words.shape[-1]))
    return BoundMask(_OnList(), (*each, of_key))


def named(indices: Array, count: int, lowering: Lowering) -> Bool[Array, "b h r c"]:
    """Which of so many blocks the rows `[B|1, h, rows, n]` of a list name.

    On a CPU, the names are marked in an array. For kernels, each block is compared with all names.
    To compile a forward for a v6e then took 4 s of CPU time, with 8 heads of 4096 queries. Marks
    took 24 s.
    """
    if lowering is not XLA:
        blocks = np.arange(count, dtype=np.int32).reshape(1, 1, 1, 1, -1)
        return (indices[..., None] == blocks).any(-2)
    places = jnp.where(indices < 0, count, indices)  # this is out of range, and so dropped
    own = [iota(n).reshape(-1, *[1] * (3 - i)) for i, n in enumerate(indices.shape[:3])]
    at = (*map(jnp.asarray, own), places)
    return jnp.zeros((*indices.shape[:3], count), bool).at[at].set(True, mode="drop")


def live_blocks(
    problem: Problem, selection: Any, tiling: Tiling, lowering: Lowering
) -> Bool[Array, "b k r c g q"]:
    """Which blocks of a blocking a list names, in rows and columns. Where it names others for each
    head or each query of a row, the last two axes are these. Otherwise they are of size 1.
    """
    indices = selection.rows_of(problem.batch_shape)
    count = -(-problem.sizes[1] // selection.block_k)
    live = named(indices, count, lowering)
    batch, lists, rows = live.shape[:3]
    live = jnp.repeat(live, selection.block_k // tiling.block_k, 3)[..., : tiling.columns]
    each = max(tiling.block_q // selection.block_q, 1)  # a row has so many lists
    live = jnp.repeat(live, max(selection.block_q // tiling.block_q, 1), 2)
    live = live[:, :, : tiling.rows * each]
    live = tiling.pad(live, 2, tiling.rows * each, "zeros")
    heads = min(lists, tiling.kv_heads)
    live = live.reshape(batch, heads, lists // heads, tiling.rows, each, tiling.columns)
    live = live.transpose(0, 1, 3, 5, 2, 4)
    return live if each == 1 else jnp.repeat(live, selection.block_q, 5)
