"""Blocks whose diagonals share a number, and sums of diagonals, beside a window of logits.

A *strip* is what the first `LANES` keys of a block have, over all of its diagonals. It is one roll
of equal rows, in which each row moves by one lane less than the row before. Further down and
further right by `LANES`, a block repeats itself. So it is put together from the square tiles of its
strip, of which there are 15 in a block of 1024 x 1024 numbers.

Each tile is a roll of its own, next to the window that needs it. Where tiles are transposed, the
units for transposes are the limit. So there one roll makes the strip, and no register is rolled
twice. With a roll for each tile, a step of `backward, T5 bias` in `python tests/measure tpu-report`
took 7% more cycles on v6e.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ..._sweep.differences import along_diagonals_p, padded, window_size
from ._products import LANES, SUBLANES
from ._sides import Sides
from ._windows import cut, size_of


class Diagonals(Sides):
    """The part of an `Evaluation` that knows numbers which the diagonals of a block share."""

    def shared(self, v: Any) -> bool:
        """Whether a value has one number for each diagonal, so that a factor costs nothing."""
        eqn = self.program.maker(v)
        return eqn is not None and eqn.primitive is along_diagonals_p

    def of_diagonals(self, eqn: Any) -> Array:
        """The whole result of an equation of diagonals."""
        if eqn.primitive is along_diagonals_p:
            return self.repeated_diagonals(eqn)
        return sums_of_diagonals(self.value(eqn.invars[0]), **eqn.params)

    def repeated_diagonals(self, eqn: Any, factor: float | None = None) -> Array:
        """The window of numbers that diagonals share, times a factor. It is whole without one."""
        whole = tuple(slice(0, n) for n in eqn.outvars[0].aval.shape)
        (at, to), found = self.window or whole, []
        turned = self.turned and self.window is not None
        for head, queries in _shares(to, eqn.params["queries"]):
            each = []
            for i, keys in _shares(at, LANES):
                first = padded(eqn.params["keys"]) - (i + 1) * LANES + queries.start
                columns = slice(first, first + size_of(queries))
                x = self._tiles(eqn, head, columns, turned, factor)
                each.append(x[:, keys] if turned else x[keys])
            found.append(_joined(each, int(turned)))
        return _joined(found, int(not turned))

    def _tiles(
        self, eqn: Any, head: int, columns: slice, turned: bool, factor: float | None
    ) -> Array:
        """Some columns of the strip of a head, `[LANES, columns]`, transposed if `turned`."""
        each = []
        for i, part in _shares(columns, LANES):
            tile = self._tile(eqn, head, i, turned, factor)
            each.append(tile[part] if turned else tile[:, part])
        return _joined(each, int(not turned))

    def _tile(self, eqn: Any, head: int, i: int, turned: bool, factor: float | None) -> Array:
        """Tile number `i` of the strip of a head, `[LANES, LANES]`, transposed if `turned`. It is
        made once for a block.
        """
        head = min(head, eqn.invars[0].aval.shape[0] - 1)
        key = "tile", eqn.outvars[0], head, i, turned, factor
        if key not in self.done:
            x = self.value(eqn.invars[0])[head : head + 1]
            x = x if factor is None else x * factor
            part = slice(i * LANES, (i + 1) * LANES)
            if turned:
                strip = "strip", *key[1:3], factor
                if strip not in self.done:
                    self.done[strip] = _rolled(x)
                self.done[key] = self.done[strip][:, part].T
            else:
                self.done[key] = _rolled(x[:, part.start : part.stop + LANES])[:, :LANES]
        return self.done[key]


def _rolled(x: Array) -> Array:
    """The strip of a window `[1, n]`, whose last `LANES` columns have no meaning."""
    rows = jnp.broadcast_to(x, (LANES, x.shape[1]))
    return pltpu.roll(rows, x.shape[1] - LANES + 1, 1, stride=1, stride_axis=0)


def _shares(part: slice, size: int) -> Iterator[tuple[int, slice]]:
    """The shares of this size that a part of an axis lies in, each with what lies in it. The shares
    of rows, for example, are those of heads.
    """
    for i in range(part.start // size, -(-part.stop // size)):
        yield i, slice(max(part.start - i * size, 0), min(part.stop - i * size, size))


def _joined(xs: Sequence[Array], axis: int) -> Array:
    return xs[0] if len(xs) == 1 else jnp.concatenate(xs, axis)


def sums_of_diagonals(x: Array, *, keys: int, queries: int, heads: int, windows: int) -> Array:
    """The sums of the diagonals of a block `[keys, heads * queries]`, as windows
    `[windows, window]`. With one window, they are those of all heads.
    """
    sides = padded(keys), padded(queries)
    blocks = [x[:, part] for part in cut(0, heads * queries, queries)]
    if windows == 1:
        blocks = [sum(blocks[1:], blocks[0])]
    found = []
    for block in blocks:
        for axis, n in enumerate(sides):
            if more := n - block.shape[axis]:
                shape = (more, block.shape[1]) if axis == 0 else (block.shape[0], more)
                block = jnp.concatenate([block, jnp.zeros(shape, block.dtype)], axis)
        found.append(_sums(_strip_of(block, window_size(keys, queries))))
    return _joined(found, 0)


def _strip_of(block: Array, size: int) -> Array:
    """The sums of a block's parts that are the same part of its strip."""
    keys, queries = block.shape
    found: list = [None] * (size // LANES)
    for at in cut(0, keys, LANES):
        for to in cut(0, queries, LANES):
            i = (keys - LANES - at.start + to.start) // LANES
            part = block[at, to]
            found[i] = part if found[i] is None else found[i] + part
    zeros = jnp.zeros((LANES, LANES), block.dtype)
    return jnp.concatenate([zeros if x is None else x for x in found], 1)


def _sums(strip: Array) -> Array:
    """The sums of the diagonals of a strip. Its rows are cut into halves, which are added, until
    one row is left. Before, the upper half is moved by as many lanes as it has rows.
    """
    n = strip.shape[0]
    while n > SUBLANES:
        n //= 2
        strip = strip[n:] + pltpu.roll(strip[:n], n, 1)
    while n > 1:
        n //= 2
        strip = pltpu.roll(strip, SUBLANES - n, 0) + pltpu.roll(strip, n, 1)
    return strip[:1]
