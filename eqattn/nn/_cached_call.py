"""How a layer continues from a cache: its rows, its new tokens, and what attention then reads."""

import bisect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._misc import as_array, as_flag, positions_in_reach
from .._pairs import Operand
from .._run_time import raise_if
from ..cache import AbstractCache
from ..masks._base import AbstractMask, live_blocks, map_terms


Cache = TypeVar("Cache", bound=AbstractCache)


def new_keys(
    query: Array,
    key_: Any,
    value: Any,
    cache: Any,
    counts: Any,
    append: bool,
    sizes: tuple[int, int],
) -> tuple[Array, Array]:
    """The keys and values that a call brings. They are the query by default, and empty arrays if
    `append` is False.
    """
    append = as_flag(append, "append")
    if cache is None and (counts is not None or not append):
        raise ValueError("counts and append say what a cache takes: pass cache= too.")
    if append:
        key_ = query if key_ is None else as_array(key_, "key_", 2)
        return key_, key_ if value is None else as_array(value, "value", 2)
    if key_ is not None or value is not None or counts is not None:
        raise ValueError("append=False reads the cache as it is: leave out key_, value and counts.")
    key_, value = (jnp.zeros((*query.shape[:-2], 0, size), query.dtype) for size in sizes)
    return key_, value


def as_batch(cache: Cache, rows: int | None) -> tuple[Cache, Callable[[Cache], Cache]]:
    """Returns a cache with an axis of rows, and a function that restores its form afterwards. Only
    the cache of one sequence, for which `rows` is None, may lack that axis.

    **Raises:** `ValueError` unless it has as many rows as the inputs.
    """
    same = lambda cache: cache
    if not isinstance(cache, AbstractCache):
        raise TypeError(
            f"cache must be one of eqattn.cache, such as a KVCache, or stacked.layer(i) of a "
            f"StackedKVCache; got {type(cache).__name__}."
        )
    shape = cache.length.shape
    if shape == (1 if rows is None else rows,):
        return cache, same
    if shape == () and cache.shares_rows:
        raise ValueError(
            f"jax.vmap over the rows of a {type(cache).__name__} would copy what they share. Call "
            "the layer outside of jax.vmap with its rows in front, inputs [rows, tokens, "
            "features]; or map over caches of batch=1 with an axis in front."
        )
    if shape == () and rows is None:
        add, remove = (lambda x: x[None]), (lambda x: x[0])
        return jax.tree.map(add, cache), lambda cache: jax.tree.map(remove, cache)
    inputs = "[tokens, features]" if rows is None else f"[{rows}, tokens, features]"
    raise ValueError(
        f"A cache with length {shape} does not fit query and other inputs {inputs}: pass all of "
        "its rows in front, [rows, tokens, features], or one sequence and a cache of batch=1, or "
        "jax.vmap over both."
    )


def as_rows(
    cache: Any, inputs: Sequence[Array], of_rows: Sequence[Any]
) -> tuple[Any, list[Array], list[Any], Callable[[Any, Any], Any]]:
    """Brings a call into the form that the rows of a cache need. One sequence becomes one row.

    **Arguments:**

    - `cache`: the cache of the call, or None.
    - `inputs`: arrays of one sequence, `[t, features]`, or of all rows, `[b, t, features]`.
    - `of_rows`: the `q_positions` of the call, `[t]` or `[b, t]`, its `counts`, and what else its
        tokens have; or None.

    **Returns:** the three of them, and a function from the last cache and the output to what the
    call returns.

    **Raises:** `ValueError` if a single sequence has several counts.
    """
    one, restored = inputs[0].ndim == 2, lambda cache: cache
    if one and np.ndim(of_rows[1]):
        raise ValueError(
            f"counts of one sequence {inputs[0].shape} must be an int, or an integer array without "
            f"axes, got {np.shape(of_rows[1])}."
        )
    if cache is not None:
        cache, restored = as_batch(cache, None if one else inputs[0].shape[0])

    def row(x: Any) -> Any:
        return jnp.asarray(x)[None] if one and x is not None else x

    def result(cache: Any, out: Any) -> Any:
        out = jax.tree.map(lambda x: x[0], out) if one else out
        return out if cache is None else (restored(cache), out)

    return cache, [row(x) for x in inputs], [row(x) for x in of_rows], result


def appended(
    cache: Cache,
    key_: Array,
    value: Array,
    of_rows: tuple[Any, Any],
    mask: Any,
    heads: int,
    window: Any = None,
) -> tuple[Cache, AbstractMask]:
    """Appends the heads of new tokens to a cache, and combines the mask of the call with the one
    that shows the stored tokens.

    **Arguments:**

    - `of_rows`: the `q_positions` and the `counts` of the call.

    **Raises:** `TypeError` unless the cache has the dtype of the heads. `ValueError` is raised
    unless it then holds all keys that the layer's window shows, or without a window the mask of the
    call. Keys may also be missing because the cache was truncated, or because the queries, at
    `q_positions`, are not the newest tokens. This raises when the program runs
    (as by `equinox.error_if`).
    """
    if cache.key.dtype != key_.dtype:
        raise TypeError(
            f"The cache is of {cache.key.dtype} and the layer's keys are {key_.dtype}; make it "
            f"with dtype=jnp.{key_.dtype}."
        )
    q_positions, counts = of_rows
    if not cache.overwrites:
        cache = cache.append(key_, value, counts)
    else:
        first, reach = cache.length, _reach(cache, key_.shape[1], window, mask, heads)
        if q_positions is not None and q_positions.shape[-1]:
            first = jnp.asarray(positions_in_reach(q_positions, "q_positions")).min(-1)
        cache = _checked(cache.append(key_, value, counts), first, reach)
    return cache, cache.mask() if mask is None else mask & cache.mask()


def _reach(
    cache: AbstractCache, tokens: int, window: Any, mask: AbstractMask | None, heads: int
) -> int:
    """How many tokens before a new one the layer's window shows, or else the mask of the call.

    **Raises:** `ValueError` unless a cache that overwrites its oldest tokens still holds them when
    `tokens` have been appended. The first tokens that it keeps are held anyway.
    """
    capacity, first, rows = cache.key.shape[1], cache.keeps_first, len(cache.length)
    kind, size = type(cache).__name__, _size(capacity, first)
    if window is not None and window[0] is not None:
        least = first + window[0] + tokens
        if capacity < least:
            raise ValueError(
                f"{tokens} new tokens and the {window[0]} before each that window={window} shows "
                f"need a {kind} of {least}, got {size}; append fewer at a time."
            )
        return window[0]
    most = capacity - first - tokens
    if most < 0:
        return 0  # `append` says that they do not fit.
    shows = lambda distances, first: _show_beyond(mask, distances, rows, heads, first)
    if shows(np.array([most]), first).any():
        kept, sinks = (f"the first {first} and ", f", sinks={first}") if first else ("", "")
        raise ValueError(
            f"With {tokens} new tokens a {kind} of {size} holds {kept}the {most} before each, and "
            f"the mask may show older ones, which are overwritten{_needed(shows, most, tokens)}: "
            f"add a window such as SlidingWindow({most}, 0{sinks}) to the mask, take a larger "
            "capacity or fewer tokens at a time, or a cache that keeps all tokens."
        )
    return _least_distance(lambda distances: shows(distances, first), most)


def _size(capacity: int, sinks: int) -> str:
    return f"{capacity} with sinks={sinks}" if sinks else f"{capacity}"


def _needed(shows: Callable[..., np.ndarray], most: int, tokens: int) -> str:
    """What a message says of the ring that holds all keys that a mask may show, if there is one. It
    shows keys that are more than `most` tokens before a new one.
    """
    far = 2**20
    exempt = lambda sinks: not shows(np.array([far]), sinks).any()
    sinks = bisect.bisect_left(range(1025), True, key=exempt)
    if sinks > 1024 or most >= far:
        return ""
    reach = _least_distance(lambda distances: shows(distances, sinks), far)
    return f" (all are in a RingBufferCache of {_size(sinks + reach + tokens, sinks)})"


def _least_distance(shows: Callable[[np.ndarray], np.ndarray], most: int) -> int:
    """The least distance beyond which nothing is shown, if that is so of `most`. Of 16 that are
    asked for at once, the search goes on between the last that shows something and the first that
    does not.
    """
    least = 0
    while least < most:
        tried = np.unique(np.linspace(least, most - 1, 16).astype(int))
        showing = int(shows(tried).sum())
        most = int(tried[showing]) if showing < len(tried) else most
        least = int(tried[showing - 1]) + 1 if showing else least
    return least


def _checked(cache: Cache, query: Array, reach: int) -> Cache:
    """A cache that raises when the program runs if it lacks tokens of the `reach` before the first
    `query`, whose position is int32 `[b]`. Newer tokens may have been written over what `truncate`
    would have to bring back, and over what a query at an older position sees.
    """
    length, held = cache.length, cache.positions
    assert held is not None  # Caches that overwrite have positions.
    first = jnp.clip(query - reach, 0, length)
    there = ((held >= first[:, None]) & (held < length[:, None])).sum(-1, dtype=jnp.int32)
    length = raise_if(
        length,
        there < length - first,
        f"The {type(cache).__name__} was truncated by more tokens than it can bring back, or "
        f"q_positions are too old: some of the {reach} tokens before the first query, which the "
        "layer's window or the mask shows, were overwritten. Append them again, or take a larger "
        "capacity.",
    )
    return eqx.tree_at(lambda c: c.length, cache, length)


class _Away(AbstractMask):
    """A mask in which `q` is how far the query is after the key."""

    mask: AbstractMask

    def operands(self) -> tuple[Operand, ...]:
        return self.mask.operands()

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return self.mask.visible(b, h, k + q, k, *ids)


def _show_beyond(
    mask: AbstractMask | None, distances: np.ndarray, rows: int, heads: int, first: int
) -> np.ndarray:
    """Whether a mask may show a key to a query that is more than some distance after it, bool
    `[n]` for each of `n` distances. The `first` keys are not asked about.

    The mask is classified over ranges of positions, so all queries from `distance + 1` to 2^29
    after a key are one range. Keys are tried one by one: the next 1024, those at the powers of two
    up to 2^20, and around the distances. These find a mask that exempts the first keys, or some in
    each chunk. A mask that treats only other keys differently is missed. A list may show any key.
    """
    if mask is None:
        return np.ones(len(distances), bool)
    keys = np.concatenate([2 ** np.arange(10, 21), distances, distances + 1])
    keys = np.concatenate([first + np.arange(1024), np.maximum(keys, first)])
    far = np.stack([distances + 1, np.full_like(distances, 2**29)], 1)
    away = map_terms(mask, lambda term: term if term.selects else _Away(term))
    each = keys.repeat(2).reshape(-1, 2)
    return np.logical_or.reduce(live_blocks(away, far, each, (rows,), heads, heads), axis=1)
