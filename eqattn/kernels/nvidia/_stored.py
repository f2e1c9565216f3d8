"""The fold of `Ragged`, whose keys and values stay where they lie: what kernels of either compiler
are given, and what they return.

A block of a cache holds all its heads, `[tokens, heads, n]`, and a program has the rows of one
head. A block has the rows of all heads, one head after the other. The rows of each head are padded
to whole tiles:

    2 heads with 3 rows each, in tiles of 4      0 1 2 -   3 4 5 -

The blocks of a row are shared out to several programs, so that the whole chip reads. Each program
makes a Carry, and XLA merges the Carries.

Finds out from block functions what the blocks of a cache are made of.

A block of keys or values is one or several *pieces* along its tokens, as many as it has pages. A
piece has one or several *parts* along its features. Keys that are latents have two: the latent, and
the rotary part beside it. A part is an array `[tokens, heads, n]`, perhaps with a scale for each
vector.

What the kernels of `Ragged` for either compiler have in common: a program's place on the grid,
and its share of the blocks.
"""

import abc
import dataclasses
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._carry import change_of_origin
from ..._jax import evaluated, Literal
from ..._sweep import loops
from ..._sweep.grid import BlockGrid, COL, ROW
from ..._sweep.nonfinite import complete
from ..._sweep.products import dot_p, grouped_dot_p
from .._program import flat_jaxpr, replaced_jaxpr
from ._operands import divided, Operand, padded, Places, rounded_up, ROWS
from ._operations import Native
from ._plans import visited, VisitPlan
from ._program import PairProgram


_SAME = {
    lax.broadcast_in_dim_p,
    lax.convert_element_type_p,
    lax.reshape_p,
    lax.squeeze_p,
    lax.copy_p,
}


@dataclasses.dataclass(frozen=True)
class Part:
    """Some features of some tokens. `array` is the index of the argument of a block function that
    holds them. `scales` is that of their scales `[1, tokens * heads]`, or None.
    """

    array: int
    scales: int | None = None

    def among(self, arguments: Sequence[int]) -> "Part":
        """The same part, where the arguments have other indices."""
        return Part(arguments[self.array], None if self.scales is None else arguments[self.scales])


Pieces = list[tuple[Part, ...]]


def keys_in(closed: Any) -> Pieces:
    """The pieces of the keys that the block function of logits multiplies; empty if it reads
    anything else.
    """
    jaxpr = flat_jaxpr(closed).jaxpr
    dots = [eqn for eqn in jaxpr.eqns if eqn.primitive is grouped_dot_p]
    return _pieces(jaxpr, dots[0].invars[0]) if len(dots) == 1 else []


def values_in(closed: Any) -> Pieces:
    """The pieces of the values that a block function returns, with 0 for what is not finite; empty
    if it returns anything else.
    """
    jaxpr = flat_jaxpr(closed).jaxpr
    return _pieces(jaxpr, jaxpr.outvars[0])


def _pieces(jaxpr: Any, v: Any) -> Pieces:  # noqa: C901 (one branch for each operation)
    made_by = {x: eqn for eqn in jaxpr.eqns for x in eqn.outvars}
    arguments = {x: i for i, x in enumerate(jaxpr.invars)}

    def scales(v: Any) -> int | None:
        while not isinstance(v, Literal) and v not in arguments:
            eqn = made_by.get(v)
            if eqn is None or eqn.primitive not in _SAME:
                return None
            v = eqn.invars[0]
        flat = not isinstance(v, Literal) and v.aval.ndim == 2 and v.aval.shape[0] == 1
        return arguments[v] if flat else None

    def pieces(v: Any) -> Pieces:
        if isinstance(v, Literal):
            return []
        if v in arguments:
            return [(Part(arguments[v]),)] if v.aval.ndim == 3 else []
        eqn = made_by.get(v)
        if eqn is None:
            return []
        if eqn.primitive in _SAME and eqn.invars[0].aval.size == v.aval.size:
            return pieces(eqn.invars[0])
        if eqn.primitive is lax.select_n_p:
            finite, kept = made_by.get(eqn.invars[0]), eqn.invars[-1]
            if finite is None or finite.primitive is not lax.is_finite_p:
                return []
            return pieces(kept) if finite.invars[0] is kept else []
        if eqn.primitive is lax.mul_p:
            whole, i = pieces(eqn.invars[0]), scales(eqn.invars[1])
            alone = len(whole) == 1 and len(whole[0]) == 1 and whole[0][0].scales is None
            return [(Part(whole[0][0].array, i),)] if alone and i is not None else []
        if eqn.primitive is lax.concatenate_p:
            found = [pieces(x) for x in eqn.invars]
            if eqn.params["dimension"] == 0:
                return [piece for x in found for piece in x] if all(found) else []
            same = eqn.params["dimension"] == v.aval.ndim - 1 and len({*map(len, found)}) == 1
            return [sum(x, ()) for x in zip(*found)] if same else []
        if eqn.primitive is lax.slice_p:  # it takes the first parts of the features
            start, stop = eqn.params["start_indices"], eqn.params["limit_indices"]
            whole = eqn.invars[0].aval.shape
            first = not any(start) and stop[:-1] == whole[:-1] and not eqn.params["strides"]
            return [_leading(jaxpr, x, stop[-1]) for x in pieces(eqn.invars[0])] if first else []
        return []

    found = pieces(v)
    return found if all(found) and len({*map(len, found)}) == 1 else []


def _leading(jaxpr: Any, piece: tuple[Part, ...], size: int) -> tuple[Part, ...]:
    """The parts of a piece that are its first features; none where a part would be cut."""
    for n in range(1, len(piece) + 1):
        if sum(jaxpr.invars[part.array].aval.shape[-1] for part in piece[:n]) == size:
            return piece[:n]
    return ()


PROGRAMS = 1056
"""How many programs there should be at least. They are eight for each of the 132 multiprocessors of
an H200, so that programs that end early leave little idle.
"""

EIGHT_BITS = ("int8", "float8_e4m3fn", "float8_e5m2")
"""The dtypes of 8 bits that the compilers widen."""

LEAST_TILES = 8
"""How many tiles a share should have, as each writes a Carry."""


class Stored(NamedTuple):
    """What a cache is made of, as arrays or their shapes and dtypes.

    **Arguments:**

    - `parts`: an array on the grid for each part of the keys.
    - `value`: the same for the values; None where they are the first part of the keys.
    - `pages`: how many pages a block has; 0 where tokens lie in order.
    - `query`: the queries.
    """

    parts: list[Any]
    value: Any
    pages: int
    query: Any


@dataclasses.dataclass(frozen=True)
class StoredSizes(abc.ABC):
    """How a block of a cache is cut for a kernel.

    **Arguments:**

    - `rows`, `keys`, `heads`: how many rows, keys and key heads a block has.
    - `dims`: the sizes of the parts of a key.
    - `width`: the size of a value.
    - `pages`: how many pages a block has; 0 where tokens lie in order.
    - `eight`: whether numbers have 8 bits.
    - `shared`: whether a value is the first part of its key.
    """

    rows: int
    keys: int
    heads: int
    dims: tuple[int, ...]
    width: int
    pages: int
    eight: bool = False
    shared: bool = False

    @classmethod
    def of(cls, layout: BlockGrid, stored: "Stored", **more):
        """The sizes of a visit."""
        keys, rows = layout.block
        parts, value = stored.parts, stored.value
        sizes, eight = tuple(x.shape[-1] for x in parts), parts[0].dtype != stored.query.dtype
        heads, width = parts[0].shape[-2], (parts[0] if value is None else value).shape[-1]
        return cls(rows, keys, heads, sizes, width, stored.pages, eight, value is None, **more)

    @property
    @abc.abstractmethod
    def tile_r(self) -> int:
        """The rows of a program."""

    @property
    @abc.abstractmethod
    def tile_k(self) -> int:
        """The keys that are multiplied at once."""

    @property
    def dim(self) -> int:
        """The size of a query."""
        return sum(self.dims)

    @property
    def of_head(self) -> int:
        """The rows of a head."""
        return self.rows // self.heads

    @property
    def padded_of_head(self) -> int:
        """The rows of a head, padded to whole tiles."""
        return rounded_up(self.of_head, self.tile_r)

    @property
    def padded_rows(self) -> int:
        """The rows of all heads, where each head is padded."""
        return self.heads * self.padded_of_head

    @property
    def tiles(self) -> int:
        return self.padded_rows // self.tile_r

    @property
    def padded_keys(self) -> int:
        return rounded_up(self.keys, self.tile_k)


def unsupported_pieces(layout: BlockGrid, logits: Any, operands: Sequence[Any]) -> str:
    """Why no kernel can read a cache; empty if `stored_in` tells what it is made of.

    **Arguments:**

    - `logits`: the block function.
    - `operands`: all operands of the visit, or arrays with their shapes and dtypes.
    """
    pieces = keys_in(logits)
    if not pieces:
        return _unknown_keys(logits)
    n = len(logits.in_avals)
    keys = [i for piece in pieces for part in piece for i in (part.array, part.scales)]
    for group in (keys, range(n, len(operands))):
        axes = [layout.in_axes[i] for i in group if i is not None]
        if any(bool(layout.pages) != any(a >= 0 for a in x) for x in axes):
            return "only its keys or only its values lie in pages"
        if len({tuple(a for a in x if a < 0) for x in axes}) > 1:
            return "its numbers and their scales vary with other axes"
    parts, value, _, query = stored_in(layout, logits, operands)
    scaled = any(part.scales is not None for part in pieces[0])
    stored = {x.dtype for x in (parts if value is None else [*parts, value])}
    if len(stored) > 1 or (stored != {query.dtype} and not scaled):
        names = " and ".join(sorted(map(str, stored)))
        return f"its keys and values are {names}, and its queries {query.dtype}"
    if scaled and str(*stored) not in EIGHT_BITS:
        return f"in 8 bits it has {', '.join(EIGHT_BITS)}, not {str(*stored)}"
    return ""


def _unknown_keys(logits: Any) -> str:
    primitives = {eqn.primitive.name for eqn in flat_jaxpr(logits).jaxpr.eqns}
    if "bitcast_convert_type" in primitives:
        return "its keys are eqattn.cache.Bitcast; a cache that is made with bits=False has floats"
    return "its keys are stored in a way of their own"


def stored_in(layout: BlockGrid, logits: Any, operands: Sequence[Any]) -> Stored:
    """What the caches are made of whose keys are made of `keys_in(logits)`."""
    pieces, n = keys_in(logits), len(logits.in_avals)
    parts = [operands[part.array] for part in pieces[0]]
    value = None if layout.shared else operands[n]
    return Stored(parts, value, len(pieces) if layout.pages else 0, operands[0])


def of_one_head(closed: Any) -> Any:
    """Turns the block function of logits into a function for one head, whose keys are
    `[tokens, n]`. The kernel itself multiplies these. So the operations that make the keys are left
    out, and the product becomes that of two matrices.
    """
    flat = flat_jaxpr(closed)
    needed = set(flat.jaxpr.outvars)
    for eqn in reversed(flat.jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            first = eqn.primitive is grouped_dot_p
            needed |= {v for v in eqn.invars[first:] if not isinstance(v, Literal)}

    def evaluate(eqn, xs):
        if needed.isdisjoint(eqn.outvars):
            return [None] * len(eqn.outvars)
        if eqn.primitive is grouped_dot_p:
            keys, _, n = eqn.invars[0].aval.shape
            return [dot_p.bind(jnp.zeros((keys, n), xs[1].dtype), xs[1], **eqn.params)]
        return evaluated(eqn, xs)

    return replaced_jaxpr(flat, [v.aval.shape for v in flat.jaxpr.invars], evaluate)


def rows_by_head(x: Any, axes: tuple[int, ...], sizes: StoredSizes) -> Any:
    """Pads the rows of an operand on pairs as the kernel does. Behind its grid axes, it is
    `[keys|1, rows|1]` or `[keys, heads|1, queries|1]`. Any other operand is returned as it is.
    """
    lead, block = x.shape[: len(axes)], x.shape[len(axes) :]
    if len(block) == 3:
        heads = block[1] if block[1] > 1 else sizes.rows // block[2]
        x = jnp.broadcast_to(x, (*lead, block[0], heads, sizes.rows // heads))
        block = (block[0], sizes.rows)
    if len(block) != 2 or block[1] == 1:
        return x
    x = x.reshape(*lead, block[0], sizes.heads, sizes.of_head)
    x = padded(x, x.ndim - 1, sizes.padded_of_head)
    return x.reshape(*lead, block[0], sizes.padded_rows)


def shares_of(layout: BlockGrid, sizes: StoredSizes, wanted: int) -> int:
    """Chooses into how many parts the blocks of a row are cut, so that there are at least as many
    programs as are `wanted`.
    """
    programs = math.prod(layout.shape((*layout.batch, ROW))) * sizes.tiles
    tiles = layout.grid[COL] * (sizes.padded_keys // sizes.tile_k)
    return max(min(-(-wanted // programs), tiles // LEAST_TILES), 1)


class StoredArrays:
    """What a kernel of the fold is given.

    **Arguments:**

    - `steps`: what is done in each class of blocks.
    - `layout`, `args`: the grid, and the table, if there is one, and the operands on it.
    - `native`: as for `BlockProgram`.

    `keys` and `values` are the pieces of a block, by operands; the latter are empty where values
    are the first part of their keys. `stored` are the arrays of a piece.
    """

    def __init__(
        self, steps: dict[int, Any], layout: BlockGrid, args: Sequence[Any], native: Native
    ):
        self.layout, first = layout, steps[max(steps)]
        self.table, self.operands = layout.split(args)
        self.query, self.count = self.operands[0], len(first.logits.in_avals)
        self.keys = keys_in(first.logits)
        self.values = [] if layout.shared else _values(first, layout, self.count)
        self.stored = stored_in(layout, first.logits, self.operands)
        self.pages = self.stored.pages
        one = {c: of_one_head(step.logits) for c, step in steps.items()}
        self.programs = {c: PairProgram(x, native) for c, x in one.items()}

    def axes_of(self, part: Any) -> tuple[int, ...]:
        """The grid axes of a part's array. If that has pages, the axes are those of their table."""
        axes = self.layout.in_axes[part.array]
        return self.layout.in_axes[self.layout.lookups[max(axes)]] if self.pages else axes

    def tables_of(self, group: Pieces) -> list[Any]:
        """For each page of a block, the index of the operand that says which page it is."""
        axes = (self.layout.in_axes[piece[0].array] for piece in group)
        return [self.layout.lookups[max(a)] for a in axes] if self.pages else []

    def planned(self, sizes: StoredSizes) -> dict[str, Any]:
        """The fields of a plan that do not depend on the compiler."""
        wide = dataclasses.replace(self.layout, block=(sizes.keys, sizes.padded_rows))
        lengths, given = dict(r=sizes.padded_rows, k=sizes.padded_keys), {}
        for i in range(self.count):
            if any(p.reads[i] for p in self.programs.values()):
                x = rows_by_head(self.operands[i], self.layout.in_axes[i], sizes)
                given[i] = Operand(x, self.layout.in_axes[i], wide, ROWS, lengths)
        listed = self.table is not None
        return dict(
            layout=wide,
            sizes=sizes,
            programs=self.programs,
            operands=given,
            table_axes=(self.layout.table_axes or ())[:-2] if listed else None,
            dtype=self.query.dtype,
        )

    def queries(self, sizes: StoredSizes) -> list[Any]:
        """The queries that each part of the keys is multiplied with, `[places, rows, n]`."""
        q = self.query.reshape(-1, sizes.dim, sizes.heads, sizes.of_head)  # perhaps a single row
        q = padded(q, 3, sizes.padded_of_head).reshape(-1, sizes.dim, sizes.padded_rows)
        q, starts = jnp.swapaxes(q, -1, -2), np.cumsum(sizes.dims)[:-1]
        return jnp.split(q, starts, -1)

    def merged(self, found: Sequence[Any], sizes: StoredSizes, shares: int) -> list[Any]:
        """The Carry of each row of the grid, from numerators, denominators and maxima of each of
        the shares. They are `[shares * places, tiles, rows of a tile, ...]`, perhaps without rows
        that only pad.
        """
        kept = self.layout.shape((*self.layout.batch, ROW))

        def of_rows(x, *rest):
            x = x.reshape(shares, *kept, sizes.heads, -1, *rest)
            x = lax.slice_in_dim(x, 0, sizes.of_head, axis=2 + len(kept))
            return x.reshape(shares, *kept, sizes.rows, *rest)

        return _merged(of_rows(found[0], sizes.width), *map(of_rows, found[1:]))


def _values(first: Any, layout: BlockGrid, n: int) -> Pieces:
    """The pieces of values, by operands."""
    read = [*layout.shared, *range(n, n + len(first.values.in_avals))]
    return [tuple(part.among(read) for part in piece) for piece in values_in(first.values)]


def unsupported_values(first: Any, layout: BlockGrid) -> str:
    """Why no kernel can read the values of a cache, whose keys it can read; empty if one can.

    **Arguments:**

    - `first`: what is done in some class of blocks.
    """
    keys = keys_in(first.logits)
    pieces = _values(first, layout, len(first.logits.in_avals))
    alone = [len(piece) for piece in pieces] == [1] * len(keys)
    same = [piece[0] for piece in pieces] == [piece[0] for piece in keys] if alone else False
    fine = alone and (same or not layout.shared)
    return "" if fine else "its values are stored in a way of their own"


def _merged(num: Any, den: Any, top: Any) -> list:
    """Merges several Carries, `[shares, ...]`, into one. By the contract of `_sweep/nonfinite.py`,
    a row with a visible value that is not finite is NaN as a whole.
    """
    if len(num) == 1:
        return complete(num[0], den[0], top[0], -1)
    most = top.max(0)
    _, scale = change_of_origin(most[None], top)
    return complete((num * scale[..., None]).sum(0), (den * scale).sum(0), most, -1)


def traverse_stored(  # noqa: PLR0913 (the arguments that every visit of a lowering has)
    steps: dict[int, Callable[..., Any]],
    layout: BlockGrid,
    args: Sequence[Any],
    start: Sequence[Any],
    axes: Sequence[tuple[int, ...]],
    *,
    visit: Callable[..., list[Any]],
    required: bool,
    finish: Callable[..., Any] = list,
    into: Sequence[Any] | None = None,
) -> list[Any]:
    """`eqattn._sweep.loops.traverse` of a fold whose keys and values stay in place.

    **Arguments:** those of `traverse`, and

    - `visit`: the kernel, a function of `steps`, `layout` and all `args` that returns a Carry.
    - `required`: whether the caller asked for a kernel.

    **Raises:** `ValueError` if it is required and there is none for the values.
    """
    assert into is None, "what is read in place does not travel around a ring"
    loop = ft.partial(loops.traverse, steps, layout, finish=finish, vectorise=False)
    if reason := unsupported_values(steps[max(steps)], layout):
        if required:
            raise ValueError(
                f"there is no kernel for this call ({reason}); platform='auto' or 'xla' runs it as "
                "XLA code."
            )
        return loop(args, start, axes)
    return visit(steps, layout, *args)


@dataclasses.dataclass(frozen=True)
class StoredPlan(VisitPlan):
    """A fold whose keys and values stay where they lie, on a `layout` with padded rows.

    **Arguments:** those of `VisitPlan`, and

    - `sizes`: how a block of the caches is cut.
    - `keys`: where each part of a key comes from.
    - `values`: where the values come from; empty where they are the first part of the keys.
    - `shares`: in how many parts the blocks of a row are cut.
    """

    sizes: StoredSizes
    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    shares: int

    @property
    def parts(self) -> int:
        """How many tiles a block of keys has."""
        return self.sizes.padded_keys // self.sizes.tile_k

    @property
    def places(self) -> int:
        """How many rows of blocks the grid has."""
        return math.prod(self.layout.shape((*self.layout.batch, ROW)))

    @property
    def count(self) -> int:
        """How many programs there are."""
        return self.shares * self.places * self.sizes.tiles


class StoredProgram:
    """One program of a kernel, on references.

    **Arguments:**

    - `plan`: the plan.
    - `refs`: the references, in the order in which they are taken here. A source of keys or values
        says how many `tables` and `arrays` it has.
    - `program`: the index of the program.
    """

    def __init__(self, plan: Any, refs: Sequence[Any], program: Any):
        self.plan, refs = plan, list(refs)
        take = lambda n: [refs.pop(0) for _ in range(n)]
        self.q = take(len(plan.keys))
        groups = plan.keys, plan.values
        self.tables = [take(group[0].tables) for group in groups if group]
        self.k, self.v = ([take(source.arrays) for source in group] for group in groups)
        listed = take(2) if plan.table_axes is not None else []
        self.given = {i: refs.pop(0) for i in plan.operands}
        self.results = refs
        layout, sizes = plan.layout, plan.sizes
        rest, self.tile = divided(program, sizes.tiles)
        rest, row = divided(rest, layout.grid[ROW])
        share, element = divided(rest, math.prod(layout.shape(layout.batch)))
        self.start = self.tile * jnp.int32(sizes.tile_r)
        self.head, _ = divided(self.tile, sizes.tiles // sizes.heads)
        self.places = Places.of(layout, ROWS, element, row)
        self.out = share * jnp.int32(plan.places) + self.places.place((*layout.batch, ROW))
        full, live, self.column = visited(plan, self.places, row, listed)
        full, live = (n * jnp.int32(plan.parts) for n in (full, live))
        each = lax.div(live + jnp.int32(plan.shares - 1), jnp.int32(plan.shares))
        self.first = share * each
        self.last = jnp.minimum(self.first + each, live)
        self.full = jnp.clip(full, self.first, self.last)

    def where(self, step: Any) -> tuple[Any, Any]:
        """The column of a step, and the first key of the tile in its block."""
        at, part = divided(step, self.plan.parts)
        return self.column(at), part * jnp.int32(self.plan.sizes.tile_k)
