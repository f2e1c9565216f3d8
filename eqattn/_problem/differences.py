"""What a mask or a score reads at the difference of two positions, in the windows of blocks."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._pairs import Operand
from .._sweep.differences import along_diagonals, cut_diagonals, padded, window_size
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
        Queries that pad the block read what the last query reads, as they stand where it does.

        **Returns:** `[keys, rows]`.
        """
        queries, last = blocking.block_q, None
        start = (row - column).reshape(()) + np.int32(self.first)
        if blocking.queries % queries:
            last = jnp.clip(np.int32(blocking.queries - 1) - row.reshape(()), 0, queries - 1)
        return cut_diagonals(x, start, last, blocking.block_k, queries, blocking.group)


class Differences(Operand):
    """An operand that varies with query and key only by the difference of their positions, which
    count up.

    **Arguments:**

    - `array`: `[B|1, H|1, T + S - 1]`, in the order of the differences. The first number is that of
        the first query and the last key.
    """

    axes: str = eqx.field(static=True, default="ts")

    @property
    def of_pairs(self) -> bool:
        return False

    def diagonals(self, role: str, blocking: Blocking) -> Diagonals:
        """The numbers as they are, for code that can cut a window where it visits a block. A long
        sequence has many more windows than these.
        """
        keys, queries = blocking.block_k, blocking.block_q
        more = blocking.rows * blocking.block_q - blocking.queries + queries
        least = blocking.columns * blocking.block_k - blocking.keys + keys
        whole = jnp.pad(self.array, ((0, 0), (0, 0), (least, more)), mode="edge")
        axes, sizes, group = self._lead(blocking)
        whole = whole.reshape(*sizes, group, -1)
        return Diagonals(role, whole, axes, first=blocking.keys + least - keys)

    def windows(self, role: str, blocking: Blocking) -> Windows:
        """The windows of all blocks. They overlap, so that there are about `2 / block` numbers for
        each pair of query and key.
        """
        keys, queries, count = blocking.block_k, blocking.block_q, self.array.shape[2]
        rows, columns = np.mgrid[: blocking.rows, : blocking.columns]
        starts = rows * queries - columns * keys + blocking.keys - padded(keys)
        size, least = window_size(keys, queries), min(int(starts.min()), 0)
        # Queries of the padding have no cotangent, but a score must be finite for them, too.
        more = max(int(starts.max()) + size - count, 0)
        whole = jnp.pad(self.array, ((0, 0), (0, 0), (-least, more)), mode="edge")
        cut = lambda start: lax.dynamic_slice_in_dim(whole, start, size, axis=-1)
        found = jax.vmap(cut)(jnp.asarray((starts - least).reshape(-1), jnp.int32))
        axes, sizes, group = self._lead(blocking)
        found = jnp.moveaxis(found.reshape(*starts.shape, -1, group, size), 2, 0)
        return Windows(role, found.reshape(*sizes, *starts.shape, group, size), (*axes, ROW, COL))

    def _lead(self, blocking: Blocking) -> tuple[tuple[int, ...], list[int], int]:
        """The grid axes of batch and heads that the array varies on, their sizes, and the number of
        heads that blocks have.
        """
        b, h, _ = self.array.shape
        kv_heads, group = (1, 1) if h == 1 else (blocking.kv_heads, blocking.group)
        kept = [(a, n) for a, n in ((BATCH, b), (HEAD, kv_heads)) if n != 1]
        return tuple(a for a, _ in kept), [n for _, n in kept], group


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
