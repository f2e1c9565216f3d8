"""Interval rules of selections, casts, shapes and lookups.

The invariant that each rule keeps is in `interval.py`. Rules of shapes move both bounds as the
primitive moves the value. A lookup at an index that is only bounded takes the extremes of the table
over the range of the index.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._jax import primitives as P
from ..._misc import at_most
from .interval import carrier, finite, GRID, guard, Interval, kind, limits, rounded, top, xp_of


# The most entries, over the whole grid, of an intermediate of a mask function that is not a scalar.
# A larger one is unknown. Of int32, its two bounds then take 8 MiB. Chosen by trial: a larger limit
# costs memory and time at each trace, a smaller one makes blocks partial, which
# `AbstractMask.sparsity` shows.
_MAX_ELEMENTS = 2**20

# The most entries of a table that is searched over ranges of indices. In a longer one, groups of
# entries are replaced by their bounds. Of int32, the 12 levels of `_over_range` then take 192 KiB
# for both bounds of a table. Chosen by trial: `AbstractMask.sparsity` shows what grouping costs,
# which is that ranges are rounded outwards to whole groups.
_MAX_ENTRIES = 2048


def expand(i: Interval, ndim: int) -> Interval:
    """A scalar's interval beside values with `ndim` axes."""
    extra = ndim - (i.lo.ndim - GRID)
    return i.map(lambda x: x.reshape(*x.shape, *(1,) * extra)) if extra else i


def too_large(shape, *ins: Interval) -> bool:
    """Whether a result is larger than both the limit and all that it is computed from."""
    known = [i.lo.size for i in ins if isinstance(i.lo.size, int)]
    return not at_most(math.prod(shape), max(_MAX_ELEMENTS, *known))


def select(dtype, which: Interval, *cases: Interval) -> Interval:
    """The hull of the cases that `which` (bool or int) may choose."""
    if which.lo.dtype == np.bool_:
        # `which.lo` says that the second is certainly chosen, `not which.hi` that the first is.
        f, t = cases
        xp = xp_of(*which, *f, *t)
        if which.point and f.point and t.point and kind(dtype) != "f":
            v = xp.where(which.lo, t.lo, f.lo)
            return Interval(v, v)
        lo = xp.where(which.hi, xp.where(which.lo, t.lo, xp.minimum(f.lo, t.lo)), f.lo)
        hi = xp.where(which.hi, xp.where(which.lo, t.hi, xp.maximum(f.hi, t.hi)), f.hi)
        return Interval(lo, hi)
    # An empty hull, which grows by each case that is possible. An index that may be out of bounds
    # makes the result unknown.
    least, most = limits(dtype)
    lo, hi = most, least
    number = which.lo.dtype.type
    for n, case in enumerate(cases):
        xp = xp_of(*which, *case) if isinstance(lo, np.generic | np.ndarray) else jnp
        chosen = (which.lo <= number(n)) & (number(n) <= which.hi)
        lo = xp.minimum(xp.where(chosen, case.lo, most), lo)  # pyright: ignore
        hi = xp.maximum(xp.where(chosen, case.hi, least), hi)  # pyright: ignore
    return guard((which.lo >= number(0)) & (which.hi < number(len(cases))), lo, hi, dtype)


def convert(old, new, a: Interval) -> Interval | None:
    """The cast of an interval to another dtype.

    Where no value wraps around or overflows, casts never decrease, so that the bounds are cast.
    Elsewhere the result is unknown. Only integers that are known exactly are cast there too, as
    NumPy wraps them as XLA does.
    """
    if not kind(new):
        return None
    if old == new:
        return a
    from_, to, c = kind(old), kind(new), carrier(new)
    cast = a.map(lambda x: x.astype(c))
    if from_ == "b" or (from_ + to == "ii" and a.point):
        return cast
    if to == "b":  # whether it is not 0: certainly where 0 lies outside, possibly unless it is all
        zero = carrier(old).type(0)
        lo, hi = (a.lo > zero) | (a.hi < zero), ~((a.lo == zero) & (a.hi == zero))
        return guard(finite(a), lo, hi, new) if from_ == "f" else Interval(lo, hi)
    if to == "f":
        nmant = jnp.finfo(new).nmant
        if from_ == "i":  # a float with n stored bits of mantissa holds integers up to 2^(n + 1)
            return rounded((a,), *cast, new, exact_up_to=2.0 ** (nmant + 1))
        lossless = nmant >= jnp.finfo(old).nmant and jnp.finfo(new).nexp >= jnp.finfo(old).nexp
        return cast if lossless else rounded((a,), *cast, new)
    least, most, t = np.iinfo(c).min, np.iinfo(c).max, carrier(old).type
    if from_ == "f":
        # The greatest integer may round up to a float that does not fit: float32(2^31 - 1) is 2^31.
        # A margin of 2^-20 is more than the 2^-24 of that rounding.
        inside = 1 - 2**-20
        ok = finite(a) & (a.lo >= t(least * inside)) & (a.hi <= t(most * inside))
    else:
        info = np.iinfo(carrier(old))
        ok = (a.lo >= t(max(least, info.min))) & (a.hi <= t(min(most, info.max)))
    return guard(ok, cast.lo, cast.hi, new)


# Shapes. `shape` is the shape of the whole value. An axis along which the bounds do not vary may be
# stored with size 1, so that rules which mix axes broadcast first, by `_full`.


def _full(a: Interval, shape) -> Interval:
    return a.map(lambda x: xp_of(x).broadcast_to(x, (*x.shape[:GRID], *shape)))


def _to_shape(a: Interval, shape) -> Interval:
    return a.map(lambda x: x.reshape(*x.shape[:GRID], *shape))


def _broadcast_in_dim(eqn, a, *_):
    sizes = dict(zip(eqn.params["broadcast_dimensions"], a.lo.shape[GRID:]))
    return _to_shape(a, [sizes.get(d, 1) for d in range(eqn.outvars[0].aval.ndim)])


def _flatten(eqn, a, *_):
    return _to_shape(_full(a, eqn.invars[0].aval.shape), eqn.outvars[0].aval.shape)


def _reshape(eqn, a, *_):
    return None if eqn.params["dimensions"] is not None else _flatten(eqn, a)


def _transpose(eqn, a):
    axes = (*range(GRID), *(GRID + d for d in eqn.params["permutation"]))
    return a.map(lambda x: x.transpose(axes))


def _slice(eqn, a):
    p = eqn.params
    steps = p["strides"] or (1,) * len(p["start_indices"])
    at = (slice(None),) * GRID
    at += tuple(slice(*z) for z in zip(p["start_indices"], p["limit_indices"], steps))
    return _full(a, eqn.invars[0].aval.shape).map(lambda x: x[at])


def _concatenate(eqn, *ins):
    full = [_full(i, v.aval.shape) for i, v in zip(ins, eqn.invars)]
    grid = jnp.broadcast_shapes(*(i.lo.shape[:GRID] for i in full))
    axis = GRID + eqn.params["dimension"]

    def join(bounds):
        xp = xp_of(*bounds)
        return xp.concatenate([xp.broadcast_to(x, (*grid, *x.shape[GRID:])) for x in bounds], axis)

    if too_large((*grid, *eqn.outvars[0].aval.shape), *ins):
        return None
    lo = join([i.lo for i in full])
    exact = all(i.point for i in full)
    return Interval(lo, lo if exact else join([i.hi for i in full]))


def _iota(eqn):
    p = eqn.params
    shape = [n if d == p["dimension"] else 1 for d, n in enumerate(p["shape"])]
    if not kind(p["dtype"]) or kind(p["dtype"]) == "f":
        return None
    x = np.arange(math.prod(shape)).astype(p["dtype"]).reshape((1,) * GRID + tuple(shape))
    return Interval(x, x)


def _reduce(name):
    """The rule of a maximum or minimum, `any` or `all`, which never decrease in any entry."""

    def rule(eqn, a):
        k = kind(eqn.invars[0].aval.dtype)
        if k == "f" or (k == "i" and name in ("any", "all")):
            return None
        axes = tuple(GRID + d for d in eqn.params["axes"])
        return a.map(lambda x: getattr(x, name)(axis=axes))

    return rule


# Lookups: an index known exactly reads the bounds that are stored there. One that is bounded by a
# range needs the extremes of the table over that range.


def block_ends(x, axis: int, size: int) -> tuple:
    """The least and greatest of consecutive groups of `size` on an axis; the last may be short."""
    n = x.shape[axis]
    if at_most(n, 1) or size == 1:
        return x, x
    whole = n // size * size
    head = (slice(None),) * axis
    parts = []
    if whole != 0:
        main = x[(*head, slice(0, whole))]
        split = (*x.shape[:axis], whole // size, size, *x.shape[axis + 1 :])
        parts.append(_ends(main.reshape(split), axis + 1))
    if whole != n:
        rest = x[(*head, slice(whole, n))]
        short = (*x.shape[:axis], 1, n - whole, *x.shape[axis + 1 :])
        parts.append(_ends(rest.reshape(short), axis + 1))
    lo, hi = zip(*parts)
    return (
        (lo[0], hi[0])
        if len(parts) == 1
        else tuple(xp_of(x).concatenate(p, axis) for p in (lo, hi))
    )


def _ends(x, axis) -> tuple:
    if isinstance(x, np.ndarray):
        return x.min(axis), x.max(axis)
    # One reduction finds both ends. XLA then fuses the operations that compute `x` into it, instead
    # of storing `x`.
    least, most = limits(x.dtype)
    return lax.reduce(
        (x, x), (most, least), lambda a, b: (lax.min(a[0], b[0]), lax.max(a[1], b[1])), (axis,)
    )


def _take(x, index, axis):
    if xp_of(x, index) is np:
        return np.take_along_axis(x, np.clip(index, 0, x.shape[axis] - 1), axis)
    return jnp.take_along_axis(jnp.asarray(x), jnp.asarray(index), axis, mode="clip")


def _over_range(least, most, lo, hi, axis: int) -> Interval:
    """The least of `least[i]` and the greatest of `most[i]` for `lo <= i <= hi`.

    A range is the union of two windows, whose size is the largest power of two that fits in it. The
    bounds of every such window are tabulated. Overlap of the two does not change a minimum. The
    table of `least` is, for example,

        index            0  1  2  3  4
        level 0, size 1  5  3  8  6  9
        level 1, size 2  3  3  6  6  .   the entry at i is the least of i and i + 1
        level 2, size 4  3  3  .  .  .   the entry at i is the least of i, ..., i + 3

    The range from 2 to 4 has 3 entries, so that its level is floor(log2 3) = 1. The windows are
    those at 2 and at 4 - 2 + 1 = 3, and the least is min(6, 6) = 6. `n` entries have
    floor(log2 n) + 1 levels, each from the one before: `size` entries later is the other half.
    """
    n, xp = least.shape[axis], xp_of(least, most)
    sizes = [np.int32(2**i) for i in range(n.bit_length())]
    width = hi - lo + np.int32(1)
    if isinstance(width, np.ndarray):
        level = np.frexp(width)[1] - np.int32(1)  # floor(log2), as width = m * 2^e, 1/2 <= m < 1
    else:
        level = np.int32(31) - lax.clz(width)

    def double(ends, size):
        def later(x):  # windows that would reach beyond the end wrap around, and are never read
            twice = xp.concatenate([x, x], axis)
            if xp is np:
                return twice[(*(slice(None),) * axis, slice(size, size + n))]
            return lax.dynamic_slice_in_dim(twice, size, n, axis)

        a, b = ends
        return xp.minimum(a, later(a)), xp.maximum(b, later(b))

    ends = least, most
    if xp is np:
        tables = [ends]
        for size in sizes[:-1]:
            tables.append(double(tables[-1], size))
        tables = tuple(np.stack(x) for x in zip(*tables))
    else:  # this is a scan, since XLA takes seconds to compile the unrolled loop
        _, tables = lax.scan(lambda x, size: (double(x, size), x), ends, np.array(sizes))
    # Levels are laid end to end: the window at i of a level is entry `level * n + i`.
    first = level * np.int32(n) + lo
    second = level * np.int32(n) + hi - (np.int32(1) << level) + np.int32(1)
    out = []
    for x, combine in zip(tables, (xp_of(*tables, lo, hi).minimum, xp_of(*tables, lo, hi).maximum)):
        x = xp.moveaxis(x, 0, axis)
        x = x.reshape(*x.shape[:axis], len(sizes) * n, *x.shape[axis + 2 :])
        out.append(combine(_take(x, first, axis), _take(x, second, axis)))
    return Interval(*out)


def _lookup(table: Interval, axis: int, index: Interval) -> Interval:
    """`table[index]` along one axis, for an index within bounds."""
    if index.point:
        return table.map(lambda x: _take(x, index.lo, axis))
    group = 1
    while group * _MAX_ENTRIES < table.lo.shape[axis]:
        group *= 2
    least, most = block_ends(table.lo, axis, group)
    if not table.point:
        most = block_ends(table.hi, axis, group)[1]
    # Whole groups contain the range of indices, so that their extremes bound its own.
    lo, hi = index.lo // np.int32(group), index.hi // np.int32(group)
    return _over_range(least, most, lo, hi, axis)


def _pick(table: Interval, shape, starts: dict[int, Interval], sizes, checked: bool):
    """The slice of `sizes` at `starts`, one lookup for each axis of which one entry is taken.

    Starts are clamped to `[0, n - size]`, as XLA clamps them. Clamping never decreases, so that
    clamped bounds bound the clamped index.

    **Arguments:**

    - `table`, `shape`: the array that is sliced, and its shape.
    - `starts`: the first index on each axis, 0 for an axis that is left out.
    - `sizes`: the size of the slice on each axis: 1, or the full size.
    - `checked`: whether an index that may be out of bounds makes the result unknown, as where XLA
        fills in a value or promises nothing.

    **Returns:** the interval of the slice; None for other sizes and where it would be too large.
    """
    if 0 in shape or any(z not in (1, n) for z, n in zip(sizes, shape)):
        return None
    table = _full(table, shape)
    inside, dtype = np.ones((1,) * table.lo.ndim, np.bool_), table.lo.dtype
    for axis, (size, n) in enumerate(zip(sizes, shape)):
        zero = np.zeros((1,) * GRID, np.int32)
        start = expand(starts.get(axis, Interval(zero, zero)), len(shape))
        most = start.lo.dtype.type(min(n - size, np.iinfo(start.lo.dtype).max))
        least = start.lo.dtype.type(0)
        inside = inside & (start.lo >= least) & (start.hi <= most)
        if size == n:
            continue
        index = start.map(lambda x: xp_of(x).clip(x, least, most).astype(np.int32))
        grid = jnp.broadcast_shapes(table.lo.shape[:GRID], index.lo.shape[:GRID])
        rest = (z for d, z in enumerate(table.lo.shape[GRID:]) if d != axis)
        if too_large((*grid, *rest), table):
            return None
        table = _lookup(table, GRID + axis, index)
    return guard(inside, *table, dtype) if checked and not _all(inside) else table


def _all(ok) -> bool:
    return isinstance(ok, np.ndarray) and bool(ok.all())


def _dynamic_slice(eqn, table, *starts):
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    return _pick(table, shape, dict(enumerate(starts)), sizes, checked=False)


def _gather(eqn, table, indices):
    # Only a gather with a single vector of start indices, as `table[i, j]` of scalars makes it, is
    # a slice; any other is unknown.
    p, out = eqn.params, eqn.outvars[0].aval
    dims, sizes = p["dimension_numbers"], p["slice_sizes"]
    width = len(dims.start_index_map)
    if dims.operand_batching_dims or math.prod(eqn.invars[1].aval.shape) != width:
        return None
    flat = _to_shape(_full(indices, eqn.invars[1].aval.shape), (width,))
    starts = {d: flat.map(lambda x, j=j: x[..., j]) for j, d in enumerate(dims.start_index_map)}
    clip = p["mode"] == lax.GatherScatterMode.CLIP
    v = _pick(table, eqn.invars[0].aval.shape, starts, sizes, checked=not clip)
    return None if v is None else _to_shape(_full(v, sizes), out.shape)


# Rules of primitives whose result depends on parameters of the equation:
# `(eqn, *intervals) -> interval`, or None if it is unknown.
ARRAY_RULES = {
    P.broadcast_in_dim_p: _broadcast_in_dim,
    P.reshape_p: _reshape,
    P.squeeze_p: _flatten,
    P.transpose_p: _transpose,
    P.slice_p: _slice,
    P.concatenate_p: _concatenate,
    P.iota_p: _iota,
    P.reduce_or_p: _reduce("any"),
    P.reduce_and_p: _reduce("all"),
    P.reduce_max_p: _reduce("max"),
    P.reduce_min_p: _reduce("min"),
    P.copy_p: lambda eqn, a: a,
    P.gather_p: _gather,
    P.dynamic_slice_p: _dynamic_slice,
    P.convert_element_type_p: lambda eqn, a: convert(
        eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype, a
    ),
}


def unknown(eqn) -> list[Interval | None]:
    """The results of an equation of which nothing is known."""
    return [top(v.aval) for v in eqn.outvars]
