"""What a mask or a score reads at the difference of two positions, in the windows of blocks."""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._sweep.differences import along_diagonals, padded, window_size
from .._sweep.grid import BATCH, COL, HEAD, ROW
from .._sweep.lowering import Lowering
from .blocking import Blocking, BlockOperand
from .problem import Problem


@dataclasses.dataclass(frozen=True)
class Windows(BlockOperand):
    """An array whose blocks are windows `[group|1, window]`, see `along_diagonals`."""

    def on_rows(self, x: Array, blocking: Blocking) -> Array:
        return along_diagonals(x, blocking.block_k, blocking.block_q, blocking.group)


@dataclasses.dataclass(frozen=True)
class Diagonals(BlockOperand):
    """An array `[group|1, n]` with the numbers of all diagonals, of which each block cuts a window.

    **Arguments:**

    - `first`: where the window of the first query and the first key begins.
    """

    first: int = 0

    def at(self, x: Array, row: Array, column: Array, blocking: Blocking) -> Array:
        """What the block reads of `x`, whose first query and key are the tokens `row` and `column`.

        **Returns:** `[keys, rows]`.
        """
        keys, queries = blocking.block_k, blocking.block_q
        start = (row - column).reshape(()) + np.int32(self.first)
        window = lax.dynamic_slice_in_dim(x, start, window_size(keys, queries), axis=1)
        return along_diagonals(window, keys, queries, blocking.group)


class Differences(eqx.Module):
    """Numbers that vary with query and key only by the difference of their positions, which count
    up.

    **Arguments:**

    - `array`: `[B|1, H|1, T + S - 1]`, in the order of the differences. The first number is that of
        the first query and the last key.
    """

    array: Any

    axes: ClassVar[str] = "ts"
    feature_shape: ClassVar[tuple[int, ...]] = ()

    def diagonals(self, role: str, blocking: Blocking) -> Diagonals:
        """The numbers as they are, for code that can cut a window where it visits a block. A long
        sequence has many more windows than these.
        """
        b, h, count = self.array.shape
        keys, queries = padded(blocking.block_k), padded(blocking.block_q)
        # Pairs of the padding are hidden, so that 0 does as their number.
        more = blocking.rows * blocking.block_q - blocking.queries + queries
        least = blocking.columns * blocking.block_k - blocking.keys + keys
        whole = jnp.pad(self.array, ((0, 0), (0, 0), (least, more)))
        kv_heads, group = (1, 1) if h == 1 else (blocking.kv_heads, blocking.group)
        kept = {BATCH: b != 1, HEAD: kv_heads != 1}
        sizes = [n for n, keep in zip((b, kv_heads), kept.values()) if keep]
        axes = tuple(a for a, keep in kept.items() if keep)
        whole = whole.reshape(*sizes, group, -1)
        return Diagonals(role, whole, axes, first=blocking.keys + least - keys)

    def windows(self, role: str, blocking: Blocking) -> Windows:
        """The windows of all blocks. They overlap, so that there are about `2 / block` numbers for
        each pair of query and key.
        """
        b, h, count = self.array.shape
        keys, queries = blocking.block_k, blocking.block_q
        rows, columns = np.mgrid[: blocking.rows, : blocking.columns]
        starts = rows * queries - columns * keys + blocking.keys - padded(keys)
        size, least = window_size(keys, queries), min(int(starts.min()), 0)
        # Pairs of the padding are hidden, so that 0 does as their number.
        more = max(int(starts.max()) + size - count, 0)
        whole = jnp.pad(self.array, ((0, 0), (0, 0), (-least, more)))
        cut = lambda start: lax.dynamic_slice_in_dim(whole, start, size, axis=-1)
        found = jax.vmap(cut)(jnp.asarray((starts - least).reshape(-1), jnp.int32))
        kv_heads, group = (1, 1) if h == 1 else (blocking.kv_heads, blocking.group)
        found = found.reshape(*starts.shape, b, kv_heads, group, size)
        found = found.transpose(2, 3, 0, 1, 4, 5)
        kept = {BATCH: b != 1, HEAD: kv_heads != 1, ROW: True, COL: True}
        axes = tuple(a for a, keep in kept.items() if keep)
        sizes = [n for n, keep in zip(found.shape, kept.values()) if keep]
        return Windows(role, found.reshape(*sizes, group, size), axes)


def reads_differences(problem: Problem, blocking: Blocking, lowering: Lowering) -> bool:
    """Whether what depends on `q - k` becomes `Differences`. Positions must count up, and the
    problem of tokens that several devices share has positions of its own. Where bits are fixed,
    each pair looks up its own number, as what XLA computes for all differences may have other bits
    for other sizes. `counts_up` answers for calls, before their problem is known.
    """
    positions = problem.q_positions is None and problem.kv_positions is None
    apart = not (blocking.in_place or blocking.fixed)
    known = isinstance(blocking.queries, int) and isinstance(blocking.keys, int)
    return lowering.repeats_diagonals and positions and apart and known
