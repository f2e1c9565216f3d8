"""Tokens of images and video: the order in which they lie, and attention to those nearby."""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from .._jax import keeping_sharding
from .._misc import as_array, as_flag, as_size, as_sizes, REACH
from .._pairs import Operand
from ._base import AbstractMask


_X = TypeVar("_X")


class TileOrder(eqx.Module):
    """An order of the tokens of an image or a video, tile by tile.

    Row by row, the tokens near a token are spread over as many blocks as the window has rows. If
    they lie tile by tile, and each tile row by row, they are in few blocks. Tiles come row by row,
    and those at an end may be smaller.

    **Arguments:**

    - `shape`: the numbers of tokens along each axis, such as `(height, width)` or
        `(time, height, width)`.
    - `tile`: those of a tile. None means that all tokens are one tile, so row by row.

    **Raises:** `ValueError` unless there are as many of both, all positive.
    """

    shape: tuple[int, ...] = eqx.field(static=True)
    tile: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, shape: Sequence[int], tile: Sequence[int] | None = None):
        self.shape = as_sizes(shape, "shape")
        self.tile = self.shape if tile is None else as_sizes(tile, "tile")
        if not self.shape or 0 in (*self.shape, *self.tile) or len(self.shape) != len(self.tile):
            raise ValueError(
                f"tile must have a positive size for each axis of shape {self.shape}, got "
                f"{self.tile}."
            )

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return math.prod(self.shape)

    @property
    def coordinates(self) -> Int[np.ndarray, "tokens axes"]:
        """The position of each token in this order: its index on each axis. These are positions for
        [`eqattn.nn.rotary`][] with `sections`.
        """
        places = np.arange(self.tokens, dtype=np.int32)
        return np.stack(self.coordinates_of(places), -1).astype(np.int32)

    def coordinates_of(self, places: Any) -> list[Any]:
        """The index on each axis of the tokens at places `0, 1, ...` of this order."""
        # After the tiles that come before on axis i, there are `tile[i]` or fewer rows left. What
        # is left of the axes before are the sizes of this tile there.
        rest, starts, sizes = places, [], []
        for i, (n, tile) in enumerate(zip(self.shape, self.tile)):
            tile = min(tile, n)
            slab = math.prod(sizes) * math.prod(self.shape[i + 1 :]) * tile
            start = rest // slab * tile
            rest = rest % slab
            left = n - start
            xp = np if isinstance(start, np.ndarray | np.integer) else jnp
            sizes.append(tile if n % tile == 0 else xp.minimum(left, tile))
            starts.append(start)
        inside = []
        for size in sizes[::-1]:
            inside.append(rest % size)
            rest = rest // size
        return [start + x for start, x in zip(starts, inside[::-1])]

    def permute(self, x: _X, axis: int = 1) -> _X:
        """Brings tokens that lie row by row into this order.

        Do it once to everything that has tokens: embeddings, labels and the positions of a rotary
        embedding.

        **Arguments:**

        - `x`: an array, NumPy or JAX.
        - `axis`: the axis of its tokens, by default that of `[b, t, ...]`.

        **Returns:** an array of the same kind and shape.

        **Raises:** `ValueError` unless `x` has as many tokens.
        """
        return self._take(x, axis, self._row_by_row())

    def unpermute(self, x: _X, axis: int = 1) -> _X:
        """Undoes `permute`. It has the same arguments."""
        return self._take(x, axis, np.argsort(self._row_by_row()))

    def _row_by_row(self) -> np.ndarray:
        """The place of each token of this order where tokens lie row by row."""
        return np.asarray(np.ravel_multi_index(tuple(self.coordinates.T), self.shape))

    def _take(self, x: Any, axis: int, order: np.ndarray) -> Any:
        x = x if isinstance(x, np.ndarray) else as_array(x, "x")  # whose dtype would change
        axis = as_size(axis, "axis", -REACH)
        if not -x.ndim <= axis < x.ndim or x.shape[axis] != self.tokens:
            raise ValueError(
                f"x {x.shape} must have the {self.tokens} tokens of {self.shape} on axis={axis}."
            )
        if isinstance(x, np.ndarray):
            return x.take(order, axis)
        return keeping_sharding(lambda x: jnp.take(x, order, axis), x)


class Neighbourhood(AbstractMask):
    """A token of an image or a video sees a window of tokens around it.

    The window has the same size for every query: at an end it is moved inwards. Queries and keys
    are at the places of one grid. Other places see nothing and nothing sees them, so combine it by
    `|` with a mask for other tokens.

    **Arguments:**

    - `grid`: the numbers of tokens along each axis, for tokens that lie row by row, or a
        [`eqattn.masks.TileOrder`][].
    - `window`: how many tokens a window has along each axis, an int or one for each axis. An even
        window has one more token before the query than after it.
    - `causal`: whether a window ends with the query instead, and is cut off at the start. It is a
        bool, or one for each axis, such as `(True, False, False)` for a video.

    **Raises:** `ValueError` for a window larger than the grid, or of other axes.

    ??? cite "Reference"

        Hassani et al., *Neighborhood Attention Transformer*, CVPR 2023 (arXiv:2204.07143). This is
        NATTEN's neighbourhood, without dilation.
    """

    grid: TileOrder
    window: tuple[int, ...] = eqx.field(static=True)
    causal: tuple[bool, ...] = eqx.field(static=True)

    by_place: ClassVar[bool] = True

    def __init__(self, grid: Any, window: Any, causal: Any = False):
        self.grid = grid if isinstance(grid, TileOrder) else TileOrder(grid)
        axes = len(self.grid.shape)
        each = lambda x: tuple(x) if isinstance(x, tuple | list) else (x,) * axes
        self.window = tuple(as_size(n, "window", 1) for n in each(window))
        self.causal = tuple(as_flag(x, "causal") for x in each(causal))
        fits = len(self.window) == len(self.causal) == axes
        if not fits or any(w > n for w, n in zip(self.window, self.grid.shape)):
            raise ValueError(
                f"window {self.window} and causal {self.causal} must be one for each axis of the "
                f"grid {self.grid.shape}, and no window larger than its axis."
            )

    def _first(self, places: Any) -> list[Any]:
        """The first index of the window on each axis, of queries at these places."""
        found = []
        known = isinstance(places, np.ndarray)
        at = zip(self.grid.coordinates_of(places), self.grid.shape, self.window, self.causal)
        for x, n, window, causal in at:
            if causal:
                found.append(x - (window - 1))
            else:
                found.append((np if known else jnp).clip(x - window // 2, 0, n - window))
        return found

    def at_places(self, q: Any, k: Any) -> AbstractMask:
        def inside(places, xs):
            xp = np if isinstance(places, np.ndarray) else jnp
            ok = (places >= 0) & (places < self.grid.tokens)
            return [xp.where(ok, x, np.int32(REACH)).astype(np.int32) for x in xs]

        rows = inside(q, self._first(q))
        # A key outside of the grid lies before all windows. The window of such a query lies after
        # all keys.
        columns = [-x for x in inside(k, [-x for x in self.grid.coordinates_of(k)])]
        return _Windows(tuple(rows), tuple(columns), self.window)

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        q, k = jnp.asarray(q), jnp.asarray(k)
        places = [(x >= 0) & (x < self.grid.tokens) for x in (q, k)]
        return _within(self._first(q), self.grid.coordinates_of(k), self.window) & (
            places[0] & places[1]
        )


class _Windows(AbstractMask):
    """A `Neighbourhood` of tokens whose places are known: what follows from these are its operands.

    **Arguments:**

    - `first`: the first index of each query's window, `[*b, t]` for each axis.
    - `keys`: the index of each key, `[*b, s]` for each axis.
    - `window`: the sizes of windows.
    """

    first: tuple[Any, ...]
    keys: tuple[Any, ...]
    window: tuple[int, ...] = eqx.field(static=True)

    operand_name: ClassVar[str] = "Neighbourhood"

    def operands(self) -> tuple[Operand, ...]:
        rows = tuple(Operand(x, "bt") for x in self.first)
        return rows + tuple(Operand(x, "bs") for x in self.keys)

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        axes = len(self.window)
        return _within(ids[:axes], ids[axes:], self.window)


def _within(first: Sequence[Any], keys: Sequence[Any], window: Sequence[int]) -> Any:
    """Whether a key is in a window on each axis."""
    each = [(low <= k) & (k < low + w) for low, k, w in zip(first, keys, window)]
    return functools.reduce(operator.and_, each)
