"""The masks of the matrix. Each is a function of a draw that returns the mask as the library makes it
and, written apart in NumPy, the `[B|1, H|1, T, S]` booleans that it shows (`oracle_masks.py`).

A new mask is one more function here: the axis `mask` of `cases.py` has them all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from eqattn import masks as m

from . import oracle_masks as om


# The sizes of listed blocks that are visited where they lie, however small they are.
VISITED = (6, 8)


@dataclasses.dataclass(frozen=True)
class Draw:
    """What a mask is made of.

    **Arguments:**

    - `lead`, `h`, `kv`, `t`, `s`: the leading axes, heads, key heads, queries and keys of the call.
    - `offset`: the position of the first query.
    - `visited`: whether a list is one of blocks that are visited where they lie.
    """

    rng: np.random.Generator
    lead: tuple[int, ...]
    h: int
    kv: int
    t: int
    s: int
    offset: int
    visited: bool

    @property
    def b(self) -> int:
        return int(np.prod(self.lead))

    def per_batch(self, low: int, high: int) -> tuple[Any, np.ndarray]:
        x = self.rng.integers(low, high, self.lead, dtype=np.int32)
        return jnp.asarray(x), x.reshape(self.b)

    def ids(self, n: int) -> tuple[Any, np.ndarray]:
        x = np.sort(self.rng.integers(-1, 3, (*self.lead, n)), -1).astype(np.int32)
        return jnp.asarray(x), x.reshape(self.b, n)


MASKS: dict[str, Callable[[Draw], tuple[Any, Any]]] = {}
RARE: list[str] = []  # only the 3-wise array has these: what they add is in other tests, too


def mask(fn: Callable, *, rare: bool = False) -> Callable:
    """Puts a mask on the axis, under the name of its function."""
    name = fn.__name__.removesuffix("_")
    MASKS[name] = fn
    if rare:
        RARE.append(name)
    return fn


rare = functools.partial(mask, rare=True)


@mask
def none(d: Draw):
    return None, None


@mask
def causal(d: Draw):
    return m.Causal(), om.causal(d.t, d.s, 0, d.offset)


@rare
def causal_offset(d: Draw):
    shift = d.s - d.t if d.s != d.t else 2
    return m.Causal(shift), om.causal(d.t, d.s, shift, d.offset)


@mask
def window(d: Draw):
    return m.SlidingWindow(5, 2), om.window(d.t, d.s, 5, 2, 0, d.offset)


@mask
def window_sinks(d: Draw):
    return m.SlidingWindow(3, 1, sinks=2), om.window(d.t, d.s, 3, 1, 2, d.offset)


@mask
def segments(d: Draw):
    (q_ids, q_plain), (kv_ids, kv_plain) = d.ids(d.t), d.ids(d.s)
    return m.Segments(q_ids, kv_ids), om.segments(q_plain, kv_plain)


@mask
def lengths(d: Draw):
    ends, plain = d.per_batch(0, d.s + 1)
    return m.KeyPadding(ends), om.lengths(d.t, d.s, plain)


@rare
def starts(d: Draw):
    (starts, low), (ends, high) = d.per_batch(0, d.s // 2 + 1), d.per_batch(d.s // 2, d.s + 1)
    return m.KeyPadding(ends, starts), om.lengths(d.t, d.s, high, low)


@mask
def prefix(d: Draw):
    prefix, plain = d.per_batch(0, d.s // 2 + 1)
    return m.PrefixLM(prefix), om.prefix_lm(d.t, d.s, plain, d.offset)


@mask
def block_causal(d: Draw):
    return m.BlockCausal(4), om.block_causal(d.t, d.s, 4, d.offset)


@mask
def chunked_causal(d: Draw):
    return m.ChunkedCausal(5), om.chunked_causal(d.t, d.s, 5, d.offset)


@mask
def tree(d: Draw):
    parents = tree_of(d.t, d.rng)
    return m.Tree(jnp.asarray(parents), start=d.s - d.t), om.tree(d.t, d.s, parents, d.s - d.t)


@mask
def selected(d: Draw):
    # A list for each head and query, or of blocks, for each head and query or for blocks of
    # queries and all heads or each.
    forms = (
        (d.h, 1, 1),
        (1, 3, 4),
        (d.h, d.t, 3),
        (d.h, 1, VISITED[1]),
        (1, *VISITED),
        (d.kv, *VISITED),
    )
    forms = forms[3:] if d.visited else forms
    all_heads, block_q, block_k = forms[int(d.rng.integers(len(forms)))]
    blocks = -(-d.s // block_k)
    shape = (*d.lead, all_heads, -(-d.t // block_q), min(blocks, 5))
    listed = d.rng.integers(-1, blocks, shape, dtype=np.int32)
    plain = om.selected(d.t, d.s, listed.reshape(d.b, *shape[-3:]), block_q, block_k)
    if all_heads == d.kv:  # the query heads of a key head have its list
        plain = np.repeat(plain, d.h // d.kv, 1)
    mask = m.Selected(jnp.asarray(listed), block_q, block_k)
    if d.rng.integers(2):
        return m.Causal() & mask, plain & om.causal(d.t, d.s, 0, d.offset)
    return m.SlidingWindow(1, 0) | mask, plain | om.window(d.t, d.s, 1, 0, 0, d.offset)


@rare
def neighbourhood(d: Draw):
    shape, tile, window = (max(d.s // 5, 3), 5), (2, 3), (3, 3)
    mask = m.Neighbourhood(m.TileOrder(shape, tile), window)
    return mask, om.neighbourhood(d.t, d.s, shape, tile, window, d.offset)


@rare
def queries(d: Draw):
    ends, plain = d.per_batch(0, d.t + 1)
    return m.QueryPadding(ends), om.query_lengths(d.t, d.s, plain, d.offset)


@rare
def function(d: Draw):
    shown = lambda b, h, q, k: (3 * q + k + b + 2 * h) % 5 > 1
    return m.MaskFn(shown), om.function(d.b, d.h, d.t, d.s, d.offset)


@rare
def table(d: Draw):
    seen = d.rng.random((4, 5)) < 0.6
    mask = m.MaskFn(functools.partial(seen_in, jnp.asarray(seen)))
    return mask, om.of_places(d.t, d.s, seen, (5, 4), d.offset)


@mask
def dense(d: Draw):
    x = d.rng.random((*d.lead, d.h, d.t, d.s)) < 0.6
    return m.Dense(jnp.asarray(x)), x.reshape(d.b, d.h, d.t, d.s)


@rare
def array(d: Draw):
    x = d.rng.random((*d.lead, 1, d.t, d.s)) < 0.6
    return jnp.asarray(x), x.reshape(d.b, 1, d.t, d.s)


@mask
def and_(d: Draw):
    (q_ids, q_plain), (kv_ids, kv_plain) = d.ids(d.t), d.ids(d.s)
    ends, plain = d.per_batch(0, d.s + 1)
    mask = m.Causal() & m.Segments(q_ids, kv_ids) & m.KeyPadding(ends)
    return mask, om.causal(d.t, d.s, 0, d.offset) & om.segments(q_plain, kv_plain) & om.lengths(
        d.t, d.s, plain
    )


@mask
def or_(d: Draw):
    ends, plain = d.per_batch(0, d.s + 1)
    return m.SlidingWindow(2, 0) | m.KeyPadding(ends), om.window(
        d.t, d.s, 2, 0, 0, d.offset
    ) | om.lengths(d.t, d.s, plain)


@mask
def not_(d: Draw):
    mask = ~m.SlidingWindow(2, 1) & m.BlockCausal(8)
    return mask, ~om.window(d.t, d.s, 2, 1, 0, d.offset) & om.block_causal(d.t, d.s, 8, d.offset)


def seen_in(table, b, h, q, k):
    return table[q // 5, k // 4]


def tree_of(n: int, rng) -> np.ndarray:
    """The parents of a random forest, whose nodes stand in any order."""
    parents = np.array([rng.integers(-1, i) if i else -1 for i in range(n)], np.int32)
    at = rng.permutation(n).astype(np.int32)
    shuffled = np.empty(n, np.int32)
    shuffled[at] = np.where(parents < 0, -1, at[parents])
    return shuffled
