"""The oracle's own description of every named mask and positional score: dense NumPy arrays,
written from the contract.

Every mask is `[B|1, H|1, T, S]` bool. `q` and `k` are the positions of rows and columns.
"""

from __future__ import annotations

import itertools

import numpy as np


def grid(t: int, s: int, offset: int = 0):
    """Query and key positions, `[T,1]` and `[1,S]`."""
    return np.arange(t)[:, None] + offset, np.arange(s)[None, :]


def _dense(x) -> np.ndarray:
    return np.asarray(x)[None, None]


def causal(t, s, offset=0, q_offset=0):
    q, k = grid(t, s, q_offset)
    return _dense(k <= q + offset)


def window(t, s, left, right, sinks=0, q_offset=0):
    """Visible iff `-right <= q - k <= left`, or the key is one of the first `sinks`."""
    q, k = grid(t, s, q_offset)
    return _dense(((q - k <= left) & (q - k >= -right)) | (k < sinks))


def segments(q_ids, kv_ids):
    """`q_ids [B,T]`, `kv_ids [B,S]`: equal and not padding (id < 0)."""
    q_ids, kv_ids = np.asarray(q_ids)[:, :, None], np.asarray(kv_ids)[:, None, :]
    return ((q_ids == kv_ids) & (q_ids >= 0) & (kv_ids >= 0))[:, None]


def lengths(t, s, ends, starts=0):
    """`ends`, `starts` `[B]`: `starts <= k < ends`."""
    ends, starts = np.reshape(ends, (-1, 1)), np.reshape(starts, (-1, 1))
    k = np.arange(s)[None]
    return np.broadcast_to(
        ((k >= starts) & (k < ends))[:, None, None], (max(len(ends), len(starts)), 1, t, s)
    )


def prefix_lm(t, s, prefix, q_offset=0):
    """`prefix` `[B]`: causal, and every row sees the first `prefix` keys."""
    q, k = grid(t, s, q_offset)
    return ((k <= q)[None] | (k[None] < np.reshape(prefix, (-1, 1, 1))))[:, None]


def block_causal(t, s, size, q_offset=0):
    q, k = grid(t, s, q_offset)
    return _dense(k // size <= q // size)


def chunked_causal(t, s, size, q_offset=0):
    q, k = grid(t, s, q_offset)
    return _dense((k // size == q // size) & (k <= q))


def tree(t, s, parents, start):
    """Row `i` is node `i` at key `start + i`; it sees the keys before `start`, itself and its
    ancestors.
    """
    visible = np.zeros((t, s), bool)
    visible[:, :start] = True
    for row in range(t):
        node = row
        while node >= 0:
            visible[row, start + node] = True
            node = int(parents[node])
    return _dense(visible)


def selected(t, s, listed, block_q, block_k):
    """`listed` `[B, H|1, rows, n]`: row `i // block_q` lists the block `j // block_k`."""
    listed = np.asarray(listed)
    visible = np.zeros((*listed.shape[:2], t, s), bool)
    for i in range(t):
        for j in range(s):
            visible[:, :, i, j] = (listed[:, :, i // block_q] == j // block_k).any(-1)
    return visible


def neighbourhood(t, s, shape, tile, window, q_offset=0):
    """Row `i` is at place `i + q_offset`, column `j` at place `j` of a grid whose tokens lie tile by
    tile. A window is around its query, or begins or ends with the grid.
    """
    corners = itertools.product(*(range(0, n, m) for n, m in zip(shape, tile)))
    places = []
    for corner in corners:
        inside = (range(a, min(a + m, n)) for a, m, n in zip(corner, tile, shape))
        places += list(itertools.product(*inside))
    visible = np.zeros((t, s), bool)
    for i, j in itertools.product(range(t), range(s)):
        if max(i + q_offset, j) < len(places):
            pairs = zip(places[i + q_offset], places[j], shape, window)
            visible[i, j] = all(0 <= y - min(max(x - w // 2, 0), n - w) < w for x, y, n, w in pairs)
    return _dense(visible)


def tree_positions(t, s, parents, start):
    """Of rows `[T,1]` and of keys `[1,S]`: a node is one below its parent, a root at `start`."""

    def depth(node):
        above = int(parents[node])
        return 0 if above < 0 else 1 + depth(above)

    nodes = [start + depth(node) for node in range(t)]
    return np.array(nodes)[:, None], np.array([*range(start), *nodes])[None, :s]


def distance(t, s, q_offset=0, at=None):
    """ALiBi subtracts `slope * |q - k|`. `at` are other positions than those of `grid`."""
    q, k = at or grid(t, s, q_offset)
    return np.abs(q - k).astype(np.float64)


def clipped_difference(t, s, size, q_offset=0, at=None):
    """The entry of a table of this size that a pair reads: its middle is for equal positions."""
    q, k = at or grid(t, s, q_offset)
    return np.clip((q - k).astype(int) + size // 2, 0, size - 1)


def t5_bucket(t, s, buckets, bidirectional=True, max_distance=128, q_offset=0, at=None):
    """T5's relative position buckets of all pairs."""
    q, k = at or grid(t, s, q_offset)
    return t5_bucket_of(k - q, buckets, bidirectional, max_distance)


def t5_bucket_of(relative, buckets, bidirectional, max_distance):
    """The bucket of `k - q`, in integers: the logarithm is never rounded.

    `floor(log(n / exact) / log(max_distance / exact) * (buckets - exact))` is the number of `j >=
    1` with `n^r exact^j >= max_distance^j exact^r`, where `r = buckets - exact`.
    """
    relative = relative.astype(int)
    if bidirectional:
        buckets //= 2
        base = np.where(relative > 0, buckets, 0)
        n = np.abs(relative)
    else:
        base = np.zeros_like(relative)
        n = np.maximum(-relative, 0)
    exact = buckets // 2
    rest = buckets - exact

    def one(n: int) -> int:
        if n < exact:
            return n
        steps = sum(n**rest * exact**j >= max_distance**j * exact**rest for j in range(1, rest))
        return exact + steps

    known = np.array([one(i) for i in range(int(n.max(initial=0)) + 1)])
    return base + known[n]


def query_lengths(t, s, ends, offset):
    """[b, 1, t, s]: the queries before the end of their batch element see all keys."""
    q, _ = grid(t, s, offset)
    return np.broadcast_to((q < np.asarray(ends)[:, None, None])[:, None], (len(ends), 1, t, s))


def function(b, h, t, s, offset):
    """[b, h, t, s]: a function of batch element, head, query and key."""
    q, k = grid(t, s, offset)
    of_rows = np.arange(b)[:, None, None, None] + 2 * np.arange(h)[:, None, None]
    return (3 * q + k + of_rows) % 5 > 1


def of_places(t, s, table, by, q_offset=0, at=None):
    """What each pair reads in a table, where so many queries and so many keys share a place. Pairs
    outside of the table read its edge.
    """
    places = zip(at or grid(t, s, q_offset), by, table.shape)
    q, k = (np.clip(x.astype(int) // n, 0, size - 1) for x, n, size in places)
    return table[q, k]
