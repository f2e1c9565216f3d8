"""Which tokens each device of a ring holds."""

import abc
import dataclasses
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from .._jax import keeping_sharding
from .._misc import as_array, as_size, REACH


_X = TypeVar("_X")


class AbstractRingLayout(abc.ABC):
    """How the tokens of a sequence are spread over a ring of devices.

    The sequence is cut into `parts` equal chunks per device, and a layout says which device holds
    which chunks. An array whose tokens are in that order is sharded over the ring in equal,
    contiguous pieces.
    """

    parts: ClassVar[int]

    @abc.abstractmethod
    def chunks(self, n: int) -> np.ndarray:
        """Returns the chunks of each of `n` devices, `[n, parts]`, in their order there."""

    def in_order(self, n: int) -> bool:
        """Whether tokens stay where they are: device after device holds the chunks `0, 1, ...`."""
        return bool((self.chunks(n).reshape(-1) == np.arange(n * self.parts)).all())

    def positions(self, tokens: int, n: int) -> np.ndarray:
        """The positions of the tokens that each device holds.

        **Arguments:**

        - `tokens`: the length of the sequence.
        - `n`: the number of devices.

        **Returns:** int32 `[n, tokens // n]`.

        **Raises:** `ValueError` unless the chunks have equal lengths.
        """
        size = self.chunk_size(tokens, n)
        chunks = self.chunks(n)[..., None] * size + np.arange(size)
        return chunks.reshape(n, -1).astype(np.int32)

    def permute(self, x: _X, n: int, axis: int = 1) -> _X:
        """Brings the tokens of an array into the order of this layout.

        Do it once, in the data loader, to everything that has tokens: inputs, labels, segment
        ids, and the positions of a rotary embedding.

        **Arguments:**

        - `x`: an array, NumPy or JAX.
        - `n`: the number of devices.
        - `axis`: the axis of its tokens, by default that of `[b, t, ...]`.

        **Returns:** an array of the same kind and shape.

        **Raises:** `ValueError` unless the chunks have equal lengths.
        """
        return self._take(x, n, axis, self.chunks(as_size(n, "n")).reshape(-1))

    def unpermute(self, x: _X, n: int, axis: int = 1) -> _X:
        """Undoes `permute`. It has the same arguments."""
        return self._take(x, n, axis, np.argsort(self.chunks(as_size(n, "n")).reshape(-1)))

    def _take(self, x: Any, n: int, axis: int, order: np.ndarray) -> Any:
        """Brings the chunks of an array into an order."""
        x, axis = as_array(x, "x"), as_size(axis, "axis", -REACH)
        if not -x.ndim <= axis < x.ndim:
            raise ValueError(
                f"axis={axis} is none of an array {x.shape}: give that of its tokens, such as "
                "axis=0 for [t]."
            )
        size = self.chunk_size(x.shape[axis], n)
        axis %= x.ndim
        split = *x.shape[:axis], n * self.parts, size, *x.shape[axis + 1 :]
        if isinstance(x, np.ndarray):
            return x.reshape(split).take(order, axis).reshape(x.shape)
        move = lambda x: jnp.take(x.reshape(split), order, axis).reshape(x.shape)
        return keeping_sharding(move, x)

    def chunk_size(self, tokens: int, n: int) -> int:
        """Returns the number of tokens of a chunk.

        **Raises:** `ValueError` unless the chunks have equal lengths.
        """
        if as_size(n, "n", -REACH) < 1:
            raise ValueError(f"A ring has at least 1 device, got n={n}.")
        tokens = as_size(tokens, "tokens")
        if tokens % (n * self.parts):
            raise ValueError(
                f"{tokens} tokens are not {self.parts} equal chunks for each of {n} devices "
                f"({type(self).__name__}); pad them to a multiple of {n * self.parts}."
            )
        return tokens // (n * self.parts)

    def tokens(self, length: int, n: int) -> Int[Array, "1 {length}"]:
        """The positions `[1, length]` of the tokens of an array that holds the whole ring's."""
        if self.parts == 1 and self.in_order(n):
            return jnp.arange(length, dtype=jnp.int32)[None]
        size = self.chunk_size(length, n)
        chunks = jnp.asarray(self.chunks(n).reshape(-1, 1) * size, jnp.int32)
        return (chunks + jnp.arange(size, dtype=jnp.int32)[None]).reshape(1, length)

    def own_tokens(self, length: int, n: int, axis: str) -> Int[Array, "1 {length}"]:
        """The positions `[1, length]` of this device's tokens, where `axis` is manual."""
        size = self.chunk_size(length * n, n)
        mine = jnp.asarray(self.chunks(n) * size, jnp.int32)[lax.axis_index(axis)]
        return (mine[:, None] + jnp.arange(size, dtype=jnp.int32)[None]).reshape(1, length)


@dataclasses.dataclass(frozen=True)
class Contiguous(AbstractRingLayout):
    """Device `i` of `n` holds the `i`-th of `n` equal pieces: tokens stay where they are.

    This is right for windows and for attention without a causal mask. With a causal mask, the last
    device works about twice as much as the mean; see [`eqattn.Zigzag`][].
    """

    parts: ClassVar[int] = 1

    def chunks(self, n: int) -> np.ndarray:
        return np.arange(n)[:, None]


@dataclasses.dataclass(frozen=True)
class Zigzag(AbstractRingLayout):
    """Device `i` of `n` holds the chunks `i` and `2 n - 1 - i` of `2 n`.

    With a causal mask every device then works equally, at every hop. The tokens must be in this
    order, see `permute`.

    ??? cite "Reference"

        Known as zigzag, or as dual chunk swap, from ring-flash-attention and TransformerEngine.
    """

    parts: ClassVar[int] = 2

    def chunks(self, n: int) -> np.ndarray:
        return np.stack([np.arange(n), 2 * n - 1 - np.arange(n)], 1)


def ring_order(coordinates: np.ndarray) -> np.ndarray:
    """An order of the points of a full grid in which each is a neighbour of the next. If the grid
    has an even side, the last is a neighbour of the first, too.

    Pairs of axes are folded into one, along a path that goes back and forth, until two are left. In
    these, the path goes back and forth along all columns but the first, and home along the first.
    With 4 rows and 3 columns, the points come in this order, and 11 is beside 0:

        11   0 - 1
         |       |
        10   3 - 2
         |   |
         9   4 - 5
         |       |
         8 - 7 - 6

    **Arguments:**

    - `coordinates`: int `[n, dims]`, all points of a box.

    **Returns:** the indices of the points in that order, int `[n]`. Points that do not fill a grid
    stay in their order.
    """
    low = coordinates.min(0)
    sides = coordinates.max(0) - low + 1
    index = np.full(sides, -1)
    index[tuple((coordinates - low).T)] = np.arange(len(coordinates))
    if (index < 0).any():
        return np.arange(len(coordinates))
    path: Any = index.reshape(1, -1) if index.ndim == 1 else index
    for _ in range(path.ndim - 2):  # Folds two axes into one, by a path back and forth.
        path = np.moveaxis(path.copy(), 1, 0)
        path[1::2] = path[1::2][:, :, ::-1] if path.ndim > 2 else path[1::2, ::-1]
        path = np.moveaxis(path, 0, 1).reshape(path.shape[1], -1, *path.shape[3:])
    if path.shape[0] % 2:
        path = path.T
    rows, columns = path.shape
    if rows % 2 or columns == 1:
        snake = [row[::-1] if i % 2 else row for i, row in enumerate(path)]
        return np.concatenate(snake)
    snake = [row[:0:-1] if i % 2 else row[1:] for i, row in enumerate(path)]
    return np.concatenate([*snake, path[::-1, 0]])


def check_layout(layout: Any) -> None:
    """**Raises:** `TypeError` unless it is a layout."""
    if not isinstance(layout, AbstractRingLayout):
        raise TypeError(f"layout must be Contiguous(), Zigzag() or Balanced(...), got {layout!r}.")


def ring_mesh(axis_name: str = "sp", *, devices: Any = None) -> jax.sharding.Mesh:
    """A mesh of one axis whose consecutive devices are neighbours in the machine.

    **Arguments:**

    - `axis_name`: the name of the axis, by default that of `AttentionMetadata.sequence_axis_name`.
    - `devices`: the devices, by default all. Those with coordinates (TPUs) are ordered along a
        cycle through their grid, so that each hop of a ring crosses one link. Others stay in their
        order.

    **Returns:** a `Mesh` with one axis of type `Auto`.

    **Raises:** `TypeError` if `axis_name` is not a string.
    """
    if not isinstance(axis_name, str):
        raise TypeError(
            f"axis_name must be a string, got {axis_name!r}; choose devices by "
            "ring_mesh(devices=jax.devices()[:n])."
        )
    devices = list(jax.devices() if devices is None else devices)
    coordinates: list[Any] = [getattr(d, "coords", None) for d in devices]
    if None not in coordinates and len(devices) > 1:
        cores = [getattr(d, "core_on_chip", 0) for d in devices]
        points = np.asarray([(*c, i) for c, i in zip(coordinates, cores)])
        points = points[:, np.ptp(points, 0) > 0]
        devices = [devices[i] for i in ring_order(points)]
    kind = (jax.sharding.AxisType.Auto,)
    return jax.sharding.Mesh(np.asarray(devices), (axis_name,), axis_types=kind)
