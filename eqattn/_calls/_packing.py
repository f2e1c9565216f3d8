"""Cuts packed queries, which lie one row after the other, into blocks of one row each."""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._carry import Carry
from .._jax import explicit_axes, without_explicit_axes
from .._misc import as_array, as_flag
from .._output import AttentionOutput
from .._problem.mesh import on_mesh_of
from ..masks._packed import packed_segments
from ..strategies._explicit_axes import result_specs
from ..strategies._results import as_output


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
