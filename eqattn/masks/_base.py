"""The base class of masks, and the masks that combine others: `And`, `Or` and `Not`.

The masks that a mask is combined from, and what follows from them term by term.
"""

import abc
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from .._misc import (
    as_array,
    as_size,
    as_sizes,
    concrete,
    int32,
    is_known,
    positions_in_reach,
    Static,
)
from .._pairs import as_operands, canonical, Operand


def int_operand(x: Any) -> tuple[Operand, ...]:
    """The operand that holds an int per batch element; none if the int is static."""
    return () if isinstance(x, Static) else (Operand(int32(x), "b"),)


def count_of(mask: Any) -> int:
    """How many operands a mask has, without computing any of them."""
    return len(jax.eval_shape(lambda: [o.array for o in mask.operands()]))


_CHEAP_PAIRS = 2**22  # `sparsity` counts visible pairs of up to 4 MiB of bools, chosen by trial


class Sparsity(NamedTuple):
    """The fractions of a mask's blocks that are `empty`, `partial` and `full`, and the fraction of
    its pairs that is `visible`. The latter is None where it takes more than about four million
    evaluations.
    """

    empty: Any
    partial: Any
    full: Any
    visible: Any


class AbstractMask(eqx.Module):
    """The base of all masks. A subclass defines `operands` and `visible`.

    `b, h, q, k` are int32 scalars: the flattened batch index, the query head, and the positions of
    the query and the key. Which blocks hold no visible pair follows from `visible` itself.

    For some masks, such as a `Tree`, the position of a token is not the place where it lies. Such a
    mask sets `moves_positions` and defines `positions_of`. All masks, scores and dropout of the
    call then see the positions that it returns.
    """

    by_place: ClassVar[bool] = False
    """Whether `at_places` is defined."""

    moves_positions: ClassVar[bool] = False
    """Whether `positions_of` is defined."""

    selects: ClassVar[bool] = False
    """Whether the mask lists keys, as a `Selected` does, instead of being a function of a pair."""

    needs_positions: ClassVar[bool] = False
    """Whether a call must give the positions of its keys, which are in some other order."""

    needs_offset: ClassVar[bool] = False
    """Whether a call whose pairs depend on where queries stand must say so. Such a mask has the
    `lengths` of stored rows, and a call may leave it out while these are its queries alone."""

    tried_in_kernels: ClassVar[bool] = True  # as for `AbstractScore`, like the next
    may_lack_kernels: ClassVar[bool] = False
    __array_ufunc__ = None  # `numpy_array & mask` is a mask

    @abc.abstractmethod
    def operands(self) -> tuple[Operand, ...]:
        """The arrays of the mask: `visible` receives one scalar of each, or one vector if it has
        features.
        """

    @abc.abstractmethod
    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any, **_: Any) -> Any:
        """Whether query `q` sees key `k`, as one bool scalar from `jnp` or `lax` operations."""

    def positions_of(self, places: Any) -> Any:
        """A hook: the positions of the tokens that lie at these places, `[n]` or `[*b, n]`. Places
        are what `q_positions`, `q_offset` and `kv_positions` of a call say.
        """
        return places

    def trunk(self) -> Any:
        """A hook of masks that move positions: how many tokens keep theirs and are seen by all
        later ones, an int or integers `[*b]`; or None, if that is not known."""

    def at_places(self, q: Any, k: Any) -> "AbstractMask | None":
        """A hook that returns the mask of queries and keys at these places, `[t]` or `[*b, t]` and
        `[s]` or `[*b, s]`. What a mask looks up by place can become operands of that mask. Each is
        then looked up once per token and not per pair, and outside of kernels.
        """

    def of_rows(self, row: Int[Array, " n"]) -> "AbstractMask | None":
        """A hook: the mask whose batch element `i` is the element `row[i]` of this one. None means
        that it follows from the operands.
        """

    def __and__(self, other: Any) -> "AbstractMask":
        return _combine(And, self, other)

    def __rand__(self, other: Any) -> "AbstractMask":
        return _combine(And, other, self)

    def __or__(self, other: Any) -> "AbstractMask":
        return _combine(Or, self, other)

    def __ror__(self, other: Any) -> "AbstractMask":
        return _combine(Or, other, self)

    def __invert__(self) -> "AbstractMask":
        return self.term if isinstance(self, Not) else Not(self)

    def __bool__(self) -> bool:
        raise TypeError(
            "A mask is neither true nor false: combine masks by `&`, `|` and `~` instead of `and`, "
            "`or` and `not`, and ask `mask is None`."
        )

    def __repr__(self) -> str:
        from ._repr import expression  # imports the rules of intervals, half of eqattn's import

        return expression(self)

    def __pdoc__(self, **how: Any) -> Any:
        import wadler_lindig  # calls this, when it prints what holds the mask

        return wadler_lindig.TextDoc(repr(self))

    def __str__(self) -> str:
        from ._repr import drawing

        return drawing(self, leaf_terms(self), block_table)

    def as_array(
        self,
        t: int,
        s: int,
        *,
        batch_shape: Sequence[int] = (),
        heads: int = 1,
        q_positions: Any = None,
        kv_positions: Any = None,
    ) -> Bool[Array, "*b h t s"]:
        """Returns the whole mask as an array, with one bool for each pair.

        **Arguments:**

        - `t`, `s`: the numbers of queries and keys.
        - `batch_shape`, `heads`: the sizes of the batch axes, and the number of query heads.
        - `q_positions`, `kv_positions`: int arrays `[*b, t]` and `[*b, s]`, by default 0, 1, ...

        **Returns:** bool `[*b, heads, t, s]`.

        **Raises:** `ValueError` if an array of the mask does not broadcast to that shape.
        """
        batch_shape, heads = as_sizes(batch_shape, "batch_shape"), as_size(heads, "heads")
        _check_leading(self, batch_shape, heads)
        t, s = as_size(t, "t"), as_size(s, "s")
        mask, q, k = _placed(self, t, s, batch_shape, heads, q_positions, kv_positions)
        if 0 in (*batch_shape, heads, t, s):
            return jnp.zeros((*batch_shape, heads, t, s), bool)
        args = [
            np.arange(math.prod(batch_shape), dtype=np.int32).reshape(-1, 1, 1, 1),
            np.arange(heads, dtype=np.int32).reshape(1, -1, 1, 1),
            q.reshape(-1, 1, t, 1),
            k.reshape(-1, 1, 1, s),
        ]
        args += [canonical(o, batch_shape, heads, t, s, name) for name, o in named_operands(mask)]
        fn = mask.visible
        for axis in (3, 2, 1, 0):
            in_axes = tuple(None if a.shape[axis] == 1 else 0 for a in args)
            if any(a == 0 for a in in_axes):
                fn = jax.vmap(fn, in_axes)
        squeezed = [
            jnp.asarray(a.reshape([*(n for n in a.shape[:4] if n != 1), *a.shape[4:]]))
            for a in args
        ]
        sizes = zip(*(a.shape[:4] for a in args))
        shape = [max((n for n in z if n != 1), default=1) for z in sizes]
        out = jnp.asarray(fn(*squeezed)).reshape(shape)
        full = jnp.broadcast_to(out, (math.prod(batch_shape), heads, t, s))
        return full.reshape(*batch_shape, heads, t, s)

    def sparsity(
        self,
        t: int,
        s: int,
        *,
        block_q: int = 128,
        block_k: int = 128,
        batch_shape: Sequence[int] = (),
        heads: int = 1,
        q_positions: Any = None,
        kv_positions: Any = None,
    ) -> Sparsity:
        """How much of the mask can be skipped. The arguments are those of `as_array`, and

        - `block_q`, `block_k`: the numbers of queries and keys in a block.

        **Returns:** a `Sparsity` of floats, or of scalar arrays under a trace.
        """
        batch_shape, heads = as_sizes(batch_shape, "batch_shape"), as_size(heads, "heads")
        t, s = as_size(t, "t"), as_size(s, "s")
        where = dict(q_positions=q_positions, kv_positions=kv_positions)
        table = block_table(
            self, t, s, block_q, block_k, batch_shape=batch_shape, heads=heads, **where
        )
        known = isinstance(table, np.ndarray)
        share = lambda c: (table == np.int8(c)).sum() / max(table.size, 1)
        empty, partial, full = (float(x) if known else x for x in map(share, (0, 1, 2)))
        visible = full if known and partial == 0.0 and full in (0.0, 1.0) else None
        if visible is None and math.prod(batch_shape) * heads * t * s <= _CHEAP_PAIRS:
            visible = self.as_array(t, s, batch_shape=batch_shape, heads=heads, **where).mean()
            visible = visible if concrete(visible) is None else float(visible)
        return Sparsity(empty, partial, full, visible)


def block_table(  # noqa: PLR0913 (the options of a table of blocks)
    mask: AbstractMask,
    t: int,
    s: int,
    block_q: int,
    block_k: int,
    *,
    batch_shape: Sequence[int] = (),
    heads: int = 1,
    q_positions: Any = None,
    kv_positions: Any = None,
) -> Any:
    """The class of every block as int8 `[b, heads, rows, columns]`. Batch and head axes that it
    does not depend on have size 1. The arguments are those of `sparsity`.
    """
    from ._intervals.classify import classify

    batch_shape, heads = as_sizes(batch_shape, "batch_shape"), as_size(heads, "heads")
    _check_leading(mask, batch_shape, heads)
    t, s = as_size(t, "t"), as_size(s, "s")
    block_q, block_k = as_size(block_q, "block_q", 1), as_size(block_k, "block_k", 1)
    mask, q, k = _placed(mask, t, s, batch_shape, heads, q_positions, kv_positions)
    return classify(
        mask,
        batch_shape=batch_shape,
        heads=heads,
        kv_heads=heads,
        q_positions=q,
        kv_positions=k,
        block_q=block_q,
        block_k=block_k,
    )


def named_operands(part: Any) -> list[tuple[str, Operand]]:
    """The operands of a mask or score, in order, each with the name of the term it belongs to."""

    terms = leaf_terms(part) if isinstance(part, AbstractMask) else [part]
    named = [(getattr(x, "operand_name", type(x).__name__), x) for x in terms]
    return [(n, o) for n, x in named for o in as_operands(x.operands(), f"{n}.operands()")]


def _check_leading(mask: AbstractMask, batch_shape: tuple[int, ...], heads: int) -> None:
    """Raises where arrays of a mask have other batch axes or heads, and says what to give."""

    given = [(name, o.array.shape, o.axes) for name, o in named_operands(mask)]
    for term in leaf_terms(mask):
        if term.selects:
            whole = term.for_heads(heads)  # pyright: ignore[reportAttributeAccessIssue]
            given.append((type(term).__name__, whole.indices.shape, "bhtf"))
    for name, shape, axes in given:
        tail = axes.lstrip("b")
        shape, tail = (shape[:-1], tail[:-1]) if tail.endswith("f") else (shape, tail)
        lead = shape[: len(shape) - len(tail)] if "b" in axes else ()
        have = shape[len(shape) - len(tail)] if tail.startswith("h") else 1
        wide = len(lead) > len(batch_shape) and any(n != 1 for n in lead)
        if wide or any(n not in (1, m) for n, m in zip(lead[::-1], batch_shape[::-1])):
            raise ValueError(
                f"{name} has an array {shape} with batch axes {lead}, and batch_shape is "
                f"{batch_shape}: give batch_shape={lead}."
            )
        if have not in (1, heads):
            raise ValueError(
                f"{name} has an array {shape} for {have} heads, and heads is {heads}: give "
                f"heads={have}."
            )


def _placed(mask, t, s, batch_shape, heads, q, k) -> tuple:
    """The mask at places `q` and `k`, and the positions of the tokens that lie there."""

    out = []
    for x, n, axes, name in ((q, t, "bt", "q_positions"), (k, s, "bs", "kv_positions")):
        x = np.arange(n, dtype=np.int32) if x is None else positions_in_reach(x, name)
        size = dict(t=n, s=1) if axes == "bt" else dict(t=1, s=n)
        full = canonical(Operand(x, axes), batch_shape, 1, **size, name=name)
        out.append(full.reshape(full.shape[0], full.shape[2] * full.shape[3]))
    xp: Any = np if all(isinstance(x, np.ndarray) for x in out) else jnp
    q, k = (xp.broadcast_to(x, (x.shape[0], n)) for x, n in zip(out, (t, s)))
    return placed(mask, batch_shape, heads, q, k)


class Dense(AbstractMask):
    """A mask given as an array.

    **Arguments:**

    - `array`: a bool array that broadcasts to `[*b, h, t, s]`.

    **Raises:** `TypeError` if the array is not bool.
    """

    array: Any

    operand_name: ClassVar[str] = "mask"
    public_name: ClassVar[str] = "DenseMask"  # its name in `eqattn`, where `Dense` is a strategy

    def __init__(self, array: Any):
        self.array = as_array(array, "array")
        if self.array.dtype != np.bool_:
            raise TypeError(
                f"a mask array must be bool, got {self.array.dtype}; compare it (`x > 0`), or pass "
                "additive values as `bias`."
            )

    def operands(self) -> tuple[Operand, ...]:
        return (Operand(self.array, ("", "s", "ts", "hts", "bhts")[min(self.array.ndim, 4)]),)

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return ids[0]


class And(AbstractMask):
    """A pair is visible where every term says so. It is written `a & b`."""

    terms: tuple[AbstractMask, ...]

    def operands(self) -> tuple[Operand, ...]:
        return sum((t.operands() for t in self.terms), ())

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return functools.reduce(operator.and_, _each(self.terms, b, h, q, k, ids))


class Or(AbstractMask):
    """A pair is visible where any term says so. It is written `a | b`."""

    terms: tuple[AbstractMask, ...]

    def operands(self) -> tuple[Operand, ...]:
        return sum((t.operands() for t in self.terms), ())

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return functools.reduce(operator.or_, _each(self.terms, b, h, q, k, ids))


class Not(AbstractMask):
    """A pair is visible where the term says that it is not. It is written `~a`."""

    term: AbstractMask

    def operands(self) -> tuple[Operand, ...]:
        return self.term.operands()

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return jnp.logical_not(self.term.visible(b, h, q, k, *ids))


def _each(terms, b, h, q, k, ids):
    for term in terms:
        n = count_of(term)
        yield jnp.asarray(term.visible(b, h, q, k, *ids[:n]))
        ids = ids[n:]


def _combine(kind: Any, *operands: Any):
    terms = []
    for x in operands:
        if not isinstance(x, AbstractMask):
            if not hasattr(x, "shape") or not hasattr(x, "dtype"):
                return NotImplemented
            x = Dense(x)
        terms += x.terms if isinstance(x, kind) else [x]  # pyright: ignore
    return kind(tuple(terms))


def visible(mask: AbstractMask) -> Callable:
    """The mask as a function of scalars that raises unless its result is one boolean."""

    def fn(b, h, q, k, *operands):
        seen = mask.visible(b, h, q, k, *operands)
        if jnp.result_type(seen) != jnp.bool_ or jnp.shape(seen) != ():
            raise TypeError(
                f"A mask must return one boolean per pair, got {jnp.result_type(seen)} of shape "
                f"{jnp.shape(seen)}."
            )
        return seen

    return fn


def leaf_terms(mask: AbstractMask | None) -> list[AbstractMask]:
    """The masks that a mask is combined from by `&`, `|` and `~`; none for None."""
    if isinstance(mask, And | Or):
        return [leaf for term in mask.terms for leaf in leaf_terms(term)]
    if isinstance(mask, Not):
        return leaf_terms(mask.term)
    return [] if mask is None else [mask]


def map_terms(mask: AbstractMask, fn: Callable[[AbstractMask], AbstractMask]) -> AbstractMask:
    """Applies `fn` to the terms of a mask, and combines the results as the terms were combined."""
    if isinstance(mask, And | Or):
        return type(mask)(tuple(map_terms(term, fn) for term in mask.terms))
    if isinstance(mask, Not):
        return Not(map_terms(mask.term, fn))
    return fn(mask)


def moved_positions(mask: AbstractMask | None, places: Any) -> Any:
    """The positions of the tokens at these places, `[n]` or `[*b, n]`, under a mask that
    `check_positions` has passed.
    """
    movers = [term for term in leaf_terms(mask) if term.moves_positions]
    return movers[0].positions_of(places) if movers else places


def check_call(mask: AbstractMask | None, *sizes: Any) -> None:
    """**Raises:** `ValueError` for a mask that does not fit a call, as far as operands do not tell.

    **Arguments:**

    - `sizes`: the batch axes, the numbers of query heads, key/value heads, queries and keys, and
        the positions of keys, or None.
    """
    check_positions(mask)
    for term in leaf_terms(mask):
        if term.needs_positions and sizes[-1] is None:
            raise ValueError(
                f"The mask holds that of a cache whose keys do not lie in the order of their "
                f"positions, {term!r}: give kv_positions=cache.positions, too."
            )
        if term.selects:
            term.check_call(*sizes)  # pyright: ignore[reportAttributeAccessIssue]


def check_positions(mask: AbstractMask | None) -> None:
    """**Raises:** `ValueError` if two terms of a mask move positions, unless they are known to be
    equal.
    """
    movers = [term for term in leaf_terms(mask) if term.moves_positions]
    for other in movers[1:]:
        if not _equal(movers[0], other):
            raise ValueError(
                f"The mask holds two that say where tokens stand, {movers[0]!r} and {other!r}: "
                "make one of both, such as one Tree of all tokens."
            )


def _equal(a: Any, b: Any) -> bool:
    """Whether two masks are known to be equal."""
    (xs, of_a), (ys, of_b) = jax.tree.flatten(a), jax.tree.flatten(b)
    same = lambda x, y: x is y or (is_known(x) and is_known(y) and np.array_equal(x, y))
    return of_a == of_b and all(map(same, xs, ys))


def placed(
    mask: Any, batch_shape: tuple[int, ...], heads: int, q: Any, k: Any, lists: bool = True
) -> tuple[Any, Any, Any]:
    """The mask of tokens at these places, and their positions under it.

    **Arguments:**

    - `mask`: a mask or None.
    - `batch_shape`: the batch axes of its arrays, which `B` flattens.
    - `heads`: the number of query heads.
    - `q`, `k`: the places of queries and keys, int32 `[B|1, t]` and `[B|1, s]`.
    - `lists`: whether a list of keys becomes an array of bools. Otherwise it stays.

    **Returns:** the mask, and the positions `[B|1, t]` and `[B|1, s]`.
    """
    terms = leaf_terms(mask)
    lead = lambda x: x.reshape(*(batch_shape if x.shape[0] != 1 else ()), x.shape[-1])
    if not any(term.by_place for term in terms):
        return mask, q, k
    rows, columns = lead(q), lead(k)

    def flat(x):
        xp = np if isinstance(x, np.ndarray) else jnp
        whole = any(n != 1 for n in x.shape[:-1])
        x = xp.broadcast_to(x, (*batch_shape, x.shape[-1])) if whole else x
        return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])

    def at(term: Any) -> Any:
        if not term.by_place or (term.selects and not lists):
            return term
        term = term.for_heads(heads) if term.selects else term
        return term.at_places(rows, columns)

    mask, moving = map_terms(mask, at), mask
    q, k = (flat(moved_positions(moving, x)) for x in (rows, columns))
    return mask, q, k


def split_list(mask: AbstractMask | None) -> tuple[Any, Any, Any]:
    """The term of a mask that lists keys, and the mask if that term is True, and if it is False.

    A list that is not negated can only add to what is visible. So a mask `f` of a list `L` and
    other terms is `L & f(True) | f(False)`. The listed keys are visited under `f(True)`, and all
    keys under `f(False)`.

    **Returns:** the term or None, and the two masks, which are True or False where they do not
    depend on the pair.

    **Raises:** `ValueError` if there are several lists, or one is negated.
    """
    lists = [term for term in leaf_terms(mask) if term.selects]
    if not lists:
        return None, mask, mask
    if _negates_list(mask):
        raise ValueError(
            "A list of keys cannot be negated: what it does not list would be visited. Take "
            "~DenseMask(mask.as_array(t, s)) where an array of all pairs fits."
        )
    if len(lists) > 1:
        raise ValueError(
            f"The mask holds {len(lists)} lists of keys, and a visit gathers those of one: join "
            "their indices for `|`, or keep those in both for `&`."
        )
    shown, hidden = (
        given(mask, lambda x, to=to: to if x.selects else None) for to in (True, False)
    )
    return lists[0], shown, hidden


def _negates_list(mask: AbstractMask | None) -> bool:
    if isinstance(mask, Not):
        return any(term.selects for term in leaf_terms(mask))
    return isinstance(mask, And | Or) and any(map(_negates_list, mask.terms))


def given(mask: Any, value_of: Callable[[AbstractMask], bool | None]) -> Any:
    """A mask where the values of some terms are known: what `value_of` a term is not None.

    **Returns:** the mask of the other terms, or True or False where that does not depend on them.
    """
    if isinstance(mask, Not):
        term = given(mask.term, value_of)
        return not term if isinstance(term, bool) else Not(term)
    if not isinstance(mask, And | Or):
        value = None if mask is None else value_of(mask)
        return mask if value is None else value
    # A True term of `&` and a False one of `|` change nothing; the other way round, they decide.
    neutral = isinstance(mask, And)
    cases = [given(term, value_of) for term in mask.terms]
    if any(x is (not neutral) for x in cases):
        return not neutral
    left = [x for x in cases if x is not neutral]
    return (left[0] if len(left) == 1 else type(mask)(tuple(left))) if left else neutral


def live_blocks(
    mask: Any,
    q_ends: np.ndarray,
    kv_ends: np.ndarray,
    batch_shape: tuple[int, ...],
    heads: int,
    kv_heads: int,
    moved: bool | None = None,
) -> np.ndarray:
    """Whether each block of positions may hold a visible pair, bool `[rows, columns]`, as far as
    this is known while tracing. An array of ids, for example, may hide anything or nothing.

    **Arguments:**

    - `q_ends`, `kv_ends`: the least and the greatest position of each block, int arrays
        `[rows, 2]` and `[columns, 2]`.
    - `moved`: whether a term moves positions. These blocks are of places then, and what the other
        terms show there is not known.
    """
    if moved is None:
        moved = any(term.moves_positions for term in leaf_terms(mask))
    both = (q_ends, kv_ends, batch_shape, heads, kv_heads)
    anything = np.ones((len(q_ends), len(kv_ends)), bool)
    if isinstance(mask, And | Or):
        terms = np.stack([live_blocks(term, *both, moved=moved) for term in mask.terms])
        return np.all(terms, axis=0) if isinstance(mask, And) else np.any(terms, axis=0)
    if mask is None or mask.selects or any(set(o.axes) & set("ts") for o in mask.operands()):
        return anything
    if moved and not (isinstance(mask, AbstractMask) and mask.moves_positions):
        return anything
    from ._intervals.classify import classify

    table = classify(
        mask,
        batch_shape=batch_shape,
        heads=heads,
        kv_heads=kv_heads,
        q_positions=q_ends.reshape(1, -1).astype(np.int32),
        kv_positions=kv_ends.reshape(1, -1).astype(np.int32),
        block_q=2,
        block_k=2,
    )
    return np.any(table > 0, axis=(0, 1)) if isinstance(table, np.ndarray) else anything
