"""The mask of tokens that branch: drafts of speculative decoding, completions of one prompt."""

import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from .._jax import sharding_of, without_explicit_axes
from .._misc import as_int, as_int32, concrete, eagerly, int32, iota, is_known, Static, unwrap
from .._pairs import Operand
from ._base import AbstractMask, int_operand


class Tree(AbstractMask):
    """A mask for tokens that branch, such as tree-shaped drafts or many completions of one prompt.

    The tokens of the tree lie at the places `start, ..., start + n - 1`. Each sees every key before
    `start`, itself and its ancestors. All other queries and keys are plain causal. There may be
    several roots, and a parent may lie after its children.

    A tree changes the positions that other masks, scores, dropout and the rotary positions of a
    layer see. They see how deep a token is, `start` for a root, and not where it lies. So each path
    gets what it would get alone, as one sequence.

    **Arguments:**

    - `parents`: an int array `[n]` or `[*b, n]`, the index of each token's parent in the tree, or
        -1 for a root.
    - `start`: the place of the first token of the tree: a Python int, which is static, or an int
        array, scalar or `[*b]`. The default is 0. Where a call gives positions, it is the position
        that this token has there, also in a ring. It is at least 0, as nothing lies before the
        first token of a sequence; add a number to all positions where they begin below.

    Most blocks are skipped where each token comes right before its descendants (a preorder). Any
    other order gives the same results.

    A call may have fewer tokens than the tree, as when it grows level by level.

    Make a new `Tree` for other parents. Replacing `parents` in one, as by `eqx.tree_at`, does not
    change who sees whom, as the tree keeps numbers that were computed from them.

    **Raises:** `ValueError` if known `parents` are out of range or have a cycle.
    """

    parents: Any
    _start: Any
    _enter: Any
    _leave: Any

    by_place: ClassVar[bool] = True
    moves_positions: ClassVar[bool] = True

    def __init__(self, parents: Any, start: Any = 0):
        self.parents = as_int32(parents, "parents", least_ndim=1)
        self._start = as_int(start, "start", least=0, added=True)
        n = self.parents.shape[-1]
        if n == 0:
            raise ValueError("parents must name at least one token, got shape (0,).")
        if not is_known(self.parents):
            self._enter, self._leave, _ = eagerly(_sharded_preorder, self.parents)
            return
        known = np.asarray(self.parents)
        wrong = np.argwhere((known < -1) | (known >= n))
        if len(wrong):
            at = tuple(wrong[0].tolist())
            raise ValueError(
                f"parents must be -1 or an index below {n}, got {known[at]} at {list(at)} of "
                f"{known.shape}."
            )
        self._enter, self._leave, lost = _preorder(np, known)
        if lost.any():
            at = np.argwhere(lost)[0].tolist()
            raise ValueError(
                f"parents must have no cycle: from the token at {at} of {known.shape}, they lead "
                f"to no root. A root's parent is -1."
            )

    @property
    def start(self) -> Any:
        return unwrap(self._start)

    @property
    def depths(self) -> Int[Array | np.ndarray, "*b n"]:
        """How many ancestors each token has, int32 `[n]` or `[*b, n]`."""
        return _depths(np if isinstance(self._enter, np.ndarray) else jnp, *self._walk())

    def _walk(self) -> tuple[Any, Any]:
        """The numbers by `_preorder`, int32 `[*b, n]`, as NumPy's where these are known."""
        known = [concrete(x) for x in (self._enter, self._leave)]
        return (self._enter, self._leave) if known[0] is None else (known[0], known[1])

    def positions_of(self, places: Any) -> Any:
        """How deep the tokens at these places are, counted from `start`: `start` for a root. Places
        outside of the tree stay as they are.

        **Arguments:**

        - `places`: int32 `[n]` or `[*b, n]`.
        """
        places = as_int32(places, "places", least_ndim=1)
        places, inside, start, depth = self._looked_up(places, self.depths)
        xp = np if all(isinstance(x, np.ndarray) for x in (depth, inside)) else jnp
        return xp.where(inside, start + depth, places)

    def trunk(self) -> Any:
        return self.start

    def at_places(self, q: Any, k: Any) -> AbstractMask:
        walk = self._walk()
        q_first, q_last, _, _ = _numbers(*self._looked_up(q, *walk))
        _, _, k_low, k_high = _numbers(*self._looked_up(k, *walk))
        return _TreeAtPlaces(q_first, q_last, k_low, k_high)

    def of_rows(self, row: Int[Array, " n"]) -> AbstractMask:
        take = lambda x, ndim: jnp.asarray(x)[row] if jnp.ndim(x) > ndim else x
        start = self._start
        new = take(self.parents, 1), take(self._enter, 1), take(self._leave, 1)
        new += (start if isinstance(start, Static) else take(start, 0),)
        return eqx.tree_at(lambda t: (t.parents, t._enter, t._leave, t._start), self, new)

    def _looked_up(self, places: Any, *tables: Any) -> list:
        """Some places `[*b, m]`, whether these are inside of the tree, its start, and the entries
        of tables `[*b, n]` there.
        """
        n, known = self.parents.shape[-1], concrete(self.start)
        start = (self.start if known is None else known.astype(np.int32))[..., None]
        arrays = places, start, *tables
        xp: Any = np if all(isinstance(x, np.ndarray) for x in arrays) else jnp
        lead = jnp.broadcast_shapes(*(x.shape[:-1] for x in arrays))
        places, start, *wide = (xp.broadcast_to(x, (*lead, x.shape[-1])) for x in arrays)
        index = places - start
        near = xp.clip(index, 0, n - 1)
        inside = (index >= 0) & (index < n)
        return [places, inside, start, *(xp.take_along_axis(x, near, -1) for x in wide)]

    def operands(self) -> tuple[Operand, ...]:
        lead = self.parents.shape[:-1]
        rows = iota(math.prod(lead))
        return (Operand(rows.reshape(lead), "b"), *int_operand(self._start))

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        row, start = ids[0], ids[1] if len(ids) > 1 else self.start
        n = self.parents.shape[-1]

        def numbers(place):
            at = row * n + jnp.clip(place - start, 0, n - 1)
            enter, leave = (jnp.asarray(x).reshape(-1)[at] for x in (self._enter, self._leave))
            inside = (place >= start) & (place < start + n)
            return _numbers(place, inside, jnp.int32(start), enter, leave)

        (first, last, _, _), (_, _, low, high) = numbers(q), numbers(k)
        return _sees(first, last, low, high)


class _TreeAtPlaces(AbstractMask):
    """A `Tree` for tokens whose places are known: what it looks up there are its operands.

    **Arguments:** what `_numbers` returns, of the queries `[*b, t]` and of the keys `[*b, s]`.
    """

    q_first: Any
    q_last: Any
    k_low: Any
    k_high: Any

    operand_name: ClassVar[str] = "Tree"

    def operands(self) -> tuple[Operand, ...]:
        rows = (Operand(x, "bt") for x in (self.q_first, self.q_last))
        return (*rows, Operand(self.k_low, "bs"), Operand(self.k_high, "bs"))

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return _sees(*ids)


_NEVER = np.int32(2**31 - 1)


def _numbers(place: Any, inside: Any, start: Any, enter: Any, leave: Any) -> tuple:
    """The numbers by which `_sees` tells who sees whom, those of a query and then those of a key.

    All tokens are one walk: those before the tree are entered at their place and never left, those
    of the tree at `start + enter`. What the walk enters until it leaves a token, sees the token:

        low <= entered < high.

    A query after the tree sees all of it, however early its tokens were left. So a query has two
    numbers: the latest `low` that it sees, and what `high` must be beyond.
    """
    xp = np if all(isinstance(x, np.ndarray | np.generic) for x in (place, enter, inside)) else jnp
    entered = xp.where(inside, start + enter, place)
    first = xp.where(inside, entered, xp.minimum(place, start - np.int32(1)))
    return first, entered, entered, xp.where(inside, start + leave, _NEVER)


def _sees(first: Any, last: Any, low: Any, high: Any) -> Any:
    return (low <= last) & (first < high)


def _depths(xp: Any, enter: Any, leave: Any) -> Any:
    """The depths of the tokens of a walk, int32 `[*b, n]`."""
    if xp is jnp and enter.ndim > 1:
        return jax.vmap(lambda *walk: _depths(jnp, *walk))(enter, leave)
    # When the walk enters a token, it has left all tokens entered before, except the ancestors. So
    # the depth is the number of tokens entered less the number left. All batch elements are one
    # walk here, one after the other.
    n, shape = enter.shape[-1], enter.shape
    row = iota(math.prod(shape[:-1]))[:, None] * np.int32(n)
    enter, leave = ((x.reshape(-1, n) + row).reshape(-1) for x in (enter, leave))
    left = xp.searchsorted(xp.sort(leave), enter, side="right")
    return (enter - left.astype(np.int32)).reshape(shape)


def _sharded_preorder(xp: Any, parents: Any) -> Any:
    """What `_preorder` returns. JAX does not sort along an explicit mesh axis, so the compiler
    propagates shardings there.
    """
    specs = (P(*sharding_of(parents)),) * 3
    return without_explicit_axes(lambda x: _preorder(xp, x), (parents,), parents, specs)


def _preorder(xp: Any, parents: Any) -> tuple[Any, Any, Any]:
    """The numbers with which a depth-first walk enters and leaves each token, int32 `[*b, n]`. A
    third array says whether the walk never ends there, as where it runs into a cycle.

    A walk that counts tokens as it enters them (preorder) visits each subtree in one go. So the
    tokens below `j`, itself included, are those with `enter[j] <= enter[i] < leave[j]`. The tree 0
    -> (1 -> 3, 2), for example, has the parents `[-1, 0, 0, 1]` and

        token  0  1  2  3
        enter  0  1  3  2
        leave  4  3  4  3

    The walk is a linked list of 2n steps. The walk enters a token, and then its first child;
    without a child, it leaves the token. It leaves a token, and then enters the next sibling or,
    without one, leaves the parent. Doubling finds how many tokens are still to be entered after a
    step. Suppose that each step knows this number for the next 2^i steps, and which step comes
    after these. Two such numbers then add up to that of 2^(i + 1) steps. So it takes n log n
    operations, without a loop over tokens, and `parents` may be traced. All batch elements that
    NumPy knows are one forest here.
    """
    if xp is jnp and parents.ndim > 1:
        return jax.vmap(lambda parents: _preorder(jnp, parents))(parents)
    n, shape, size = parents.shape[-1], parents.shape, math.prod(parents.shape)
    token = np.arange(size, dtype=np.int32)
    row = token // np.int32(n) * np.int32(n)  # the first token of the same batch element
    above = parents.reshape(-1)
    above = xp.where(above < 0, np.int32(size), above + row)
    # Siblings follow each other in `order`, the oldest first; roots are siblings.
    order = int32(xp.argsort(above, stable=True))
    sorted_above = above[order]
    place = int32(xp.argsort(order))
    here = int32(xp.searchsorted(sorted_above, token))  # where the first child would stand
    child = xp.minimum(here, np.int32(size - 1))
    has_child = sorted_above[child] == token
    after = xp.minimum(place + np.int32(1), np.int32(size - 1))
    has_sibling = (sorted_above[after] == above) & (place + np.int32(1) < size)
    end = np.int32(2 * size)
    up = xp.where(above == size, end, above + np.int32(size))
    entering = xp.where(has_child, order[child], token + np.int32(size))
    leaving = xp.where(has_sibling, order[after], up)
    steps = xp.concatenate([entering, leaving, np.full(1, end)])
    ahead = np.zeros(2 * size + 1, np.int32)
    ahead[:size] = 1  # entering a token counts it

    def double(_, state):
        steps, ahead = state
        return steps[steps], ahead + ahead[steps]

    state, rounds = (steps, xp.asarray(ahead)), (2 * size).bit_length()
    if xp is np:
        for i in range(rounds):
            state = double(i, state)
    else:
        state = lax.fori_loop(0, rounds, double, state)
    steps, ahead = state
    walked = (np.int32(size) - ahead[:-1]).reshape(2, size) - row[None]
    lost = steps[:size] != end
    return walked[0].reshape(shape), walked[1].reshape(shape), lost.reshape(shape)
