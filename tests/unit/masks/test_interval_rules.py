"""Each interval rule, alone: sound at the edges of every dtype, and exact where nothing wraps.

A function of scalars is interpreted over every interval between two edge values at once, one per
cell of the grid, and compared with what XLA computes for every combination of values in these
intervals: overflow, infinities, NaN, subnormals, over-wide shifts and indices out of range included.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqattn.masks._intervals.classify import _interpret
from eqattn.masks._intervals.interval import carrier, GRID, Interval, kind, source


SIGNED = ["int8", "int16", "int32", "int64"]
UNSIGNED = ["uint8", "uint16", "uint32", "uint64"]
INTS = [*SIGNED, *UNSIGNED]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
# One of each kind; tests/nightly/masks has all.
SOME = ["int8", "uint32", "float32"]


@pytest.fixture(autouse=True)
def wide(x64):
    """Else there are no dtypes of 64 bits."""
    with np.errstate(all="ignore"):
        yield


def edges(dtype) -> np.ndarray:
    """Sorted values of a dtype where rules go wrong, without NaN."""
    dtype = jnp.dtype(dtype)
    if dtype == np.bool_:
        return np.array([False, True])
    if kind(dtype) == "i":
        info = np.iinfo(dtype)
        pool = {info.min, info.min + 1, info.max // 2 + 1, info.max - 1, info.max}
        pool |= {-9, -4, -1, 0, 1, 2, 3, 4, 7, info.bits - 1, info.bits}
        return np.array(sorted(x for x in pool if info.min <= x <= info.max), dtype)
    info = jnp.finfo(dtype)
    most, tiny, least = (
        float(x) for x in (info.max, info.smallest_normal, info.smallest_subnormal)
    )
    pool = [0.1, 1.0, 1.0 + float(info.eps), 3.0, 255.5, 2.0**31, most, np.inf, tiny, least]
    return np.array(sorted([0.0, *pool, *(-x for x in pool)])).astype(dtype)


class Cells:
    """Every interval between two edges of a dtype, as a grid; as points, every edge."""

    def __init__(self, dtype, axis: int, points: bool = False, values=None):
        self.dtype = jnp.dtype(dtype)
        values = edges(dtype) if values is None else values
        n, c = len(values), carrier(self.dtype)
        spans = [(i, j) for i in range(n) for j in range(i, n) if i == j or not points]
        self.values, self.held = values, [list(range(i, j + 1)) for i, j in spans]
        shape = [1] * GRID
        shape[axis] = -1
        lo, hi = (values[list(x)].astype(c).reshape(shape) for x in zip(*spans))
        if kind(self.dtype) == "f":  # what is not finite may be NaN, the last of the values
            self.values = np.append(values, np.array(np.nan, self.dtype))
            for (i, j), at in zip(spans, self.held):
                at += [n] * bool(np.isinf(float(values[i])) or np.isinf(float(values[j])))
        self.interval = source(lo, lo if points else hi, self.dtype)


def interpreted(fn, cells, traced=False):
    """The interval of `fn` at every cell."""
    closed = jax.make_jaxpr(fn)(*[jax.ShapeDtypeStruct((), c.dtype) for c in cells])
    consts = []
    for var, x in zip(closed.jaxpr.constvars, closed.consts):
        x = np.asarray(x).reshape((1,) * GRID + var.aval.shape)
        consts.append(Interval(x, x))
    if not traced:
        (out,) = _interpret(closed.jaxpr, consts, [c.interval for c in cells], False)
        return out

    def bounds(ends):
        ins = [Interval(x[0], x[0] if len(x) == 1 else x[-1]) for x in ends]
        return _interpret(closed.jaxpr, consts, ins, True)[0]

    ends = [(c.interval.lo,) if c.interval.point else tuple(c.interval) for c in cells]
    out = jax.jit(bounds)(ends)
    return None if out is None else Interval(*map(np.asarray, out))


def results(fns, values):
    """What XLA computes for every combination of values, of several functions in one program."""

    def mapped(fn):
        for i in reversed(range(len(values))):
            fn = jax.vmap(fn, [0 if i == j else None for j in range(len(values))])
        return fn

    out = jax.jit(lambda *xs: {name: mapped(fn)(*xs) for name, fn in fns.items()})(*values)
    return {name: np.asarray(x) for name, x in out.items()}


def flushed(values):
    """With zeros in the place of subnormals."""
    if kind(values.dtype) != "f":
        return values
    tiny = np.array(jnp.finfo(values.dtype).smallest_normal, values.dtype)
    return np.where(abs(values) < tiny, values * 0, values).astype(values.dtype)


def widened(values):
    return values.astype(np.float64) if kind(values.dtype) == "f" else values


def all_results(fns, cells):
    """Per function, what XLA may compute: as it does here, if it takes subnormals for zeros, and if
    it computes more exactly.
    """
    values = [c.values for c in cells]
    tables = [results(fns, values)]
    if any(kind(c.dtype) == "f" for c in cells):
        tables.append(results(fns, [flushed(x) for x in values]))
        wide = results(fns, [widened(x) for x in values])
        tables.append({n: x if kind(tables[0][n].dtype) == "f" else tables[0][n]
                       for n, x in wide.items()})  # fmt: skip
    return {name: [table[name] for table in tables] for name in fns}


def number(x):
    return x if x.dtype.kind in "biu" else x.astype(np.float64)


def hull(table, cells):
    """The least and the greatest result in every cell, and whether some result is NaN."""
    lo = hi = number(table)
    nan = np.isnan(lo) if lo.dtype.kind == "f" else np.zeros(lo.shape, bool)
    for axis, c in enumerate(cells):
        each = lambda f, x: np.stack([f.reduce(x.take(at, axis), axis) for at in c.held], axis)
        lo, hi, nan = each(np.fmin, lo), each(np.fmax, hi), each(np.logical_or, nan)
    return lo, hi, nan


def on_grid(x, rank):
    return np.broadcast_to(number(np.asarray(x)).squeeze(tuple(range(rank, GRID))), x.shape[:rank])


def check_sound(fns, *cells, traced=False, tables=None):
    """No result lies outside of its cell's interval. Returns the intervals."""
    fns = fns if isinstance(fns, dict) else {"": fns}
    tables = all_results(fns, cells) if tables is None else tables
    out = {}
    for name, fn in fns.items():
        out[name] = got = interpreted(fn, cells, traced)
        for table in tables[name] if got is not None else []:
            check_inside(name, got, table, cells)
    return out[""] if "" in fns else out


def check_inside(name, got, table, cells):
    lo, hi = (on_grid(x, len(cells)) for x in got)
    least, most, nan = hull(table, cells)
    wrong = (least < lo) | (most > hi)
    if table.dtype.kind not in "biu":
        wrong |= nan & np.isfinite(lo) & np.isfinite(hi)
    for at in map(tuple, np.argwhere(wrong)[:1]):
        inputs = [c.values[c.held[i]] for c, i in zip(cells, at)]
        lo, hi = (np.broadcast_to(x, wrong.shape)[at] for x in (lo, hi))
        raise AssertionError(
            f"{name} of {inputs} is {least[at]} to {most[at]}, NaN: {nan[at]}; the interval is "
            f"[{lo}, {hi}]"
        )


UNARY = {
    "neg": lambda x: -x,
    "abs": jnp.abs,
    "sign": jnp.sign,
    "square": jnp.square,
    "cube": lambda x: x**3,
    "itself": lambda x: x == x,
    "not itself": lambda x: x != x,
    "less than itself": lambda x: x < x,
    "at most itself": lambda x: x >= x,
    "joined": lambda x: jnp.max(jnp.concatenate([x.reshape(1), -x.reshape(1)])[::-1]),
    "second": lambda x: jnp.concatenate([jnp.full((2, 1), x), -x.reshape(1, 1)]).T[0, 2],
    "least": lambda x: jnp.min(jnp.concatenate([jnp.full((2,), x), jnp.ones((1,), x.dtype)])),
}
UNARY_INT = {
    "not": lambda x: ~x,
    "low bits": lambda x: x & jnp.array(3, x.dtype),
    "other bits": lambda x: x & jnp.array(5, x.dtype),
    "high bits": lambda x: x | jnp.array(4, x.dtype),
    "population count": lax.population_count,
}
UNARY_FLOAT = {
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "isnan": jnp.isnan,
    "isfinite": jnp.isfinite,
    "sine": jnp.sin,
}
BINARY = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "max": lax.max,
    "min": lax.min,
    "lt": lax.lt,
    "le": lax.le,
    "gt": lax.gt,
    "ge": lax.ge,
    "eq": lax.eq,
    "ne": lax.ne,
    "div": lax.div,
    "rem": lax.rem,
    "where": lambda x, y: jnp.where(x < y, x, y),
    "cond": lambda x, y: lax.cond(x < y, lambda: y, lambda: x),
    "fused": lambda x, y: x * y - x,
}
BINARY_INT = {
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "floor_divide": jnp.floor_divide,
    "remainder": jnp.remainder,
    "shift_left": lax.shift_left,
    "shift_right_logical": lax.shift_right_logical,
    "shift_right_arithmetic": lax.shift_right_arithmetic,
}


def functions(dtype, common, ints, floats=None):
    return {**common, **(ints if kind(jnp.dtype(dtype)) == "i" else floats or {})}


@pytest.mark.parametrize("dtype", SOME)
def test_functions_of_one_number_are_sound(dtype):
    fns = functions(dtype, UNARY, UNARY_INT, UNARY_FLOAT)
    tables = all_results(fns, [Cells(dtype, 0)])
    for points in (False, True):
        check_sound(fns, Cells(dtype, 0, points), tables=tables)


@pytest.mark.parametrize("dtype", SOME)
def test_functions_of_two_numbers_are_sound(dtype):
    fns = functions(dtype, BINARY, BINARY_INT)
    tables = all_results(fns, [Cells(dtype, 0), Cells(dtype, 1)])
    for points in ((False, False), (False, True), (True, False), (True, True)):
        cells = [Cells(dtype, axis, known) for axis, known in enumerate(points)]
        check_sound(fns, *cells, tables=tables)


@pytest.mark.parametrize("dtype", ["float32"])
def test_known_floats_are_rounded_too(dtype):
    """A number that is the same for all pairs of a block is known exactly. What is computed from it
    may still be rounded otherwise, or flushed to zero.
    """
    values = edges(dtype)
    values = values[flushed(values) == values]  # A subnormal has bounds.
    cells = [Cells(dtype, axis, points=True, values=values) for axis in (0, 1)]
    assert all(x.interval.point for x in cells)
    check_sound(functions(dtype, BINARY, BINARY_INT), *cells)


@pytest.mark.parametrize("dtype", ["float32"])
def test_rules_are_sound_when_traced(dtype):
    """NumPy and jax.numpy take different ways through the same rules."""
    fns = functions(dtype, BINARY, BINARY_INT)
    cells = Cells(dtype, 0), Cells(dtype, 1, points=True)
    traced = check_sound(fns, *cells, traced=True)
    for name, fn in fns.items():
        assert (traced[name] is None) == (interpreted(fn, cells) is None), name


@pytest.mark.parametrize("old", ["bool", *SOME])
def test_casts_are_sound(old):
    casts = {new: lambda x, new=new: x.astype(jnp.dtype(new)) for new in ("bool", *INTS, *FLOATS)}
    values = edges(old)
    if kind(jnp.dtype(old)) == "i":  # the first integers that are not exact in some float
        inexact = [x for x in (257, 2049, 2**24 + 1, 2**53 + 1) if x <= np.iinfo(old).max]
        values = np.unique(np.append(values, np.array(inexact, old)))
    for points in (False, True):
        check_sound(casts, Cells(old, 0, points, values))


def test_bools_are_sound():
    cells = Cells("bool", 0), Cells("bool", 1)
    ways = {f.__name__: f for f in (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor, lax.lt)}
    ways |= {
        "any": lambda x, y: jnp.any(jnp.concatenate([x.reshape(1), y.reshape(1)])),
        "all": lambda x, y: jnp.all(jnp.concatenate([x.reshape(1), y.reshape(1)])),
        "not": lambda x, y: jnp.logical_not(x),
    }
    got = check_sound(ways, *cells)
    exact = all_results(ways, cells)
    for name, (table,) in exact.items():
        least, most, _ = hull(table, cells)
        lo, hi = (np.broadcast_to(on_grid(x, 2), least.shape) for x in got[name])
        np.testing.assert_array_equal(lo, least, name)
        np.testing.assert_array_equal(hi, most, name)


@pytest.mark.parametrize("dtype", ["int8", "int32", "float32"])
def test_choices_between_three_are_sound(dtype):
    values = edges(dtype)[::4]
    x, y = Cells(dtype, 0, values=values), Cells(dtype, 1, values=values)
    z = Cells(dtype, 2, values=values[:3])

    def clamped(x, y, z):  # all of one shape: `jax.vmap` of a clamp needs it
        return lax.clamp(x + y * 0 + z * 0, y + x * 0 + z * 0, z + x * 0 + y * 0)

    if dtype != "float32":
        check_sound(clamped, x, y, z)
    else:  # without infinities, whose product with 0 is NaN
        some = np.array([-3.0, -0.5, 0.0, 1.0, 7.0], np.float32)
        check_sound(clamped, *[Cells(dtype, axis, values=some) for axis in range(3)])
    where = Cells("int32", 2, values=np.array([-(2**31), -1, 0, 1, 2, 3, 2**31 - 1], np.int32))

    def chosen(x, y, i):
        return lax.switch(i, [lambda: x, lambda: y, lambda: jnp.ones((), x.dtype)])

    check_sound(chosen, x, y, where)
    inside = Cells("int32", 2, values=np.arange(3, dtype=np.int32))
    check_sound(lambda x, y, i: lax.select_n(i, x, y, jnp.ones((), x.dtype)), x, y, inside)


def test_a_choice_out_of_range_is_unknown():
    """XLA does not say what `select_n` gives beyond its cases."""
    which = Cells("int32", 0, values=np.array([-1, 0, 2, 3], np.int32))
    got = interpreted(lambda i: lax.select_n(i, *[jnp.int32(7)] * 3), [which])
    known = [all(0 <= which.values[i] < 3 for i in at) for at in which.held]
    np.testing.assert_array_equal(got.lo.squeeze(), np.where(known, 7, np.iinfo(np.int32).min))
    np.testing.assert_array_equal(got.hi.squeeze(), np.where(known, 7, np.iinfo(np.int32).max))


TABLE = np.array([5, -2, 9, 9, 0], np.int32)
INDICES = np.array([-(2**31), -6, -5, -1, 0, 1, 4, 5, 6, 2**31 - 1], np.int64)


@pytest.mark.parametrize("index", ["int8", "uint8", "int32", "uint32", "int64"])
def test_lookups_are_sound(index):
    """Negative indices count from the end, or are clamped, or give the filling: as XLA says."""
    info = np.iinfo(index)
    values = INDICES[(info.min <= INDICES) & (info.max >= INDICES)].astype(index)
    table, rows = jnp.asarray(TABLE), jnp.asarray(np.stack([TABLE, TABLE - 3]))
    ways = {
        "brackets": lambda i: table[i],
        "clip": lambda i: table.at[i].get(mode="clip"),
        "fill": lambda i: table.at[i].get(mode="fill", fill_value=77),
        "drop": lambda i: table.at[i].get(mode="drop"),
        "wrap": lambda i: jnp.take(table, i, mode="wrap"),
        "dynamic slice": lambda i: lax.dynamic_slice(table, (i,), (1,))[0],
        "two axes": lambda i: rows[jnp.clip(i, 0, 1), i],
        "two axes, clipped": lambda i: rows.at[jnp.clip(i, 0, 1), i].get(mode="clip"),
        "two axes, filled": lambda i: rows.at[i, jnp.clip(i, 2, 4)].get(mode="fill", fill_value=77),
    }
    for points in (False, True):
        cells = Cells(index, 0, points, values)
        check_sound(ways, cells)


def test_lookups_in_long_tables_are_sound_and_those_in_short_ones_exact():
    """Beyond some thousand entries, bounds are those of groups of entries."""
    rng = np.random.default_rng(0)
    for n in (300, 5000):
        table = rng.integers(-(2**31), 2**31 - 1, n).astype(np.int32)
        values = np.array([0, 1, 2, 3, 63, 64, n // 2, n - 2, n - 1], np.int32)
        cells = Cells("int32", 0, values=values)
        cells.values = np.arange(n, dtype=np.int32)
        spans = [(values[at[0]], values[at[-1]]) for at in cells.held]
        cells.held = [list(range(a, b + 1)) for a, b in spans]
        fn = lambda i: lax.dynamic_slice(jnp.asarray(table), (i,), (1,))[0]  # noqa: B023
        got = check_sound(fn, cells)
        if n == 300:
            least, most, _ = hull(table, [cells])
            np.testing.assert_array_equal(got.lo.squeeze(), least)
            np.testing.assert_array_equal(got.hi.squeeze(), most)


WITHOUT_WRAPPING = {
    "add": (lax.add, lambda x, y: x + y),
    "sub": (lax.sub, lambda x, y: x - y),
    "mul": (lax.mul, lambda x, y: x * y),
    "max": (lax.max, np.maximum),
    "min": (lax.min, np.minimum),
    "floor_divide": (jnp.floor_divide, lambda x, y: x // y),
    "remainder": (jnp.remainder, lambda x, y: x % y),
    "div": (lax.div, lambda x, y: np.trunc(x / y).astype(int)),
    "rem": (lax.rem, np.fmod),
    "shift_left": (lax.shift_left, lambda x, y: x << np.clip(y, 0, 62)),
    "shift_right": (
        lambda x, y: (
            lax.shift_right_arithmetic if x.dtype == np.int8 else lax.shift_right_logical
        )(x, y),
        lambda x, y: x >> y,
    ),
}


@pytest.mark.parametrize("name", WITHOUT_WRAPPING)
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_integers_that_do_not_wrap_are_exact(dtype, name):
    """Against all 256 values: the bounds are attained, so no block is partial for nothing."""
    fn, of_python = WITHOUT_WRAPPING[name]
    info = np.iinfo(dtype)
    divides = name in ("floor_divide", "remainder", "div", "rem") or name.startswith("shift")
    second = np.array([1, 2, 3, 4, 7], dtype) if divides else edges(dtype)
    cells = Cells(dtype, 0), Cells(dtype, 1, points=divides, values=second)
    got = interpreted(fn, cells)
    for axis, c in enumerate(cells):
        first = lambda i: int(c.values[i])  # noqa: B023
        ends = [(first(at[0]), first(at[-1])) for at in c.held]
        c.held = [list(range(a - info.min, b - info.min + 1)) for a, b in ends]
    x = np.arange(info.min, info.max + 1)
    y = np.where(x == 0, 1, x) if divides else x
    y = np.clip(y, 0, 62) if name.startswith("shift") else y
    least, most, _ = hull(of_python(x[:, None], y[None]), cells)
    fits = (least >= info.min) & (most <= info.max)
    assert fits.sum() > 100
    lo, hi = (np.broadcast_to(on_grid(b, 2), fits.shape) for b in got)
    np.testing.assert_array_equal(lo[fits], least[fits])
    np.testing.assert_array_equal(hi[fits], most[fits])


def test_signs_and_squares_that_do_not_wrap_are_exact():
    x = np.arange(-128, 128)
    ways = [(jnp.abs, abs(x)), (jnp.square, x * x), (lax.neg, -x), (jnp.sign, np.sign(x))]
    ways += [(lambda x: x.astype(bool), x != 0), (lambda x: x.astype(jnp.int16), x)]
    for fn, values in ways:
        cells = Cells("int8", 0)
        got = interpreted(fn, [cells])
        first = lambda i: int(cells.values[i])  # noqa: B023
        ends = [(first(at[0]), first(at[-1])) for at in cells.held]
        cells.held = [list(range(a + 128, b + 129)) for a, b in ends]
        least, most, _ = hull(values, [cells])
        fits = most <= 127
        np.testing.assert_array_equal(got.lo.squeeze()[fits], least[fits])
        np.testing.assert_array_equal(got.hi.squeeze()[fits], most[fits])


def test_floats_that_are_comparable_are_compared():
    """Bounds that are finite and apart decide, whatever the dtype."""
    ways = {f.__name__: f for f in (lax.lt, lax.le, lax.gt, lax.ge, lax.eq, lax.ne)}
    for dtype in FLOATS:
        values = np.array([-3.0, 0.0, 0.5, 2.0, 8.0]).astype(dtype)
        cells = Cells(dtype, 0, values=values), Cells(dtype, 1, values=values)
        for name, table in results(ways, (values, values)).items():
            least, most, _ = hull(table, cells)
            got = interpreted(ways[name], cells)
            np.testing.assert_array_equal(on_grid(got.lo, 2), least, name)
            np.testing.assert_array_equal(on_grid(got.hi, 2), most, name)


@pytest.mark.parametrize("dtype", FLOATS)
def test_stored_subnormals_may_be_zero(dtype):
    least = np.array(jnp.finfo(dtype).smallest_subnormal, carrier(jnp.dtype(dtype)))
    least = least.reshape((1,) * GRID)
    tiny = float(jnp.finfo(dtype).smallest_normal)
    for x in (least, -least):
        for array in (x, jnp.asarray(x)):
            lo, hi = source(array, array, jnp.dtype(dtype))
            assert float(lo.squeeze()) <= 0 <= float(hi.squeeze())
            assert float(lo.squeeze()) == -tiny and float(hi.squeeze()) == tiny
    normal = np.array(tiny, carrier(jnp.dtype(dtype))).reshape((1,) * GRID)
    assert source(normal, normal, jnp.dtype(dtype)).point


def test_namesakes_of_divisions_are_what_they_compute():
    """Only a `jit` that holds what `jnp` defines is taken for a division."""

    def namesake(name, fn):
        fn.__name__ = fn.__qualname__ = name
        return jax.jit(fn)

    x, n = Cells("int32", 0), Cells("int32", 1, points=True)
    for name in ("floor_divide", "remainder"):
        for fn in (
            lambda x, n: x - n,
            lambda x, n: jnp.floor_divide(x, n) + 1,
            lambda x, n: jnp.floor_divide(n, x),
            lambda x, n: jnp.remainder(x, n) * 2 + jnp.floor_divide(x, n),
        ):
            check_sound(namesake(name, fn), x, n)
    twin = namesake("remainder", lambda x, n: jnp.floor_divide(x, n))
    check_sound(twin, x, n)


def test_a_namesake_that_differs_in_one_constant():
    """As `jnp.remainder` in every equation, but for a number in one of them."""
    division = jax.make_jaxpr(jnp.remainder)(jnp.int32(0), jnp.int32(0)).jaxpr.eqns[0]

    def remainder(x, n):
        r = lax.rem(x, n)
        one = lax.bitwise_and(
            lax.ne(r, jnp.int32(1)), lax.ne(lax.lt(r, jnp.int32(0)), lax.lt(n, jnp.int32(0)))
        )
        return lax.select(one, r + n, r)

    assert division.params["name"] == "remainder"
    x, n = Cells("int32", 0), Cells("int32", 1, points=True)
    check_sound(jax.jit(remainder), x, n)
