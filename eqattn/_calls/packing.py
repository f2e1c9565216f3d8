"""Cuts packed queries, which lie one row after the other, into blocks of one row each.

Masks and scores for packed queries: each batch element is a block of queries, from one row or
from several.

A mask and a score are functions of the row `b`. But here the batch index is that of a block, not of
a row. So the row to which a block, or each query in it, belongs becomes an operand. It travels with
the block and replaces `b`.

Keys and values of rows as pages, for blocks of packed queries. Blocks of one row share its
pages, so nothing is copied for them.

Where `n` devices share the keys, each of them has one piece of a row. Pages are dealt out in turn:
the page `j` of device `i` is the part `j n + i` of the row. So the positions of keys are passed
along with them.
"""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._carry import Carry
from .._jax import explicit_axes, without_explicit_axes
from .._misc import accumulation_dtype, as_array, as_flag, even_block, iota, REACH
from .._output import AttentionOutput
from .._pairs import canonical, Operand
from .._problem.mesh import on_mesh_of
from .._problem.storage import as_stored, in_pages, Pages
from ..masks._base import AbstractMask, map_terms, named_operands
from ..masks._segments import packed_segments
from ..scores._base import AbstractScore
from ..scores._function import ScoreFn
from ..strategies._fold_strategy import as_output, result_specs


_Call = TypeVar("_Call", bound=Callable[..., AttentionOutput])


def on_auto_axes(call: _Call) -> _Call:
    """A decorator of calls that put queries into another order. JAX gives no type to a gather of
    what an explicit mesh axis shards. So the compiler propagates shardings inside of the call, and
    its results are sharded as the query is.
    """

    @ft.wraps(call)
    def wrapped(query: Any, *args: Any, **kwargs: Any) -> AttentionOutput:
        query = on_mesh_of(jnp.asarray(as_array(query, "query")), (args, kwargs))
        if not explicit_axes(query):
            return call(query, *args, **kwargs)
        names = ("logsumexp", "carry", "max_logits")
        asked = (n for n in names if as_flag(kwargs.get(f"return_{n}", False), f"return_{n}"))
        wanted, specs = ["outputs", *asked], result_specs(query)

        def run(query: Array, args: Any, kwargs: Any) -> dict[str, Any]:
            out = call(query, *args, **kwargs)
            found: dict[str, Any] = {n: getattr(out, n) for n in names}
            found["outputs"] = out.attention_outputs
            if (c := out.carry) is not None:
                found["carry"] = c.numerator, c.denominator, c.max_so_far
            return {n: found[n] for n in wanted}

        specs = {n: specs[n] for n in wanted}
        return as_output(without_explicit_axes(run, (query, args, kwargs), query, specs))

    return wrapped  # pyright: ignore[reportReturnType]


class Places(NamedTuple):
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


@ft.partial(jax.jit, static_argnums=(1, 2))
def places_of(boundaries: Array, n: int, size: int) -> Places:
    """Where `n` packed queries lie in blocks of `size`. `boundaries` are those of their rows."""
    rows = len(boundaries) - 1
    if not rows:  # all queries are padding
        none, padding = jnp.zeros(0, jnp.int32), jnp.zeros(n, jnp.int32)
        return Places(none, none > 0, none, jnp.zeros((0, size), jnp.int32), padding, padding)
    # A row of `c` queries has `ceil(c / size)` blocks, at most `(c + size - 1) / size`. The sum of
    # that is a static bound, as shapes must be static. The blocks beyond are not live.
    most = max((n + rows * (size - 1)) // size, 1)
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
    return Places(row, live, first, tokens, token_block, within % size)


@jax.jit
def queries_of(packed: Array, place: Places) -> Array:
    """The queries of each block, and zeros for padding."""
    if not len(packed):
        return jnp.zeros((*place.tokens.shape, *packed.shape[1:]), packed.dtype)
    return jnp.take(packed, place.tokens, axis=0, mode="fill", fill_value=0)


@jax.jit
def packed_output(output: AttentionOutput, place: Places) -> AttentionOutput:
    """Packs the output of the blocks again. Padding gets the output of a query that sees no key."""
    blocks, low = len(place.row), -jnp.inf
    seen = place.token_block < blocks
    own = jnp.minimum(place.token_block, blocks - 1), place.token_offset

    def packed(x: Array | None, padding: float = 0.0) -> Any:
        if x is None:
            return None
        x = x[own] if blocks else jnp.zeros((len(seen), *x.shape[2:]), x.dtype)
        return jnp.where(seen.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.asarray(padding, x.dtype))

    c = output.carry
    return AttentionOutput(
        attention_outputs=packed(output.attention_outputs),
        logsumexp=packed(output.logsumexp, low),
        carry=c and Carry(packed(c.numerator), packed(c.denominator), packed(c.max_so_far, low)),
        max_logits=packed(output.max_logits, low),
    )


def check_strategy(strategy: Any, function: str) -> None:
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


class _OfRows(AbstractMask):
    """A mask that reads the row from an operand.

    **Arguments:**

    - `mask`: the mask of rows.
    - `held`: the row, and the operands of the mask for each block.
    """

    mask: AbstractMask
    held: tuple[Operand, ...]

    def operands(self) -> tuple[Operand, ...]:
        return self.held

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return self.mask.visible(ids[0], h, q, k, *ids[1:])


class _Transform(eqx.Module):
    """The `transform` of a score that reads the row from an operand."""

    score: AbstractScore

    def __call__(self, logit: Any, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return self.score.transform(logit, ids[0], h, q, k, *ids[1:])


class PackedRows(NamedTuple):
    """The rows that packed queries belong to.

    **Arguments:**

    - `row`: the row of each block, int32 `[blocks]`, or of each of its queries, `[blocks, q]`.
    - `rows`, `heads`: the numbers of rows and of query heads.
    - `tokens`: the packed queries of each block, int32 `[blocks, q]`, for lists of keys.
    - `token`: the place of each query among those of its row, int32 `[blocks, q]`, where arrays may
        have an entry for each query or key; else None.
    - `sizes`: how many queries and keys a row has in such arrays.
    """

    row: Array
    rows: int
    heads: int
    tokens: Array
    token: Array | None = None
    sizes: tuple[int, int] = (1, 1)

    @property
    def operand(self) -> Operand:
        """The row of each block or query."""
        return Operand(self.row, "bt"[: self.row.ndim])

    def of_blocks(self, operand: Operand, name: str) -> Operand | None:
        """An operand of rows as one of blocks; None if it is the same for all rows and queries.

        **Raises:** `ValueError` if its shape does not allow it.
        """
        given = f"{name} holds an array {tuple(operand.array.shape)} (axes {operand.axes!r}). "
        try:
            x = jnp.asarray(canonical(operand, (self.rows,), self.heads, *self.sizes, name))
        except ValueError as e:
            raise ValueError(
                f"{given}Queries are packed here, so arrays may be per row ({self.rows}) or head "
                f"({self.heads}), not per query or key: use a function of positions, or call "
                "attention with the rows apart."
            ) from e
        if x.shape[0] == x.shape[2] == 1:
            return None
        if self.token is None:
            return Operand.of_canonical(x[self.row])
        if x.shape[3] > 1:
            raise ValueError(
                f"{given}Keys are read for several of the {self.rows} rows and of their queries at "
                "once, so an array per key must be the same for all of them: use a function of "
                "positions, or attention with Causal() & cache.mask()."
            )
        # [blocks, q, H, 1, *f], as the axes of indices go in front where a slice is between them.
        at = [i if n > 1 else 0 * i for i, n in zip((self.row, self.token), x.shape[::2])]
        return Operand.of_canonical(jnp.moveaxis(x[at[0], :, at[1]], 1, 2))


def mask_of_rows(mask: AbstractMask | None, rows: PackedRows) -> Any:
    """Turns a mask of rows, or None, into a mask of blocks.

    **Raises:** `ValueError` if the mask holds arrays that have no entries for blocks.
    """

    def of_blocks(term):
        if term.selects:
            return term.of_packed(rows.tokens)  # pyright: ignore[reportAttributeAccessIssue]
        if rows.token is None and (moved := term.of_rows(rows.row)) is not None:
            return moved
        held = _held(term, term.visible, (), rows)
        return term if held is None else _OfRows(term, held)

    return None if mask is None else map_terms(mask, of_blocks)


def scores_of_rows(
    scores: Sequence[AbstractScore], rows: PackedRows, dtype: Any
) -> tuple[AbstractScore, ...]:
    """Turns scores of rows into scores of blocks, as `mask_of_rows` does. The `dtype` is that of
    the query.
    """
    logit = (jax.ShapeDtypeStruct((), accumulation_dtype(dtype)),)
    of_blocks = [_held(s, s.transform, logit, rows) for s in scores]
    return tuple(
        score if held is None else ScoreFn(_Transform(score), held)
        for score, held in zip(scores, of_blocks)
    )


def _held(
    part: Any, fn: Callable, lead: tuple[Any, ...], rows: PackedRows
) -> tuple[Operand, ...] | None:
    """The operands of a mask or score for blocks, after one that holds the rows. It is None where
    neither the operands nor the function depend on the row or on the place of a query.

    **Arguments:**

    - `part`: the mask or score.
    - `fn`: its function of a pair, `fn(*lead, b, h, q, k, *operands)`.
    - `lead`: the arguments in front of `b`, as abstract values.
    """
    operands = named_operands(part)
    moved = [rows.of_blocks(operand, name) for name, operand in operands]
    read = [((), np.int32)] * 4 + [(o.feature_shape, o.array.dtype) for _, o in operands]
    scalars = [jax.ShapeDtypeStruct(n, jax.dtypes.canonicalize_dtype(d)) for n, d in read]
    jaxpr = jax.make_jaxpr(fn)(*lead, *scalars).jaxpr
    b = jaxpr.invars[len(lead)]
    depends = any(x is b for eqn in jaxpr.eqns for x in eqn.invars)
    if not depends and all(x is None for x in moved):
        return None
    same = (operand for _, operand in operands)
    return rows.operand, *(old if new is None else new for old, new in zip(same, moved))


class Sharers(NamedTuple):
    """The devices that share the keys of each row.

    **Arguments:**

    - `axis`: the mesh axis that shards them; None if one device has all keys.
    - `devices`: how many devices it has.
    - `inside`: whether it is manual already, so that arrays hold the keys of this device.
    """

    axis: str | None = None
    devices: int = 1
    inside: bool = False

    def keys(self, s: int) -> int:
        """How many keys a row has in all, if the array at hand has `s`."""
        return s * self.devices if self.inside else s

    def pieces(self, a: Array, fill: Any = 0, multiple: int = 1) -> Array:
        """Cuts `[b, s, ...]` into one piece for each device whose keys it holds,
        `[b, pieces, s / pieces, ...]`. Each piece is padded at its end to a `multiple`.
        """
        n = 1 if self.inside else self.devices
        b, s = a.shape[:2]
        a = a.reshape(b, n, s // n, *a.shape[2:])
        widths = [(0, 0)] * a.ndim
        widths[2] = (0, -(s // n) % multiple)
        return jnp.pad(a, widths, constant_values=fill) if widths[2][1] else a


def pages_of_rows(x: Any, row: Array, size: int | None, sharers: Sharers) -> Pages:
    """Keys or values `[b, s, k, d]` as pages of the row of each block.

    **Arguments:**

    - `x`: an array, or the form in which keys are stored.
    - `row`: the row of each block, int32 `[blocks]`.
    - `size`: how many tokens a page has, also where there are fewer; None chooses.
    - `sharers`: the devices that share the keys.

    **Raises:** `ValueError` if the keys are not equal pieces for the devices.
    """
    x = in_pages(x)
    if isinstance(x, Pages):
        return x.rows(row)
    b, s = x.shape[:2]
    if sharers.keys(s) % sharers.devices:
        raise ValueError(
            f"key_ and value {x.shape} [b, s, heads, dim] have {s} keys, which are not equal "
            f"pieces for the {sharers.devices} devices of axis {sharers.axis!r}: pad them, or make "
            f"the capacity of the cache a multiple of {sharers.devices}."
        )
    own = sharers.keys(s) // sharers.devices
    if size is None:
        # A size from 64 to 256 that divides the row needs no padding, hence no copy. If there is
        # none, the row is padded to blocks of 128, which was chosen by trial within that range. No
        # benchmark covers padded rows; `bench --only 'cpu-decode-*'` shows those without padding.
        size = max(min(even_block(own) or 128, own), 1)
    parts = -(-own // size)

    def paged(a: Array) -> Array:
        pieces = sharers.pieces(a, multiple=size)
        # A device's share of the pool is the pages of all rows that it has.
        pool = pieces.swapaxes(0, 1) if pieces.shape[1] > 1 else pieces
        return pool.reshape(b * pieces.shape[1] * parts, size, *a.shape[2:])

    part, device = np.divmod(np.arange(parts * sharers.devices, dtype=np.int32), sharers.devices)
    table = row[:, None] * parts + (device * (b * parts) + part)[None]
    return Pages(as_stored(x).map_tokens(paged), table, sharers.devices)


def positions_of_pages(at: Any, x: Any, pages: Pages, row: Array, sharers: Sharers) -> Any:
    """The positions of the tokens of pages, `[blocks, tokens]`; None means `0, 1, ...`

    **Arguments:**

    - `at`: the positions of the keys `x` `[b, s, k, d]`, int32 `[1|b, s]`, or None.
    - `pages`: what `pages_of_rows` made of the keys.
    - `row`, `sharers`: as for `pages_of_rows`.
    """
    if at is None and (sharers.devices == 1 or isinstance(x, Pages)):
        return None
    if at is None:
        at = iota(sharers.keys(x.shape[1]))[None]
    elif sharers.inside and not isinstance(x, Pages):
        at = lax.all_gather(at, sharers.axis, axis=1, tiled=True)
    at = jnp.asarray(at)
    if not isinstance(x, Pages):
        # Devices have their pages in turn, and padding is at positions that no mask shows.
        whole = sharers._replace(inside=False)
        at = whole.pieces(at, -REACH, pages.page_size)
        rows, devices, tokens = at.shape
        at = at.reshape(rows, devices, tokens // pages.page_size, pages.page_size)
        at = at.swapaxes(1, 2).reshape(rows, devices * tokens)
    return at if len(at) == 1 else at[row]
