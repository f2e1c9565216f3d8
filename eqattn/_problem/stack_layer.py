"""The keys or values of one layer, where a cache has arrays of all layers."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from .._misc import even_block
from .storage import AbstractStored, as_stored, Pages


class StackLayer(AbstractStored):
    """Keys or values of one layer, in the arrays of all layers.

    A visit looks up the layer, and finds rows and tokens where they lie. So arrays that are sharded
    over rows or heads stay sharded.

    **Arguments:**

    - `stack`: keys or values of all layers, `[layers, b, s, k, d]`: an array or an
        [`eqattn.cache.AbstractStored`][] that is not `flat`.
    - `index`: which layer it is, int32.
    """

    stack: Any
    index: Int[Array, ""]

    @property
    def stored(self) -> AbstractStored:
        """The stack in the form in which it is stored."""
        return as_stored(self.stack)

    @property
    def arrays(self) -> tuple[Shaped[Array, "..."], ...]:
        """The arrays `[layers, b, s, k, ...]` of all layers."""
        return self.stored.arrays

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[1:]

    @property
    def dtype(self) -> Any:
        return self.stored.dtype

    @property
    def itemsize(self) -> int:
        return self.stored.itemsize

    @property
    def first(self) -> Any:
        first = self.stored.first
        return None if first is None else StackLayer(first, self.index)

    def decode(self, *arrays: Shaped[Array, "..."]) -> Float[Array, "..."]:
        return self.stored.decode(*arrays)

    def materialise(self) -> Float[Array, "b s k d"]:
        return self.decode(*[x[self.index] for x in self.arrays]).astype(self.dtype)

    def alone(self) -> AbstractStored:
        """A copy of the layer, in the form in which the stack is stored."""
        return with_arrays(self.stored, [x[self.index] for x in self.arrays])

    def pages(self) -> Pages:
        """The layer as pages, for code that reads no stacks. All layers are one pool. Row `b` of
        layer `l` has the pages from `(l * rows + b) * (s // size)` on.
        """
        layers, rows, s = self.stored.shape[:3]
        # The blocks of `Ragged(metadata, bitwise=True)` have 128 keys, whatever the capacity is.
        size = even_block(s, 128 if s % 128 == 0 else 256) or s
        each = jnp.arange(rows * (s // size), dtype=jnp.int32).reshape(rows, s // size)
        cut = lambda x: x.reshape(layers * each.size, size, *x.shape[3:])
        return Pages(with_arrays(self.stored, map(cut, self.arrays)), self.index * each.size + each)


def in_pages(x: Any) -> Any:
    """Keys or values, as pages if they are those of a layer of a stack."""
    return x.pages() if isinstance(x, StackLayer) else x


def with_arrays(held: AbstractStored, arrays: Iterable[Array]) -> Any:
    """The same form of the numbers that other arrays hold.

    **Raises:** `NotImplementedError` if its `arrays` are not leaves of this PyTree: what replaces
    them would be lost.
    """
    new = {id(x): y for x, y in zip(held.arrays, arrays, strict=True)}
    leaves, tree = jax.tree.flatten(held)
    if not new.keys() <= set(map(id, leaves)):
        raise NotImplementedError(
            f"The arrays of {type(held).__name__} are no fields of it, so that none can be written."
        )
    return jax.tree.unflatten(tree, [new.get(id(x), x) for x in leaves])
