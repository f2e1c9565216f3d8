"""The mask of tree-shaped drafts, for speculative decoding."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._misc import as_int, as_int32, eagerly, is_known, unwrap
from .._pairs import Operand
from ._base import AbstractMask, int_operand


class Tree(AbstractMask):
    """A mask for the tree-shaped drafts of speculative decoding.

    The draft tokens are at positions `start, ..., start + n - 1`. Each sees every key before
    `start`, itself and its ancestors. All other queries and keys are plain causal.

    Positions are places among the drafts. They say how far a draft is from its ancestors only in a
    chain, so that windows, ALiBi and rotary positions next to any other tree raise.

    **Arguments:**

    - `parents`: an int array `[n]` or `[*b, n]`, the index of each draft token's parent among the
        drafts, or -1 for a token without one.
    - `start`: the position of the first draft token: a Python int, which is static, or an int
        array, scalar or `[*b]`. The default is 0.

    **Raises:** `ValueError` if known `parents` are out of range or have a cycle.
    """

    parents: Any
    _start: Any
    _enter: Any
    _leave: Any

    def __init__(self, parents: Any, start: Any = 0):
        self.parents = as_int32(parents, "parents", least_ndim=1)
        self._start = as_int(start, "start", added=True)
        n = self.parents.shape[-1]
        if n == 0:
            raise ValueError("parents must name at least one draft token, got shape (0,).")
        known = is_known(self.parents)
        if known:
            _check_forest(np.asarray(self.parents))
        self._enter, self._leave = eagerly(
            _preorder, np.asarray(self.parents) if known else self.parents
        )

    @property
    def start(self) -> Any:
        return unwrap(self._start)

    @property
    def positions_are_distances(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the tree is known to be a chain, where a token's index is its depth."""
        n = self.parents.shape[-1]
        return is_known(self.parents) and bool(
            (np.asarray(self.parents) == np.arange(-1, n - 1)).all()
        )

    def operands(self) -> tuple[Operand, ...]:
        rows = np.arange(math.prod(self.parents.shape[:-1]), dtype=np.int32)
        return (Operand(rows.reshape(self.parents.shape[:-1]), "b"), *int_operand(self._start))

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        row, start = ids[0], ids[1] if len(ids) > 1 else self.start
        n = self.parents.shape[-1]
        enter, leave = (x.reshape(-1) for x in (self._enter, self._leave))

        def at(table, i):
            return jnp.asarray(table)[row * n + jnp.clip(i, 0, n - 1)]

        i, j = q - start, k - start
        both = (i >= 0) & (i < n) & (j >= 0) & (j < n)
        # In preorder, a token and its descendants are numbered from `enter` to before `leave`.
        descends = (at(enter, j) <= at(enter, i)) & (at(enter, i) < at(leave, j))
        return jnp.where(both, descends, k <= q)


def _check_forest(parents):
    n = parents.shape[-1]
    if (parents < -1).any() or (parents >= n).any():
        raise ValueError(f"parents must be -1 or an index below {n}, got {parents.tolist()}.")
    at = parents
    for _ in range(n):
        at = np.where(at < 0, -1, np.take_along_axis(parents, np.maximum(at, 0), -1))
    if (at >= 0).any():
        raise ValueError(f"parents must have no cycle, got {parents.tolist()}.")


def _preorder(xp, parents):
    """The numbers with which a depth-first walk enters and leaves each token, int32 `[*b, n]`.

    A walk that counts tokens as it enters them (preorder) visits each subtree in one go. So the
    tokens below `j`, itself included, are those with `enter[j] <= enter[i] < leave[j]`, where
    `leave[j] = enter[j] + size[j]` and `size` counts the tokens of a subtree. For the parents
    `[-1, 0, 0, 1]` of the tree 0 -> (1 -> 3, 2):

        token  0  1  2  3
        size   4  2  1  1
        enter  0  1  3  2
        leave  4  3  4  3

    Nothing here loops over tokens, so that `parents` may be traced. Squaring the relation "is its
    parent or itself" k times gives all ancestors up to 2^k above. Before a token, the walk enters
    its parent (one step) and the subtrees of older siblings (their sizes). The sum of such steps
    over the token and all its ancestors is `enter`.
    """
    n = parents.shape[-1]
    own = xp.arange(n, dtype=np.int32)
    own = own.reshape((1,) * (parents.ndim - 1) + (n,))
    above = (parents[..., :, None] == own[..., None, :]) | (own[..., :, None] == own[..., None, :])
    above = above.astype(np.int32)  # [token, ancestor or itself]
    for _ in range(max(n - 1, 1).bit_length()):
        above = (xp.matmul(above, above) > 0).astype(np.int32)
    size = above.sum(-2, dtype=np.int32)
    older = (parents[..., :, None] == parents[..., None, :]) & (
        own[..., None, :] < own[..., :, None]
    )
    step = xp.matmul(older.astype(np.int32), size[..., None])[..., 0]
    step = step + (parents >= 0).astype(np.int32)
    enter = xp.matmul(above, step[..., None])[..., 0]
    return enter, enter + size
