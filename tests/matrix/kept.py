"""How the keys and values of a case are kept: as arrays, as latents, in pages or in other caches.

The oracle's keys and values are a linear map of the library's arguments. `Kept.joined` is that map,
and `Kept.parted` is its transpose, which brings the oracle's gradients back.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from . import oracle_masks as om
from .cases import Case


PAGE = 4  # tokens
# Targets of caches that are filled as they are in use. Their arrays have one axis of rows.
FILLED = "cascade", "cascade_latent", "cascade_int8", "int8", "ring_buffer"


def rows_of(case: Case) -> tuple[int, ...]:
    """The batch axes of the arrays of a case."""
    lead = case["lead"]
    return (math.prod(lead),) if case["target"][0] in FILLED else lead


def is_cascade(case: Case) -> bool:
    return case["target"][0].startswith("cascade")


def offset_of(case: Case, given: int | None) -> int | None:
    """The position of the first query, where an axis gives one or none. The last tokens of a cache
    are the new ones, and they come after what rows share.
    """
    t, s = case["length"]
    if case["target"][0] not in FILLED:
        return given
    return max(s - t, 0) if given is None else min(given, s)


@dataclasses.dataclass(frozen=True)
class Kept:
    """**Arguments:**

    - `latent`: whether the library's `k` holds the rest of the keys, after the values `v`.
    - `quantized`: whether keys and values are kept in eight bits, so that they have no gradient.
    - `cache`: a cache without the new tokens, or None.
    - `counts`: how many tokens each row takes in each `append`, int32 `[appends, b]`.
    - `sizes`: with how many tokens each `append` is called.
    - `owner`: the row whose argument is read for each token of each row, `[b, s]`. Rows that share
        a page read that of the first of them.
    - `visible`: what the cache shows, for the oracle.
    - `levels`: those of a cascade.
    """

    latent: bool = False
    quantized: bool = False
    cache: Any = None
    counts: Any = None
    sizes: tuple[int, ...] = ()
    owner: Any = None
    visible: Any = None
    levels: int = 1

    def joined(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The oracle's arguments, or directions, of those of the library."""
        if "k" not in arguments:
            return arguments
        k, v = (np.asarray(arguments[n]) for n in "kv")
        k = np.concatenate([v, k], -1) if self.latent else k
        if self.owner is not None:
            at = self.owner, np.arange(self.owner.shape[1])
            k, v = k[at], v[at]
        return {**arguments, "k": k, "v": v}

    def parted(self, gradients: dict[str, Any], size: int, dtype: Any) -> dict[str, Any]:
        """The gradients of the library's arguments of those of the oracle's. A latent is an operand
        twice, of `size` numbers each, and each of both gradients has the `dtype` of it.
        """
        if self.quantized:
            return gradients
        k, v = gradients["k"], gradients["v"]
        if self.owner is not None:
            k, v = self._summed(k), self._summed(v)
        if self.latent:
            v = k[..., :size].rounded(dtype) + v.rounded(dtype)
            k = k[..., size:]
        return {**gradients, "k": k, "v": v}

    def _summed(self, x: Any) -> Any:
        """The sum over the rows that read an argument."""
        b, s, *shape = np.shape(x)
        read = (self.owner[:, None] == np.arange(b)[:, None])[..., None, None]
        return np.sum(np.where(read, np.reshape(x, (b, 1, s, *shape)), 0.0), axis=0)

    def filled(self, cache: Any, k: Any, v: Any) -> Any:
        """The cache of a cascade with all tokens before the new ones. What no row has in its pages is a
        number, which nothing reads.
        """
        s = k.shape[1]
        if not s:
            return cache
        table, old = np.asarray(self.cache.table), s - sum(self.sizes)
        pages = np.where(table < -1, -2 - table, table)
        # Which argument an entry of the pools is: [pages, page size] of rows and of tokens.
        row, token = (np.zeros((cache.key.content.shape[0], PAGE), int) for _ in range(2))
        for part in range(pages.shape[1]):
            for b in reversed(range(len(pages))):  # The first row that has a page comes last.
                at = part * PAGE + np.arange(PAGE)
                if pages[b, part] >= 0:
                    row[pages[b, part]] = np.where(at < old, b, 0)
                    token[pages[b, part]] = np.where(at < old, at, 0)
        pools = [x[row, token] for x in (k, v)]
        if self.quantized:
            from eqattn.cache import Quantized

            pools = [Quantized.quantize(x) for x in pools]
        return eqx.tree_at(lambda c: (c.key_pages, c.value_pages), cache, tuple(pools))

    def append(self, cache: Any, k: Any, v: Any) -> Any:
        """The cache with the last tokens of `k` and `v`, as many as `sizes` says."""
        first = k.shape[1] - sum(self.sizes)
        for size, counts in zip(self.sizes, self.counts, strict=True):
            new = slice(first, first + size)
            cache = cache.append(k[:, new], v[:, new], jnp.asarray(counts))
            first += size
        return cache


def kept(case: Case, rng, dtype, offset: int | None) -> Kept:
    """How the keys and values of a case are kept. A cascade's first query is at the `offset`."""
    name = case["target"][0]
    latent, quantized = name.endswith("latent"), name.endswith("int8")
    if is_cascade(case):
        of = shared_pages(case, rng, dtype, offset, quantized)
        return dataclasses.replace(of, latent=latent, quantized=quantized)
    if name in ("ring_buffer", "int8"):
        of = ring_buffer(case, rng, dtype) if name == "ring_buffer" else quantized_rows(case, dtype)
        return dataclasses.replace(of, quantized=quantized)
    cache = empty_pages(case, dtype) if name.startswith("paged") else None
    return Kept(latent=latent, cache=cache)


def numbers_of_eight_bits(rng, shape) -> np.ndarray:
    """Numbers that int8 holds exactly: of each vector, the largest is 127 times a power of two."""
    x = rng.integers(-127, 128, shape)
    x[..., 0] = rng.choice([-127, 127], shape[:-1])
    return x / 64


def _pages(case: Case, dtype, **sizes) -> Any:
    """A cache in pages that has no tokens, for the keys of a case."""
    from eqattn.cache import PagedKVCache

    (d, dv), (b,), s = case["dims"], rows_of(case), max(case["length"][1], 1)
    more = dict(page_size=PAGE, kv_heads=case["heads"][1], head_dim=d, value_dim=dv, dtype=dtype)
    return PagedKVCache.empty(b, s, **(more | sizes))


def empty_pages(case: Case, dtype) -> Any:
    """A cache in pages of 4 tokens, for as many tokens as there are. Rows have their pages in turns,
    so that those of a row lie apart.
    """
    (b,), s, devices = rows_of(case), case["length"][1], case["target"][1]
    cache = _pages(case, dtype, pages=b * s // PAGE, devices=devices, bits=False)
    for tokens in range(PAGE * devices, s + 1, PAGE * devices):
        cache = cache.reserve(tokens)
    return cache


def shared_pages(case: Case, rng, dtype, offset: int, quantized: bool) -> Kept:
    """Rows that begin with tokens of earlier rows, and go on after these. All have `offset` tokens,
    and then as many new ones as there is room for, or fewer.
    """
    (b,), (_, s) = rows_of(case), case["length"]
    parts = -(-max(s, 1) // PAGE)
    more = dict(stored=jnp.int8) if quantized else dict(bits=False)
    cache = _pages(case, dtype, pages=b * parts + 1, **more)

    def taken(cache, counts):
        cache = cache.reserve(counts)
        length = cache.length + jnp.asarray(counts, jnp.int32)
        return eqx.tree_at(lambda c: c.length, cache, length)

    for row in range(b):
        tokens = int(rng.choice([offset, offset, rng.integers(offset + 1)])) if row else 0
        if tokens:
            cache = cache.share(row, int(rng.integers(row)), tokens)
        cache = taken(cache, (offset - tokens) * (np.arange(b) == row))
    new = s - offset
    # Of a tree a row takes all tokens or none, so that it has the ancestors of those that it has.
    fewer = np.zeros(b, int) if case["mask"] == "tree" else rng.integers(0, new + 1, b)
    counts = np.where(rng.integers(2, size=b), new, fewer).astype(np.int32)
    cache = cache.reserve(counts)
    table = np.asarray(cache.table)
    table = np.where(table < -1, -2 - table, table)
    first = np.argmax(table[:, None] == table[None], 1)  # [b, parts], row 0 of those without one
    owner = np.where(table < 0, np.arange(b)[:, None], first)
    return Kept(
        cache=cache,
        counts=counts[None],
        sizes=(new,),
        owner=np.repeat(owner, PAGE, 1)[:, :s],
        visible=om.lengths(case["length"][0], s, offset + counts),
        levels=int(rng.integers(1, 4)),
    )


def quantized_rows(case: Case, dtype) -> Kept:
    """All tokens, in eight bits."""
    from eqattn.cache import QuantizedKVCache

    (d, dv), (b,), (t, s) = case["dims"], rows_of(case), case["length"]
    cache = QuantizedKVCache.empty(b, s, case["heads"][1], d, dv, dtype)
    counts = np.full((1, b), s, np.int32)
    return Kept(cache=cache, counts=counts, sizes=(s,), visible=om.lengths(t, s, counts[0]))


def ring_buffer(case: Case, rng, dtype) -> Kept:
    """The last tokens of rows of unequal length, and in some cases their first token."""
    from eqattn.cache import RingBufferCache

    (d, dv), (b,), (t, s) = case["dims"], rows_of(case), case["length"]
    capacity = max(1, -(-2 * s // 3))
    sinks = int(rng.integers(2)) if capacity > 1 else 0
    turn, heads = capacity - sinks, case["heads"][1]
    cache = RingBufferCache.empty(b, capacity, heads, d, dv, dtype, bits=False, sinks=sinks)
    length = np.where(rng.integers(2, size=b), s, rng.integers(0, s + 1, b))
    firsts = np.arange(0, s, turn)
    sizes = tuple(int(n) for n in np.minimum(turn, s - firsts))
    counts = np.clip(length - firsts[:, None], 0, np.array(sizes)[:, None]).astype(np.int32)
    last = om.lengths(t, s, length, np.maximum(length - turn, 0))
    return Kept(
        cache=cache,
        counts=counts,
        sizes=sizes,
        visible=last | om.lengths(t, s, np.minimum(length, sinks)),
    )
